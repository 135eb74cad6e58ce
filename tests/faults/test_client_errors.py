"""Clients that fail are tried again, then left out: the same numbers for any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from faults import deaths
from support import toy
from support.runs import CONFIG, SCRIPT, Alone, Runs

from mpifl import cli

CLUMSY = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from mpifl.algorithms.fedavg import FedAvg as Base
from mpifl.core.algorithm import Algorithm


@dataclass(frozen=True)
class Clumsy(Algorithm):
    """FedAvg; client 2 raises in every visit, client 5 returns NaN, client 6 fails at the first try."""

    paper = Base.paper
    tries: ClassVar[dict] = {}

    def setup(self, init, fingerprints, key):
        return Base().setup(init, fingerprints, key)

    def aggregate(self, server, notes):
        return Base().aggregate(server, notes)

    def local_update(self, message, state, client, key):
        report, state = Base().local_update(message, state, client, key)
        if client.id == 2:
            raise MemoryError("no room")
        if client.id == 5:
            report.vectors["model"].fill_(torch.nan)
        if client.id == 6:
            self.tries[client.visit] = self.tries.get(client.visit, 0) + 1
            if self.tries[client.visit] == 1:
                raise OSError("a disk that hiccups")
        return report, state
'''
EVENTS = ["--policy", "{name: buffer, size: 2}", *deaths.FEW]
ROUNDS = ["--rounds", "3"]
KINDS = {"rounds": ROUNDS, "events": EVENTS}
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def clumsy(tmp_path) -> list[str]:
    """Options that take the method above."""
    (tmp_path / "clumsy.py").write_text(CLUMSY)
    return ["--algorithm", f"{tmp_path / 'clumsy.py'}:Clumsy", "--data.cache", str(tmp_path / "cache")]


def words(folder: Path, run_id: str, *options: str) -> list[str]:
    """Return the arguments of a run."""
    place = ["--output.folder", str(folder), "--output.id", run_id]
    return ["run", str(CONFIG), "--quiet", *place, *options]


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_fail_are_left_out_and_listed(kind, clumsy, tmp_path):
    assert cli.main([*words(tmp_path, kind, *KINDS[kind]), *clumsy, "--on_client_error", "drop"]) == 0
    runs = Runs(tmp_path)
    dropped = runs.table(kind, "dropped.csv")
    assert {(row["client"], row["reason"]) for row in dropped} == {
        ("2", "MemoryError: no room"),
        ("5", "upload 'model' is not finite (in body.fc1.weight)"),
    }
    assert runs.summary(kind)["visits_dropped"] == len(dropped)
    if kind == "rounds":
        assert len(dropped) == 2 * 3


@pytest.mark.nightly
def test_clients_that_fail_are_the_same_on_three_ranks(clumsy, mpirun, tmp_path):
    """In rounds and in events, both in one start."""
    drop = [*clumsy, "--on_client_error", "drop"]
    one, three = Alone(tmp_path / "one", KINDS, *drop), Runs(tmp_path / "three")
    end = mpirun(3, SCRIPT, CONFIG, three.folder, json.dumps(KINDS), *drop, env=toy.PYTHONPATH)
    assert end.returncode == 0, end.stderr
    for kind in KINDS:
        assert one.summary(kind)["digest"] == three.summary(kind)["digest"]
        assert one.table(kind, "dropped.csv") == three.table(kind, "dropped.csv")
        assert three.summary(kind)["visits_dropped"] == one.summary(kind)["visits_dropped"]
        logs = "".join(path.read_text() for path in (three.of(kind) / "logs").glob("*-[12].log"))
        assert "client 2, round 1, visit 0 failed again, is left out\nTraceback" in logs
        assert "in local_update" in logs


def test_a_trace_with_dropped_visits_is_replayed(clumsy, tmp_path):
    """Where a visit is dropped the next one starts, at an instant at which nothing arrives."""
    first = words(tmp_path, "first", *clumsy, "--on_client_error", "drop", *EVENTS)
    assert cli.main(first) == 0
    rows = Runs(tmp_path).table("first", "events.csv")
    assert {row["start"] for row in rows} - {row["time"] for row in rows} > {"0.0"}
    clock = f"{{name: replay, trace: {tmp_path / 'tiny-first' / 'events.csv'}}}"
    again = words(tmp_path, "again", *clumsy, *EVENTS, "--delay", "{name: constant}", "--clock", clock)
    assert cli.main(again) == 0
    assert Runs(tmp_path).table("again", "events.csv") == rows
    assert Runs(tmp_path).summary("again")["digest"] == Runs(tmp_path).summary("first")["digest"]


def test_a_replay_starts_visits_at_the_step_at_which_they_started(clumsy, tmp_path):
    """Where a drawn visit is dropped, another starts before the step and others after it, at one instant. The
    learning rate says at which step.
    """
    drawn = ["--policy", "{name: drawn_staleness, most: 3}", "--rounds", "12", "--local.lr_decay", "0.5"]
    first = words(tmp_path, "first", *clumsy, "--on_client_error", "drop", *drawn)
    assert cli.main(first) == 0
    there = Runs(tmp_path)
    rows, left_out = there.table("first", "events.csv"), there.table("first", "dropped.csv")
    started = Counter(row["start"] for row in rows if row["start"] == row["time"])
    assert started, "in place of one that was dropped"
    assert any(row["start"] in started and row["start"] != row["time"] for row in rows)
    assert left_out
    clock = f"{{name: replay, trace: {tmp_path / 'tiny-first' / 'events.csv'}}}"
    assert cli.main(words(tmp_path, "again", *clumsy, *drawn, "--clock", clock)) == 0
    assert there.table("again", "events.csv") == rows
    assert there.summary("again")["digest"] == there.summary("first")["digest"]


LINKS = ["--network.uplink_bytes_s", "1000"]
MEASURED = {
    "events": [*EVENTS, *LINKS],
    "rules": [*ROUNDS, *LINKS, "--policy", "{name: partial_work, deadline_s: 10000}"],
}


@pytest.mark.parametrize("kind", MEASURED)
def test_where_an_upload_is_measured_clients_may_fail_too(kind, clumsy, tmp_path, capsys):
    """Client 0 is the one by which it is measured; then clients 0 to 4, of which none works."""
    drop = [*clumsy, *MEASURED[kind], "--on_client_error", "drop"]
    (tmp_path / "clumsy.py").write_text(CLUMSY.replace("client.id == 2", "client.id == 0"))
    assert cli.main(words(tmp_path, "zero", *drop)) == 0
    assert {row["client"] for row in Runs(tmp_path).table("zero", "dropped.csv")} >= {"0"}
    (tmp_path / "clumsy.py").write_text(CLUMSY.replace("client.id == 2", "client.id < 5"))
    capsys.readouterr()
    assert cli.main(words(tmp_path, "none", *drop)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "clients 0 to 4 failed, by which an upload is measured" in last
    assert "Clumsy.local_update: rank 0, client 4, round 1, visit 0: MemoryError: no room" in last


@pytest.mark.parametrize("kind", MEASURED)
def test_an_upload_that_cannot_be_measured_ends_the_run_as_a_visit_does(kind, clumsy, tmp_path, capsys):
    (tmp_path / "clumsy.py").write_text(CLUMSY.replace("client.id == 2", "client.id == 0"))
    assert cli.main(words(tmp_path, "x", *clumsy, *MEASURED[kind])) == 1
    said = capsys.readouterr().err
    assert said.endswith("Clumsy.local_update: rank 0, client 0, round 1, visit 0: MemoryError: no room\n")
    assert "mpifl/runtime" not in said


def test_a_plan_leaves_out_a_client_that_fails(clumsy, tmp_path, capsys):
    """Its times would need all of those that it measures."""
    (tmp_path / "clumsy.py").write_text(CLUMSY.replace("client.id == 2", "client.id == 0"))
    plan = ["plan", str(CONFIG), *clumsy]
    assert cli.main([*plan, "--on_client_error", "drop"]) == 0
    page = capsys.readouterr().out
    assert "federation per round" in page
    assert "no times: Clumsy.local_update: rank 0, client 0, round 1, visit 0: MemoryError: no room" in page
    assert cli.main(plan) == 1
    said = capsys.readouterr().err
    assert said.endswith("Clumsy.local_update: rank 0, client 0, round 1, visit 0: MemoryError: no room\n")


def test_by_default_the_first_failure_ends_the_run(clumsy, tmp_path, capsys):
    assert cli.main(words(tmp_path, "x", *clumsy, *ROUNDS)) == 1
    assert "client 2, round 1, visit 0: MemoryError: no room" in capsys.readouterr().err


def test_a_step_without_any_client_ends_the_run(clumsy, tmp_path, capsys):
    (tmp_path / "clumsy.py").write_text(CLUMSY.replace("client.id == 2", "client.id >= 0"))
    assert cli.main(words(tmp_path, "x", *clumsy, *ROUNDS, "--on_client_error", "drop")) == 1
    said = capsys.readouterr().err
    assert "all clients of round 1 failed; client 0, visit 0: MemoryError: no room" in said


LEAVING = """
import sys
from dataclasses import dataclass

