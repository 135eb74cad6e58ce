"""Imports: classes in files of users, and packages that are only tried."""

from __future__ import annotations

import sys

import pytest

from mpifl.core.errors import UserError
from mpifl.core.imports import code_of, hidden, load_object


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


def test_a_file_whose_import_failed_is_imported_anew_and_not_taken_half_done(tmp_path, monkeypatch):
    """The class stands before the line that fails; the second call would find it in what was left."""
    path = tmp_path / "half.py"
    path.write_text("class Mine: pass\nimport seldom_there\n")
    for _ in range(2):
        with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
            load_object(f"{path}:Mine", "algorithm.name")
    (tmp_path / "seldom_there.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object(f"{path}:Mine", "algorithm.name").__name__ == "Mine"
    del sys.modules["seldom_there"]


def test_the_code_of_import_paths_is_that_of_their_files_loaded_or_not(tmp_path, monkeypatch):
    """Ranks load what the configuration names at different times."""
    (tmp_path / "mine_of_one.py").write_text("Own = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = f"{tmp_path}/mine_of_one.py:Own"
    before = code_of(["fedavg", path])
    assert load_object(path, "algorithm") == 1
    assert len(before) == 12
    assert code_of([path, "mine_of_one:Own", "cuda:0"]) == before, "one file, under two names"
    (tmp_path / "mine_of_one.py").write_text("Own = 2\n")
    assert code_of([path]) != before
    assert code_of(["fedavg", "mpifl.algorithms.fedavg:FedAvg", "no.such:Thing", "nowhere.py:Own"]) == ""
