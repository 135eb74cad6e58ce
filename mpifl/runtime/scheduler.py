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


def task_costs(costs: np.ndarray, fresh: np.ndarray, looks: bool) -> np.ndarray:
    """Return the predicted work of the tasks of a step [m], in samples.

    Args:
        costs: work of each client's training [m].
        fresh: whether it trains, bool [m].
        looks: whether the clients look at each other.
    """
    return np.where(fresh, costs, 1) + (len(costs) * LOOK_COST if looks else 0)


def balance(costs: np.ndarray, workers: Sequence[int], speeds: Sequence[float] | None = None) -> np.ndarray:
    """Return the worker [m] of each task: longest processing time first, ties go to the lowest rank.

    Args:
        costs: predicted work of each task [m].
        workers: ranks of the workers.
        speeds: work per second of each worker, up to a common factor; None for equal speeds.
    """
    speeds = speeds or [1.0] * len(workers)
    heap = [(0.0, i) for i in range(len(workers))]
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

    Attributes:
        speed: rank -> relative work per second.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        workers: Sequence[int],
        sizes: np.ndarray,
        pinned: bool = False,
        shuffle: Key | None = None,
        stack: int = 1,
    ) -> None:
        self.stack = stack
        self.pinned, self.shuffle, self.calls = pinned, shuffle, 0
        self._set_workers(nodes, workers)
        self._sizes, self._homes = sizes, {node: len(ranks) for node, ranks in self.groups.items()}

    @cached_property
    def home(self) -> np.ndarray:
        """Home node of each client [N]; matters if `pinned`, and stays the same when ranks are lost."""
        nodes = list(self._homes)
        if len(nodes) == 1:
            return np.broadcast_to(np.int64(nodes[0]), len(self._sizes))
        return balance(self._sizes, nodes, [float(count) for count in self._homes.values()])

    def _set_workers(self, nodes: Sequence[int], workers: Sequence[int]) -> None:
        self.workers, self.speed = list(workers), dict.fromkeys(workers, 1.0)
        self._measured: dict[int, float] = {}
        self.groups: dict[int, list[int]] = {}
        for r in workers:
            self.groups.setdefault(nodes[r], []).append(r)

    def regroup(self, nodes: Sequence[int], workers: Sequence[int]) -> None:
        """Continue with the remaining workers; home nodes stay, because they hold the clients' states.

        Args:
            nodes: node of each remaining rank.
            workers: ranks that host clients.

        Raises:
            CannotRecover: no worker remains on a node that holds states of clients.
        """
        self._set_workers(nodes, workers)
        if self.pinned and not set(np.unique(self.home).tolist()) <= set(self.groups):
            raise CannotRecover("all workers of a node, which holds states of clients, were lost")

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
        return self.groups[int(self.home[client])] if self.pinned else self.workers

    def reach(self, clients: Sequence[int]) -> list[int]:
        """Return, for each client, a rank that can read its state; clients are spread evenly over ranks."""
        ranks = [self.candidates(k) for k in clients]
        return [some[i % len(some)] for i, some in enumerate(ranks)]

    def row_owners(self) -> np.ndarray:
        """Return the rank [N] that owns the row of each client: round-robin within its home node."""
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
