"""Which tests run: all usual ones or those of a day of four; of nightly ones those of a day of fourteen.

Tests near a change run on any day.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

TURNS = 4  # days of a full cycle of the usual tests
DAYS = 14  # and of the nightly ones
NEAR_SHARE = 2 / 3  # of the time: those of the day come first
SECONDS = 10.0  # on two cores, of a test whose mark names no more: nightly(seconds=60)
LATE = "no time left: launch/nightly runs all tests"
SPANNING = {  # kinds of tests that lie in a folder of their own, by the package folders that they are about
    "mpi": {"aggregation", "comm", "core", "runtime", "simulation", "traffic"},
    "faults": {"comm", "runtime"},
    "malformed": {"cli", "core"},
}
NEAR = pytest.StashKey[bool]()  # of a test that runs only because it is near a change
OTHER_DAYS = pytest.StashKey[int]()  # how many usual tests have their turn on another day
BEGIN = pytest.StashKey[float]()  # of the session, in seconds of the epoch
REPOSITORY = Path(__file__).parents[2]
TESTPATHS = pytest.Config.ArgsSource.TESTPATHS


def day_of(name: str) -> int:
    """Return the day, from 0, of the tests of a name."""
    return zlib.crc32(name.encode()) % DAYS


def name_of(item: pytest.Item) -> str:
    """Return what a test has in common with those that run on its day.

    Tests with one parameter of a fixture of their file share its set-up, and run on one day; otherwise all
    parameters of a function do, unless its mark is `nightly(spread=True)`.
    """
    name = item.nodeid.replace(os.sep, "/")
    marker, call = item.get_closest_marker("nightly"), getattr(item, "callspec", None)
    if marker is not None and marker.kwargs.get("spread"):
        return name
    wide = [arg for arg, scope in getattr(call, "_arg2scope", {}).items() if scope.value != "function"]
    if call is not None and wide:
        return f"{name.split('::')[0]}::{[call.params[arg] for arg in sorted(wide)]}"
    return name.split("[")[0]


def mostly_nightly(
    cases: Iterable[Any], usual: Collection[Any], name: Callable[[Any], str] | None = None
) -> list[Any]:
    """Return cases for `parametrize`: those of `usual` run always, each of the others on its own night.

    Args:
        cases: of one argument.
        usual: cases, or their names.
        name: of a case; its text by default.

    Raises:
        ValueError: what is usual is no case.
    """
    listed, name = [*cases], name or str
    if unknown := [one for one in usual if one not in listed and one not in map(name, listed)]:
        raise ValueError(f"no cases: {unknown}")
    night = pytest.mark.nightly(spread=True)
    return [
        pytest.param(one, id=name(one), marks=[night] * (one not in usual and name(one) not in usual))
        for one in listed
    ]


def covering(*lists: Sequence[Any], ids: Callable[[Any], str] = str) -> list[Any]:
    """Return all combinations as cases of several arguments; the others than these few are nightly.

    As many as the longest list has values run always, and each value of each list occurs in one of them (in
    as many as there are places for).
    """
    most, usual = max(map(len, lists)), set[tuple[int, ...]]()
    longest = max(range(len(lists)), key=lambda place: len(lists[place]))
    for number in range(most):
        stride, chosen = 1, []
        for place, values in enumerate(lists):
            chosen.append(number if place == longest else number // stride % len(values))
            stride *= 1 if place == longest else len(values)
        usual.add(tuple(chosen))
    night = pytest.mark.nightly(spread=True)
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, places, strict=True)),
            id="-".join(ids(values[i]) for values, i in zip(lists, places, strict=True)),
            marks=[night] * (places not in usual),
        )
        for places in product(*(range(len(values)) for values in lists))
    ]


def date() -> int:
    """Return the number of days since the epoch, in UTC."""
    return int(time.time() // 86400)


def today() -> tuple[int, int]:
    """Return the number of the cycle and the day of it."""
    return divmod(date(), DAYS)


def file_of(item: pytest.Item) -> str:
    """Return the path of the file of a test, from the root."""
    return item.nodeid.replace(os.sep, "/").split("::")[0]


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
    asked, hours = config.getoption("--nightly-day"), config.getoption("--near-changes")
    if asked is None:
        return
    day = today()[1] if asked == "today" else int(asked)
    changed = changed_files(hours) if hours else []
    kept, left = [], []
    for item in items:
        of_the_day = day_of(name_of(item)) == day
        near = is_near(file_of(item), changed)
        (kept if of_the_day or near else left).append(item)
        item.stash[NEAR] = not of_the_day
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the usual tests of a day of `TURNS`, and those near a change, where an option asks for it.

    A function with several cases runs with some of them, and each of them has its turn. Functions whose mark
    is `in_turn` run on one day of them; those of a file, which may share a set-up, on the same. Tests that
    were chosen by name, mark or path all run.
    """
    option = config.option
    chosen = option.keyword or option.markexpr != "not nightly" or config.args_source != TESTPATHS
    if not option.in_turn or chosen:
        return
    day, changed = date(), changed_files(0)
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    left = set[pytest.Item]()
    for name, cases in functions.items():
        file = file_of(cases[0])
        if is_near(file, changed):
            continue
        if cases[0].get_closest_marker("in_turn"):
            left.update(cases if (day + zlib.crc32(file.encode())) % TURNS else ())
            continue
        first, days = day + zlib.crc32(name.encode()), min(TURNS, len(cases))
        left.update(item for number, item in enumerate(cases) if (first + number) % days)
    config.hook.pytest_deselected(items=[*left])
    config.stash[OTHER_DAYS] = len(left)
    items[:] = [item for item in items if item not in left]


