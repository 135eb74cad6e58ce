"""Imports that wait until a module is used."""

from __future__ import annotations

import builtins
import sys

import pytest

from mpifl.core.lazy_imports import defer


def test_a_deferred_module_is_imported_when_our_code_uses_it_and_at_once_by_other_code(tmp_path, monkeypatch):
    package = tmp_path / "rarely"
    package.mkdir()
    (package / "__init__.py").write_text("from . import used\nNUMBER = 3")
    (package / "used.py").write_text("NUMBER = 4")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    defer("rarely", "rarely.used")
    ours = {"__name__": "mpifl.new"}
    exec("import rarely; from rarely import used; from rarely import used as u", ours)
    assert "rarely" not in sys.modules
    assert (ours["used"].NUMBER, ours["rarely"].NUMBER, ours["u"].NUMBER) == (4, 3, 4)
    theirs = {"__name__": "users_own"}
    exec("import rarely; from rarely import used", theirs)
    assert (theirs["rarely"], theirs["used"]) == (sys.modules["rarely"], sys.modules["rarely.used"])
    nameless: dict[str, object] = {}
    exec("import rarely", nameless)
    assert nameless["rarely"] is sys.modules["rarely"]
    exec("from rarely import NUMBER", ours)
    assert ours["NUMBER"] == 3
    with pytest.raises(AttributeError, match="SELDOM"):
        ours["rarely"].SELDOM  # noqa: B018
    for name in ("rarely", "rarely.used"):
        del sys.modules[name]
