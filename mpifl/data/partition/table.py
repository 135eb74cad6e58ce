"""Partitions in files: a table of client, part and sample in CSV or Parquet, or JSON lists of samples.

`sample` numbers the samples of the source, its training part first, then its test part: sample 0 of MNIST is
the first image of its training files, sample 60,000 the first of its test files. Rows of one client and part
are in the order in which the client holds them.

A file that mpifl wrote begins with a line of JSON, `# mpifl partition {...}` (in Parquet: metadata of that
name), which says what the scenario does to the samples of each group. Files of other programs have no such
line. They are

- CSV or Parquet with a column for the client (`client`, `client_id` or `user_id`) and one for the sample
  (`sample`, `sample_id`, `image_id` or `index`), with or without `part` (or `split`), `group`, and `label`
  (or `class`): `user_id,image_id,class` are the columns of the federated vision data sets (Hsu, Qi and
  Brown, ECCV 2020);
- JSON that maps a client to its samples, `{"0": [4, 17], "1": [3]}`, or to those of each part,
  `{"0": {"train": [4, 17], "test": [3]}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.textfiles import RepeatedKey, check_file, json_of

if TYPE_CHECKING:
    import pandas as pd

FORMATS = (".csv", ".parquet", ".json")
MARK = "mpifl partition"
COLUMNS = {
    "client": ("client", "client_id", "user_id"),
    "part": ("part", "split"),
    "sample": ("sample", "sample_id", "image_id", "index"),
    "group": ("group",),
    "label": ("label", "class"),
}  # our name -> names in files
PARTS = {"training": "train", "validation": "val", "valid": "val", "testing": "test"}  # name in files -> ours


@dataclass(frozen=True)
class PartitionTable:
    """Rows of a partition.

    Attributes:
        client: int64 [n], number of the client of each row.
        part: [n], train, val, test or the name of a further test set.
        sample: int64 [n], the address of the sample in the pool.
        group: int64 [n], the group of the client, or None.
        label: int64 [n], the label of the sample in the source, or None.
        clients: names of the clients, [N].
        facts: content of the first line of a file that mpifl wrote; empty for other files.
    """

    client: np.ndarray
    part: np.ndarray
    sample: np.ndarray
    group: np.ndarray | None = None
    label: np.ndarray | None = None
    clients: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def write(table: PartitionTable, path: Path, key: str) -> None:
    """Write a table as .csv or .parquet.

    Args:
        table: the rows.
        path: the file.
        key: the option that names the file, for error messages.

    Raises:
        UserError: the file has another ending, Parquet lacks pyarrow, or the file cannot be written.
    """
    import pandas as pd

    check_format(path, key, FORMATS[:2])
    columns = {name: getattr(table, name) for name in COLUMNS}
    frame = pd.DataFrame({name: values for name, values in columns.items() if values is not None})
    facts = json.dumps(dict(table.facts), sort_keys=True, default=lambda value: value.tolist())
    try:
        if path.suffix == ".csv":
            with path.open("w", newline="") as file:
                file.write(f"# {MARK} {facts}\n")
                frame.to_csv(file, index=False)
        else:
            import pyarrow as pa
            from pyarrow import parquet

            rows = pa.Table.from_pandas(frame, preserve_index=False)
            noted = {**(rows.schema.metadata or {}), MARK.encode(): facts.encode()}
            parquet.write_table(rows.replace_schema_metadata(noted), path)
    except OSError as error:
        raise UserError(key, str(path), f"cannot be written ({error.strerror or error})") from error


def read(path: Path, key: str) -> PartitionTable:
    """Read a table.

    Args:
        path: a file with one of the endings `FORMATS`.
        key: the key that names the file, for error messages.

    Raises:
        UserError: the file cannot be read, lacks a column, or has invalid values in one.
    """
    facts = facts_of(path, key)
    frame = _json_frame(path, key) if path.suffix == ".json" else _frame(path, key, facts)
    require(len(frame) > 0, key, str(path), "holds no row: give client and sample of some")
    client, clients = _numbered(frame, facts, path, key)
    part = np.array([PARTS.get(p, p) for p in _texts(frame, "part", path, key)]) if "part" in frame else None
    return PartitionTable(
        client=client,
        part=np.full(len(frame), "train") if part is None else part,
        sample=_whole(frame, "sample", path, key),
        group=_whole(frame, "group", path, key) if "group" in frame else None,
        label=_whole(frame, "label", path, key) if "label" in frame else None,
        clients=clients,
        facts=facts,
    )


def facts_of(path: Path, key: str) -> dict[str, Any]:
    """Return the content of the first line of a file that mpifl wrote; empty for files of other programs."""
    check_format(path, key, FORMATS)
    check_file(path, key)
    text = ""
    with _reading(path, key):
        if path.suffix == ".parquet":
            from pyarrow import parquet

            text = ((parquet.read_schema(path).metadata or {}).get(MARK.encode()) or b"").decode()
        elif path.suffix == ".csv":
            with path.open() as file:
                line = file.readline()
            text = line.removeprefix(f"# {MARK} ") if line.startswith(f"# {MARK} ") else ""
        found = json_of(text) if text else {}
        require(isinstance(found, dict), key, str(path), "was altered in its first line: export it again")
    return dict(found)


def check_format(path: Path, key: str, formats: tuple[str, ...]) -> None:
    """Refuse a file with another ending, and Parquet if pyarrow is missing."""
    known = path.suffix in formats
    require(known, key, str(path), f"use a file that ends in {', '.join(formats)}")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise UserError(key, str(path), 'needs pyarrow: pip install "mpifl[parquet]"') from error


class _reading:
    """Turns the exceptions of a reader into a `UserError` that names the file."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RepeatedKey):
            raise UserError(self.key, str(self.path), str(error)) from error
        if isinstance(error, Exception) and not isinstance(error, UserError):
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            remedy = f"cannot be read as a partition ({text}); give a table of clients and samples"
            raise UserError(self.key, str(self.path), remedy) from error


