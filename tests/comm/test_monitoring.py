"""Open MPI's monitoring counts what its parser says; the test of `mpi_traffic.csv` relies on it."""

import subprocess
import sys

import pytest

from mpifl.comm.monitoring import Count, parse_monitoring

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
