"""Plug-ins: what installed packages add to mpifl by entry points, found when a name is not one of mpifl's.

A package names its class in its `pyproject.toml`:

    [project.entry-points."mpifl.algorithms"]
    mymethod = "mypackage.mymethod:MyMethod"

The metadata of all packages are read at the first name that mpifl does not have, and for lists: some 0.1 s
for two hundred packages, once. Every rank reads those of its own machine; their hashes are compared when a
run starts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError, require
from .imports import load_object

if TYPE_CHECKING:
    from importlib.metadata import Distribution

PREFIX = "mpifl."  # of the groups
NAME = re.compile(r"[A-Za-z]\w*(-\w+)*")
GROUP = re.compile(r"^\[(mpifl\.\w+)\]", re.MULTILINE)
EXTRAS = re.compile(r"\s*\[[\w\s,-]*\]$")  # of the package that an entry point asks for, after the path
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NO_CODE = re.compile(
    r"\.(dist|egg)-info$|^__pycache__$|^__editable__|\.pth$|\.py[co]$|^\.\.$"
)  # parts of a path


@dataclass(frozen=True)
class Plugin:
    """A name that an installed package adds to a registry.

    Attributes:
        name: the name.
        path: `package.module:Class`.
        package: name of the installed package.
        version: its version.
        distribution: its metadata.
        rivals: other packages that declare the same name, with their versions.
    """

    name: str
    path: str
    package: str
    version: str
    distribution: Distribution = field(compare=False, repr=False)
    rivals: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """The package and its version."""
        return f"{self.package} {self.version}"

    def load(self, key: str, kind: type) -> Any:
        """Import and return the class, which then knows the name under which it was asked for.

        Args:
            key: configuration key that holds the name, for messages.
            kind: the class from which it usually is derived, for messages.

        Raises:
            UserError: another package declares the name, too, or the import fails.
        """
        who, remedy = f"{self.origin} and {', '.join(self.rivals)}", f"or give its import path, {self.path}"
        require(not self.rivals, key, self.name, f"{who} declare that name; uninstall one, {remedy}")
        good = bool(NAME.fullmatch(self.name) and PATH.fullmatch(self.path))
        remedy = (
            f"the package {self.origin} declares {self.path!r}; an entry point is name = package.module:Class"
        )
        require(good, key, self.name, remedy)
        try:
            found = load_object(self.path, key, kind)
        except UserError as error:
            what = f"the package {self.origin} cannot give it: {self.path}: {error.remedy}"
            remedy = f"install a version that fits, or uninstall it: pip uninstall {self.package}"
            raise UserError(key, self.name, f"{what}; {remedy}") from error
        if isinstance(found, type):
            found.imported_as = self.name  # type: ignore[attr-defined]
        return found

    @property
    def identity(self) -> str:
        """Package, version and a hash of its files, 12 hexadecimal digits, for the identity of runs."""
        return f"{self.origin} {_hash_of(self.path, self.distribution)}"


def declared(group: str) -> Mapping[str, Plugin]:
    """Return name -> plug-in of the installed packages.

    Args:
        group: the group of entry points without `mpifl.`, such as `algorithms`.
    """
    return _found(tuple((place, _changed(place)) for place in sys.path)).get(group, {})


def _changed(folder: str) -> int:
    """Return when a folder of modules was changed last, so that an installation is noticed; 0 for none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _found(places: tuple[tuple[str, int], ...]) -> Mapping[str, Mapping[str, Plugin]]:
    """Return group -> name -> plug-in of the packages in the folders of `sys.path`."""
    from importlib.metadata import distribution, distributions  # 100 ms, which only plug-ins need

    out: dict[str, dict[str, Plugin]] = {}
    known = set[str]()
    for one in distributions():
        text = one.read_text("entry_points.txt") or ""
        if f"[{PREFIX}" not in text or one.name in known:
            continue
        known.add(one.name)
        first = distribution(one.name)  # of several versions on the path, the one that is imported
        try:
            entries = [(entry.group, entry.name, entry.value) for entry in first.entry_points]
        except Exception:  # no such file: a name that tells the package, and cannot be loaded
            entries = [(group, first.name, text) for group in GROUP.findall(text)]
        for group, name, value in entries:
            if group.startswith(PREFIX):
                names = out.setdefault(group.removeprefix(PREFIX), {})
                before = names.get(name)
                rivals = () if before is None else (before.origin, *before.rivals)
                path = EXTRAS.sub("", value)
                names[name] = Plugin(name, path, first.name, first.version, first, rivals)
    return out


@cache
def _hash_of(path: str, distribution: Distribution) -> str:
    """Return a hash of the names and contents of the files of a package, 12 hexadecimal digits."""
    sha = sha256()
    for name, file in sorted(_files_of(path, distribution)):
        sha.update(name.encode() + b"\0" + sha256(file.read_bytes()).digest())
    return sha.hexdigest()[:12]


def _files_of(path: str, distribution: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield name and place of each file of a package: those it has installed, and those around its class.

    An editable installation names none of its modules, so these are looked up where they are imported from.

    Args:
        path: `package.module:Class`.
        distribution: metadata of the package.
    """
    names = dict[str, Path]()
    for listed in (distribution.files or ()) if distribution.read_text("RECORD") else ():
        names[str(listed)] = Path(str(listed.locate()))
    first, _, inside = path.partition(":")[0].partition(".")
    spec = find_spec(first)
    if spec is not None and spec.origin is not None and not spec.submodule_search_locations:
        names[Path(spec.origin).name] = Path(spec.origin)
    for folder in map(Path, (spec.submodule_search_locations or ()) if spec is not None else ()):
        own = folder if spec is not None and spec.origin is not None else folder / inside.partition(".")[0]
        found = [own.with_suffix(".py")] if not own.is_dir() else sorted(own.rglob("*"))
        names |= {str(file.relative_to(folder.parent)): file for file in found}
    for name, file in names.items():
        if file.is_file() and not any(NO_CODE.search(part) for part in Path(name).parts):
            yield name, file
