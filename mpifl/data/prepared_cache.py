"""Folders of arrays, written once, checked by SHA-256, memory-mapped by all ranks of a node.

A folder is built under a temporary name beside its final place and renamed when complete, so that concurrent
builders never see unfinished folders. If several processes need the same folder, one builds it and the others
wait. Where files cannot be locked, all of them build; the first to finish wins and the others use its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.files import try_lock
from mpifl.core.imports import imported_from
from mpifl.core.mapped_arrays import new_array
from mpifl.core.progress import doing, each

META = "meta.json"
WAIT_S = 0.05  # between two checks whether another process has built a folder
Progress = Callable[[str], None]


class CacheMissing(RuntimeError):
    """The cache is missing or damaged, and the caller did not ask to build it."""


def save(folder: Path, name: str, array: np.ndarray) -> None:
    """Write `array` as `folder`/`name`.npy."""
    np.save(folder / f"{name}.npy", array, allow_pickle=False)


def allocate(folder: Path, name: str, shape: tuple[int, ...], dtype: type | str = "uint8") -> np.ndarray:
    """Create `folder`/`name`.npy of `shape` and `dtype`, and return it mapped for writing."""
    return new_array(folder / f"{name}.npy", np.dtype(dtype).type, shape)


def load(folder: Path, name: str) -> np.ndarray:
    """Map `folder`/`name`.npy copy-on-write: the ranks of a node share its pages, the file never changes."""
    # a plain array over the map: slices of a np.memmap cost several times as much
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))


def load_all(folder: Path) -> dict[str, np.ndarray]:
    """Map all arrays of `folder`, by name; see `load`."""
    return {path.stem: load(folder, path.stem) for path in sorted(folder.glob("*.npy"))}


def facts(folder: Path) -> dict[str, Any]:
    """Return the facts that are stored beside the arrays of `folder`."""
    noted: dict[str, Any] = json.loads((folder / META).read_text())["facts"]
    return noted


def content(folder: Path, *names: str) -> str:
    """Return a digest of the named arrays of `folder`, computed from their stored checksums alone."""
    files = json.loads((folder / META).read_text())["files"]
    return digest({name: files[f"{name}.npy"]["sha256"] for name in names if f"{name}.npy" in files})


def ensure(
    folder: Path,
    fill: Callable[[Path], Mapping[str, Any]],
    progress: Progress,
    build: bool = True,
    verify: bool = True,
) -> Path:
    """Return `folder`, complete and intact; if it is not, report that and let `fill` write it again.

    Args:
        folder: final place.
        fill: writes arrays into a temporary folder and returns facts (JSON) to keep beside them.
        progress: called with a line for each event.
        build: whether to build at all; if not, `CacheMissing` is raised at once.
        verify: whether to compare SHA-256 sums; sizes are always compared.

    Raises:
        CacheMissing: it is missing or damaged and `build` is false.
        UserError: it cannot be written.
    """
    wrong = _look(folder, verify)
    if wrong and not build:
        raise CacheMissing(f"the data cache {folder} {wrong}")
    if wrong:
        with _building(folder, progress):
            if wrong := _look(folder, verify):  # another process may have built it since
                _build(folder, fill, progress, wrong)
    return folder


def _look(folder: Path, verify: bool) -> str:
    """Return what is wrong with a folder, its absence included; empty if nothing is wrong."""
    if not os.path.lexists(folder):
        return "is not there"
    with doing("checking the data cache"):
        return flaw(folder, verify)


@contextmanager
def _building(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock for building a folder; wait while another process holds it."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:  # `_build` says why nothing can be written there
        yield
        return
    with file:
        if not try_lock(file):
            progress(f"another process prepares {folder}: waiting for it")
            with doing("waiting for data that another process prepares"):
                while not try_lock(file):
                    time.sleep(WAIT_S)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _build(folder: Path, fill: Callable[[Path], Mapping[str, Any]], progress: Progress, wrong: str) -> None:
    """Build a folder that is missing, or rebuild a damaged one."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")
    try:
        if os.path.lexists(folder):
            progress(f"the data cache {folder} {wrong}: rebuilding it")
            _discard(folder)
        temporary.mkdir(parents=True)
        _remove_leftovers(folder)
        noted = {"facts": fill(temporary), "files": _checksums(temporary)}
        (temporary / META).write_text(json.dumps({**noted, "sha256": digest(noted)}, indent=1))
        _publish(temporary, folder)
    except OSError as error:
        remedy = f"prepared data cannot be written there ({error}); name another folder with --data.cache"
        raise UserError("data.cache", str(folder.parent), remedy) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flaw(folder: Path, verify: bool) -> str:
    """Return what is wrong with `folder`, naming the file; empty if nothing is wrong."""
    unread = f"is corrupt ({META} is missing or unreadable)"
    try:
        if not (folder / META).is_file():  # a pipe would wait for a writer
            return unread
        meta = json.loads((folder / META).read_text())
        noted = {name: meta[name] for name in ("facts", "files")}
        if meta["sha256"] != digest(noted):
            return f"is corrupt ({META} was altered: its SHA-256 differs)"
        wrong = (_file_flaw(folder / name, expected, verify) for name, expected in noted["files"].items())
        return next(filter(None, wrong), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return unread


def _file_flaw(path: Path, expected: Mapping[str, Any], verify: bool) -> str:
    """Return what is wrong with one file; empty if nothing is wrong."""
    size = path.stat().st_size if path.is_file() else -1
    if size != expected["bytes"]:
        return f"is corrupt ({path.name} has {max(size, 0)} bytes instead of {expected['bytes']}: truncated)"
    if verify and sha256_of(path) != expected["sha256"]:
        return f"is corrupt ({path.name} was altered: its SHA-256 differs)"
    return ""


def home_of(root: str | None, cache: str | None) -> Path:
    """Return `cache`, or the first writable of `root`/.mpifl, the user cache and the temporary folder."""
    if cache is not None:
        return folder_of(cache, "data.cache")
    xdg = os.environ.get("XDG_CACHE_HOME")
    candidates = [folder_of(root, "data.root") / ".mpifl"] if root is not None else []
    candidates.append(Path(xdg) / "mpifl" if xdg else Path(os.path.expanduser("~/.cache/mpifl")))
    for candidate in candidates:
        nearest = next(p for p in (candidate, *candidate.parents) if os.path.exists(p))
        if nearest.is_dir() and os.access(nearest, os.W_OK):
            return candidate
    return Path(tempfile.gettempdir()) / f"mpifl-{os.getuid()}"


def folder_of(name: str, key: str) -> Path:
    """Return the folder that a user names, `~` expanded.

    Raises:
        UserError: the name contains a null character or an unknown user; the error names `key`.
    """
    folder = os.path.expanduser(name)
    known = "\0" not in folder and not folder.startswith("~")
    require(known, key, name, "there is no such user, or no folder of such a name; name another")
    return Path(folder)


def digest(*parts: Any) -> str:
    """Return a digest of `parts` (anything JSON can write), 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def _package_digest() -> str:
    return digest([path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py"))])


def code_digest(cls: type) -> str:
    """Return a digest of the code that prepares data: this package, and the file of a user's own class.

    Files that it imports from its own folder are included (`imported_from`). The digest is part of a cache's
    name, so data that other code prepared are never read.
    """
    ours = cls.__module__.startswith(f"{__package__}.")
    file = None if ours else getattr(sys.modules.get(cls.__module__), "__file__", None)
    if not file:
        return digest(_package_digest(), "")
    helpers = imported_from(Path(file), cls.__module__)
    return digest(_package_digest(), Path(file).read_text(), *helpers.items())


def _discard(folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")
    try:
        folder.rename(aside)
    except FileNotFoundError:  # another builder was quicker
        return
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of builders that were killed more than a day ago."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        with suppress(FileNotFoundError):  # renamed meanwhile by a builder that is alive
            if left.stat().st_mtime < time.time() - 86400:
                _remove(left)


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:  # another builder finished first, with the same bytes
        if wrong := flaw(folder, verify=False):
            raise CacheMissing(f"the data cache {folder} {wrong}") from None


def _checksums(folder: Path) -> dict[str, dict[str, Any]]:
    files = each(sorted(folder.glob("*.npy")), "checksums of prepared data", "files")
    return {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in files}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 sum of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
