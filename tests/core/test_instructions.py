"""Which vector instructions the libraries compute with: limited, said, refused where they are not kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support import toy

from mpifl.core import instructions
from mpifl.core.errors import UserError
from mpifl.core.instructions import LIMITS, VARIABLE
from mpifl.results.identity import machine

HERE = torch.backends.cpu.get_cpu_capability()
AVX2 = pytest.mark.skipif(not HERE.startswith("AVX"), reason=f"the processor has {HERE}, no AVX2")
WIDER = pytest.mark.skipif(HERE != "AVX512", reason=f"nothing to limit: the processor has {HERE}")
ASK = """
import json
{imports}
from mpifl.core import instructions
from mpifl.core.errors import UserError
try:
    instructions.check()
    print(json.dumps([instructions.in_use(), instructions._of_numpy()]))
except UserError as error:
    print(json.dumps([str(error)]))
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch) -> None:
    for name in (VARIABLE, *LIMITS["avx2"], *instructions.OTHERS):
        monkeypatch.setenv(name, "")  # so that it is taken back after the test, whoever sets it
        monkeypatch.delenv(name)


def asked(imports: str = "", **variables: str) -> list[str]:
    """Return what a process with these variables uses: of PyTorch, with variables, and of NumPy."""
    strict = ["-W", "error", "-W", "ignore::ImportWarning"]
    command = [sys.executable, *strict, "-c", ASK.format(imports=imports)]
    environment = {**os.environ, **toy.PYTHONPATH, **variables}
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def test_without_a_limit_the_widest_are_used():
    assert instructions.in_use() == HERE
    assert instructions.variables() == ""
    assert "library_variables" not in machine()
    instructions.check()


@pytest.mark.in_turn
@AVX2
def test_a_limit_holds_in_pytorch_and_in_numpy():
    of_pytorch, of_numpy = asked(MPIFL_INSTRUCTIONS="avx2")
    assert of_pytorch == "AVX2 (MPIFL_INSTRUCTIONS)"
    assert of_numpy in ("X86_V3", "AVX2", "FMA3__AVX2")


@WIDER
def test_a_limit_that_comes_after_numpy_is_refused():
    (line,) = asked("import numpy, torch", MPIFL_INSTRUCTIONS="avx2")
    said = "MPIFL_INSTRUCTIONS = 'avx2': PyTorch uses AVX2 and NumPy uses X86_V4: import mpifl before them"
    assert line.startswith(said)


def test_bad_limits_are_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "avx3")
    with pytest.raises(UserError, match=r"^MPIFL_INSTRUCTIONS = 'avx3': use avx2, or unset it$"):
        instructions.check()
    monkeypatch.setenv(VARIABLE, "avx2")
    with pytest.raises(UserError, match=r"^MPIFL_INSTRUCTIONS = 'avx2': set it before mpifl is imported$"):
        instructions.check()
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    instructions.limit()
    with pytest.raises(UserError, match=r"^OPENBLAS_CORETYPE = 'Zen': MPIFL_INSTRUCTIONS=avx2 makes it"):
        instructions.check()


def test_variables_of_the_libraries_are_said(monkeypatch):
    """They change last bits: with one of them `numpy.exp` rounds otherwise, and PyTorch is as it was."""
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "X86_V4")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert instructions.variables() == "NPY_DISABLE_CPU_FEATURES=X86_V4, MKL_CBWR=AVX2"
    assert machine()["library_variables"] == "NPY_DISABLE_CPU_FEATURES=X86_V4, MKL_CBWR=AVX2"
    monkeypatch.setenv("MKL_CBWR", "\udcff")  # a byte that is no UTF-8: a report is written in UTF-8
    assert instructions.variables() == "NPY_DISABLE_CPU_FEATURES=X86_V4, MKL_CBWR=\\udcff"
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.delenv("NPY_DISABLE_CPU_FEATURES")
    monkeypatch.setenv(VARIABLE, "avx2")
    instructions.limit()
    assert (instructions.in_use(), instructions.variables()) == (
        f"{HERE} (MPIFL_INSTRUCTIONS)",
        "MKL_CBWR=AVX2",
    )
    for name in LIMITS["avx2"]:
        assert os.environ.pop(name) == LIMITS["avx2"][name]
