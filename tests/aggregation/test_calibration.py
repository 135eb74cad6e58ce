"""Measured costs: the fit, and a run that measures."""

from __future__ import annotations

import json

import numpy as np
from numpy.testing import assert_allclose

from mpifl.aggregation.calibration import fit
from mpifl.aggregation.collective_choice import Line


def test_the_fit_finds_the_line_behind_its_points():
    line = Line(2e-3, 5e-4, 8e-8)
    shapes = ((1, 8_000), (8, 64_000), (1, 500_000), (4, 2_000_000))
    found = fit([(calls, size, line.seconds(calls, size)) for calls, size in shapes])
    assert_allclose((found.once_s, found.block_s, found.byte_s), (2e-3, 5e-4, 8e-8), rtol=1e-6)
    noisy = fit([(calls, size, 1e-3) for calls, size in shapes])
    assert min(noisy.once_s, noisy.block_s, noisy.byte_s) >= 0


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
