"""The pages of `mpifl show` and `mpifl list`, and the JSON Schema of configuration files.

All of it is read from the dataclasses and their docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from itertools import takewhile
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

from annotated_types import MinLen

from mpifl.algorithms.registry import CATALOGUE, METHODS
from mpifl.core.algorithm import Algorithm, asked_of_trainer
from mpifl.core.errors import UserError, name_of, nearest, require
from mpifl.core.imports import load_object
from mpifl.core.options import Options, choices_of, is_union, type_text, types_of, without_bounds
from mpifl.core.plugins import PREFIX
from mpifl.core.registry import Installed, Registry
from mpifl.core.trainer import GIFTS, trainer_of
from mpifl.core.units import Unit, unit_of
from mpifl.data import SCENARIOS, SOURCES
from mpifl.models import MODELS
from mpifl.results.trackers import CALLBACKS
from mpifl.simulation.policies import POLICIES, Policy
from mpifl.traffic.compression import COMPRESSIONS
from mpifl.training.config import LocalConfig

from . import contents
from .citations import entry
from .docstrings import meanings
from .loader import SHIPPED, class_of, from_tree, overrides, to_tree
from .schema import CHOICES, Config, defaults_of, is_in, sections_of, walk

RUN = "run"  # name of the keys outside sections in `mpifl show`


def _plural(word: str) -> str:
    return word if word.endswith("s") else f"{word}s".replace("cys", "cies")


LISTED: dict[str, dict[str, Registry[Any]]] = {  # argument of `mpifl list` -> title -> catalogue
    "algorithms": {"algorithms": CATALOGUE},
    "data": {"sources": SOURCES, "scenarios": SCENARIOS},
    "sources": {"sources": SOURCES},
    "scenarios": {"scenarios": SCENARIOS},
    "models": {"models": MODELS},
    **{
        _plural(field): {_plural(field): catalogue}
        for (_, field), catalogue in CHOICES.items()
        if field not in ("algorithm", "model", "source", "public", "scenario", "downloads")
    },
    "callbacks": {"callbacks": CALLBACKS},
}
LISTED["protections"] = {
    title: c for group in [*LISTED.values()] for title, c in group.items() if c.group == "protections"
}
ALGORITHMS = "algorithms"
TRIED = ("rounds", "buffer", "every_arrival")  # policies that `mpifl list algorithms` names
CONFIGURATIONS, KEYS, PAPERS, COLUMNS = "configurations", "keys", "papers", "columns"
OTHER_WORDS = {"methods": "algorithms", "datasets": "data", "configs": CONFIGURATIONS}
_NUMBERS = re.compile(r"\b(int|float)\b")
FEW = 10  # a section's page explains its choices if there are at most so many, otherwise only names them


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        path: dotted path.
        type: type, in words.
        default: default value as YAML; empty if there is none.
        meaning: description from the docstring of its class.
        choices: values that it may have; empty if these are not a list.
        unit: unit of a number; empty for none.
        examples: examples of values with other units; empty if there are none.
        of: name of the component that has the key, or of several (`shared`); empty if every configuration
            has it.
        is_section: whether it contains other keys.
    """

    path: str
    type: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    unit: str = ""
    examples: str = ""
    of: str = ""
    is_section: bool = False


@cache
def keys(within: str = "") -> tuple[Key, ...]:
    """Return keys: sections before their keys, components in the order of their catalogues.

    Args:
        within: only this key or section, and what contains it or is inside it; empty for all keys.
    """
    return tuple(_key(*place) for place in walk(within=within))


def _key(path: str, cls: type, name: str, of: str) -> Key:
    """Return what is known about a key, see `walk`."""
    hint, meaning, choices = types_of(cls)[name], meanings(cls).get(name, ""), CHOICES.get((cls, name))
    default = defaults_of(cls).get(name, dataclasses.MISSING)
    if choices is not None:
        usual = name_of(default) if name_of(default) in choices else ""
        return Key(path, "section with a name", usual, meaning, tuple(choices), of=of, is_section=True)
    if sections_of(cls, name):
        return Key(path, "section", "", meaning, of=of, is_section=True)
    unit = _unit(cls, name, hint)
    text = "" if default is dataclasses.MISSING else _yaml(default)
    written = (unit.name, unit.examples) if unit is not None else ("", "")
    return Key(path, type_text(hint), text, meaning, choices_of(hint), *written, of)


