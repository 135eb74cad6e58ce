"""Every method of the catalogue gives the same bits over three ranks as alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import worlds
from support.cases import CASES, OPTIONS, named

SCRIPT = Path(__file__).with_name("catalogue.py")
ON_GPU = {"fedavg", "cfl", "ucfl", "fedbuff"}
ENV = {"PYTHONPATH": f"{worlds.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"}


@pytest.fixture(scope="module")
def digests(mpirun, tmp_path_factory):
    """Return a function ranks, cases, memory -> digest of each case; for `memory` see the script."""

    def of(ranks: int | None, cases: list[str], *memory: str) -> dict[str, str]:
        arguments = tmp_path_factory.mktemp("runs"), json.dumps(cases), *memory
        end = mpirun(ranks, SCRIPT, *arguments, timeout=900, env=ENV)
        assert end.returncode == 0, end.stderr
        return json.loads(end.stdout.splitlines()[-1])

    return of


@pytest.fixture(scope="module")
def alone(digests) -> dict[str, str]:
    """Digests of one process, or tracebacks."""
    return digests(None, [named(case) for case in CASES])


@pytest.fixture(scope="module")
def together(digests, alone) -> dict[str, str]:
    """Digests over three ranks, of those that run alone."""
    names = [named(case) for case in CASES]
    return digests(3, [name for name in names if "Error" not in alone[name]])


@pytest.mark.parametrize("name", [named(case) for case in CASES])
def test_three_ranks_give_the_bits_of_one_process(name, alone, together):
    assert "Error" not in alone[name], alone[name]
    assert together[name] == alone[name]


def test_uploads_on_a_pretended_gpu_lent_to_mpi_give_the_bits_of_one_process(digests):
    names = [named(case) for case in CASES if case[0] in ON_GPU and case[1] == OPTIONS.get(case[0], {})]
    alone, together = (digests(*where) for where in ((None, names, "main"), (3, names, "device")))
    assert (alone.pop("lent"), together.pop("lent") > 0) == (0, True)
    assert together == alone
    assert len(alone) == len(ON_GPU)
