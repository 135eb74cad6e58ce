"""Callbacks: what they are told, that they change nothing, and what becomes of their errors."""

from __future__ import annotations

import csv
import importlib.util
import pickle
import re
import time
from types import SimpleNamespace

import pytest
import yaml
from support import toy
from support.runs import CONFIG

import mpifl
from mpifl.core.errors import CodeFailed
from mpifl.driver.run_callbacks import RunCallbacks
from mpifl.results.callbacks import CallbackFailed, Callbacks
from mpifl.results.trackers import Logged

FILE = """
class Counts:
    def __init__(self, path, fails_at=0):
        self.path, self.fails_at = path, fails_at

    def on_round(self, done):
        with open(self.path, "a") as file:
            print(done.step, done.run.ranks, file=file)
        if done.step == self.fails_at:
            raise ValueError("no space for this")

class Nothing:
    pass
"""


class Keeps:
    """Keeps what it is told; raises in a hook at a step."""

    def __init__(self, hook: str = "", step: int = 0) -> None:
        self.fails = hook, step
        self.told = []

    def _keep(self, hook, value, step=0):
        self.told.append((hook, value))
        if self.fails == (hook, step):
            raise ValueError("so be it")

    def on_start(self, info):
        self._keep("on_start", info)

    def on_round(self, done):
        self._keep("on_round", done, done.step)

    def on_evaluation(self, found):
        self._keep("on_evaluation", found, found.step)

    def on_end(self, run):
        self._keep("on_end", run)

    def on_stop(self, reason):
        self._keep("on_stop", reason)

    @property
    def hooks(self):
        return [(hook, getattr(value, "step", None)) for hook, value in self.told]


def tiny(tmp_path, name, **changes):
    """Return what `mpifl.run` gives for the tiny configuration."""
    return mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "id": name, "model": False}, **changes)


def test_rounds_and_evaluations_are_told_in_order_and_change_nothing(tmp_path):
    keeps, options = Keeps(), {"rounds": 3, "evaluation": {"every": 2, "at_start": True}, "cohort_size": 5}
    plain = tiny(tmp_path, "plain", **options)
    run = tiny(tmp_path, "told", callbacks=[keeps], **options)
    assert keeps.hooks == [
        *(("on_start", 0), ("on_evaluation", 0), ("on_round", 1), ("on_round", 2), ("on_evaluation", 2)),
        *(("on_round", 3), ("on_evaluation", 3), ("on_end", None)),
    ]
    assert (run.summary["digest"], run.label) == (plain.summary["digest"], plain.label)
    info, last = keeps.told[0][1], keeps.told[-2][1]
    assert (info.folder, info.method, info.rounds, info.resumed) == (run.folder, "fedavg", 3, False)
    with pytest.raises(TypeError):
        info.config["local"]["lr"] = 2
    with (run.folder / "metrics.csv").open(newline="") as lines:
        written = list(csv.DictReader(lines))[-1]
    assert {name: str(value) for name, value in last.metrics.items()} == written
    sums = [sum(run.visits[run.visits["step"] <= step]["bytes_up"]) for step in (1, 2, 3)]
    assert [told.bytes_up for hook, told in keeps.told if hook == "on_round"] == sums
    assert last.bytes_down == run.summary["federation_bytes_down"]
    cohorts = [told.clients for hook, told in keeps.told if hook == "on_round"]
    assert [set(run.visits[run.visits["step"] == s]["client"]) for s in (1, 2, 3)] == [*map(set, cohorts)]
    assert {k: dict(v)["accuracy"] for k, v in last.clients.items()} == dict(
        zip(run.clients["client"], run.clients["accuracy"], strict=True)
    )


