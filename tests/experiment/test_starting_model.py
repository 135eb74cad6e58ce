"""Runs that start from the model of an earlier run; on ranks: `tests/mpi/test_digests.py`."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.core.parameters import Layout
from mpifl.experiment.build import from_earlier
from mpifl.experiment.schema import StartConfig
from mpifl.experiment.starting_model import FILE, read_model

ADAPTED = "{name: mlp, hidden: [12], lora: {rank: 2}}"
TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
LAYOUT = Layout(("fc1.weight", "head.weight"), ((2,), (1,)), 3)


def run(folder: Path, name: str, *options: str) -> Path:
    """Run the tiny configuration for two rounds, evaluated before the first, too."""
    place = ["--output.folder", str(folder), "--output.id", name, "--evaluation.at_start", "true"]
    assert cli.main(["run", str(TINY), "--rounds", "2", "-q", *place, *options]) == 0
    return folder / f"tiny-{name}"


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return metrics.csv of a run."""
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """Return the folder of a finished run of FedAvg."""
    return run(tmp_path_factory.mktemp("earlier"), "fedavg", "--algorithm", "fedavg")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """Return the folder of a finished run of FedAvg that trained adapters."""
    return run(tmp_path_factory.mktemp("adapted"), "lora", "--model", ADAPTED)


@pytest.mark.parametrize("method", ["fedavg", "fedavg_memory", "local", "{name: fesem, num_clusters: 2}"])
def test_a_run_starts_where_the_earlier_one_ended(method, earlier, tmp_path):
    """Before its first round every client has the accuracy that it had at the end of the earlier run."""
    later = run(tmp_path, "later", "--algorithm", method, "--start.run", str(earlier))
    first, last = rows_of(later)[0], rows_of(earlier)[-1]
    for name in ("accuracy_mean", "accuracy_worst", "accuracy_std", "loss"):
        assert first[name] == last[name]
    plain = run(tmp_path, "plain", "--algorithm", method)
    assert rows_of(plain)[0]["loss"] != first["loss"]


def test_the_body_is_the_earlier_models_and_each_head_its_own():
    """Earlier (1, 2, 3), drawn (10 j, 10 j, 10 j): initial model j is (1, 2, 10 j)."""
    start, drawn = torch.tensor([1.0, 2.0, 3.0]), lambda j: torch.full((3,), 10.0 * j)
    body = from_earlier(start, StartConfig("run", "body"), LAYOUT, drawn)
    whole = from_earlier(start, StartConfig("run"), LAYOUT, drawn)
    for j in (0, 1, 2):
        assert_close(body(j), torch.tensor([1.0, 2.0, 10.0 * j]))
        assert_close(whole(j), start)
    whole(0).zero_()
    assert_close(whole(0), start)


# -- refusals


def refused(capsys, *options: str) -> str:
    """Return what is said of a run that is refused."""
    assert cli.main(["run", str(TINY), "--rounds", "1", "-q", *options]) == 2
    return capsys.readouterr().err


def test_a_folder_that_is_no_finished_run_is_refused(tmp_path, capsys):
    place = ["--output.folder", str(tmp_path)]
    said = refused(capsys, *place, "--start.run", str(tmp_path / "nowhere"))
    assert "start.run" in said
    assert f"has no {FILE}" in said
    assert "start.part = 'body': has no effect" in refused(capsys, *place, "--start.part", "body")
    assert "use one of all, body" in refused(capsys, *place, "--start.run", "x", "--start.part", "head")


def test_weights_of_which_the_earlier_run_leaves_nothing_are_refused(earlier, tmp_path, capsys):
    """`start.part: body` leaves the last layer to `model.weights`, and adapters stand on them."""
    place = ["--output.folder", str(tmp_path), "--start.run", str(earlier)]
    weights = ["--model.weights", str(earlier / FILE)]
    said = refused(capsys, *place, *weights)
    assert f"model.weights = '{earlier / FILE}': has no effect beside start.run" in said
    assert not list(tmp_path.iterdir()), "nothing was begun"
    run(tmp_path, "body", "--start.run", str(earlier), *weights, "--start.part", "body")


