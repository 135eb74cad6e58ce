"""Placement of clients on ranks. It does not change results, so it may depend on measured speed."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from mpifl.comm.transport import CannotRecover
from mpifl.core.errors import require
from mpifl.core.rng import Key

SPEED_DECAY = 0.3  # weight of the last step in a worker's moving average of speed


LOOK_COST = 64  # work of a look at one other client, in samples of training


def visit_work(sizes: np.ndarray, effort: np.ndarray | None) -> np.ndarray:
    """Return the predicted work of each client's visit [N], in samples.

    Args:
        sizes: number of training samples of each client [N].
        effort: see `StepConfig`.
    """
    return sizes if effort is None else sizes * effort


def task_costs(costs: np.ndarray, fresh: np.ndarray, looks: bool) -> np.ndarray:
    """Return the predicted work of the tasks of a step [m], in samples.

    Args:
        costs: work of each client's training [m].
        fresh: whether it trains, bool [m].
        looks: whether the clients look at each other.
    """
    return np.where(fresh, costs, 1) + (len(costs) * LOOK_COST if looks else 0)


def balance(
    costs: np.ndarray,
    workers: Sequence[int],
    speeds: Sequence[float] | None = None,
    loads: Sequence[float] | None = None,
) -> np.ndarray:
    """Return the worker [m] of each task: longest processing time first, ties go to the lowest rank.

    Args:
        costs: predicted work of each task [m].
        workers: ranks of the workers.
        speeds: work per second of each worker, up to a common factor; None for equal speeds.
        loads: work that each worker has already; None for none.
    """
    speeds = speeds or [1.0] * len(workers)
    heap = [(load, i) for i, load in enumerate(loads or [0.0] * len(workers))]
    heapq.heapify(heap)
    out = np.empty(len(costs), np.int64)
    for task in np.lexsort((np.arange(len(costs)), -np.asarray(costs))):
        load, i = heapq.heappop(heap)
        out[task] = workers[i]
        heapq.heappush(heap, (load + float(costs[task]) / speeds[i], i))
    return out


class Scheduler:
    """Places tasks on workers.

    Args:
        nodes: node of each rank.
        workers: ranks that host clients.
        sizes: number of samples of each client [N]; decides the home nodes.
        pinned: whether a client must stay on the node that holds its state.
        shuffle: key for random placement, to show that results do not depend on placement; None balances.
        stack: block size for placing tasks; the clients of a block are trained together.
        hosted: predicted work of each client's visit [N], by which each worker hosts a group of clients for
            the whole run; None: any worker may train any client.
        numbers: for each rank, its number when the run began; None: it is the rank.

    Attributes:
        speed: rank -> relative work per second.
        hosts: rank that hosts each client [N]; None without groups.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        workers: Sequence[int],
        sizes: np.ndarray,
        pinned: bool = False,
        shuffle: Key | None = None,
        stack: int = 1,
        hosted: np.ndarray | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.stack, self._hosted = stack, hosted
        self.pinned, self.shuffle, self.calls = pinned, shuffle, 0
        self._set_workers(nodes, workers)
        self._sizes, self._homes = sizes, {node: len(ranks) for node, ranks in self.groups.items()}
        self.hosts = None if hosted is None else balance(hosted, self.workers)
        self._numbers = tuple(range(len(nodes)) if numbers is None else numbers)

    @property
    def home(self) -> np.ndarray:
        """Home node of each client [N]; matters if `pinned`, and stays the same when ranks are lost."""
        return self._spread if self.hosts is None else self._nodes[self.hosts]

    @cached_property
    def _spread(self) -> np.ndarray:
        nodes = list(self._homes)
        if len(nodes) == 1:
            return np.broadcast_to(np.int64(nodes[0]), len(self._sizes))
        return balance(self._sizes, nodes, [float(count) for count in self._homes.values()])

    def _set_workers(self, nodes: Sequence[int], workers: Sequence[int]) -> None:
        self.workers, self.speed = list(workers), dict.fromkeys(workers, 1.0)
        self._nodes = np.array(nodes, np.int64)
        self._measured: dict[int, float] = {}
        self.groups: dict[int, list[int]] = {}
        for r in workers:
            self.groups.setdefault(nodes[r], []).append(r)

    def regroup(self, nodes: Sequence[int], workers: Sequence[int], numbers: Sequence[int]) -> None:
        """Continue with the remaining workers; home nodes stay, because they hold the clients' states.

        Args:
            nodes: node of each remaining rank.
            workers: ranks that host clients.
            numbers: for each remaining rank, its number when the run began.

        Raises:
            CannotRecover: no worker remains on a node that holds states of clients.
        """
        home = self.home
        self._set_workers(nodes, workers)
        if self.pinned and not set(np.unique(home).tolist()) <= set(self.groups):
            raise CannotRecover("all workers of a node, which holds states of clients, were lost")
        if self.hosts is not None and self._hosted is not None:
            rank_of = {number: rank for rank, number in enumerate(numbers) if rank in self.speed}
            kept = np.array([rank_of.get(number, -1) for number in self._numbers])[self.hosts]
            self.hosts = self._handed_on(kept, home, self._hosted)
        self._numbers = tuple(numbers)

    def _handed_on(self, hosts: np.ndarray, home: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return the host of each client [N] after clients without one (-1) were given to the workers.

        Each worker keeps its group. Clients that are pinned stay on their node.
        """
        out = hosts.copy()
        for node, ranks in self.groups.items() if self.pinned else ((-1, self.workers),):
            orphans = np.flatnonzero((hosts < 0) & (home == node if self.pinned else True))
            loads = [float(work[hosts == rank].sum()) for rank in ranks]
            out[orphans] = balance(work[orphans], ranks, loads=loads)
        return out

    def assign(self, clients: np.ndarray, costs: np.ndarray) -> np.ndarray:
        """Return the rank [m] of each task.

        Args:
            clients: client of each task [m].
            costs: predicted work of each task [m].

        Raises:
            UserError: clients are stacked but must stay on their nodes, of which there are several.
        """
        self.calls += 1
        if self.stack == 1:
            return self._place(clients, costs)
        remedy = "this method keeps clients on their nodes, of which there are several; use 1"
        require(not self.pinned or len(self.groups) == 1, "system.stack", self.stack, remedy)
        first = np.arange(0, len(clients), self.stack)
        owner = self._place(clients[first], np.add.reduceat(costs, first))
        return np.repeat(owner, np.diff(np.append(first, len(clients))))

    def _place(self, clients: np.ndarray, costs: np.ndarray) -> np.ndarray:
        if self.hosts is not None:
            hosts: np.ndarray = self.hosts[clients]
            return hosts
        if not self.pinned:
            return self._on_ranks(self.workers, costs, -1)
        out = np.empty(len(clients), np.int64)
        homes = self.home[clients]
        for node, ranks in self.groups.items():
            at_home = homes == node
            out[at_home] = self._on_ranks(ranks, costs[at_home], node)
        return out

    def _on_ranks(self, ranks: list[int], costs: np.ndarray, node: int) -> np.ndarray:
        if self.shuffle is not None:
            return self.shuffle.of(self.calls, node).numpy().choice(ranks, len(costs))
        return balance(costs, ranks, [self.speed[r] for r in ranks])

    def candidates(self, client: int) -> list[int]:
        """Return the ranks that may run a client's visit."""
        if self.hosts is not None:
            return [int(self.hosts[client])]
        return self.groups[int(self.home[client])] if self.pinned else self.workers

    def reach(self, clients: Sequence[int]) -> list[int]:
        """Return, for each client, a rank that can read its state; clients are spread evenly over ranks."""
        ranks = [self.candidates(k) for k in clients]
        return [some[i % len(some)] for i, some in enumerate(ranks)]

    def row_owners(self) -> np.ndarray:
        """Return the rank [N] that owns the row of each client: its host, or one of its home node in turn."""
        if self.hosts is not None:
            return self.hosts.copy()
        out = np.empty(len(self.home), np.int64)
        for node, ranks in self.groups.items():
            at_home = np.flatnonzero(self.home == node)
            out[at_home] = np.resize(ranks, len(at_home))
        return out

    def record_speeds(self, work: Sequence[float], seconds: Sequence[float]) -> None:
        """Update the mean speeds of the workers.

        Args:
            work: work done by each rank, in the unit of costs [P].
            seconds: seconds that each rank took [P].
        """
        for rank, (done, taken) in enumerate(zip(work, seconds, strict=True)):
            if done > 0 and taken > 0 and rank in self.speed:
                before = self._measured.get(rank, done / taken)
                self._measured[rank] = before + SPEED_DECAY * (done / taken - before)
        if self._measured:
            middle = statistics.median(self._measured.values())
            self.speed |= {rank: speed / middle for rank, speed in self._measured.items()}
