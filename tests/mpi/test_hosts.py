"""Virtual hosts, two and four, with their own shared memory domains give the digests of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import toy
from support.runs import CONFIG, RUNS, SCRIPT, Alone, Runs

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "mpi_bytes.py"
CLUSTER = Path(__file__).parents[2] / "launch" / "virtual-cluster"
NAMES = ("fedavg", "scaffold", "cfl", "emdcfl", "ucfl")  # state, remembered uploads, spread rows among them
pytestmark = pytest.mark.usefixtures("virtual_hosts")


def on_hosts(hosts: int, ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    """Run a program on virtual hosts, ranks in turn."""
    environment = os.environ | toy.PYTHONPATH | {"VIRTUAL_ENV": sys.prefix, "OMPI_MCA_btl": "^ofi"}
    command = [CLUSTER, "-H", str(hosts), "-n", str(ranks), "--map-by", "node", "--", *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.nightly
def test_between_two_hosts_every_byte_is_witnessed_too():
    """The library's own exchanges, to learn which ranks are near, are none of mpifl's."""
    done = on_hosts(2, 4, sys.executable, str(CAMPAIGN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "0"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Alone:
    """The runs in one process."""
    return Alone(tmp_path_factory.mktemp("alone"), RUNS)


@pytest.mark.parametrize(("number", "nodes"), [(2, [0, 1, 0]), (2, [0, 1, 0, 1, 0]), (4, [0, 1, 2, 3, 0])])
@pytest.mark.nightly
def test_hosts_give_the_digests_of_one_process(number, nodes, alone, tmp_path):
    program = [sys.executable, str(SCRIPT), str(CONFIG), str(tmp_path)]
    done = on_hosts(number, len(nodes), *program, json.dumps({name: RUNS[name] for name in NAMES}))
    assert done.returncode == 0, done.stderr
    hosts = Runs(tmp_path)
    for name in NAMES:
        assert hosts.summary(name)["digest"] == alone.summary(name)["digest"], name
        places = json.loads((tmp_path / f"tiny-{name}" / "environment.json").read_text())["processes"]
        assert [place["node"] for place in places] == nodes
        assert [place["host"] for place in places] == [f"vh{node}" for node in nodes]
