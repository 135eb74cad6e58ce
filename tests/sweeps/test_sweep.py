"""Sweeps: every combination of what a configuration varies, in one folder with a table and a figure."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.each import for_each
from support.runs import TASK_CONFIG, TASKS, columns_of

import mpifl
from mpifl.analysis.comparison import compare
from mpifl.analysis.comparison_tables import final_table
from mpifl.analysis.figures import Curve
from mpifl.analysis.seed_groups import gather
from mpifl.analysis.tables import as_text
from mpifl.api import laid
from mpifl.cli import main
from mpifl.comm.single import Single
from mpifl.core.case_names import LOCKS
from mpifl.core.errors import MethodError, Stopped, UserError
from mpifl.driver import run as running
from mpifl.driver.run_callbacks import RunCallbacks
from mpifl.experiment import loader
from mpifl.experiment.loader import load
from mpifl.results import identity
from mpifl.supervision.logging import warn_once
from mpifl.sweeps import results as sweep_results
from mpifl.sweeps import sweep as sweeping
from mpifl.sweeps.cases import ALL, Part, cases, read
from mpifl.sweeps.results import over_seeds, table
from mpifl.sweeps.retime import retime
from mpifl.sweeps.sweep import listed

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
VARY = "{algorithm.alpha: [0.3, 0.6], delay: {even: constant, uneven: {name: lognormal, sigma: 2}}}"
ASYNC = ["--algorithm", "fedasync", "--policy", "every_arrival", "--cohort_size", "4", "--rounds", "6"]
ASYNC += ["--evaluation.every", "1"]


def sweep(name, options, transport, quiet=False, part=ALL):
    """Run a sweep as the command line does."""
    return sweeping.sweep(lambda: read(name, options), transport, quiet, part)


def test_each_run_of_a_job_counts_its_own_bytes(tmp_path):
    transport, counted = Single(), []
    for name in ("a", "b"):
        transport.traffic("send", "test", sent=5, messages=1)
        config = load(TINY, ["--output.folder", str(tmp_path), "--output.id", name])
        folder = running.run(config, transport, quiet=True)
        counted.append(json.loads((folder / "summary.json").read_text())["mpi_bytes"])
    assert counted == [5, 5]


@pytest.mark.in_turn
def test_a_sweep_runs_every_combination_and_writes_a_table_and_a_figure(drawn, tmp_path, capsys):
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    folder = sweep(TINY, ["--vary", VARY, *ASYNC, *place], Single())
    said = capsys.readouterr().out
    assert "case 1/4: algorithm.alpha 0.3, delay even\n" in said
    assert said.count("round 6/6  accuracy") == 4
    assert said.count("numbers ") == 1, "how numbers are computed is said once, not for each case"
    assert said.endswith(f"results: {folder}: sweep.md, sweep.csv, sweep.png\n")
    assert folder == tmp_path / "tiny-x"
    with (folder / "sweep.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(r["algorithm.alpha"], r["delay"]) for r in rows] == [
        (a, d) for a in ("0.3", "0.6") for d in ("even", "uneven")
    ]
    assert len({r["accuracy_mean"] for r in rows}) > 1
    with (folder / "tiny-0.3-even" / "metrics.csv").open() as lines:
        late = [float(r["accuracy_mean"]) for r in csv.DictReader(lines)][3:]
    assert len(late) == 3
    shown = float(rows[0]["second_half_mean"]), float(rows[0]["second_half_lowest"])
    assert shown == (pytest.approx(sum(late) / 3), min(late))
    assert all(float(r["staleness_mean"]) > 0 for r in rows)
    assert {p.name for p in folder.iterdir()} >= {"tiny-0.3-even", "tiny-0.6-uneven", "sweep.md", "sweep.png"}
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sweep.md").read_text().count("\n") == 6


def diverged(folder: Path, *options: str) -> Path:
    """Return the folder of a sweep over two learning rates, the first of which ends in infinity."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--rounds", "1"]
    given = [*TASKS["next_token"], "--vary", "{local.lr: [300, 0.1]}", *place, *options]
    return sweep(str(TASK_CONFIG), given, Single(), quiet=True)


