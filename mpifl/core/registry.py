"""Registries: the choices of a key of the configuration, of mpifl and of installed packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from .errors import UserError, address, note_name, require
from .plugins import PREFIX, Plugin, declared

Class = TypeVar("Class", bound=type)


class Installed(NamedTuple, Generic[Class]):
    """What installed packages add to a registry.

    Attributes:
        classes: name -> plug-in and its class.
        faults: a message for each plug-in that cannot be used.
    """

    classes: dict[str, tuple[Plugin, Class]]
    faults: list[UserError]


class Registry(Mapping[str, Class]):
    """The choices of a key of the configuration: name -> class.

    As a mapping, it has the choices of mpifl: they are counted and listed. Any name of an installed package
    can be looked up in it as well (`in`, `[]`, `load`); `installed` lists those.

    Args:
        group: group of entry points by which packages add choices, without `mpifl.`; empty for none.
        kind: the class from which the choices are derived.
        classes: name -> class, or `module:Class`, which is imported when it is first used.
        package: the package of these modules.
    """

    _sharing: ClassVar[dict[str, list[Registry[Any]]]] = {}  # group -> its registries

    def __init__(self, group: str, kind: type, classes: Mapping[str, Any], package: str = "") -> None:
        self.group, self.kind = group, kind
        self._classes = {n: f"{package}.{one}" if isinstance(one, str) else one for n, one in classes.items()}
        self._sharing.setdefault(group, []).append(self)
        for name, one in self._classes.items():
            note_name(one if isinstance(one, str) else address(one), name)

    def load(self, name: str, key: str = "name") -> Class:
        """Return the class of a name.

        Args:
            name: the name.
            key: configuration key that holds it, for messages.

        Raises:
            KeyError: neither mpifl nor an installed package has it.
            UserError: the installed package cannot give it; names the package.
        """
        found = self._classes.get(name)
        if found is None:
            plugin = self.plugins()[name]
            cls: Class = plugin.load(key, self.kind)
            return cls
        if isinstance(found, str):
            module, _, cls_name = found.partition(":")
            found = getattr(importlib.import_module(module), cls_name)
        cls = found
        return cls

    def plugins(self) -> Mapping[str, Plugin]:
        """Return name -> plug-in of the installed packages, imported or not."""
        return declared(self.group) if self.group else {}

    def plugin(self, name: str) -> Plugin | None:
        """Return the plug-in that a name stands for; None for a choice of mpifl, or none at all."""
        return None if name in self._classes else self.plugins().get(name)

    def known(self) -> list[str]:
        """Return all names, those of mpifl first."""
        return [*dict.fromkeys((*self._classes, *self.plugins()))]

    def installed(self, only: str = "") -> Installed[Class]:
        """Import what installed packages add, and return it with what is wrong about it.

        Args:
            only: this name alone; empty for all.
        """
        out = Installed[Class]({}, [])
        key = f"{PREFIX}{self.group}"
        for name, plugin in self.plugins().items():
            if only not in ("", name):
                continue
            try:
                cls = plugin.load(key, self.kind)
                if not self._is_ours(cls):
                    continue
                remedy = f"mpifl has that name, and {plugin.origin} declares it, too; "
                remedy += f"uninstall that package, or give the import path, {plugin.path}"
                require(name not in self._classes, key, name, remedy)
            except UserError as error:
                out.faults.append(error)
            else:
                out.classes[name] = (plugin, cls)
        return out

    def _is_ours(self, cls: Class) -> bool:
        """Return whether a plug-in is for this registry, rather than for another one with its group."""
        others = [other.kind for other in self._sharing[self.group] if other is not self]
        return not others or issubclass(cls, self.kind) or not any(issubclass(cls, kind) for kind in others)

    def __getitem__(self, name: str) -> Class:
        return self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._classes or (isinstance(name, str) and name in self.plugins())

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)
