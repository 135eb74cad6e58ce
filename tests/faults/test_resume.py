"""A run that stops after some step and goes on, or begins again: its files are those of one undisturbed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.nightly import covering, mostly_nightly
from support.runs import CONFIG, assert_same_run

import mpifl
from mpifl import cli
from mpifl.analysis import watch
from mpifl.core.errors import UserError
from mpifl.driver import checkpoints
from mpifl.driver import run as running
from mpifl.experiment import loader
from mpifl.experiment.schema import CheckpointConfig, defaults_of
from mpifl.results import checkpoint_files as checkpoint
from mpifl.results.run_folder import FORMAT
from mpifl.runtime.run_state import SAVE, STOP
from mpifl.runtime.worker import Worker
from mpifl.supervision.signals import Signals
from mpifl.training.client import LocalClient, LocalClients
from mpifl.training.config import LocalConfig

JUDGED = [
    "--rounds",
    "5",
    "--participation",
    "0.5",
    "--evaluation.every",
    "2",
    "--evaluation.at_start",
    "true",
]
LATE = ["--delay", "{name: exponential, mean_s: 2}"]
BUFFER = ["--policy", "{name: buffer, size: 2}", *LATE]
CODED = "{dtype: bfloat16, compression: {name: top_k, share: 0.1}, error_feedback: true}"
RUNS: dict[str, list[str]] = {
    "fedavg on links": ["--network.name", "wireless-slow"],
    "client state": ["--algorithm", "scaffold"],
    "error feedback": ["--payload", CODED],
    "kept optimisers": ["--local.keep_optimizer", "true", "--local.momentum", "0.9"],
    "clusters, memo": ["--algorithm", "{name: cfl, warmup: 1, eps1: 100, eps2: 0}"],
    "remembered uploads": ["--algorithm", "oracle", "--evaluation.clients", "4"],
    "personal rows": ["--algorithm", "ucfl"],
    "newcomers": ["--newcomers", "{share: 0.3, joins: 4}", "--algorithm", "{name: ifca, num_clusters: 2}"],
    "clients that fail": ["--on_client_error", "drop"],
    "privacy": ["--privacy", "{name: central, clip: 0.5, quantile: 0.5, quantile_noise: 4.0}"],
    "masks": ["--secure_aggregation", "{name: masks, dropout: 0.3, threshold: 0.5}"],
    "products of adapters": ["--model.lora", "{rank: 3, average: product, ranks: {0-3: 1}}"],
    "adapters": ["--algorithm", "ditto", "--model", "{name: mlp, hidden: [12], lora: {rank: 2}}"],
    "arrivals": ["--algorithm", "fedbuff", *BUFFER],
    "arrivals with state": ["--algorithm", "scaffold", *BUFFER, "--payload", CODED],
    "liars": ["--attack", "{name: noise, share: 0.25}", "--robust", "median"],
    "arrivals of liars": [
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 3}", *LATE),
        *("--attack", "{name: sign_flip, share: 0.25}", "--robust", "geometric_median"),
    ],
    "newcomers among arrivals": [
        *("--algorithm", "fedasync", "--policy", "client_decides", "--rounds", "8"),
        *("--newcomers", "{share: 0.6, joins: 2, spread: 4}"),
    ],
    "newcomers at a time": [
        *("--algorithm", "fedasync", "--policy", "{name: client_decides, uploads: when_done}", *LATE),
        *("--rounds", "8"),
        *("--newcomers", "{share: 0.6, joins_s: 0.1, spread_s: 0.5}"),
    ],
    "drift": [
        *("--algorithm", "{name: ifca, num_clusters: 2}"),
        *("--drift", "{kind: swap, at: [2, 4], share: 0.5, recurring: true}"),
    ],
    "statistics again": [
        *("--algorithm", "{name: flexcfl, num_groups: 2}", "--rounds", "5", "--recluster", "{every: 2}")
    ],
    "drift among arrivals": [
        *("--algorithm", "fedbuff", *BUFFER, "--drift", "{kind: concept, at: [2], gradual: 3, share: 0.5}")
    ],
    "drift by time": [
        *(
            "--algorithm",
            "{name: flexcfl, num_groups: 2}",
            "--rounds",
            "5",
            "--recluster",
            "{loss_rise: 0.3}",
        ),
        *("--drift", "{kind: swap, at_s: [0.5, 2.5], share: 0.5}"),
    ],
    "drift among arrivals by time": [
        *("--algorithm", "{name: flexcfl, num_groups: 2}", *BUFFER, "--recluster", "{seconds: 0.1}"),
        *("--drift", "{kind: concept, at_s: [0.05, 0.2], share: 0.4}"),
        *("--leavers", "{share: 0.3, leaves_s: 0.1, spread_s: 0.2}"),
    ],
    "groups that change one by one by time": [
        *("--algorithm", "oracle", "--rounds", "5"),
        *("--drift", "{kind: swap, at_s: [0.5, 3.2], gradual_s: 2, share: 0.8}"),
    ],
    "groups that change one by one among arrivals": [
        *("--algorithm", "oracle", *BUFFER),
        *("--drift", "{kind: swap, at_s: [0.02], gradual_s: 0.3, share: 0.8}"),
    ],
    "arrivals one by one": ["--algorithm", "fedasync", "--policy", "every_arrival", *LATE],
}


def start(folder: Path, cache: Path, name: str, *more: str) -> int:
    """Run to the end, or to where it is stopped; return the exit code."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(cache)]
    return cli.main(["run", str(CONFIG), "--quiet", *place, *JUDGED, *RUNS[name], *more])


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache of prepared data that all runs share."""
    return tmp_path_factory.mktemp("cache")


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a run stop after a step, as if it had been asked to."""
    monkeypatch.setattr(checkpoints.Checkpoints, "due", lambda self, now: STOP if now == step else "")


