"""A pre-trained network that later runs find again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpifl import cli
from mpifl.algorithms.flt import FLT
from mpifl.experiment.pretraining_cache import read_shown, write_shown

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SMALL = {"name": "flt", "pretrain_epochs": 1, "finetune_epochs": 1, "centroids": 2, "code": 4}


@pytest.fixture
def trained(monkeypatch) -> list[Path]:
    """Return the files of autoencoders that were pre-trained, not read, since the test began."""
    files: list[Path] = []

    def write(file: Path, shown) -> None:
        files.append(file)
        write_shown(file, shown)

    monkeypatch.setattr("mpifl.experiment.pretraining_cache.write_shown", write)
    return files


def run(folder: Path, name: str, *options: str, **algorithm: object) -> str:
    """Run FLT for a round and return the digest of its final state."""
    method = json.dumps({**SMALL, **algorithm})
    place = ["--output.folder", str(folder), "--output.id", name, "--algorithm", method]
    assert cli.main(["run", str(TINY), "--rounds", "1", "-q", *place, *options]) == 0
    return json.loads((folder / f"tiny-{name}" / "summary.json").read_text())["digest"]


@pytest.mark.in_turn
@pytest.mark.usefixtures("flat_plane")
def test_the_same_network_is_trained_once_and_gives_the_same_bits(trained, tmp_path):
    cache = ["--system.statistics_cache", str(tmp_path / "cache")]
    plain = run(tmp_path, "plain")
    assert [run(tmp_path, f"{i}", *cache) for i in range(2)] == [plain, plain]
    assert len(trained) == 1
    run(tmp_path, "ward", *cache, case="ward", num_clusters=2)
    assert len(trained) == 1, "what happens with the codes does not decide the network"
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert run(tmp_path, "damaged", *cache) == plain
    assert len(trained) == 2
    assert read_shown(file).keys() == {"autoencoder", ".computation"}
    names = ("plain", "0", "1", "damaged")
    counted = [(tmp_path / f"tiny-{name}" / "computation.csv").read_text() for name in names]
    assert "0,server,0,0," in counted[0], "what was pre-trained counts, also where it is read"
    assert counted == counted[:1] * 4


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize(
    "change", ["data.public", "pretrain_epochs", "code", "seed.model", "seed.training", "local.batch_size"]
)
@pytest.mark.nightly
def test_another_network_is_trained_anew(change, trained, tmp_path):
    cache = ["--system.statistics_cache", str(tmp_path / "cache")]
    run(tmp_path, "first", *cache)
    if change in SMALL:
        run(tmp_path, "other", *cache, **{change: 3})
    else:
        run(tmp_path, "other", *cache, f"--{change}", {"data.public": "digits"}.get(change, "5"))
    assert len(trained) == 2
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "file").touch()
    options = ["--system.statistics_cache", str(tmp_path / "file"), "--output.folder", str(tmp_path / "runs")]
    assert cli.main(["run", str(TINY), "-q", *options]) == 2
    assert "system.statistics_cache" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_methods_that_train_nothing_before_keep_nothing(tmp_path):
    cache = ["--system.statistics_cache", str(tmp_path / "cache"), "--output.folder", str(tmp_path)]
    assert cli.main(["run", str(TINY), "--rounds", "1", "-q", "--algorithm", "pacfl", *cache]) == 0
    assert not [*(tmp_path / "cache").iterdir()]
    assert FLT.shown_from is not None
    assert replace(FLT(), gamma=2.0).shown_from == FLT.shown_from
