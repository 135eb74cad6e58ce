"""The work of visits before they are made, for virtual time that is charged for all of it (`costs: all`).

A method declares what a visit asks a client for (`Algorithm.visit_passes`). Its FLOPs, in units of those of
one local training, are known for every client and visit, so the order of arrivals is known before any
training. What second looks ask for (`SecondLook.look_passes`) is known as soon as it is decided who looks at
whom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import NewClients, OneShotStatistics, SecondLook, hooks_of, uses
from mpifl.core.computation import Asked, Held
from mpifl.core.errors import name_of, require
from mpifl.core.federation import SPLITS, Federation
from mpifl.core.types import ProblemInfo
from mpifl.simulation.durations import Loads, LookLoads
from mpifl.simulation.policies import ClientDecides
from mpifl.simulation.upload_triggers import Drift
from mpifl.supervision.logging import warn_once
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.passes import Form, form_of

from .schema import Config

KEY = "costs"
NOT_DECLARED = "does not declare what {} (define {}); use costs: training"
AT_MOST = "costs: all: some visits of {} compute less than they are charged for, which only the run shows"
Declared = Callable[[Held, ProblemInfo], "Sequence[Asked] | None"]


@dataclass
class WorkOf:
    """(client, visit) -> the work of what a method asks for, in units of one local training.

    Pickled without data and networks, for ranks that have no clock.

    Attributes:
        declared: what the method asks a client for.
        federation: the clients' data.
        problem: the problem of the method.
        learner: knows the FLOPs of its networks.
        local: how clients train.
        differing: client -> its own `local`, for clients that train in another way.
        untrained: the work of a client that trains on nothing.
    """

    declared: Declared
    federation: Federation
    problem: ProblemInfo
    learner: Learner
    local: LocalConfig
    differing: Mapping[int, LocalConfig]
    untrained: float = 1.0
    _known: dict[Any, float] = field(default_factory=dict)

    def __call__(self, client: int, visit: int) -> float:
        """Return the work of a visit."""
        held = self.held(client, visit)
        local = self.differing.get(client, self.local)
        at = held, local
        if at not in self._known:
            form = self.form
            usual = self.learner.work([Asked("sgd", held.train)], form, local).flops
            asked = self.learner.work(self.declared(held, self.problem) or (), form, local).flops
            self._known[at] = asked / usual if usual else self.untrained
        return self._known[at]

    def held(self, client: int, visit: int = 0) -> Held:
        """Return the samples of a client at a visit."""
        who, when = np.array([client]), np.array([visit])
        return Held(*(int(self.federation.sizes_of(split, who, when)[0]) for split in SPLITS))

    @cached_property
    def form(self) -> Form:
        """The form of the clients' samples."""
        return form_of(self.federation.shape, self.federation.client(0).train.x.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unasked, ()


class _Unasked:
    """Stands for a load on ranks that have no clock."""

    def __call__(self, client: int, visit: int) -> float:
        raise AssertionError("rank 0 alone asks what it was told")


def declared_statistics(algorithm: Algorithm) -> Declared:
    """Return what the one-shot statistics of a method ask for; nothing where it has none."""
    if uses(algorithm, OneShotStatistics):
        return hooks_of(algorithm, OneShotStatistics).statistics_passes
    return lambda held, problem: ()


def visit_loads(
    config: Config,
    federation: Federation,
    problem: ProblemInfo,
    learner: Learner,
    differing: Mapping[int, LocalConfig],
) -> Loads:
    """Return what clients compute, in units of one local training.

    Raises:
        UserError: the method does not declare it, or it is known only from the run.
    """
    algorithm, name = config.algorithm, name_of(config.algorithm)
    told = federation, problem, learner, config.local, differing
    visit = WorkOf(algorithm.visit_passes, *told)
    statistics = WorkOf(declared_statistics(algorithm), *told)
    held = visit.held(0)
    asked = visit.declared(held, problem)
    remedy = f"{name} {NOT_DECLARED.format('a visit computes', 'visit_passes')}"
    require(asked is not None, KEY, config.costs, remedy)
    remedy = f"{name} {NOT_DECLARED.format('its statistics compute', 'statistics_passes')}"
    require(statistics.declared(held, problem) is not None, KEY, config.costs, remedy)
    drifts = isinstance(config.policy, ClientDecides) and isinstance(config.policy.uploads, Drift)
    remedy = "a delay is the time of a cycle of data under uploads drift, not of what a visit computes"
    require(not drifts, KEY, config.costs, f"{remedy}; use costs: training")
    if uses(algorithm, NewClients):
        some = type(algorithm).initial_clients is not NewClients.initial_clients  # type: ignore[attr-defined]
        newcomers = bool(config.newcomers.share or config.newcomers.groups)
        remedy = "who sends statistics when is known only from the run; use costs: training"
        require(not (some or newcomers), KEY, config.costs, remedy)
    if any(one.at_most for one in asked or ()):
        warn_once(AT_MOST.format(name))
    if not uses(algorithm, SecondLook) or hooks_of(algorithm, SecondLook).at_server:
        return Loads(visit, statistics)
    looking = hooks_of(algorithm, SecondLook)
    remedy = f"{name} {NOT_DECLARED.format('a second look computes', 'look_passes')}"
    require(looking.look_passes(held) is not None, KEY, config.costs, remedy)

    def look(which: int) -> WorkOf:
        return WorkOf(lambda held, problem: (looking.look_passes(held) or ((), ()))[which], *told, 0.0)

    return Loads(visit, statistics, LookLoads(look(0), look(1)))
