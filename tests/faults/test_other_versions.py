"""Checkpoints that other code wrote: a run goes on with the same state; any other is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.test_resume import start
from support.runs import CONFIG

import mpifl
from mpifl import cli
from mpifl.driver import checkpoints
from mpifl.results import checkpoint_files as checkpoint
from mpifl.runtime.run_state import STOP, Saved

Change = Callable[[dict[str, Any], dict[str, Any], dict[str, np.ndarray]], Any]  # about, values, arrays


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache of prepared data that all runs share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def stopped(cache, tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Begins a run of `RUNS`, which stops after two steps; returns its folder."""

    def run(name: str) -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints.Checkpoints, "due", lambda self, now: STOP if now == 2 else "")
            assert start(tmp_path, cache, name) == 75
        return tmp_path / "tiny-x"

    return run


def rewrite(folder: Path, change: Change, code: str = "0123456789ab") -> None:
    """Write the last checkpoint anew, as another version would have written it."""
    (step,), place = checkpoint.steps(folder / "checkpoints"), folder / "checkpoints"
    old = checkpoint.read(place, step, checkpoints_id(folder))
    about = {
        **old.about,
        "surroundings": {**old.about["surroundings"], "code": code},
        "version": "1.0.0.dev7",
    }
    values, arrays = {name: {**part} for name, part in old.values.items()}, dict(old.arrays)
    change(about, values, arrays)
    checkpoint.write(place, replace(old, about=about, values=values, arrays=arrays))


def checkpoints_id(folder: Path) -> str:
    """Return the identifier of a run."""
    return str(json.loads((folder / "run.json").read_text())["id"])


def digest_of(folder: Path) -> str:
    """Return the digest of a complete run."""
    return str(json.loads((folder / "summary.json").read_text())["digest"])


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a run folder, logs apart."""
    files = (f for f in sorted(folder.rglob("*")) if f.is_file() and "logs" not in f.parts)
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.name != "progress.json"}


def forget(*names: str) -> Change:
    """Return a change after which a checkpoint without a layout lacks a value or an array."""

    def change(about: dict[str, Any], values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        about.pop("layout"), about.pop("version")
        parts = {"engine": values["engine"], "recorder": values["recorder"], "arrays": arrays}
        for name in names:
            where, _, key = name.partition("/")
            del parts[where][key]

    return change


def field_of_visits(about: dict[str, Any], values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Give visits under way a field that is not known."""
    about.pop("layout")
    values["engine"]["visits"] = [
        {**v, "visit": {**v["visit"], "colour": 1}} for v in values["engine"]["visits"]
    ]
    assert values["engine"]["visits"]


