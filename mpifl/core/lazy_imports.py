"""Imports that wait until a module is used, for commands that print pages."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = __package__.partition(".")[0]


class _StandIn(ModuleType):
    """A module that is imported when one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def defer(*modules: str) -> None:
    """Make our import statements, from now on, import these modules when their attributes are used.

    Our modules get a stand-in of each; other packages and users' files get the modules themselves. The names
    in `import torch`, `from torch import nn` and `from mpifl.core import torch_state` are such modules, while
    `from torch import Tensor` uses an attribute. Annotations use none.

    Args:
        modules: full names; a package before what is inside it.
    """
    plain = builtins.__import__
    later = {name: _StandIn(name) for name in modules}
    for name in modules:
        package, _, own = name.rpartition(".")
        if package in later:
            setattr(later[package], own, later[name])

    def import_statement(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__"))  # code that `exec` runs may have no name
        if level == 0 and importer.startswith(f"{OURS}."):
            if name in later:
                return later[name if fromlist else name.partition(".")[0]]
            found = {own: later[f"{name}.{own}"] for own in fromlist or () if f"{name}.{own}" in later}
            if found:
                package = plain(name, globals, locals, [own for own in fromlist or () if own not in found])
                return SimpleNamespace(**{**vars(package), **found})
        return plain(name, globals, locals, fromlist, level)

    builtins.__import__ = import_statement
