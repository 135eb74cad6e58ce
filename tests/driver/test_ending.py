"""Runs that end before their last round: by rules of `stop`, and by callbacks that return STOP."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.nightly import covering
from support.refusal import refusal_of
from support.runs import CONFIG

import mpifl
from mpifl.analysis.report_data import facts
from mpifl.cli import main

EVENTS = {
    "algorithm": "fedbuff",
    "policy": {"name": "buffer", "size": 3},
    "delay": {"name": "exponential", "mean_s": 2.0},
}
KINDS = {"rounds": {}, "events": EVENTS}
RULES = {
    "target": {"metric": "accuracy_worst", "target": 0.4},
    "patience": {"metric": "loss", "patience": 2, "min_delta": 0.05},
    "seconds": {"seconds": 9.5},
    "bytes": {"bytes": 420_000},
}


def tiny(tmp_path, name, **changes):
    """Return what `mpifl.run` gives for the tiny configuration, evaluated every second step."""
    given = {"rounds": 60, "evaluation": {"every": 2}, **changes}
    return mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "id": name}, **given)


class Breaks:
    """Raises an exception after a step."""

    def __init__(self, step):
        self.step = step

    def on_round(self, done):
        if done.step == self.step:
            raise KeyError("gone")


class Asks:
    """Returns STOP in a hook from a step on; keeps the steps of all calls."""

    def __init__(self, hook, step):
        self.hook, self.step, self.told = hook, step, []

    def answer(self, hook, step):
        self.told.append((hook, step))
        return mpifl.STOP if hook == self.hook and step >= self.step else None

    def on_start(self, info):
        return self.answer("on_start", info.step)

    def on_round(self, done):
        return self.answer("on_round", done.step)

    def on_evaluation(self, found):
        return self.answer("on_evaluation", found.step)

    def on_end(self, run):
        self.told.append(("on_end", run.summary["rounds"]))


@pytest.mark.parametrize(("kind", "rule"), covering([*KINDS], [*RULES]))
def test_a_run_ends_where_its_rule_says_and_is_the_run_of_so_many_rounds(tmp_path, kind, rule):
    """Interrupted, it ends at the same step, also where the checkpoint is beyond the best evaluation."""
    run = tiny(tmp_path, "one", stop=RULES[rule], **KINDS[kind])
    steps, told = run.summary["rounds"], run.summary["ended"]
    assert 2 < steps < 60
    assert (told["rule"], told["rounds"], run.ended) == (rule, 60, told["reason"])
    assert run.metrics["round"].iloc[-1] == steps  # the last step is evaluated
    assert not (run.folder / "checkpoints").exists()
    short = tiny(tmp_path, "short", **{**KINDS[kind], "rounds": steps})
    assert run.summary["digest"] == short.summary["digest"]
    expected = [c.summary["federation_bytes_expected"] for c in (run, short)]
    assert expected[0] == expected[1]
    assert run.summary["flops_expected"] == short.summary["flops_expected"]
    assert run.ledger.equals(short.ledger)
    assert run.summary["identity"] == short.summary["identity"]
    with pytest.raises(KeyError, match="gone"):
        tiny(tmp_path, "cut", stop=RULES[rule], callbacks=[Breaks(steps - 1)], **KINDS[kind])
    again = mpifl.resume(tmp_path / "tiny-cut")
    assert (again.summary["digest"], again.summary["ended"]) == (run.summary["digest"], told)
    assert again.metrics["round"].tolist() == run.metrics["round"].tolist()


def test_rules_hold_as_figures_in_metrics_csv_say(tmp_path):
    run = tiny(tmp_path, "worst", stop=RULES["target"])
    worst = run.metrics["accuracy_worst"].tolist()
    assert [value >= 0.4 for value in worst] == [False] * (len(worst) - 1) + [True]
    run = tiny(tmp_path, "bytes", stop=RULES["bytes"], evaluation={"every": 100})
    (total,) = run.metrics["federation_bytes_up"] + run.metrics["federation_bytes_down"]
    assert total >= 420_000 > total * (run.summary["rounds"] - 1) / run.summary["rounds"]
    run = tiny(tmp_path, "seconds", stop=RULES["seconds"], **EVENTS)
    assert run.events["time"].iloc[-1] >= 9.5 > run.events["time"].iloc[-4]  # the step before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", ["on_round", "on_evaluation"])
def test_a_callback_ends_a_run_by_its_answer(tmp_path, kind, hook):
    """The last step is evaluated although no evaluation was due, and the callback is told of it once."""
    asks = Asks(hook, 3)
    run = tiny(tmp_path, "asked", callbacks=[asks], **KINDS[kind])
    last = 3 if hook == "on_round" else 4
    assert run.metrics["round"].tolist() == ([2, 3] if last == 3 else [2, 4])
    rounds = [step for hook, step in asks.told if hook == "on_round"]
    assert rounds == [*range(1, last + 1)]
    assert asks.told[-2:] == [("on_evaluation", last), ("on_end", last)]
    assert run.summary["ended"]["rule"] == "callback"
    assert "test_ending:Asks returned STOP" in run.ended
    short = tiny(tmp_path, "short", **{**KINDS[kind], "rounds": last})
    assert run.summary["digest"] == short.summary["digest"]
    assert run.summary["identity"]["ended"] == f"after step {last} by callback"
    assert run.summary["identity"]["hash"] != short.summary["identity"]["hash"]


def test_matrices_of_the_last_uploads_are_those_of_the_round_that_turned_out_to_be_the_last(tmp_path, capsys):
    matrices = {"every": 2, "matrices": ["parameters"]}
    run = tiny(tmp_path, "one", evaluation=matrices, stop=RULES["target"])
    short = tiny(tmp_path, "short", evaluation=matrices, rounds=run.summary["rounds"])
    np.testing.assert_array_equal(run.matrices["parameters"], short.matrices["parameters"])
    asked = tiny(tmp_path, "asked", evaluation=matrices, callbacks=[Asks("on_round", 3)])
    assert "parameters" not in asked.matrices
    assert "evaluation.matrices: parameters is left out" in capsys.readouterr().err


def test_an_answer_at_the_last_round_is_no_early_end_and_one_at_the_start_is_refused(tmp_path):
    run = tiny(tmp_path, "last", rounds=3, callbacks=[Asks("on_round", 3)])
    assert "ended" not in run.summary
    with pytest.raises(mpifl.UserError, match="returns STOP, which only on_round and on_evaluation may"):
        tiny(tmp_path, "start", callbacks=[Asks("on_start", 0)])
    run = tiny(tmp_path, "first", evaluation={"at_start": True}, callbacks=[Asks("on_evaluation", 0)])
    assert run.metrics["round"].tolist() == [0, 1]  # it has a step before it ends


def test_real_time_ends_a_run_whose_identity_says_where(tmp_path):
    run = tiny(tmp_path, "wall", stop={"wall_seconds": 1e-6})
    assert run.summary["rounds"] == 1
    assert run.summary["identity"]["ended"] == "after step 1 by wall_seconds"
    other = tiny(tmp_path, "other", stop={"wall_seconds": 1e-6}, callbacks=[Asks("on_round", 1)])
    assert other.summary["identity"]["ended"] == "after step 1 by callback"
    assert run.label == other.label


def test_an_unfinished_run_takes_other_rules_unless_they_would_have_ended_it_before(tmp_path):
    with pytest.raises(KeyError):
        tiny(tmp_path, "one", rounds=8, stop={"bytes": 250_000}, callbacks=[Breaks(4)])
    folder = tmp_path / "tiny-one"
    with pytest.raises(mpifl.UserError, match=r"stop\.bytes = 100000: would have ended the run after step 2"):
        mpifl.resume(folder, stop={"bytes": 100_000})
    run = mpifl.resume(folder, stop={"bytes": 400_000})
    assert run.summary["rounds"] == 7
    assert run.config["stop"]["bytes"] == 400_000


def test_a_run_that_ended_is_complete_and_more_rounds_or_other_rules_need_a_new_one(tmp_path, capsys):
    run = tiny(tmp_path, "one", stop=RULES["target"])
    again = ["run", str(run.folder / "config.yaml"), "--resume"]
    assert main([*again, "-q"]) == 0  # its 60 rounds are no more than it was given
    assert "is complete" in capsys.readouterr().out
    assert main([*again, "--rounds", "61"]) == 2
    error = capsys.readouterr().err
    assert f"is complete after {run.summary['rounds']} (accuracy_worst" in error
    assert main([*again, "--stop.target", "0.5"]) == 2
    assert "stop.target = 0.5: " in capsys.readouterr().err
    assert mpifl.resume(run.folder).summary == run.summary


def test_a_rule_on_an_absent_column_ends_with_a_message(tmp_path):
    with pytest.raises(mpifl.UserError, match=r"stop\.metric = 'accuracy_finetuned': no such column"):
        tiny(tmp_path, "one", stop={"metric": "accuracy_finetuned", "target": 0.5})


REFUSED = {
    "stop.metric": {"stop": {"metric": "acuracy", "target": 0.5}},
    "stop.target": {"stop": {"target": 80}},
    "stop.patience": {"stop": {"patience": 2}, "evaluation": {"every": 0}},
    "stop.seconds": {
        "stop": {"seconds": 5},
        "algorithm": "fedasync",
        "policy": {"name": "drawn_staleness", "most": 2},
    },
}


@pytest.mark.parametrize(("key", "changes"), REFUSED.items())
def test_rules_that_cannot_hold_are_refused_before_a_folder_is_made(tmp_path, key, changes):
    with refusal_of(key):
        tiny(tmp_path / "runs", "one", **changes)
    assert not (tmp_path / "runs").exists()


def test_runs_that_ended_at_different_rounds_are_compared_and_censored(tmp_path, capsys):
    """One group of two seeds, which share no evaluated round: final figures are those of each last one."""
    ends = {"bytes": 250_000}, {"bytes": 380_000}
    seeds = [
        tiny(tmp_path, f"s{seed}", seed=seed, evaluation={"every": 50}, stop=ends[seed]) for seed in (0, 1)
    ]
    for run in seeds:  # one rule, under which the seeds end at different rounds, as by a target
        text = (run.folder / "summary.json").read_text()
        file = json.loads(text)
        file["settings"]["stop"] = {"target": 0.99}
        (run.folder / "summary.json").write_text(json.dumps(file))
    assert [run.summary["rounds"] for run in seeds] == [5, 7]
    assert main(["compare", *(str(run.folder) for run in seeds), "--target", "0.9"]) == 0
    shown = capsys.readouterr().out
    assert "5-7" in shown
    assert "ended before the last round, by a rule of `stop` or a callback: fedavg (2 of 2)" in shown
    (row,) = mpifl.compare(*[run.folder for run in seeds], target=0.9).to_dict("records")
    assert (row["unreached"], row["rounds"]) == (2, 7)
    final = [run.metrics["accuracy_mean"].iloc[-1] for run in seeds]
    assert row["accuracy_mean"] == pytest.approx(50 * sum(final))


def test_plan_and_report_say_that_rounds_are_a_bound(tmp_path, capsys):
    options = ["--rounds", "60", "--evaluation.every", "2", "--stop.target", "0.4", "--time", "no"]
    assert main(["plan", str(CONFIG), *options, "-q"]) == 0
    assert "upper bounds: it may end once the task's metric reaches 0.4" in capsys.readouterr().out
    run = tiny(tmp_path, "one", stop=RULES["target"])
    assert facts(run)["rounds"].startswith(f"{run.summary['rounds']} of 60: accuracy_worst")
    assert main(["watch", str(run.folder), "--once"]) == 0
    watched = capsys.readouterr().out
    assert f"complete (accuracy_worst {run.summary['accuracy_worst']:.6g}" in watched
    assert f"round {run.summary['rounds']}/{run.summary['rounds']}" in watched
