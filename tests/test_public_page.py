"""`import mpifl`: the public names, and nothing heavy before one is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mpifl
from mpifl.core import mixing

TINY = str(Path(__file__).parent / "configs" / "tiny.yaml")
BUILDERS = {"add", "average", "blend", "by_cluster", "carry", "componentwise", "in_turn", "own_rows", "rows"}
NAMES = {
    *("__version__", "run", "resume", "load", "load_config", "load_run", "Config", "Run", "UserError"),
    *(
        "Algorithm",
        "Client",
        "Mixing",
        "Plan",
        "sample_weights",
        "Sweep",
        "sweep",
        "load_sweep",
        "client_data",
    ),
    *("compare", "table", "STOP", "CodeFailed", "Stopped", "Fit", "FitContext", "Samples", "Trainer"),
}


def test_the_public_page_is_this():
    assert set(mpifl.__all__) == set(dir(mpifl)) == NAMES | BUILDERS
    assert all(getattr(mpifl, name) is not None for name in mpifl.__all__)
    assert all(getattr(mpifl, name) is getattr(mixing, name) for name in BUILDERS)
    with pytest.raises(AttributeError, match="no attribute 'algorithms_'"):
        mpifl.algorithms_  # noqa: B018


def test_importing_the_package_imports_nothing_else():
    program = (
        "import sys, mpifl; print([m for m in sys.modules if m.startswith(('torch', 'numpy', 'mpifl.'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_from_python_is_that_of_the_command_line(tmp_path):
    config = mpifl.load_config(TINY, ["--output.folder", str(tmp_path)])
    one = mpifl.run(config, output={"id": "one"})
    two = mpifl.run(TINY, output={"id": "two", "folder": str(tmp_path)})
    assert one.folder == tmp_path / "tiny-one"
    assert one.summary["digest"] == two.summary["digest"]
    assert mpifl.load_run(one.folder).summary == one.summary
    assert len(one.metrics["accuracy_mean"]) >= 1


def test_bad_changes_name_the_key(tmp_path):
    with pytest.raises(mpifl.UserError, match=r"local\.epoch = 1: unknown key; did you mean 'epochs'"):
        mpifl.run(TINY, local={"epoch": 1}, output={"folder": str(tmp_path)})