REFUSED: dict[str, tuple[str, Change, str]] = {  # run of RUNS, change, what the message says
    "a part that is no longer there": (
        "client state",
        lambda about, values, arrays: about["layout"].update({"engine/values/colour": "int"}),
        "engine/values/colour was int and is not there",
    ),
    "a part that was not there": (
        "client state",
        lambda about, values, arrays: about["layout"].pop("recorder/labels"),
        "recorder/labels was not there and is NoneType",
    ),
    "an array with other axes": (
        "client state",
        lambda about, values, arrays: about["layout"].update({"engine/arrays/visits": "int64[2]"}),
        "engine/arrays/visits was int64[2] and is int64[1]",
    ),
    "a field of visits": (
        "arrivals with state",
        lambda about, values, arrays: about["layout"].update({"engine/values/visits/colour": "int"}),
        "engine/values/visits/colour was int and is not there",
    ),
    "no layout, a value less": ("client state", forget("engine/seconds"), "KeyError: 'seconds'"),
    "no layout, an array less": ("client state", forget("arrays/visits"), "KeyError: 'visits'"),
    "no layout, less of the recorder": ("client state", forget("recorder/placed"), "KeyError: 'placed'"),
    "no layout, other visits": ("arrivals with state", field_of_visits, "colour"),
    "no entry of the method": (
        "clusters, memo",
        lambda about, values, arrays: values["engine"]["server"]["memo"].remove("children"),
        "the method's 'children' is not there",
    ),
    "other entries of the manifest": (
        "client state",
        lambda about, values, arrays: [about.pop(name) for name in ("layout", "data")],
        "KeyError: 'data'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_state_is_refused_in_one_line_and_nothing_is_lost(case, stopped, capsys):
    name, change, says = REFUSED[case]
    folder = stopped(name)
    rewrite(folder, change)
    before = files_of(folder)
    capsys.readouterr()
    assert cli.main(["resume", str(folder), "--quiet"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    for part in ("RUN = ", str(folder), says, "(code 0123456789ab)", "resume with that version", "output.id"):
        assert part in said
    assert "Traceback" not in said
    assert files_of(folder) == before


@pytest.mark.parametrize("layout", [True, False])
def test_the_same_state_of_other_code_is_gone_on_with(layout, stopped, cache, tmp_path):
    """Also of a version that wrote no layout."""
    folder = stopped("arrivals with state")
    rewrite(folder, (lambda *parts: None) if layout else forget())
    assert cli.main(["resume", str(folder), "--quiet"]) == 0
    assert start(tmp_path / "one", cache, "arrivals with state") == 0
    one, other = (
        json.loads((run / "summary.json").read_text()) for run in (tmp_path / "one" / "tiny-x", folder)
    )
    assert one["digest"] == other["digest"]


def test_what_fails_under_the_same_code_is_an_error_of_ours(stopped):
    folder = stopped("client state")
    (step,) = checkpoint.steps(folder / "checkpoints")
    about = checkpoint.read(folder / "checkpoints", step, checkpoints_id(folder)).about
    rewrite(folder, forget("engine/seconds"), code=about["surroundings"]["code"])
    with pytest.raises(KeyError, match="seconds"):
        mpifl.resume(folder)


def test_a_manifest_of_another_form_is_refused(stopped, capsys):
    folder = stopped("client state")
    (step,) = checkpoint.steps(folder / "checkpoints")
    path = checkpoint.path_of(folder / "checkpoints", step)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["tables"]
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    (path / checkpoint.CHECKSUM).write_text(checkpoint._checksum_line(path / checkpoint.MANIFEST))
    before = files_of(folder)
    assert cli.main(["resume", str(folder), "--quiet"]) == 2
    assert "KeyError: 'tables'; resume with that version" in capsys.readouterr().err
    assert files_of(folder) == before


def test_all_ranks_end_with_one_line(stopped, mpirun):
    """Rank 0 alone restores the state."""
    folder = stopped("client state")
    rewrite(folder, forget("arrays/visits"))
    done = mpirun(2, "-m", "mpifl", "resume", str(folder), "--quiet")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("KeyError: 'visits'") == 1


def test_the_case_of_a_sweep_that_is_refused_is_named(cache, tmp_path, monkeypatch, capsys):
    place = ["--quiet", "--output.folder", str(tmp_path), "--output.id", "x", "--data.cache", str(cache)]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoints, "due", lambda self, now: STOP if now == 2 else "")
        assert cli.main(["sweep", str(CONFIG), *place, "--rounds", "4", "--vary", "{seed: [0, 1]}"]) == 75
    folder = tmp_path / "tiny-x"
    rewrite(folder / "tiny-0", forget("arrays/visits"))
    capsys.readouterr()
    assert cli.main(["resume", str(folder), "--quiet"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "KeyError: 'visits'; resume with that version" in said
    assert "in the case" in said


def test_a_layout_names_the_kind_of_each_part():
    saved = Saved(3, arrays={"visits": np.zeros((2, 3), np.int64)}, values={"seconds": 0.0, "clock": {}})
    assert checkpoints.layout_of(saved, "engine") == {
        **{f"engine/{part}": "mapping" for part in ("", "tensors/", "arrays/", "values/", "values/clock/")},
        "engine/arrays/visits": "int64[2]",
        "engine/values/seconds": "float",
    }
    fields = checkpoints.layout_of(checkpoint.Content, "content")
    assert fields["content/step"] == "int"
