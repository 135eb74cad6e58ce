"""Checkpoints of a run on disk: whole or absent, checked to the last byte before a number is used.

    RUN/run.json                      which run this is
    RUN/checkpoints/step-000000040/   tensors.safetensors, arrays.npz, values.json, metrics.csv
        manifest.json                 the run, the step, bytes and SHA-256 of every file that belongs to it
        manifest.sha256               of the manifest, as `sha256sum -c` reads it
    RUN/checkpoints/clients/          what clients keep between visits, a file each; shared by checkpoints

A checkpoint is written to a temporary folder, forced to disk and renamed. Files of clients, and the part of
events.csv that was there, belong to a checkpoint by its manifest: they are not copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from mpifl.core.files import told_as_os_error

FORMAT = 1
MANIFEST, SEAL = "manifest.json", "manifest.sha256"
CHUNK = 1 << 24

Sums = tuple[int, str]  # bytes, SHA-256


class Damaged(Exception):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds.

    Attributes:
        step: server steps taken. run: identity of the run. about: further facts of the manifest.
        tensors, arrays, values: see `engine.saved.Saved`.
        metrics: bytes of metrics.csv. events: the part of events.csv that belongs to it.
        clients: files in `checkpoints/clients`.
    """

    step: int
    run: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metrics: bytes = b""
    events: Sums = (0, hashlib.sha256().hexdigest())
    clients: Mapping[str, Sums] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def sums_of(path: Path, size: int | None = None) -> Sums:
    """Return the length and the SHA-256 of a file, or of its first `size` bytes."""
    sha, read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(CHUNK if size is None else min(CHUNK, size - read)):
            sha.update(block)
            read += len(block)
    return read, sha.hexdigest()


def settled(path: Path) -> None:
    """Force a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, the newest first."""
    names = [path.name for path in folder.glob("step-*")]
    return sorted((int(n[5:]) for n in names if n[5:].isdigit()), reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:09d}"


def write(folder: Path, content: Content) -> Path:
    """Write a checkpoint into `folder`; return its own folder.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    path = path_of(folder, content.step)
    remove_halves(folder)
    half = path.with_name(f".{path.name}.tmp")
    try:
        _fill(half, content)
        if path.exists():  # damaged, or the run would not have come by here again
            shutil.rmtree(path)
        half.rename(path)
        settled(folder)
    except OSError:
        remove_halves(folder)
        raise
    return path


def remove_halves(folder: Path) -> None:
    """Remove what is left of checkpoints that were never finished."""
    for half in folder.glob(".step-*.tmp"):
        shutil.rmtree(half, ignore_errors=True)


def _fill(half: Path, content: Content) -> None:
    """Write the files of a checkpoint, and force them to disk."""
    half.mkdir(parents=True)
    tensors = {name: t.detach().cpu().contiguous().numpy() for name, t in content.tensors.items()}
    with told_as_os_error(half / "tensors.safetensors"):
        save_file(tensors, half / "tensors.safetensors")
    np.savez(half / "arrays.npz", **content.arrays)  # type: ignore[arg-type]  # names are arrays' names
    (half / "values.json").write_text(json.dumps(content.values))
    (half / "metrics.csv").write_bytes(content.metrics)
    files = {file.name: sums_of(file) for file in sorted(half.iterdir())}
    manifest = {
        "format": FORMAT,
        "run": content.run,
        "step": content.step,
        "about": content.about,
        "files": files,
        "events": content.events,
        "clients": content.clients,
    }
    (half / MANIFEST).write_text(json.dumps(manifest, indent=1))
    (half / SEAL).write_text(_seal(half / MANIFEST))
    for file in half.iterdir():
        settled(file)
    settled(half)


def _seal(manifest: Path) -> str:
    return f"{sums_of(manifest)[1]}  {MANIFEST}\n"


def read(folder: Path, step: int, run: str) -> Content:
    """Return the checkpoint of a step, after every byte was checked.

    Args:
        folder: `RUN/checkpoints`. run: identity of the run.

    Raises:
        Damaged: something is missing, altered, or belongs to another run or step.
    """
    path = path_of(folder, step)
    try:
        manifest = _manifest(path, step, run)
        for name, (size, sha) in manifest["files"].items():
            _check(path / name, size, sha)
        for name, (size, sha) in manifest["clients"].items():
            _check(folder / "clients" / name, size, sha)
        size, sha = manifest["events"]
        _check(folder.parent / "events.csv", size, sha, growing=True)
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
        )
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from error


def _manifest(path: Path, step: int, run: str) -> dict[str, Any]:
    if not (path / SEAL).is_file() or (path / SEAL).read_bytes() != _seal(path / MANIFEST).encode():
        raise Damaged(f"{MANIFEST} is not the one that was written")
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise Damaged(f"format {manifest['format']}; this version of mpifl reads {FORMAT}")
    if manifest["run"] != run:
        raise Damaged("it belongs to another run")
    if manifest["step"] != step:
        raise Damaged(f"it is that of step {manifest['step']}")
    return manifest


def _check(path: Path, size: int, sha: str, growing: bool = False) -> None:
    """Raise `Damaged` unless a file, or the first part of a growing one, is the one that was written."""
    if growing and not size and not path.exists():
        return
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    there = path.stat().st_size
    if there < size or (there > size and not growing):
        raise Damaged(f"{path.name} has {there} bytes instead of {size}")
    if sums_of(path, size)[1] != sha:
        raise Damaged(f"{path.name} was altered: its checksum differs")


def latest(folder: Path, run: str, say: Callable[[str], None]) -> Content | None:
    """Return the newest checkpoint that is sound; say which are not. None where there is none at all.

    Raises:
        Damaged: there are some, and none is sound.
    """
    found = steps(folder)
    for step in found:
        try:
            return read(folder, step, run)
        except Damaged as problem:
            say(f"checkpoint {path_of(folder, step).name} is not used: {problem}")
    if found:
        raise Damaged("no checkpoint is sound")
    return None


def prune(folder: Path, keep: int, run: str) -> None:
    """Remove all but the newest checkpoints, and the files of clients that none of those names."""
    for step in steps(folder)[keep:]:
        shutil.rmtree(path_of(folder, step))
    wanted: set[str] = set()
    for step in steps(folder):
        try:
            wanted |= set(_manifest(path_of(folder, step), step, run)["clients"])
        except (Damaged, OSError, ValueError):
            continue
    clients = folder / "clients"
    for path in clients.iterdir() if clients.exists() else ():
        if path.name not in wanted:
            path.unlink(missing_ok=True)
