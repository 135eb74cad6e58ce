"""How many tasks the server keeps at a worker."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mpifl.comm.single import Single
from mpifl.comm.task_pool import RecoveringPool, Task, _WorkerPool, packed, unpacked
from mpifl.comm.transport import Mismatch, RankLost


class Silent:
    """Two workers that take tasks and answer nothing; counts what each was sent."""

    workers = (1, 2)

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def isend(self, rank, header, block, purpose):
        """Note who was sent which task."""
        self.sent.append((rank, header[1]))


@pytest.mark.parametrize(
    ("under_way", "held"),
    [
        (1, [1]),
        (3, [1, 2]),
        (8, [2, 2]),  # the rest waits here, for whoever is free first
        (32, [4, 4]),
        (40, [5, 5]),
        (400, [5, 5]),  # urgent tasks may still overtake most others
    ],
)
def test_workers_hold_two_tasks_and_more_where_many_are_under_way(under_way, held):
    transport = Silent()
    pool = _WorkerPool(transport)
    for number in range(under_way):
        pool.submit(Task(number, 0.0, None, {"x": torch.zeros(1, 1)}, (1, 2)))
    assert sorted(Counter(rank for rank, _ in transport.sent).values()) == held
    assert [number for _, number in transport.sent] == list(range(sum(held)))


def test_what_one_process_trains_is_progress_for_the_watchdog():
    """Asynchronous runs of one process call no collective between two evaluations."""
    transport = Single()
    pool = RecoveringPool(transport, lambda header, vectors: (header, {}), lambda: None, lambda task: (0,))
    before = transport.last_call
    pool.submit(Task(0, 0.0, "visit", {}, (0,)))
    assert pool.result(0) == ("visit", {})
    assert transport.last_call > before


def test_a_poll_is_progress_for_the_watchdog():
    """A clock on the wall polls while all that is trained is held back."""
    transport = Single()
    pool = RecoveringPool(transport, lambda header, vectors: (header, {}), lambda: None, lambda task: (0,))
    before = transport.last_call
    pool.poll()
    assert transport.last_call > before


class Losing(Silent):
    """Three workers; the second answers nobody, and is lost while tasks are sent again."""

    size, is_server = 4, True

    def __init__(self) -> None:
        super().__init__()
        self.workers = (1, 2, 3)

    def isend(self, rank, header, block, purpose):
        """Fail at rank 2, as long as it is there."""
        if rank == 2:
            raise RankLost
        super().isend(rank, header, block, purpose)


def test_a_second_loss_while_tasks_are_sent_again_is_made_up_for_too():
    transport, groups = Losing(), [(1, 2), (1,)]

    def regroup() -> None:
        transport.workers = groups.pop(0)
        transport.sent.clear()

    pool = RecoveringPool(
        transport, lambda header, vectors: (header, {}), regroup, lambda task: transport.workers
    )
    for number in range(2):
        pool.tasks[number] = Task(number, 0.0, None, {"x": torch.zeros(1, 1)}, (3,))
    pool.recover()
    assert not groups
    assert sorted(transport.sent) == [(1, 0), (1, 1)]


@pytest.mark.parametrize("size", [5, 7])
def test_a_message_holds_as_many_numbers_as_its_header_says(size):
    shapes, block = packed({"a": torch.arange(4.0).view(2, 2), "b": torch.ones(1, 2)})
    assert unpacked(shapes, block)["a"].tolist() == [[0, 1], [2, 3]]
    with pytest.raises(Mismatch, match=f"{size} numbers"):
        unpacked(shapes, torch.zeros(size))
