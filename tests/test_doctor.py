"""What the doctor finds, and what it says of it."""

from __future__ import annotations

import worlds

from mpifl import doctor
from mpifl.comm import Single


def place(**changes):
    """Return the facts of a rank on a machine with two cores."""
    fine = {"host": "a", "node": 0, "local_rank": 0, "cpus": "0-1", "threads": 1, "gpus": [], "start_s": {}}
    return fine | {"device": "cpu", "versions": {"torch": "1"}, "time": 0.0} | changes


def bad(places) -> set[str]:
    """Return the names of the checks that fail."""
    return {check.name for check in doctor._layout(places) if not check.good}


def test_each_fault_of_a_layout_is_found_and_no_other():
    assert bad([place(), place(), place()]) == set(), "two workers and a server on two cores"
    assert bad([place(), place(versions={"torch": "2"})]) == {"versions"}
    assert bad([place(), place(time=5.0)]) == {"clocks"}
    assert bad([place(), place(), place(), place()]) == {"cores"}
    assert bad([place(), place(threads=4)]) == {"cores"}
    assert bad([place(), place(cpus="0"), place(cpus="0", node=1), place(cpus="0", node=1)]) == {"cores"}
    assert bad([place(), place(gpus=["a"])]) == {"GPUs"}


def test_one_process_is_examined(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIFL_DATA", str(tmp_path / "nowhere"))
    said = []
    assert not doctor.doctor(Single(), str(tmp_path), said.append)
    assert "BAD  data" in said[0]
    assert "put it where every node sees it" in said[0]
    assert "ok   collectives" in said[0]


def test_three_ranks_are_examined(mpirun, tmp_path):
    env = worlds.PYTHONPATH | {"MPIFL_DATA": ""}
    done = mpirun(3, "-m", "mpifl", "doctor", "--runs", tmp_path, env=env, timeout=300)
    assert "ok   collectives  sums and rows are right" in done.stdout, done.stderr
    assert "3 ranks on 1 hosts" in done.stdout
    assert done.returncode == (1 if "BAD" in done.stdout else 0)
