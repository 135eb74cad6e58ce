"""Reads and writes the checkpoints of a run.

    RUN/run.json                      the identifier of the run, and the format of its folder
    RUN/checkpoints/step-000000040/   tensors.safetensors, arrays.npz, values.json, metrics.csv
        manifest.json                 the run, the step, size and SHA-256 of every file of the checkpoint
        manifest.sha256               checksum of the manifest, in the format of `sha256sum -c`
    RUN/checkpoints/clients/          client state, one file per client; shared by the checkpoints

A checkpoint is written to a temporary folder, forced to disk and renamed, so it is either complete or absent.
Client files and the rows of `events.csv`, `updates.csv` and `assignments.csv` written so far are not copied:
the manifest lists them as parts of the checkpoint. A checkpoint is used only after every byte of it has been
verified.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from mpifl.core.files import force_to_disk, safetensors_file

from .run_folder import GrowingCsv

MANIFEST, CHECKSUM = "manifest.json", "manifest.sha256"
BLOCK_BYTES = 1 << 24

FileSum = tuple[int, str]  # bytes, SHA-256


class Damaged(Exception):
    """A checkpoint differs from what was written."""


class OtherForm(Exception):
    """A checkpoint is as it was written, in a form that this version does not read."""


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint.

    Attributes:
        step: server steps taken.
        run: identifier of the run.
        tensors: tensors of the engine, by name; see `runtime.run_state.Saved`.
        arrays: arrays of the engine, by name.
        values: other values of the engine; serialisable as JSON.
        metrics: the content of `metrics.csv`.
        events: size in bytes and SHA-256 of the part of `events.csv` that belongs to the checkpoint.
        clients: files of `checkpoints/clients` that belong to the checkpoint, by name.
        about: further entries of the manifest.
        tables: the same as `events` for other growing tables of the run folder, by file name.
    """

    step: int
    run: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metrics: bytes = b""
    events: FileSum = (0, hashlib.sha256().hexdigest())
    clients: Mapping[str, FileSum] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, FileSum] = field(default_factory=dict)


class TableSum:
    """The size and the SHA-256 of a growing table, each of whose rows is read once.

    Args:
        table: the table.
    """

    def __init__(self, table: GrowingCsv) -> None:
        self.table = table
        self._columns: list[str] = []
        self._size, self._sha = 0, hashlib.sha256()

    def up_to_now(self) -> FileSum:
        """Force the table to disk, and return its size and sum; a table without rows has size 0."""
        if self.table.columns != self._columns:  # the file was rewritten
            self._size, self._sha = 0, hashlib.sha256()
            self._columns = list(self.table.columns)
        if self._columns:
            with self.table.path.open("rb") as file:
                file.seek(self._size)
                while block := file.read(BLOCK_BYTES):
                    self._sha.update(block)
                    self._size += len(block)
            force_to_disk(self.table.path)
        return self._size, self._sha.hexdigest()


