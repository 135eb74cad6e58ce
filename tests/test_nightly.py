"""The choice of nightly tests: each has one day of seven, and a change brings those that are about it."""

from __future__ import annotations

import pytest
from support import nightly


def test_all_parameters_of_a_test_run_on_one_day_and_no_day_is_empty():
    days = [nightly.day_of(f"tests/mpi/test_{number}.py::test_it") for number in range(200)]
    assert set(days) == set(range(nightly.DAYS))
    assert nightly.day_of("tests/faults/test_a.py::test_b[1]") == nightly.day_of(
        "tests/faults/test_a.py::test_b[2]"
    )


@pytest.mark.parametrize(
    ("test", "changed", "near"),
    [
        ("tests/traffic/test_ledger.py", ["mpifl/traffic/compression.py"], True),
        ("tests/traffic/test_ledger.py", ["mpifl/simulation/clock.py"], False),
        ("tests/faults/test_deaths.py", ["mpifl/comm/mpi.py"], True),
        ("tests/faults/test_deaths.py", ["tests/faults/test_deaths.py"], True),
        ("tests/faults/test_deaths.py", ["tests/faults/test_cut.py", "docs/running.md"], False),
        ("tests/malformed/test_malformed.py", ["mpifl/cli.py"], True),
        ("tests/launchers/slurm/test_slurm.py", ["launch/job.sh"], True),
        ("tests/launchers/slurm/test_slurm.py", ["configs/async.yaml"], False),
    ],
)
def test_a_test_is_near_a_change_of_what_it_tests(test, changed, near):
    assert nightly.is_near(test, changed) is near