def test_a_run_of_another_model_is_refused(earlier, tmp_path, capsys):
    options = ["--model", "{name: mlp, hidden: [3]}", "--output.folder", str(tmp_path)]
    said = refused(capsys, *options, "--start.run", str(earlier))
    assert "use the same model and data" in said
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize("named", [True, False])
def test_another_network_of_as_many_numbers_is_refused(named, tmp_path, capsys):
    """64 - 15 - 10 and 64 - 5 - 50 - 10 have 1135 numbers each; the file names the tensors of its model."""
    folder = run(tmp_path, "one", "--model", "{name: mlp, hidden: [15]}")
    if not named:
        save_file(load_file(folder / FILE), folder / FILE)
    place = ["--output.folder", str(tmp_path / "other"), "--model", "{name: mlp, hidden: [5, 50]}"]
    for key, value in (("start.run", folder), ("model.weights", folder / FILE)):
        said = refused(capsys, *place, f"--{key}", str(value))
        assert f"{key} = '{value}': " in said
        if not named:
            assert "does not name its tensors" in said
            continue
        assert "fc1.weight [15, 64]" in said
        assert "fc1.weight [5, 64]" in said
        assert said.count("\n") == 1
        run(tmp_path, key.partition(".")[0], "--model", "{name: mlp, hidden: [15]}", f"--{key}", str(value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("several", "its clients use 2 models"),
        ("parts", "holds assign, body, no table 'model'"),
        ("infinite", "not finite"),
        ("damaged", "cannot be read"),
    ],
)
def test_a_run_without_one_whole_model_is_refused(change, words, earlier, tmp_path):
    tables = load_file(earlier / FILE)
    if change == "several":
        tables["model"] = tables["model"].repeat(2, 1)
        tables["assign"][0] = 1
    elif change == "parts":
        tables["body"] = tables.pop("model")
    elif change == "infinite":
        tables["model"][0, 3] = np.inf
    save_file({k: v.contiguous() for k, v in tables.items()}, tmp_path / FILE)
    if change == "damaged":
        (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:50])
    with pytest.raises(UserError, match=r"start\.run") as error:
        read_model(str(tmp_path))
    assert words in str(error.value)


@pytest.mark.parametrize("key", ["start.run", "model.weights"])
def test_a_run_whose_clients_mix_several_models_is_refused(key, tmp_path, capsys):
    """All clients of FedEM have row 0 in `assign`, and are evaluated by three components."""
    mixed = run(tmp_path, "em", "--algorithm", "{name: fedem, num_components: 3}")
    value = mixed if key == "start.run" else mixed / FILE
    said = refused(capsys, "--output.folder", str(tmp_path), f"--{key}", str(value))
    assert f"{key} = " in said
    assert "clients mix, or choose among, 3 models" in said


def test_a_run_whose_clients_keep_their_models_to_themselves_is_refused(tmp_path, capsys):
    """Local uploads nothing, so its file has no table of models."""
    alone = run(tmp_path, "local", "--algorithm", "local")
    assert "model" not in load_file(alone / FILE)
    place, words = (
        ["--output.folder", str(tmp_path)],
        "whose clients keep models of their own and upload none",
    )
    said = refused(capsys, *place, "--start.run", str(alone))
    assert "start.run" in said
    assert words in said
    said = refused(capsys, *place, "--model.weights", str(alone / FILE))
    assert "model.weights" in said
    assert words in said
    (alone / "summary.json").unlink()
    assert "holds assign, no table 'model'" in refused(capsys, *place, "--start.run", str(alone))
    assert "holds no table 'model'" in refused(capsys, *place, "--model.weights", str(alone / FILE))


@pytest.mark.parametrize("method", ["ditto", "{name: fedem, num_components: 1}"])
def test_a_run_with_one_row_for_all_is_a_start_whatever_clients_make_of_it(method, tmp_path):
    earlier = run(tmp_path, "one", "--algorithm", method)
    run(tmp_path, "later", "--start.run", str(earlier))


OTHER_BASES = {
    "seed": (["--seed.model", "5"], "other frozen weights", "seed.model 0"),
    "alpha": (["--model.lora.alpha", "6"], "model.lora.alpha is 2", "model.lora.alpha is 2"),
}


@pytest.mark.parametrize("case", OTHER_BASES)
def test_adapters_on_other_frozen_weights_are_refused(case, adapted, tmp_path, capsys):
    """By the checksum of what is frozen; where figures are not there any more, by the configuration."""
    options, *words = OTHER_BASES[case]
    bare = tmp_path / "bare"
    shutil.copytree(adapted, bare)
    (bare / "summary.json").unlink()
    place = ["--output.folder", str(tmp_path), "--model", ADAPTED]
    for folder, said in zip((adapted, bare), words, strict=True):
        assert said in refused(capsys, *place, *options, "--start.run", str(folder))


def test_adapters_start_on_the_same_frozen_weights(adapted, tmp_path):
    """Before its first round every client has the accuracy of the earlier run's end."""
    same = ["--model", "{name: mlp, hidden: [12], lora: {rank: 2, alpha: 2}}", "--seed.training", "4"]
    later = run(tmp_path, "later", *same, "--start.run", str(adapted))
    assert rows_of(later)[0]["loss"] == rows_of(adapted)[-1]["loss"]


def test_a_whole_model_is_a_start_under_another_model_seed(earlier, tmp_path):
    later = run(tmp_path, "later", "--seed.model", "5", "--start.run", str(earlier))
    assert rows_of(later)[0]["loss"] == rows_of(earlier)[-1]["loss"]