def _frame(path: Path, key: str, facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return the columns that `COLUMNS` lists, under our names."""
    import pandas as pd

    with _reading(path, key):
        found = _csv(path, facts) if path.suffix == ".csv" else pd.read_parquet(path, engine="pyarrow")
    chosen = {ours: old for ours, olds in COLUMNS.items() for old in olds[::-1] if old in found}
    for ours in ("client", "sample"):
        lacks = f"has no column for the {ours}: call it {' or '.join(COLUMNS[ours])}"
        require(ours in chosen, key, str(path), lacks)
    return pd.DataFrame({ours: found[old] for ours, old in chosen.items()})


def _csv(path: Path, facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return a CSV file without its leading # lines; clients and parts of other programs stay text."""
    import pandas as pd

    texts = () if facts else (*COLUMNS["client"], *COLUMNS["part"])  # in files of ours, clients are numbers
    begin = 0
    with path.open("rb") as file:
        while file.readline().startswith(b"#"):
            begin = file.tell()
        file.seek(begin)
        return pd.read_csv(
            file, dtype=dict.fromkeys(texts, str), keep_default_na=False, skipinitialspace=True
        )


def _json_frame(path: Path, key: str) -> pd.DataFrame:
    """Return the rows of a JSON mapping from clients to samples, or to those of each part."""
    import pandas as pd

    with _reading(path, key):
        tree = json_of(path.read_bytes())
        require(isinstance(tree, dict), key, str(path), "must map clients to lists of samples")
        rows: list[tuple[str, str, Any]] = []
        for client, held in tree.items():
            parts = held if isinstance(held, dict) else {"train": held}
            rows += [(client, part, sample) for part, samples in parts.items() for sample in samples]
    return pd.DataFrame(rows, columns=["client", "part", "sample"])


def _numbered(
    frame: pd.DataFrame, facts: Mapping[str, Any], path: Path, key: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the client number of each row, and the names of all clients.

    Names that are all numbers are sorted as numbers, other names as texts. If different texts are the same
    number, such as 1 and 01, all names are texts.
    """
    import pandas as pd

    column = frame["client"]
    if not pd.api.types.is_integer_dtype(column):
        texts, row = np.unique(_texts(frame, "client", path, key), return_inverse=True)
        numbers = pd.to_numeric(pd.Series(texts), errors="coerce")
        whole = bool((numbers == np.floor(numbers)).all()) and bool((numbers.abs() < 2**63).all())
        if not whole or numbers.nunique() < len(texts):
            return row.astype(np.int64), tuple(map(str, texts))
        column = numbers.iloc[row]
    values = column.to_numpy(np.int64)
    if facts.get("clients"):
        return values, tuple(map(str, range(int(facts["clients"]))))
    names, number = np.unique(values, return_inverse=True)
    return number.astype(np.int64), tuple(map(str, names))


def _texts(frame: pd.DataFrame, name: str, path: Path, key: str) -> np.ndarray:
    """Return a column as texts; refuse empty ones."""
    column = frame[name]
    texts = np.array([str(value).strip() for value in column])
    bare = column.isna().to_numpy() | (texts == "")
    if bare.any():
        row = int(np.flatnonzero(bare)[0]) + 1
        raise UserError(key, str(path), f"has no {name} in row {row}: name one in each row")
    return texts


def _whole(frame: pd.DataFrame, name: str, path: Path, key: str) -> np.ndarray:
    """Return a column as whole numbers; refuse negative ones and other values."""
    import pandas as pd

    numbers = pd.to_numeric(frame[name], errors="coerce")
    good = numbers.notna() & (numbers >= 0) & (numbers == np.floor(numbers))
    if not bool(good.all()):
        row = int(np.flatnonzero(~good.to_numpy())[0])
        value = str(frame[name].iloc[row])
        remedy = f"{name} {value!r} of row {row + 1} is not a number from zero: give whole numbers"
        raise UserError(key, str(path), remedy)
    return np.asarray(numbers.to_numpy(np.int64))
