"""Converts YAML files and command-line options to a `Config`, and back.

Command-line options override the file, the file overrides its `base`, and the base overrides the defaults.
The key `name` of a section selects its class from the section's catalogue, or is `file.py:Class` or
`package.module:Class`; the other keys are the fields of that class. Values are texts, which the types of the
fields turn into numbers, truths or words.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from mpifl.core.algorithm import Algorithm
from mpifl.core.conversion import converted
from mpifl.core.errors import CodeFailed, UserError, name_of, nearest, require
from mpifl.core.imports import load_object
from mpifl.core.options import check_values, types_of
from mpifl.core.registry import Registry
from mpifl.core.textfiles import MAX_DEPTH, is_file, yaml_file, yaml_of
from mpifl.core.units import unit_of
from mpifl.models import ModelOptions
from mpifl.results.identity import deciding

from .schema import CHOICES, Config, Seeds, defaults_of, walk

if TYPE_CHECKING:
    from mpifl.comm.transport import Transport

SHIPPED = Path(__file__).parents[1] / "configs"  # the configurations that come with mpifl
EXCLUSIVE = ("participation", "cohort_size")  # keys of a run; the one that is given last counts
FILES_OF_TIMES = ("delay.file", "network.file", "devices.file", "policy.uploads.file", "clock.trace")
FILES = {  # keys that name files which decide numbers -> the file inside a folder that the key names
    **dict.fromkeys(FILES_OF_TIMES, ""),
    "model.weights": "",
    "start.run": "model.safetensors",
}
MAX_BASES = 32  # length of a chain of bases
NULLS = ("~", "null", "Null", "NULL")  # in YAML

Section = TypeVar("Section")


def load(name: str | Path, options: Sequence[str] = ()) -> Config:
    """Return a configuration whose sections have not been checked against each other.

    Args:
        name: name or path of a file, see `find`.
        options: words of `--key.path value` options.

    Raises:
        UserError: a file or a value is invalid; names the key or the file.
    """
    return from_tree(Config, resolved(str(name), overrides(options)))


def load_everywhere(transport: Transport, name: str, options: Sequence[str] = ()) -> Config:
    """Return a checked configuration on every rank; rank 0 reads it and sends it.

    Args:
        transport: connects the ranks; every rank calls.
        name: name of a file, see `find`.
        options: words of `--key.path value` options.

    Raises:
        UserError: a file or a value is invalid; on every rank. Names the key or the file.
    """
    from mpifl.comm.transport import on_server

    from .section_checks import check_sections

    def tree() -> dict[str, Any]:
        found = resolved(name, overrides(options))
        check_sections(from_tree(Config, found))
        return found

    return everywhere(transport, on_server(transport, tree))


def everywhere(transport: Transport, tree: Mapping[str, Any]) -> Config:
    """Return the configuration in a tree that rank 0 has accepted.

    Args:
        transport: connects the ranks.
        tree: the tree.

    Raises:
        UserError: this rank lacks a package or file that rank 0 has; names the host.
    """
    try:
        return from_tree(Config, tree)
    except UserError as error:
        if transport.is_server:
            raise
        what = f"rank {transport.rank} on {socket.gethostname()} cannot load what rank 0 has loaded"
        remedy = f"{what} ({error.remedy}); install the same packages and files on all nodes"
        raise UserError(error.key, error.value, remedy) from error


def resolved(
    name: str,
    changes: Mapping[str, Any],
    over: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the tree of a configuration with a user's changes and the scenario that serves its source.

    Args:
        name: name of a file, see `find`.
        changes: keys and values.
        over: returns a tree with the changes; None: `merged`.

    Raises:
        UserError: see `read`.
    """
    over = over or merged
    return with_scenario(over(read(name), changes), merged(read(name, own=True), changes))


