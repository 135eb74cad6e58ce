"""Objects by import path: classes of users, in installed modules or in files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError, nearest
from .files import same_folder
from .torchvision_compat import with_operators

OURS = __package__.partition(".")[0]
INSTALLED = {"site-packages", "dist-packages"}  # folders
_helpers: dict[Path, bytes] = {}  # modules that users' files import -> content when they were imported


def code_of(texts: Iterable[str]) -> str:
    """Return a hash of the files of the modules in import paths, 12 hexadecimal digits; empty for none.

    It includes what a file imports from its own folder; see `imported_from`.

    Args:
        texts: texts of a configuration; those that are not import paths, or are of mpifl itself, are ignored.
    """
    found = sorted(set[bytes]().union(*map(_sources, texts)))
    return sha256(b"\0".join(found)).hexdigest()[:12] if found else ""


def _sources(path: str) -> set[bytes]:
    """Return the file of the module that an import path names, and those it imports; empty for none."""
    place, _, name = path.partition(":")
    if not name.isidentifier() or place.partition(".")[0] == OURS:
        return set()
    try:
        if place.endswith(".py"):
            file, module = Path(os.path.expanduser(place)), ""
        else:
            spec = importlib.util.find_spec(place)
            if spec is None or spec.origin is None:
                return set()
            file, module = Path(spec.origin), place
        return {file.read_bytes(), *(f"{n}\0".encode() + t for n, t in imported_from(file, module).items())}
    except (OSError, ImportError, ValueError):  # not found: loading it raises the error
        return set()


def imported_from(file: Path, module: str = "") -> dict[str, bytes]:
    """Return the modules that a user's file imports from its own folder or below, and what these import.

    They are found from import statements, whatever is loaded, so that every rank finds the same. Installed
    files and mpifl itself are left out, and so are modules that are imported by other means.

    Args:
        file: file of a module.
        module: its dotted name; empty for a file that is named by its path.

    Returns:
        Path below the folder -> content, in the order of the paths.
    """
    root = root_of(file, module)
    if INSTALLED & {*root.parts}:
        return {}
    found: dict[Path, bytes] = {file.resolve(): file.read_bytes()}
    todo = [*found]
    while todo:
        one = todo.pop()
        for other in _imports(one, found[one], root):
            if other not in found and other.is_relative_to(root):
                found[other] = b""
                with suppress(OSError):  # loading it raises the error
                    found[other] = other.read_bytes()
                todo.append(other)
    del found[file.resolve()]
    return {str(path.relative_to(root)): found[path] for path in sorted(found)}


def root_of(file: Path, module: str = "") -> Path:
    """Return the folder below which `imported_from` finds modules: that of the file, or of its package.

    Args:
        file: file of a module.
        module: its dotted name; empty for a file that is named by its path.
    """
    above = module.count(".") + (file.name == "__init__.py") if module else 0
    folders = file.resolve().parents
    return folders[min(above, len(folders) - 1)]


def _imports(file: Path, text: bytes, root: Path) -> Iterator[Path]:
    """Yield the files that a module may import: packages, modules, and names that may be modules.

    Args:
        file: file of the module.
        text: its content.
        root: folder in which absolute imports are looked up, besides the folder of the file.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # loading it raises the error
        return
    for node in ast.walk(tree):
        places = [root, file.parent]
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = node.module.split(".") if node.module else []
            names = [[*stem, alias.name] for alias in node.names]
            places = [file.parents[min(node.level, len(file.parents)) - 1]] if node.level else places
        else:
            continue
        found = [path / "__init__.py" for path in places if path != root]
        for path, parts in product(places, names):
            for part in parts if path != root or parts[0] != OURS else ():
                found.append(path / f"{part}.py")
                path /= part
                found.append(path / "__init__.py")
        yield from (path.resolve() for path in found if path.is_file())