def shared(found: Sequence[Key], sections: Sequence[Key]) -> list[Key]:
    """Return keys, those that are alike in several components once; `of` then names these components.

    Args:
        found: the keys.
        sections: the sections that they are in, and any other keys.
    """
    titles = {tuple(c): title for group in LISTED.values() for title, c in group.items()}
    everyone = {key.path: key.choices for key in sections if key.is_section and key.choices}
    owners: dict[Key, list[str]] = {}
    for key in found:
        owners.setdefault(dataclasses.replace(key, of=""), []).append(key.of)
    out = []
    for key, names in owners.items():
        all_of = [c for path, c in everyone.items() if is_in(key.path, path) and set(names) == {*c}]
        of = f"all {titles[all_of[0]]}" if all_of else ", ".join(names)
        out.append(dataclasses.replace(key, of=of))
    return out


def _unit(cls: type, name: str, hint: Any) -> Unit | None:
    """Return the unit of a key; None if its values are no numbers or have no unit."""
    unit = unit_of(cls, name)
    return unit if unit is not None and _NUMBERS.search(type_text(hint)) else None


def _yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    return json.dumps(to_tree(value)) if not isinstance(value, str) else value


# -- pages ---------------------------------------------------------------------------------------------------


def listed(what: str, words: Sequence[str] = (), trainer: str | None = None) -> str:
    """Return the page of `mpifl list`.

    Args:
        what: a key of `LISTED`, `configurations`, `keys`, `columns`, or empty for the list of these words.
        words: of algorithms, those that are listed: words of their headings, and policies.
        trainer: of algorithms, those that ask a trainer for no more than this one gives; as `local.trainer`.

    Raises:
        UserError: `what` is something else, or a word or the trainer is unknown.
    """
    what = OTHER_WORDS.get(what, what)
    if what == ALGORITHMS:
        return "\n".join(_algorithms(words, trainer))
    require(trainer is None, "--trainer", trainer, "chooses algorithms: mpifl list algorithms --trainer X")
    require(not words, f"list {what}", " ".join(words), "takes no words; leave them out")
    if not what:
        return "\n".join(["mpifl list WHAT, which is one of", *(f"  {kind}" for kind in kinds())])
    if what == CONFIGURATIONS:
        return "\n".join(_configurations())
    if what == KEYS:
        short = [dataclasses.replace(key, meaning=_sentence(key.meaning)) for key in keys()]
        return "\n".join(f"{_head(key)}: {key.meaning}" for key in shared(short, short))
    if what == COLUMNS:
        return "\n".join(contents.listed())
    if what not in LISTED:
        raise UserError("list", what, nearest(what, kinds()))
    lines = []
    for title, catalogue in LISTED[what].items():
        lines += [title, *(f"  {name:22} {summary(cls)}" for name, cls in catalogue.items())]
        added = _added(catalogue).classes.items()
        lines += [f"  {name:22} {summary(cls)} [{plugin.origin}]" for name, (plugin, cls) in added]
    return "\n".join(lines)


def faults(what: str) -> list[UserError]:
    """Return what is wrong about the plug-ins that a page of `mpifl list` would hold, each once."""
    found = LISTED.get(OTHER_WORDS.get(what, what), {}).values()
    return [*{str(one): one for catalogue in found for one in _added(catalogue).faults}.values()]


def _added(catalogue: Registry[Any], only: str = "") -> Installed[Any]:
    """Return what installed packages add to a catalogue, checked as in a configuration.

    Args:
        catalogue: the catalogue.
        only: this name alone; empty for all.
    """
    found = catalogue.installed(only)
    for name in [*found.classes] if catalogue.kind is not object else ():
        try:
            class_of(catalogue, name, f"{PREFIX}{catalogue.group}")
        except UserError as error:
            found.faults.append(error)
            del found.classes[name]
    return found