def let_clients_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two clients fail at every visit, also where visits are made in one call."""
    real, together = Worker._train, LocalClients.train_visits

    def train(self: Worker, client: LocalClient, *rest: Any) -> Any:
        if client.id in (2, 5):
            raise RuntimeError("no memory left")
        return real(self, client, *rest)

    def train_visits(self: LocalClients, visits: tuple[np.ndarray, np.ndarray], *rest: Any) -> Any:
        return None if np.isin(visits[0], (2, 5)).any() else together(self, visits, *rest)

    monkeypatch.setattr(Worker, "_train", train)
    monkeypatch.setattr(LocalClients, "train_visits", train_visits)


FEW = [  # of the usual run: each kind of state that a checkpoint holds
    *("client state", "error feedback", "kept optimisers", "clusters, memo", "remembered uploads"),
    *("personal rows", "newcomers", "clients that fail", "privacy", "products of adapters"),
    *("arrivals with state", "arrivals of liars", "newcomers at a time", "drift", "statistics again"),
]


@pytest.mark.parametrize("name", mostly_nightly(RUNS, FEW))
def test_all_files_of_a_run_that_stopped_and_went_on_are_those_of_one_that_did_not(
    name, cache, tmp_path, monkeypatch
):
    """It stops twice: after a step that is evaluated, and after one that is not. It would go on with other
    code of the same state, too.
    """
    monkeypatch.setattr(checkpoints.Checkpoints, "_other_code", True)
    if name == "clients that fail":
        let_clients_fail(monkeypatch)
    assert start(tmp_path / "one", cache, name) == 0
    assert (tmp_path / "one" / "tiny-x" / "dropped.csv").exists() == (name == "clients that fail")
    for at, command in ((2, None), (3, "resume"), (9, "resume")):
        stop_after(at, monkeypatch)
        words = ["resume", str(tmp_path / "two" / "tiny-x"), "--quiet"]
        code = cli.main(words) if command else start(tmp_path / "two", cache, name)
        assert code == (0 if at == 9 else 75)
    assert_same_run(tmp_path / "one" / "tiny-x", tmp_path / "two" / "tiny-x")


def test_a_run_that_was_killed_between_checkpoints_drops_what_came_after_the_last(
    cache, tmp_path, monkeypatch
):
    """Rows of events.csv and metrics.csv that were written after the checkpoint are written anew, once."""
    assert start(tmp_path / "one", cache, "arrivals", "--evaluation.every", "1") == 0
    due = {2: SAVE, 4: STOP}
    monkeypatch.setattr(checkpoints.Checkpoints, "due", lambda self, now: due.get(now, ""))
    assert start(tmp_path / "two", cache, "arrivals", "--evaluation.every", "1") == 75
    monkeypatch.undo()
    folder = tmp_path / "two" / "tiny-x"
    shutil.rmtree(checkpoint.path_of(folder / "checkpoints", 4))
    assert cli.main(["resume", str(folder), "--quiet"]) == 0
    assert_same_run(tmp_path / "one" / "tiny-x", folder)


class Killed(BaseException):
    """A run that ends here and now, as by SIGKILL."""


def raise_killed(self: checkpoints.Checkpoints, step: int) -> str:
    """End a run before its first step."""
    raise Killed


def killed_at(step: int, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Path:
    """Run fedavg until it is killed, in the step after `step`; return its folder."""
    real = checkpoints.Checkpoints.due

    def due(self: checkpoints.Checkpoints, now: int) -> str:
        if now == step + 1:
            raise Killed
        return real(self, now)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoints, "due", due)
        with pytest.raises(Killed):
            start(folder, cache, "fedavg on links", *more)
    return folder / "tiny-x"


def test_the_first_checkpoint_comes_after_the_first_round(cache, tmp_path, monkeypatch):
    folder = killed_at(2, tmp_path / "two", cache, monkeypatch)
    assert checkpoint.steps(folder / "checkpoints") == [1]
    assert cli.main(["resume", str(folder), "--quiet"]) == 0
    assert start(tmp_path / "one", cache, "fedavg on links") == 0
    assert_same_run(tmp_path / "one" / "tiny-x", folder)


NEVER = ["--checkpoint", "{every: 0, minutes: 0}"]


def test_without_a_checkpoint_resume_asks_for_from_start_and_keeps_the_figures(
    cache, tmp_path, monkeypatch, capsys
):
    folder = killed_at(3, tmp_path, cache, monkeypatch, *NEVER)
    before = (folder / "metrics.csv").read_bytes()
    assert before.count(b"\n") > 1
    assert cli.main(["resume", str(folder), "--quiet"]) == 2
    assert "--from-start" in capsys.readouterr().err
    assert (folder / "metrics.csv").read_bytes() == before
    assert cli.main(["resume", str(folder), "--quiet", "--from-start"]) == 0
    assert start(tmp_path / "one", cache, "fedavg on links") == 0
    assert_same_run(tmp_path / "one" / "tiny-x", folder)


def test_a_run_that_begins_again_leaves_no_rows_of_before(cache, tmp_path, monkeypatch):
    """Those of tables that it does not write any more, because options of the output were changed."""
    more = ["--output.updates", "true", "--evaluation.every", "1"]
    folder = killed_at(3, tmp_path, cache, monkeypatch, *NEVER, *more)
    assert (folder / "updates.csv").exists()
    again = ["--output.updates", "false", "--output.clients", "none"]
    assert cli.main(["resume", str(folder), "--quiet", "--from-start", *again]) == 0
    assert not (folder / "updates.csv").exists()
    assert not (folder / "assignments.csv").exists()


def test_run_with_resume_begins_again_what_has_no_checkpoint(cache, tmp_path, monkeypatch):
    folder = killed_at(1, tmp_path, cache, monkeypatch, *NEVER)
    assert start(tmp_path, cache, "fedavg on links", "--resume") == 0
    assert (folder / "summary.json").exists()
    folder = tmp_path / "again" / "tiny-x"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: tiny\n")  # killed while it was made
    assert start(tmp_path / "again", cache, "fedavg on links", "--resume") == 0
    assert (folder / "summary.json").exists()


def begun_from(file: Path, folder: Path, cache: Path, *more: str) -> int:
    """Run a configuration of one's own, or go on with its run, as a script does; return the exit code."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(cache)]
    return cli.main(["run", str(file), "--quiet", "--resume", *place, *more])