def sum_of(path: Path, size: int | None = None) -> FileSum:
    """Return the length and the SHA-256 of a file, or of its first `size` bytes."""
    sha, read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES if size is None else min(BLOCK_BYTES, size - read)):
            sha.update(block)
            read += len(block)
    return read, sha.hexdigest()


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first."""
    names = [path.name for path in folder.glob("step-*")]
    return sorted((int(n[5:]) for n in names if n[5:].isdigit()), reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:09d}"


# -- writing -------------------------------------------------------------------------------------------------


def write(folder: Path, content: Content) -> Path:
    """Write a checkpoint.

    Args:
        folder: `RUN/checkpoints`.
        content: its content.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: it cannot be written; its partial files are removed.
    """
    path = path_of(folder, content.step)
    remove_partial(folder)
    partial = path.with_name(f".{path.name}.tmp")
    try:
        _fill(partial, content)
        if path.exists():  # it is damaged: only then does a resumed run repeat its step
            shutil.rmtree(path)
        partial.rename(path)
        force_to_disk(folder)
    except OSError:
        remove_partial(folder)
        raise
    return path


def remove_partial(folder: Path) -> None:
    """Remove checkpoints that were not finished."""
    for partial in folder.glob(".step-*.tmp"):
        shutil.rmtree(partial, ignore_errors=True)


def _fill(partial: Path, content: Content) -> None:
    """Write the files of a checkpoint, and force them to disk."""
    partial.mkdir(parents=True)
    tensors = {name: t.detach().cpu().contiguous().numpy() for name, t in content.tensors.items()}
    with safetensors_file(partial / "tensors.safetensors") as file:
        save_file(tensors, file)
    arrays: dict[str, Any] = dict(content.arrays)
    np.savez(partial / "arrays.npz", **arrays)
    (partial / "values.json").write_text(json.dumps(content.values))
    (partial / "metrics.csv").write_bytes(content.metrics)
    files = {file.name: sum_of(file) for file in sorted(partial.iterdir())}
    manifest = {
        "run": content.run,
        "step": content.step,
        "about": content.about,
        "files": files,
        "events": content.events,
        "tables": content.tables,
        "clients": content.clients,
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    (partial / CHECKSUM).write_text(_checksum_line(partial / MANIFEST))
    for file in partial.iterdir():
        force_to_disk(file)
    force_to_disk(partial)


def _checksum_line(manifest: Path) -> str:
    return f"{sum_of(manifest)[1]}  {MANIFEST}\n"


def prune(folder: Path, keep: int, run: str) -> None:
    """Remove old checkpoints, and the client files to which no remaining checkpoint refers.

    Args:
        folder: `RUN/checkpoints`.
        keep: number of checkpoints to keep.
        run: identifier of the run.
    """
    for step in steps(folder)[keep:]:
        shutil.rmtree(path_of(folder, step))
    named: set[str] = set()
    for step in steps(folder):
        try:
            named |= set(_manifest(path_of(folder, step), step, run)["clients"])
        except (Damaged, OSError, ValueError):
            continue
    clients = folder / "clients"
    for path in clients.iterdir() if clients.exists() else ():
        if path.name not in named:
            path.unlink(missing_ok=True)


# -- reading -------------------------------------------------------------------------------------------------


def latest(folder: Path, run: str, say: Callable[[str], None]) -> Content | None:
    """Return the newest undamaged checkpoint, or None if there is no checkpoint.

    Args:
        folder: `RUN/checkpoints`.
        run: identifier of the run.
        say: called with a line of text for each damaged checkpoint.

    Raises:
        Damaged: there are checkpoints, but all are damaged.
        OtherForm: the newest one that is not has another form than this version reads.
    """
    found = steps(folder)
    for step in found:
        try:
            return read(folder, step, run)
        except Damaged as problem:
            say(f"checkpoint {path_of(folder, step).name} is not used: {problem}")
    if found:
        raise Damaged("all checkpoints are damaged")
    return None


def read(folder: Path, step: int, run: str) -> Content:
    """Return the checkpoint of a step, after verifying every byte.

    Args:
        folder: `RUN/checkpoints`.
        step: the step.
        run: identifier of the run.

    Raises:
        Damaged: a file is missing or altered, or the checkpoint belongs to another run or step.
        OtherForm: it has another form than this version reads.
    """
    path = path_of(folder, step)
    try:
        manifest = _manifest(path, step, run)
        for name, (size, sha) in manifest["files"].items():
            _check(path / name, size, sha)
        for name, (size, sha) in manifest["clients"].items():
            _check(folder / "clients" / name, size, sha)
        size, sha = manifest["events"]
        tables = manifest["tables"]
        for name, (length, found) in {"events.csv": (size, sha), **tables}.items():
            _check(folder.parent / name, length, found, growing=True)
        with np.load(path / "arrays.npz", allow_pickle=False) as arrays:
            named = {name: arrays[name] for name in arrays.files}
        return Content(
            step=step,
            run=run,
            tensors=load_file(path / "tensors.safetensors"),
            arrays=named,
            values=json.loads((path / "values.json").read_text()),
            metrics=(path / "metrics.csv").read_bytes(),
            events=(size, sha),
            clients={name: (size, sha) for name, (size, sha) in manifest["clients"].items()},
            about=manifest["about"],
            tables={name: (size, sha) for name, (size, sha) in tables.items()},
        )
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:  # its manifest is as it was written
        raise OtherForm(f"{type(error).__name__}: {error}") from error


def _manifest(path: Path, step: int, run: str) -> dict[str, Any]:
    """Return the verified manifest of a checkpoint."""
    if (
        not (path / CHECKSUM).is_file()
        or (path / CHECKSUM).read_bytes() != _checksum_line(path / MANIFEST).encode()
    ):
        raise Damaged(f"{MANIFEST} is not the one that was written")
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    if manifest["run"] != run:
        raise Damaged("it belongs to another run")
    if manifest["step"] != step:
        raise Damaged(f"it is that of step {manifest['step']}")
    return manifest


def _check(path: Path, size: int, sha: str, growing: bool = False) -> None:
    """Raise `Damaged` unless a file has the recorded content.

    Args:
        path: the file.
        size: its recorded size in bytes.
        sha: SHA-256 of these bytes.
        growing: whether the file may have grown since; only its first `size` bytes are compared.
    """
    if growing and not size and not path.exists():
        return
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    found = path.stat().st_size
    if found < size or (found > size and not growing):
        raise Damaged(f"{path.name} has {found} bytes instead of {size}")
    if sum_of(path, size)[1] != sha:
        raise Damaged(f"{path.name} was altered: its checksum differs")
