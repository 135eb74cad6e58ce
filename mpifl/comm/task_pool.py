"""A pool of workers that run tasks one at a time, in no fixed order, for the asynchronous engine.

The server submits tasks with a priority. Each worker holds a running task and further waiting ones, so it is
not idle while a message travels. Headers are pickled; the vectors of a task travel as one flat float32 block.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from time import monotonic, perf_counter
from typing import Any

import torch

from mpifl.core.timing import Stopwatch

from .liveness import wait_until
from .transport import Mismatch, RankLost, Transport

AHEAD = 2  # tasks at a worker: one runs, one waits
MOST_AHEAD, SHARE = 5, 4  # if many are under way: 1 / SHARE of a worker's share of them, at most MOST_AHEAD


@dataclass(frozen=True)
class Task:
    """Work for one worker.

    Attributes:
        number: identifies the task.
        urgency: priority; the task with the smallest value is sent first.
        header: any picklable object.
        vectors: name -> rows [r, w], float32.
        ranks: workers that may run the task.
    """

    number: int
    urgency: float
    header: Any
    vectors: Mapping[str, torch.Tensor]
    ranks: tuple[int, ...]


Answer = tuple[Any, dict[str, torch.Tensor]]  # (picklable object, name -> rows [r, w])
Handler = Callable[[Any, Mapping[str, torch.Tensor]], Answer]


def packed(vectors: Mapping[str, torch.Tensor]) -> tuple[list[tuple[str, tuple[int, ...]]], torch.Tensor]:
    """Return the names and shapes of tensors, and one flat block with their values."""
    shapes = [(name, tuple(v.shape)) for name, v in vectors.items()]
    flat = [v.reshape(-1).cpu() for v in vectors.values()]
    return shapes, flat[0].contiguous() if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0)


def unpacked(shapes: Sequence[tuple[str, tuple[int, ...]]], block: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the named tensors that `packed` packed, as views of the flat block.

    Args:
        shapes: names and shapes, as `packed` returned them.
        block: flat block, as `packed` returned it.

    Raises:
        Mismatch: the block has more or fewer numbers than the shapes say.
    """
    sizes = [prod(shape) for _, shape in shapes]
    if sum(sizes) != block.numel():
        raise Mismatch(f"a message has {block.numel()} numbers, its header says {dict(shapes)}")
    if len(shapes) == 1:
        return {shapes[0][0]: block.view(shapes[0][1])}
    pieces = block.split(sizes) if sizes else []
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes, pieces, strict=True)}


