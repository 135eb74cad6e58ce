"""Every method of the catalogue gives the same bits over three ranks as alone; variants of them, nightly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi import catalogue
from support import fake_device, toy
from support.cases import CASES, OPTIONS, PARAMS, named

from mpifl.comm.single import Single

SCRIPT = Path(__file__).with_name("catalogue.py")
NAMES = [pytest.param(param.id, marks=param.marks, id=param.id) for param in PARAMS]
METHODS = "fedavg", "cfl", "ucfl", "fedbuff"
ON_GPU = [named(case) for case in CASES if case[0] in METHODS and case[1] == OPTIONS.get(case[0], {})]
ENV = {"PYTHONPATH": f"{toy.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"}


@pytest.fixture(scope="module")
def names(request) -> list[str]:
    """The cases that are asked for."""
    given = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [call.params["name"] for call in given if call is not None]


@pytest.fixture(scope="module")
def alone(names, tmp_path_factory) -> dict[str, str]:
    """Digests of one process, or tracebacks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mpifl.algorithms.flt.umap_plane", toy.plane)
        return catalogue.digests(Single(), tmp_path_factory.mktemp("runs"), names)


@pytest.fixture(scope="module")
def together(mpirun, names, alone, tmp_path_factory) -> dict[str, dict[str, str]]:
    """Digests over three ranks, of those that run alone; then some on a fake GPU."""
    sound = [name for name in names if "Error" not in alone[name]]
    arguments = tmp_path_factory.mktemp("runs"), json.dumps([[sound], [ON_GPU, "device"]])
    end = mpirun(3, SCRIPT, *arguments, timeout=900, env=ENV)
    assert end.returncode == 0, end.stderr
    plain, device = map(json.loads, end.stdout.splitlines()[-2:])
    return {"plain": plain, "device": device}


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_give_the_bits_of_one_process(name, alone, together):
    assert "Error" not in alone[name], alone[name]
    assert together["plain"][name] == alone[name]
    assert together["plain"]["lent"] == 0


def test_uploads_on_a_fake_gpu_lent_to_mpi_give_the_bits_of_one_process(together, tmp_path):
    """There they are staged through main memory."""
    with fake_device.gpu():
        alone = catalogue.digests(Single(), tmp_path, ON_GPU, "main")
    lent = dict(together["device"])
    assert (alone.pop("lent"), lent.pop("lent") > 0) == (0, True)
    assert lent == alone
    assert len(alone) == len(METHODS)