def load_object(path: str, key: str, kind: type = object) -> Any:
    """Return the object at `package.module:Name` or `file.py:Name`.

    A class keeps `path` as its attribute `imported_as`, for the resolved configuration.

    Args:
        path: module or file, and name.
        key: configuration key that holds it, for messages.
        kind: the class from which it usually is derived, for messages.

    Raises:
        UserError: there is no such module, file or name, or the import fails.
    """
    place, _, name = path.partition(":")
    file = Path(os.path.expanduser(place)) if place.endswith(".py") else None

    def loaded() -> ModuleType:
        with same_folder():
            return _import(place, path, key) if file is None else _from_file(file, path, key)

    module = with_operators(loaded)
    if not name or not hasattr(module, name):
        known = _offered(module, kind)
        meant = nearest(name, known) if known else "it defines nothing that could be meant"
        raise UserError(key, path, f"{place} has no {name!r}; {meant}")
    found = getattr(module, name)
    if isinstance(found, type):
        with suppress(TypeError):  # built-in classes take no attributes
            found.imported_as = path  # type: ignore[attr-defined]
    return found


def _offered(module: ModuleType, kind: type) -> list[str]:
    """Return the names in a module that may be meant: its own classes of a kind, or concrete imported ones.

    If there are none, return all classes and functions that the module defines, or else all that it imports.

    Args:
        module: the loaded module.
        kind: the class from which they are derived; object for anything.
    """
    things = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    things = {name: thing for name, thing in things.items() if not inspect.ismodule(thing)}
    own = {name for name, thing in things.items() if getattr(thing, "__module__", "") == module.__name__}
    if kind is not object:
        classes = {n: c for n, c in things.items() if isinstance(c, type) and issubclass(c, kind)}
        found = [n for n, c in classes.items() if n in own or not (c is kind or inspect.isabstract(c))]
        if found:
            return found
    return sorted(own) or [*things]


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
    helpers = imported_from(file)
    if known is not None and (known._source, known._helpers) == (text, helpers):
        return known  # an unchanged file keeps its classes
    folder = file.resolve().parent
    _forget_changed({folder / other: content for other, content in helpers.items()})
    _forget_namesakes(folder, helpers, key, path)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module._source, module._helpers = text, helpers  # type: ignore[attr-defined]  # ours
    sys.modules[name] = module
    try:
        with _importable(folder):
            # from source: bytecode is matched to its source by times in whole seconds
            exec(compile(text, file, "exec"), vars(module))
    except BaseException as error:
        sys.modules.pop(name, None)  # the next call would find a half-loaded module
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UserError(key, path, f"cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _forget_changed(helpers: Mapping[Path, bytes]) -> None:
    """Forget the modules that users' files import if one was edited, so that they are imported again.

    Args:
        helpers: file of each module -> its present content.
    """
    if any(_helpers.get(path, text) != text for path, text in helpers.items()):
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if file and Path(file).resolve() in helpers:
                del sys.modules[name]
        importlib.invalidate_caches()
    _helpers.update(helpers)


def _forget_namesakes(folder: Path, helpers: Iterable[str], key: str, path: str) -> None:
    """Forget modules with the names of a file's helpers that were imported from other folders of users.

    Args:
        folder: folder of the file.
        helpers: the helpers' paths below the folder.
        key: configuration key that holds the import path.
        path: the import path.

    Raises:
        UserError: an installed module of that name is in use, which the file would get instead.
    """
    for helper in helpers:
        name = ".".join(Path(helper).with_suffix("").parts).removesuffix(".__init__")
        module = sys.modules.get(name)
        place = getattr(module, "__file__", None)
        if module is None or (place and Path(place).resolve() == (folder / helper).resolve()):
            continue
        if place is None or Path(place).resolve() not in _helpers:
            raise UserError(key, path, f"imports {name}, which is another module's name; rename {helper}")
        del sys.modules[name]


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Find the modules in a folder first within the block, as in a script there, and last after it."""
    place = str(folder)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Make imports of packages fail within the block, for a library that needs them only optionally.

    Args:
        names: names of the packages; those that are imported already stay visible.
    """
    hiding = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(hiding)  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for name in hiding:
            del sys.modules[name]
