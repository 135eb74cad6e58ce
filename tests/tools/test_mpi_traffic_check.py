"""mpifl's counts of MPI bytes beside the library's own, as `mpifl doctor --check-mpi-traffic` shows them."""

from __future__ import annotations

import pytest
from support import toy

from mpifl.comm.transport import Single
from mpifl.core.errors import UserError
from mpifl.tools.mpi_traffic_check import compare_counts, measure, table


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
    with pytest.raises(UserError, match="mpirun -n 3 mpifl doctor --check-mpi-traffic"):
        measure(Single())


@pytest.mark.nightly
def test_open_mpi_counts_the_same_bytes_of_rounds_and_of_an_asynchronous_run(mpirun):
    done = mpirun(3, "-m", "mpifl", "doctor", "--check-mpi-traffic", env=toy.PYTHONPATH, timeout=300)
    if done.returncode == 2:
        assert "only Open MPI monitors itself" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("rounds", "async", "all"))]
    assert {line[-1] for line in lines} == {"0"}
    assert len(lines) == 17
    for kind in ("broadcasts", "gathers", "exchanges", "messages"):
        assert any(line[-4] == kind and line[-3] == line[-2] != "0" for line in lines), kind
