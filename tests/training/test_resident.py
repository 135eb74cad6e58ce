"""What stays on a device of the clients that a rank hosts."""

from __future__ import annotations

import torch

from mpifl.core.federation import Split
from mpifl.training.resident import ResidentClients

META = torch.device("meta")  # stands for a GPU: tensors without numbers


def samples(n: int) -> Split:
    """Return n samples of four numbers, 24 bytes each with the label."""
    return Split(torch.zeros(n, 4), torch.zeros(n, dtype=torch.long))


class Reads:
    """Counts how often samples are copied to the device."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0

    def __call__(self) -> Split:
        self.count += 1
        split = samples(self.n)
        return Split(split.x.to(META), split.y.to(META))


def test_samples_are_copied_to_the_device_once_while_there_is_room():
    """Room for ten samples: four of client 1 and six of client 2 stay, those of client 3 come each time."""
    resident = ResidentClients(META, 10 * 24)
    reads = {1: Reads(4), 2: Reads(6), 3: Reads(1)}
    for _ in range(3):
        for k, read in reads.items():
            split = resident.split(k, "train", read)
            assert split.x.device == META
            assert len(split) == read.n
    assert [read.count for read in reads.values()] == [1, 1, 3]
    assert resident.room == 0


def test_splits_of_a_client_are_told_apart():
    resident = ResidentClients(META, 1000)
    assert len(resident.split(1, "train", Reads(4))) == 4
    assert len(resident.split(1, "test", Reads(2))) == 2
    assert len(resident.split(1, "train", Reads(9))) == 4


def test_the_state_of_the_last_visit_stays_and_any_other_is_read():
    """A repeated step reads the state before it, which the file has."""
    resident, asked = ResidentClients(torch.device("cpu"), 100), []

    def load(visit: int):
        def read():
            asked.append(visit)
            return {"c": torch.full((4,), float(visit))}

        return read

    state = {"c": torch.full((4,), 2.0)}
    resident.keep_state(7, 2, state)
    state["c"].zero_()
    found = resident.state(7, 2, load(2))
    assert not asked
    assert torch.equal(found["c"], torch.full((4,), 2.0)), "a copy of its own"
    assert torch.equal(resident.state(7, 1, load(1))["c"], torch.full((4,), 1.0))
    assert torch.equal(resident.state(8, 2, load(2))["c"], torch.full((4,), 2.0))
    assert asked == [1, 2]


def test_a_new_state_takes_the_room_of_the_old_one():
    resident = ResidentClients(torch.device("cpu"), 40)
    for visit in range(1, 6):
        resident.keep_state(1, visit, {"c": torch.zeros(8)})
        assert resident.room == 8
    resident.keep_state(2, 1, {"c": torch.zeros(4)})
    assert resident.room == 8, "no room: it stays in its file"
    resident.keep_state(1, 6, {"c": torch.zeros(20)})
    assert resident.room == 40
    assert resident.state(1, 6, lambda: {"c": torch.ones(1)})["c"].numel() == 1
