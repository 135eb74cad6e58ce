"""Plants bugs one at a time in a copy of the package and tells which of them the tests see.

    python tests/mutation/run.py                        all of them, on two cores
    python tests/mutation/run.py --only core engine     areas
    python tests/mutation/run.py --bug dropped-sign     one, with what the tests say
    python tests/mutation/run.py --json figures.json    the outcome of each, for other programs

A file of `bugs/` is an area: the tests that should see its bugs, and the bugs. A bug is a text that occurs
once in a file, and what takes its place; `kind` is `textbook` (what any programmer may write one day) or
`hole` (aimed at what the tests were suspected not to see). The tests of a bug are those of its area, or its
own `tests`, chosen before anybody knew whether they see it. A bug is killed where they fail, do not end in
time, or cannot start.

The working tree is not touched: each of `--jobs` workers has a copy of the package in a temporary folder, in
which a file is changed, the tests run, and the file is put back. A bug in C is compiled there. A test that
has seen a bug then runs without it: one that fails anyway would see everything.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import yaml

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first takes a tenth of the time
ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).parent / "bugs"
COPIED = ("mpifl", "tests")  # the rest of the tree is linked to
KINDS = ("textbook", "hole")
LIMIT_S = 300.0
PYTEST = ("-m", "pytest", "-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "-m")
# nightly tests of others take minutes
WITH_NIGHTLY = ("tests/comm", "tests/mpi/test_hosts.py", "tests/results/test_trackers.py")
PASSED, NONE_COLLECTED, USAGE = 0, 5, 4  # exit codes of pytest
SUFFIXES = (".c", ".h", ".inc")


@dataclass(frozen=True)
class Bug:
    """A change of one file that some test should see.

    Attributes:
        area: the file of `bugs/` it stands in. kind: `textbook` or `hole`.
        file: below the root. old: text that occurs in it once. new: what takes its place.
        why: what is wrong then, in a line.
        tests: files and folders.
        survives: why no test can see it; empty for all that one should.
    """

    area: str
    name: str
    kind: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """Its tests in the order in which they run until some fail: files named after its own, which see it
        soonest, then place by place.
        """
        name = f"test_{Path(self.file).stem}*.py"
        paths = [path for part in self.tests for path in _files(ROOT / part, name)]
        named = tuple(str(path.relative_to(ROOT)) for path in dict.fromkeys(paths))
        return [*([named] if named else []), *((part,) for part in self.tests)]

    @property
    def compiled(self) -> bool:
        """Whether it is a bug in C."""
        return self.file.endswith(SUFFIXES)

    def planted(self, text: str) -> str:
        """Return the text of its file with the bug.

        Raises:
            ValueError: the old text is not there, or more than once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.area}/{self.name}: the old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a bug: `killed` or `survived`, by which test (or how), after how many seconds."""

    bug: Bug
    verdict: str
    by: str
    seconds: float
    said: str = field(default="", repr=False)


def _files(place: Path, name: str) -> list[Path]:
    """Return the files of such a name at a place: a folder, or a file."""
    return sorted(place.rglob(name)) if place.is_dir() else [p for p in [place] if p.match(name)]


def load(folder: Path = BUGS) -> list[Bug]:
    """Return all bugs, area by area."""
    return [bug for path in sorted(folder.glob("*.yaml")) for bug in _area(path)]


def _area(path: Path) -> Iterator[Bug]:
    tree = yaml.load(
        path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )  # ten times faster
    for entry in tree["bugs"]:
        given = {**entry, "tests": tuple(entry.get("tests", tree["tests"]))}
        yield Bug(area=path.stem, **given)


# -- one copy of the package ---------------------------------------------------------------------------------


class Copy:
    """A copy of the package and its tests in which bugs are planted.

    Args:
        folder: an empty one. shared: a folder of caches that all copies share.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        without = shutil.ignore_patterns("__pycache__", "*.tmp")
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=without)
        for path in ROOT.iterdir():
            if path.name not in (*COPIED, ".git", "build") and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        (folder / "tmp").mkdir()
        keep = {k: v for k, v in os.environ.items() if k not in ("MPIFL_DATA", "PYTHONPATH")}
        caches = {"XDG_CACHE_HOME": str(shared), "MPLCONFIGDIR": str(shared / "matplotlib")}
        self.env = {
            **keep,
            **caches,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
        }
        # compiled once, and looked up by content: a change within the same second is seen
        compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *COPIED]
        subprocess.run(compiling, cwd=folder, check=True, env=self.env | {"PYTHONDONTWRITEBYTECODE": ""})
        self._build()  # those of the working tree may be older than its sources

    def run(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return the exit code of pytest (None: no end in time), and what it said."""
        chosen = "" if set(tests) <= set(WITH_NIGHTLY) else "not nightly"
        command = [sys.executable, *PYTEST, chosen, *tests]
        return finished(command, self.folder, self.env, limit)

    def evaluate(self, bug: Bug, limit: float, baseline: bool) -> Outcome:
        """Plant a bug, run its tests, and take it out again; see `evaluate` below."""
        path, start = self.folder / bug.file, perf_counter()
        before = path.read_bytes()
        with ExitStack() as after:
            after.callback(path.write_bytes, before)
            path.write_text(bug.planted(before.decode()))
            if bug.compiled:
                for library in self._libraries():
                    after.callback(library.write_bytes, library.read_bytes())
                self._compile(bug)
            for tests in bug.stages:
                code, said = self.run(tests, limit)
                if code not in (PASSED, NONE_COLLECTED):
                    break
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        (self.folder / "tmp").mkdir()
        if code in (NONE_COLLECTED, USAGE):
            raise ValueError(f"{bug.area}/{bug.name}: pytest finds no tests in {' '.join(bug.tests)}\n{said}")
        verdict = "survived" if code == PASSED else "killed"
        outcome = Outcome(bug, verdict, killer(code, said), perf_counter() - start, said)
        if baseline and verdict == "killed":
            seen_by = [outcome.by.partition("[")[0]] if "::" in outcome.by else tests
            code, said = self.run(seen_by, limit)
            if code != PASSED:
                raise ValueError(f"{bug.area}/{bug.name}: {seen_by} fail without the bug, too:\n{said}")
        return outcome

    def _libraries(self) -> list[Path]:
        return sorted((self.folder / "mpifl").rglob("*.so"))

    def _compile(self, bug: Bug) -> None:
        """Build the extensions anew, with a bug in them.

        Raises:
            ValueError: it does not compile, so that no test would look at it, or no library was built.
        """
        before = {p: p.stat().st_mtime_ns for p in self._libraries()}
        code, said = self._build()
        changed = any(p.stat().st_mtime_ns != before.get(p) for p in self._libraries())
        if code != 0 or not changed:
            raise ValueError(f"{bug.area}/{bug.name}: {said or 'no library was built'}")

    def _build(self) -> tuple[int | None, str]:
        """Build those extensions whose sources have changed; return exit code and words."""
        env = {k: v for k, v in self.env.items() if k != "PYTHONPATH"}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", "tmp/build"]
        return finished(command, self.folder, env, LIMIT_S)


def finished(
    command: Sequence[str], folder: Path, env: Mapping[str, str], limit: float
) -> tuple[int | None, str]:
    """Run a command to its end, or end it and its children after `limit` seconds: exit code None."""
    with tempfile.TemporaryFile("w+") as words:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": words, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun ends its ranks when it is asked to
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
        words.seek(0)
        return code, words.read()


def killer(code: int | None, said: str) -> str:
    """Return which test failed, or in which other way the tests did not pass."""
    if code == PASSED:
        return ""
    if code is None:
        return "no end in time"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return found[1] if found else f"pytest ends with {code}"


# -- all of them ---------------------------------------------------------------------------------------------


def evaluate(
    bugs: Sequence[Bug],
    jobs: int = 2,
    limit: float = LIMIT_S,
    baseline: bool = True,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Return what becomes of bugs, in their order.

    Args:
        baseline: whether to run the test that saw a bug without it, too.
        say: is told of each outcome.

    Raises:
        ValueError: an entry does not apply or compile, or the test that saw it fails without it.
    """
    for bug in bugs:
        bug.planted((ROOT / bug.file).read_text())
    with tempfile.TemporaryDirectory(prefix="bugs-") as place, ThreadPoolExecutor(jobs) as pool:
        shared = Path(place) / "shared"
        shared.mkdir()
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            (Path(place) / str(number)).mkdir()
            copies.put(Copy(Path(place) / str(number), shared))

        def borrowed(work: Callable[[Copy], Any]) -> Any:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        def one(bug: Bug) -> Outcome:
            outcome: Outcome = borrowed(lambda copy: copy.evaluate(bug, limit, baseline))
            say(f"{outcome.verdict:8} {outcome.seconds:6.1f} s  {bug.area}/{bug.name}  {outcome.by}")
            return outcome

        return list(pool.map(one, bugs))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return killed and all bugs by area and kind, in Markdown."""
    areas = [*dict.fromkeys(o.bug.area for o in outcomes)]
    killed = Counter((o.bug.area, o.bug.kind) for o in outcomes if o.verdict == "killed")
    every = Counter((o.bug.area, o.bug.kind) for o in outcomes)
    lines = [f"| area | {' | '.join(KINDS)} | both |", "| --- " * (len(KINDS) + 2) + "|"]
    for name, some in [*((a, [a]) for a in areas), ("all", areas)]:
        counts = [
            (sum(killed[a, k] for a in some for k in kinds), sum(every[a, k] for a in some for k in kinds))
            for kinds in (*((k,) for k in KINDS), KINDS)
        ]
        lines.append(f"| {name} | {' | '.join(f'{k} of {n}' if n else '' for k, n in counts)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return 0 where every bug was killed that no reason is given for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="AREA", help="files of bugs/ without their ending")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--bug", nargs="+", metavar="NAME", help="these alone, with what the tests say")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of a bug")
    parser.add_argument(
        "--no-baseline", action="store_true", help="trust that tests pass without the bugs that they see"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file")
    asked = parser.parse_args(arguments)
    bugs = [
        bug
        for bug in load()
        if (not asked.only or bug.area in asked.only)
        and (not asked.kind or bug.kind == asked.kind)
        and (not asked.bug or bug.name in asked.bug)
    ]
    if not bugs:
        parser.error("no such bug; areas: " + ", ".join(dict.fromkeys(b.area for b in load())))
    start = perf_counter()
    outcomes = evaluate(bugs, asked.jobs, asked.limit, not asked.no_baseline, lambda x: print(x, flush=True))
    alive = [o for o in outcomes if o.verdict == "survived"]
    for o in outcomes if asked.bug else ():
        print(f"\n{o.bug.area}/{o.bug.name}: {o.bug.why}\n{o.said}")
    print(f"\n{table(outcomes)}\n")
    for o in alive:
        print(f"survived: {o.bug.area}/{o.bug.name} ({o.bug.file}): {o.bug.survives or o.bug.why}")
    print(
        f"{len(outcomes) - len(alive)} of {len(outcomes)} killed, "
        f"{perf_counter() - start:.0f} s, {asked.jobs} at a time"
    )
    if asked.json:
        rows = [{**asdict(o.bug), "verdict": o.verdict, "by": o.by, "seconds": o.seconds} for o in outcomes]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(not o.bug.survives for o in alive))


if __name__ == "__main__":
    sys.exit(main())
