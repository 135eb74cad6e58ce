"""Cases of a sweep that differ in drift take the steps before it once, to the results of cases alone."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from numpy.testing import assert_allclose
from support.runs import CONFIG
from support.sweeps import records, results, swept

from mpifl.comm.single import Single
from mpifl.core import beginning
from mpifl.core.beginning import STEPS
from mpifl.core.capabilities import STATISTICS
from mpifl.core.errors import Stopped
from mpifl.driver import shared_steps
from mpifl.experiment import loader
from mpifl.results.recorder import Recorder
from mpifl.supervision.logging import warn_once
from mpifl.sweeps import sweep as sweeping
from mpifl.sweeps.cases import beginnings, cases, in_order, read, table_if_any
from mpifl.sweeps.forecast import lines, steps_taken
from mpifl.sweeps.sweep import listed

GROUPS = ["--data.scenario", "{name: rotated, angles: [0, 90, 180, 270], clients: 8, validation: 0.2}"]
KINDS = ("swap", "label", "split", "merge", "arrival", "input", "concept")
ARRIVALS = ["--policy", "every_arrival", "--delay", "exponential", "--cohort_size", "3"]
BUFFER = ["--policy", "{name: buffer, size: 2}", "--delay", "exponential", "--cohort_size", "3"]
AGAIN = ["--recluster.visits", "2"]
METHODS = {  # options, and the step at which data change
    "fedavg, rounds": (["--rounds", "8", "--participation", "0.5"], 5),
    "fedavg, arrivals": ([*ARRIVALS, "--rounds", "20", "--evaluation.every", "3"], 11),
    "pacfl again, buffer": (["--algorithm", "pacfl", *BUFFER, *AGAIN, "--rounds", "10"], 6),
    "emdcfl again, rounds": (
        ["--algorithm", "{name: emdcfl, against: train, sample_cap: 24}", *AGAIN, "--rounds", "6"],
        4,
    ),
    "emdcfl again, arrivals": (
        [
            "--algorithm",
            "{name: emdcfl, against: train, sample_cap: 24}",
            *AGAIN,
            *ARRIVALS,
            "--rounds",
            "12",
        ],
        7,
    ),
    "feddrift": (["--algorithm", "{name: feddrift, period: 2}", "--rounds", "8"], 5),
    "fedrep, state at clients": (["--algorithm", "fedrep", "--rounds", "6", "--evaluation.by", "[group]"], 4),
    "scaffold, compressed": (
        ["--algorithm", "scaffold", "--payload.compression", "{name: top_k, share: 0.5}", "--rounds", "6"],
        4,
    ),
    "ucfl, updates written": (["--algorithm", "ucfl", "--rounds", "6", "--output.updates", "true"], 4),
    "patience": (["--rounds", "12", "--stop", "{metric: loss, patience: 3}", "--evaluation.every", "1"], 4),
}
USUAL = ("fedavg, arrivals", "emdcfl again, rounds")  # the others are nightly


def worlds(at: int, kinds: tuple[str, ...] = ("swap", "label")) -> list[str]:
    """Return options of cases that differ in drift: none, at a step, and two steps later."""
    named = [f"{kind}: {{drift: {{kind: {kind}, at: [{at}]}}}}" for kind in kinds]
    later = f"later: {{drift: {{kind: swap, at: [{at + 2}]}}}}"
    return [*GROUPS, "--vary", f"{{columns: {{none: {{}}, {', '.join(named)}, {later}}}}}"]


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.nightly]) for name in METHODS]
)
def test_shared_steps_give_the_results_of_cases_alone(which, tmp_path):
    options, at = METHODS[which]
    alone, shared = (swept(tmp_path, [*worlds(at), *options], share) for share in ("false", "true"))
    assert results(shared) == results(alone)
    taken = {name: record.get(STEPS) for name, record in records(shared).items()}
    once = {"tiny-swap": 1}
    assert taken == {"tiny-swap": {"": 1}, "tiny-label": once, "tiny-later": once, "tiny-none": once}


@pytest.mark.nightly
@pytest.mark.parametrize("first", KINDS)
def test_any_kind_of_drift_leaves_its_steps_to_any_other(first, tmp_path):
    """The case that takes them writes other columns than some of the others."""
    kinds = (first, *(kind for kind in KINDS if kind != first))
    options = [*worlds(4, kinds), "--rounds", "6", "--evaluation.every", "1"]
    alone, shared = (swept(tmp_path, options, share) for share in ("false", "true"))
    assert results(shared) == results(alone)
    assert [name for name, record in records(shared).items() if "" in record[STEPS]] == [f"tiny-{first}"]


def test_every_step_before_the_change_is_taken_once(tmp_path, monkeypatch):
    """Of 6 steps the first 3 are shared: evaluated are 6 of the first case, 3 of each of the three others."""
    evaluated, record = Counter(), Recorder.record_evaluation

    def counted(self, step, *given, **more):
        evaluated[self.folder.name] += 1
        return record(self, step, *given, **more)

    monkeypatch.setattr(Recorder, "record_evaluation", counted)
    folder = swept(tmp_path, [*worlds(4), "--rounds", "6", "--evaluation.every", "1"], None, "x")
    assert evaluated == {"tiny-swap": 6, "tiny-label": 3, "tiny-later": 3, "tiny-none": 3}
    with (folder / "beginnings.csv").open() as table:
        rows = {row["columns"]: (row["phase"], row["taken"], row["from"]) for row in csv.DictReader(table)}
    assert rows["none"] == (STEPS, "1", "tiny-swap")
    assert not (folder / sweeping.BEGINNINGS).exists(), "all cases are complete"
    assert not [*folder.glob(f"*/{shared_steps.COPYING}")]


def shares(vary: str, *options: str) -> dict[str, str]:
    """Return case -> the number of steps that it shares, of 9; cases without are left out."""
    tree = read(str(CONFIG), [*GROUPS, "--rounds", "9", "--vary", vary, *options])
    found = beginnings(cases(tree), table_if_any(tree))
    return {slug: of[STEPS].rpartition(".")[2] for slug, of in found.items() if STEPS in of}


SWAP = "{drift: {kind: swap, at: [5]}}"


def test_cases_share_steps_only_if_nothing_but_drift_differs():
    pair = f"columns: {{none: {{}}, swap: {SWAP}}}"
    assert shares(f"{{{pair}}}") == {"none": "4", "swap": "4"}
    assert shares(f"{{{pair}, seed: [0, 1]}}") == {f"{w}-{s}": "4" for w in ("none", "swap") for s in (0, 1)}
    assert shares(f"{{columns: {{a: {SWAP}, b: {{local: {{lr: 0.2}}}}}}}}") == {}
    assert shares("{local.lr: [0.1, 0.2]}") == {}, "none of them drifts"
    for told in (["--output.trace", "true"], ["--stop.wall_seconds", "900"], ["--algorithm", "oracle"]):
        assert shares(f"{{{pair}}}", *told) == {}
    assert shares(f"{{{pair}}}", "--system.share_beginnings", "false") == {}
    assert shares(f"{{{pair}}}", *ARRIVALS) == {"none": "4", "swap": "4"}
    assert shares(f"{{{pair}}}", *ARRIVALS, "--clock", "{name: wall, scale: 0.001}") == {}
    seconds = "{columns: {a: {drift: {kind: swap, at_s: [5]}}, b: {drift: {kind: label, at_s: [5]}}}}"
    assert shares(seconds, *ARRIVALS) == {}, "the step of the change is not known"


def test_the_number_of_shared_steps_is_that_which_saves_most():
    """1 step of four cases saves 3, 6 steps of three cases 12."""
    drifts = {name: f"{{drift: {{kind: swap, at: [{at}]}}}}" for name, at in (("a", 2), ("b", 7), ("c", 8))}
    vary = ", ".join(f"{name}: {drift}" for name, drift in drifts.items())
    assert shares(f"{{columns: {{{vary}, none: {{}}}}}}") == {"b": "6", "c": "6", "none": "6"}


def test_a_case_without_drift_runs_after_those_that_leave_it_their_steps():
    drifts = f"swap: {SWAP}, lr: {{local: {{lr: 0.2}}}}, label: {SWAP.replace('swap', 'label')}"
    vary = f"{{algorithm: [fedavg, local], columns: {{none: {{}}, {drifts}}}}}"
    tree = read(str(CONFIG), [*GROUPS, "--rounds", "9", "--vary", vary])
    every = cases(tree)
    assert [every[i].slug for i in in_order(every, beginnings(every, None))] == [
        *("fedavg-swap", "fedavg-lr", "fedavg-label", "fedavg-none"),
        *("local-swap", "local-lr", "local-label", "local-none"),
    ]
    assert in_order(every, {}) == [*range(8)]


def test_a_list_of_cases_says_how_often_steps_are_taken():
    options = [*worlds(4), "--rounds", "6"]
    assert "steps before data change: computed 1 times for 4 cases" in listed(read(str(CONFIG), options))


def test_a_forecast_counts_shared_steps_once():
    """Of 8 steps, 4 cases share 6: each takes 2 itself and a fourth of 6, together 3.5 of 8."""
    found = steps_taken({name: {STEPS: "abc.6"} for name in "abcd"} | {"e": {}}, dict.fromkeys("abcde", 8))
    assert_allclose([*found.values()], [3.5 / 8] * 4)
    assert [*found] == [*"abcd"]


def test_the_forecast_of_a_sweep_is_less_by_what_cases_share():
    """Four cases of 60 s share 3 of 6 steps: 30 s once, and 30 s of each."""
    said = lines(read(str(CONFIG), [*worlds(4), "--rounds", "6"]), 1, lambda config: 60.0)
    assert "about 2 min 30 s" in said[0]


# -- copies that do not fit ----------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path):
    """Return a function that runs one case with the shared steps of a folder, and what it found."""
    folders = {STEPS: tmp_path / "shared" / "steps-x.3"}

    def run(name: str, kind: str | None, *more: str, **options):
        given = [*GROUPS, "--rounds", "6", "--evaluation.every", "1", "--output.folder", str(tmp_path)]
        given += ["--output.id", name, *more]
        given += [] if kind is None else ["--drift", f"{{kind: {kind}, at: [4]}}"]
        config = loader.load(str(CONFIG), given)
        folder = tmp_path / f"tiny-{name}"
        resumed = folder if (folder / "run.json").exists() else None
        sweeping.run(config, Single(), True, resumed, beginning=folders, **options)
        return {k: v for k, v in results(tmp_path)[f"tiny-{name}"].items() if k != "beginning"}

    warn_once.cache_clear()
    run.copy = folders[STEPS]
    return run


def origin(tmp_path: Path, name: str) -> list[str]:
    """Return from which case a run took its first steps."""
    return [*json.loads((tmp_path / f"tiny-{name}" / "summary.json").read_text())["beginning"][STEPS]]


def test_a_damaged_copy_is_not_used(begun, tmp_path, capsys):
    begun("first", "swap")
    alone = begun("alone", "label")
    assert origin(tmp_path, "alone") == ["tiny-first"]
    os.truncate(next(begun.copy.glob("*/step-*/tensors.safetensors")), 100)
    assert begun("again", "label") == alone
    assert origin(tmp_path, "again") == [""]
    assert "this case takes all steps itself" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["surroundings", "data"])
def test_a_copy_of_another_machine_or_of_other_data_is_not_used(begun, tmp_path, entry, monkeypatch):
    begun("first", "swap")
    read_of = shared_steps.checkpoint_files.latest

    def other(*given):
        content = read_of(*given)
        content.about[entry]["processor"] = "another"
        return content

    monkeypatch.setattr(shared_steps.checkpoint_files, "latest", other)
    begun("second", "label")
    assert origin(tmp_path, "second") == [""]


@pytest.mark.parametrize("limit", ["disk", "size"])
def test_a_copy_that_cannot_be_written_is_said_and_ends_no_case(limit, begun, tmp_path, monkeypatch, capsys):
    def full(*given, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    if limit == "disk":
        monkeypatch.setattr(shutil, "copytree", full)
    else:
        monkeypatch.setattr(beginning, "MOST_BYTES", 1000)
    begun("first", "swap")
    assert {"disk": "No space left on device", "size": "holds 0 MB"}[limit] in capsys.readouterr().err
    assert not begun.copy.exists()
    assert not (tmp_path / "tiny-first" / shared_steps.COPYING).exists()


@pytest.mark.parametrize("where", [(shutil, "copyfile"), (shared_steps.checkpoint_files, "write")])
def test_a_case_that_cannot_copy_the_steps_takes_them_itself(where, begun, tmp_path, monkeypatch, capsys):
    alone = begun("alone", "label")
    begun("first", "swap")
    made, calls = getattr(*where), itertools.count()

    def full(*given):
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return made(*given)

    monkeypatch.setattr(*where, full)
    assert begun("second", "label") == alone
    assert origin(tmp_path, "second") == [""]
    assert "this case takes them itself" in capsys.readouterr().err


def test_a_case_that_stops_after_shared_steps_goes_on_to_the_same_results(begun, tmp_path):
    begun("first", "swap")
    whole = begun("whole", "label")
    asked = itertools.count()
    with pytest.raises(Stopped) as end:
        begun("parts", "label", asked_to_stop=lambda: next(asked) > 0)
    assert end.value.step == 4
    shutil.rmtree(begun.copy)
    assert begun("parts", "label") == whole
    assert origin(tmp_path, "parts") == ["tiny-first"]


def test_a_case_that_was_killed_before_its_first_checkpoint_takes_the_steps_when_it_begins_again(
    begun, tmp_path
):
    whole = begun("whole", "label")
    shutil.rmtree(begun.copy)
    begun("first", "swap")
    (tmp_path / "tiny-killed").mkdir()
    for name in ("config.yaml", "run.json"):
        shutil.copy(tmp_path / "tiny-whole" / name, tmp_path / "tiny-killed")
    assert begun("killed", "label") == whole
    assert origin(tmp_path, "killed") == ["tiny-first"]


def test_statistics_that_came_with_the_steps_are_not_said_to_be_computed(tmp_path):
    options = [*worlds(4), "--rounds", "6", "--algorithm", "ucfl"]
    found = records(swept(tmp_path, options, "true"))
    assert found["tiny-none"] == {STEPS: {"tiny-swap": 1}}
    assert STATISTICS not in found["tiny-swap"], "drift differs, so statistics alone are shared by no two"


# -- several ranks -------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("which", ["emdcfl again, arrivals", "fedrep, state at clients"])
def test_results_on_two_ranks_are_those_of_cases_alone(which, jobs, mpirun, tmp_path):
    options, at = METHODS[which]
    alone = swept(tmp_path, [*worlds(at), *options], "false")
    given = [*worlds(at), *options, "--output.folder", tmp_path, "--output.id", "two", "-q"]
    end = mpirun(2, "-m", "mpifl", "sweep", CONFIG, *given, "--jobs", jobs, timeout=900)
    assert end.returncode == 0, end.stderr
    assert results(tmp_path / "tiny-two") == results(alone)
    taken = Counter(name for record in records(tmp_path / "tiny-two").values() for name in record[STEPS])
    assert taken[""] < 4, "some case took the steps of another"
