"""Any mixture of settings is refused before training or gives the same files, however it is run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
from mpi import combinations
from support import toy

from mpifl.data import SOURCES, DataConfig
from mpifl.experiment.schema import CHOICES

PROGRAM = Path(combinations.__file__)
COUNT = int(os.environ.get("MPIFL_CONFIGURATIONS", "300"))
SEED = int(os.environ.get("MPIFL_SEED", "0"))


@pytest.mark.nightly(seconds=180)
def test_what_is_drawn_is_refused_before_training_or_has_one_set_of_files(mpirun, tmp_path):
    """On one rank and three, interrupted, without kernels; `python tests/mpi/combinations.py` runs more."""

    def start(ranks: int, folder: Path, what: str) -> subprocess.CompletedProcess[str]:
        command = (PROGRAM, folder, "--stage", what)
        return mpirun(ranks if ranks > 1 else None, *command, timeout=3600, env=toy.PYTHONPATH)

    counted, faults = combinations.campaign(tmp_path, SEED, COUNT, start)
    assert not faults, "\n\n".join(f"## {kind}\n" + "\n\n".join(texts) for kind, texts in faults.items())
    assert counted["ended"] >= COUNT // 2, counted
    assert min(counted[what] for what in combinations.COMPARED) >= COUNT // 8, counted


def test_combinations_depend_on_the_seed_alone_and_repairs_end():
    """A repair takes out what a refusal names; without a name that is there, something else."""
    drawn = combinations.draw(3, 20)
    assert drawn == combinations.draw(3, 40)[:20]
    assert drawn != combinations.draw(4, 20)
    random = combinations.Random(1)
    tree = {"seed": 1, "rounds": 3, "algorithm": {"name": "ifca"}, "policy": "rounds", "robust": "median"}
    assert "robust" not in combinations.repaired(tree, "robust.f", random)
    assert combinations.repaired(tree, "algorithm.name", random)["algorithm"] == {"name": "fedavg"}
    for _ in range(2):
        tree = combinations.repaired(tree, "evaluation.by", random)
    assert [*tree] == ["seed", "rounds", "algorithm"]


def test_all_that_the_registries_name_is_drawn_but_for_what_is_said():
    sections = {
        "trainer": "local",
        "uploads": "policy",
        "compression": "payload",
        "downloads": "payload",
        "cost": "system",
        "exchange": "system",
    }
    drawn = combinations.draw(0, 6000)
    missing = {}
    for (cls, field), registry in CHOICES.items():
        section = "data" if cls is DataConfig else sections.get(field, "")
        held = (tree.get(section, {}) if section else tree for tree in drawn)
        values = [tree.get(field) for tree in held if isinstance(tree, dict)]
        default = type(default_of(cls, field))
        names = {v if isinstance(v, str) else v.get("name") for v in values if v is not None}
        names |= {name for name, option in registry.items() if option is default}
        if left := registry.keys() - names:
            missing[f"{section}.{field}".lstrip(".")] = left
    public = missing.pop("data.public")
    assert public == SOURCES.keys() - {type(DataConfig().public).name}
    assert missing == combinations.LEFT_OUT


def default_of(cls, field):
    """Return the default of a field of a dataclass."""
    (found,) = (f for f in dataclasses.fields(cls) if f.name == field)
    return found.default if found.default_factory is dataclasses.MISSING else found.default_factory()


def test_a_campaign_tells_what_differs(tmp_path):
    """A stage that dies, a refusal that comes late, a plan that refuses what runs, and other files."""
    ends = {
        "run": {"0": {"end": "x = 1: no", "kind": "UserError", "begun": True}, "3": {"end": "ok"}},
        "three": {"0": {"end": "x = 1: no", "kind": "UserError", "begun": True}},
        "plan": {"0": {"end": "ok"}, "4": {"end": "y = 1: no", "kind": "UserError", "key": "y"}},
    }

    def start(ranks: int, folder: Path, what: str) -> subprocess.CompletedProcess[str]:
        died = 0
        with (folder / f"{what}.jsonl").open("a") as file:
            for number in json.loads((folder / f"{what}.todo").read_text()):
                end = {
                    "end": "ok",
                    "kind": "",
                    "key": "",
                    "begun": False,
                    "tree": {"algorithm": {"name": ""}},
                }
                if (what, number) == ("three", "3"):
                    died, end["end"] = 1, "not ended"
                print(json.dumps(end | {"number": number} | ends.get(what, {}).get(number, {})), file=file)
                if died:
                    break
        return subprocess.CompletedProcess([], died, "", "")

    counted, faults = combinations.campaign(tmp_path, 0, 6, start)
    assert counted["tried"] == 6
    assert counted["ended"] == 5
    assert {kind: [text.split(",")[0] for text in texts] for kind, texts in faults.items()} == {
        "refusals after training begins": ["0"],
        "tracebacks": ["3"],
        "unequal": ["3", "2", "5"],  # the first died; the others left no folders
        "plan differs": ["4"],
    }
