"""Seconds of collectives from a few figures, by hand, and the choice that follows from them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mpifl.aggregation.calibration import fit
from mpifl.aggregation.collective_choice import (
    BLOCK,
    GATHER,
    REDUCE,
    Costs,
    Given,
    Line,
    between,
    blocks_of,
    choose,
    crossover,
    far_ranks,
)
from mpifl.core.errors import UserError


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


def test_the_fit_finds_the_line_behind_its_points():
    line = Line(2e-3, 5e-4, 8e-8)
    shapes = ((1, 8_000), (8, 64_000), (1, 500_000), (4, 2_000_000))
    found = fit([(calls, size, line.seconds(calls, size)) for calls, size in shapes])
    assert_allclose((found.once_s, found.block_s, found.byte_s), (2e-3, 5e-4, 8e-8), rtol=1e-6)
    noisy = fit([(calls, size, 1e-3) for calls, size in shapes])
    assert min(noisy.once_s, noisy.block_s, noisy.byte_s) >= 0


def test_impossible_costs_are_refused():
    with pytest.raises(UserError, match=r"latency_s = -1\.0"):
        Given(latency_s=-1.0)
    with pytest.raises(UserError, match=r"bytes_s = 0\.0: take a positive rate"):
        Given(bytes_s=0.0)


def test_costs_are_measured_stored_and_change_no_number(mpirun, tmp_path):
    """Two ranks: one run whose collective is chosen by measured costs, one by bytes."""
    from pathlib import Path

    from support import worlds

    tests = Path(__file__).parents[1]
    runs = {"bytes": [], "measured": ["--system.cost.name", "measured"]}
    program = (tests / "mpi" / "many.py", tests / "configs" / "tiny.yaml", tmp_path, json.dumps(runs))
    end = mpirun(2, *program, timeout=600, env=worlds.PYTHONPATH)
    assert end.returncode == 0, end.stderr
    read = {
        name: {
            file: json.loads((tmp_path / f"tiny-{name}" / f"{file}.json").read_text())
            for file in ("summary", "environment")
        }
        for name in runs
    }
    assert read["bytes"]["summary"]["digest"] == read["measured"]["summary"]["digest"]
    assert read["bytes"]["environment"]["mpi_costs"] is None
    costs = read["measured"]["environment"]["mpi_costs"]
    assert costs["latency_s"] > 0
    assert costs["bytes_s"] > 0
    assert set(costs["reduce"]) == {"once_s", "block_s", "byte_s"}
    assert np.isfinite(list(costs["gather"].values())).all()
