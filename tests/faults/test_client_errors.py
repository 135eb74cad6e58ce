"""Clients that fail are tried again, then left out: the same numbers for any number of ranks."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
from faults import deaths
from support import worlds

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


@pytest.fixture
def clumsy(tmp_path) -> list[str]:
    """Options that take the method above."""
    (tmp_path / "clumsy.py").write_text(CLUMSY)
    return ["--algorithm", f"{tmp_path / 'clumsy.py'}:Clumsy", "--data.cache", str(tmp_path / "cache")]


def go(mpirun, ranks, folder: Path, run_id: str, *options: str):
    """Run with the clumsy method."""
    place = ["--output.folder", str(folder), "--output.id", run_id]
    command = ["-m", "mpifl", "run", str(deaths.CONFIG), "--quiet", *place, *options]
    return mpirun(ranks, *command, env=worlds.PYTHONPATH, timeout=300)


@pytest.mark.parametrize("kind", [ROUNDS, EVENTS], ids=["rounds", "events"])
def test_clients_that_fail_are_left_out_and_listed(kind, clumsy, mpirun, tmp_path):
    for run_id, ranks in (("one", None), ("three", 3)):
        end = go(mpirun, ranks, tmp_path, run_id, *clumsy, *kind, "--on_client_error", "drop")
        assert end.returncode == 0, end.stderr
    assert deaths.digest(tmp_path, "one") == deaths.digest(tmp_path, "three")
    for run_id in ("one", "three"):
        folder = tmp_path / f"tiny-{run_id}"
        dropped = list(csv.DictReader((folder / "dropped.csv").open()))
        reasons = {(row["client"], row["reason"]) for row in dropped}
        assert reasons == {
            ("2", "MemoryError: no room"),
            ("5", "upload 'model' is not finite"),
        }
        assert json.loads((folder / "summary.json").read_text())["visits_dropped"] == len(dropped)
        if kind is ROUNDS:
            assert len(dropped) == 2 * 3
    logs = "".join(path.read_text() for path in (tmp_path / "tiny-three" / "logs").glob("*-[12].log"))
    assert "client 2, round 1, visit 0 failed again, is left out\nTraceback" in logs
    assert "in local_update" in logs
    one, three = ((tmp_path / f"tiny-{r}" / "dropped.csv").read_text() for r in ("one", "three"))
    assert one == three


def test_by_default_the_first_failure_ends_the_run(clumsy, mpirun, tmp_path):
    end = go(mpirun, None, tmp_path, "x", *clumsy, *ROUNDS)
    assert end.returncode == 1
    assert "client 2, round 1, visit 0: MemoryError: no room" in end.stderr


def test_a_step_without_any_client_ends_the_run(clumsy, mpirun, tmp_path):
    (tmp_path / "clumsy.py").write_text(CLUMSY.replace("client.id == 2", "client.id >= 0"))
    end = go(mpirun, None, tmp_path, "x", *clumsy, *ROUNDS, "--on_client_error", "drop")
    assert end.returncode == 1
    assert "all clients of round 1 failed; client 0, visit 0: MemoryError: no room" in end.stderr


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


@pytest.mark.parametrize(
    ("where", "ranks", "kind"),
    [
        *((where, 3, ROUNDS) for where in ("client", "raise")),
        *((where, 3, EVENTS) for where in ("server", "judging")),
        *(pytest.param(where, None, ROUNDS, marks=pytest.mark.nightly) for where in ENDS),
        *(
            pytest.param(where, 3, ROUNDS, marks=pytest.mark.nightly)
            for where in ("key", "server", "judging")
        ),
        pytest.param("client", 3, EVENTS, marks=pytest.mark.nightly),
    ],
)
def test_code_of_a_method_that_ends_or_fails_ends_all_ranks_with_one_message(
    where, ranks, kind, mpirun, tmp_path
):
    (tmp_path / "leaving.py").write_text(LEAVING)
    method = ["--algorithm.name", f"{tmp_path / 'leaving.py'}:Leaving", "--algorithm.where", where]
    start = time.monotonic()
    end = go(mpirun, ranks, tmp_path, "x", *method, *kind, "--data.cache", str(tmp_path / "cache"))
    code, text = ENDS[where]
    assert end.returncode == code
    assert end.stderr.count(text) == 1
    assert end.stderr.count("Traceback") == (where == "raise")
    assert "MPI_ABORT" not in end.stderr
    assert not (tmp_path / "tiny-x" / "summary.json").exists()
    assert time.monotonic() - start < 120  # of which nearly all is the start of Python on a busy machine


def test_a_rank_that_trains_for_long_does_not_keep_the_others_from_ending(mpirun, tmp_path):
    text = LEAVING.replace("client.id == 3", "client.id == 0")
    text = text.replace("return super().local_update", "import time; time.sleep(600)")
    (tmp_path / "leaving.py").write_text(text)
    method = ["--algorithm.name", f"{tmp_path / 'leaving.py'}:Leaving", "--algorithm.where", "client"]
    cohort = ["--local.epochs", "1", "--data.scenario.clients", "4", "--data.cache", str(tmp_path / "cache")]
    end = go(mpirun, 3, tmp_path, "x", *method, *ROUNDS, *cohort)
    assert end.returncode == 2
    assert "sys.exit(0)" in end.stderr
