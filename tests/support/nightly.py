"""Which nightly tests run after the usual ones: a seventh that rotates by date, and those near a change."""

from __future__ import annotations

import os
import subprocess
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import pytest

DAYS = 7  # a full cycle in a week
SPANNING = {  # kinds of tests that lie in a folder of their own, by the package folders that they are about
    "mpi": {"aggregation", "comm", "core", "runtime", "simulation", "traffic"},
    "faults": {"comm", "runtime"},
    "malformed": {"cli", "core"},
}
NEAR = pytest.StashKey[bool]()  # of a test that runs only because it is near a change
REPOSITORY = Path(__file__).parents[2]


def day_of(name: str) -> int:
    """Return the day, 0 to 6, of a test function `FILE::NAME`: all its parameters run on one day."""
    return zlib.crc32(name.split("[")[0].encode()) % DAYS


def today() -> int:
    """Return which day of the cycle it is, from the date in UTC."""
    return int(time.time() // 86400) % DAYS


def changed_files(hours: float) -> list[str]:
    """Return the files changed by commits of the last `hours` before the newest one, or not yet committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout

    since = int(git("log", "-1", "--format=%ct")) - round(hours * 3600)
    committed = git("log", f"--since={since}", "--name-only", "--format=")
    return sorted({*committed.split(), *git("diff", "--name-only", "HEAD").split()})


def is_near(test: str, changed: Iterable[str]) -> bool:
    """Return whether a test file is a changed one, or tests a folder of the package that has one."""
    path = PurePosixPath(test)
    room = path.parts[1]
    packages = {Path(file).parts[1].removesuffix(".py") for file in changed if file.startswith("mpifl/")}
    packages |= {"launchers" for file in changed if file.startswith("launch/")}
    return test in changed or room in packages or bool(SPANNING.get(room, set()) & packages)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the nightly tests of a day and those near a change, where options ask for it."""
    day, hours = config.getoption("--nightly-day"), config.getoption("--near-changes")
    if day is None:
        return
    changed = changed_files(hours) if hours else []
    kept, left = [], []
    for item in items:
        name = item.nodeid.replace(os.sep, "/")
        of_the_day = day_of(name) == (today() if day == "today" else int(day))
        (kept if of_the_day or is_near(name.split("::")[0], changed) else left).append(item)
        item.stash[NEAR] = not of_the_day
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def skip_when_late(item: pytest.Item) -> None:
    """Skip a test that only is near a change after MPIFL_NIGHTLY_UNTIL (seconds of the epoch)."""
    until = float(os.environ.get("MPIFL_NIGHTLY_UNTIL", "inf"))
    if item.stash.get(NEAR, False) and time.time() > until:
        pytest.skip("no time left for tests near a change: launch/nightly runs them all")


def options(parser: pytest.Parser) -> None:
    """Add the options that choose nightly tests."""
    days: Sequence[str] = ["today", *map(str, range(DAYS))]
    parser.addoption("--nightly-day", choices=days, help=f"of the nightly tests, those of a day of {DAYS}")
    parser.addoption(
        "--near-changes",
        type=float,
        default=0,
        metavar="HOURS",
        help="and those near what changed in so many hours",
    )
