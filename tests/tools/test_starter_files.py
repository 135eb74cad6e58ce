"""`mpifl init`: what it writes runs at once, by the commands that it names."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from mpifl.cli import main
from mpifl.core.errors import UserError
from mpifl.tools.starter_files import TEMPLATES, init

SHORT = ["--rounds", "1", "--local.epochs", "1", "--model", "{name: mlp, hidden: [8]}"]


@pytest.fixture
def here(tmp_path, tmp_path_factory, monkeypatch):
    """A folder, and a Python that knows no other: mpifl still finds modules beside files of earlier tests."""
    base = str(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(base)])
    monkeypatch.delitem(sys.modules, "my_method", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.in_turn
@pytest.mark.parametrize(  # a sweep draws a figure
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "sweep")) for kind in TEMPLATES]
)
def test_what_is_written_runs_by_the_commands_that_are_named(kind, here, capsys):
    assert main(["init", kind, f"Our{kind.capitalize()}"]) == 0
    written, *commands = capsys.readouterr().out.splitlines()
    file = here / written.removeprefix("written: ")
    assert file.stem == f"our_{kind}"
    assert f"my_{kind}" not in file.read_text()
    assert f"My{kind.capitalize()}" not in file.read_text()
    assert commands
    for command in commands:
        program, name, *words = shlex.split(command.strip())
        assert program == "mpifl"
        if name == "check":
            words += ["--ranks", "1", "--rounds", "2"]
        if name in ("run", "data"):
            words += [*SHORT[:4], *(() if kind == "model" else SHORT[4:])]
        assert main([name, *words]) == 0, command
        assert command.strip() in file.read_text() or kind == "sweep"


def test_the_method_that_is_written_is_fedavg_with_one_cluster(here):
    init("method", "OneCluster", here)
    for name in ("{name: 'one_cluster.py:OneCluster', num_clusters: 1}", "fedavg"):
        where = ["--output.id", name[:3].strip("{"), "--participation", "0.5", "-q"]
        assert main(["run", "quickstart", "--algorithm", name, *SHORT, *where]) == 0
    digests = {json.loads(file.read_text())["digest"] for file in here.glob("runs/*/summary.json")}
    assert len([*here.glob("runs/*/summary.json")]) == 2
    assert len(digests) == 1


def test_a_package_has_the_names_that_were_given_everywhere(here):
    said = init("plugin", "LossGroups", here)
    written = {str(path.relative_to(here)): path for path in here.rglob("*") if path.is_file()}
    assert {*written} == {
        *("loss_groups/pyproject.toml", "loss_groups/README.md", "loss_groups/tests/test_loss_groups.py"),
        *(f"loss_groups/loss_groups/{name}" for name in ("__init__.py", "method.py", "codec.py")),
        "loss_groups/loss_groups/papers.bib",
    }
    texts = "\n".join(path.read_text() for path in written.values())
    assert "my_plugin" not in texts
    assert "MyPlugin" not in texts
    entries = tomllib.loads(written["loss_groups/pyproject.toml"].read_text())["project"]["entry-points"]
    assert entries == {
        "mpifl.algorithms": {"loss_groups": "loss_groups.method:LossGroups"},
        "mpifl.compressions": {"loss_groups_codec": "loss_groups.codec:LossGroupsCodec"},
    }
    assert "mpifl check loss_groups" in said


@pytest.mark.nightly
def test_a_package_is_installed_and_passes_its_own_tests(here):
    init("plugin", "LossGroups", here)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--quiet", "--target", "site", "./loss_groups"], check=True)
    path = os.pathsep.join([str(here / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "loss_groups/tests"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.parametrize("name", ["MyMethod", "my_method", "FedX2", ""])
def test_names_of_class_and_file_follow_from_either(name, here):
    said = init("method", name, here)
    file, cls = {"FedX2": ("fed_x2.py", "FedX2")}.get(name, ("my_method.py", "MyMethod"))
    assert (here / file).exists()
    assert f"class {cls}(ComparedUploads, Algorithm)" in (here / file).read_text()
    assert f"{file}:{cls}" in said


def test_nothing_is_overwritten_and_bad_names_are_refused(here):
    init("model", "", here)
    before = (here / "my_model.py").read_text()
    for kind, name, part in [
        ("model", "MyModel", "exists; use another name"),
        ("modell", "", "did you mean 'model'?"),
        ("data", "../data", "use letters, digits and underscores"),
        ("model", "none", "None has another meaning in that file"),
        ("method", "plan", "Plan has another meaning in that file"),
        ("scenario", "Rotate", "Rotate has another meaning in that file"),
        ("model", "Torch", r"a file torch.py would hide the module torch"),
        ("data", "2fast", "use letters, digits and underscores"),
        ("plugin", "ifca", "mpifl has a method of that name"),
        ("plugin", "Torch", "would hide the module torch"),
    ]:
        with pytest.raises(UserError, match=re.escape(part)):
            init(kind, name, here)
    assert (here / "my_model.py").read_text() == before
    assert len(list(here.iterdir())) == 1
