"""What was asked for last stays at hand, within its limit, and is what would be read again."""

from __future__ import annotations

import torch

from mpifl.core.federation import Split
from mpifl.data.recent import Recent


def split(value: int) -> Split:
    """Return a split of 48 bytes: 10 numbers and one label."""
    return Split(torch.full((1, 10), float(value)), torch.tensor([value]))


def test_what_fits_is_read_once_and_the_oldest_goes_first():
    reads = []

    def read(value: int):
        return lambda: reads.append(value) or split(value)

    recent = Recent(2 * 48)
    for value in (1, 2, 1, 3, 1, 2):  # 3 drives out 2, which was used before 1
        assert int(recent.get(value, read(value)).y) == value
        assert recent.held <= 2 * 48
    assert reads == [1, 2, 3, 2]


def test_a_limit_of_zero_keeps_nothing_and_what_is_too_large_drives_nothing_out():
    assert Recent(0).get(1, lambda: split(1)).y.tolist() == [1]
    none, small = Recent(0), Recent(48)
    none.get(1, lambda: split(1))
    first = small.get(1, lambda: split(1))
    small.get(2, lambda: Split(torch.zeros(100), torch.zeros(1)))
    assert none.held == 0
    assert small.get(1, lambda: split(9)) is first