@pytest.mark.parametrize(
    "policy", [{"name": "rounds"}, {"name": "buffer", "size": 3}], ids=["rounds", "events"]
)
def test_a_callback_that_raises_stops_the_run_and_a_resumed_one_ends_alike(tmp_path, policy):
    method = "fedavg" if policy["name"] == "rounds" else "fedbuff"
    options = {"rounds": 4, "policy": policy, "algorithm": method, "evaluation": {"every": 1}}
    options["delay"] = {"name": "exponential", "mean_s": 2.0}
    whole = tiny(tmp_path, "whole", **options)
    broken, other = Keeps("on_round", 2), Keeps()
    with pytest.raises(ValueError, match="so be it") as e:
        tiny(tmp_path, "broken", callbacks=[other, broken], **options)
    folder, (note,) = tmp_path / "tiny-broken", e.value.__notes__
    assert re.search(r"test_callbacks:Keeps\.on_round, after step 2: ValueError: so be it", note)
    assert f"state written; go on with: mpifl resume {folder}" in note
    assert e.traceback[-1].name == "_keep"
    assert isinstance(e.value.failed, CodeFailed)
    assert "raise ValueError" in e.value.failed.trace
    assert "run.py" not in e.value.failed.trace
    assert other.hooks[-3:] == [("on_round", 2), ("on_evaluation", 2), ("on_stop", None)]
    again = Keeps()
    run = mpifl.resume(folder, callbacks=[again])
    assert again.hooks[:2] == [("on_start", 2), ("on_round", 3)]
    assert again.told[0][1].resumed
    assert again.told[0][1].id == broken.told[0][1].id
    assert run.summary["digest"] == whole.summary["digest"]
    assert run.metrics["round"].tolist() == [1, 2, 3, 4]
    assert [t.virtual_seconds for hook, t in again.told if hook == "on_evaluation"] == whole.metrics[
        "virtual_seconds"
    ].tolist()[2:]


class Pruned(Exception):
    """An exception of another library, whose arguments are not those of its class."""

    def __init__(self, trial, step):
        super().__init__(f"trial {trial} at step {step}")


def test_an_exception_of_a_callback_keeps_its_type_and_cause(tmp_path):
    class Prunes:
        def on_evaluation(self, found):
            try:
                found.metrics["no such column"]
            except KeyError as error:
                raise Pruned(3, found.step) from error

    with pytest.raises(Pruned, match="trial 3 at step 1") as error:
        tiny(tmp_path, "one", evaluation={"every": 1}, callbacks=[Prunes()])
    assert isinstance(error.value.__cause__, KeyError)
    assert error.value.__context__ is error.value.__cause__
    assert error.traceback[-1].name == "on_evaluation"
    (note,) = error.value.__notes__
    assert "Prunes.on_evaluation, after step 1: Pruned: trial 3 at step 1; stopped after step 1" in note
    assert mpifl.resume(tmp_path / "tiny-one").summary["rounds"] == 2


def test_an_exception_travels_to_other_ranks_if_it_can():
    """One whose arguments are not those of its class cannot be sent: those ranks get `CodeFailed`."""
    failed = pickle.loads(pickle.dumps(CallbackFailed("text", "trace", KeyError("gone"))))
    assert (failed.text, failed.trace, type(failed.cause), failed.cause.args) == (
        *("text", "trace"),
        *(KeyError, ("gone",)),
    )
    failed = pickle.loads(pickle.dumps(CallbackFailed("text", "trace", Pruned(3, 1))))
    assert (failed.text, failed.cause) == ("text", None)


@pytest.mark.parametrize("policy", ["rounds", "every_arrival"])
def test_the_wall_time_of_a_resumed_run_counts_the_seconds_before(tmp_path, policy):
    class Sleeps:
        def on_round(self, done):
            time.sleep(1)
            raise ValueError("enough")

    method = "fedavg" if policy == "rounds" else "fedasync"
    with pytest.raises(ValueError, match="enough"):
        tiny(tmp_path, "one", policy=policy, algorithm=method, rounds=2, callbacks=[Sleeps()])
    run = mpifl.resume(tmp_path / "tiny-one")
    assert run.summary["wall_seconds"] >= run.metrics["seconds"].iloc[-1] > 1


@pytest.mark.parametrize(("hook", "step"), [("on_round", 2), ("on_end", 0)])
def test_a_run_whose_callback_raises_at_its_end_is_complete(tmp_path, hook, step):
    with pytest.raises(ValueError, match="so be it") as error:
        tiny(tmp_path, "one", callbacks=[Keeps(hook, step)])
    assert re.search(f"{hook}.*; the run itself is complete", error.value.__notes__[0])
    assert mpifl.load(tmp_path / "tiny-one").summary["rounds"] == 2


def test_a_run_that_was_killed_before_its_callbacks_were_told_of_its_end_tells_them_when_resumed(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "end", lambda self: None)  # as if it was killed there
        tiny(tmp_path, "one", callbacks=[Keeps()])
    late, never = Keeps(), Keeps()
    run = mpifl.resume(tmp_path / "tiny-one", callbacks=[late])
    assert late.hooks == [("on_start", 2), ("on_end", None)]
    info, told = (value for hook, value in late.told)
    assert (info.resumed, info.restored, info.method, info.num_clients) == (True, True, "fedavg", 8)
    assert (told.summary, info.folder) == (run.summary, run.folder)
    mpifl.resume(tmp_path / "tiny-one", callbacks=[never])
    assert never.told == []


