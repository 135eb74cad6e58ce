"""Without the packages of its extras mpifl trains; what needs one says so in one line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from support.runs import CONFIG

from mpifl import cli
from mpifl.core import optional_packages
from mpifl.core.errors import UserError
from mpifl.data import SOURCES
from mpifl.data.sources.base import fetch
from mpifl.models.torchvision_models import ResNet18
from mpifl.results.reader import load


@pytest.fixture
def bare(monkeypatch) -> None:
    """Make Matplotlib and torchvision look missing."""

    def find_spec(name: str) -> object:
        return None if name in ("matplotlib", "torchvision") else importlib.util.find_spec(name)

    monkeypatch.setattr(optional_packages, "find_spec", find_spec)


def test_figures_need_the_extra_report_and_runs_and_sweeps_do_not(bare, tmp_path, capsys, monkeypatch):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "1"]
    assert cli.main(["run", str(CONFIG), *place, "--quiet"]) == 0
    capsys.readouterr()
    for words in (["report", str(tmp_path / "tiny-x")], ["data", str(CONFIG), "--sheet", "s.png"]):
        assert cli.main(words) == 2
        assert capsys.readouterr().err.endswith(': needs matplotlib: pip install "mpifl[report]"\n')
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r'plot = .*: needs matplotlib: pip install "mpifl\[report\]"'):
        load(tmp_path / "tiny-x").plot()
    place[3] = "y"
    assert cli.main(["sweep", str(CONFIG), "--vary", "{local.lr: [0.1, 0.2]}", *place]) == 0
    out, err = capsys.readouterr()
    assert err.count("no figure sweep.png") == 1
    assert out.rstrip().endswith("sweep.md, sweep.csv")
    assert not (tmp_path / "tiny-y" / "sweep.png").exists()


def test_downloads_and_networks_of_torchvision_need_the_extra_vision(bare, tmp_path):
    needs = r'needs torchvision: pip install "mpifl\[vision\]"'
    with pytest.raises(UserError, match=rf"model\.name = .resnet18.: {needs}"):
        ResNet18().make((3, 32, 32), 10)
    with pytest.raises(UserError, match=rf"data\.root = .*: {needs}"):
        fetch(SOURCES["mnist"](), "MNIST", Path(tmp_path))
