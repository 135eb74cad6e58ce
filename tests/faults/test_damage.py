"""Damaged checkpoints are found out before a number of theirs is used."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from faults import halted
from support import toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.results import checkpoint_files as checkpoint
from mpifl.simulation.delays import Exponential
from mpifl.simulation.policies import Buffer

CASES = 80


def written(folder: Path, seed: int) -> Path:
    """Return the checkpoints of an asynchronous run with client state: after steps 2 and 4, and events."""
    changes = {"policy": Buffer(size=2), "delay": Exponential(mean_s=2.0), "seed": toy.Seeds(training=seed)}
    disk = halted.Disk(folder, None)
    run = halted.run(CATALOGUE["scaffold"](), toy.Tiny(), folder, steps=6, **changes)
    assert run.server.version == 6
    assert checkpoint.steps(disk.folder) == [5, 4, 3, 2, 1]
    (folder / "events.csv").write_text("time,client\n" + "".join(f"{i},{seed}\n" for i in range(50)))
    for step in (2, 4):
        path = checkpoint.path_of(disk.folder, step)
        about = json.loads((path / checkpoint.MANIFEST).read_text())
        run_id = halted.RUN if seed == 1 else "c3d4"
        content = checkpoint.read(disk.folder, step, halted.RUN)
        clients = {name: tuple(sums) for name, sums in about["clients"].items()}
        events = checkpoint.sum_of(folder / "events.csv")
        whole = checkpoint.Content(
            step, run_id, content.tensors, content.arrays, content.values, b"round\n1\n", events, clients
        )
        checkpoint.write(disk.folder, whole)
    return disk.folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """The checkpoints of two runs that differ in their seed."""
    return tuple(written(tmp_path_factory.mktemp("run"), seed) for seed in (1, 2))  # type: ignore[return-value]


def parts(folder: Path, step: int) -> list[Path]:
    """Return the files that belong to a checkpoint."""
    path = checkpoint.path_of(folder, step)
    clients = json.loads((path / checkpoint.MANIFEST).read_text())["clients"]
    own = [file for file in sorted(path.iterdir()) if file.stat().st_size]
    return [*own, *(folder / "clients" / name for name in sorted(clients)), folder.parent / "events.csv"]


def flip(rng: random.Random, file: Path, other: Path) -> str:
    """Flip one to eight bits."""
    data = bytearray(file.read_bytes())
    for at in rng.sample(range(8 * len(data)), min(rng.randint(1, 8), 8 * len(data))):
        data[at // 8] ^= 1 << at % 8
    file.write_bytes(data)
    return "flipped"


def cut(rng: random.Random, file: Path, other: Path) -> str:
    """Truncate."""
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
    return "truncated"


def zero(rng: random.Random, file: Path, other: Path) -> str:
    """Overwrite a stretch with zeros, as a lost page does."""
    data = bytearray(file.read_bytes())
    before = bytes(data)
    while bytes(data) == before:
        at = rng.randrange(len(data))
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    file.write_bytes(data)
    return "zeroed"


def remove(rng: random.Random, file: Path, other: Path) -> str:
    """Remove."""
    file.unlink()
    return "missing"


def swap(rng: random.Random, file: Path, other: Path) -> str:
    """Put the same file of the other run in its place."""
    if not other.exists() or other.read_bytes() == file.read_bytes():
        return flip(rng, file, other)
    shutil.copy(other, file)
    return "swapped"


@pytest.mark.parametrize("cases", [CASES, pytest.param(500, marks=pytest.mark.nightly)])
def test_damaged_checkpoints_are_all_found_out(cases, runs, tmp_path):
    mine, theirs = runs
    assert checkpoint.read(mine, 4, halted.RUN).step == 4
    rng, kinds, names = random.Random(7), set(), set()
    for case in range(cases):
        folder = tmp_path / str(case) / "checkpoints"
        shutil.copytree(mine.parent, folder.parent, ignore=shutil.ignore_patterns("step-*[1235]", "first*"))
        shutil.copytree(mine / "clients", folder / "clients", dirs_exist_ok=True)
        file = rng.choice(parts(folder, 4))
        other = theirs.parent / file.relative_to(folder.parent)
        kinds.add(rng.choice((flip, cut, zero, remove, swap))(rng, file, other))
        names.add(file.name)
        with pytest.raises(checkpoint.Damaged):
            checkpoint.read(folder, 4, halted.RUN)
        shutil.rmtree(folder.parent)
    assert kinds == {"flipped", "truncated", "zeroed", "missing", "swapped"}
    assert names >= {"manifest.json", "manifest.sha256", "tensors.safetensors", "values.json", "events.csv"}


def test_a_whole_checkpoint_of_another_run_or_step_is_found_out(runs, tmp_path):
    mine, theirs = runs
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(theirs.parent, folder.parent)
    with pytest.raises(checkpoint.Damaged, match="another run"):
        checkpoint.read(folder, 4, halted.RUN)
    shutil.rmtree(folder.parent)
    shutil.copytree(mine.parent, folder.parent)
    shutil.rmtree(folder / "step-000000004")
    (folder / "step-000000002").rename(folder / "step-000000004")
    with pytest.raises(checkpoint.Damaged, match="that of step 2"):
        checkpoint.read(folder, 4, halted.RUN)


def test_the_one_before_a_damaged_checkpoint_is_used_and_that_is_said(runs, tmp_path):
    folder, said = tmp_path / "run" / "checkpoints", []
    shutil.copytree(runs[0].parent, folder.parent)
    for step in (5, 3, 1):
        shutil.rmtree(checkpoint.path_of(folder, step))
    (folder / ".step-000000006.tmp").mkdir()  # half written when the machine went down
    flip(random.Random(1), checkpoint.path_of(folder, 4) / "tensors.safetensors", Path())
    content = checkpoint.latest(folder, halted.RUN, said.append)
    assert content is not None
    assert content.step == 2
    assert said == [
        "checkpoint step-000000004 is not used: tensors.safetensors was altered: its checksum differs"
    ]
    remove(random.Random(1), checkpoint.path_of(folder, 2) / "arrays.npz", Path())
    with pytest.raises(checkpoint.Damaged, match="all checkpoints are damaged"):
        checkpoint.latest(folder, halted.RUN, said.append)


def test_old_checkpoints_go_and_files_that_others_need_stay(runs, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(runs[0].parent, folder.parent)
    checkpoint.prune(folder, 2, halted.RUN)
    assert checkpoint.steps(folder) == [5, 4]
    for step in (5, 4):
        assert checkpoint.read(folder, step, halted.RUN).step == step
    needed = {p.name for step in (5, 4) for p in parts(folder, step)}
    assert {p.name for p in (folder / "clients").iterdir()} <= needed
