"""Plug-ins: packages installed beside mpifl are listed, explained, cited, run, and part of the identity."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import toy
from support.packages import METHOD, install, install_slow

import mpifl
from mpifl.cli import main
from mpifl.comm.mpi_startup import mpirun
from mpifl.comm.single import Single
from mpifl.core import plugins
from mpifl.core.errors import Stopped, UserError
from mpifl.driver.run import run
from mpifl.experiment import loader, reference
from mpifl.experiment.schema import CHOICES, Config
from mpifl.results.trackers import CALLBACKS

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
SHORT = ["--rounds", "2", "--model", "{name: mlp, hidden: [4]}", "-q"]
GROUPS = {
    *("algorithms", "models", "sources", "scenarios", "policies"),
    *("compressions", "trainers", "protections", "callbacks"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a folder of packages, which is on the path; the working folder is beside it."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    yield folder
    forget(tmp_path)


def forget(folder: Path) -> None:
    """Forget modules of a folder, as a new process would."""
    for name, module in [*sys.modules.items()]:
        if str(folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def said(capsys, *words: str) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it prints on stdout and stderr."""
    code = main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


def summary(folder: Path, run: str) -> dict:
    return json.loads((folder / "runs" / f"tiny-{run}" / "summary.json").read_text())


def test_the_nine_groups_are_read_by_one_mechanism():
    groups = {catalogue.group for catalogue in (*CHOICES.values(), CALLBACKS)}
    assert groups >= GROUPS
    assert {*reference.LISTED} >= GROUPS, "the word of mpifl list is the name of the group"