@pytest.mark.nightly
def test_a_case_that_diverged_is_a_value_of_its_sweep_and_stops_no_table(drawn, tmp_path, capsys):
    table = "{title: T, figures: {here: {of: metric_mean}}}"
    folder = diverged(tmp_path, "--table", table)
    runs = mpifl.load_sweep(folder).runs
    assert [run.series["perplexity_mean"][-1] < np.inf for run in runs.values()] == [False, True]
    text = (runs["300"].folder / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (summary["perplexity_mean"], summary["perplexity_std"]) == (None, None)
    assert (folder / "sweep.md").read_text().split("\n")[2].startswith("| 300 | ∞ | ")
    assert "| 300 | ∞ | 1 |" in (folder / "table.md").read_text()
    names, files = [str(folder)], [str(tmp_path / f"t.{form}") for form in ("csv", "md", "tex")]
    written = [
        option for pair in zip(("--csv", "--markdown", "--latex"), files, strict=True) for option in pair
    ]
    for command in (
        ["compare", *names, *written, "--test", "none"],
        ["compare", *names, "--target", "3", "--columns", "run,perplexity,perplexity_mean,mb_to_target"],
        ["report", *names, "--out", str(tmp_path / "report")],
        *(["export", *names, "--table", kind] for kind in ("metrics", "final", "clients")),
        ["resume", *names],
        ["watch", *names, "--once"],
    ):
        assert main(command) == 0, command
    assert capsys.readouterr().out.count(",inf,") > 2
    metrics = runs["300"].folder / "metrics.csv"
    for value in ("1.87e+202", "1.7e+308"):
        metrics.write_text(re.sub(r"inf|1.87e.202", value, metrics.read_text()))
        assert main(["resume", str(folder)]) == 0
        assert f"| 300 | {value} | 1 |" in (folder / "table.md").read_text()


def test_a_case_that_cannot_be_read_gets_a_line_and_stops_neither_the_others_nor_the_table(tmp_path, capsys):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--vary", "{local.lr: [0.1, 0.2, 0.3]}"]
    begun = sweep(TINY, [*place, "--rounds", "1"], Single(), part=Part(only={"local.lr": ["0.1"]}))
    (begun / "tiny-0.1" / "metrics.csv").write_text("round,accuracy_mean\n")
    folder = sweep(TINY, [*place, "--rounds", "1"], Single())
    rows = (folder / "sweep.md").read_text().split("\n")
    assert [row.split(" | ")[0] for row in rows[2:4]] == ["| 0.2", "| 0.3"]
    said = capsys.readouterr()
    assert "local.lr 0.1 is left out of the tables" in said.err
    assert "2 of 3 cases" in (folder / "sweep.md").read_text()
    assert list(mpifl.load_sweep(folder).runs) == ["0.2", "0.3"]
    for case in ("0.2", "0.3"):
        (folder / f"tiny-{case}" / "metrics.csv").write_text("round,accuracy_mean\n")
    with pytest.raises(UserError, match="has no case that can be read"):
        mpifl.load_sweep(folder)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("command", ["compare", "report", "export"])
def test_cases_that_are_not_there_are_named_where_a_sweep_is_compared(command, tmp_path, capsys):
    place = ["--output.folder", str(tmp_path), "--output.id", command, "--rounds", "1"]
    given = [*place, "--vary", "{local.lr: [0.1, 0.2, 0.3]}"]
    folder = sweep(TINY, given, Single(), part=Part(only={"local.lr": ["0.2"]}))
    capsys.readouterr()
    said = f"{folder}: 2 of 3 cases are not there: local.lr 0.1, local.lr 0.3"
    for name in (folder, tmp_path, f"{tmp_path}/*"):
        assert main([command, str(name)]) == 0
        assert capsys.readouterr().err.count(said) == 1
    assert len(mpifl.compare(folder)) == len(mpifl.table(folder, of="final")) == 1
    assert capsys.readouterr().err.count(said) == 2


def kept_models(folder: Path) -> list[str]:
    """Return the names of the cases that kept their models."""
    return sorted(file.parent.name for file in folder.glob("*/model.safetensors"))


def test_cases_keep_their_models_where_output_model_is_given_as_true(tmp_path):
    """On the command line, in a file, for one of the cases, and in Python; copies under other times, too."""
    place = ["--output.folder", str(tmp_path), "--rounds", "1"]
    vary = ["--vary", "{seed: [0], network: [wired, wireless-slow]}"]
    both = ["tiny-0-wired", "tiny-0-wireless_slow"]
    (tmp_path / "keeps.yaml").write_text(f"base: {TINY}\noutput: {{model: true}}\n")
    models = {}
    for name, file, options in (
        ("plain", TINY, []),
        ("asked", TINY, ["--output.model", "true"]),
        ("file", str(tmp_path / "keeps.yaml"), []),
        ("not", str(tmp_path / "keeps.yaml"), ["--output.model", "false"]),
    ):
        models[name] = kept_models(
            sweep(file, [*vary, *place, "--output.id", name, *options], Single(), True)
        )
    assert models == {"plain": [], "asked": both, "file": both, "not": []}
    rows = ["--vary", "{rows: {a: {network: wired}, b: {network: wireless-slow, output: {model: true}}}}"]
    assert kept_models(sweep(TINY, [*rows, *place, "--output.id", "row"], Single(), True)) == ["tiny-b"]
    (tmp_path / "only.yaml").write_text("name: tiny\n")
    named = ["--vary", f"{{configuration: {{it: '{tmp_path / 'keeps.yaml'}'}}}}", "--output.id", "named"]
    assert kept_models(sweep(str(tmp_path / "only.yaml"), [*named, *place], Single(), True)) == ["tiny-it"]
    for name, model in (("python", {}), ("python-asked", {"model": True})):
        output = {"folder": str(tmp_path), "id": name, **model}
        found = mpifl.sweep(load(TINY, ["--rounds", "1"]), vary={"seed": [0]}, output=output)
        assert kept_models(found.folder) == (["tiny-0"] if model else [])


class Starts:
    """A callback that adds the name of its run to a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_start(self, info) -> None:
        """Add the name."""
        with open(self.path, "a") as file:
            print(info.folder.name, file=file)


class Ends(Starts):
    """A callback that notes the name of each run that ends."""

    def on_start(self, info) -> None:
        """Say nothing."""

    def on_end(self, run) -> None:
        """Add the name."""
        with open(self.path, "a") as file:
            print(run.folder.name, file=file)


def test_cases_with_callbacks_are_trained_and_not_copied(tmp_path, capsys):
    """A copy under other times would tell its callbacks of nothing."""
    told = f"[{{name: '{__file__}:Starts', path: '{tmp_path}/told'}}]"
    options = ["--vary", "{network: [wired, wireless-slow]}", "--output.callbacks", told, "--rounds", "1"]
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    sweep(TINY, [*options, *place], Single(), quiet=True)
    assert (tmp_path / "told").read_text().split() == ["tiny-wired", "tiny-wireless_slow"]


def test_callbacks_of_a_case_that_was_killed_before_its_end_was_told_are_told_when_the_sweep_goes_on(
    tmp_path, monkeypatch
):
    told = f"[{{name: '{__file__}:Ends', path: '{tmp_path}/told'}}]"
    options = ["--vary", "{seed: [0]}", "--output.callbacks", told, "--rounds", "1"]
    options += ["--output.folder", str(tmp_path), "--output.id", "x"]
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "end", lambda self: None)  # as if it was killed there
        sweep(TINY, options, Single(), quiet=True)
    assert not (tmp_path / "told").exists()
    for _ in range(2):  # the second time there is nothing to tell
        sweep(TINY, options, Single(), quiet=True)
        assert (tmp_path / "told").read_text().split() == ["tiny-0"]


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    vary = "{seed: [0, 1, 2], network: [wired, wireless-slow]}"
    options = [
        "--vary",
        vary,
        "--output.folder",
        str(tmp_path),
        "--checkpoint.every",
        "1",
        "--delay",
        "constant",
    ]
    whole = sweep(TINY, [*options, "--output.id", "whole"], Single(), quiet=True)
    real, calls = running.run, []

    def stopped(*args, **more):
        calls.append(args)
        if len(calls) == 2:
            raise Stopped(0, "here")
        return real(*args, **more)

    monkeypatch.setattr("mpifl.sweeps.sweep.run", stopped)
    with pytest.raises(Stopped):
        sweep(TINY, [*options, "--output.id", "x"], Single(), quiet=True)
    folder = tmp_path / "tiny-x"
    first = (folder / "tiny-0-wired" / "metrics.csv").stat().st_mtime_ns
    (folder / "tiny-1-wired").mkdir()  # killed between making the folder and its first file
    half = folder / "tiny-2-wired"
    shutil.copytree(whole / "tiny-2-wired", half)
    (half / "summary.json").unlink()  # killed before the last file: there is a checkpoint
    assert main(["resume", str(folder), "-q"]) == 0
    assert (folder / "tiny-0-wired" / "metrics.csv").stat().st_mtime_ns == first
    assert [c[3] for c in calls] == [None, None, None, half]

    def found(parent):
        rows = list(csv.DictReader((parent / "sweep.csv").open()))
        return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in rows]

    assert len(found(folder)) == 6
    assert found(folder) == found(whole)


def test_a_sweep_that_is_stopped_after_a_cases_last_step_ends_before_the_next_case(tmp_path, monkeypatch):
    """The request comes while the first case writes its results: too late for it, not for the sweep."""
    real = running.finish

    def late(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(running, "finish", late)
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--vary", "{seed: [0, 1]}"]
    with pytest.raises(Stopped, match=r"mpifl resume .*tiny-x$"):
        sweep(TINY, place, Single(), quiet=True)
    assert (tmp_path / "tiny-x" / "tiny-0" / "summary.json").exists()
    assert not (tmp_path / "tiny-x" / "tiny-1").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_part_of_a_sweep_that_is_stopped_names_a_command_that_goes_on_with_that_part(tmp_path, monkeypatch):
    """Seed 0 is not asked for. The label has a space."""

    def late(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    real = running.finish
    vary = "{algorithm: {my own: fedavg, theirs: local}, seed: [0, 1, 2]}"
    part = Part.of(only=["algorithm=my own", "seed=1,2"])
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--vary", vary]
    with monkeypatch.context() as patched:
        patched.setattr(running, "finish", late)
        with pytest.raises(Stopped) as stop:
            sweep(TINY, place, Single(), True, part)
    folder = tmp_path / "tiny-x"
    command = shlex.split(str(stop.value).partition("go on with: mpifl ")[2])
    assert command == ["resume", str(folder), "--only", "algorithm=my own", "--only", "seed=1,2"]
    assert main([*command, "-q"]) == 0
    assert sorted(path.parent.name for path in folder.glob("*/summary.json")) == [
        "tiny-my_own-1",
        "tiny-my_own-2",
    ]


def test_options_of_resume_that_a_run_or_a_sweep_does_not_have_are_refused(tmp_path, capsys):
    place = ["-q", "--output.folder", str(tmp_path), "--output.id"]
    assert main(["run", TINY, *place, "run"]) == 0
    assert main(["sweep", TINY, *place, "sweep", "--vary", "{seed: [0, 1]}", "--only", "seed=0"]) == 0
    capsys.readouterr()
    for folder, option, said in (
        ("run", ["--only", "seed=1"], "--only = 'seed=1': .* is one run, not a sweep"),
        ("run", ["--case", "1/2"], "--case = '1/2': .* is one run, not a sweep"),
        ("sweep", ["--only", "seed=2"], "--only = 'seed=2': no such label"),
        ("sweep", ["--case", "3/4"], "--case = '3/4': has no case left"),
        ("sweep", ["--from-start"], "--from-start = True: a case of a sweep"),
        ("sweep", ["--bind-report"], "--bind-report = True: is for a run"),
    ):
        assert main(["resume", str(tmp_path / f"tiny-{folder}"), *option]) == 2
        assert re.search(said, capsys.readouterr().err), option
    assert not (tmp_path / "tiny-sweep" / "tiny-1").exists()


def found_in(folder: Path) -> list[dict[str, str]]:
    """Return the rows of sweep.csv without seconds of a clock on the wall."""
    with (folder / "sweep.csv").open() as lines:
        return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in csv.DictReader(lines)]


def test_cases_added_later_join_and_complete_ones_stay(tmp_path):
    """Seed 2 is added, with an option that changes no number. A process that knows of fewer adds none."""
    place = ["--output.folder", str(tmp_path), "--output.id"]
    folder = sweep(TINY, ["--vary", "{seed: [0, 1]}", *place, "x"], Single(), quiet=True)
    first = (folder / "tiny-0" / "metrics.csv").stat().st_mtime_ns
    more = ["--vary", "{seed: [0, 2, 1]}", "--system.statistics_cache", str(tmp_path / "c"), *place]
    assert sweep(TINY, [*more, "x"], Single(), quiet=True) == folder
    assert (folder / "tiny-0" / "metrics.csv").stat().st_mtime_ns == first
    whole = sweep(TINY, [*more, "whole"], Single(), quiet=True)
    assert found_in(folder) == found_in(whole)
    assert [row["seed"] for row in found_in(folder)] == ["0", "2", "1"]
    before = (folder / "sweep.yaml").read_text()
    sweep(TINY, ["--vary", "{seed: [1]}", *place, "x"], Single(), quiet=True)
    assert (folder / "sweep.yaml").read_text() == before
    assert len(found_in(folder)) == 3
    shutil.rmtree(folder / "tiny-2")
    assert main(["resume", str(folder), "-q"]) == 0
    assert found_in(folder) == found_in(whole)


@pytest.mark.nightly
def test_a_process_that_ends_last_writes_the_cases_that_others_have_added_meanwhile(
    tmp_path, monkeypatch, capsys
):
    """Seed 2 is added and run, and seed 3 is added and left, while a process runs seeds 0 and 1."""
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--vary"]
    real = sweeping.run

    def meanwhile(*arguments, **options):
        monkeypatch.setattr(sweeping, "run", real)
        sweep(TINY, [*place, "{seed: [0, 1, 2, 3]}"], Single(), True, Part({"seed": ["2"]}))
        return real(*arguments, **options)

    monkeypatch.setattr(sweeping, "run", meanwhile)
    folder = sweep(TINY, [*place, "{seed: [0, 1]}"], Single())
    assert [row["seed"] for row in found_in(folder)] == ["0", "1", "2"]
    assert (folder / "sweep.md").read_text().endswith("3 of 4 cases are complete.\n")
    assert (
        "\n1 of 4 cases is not complete; once no other process runs it: mpifl resume"
        in capsys.readouterr().out
    )
    assert (folder / LOCKS).is_dir(), "another process may be running seed 3"
    assert main(["resume", str(folder), "-q"]) == 0
    assert [row["seed"] for row in found_in(folder)] == ["0", "1", "2", "3"]
    assert not (folder / LOCKS).exists()


def test_a_sweep_says_that_its_cases_were_computed_by_other_code(tmp_path, monkeypatch, capsys):
    """Numbers may have been mended between two of its cases."""
    options = ["--output.folder", str(tmp_path), "--output.id", "x", "--vary"]
    sweep(TINY, [*options, "{seed: [0]}"], Single())
    assert "cases differ in" not in capsys.readouterr().out
    monkeypatch.setattr(identity, "code", lambda: "mended")
    sweep(TINY, [*options, "{seed: [0, 1]}"], Single())
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cases differ in ")]
    assert len(said) == 1
    assert "mended (tiny-1)" in said[0]


def test_a_case_that_was_computed_with_other_data_is_not_done(tmp_path, capsys):
    """The file of the split, or that of times, was written again; comparisons and exports say it."""
    split, times = tmp_path / "split.csv", tmp_path / "times.csv"
    tree = {**loader.read(TINY), "output": {"folder": str(tmp_path), "id": "x"}, "rounds": 1}
    tree["data"]["scenario"] = {"name": "partition", "path": str(split), "test": "own"}
    tree["data"]["cache"] = str(tmp_path / "cache")
    tree["delay"] = {"name": "measured", "file": str(times)}

    def deal(samples, seconds=1):
        split.write_text("client,sample\n" + "".join(f"{i % 4},{i}\n" for i in range(samples)))
        times.write_text("client,seconds\n" + "".join(f"{k},{seconds}\n" for k in range(4)))

    deal(80)
    folder = mpifl.sweep(tree, vary={"seed": [0, 1]}).folder
    assert main(["resume", str(folder), "-q"]) == 0
    for changed, says in (((60,), "files of its data: "), ((80, 2), f"delay.file = '{times}': ")):
        deal(*changed)
        assert main(["resume", str(folder), "-q"]) == 2
        assert says in capsys.readouterr().err
        with pytest.raises(UserError, match=r"the run in .*tiny-0"):
            mpifl.sweep(tree, vary={"seed": [0, 1, 2]})
    deal(60, 2)
    split.rename(tmp_path / "away")
    times.rename(tmp_path / "too")
    assert main(["resume", str(folder), "-q"]) == 0, "nothing can be compared"
    deal(60, 2)
    other = mpifl.sweep({**tree, "output": {"folder": str(tmp_path), "id": "y"}}, vary={"seed": [2]}).folder
    runs = [str(folder / "tiny-0"), str(other / "tiny-2")]
    says = ["these runs differ in file of delay.file (in one configuration)"]
    says += ["these runs differ in files of the data (under the same data)"]
    for command in ("compare", "export"):
        warn_once.cache_clear()
        assert main([command, *runs]) == 0
        err = capsys.readouterr().err
        assert all(f"{text}: " in err for text in says), command
        assert "last bits of these runs may differ, file" not in err


def test_cases_under_several_networks_have_their_times_in_the_table(tmp_path):
    """They differ in nothing else."""
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    networks = "{network: {lte: {name: links, uplink_bytes_s: 1.0e+5}, wired: wired}}"
    folder = sweep(TINY, ["--vary", networks, *place], Single(), quiet=True)
    lte, wired = found_in(folder)
    assert lte.pop("network") != wired.pop("network")
    assert float(lte.pop("virtual_seconds")) != float(wired.pop("virtual_seconds"))
    assert lte == wired


def test_a_case_that_another_process_runs_is_left_to_it(tmp_path, capsys):
    """That process has just made the case's folder, which looks like one that was given up."""
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    folder = sweep(TINY, ["--vary", "{seed: [0]}", *place], Single(), quiet=True)
    options = ["--vary", "{seed: [0, 1]}", *place]
    under_way, lock = folder / "tiny-1", folder / sweeping.LOCKS / "1"
    under_way.mkdir()
    lock.parent.mkdir()
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        sweep(TINY, options, Single(), quiet=True)
        said = capsys.readouterr().out
        assert "seed 1: another process runs it" in said
        assert said.endswith(
            f"1 of 2 cases is not complete; once no other process runs it: mpifl resume {folder}\n"
        )
        assert [row["seed"] for row in found_in(folder)] == ["0"]
        assert under_way.is_dir()
    sweep(TINY, options, Single(), quiet=True)
    assert [row["seed"] for row in found_in(folder)] == ["0", "1"]
    assert not lock.parent.exists()


def test_locks_that_another_process_removes_at_its_end_are_made_again(tmp_path, monkeypatch):
    mkdir, removed = Path.mkdir, []

    def make(folder, *args, **options):
        mkdir(folder, *args, **options)
        if folder.name == LOCKS and not removed:  # between the creation of the folder and of a file in it
            shutil.rmtree(folder)
            removed.append(folder)

    monkeypatch.setattr(Path, "mkdir", make)
    place = ["--output.folder", str(tmp_path), "--vary", "{seed: [0]}", "--rounds", "1"]
    folder = sweep(TINY, place, Single(), True)
    assert removed
    assert len(list(folder.glob("*/summary.json"))) == 1


def test_a_case_that_another_process_gave_up_is_run_in_the_end(tmp_path, monkeypatch):
    """It ran the first of two cases and was killed while this one ran the second."""
    real, folder = running.run, tmp_path / "tiny-x"
    options = ["--vary", "{seed: [0, 1]}", "--output.folder", str(tmp_path), "--output.id", "x"]
    folder.mkdir()
    (folder / "sweep.yaml").write_text(yaml.safe_dump(read(TINY, options), sort_keys=False))
    (folder / sweeping.LOCKS).mkdir()
    with (folder / sweeping.LOCKS / "0").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def killed(*args, **more):
            other.close()
            return real(*args, **more)

        monkeypatch.setattr("mpifl.sweeps.sweep.run", killed)
        sweep(TINY, options, Single(), quiet=True)
    assert [row["seed"] for row in found_in(folder)] == ["0", "1"]
    assert [path.name for path in folder.glob(".*")] == []


def test_what_groups_of_a_killed_job_told_each_other_is_removed(tmp_path):
    place = ["--vary", "{seed: [0, 1]}", "--output.folder", str(tmp_path), "--output.id", "x"]
    folder = sweep(TINY, [*place, "--rounds", "1"], Single(), quiet=True)
    (folder / ".jobs-0a1b2c3d").mkdir()
    (folder / ".jobs-0a1b2c3d" / "0").touch()
    assert main(["resume", str(folder), "-q"]) == 0
    assert [path.name for path in folder.glob(".*")] == []


def test_two_processes_train_once_what_gives_several_cases(tmp_path, monkeypatch, capsys):
    """The second one begins while the first trains: the other case is a copy under other times."""
    options = ["--vary", "{network: [wired, wireless-slow]}", "--output.folder", str(tmp_path)]
    options += ["--output.id", "x"]
    real, trained = running.run, []

    def beside(config, *args, **more):
        trained.append(config.output.id)
        if len(trained) == 1:
            sweep(TINY, options, Single(), quiet=True)
        return real(config, *args, **more)

    monkeypatch.setattr("mpifl.sweeps.sweep.run", beside)
    folder = sweep(TINY, options, Single(), quiet=True)
    assert trained == ["wired"]
    assert [row["network"] for row in found_in(folder)] == ["wired", "wireless-slow"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "3"], "rounds = 3: the sweep in FOLDER has 2; give another output.id"),
        (
            ["--local.lr", "0.3", "--local.epochs", "2"],
            "local.epochs = 2: the sweep in FOLDER has 1 (other keys that differ: local.lr)",
        ),
        (["--algorithm", "fedprox"], "algorithm.name = 'fedprox': the sweep in FOLDER has 'fedavg'"),
        (["--system.kernels", "false"], "system.kernels = False: the sweep in FOLDER has True"),
        (["--vary.seed", "{0: 0, 1: 7}"], "seed.data = 7: the sweep in FOLDER has 1"),
        (["--vary.seed", "[1, 2]"], "vary.seed = [1, 2]: leaves out 0 of the sweep in FOLDER; name them too"),
        (
            ["--vary", "{seed: [0], local.lr: [0.1]}"],
            "vary = 'seed, local.lr': the sweep in FOLDER varies seed",
        ),
    ],
)
def test_a_sweep_with_other_settings_is_not_joined_and_the_key_is_named(options, message, tmp_path):
    place = ["--vary", "{seed: [0, 1]}", "--output.folder", str(tmp_path), "--output.id", "x"]
    (tmp_path / "tiny-x").mkdir()
    tree = read(TINY, place)
    (tmp_path / "tiny-x" / "sweep.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    (tmp_path / "tiny-x" / LOCKS).mkdir()
    with (tmp_path / "tiny-x" / LOCKS / "tiny-0").open("w") as held:  # another process has begun it
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError) as raised:
            sweep(TINY, [*place, *options], Single(), quiet=True)
    assert str(raised.value).startswith(message.replace("FOLDER", str(tmp_path / "tiny-x")))
    assert not list((tmp_path / "tiny-x").glob("tiny-*"))