def seconds_of(item: pytest.Item) -> float:
    """Return how long a nightly test takes, as its mark says."""
    marker = item.get_closest_marker("nightly")
    return float(marker.kwargs.get("seconds", SECONDS)) if marker is not None else 0.0


def order(items: Sequence[pytest.Item]) -> dict[Path, int]:
    """Return where the files with tests of the day stand; others come later.

    Those with the longest test come first, while there is time for it; the rest in another order in each
    cycle: if time ends before the last of them, it is not always the same.
    """
    longest: dict[Path, float] = {}
    for item in items:
        if item.stash.get(NEAR, None) is False:
            longest[item.path] = max(longest.get(item.path, 0.0), seconds_of(item))
    cycle, _ = today()
    turns = {path: zlib.crc32(f"{cycle}{path.name}".encode()) for path in longest}
    return {path: place for place, path in enumerate(sorted(longest, key=lambda p: (-longest[p], turns[p])))}


def skip_when_late(item: pytest.Item) -> None:
    """Skip a test that would not end within the minutes given; near a change, within two thirds of them."""
    share = NEAR_SHARE if item.stash.get(NEAR, False) else 1.0
    end = item.config.stash[BEGIN] + 60 * item.config.getoption("--minutes") * share
    if time.time() + seconds_of(item) > end:
        pytest.skip(LATE)


def told(reports: Iterable[pytest.TestReport]) -> str:
    """Return a line about the tests for which no time was left; empty if there are none."""
    late = sum(isinstance(report.longrepr, tuple) and LATE in report.longrepr[2] for report in reports)
    return f"{late} nightly tests were not run: {LATE}" if late else ""


def options(parser: pytest.Parser) -> None:
    """Add the options that choose nightly tests."""
    parser.addoption(
        "--in-turn", action="store_true", help=f"of functions with several cases, those of a day of {TURNS}"
    )
    days: Sequence[str] = ["today", *map(str, range(DAYS))]
    parser.addoption("--nightly-day", choices=days, help=f"of the nightly tests, those of a day of {DAYS}")
    parser.addoption(
        "--near-changes",
        type=float,
        default=0,
        metavar="HOURS",
        help="and those near what changed in so many hours",
    )
    parser.addoption(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="begin no test that would end later; none near a change after two thirds of them",
    )
