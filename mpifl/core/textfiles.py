"""Text files of users and of other programs, read with limits: YAML, JSON and CSV.

A file that cannot be read raises `UserError`. YAML is read strictly: no key occurs twice in a mapping, and
aliases cannot multiply the size of a file. Its scalars are texts as they are written, except null; the types
of options say what becomes of them (`core.conversion`).
"""

from __future__ import annotations

import csv
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from .errors import UserError, require

MAX_BYTES = 1 << 20  # of a configuration or of the value of an option; the largest shipped one has 4 kB
MAX_NAME_BYTES = 100  # of a part of a folder name; file systems allow 255 for the whole name
MAX_DEPTH, MAX_NODES = 32, 100_000  # of a YAML tree; a node counts each time that an alias repeats it
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # in JSON, escaped or as it is
MERGE, NULL, STR, *_OTHERS = TAGS = [
    f"tag:yaml.org,2002:{kind}" for kind in ("merge", "null", "str", "bool", "int", "float", "seq", "map")
]
FAULTS = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def check_file(path: Path, key: str, most_bytes: int | None = None) -> None:
    """Check that a path is a regular file; reading a pipe or a device could block for ever.

    Args:
        path: the file.
        key: configuration key or argument that names it, for messages.
        most_bytes: largest size; None for any.

    Raises:
        UserError: the file does not exist, is not regular, or is larger.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        what = error.strerror if isinstance(error, OSError) else error
        raise UserError(key, str(path), f"there is no such file ({what})") from error
    require(stat.S_ISREG(found.st_mode), key, str(path), "is not a file")
    large = f"has {found.st_size} bytes, more than {most_bytes}; is it the right file?"
    require(most_bytes is None or found.st_size <= most_bytes, key, str(path), large)


def text_of(path: Path, key: str, most_bytes: int | None = None) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Args:
        path: the file.
        key: configuration key or argument that names it, for messages.
        most_bytes: largest size; None for any.

    Raises:
        UserError: as for `check_file`, or the file cannot be read, or is not UTF-8.
    """
    check_file(path, key, most_bytes)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(key, str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(key, str(path), f"is not text in UTF-8 (byte {error.start})") from error


def check_name(key: str, name: str) -> None:
    """Raise `UserError` under `key` unless a name can be part of a folder name."""
    require("/" not in name, key, name, "is part of a folder's name; leave out the slashes")
    remedy = f"is part of a folder's name; use at most {MAX_NAME_BYTES} bytes"
    require(len(os.fsencode(name)) <= MAX_NAME_BYTES, key, name, remedy)


def is_file(path: str | os.PathLike[str], key: str) -> bool:
    """Return whether there is a file; other than `os.path.isfile`, tell one in a closed folder from none.

    Args:
        path: the file.
        key: what names it, for the message.

    Raises:
        UserError: this user may not look into its folder.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError as error:
        raise UserError(key, str(path), f"its folder may not be read ({error.strerror})") from error
    except (OSError, ValueError):  # ValueError: no valid file name
        return False


def readable(value: str) -> str:
    """Return a string with an escape in place of each surrogate, so that it can be written in UTF-8.

    A JSON string contains a surrogate where one half of a pair of escapes is missing. The name of a file, an
    argument or an environment variable contains one for each byte that is not UTF-8.
    """
    return value.encode(errors="backslashreplace").decode()


# -- YAML ----------------------------------------------------------------------------------------------------


_BASE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the loader in C, if PyYAML was built with it


class _Loader(_BASE):  # type: ignore[misc, valid-type]
    """A safe YAML loader that checks the tree before it constructs objects."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of the tree, checked by `_check`."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check(node)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; raise if a key occurs twice or is not a scalar."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key_node.start_mark)
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node)
            if key in seen:
                problem = f"the key {key!r} appears twice; leave one out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


class _TextLoader(_Loader):
    """A loader whose scalars are texts, except null."""


class _TextDumper(yaml.SafeDumper):  # type: ignore[misc]
    """A dumper for files that `_TextLoader` reads: quotes no number, and no word except null."""

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        """Return the node of a scalar: null, or a text."""
        node: yaml.ScalarNode = super().represent_scalar(tag if tag == NULL else STR, value, style)
        return node


for _kind in (_TextLoader, _TextDumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag in (MERGE, NULL)]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def yaml_text(tree: Any) -> str:
    """Return a tree of texts as YAML, which `yaml_of` reads."""
    return str(yaml.dump(tree, Dumper=_TextDumper, sort_keys=False))


def _check_depth(text: str) -> None:
    """Raise if a text is nested too deeply: building its tree would end in a segmentation fault."""
    depth = 0
    for event in yaml.parse(text, _BASE):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            problem = f"it is nested deeper than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _check(root: yaml.Node) -> None:
    """Raise if a tree contains itself, has tags, or has too many nodes when aliases are written out."""
    sizes: dict[int, int] = {}  # of finished nodes
    path: list[tuple[yaml.Node, Iterator[yaml.Node]]] = [(root, _below(root))]
    under_way = {id(root)}
    while path:
        node, rest = path[-1]
        child = next(rest, None)
        if node.tag not in TAGS:
            raise yaml.MarkedYAMLError(problem=f"no tags, like {node.tag}", problem_mark=node.start_mark)
        if child is None:
            path.pop()
            under_way.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(n)] for n in _below(node))
            if sizes[id(node)] > MAX_NODES:
                problem = f"it holds more than {MAX_NODES} values"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        elif id(child) in under_way:
            raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=child.start_mark)
        elif id(child) not in sizes:
            if len(path) > MAX_DEPTH:  # possible with aliases
                problem = f"it is nested deeper than {MAX_DEPTH} levels"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=child.start_mark)
            path.append((child, _below(child)))
            under_way.add(id(child))