def edited(file: Path, **changes: str) -> None:
    """Replace values in a configuration file, given by their keys."""
    text = file.read_text()
    for key, value in changes.items():
        text = re.sub(rf"\b{key}: [^,}}\n]*", f"{key}: {value}", text)
    file.write_text(text)


def test_run_with_resume_reads_its_file_again(cache, tmp_path, monkeypatch, capsys):
    """More rounds in the file are taken; another learning rate is refused, also where the run is complete."""
    file, folder = Path(shutil.copy(CONFIG, tmp_path / "mine.yaml")), tmp_path / "tiny-x"
    edited(file, rounds="4")
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert begun_from(file, tmp_path, cache) == 75
    edited(file, lr="0.001")
    capsys.readouterr()
    assert begun_from(file, tmp_path, cache) == 2
    said = capsys.readouterr().err
    assert "local.lr = 0.001: the run began with 0.1" in said
    assert said.count("\n") == 1
    edited(file, lr="0.1", rounds="5")
    assert begun_from(file, tmp_path, cache) == 0
    assert begun_from(CONFIG, tmp_path / "one", cache, "--rounds", "5") == 0
    assert_same_run(tmp_path / "one" / "tiny-x", folder)
    assert begun_from(file, tmp_path, cache) == 0, "it is complete"
    for key, value, said in (("lr", "0.001", "local.lr = 0.001: "), ("rounds", "6", "rounds = 6: ")):
        capsys.readouterr()
        edited(file, **{key: value})
        assert begun_from(file, tmp_path, cache) == 2
        assert said in capsys.readouterr().err
        edited(file, lr="0.1", rounds="5")


