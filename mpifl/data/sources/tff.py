"""TensorFlow Federated's data sets: HDF5 with a group for each client, or SQLite with a row per sample.

The tables of the SQLite files are those of `tff.simulation.datasets.SqlClientData`: `examples` has
`client_id`, `split_name` and a `tf.train.Example` in `serialized_example_proto`, which is a map from names
to lists of bytes, float32 or int64; `example_of` reads its wire format.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.progress import doing, each
from mpifl.data.pool import Pool
from mpifl.data.sources.arrays import (
    LABELS,
    any_labels_of,
    characters_of,
    inputs_of,
    labels_of_texts,
    pool_of,
    refuse_not_finite,
)
from mpifl.data.sources.base import Source, reading
from mpifl.data.sources.columns import clean_name, index_of
from mpifl.data.sources.leaf import LETTERS

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = "examples"  # HDF5 group, or SQL table, of the clients' examples
SQLITE = (".sqlite", ".sqlite3", ".db")
TRAIN, TEST = "train", "test"
TEST_SHARE = 0.2  # of a file without a test part
QUERY = f"select client_id, split_name, serialized_example_proto from {EXAMPLES} order by client_id, rowid"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
INPUTS, LABEL_NAMES, TEXTS = ("pixels", "image", "x"), ("label", "labels", "y"), "snippets"
TWICE = "two clients have this name, but for blanks at its ends: rename one"
Held = dict[str, tuple[np.ndarray, np.ndarray]]  # client -> samples, labels


@dataclass(frozen=True)
class TensorFlowFederated(Source):
    """A data set of TensorFlow Federated: NAME_train.h5 and NAME_test.h5, read by h5py, or NAME.sqlite.

    FEMNIST's `pixels`, CIFAR-100's `image` and numbers under `x` are used as samples; `snippets` of text
    (Shakespeare) give a sample for each character that follows `length` others. Clients are the origins, so
    scenario natural makes each of them a client. An SQLite file has both parts, or names none: then a share
    of the samples is set aside for testing. Further parts (heldout) are left out.

    Attributes:
        path: below data.root: common name of both HDF5 files, without `_train.h5`, or an SQLite file with its
            ending.
        label: name of the labels; null: label, labels or y. CIFAR-100 has `coarse_label`, too.
        labels: classes or numbers, for labels of one number each whose type says otherwise, such as classes
            that are stored as floats; null: whole numbers are classes, floats numbers.
        length: for snippets, the number of characters before the one to predict.
    """

    name: ClassVar[str] = "tff"
    readable_labels: ClassVar[tuple[str, ...]] = LABELS

    path: str = "fed_emnist"
    label: str | None = None
    labels: str | None = None
    length: int = 80

    def __post_init__(self) -> None:
        super().__post_init__()
        known_labels = self.labels is None or self.labels in LABELS
        require(known_labels, "labels", self.labels, f"known: {', '.join(LABELS)}")
        require(self.length > 0, "length", self.length, "counts characters")

    def files(self, root: Path) -> list[Path]:
        """Return the SQLite file, or both HDF5 files, training part first."""
        if self.path.endswith(SQLITE):
            return [root / self.path]
        remedy = "is packed; unpack it (unlzma), and name the .sqlite file"
        require(not self.path.endswith((".lzma", ".xz")), "path", self.path, remedy)
        return [root / f"{self.path}_{part}.h5" for part in ("train", "test")]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read all samples; clients are numbered by name."""
        remarks: tuple[str, ...] = ()
        if self.path.endswith(SQLITE):
            found = self._read_sqlite(root / self.path)
            left = sorted(map(str, found.keys() - {TRAIN, TEST, None}))
            remarks = tuple(f"{self.path}: part {part} is left out" for part in left)
            train, test = found.get(TRAIN, {}), found.get(TEST, {})
            if not train and not test:
                return self._pool(found.get(None, {}), None, str(root / self.path))
        else:
            train, test = map(self._read, self.files(root))
        pool = self._pool(train, test, str(root / self.path))
        return replace(pool, remarks=(*remarks, *pool.remarks))

    def _pool(self, train: Held, test: Held | None, name: str) -> Pool:
        """Return the pool of the clients' samples; without a test part, a share is set aside."""
        import pandas as pd  # heavy: only when files are read

        parts = [train] if test is None else [train, test]
        clients = sorted({c for held in parts for c in held})
        rows = [(i, held[c]) for held in parts for i, c in enumerate(clients) if c in held]
        remedy = "training and test part need some; fetch them again"
        require(all(parts), name, "no clients", remedy)
        try:
            x, y = (np.concatenate([held[column] for _, held in rows]) for column in (0, 1))
        except ValueError as error:
            raise UserError(name, "shapes", "samples of all clients must have one shape") from error
        count = sum(len(labels) for _, labels in train.values())
        places = zip((TRAIN, TEST), parts, strict=False)  # without a test part, the one part has all
        owned = [
            (f"client {c} in {of}", len(held[c][1])) for of, held in places for c in clients if c in held
        ]
        index, text = pd.Series(0, index_of(owned)), x.dtype.kind == "U"
        refuse_not_finite(x, f"{name}: x", index)
        inputs = characters_of(x.tolist(), LETTERS, f"{name}: {TEXTS}") if text else inputs_of(x, name)
        labels, classes = self._labels(y, name, index)
        origin = np.repeat([i for i, _ in rows], [len(held[1]) for _, held in rows]).astype(np.int64)
        ours = inputs[:count], labels[:count]
        theirs = None if test is None else (inputs[count:], labels[count:])
        names, vocabulary = (tuple(map(repr, LETTERS)), len(LETTERS)) if text else (classes, 0)
        share = TEST_SHARE if test is None else 0.0
        return pool_of(ours, theirs, name, names, vocabulary, share, origin, tuple(clients), f"{name}: x")

    def _labels(self, y: np.ndarray, name: str, rows: pd.Series) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return labels, and the names of classes where they are texts.

        Args:
            y: the labels of all clients.
            name: the file.
            rows: where they are from, see `refuse_not_finite`.
        """
        if y.dtype.kind not in "OSU":
            return any_labels_of(y, f"{name}: labels", self.labels, rows), ()
        texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in y.ravel().tolist()]
        import pandas as pd

        column = pd.Series(texts, rows.index, dtype=object)
        return labels_of_texts(column, name, self.label or "labels", self.labels)

    def _read(self, path: Path) -> Held:
        """Return the clients of a file; those without a sample are left out."""
        try:
            import h5py
        except ImportError as error:
            raise UserError("data.source.name", "tff", 'needs h5py: pip install "mpifl[tff]"') from error
        found: Held = {}
        with reading(path, "an HDF5 file"), h5py.File(path) as file:
            require(EXAMPLES in file, str(path), [*file], f"has no group {EXAMPLES}; fetch it again")
            for name in each([*file[EXAMPLES]], "reading clients", "clients"):
                x, y = self._samples(file[EXAMPLES][name], f"{path}: client {name}")
                client = clean_name(name, f"{path}: clients")
                require(client not in found, f"{path}: client {client}", "twice", TWICE)
                if len(y):
                    found[client] = x, y
        return found

    def _read_sqlite(self, path: Path) -> dict[str | None, Held]:
        """Return the clients of each part of an SQLite file, None for rows that name no part."""
        rows: dict[tuple[str | None, str], list[dict[str, Any]]] = {}
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with reading(path, "an SQLite file of TensorFlow Federated"), doing("reading samples"):
            with closing(sqlite3.connect(address, uri=True)) as file:
                file.execute("pragma trusted_schema = off")
                for client, part, example in file.execute(QUERY):
                    client = clean_name("" if client is None else str(client), f"{path}: client_id")
                    rows.setdefault((part or None, client), []).append(_shaped(example_of(example)))
            found: dict[str | None, Held] = {}
            for (part, client), examples in rows.items():
                where = f"{path}: client {client}"
                names = set.intersection(*(set(example) for example in examples))
                columns = {name: [example[name] for example in examples] for name in sorted(names)}
                samples = self._samples(_Columns(columns), where)
                if len(samples[1]):
                    found.setdefault(part, {})[client] = samples
        return found

    def _samples(self, group: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples and labels of a client."""
        if TEXTS in group:
            return self._characters([bytes(t).decode("utf-8", "replace") for t in group[TEXTS][()]])
        wanted = LABEL_NAMES if self.label is None else (self.label,)
        x = next((name for name in INPUTS if name in group), None)
        y = next((name for name in wanted if name in group), None)
        remedy = f"needs one of {', '.join(INPUTS)} and one of {', '.join(wanted)}"
        if x is None or y is None:
            raise UserError(where, ", ".join(group), remedy)
        samples, labels = np.asarray(group[x][()]), np.asarray(group[y][()])
        for name, array in ((x, samples), (y, labels)):
            require(array.ndim > 0, where, name, "is one value: give an array, one for each sample")
        require(len(samples) == len(labels), where, len(labels), f"labels for {len(samples)} samples")
        return samples, labels

    def _characters(self, snippets: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return a text of `length` characters and the number of the next one, for each place in snippets.

        Characters that LEAF's alphabet lacks are left out.
        """
        number = {character: i for i, character in enumerate(LETTERS)}
        known = ["".join(c for c in snippet if c in number) for snippet in snippets]
        places = [(s, i) for s in known for i in range(len(s) - self.length)]
        x = np.array([s[i : i + self.length] for s, i in places], f"U{self.length}")
        return x, np.array([number[s[i + self.length]] for s, i in places], np.int64)


class _Columns(dict[str, list[Any]]):
    """Columns of a client by name; `[()]` returns the array of one, as for a data set in an HDF5 file."""

    def __getitem__(self, name: str) -> Any:
        return {(): super().__getitem__(name)}


def _shaped(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example with its pictures reshaped, and lists of one value as that value.

    An Example stores no shapes: `pixels` are a square, `image` a square of three colours, in bytes.
    """
    out: dict[str, Any] = {}
    for name, value in example.items():
        if isinstance(value, list):  # of bytes
            out[name] = value[0] if len(value) == 1 else value
            continue
        side = isqrt(len(value) if name == "pixels" else len(value) // 3)
        if name == "pixels" and side**2 == len(value):
            value = value.reshape(side, side)
        elif name == "image" and 3 * side**2 == len(value):
            value = value.reshape(side, side, 3)
        if name in ("pixels", "image") and value.dtype == np.int64 and value.min() >= 0 and value.max() < 256:
            value = value.astype(np.uint8)
        out[name] = value[0] if value.shape == (1,) and name not in INPUTS else value
    return out


def example_of(data: bytes) -> dict[str, Any]:
    """Return the features of a serialized `tf.train.Example`: name -> bytes [..], float32 [n] or int64 [n].

    Raises:
        ValueError: the bytes are not a `tf.train.Example`.
    """
    found: dict[str, Any] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            name = b"".join(_messages(entry, 1)).decode()
            for kind, values in _fields(b"".join(_messages(entry, 2))):
                found[name] = _list_of(kind, values)
    return found


def _list_of(kind: int, data: Any) -> Any:
    """Return the values of a BytesList (1), FloatList (2) or Int64List (3)."""
    if kind == 1:
        return list(_messages(data, 1))
    fields = [value for number, value in _fields(data) if number == 1]
    packed = b"".join(v if isinstance(v, bytes) else v.to_bytes(4, "little") for v in fields if kind == 2)
    if kind == 2:
        return np.frombuffer(packed, "<f4")
    numbers = (n for v in fields for n in (_varints(v) if isinstance(v, bytes) else (v,)))
    return np.array([n - (n >> 63 << 64) for n in numbers], np.int64)


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    """Yield the bytes of those fields of a message that have this number."""
    for found, value in _fields(data):
        if found == number:
            if not isinstance(value, bytes):
                raise ValueError(f"field {number} is a number")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field of a message in the wire format of protocol buffers."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if kind == BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError("no protocol buffer, or one that was cut")
        piece = data[at : at + size]
        yield tag >> 3, piece if kind == BYTES else int.from_bytes(piece, "little")
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint (7 bits a byte, least significant first) and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value & (2**64 - 1), at
    raise ValueError("a number without an end")


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value