def test_a_process_that_is_slower_to_create_the_folder_joins(tmp_path, monkeypatch):
    """Tasks of a job array begin at the same time: between its look and its own try another one was there."""
    place = ["--vary", "{seed: [0]}", "--output.folder", str(tmp_path), "--output.id", "x"]
    real = sweeping.folders.create

    def other_first(*args):
        if args[2] == "x":
            folder = real(*args)
            (folder / "sweep.yaml").write_text(yaml.safe_dump(read(TINY, place), sort_keys=False))
        return real(*args)

    monkeypatch.setattr(sweeping.folders, "create", other_first)
    folder = sweep(TINY, place, Single(), quiet=True)
    assert len(found_in(folder)) == 1


FREE = ["--system.statistics_cache", "c", "--system.sample_cache_mb", "1", "--checkpoint.every", "3"]


def test_what_changes_no_number_is_no_other_setting(tmp_path):
    was = cases(read(TINY, ["--vary", "{seed: [0]}"]))
    now = cases(read(TINY, ["--vary", "{seed: [0]}", *FREE, "--data.cache", "d", "--output.updates", "true"]))
    assert sweep_results.settings_of(was[0].config) == sweep_results.settings_of(now[0].config)


def three_seeds(folder):
    """Run a sweep over three learning rates; return its folder."""
    place = {"output": {"folder": str(folder), "id": "x"}, "rounds": 1}
    return mpifl.sweep({**loader.read(TINY), **place}, vary={"local.lr": [0.1, 0.2, 0.3]}).folder