def test_run_with_resume_begins_again_from_its_file(cache, tmp_path, monkeypatch):
    """It is not the configuration of the run that left no checkpoint."""
    file = Path(shutil.copy(CONFIG, tmp_path / "mine.yaml"))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoints, "due", raise_killed)
        with pytest.raises(Killed):
            begun_from(file, tmp_path, cache)
    edited(file, lr="0.001")
    assert begun_from(file, tmp_path, cache) == 0
    assert begun_from(CONFIG, tmp_path / "one", cache, "--local.lr", "0.001") == 0
    assert_same_run(tmp_path / "one" / "tiny-x", tmp_path / "tiny-x")


def test_a_default_that_has_changed_since_the_checkpoint_is_refused(cache, tmp_path, monkeypatch, capsys):
    """The checkpoint's digest leaves defaults out, config.yaml has all values: together they tell."""
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert start(tmp_path, cache, "fedavg on links") == 75
    resume = ["resume", str(tmp_path / "tiny-x"), "--quiet"]
    with monkeypatch.context() as patched:
        usual = {**defaults_of(LocalConfig), "weight_decay": 0.5}
        patched.setattr(loader, "defaults_of", lambda cls: usual if cls is LocalConfig else defaults_of(cls))
        assert cli.main(resume) == 2
    assert "a default has changed since the checkpoint" in capsys.readouterr().err
    assert cli.main(resume) == 0


def test_a_run_of_another_format_is_refused(cache, tmp_path, monkeypatch, capsys):
    """That of release 0.2 is 1, of releases to come another."""
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert start(tmp_path, cache, "fedavg on links") == 75
    folder = tmp_path / "tiny-x"
    about = json.loads((folder / "run.json").read_text())
    again = ["run", str(CONFIG), "--quiet", "--output.folder", str(tmp_path), "--output.id", "x", "--resume"]
    for form in (1, FORMAT + 1, None):
        (folder / "run.json").write_text(json.dumps({**about, "format": form}))
        for words in (["resume", str(folder), "--quiet"], again):
            capsys.readouterr()
            assert cli.main(words) == 2
            (said,) = capsys.readouterr().err.splitlines()
            assert f"RUN = '{folder}': has format {form} of another version of mpifl" in said


