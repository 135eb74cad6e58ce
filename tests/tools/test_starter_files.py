"""`mpifl init`: what it writes runs at once, by the commands that it names."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from mpifl.cli import main
from mpifl.core.errors import UserError
from mpifl.tools.starter_files import TEMPLATES, init

SHORT = ["--rounds", "1", "--local.epochs", "1", "--model", "{name: mlp, hidden: [8]}"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
            words += ["--ranks", "1"]
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
    ]:
        with pytest.raises(UserError, match=re.escape(part)):
            init(kind, name, here)
    assert (here / "my_model.py").read_text() == before
    assert len(list(here.iterdir())) == 1