def _below(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the children of a node: keys and values of a mapping."""
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def yaml_of(text: str, key: str, value: str, typed: bool = False) -> Any:
    """Return the value of a YAML text.

    Args:
        text: YAML.
        key: configuration key or argument that holds it, for messages.
        value: what messages show in place of the text.
        typed: whether numbers and truths are such, instead of texts, as in a file that a program wrote.

    Raises:
        UserError: it is not YAML; names line and column.
    """
    require(len(text) <= MAX_BYTES, key, value, f"has {len(text)} characters, more than {MAX_BYTES}")
    try:
        _check_depth(text)
        return yaml.load(text, _Loader if typed else _TextLoader)
    except FAULTS as error:
        raise UserError(key, value, f"is not YAML{_place(error)}: {_problem(error)}") from error


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"


def _problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(getattr(error, "problem", None) or error)


def yaml_file(path: Path, key: str, typed: bool = False) -> Any:
    """Return the value of a YAML file; arguments and errors are those of `text_of` and `yaml_of`."""
    return yaml_of(text_of(path, key, MAX_BYTES), key, str(path), typed)


# -- JSON and CSV --------------------------------------------------------------------------------------------


class RepeatedKey(ValueError):
    """A key stands twice in one object of a JSON text, of which `json` would silently keep the last value."""


def _strict_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise `RepeatedKey` for a key that stands twice in it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        known: set[str] = set()
        twice = next(name for name, _ in pairs if name in known or known.add(name))  # type: ignore[func-returns-value]
        raise RepeatedKey(f"the key {readable(twice)!r} appears twice; leave one out")
    return found


def json_of(text: str | bytes) -> Any:
    """Return the value of a JSON text; bytes are UTF-8, with or without a byte order mark.

    Raises:
        RepeatedKey: a key stands twice in one object.
        ValueError: it is not JSON, or one of its strings cannot be written in UTF-8 (`readable`).
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    tree = json.loads(text, object_pairs_hook=_strict_object)
    if SURROGATE.search(text):  # usually halves of complete pairs
        json.dumps(tree, ensure_ascii=False).encode()
    return tree


def escaped(tree: Any) -> Any:
    """Return a tree of JSON whose strings can all be written (`readable`)."""
    if isinstance(tree, dict):
        return {escaped(name): escaped(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [escaped(value) for value in tree]
    return readable(tree) if isinstance(tree, str) else tree


def json_file(path: Path, key: str) -> Any:
    """Return the value of a JSON file.

    Args:
        path: the file.
        key: configuration key or argument that names it, for messages.

    Raises:
        UserError: as for `text_of`, or the file is not JSON or has a key twice (`json_of`).
    """
    try:
        return json_of(text_of(path, key))
    except RepeatedKey as error:
        raise UserError(key, str(path), str(error)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(key, str(path), f"is not JSON: {error}") from error


def json_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file; empty if it holds none, or cannot be read."""
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_strict_object)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def csv_file(path: Path, key: str, columns: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, row) for each row of a CSV file; a place is "FILE line NUMBER".

    Args:
        path: the file.
        key: configuration key or argument that names it, for messages.
        columns: columns that the header must have.

    Raises:
        UserError: the file cannot be read, a column is missing or occurs twice, or a row has more or fewer
            fields than the header.
    """
    check_file(path, key)
    place = str(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            table = csv.reader(lines)
            head = next(table, [])
            missing = ", ".join(name for name in columns if name not in head)
            require(not missing, key, str(path), f"has no column {missing}")
            require(len(set(head)) == len(head), key, str(path), "has two columns of the same name")
            for row in table:
                place = f"{path} line {table.line_num}"
                if row:
                    fits = len(row) == len(head)
                    require(fits, place, row, f"has {len(row)} fields, the head has {len(head)}")
                    yield place, dict(zip(head, row, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(key, place, f"is not CSV: {error}") from error
    except OSError as error:
        raise UserError(key, str(path), f"cannot be read ({error.strerror})") from error


T = TypeVar("T")


def read_per_client(
    file: str, key: str, form: str, needs: str, parse: Callable[[Mapping[str, str], str], T]
) -> dict[int, list[T]]:
    """Return client -> values of its rows, in the order of the file: one row per visit.

    Args:
        file: a CSV file with a column `client`.
        key: configuration key that names the file, for messages.
        form: what the file must hold, for messages.
        needs: what a row must hold, for messages.
        parse: returns the value of a row, given the row and its place.

    Raises:
        UserError: there is no such file, or `parse` refuses a row.
    """
    require(is_file(file, key), key, file, f"there is no such file; give a CSV of {form}")
    out: dict[int, list[T]] = {}
    for place, row in csv_file(Path(file), key, ("client",)):
        try:
            client, found = int(row["client"]), parse(row, place)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(place, row, f"needs {needs}") from error
        out.setdefault(client, []).append(found)
    return out


def check_per_client(clients: Iterable[int], num_clients: int, file: str, key: str) -> None:
    """Raise `UserError` under `key` unless the clients of a file are exactly 0 to num_clients - 1."""
    known, everyone = set(clients), set(range(num_clients))
    unknown, missing = known - everyone, everyone - known
    remedy = f"{file} has rows of client {min(unknown, default=0)}; there are {num_clients} clients"
    require(not unknown, key, file, remedy)
    remedy = f"{file} has no row of client {min(missing, default=0)}; give every client one"
    require(not missing, key, file, remedy)


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
