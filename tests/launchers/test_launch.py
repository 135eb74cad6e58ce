"""The launch scripts hand over what they should; schedulers are stubs that print how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(
    p
    for p in [*LAUNCH.iterdir(), ROOT / ".ci" / "run"]
    if p.is_file() and b"bash" in p.read_bytes().split(b"\n")[0]
)


@pytest.fixture
def stubs(tmp_path):
    """Return an environment in which mpirun, srun and mpifl print their name, threads and arguments."""
    for name in ("mpirun", "srun", "mpifl"):
        (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/} threads=$OMP_NUM_THREADS $*"\n')
        (tmp_path / name).chmod(0o755)
    outside = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return outside | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def launch(script: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a launch script to its end."""
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, **options
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_stop_at_the_first_error(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if script.name != "common.sh":  # read by the others
        assert "\nset -euo pipefail\n" in script.read_text()
        assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("launcher", "called"),
    [
        ({}, "mpirun threads=2 -n 8 mpifl run a.yaml --rounds 3\n"),
        (
            {"LAUNCHER": "srun"},
            "srun threads=2 --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=2 mpifl run a.yaml --rounds 3\n",
        ),
    ],
    ids=["mpirun", "srun"],
)
def test_slurm_takes_ranks_and_threads_from_the_allocation(stubs, launcher, called):
    slurm = {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2"}
    done = launch("slurm", "a.yaml", "--rounds", "3", env=stubs | slurm | launcher)
    assert (done.returncode, done.stdout) == (0, called)


def test_slurm_without_a_configuration_says_how_it_is_called(stubs):
    done = launch("slurm", env=stubs)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


def test_pbs_counts_the_lines_of_its_node_file(stubs, tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "CONFIG": "a.yaml"}
    done = launch("pbs", env=stubs | pbs | {"OPTIONS": "--rounds 3 --seed 1"})
    assert (done.returncode, done.stdout) == (
        0,
        "mpirun threads=1 -n 4 mpifl run a.yaml --rounds 3 --seed 1\n",
    )
