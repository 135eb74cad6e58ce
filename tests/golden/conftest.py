"""An option that writes the golden files anew: `pytest tests/golden --regolden`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --regolden."""
    parser.addoption("--regolden", action="store_true", help="write the golden files anew")