def _algorithms(words: Sequence[str], trainer: str | None = None) -> Iterator[str]:
    """Yield a line for each method to which all words apply: name, year, policies, summary; by headings."""
    gives = None if trainer is None else _gives(trainer)
    tried = {name: POLICIES[name]() for name in TRIED}
    kinds = {title: {*title.lower().replace(",", "").split()} for title in METHODS}
    known = sorted({word for some in kinds.values() for word in some if len(word) > 3} | {*TRIED})
    for word in words:
        require(word in known, "list algorithms", word, nearest(word, known))
    yield "name, year, policies that it runs under (of " + ", ".join(TRIED) + "), summary"
    for title, some in METHODS.items():
        lines = []
        for name in some:
            cls = CATALOGUE[name]
            under = [policy for policy, rule in tried.items() if _runs(cls, rule)]
            fits = gives is None or {*asked_of_trainer(cls())} <= gives
            if fits and {*words} <= kinds[title] | {*under}:
                lines.append(_row(name, cls, under))
        if lines:
            yield from ("", title, *lines)
    lines = []
    for name, (plugin, cls) in _added(CATALOGUE).classes.items():
        needed = [f for f in types_of(cls) if f not in defaults_of(cls)]  # without them, it cannot be tried
        under = [policy for policy, rule in tried.items() if not needed and _runs(cls, rule)]
        fits = gives is None or (not needed and {*asked_of_trainer(cls())} <= gives)
        if fits and {*words} <= {*under}:
            lines.append(f"{_row(name, cls, under)} [{plugin.origin}]")
    if lines:
        yield from ("", "Of installed packages", *lines)


def _row(name: str, cls: type[Algorithm], under: Sequence[str]) -> str:
    """Return the line of a method, with the policies that it runs under."""
    year = re.search(r"year = \{(\d+)", entry(cls.paper, cls))
    return f"  {name:16} {year[1] if year else '':4}  {', '.join(under):29} {summary(cls)}".rstrip()


def _gives(trainer: str) -> set[str]:
    """Return what a trainer gives beside a trained model, from the value of `local.trainer`."""
    found = trainer_of(from_tree(LocalConfig, overrides(["--trainer", trainer]), "local").trainer)
    return {*GIFTS} if found is None else {*found.gives}


def _runs(cls: type[Algorithm], policy: Policy) -> bool:
    """Return whether a method with its default options runs under a policy with its own."""
    try:
        policy.check(cls())
    except UserError:
        return False
    return True


def kinds() -> list[str]:
    """Return the words that `mpifl list` takes."""
    return [*LISTED, CONFIGURATIONS, KEYS, COLUMNS, PAPERS]


def configurations() -> dict[str, Path]:
    """Return name -> file of the configurations that come with mpifl."""
    files = (path for path in sorted(SHIPPED.rglob("*.yaml")) if not path.name.startswith("_"))
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in files}


def _configurations() -> Iterator[str]:
    """Yield a line for each configuration that comes with mpifl: its name and its comment or method."""
    for name, path in configurations().items():
        if not name.startswith("papers/"):
            about = " ".join(line.lstrip("# ") for line in _comment(path.read_text()))
            yield f"{name:30} {_sentence(about or summary(CATALOGUE[path.stem]))}"
    yield f"{'papers/...':30} Tables and figures of the papers: mpifl list papers."


def _comment(text: str) -> list[str]:
    """Return the lines of the comment at the start of a file."""
    return list(takewhile(lambda line: line.startswith("#"), text.splitlines()))


def shown(name: str) -> str:
    """Return the page of `mpifl show`.

    Args:
        name: a key, a section, `run` for the keys outside sections, the name of a component, a column or
            file of a run folder, or the import path of a user's own component.

    Raises:
        UserError: there is nothing of that name; suggests similar names.
    """
    if ":" in name:
        cls = load_object(name, "show")
        remedy = "is not a component: those are dataclasses, whose fields are their options"
        require(isinstance(cls, type) and dataclasses.is_dataclass(cls), "show", name, remedy)
        return describe(name, cls)
    pages = [describe(name, cls, origin) for cls, origin in _components(name).items()]
    found = keys(name)
    at = [key for key in found if key.path == name]
    if name == RUN:
        first = [_key(name, Config, name, "") for name in types_of(Config)]
        pages.append("\n".join(line for key in first for line in _lines(key)))
    elif at and not at[0].is_section:
        pages += ["\n".join(_lines(key)) for key in shared(at, found)]
    elif at:
        pages.append(
            _section_page(at[0], [key for key in found if key.path != name and is_in(key.path, name)])
        )
    if not at and (column := contents.page(name)):
        pages.append(column)
    if not pages:
        names = [word for catalogue in _catalogues() for word in catalogue.known()]
        names += [*contents.TABLES, *(column.name for column in contents.columns())]
        raise UserError("show", name, _meant(name, keys(), [RUN, *dict.fromkeys(names)]))
    return "\n\n".join(pages)


