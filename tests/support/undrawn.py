"""Sweeps draw no figure where a test file imports `undrawn`; a test may ask for `drawn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpifl.sweeps import results


@pytest.fixture
def drawn() -> None:
    """Let the sweeps of a test draw their figures."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty files in place of figures, unless the test asks for `drawn`."""

    def written(curves: Any, path: Path) -> None:
        path.write_bytes(b"")

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(results, "draw_sweep", written)