def test_a_plug_in_is_listed_explained_and_cited_with_its_package(here, capsys):
    install_slow(here)
    code, out, _ = said(capsys, "list", "algorithms")
    assert code == 0
    row = next(line for line in out.splitlines() if line.split()[:1] == ["slow"])
    assert row.split()[1:5] == ["2026", "rounds,", "buffer,", "every_arrival"]
    assert row.endswith("One model, changed slowly. [slowly 1.0]")
    code, out, _ = said(capsys, "show", "slow")
    assert code == 0
    for part in ("slowly 1.0", "eta: step of the server.", "eta: float in (0, 1] = 0.5", "@misc{doe2026slow"):
        assert part in out
    code, out, _ = said(capsys, "cite", TINY, "--algorithm.name", "slow")
    assert code == 0
    assert out.startswith("% algorithm slow\n@misc{doe2026slow,")
    schema = json.loads(reference.json_schema())["$defs"]
    assert "slow" in schema["algorithm.name"]["anyOf"][0]["enum"]


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_plug_in_computes_the_same_over_ranks(ranks, here, mpirun):
    install_slow(here)
    words = ["run", TINY, "--algorithm", "{name: slow, eta: 0.25}", *SHORT]
    assert main([*words, "--output.id", "one"]) == 0
    path = os.pathsep.join([str(here), toy.PYTHONPATH["PYTHONPATH"]])
    done = mpirun(ranks, "-m", "mpifl", *words, "--output.id", "more", env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    one, other = summary(here.parent, "one"), summary(here.parent, "more")
    assert one["digest"] == other["digest"]
    assert one["identity"]["plugins"] == other["identity"]["plugins"]
    assert one["settings"]["algorithm"] == {"name": "slow", "eta": 0.25}


@pytest.mark.in_turn
def test_a_rank_without_the_package_ends_all_with_one_line(here):
    install_slow(here)
    words = ["mpifl", "run", TINY, "--algorithm.name", "slow", *SHORT]
    path = os.environ.get("PYTHONPATH", "")
    more = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    start = mpirun(1)
    first = [*start, *words]
    first[first.index(sys.executable) : first.index(sys.executable)] = ["env", f"PYTHONPATH={here}:{path}"]
    rest = [word for word in first[first.index("env") :] if not word.startswith("PYTHONPATH=")]
    rest.insert(1, f"PYTHONPATH={path}")
    command = [*first, ":", "-n", "1", *rest]
    done = subprocess.run(command, capture_output=True, text=True, env=more, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpifl:")]
    assert done.returncode == 2
    assert len(lines) == 1
    assert re.search("algorithm.name = 'slow': rank 1 on .* cannot load what rank 0 has loaded", lines[0])


def identity(here: Path, id: str) -> str:
    assert main(["run", TINY, "--algorithm.name", "slow", *SHORT, "--output.id", id]) == 0
    return str(summary(here.parent, id)["identity"]["plugins"])


def test_versions_and_files_of_a_package_are_in_the_identity(here, tmp_path, monkeypatch, capsys):
    """The same version from another folder is the same; another version or file is another."""
    install_slow(here)
    first = identity(here, "a")
    assert re.fullmatch(r"slowly 1\.0 [0-9a-f]{12}", first)
    code = first.rsplit(" ", 1)[1]
    found = []
    for at, (version, text) in enumerate([("1.0", METHOD), ("1.1", METHOD), ("1.0", METHOD + "# more\n")]):
        forget(tmp_path)
        monkeypatch.syspath_prepend(str(install_slow(tmp_path / str(at), version=version, text=text)))
        found.append(loader.plugins_of(loader.load(TINY, ["--algorithm.name", "slow"])))
    assert found[:2] == [first, f"slowly 1.1 {code}"]
    assert found[2].startswith("slowly 1.0 ")
    assert found[2] != first
    words = [TINY, "--algorithm.name", "slow", *SHORT, "--output.id", "a", "--output.existing", "reuse"]
    code, _, err = said(capsys, "run", *words)
    assert code == 2
    assert f"was computed by {first}; install that" in err
    assert found[2] in err


def test_a_resumed_run_says_that_the_plug_in_was_another(here, tmp_path, monkeypatch, capsys):
    install_slow(here)
    words = ["--algorithm.name", "slow", "--rounds", "3", "--output.id", "a"]
    with pytest.raises(Stopped):
        run(loader.load(TINY, words), Single(), quiet=True, asked_to_stop=lambda: True)
    forget(tmp_path)
    monkeypatch.syspath_prepend(str(install_slow(tmp_path / "later", version="1.1")))
    code, _, err = said(capsys, "resume", "runs/tiny-a", "-q")
    assert code == 0
    assert re.search(r"plugins was slowly 1\.0 \w+ and is slowly 1\.1 \w+: numbers, not only", err)
    assert "plugins slowly 1.0" in summary(here.parent, "a")["identity"]["earlier"]


def test_a_name_of_two_packages_or_of_mpifl_is_refused_with_both(here, capsys):
    install_slow(here)
    install_slow(here, "slower", "0.2")
    path = {"fedprox": "own:Slow"}
    install(here, "proxes", "3", {"algorithms": path}, {"own.py": METHOD})
    code, _, err = said(capsys, "run", TINY, "--algorithm.name", "slow", *SHORT)
    assert code == 2
    assert err.count("\n") == 1
    assert "slowly 1.0" in err
    assert "slower 0.2" in err
    code, out, err = said(capsys, "list", "algorithms")
    assert code == 2
    assert "fedavg" in out, "the others are listed"
    assert err.count("\n") == 2
    assert "fedprox': mpifl has that name, and proxes 3 declares it, too" in err
    assert said(capsys, "show", "fedprox")[0] == 2


BROKEN = {
    "import": ({"mine": "broken:Mine"}, "import nowhere_to_be_found\n", "No module named 'nowhere_to_be"),
    "name": ({"mine": "broken:Mine"}, "class Mind: pass\n", "broken has no 'Mine'; did you mean 'Mind'?"),
    "path": ({"mine": "broken"}, "", "an entry point is name = package.module:Class"),
    "kind": ({"mine": "broken:Mine"}, "class Mine: pass\n", "is not a dataclass"),
    "type": (
        {"mine": "broken:Mine"},
        METHOD.replace("PositiveShare = 0.5", "'PositiveShore' = 0.5").replace("Slow", "Mine"),
        "has a field whose type cannot be read: NameError: name 'PositiveShore'",
    ),
    "exit": ({"mine": "broken:Mine"}, "raise SystemExit(3)\n", "cannot be imported: SystemExit"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plug_in_costs_only_those_who_use_or_list_it(kind, here, capsys):
    entries, text, part = BROKEN[kind]
    install(here, "broken", "1", {"algorithms": entries}, {"broken.py": text})
    for words in (
        ["run", TINY, "--algorithm.name", "mine", *SHORT],
        ["list", "algorithms"],
        ["show", "mine"],
    ):
        code, _, err = said(capsys, *words)
        assert code == 2, words
        assert err.count("\n") == 1
        assert part in err
    assert "broken 1" in err or kind in ("kind", "type")
    assert said(capsys, "run", TINY, *SHORT)[0] == 0
    assert said(capsys, "show", "fedavg")[0] == 0
    assert said(capsys, "schema")[0] == 0
    code, _, err = said(capsys, "run", TINY, "--algorithm.name", "min", *SHORT)
    assert code == 2
    assert "did you mean 'mine'?" in err


def test_a_file_of_entry_points_that_is_none_is_told_where_its_group_is_listed(here, capsys):
    folder = install(here, "broken", "1", {"algorithms": {}}, {})
    (folder / "broken-1.dist-info" / "entry_points.txt").write_text("[mpifl.algorithms]\nmine\n")
    code, out, err = said(capsys, "list", "algorithms")
    assert code == 2
    assert "fedavg" in out
    assert err.count("\n") == 1
    assert "the package broken 1 declares '[mpifl.algorithms]" in err
    assert said(capsys, "list", "models")[0] == 0


def test_metadata_are_read_only_for_a_name_that_mpifl_lacks(monkeypatch):
    """Whoever has no plug-ins waits for nothing."""

    def unasked(group: str) -> None:
        raise AssertionError(f"{group} were looked up")

    monkeypatch.setattr("mpifl.core.registry.declared", unasked)
    config = loader.load(TINY, ["--payload.compression.name", "qsgd", "--output.callbacks", "[tensorboard]"])
    assert loader.plugins_of(config) == ""
    with pytest.raises(AssertionError, match="algorithms were looked up"):
        loader.load(TINY, ["--algorithm.name", "fedavgg"])


@pytest.mark.parametrize("name", ["fedavg-plus", "package.method", "plain"])
def test_a_name_of_no_installed_package_says_that_packages_were_asked(name, here):
    def remedy() -> str:
        with pytest.raises(UserError) as error:
            loader.load(TINY, ["--algorithm.name", name])
        return error.value.remedy

    assert remedy().startswith("unknown name, and no installed package gives it") == (name != "plain")
    install_slow(here)
    assert remedy().startswith("unknown name, and no installed package gives it")


def test_a_file_without_its_class_is_told_how_to_name_it(here):
    Path("mine.py").write_text(METHOD)
    with pytest.raises(UserError, match=r"give mine\.py:Class"):
        loader.load(TINY, ["--algorithm.name", "mine.py"])
    with pytest.raises(UserError, match="unknown name"):
        loader.load(TINY, ["--algorithm.name", "nowhere.py"])


def test_an_installation_while_python_runs_is_noticed(here):
    assert "slow" not in CHOICES[Config, "algorithm"]
    install_slow(here)
    assert "slow" in CHOICES[Config, "algorithm"]
    assert plugins.declared("algorithms")["slow"].origin == "slowly 1.0"


OTHERS = '''
from dataclasses import dataclass, field

import torch

from mpifl.data.scenarios.usual import Iid
from mpifl.data.sources.scikit import Digits
from mpifl.models.mlp import MLP
from mpifl.protection.privacy import Privacy
from mpifl.protection.robust_rules import Median
from mpifl.simulation.policies import Synchronous
from mpifl.traffic.compression import Compression
from mpifl.training.trainers.pytorch import Torch


@dataclass(frozen=True)
class Signs(Compression):
    """One bit for each number."""

    sends_values = False

    def size(self, d, number_bytes):
        return -(-d // 8) + 4

    def code(self, x, key, unbiased):
        return torch.where(x < 0, -1.0, 1.0) * x.abs().mean()


class Told:
    """Counts rounds."""

    rounds = 0

    def on_round(self, done):
        Told.rounds += 1
''' + "".join(
    f'\n\n@dataclass(frozen=True)\nclass My{base}({base}):\n    """Mine."""\n'
    for base in ("Iid", "Digits", "MLP", "Privacy", "Median", "Synchronous", "Torch")
)
OF_GROUPS = {  # group -> key, class
    "models": ("model", "MyMLP"),
    "sources": ("data.source", "MyDigits"),
    "scenarios": ("data.scenario", "MyIid"),
    "policies": ("policy", "MySynchronous"),
    "compressions": ("payload.compression", "Signs"),
    "trainers": ("local.trainer", "MyTorch"),
    "protections": ("privacy", "MyPrivacy"),
}


def test_each_group_gives_its_section_a_class(here, capsys):
    """Of protections, a section takes those of its kind; a callback is any class with hooks."""
    entries = {group: {"mine": f"others:{cls}"} for group, (_, cls) in OF_GROUPS.items()}
    entries["protections"]["middle"] = "others:MyMedian"
    entries["callbacks"] = {"told": "others:Told"}
    install(here, "others", "1.0", entries, {"others.py": OTHERS})
    words = [word for key, _ in OF_GROUPS.values() if key != "local.trainer" for word in (f"--{key}", "mine")]
    words += ["--robust", "middle", "--output.callbacks", "[told]"]
    trained = ["--local.trainer", "mine"]
    for label, more in (("all", words), ("trainer", trained)):
        code, _, err = said(capsys, "run", TINY, "-q", "--rounds", "2", *more, "--output.id", label)
        assert code == 0, err
        assert summary(here.parent, label)["identity"]["plugins"].startswith("others 1.0 ")
    assert sys.modules["others"].Told.rounds == 2
    for group in GROUPS - {"algorithms"}:
        code, out, err = said(capsys, "list", group)
        assert (code, err) == (0, "")
        assert re.search(r"^  (mine|told|middle) .*\[others 1\.0\]$", out, re.MULTILINE), group
    privacies = said(capsys, "list", "privacies")[1]
    assert "mine" in privacies
    assert "middle" not in privacies
    code, _, err = said(capsys, "run", TINY, *SHORT, "--privacy", "middle")
    assert code == 2
    assert "privacy.name = 'middle': is not a subclass of mpifl.protection.privacy.Privacy" in err


def test_the_package_of_the_page_has_the_name_that_the_page_uses(here, capsys):
    """The commands after pip, as the page gives them; the run is cut short."""
    page = (Path(mpifl.__file__).parents[1] / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^<!-- test: (\S+) -->\n+```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    project = tomllib.loads(dict(blocks)["pyproject.toml"])["project"]
    groups = {group.removeprefix("mpifl."): names for group, names in project["entry-points"].items()}
    files = {"slowly.py": dict(blocks)["slowly.py"]}
    install(here, project["name"], project["version"], groups, files)
    (commands,) = re.findall(r"^```bash\npip install ./slowly.*?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    said_by = {}
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)[1:]
        short = {"run": ["--rounds", "1", "--model.name", "mlp", "-q"], "check": ["--ranks", "1"]}
        code, said_by[words[0]], err = said(capsys, *words, *short.get(words[0], []))
        assert code == 0, err
    (row,) = re.findall(r"ends with: (.*)$", commands, re.MULTILINE)
    first, last = (part.split() for part in row.split("..."))
    line = said_by["list"].splitlines()[-1].split()
    assert line[: len(first)] == first
    assert line[-len(last) :] == last
    assert "FAIL" not in said_by["check"]
    assert "@misc{doe2026slow" in said_by["cite"]
    rows = page[page.index("| group, after `mpifl.` |") :].split("\n\n")[0].splitlines()[2:]
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])} == {
        catalogue.group for catalogue in (*CHOICES.values(), CALLBACKS) if catalogue.group
    }