def test_a_callback_that_raises_at_the_start_lets_nothing_be_trained(tmp_path):
    with pytest.raises(ValueError, match="so be it") as error:
        tiny(tmp_path, "one", callbacks=[Keeps("on_start")])
    assert re.search(r"on_start, before the first step: .*; nothing was trained", error.value.__notes__[0])
    assert not (tmp_path / "tiny-one" / "metrics.csv").exists()


REFUSED = {
    "tensorbord": "name one of tensorboard, wandb, mlflow",
    "7": "name one of",
    "{name: tensorboard, colour: red}": "unexpected keyword argument 'colour'; its options: folder",
    "{name: wandb, mode: sometimes}": "use one of offline, online, disabled",
    "FILE:Nothing": "has none of the methods on_start",
    "FILE:Counts": "missing a required argument: 'path'",
    "FILE:Absent": "has no 'Absent'",
}


@pytest.mark.parametrize(("entry", "said"), REFUSED.items())
def test_what_cannot_be_called_is_refused_before_a_folder_is_made(tmp_path, entry, said):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    entry = yaml.safe_load(entry.replace("FILE", str(file)))
    with pytest.raises(mpifl.UserError, match=re.escape(said)) as error:
        mpifl.run(str(CONFIG), output={"folder": str(tmp_path / "runs"), "callbacks": [entry]})
    assert error.value.key.startswith("output.callbacks")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "given", [Keeps(), "tensorboard", ["tensorboard"], {"name": "wandb"}, iter([Keeps()])]
)
def test_callbacks_that_are_no_list_of_objects_are_refused_before_a_folder_is_made(tmp_path, given):
    for call in (mpifl.run, mpifl.resume):
        with pytest.raises(mpifl.UserError, match=r"^callbacks = .*: .*objects"):
            call(str(CONFIG), output={"folder": str(tmp_path)}, callbacks=given)
    assert not [*tmp_path.iterdir()]


def test_a_tracker_without_its_library_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("mpifl.core.optional_packages.find_spec", lambda name: None)
    with pytest.raises(
        mpifl.UserError, match=r'output\.callbacks = .mlflow.: .* pip install "mpifl\[mlflow\]"'
    ):
        mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "callbacks": ["mlflow"]})


def test_an_end_without_a_text_of_its_own_is_told_by_its_name(tmp_path):
    class Interrupts(Keeps):
        def on_round(self, done):
            raise KeyboardInterrupt

    watcher = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        mpifl.run(str(CONFIG), output={"folder": str(tmp_path)}, callbacks=[watcher])
    assert watcher.told[-1] == ("on_stop", "KeyboardInterrupt")


def test_an_error_while_stopping_is_a_warning_and_the_others_are_told(capsys):
    broken, other = Keeps("on_stop"), Keeps()
    Callbacks([("mine", broken), ("other", other)]).stop("why")
    assert other.told == [("on_stop", "why")]
    assert "callback mine.on_stop: ValueError: so be it" in capsys.readouterr().err


@pytest.mark.nightly
def test_over_ranks_rank_0_alone_is_told_and_an_error_is_one_message(mpirun, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    told = f"[{{name: '{tmp_path}/mine.py:Counts', path: '{tmp_path}/told', fails_at: 2}}]"
    options = ["--rounds", "4", "--output.callbacks", told, "--output.folder", tmp_path, "--output.id", "one"]
    done = mpirun(3, "-m", "mpifl", "run", CONFIG, "-q", *options, env=toy.PYTHONPATH, timeout=300)
    assert done.returncode == 1
    assert (tmp_path / "told").read_text() == "1 3\n2 3\n"
    said = "mine.py:Counts.on_round, after step 2: ValueError: no space for this; stopped after step 2"
    assert done.stderr.count(said) == 1
    assert done.stderr.count("Traceback") == 1


def test_rounds_that_a_resumed_run_repeats_are_not_logged_twice(tmp_path):
    """Killed after round 3 and resumed from the checkpoint of round 1; from the start all is logged again."""
    told: list[int] = []

    def follow(resumed: bool, steps: list[int]) -> None:
        config = {"clock": {"name": "virtual"}}
        info = SimpleNamespace(id="one", folder=tmp_path, resumed=resumed, config=config)
        logged = Logged(info, "mlflow")
        for step in filter(logged.is_new, steps):
            told.append(step)
            logged.note(step)

    follow(False, [0, 1, 2, 3])
    follow(True, [2, 3, 4])
    follow(True, [5])
    assert told == [0, 1, 2, 3, 4, 5]
    follow(False, [0])
    assert told[-1] == 0
