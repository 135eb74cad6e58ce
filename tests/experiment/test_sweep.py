"""Sweeps: every combination of what a configuration varies, in one folder with a table and a figure."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import weakref
from pathlib import Path

import pytest

from mpifl.cli import main
from mpifl.comm.transport import Single
from mpifl.core.errors import Stopped, UserError
from mpifl.experiment import loader
from mpifl.experiment import run as running
from mpifl.experiment.loader import load
from mpifl.experiment.sweep import cases, over_seeds, sweep, table
from mpifl.results.sweep_figure import Curve

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
VARY = "{algorithm.alpha: [0.3, 0.6], delay: {even: constant, uneven: {name: lognormal, sigma: 2}}}"
ASYNC = ["--algorithm", "fedasync", "--policy", "every_arrival", "--cohort_size", "4", "--rounds", "6"]
ASYNC += ["--evaluation.every", "1"]


def test_each_run_of_a_job_counts_its_own_bytes(tmp_path):
    transport, counted = Single(), []
    for name in ("a", "b"):
        transport.traffic("send", "test", sent=5, messages=1)
        config = load(TINY, ["--output.folder", str(tmp_path), "--output.id", name])
        folder = running.run(config, transport, quiet=True)
        counted.append(json.loads((folder / "summary.json").read_text())["mpi_bytes"])
    assert counted == [5, 5]


def test_a_sweep_runs_every_combination_and_writes_a_table_and_a_figure(tmp_path, capsys):
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    folder = sweep(TINY, ["--vary", VARY, *ASYNC, *place], Single())
    said = capsys.readouterr().out
    assert "case 1/4: algorithm.alpha 0.3, delay even\n" in said
    assert said.count("round 6/6  accuracy") == 4
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
    assert (rows[0]["second_half_mean"], rows[0]["second_half_lowest"]) == (
        str(round(sum(late) / 3, 4)),
        str(round(min(late), 4)),
    )
    assert all(float(r["staleness_mean"]) > 0 for r in rows)
    assert {p.name for p in folder.iterdir()} >= {"tiny-0.3-even", "tiny-0.6-uneven", "sweep.md", "sweep.png"}
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sweep.md").read_text().count("\n") == 6


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

    def stopped(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Stopped(0, "here")
        return real(*args)

    monkeypatch.setattr("mpifl.experiment.sweep.run", stopped)
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


def test_a_sweep_of_rounds_has_no_staleness(tmp_path):
    options = ["--vary", "{seed: [0, 1]}", "--output.folder", str(tmp_path), "--output.id", "x"]
    assert main(["study", TINY, "-q", *options]) == 0
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


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({}, "vary = {}: name at least one key and its values"),
        (3, "vary = 3: name at least one key and its values"),
        ({"rounds": 3}, "vary.rounds = 3: take a list of values, or a mapping of labels to values"),
        ({"rounds": []}, "vary.rounds = .*: take a list of values"),
        ({"rounds": [1, 0]}, "rounds = 0: take at least one round"),
        ({"local.epoch": [1]}, "local.epoch = 1: unknown key"),
        ({"policy": ["rounds", "every_arrival"], "algorithm": ["fedavg", "cfl"]}, "CFL compares the uploads"),
        ({"rounds": [2, 2]}, "two cases have the same name; label the values"),
        ({"seed": {"a": 3, "b": 3}}, "vary = 'b': the same run as a; take other values of seed"),
        ({"local.lr": [0.1, 1.0], "seed": {"a": 0, "b": 0}}, "take other values of seed"),
        ({"local.lr": {"x" * 200: 0.1}}, "too long a name"),
        ({"rounds": [*range(1, 102)], "seed": [*range(100)]}, "vary = 10100: are more than 10000 cases"),
        ({2: [1]}, r"vary = \[2\]: is no key"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_it_begins(vary, message):
    tree = {"algorithm": "fedavg", "model": "mlp", "vary": vary}
    with pytest.raises(UserError, match=message):
        cases(tree)


def test_a_table_has_the_columns_of_all_rows():
    text = table([{"a": 1, "b": 2}, {"a": 3, "c": 4}])
    assert text == "| a | b | c |\n| --- | --- | --- |\n| 1 | 2 |  |\n| 3 |  | 4 |\n"


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


def test_old_keys_and_both_units_of_a_cohort_can_be_varied():
    tree = loader.merged(loader.read(TINY), {"vary": {"participation": [0.5, 4], "system.compiled": [False]}})
    found = [(c.config.participation, c.config.cohort_size, c.config.system.kernels) for c in cases(tree)]
    assert found == [(0.5, None, False), (1.0, 4, False)]
