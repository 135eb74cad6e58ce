"""The GPU campaign, tried without a GPU: a step that fails is told and the next one begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from campaigns import gpu_campaign
from campaigns.gpu_campaign import Campaign, Step, main, run_campaign

from mpifl.core.devices import CPU
from mpifl.core.errors import UserError
from mpifl.training.precision import has_bfloat16


def broken(campaign):
    raise UserError("x", 1, "use 2 | 3")


FAKES = {
    "good": Step("good work", "a goal", lambda c: {"x": 2.0}, lambda f: f["x"] > 1),
    "poor": Step("poor work", "a goal", lambda c: {"x": 0.5}, lambda f: f["x"] > 1),
    "broken": Step("no work", "a goal", broken, lambda f: True),
    "figures": Step("figures alone", "", lambda c: {"x": 3.0}),
}


def test_each_step_has_an_outcome_and_the_files_hold_all(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_campaign, "STEPS", FAKES)
    said = []
    results = run_campaign(Campaign(tmp_path / "out"), [*FAKES], said.append)
    assert [results[name].get("met") for name in FAKES] == [True, False, None, None]
    assert results["broken"]["failed"] == "UserError: x = 1: use 2 | 3"
    assert json.loads((tmp_path / "out" / "gpu-campaign.json").read_text())["steps"] == results
    rows = [
        line for line in (tmp_path / "out" / "gpu-campaign.md").read_text().splitlines() if "work" in line
    ]
    assert [row.split(" | ")[2] for row in rows[:3]] == [
        "met",
        "**not met**",
        "failed: UserError: x = 1: use 2 / 3",
    ]
    assert [line.split(":")[0] for line in said] == [*FAKES]


def test_a_rehearsal_meets_no_goal_and_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_campaign, "STEPS", FAKES)
    results = run_campaign(Campaign(tmp_path / "out", "cpu"), ["good"], lambda line: None)
    assert results["good"]["met"] is None
    assert "no figure of it is a GPU's" in (tmp_path / "out" / "gpu-campaign.md").read_text()


def test_steps_for_which_no_time_is_left_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_campaign, "STEPS", FAKES)
    results = run_campaign(Campaign(tmp_path / "out", seconds=1.0), ["good"], lambda line: None)
    assert results["good"]["not_run"] == "no time was left"


def test_every_test_that_skips_without_a_gpu_is_in_the_campaign():
    root = Path(__file__).parents[2]
    here = [path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")]
    skipping = [name for name in here if 'reason="no GPU"' in (root / name).read_text()]
    assert sorted(skipping) == sorted([*gpu_campaign.TESTS, Path(__file__).relative_to(root).as_posix()])


@pytest.mark.nightly
def test_a_way_that_fails_or_hangs_leaves_the_others(tmp_path, monkeypatch):
    """A loop that answers, and ways that do, break at the first round, or do not answer at all."""
    answers = """
import sys, time
from multiprocessing.connection import Client

from mpifl.benchmarks.turns import usage
how, path = sys.argv[1:]
if how == "hangs":
    time.sleep(60)
there, report = Client(path), {"ready": True}
while True:
    there.send({**report, "pids": [], "used": [usage()]})
    asked = there.recv()
    if not asked or how == "breaks":
        break
    report = {"seconds": 0.1 if how == "loop" else 0.01}
"""

    class Faked(gpu_campaign.Job):
        def __init__(self, name, command, variables, folder, limit):
            how = {"one by one": "works", "stacked": "breaks", "stacked, free": "hangs"}.get(name, name)
            super().__init__(name, [sys.executable, "-c", answers, how, "SOCKET"], variables, folder, 6.0)

    monkeypatch.setattr(gpu_campaign, "Job", Faked)
    monkeypatch.setattr(gpu_campaign, "mpirun", lambda ranks: [])
    found = gpu_campaign.speed("W1")(Campaign(tmp_path, "cpu", 15.0))
    assert set(found["ways_that_failed"]) == {"stacked", "stacked, free"}
    assert found["times_the_loop"]["one by one"] == pytest.approx(10)


def test_goals_do_not_count_bfloat16_against_a_loop_in_float32():
    figures = {"times_the_loop": {"one by one": 0.7, "bfloat16": 2.0}}
    assert not gpu_campaign.STEPS["W5"].met(figures)


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    code, said = Campaign(tmp_path).told(["sh", "-c", "echo begun; sleep 60"], "long", 1.0)
    assert (code, said) == (124, ["begun"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "--steps", "tests,nothing"], "--steps = 'nothing': use some of machine, tests"),
        ([".", "--rehearse"], "FOLDER = '.': is there already"),
        pytest.param(
            ["new"],
            "device = 'cuda': there is no GPU: --rehearse",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_done_is_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_stacked_step_is_the_same_compiled(tmp_path):
    found = gpu_campaign.compiled(Campaign(tmp_path, "cpu"))
    assert found["largest_difference"] == 0.0, "in a rehearsal nothing is fused"


def test_a_run_that_fails_is_told_by_its_own_line_not_by_that_of_mpirun(tmp_path, monkeypatch):
    said = "echo 'mpifl: model = 3: use one'; echo; echo -----; exit 2"
    monkeypatch.setattr(gpu_campaign, "mpirun", lambda ranks: ["sh", "-c", said])
    with pytest.raises(UserError, match="mpifl: model = 3: use one"):
        Campaign(tmp_path, "cpu").mpifl(3, "x", "quickstart")


@pytest.mark.nightly(seconds=100)
def test_the_whole_campaign_is_rehearsed(tmp_path, capsys):
    """One step after the other, as on a GPU, on the CPU."""
    assert main([str(tmp_path / "out"), "--rehearse"]) == 0, capsys.readouterr().out
    steps = json.loads((tmp_path / "out" / "gpu-campaign.json").read_text())["steps"]
    assert [*steps] == [name for name in gpu_campaign.STEPS if name not in gpu_campaign.SLOW_TO_REHEARSE]
    assert steps["tests"]["passed"] > 0
    assert steps["digests"]["equal"]
    assert steps["memory"]["equal"]
    assert steps["digests"]["in_turn"]
    assert "system.mpi_memory = 'device'" in steps["memory"]["device"]["refused"]
    ways = {"default", "one by one", "stacked", "stacked, free", *(["bfloat16"] if has_bfloat16(CPU) else [])}
    assert set(steps["W3"]["times_the_loop"]) == ways
    assert set(steps["sharing"]["without MPS"]) == {"1", "2"}