@pytest.mark.parametrize("which", ["another run", "the file of the sweep", "another format"])
def test_a_run_of_other_settings_in_the_folder_of_a_case_is_not_taken_for_the_case(which, tmp_path, capsys):
    folder = three_seeds(tmp_path)
    if which == "another run":
        shutil.rmtree(folder / "tiny-0.2")
        shutil.copytree(folder / "tiny-0.1", folder / "tiny-0.2")
        wrong = "local.lr = 0.2: the run in FOLDER/tiny-0.2 has 0.1"
    elif which == "another format":
        about = json.loads((folder / "tiny-0.2" / "run.json").read_text())
        (folder / "tiny-0.2" / "run.json").write_text(json.dumps({**about, "format": 1}))
        wrong = "RUN = 'FOLDER/tiny-0.2': has format 1 of another version of mpifl"
    else:
        text = (folder / "sweep.yaml").read_text()
        (folder / "sweep.yaml").write_text(text.replace("batch_size: 32", "batch_size: 16"))
        wrong = "local.batch_size = 16: the run in FOLDER/tiny-0.1 has 32"
    assert main(["resume", str(folder), "-q"]) == 2
    assert wrong.replace("FOLDER", str(folder)) in capsys.readouterr().err
    if which != "the file of the sweep":
        assert [*mpifl.load_sweep(folder).runs] == ["0.1", "0.3"]
        shutil.rmtree(folder / "tiny-0.2")
        assert main(["resume", str(folder), "-q"]) == 0
        rates = [run.config["local"]["lr"] for run in mpifl.load_sweep(folder).runs.values()]
        assert rates == [0.1, 0.2, 0.3]


