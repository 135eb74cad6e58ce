"""Which collective carries a mixing: by bytes as a table, by the cost model worked out by hand."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose
from support.each import for_each

from mpifl.aggregation.collective_choice import (
    BLOCK,
    GATHER,
    REDUCE,
    SCATTER,
    busiest_bytes,
    choose,
    far_ranks,
    is_sharded,
)
from mpifl.aggregation.collective_costs import Costs, Line, between, blocks_of, crossover


@for_each(
    ("rows", "uploads", "exact", "sharded", "expected"),
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
def test_the_short_side_of_w_is_shipped(rows, uploads, exact, sharded, expected):
    assert choose(rows, uploads, exact, sharded) == expected


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
def test_rows_are_sharded_where_each_has_one_reader_and_there_are_many(rows, readers, ranks, expected):
    assert is_sharded(rows, readers, ranks) is expected


def test_a_mixing_by_hand():
    """P = 5: three levels. K = 2 rows of 1000 numbers: 16 kB in one call; m = 8 uploads: 32 kB in one.

    A message of n bytes takes 1 ms + n / 1 MB/s.
    """
    costs = between(1e-3, 1e6, 5)
    assert_allclose(costs.mixing(REDUCE, 2, 8, 1000, 5), 3 * (1e-3 + 0.016))
    assert_allclose(costs.mixing(GATHER, 2, 8, 1000, 5), 1e-3 + 0.032)
    assert costs.choose(2, 8, 1000, 5) == GATHER
    assert choose(2, 8) == REDUCE, "by bytes alone the levels of the tree do not count"
    assert_allclose(costs.sharing(2, 1000), 3 * (2 * 1e-3 + 0.008))


def test_the_servers_own_work_counts():
    """K m d products at rank 0 for a gather, K ceil(m / (P - 1)) d at each worker for a reduction."""
    costs = Costs(0, 1, Line(), Line(), Line(), term_s=1e-6)
    assert_allclose(costs.mixing(GATHER, 2, 9, 100, 5), 2 * 9 * 100 * 1e-6)
    assert_allclose(costs.mixing(REDUCE, 2, 9, 100, 5), 2 * 3 * 100 * 1e-6)


def test_only_uploads_from_other_nodes_cross_the_link():
    """Ranks 1 and 3 are far: of 6 uploads 4 cross, unless told how many."""
    assert far_ranks((0, 1, 0, 1)) == [1, 3]
    assert far_ranks((0, 0, 0)) == [1, 2], "one node: all share its memory"
    costs = Costs(0, 1, Line(), Line(byte_s=1e-3), Line(), far=2 / 3)
    assert_allclose(costs.mixing(GATHER, 1, 6, 10, 4), 4 * 40e-3)
    assert_allclose(costs.mixing(GATHER, 1, 6, 10, 4, from_far=1), 40e-3)


def test_messages_are_blocks():
    assert blocks_of(1, BLOCK) == 1
    assert blocks_of(1, BLOCK + 1) == 2
    assert blocks_of(4, BLOCK) == 4
    assert blocks_of(BLOCK, 2048) == 2


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_the_crossover_is_where_the_choice_changes(rows):
    for costs in (None, between(1e-4, 1e8, 9)):
        m = crossover(costs, rows, 10_000, 9)
        chosen = [choose(rows, u) if costs is None else costs.choose(rows, u, 10_000, 9) for u in (m - 1, m)]
        assert chosen == [GATHER, REDUCE]
    assert crossover(None, rows, 10_000, 9) == 2 * rows, "8 bytes a number of a row, 4 of an upload"


def test_a_reduction_that_is_never_faster_has_no_crossover():
    slow = Costs(0, 1, Line(once_s=1e9), Line(), Line())
    assert crossover(slow, 1, 10, 4) is None
