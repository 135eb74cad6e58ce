"""The chain of filters of a run: what changes updates between training and the rows, and in which order."""

from __future__ import annotations

from mpifl.aggregation.update_filter import UpdateFilter, UpdateFilters
from mpifl.core.algorithm import vector_parts
from mpifl.protection.attacks import AttackedUploads, UploadAttack

from .context import RunContext


def build_filters(context: RunContext) -> UpdateFilters:
    """Return the filters of a run, in the order in which a client's report passes them."""
    config, chain = context.config, list[UpdateFilter]()
    parts = vector_parts(config.algorithm, context.problem.layout)
    attackers = context.federation.attackers
    if isinstance(config.attack, UploadAttack) and attackers is not None:
        chain.append(AttackedUploads(config.attack, frozenset(attackers.tolist()), parts))
    return UpdateFilters(chain)
