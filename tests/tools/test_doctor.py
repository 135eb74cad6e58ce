"""What the doctor finds, and what it says of it."""

from __future__ import annotations

from itertools import combinations

import pytest
from support import toy
from support.runs import CONFIG

from mpifl.comm.link_test import Link, rounds_of_pairs
from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.experiment import loader
from mpifl.tools import doctor


def place(**changes):
    """Return the facts of a rank on a machine with two cores."""
    fine = {"host": "a", "node": 0, "local_rank": 0, "cpus": "0-1", "threads": 1, "gpus": [], "start_s": {}}
    machine = {"kernels": "1a2b", "compiler": "gcc 12", "processor": "fast", "instructions": "AVX2"}
    fine |= {"device": "cpu", "versions": {"torch": "1"}, "time": 0.0, "machine": machine}
    for name in machine.keys() & changes.keys():
        fine["machine"] = fine["machine"] | {name: changes.pop(name)}
    return fine | changes


def bad(places) -> set[str]:
    """Return the names of the checks that fail."""
    return {check.name for check in doctor.check_layout(places) if not check.good}


def test_each_fault_of_a_layout_is_found_and_no_other():
    assert bad([place(), place(), place()]) == set(), "two workers and a server on two cores"
    assert bad([place(), place(versions={"torch": "2"})]) == {"versions"}
    assert bad([place(), place(time=5.0)]) == {"clocks"}
    assert bad([place(), place(), place(), place()]) == {"cores"}
    assert bad([place(), place(threads=4)]) == {"cores"}
    assert bad([place(), place(cpus="0"), place(cpus="0", node=1), place(cpus="0", node=1)]) == {"cores"}
    assert bad([place(), place(gpus=["a"])]) == {"GPUs"}
    assert bad([place(), place(kernels="none")]) == {"kernels"}
    assert bad([place(), place(), place(kernels="3c4d")]) == {"kernels"}
    assert bad([place(), place(), place(processor="old")]) == {"processors"}
    assert bad([place(), place(), place(instructions="AVX512")]) == {"processors"}
    assert bad([place(kernels="none"), place(), place()]) == set(), "it trains nothing"
    assert bad([place(processor="old"), place(), place()]) == {"processors"}, "but computes weights"


def link(a: int, b: int, rate: float = 1e9, latency: float = 1e-5, right: bool = True) -> Link:
    """Return a measured link."""
    return Link((a, b), latency, rate, right)


def test_a_link_that_is_slow_or_adds_wrongly_is_named():
    hosts, fine = ["a", "b", "c"], [link(0, 1), link(0, 2, 8e8), link(1, 2)]
    assert doctor.check_links([], hosts[:1]).good
    assert doctor.check_links(fine, hosts).good
    slow = doctor.check_links([*fine[:2], link(1, 2, 1e8)], hosts)
    assert not slow.good
    assert slow.found.endswith("3 pairs of nodes, 100 to 1000 MB/s, 10 to 10 us; slow: b - c")
    assert doctor.check_links([*fine[:2], link(1, 2, latency=2e-3)], hosts).found.endswith("slow: b - c")
    wrong = doctor.check_links([link(0, 1, right=False), *fine[1:]], hosts)
    assert not wrong.good
    assert wrong.found.endswith("wrong sums: a - b")


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_every_pair_of_nodes_meets_once_and_none_twice_at_a_time(nodes):
    rounds = list(rounds_of_pairs(nodes))
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(nodes), 2)]
    assert all(len({n for pair in pairs for n in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == (nodes - 1 if nodes % 2 == 0 else nodes if nodes > 1 else 1)


def test_the_run_that_is_to_follow_is_opened_and_its_groups_are_shown(tmp_path):
    """One process is the only worker, and hosts all 8 clients."""
    options = ["--system.hosting", "groups", "--output.folder", str(tmp_path)]
    said = []
    doctor.doctor(Single(), str(tmp_path), said.append, loader.load(str(CONFIG), options))
    assert "ok   run          tiny: 8 clients" in said[1]
    assert [line.split()[:2] for line in said[1].splitlines()[-3:-1]] == [["rank", "clients"], ["0", "8"]]
    doctor.doctor(Single(), str(tmp_path), said.append, loader.load(str(CONFIG), options[2:]))
    assert "any worker may train any" in said[3]


def test_a_run_that_cannot_begin_is_refused_after_the_job_was_shown(tmp_path):
    said = []
    config = loader.load(str(CONFIG), ["--cohort_size", "9"])
    with pytest.raises(UserError, match="cohort_size = 9"):
        doctor.doctor(Single(), str(tmp_path), said.append, config)
    assert "collectives" in said[0]


def test_one_process_is_examined(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIFL_DATA", str(tmp_path / "nowhere"))
    said = []
    assert not doctor.doctor(Single(), str(tmp_path), said.append)
    assert "BAD  data" in said[0]
    assert "put it where every node sees it" in said[0]
    assert "ok   collectives" in said[0]


def test_a_run_folder_that_cannot_be_reached_is_told_in_the_table(tmp_path):
    said = []
    assert not doctor.doctor(Single(), str(tmp_path / ("x" * 300) / "runs"), said.append)
    assert "runs: File name too long" in said[0]


@pytest.mark.nightly
def test_three_ranks_are_examined(mpirun, tmp_path):
    env = toy.PYTHONPATH | {"MPIFL_DATA": ""}
    done = mpirun(3, "-m", "mpifl", "doctor", "--runs", tmp_path, env=env, timeout=300, fresh=True)
    assert "ok   collectives  sums and rows are right" in done.stdout, done.stderr
    assert "3 ranks on 1 hosts" in done.stdout
    assert done.returncode == (1 if "BAD" in done.stdout else 0)


STANDS_STILL = """
import os, signal, sys
from mpifl import cli
from mpifl.tools import doctor
from mpifl.comm import link_test as pairs
from mpifl.comm.mpi import Mpi
doctor.LIMIT_S = 2.0
find, link = Mpi._find_nodes, pairs._link

def apart(self, parent):
    find(self, parent)
    return tuple(range(self.size))  # each rank counts as a node

def stops(transport, ranks):
    if transport.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return link(transport, ranks)

Mpi._find_nodes, pairs._link = apart, stops
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "told"), [(2, "the exchange between rank 0 on "), (3, "no word from rank 1 on ")]
)
def test_a_rank_that_does_not_answer_is_named_in_time(ranks, told, mpirun):
    """The last rank stops in its first exchange: with rank 0, or with rank 1 while rank 0 waits for both."""
    done = mpirun(ranks, "-c", STANDS_STILL, str(ranks - 1), env=toy.PYTHONPATH, timeout=300, fresh=True)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("mpifl: ")]
    assert "did not end within 2 s" in said
    assert told in said
    assert f"rank {ranks - 1} on " in said
    assert done.returncode not in (0, 2)


def test_the_data_root_is_that_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPIFL_DATA", "~/data")
    monkeypatch.chdir(tmp_path)
    said = []
    assert not doctor.doctor(Single(), str(tmp_path), said.append)
    (tmp_path / "data").mkdir()
    doctor.doctor(Single(), str(tmp_path), said.append)
    assert f"{tmp_path}/data: ranks [0] cannot read it" in said[0]
    assert f"{tmp_path}/data: all ranks read it" in said[1]