def test_a_case_that_was_computed_by_other_code_of_the_user_is_not_done(tmp_path, capsys):
    (tmp_path / "own.py").write_text("def share(logits, labels):\n    return float((labels == 0).sum())\n")
    metrics = {"evaluation": {"metrics": [f"{tmp_path / 'own.py'}:share"]}}
    tree = {**loader.read(TINY), **metrics, "output": {"folder": str(tmp_path), "id": "x"}, "rounds": 1}
    folder = mpifl.sweep(tree, vary={"seed": [0]}).folder
    (tmp_path / "own.py").write_text("def share(logits, labels):\n    return float((labels == 1).sum())\n")
    assert main(["resume", str(folder), "-q"]) == 2
    assert "own_code = " in capsys.readouterr().err


def test_a_file_that_changes_changes_nothing_of_a_sweep_that_has_begun(tmp_path):
    """It goes on, and is retimed, with the files as they were; under other ones it is not joined."""
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    mine.write_text(f"base: {TINY}\nlocal: {{lr: 0.1}}\n")
    other.write_text(f"base: {TINY}\nalgorithm: local\n")
    tree = {"name": "x", "output": {"folder": str(tmp_path), "id": "1"}}
    tree["vary"] = {"configuration": {"mine": str(mine), "other": str(other)}, "seed": [0]}
    folder = mpifl.sweep(tree, only={"configuration": ["mine"]}).folder
    for file in (mine, other):
        file.write_text(f"{file.read_text()}rounds: 1\n")
    with pytest.raises(UserError, match=r"rounds = 1: the sweep in .*x-1 has 2; give another output.id"):
        mpifl.sweep(tree)
    with pytest.raises(UserError, match=r"rounds = 1: the sweep in .*x-1 has 2; give another output.id"):
        mpifl.sweep(tree, vary={**tree["vary"], "seed": [0, 1]})
    assert main(["resume", str(folder), "-q"]) == 0
    again, _ = retime(str(folder), ["--delay", "uniform"])
    runs = [run for place in (folder, again) for run in mpifl.load_sweep(place).runs.values()]
    assert [run.config["rounds"] for run in runs] == [2] * 4
    assert [run.summary["rounds"] for run in runs] == [2] * 4


def test_a_network_added_later_is_computed_wherever_it_stands(tmp_path, monkeypatch):
    place = ["--delay", "constant", "--output.folder", str(tmp_path), "--output.id", "x"]
    sweep(TINY, ["--vary", "{network: [wired]}", *place], Single(), quiet=True)
    monkeypatch.setattr("mpifl.sweeps.sweep.run", None)  # nothing is trained
    folder = sweep(TINY, ["--vary", "{network: [wireless-slow, wired]}", *place], Single(), quiet=True)
    slow = json.loads((folder / "tiny-wireless_slow" / "summary.json").read_text())
    assert slow["retimed_from"] == "tiny-wired"


MEASURED = "{name: measured, file: DEVICES, assign: %s}"
CCFL = "{name: ccfl, clusters: 2, clients: 8, smallest: 20, largest: 40, test_images: 9, public: 9, exam: 9}"
HALVES = "{name: classes, classes: {a: {share: %s, speed: 2}, b: {share: %s}}}"


@pytest.mark.parametrize(
    ("key", "values", "options"),
    [
        ("network", ["wired", "wireless-slow"], ["--output.clients", "none"]),
        ("network", ["wired", "wireless-slow"], ["--output.clients", "sample"]),
        ("devices", [MEASURED % "drawn", MEASURED % "round_robin"], ["--evaluation.clients", "3"]),
        ("devices", [MEASURED % "drawn", MEASURED % "round_robin"], ["--data.scenario", CCFL]),
        ("devices", [HALVES % (0.25, 0.75), HALVES % (0.5, 0.5)], ["--evaluation.by", "[device]"]),
    ],
)
def test_a_case_whose_times_cannot_be_computed_is_trained(key, values, options, tmp_path, monkeypatch):
    """Its tables are those of a run of its own."""
    monkeypatch.setattr("mpifl.results.recorder.SAMPLE", 2)
    (tmp_path / "devices.csv").write_text("device,seconds_per_sample\na,0.01\nb,0.05\n")
    first, second = (value.replace("DEVICES", str(tmp_path / "devices.csv")) for value in values)
    place = [*options, "--evaluation.every", "1", "--output.folder", str(tmp_path), "--output.id"]
    vary = ["--vary", f"{{{key}: {{a: {first}, b: {second}}}}}"]
    folder = sweep(TINY, [*vary, *place, "x"], Single(), quiet=True)
    assert main(["run", TINY, f"--{key}", second, *place, "alone", "-q"]) == 0
    assert "retimed_from" not in json.loads((folder / "tiny-b" / "summary.json").read_text())
    assert columns_of(folder / "tiny-b" / "metrics.csv") == columns_of(
        tmp_path / "tiny-alone" / "metrics.csv"
    )
    assert listed(read(TINY, vary + options)).endswith("\n2 of 2 cases")


def test_tables_hold_a_case_that_another_process_finishes_while_they_are_written(tmp_path, monkeypatch):
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    options = ["--vary", "{seed: [0, 1]}", *place]
    folder = sweep(TINY, options, Single(), quiet=True)
    late, hidden = folder / "tiny-1" / "summary.json", tmp_path / "hidden"
    late.rename(hidden)
    real = sweep_results.table

    def meanwhile(rows):
        if hidden.exists():
            hidden.rename(late)
        return real(rows)

    monkeypatch.setattr(sweep_results, "table", meanwhile)
    sweep_results.Found(folder).write()
    assert [row["seed"] for row in found_in(folder)] == ["0", "1"]


def test_labels_of_the_users_own_stand_in_tables_and_reports(tmp_path):
    methods = "{mine: fedavg, theirs: {name: fedprox, mu: 0.5}}"
    vary = f"{{algorithm: {methods}, local.lr: [0.1, 0.2], seed: {{a: 0, b: 1}}}}"
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "1"]
    folder = sweep(TINY, ["--vary", vary, *place], Single(), quiet=True)
    assert {row["algorithm"] for row in found_in(folder)} == {"mine", "theirs"}
    groups = {group.name: len(group.runs) for group in gather([str(folder)])}
    assert groups == {f"{label}, lr {lr}": 2 for label in ("mine", "theirs") for lr in (0.1, 0.2)}
    named = cases(read(TINY, ["--vary", "{rows: {A: {rounds: 1}}}", "--output.label", "trial"]))
    assert named[0].placed(tmp_path).output.label == "trial, A"
    plain = cases(read(TINY, ["--vary", "{local.lr: [0.1]}"]))
    assert plain[0].placed(tmp_path).output.label is None


def test_a_sweep_that_has_begun_keeps_the_spelling_of_numbers(tmp_path):
    """In its configuration; labels of its cases, and so names of their folders, are of the numbers."""
    labels = "{A: {output: {label: 1.10}}, B: {output: {label: 1_0}, rounds: 0x3}}"
    options = ["--vary", f"{{rows: {labels}, local.lr: [1.0e-1, 0.20], seed: [0, 1_0]}}", "--name", "1.10"]
    tree = read(TINY, options)
    sweep_results.keep(tree, tmp_path)
    for found in (cases(tree), cases(sweep_results.started_with(tmp_path))):
        configs = [case.placed(tmp_path) for case in found]
        assert {config.output.label for config in configs} == {"1.10, A", "1_0, B"}
        assert {config.name for config in configs} == {"1.10"}
        assert [case.slug for case in found[:4]] == ["A-0.1-0", "A-0.1-10", "A-0.2-0", "A-0.2-10"]
        assert {(config.rounds, config.local.lr) for config in configs[4:]} == {(3, 0.1), (3, 0.2)}