@pytest.mark.parametrize("rounds", ["2", "3"])
def test_fewer_rounds_than_were_taken_are_refused(rounds, cache, tmp_path, monkeypatch, capsys):
    stop_after(3, monkeypatch)
    assert start(tmp_path, cache, "fedavg on links") == 75
    capsys.readouterr()
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet", "--rounds", rounds]) == 2
    said = capsys.readouterr().err
    assert f"rounds = {rounds}: step 3" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("was", "change", "said"),
    [
        (
            [],
            ["--output.clients", "none"],
            "output.clients = 'none': the rounds before were written with 'all'",
        ),
        (["--output.clients", "none"], ["--output.clients", "all"], "output.clients = 'all': "),
        (
            [],
            ["--output.updates", "true"],
            "output.updates = True: the rounds before were written with False",
        ),
    ],
)
def test_tables_that_would_lack_the_rounds_before_are_refused(
    was, change, said, cache, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert start(tmp_path, cache, "fedavg on links", *was) == 75
    resume = ["resume", str(tmp_path / "tiny-x"), "--quiet"]
    capsys.readouterr()
    assert cli.main([*resume, *change]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert cli.main([*resume, "--output.label", "mine", "--output.client_models", "true"]) == 0


def shortened(file: Path) -> None:
    """Cut off the end of a file, as a machine does that goes down before it is on disk."""
    os.truncate(file, file.stat().st_size - 20)


def altered(file: Path) -> None:
    """Replace digits in the rows of a file."""
    head, _, rows = file.read_text().partition("\n")
    file.write_text(f"{head}\n{rows.replace('1', '7')}")


DAMAGES = {"unlink": Path.unlink, "shortened": shortened, "altered": altered}


@pytest.mark.parametrize(("table", "damage"), covering(["assignments.csv", "updates.csv"], [*DAMAGES]))
def test_a_run_does_not_go_on_after_rows_that_are_damaged(
    table, damage, cache, tmp_path, monkeypatch, capsys
):
    """The checkpoint holds how long these tables were; missing rows were filled up with zero bytes."""
    words = ["--output.updates", "true", "--evaluation.every", "1"]
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert start(tmp_path, cache, "fedavg on links", *words) == 75
    folder = tmp_path / "tiny-x"
    whole = (folder / table).read_bytes()
    DAMAGES[damage](folder / table)
    capsys.readouterr()
    assert cli.main(["resume", str(folder), "--quiet"]) == 2
    assert f"step-000000002 is not used: {table} " in capsys.readouterr().err
    (folder / table).write_bytes(whole + b"rows of a step that will be taken again\n")
    assert cli.main(["resume", str(folder), "--quiet"]) == 0
    assert start(tmp_path / "one", cache, "fedavg on links", *words) == 0
    assert_same_run(tmp_path / "one" / "tiny-x", folder)
    assert (folder / table).read_bytes() == (tmp_path / "one" / "tiny-x" / table).read_bytes()


@pytest.mark.parametrize(("key", "value"), [("id", "y"), ("folder", "elsewhere")])
def test_a_run_does_not_move_when_it_goes_on(key, value, cache, tmp_path, monkeypatch, capsys):
    """RUN says where it is: another name or folder would be in its configuration only."""
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert start(tmp_path, cache, "fedavg on links") == 75
    folder = tmp_path / "tiny-x"
    for _ in ("while it is unfinished", "when it is complete"):
        capsys.readouterr()
        assert cli.main(["resume", str(folder), "--quiet", f"--output.{key}", value]) == 2
        said = capsys.readouterr().err
        assert f"output.{key} = {value!r}: has no effect" in said
        assert said.count("\n") == 1
        with pytest.raises(UserError, match=f"output.{key}"):
            mpifl.resume(folder, output={key: value})
        as_before = ["--output.id", "x", "--output.folder", str(tmp_path)]
        assert cli.main(["resume", str(folder), "--quiet", *as_before]) == 0


def own_images(path: Path, bright: int) -> Path:
    """Write an archive of 200 small images of two classes; return it."""
    x = np.random.default_rng(0).integers(0, bright, (200, 8, 8), dtype=np.uint8)
    np.savez(path, x_train=x[:160], y_train=np.arange(160) % 2, x_test=x[160:], y_test=np.arange(40) % 2)
    return path


def stopped_on(archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Path:
    """Run on one's own images until it stops after two rounds; return the run folder."""
    data = ["--data.source", f"{{name: npz, path: {archive}}}", "--data.scenario", "{name: iid, clients: 4}"]
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert start(archive.parent, cache, "fedavg on links", *data, *more) == 75
    return archive.parent / "tiny-x"


def test_a_run_goes_on_with_the_samples_that_it_began_with_or_not_at_all(
    cache, tmp_path, monkeypatch, capsys
):
    folder = stopped_on(own_images(tmp_path / "mine.npz", 200), cache, monkeypatch)
    own_images(tmp_path / "mine.npz", 100)
    capsys.readouterr()
    assert cli.main(["resume", str(folder), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "samples of the data: " in said
    assert said.count("\n") == 1
    own_images(tmp_path / "mine.npz", 200)  # written anew, but the same
    assert cli.main(["resume", str(folder), "--quiet"]) == 0


TIMES = {  # key -> columns of its file, values of a row, options of the run
    "delay.file": ("client,seconds", "{k},2.5", ["--delay", "{name: measured, file: FILE}"]),
    "network.file": (
        "client,downlink_bytes_s,uplink_bytes_s",
        "{k},9000,5000.5",
        ["--network", "{name: trace, file: FILE}"],
    ),
    "devices.file": ("device,seconds", "phone{k},2.5", ["--devices", "{name: measured, file: FILE}"]),
    "policy.uploads.file": (
        "client,mean_s",
        "{k},2.5",
        ["--policy", "{name: client_decides, uploads: {name: rates, file: FILE}}"],
    ),
}


@pytest.mark.parametrize("key", TIMES)
def test_a_run_does_not_go_on_with_other_times_than_it_began_with(key, cache, tmp_path, monkeypatch, capsys):
    columns, row, options = TIMES[key]
    file = tmp_path / "mine.csv"
    whole = "\n".join([columns, *(row.format(k=k) for k in range(8)), ""])
    file.write_text(whole)
    asked = [word.replace("FILE", str(file)) for word in options]
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        begun = ["run", str(CONFIG), "--quiet", "--rounds", "4", *asked, "--output.folder", str(tmp_path)]
        assert cli.main([*begun, "--output.id", "x", "--data.cache", str(cache)]) == 75
    file.write_text(whole.replace(".5", ".25"))
    capsys.readouterr()
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert f"{key} = '{file}': holds other content than at the checkpoint" in said
    assert said.count("\n") == 1
    file.write_text(whole)
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == 0


def of_fedavg(folder: Path, name: str, seed: int, cache: Path) -> Path:
    """Return the folder of a finished run whose model depends on `seed`."""
    place = ["--output.folder", str(folder), "--output.id", name, "--data.cache", str(cache)]
    assert cli.main(["run", str(CONFIG), "--quiet", *place, "--seed.training", str(seed)]) == 0
    return folder / f"tiny-{name}"


@pytest.mark.parametrize("key", ["start.run", "model.weights"])
@pytest.mark.parametrize(("changes", "code"), [(1, 2), (0, 0)])
def test_a_run_does_not_go_on_from_other_weights_than_it_began_with(
    key, changes, code, cache, tmp_path, monkeypatch, capsys
):
    one, other = (of_fedavg(tmp_path, name, seed, cache) for seed, name in enumerate(["one", "other"]))
    value = one if key == "start.run" else one / "model.safetensors"
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert (
            start(tmp_path, cache, "fedavg on links", "--algorithm", "fedper", f"--{key}", str(value)) == 75
        )
    if changes:
        shutil.copy(other / "model.safetensors", one / "model.safetensors")
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == code
    said = capsys.readouterr().err
    assert (f"{key} = '{value}': holds other weights than at the checkpoint" in said) == (code == 2)


def test_a_run_does_not_go_on_from_another_last_layer(cache, tmp_path, monkeypatch, capsys):
    """It is read from the file, too, where it fits the classes."""
    file = of_fedavg(tmp_path, "one", 0, cache) / "model.safetensors"
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        asked = ("--algorithm", "fedper", "--model.weights", str(file))
        assert start(tmp_path, cache, "fedavg on links", *asked) == 75
    tables = load_file(file)
    tables["model"][:, -5:] += 1.0
    with safe_open(file, "pt") as opened:
        save_file(tables, file, opened.metadata())
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == 2
    assert "holds other weights than at the checkpoint" in capsys.readouterr().err


def test_a_resumed_run_is_held_before_its_data_are_opened(cache, tmp_path, monkeypatch):
    """Who watches sees that it goes on, not how it ended before; another resume is refused at once."""
    stop_after(2, monkeypatch)
    assert start(tmp_path, cache, "client state") == 75
    monkeypatch.undo()
    told = []

    def build(*arguments: object) -> None:
        told.append(watch.look(tmp_path / "tiny-x").text)
        raise UserError("data", "tiny", "are gone")

    assert watch.look(tmp_path / "tiny-x").state == "stopped"
    monkeypatch.setattr(running, "build", build)
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == 2
    assert told == ["running: it is being resumed"]
    assert watch.look(tmp_path / "tiny-x").state == "stopped", "it is held no longer"
    monkeypatch.undo()
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == 0


def test_checkpoints_come_by_steps_by_minutes_and_when_asked_for(tmp_path, monkeypatch):
    """`minutes: 5`, `every: 4`: after the first step, at multiples of 4, five minutes after the last one."""
    now = [1000.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    signals = Signals()
    config = loader.load(str(CONFIG), ["--checkpoint", "{every: 4, minutes: 5}"])
    keeper = checkpoints.Checkpoints(tmp_path, {}, signals, None, print, **vars(config.checkpoint))

    def due(step: int, minutes: float) -> str:
        now[0] += 60.0 * minutes
        if word := keeper.due(step):
            keeper.tried, keeper.written, keeper.since = step, step, now[0]
        return word

    assert [due(0, 4.9), due(1, 0.0), due(2, 4.9), due(3, 0.2), due(4, 0.0)] == ["", SAVE, "", SAVE, SAVE]
    assert [due(5, 4.9), due(6, 0.2), due(7, 4.9), due(8, 0.0), due(9, 5.1)] == ["", SAVE, "", SAVE, SAVE]
    signals.save = True
    assert [due(10, 0.0), due(11, 0.0)] == [SAVE, ""]
    signals.stop = True
    assert due(11, 0.0) == STOP


def test_by_default_a_checkpoint_is_written_every_ten_minutes():
    assert (CheckpointConfig().every, CheckpointConfig().minutes) == (0, 10.0)


def full_from(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk be full from the n-th file of a checkpoint on that is forced to it."""
    real, calls = checkpoint.force_to_disk, [0]

    def force(path: Path) -> None:
        calls[0] += 1
        if calls[0] >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    monkeypatch.setattr(checkpoint, "force_to_disk", force)


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before_and_the_run_goes_on(
    cache, tmp_path, monkeypatch, capsys
):
    assert start(tmp_path / "one", cache, "client state") == 0
    capsys.readouterr()
    full_from(12, monkeypatch)  # in the second checkpoint
    seen = []
    real = checkpoints.Checkpoints.write_failed

    def fail(self: checkpoints.Checkpoints, step: int, error: OSError) -> None:
        real(self, step, error)
        clients = {path.name.rsplit("-", 1)[1] for path in self.clients.iterdir()}
        seen.append((step, sorted(path.name for path in self.folder.iterdir()), clients))

    monkeypatch.setattr(checkpoints.Checkpoints, "write_failed", fail)
    assert start(tmp_path / "two", cache, "client state", "--checkpoint.every", "1") == 0
    assert seen == [(step, ["clients", "step-000000001"], {"1"}) for step in (2, 3, 4)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert all("No space left" in line and "last checkpoint is of step 1" in line for line in said)
    assert_same_run(tmp_path / "one" / "tiny-x", tmp_path / "two" / "tiny-x")


@pytest.mark.parametrize(("call", "last"), [(1, "step 0"), (12, "step 1")], ids=["none", "one"])
def test_a_run_that_is_stopped_on_a_full_disk_says_which_state_was_written_last(
    call, last, cache, tmp_path, monkeypatch, capsys
):
    due = {1: SAVE, 3: STOP}
    monkeypatch.setattr(checkpoints.Checkpoints, "due", lambda self, now: due.get(now, ""))
    full_from(call, monkeypatch)
    assert start(tmp_path, cache, "client state") == 75
    said = capsys.readouterr().err
    assert f"stopped after step 3, the last state that was written is of {last}" in said
    assert ("--from-start" in said) == (last == "step 0")


def test_a_full_disk_under_the_figures_ends_the_run_with_one_line(cache, tmp_path, monkeypatch, capsys):
    def full(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.Checkpoints, "write", full)
    monkeypatch.setattr("mpifl.results.recorder.GrowingCsv.append", full)
    monkeypatch.setattr("mpifl.comm.single.os._exit", lambda code: None)
    assert start(tmp_path, cache, "client state") == 1
    said = capsys.readouterr().err
    assert "No space left" in said
    assert said.count("\n") == 1
