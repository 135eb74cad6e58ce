"""Runs that are called from Python: what they take, and that several in one process leave nothing behind."""

from __future__ import annotations

import gc
import signal
import threading

import pandas as pd
import pytest
from support.refusal import refusal_of
from support.runs import CONFIG

import mpifl
from mpifl.cli import main
from mpifl.experiment import loader
from mpifl.supervision.signals import SAVE_SIGNALS, STOP_SIGNALS
from mpifl.training.learner import Learner


def handlers():
    """Return the handlers of all signals that a run takes over."""
    return [signal.getsignal(number) for number in (*SAVE_SIGNALS, *STOP_SIGNALS)]


def learners():
    """Return how many models are alive."""
    gc.collect()
    return sum(isinstance(thing, Learner) for thing in gc.get_objects())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run."""
    return mpifl.run(str(CONFIG), output={"folder": str(tmp_path_factory.mktemp("finished"))})


@pytest.mark.nightly
def test_runs_of_one_process_leave_no_handlers_threads_models_or_open_files(tmp_path, capsys):
    before = handlers(), learners(), threading.active_count()
    for number in range(3):
        run = mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "id": str(number)})
        assert (handlers(), learners(), threading.active_count()) == before
    with pytest.raises(mpifl.UserError):
        mpifl.run(str(CONFIG), algorithm={"name": "fedprox", "mu": -1}, output={"folder": str(tmp_path)})
    assert (handlers(), learners(), threading.active_count()) == before
    left = run.folder / "checkpoints" / "step-000000001"  # of a job killed in its last moment
    left.mkdir(parents=True)
    assert mpifl.resume(run.folder).summary == run.summary  # complete already
    rounds = run.summary["rounds"]
    assert mpifl.resume(run.folder, rounds=rounds).summary == run.summary
    with pytest.raises(mpifl.UserError, match="its checkpoints are gone; run it anew"):
        mpifl.resume(run.folder, rounds=rounds + 1)
    with pytest.raises(mpifl.UserError, match="its checkpoints are gone; run it anew"):
        mpifl.resume(run.folder, rounds=str(rounds + 1))
    assert main(["resume", str(run.folder), "--rounds", str(rounds + 1)]) == 2
    assert "its checkpoints are gone" in capsys.readouterr().err
    assert not left.parent.exists()


def test_changes_that_a_complete_run_cannot_take_are_refused(tmp_path, capsys):
    """What it was run with, and what decides no numbers, is no change."""
    run = mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "id": "x"})
    assert mpifl.resume(run.folder, local={"lr": 0.1}, system={"threads": 1}).summary == run.summary
    with pytest.raises(
        mpifl.UserError, match=r"local\.lr = 9\.0: .*tiny-x is complete, and was run with 0\.1"
    ):
        mpifl.resume(run.folder, local={"lr": 9.0})
    with pytest.raises(mpifl.UserError, match=r"algorithm\.name = 'ditto'"):
        mpifl.resume(run.folder, algorithm="ditto")
    with pytest.raises(mpifl.UserError, match=r"output\.clients = 'none'"):
        mpifl.resume(run.folder, output={"clients": "none"})
    capsys.readouterr()
    resume = ["resume", str(run.folder)]
    assert main([*resume, "--local.lr", "0.1", "--data.root", str(tmp_path)]) == 0
    assert main([*resume, "--local.lr", "9"]) == 2
    assert "local.lr = 9.0: " in capsys.readouterr().err
    assert main([*resume, "--local.rate", "9"]) == 2


class Stop:
    """A callback that ends a run after its first step."""

    def on_round(self, info):
        """Fail."""
        raise RuntimeError("enough")


def test_a_run_that_went_on_for_more_rounds_is_a_run_of_those(tmp_path):
    output, short = {"folder": str(tmp_path)}, str(CONFIG)
    with pytest.raises(RuntimeError, match="enough"):
        mpifl.run(short, output={**output, "id": "long"}, callbacks=[Stop()])
    long = mpifl.resume(tmp_path / "tiny-long", rounds=3)
    assert long.config["rounds"] == long.summary["rounds"] == 3
    other = mpifl.run(short, seed=1, output={**output, "id": "short"})
    assert mpifl.compare(long, other)["seeds"].tolist() == [1, 1]
    pd.testing.assert_frame_equal(mpifl.compare([long, str(other.folder)]), mpifl.compare(long, other))


def test_runs_are_compared_and_tabled_as_the_commands_do(tmp_path, capsys):
    """Two methods, two seeds; runs are given as objects and as folders."""
    place = {"folder": str(tmp_path), "id": "x"}
    found = mpifl.sweep(str(CONFIG), vary={"algorithm": ["fedavg", "local"], "seed": [0, 1]}, output=place)
    table = mpifl.compare(found, test="t", interval="t", columns=["accuracy"])
    file, same = str(tmp_path / "c.csv"), ["--test", "t", "--interval", "t", "--columns", "accuracy"]
    assert main(["compare", str(found.folder), *same, "--csv", file]) == 0
    pd.testing.assert_frame_equal(table, pd.read_csv(file, keep_default_na=False), check_dtype=False)
    assert table["seeds"].tolist() == [2, 2]
    rows = mpifl.table(*found.runs.values(), of="final", target=0.1)
    capsys.readouterr()
    assert main(["export", str(found.folder), "--table", "final", "--target", "0.1"]) == 0
    assert rows.to_csv(index=False) == capsys.readouterr().out
    for wrong, key in (({"of": "all"}, "of"), ({"target": 0.5}, "target")):
        with refusal_of(key):
            mpifl.table(found, **wrong)
    with pytest.raises(mpifl.UserError, match="confidence = 95"):
        mpifl.compare(found, confidence=95)
    for wrong in ({"test": "wilcoxn"}, {"interval": "T"}, {"target": float("inf")}):
        ((key, value),) = wrong.items()
        with pytest.raises(mpifl.UserError) as error:
            mpifl.compare(found, **wrong)
        assert (error.value.key, error.value.value) == (key, value)
    with pytest.raises(mpifl.UserError, match=r"85: use an accuracy in \[0, 1\]"):
        mpifl.compare(found, target=85)


def test_targets_of_metrics_that_are_no_shares_are_compared(tmp_path):
    """A perplexity over twelve tokens: any model is far below 1000 in the first round."""
    tokens = {
        "algorithm": "fedavg",
        "task": "next_token",
        "model": {"name": "transformer", "width": 8, "layers": 1, "heads": 1},
        "data": {
            "source": {"name": "generated", "kind": "tokens", "outputs": 12, "train": 80, "test": 20},
            "scenario": {"name": "relations", "clients": 4, "groups": 2},
        },
    }
    run = mpifl.run({"name": "tokens", "rounds": 1, **tokens}, output={"folder": str(tmp_path)})
    (row,) = mpifl.compare(run, target=1000, columns=["rounds_to_target"]).to_dict("records")
    assert (row["target"], row["unreached"], row["rounds_to_target_median"]) == (1000, 0, 1)


def test_files_names_mappings_and_configurations_are_the_same_run(tmp_path):
    output = {"folder": str(tmp_path)}
    ways = [str(CONFIG), CONFIG, mpifl.load_config(str(CONFIG)), loader.read(str(CONFIG))]
    assert mpifl.load_config(CONFIG) == ways[2]
    digests = {
        mpifl.run(way, output={**output, "id": str(i)}).summary["digest"] for i, way in enumerate(ways)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        *((mpifl.compare, {"confidence": x}) for x in ("0.9", True)),
        *((mpifl.compare, {"target": x}) for x in ("0.9", True)),
        *((mpifl.compare, {"columns": x}) for x in ("accuracy", [3])),
        (mpifl.compare, {"problem": "data"}),
        (mpifl.compare, {"metric": None}),
        *((mpifl.table, {"target": x, "of": "final"}) for x in ("0.9", float("nan"))),
        *((mpifl.client_data, {"client": x}) for x in (1.5, "1", True, None)),
        *((mpifl.client_data, {"visit": x, "client": 1}) for x in (1.5, "1")),
        *((mpifl.sweep, {"jobs": x}) for x in (1.5, "1")),
        *((mpifl.sweep, {"case": x}) for x in ((1, 2), 1)),
        (mpifl.sweep, {"only": ["seed"]}),
    ],
)
def test_arguments_of_other_types_are_refused_by_their_names(call, wrong, finished, tmp_path):
    given = (finished,) if call in (mpifl.compare, mpifl.table) else (str(CONFIG),)
    place = {"vary": {"seed": [0]}, "output": {"folder": str(tmp_path)}} if call is mpifl.sweep else {}
    with pytest.raises(mpifl.UserError) as error:
        call(*given, **wrong, **place)
    key, value = next(iter(wrong.items()))
    assert (error.value.key, str(error.value.value)) == (key, str(value))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", ["12", 12])
def test_a_single_value_of_only_is_no_list_of_its_digits(value, tmp_path):
    """Read letter by letter, '12' names the seeds 1 and 2."""
    output = {"folder": str(tmp_path)}
    with pytest.raises(mpifl.UserError, match=r"only\.seed = .*12.*: use a list of values: \["):
        mpifl.sweep(str(CONFIG), vary={"seed": [1, 2, 12]}, output=output, only={"seed": value})
    assert not [*tmp_path.iterdir()]


def test_errors_have_key_value_and_remedy(tmp_path):
    with pytest.raises(mpifl.UserError) as error:
        mpifl.run(str(CONFIG), local={"lr": -0.5})
    assert (error.value.key, error.value.value) == ("local.lr", -0.5)
    assert error.value.remedy == "must be above 0"
    with pytest.raises(mpifl.UserError, match=r"CONFIG = 7: name a file, or give a mapping"):
        mpifl.run(7)
    with pytest.raises(mpifl.UserError, match=r"vary = 'local\.lr': .*vary=None"):
        mpifl.run(str(CONFIG), vary={"local.lr": [0.1, 0.2]}, output={"folder": str(tmp_path)})
    with pytest.raises(mpifl.UserError, match=r"RUN = .*is not a run folder"):
        mpifl.resume(tmp_path)


def test_a_run_in_another_thread_takes_no_signals(tmp_path):
    found = []
    work = threading.Thread(
        target=lambda: found.append(mpifl.run(str(CONFIG), output={"folder": str(tmp_path)}))
    )
    before = handlers()
    work.start()
    work.join()
    assert found[0].summary["rounds"] == 2
    assert handlers() == before
