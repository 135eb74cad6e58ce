"""A run on one rank, after it has been built and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mpifl.comm.transport import Transport
from mpifl.core.algorithm import vector_parts
from mpifl.core.federation import Federation
from mpifl.core.rng import Key, key
from mpifl.core.types import ProblemInfo
from mpifl.protection.accountant import Accountant, Spending
from mpifl.protection.privacy import CentralPrivacy
from mpifl.results.identity import CONVOLUTIONS, OWN, PLUGINS, WINOGRAD, identity, with_replaced
from mpifl.simulation.clock import Clock
from mpifl.simulation.durations import VisitDuration
from mpifl.simulation.policies import Policy
from mpifl.simulation.sampling import Sampler
from mpifl.traffic.payload import NumberFormat
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.precision import FLOAT32

from .placement import CPU, Place, workers_of
from .schema import Config


@dataclass(frozen=True)
class Parts:
    """The parts of a run that each rank opens and builds for itself.

    Attributes:
        federation: the clients' data.
        problem: what the method may know.
        learner: the model on this rank's device.
        duration: how long visits take on devices and links.
        differing: client -> its own `local`, for clients that do not train as `local` says.
        ranks: rank of each client's adapters [N]; empty if all have that of `model.lora.rank`.
    """

    federation: Federation
    problem: ProblemInfo
    learner: Learner
    duration: VisitDuration
    differing: Mapping[int, LocalConfig]
    ranks: tuple[int, ...] = ()


def with_newcomers(
    parts: Parts, policy: Policy, joins: Mapping[int, float], leaves: Mapping[int, float]
) -> Parts:
    """Return parts in whose virtual time newcomers are absent until they join, and leavers once they leave.

    Under rounds and `barrier`, where cohorts are drawn of the clients that are there, they are unchanged.

    Args:
        parts: the parts.
        policy: the section `policy`.
        joins: `Decisions.joins`.
        leaves: `Decisions.leaves`.
    """
    if policy.joins_by_step and policy.in_seconds:
        return parts
    if policy.joins_by_step:  # its clock counts steps: who is drawn for step t is there when t - 1 are done
        joins, leaves = ({k: when - 1 for k, when in whose.items()} for whose in (joins, leaves))
    presence = parts.duration.presence.within(joins, leaves)
    return replace(parts, duration=replace(parts.duration, presence=presence))


@dataclass(frozen=True)
class Decisions:
    """Decisions of rank 0 when it checks a run; the same on every rank.

    Attributes:
        num_sampled: m, the number of clients in a round, or of visits under way at the same time.
        joins: client -> its first server step, for clients that are absent at first; under policies with
            `joins_by_step` false, the time in seconds of virtual time at which it joins.
        leaves: client -> the first server step in which it takes no part any more, or the time at which it
            leaves.
        mpi_memory: memory from which MPI reads sums that were computed on a GPU, `main` or `device`.
        stack: number of clients that are trained together.
        clock: the clock that orders the arrivals; None if the policy is synchronous.
        base: short hash of the frozen weights of the model; empty if nothing is frozen.
        spent: privacy that earlier runs over the same clients spent on the first model.
    """

    num_sampled: int
    joins: Mapping[int, float]
    leaves: Mapping[int, float]
    mpi_memory: str
    stack: int
    clock: Clock | None
    base: str = ""
    spent: tuple[Spending, ...] = ()

    @property
    def absent(self) -> tuple[int, ...]:
        """The clients that are absent at first, ascending."""
        return tuple(sorted(self.joins))


@dataclass(frozen=True, kw_only=True)
class RunContext(Parts):
    """All objects of a run on this rank: the parts that it built, and the following; never changed.

    Attributes:
        config: the configuration.
        transport: connects this rank with the others.
        decisions: the decisions of rank 0.
        places: host, cores, device and threads of all ranks, on rank 0; empty elsewhere.
    """

    config: Config
    transport: Transport
    decisions: Decisions
    places: Sequence[Place] = ()

    @property
    def system_key(self) -> Key:
        """The random key of cohorts, delays and absences."""
        return key(self.config.seed.system)

    @property
    def payload(self) -> NumberFormat:
        """The form of messages, with the sizes of rows."""
        return self.config.payload.sent(vector_parts(self.config.algorithm, self.problem.layout))

    @property
    def sampler(self) -> Sampler:
        """Draws the cohorts."""
        n = self.problem.num_clients
        m = self.config.policy.num_started(self.decisions.num_sampled, n)
        privacy = self.config.privacy
        poisson = isinstance(privacy, CentralPrivacy) and privacy.sampling == "poisson"
        by_step, decisions = self.config.policy.joins_by_step, self.decisions
        joins, leaves = (
            {k: int(step) for k, step in whose.items()} if by_step else {}
            for whose in (decisions.joins, decisions.leaves)
        )
        return Sampler(n, m, self.system_key, joins, poisson, leaves)

    @cached_property  # the accountant caches the privacy loss of one round
    def accountant(self) -> Accountant:
        """Computes the privacy that the noise of `privacy` gives."""
        n, decisions = self.problem.num_clients, self.decisions
        return Accountant(self.config.privacy, n, decisions.num_sampled, decisions.spent)

    def local_of(self, client: int) -> LocalConfig:
        """Return how a client trains."""
        return self.differing.get(client, self.config.local)

    @property
    def evaluated_clients(self) -> np.ndarray:
        """The clients that are evaluated, int64 ascending: all, or some evenly spaced."""
        num_clients = self.problem.num_clients
        count = min(self.config.evaluation.clients or num_clients, num_clients)
        return np.unique(np.linspace(0, num_clients - 1, count).astype(np.int64))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the last bits of the run's numbers, on rank 0; empty elsewhere."""
        if not self.places:
            return {}
        system, on_cpu = self.config.system, self.learner.device.type == CPU
        options: dict[str, Any] = {"sums": system.sums}
        if on_cpu:
            options["compiled"] = system.kernels and self.learner.task.for_kernels
            options |= {CONVOLUTIONS: WINOGRAD} if self.learner.context.computes_convolutions else {}
        else:
            options |= {"graphs": self.learner.replays, "deterministic": system.deterministic}
        if system.sums != "exact":
            options |= {"ranks": self.transport.size, "collective": system.collective}
        options |= {"stack": self.decisions.stack, "threads": torch.get_num_threads()}
        local = self.config.local
        options |= {} if local.precision == FLOAT32 else {"precision": local.precision}
        options |= {"frozen": self.decisions.base} if self.decisions.base else {}
        options |= {name: code for name in (OWN, PLUGINS) if (code := self.places[0][name])}
        machines = [with_replaced(place["machine"]) for place in workers_of(self.places)]
        # it trains no client
        server = {**with_replaced(self.places[0]["machine"]), "device": machines[0]["device"]}
        return identity(options, [server, *machines])
