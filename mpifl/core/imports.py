"""Objects by import path: classes of users, in installed modules or in files."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError, nearest


def code_of(texts: Iterable[str]) -> str:
    """Return a hash of the files of modules that import paths name, 12 hexadecimal digits; empty for none.

    Args:
        texts: of a configuration; those that are no import paths, or of mpifl itself, are left out.
    """
    found = sorted({_source(text) for text in texts} - {b""})
    return sha256(b"\0".join(found)).hexdigest()[:12] if found else ""


def _source(path: str) -> bytes:
    """Return the file of the module that an import path names; empty where there is none."""
    place, _, name = path.partition(":")
    if not name.isidentifier() or place.partition(".")[0] == __package__.partition(".")[0]:
        return b""
    try:
        if place.endswith(".py"):
            return Path(os.path.expanduser(place)).read_bytes()
        spec = importlib.util.find_spec(place)
        return Path(spec.origin).read_bytes() if spec is not None and spec.origin is not None else b""
    except (OSError, ImportError, ValueError):  # not to be found: whoever loads it says so
        return b""


def load_object(path: str, key: str) -> Any:
    """Return the object at `package.module:Name` or `file.py:Name`.

    A class keeps `path` as its attribute `imported_as`, for the resolved configuration.

    Args:
        path: module or file, and name.
        key: configuration key that holds it, for messages.

    Raises:
        UserError: there is no such module, file or name, or the import fails.
    """
    place, _, name = path.partition(":")
    module = (
        _from_file(Path(os.path.expanduser(place)), path, key)
        if place.endswith(".py")
        else _import(place, path, key)
    )
    if not name or not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(key, path, f"{place} has no {name!r}; {nearest(name, known)}")
    found = getattr(module, name)
    if isinstance(found, type):
        with suppress(TypeError):  # built-in classes take no attributes
            found.imported_as = path  # type: ignore[attr-defined]
    return found


def _import(place: str, path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise UserError(key, path, f"{error}; give package.module:Name or file.py:Name") from error
    except (Exception, SystemExit) as error:
        raise UserError(key, path, f"cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(file: Path, path: str, key: str) -> ModuleType:
    if not file.is_file():
        raise UserError(key, path, f"there is no file {file}")
    name = f"mpifl_user_{file.stem}_{sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    known = sys.modules.get(name)
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(key, path, f"cannot be read ({error.strerror})") from error
    if known is not None and known.source == text:
        return known  # an unchanged file keeps its classes
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.source = text  # type: ignore[attr-defined]  # ours
    sys.modules[name] = module
    try:
        # from source: bytecode is matched to its source by seconds only
        exec(compile(text, file, "exec"), vars(module))
    except BaseException as error:
        sys.modules.pop(name, None)  # the next call would take half of it for the whole
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UserError(key, path, f"cannot be imported: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Have imports of packages fail within the block, for a package that only tries them.

    Args:
        names: of the packages; those that are imported already stay visible.
    """
    hiding = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(hiding)  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for name in hiding:
            del sys.modules[name]