def with_scenario(tree: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree whose scenario serves the samples of the source, and say so if it is another one.

    It is another one only if the user chose a source and no scenario, and the scenario that is there, of a
    configuration that comes with mpifl or the default, cannot serve the samples of this source.

    Args:
        tree: the configuration.
        own: those of its keys that the user gave.
    """
    from mpifl.data.build import DataConfig, scenario_in_place  # needs PyTorch
    from mpifl.supervision.logging import warn_once

    chosen = own.get("data")
    if not isinstance(chosen, Mapping) or "source" not in chosen or "scenario" in chosen:
        return tree
    try:
        data = from_tree(DataConfig, tree["data"], "data")
        found = scenario_in_place(data, warn_once)
    except (UserError, CodeFailed):  # raised again where sections are checked or data are opened
        return tree
    if found is None:
        return tree
    (scenario, why), was = found, name_of(data.scenario)
    section = non_default(scenario, DataConfig, "scenario")
    options = ", ".join(f"{key}: {value}" for key, value in section.items())
    instead = f"data.scenario is {{{options}}} in place of {was}, which does not serve: {why}"
    warn_once(f"{instead}; data.scenario chooses another")
    return merged(tree, {"data": {"scenario": section}})


# -- files and options ---------------------------------------------------------------------------------------


def find(name: str, key: str = "CONFIG", given: str | None = None) -> Path:
    """Return the file of a configuration.

    Args:
        name: a path, or the name of a configuration that comes with mpifl; `.yaml` may be left out.
        key: the key or option that names it, for messages.
        given: the name as the user wrote it; None: `name`.

    Raises:
        UserError: there is no such file; names similar ones.
    """
    for root in (Path(), SHIPPED):
        for path in (root / name, root / f"{name}.yaml"):
            if is_file(path, key):
                return path
    given = name if given is None else given
    require(not os.path.exists(name), key, given, "is not a file; name a YAML file")
    shipped = sorted(path.relative_to(SHIPPED).as_posix() for path in SHIPPED.rglob("*.yaml"))
    near = get_close_matches(given, shipped, n=3, cutoff=0.5)
    places = sorted({f"{folder}/" if (folder := p.rpartition("/")[0]) else p for p in shipped})
    also = f"do you mean {' or '.join(near)}?" if near else f"there are {', '.join(places) or 'none'}"
    raise UserError(key, given, f"no such file; {also}")


def read(
    name: str, above: tuple[Path, ...] = (), given: str | None = None, own: bool = False
) -> dict[str, Any]:
    """Return the tree in a configuration file, merged over that of its `base`.

    A base is a path relative to the file, or the name of a configuration that comes with mpifl.

    Args:
        name: name of a file, see `find`.
        above: chain of the files that have this one as their base; the last of them names it directly.
        given: the name as that file writes it; None: `name`.
        own: whether to leave out what configurations say that come with mpifl.

    Raises:
        UserError: there is no such file, it holds no YAML or no mapping, or the chain of bases is endless or
            too long.
    """
    path = find(name, f"{_shown(above[-1])}: base" if above else "CONFIG", given)
    require(path.resolve() not in above, "base", str(path), "is its own base; use another or none")
    require(len(above) <= MAX_BASES, "base", str(path), f"has more than {MAX_BASES} above it; join some")
    tree = yaml_file(path, "CONFIG") or {}
    require(isinstance(tree, dict), "CONFIG", str(path), "must hold a mapping of keys to values")
    base = tree.pop("base", None)
    if own and path.resolve().is_relative_to(SHIPPED.resolve()):
        return {}
    if not base:
        return tree
    return merged(read(_base(path, str(base)), (*above, path.resolve()), str(base), own), tree)


def _shown(path: Path) -> str:
    """Return a path for messages: relative if it is in the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _base(path: Path, name: str) -> str:
    """Return the base that a file names: a file beside it, else a configuration that comes with mpifl."""
    beside = path.parent / name
    shipped = [p for p in (SHIPPED / name, SHIPPED / f"{name}.yaml") if os.path.isfile(p)]
    is_beside = any(os.path.isfile(p) for p in (beside, f"{beside}.yaml"))
    return str(shipped[0] if shipped and not is_beside else beside)


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the tree of `--key.path value` or `--key.path=value` options.

    A value that begins with `[` or `{`, or stands in quotes, is YAML, and so is null; any other stands as it
    is written.

    Raises:
        UserError: a word is no option, an option has no value or too many parts, or a value is not YAML.
    """
    tree: dict[str, Any] = {}
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        option, *words = words
        require(option.startswith("--"), "option", option, "options are --key.path value")
        require(bool(words), "option", option, "needs a value")
        text, *words = words
        keys = option[2:].split(".")
        require(len(keys) <= MAX_DEPTH, "option", option, f"has more than {MAX_DEPTH} parts")
        tree = merged(tree, nested(keys, _value_of(option, text.strip())))
    return tree


def _value_of(option: str, text: str) -> Any:
    """Return the value of an option."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_yaml = quoted or text in NULLS or text.startswith(("[", "{"))
    return yaml_of(text, option, text) if is_yaml else text


def nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the tree that holds only one value, at a path of keys."""
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `under` updated with `over`, key by key; a section that changes its `name` starts anew.

    A word in place of a section is its `name`; a number in place of the section `seed` sets all seeds.
    """
    given = [name for name in EXCLUSIVE if name in over]
    out = {name: value for name, value in under.items() if not (given and name in EXCLUSIVE)}
    for name, value in over.items():
        old = out.get(name)
        if isinstance(value, dict) and isinstance(old, (str, int)):
            old = dict.fromkeys(types_of(Seeds), old) if name == "seed" else {"name": old}
        elif isinstance(value, str) and isinstance(old, dict) and value == old.get("name"):
            value = {"name": value}
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            out[name] = merged(old, value)
        else:
            out[name] = value
    return out


# -- from trees to objects -----------------------------------------------------------------------------------


def from_tree(cls: type[Section], tree: Mapping[str, Any], path: str = "") -> Section:
    """Return an instance of a dataclass.

    Args:
        cls: the dataclass; its fields are the keys.
        tree: key -> value.
        path: dotted path of the section, for messages.

    Raises:
        UserError: a key is unknown or missing, or a value has another type or is refused by the class.
    """
    kind: type = cls
    known, usual = types_of(kind), defaults_of(kind)
    require(isinstance(tree, Mapping), path or "CONFIG", tree, f"must be a section with {', '.join(known)}")
    for name, value in tree.items():
        if name not in known:
            raise UserError(_below(path, name), value, _unknown(cls, name, value, path))
    values = {name: _value(cls, name, value, _below(path, name)) for name, value in tree.items()}
    for name in known:
        if name not in values and name not in usual:
            names = ", ".join(CHOICES[cls, name].known() if (cls, name) in CHOICES else ())
            remedy = f"name one of {names}" if names else f"{cls.__name__} has no default for it"
            raise UserError(_below(path, name), None, f"is missing; {remedy}")
    try:
        check_values(cls, values)  # a user's class need not call the `__post_init__` of `Options`
        return cls(**values)
    except UserError as error:
        raise error.under(path) from None


def _unknown(cls: type, name: str, value: Any, path: str) -> str:
    """Return what to do about an unknown key: outside of sections, name the keys that end with it."""
    from mpifl.data.scenario import Scenario  # needs PyTorch

    if name == "test_share" and issubclass(cls, Scenario) and cls.tested_on:
        return cls.tested_on
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
    ends = [] if path else [(bool(of), key) for key, *_, of in walk() if key.endswith(f".{name}")]
    elsewhere = list(dict.fromkeys(key for _, key in sorted(ends, key=itemgetter(0))))
    meant = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(str(name), [*types_of(cls)])
    return f"unknown key; {meant}"


def _below(path: str, name: object) -> str:
    return f"{path}.{name}".lstrip(".")


def _value(cls: type, name: str, value: Any, path: str) -> Any:
    """Return `value` converted for field `name` of `cls`."""
    if (cls, name) in CHOICES:
        return chosen(CHOICES[cls, name], _named(cls, name, value), path)
    hint = types_of(cls)[name]
    if hint is Seeds and not isinstance(value, Mapping):
        value = dict.fromkeys(types_of(Seeds), converted(int, value, path))
    return converted(hint, value, path, unit_of(cls, name), from_tree)


def _named(cls: type, name: str, value: Any) -> Any:
    """Return the tree of a section with its `name`; a word is a name, and a missing name is the default's."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping) or "name" in value:
        return value
    usual = name_of(defaults_of(cls).get(name))
    return {"name": usual, **value} if usual in CHOICES[cls, name] else value


def chosen(catalogue: Registry[Any], tree: Any, path: str) -> Any:
    """Return the object that a section describes.

    Args:
        catalogue: the choices of the section.
        tree: the section: `name`, and the keys of that class.
        path: dotted path of the section.

    Raises:
        UserError: the name is missing, or `class_of` or `from_tree` raises.
    """
    if not (isinstance(tree, Mapping) and "name" in tree):
        raise UserError(path, tree, f"name one of {', '.join(catalogue.known())}")
    name, rest = tree["name"], {k: v for k, v in tree.items() if k != "name"}
    if not isinstance(name, str):
        raise UserError(f"{path}.name", name, f"name one of {', '.join(catalogue.known())}")
    cls = class_of(catalogue, name, f"{path}.name")
    for option in rest if not types_of(cls) else ():
        others = [other for other, of in catalogue.items() if option in types_of(of)]
        have = f", or use one that has it: {', '.join(others)}" if others else ""
        remedy = f"unknown key; {name} has no options: leave it out{have}"
        raise UserError(_below(path, option), rest[option], remedy)
    return from_tree(cls, rest, path)


def class_of(catalogue: Registry[Any], name: str, key: str) -> type:
    """Return the class of a name: of mpifl, of an installed package, or of the user by its import path.

    Args:
        catalogue: the choices of a section.
        name: the name, `file.py:Class` or `package.module:Class`.
        key: configuration key that holds it.

    Raises:
        UserError: there is no such class or several, it is no dataclass, or lacks something of a choice.
    """
    if ":" in name:
        cls = load_object(name, key, catalogue.kind)
    elif name in catalogue:
        cls = catalogue.load(name, key)
    else:
        raise UserError(key, name, _unknown_name(catalogue, name))
    if ":" in name or catalogue.plugin(name) is not None:
        remedy = _module_remedy(catalogue, cls, name) or "is not a dataclass; its fields are the options"
        require(isinstance(cls, type) and dataclasses.is_dataclass(cls), key, name, remedy)
        missing = ", ".join(f"`{hook}`" for hook in sorted(getattr(cls, "__abstractmethods__", ())))
        require(not missing, key, name, f"does not define {missing}, which it needs; add it")
        _check_kind(cls, catalogue.kind, key, name)
        try:
            types_of(cls)
        except Exception as error:  # an annotation is any expression
            what = f"{type(error).__name__}: {error}"
            raise UserError(key, name, f"has a field whose type cannot be read: {what}") from error
    found: type = cls
    return found


def _unknown_name(catalogue: Registry[Any], name: str) -> str:
    """Return what to do about a name that a catalogue lacks."""
    if name.endswith(".py") and is_file(Path(name).expanduser(), "file"):
        return f"is a file; name the class in it, too: give {name}:Class"
    asked = bool(catalogue.plugins()) or "-" in name or "." in name
    nowhere = ", and no installed package gives it either" if asked else ""
    return f"unknown name{nowhere}; {nearest(name, catalogue.known())}"


def _module_remedy(catalogue: Registry[Any], cls: Any, name: str) -> str:
    """Return how a user's `torch.nn.Module` is named as a model; empty for other classes."""
    if catalogue.kind is not ModelOptions or not isinstance(cls, type):
        return ""
    from torch.nn import Module

    plugin = catalogue.plugin(name)
    path = name if plugin is None else plugin.path
    custom = f"use {{name: custom, path: {path}, head: NAME}}, with the name of its last nn.Linear"
    return f"is a torch.nn.Module; {custom}" if issubclass(cls, Module) else ""


def _check_kind(cls: type, kind: type, key: str, name: str) -> None:
    """Raise `UserError` for a user's class that is not derived from `kind` and lacks something of it."""
    needed = ["build"] if kind is ModelOptions else [name for name in dir(kind) if not name.startswith("_")]
    lacking = [] if issubclass(cls, kind) else [name for name in needed if not hasattr(cls, name)]
    some = ", ".join(f"`{name}`" for name in lacking[:3]) + ", ..." * (len(lacking) > 3)
    place = "mpifl" if kind is Algorithm else kind.__module__
    require(not lacking, key, name, f"is not a subclass of {place}.{kind.__name__}, and has no {some}")


# -- from objects to trees -----------------------------------------------------------------------------------


def to_tree(value: Any, owner: type | None = None, name: str = "") -> Any:
    """Return the tree that `from_tree` turns into `value` again.

    Args:
        value: a configuration, a section or a plain value.
        owner: class of the section that contains `value`.
        name: key of `value` in that section.
    """
    if isinstance(value, dict):
        return {key: to_tree(one) for key, one in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return list(value) if isinstance(value, tuple) else value
    tree = {f: to_tree(getattr(value, f), type(value), f) for f in types_of(type(value))}
    return {"name": name_of(value), **tree} if owner and (owner, name) in CHOICES else tree


def non_default(section: Any, owner: type | None = None, name: str = "") -> dict[str, Any]:
    """Return the tree of the keys alone that differ from their defaults; `from_tree` makes the same of it.

    A key that a later version adds does not change it. `name` is in it if the section has a catalogue.

    Args:
        section: a configuration or a section.
        owner: class of the section that contains it.
        name: key of the section there.
    """
    out, whole = dict[str, Any](), to_tree(section, owner, name)
    kind: type = type(section)
    usual = defaults_of(kind)
    for key in types_of(kind):
        value, of = getattr(section, key), (kind, key)
        if key in usual and to_tree(usual[key], *of) == whole[key]:
            continue
        if dataclasses.is_dataclass(value):
            out[key] = non_default(value, *of)
        elif isinstance(value, dict) and all(map(dataclasses.is_dataclass, value.values())):
            out[key] = {label: non_default(one) for label, one in value.items()}
        else:
            out[key] = whole[key]
    return {"name": whole["name"], **out} if owner is not None and (owner, name) in CHOICES else out


def settings(config: Config) -> dict[str, Any]:
    """Return the tree of the keys that decide numbers and differ from their defaults.

    This is the configuration's part of the identity of a run: a checkpoint knows its digest, `summary.json`
    holds it, and runs that have the same one, but for seeds, form one group.
    """
    return deciding(non_default(config))


def texts(config: Config) -> Iterator[str]:
    """Yield all texts among the values of a configuration, except those of `output`."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (Mapping, list, tuple)):
            for one in value.values() if isinstance(value, Mapping) else value:
                yield from inside(one)

    yield from inside({key: value for key, value in to_tree(config).items() if key != "output"})


def plugins_of(config: Config) -> str:
    """Return the plug-ins that a configuration uses, except those of `output`; empty for none.

    Each is given as its package, its version and a hash of the package's files, once, in the order of names.
    """

    def inside(section: Any) -> Iterator[str]:
        kind: type = type(section)
        for name in types_of(kind):
            value, catalogue = getattr(section, name), CHOICES.get((kind, name))
            if catalogue is not None and ":" not in getattr(type(value), "imported_as", ":"):
                plugin = catalogue.plugin(name_of(value))
                yield from () if plugin is None else (plugin.identity,)
            if dataclasses.is_dataclass(value):
                yield from inside(value)

    return ", ".join(sorted({*inside(config)}))


def files_of(config: Config) -> dict[str, Path]:
    """Return key -> the user's own file that it names, for keys whose files decide numbers.

    Data and code are not among them; they have digests of their own (`Federation.content`, `code_of`). Files
    that are not where this process looks for them are left out.
    """
    tree, found = to_tree(config), dict[str, Path]()
    for key, inside in FILES.items():
        value: Any = tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value and (file := Path(value).expanduser() / inside).is_file():
            found[key] = file
    return found


def sums_of(config: Config) -> dict[str, str]:
    """Return key -> SHA-256 of the user's own file that it names; see `files_of`."""
    sums = {}
    for key, path in files_of(config).items():
        with path.open("rb") as file:
            sums[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C, if PyYAML was built with it: the same values


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML."""
    return str(yaml.dump(to_tree(config), Dumper=_DUMPER, sort_keys=False))
