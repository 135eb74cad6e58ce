"""The C kernels under the address and undefined-behaviour sanitizers of gcc (nightly; minutes).

A copy of mpifl is built with both, and the tests of the kernels run on it, with generated networks. PyTorch
itself is not instrumented.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpifl.kernels import bindings

ROOT = Path(__file__).parents[2]
GCC = shutil.which("gcc")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
TESTS = "test_bindings.py", "test_network.py", "test_pooling.py", "test_wide_layers.py", "test_exact_sum.py"
LEFT_OUT = "not warning and not left_to_pytorch and not where_there_is_a_compiler"  # no kernel runs in these
EXAMPLES, LIMIT_S = "300", 3600
BEYOND = """
import torch
from mpifl.kernels import bindings
x = torch.ones(1000)
bindings.call("max_abs", x.data_ptr(), x.numel() + {more})
"""


def library(name: str) -> str:
    """Return where gcc has a library, empty where it has none."""
    asked = [str(GCC), f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if GCC else ""
    return found if os.path.isabs(found) else ""


pytestmark = [
    pytest.mark.nightly(seconds=90),
    pytest.mark.skipif(not library("libasan.so"), reason="no gcc with sanitizers"),
    pytest.mark.skipif(not bindings.hash_of_sources(), reason="no sources beside mpifl"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the repository whose kernels are built with the sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("mpifl", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=built)
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "CFLAGS": FLAGS}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("mpifl/kernels/*.so"))) == len(bindings.LIBRARIES), done.stderr
    return folder


def run(copy: Path, *arguments: str) -> tuple[int, str]:
    """Run Python on the copy; return its exit code and what the sanitizers said."""
    for old in copy.glob("said.*"):
        old.unlink()
    log = f"log_path={copy / 'said'}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": f"detect_leaks=0:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
        "MPIFL_EXAMPLES": EXAMPLES,
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    said = "".join(file.read_text() for file in sorted(copy.glob("said.*")))
    print(done.stdout[-2000:])
    return done.returncode, said or done.stderr[-2000:] * (done.returncode != 0)


def test_the_sanitizers_see_a_number_read_beyond_the_end(copy):
    assert run(copy, "-c", BEYOND.format(more=0)) == (0, "")
    code, said = run(copy, "-c", BEYOND.format(more=1))
    assert code != 0
    assert "heap-buffer-overflow" in said
    assert "max_abs" in said


def test_the_tests_of_the_kernels_are_clean(copy):
    tests = [str(next(copy.glob(f"tests/*/{name}"))) for name in TESTS]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", LEFT_OUT]
    assert run(copy, "-m", "pytest", *options, *tests) == (0, "")
