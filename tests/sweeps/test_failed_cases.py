"""Cases of a sweep that fail: the others go on, and a case that never ran may be mended under the same id."""

from __future__ import annotations

import csv
import fcntl
import json
import shutil
from pathlib import Path

import pytest
import yaml
from support import toy
from support.runs import CONFIG

import mpifl
from mpifl.cli import main
from mpifl.sweeps.results import over_seeds

METRICS = """
def fine(logits, labels):
    return 1.0

def mended(logits, labels):
    return 2.0

def third(logits, labels):
    return 3.0

def fails(logits, labels):
    raise OSError("no space for this")
"""


@pytest.fixture
def sweep(tmp_path):
    """Return a function that runs `mpifl sweep`: one of three choices of metrics fails, under two seeds."""
    file = tmp_path / "mine.py"
    file.write_text(METRICS)
    vary = f"{{seed: [0, 1], evaluation.metrics: {{z: [], bad: ['{file}:fails'], a: ['{file}:fine']}}}}"

    def run(*options: str, name: str = "x", vary: str = vary) -> int:
        place = ["--output.folder", str(tmp_path), "--output.id", name, "--rounds", "1", "-q"]
        return main(["sweep", str(CONFIG), "--vary", vary, *place, *options])

    return run


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of sweep.csv."""
    with (folder / "sweep.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_a_failed_case_ends_a_sweep_unless_it_is_told_to_keep_going(tmp_path, sweep, capsys):
    assert sweep(name="ends") == 1
    assert len(rows(tmp_path / "tiny-ends")) == 1
    assert sweep("--keep-going") == 1
    error = capsys.readouterr().err
    folder = tmp_path / "tiny-x"
    assert [row["evaluation.metrics"] for row in rows(folder)] == ["z", "a", "z", "a"]
    last = error.splitlines()[-3:]
    assert last[0] == f"mpifl: 2 of 6 cases failed; mpifl resume {folder} tries them again"
    assert last[1].startswith("seed 0, evaluation.metrics bad: metric ")
    assert last[2].startswith("seed 1, evaluation.metrics bad: metric ")
    assert "OSError: no space for this" in last[2]
    assert main(["resume", str(folder), "-q", "--keep-going"]) == 1
    with pytest.raises(mpifl.CodeFailed, match="2 of 2 cases failed") as failed:
        mpifl.sweep(
            str(CONFIG),
            rounds=1,
            vary=_vary(folder),
            only={"evaluation.metrics": ["bad"]},
            keep_going=True,
            output={"folder": str(tmp_path), "id": "x"},
        )
    assert len(failed.value.failed) == 2


def _vary(folder: Path) -> dict:
    """Return what a sweep varies."""
    return yaml.safe_load((folder / "sweep.yaml").read_text())["vary"]


def test_a_sweep_of_which_all_cases_fail_says_so(tmp_path, sweep, capsys):
    vary = f"{{evaluation.metrics: {{bad: ['{tmp_path}/mine.py:fails']}}}}"
    assert sweep("--keep-going", vary=vary) == 1
    assert "1 of 1 cases failed" in capsys.readouterr().err
    assert sweep("--keep-going", "--list", vary=vary) == 2
    run = tmp_path / "tiny-x" / "tiny-bad"
    assert main(["resume", str(run), "--keep-going"]) == 2


def test_a_case_that_never_ran_is_mended_under_the_same_id_and_rows_keep_the_order_of_vary(
    tmp_path, sweep, capsys
):
    assert sweep("--keep-going") == 1
    folder = tmp_path / "tiny-x"
    before = {row["seed"]: row for row in rows(folder) if row["evaluation.metrics"] == "z"}
    good = _vary(folder)["evaluation.metrics"] | {"bad": [f"{tmp_path}/mine.py:mended"]}
    capsys.readouterr()
    some = {key: good[key] for key in ("z", "bad")}
    mended = "{seed: [0, 1], evaluation.metrics: %s}"
    assert sweep(vary=mended % json.dumps(some)) == 2  # the sweep is to be known whole
    assert "leaves out a" in capsys.readouterr().err
    other = {**good, "z": [f"{tmp_path}/mine.py:third"]}  # a complete case is another one
    assert sweep(vary=mended % json.dumps(other)) == 2
    assert "give another output.id" in capsys.readouterr().err
    assert sweep(vary=mended % json.dumps(good)) == 0
    found = rows(folder)
    assert [row["evaluation.metrics"] for row in found] == ["z", "bad", "a"] * 2
    assert all(row == before[row["seed"]] for row in found if row["evaluation.metrics"] == "z")
    assert main(["resume", str(folder), "-q"]) == 0  # it knows the mended case
    lines = (folder / "sweep.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["z", "bad", "a"]
    capsys.readouterr()
    assert main(["export", str(folder), "--table", "final"]) == 0
    shown = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [Path(row["run"]).name for row in shown] == [
        f"tiny-{seed}-{name}" for name in ("z", "bad", "a") for seed in (0, 1)
    ]


def test_a_case_that_another_process_is_running_or_that_has_a_checkpoint_is_not_mended(
    tmp_path, sweep, capsys
):
    assert sweep("--keep-going") == 1
    folder = tmp_path / "tiny-x"
    good = _vary(folder)["evaluation.metrics"] | {"bad": [f"{tmp_path}/mine.py:mended"]}
    vary = f"{{seed: [0, 1], evaluation.metrics: {json.dumps(good)}}}"
    for seed in (0, 1):  # as if the cases had begun
        shutil.copytree(folder / f"tiny-{seed}-z", folder / f"tiny-{seed}-bad")
        (folder / f"tiny-{seed}-bad" / "summary.json").unlink()
    with (folder / "tiny-1-bad" / "run.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep(vary=vary) == 2
    (folder / "tiny-0-bad" / "checkpoints" / "step-1").mkdir(parents=True)
    assert sweep(vary=vary) == 2
    shutil.rmtree(folder / "tiny-0-bad" / "checkpoints")
    assert sweep("--list", vary=vary) == 0
    assert "give another output.id" in capsys.readouterr().err


def test_groups_of_seeds_are_in_the_order_of_the_cases_whichever_are_complete():
    every = [{"seed": seed, "method": name} for seed in "01" for name in ("b", "a")]
    found = over_seeds([{**every[1], "x": 1.0}, {**every[2], "x": 2.0}, {**every[3], "x": 3.0}], every)
    assert [row["method"] for row in found] == ["b", "a"]


def test_a_sweep_is_replaced_whole_and_only_if_it_is_one(tmp_path, sweep, capsys):
    vary = "{seed: [0, 1]}"
    assert sweep(vary=vary) == 0
    folder = tmp_path / "tiny-x"
    (folder / "mine.txt").touch()
    assert sweep("--output.existing", "reuse", vary=vary) == 0
    assert sweep("--output.existing", "replace", "--only", "seed=0", vary=vary) == 2
    assert "would delete cases that are not to run" in capsys.readouterr().err
    with (folder / "tiny-0" / "run.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep("--output.existing", "replace", "--local.lr", "0.05", vary=vary) == 2
    assert (folder / "mine.txt").exists()
    assert sweep("--output.existing", "replace", "--local.lr", "0.05", vary=vary) == 0
    assert not (folder / "mine.txt").exists()
    assert len(rows(folder)) == 2
    mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "id": "run"})
    assert sweep("--output.existing", "replace", name="run", vary=vary) == 2
    assert mpifl.load(tmp_path / "tiny-run").summary["rounds"] == 2


def test_cases_that_a_rule_ended_are_complete_and_times_that_end_them_train_each(tmp_path):
    """Under a rule on virtual time, a slower network has fewer rounds, so no case is a copy of another."""
    vary = {"network": {"fast": "links", "slow": {"name": "links", "latency_s": 0.5}}}
    place = {"folder": str(tmp_path), "id": "x"}
    found = mpifl.sweep(str(CONFIG), rounds=20, stop={"seconds": 5}, vary=vary, output=place)
    fast, slow = (found.runs[name].summary for name in ("fast", "slow"))
    assert 20 > fast["rounds"] > slow["rounds"] > 1
    assert "retimed_from" not in fast.keys() | slow.keys()
    with pytest.raises(mpifl.UserError, match=r"stop\.seconds = 5\.0: times decide what the run computes"):
        _retime(found.runs["slow"].folder)


def _retime(folder: Path) -> None:
    """Retime a run."""
    from mpifl.sweeps.retime import retime

    retime(str(folder), ["--network.name", "wired"])


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "jobs"), [(3, 1), (4, 2)])
def test_over_ranks_the_other_cases_go_on_too(mpirun, tmp_path, ranks, jobs):
    """A case fails on one worker; the next cases run on the same ranks, over messages of their own."""
    file = tmp_path / "mine.py"
    file.write_text(METRICS)
    vary = f"{{seed: [0, 1], evaluation.metrics: {{bad: ['{file}:fails'], fine: ['{file}:fine']}}}}"
    options = ["--vary", vary, "--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "2"]
    options += ["--keep-going", "--jobs", str(jobs), "-q"]
    end = mpirun(ranks, "-m", "mpifl", "sweep", CONFIG, *options, env=toy.PYTHONPATH)
    assert end.returncode == 1
    assert end.stderr.count("2 of 4 cases failed") == 1
    assert [row["evaluation.metrics"] for row in rows(tmp_path / "tiny-x")] == ["fine", "fine"]
    alone = mpifl.run(str(CONFIG), rounds=2, seed=1, output={"folder": str(tmp_path / "alone")})
    summary = json.loads((tmp_path / "tiny-x" / "tiny-1-fine" / "summary.json").read_text())
    assert summary["digest"] == alone.summary["digest"]
    assert summary["ranks"] == ranks // jobs
