"""Jobs that are killed at moments drawn by a seed: no hang, no wrong number, nothing left.

    pytest -m nightly tests/faults/test_kill_campaign.py           50 of them
    MPIFL_KILLS=15 MPIFL_KILLS_FROM=20 pytest -m nightly ...       numbers 20 to 34

A case is a run, a moment (before MPI is up, as it comes up, while data are prepared, in training, in a
message, while a client's state or a checkpoint is written, at the end), who gets which signal, and whether
the job has fault tolerance. After the job has ended the same command goes on with `--resume`, at another
number of ranks, unless the run is complete. Then all files are those of the undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults import deaths
from faults.test_deaths import Whole
from support import toy
from support.runs import assert_same_run

COUNT, FIRST = int(os.environ.get("MPIFL_KILLS", "50")), int(os.environ.get("MPIFL_KILLS_FROM", "0"))
RANKS = 4
KILLER = Path(__file__).parent / "kills.py"
LIMIT_S = 60.0  # from the kill to the end of the job
MARK = "MPIFL_KILL_CASE"  # in the environment of all that a case starts
MOMENTS = {
    "start": 40,
    "mpi": 1,
    "data": 6,
    "train": 12,
    "verbs": 60,
    "state": 12,
    "checkpoint": 30,
    "end": 8,
}
OF_A_WORKER = ("train", "state")  # rank 0 does not come by
LAUNCHER = "launcher"
KINDS: dict[str, tuple[list[int | str], int]] = {
    "kill a worker": ([2], signal.SIGKILL),
    "kill two workers": ([1, 3], signal.SIGKILL),
    "kill rank 0": ([0], signal.SIGKILL),
    "kill all ranks": ([0, 1, 2, 3], signal.SIGKILL),
    "kill all and mpirun": ([LAUNCHER, 0, 1, 2, 3], signal.SIGKILL),
    "terminate mpirun": ([LAUNCHER], signal.SIGTERM),
    "terminate all ranks": ([0, 1, 2, 3], signal.SIGTERM),
    "stop a worker": ([2], signal.SIGSTOP),
    "stop rank 0": ([0], signal.SIGSTOP),
}


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        name: of the run. moment, nth, at: when, and at which rank. kind: who gets which signal.
        tolerant: whether it has fault tolerance. again: ranks of the job that goes on, None without mpirun.
    """

    name: str
    moment: str
    nth: int
    at: int
    kind: str
    tolerant: bool
    again: int | None


def drawn(number: int) -> Case:
    """Return the case of a number: moments and kinds in turn, the rest by the number as a seed."""
    rng = random.Random(number)
    moment, kind = [*MOMENTS][number % len(MOMENTS)], [*KINDS][number % len(KINDS)]
    targets = [r for r in KINDS[kind][0] if r != LAUNCHER]
    ranks = range(1, RANKS) if moment in OF_A_WORKER else range(RANKS)
    at = (
        0
        if moment in ("data", "checkpoint", "end")
        else rng.choice([r for r in targets if r in ranks] or [1])
    )
    return Case(
        name=rng.choice([*deaths.RUNS]),
        moment=moment,
        nth=rng.randint(1, MOMENTS[moment]),
        at=at,
        kind=kind,
        tolerant=rng.random() < 0.5,
        again=rng.choice((None, 2, 3)),
    )


@dataclass
class Campaign:
    """What became of all cases."""

    whole: Whole
    outcomes: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what is worth telling."""
        parts = {"outcomes": self.outcomes, "moments": self.moments, "kinds": self.kinds}
        texts = [f"{n}: " + ", ".join(f"{k} {v}" for k, v in c.items()) for n, c in parts.items()]
        longest = f"{max(self.waits):.1f} s" if self.waits else "none"
        return [f"KILLS {self.outcomes.total()}; longest wait from kill to end: {longest}", *texts]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, request) -> Iterator[Campaign]:
    """Return the campaign; in the end, print what it came to."""
    out = Campaign(Whole(tmp_path_factory.mktemp("whole")))
    yield out
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *out.lines(), sep="\n")


def left_of(mark: str) -> list[str]:
    """Return the processes of a case that are still there."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(f"{place.name} {(place / 'cmdline').read_bytes()[:200]!r}")
        except OSError:
            continue
    return found


def nothing_is_left(mark: str, scratch: Path) -> None:
    """Raise unless, within some seconds, every process of a case is gone, and its scratch."""
    end = time.monotonic() + 30.0
    while (found := left_of(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not found
    assert not [*scratch.iterdir()]


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_a_job_that_is_killed_leaves_nothing_and_goes_on(number, campaign, mpirun, tmp_path):
    case, note, scratch = drawn(number), tmp_path / "note", tmp_path / "scratch"
    expected = campaign.whole(case.name)
    mark = f"{os.getpid()}-{number}"
    cache = tmp_path / "cache" if case.moment == "data" else campaign.whole.cache
    targets, what = KINDS[case.kind]
    plan = {"moment": case.moment, "nth": case.nth, "at": case.at, "targets": targets, "signal": int(what)}
    words = [*deaths.arguments(tmp_path, "x", case.name, cache), "--checkpoint.every", "1"]
    words += ["--system.scratch", str(scratch), "--system.stopped_timeout_s", "5", "--resume"]
    scratch.mkdir()
    environment = toy.PYTHONPATH | {"MPIFL_START_S": "30", MARK: mark}
    options = {"env": environment, "timeout": 600, "fresh": True}
    plan["note"] = str(note)
    launcher = deaths.ULFM if case.tolerant else ()
    end = mpirun(RANKS, KILLER, json.dumps(plan), *words, launcher=launcher, **options)
    wait = time.time() - float(note.read_text()) if note.exists() else 0.0
    whole = (tmp_path / "tiny-x" / "summary.json").exists()
    said = f"{case}\nexit code {end.returncode}, {wait:.1f} s\n{end.stdout}\n{end.stderr}"
    campaign.moments[case.moment] += 1
    campaign.kinds[case.kind] += 1
    campaign.waits.append(wait)
    assert wait < LIMIT_S, said
    if not case.tolerant:  # with fault tolerance mpirun ends with 0 although all ranks were killed
        assert whole or end.returncode != 0, said
    assert "Traceback" not in end.stderr, said
    outcome = "went on without what was lost" if whole else "was resumed"
    if not note.exists():
        outcome = "was over before the moment came"
    if not whole or (tmp_path / "tiny-x" / "checkpoints").exists():  # left by the last moment of a run
        again = mpirun(case.again, "-m", "mpifl", *words, **options)
        assert again.returncode == 0, f"{said}\n{again.stderr}"
        if not whole:
            outcome += " from a checkpoint" if "going on after step" in again.stderr else " from the start"
    assert_same_run(tmp_path / "tiny-x", expected)
    nothing_is_left(mark, scratch)
    campaign.outcomes[outcome] += 1
    print(f"KILL {number} {case} {outcome}, {wait:.1f} s")
