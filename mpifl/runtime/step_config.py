"""The objects and settings that server steps use; every rank builds them before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from mpifl.aggregation.collective_choice import CostModel
from mpifl.aggregation.exchange_choice import Local, OverMpi
from mpifl.aggregation.tables import Tables
from mpifl.aggregation.update_filter import UpdateFilters
from mpifl.comm.transport import Transport
from mpifl.core.algorithm import Algorithm, vector_parts
from mpifl.core.capabilities import RememberedUploads, upload_named
from mpifl.core.client import ClientHost, ClientStates
from mpifl.core.federation import Federation
from mpifl.core.parameters import VectorParts
from mpifl.core.progress import VisitCounter
from mpifl.core.rng import Key
from mpifl.core.timing import NO_TIMELINE, Stopwatch, Timeline
from mpifl.core.types import Message, ProblemInfo
from mpifl.simulation.reclustering import Recluster
from mpifl.traffic.payload import NumberFormat

from .hook_errors import Kept
from .protocol import ClientTask, ReportHeader, ReportTable, TaskBatch

Made = TypeVar("Made")


class PretrainingCache(Protocol):
    """Keeps the rows that `OneShotStatistics.shows` returns, which may be costly to train, for later runs."""

    def get(
        self,
        algorithm: Algorithm,
        problem: ProblemInfo,
        key: Key,
        make: Callable[[], Mapping[str, torch.Tensor]],
    ) -> Mapping[str, torch.Tensor]:
        """Return the rows that an earlier run stored, or the result of `make`."""


Origins = Mapping[str, Mapping[int, str]]  # phase -> client -> name of the run that computed the result


class SharedBeginning(Protocol):
    """Results of the first phases of a run (`core/beginning.py`) that the cases of a sweep share."""

    def __contains__(self, phase: str) -> bool:
        """Return whether a phase is shared."""

    def address(self, phase: str, *arguments: Any) -> str:
        """Return what identifies a call, by its arguments; empty if they cannot be compared."""

    def alone(self, phase: str, address: str) -> AbstractContextManager[None]:
        """Return a context in which no other case computes a result; it waits while one does."""

    def find(self, phase: str, client: int, address: str, known: Message | None = None) -> Any:
        """Return the result of a call that another case made; None if there is none.

        Args:
            phase: the phase.
            client: number of the client, or `core.computation.SERVER`.
            address: the return value of `address`.
            known: download of the visit, whose rows need not be kept.
        """

    def keep(self, phase: str, client: int, address: str, value: Any, known: Message | None = None) -> None:
        """Keep the result of a call for other cases; see `find`."""

    def taken(self) -> Origins:
        """Return the origins of all results since the last call; a result of this run has an empty one."""


def shared_result(
    beginning: SharedBeginning | None,
    phase: str,
    client: int,
    arguments: Callable[[], tuple[Any, ...]],
    make: Callable[[], Made],
) -> Made:
    """Return the result of a call, now or in another case of a sweep.

    Args:
        beginning: the results that cases share; None for none.
        phase: the phase that the call belongs to.
        client: number of the client, or `core.computation.SERVER`.
        arguments: returns what the result depends on.
        make: makes the call.
    """
    if beginning is None or phase not in beginning:
        return make()
    address = beginning.address(phase, *arguments())
    found: Made | None = beginning.find(phase, client, address)
    if found is not None:
        return found
    with beginning.alone(phase, address):
        found = beginning.find(phase, client, address)  # meanwhile
        if found is None:
            found = make()
            beginning.keep(phase, client, address, found)
    return found


class VisitsInOneCall(Protocol):
    """Makes visits that only train in one call; it returns None if they do more, or one of them fails."""

    def run(
        self, batch: TaskBatch, rows: Callable[[int, int], list[torch.Tensor]]
    ) -> tuple[list[ReportTable], dict[str, list[torch.Tensor]]] | None:
        """Return the reports and uploads of a step.

        Args:
            batch: this rank's tasks.
            rows: function (width, count) -> vectors that receive the uploads.
        """

    def run_visit(
        self, task: ClientTask, message: Message
    ) -> tuple[ReportHeader, dict[str, torch.Tensor]] | None:
        """Return the report and uploads [1, d] of a single visit."""


@dataclass(frozen=True)
class Sums:
    """How uploads are added.

    Attributes:
        exact: whether sums are int64 and equal for any number of ranks; otherwise they are float32.
        collective: the collective of every mixing; None chooses one for each mixing.
        costs: measured or given costs for choosing the collective; None chooses by bytes.
        direct: whether MPI reads GPU memory directly.
    """

    exact: bool = True
    collective: str | None = None
    costs: CostModel | None = None
    direct: bool = False


@dataclass(frozen=True)
class StepEvaluation:
    """What is computed beside the clients' scores on their test data.

    Attributes:
        training_data: whether clients are also evaluated on their training data.
        finetune_epochs: epochs of training before a client is evaluated a second time; 0 for none.
        updates: whether workers keep what uploads are based on, so that the updates can be measured.
    """

    training_data: bool = False
    finetune_epochs: int = 0
    updates: bool = False


@dataclass(frozen=True)
class StepConfig:
    """The objects and settings of server steps, the same on every rank.

    Attributes:
        transport: connects the ranks.
        algorithm: the method.
        federation: the clients' data.
        clients: makes the clients of this rank.
        problem: information that the method may use.
        store: state that clients keep between visits.
        seed: key of the training seed.
        sums: how uploads are added.
        exchange: how the second look travels between ranks.
        shuffle: key for placing tasks at random; None balances them.
        absent: clients that are not there before training.
        recluster: when clients send their one-shot statistics again.
        evaluation: what is computed beside the clients' scores.
        payload: form of numbers in transit.
        stack: number of clients that are trained together.
        hosts_groups: whether each worker hosts a fixed group of clients.
        drops: whether a client that fails twice is left out; otherwise a failure ends the run.
        pretraining_cache: cache, for later runs, of the rows that clients download for one-shot statistics;
            None for no cache.
        beginning: results of the first phases that cases of a sweep share; None to compute all of them.
        synchronous: False if uploads reach rank 0 one by one; then all tables stay on rank 0.
        effort: factor of each client's training time per sample [N], to balance the ranks; None for equal
            factors.
        counter: counts the visits of this rank, for progress displays.
        give_back: returns memory that this rank has freed to the system, if that is due.
        filters: change updates on their way from training into the rows.
        in_one_call: makes what makes visits that only train in one call; None for none.
        kept: makes contexts that put back the settings of PyTorch that code of the method changes.
        timeline: is told what this rank does and when.
        check_code: raises an error, which names the given place, if code has changed functions or modes of
            PyTorch.
    """

    transport: Transport
    algorithm: Algorithm
    federation: Federation
    clients: ClientHost
    problem: ProblemInfo
    store: ClientStates
    seed: Key
    sums: Sums = field(default_factory=Sums)
    exchange: OverMpi | Local = field(default_factory=OverMpi)
    shuffle: Key | None = None
    absent: Sequence[int] = ()
    recluster: Recluster = field(default_factory=Recluster)
    evaluation: StepEvaluation = field(default_factory=StepEvaluation)
    payload: NumberFormat = field(default_factory=NumberFormat)
    stack: int = 1
    hosts_groups: bool = False
    drops: bool = False
    pretraining_cache: PretrainingCache | None = None
    beginning: SharedBeginning | None = None
    synchronous: bool = True
    effort: np.ndarray | None = None
    counter: VisitCounter = field(default_factory=VisitCounter)
    give_back: Callable[[], object] = lambda: None
    filters: UpdateFilters = field(default_factory=UpdateFilters)
    in_one_call: Callable[[StepConfig, Tables, Stopwatch], VisitsInOneCall | None] | None = None
    kept: Kept = nullcontext
    timeline: Timeline = NO_TIMELINE
    check_code: Callable[[str], None] = lambda place: None

    @cached_property
    def parts(self) -> VectorParts:
        """What the vectors of the method hold."""
        return vector_parts(self.algorithm, self.problem.layout)

    @property
    def remembered(self) -> str | None:
        """The upload that workers remember for their clients.

        None if the method remembers none, or under asynchronous policies, where rank 0 does.
        """
        return upload_named(self.algorithm, RememberedUploads, "remembered") if self.synchronous else None