def _meant(name: str, everything: Sequence[Key], others: Sequence[str]) -> str:
    """Suggest meanings of an unknown word: the nearest name, else keys whose last part or meaning has it."""
    paths = [*dict.fromkeys(key.path for key in everything)]
    near = get_close_matches(name, [*paths, *others], n=1, cutoff=0.7)
    words = re.findall(r"\w+?(?=_|\b)", name.lower().replace("_", " "))
    last = [path for path in paths if path.rpartition(".")[2] == name]
    said = [key.path for key in everything if all(w in f"{key.path} {key.meaning}".lower() for w in words)]
    if near and not last:
        return f"did you mean {near[0]!r}?"
    found = [*dict.fromkeys([*last, *(said if words else [])])]
    if not found:
        nothing = "no key, section, component or column is called so"
        return f"{nothing}; `mpifl list keys` has all keys, `mpifl list` the rest"
    more = f" and {len(found) - FEW} more (mpifl list keys)" if len(found) > FEW else ""
    return f"did you mean one of {', '.join(found[:FEW])}{more}?"


def _catalogues() -> list[Registry[Any]]:
    return [*(c for group in LISTED.values() for c in group.values()), *CHOICES.values()]


def _components(name: str) -> dict[Any, str]:
    """Return all classes of a name, over all catalogues, and the packages of those that are plug-ins."""
    found = dict[Any, str]()
    for catalogue in {id(one): one for one in _catalogues()}.values():
        for fault in _added(catalogue, name).faults:
            raise fault
        if name in catalogue:
            plugin = catalogue.plugin(name)
            found[catalogue.load(name, "show")] = "" if plugin is None else plugin.origin
    return found


def catalogue_of(section: Key) -> Registry[Any] | None:
    """Return the catalogue of a section; None for one without a choice, and for other keys."""
    return next((c for c in CHOICES.values() if section.is_section and tuple(c) == section.choices), None)


def _section_page(section: Key, below: list[Key]) -> str:
    """Return the page of a section: its keys, and its components with their keys."""
    own = [key for key in below if key.of == section.of]
    lines = [*_lines(section), *(line for key in own for line in _lines(key))]
    catalogue = catalogue_of(section)
    if catalogue is None:
        return "\n".join(lines)
    for name, cls in catalogue.items():
        lines += ["", f"{section.path}.name = {name}: {summary(cls)}"]
        if len(catalogue) <= FEW:
            mine = [key for key in below if key.of == name and key not in own]
            lines += [line for key in mine for line in _lines(key)]
    added = _added(catalogue).classes.items()
    for name, (plugin, cls) in added:
        lines += ["", f"{section.path}.name = {name}: {summary(cls)} [{plugin.origin}]"]
    if len(catalogue) > FEW or added:
        lines += ["", f"`mpifl show NAME` explains one, with its keys below {section.path}"]
    return "\n".join(lines)


def _lines(key: Key) -> list[str]:
    """Return the lines that explain a key."""
    choices = f"Choices: {', '.join(key.choices)}." if key.choices else ""
    units = f"With a unit: {key.examples}." if key.examples else ""
    text = " ".join(part for part in (key.meaning, choices, units) if part)
    return [_head(key), *(f"    {line}" for line in wrap(text, 100))]


def _head(key: Key) -> str:
    """Return path, type, unit, default and component of a key."""
    default = f", default {key.default}" if key.default else ""
    unit = f", in {key.unit}" if key.unit else ""
    return f"{key.path}: {key.type}{unit}{default}" + (f" (of {key.of})" if key.of else "")


