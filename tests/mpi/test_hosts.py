"""Two virtual hosts with their own shared memory domains give the digests of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import worlds
from runs import CONFIG, RUNS, SCRIPT, Runs

CLUSTER = Path(__file__).parents[2] / "launch" / "virtual-cluster"
NAMES = (
    "fedavg",
    "scaffold",
    "cfl",
    "emdcfl",
    "ucfl",
)  # state, remembered uploads and spread rows among them


@pytest.fixture(scope="module")
def allowed() -> None:
    """Skip where hosts cannot be made."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("virtual hosts need root, iproute2 and util-linux")
    if not (Path(sys.executable).parent / "prterun").exists():
        pytest.skip("virtual hosts need Open MPI 5 beside the interpreter")
    if subprocess.run(["ip", "netns", "add", "mpifl-ask"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    subprocess.run(["ip", "netns", "delete", "mpifl-ask"], check=True)


def on_hosts(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    """Run a program on two virtual hosts, ranks in turn."""
    environment = os.environ | worlds.PYTHONPATH | {"VIRTUAL_ENV": sys.prefix, "OMPI_MCA_btl": "^ofi"}
    command = [CLUSTER, "-H", "2", "-n", str(ranks), "--map-by", "node", "--", *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.usefixtures("allowed")
def test_between_two_hosts_every_byte_is_witnessed_too():
    """The library's own exchanges, to learn which ranks are near, are none of mpifl's."""
    done = on_hosts(4, sys.executable, "-m", "mpifl", "doctor", "--witness")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "0"


@pytest.mark.usefixtures("allowed")
def test_two_hosts_give_the_digests_of_one_process(mpirun, tmp_path):
    some = json.dumps({name: RUNS[name] for name in NAMES})
    options = ["--data.cache", str(tmp_path / "cache")]
    end = mpirun(None, SCRIPT, CONFIG, tmp_path / "alone", some, *options, timeout=600, env=worlds.PYTHONPATH)
    assert end.returncode == 0, end.stderr
    program = [sys.executable, str(SCRIPT), str(CONFIG), str(tmp_path / "hosts"), some, *options]
    done = on_hosts(5, *program)
    assert done.returncode == 0, done.stderr
    alone, hosts = Runs(tmp_path / "alone"), Runs(tmp_path / "hosts")
    for name in NAMES:
        assert hosts.summary(name)["digest"] == alone.summary(name)["digest"], name
        environment = json.loads((tmp_path / "hosts" / f"tiny-{name}" / "environment.json").read_text())
        assert [place["node"] for place in environment["places"]] == [0, 1, 0, 1, 0]
