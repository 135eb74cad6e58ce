"""A Grid Engine for the tests of this folder; they are skipped where it cannot be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..jobs import started
from .cluster import GridEngine, missing


@pytest.fixture(scope="session")
def gridengine() -> Iterator[GridEngine]:
    """Yield two nodes of four slots (whose cores they share with all others of this machine)."""
    if why := missing():
        pytest.skip(why)
    with started("gridengine", lambda folder, own: GridEngine(folder, 2, 4, own), "SGE_") as cluster:
        yield cluster
