"""Open MPI's monitoring counts what its parser says, and mpifl's counts of MPI bytes are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from campaigns.mpi_bytes import Count, compare_counts, measure, parse_monitoring, table
from support import toy

from mpifl.comm.single import Single
from mpifl.core.errors import UserError

CAMPAIGN = Path(__file__).parent / "mpi_bytes.py"
PROGRAM = """
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
keep = []

def named(name):
    keep.append(world.Dup())  # a communicator that is freed is not written
    keep[-1].Set_name(name)
    return keep[-1]

mine, root = np.zeros(100), 1
counts = [100 + 10 * r for r in range(size)]
all_ = np.zeros(sum(counts))
part = np.zeros(counts[rank])
named("Bcast").Bcast(mine, root)
named("Reduce").Reduce(mine, np.empty(100) if rank == root else None, root=root)
named("Gatherv").Gatherv(part, [all_, counts] if rank == root else None, root)
named("Scatterv").Scatterv([all_, counts] if rank == root else None, part, root)
named("Reduce_scatter").Reduce_scatter(all_, part, counts)
named("Allreduce").Allreduce(mine, np.empty(100))
named("Barrier").Ibarrier().Wait()
named("bcast").bcast("note" if rank == root else None, root)
peer = named("Send")
if rank == 0:
    peer.Send(mine, 1)
elif rank == 1:
    peer.Recv(mine, 0)
"""


def monitored(mpirun, tmp_path, ranks: int) -> dict[str, dict]:
    """Run PROGRAM under monitoring and return what was counted."""
    options = {"enable": 2, "enable_output": 3, "filename": tmp_path / "count"}
    environment = {f"OMPI_MCA_pml_monitoring_{k}": str(v) for k, v in options.items()}
    done = mpirun(ranks, "-c", PROGRAM, env=environment)
    assert done.returncode == 0, done.stderr
    return parse_monitoring(tmp_path / "count")


@pytest.fixture(scope="module")
def open_mpi() -> None:
    """Skip where the MPI is another one."""
    ask = "from mpi4py import MPI; print(MPI.Get_library_version())"
    version = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    if not version.startswith("Open MPI"):
        pytest.skip("monitoring is Open MPI's")


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))])
@pytest.mark.usefixtures("open_mpi")
def test_bytes_of_each_collective_have_their_closed_form(mpirun, tmp_path, ranks):
    found = monitored(mpirun, tmp_path, ranks)
    counts = [100 + 10 * r for r in range(ranks)]
    others, everyone = ranks - 1, range(ranks)
    expected = {
        "Bcast": {(1, "O2A"): Count(800 * others, 1)},
        "Reduce": {(1, "A2O"): Count(800 * others, 1)},
        "Gatherv": {(1, "A2O"): Count(8 * (sum(counts) - counts[1]), 1)},
        "Scatterv": {(1, "O2A"): Count(8 * sum(counts), 1)},
        "Reduce_scatter": {(r, "A2A"): Count(8 * (sum(counts) - counts[r]), 1) for r in everyone},
        "Allreduce": {(r, "A2A"): Count(800 * others, 1) for r in everyone},
        "Barrier": {(r, "A2A"): Count(0, 1) for r in everyone},
        "bcast": {(1, "O2A"): Count((8 + len(pickled("note"))) * others, 2)},
        "Send": {},
    }
    for name, calls in expected.items():
        assert {k: v for k, v in found["communicators"][name].items() if v.calls} == calls, name
    assert found["point"] == {(0, 1): Count(800, 1)}


def pickled(note: object) -> bytes:
    """Return what mpi4py sends for a note."""
    from mpi4py import MPI

    return MPI.pickle.dumps(note)


def test_missing_files_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="MPI_Finalize"):
        parse_monitoring(tmp_path / "count")


def test_communicators_of_one_name_add_up(tmp_path):
    one = "D\tpair\tprocs: 0,1\nO2A\t0\t8 bytes\t1 msgs sent\n"
    two = "D\tpair\tprocs: 0,2\nO2A\t0\t16 bytes\t2 msgs sent\n"
    (tmp_path / "count.0.prof").write_text(f"# COLLECTIVES\n{one}{two}")
    assert parse_monitoring(tmp_path / "count")["communicators"]["pair"] == {(0, "O2A"): Count(24, 3)}


def row(rank: int, call: str, size: int) -> dict[str, str]:
    """Return a row of mpi_traffic.csv."""
    return {"rank": str(rank), "call": call, "bytes": str(size)}


def differences(rows, *counts) -> dict[str, int]:
    """Return the difference of each kind of call."""
    return {line.kind: line.difference for line in compare_counts("run", rows, counts)}


def test_a_byte_too_many_shows_as_a_difference():
    """Rank 0 sends 16 bytes to one other, which answers with 8; sums of 24 bytes come to rank 0."""
    rows = [row(0, "bcast", 16), row(1, "send", 8), row(1, "reduce", 20), row(1, "gatherv", 4)]
    zero, one = {"O2A": 16, "A2O": 24, "A2A": 0, "point": 0}, {"O2A": 0, "A2O": 0, "A2A": 0, "point": 8}
    assert differences(rows, zero, one) == {"O2A": 0, "A2O": 0, "A2A": 0, "point": 0}
    assert differences(rows, zero | {"O2A": 17}, one)["O2A"] == 1
    assert differences(rows, zero, one | {"A2A": 2})["A2A"] == 2
    lines = compare_counts("run", rows, (zero | {"A2O": 27}, one))
    assert table(lines).splitlines()[-1].split() == ["all", "48", "51", "3"]


def test_messages_are_compared_rank_by_rank():
    counts = [{"O2A": 0, "A2O": 0, "A2A": 0, "point": size} for size in (8, 0)]
    assert differences([row(1, "send", 8)], *counts)["point"] == 16


def test_one_process_sends_nothing():
    with pytest.raises(UserError, match=r"mpirun -n 3 python tests/campaigns/mpi_bytes\.py"):
        measure(Single())


@pytest.mark.nightly
def test_open_mpi_counts_the_same_bytes_of_rounds_and_of_an_asynchronous_run(mpirun):
    done = mpirun(3, str(CAMPAIGN), env=toy.PYTHONPATH, timeout=300)
    if done.returncode == 2:
        assert "only Open MPI monitors itself" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("rounds", "async", "all"))]
    assert {line[-1] for line in lines} == {"0"}
    assert len(lines) == 21
    for kind in ("broadcasts", "gathers", "exchanges", "messages"):
        assert any(line[-4] == kind and line[-3] == line[-2] != "0" for line in lines), kind
