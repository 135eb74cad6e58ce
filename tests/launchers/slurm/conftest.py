"""A Slurm for the tests of this folder; they are skipped where it cannot be started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from ..jobs import started
from .cluster import Slurm, missing


def started_slurm(nodes: int, cores: int, **options: bool) -> AbstractContextManager[Slurm]:
    """Start a Slurm with nodes of some cores, and end it; options are those of `Slurm`."""
    return started(
        "slurm",
        lambda folder, environment: Slurm(folder, nodes, cores, environment, **options),
        "SLURM",
        PRTE_MCA_hwloc_default_binding_policy="none",
    )


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Yield two nodes of four cores (which they share with all others of this machine)."""
    if why := missing():
        pytest.skip(why)
    with started_slurm(2, 4) as cluster:
        yield cluster