def test_a_sweep_in_python_has_runs_by_their_labels_and_a_table(tmp_path):
    place = {"folder": str(tmp_path), "id": "x"}
    vary = {"algorithm": {"mine": "fedavg", "theirs": "local"}, "local.lr": [0.1, 1], "seed": [3]}
    found = mpifl.sweep(TINY, vary=vary, output=place, rounds=1, only={"local.lr": [0.1]})
    assert [*found.runs] == [("mine", "0.1", "3"), ("theirs", "0.1", "3")]
    assert found.runs["theirs", "0.1", "3"].summary["algorithm"] == "local"
    assert [*found.table.columns[:4]] == ["algorithm", "local.lr", "seed", "accuracy_mean"]
    assert found.table["local.lr"].tolist() == [0.1, 0.1]
    assert found.table["seed"].tolist() == [3, 3]
    assert found.table["accuracy_mean"][1] == found.runs["theirs", "0.1", "3"].summary["accuracy_mean"]
    whole = mpifl.sweep(TINY, vary=vary, output=place, rounds=1)
    assert (len(found.table), len(whole.table), len(mpifl.load_sweep(whole.folder).runs)) == (2, 4, 4)
    one = mpifl.sweep(TINY, vary={"seed": [0]}, output=place | {"id": "y"}, rounds=1)
    assert [*one.runs] == ["0"], "one key, one label"
    with pytest.raises(UserError, match=r"is the folder of a sweep; .* mpifl\.load_sweep"):
        mpifl.load(one.folder)


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    for folder, message in (
        (tmp_path, "is not a sweep: it has no sweep.yaml"),
        (tmp_path / "x", "no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            mpifl.load_sweep(folder)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(read(TINY, ["--vary", "{seed: [0]}"])))
    with pytest.raises(UserError, match="has no complete case"):
        mpifl.load_sweep(tmp_path)


def test_a_sweep_takes_no_options_when_it_goes_on(tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text("vary: {seed: [0]}")
    assert main(["resume", str(tmp_path), "--rounds", "3"]) == 2
    assert "option = '--rounds'" in capsys.readouterr().err


def test_a_sweep_keeps_nothing_of_the_cases_before(tmp_path, monkeypatch):
    real, alive, held = running.build, [], []

    def build(*args):
        held.append(sum(ref() is not None for ref in alive))
        context = real(*args)
        alive.append(weakref.ref(context.learner))
        return context

    monkeypatch.setattr(running, "build", build)
    options = ["--vary", "{seed: [0, 1, 2]}", "--output.folder", str(tmp_path)]
    sweep(TINY, options, Single(), quiet=True)
    assert held == [0, 0, 0]


@pytest.mark.parametrize(
    ("first", "times"), [(0.0, 2), (sweep_results.FIRST_DRAWING_S, 1)], ids=["after each case", "at the end"]
)
def test_the_figure_of_a_sweep_shows_training_data_where_they_were_evaluated(
    first, times, tmp_path, monkeypatch
):
    drawn: list[Curve] = []
    monkeypatch.setattr(sweep_results, "FIRST_DRAWING_S", first)
    monkeypatch.setattr("mpifl.sweeps.results.draw_sweep", lambda curves, path: drawn.extend(curves))
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--evaluation.every", "1"]
    folder = sweep(TINY, [*place, "--vary", "{evaluation.train: [true, false]}"], Single(), quiet=True)
    with (folder / "tiny-True" / "metrics.csv").open() as lines:
        written = [float(row["accuracy_train_mean"]) for row in csv.DictReader(lines)]
    assert len(written) == 2
    assert [curve.train for curve in drawn] == [written] * times + [[]]


def test_a_sweep_of_rounds_has_no_staleness(tmp_path):
    options = ["--vary", "{seed: [0, 1]}", "--output.folder", str(tmp_path), "--output.id", "x"]
    assert main(["sweep", TINY, "-q", *options]) == 0
    text = (tmp_path / "tiny-x" / "sweep.md").read_text()
    assert "staleness" not in text
    assert text.count("\n") == 3, "one line for both seeds"
    assert " ± " in text


def test_a_sweep_varies_whole_configurations_below_its_own_keys():
    vary = {"configuration": ["algorithms/fedavg", "algorithms/apfl"], "seed": [0, 1]}
    found = cases({"rounds": 2, "vary": vary})
    assert [c.slug for c in found] == ["fedavg-0", "fedavg-1", "apfl-0", "apfl-1"]
    assert [(c.config.rounds, c.config.local.lr) for c in found] == [(2, 0.02)] * 2 + [(2, 0.1)] * 2


def test_a_sweep_whose_own_method_hides_those_it_varies_is_refused():
    """Six rows named after six methods were all FedAvg."""
    vary = {"configuration": ["algorithms/fedavg", "algorithms/fedprox"]}
    with pytest.raises(
        UserError, match=r"algorithm = .fedavg.: vary\.configuration algorithms/fedprox says fedprox"
    ):
        cases({"algorithm": {"name": "fedavg"}, "vary": vary})
    assert len(cases({"local": {"lr": 0.5}, "vary": vary})) == 2


def test_a_sweep_whose_own_keys_make_two_configurations_the_same_is_refused(tmp_path):
    tree = "name: {0}\nalgorithm: fedavg\nmodel: mlp\nlocal: {{lr: {1}}}\n"
    files = {name: tmp_path / f"{name}.yaml" for name in ("slow", "fast")}
    for (name, file), lr in zip(files.items(), (0.1, 0.2), strict=True):
        file.write_text(tree.format(name, lr))
    vary = {"configuration": {name: str(file) for name, file in files.items()}}
    assert [case.config.local.lr for case in cases({"rounds": 3, "vary": vary})] == [0.1, 0.2]
    with pytest.raises(UserError, match=r"the same run as slow below the sweep's own rounds, local"):
        cases({"rounds": 3, "local": {"lr": 0.5}, "vary": vary})


def test_a_run_of_a_sweep_is_refused_and_the_command_named(tmp_path, capsys):
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    assert main(["run", TINY, "-q", "--vary", "{seed: [0, 1]}", "--resume", *place]) == 2
    assert f"vary = 'seed': `mpifl sweep {TINY}` runs all" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["run", TINY, "-q", "--vary", "{seed: [0, 1]}", "--vary", "null", *place]) == 0
    assert (tmp_path / "tiny-x" / "summary.json").is_file()


def test_figures_over_seeds_are_means_with_standard_deviations():
    """1 and 3: mean 2, standard deviation sqrt(2)."""
    rows = [{"m": "a", "seed": s, "x": x, "bytes": 8} for s, x in (("0", 1.0), ("1", 3.0))]
    assert over_seeds(rows) == [{"m": "a", "x": "2 ± 1.4", "bytes": 8}]
    rows[0]["x"], rows[1]["x"] = 0.9, 0.9 + 1.2e-16
    assert over_seeds(rows) == [{"m": "a", "x": "0.9 ± 0", "bytes": 8}]


def test_figures_that_some_seeds_lack_say_of_how_many_they_are():
    """The first seed lacks y, the last x."""
    rows = [{"m": "a", "seed": "0", "x": 1.0}, {"m": "a", "seed": "1", "x": 3.0, "y": 5.0}]
    rows.append({"m": "a", "seed": "2", "y": 5.0})
    assert over_seeds(rows) == [{"m": "a", "x": "2 ± 1.4 (2 of 3)", "y": "5.0 (2 of 3)"}]


@pytest.mark.in_turn
def test_figures_are_shortened_where_they_are_shown_only(tmp_path):
    """Mean squared errors of targets of a thousandth are about a millionth."""
    x = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32)
    y = 0.001 * x @ np.array([[1.0], [-2.0], [0.5], [1.0]], np.float32)
    np.savez(tmp_path / "small.npz", x_train=x[:160], y_train=y[:160], x_test=x[160:], y_test=y[160:])
    data = f"{{source: {{name: npz, path: {tmp_path / 'small.npz'}}}, scenario: {{name: iid, clients: 4}}}}"
    tree = {"name": "small", "rounds": 20, "task": "regression", "model": {"name": "mlp", "hidden": [8]}}
    tree |= {"data": yaml.safe_load(data), "local": {"epochs": 2, "batch_size": 8, "lr": 0.1}}
    tree |= {"algorithm": "fedavg", "vary": {"seed": [0, 1]}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(tree))
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    folder = sweep(str(tmp_path / "small.yaml"), place, Single(), quiet=True)
    with (folder / "sweep.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    ends = [columns_of(folder / f"small-{seed}" / "metrics.csv")["mse_mean"][-1] for seed in (0, 1)]
    assert [float(row["mse_mean"]) for row in rows] == [float(end) for end in ends]
    assert max(map(float, ends)) < 5e-4
    mean = f"{np.mean([float(end) for end in ends]):.4g}"
    assert f"| {mean} ± " in (folder / "sweep.md").read_text()
    assert f"  {mean} +- " in as_text(final_table(compare([str(folder)])))


@for_each(
    ("value", "text"),
    [
        *((0.81234567, "0.8123"), (0.5, "0.5"), (1.0, "1.0"), (0.0, "0.0"), (12.3456789, "12.3457")),
        *((0.00014228, "0.0001423"), (1.23456e-6, "1.235e-06"), (-0.0123456, "-0.01235")),
        *((8, "8"), ("a", "a")),
    ],
)
def test_a_table_shows_four_decimals_or_four_digits(value, text):
    """Accuracies have the decimals that they always had."""
    assert table([{"x": value}]).splitlines()[-1] == f"| {text} |"


def test_groups_of_fewer_seeds_than_the_sweep_has_say_so(tmp_path):
    """Two of three seeds of the first method are complete, and all of the second."""
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "1"]
    rows = {"a": {"algorithm": "fedavg"}, "b": {"algorithm": "local"}}
    table = {"title": "T", "figures": {"ARI": {"of": "accuracy_mean"}}}
    tree = {"base": TINY, "name": "x", "vary": {"rows": rows, "seed": [0, 1, 2]}, "table": table}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    folder = sweep(str(tmp_path / "x.yaml"), place, Single(), quiet=True)
    whole = {name: (folder / name).read_text() for name in ("sweep.md", "table.md")}
    assert not any(" of " in text for text in whole.values())
    (folder / "x-a-1" / "summary.json").rename(tmp_path / "kept")
    part = Part.of(["rows=b"])
    sweep(str(tmp_path / "x.yaml"), place, Single(), quiet=True, part=part)
    short = {name: (folder / name).read_text() for name in whole}
    lines = [line.split(" | ") for line in short["sweep.md"].splitlines()]
    assert [line[:2] for line in lines[2:4]] == [["| a", "2 of 3"], ["| b", "3"]]
    assert lines[0][1] == "seeds"
    assert "| 2 of 3 |\n" in short["table.md"]
    assert all(text.endswith("\n\n5 of 6 cases are complete.\n") for text in short.values())
    (tmp_path / "kept").rename(folder / "x-a-1" / "summary.json")
    sweep(str(tmp_path / "x.yaml"), place, Single(), quiet=True, part=part)
    assert {name: (folder / name).read_text() for name in whole} == whole


@for_each(
    ("vary", "message"),
    [
        ({}, "vary = {}: name at least one key and its values"),
        (3, "vary = 3: name at least one key and its values"),
        ({"rounds": 3}, "vary.rounds = 3: use a list of values, or a mapping of labels to values"),
        ({"rounds": []}, "vary.rounds = .*: use a list of values"),
        ({"rounds": [1, 0]}, "rounds = 0: must be 1 or more"),
        ({"local.epoch": [1]}, "local.epoch = 1: unknown key"),
        ({"policy": ["rounds", "every_arrival"], "algorithm": ["fedavg", "cfl"]}, "CFL compares the uploads"),
        ({"rounds": [2, 2]}, "two cases have the same name; label the values"),
        ({"seed": {"a": 3, "b": 3}}, "vary = 'b': the same run as a; use other values of seed"),
        ({"local.lr": [0.1, 1.0], "seed": {"a": 0, "b": 0}}, "use other values of seed"),
        ({"local.lr": {"x" * 200: 0.1}}, "too long a name"),
        ({"rounds": [*range(1, 102)], "seed": [*range(100)]}, "vary = 10100: are more than 10000 cases"),
        ({2: [1]}, r"vary = \[2\]: is not a key"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_it_begins(vary, message):
    tree = {"algorithm": "fedavg", "model": "mlp", "vary": vary}
    with pytest.raises(UserError, match=message):
        cases(tree)


TABLE = """
algorithm: fedavg
model: mlp
rounds: 9
vary:
  rows:
    ours: {algorithm: {name: ifca, num_clusters: 2}}
    brief: {rounds: 1}
  columns:
    few: {local: {epochs: 2}, rows: {ours: {local: {epochs: 3}}}}
    many: {local: {momentum: 0.5}}
"""


def of_table(options, tmp_path):
    (tmp_path / "table.yaml").write_text(TABLE)
    every = cases(read(str(tmp_path / "table.yaml"), options))
    return {case.slug: case.config for case in every}


def test_options_count_in_every_case_over_what_rows_and_columns_say(tmp_path):
    before = of_table([], tmp_path)
    assert {slug: c.rounds for slug, c in before.items()} == {
        "ours-few": 9,
        "ours-many": 9,
        "brief-few": 1,
        "brief-many": 1,
    }
    assert [c.local.epochs for c in before.values()] == [3, 1, 2, 1]
    now = of_table(["--rounds", "4", "--local.epochs=7", "--local.lr", "0.5"], tmp_path)
    assert {(c.rounds, c.local.epochs, c.local.lr) for c in now.values()} == {(4, 7, 0.5)}
    assert {type(c.algorithm).__name__ for c in now.values()} == {"FedAvg", "IFCA"}
    python = laid(str(tmp_path / "table.yaml"), {"rounds": 4})
    assert {case.config.rounds for case in cases(python)} == {4}


def test_both_keys_of_a_cohort_are_one_where_an_option_counts_in_every_case():
    vary = "{rows: {half: {participation: 0.5}, few: {cohort_size: 3, rounds: 1}, all: {algorithm: local}}}"
    for options, cohort in ((["--cohort_size", "2"], (1.0, 2)), (["--participation", "0.25"], (0.25, None))):
        every = cases(read(TINY, ["--vary", vary, *options]))
        assert {(c.config.participation, c.config.cohort_size) for c in every} == {cohort}


def test_what_is_varied_keeps_the_keys_beside_it():
    """A word over a section of its name, and one seed of four."""
    tree = {"seed": 3, "algorithm": {"name": "fedprox", "mu": 0.5}}
    tree["vary"] = {"algorithm": ["fedprox", "fedavg"], "seed.training": [0, 1]}
    found = [case.config for case in cases(loader.merged(loader.read(TINY), tree))]
    assert [getattr(config.algorithm, "mu", None) for config in found] == [0.5, 0.5, None, None]
    assert [(config.seed.data, config.seed.training) for config in found] == [(3, 0), (3, 1)] * 2


def test_an_option_that_one_case_does_not_know_is_refused_and_the_case_named(tmp_path):
    with pytest.raises(
        UserError, match=r"algorithm.num_clusters = 3: unknown key.*\(in the case rows brief, "
    ):
        of_table(["--algorithm.num_clusters", "3"], tmp_path)


RULED_OUT = {
    "updates of remembered uploads": (
        "{algorithm: [fedavg, fedprox, {name: emdcfl}]}",
        ["--output.updates", "true"],
        r"output\.updates = True: clients .* leave it out \(in the case algorithm emdcfl\)",
    ),
    "momentum": (
        "{algorithm: [fedavg, fedprox, apfl]}",
        ["--local.momentum", "0.9"],
        r"local\.momentum = 0\.9: this method needs SGD without .* use 0 \(in the case algorithm apfl\)",
    ),
    "updates of a policy": (
        "{policy: [rounds, every_arrival]}",
        ["--output.updates", "true"],
        r"output\.updates = True: .* \(in the case policy every_arrival\)",
    ),
    "models of mixtures": (
        "{algorithm: [fedavg, fedprox, fedem]}",
        ["--output.client_models", "true"],
        r"output\.client_models = True: .* \(in the case algorithm fedem\)",
    ),
    "newcomers": (
        "{algorithm: [fedavg, fedprox, ucfl]}",
        ["--newcomers", "{share: 0.3, joins: 2}"],
        r"newcomers = 0\.3: .* \(in the case algorithm ucfl\)",
    ),
    "a stack": (
        "{system.stack: [0, 1, 2]}",
        ["--local", "{keep_optimizer: true, momentum: 0.9}"],
        r"system\.stack = 2: .* \(in the case system\.stack 2\)",
    ),
}


@pytest.mark.parametrize(("vary", "options", "message"), RULED_OUT.values(), ids=RULED_OUT)
def test_a_case_that_its_own_configuration_rules_out_is_refused_before_the_first(
    vary, options, message, tmp_path
):
    options = ["--vary", vary, *options, "--output.folder", str(tmp_path / "runs")]
    with pytest.raises(UserError, match=f"{message}$"):
        sweep(TINY, options, Single(), quiet=True)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=f"{message}$"):
        listed(read(TINY, options))


def test_a_case_that_only_the_data_rule_out_is_named(tmp_path):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "1"]
    message = r"cohort_size = 400: there are 8 clients.* for all \(in the case cohort_size many\)$"
    with pytest.raises(UserError, match=message):
        sweep(TINY, ["--vary", "{cohort_size: {few: 4, many: 400}}", *place], Single(), quiet=True)
    assert (tmp_path / "tiny-x" / "tiny-few" / "summary.json").exists()


def test_rows_that_only_leaves_out_need_neither_files_nor_valid_options(tmp_path, capsys):
    rows = "{here: {rounds: 1}, 'lr=0.2, gone': {local: {lr: 0.2}, rounds: 1}"
    rows += f", gone: {{algorithm: {tmp_path / 'gone.py'}:Mine}}, wrong: {{rounds: 0}}}}"
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    options = ["--vary", f"{{rows: {rows}}}", *place]
    with pytest.raises(UserError, match=r"gone.py.*\(in the case rows gone\)$"):
        sweep(TINY, options, Single(), quiet=True)
    assert not (tmp_path / "tiny-x").exists()
    folder = sweep(TINY, options, Single(), part=Part.of(["rows=here"]))
    assert "1 of 4 cases are complete" in (folder / "sweep.md").read_text()
    assert "3 of 4 cases are not complete" in capsys.readouterr().out
    again = ["resume", str(folder), "--only", "rows=lr=0.2, gone"]
    assert main(again) == 0
    assert [run.folder.name for run in mpifl.load_sweep(folder).runs.values()] == [
        "tiny-here",
        "tiny-lr_0.2__gone",
    ]
    sweep(TINY, options, Single(), quiet=True, part=Part.of(["rows=here,lr=0.2, gone"]))  # into the folder
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "gone.py" in said
    assert said.count("\n") == 1, "one line"
    assert main(["resume", str(folder), "--only", "rows=wrong"]) == 2
    assert "rounds = 0: must be 1 or more (in the case rows wrong)" in capsys.readouterr().err
    copy, _ = retime(str(folder), ["--network.name", "wired"])
    assert len(mpifl.load_sweep(copy).runs) == 2


def test_a_case_that_became_invalid_is_left_out_of_the_tables_and_stops_no_other(tmp_path, capsys):
    kept = tmp_path / "kept.py"
    kept.write_text("from mpifl.algorithms.fedavg import FedAvg as Mine\n")
    rows = f"{{here: {{}}, there: {{algorithm: {kept}:Mine}}}}"
    options = ["--vary", f"{{rows: {rows}}}", "--output.folder", str(tmp_path), "--output.id", "x"]
    options += ["--rounds", "1"]
    there = Part.of(["rows=there"])
    folder = sweep(TINY, options, Single(), quiet=True, part=there)
    kept.unlink()
    sweep(TINY, options, Single(), quiet=True, part=Part.of(["rows=here"]))
    assert [run.folder.name for run in mpifl.load_sweep(folder).runs.values()] == ["tiny-here"]
    with pytest.raises(UserError, match=r"kept\.py"):
        sweep(TINY, options, Single(), quiet=True, part=there)


def test_an_error_names_one_case_and_keeps_its_form():
    error = MethodError("FedAvg.aggregate", "no rows", "return some")
    named = error.in_case("seed 1")
    assert type(named) is MethodError
    assert str(named) == "FedAvg.aggregate: no rows; return some (in the case seed 1)"
    assert named.in_case("seed 1") is named, "another rank has named it"


@pytest.mark.parametrize(
    ("vary", "options", "message"),
    [
        (
            "{seed: [0, 1]}",
            ["--seed", "5"],
            "seed = 5: vary.seed gives each case its own; use --only seed=LABEL",
        ),
        ("{seed: {a: {data: 0}}}", ["--seed.model", "5"], "seed.model = 5: vary.seed gives"),
        ("{local.lr: [0.1, 0.2]}", ["--local", "{lr: 3.0}"], "local.lr = 3.0: vary.local.lr gives"),
        ("{algorithm: [fedavg, ifca]}", ["--algorithm.tau", "3"], "algorithm.tau = 3: vary.algorithm gives"),
        ("{cohort_size: [2, 4]}", ["--participation", "0.5"], "participation = 0.5: vary.cohort_size gives"),
    ],
)
def test_an_option_without_effect_is_refused(vary, options, message):
    with pytest.raises(UserError, match=message):
        read(TINY, ["--vary", vary, *options])


def test_a_table_has_the_columns_of_all_rows():
    text = table([{"a": 1, "b": 2}, {"a": 3, "c": 4}])
    assert text == "| a | b | c |\n| --- | ---: | ---: |\n| 1 | 2 |  |\n| 3 |  | 4 |\n"


def test_sections_are_labelled_by_name_and_mappings_by_their_keys():
    vary = {"delay": [{"name": "constant"}, {"name": "tiers"}], "rounds": {2: 10, True: 20}}
    found = cases({"algorithm": "fedavg", "model": "mlp", "vary": vary})
    assert [c.slug for c in found] == ["constant-2", "constant-True", "tiers-2", "tiers-True"]


@pytest.mark.parametrize(
    ("labels", "panel", "line"),
    [
        ({"a": "1", "b": "2", "delay": "wide"}, "delay: wide", "1, 2"),
        ({"configuration": "fedavg"}, "", "fedavg"),
        ({"configuration": "fedavg", "seed": "3"}, "", "fedavg"),
        ({"seed": "3"}, "", ""),
    ],
)
def test_a_case_has_a_panel_and_a_line_whatever_its_seed(labels, panel, line):
    curve = Curve(labels, "round", [1], [0.5], [])
    assert (curve.panel, curve.line) == (panel, line)


@pytest.mark.parametrize("column", ["accuracy_mean", "federation_bytes_up"])
def test_a_run_whose_tables_and_summary_disagree_is_read_by_nobody(column, tmp_path):
    folder = running.run(load(TINY, ["--output.folder", str(tmp_path)]), Single(), quiet=True)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, column: summary[column] / 2}))
    with pytest.raises(UserError, match=f"has {column} = .* in the last row of metrics.csv, "):
        mpifl.load(folder)
