"""Which methods can run without rounds, and under which policies."""

from __future__ import annotations

from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import require

from .policy import Policy


def check(algorithm: Algorithm, policy: Policy) -> None:
    """Raise `UserError` for a method that cannot run without rounds."""
    needs, name = algorithm.needs, type(algorithm).__name__
    remedy = f"{name} takes one upload at a time; take policy every_arrival or client_decides"
    require(not needs.one_by_one or policy.singly, "policy.name", "buffer or barrier", remedy)
    remedy = f"{name} looks at all clients of a round at once; it runs under policy rounds only"
    require(not (needs.probe or needs.memory or needs.rounds), "policy.name", "asynchronous", remedy)
    remedy = f"{name} compares the uploads of a step; take policy rounds, barrier or buffer"
    fresh = policy.fresh or not needs.together
    require(fresh, "policy.name", "stale uploads", f"{name} needs fresh uploads; take rounds or barrier")
    several = needs.several or needs.gram is not None
    require(not (several and policy.singly), "policy.name", "one upload at a time", remedy)
