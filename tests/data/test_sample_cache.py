"""The cache keeps what was read last, within its limit, and returns what would be read again."""

from __future__ import annotations

import torch

from mpifl.core.federation import Split
from mpifl.data.sample_cache import BLOCK_BYTES, SampleCache

SIZE = 128  # bytes of a split, each tensor's rounded up to 64


def split(value: int) -> Split:
    """Return a split of 10 numbers and one label."""
    return Split(torch.full((1, 10), float(value)), torch.tensor([value]))


def test_what_fits_is_read_once_and_the_oldest_goes_first():
    reads = []

    def read(value: int):
        return lambda: reads.append(value) or split(value)

    recent = SampleCache(2 * SIZE)
    for value in (1, 2, 1, 3, 2, 1, 3):  # 3 drives out 1, which was read before 2
        found = recent.get(value, read(value))
        assert int(found.y) == value
        assert torch.equal(found.x, split(value).x)
        assert recent.held <= 2 * SIZE
    assert reads == [1, 2, 3, 1]


def test_a_limit_of_zero_keeps_nothing_and_what_is_too_large_drives_nothing_out():
    assert SampleCache(0).get(1, lambda: split(1)).y.tolist() == [1]
    none, small = SampleCache(0), SampleCache(SIZE)
    none.get(1, lambda: split(1))
    first = small.get(1, lambda: split(1))
    small.get(2, lambda: Split(torch.zeros(100), torch.zeros(1)))
    assert none.held == 0
    assert small.get(1, lambda: split(9)) is first


def test_splits_lie_side_by_side_in_blocks():
    recent = SampleCache(16 * SIZE)  # blocks of two
    kept = [recent.get(value, lambda value=value: split(value)) for value in range(40)]
    starts = [s.x.data_ptr() for s in kept]
    assert [b - a for a, b in zip(starts[::2], starts[1::2], strict=True)] == [SIZE] * 20
    assert [int(s.y) for s in kept] == [*range(40)], "what was handed out outlives its block"
    assert recent.held == 16 * SIZE
    assert len(recent._splits) == 16


def test_a_limit_beyond_all_memory_takes_what_its_splits_need():
    endless = SampleCache(10**21)  # more than a tensor can have
    first = endless.get(1, lambda: split(1))
    assert endless.get(1, lambda: split(9)) is first
    assert endless.held <= BLOCK_BYTES
