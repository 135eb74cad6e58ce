"""Many ranks on few cores."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
from conftest import children, mpi_environment

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
RANK_BYTES, LEFT_BYTES = 175e6, 4e9  # of a rank, with its share of what all have; for others, and for tests
MOST_BYTES = 250e6  # of a rank


def proportional(launcher: int) -> list[int]:
    """Return the bytes of each rank that a launcher has, shared pages in parts (PSS)."""
    found = []
    for pid in children(launcher):
        with suppress(OSError):  # it has ended
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += [int(size) * 1024 for size in re.findall(r"^Pss: +(\d+)", text, re.M)]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [64, 128])
def test_many_ranks_have_the_digest_of_one_in_little_memory(ranks, tmp_path):
    environment = mpi_environment({"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    if shutil.which("mpirun", path=environment["PATH"]) is None:
        pytest.skip("no mpirun beside the interpreter or on the PATH")
    free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    if free < ranks * RANK_BYTES + LEFT_BYTES:
        pytest.skip(f"{ranks} ranks need {(ranks * RANK_BYTES + LEFT_BYTES) / 1e9:.0f} GB that are free")
    # bytecode of the run with one rank: compiling takes each rank three seconds, and leaves 7 MB behind
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "bytecode")
    run = [sys.executable, "-m", "mpifl", "run", TINY, "--output.folder", str(tmp_path), "-q"]
    digests, seen = {}, []
    for number in (1, ranks):
        launcher = ["mpirun", "-n", str(number)] if number > 1 else []
        with subprocess.Popen([*launcher, *run, "--output.id", str(number)], env=environment) as process:
            while process.poll() is None:
                time.sleep(2.0)
                seen.append(proportional(process.pid))
        assert process.returncode == 0
        (summary,) = tmp_path.glob(f"*-{number}/summary.json")
        digests[number] = json.loads(summary.read_text())["digest"]
    assert digests[ranks] == digests[1]
    full = [sizes for sizes in seen if len(sizes) == ranks]
    middle, most = (max(of(sizes) for sizes in full) for of in (median, max))
    print(f"{ranks} ranks: PSS {middle / 1e6:.0f} MB in the median, {most / 1e6:.0f} at the most")
    assert most < MOST_BYTES
