"""Ten losses of small runs in the default (exact) mode, one number a line, as they were when the file was
written.

A change that is meant to leave numbers alone leaves these files alone. `pytest tests/golden --regolden`
writes them anew; the tolerance is for other processors and library versions.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mpifl.cli import main

HERE = Path(__file__).parent
CONFIGS = sorted(HERE.parent.glob("configs/golden_*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_losses_are_what_they_were(config, tmp_path, pytestconfig):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--output.model", "false"]
    assert main(["run", str(config), "--quiet", *place]) == 0
    (folder,) = tmp_path.iterdir()
    with (folder / "metrics.csv").open() as lines:
        losses = [float(row["loss"]) for row in csv.DictReader(lines)]
    assert len(losses) == 10
    golden = HERE / f"{config.stem}.txt"
    if pytestconfig.getoption("--regolden", default=False):
        golden.write_text("".join(f"{loss:.9g}\n" for loss in losses))
    expected = np.loadtxt(golden)
    assert_allclose(losses, expected, rtol=1e-4)
    assert expected[-1] < 0.8 * expected[0], "a run that learns nothing guards nothing"