def depth(under_way: int, workers: int) -> int:
    """Return how many tasks a worker may hold: enough to stay busy while the server is slow to answer.

    Args:
        under_way: number of tasks submitted and not yet answered.
        workers: number of workers.
    """
    return max(AHEAD, min(MOST_AHEAD, under_way // (SHARE * workers)))


class Pool(ABC):
    """Runs tasks; only rank 0 has a pool.

    Attributes:
        answers: task number -> an answer that was received and not yet returned by `result`.
    """

    answers: dict[int, Answer]

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Submit a task."""

    @abstractmethod
    def result(self, number: int) -> Answer:
        """Block until a task is done, and return its answer; the core stays free meanwhile."""

    @abstractmethod
    def finished(self) -> list[int]:
        """Return the numbers of the tasks whose answers have been received, in order of arrival."""

    @abstractmethod
    def poll(self) -> None:
        """Receive the answers that have arrived; in one process, run one task."""

    @abstractmethod
    def command_all(self, command: str, argument: Any = None) -> None:
        """Send a command to all workers, which finish the tasks they hold and return it from `task_loop`.

        Args:
            command: one word.
            argument: any picklable object.
        """

    @abstractmethod
    def close(self, command: str, argument: Any = None) -> None:
        """Send the last command, drop the tasks not yet sent, and receive the answers to all others.

        Args:
            command: one word.
            argument: any picklable object.
        """


class _LocalPool(Pool):
    """One process: a task runs when its result is asked for, or at a poll."""

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

    def poll(self) -> None:
        if self.waiting:
            number = min(self.waiting.values(), key=lambda t: (t.urgency, t.number)).number
            self.answers[number] = self.result(number)

    def command_all(self, command: str, argument: Any = None) -> None:
        return

    def close(self, command: str, argument: Any = None) -> None:
        return


class _WorkerPool(Pool):
    """Sends tasks to workers over a transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.queues: dict[int, list[tuple[float, int, Task]]] = {r: [] for r in transport.workers}
        self.shared: list[tuple[float, int, Task]] = []  # any worker may run these
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
        """Send the most urgent tasks that each worker may run, first to the workers that hold the fewest."""
        if not self.shared and not any(self.queues.values()):
            return
        for level in range(depth(self.under_way, len(self.held))):
            for rank, held in self.held.items():
                if held == level and (heap := self._heap(rank)):
                    _, number, task = heapq.heappop(heap)
                    shapes, block = packed(task.vectors)
                    self.transport.isend(rank, ("task", number, task.header, shapes), block, "visit")
                    self.held[rank] += 1

    def _heap(self, rank: int) -> list[tuple[float, int, Task]]:
        """Return the queue that holds the most urgent task a worker may run."""
        own, shared = self.queues[rank], self.shared
        return own if own and (not shared or own[0][:2] < shared[0][:2]) else shared

    def poll(self) -> None:
        while (message := self.transport.poll("report")) is not None:
            rank, (number, header, shapes), block = message
            self.answers[number] = (header, unpacked(shapes, block))
            self.held[rank] -= 1
            self.under_way -= 1
            self._send()

    def result(self, number: int) -> Answer:
        def here() -> bool:
            if number not in self.answers:
                self.poll()
            return number in self.answers

        wait_until(here)
        return self.answers.pop(number)

    def finished(self) -> list[int]:
        return list(self.answers)

    def command_all(self, command: str, argument: Any = None) -> None:
        for rank in self.transport.workers:
            self.transport.isend(rank, (command, 0, argument, []), torch.empty(0), "control")

    def close(self, command: str, argument: Any = None) -> None:
        self.queues, self.shared = {r: [] for r in self.transport.workers}, []
        self.command_all(command, argument)

        def empty() -> bool:
            self.poll()
            return not any(self.held.values())

        wait_until(empty)


class RecoveringPool(Pool):
    """A pool that survives the loss of workers: it sends their tasks again to the remaining ones.

    Args:
        transport: connects the ranks.
        handler: runs a task if there is only one process.
        regroup: forms a group of the remaining ranks.
        ranks: returns the workers that may currently run a task.
    """

    def __init__(
        self,
        transport: Transport,
        handler: Handler,
        regroup: Callable[[], None],
        ranks: Callable[[Task], Sequence[int]],
    ) -> None:
        self.transport, self.handler, self.regroup, self.ranks = transport, handler, regroup, ranks
        self.tasks: dict[int, Task] = {}  # by number, without those whose result was returned
        self.answers = {}
        self.pool = self._open()

    def _open(self) -> Pool:
        return _LocalPool(self.handler) if self.transport.size == 1 else _WorkerPool(self.transport)

    def _try(self, call: Callable[[Pool], Any]) -> Any:
        while True:
            try:
                return call(self.pool)
            except RankLost:
                self.recover()

    def recover(self) -> None:
        """Regroup and send all unanswered tasks again; repeat this if another rank is lost meanwhile."""
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
        """Submit a task; repeat this after the loss of a worker."""
        self.tasks[task.number] = task
        try:
            self.pool.submit(task)
        except RankLost:
            self.recover()  # sends this task as well

    def result(self, number: int) -> Answer:
        """Block until a task is done, and return its answer."""
        answer: Answer = self._try(lambda pool: pool.result(number))
        self.transport.last_call = monotonic()  # in one process, nothing was sent
        del self.tasks[number]
        return answer

    def finished(self) -> list[int]:
        """Return the numbers of the tasks whose answers have been received."""
        return self.pool.finished()

    def poll(self) -> None:
        """Receive the answers that have arrived."""
        self._try(lambda pool: pool.poll())
        self.transport.last_call = monotonic()  # in one process, nothing was sent

    def command_all(self, command: str, argument: Any = None) -> None:
        """Send a command to all workers; see `Pool`."""
        self._try(lambda pool: pool.command_all(command, argument))

    def close(self, command: str, argument: Any = None) -> None:
        """Send the last command; see `Pool`."""
        self.tasks.clear()
        self._try(lambda pool: pool.close(command, argument))


@dataclass(frozen=True)
class Command:
    """A command that rank 0 sends to all workers between tasks, with this worker's times before it.

    Attributes:
        name: one word.
        argument: any picklable object.
        idle: seconds in `task_loop` during which this worker had no task.
        seconds: seconds in `task_loop` in total.
    """

    name: str
    argument: Any
    idle: float
    seconds: float


def task_loop(transport: Transport, handler: Handler, watch: Stopwatch) -> Command:
    """Run tasks at a worker until rank 0 sends a command, and return the command.

    Args:
        transport: connects the ranks.
        handler: runs a task: takes its header and vectors, returns an answer and the answer's vectors.
        watch: counts the seconds of each phase.
    """
    idle, begin = 0.0, perf_counter()
    while True:
        start = perf_counter()
        with watch("wait"):
            _, (name, number, header, shapes), block = wait_until(lambda: transport.poll("visit"))
        idle += perf_counter() - start
        if name != "task":
            return Command(name, header, idle, perf_counter() - begin)
        answer, vectors = handler(header, unpacked(shapes, block))
        with watch("report"):
            out_shapes, out = packed(vectors)
            transport.isend(0, (number, answer, out_shapes), out, "report")
