"""Tasks for workers, one at a time and in no fixed order: what events are made of.

The server submits tasks with an urgency; each worker holds one that runs and one that waits, so that nobody
waits for a message. Headers are small objects; vectors travel as one flat float32 block a task.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from .liveness import patiently
from .transport import RankLost, Transport

AHEAD = 2  # tasks at a worker: one runs, one waits
MOST_AHEAD, SHARE = 5, 4  # where many are under way: a quarter of a worker's share of them, but no more


@dataclass(frozen=True)
class Task:
    """Work for one worker.

    Attributes:
        number: names the task; results are asked for by it.
        urgency: smaller is sooner.
        header: a small object.
        vectors: name -> rows [r, w] that travel with it.
        ranks: workers that may take it.
    """

    number: int
    urgency: float
    header: Any
    vectors: Mapping[str, torch.Tensor]
    ranks: tuple[int, ...]


Answer = tuple[Any, dict[str, torch.Tensor]]  # (small object, name -> rows [r, w])
Handler = Callable[[Any, Mapping[str, torch.Tensor]], Answer]


def packed(vectors: Mapping[str, torch.Tensor]) -> tuple[list[tuple[str, tuple[int, ...]]], torch.Tensor]:
    """Return the shapes of named tensors and one flat block that holds them."""
    shapes = [(name, tuple(v.shape)) for name, v in vectors.items()]
    flat = [v.reshape(-1).cpu() for v in vectors.values()]
    return shapes, flat[0].contiguous() if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0)


def unpacked(shapes: Sequence[tuple[str, tuple[int, ...]]], block: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the named tensors, as views of the block."""
    if len(shapes) == 1:
        return {shapes[0][0]: block.view(shapes[0][1])}
    sizes = [int(torch.Size(shape).numel()) for _, shape in shapes]
    pieces = block.split(sizes) if sizes else []
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes, pieces, strict=True)}


class Pool(ABC):
    """The server's view of the workers."""

    answers: dict[int, Answer]  # here, and not yet handed on

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Hand in a task."""

    @abstractmethod
    def result(self, number: int) -> Answer:
        """Wait, politely, for a task's answer and return it."""

    @abstractmethod
    def finished(self) -> list[int]:
        """Return the numbers of tasks whose answers are here, in the order in which they came."""

    @abstractmethod
    def look(self) -> None:
        """See whether more answers have come."""

    @abstractmethod
    def order_all(self, word: str, what: Any = None) -> None:
        """Say a word to every worker: they finish what they hold, then leave `serve` with it."""

    @abstractmethod
    def close(self, word: str, what: Any = None) -> None:
        """Say the last word; drop what nobody has begun, and take in what the workers still send."""


