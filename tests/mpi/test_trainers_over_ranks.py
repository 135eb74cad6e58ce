"""Runs with trainers: the same digest, bytes and FLOPs on any number of ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mpi.trainers import METHODS, TRAINERS, all_found
from support import toy

from mpifl.comm.single import Single
from mpifl.core.parameters import Layout

SCRIPT = Path(__file__).with_name("trainers.py")
FEW = ["fedavg-torch", "ditto-own"]  # Lightning, which takes seconds to import on every rank, is nightly
ALL = [f"{method}-{trainer}" for trainer in TRAINERS for method in METHODS]
if find_spec("lightning") is None:
    ALL = [case for case in ALL if not case.endswith("-lightning")]
PATH = {"PYTHONPATH": f"{toy.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(3, FEW, id="3 ranks, few"),
        *(pytest.param(p, ALL, id=f"{p} ranks", marks=pytest.mark.nightly) for p in (2, 3)),
    ],
)
def test_a_run_does_not_depend_on_the_ranks(ranks, cases, mpirun, tmp_path):
    file = tmp_path / "found.json"
    end = mpirun(ranks, SCRIPT, file, *cases, env=PATH, timeout=900)
    assert end.returncode == 0, end.stderr
    there, alone = json.loads(file.read_text()), all_found(cases, Single())
    assert there == alone
    for method in {case.partition("-")[0] for case in cases}:  # each trainer has its own numbers
        digests = [found["digest"] for case, found in there.items() if case.startswith(f"{method}-")]
        assert len({*digests}) == len(digests), method


def test_bytes_follow_from_the_model_alone():
    """Two rounds of FedAvg with 8 clients: 16 models of 4 bytes a number each way."""
    found: dict[str, Any] = all_found(["fedavg-torch", "fedavg-own"], Single())
    size = Layout.of(toy.mlp(12).build((1, 8, 8), 10)).size
    for one in found.values():
        assert one["federation_bytes_down"] == 2 * 8 * 4 * size
        assert one["federation_bytes_up"] == 2 * 8 * 4 * size