def summary(cls: type) -> str:
    """Return the first paragraph of a docstring, or its first sentence if the paragraph is long."""
    return _sentence(" ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()))


def _sentence(text: str) -> str:
    """Return a text, or its first sentence if the text is long."""
    return text if len(text) <= 110 else text.split(". ")[0].rstrip(".") + "."


def describe(name: str, cls: type, origin: str = "") -> str:
    """Return the page of a component: its docstring, fields, defaults and paper.

    Args:
        name: its name in its catalogue.
        cls: its class; of a callback also a function, or any object.
        origin: package and version of a plug-in; empty for others.
    """
    lines = [name, "=" * len(name), "", *([f"A plug-in: {origin}.", ""] if origin else [])]
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return "\n".join([*lines, inspect.getdoc(cls) or ""])
    is_method = issubclass(cls, Algorithm)
    module = inspect.getdoc(sys.modules[cls.__module__])
    if is_method and module:
        lines += [module, ""]
    text = inspect.getdoc(cls) or ""
    lines += [text, ""]
    if "Attributes:" not in text and (inherited := meanings(cls)):
        lines += ["Attributes:", *(f"    {name}: {said}" for name, said in inherited.items()), ""]
    lines += ["Fields and defaults:"]
    defaults = defaults_of(cls)
    for name, hint in types_of(cls).items():
        default = repr(defaults[name]) if name in defaults else "required"
        lines.append(f"  {name}: {', '.join(choices_of(hint)) or type_text(hint)} = {default}")
    if issubclass(cls, Options) and cls.paper:
        lines += ["", entry(cls.paper, cls)]
    return "\n".join(lines)


# -- JSON Schema ---------------------------------------------------------------------------------------------


Schema = dict[str, Any]
CLASS_PATH = {"type": "string", "pattern": ":"}  # file.py:Class or package.module:Class
SCALARS: dict[str, Schema] = {
    "number": {"type": ["number", "string"], "pattern": "^[-+0-9.eE]+$"},  # YAML 1.1 reads 1e-3 as a word
    "quantity": {"type": ["number", "string"], "pattern": "^[-+0-9._eE]+ *[A-Za-z/]*$"},  # with a unit
    "text": {"type": ["string", "number", "boolean"]},  # 7 and no are texts where a text is asked
}
OR_NULL = "_or_null"
SCALARS |= {f"{name}{OR_NULL}": {**one, "type": [*one["type"], "null"]} for name, one in SCALARS.items()}
LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def json_schema() -> str:
    """Return the JSON Schema of a configuration file; all keys are optional, because a base may set them."""
    definitions = dict(SCALARS)
    tree = _object(Config, definitions)
    tree["properties"]["base"] = {"type": "string", "description": "a file that this one is laid over"}
    tree["properties"]["seed"] = {"anyOf": [{"type": "integer"}, tree["properties"]["seed"]]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mpifl configuration"}
    return json.dumps({**head, **tree, "$defs": _shared(tree, definitions)}, separators=(",", ":"))


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _object(cls: type, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a section without a name; those inside it are added to `definitions`."""
    keys = _properties(cls, definitions)
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _properties(cls: type, definitions: dict[str, Schema]) -> dict[str, Schema]:
    texts, out = meanings(cls), {}
    for name, hint in types_of(cls).items():
        if (cls, name) in CHOICES:
            schema = _choice(name, CHOICES[cls, name], definitions)
        else:
            unit = _unit(cls, name, hint)
            number = "quantity" if unit is not None and unit.dimension else "number"
            schema = _value(hint, definitions, number)
        about = re.split("[.;:] | [(]", texts.get(name, ""))[0]
        out[name] = {**schema, "description": about} if about else schema
    return out


def _choice(key: str, catalogue: Registry[Any], definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a section whose name selects a class; the base may give the name instead."""
    key = {id(SOURCES): "source", id(COMPRESSIONS): "compression"}.get(id(catalogue), key)  # of two keys each
    if key not in definitions:
        classes = {**catalogue, **{word: cls for word, (_, cls) in _added(catalogue).classes.items()}}
        name = {"anyOf": [{"enum": [*classes]}, CLASS_PATH]}
        own = {word: _properties(cls, definitions) for word, cls in classes.items()}
        first, *others = own.values()
        common = {at: one for at, one in first.items() if all(more.get(at) == one for more in others)}
        cases = [
            {"if": _named(word), "then": {"properties": rest}}
            for word, properties in own.items()
            if (rest := {at: one for at, one in properties.items() if at not in common})
        ]
        unknown = {"if": {"properties": {"name": CLASS_PATH}}, "then": {"additionalProperties": True}}
        section = {"properties": {"name": _ref(f"{key}.name"), **common}, "allOf": [*cases, unknown]}
        definitions[f"{key}.name"] = name
        definitions[key] = {
            "anyOf": [_ref(f"{key}.name"), {"type": "object", **section, "unevaluatedProperties": False}]
        }
    return _ref(key)


def _named(word: str) -> Schema:
    """Return the schema of a section with a name."""
    return {"properties": {"name": {"const": word}}, "required": ["name"]}


def _value(hint: Any, definitions: dict[str, Schema], number: str = "number") -> Schema:
    """Return the schema of a value.

    Args:
        hint: its type.
        definitions: schemas of the sections inside it are added to these.
        number: the key of `SCALARS` that says how its numbers may be written.
    """
    hint, bounds = without_bounds(hint)
    origin, args = get_origin(hint), get_args(hint)
    inside = partial(_value, definitions=definitions, number=number)
    if is_union(hint):
        return _or_null(inside(next(arg for arg in args if arg is not type(None))))
    if dataclasses.is_dataclass(hint):
        return _object(hint, definitions)  # type: ignore[arg-type]
    if origin is dict:
        return {"type": "object", "additionalProperties": inside(args[1])}
    if hint is float or (hint is int and number == "quantity"):
        return {**_ref(number), **_limits(bounds)}
    if origin is Literal:
        return {"enum": [*args]}
    if origin is tuple:
        size = {} if args[-1] is Ellipsis else {"minItems": len(args), "maxItems": len(args)}
        least = {"minItems": 1} if MinLen(1) in bounds else {}
        return {"type": "array", "items": inside(args[0]), **size, **least}
    simple = {int: "integer", bool: "boolean", dict: "object"}
    if hint is str:
        return _ref("text")
    return {"type": simple[hint], **_limits(bounds)} if hint in simple else {}


def _or_null(schema: Schema) -> Schema:
    """Return the schema of a value or null; one without words or types allows null already."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "$ref" in schema:
        return {**schema, "$ref": f"{schema['$ref']}{OR_NULL}"}
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else schema


def _limits(bounds: Sequence[Any]) -> Schema:
    """Return the bounds of a number as JSON Schema has them."""
    given = [(f.name, getattr(one, f.name)) for one in bounds for f in dataclasses.fields(one)]
    return {LIMITS[name]: value for name, value in given if name in LIMITS and isfinite(value)}


def _shared(tree: Schema, definitions: dict[str, Schema]) -> dict[str, Schema]:
    """Return the definitions, with one for each key that several sections describe alike.

    These sections refer to it afterwards, in place.
    """
    places: dict[str, list[tuple[Schema, str]]] = {}
    for top in (tree, *definitions.values()):
        for properties in _inside(top):
            for name, schema in properties.items():
                if isinstance(schema, dict) and "description" in schema:
                    places.setdefault(json.dumps([name, schema]), []).append((properties, name))
    out = dict(definitions)
    for text, found in places.items():
        if len(found) > 1:
            name, schema = json.loads(text)
            number = sum(key.partition(".")[0] == name for key in out)
            key = f"{name}.{number}" if number else name
            out[key] = schema
            for properties, at in found:
                properties[at] = _ref(key)
    return out


def _inside(schema: Any) -> Iterator[Schema]:
    """Yield all `properties` in a schema, the innermost first."""
    if isinstance(schema, list):
        for one in schema:
            yield from _inside(one)
    elif isinstance(schema, dict):
        for one in schema.values():
            yield from _inside(one)
        if isinstance(schema.get("properties"), dict):
            yield schema["properties"]
