"""Every method of the catalogue gives the same bits over three ranks as alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import worlds
from cases import CASES, named

SCRIPT = Path(__file__).with_name("catalogue.py")
ENV = {"PYTHONPATH": f"{worlds.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"}


@pytest.fixture(scope="module")
def digests(mpirun, tmp_path_factory):
    """Return a function ranks, cases -> digest of each case."""

    def of(ranks: int | None, cases: list[str]) -> dict[str, str]:
        end = mpirun(ranks, SCRIPT, tmp_path_factory.mktemp("runs"), json.dumps(cases), timeout=900, env=ENV)
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
    return digests(3, [name for name, digest in alone.items() if "Error" not in digest])


@pytest.mark.parametrize("name", [named(case) for case in CASES])
def test_three_ranks_give_the_bits_of_one_process(name, alone, together):
    assert "Error" not in alone[name], alone[name]
    assert together[name] == alone[name]
