"""What trackers wrote, read back by the readers of their libraries; runs are interrupted and resumed."""

from __future__ import annotations

import json
import shutil
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace

import pytest
from support.runs import CONFIG

import mpifl
from mpifl.results.run_events import RunInfo
from mpifl.results.trackers import MLflow, WandB

pytestmark = pytest.mark.nightly  # their libraries take long to import
COLUMNS = ("accuracy_mean", "loss", "federation_bytes_up", "virtual_seconds")


class Interrupts:
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_round(self, done):
        if done.step == self.step:
            raise RuntimeError("interrupted")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that all three trackers followed: stopped after step 3 of 5, then resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    callbacks = ["tensorboard", {"name": "wandb", "project": "tests", "mode": "offline"}, "mlflow"]
    with pytest.raises(RuntimeError, match="interrupted"):
        mpifl.run(
            str(CONFIG),
            rounds=5,
            evaluation={"every": 1},
            delay={"name": "exponential", "mean_s": 2.0},
            output={"folder": str(folder), "id": "one", "callbacks": callbacks},
            callbacks=[Interrupts(3)],
        )
    return mpifl.resume(folder / "tiny-one")


def test_tensorboard_has_each_figure_against_rounds_and_virtual_seconds(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    for name in COLUMNS[:3]:
        rounds = read.Scalars(name)
        assert [event.step for event in rounds] == [1, 2, 3, 4, 5]
        assert [event.value for event in rounds] == pytest.approx(run.metrics[name].tolist(), rel=1e-6)
        virtual = read.Scalars(f"over_virtual_seconds/{name}")
        assert [event.wall_time for event in virtual] == pytest.approx(
            run.metrics["virtual_seconds"].tolist()
        )
    final = read.Scalars("summary/accuracy_mean")
    assert [event.value for event in final] == pytest.approx([run.summary["accuracy_mean"]])
    (config,) = read.Tensors("config/text_summary")
    assert b"batch_size: 32" in config.tensor_proto.string_val[0]


def test_tensorboard_has_each_step_once_where_a_run_begins_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(RuntimeError, match="interrupted"):
        mpifl.run(
            str(CONFIG),
            rounds=3,
            evaluation={"every": 1, "at_start": True},
            output={"folder": str(tmp_path), "id": "one", "callbacks": ["tensorboard"]},
            callbacks=[Interrupts(2)],
        )
    shutil.rmtree(tmp_path / "tiny-one" / "checkpoints")
    run = mpifl.resume(tmp_path / "tiny-one")
    found = EventAccumulator(str(run.folder / "tensorboard")).Reload().Scalars("accuracy_mean")
    assert [event.step for event in found] == [0, 1, 2, 3]


def records(file: Path):
    """Yield the records of a .wandb file: its header, then LevelDB's log format, messages of the library."""
    from wandb.proto import wandb_internal_pb2 as messages

    data, block = file.read_bytes(), 32768
    assert data[:4] in (b":W&B", b"")
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = block - place % block
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = messages.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(records):
    """Return the rows that were logged to Weights & Biases."""
    return [
        {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]


def test_wandb_offline_has_one_run_whose_last_file_has_all_rounds(run):
    """Of the first file, a run that was killed would have written the first blocks at most."""
    files = sorted((run.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    found = [list(records(file)) for file in files]
    begun = [r.run for part in found for r in part if r.WhichOneof("record_type") == "run"]
    assert {(r.project, r.run_id, r.display_name) for r in begun} == {
        ("tests", json.loads((run.folder / "run.json").read_text())["id"], "tiny-one")
    }
    config = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert config["local"]["batch_size"] == 32
    assert [row["round"] for row in history(found[0])] == [1, 2, 3]
    rows = history(found[1])
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5]
    for name in COLUMNS:
        assert [row[name] for row in rows] == pytest.approx(run.metrics[name].tolist())
    summary = {
        (i.key or i.nested_key[0]): json.loads(i.value_json)
        for r in found[1]
        if r.WhichOneof("record_type") == "summary"
        for i in r.summary.update
    }
    assert summary["digest"] == run.summary["digest"]
    assert summary["final/accuracy_mean"] == pytest.approx(run.summary["accuracy_mean"])
    ends = [r.exit.exit_code for part in found for r in part if r.WhichOneof("record_type") == "exit"]
    assert ends == [1, 0]


def test_mlflow_has_one_finished_run_with_histories_and_parameters(run, monkeypatch):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.folder.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tiny")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("tiny-one", "FINISHED")
    assert found.data.params["local.batch_size"] == "32"
    assert found.data.tags["mpifl.digest"] == run.summary["digest"]
    for name in COLUMNS[:3]:
        history = client.get_metric_history(found.info.run_id, name)
        assert [(m.step, m.value) for m in history] == list(
            zip(run.metrics["round"], run.metrics[name].astype(float), strict=True)
        )
        virtual = client.get_metric_history(found.info.run_id, f"over_virtual_seconds/{name}")
        assert [m.timestamp for m in virtual] == [int(1000 * t) for t in run.metrics["virtual_seconds"]]
    assert found.data.metrics["final/accuracy_mean"] == run.summary["accuracy_mean"]
    assert "mpifl.stopped" not in found.data.tags, "it was resumed"


def test_runs_that_share_a_folder_are_separate_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = {
        "folder": str(tmp_path),
        "callbacks": [{"name": "tensorboard", "folder": str(tmp_path / "all")}],
    }
    for seed in (0, 1):
        run = mpifl.run(str(CONFIG), rounds=2, seed=seed, output={**output, "id": str(seed)})
        read = EventAccumulator(str(tmp_path / "all" / f"tiny-{seed}")).Reload()
        found = [event.value for event in read.Scalars("accuracy_mean")]
        assert found == pytest.approx(run.metrics["accuracy_mean"].tolist(), rel=1e-6)


def test_mlflow_takes_names_that_it_does_not_allow(tmp_path):
    """A class of devices with brackets, which is in keys of the configuration and in names of figures."""
    from mlflow import MlflowClient

    devices = {
        "name": "classes",
        "classes": {"phone (old)": {"share": 0.5, "speed": 0.5}, "pc+": {"share": 0.5}},
    }
    run = mpifl.run(
        str(CONFIG),
        rounds=1,
        devices=devices,
        evaluation={"by": ["device"]},
        output={"folder": str(tmp_path), "callbacks": ["mlflow"]},
    )
    client = MlflowClient(tracking_uri=(run.folder.parent / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert found.data.params["devices.classes.phone _old_.speed"] == "0.5"
    assert any("phone _old_" in name for name in found.data.metrics)


def test_trackers_change_no_number(run, tmp_path):
    plain = mpifl.run(
        str(CONFIG),
        rounds=5,
        evaluation={"every": 1},
        delay={"name": "exponential", "mean_s": 2.0},
        output={"folder": str(tmp_path)},
    )
    assert (plain.summary["digest"], plain.label) == (run.summary["digest"], run.label)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Return a client of a store in a folder."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())


def begun(folder: Path, clock: str = "virtual", **changes) -> RunInfo:
    """Return what a tracker is told of a run in a folder."""
    folder.mkdir(exist_ok=True)
    config = {"rounds": 9, "clock": {"name": clock}}
    return RunInfo(folder.name, "tiny", folder, config, "fedavg", 9, 4, 10, 1, **changes)


def test_runs_that_begin_at_once_share_an_experiment_of_mlflow(client, tmp_path, monkeypatch):
    """Each of two looks for it before one has created it, unless they take turns."""
    from mlflow import MlflowClient

    both, real = Barrier(2), MlflowClient.get_experiment_by_name

    def slow(self, title):
        known = real(self, title)
        with suppress(BrokenBarrierError):
            both.wait(1)
        return known

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", slow)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: MLflow().on_start(begun(tmp_path / name)), "ab"))
    (where,) = client.search_experiments(filter_string="name = 'tiny'")
    assert sorted(r.info.run_name for r in client.search_runs([where.experiment_id])) == ["a", "b"]


def test_an_experiment_of_mlflow_that_another_run_has_just_created_is_taken(client, tmp_path, monkeypatch):
    """On a server, where runs on other machines do not take turns."""
    from mlflow import MlflowClient

    real, there = MlflowClient.get_experiment_by_name, client.create_experiment("tiny")
    answers = iter([None])
    monkeypatch.setattr(
        MlflowClient, "get_experiment_by_name", lambda self, title: next(answers, real(self, title))
    )
    MLflow().on_start(begun(tmp_path / "a"))
    assert [r.info.run_name for r in client.search_runs([there])] == ["a"]


def killed_and_resumed(make, folder: Path) -> None:
    """Let a tracker follow a run with a real clock that is killed twice.

    It is killed after step 3 and goes on from step 2, then after step 5 and goes on from step 4. Its accuracy
    is the step, and in the steps that are lost 0.
    """

    def follow(figures, **resumed) -> None:
        if resumed:
            kept = "".join(f"{s},{s},{s}.0,{s}.0\n" for s in range(1, resumed["step"] + 1))
            (folder / "metrics.csv").write_text(f"round,seconds,accuracy_mean,virtual_seconds\n{kept}")
        tracker = make()
        tracker.on_start(begun(folder, "wall", **resumed))
        for step, accuracy in figures.items():
            row = {"round": step, "seconds": step, "accuracy_mean": accuracy, "virtual_seconds": float(step)}
            tracker.on_evaluation(SimpleNamespace(step=step, metrics=row, virtual_seconds=float(step)))
        if 6 in figures:
            tracker.on_end(SimpleNamespace(summary={"rounds": 6, "digest": "0", "accuracy_mean": 6.0}))
        elif make is WandB:
            tracker._run.finish(exit_code=1)  # writes what it was given: more than where it is killed

    follow({1: 1.0, 2: 2.0, 3: 0.0})
    follow({3: 3.0, 4: 4.0, 5: 0.0}, resumed=True, restored=True, step=2)
    follow({5: 5.0, 6: 6.0}, resumed=True, restored=True, step=4)


def test_mlflow_begins_a_new_run_without_the_lost_steps_of_a_real_clock(client, tmp_path):
    killed_and_resumed(MLflow, tmp_path / "a")
    (where,) = client.search_experiments(filter_string="name = 'tiny'")
    runs = {r.data.tags["mpifl.id"]: r for r in client.search_runs([where.experiment_id])}
    assert {name: r.info.status for name, r in runs.items()} == {
        **{"a": "KILLED", "a-1": "KILLED"},
        "a-2": "FINISHED",
    }
    assert [runs[name].data.tags.get("mpifl.continues") for name in ("a", "a-1", "a-2")] == [None, "a", "a-1"]
    assert runs["a-1"].data.tags["mpifl.stopped"] == "goes on from step 4 as a-2"
    last = runs["a-2"].info
    assert last.run_name == "a"
    found = client.get_metric_history(last.run_id, "accuracy_mean")
    assert [(m.step, m.value) for m in found] == [(s, s) for s in range(1, 7)]
    found = client.get_metric_history(last.run_id, "over_virtual_seconds/accuracy_mean")
    assert [(m.timestamp, m.value) for m in found] == [(1000 * s, s) for s in range(1, 7)]


def test_mlflow_goes_on_in_the_same_run_where_no_step_of_a_real_clock_was_lost(client, tmp_path):
    MLflow().on_start(begun(tmp_path / "a", "wall"))
    MLflow().on_start(begun(tmp_path / "a", "wall", resumed=True, restored=True, step=0))
    (where,) = client.search_experiments(filter_string="name = 'tiny'")
    (found,) = client.search_runs([where.experiment_id])
    assert (found.data.tags["mpifl.id"], found.info.status) == ("a", "RUNNING")


def test_wandb_begins_a_new_run_without_the_lost_steps_of_a_real_clock(tmp_path):
    killed_and_resumed(WandB, tmp_path / "a")
    files = {file.stem: file for file in (tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb")}
    assert sorted(files) == ["run-a", "run-a-1", "run-a-2"]
    until = time.monotonic() + 60
    while not (rows := history(records(files["run-a-2"]))):  # wandb's own process writes it a moment later
        assert time.monotonic() < until
        time.sleep(0.1)
    assert [(row["_step"], row["accuracy_mean"]) for row in rows] == [(s, s) for s in range(1, 7)]


def test_runs_of_mlflow_are_looked_for_again_while_another_writes_to_the_store(tmp_path, monkeypatch):
    """A store of files whose last figure has a file, but no line yet; a new run looks for none."""
    from mlflow import MlflowClient

    real, calls = MlflowClient.search_runs, []

    def search(self, *given):
        calls.append(given)
        if len(calls) == 1:
            raise ValueError("Metric 'ari' is malformed. No data found.")
        return real(self, *given)

    monkeypatch.setattr(MlflowClient, "search_runs", search)
    first, second = MLflow(), MLflow()
    first.on_start(begun(tmp_path / "a"))
    assert not calls
    second.on_start(begun(tmp_path / "a", resumed=True, restored=True))
    assert (len(calls), second._id) == (2, first._id)
