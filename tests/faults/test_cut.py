"""Four virtual hosts, and one that cannot be reached any more: the others go on, or the job says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import deaths
from support import toy

pytestmark = pytest.mark.nightly(seconds=30)
CLUSTER = Path(__file__).parents[2] / "launch" / "virtual-cluster"
LIMIT = 240  # seconds; it takes about thirty
ROUNDS = ["--rounds", "30", "--evaluation.every", "1"]


@pytest.fixture
def hosts(virtual_hosts: None) -> Iterator[dict[str, str]]:
    """Make four hosts; return the environment in which the script runs. Skip where there can be none."""
    environment = os.environ | toy.PYTHONPATH | {"VIRTUAL_ENV": sys.prefix, "OMPI_MCA_btl": "^ofi"}
    made = subprocess.run([CLUSTER, "up", "4"], capture_output=True, text=True, env=environment, timeout=60)
    if made.returncode:
        pytest.skip(f"no virtual hosts here: {made.stderr.strip()}")
    yield environment | {"MPIFL_HANG_S": "10"}
    subprocess.run([CLUSTER, "down"], check=True, env=environment, timeout=60)


def start(folder: Path, environment: dict[str, str], name: str, *options: str) -> subprocess.Popen[str]:
    """Run a rank on each host."""
    asked = [*deaths.arguments(folder, name, name, folder / "cache"), *ROUNDS]
    command = [CLUSTER, "run", "-n", "4", "--map-by", "node", *options, "--", sys.executable, "-m", "mpifl"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command), *asked], env=environment, **pipes)  # type: ignore[call-overload]


def cut_in_mid_run(folder: Path, name: str, job: subprocess.Popen[str]) -> str:
    """Pull the cable of a host during the rounds; return what the job says till its end."""
    metrics, end = folder / f"tiny-{name}" / "metrics.csv", time.monotonic() + LIMIT
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end, "did not begin"
        time.sleep(0.02)
    subprocess.run([CLUSTER, "cut", "3"], check=True, timeout=60)
    try:
        return job.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        job.kill()
        pytest.fail("hangs after the cut")


@pytest.mark.nightly(seconds=30)
def test_four_hosts_outlive_one_that_is_cut_off(hosts, mpirun, tmp_path):
    asked = [*deaths.arguments(tmp_path, "alone", "fedavg", tmp_path / "cache"), *ROUNDS]
    end = deaths.launch(mpirun, None, [], *asked)
    assert end.returncode == 0, end.stderr
    said = cut_in_mid_run(tmp_path, "fedavg", start(tmp_path, hosts, "fedavg", *deaths.ULFM))
    assert "3 ranks go on" in said
    (lost,) = deaths.lost(tmp_path, "fedavg")
    assert "on vh3" in lost
    assert deaths.digest(tmp_path, "fedavg") == deaths.digest(tmp_path, "alone")
    places = json.loads((tmp_path / "tiny-fedavg" / "environment.json").read_text())["processes"]
    assert [place["host"] for place in places] == ["vh0", "vh1", "vh2"]


@pytest.mark.nightly(seconds=30)
def test_four_hosts_tell_when_they_cannot_go_on_without_one(hosts, tmp_path):
    said = cut_in_mid_run(tmp_path, "scaffold", start(tmp_path, hosts, "scaffold", *deaths.ULFM))
    assert "holds states of clients, were lost; go on from the last checkpoint" in said
    assert "Traceback" not in said
