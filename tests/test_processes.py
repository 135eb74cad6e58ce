"""`pytest -n 2`: tests in processes that are forked after the tests have been collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import os
import pytest
from support import processes

def pytest_addoption(parser):
    processes.options(parser)

def pytest_runtestloop(session):
    return processes.run(session)

@pytest.fixture(scope="session")
def place():
    yield os.getpid()
    print("the end of", os.getpid())
"""
FIRST = """
import os, warnings

def test_passes(place, tmp_path):
    assert not [*tmp_path.iterdir()]

def test_dies(place):
    os._exit(3)

def test_warns(place):
    warnings.warn("beware", DeprecationWarning)

def test_fails(place):
    print("in", place)
    assert {"a": 1} == {"a": 2}
"""
SECOND = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_passes(place, tmp_path, n):
    assert not [*tmp_path.iterdir()]

@pytest.mark.skip(reason="for no reason")
def test_is_skipped():
    assert False
"""


@pytest.fixture
def session(tmp_path):
    """Return a function that runs those tests with options, and returns exit code and what is said."""
    for name, text in (("conftest", CONFTEST), ("test_first", FIRST), ("test_second", SECOND)):
        (tmp_path / f"{name}.py").write_text(text)

    def run(*options: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-rfs",
            *options,
        ]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        own = ["--basetemp", str(tmp_path / "base"), "-c", os.devnull, "--rootdir", str(tmp_path)]
        done = subprocess.run([*command, *own], cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


def test_every_test_is_reported_also_one_whose_process_ends(session):
    code, said = session("-n", "2", "--durations=2", "-vv")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 4 passed, 1 skipped, 1 warning" in said
    assert "FAILED test_first.py::test_dies - the process of this test ended with exit code 3" in said
    assert "FAILED test_first.py::test_fails - AssertionError: assert {'a': 1} == {'a': 2}" in said
    assert "SKIPPED [1] test_second.py:8: for no reason" in said
    assert "DeprecationWarning: beware" in said
    assert "slowest 2 durations" in said
    (place,) = (line for line in said.splitlines() if line.startswith("in "))
    assert place.replace("in", "the end of") in said, "fixtures of the session have their end"


@pytest.mark.parametrize(
    ("options", "outcomes"),
    [(("-k", "passes"), "3 passed, 4 deselected"), (("-x", "-k", "fails or warns"), "1 failed, 1 passed")],
)
def test_options_choose_and_end_as_in_one_process(session, options, outcomes):
    code, said = session("-n", "2", *options)
    assert outcomes in said
    assert code == int("failed" in outcomes)
    assert ("stopping after 1 failures" in said) == ("-x" in options)
