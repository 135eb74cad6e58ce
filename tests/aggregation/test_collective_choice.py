"""Which collective carries a mixing, by a table of sizes."""

from __future__ import annotations

import pytest

from mpifl.aggregation.collective_choice import GATHER, REDUCE, SCATTER, busiest_bytes, choose, is_sharded


@pytest.mark.parametrize(
    ("rows", "uploads", "exact", "spread", "expected"),
    [
        (1, 20, True, False, REDUCE),  # FedAvg: one row of 8 bytes a number against 20 of 4
        (4, 20, True, False, REDUCE),  # clusters: 32 against 80
        (20, 20, True, False, GATHER),  # user-centric on few ranks: 160 against 80
        (20, 20, False, False, REDUCE),  # 80 against 80: a tie goes to the reduction
        (10, 20, True, False, REDUCE),  # 80 against 80
        (11, 20, True, False, GATHER),  # 88 against 80
        (1, 1, True, False, GATHER),  # one late arrival
        (1, 1, False, False, REDUCE),
        (0, 5, True, False, REDUCE),  # nothing moves
        (20, 20, True, True, SCATTER),
        (1, 50, False, True, SCATTER),
    ],
)
def test_the_short_side_of_w_is_shipped(rows, uploads, exact, spread, expected):
    assert choose(rows, uploads, exact, spread) == expected


@pytest.mark.parametrize(("rows", "uploads"), [(1, 1), (1, 3), (3, 1), (7, 14), (8, 14), (100, 3)])
@pytest.mark.parametrize("exact", [True, False])
def test_the_choice_is_the_one_with_fewer_bytes_at_the_busiest_rank(rows, uploads, exact):
    sizes = {c: busiest_bytes(c, rows, uploads, 1000, exact) for c in (REDUCE, GATHER)}
    assert sizes[choose(rows, uploads, exact)] == min(sizes.values())


def test_bytes_at_the_busiest_rank_by_hand():
    """d = 10: gather of 3 uploads 3 * 10 * 4 = 120; 2 rows of int64 2 * 10 * 8 = 160, of float32 80."""
    assert busiest_bytes(GATHER, 2, 3, 10) == 120
    assert busiest_bytes(REDUCE, 2, 3, 10) == 160
    assert busiest_bytes(REDUCE, 2, 3, 10, exact=False) == 80
    assert busiest_bytes(SCATTER, 2, 3, 10) == 160


@pytest.mark.parametrize(
    ("rows", "readers", "ranks", "expected"),
    [
        (10, 1, 3, True),
        (10, 2, 3, False),
        (10, 1, 2, False),
        (10, 1, 1, False),
        (3, 1, 3, False),
        (4, 0, 3, True),
    ],
)
def test_rows_are_spread_where_each_has_one_reader_and_there_are_many(rows, readers, ranks, expected):
    assert is_sharded(rows, readers, ranks) is expected