class _Alone(Pool):
    """One process: a task runs when its answer is asked for, or when somebody looks what is finished."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.waiting: dict[int, Task] = {}
        self.answers = {}

    def submit(self, task: Task) -> None:
        self.waiting[task.number] = task

    def result(self, number: int) -> Answer:
        if number in self.answers:
            return self.answers.pop(number)
        task = self.waiting.pop(number)
        return self.handler(task.header, task.vectors)

    def finished(self) -> list[int]:
        return list(self.answers)

    def look(self) -> None:
        if self.waiting:
            number = min(self.waiting.values(), key=lambda t: (t.urgency, t.number)).number
            self.answers[number] = self.result(number)

    def order_all(self, word: str, what: Any = None) -> None:
        return

    def close(self, word: str, what: Any = None) -> None:
        return


class _Remote(Pool):
    """Workers behind a transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.queues: dict[int, list[tuple[float, int, Task]]] = {r: [] for r in transport.workers}
        self.shared: list[tuple[float, int, Task]] = []  # any worker may take these
        self.held = dict.fromkeys(transport.workers, 0)
        self.under_way = 0  # submitted and not answered
        self.answers = {}

    def submit(self, task: Task) -> None:
        entry = (task.urgency, task.number, task)
        self.under_way += 1
        if len(task.ranks) == len(self.held):
            heapq.heappush(self.shared, entry)
        else:
            rank = min(task.ranks, key=lambda r: (len(self.queues[r]) + self.held[r], r))
            heapq.heappush(self.queues[rank], entry)
        self._send()

    def _send(self) -> None:
        """Top up every worker, the emptiest first, with the most urgent task it may take."""
        if not self.shared and not any(self.queues.values()):
            return
        for level in range(self._depth()):
            for rank, held in self.held.items():
                if held == level and (heap := self._heap(rank)):
                    _, number, task = heapq.heappop(heap)
                    shapes, block = packed(task.vectors)
                    self.transport.isend(rank, ("task", number, task.header, shapes), block, "visit")
                    self.held[rank] += 1

    def _depth(self) -> int:
        """Return how many tasks a worker may hold: a server that is late then leaves nobody idle."""
        return max(AHEAD, min(MOST_AHEAD, self.under_way // (SHARE * len(self.held))))

    def _heap(self, rank: int) -> list[tuple[float, int, Task]]:
        """Return where the most urgent task is that a worker may take."""
        own, shared = self.queues[rank], self.shared
        return own if own and (not shared or own[0][:2] < shared[0][:2]) else shared

    def look(self) -> None:
        while (message := self.transport.poll("report")) is not None:
            rank, (number, header, shapes), block = message
            self.answers[number] = (header, unpacked(shapes, block))
            self.held[rank] -= 1
            self.under_way -= 1
            self._send()

    def result(self, number: int) -> Answer:
        def here() -> bool:
            if number not in self.answers:
                self.look()
            return number in self.answers

        patiently(here)
        return self.answers.pop(number)

    def finished(self) -> list[int]:
        return list(self.answers)

    def order_all(self, word: str, what: Any = None) -> None:
        for rank in self.transport.workers:
            self.transport.isend(rank, (word, 0, what, []), torch.empty(0), "control")

    def close(self, word: str, what: Any = None) -> None:
        self.queues, self.shared = {r: [] for r in self.transport.workers}, []
        self.order_all(word, what)

        def empty() -> bool:
            self.look()
            return not any(self.held.values())

        patiently(empty)


class Lasting(Pool):
    """A pool that outlives its workers: what a lost one held is given out again to those that are left.

    Args:
        regroup: brings those that are left together. ranks: who may take a task now.
    """

    def __init__(
        self,
        transport: Transport,
        handler: Handler,
        regroup: Callable[[], None],
        ranks: Callable[[Task], Sequence[int]],
    ) -> None:
        self.transport, self.handler, self.regroup, self.ranks = transport, handler, regroup, ranks
        self.tasks: dict[int, Task] = {}  # whose answers were not handed on
        self.answers = {}
        self.pool = self._open()

    def _open(self) -> Pool:
        return _Alone(self.handler) if self.transport.size == 1 else _Remote(self.transport)

    def _try(self, call: Callable[[Pool], Any]) -> Any:
        while True:
            try:
                return call(self.pool)
            except RankLost:
                self.recover()

    def recover(self) -> None:
        """Start again with the workers that are left."""
        while True:
            try:
                self.regroup()
                answers, self.pool = self.pool.answers, self._open()
                self.pool.answers.update(answers)
                for number, task in self.tasks.items():
                    if number not in answers:
                        self.pool.submit(replace(task, ranks=tuple(self.ranks(task))))
                return
            except RankLost:
                continue

    def submit(self, task: Task) -> None:
        self.tasks[task.number] = task
        try:
            self.pool.submit(task)
        except RankLost:
            self.recover()  # gives this one out as well

    def result(self, number: int) -> Answer:
        answer: Answer = self._try(lambda pool: pool.result(number))
        del self.tasks[number]
        return answer

    def finished(self) -> list[int]:
        return self.pool.finished()

    def look(self) -> None:
        self._try(lambda pool: pool.look())

    def order_all(self, word: str, what: Any = None) -> None:
        self._try(lambda pool: pool.order_all(word, what))

    def close(self, word: str, what: Any = None) -> None:
        self.tasks.clear()
        self._try(lambda pool: pool.close(word, what))


def open_pool(
    transport: Transport,
    handler: Handler,
    regroup: Callable[[], None],
    ranks: Callable[[Task], Sequence[int]],
) -> Lasting:
    """Return the pool of rank 0; `regroup` and `ranks`: see `Lasting`."""
    return Lasting(transport, handler, regroup, ranks)


@dataclass(frozen=True)
class Word:
    """What ended a worker's service.

    Attributes:
        word, what: as rank 0 said it.
        idle, seconds: how long the worker had nothing to do, and how long it served.
    """

    word: str
    what: Any
    idle: float
    seconds: float


def serve(transport: Transport, handler: Handler) -> Word:
    """Run tasks at a worker until rank 0 says a word."""
    idle, begin = 0.0, perf_counter()
    while True:
        start = perf_counter()
        _, (word, number, header, shapes), block = patiently(lambda: transport.poll("visit"))
        idle += perf_counter() - start
        if word != "task":
            return Word(word, header, idle, perf_counter() - begin)
        answer, vectors = handler(header, unpacked(shapes, block))
        out_shapes, out = packed(vectors)
        transport.isend(0, (number, answer, out_shapes), out, "report")
