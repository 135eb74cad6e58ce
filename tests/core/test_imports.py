"""Imports that a package only tries."""

from __future__ import annotations

import sys

import pytest

from mpifl.core.imports import hidden


def test_a_hidden_package_cannot_be_imported_until_the_block_ends(tmp_path, monkeypatch):
    (tmp_path / "seldom.py").write_text("NUMBER = 3")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("seldom", "json"):
        import json

        with pytest.raises(ImportError):
            import seldom
    import seldom

    assert (seldom.NUMBER, json) == (3, sys.modules["json"])
    del sys.modules["seldom"]
