"""Many ranks on few cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import mpi_environment

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


@pytest.mark.nightly
def test_64_ranks_have_the_digest_of_one_in_little_memory(tmp_path):
    """Resident memory counts the pages that ranks share in each of them: more than PSS, some 150 MB."""
    environment = mpi_environment({"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    if shutil.which("mpirun", path=environment["PATH"]) is None:
        pytest.skip("no mpirun beside the interpreter or on the PATH")
    run = [sys.executable, "-m", "mpifl", "run", TINY, "--output.folder", str(tmp_path), "-q"]
    found = {}
    for ranks in (1, 64):
        launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
        command = [*launcher, *run, "--output.id", str(ranks)]
        subprocess.run(command, env=environment, check=True, timeout=1800)
        (summary,) = tmp_path.glob(f"*-{ranks}/summary.json")
        found[ranks] = json.loads(summary.read_text())
    assert found[64]["digest"] == found[1]["digest"]
    assert sorted(found[64]["peak_bytes"])[32] < 350e6
