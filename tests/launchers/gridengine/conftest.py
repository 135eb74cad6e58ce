"""A Grid Engine for the tests of this folder; they are skipped where it cannot be started."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import GridEngine, missing

HERE = Path(__file__).parent
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


@pytest.fixture(scope="session")
def gridengine() -> Iterator[GridEngine]:
    """Yield two nodes of four slots (whose cores they share with all others of this machine)."""
    if why := missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="gridengine-", dir="/var/tmp"))
    folder.chmod(0o755)
    foreign = ("SGE_", "OMPI_", "PRTE_", "PMIX_", "MPIFL_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    cluster = GridEngine(folder, 2, 4, environment | OPEN_MPI | {"OMP_NUM_THREADS": "1"})
    for name in ("sleepy.py", "sleepy.yaml"):
        shutil.copy(HERE.parent / "slurm" / name, cluster.jobs)
    try:
        yield cluster
    finally:
        cluster.close()
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder, ignore_errors=True)
