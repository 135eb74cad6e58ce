"""The planted bugs still apply, and a sample of them is killed (nightly).

All of them: `python tests/mutation/run.py`.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mutation import run

BUGS = run.load()
AREAS = sorted({bug.area for bug in BUGS})
SAMPLE = 12
IN_C = 4  # one of so many bugs in C is in the sample
CC = shutil.which("gcc") or shutil.which("cc")


@pytest.mark.parametrize("area", AREAS)
def test_every_bug_of_an_area_applies(area):
    """Its old text occurs once, and its tests exist."""
    for bug in (bug for bug in BUGS if bug.area == area):
        bug.planted((run.ROOT / bug.file).read_text())
        assert bug.old != bug.new, bug.name
        assert bug.kind in run.KINDS, bug.name
        assert bug.why, bug.name
        paths = [run.ROOT / part.partition("::")[0] for part in bug.tests if part.startswith("tests")]
        assert paths, bug.name
        assert all(path.exists() for path in paths), bug.name


@pytest.mark.nightly(spread=True)
@pytest.mark.parametrize("area", AREAS)
def test_every_bug_of_an_area_can_be_parsed(area):
    """A bug that cannot is killed by any test, in the campaign."""
    for bug in (bug for bug in BUGS if bug.area == area and bug.file.endswith(".py")):
        ast.parse(bug.planted((run.ROOT / bug.file).read_text()))


def test_there_are_enough_bugs_of_both_kinds_and_no_two_of_one_name():
    assert len(BUGS) >= 110
    kinds = Counter(bug.kind for bug in BUGS)
    assert min(kinds[kind] for kind in run.KINDS) >= 45
    assert max(Counter(bug.name for bug in BUGS).values()) == 1


def test_a_text_that_occurs_twice_is_no_bug():
    bug = run.Bug("x", "twice", "hole", "a.py", "n = 1\n", "n = 2\n", "why", ("tests",))
    assert bug.planted("n = 1\n") == "n = 2\n"
    for text in ("", "n = 1\nn = 1\n"):
        with pytest.raises(ValueError, match="occurs"):
            bug.planted(text)


def test_files_named_after_a_bugs_own_come_first():
    bug = run.Bug("x", "b", "hole", "mpifl/core/rng.py", "o", "n", "w", ("tests/core", "tests/aggregation"))
    assert bug.stages == [("tests/core/test_rng.py",), ("tests/core",), ("tests/aggregation",)]


@pytest.mark.parametrize(
    ("codes", "expected"), [([1, run.PASSED], "killed"), ([run.PASSED], "survived"), ([1, 1], None)]
)
def test_a_test_that_fails_without_the_bug_sees_nothing(codes, expected, tmp_path, monkeypatch):
    """It fails with the bug, and then without; which tests were asked for the second time."""
    (tmp_path / "a.py").write_text("n = 1\n")
    bug, asked = run.Bug("x", "b", "hole", "a.py", "n = 1", "n = 2", "w", ("tests/core",)), []
    copy = run.Copy.__new__(run.Copy)
    copy.folder = tmp_path

    def pretended(self, tests, limit):
        asked.append((list(tests), (tmp_path / "a.py").read_text()))
        return codes[len(asked) - 1], "FAILED tests/core/test_a.py::test_b[one two] - AssertionError\n"

    monkeypatch.setattr(run.Copy, "run", pretended)
    if expected is None:
        with pytest.raises(ValueError, match="fail without the bug, too"):
            copy.evaluate(bug, 1.0, True)
    else:
        assert copy.evaluate(bug, 1.0, True).verdict == expected
    again = [(["tests/core/test_a.py::test_b"], "n = 1\n")] * (len(codes) - 1)
    assert asked == [(["tests/core"], "n = 2\n"), *again]


def test_every_bug_outside_python_is_compiled():
    others = [bug for bug in BUGS if not bug.file.endswith(".py")]
    assert all(bug.compiled for bug in others)
    assert len({Path(bug.file).suffix for bug in others}) > 2


C_BUG = run.Bug("x", "b", "hole", "mpifl/a.c", "n = 1", "n = 2", "w", ("tests/core",))


def copy_with_a_library(folder):
    copy = run.Copy.__new__(run.Copy)
    copy.folder = folder
    (folder / "mpifl" / "deep").mkdir(parents=True)
    (folder / "mpifl" / "a.c").write_text("n = 1\n")
    (folder / "mpifl" / "deep" / "a.so").write_text("1")
    return copy


def test_a_bug_in_c_is_in_the_library_while_its_tests_run_and_not_afterwards(tmp_path, monkeypatch):
    copy, seen = copy_with_a_library(tmp_path), []
    library = tmp_path / "mpifl" / "deep" / "a.so"

    def build(self):
        library.unlink()
        library.write_text("2")
        os.utime(library, ns=(1, 1))
        return 0, ""

    def pretended(self, tests, limit):
        seen.append(library.read_text())
        return (
            1 if seen[-1] == "2" else run.PASSED
        ), "FAILED tests/core/test_a.py::test_b - AssertionError\n"

    monkeypatch.setattr(run.Copy, "_build", build)
    monkeypatch.setattr(run.Copy, "run", pretended)
    assert copy.evaluate(C_BUG, 1.0, True).by == "tests/core/test_a.py::test_b"
    assert seen == ["2", "1"]


@pytest.mark.parametrize(
    ("built", "message"), [((1, "no such type"), "no such type"), ((0, ""), "no library")]
)
def test_a_bug_in_c_that_gives_no_library_is_no_bug(built, message, tmp_path, monkeypatch):
    copy = copy_with_a_library(tmp_path)
    monkeypatch.setattr(run.Copy, "_build", lambda self: built)
    with pytest.raises(ValueError, match=f"x/b: {message}"):
        copy.evaluate(C_BUG, 1.0, True)


def test_the_table_counts_by_area_and_kind():
    def outcome(area: str, kind: str, verdict: str) -> run.Outcome:
        return run.Outcome(run.Bug(area, "n", kind, "f", "o", "n", "w", ("t",)), verdict, "", 0.0)

    found = [
        outcome("a", "hole", "killed"),
        outcome("a", "hole", "survived"),
        outcome("b", "textbook", "killed"),
    ]
    assert run.table(found).splitlines()[2:] == [
        "| a |  | 1 of 2 | 1 of 2 |",
        "| b | 1 of 1 |  | 1 of 1 |",
        "| all | 1 of 1 | 1 of 2 | 2 of 3 |",
    ]


def test_the_first_test_that_failed_is_named():
    assert run.killer(1, "....\nFAILED tests/a.py::test_b - AssertionError\n") == "tests/a.py::test_b"
    assert run.killer(None, "") == "no end in time"
    assert run.killer(run.PASSED, "") == ""


@pytest.mark.nightly(seconds=240)
def test_a_sample_of_the_bugs_is_killed():
    seen = [bug for bug in BUGS if not bug.survives and not bug.compiled]
    chosen = [seen[i] for i in np.random.default_rng(0).choice(len(seen), SAMPLE, replace=False)]
    if CC is not None:
        chosen += [bug for bug in BUGS if bug.compiled and not bug.survives][::IN_C]
    outcomes = run.evaluate(chosen, say=lambda line: None)
    assert [o.bug.name for o in outcomes if o.verdict == "survived"] == []
