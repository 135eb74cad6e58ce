"""The peak memory that `mpifl plan` foretells, against that of real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import worlds

from mpifl import cli

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
UNITS = {"MB": 1e6, "GB": 1e9}
MANY = ["--model.hidden", "[10000]", "--data.scenario", "{name: iid, clients: 60}"]  # 3 MB a model


def planned(text: str) -> list[float]:
    """Return the bytes of each line about memory."""
    found = re.findall(r"^memory, .*? ([\d.]+) (MB|GB) resident", text, re.MULTILINE)
    return [float(number) * UNITS[unit] for number, unit in found]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "least"), [(None, 450e6), (3, 380e6)])
def test_the_plan_foretells_the_peak_memory(ranks, least, mpirun, tmp_path):
    """Within 15 %, with 60 uploads of 3 MB: more than that beside what Python and PyTorch take."""
    common = [*MANY, "--data.cache", str(tmp_path / "cache")]
    env = worlds.PYTHONPATH
    assert cli.main(["prepare", str(CONFIG), *common]) == 0  # its memory is not a run's
    plan = mpirun(
        None,
        "-m",
        "mpifl",
        "plan",
        "--time",
        "no",
        CONFIG,
        *common,
        "--system.ranks",
        ranks or 1,
        timeout=300,
        env=env,
    )
    place = ["--output.folder", str(tmp_path), "--output.id", "run", "--quiet"]
    run = mpirun(ranks, "-m", "mpifl", "run", CONFIG, *common, *place, timeout=300, env=env)
    assert run.returncode == 0, run.stderr
    max_abs = json.loads((tmp_path / "tiny-run" / "summary.json").read_text())["peak_bytes"]
    assert len(max_abs) == (ranks or 1)
    assert max(max_abs) > least
    busiest = [max_abs[0], max(max_abs[1:])] if ranks else max_abs
    assert planned(plan.stdout) == pytest.approx(busiest, rel=0.15)
