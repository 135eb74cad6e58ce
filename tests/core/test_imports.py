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


HELPED = """
import json, torch
from helper_of_one import number
class Own:
    def of(self):
        from parts_of_one.deep import more
        return number() + more()
"""


@pytest.fixture
def helped(tmp_path, monkeypatch):
    """A class whose file imports a module, a package and a module of it from its own folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "parts_of_one"
    package.mkdir()
    (package / "__init__.py").write_text("from . import wide\n")
    (package / "wide.py").write_text("TWO = 2\n")
    (package / "deep.py").write_text("from .wide import TWO\ndef more(): return TWO\n")
    (tmp_path / "helper_of_one.py").write_text("import json\ndef number(): return 1\n")
    (tmp_path / "other.py").write_text("import helper_of_one\n")
    (tmp_path / "helped.py").write_text(HELPED)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("helper_of_one", "parts_of_one")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["helper_of_one.py", "parts_of_one/__init__.py", "parts_of_one/wide.py", "parts_of_one/deep.py"]
)
def test_own_code_counts_the_modules_that_a_file_imports_from_its_folder(name, helped):
    path = f"{helped}/helped.py:Own"
    before = code_of([path])
    (helped / "other.py").write_text("import nothing_of_it\n")
    assert load_object(path, "algorithm")().of() == 3
    assert code_of([path]) == before, "loaded or not, and whatever else lies there"
    (helped / name).write_text((helped / name).read_text() + "\n")
    assert code_of([path]) != before


def test_own_code_of_a_module_in_a_package_counts_its_neighbours(helped, monkeypatch):
    monkeypatch.syspath_prepend(str(helped))
    before = code_of(["parts_of_one.deep:more"])
    (helped / "parts_of_one" / "wide.py").write_text("TWO = 3\n")
    assert code_of(["parts_of_one.deep:more"]) != before


def test_a_file_whose_helper_was_edited_is_imported_anew(helped):
    path = f"{helped}/helped.py:Own"
    first = load_object(path, "algorithm")
    assert first().of() == 3
    assert load_object(path, "algorithm") is first
    (helped / "parts_of_one" / "wide.py").write_text("TWO = 20\n")
    assert load_object(path, "algorithm")().of() == 21


def test_helpers_of_one_name_in_two_folders_are_told_apart(helped, tmp_path):
    (other := tmp_path / "elsewhere").mkdir()
    (other / "helper_of_one.py").write_text("def number(): return 10\n")
    (other / "mine.py").write_text("from helper_of_one import number\n")
    for _ in range(2):
        assert load_object(f"{helped}/helped.py:Own", "algorithm")().of() == 3
        assert load_object(f"{other}/mine.py:number", "algorithm")() == 10


def test_a_helper_with_the_name_of_a_module_in_use_is_refused(tmp_path):
    (tmp_path / "json.py").touch()
    (tmp_path / "mine.py").write_text("import json\nX = 1\n")
    with pytest.raises(UserError, match=r"mine.py:X': imports json, .*; rename json.py"):
        load_object(f"{tmp_path}/mine.py:X", "algorithm")


def test_modules_that_import_each_other_are_counted_once(tmp_path):
    (tmp_path / "a.py").write_text("import b\nX = 1\n")
    (tmp_path / "b.py").write_text("import a\n")
    (tmp_path / "c.py").write_text("not python\n")
    (tmp_path / "d.py").write_text("import c\n")
    assert len(code_of([f"{tmp_path}/a.py:X"])) == len(code_of([f"{tmp_path}/d.py:X"])) == 12
