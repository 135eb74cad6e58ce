"""A Slurm for the tests of this folder; they are skipped where it cannot be started."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .cluster import Slurm, missing

HERE = Path(__file__).parent
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@contextmanager
def started(nodes: int, cores: int, **options: bool) -> Iterator[Slurm]:
    """Start a Slurm, and end it; its jobs run the package of this checkout."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
    folder.chmod(0o755)
    foreign = ("SLURM", "OMPI_", "PRTE_", "PMIX_", "MPIFL_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    environment |= OPEN_MPI | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2])}
    try:
        cluster = Slurm(folder, nodes, cores, environment, **options)
        try:
            for name in ("sleepy.py", "sleepy.yaml"):
                shutil.copy(HERE / name, cluster.jobs)
            yield cluster
        finally:
            cluster.close()
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Yield two nodes of four cores (which they share with all others of this machine)."""
    if why := missing():
        pytest.skip(why)
    with started(2, 4) as cluster:
        yield cluster
