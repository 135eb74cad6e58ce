"""Commands in one process: list, show, cite, plan, run."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpifl.algorithms.registry import CATALOGUE
from mpifl.cli import main
from mpifl.comm import Single
from mpifl.data import SCENARIOS, SOURCES
from mpifl.models import MODELS

TINY = str(Path(__file__).parent / "configs" / "tiny.yaml")


@pytest.fixture
def said(capsys, monkeypatch):
    """Return a function argv -> what a command that succeeds fingerprints."""
    monkeypatch.setattr(Single, "abort", lambda self, code: None)

    def say(*argv: str) -> str:
        code = main(argv)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return say


@pytest.mark.parametrize(
    ("what", "names"), [("algorithms", CATALOGUE), ("models", MODELS), ("data", {**SOURCES, **SCENARIOS})]
)
def test_everything_is_listed_with_a_line_of_its_own(what, names, said):
    lines = said("list", what).splitlines()
    for name in names:
        (line,) = (x for x in lines if x.split()[:1] == [name] and x.startswith(" "))
        assert len(line.split()) > 2, line


@pytest.mark.parametrize("name", [*CATALOGUE, *MODELS, *SOURCES, *SCENARIOS])
def test_everything_can_be_shown(name, said):
    shown = said("show", name)
    assert shown.startswith(f"{name}\n{'=' * len(name)}\n")
    assert "Fields and defaults:" in shown
    if name in CATALOGUE:
        assert re.search(r"@(article|inproceedings|misc){", shown)


def test_a_configuration_is_cited(said):
    assert "@inproceedings{mcmahan2017communication," in said("cite", TINY)
    assert "@inproceedings{li2020federated," in said("cite", TINY, "--algorithm", "fedprox")


@pytest.fixture
def ran(said, tmp_path):
    """Return a function options -> the folder of a run."""

    def run(*options: str, config: str = TINY) -> Path:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        out = said("run", config, "--output.folder", str(place), *options)
        (folder,) = place.iterdir()
        assert out.splitlines()[-1].endswith(str(folder)), "the last line names the folder"
        return folder

    return run


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a file of a run."""
    with (folder / name).open() as lines:
        return list(csv.DictReader(lines))


def test_the_resolved_configuration_gives_the_run_again(ran):
    options = [
        "--algorithm",
        "{name: fedprox, mu: 0.3}",
        "--seed",
        "4",
        "--cohort_size",
        "3",
        "--local.lr",
        "0.2",
    ]
    first = ran(*options)
    again = ran(config=str(first / "config.yaml"))
    one, two = (json.loads((f / "summary.json").read_text()) for f in (first, again))
    assert one["digest"] == two["digest"]
    assert one["seed"] == {"data": 4, "model": 4, "training": 4, "system": 4}
    assert (one["algorithm"], one["ranks"], one["rounds"]) == ("fedprox", 1, 2)


@pytest.mark.parametrize("seed", ["data", "model", "training", "system"])
def test_every_seed_matters(seed, ran):
    digests = {
        json.loads((ran("--cohort_size", "4", f"--seed.{seed}", s) / "summary.json").read_text())["digest"]
        for s in ("0", "1")
    }
    assert len(digests) == 2


def test_evaluation_before_the_first_round_and_every_round(ran):
    folder = ran("--evaluation.at_start", "true", "--evaluation.every", "1")
    rows = read(folder, "metrics.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert float(rows[2]["loss"]) < float(rows[0]["loss"])
    assert rows[0]["train_loss"] == ""
    assert float(rows[2]["train_loss"]) > 0
    assert rows[0]["federation_bytes_up"] == "0"


def test_only_some_clients_are_judged(ran):
    clients = read(ran("--evaluation.clients", "3"), "clients.csv")
    assert [row["client"] for row in clients] == ["0", "3", "7"]
    assert {row["group"] for row in clients} == {"0", "1"}


def test_the_final_rows_are_kept_unless_unwanted(ran):
    from safetensors.torch import load_file

    tensors = load_file(ran("--algorithm", "{name: ifca, num_clusters: 2}") / "model.safetensors")
    assert tensors["model"].shape == (2, 910)
    assert tensors["assign"].shape == (8,)
    assert not (ran("--output.model", "false") / "model.safetensors").exists()


@pytest.mark.parametrize(
    "options", [[], ["--algorithm", "ucfl"], ["--algorithm", "{name: ifca, num_clusters: 3}"]]
)
def test_a_plan_foretells_the_bytes_of_the_run(options, ran, said):
    plan = said("plan", TINY, *options)
    summary = json.loads((ran(*options) / "summary.json").read_text())
    (line,) = re.findall(r"federation in all +([\d.]+) kB down, ([\d.]+) kB up", plan)
    for told, way in zip(line, ("down", "up"), strict=True):
        assert float(told) == pytest.approx(summary[f"federation_bytes_{way}"] / 1000, rel=1e-3)
    assert "N = 8" in plan
    assert "d = 910" in plan


def test_a_reader_that_leaves_early_is_no_error():
    shell = f"{sys.executable} -m mpifl show fedavg | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