from mpifl.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Leaving(FedAvg):
    where: str = ""

    def local_update(self, message, state, client, key):
        if client.id == 3 and self.where == "client":
            sys.exit(0)
        if client.id == 3 and self.where == "key":
            raise KeyboardInterrupt
        if client.id == 3 and self.where == "raise":
            raise ArithmeticError("no such number")
        return super().local_update(message, state, client, key)

    def aggregate(self, server, notes):
        return sys.exit(0) if self.where == "server" else super().aggregate(server, notes)

    def evaluate(self, message, state, client, split):
        scores = super().evaluate(message, state, client, split)
        return scores if client.id != 3 or self.where != "judging" else None
"""
ENDS = {  # where the method goes wrong -> the exit code, and what is said once
    "client": (2, "Leaving.local_update: client 3, visit 0: sys.exit(0)"),
    "key": (130, "Leaving.local_update: client 3, visit 0: interrupted"),
    "raise": (1, "visit 0: ArithmeticError: no such number"),
    "server": (2, "Leaving.aggregate: step 1: sys.exit(0)"),
    "judging": (2, "Leaving.evaluate: client 3: returned None"),
}


def leaving(folder: Path, where: str, text: str = LEAVING) -> list[str]:
    """Write the method above; return the options that take it."""
    (folder / "leaving.py").write_text(text)
    method = f"{folder / 'leaving.py'}:Leaving"
    return ["--algorithm.name", method, "--algorithm.where", where, "--data.cache", str(folder / "cache")]


def said_once(where: str, code: int, said: str, folder: Path) -> None:
    """Raise unless a run that went wrong ended with its code and one message."""
    expected, text = ENDS[where]
    assert code == expected
    assert said.count(text) == 1
    assert said.count("Traceback") == (where == "raise")
    assert not (folder / "tiny-x" / "summary.json").exists()


@pytest.mark.parametrize("where", ENDS)
def test_code_of_a_method_that_ends_or_fails_ends_the_run_with_one_message(where, tmp_path, capsys):
    code = cli.main(words(tmp_path, "x", *leaving(tmp_path, where), *ROUNDS))
    said_once(where, code, capsys.readouterr().err, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *((where, "rounds") for where in ENDS),
        *((where, "events") for where in ("server", "client", "judging")),
    ],
)
def test_it_ends_all_ranks_with_one_message(where, kind, mpirun, tmp_path):
    asked = words(tmp_path, "x", *leaving(tmp_path, where), *KINDS[kind])
    end = mpirun(3, "-m", "mpifl", *asked, env=toy.PYTHONPATH, timeout=300)
    said_once(where, end.returncode, end.stderr, tmp_path)
    assert "MPI_ABORT" not in end.stderr


@pytest.mark.nightly
def test_a_rank_that_trains_for_long_does_not_keep_the_others_from_ending(mpirun, tmp_path):
    text = LEAVING.replace("client.id == 3", "client.id == 0")
    text = text.replace("return super().local_update", "import time; time.sleep(600)")
    cohort = ["--local.epochs", "1", "--data.scenario.clients", "4"]
    asked = words(tmp_path, "x", *leaving(tmp_path, "client", text), *ROUNDS, *cohort)
    end = mpirun(3, "-m", "mpifl", *asked, env=toy.PYTHONPATH, timeout=300)
    assert end.returncode == 2
    assert "sys.exit(0)" in end.stderr
