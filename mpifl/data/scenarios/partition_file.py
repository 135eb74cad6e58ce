"""A partition that is read from a file, written by mpifl or by another simulator.

A file is a table of client, part and sample in CSV or Parquet, or JSON lists of samples.

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
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import CLASSES, SPLITS
from mpifl.core.optional_packages import optional
from mpifl.core.options import ShareBelowOne
from mpifl.core.rng import Key
from mpifl.core.textfiles import RepeatedKey, check_file, json_of
from mpifl.data.partition.csr import Csr, everyone, from_lists, hold_out
from mpifl.data.pool import Pool
from mpifl.data.scenario import TEST_SHARE, Scenario, ScenarioSpec, check_test_share
from mpifl.data.scenarios.relations import PermuteFeatures, PermuteTargets, PermuteTokens
from mpifl.data.scenarios.usual import strata, test_like
from mpifl.data.sources.base import in_one_line
from mpifl.data.sources.columns import lines_on_names
from mpifl.data.transforms import Border, Colour, Noise, Op, Patch, PermuteLabels, Rotate

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
VERSION = 1
OPS: dict[str, type[Op]] = {
    op.__name__: op
    for op in (
        *(Border, Colour, Noise, Patch, PermuteLabels, Rotate),
        *(PermuteFeatures, PermuteTargets, PermuteTokens),
    )
}
AS_WRITTEN = ("resize", "normalise", "targets", "facts")  # fields of a specification that JSON can hold
ALTERED = "its first line was altered: export it again, or remove that line"


class Table(NamedTuple):
    """Rows of a partition.

    Attributes:
        frame: int64 columns client, sample, and, where the file has them, group and label; texts in part.
        clients: names of the clients, [N].
        facts: content of the first line of a file that mpifl wrote; empty for other files.
    """

    frame: pd.DataFrame
    clients: tuple[str, ...] = ()
    facts: Mapping[str, Any] = {}

    def column(self, name: str) -> np.ndarray:
        """Return a column as an array [n]."""
        return np.asarray(self.frame[name].to_numpy())


@dataclass(frozen=True)
class PartitionFile(Scenario):
    """The partition in a file of mpifl (`mpifl data CONFIG --export split.csv`) or of another simulator.

    A file of mpifl gives exactly the exported clients: their samples, their groups, and the operations on the
    samples of each group.

    Attributes:
        path: a .csv, .parquet or .json file, relative to the working folder. A row holds client, part (train,
            val, test) and sample; samples are numbered through the source, its training part first.
        test: how clients are tested if the file has no test samples: `like`, `own` or `all`, as in scenario
            iid; null: like, or not at all if mpifl wrote the file. `like` and `all` test on the source's test
            part; clients may then not train or validate on samples of that part.
        test_share: share of each client's samples set aside for testing if test is own.
        validation: share of each client's training samples set aside for validation if the file has no
            validation samples; null: none.
        labels: `check` refuses a file whose labels, if it has any, differ from those of the source; `ignore`
            does not compare them.
    """

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    path: str = "split.csv"
    test: Literal["like", "own", "all"] | None = None
    test_share: ShareBelowOne = TEST_SHARE
    validation: ShareBelowOne | None = None
    labels: Literal["check", "ignore"] = "check"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_test_share(self.test, self.test_share)

    def files(self) -> list[Path]:
        """Return the file: if its content changes, so does the partition."""
        return [self._path]

    @property
    def _path(self) -> Path:
        return Path(os.path.expanduser(self.path))

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition, with the facts and operations in a file of mpifl."""
        facts = facts_of(self._path)
        if not facts:
            table = read(self._path)
            return ScenarioSpec(
                lambda: self._splits(pool, key, table),
                self._groups(table),
                facts={"clients": list(table.clients)},
                remarks=lambda splits: [
                    *self._remarks(splits, [*_numbered_by_part(pool, table), *_shared(table)]),
                    *lines_on_names(table.clients, f"data.scenario.path = {self.path!r}", "clients"),
                ],
            )
        try:
            return self._as_exported(facts, pool, key)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("path", self.path, ALTERED) from error

    def _as_exported(self, facts: Mapping[str, Any], pool: Pool, key: Key) -> ScenarioSpec:
        remedy = f"is of version {facts['version']}: update mpifl"
        require(facts["version"] == VERSION, "path", self.path, remedy)
        for name, what, here in (
            ("samples", "samples", len(pool.labels)),
            ("train", "training samples", pool.num_train),
        ):
            made = f"was made for {facts['source']} with {facts[name]} {what}"
            remedy = f"{made}, and the source has {here}: name that source"
            require(facts[name] == here, "path", self.path, remedy)
        groups, blocks = (
            None if facts[name] is None else np.array(facts[name], np.int64) for name in ("groups", "blocks")
        )
        return ScenarioSpec(
            lambda: self._splits(pool, key, read(self._path)),
            groups,
            blocks,
            ops=ops_of(facts["ops"]),
            split_ops={name: ops_of(ops) for name, ops in facts["split_ops"].items()},
            materialize=bool(facts["materialize"]),
            names=tuple(facts["names"]),
            remarks=self._remarks,
            **{name: facts[name] for name in AS_WRITTEN},
        )

    def _groups(self, table: Table) -> np.ndarray | None:
        """Return the group of each client, if the file has a column of them."""
        if "group" not in table.frame:
            return None
        client, group = table.column("client"), table.column("group")
        groups = np.full(len(table.clients), -1, np.int64)
        groups[client] = group
        wrong = np.flatnonzero(groups[client] != group)
        who = table.clients[client[wrong[0]]] if len(wrong) else ""
        require(not len(wrong), "path", self.path, f"client {who} is in several groups: give it one")
        return np.unique(groups, return_inverse=True)[1]

    def _splits(self, pool: Pool, key: Key, table: Table) -> dict[str, Csr]:
        self._check(pool, table)
        client, part, sample = (table.column(name) for name in ("client", "part", "sample"))
        splits = {}
        for name in dict.fromkeys([*SPLITS, *np.unique(part).tolist()]):
            chosen = np.flatnonzero(part == name)
            order = chosen[np.argsort(client[chosen], kind="stable")]
            sizes = np.bincount(client[chosen], minlength=len(table.clients))
            splits[name] = from_lists(np.split(sample[order], np.cumsum(sizes)[:-1]))
        bare = np.flatnonzero(splits["train"].sizes == 0)
        who = table.clients[bare[0]] if len(bare) else ""
        remedy = f"client {who} has no training samples: give it some"
        require(not len(bare), "path", self.path, remedy)
        splits["train"], splits["test"] = self._test(pool, key, table, splits)
        if splits["val"].sizes.any():
            remedy = "the file says which samples validate: leave it out"
            require(self.validation is None, "validation", self.validation, remedy)
        elif self.validation:
            mixed = _mixed(splits["train"], key.of("validation"))
            splits["train"], splits["val"] = hold_out(mixed, self.validation)
        return splits

    def _check(self, pool: Pool, table: Table) -> None:
        """Refuse samples that the source does not have, labels unlike its own, and unknown parts."""
        client, sample = table.column("client"), table.column("sample")
        few = f"and the source has {len(pool.labels)}: name the source that it is of"
        require(sample.max() < len(pool.labels), "path", self.path, f"names sample {sample.max()}, {few}")
        inside = client.min() >= 0 and client.max() < len(table.clients)
        require(bool(inside), "path", self.path, ALTERED)
        known = (*SPLITS, *table.facts.get("split_ops", ()))
        for part in sorted(map(str, table.frame["part"].unique())):
            remedy = f"names part {part!r}: known are {', '.join(known)}"
            require(part in known, "path", self.path, remedy)
        if "label" in table.frame and self.labels == "check" and pool.label_kind == CLASSES:
            here, label = np.asarray(pool.labels)[sample], table.column("label")
            wrong = np.flatnonzero(here != label)
            i = wrong[0] if len(wrong) else 0
            says = f"{len(wrong)} labels differ; sample {sample[i]} has label {label[i]} in it"
            remedy = f"{says} and {here[i]} in the source: another data set or order; labels: ignore reads it"
            require(not len(wrong), "path", self.path, remedy)

    def _test(self, pool: Pool, key: Key, table: Table, splits: dict[str, Csr]) -> tuple[Csr, Csr]:
        """Return (train, test) of the file, or as the key `test` says."""
        train, test, clients = splits["train"], splits["test"], len(table.clients)
        if test.sizes.any():
            remedy = "the file says which samples test: leave it out"
            require(self.test is None, "test", self.test, remedy)
            return train, test
        if self.test is None and table.facts:  # exported from a federation in which nobody is tested
            return train, test
        if self.test == "own":
            return hold_out(_mixed(train, key.of("own")), self.test_share)
        part, sample = table.column("part"), table.column("sample")
        tested = len(np.unique(sample[(sample >= pool.num_train) & np.isin(part, ("train", "val"))]))
        says = f"{tested} samples that train or validate in the file are of the source's test part"
        remedy = f"{says}, on which clients would be tested; use own, or leave their rows out"
        require(not tested, "test", self.test or "like", remedy)
        if self.test == "all":
            return train, everyone(pool.test, clients)
        assert train.index is not None
        owner = np.repeat(np.arange(clients), train.sizes)
        return train, test_like(pool, strata(pool)[train.index], owner, clients, key.of("test").numpy())

    def _remarks(self, splits: Mapping[str, Csr], more: Sequence[str] = ()) -> list[str]:
        """Return a line that counts samples used for both testing and training, or twice by a client.

        Args:
            splits: the partitions.
            more: what else the line says.
        """
        clients, found = np.arange(len(splits["train"].sizes)), []
        held = {name: csr.of_all(clients)[0] for name, csr in splits.items()}
        learnt = np.concatenate([held["train"], held["val"]])
        tested = np.unique(np.concatenate([held[name] for name in held if name not in ("train", "val")]))
        if both := int(np.isin(tested, learnt).sum()):
            found.append(f"{both} of {len(tested)} test samples also train or validate")
        most = 1 + max(int(samples.max(initial=0)) for samples in held.values())
        own = {name: np.repeat(clients, csr.sizes) * most + held[name] for name, csr in splits.items()}
        val = np.unique(own["val"])
        if both := int(np.isin(val, own["train"]).sum()):
            found.append(f"{both} of {len(val)} validation samples also train their client")
        if repeated := sum(len(rows) - len(np.unique(rows)) for rows in own.values()):
            found.append(f"{repeated} rows repeat a sample of their client")
        found += more
        return [f"data.scenario.path = {self.path!r}: {'; '.join(found)}"] if found else []


def _mixed(rows: Csr, key: Key) -> Csr:
    """Return the rows in random order: those of a file may be sorted by label."""
    held = [np.asarray(rows.of(k)) for k in range(len(rows.sizes))]
    return from_lists([key.of(k).numpy().permutation(samples) for k, samples in enumerate(held)])


def _numbered_by_part(pool: Pool, table: Table) -> list[str]:
    """Return words about a foreign file that seems to number the source's test part from 0."""
    tested = table.column("sample")[table.column("part") == "test"]
    if pool.num_train == len(pool.labels) or not len(tested) or tested.max() >= pool.num_train:
        return []
    says = f"all {len(tested)} test samples are of the source's training part"
    begins = f"its test part begins at {pool.num_train}: add that where the file numbers it from 0"
    return [f"{says} ({begins})"]


def _shared(table: Table) -> list[str]:
    """Return words that count samples of a foreign file which several clients hold to train or to test."""
    found = []
    for what, parts in (("training", ("train", "val")), ("test", ("test",))):
        of = table.frame[table.frame["part"].isin(parts)]
        pairs = np.unique(of[["sample", "client"]].to_numpy().T, axis=1)
        sample, clients = np.unique(pairs[0], return_counts=True)
        if (twice := clients > 1).any():
            first = pairs[1][pairs[0] == sample[twice][0]][:2]
            who = " and ".join(table.clients[k] for k in first.tolist())
            says = f"{int(twice.sum())} of {len(sample)} {what} samples are held by several clients"
            found.append(f"{says} (sample {int(sample[twice][0])} by {who})")
    return found


def exported(spec: ScenarioSpec, pool: Pool, source: str, of: Mapping[str, Any]) -> Table:
    """Return the table of a scenario.

    Args:
        spec: the specification that the scenario composed.
        pool: the samples.
        source: the name of their source.
        of: further facts for the first line of the file.

    Raises:
        UserError: clients draw their samples when they are visited, or an operation is not one of mpifl's.
    """
    if spec.drift is not None or spec.public or spec.group_test_sets:
        remedy = "its clients draw their samples when they are visited: there is no partition to export"
        raise UserError("data.scenario.name", of.get("scenario"), remedy)
    import pandas as pd

    rows = {name: csr for name, csr in spec.splits().items() if csr.sizes.any()}
    clients = np.arange(len(next(iter(rows.values())).sizes))
    held = {name: csr.of_all(clients)[0] for name, csr in rows.items()}
    frame = pd.DataFrame(
        {
            "client": np.concatenate([np.repeat(clients, csr.sizes) for csr in rows.values()]),
            "part": np.repeat(list(held), [len(index) for index in held.values()]),
            "sample": np.concatenate(list(held.values())),
        }
    ).sort_values("client", kind="stable", ignore_index=True)
    if spec.groups is not None:
        frame["group"] = spec.groups[frame["client"]]
    if pool.labels.ndim == 1:
        frame["label"] = np.asarray(pool.labels)[frame["sample"]]
    facts = {
        **of,
        "version": VERSION,
        "source": source,
        "samples": len(pool.labels),
        "train": pool.num_train,
        "clients": len(clients),
        "groups": spec.groups,
        "blocks": spec.blocks,
        "ops": [told(op) for op in spec.ops],
        "split_ops": {name: [told(op) for op in ops] for name, ops in spec.split_ops.items()},
        "materialize": spec.materialize,
        "names": spec.names,
        **{name: getattr(spec, name) for name in AS_WRITTEN},
    }
    return Table(frame, facts=facts)


def told(op: Op) -> dict[str, Any]:
    """Return an operation as a mapping with its name and options."""
    if OPS.get(type(op).__name__) is not type(op):
        remedy = "is an operation of your own, which no file can hold; export a scenario without it"
        raise UserError("data.scenario", type(op).__name__, remedy)
    options = asdict(op)  # type: ignore[call-overload]
    return {"op": type(op).__name__, **{name: _written(value) for name, value in options.items()}}


def _written(value: Any) -> Any:
    """Return an option in a form that JSON can hold; arrays keep their type."""
    return {"array": value.tolist(), "dtype": str(value.dtype)} if isinstance(value, np.ndarray) else value


def ops_of(trees: list[dict[str, Any]]) -> tuple[Op, ...]:
    """Return the operations that mappings from `told` describe."""
    options = [{name: _option(value) for name, value in tree.items() if name != "op"} for tree in trees]
    return tuple(OPS[tree["op"]](**given) for tree, given in zip(trees, options, strict=True))


def _option(value: Any) -> Any:
    """Return the option that a JSON value stands for, a tuple for a list, or an array."""
    if isinstance(value, dict):
        return np.array(value["array"], value["dtype"])
    return tuple(map(_option, value)) if isinstance(value, list) else value


def write(table: Table, path: Path, key: str) -> None:
    """Write a table as .csv or .parquet.

    Args:
        table: the rows.
        path: the file.
        key: the option that names the file, for error messages.

    Raises:
        UserError: the file has another ending, Parquet lacks pyarrow, or the file cannot be written.
    """
    check_format(path, key, FORMATS[:2])
    facts = json.dumps(dict(table.facts), sort_keys=True, default=lambda value: value.tolist())
    try:
        if path.suffix == ".csv":
            with path.open("w", newline="") as file:
                file.write(f"# {MARK} {facts}\n")
                table.frame.to_csv(file, index=False)
        else:
            import pyarrow as pa
            from pyarrow import parquet

            rows = pa.Table.from_pandas(table.frame, preserve_index=False)
            noted = {**(rows.schema.metadata or {}), MARK.encode(): facts.encode()}
            parquet.write_table(rows.replace_schema_metadata(noted), path)
    except OSError as error:
        raise UserError(key, str(path), f"cannot be written ({error.strerror or error})") from error


def read(path: Path) -> Table:
    """Read a table from a file with one of the endings `FORMATS`.

    Raises:
        UserError: the file cannot be read, lacks a column, or has invalid values in one.
    """
    import pandas as pd

    facts = facts_of(path)
    with _reading(path):
        if path.suffix == ".json":
            found = _json(path)
        else:
            found = _csv(path, facts) if path.suffix == ".csv" else pd.read_parquet(path, engine="pyarrow")
    chosen = {ours: old for ours, olds in COLUMNS.items() for old in olds[::-1] if old in found}
    for ours in ("client", "sample"):
        lacks = f"has no column for the {ours}: call it {' or '.join(COLUMNS[ours])}"
        require(ours in chosen, "path", str(path), lacks)
    require(len(found) > 0, "path", str(path), "holds no row: give client and sample of some")
    client, clients = _numbered(found[chosen["client"]], facts, path)
    columns: dict[str, Any] = {"client": client, "part": "train"}
    if "part" in chosen:
        columns["part"] = [PARTS.get(part, part) for part in _texts(found[chosen["part"]], "part", path)]
    for name in ("sample", "group", "label"):
        if name in chosen:
            columns[name] = _whole(found[chosen[name]], name, path)
    return Table(pd.DataFrame(columns), clients, facts)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the content of the first line of a file that mpifl wrote; empty for files of other programs."""
    check_format(path, "path", FORMATS)
    check_file(path, "path")
    text = ""
    with _reading(path):
        if path.suffix == ".parquet":
            from pyarrow import parquet

            text = ((parquet.read_schema(path).metadata or {}).get(MARK.encode()) or b"").decode()
        elif path.suffix == ".csv":
            with path.open() as file:
                line = file.readline()
            text = line.removeprefix(f"# {MARK} ") if line.startswith(f"# {MARK} ") else ""
        found = json_of(text) if text else {}
        require(isinstance(found, dict), "path", str(path), "was altered in its first line: export it again")
    return dict(found)


def check_format(path: Path, key: str, formats: tuple[str, ...]) -> None:
    """Refuse a file with another ending, and Parquet if pyarrow is missing."""
    require(path.suffix in formats, key, str(path), f"use a file that ends in {', '.join(formats)}")
    if path.suffix == ".parquet":
        optional("pyarrow", "parquet", key, str(path))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the exceptions of a reader into a `UserError` that names the file."""
    try:
        yield
    except UserError:
        raise
    except RepeatedKey as error:
        raise UserError("path", str(path), str(error)) from error
    except Exception as error:
        remedy = f"cannot be read as a partition ({in_one_line(error)}); give a table of clients and samples"
        raise UserError("path", str(path), remedy) from error


def _csv(path: Path, facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return a CSV file without its leading # lines; clients and parts of other programs stay text."""
    import pandas as pd

    texts = () if facts else (*COLUMNS["client"], *COLUMNS["part"])  # in files of ours, clients are numbers
    types, begin = dict.fromkeys(texts, str), 0
    with path.open("rb") as file:
        while file.readline().startswith(b"#"):
            begin = file.tell()
        file.seek(begin)
        return pd.read_csv(file, dtype=types, keep_default_na=False, skipinitialspace=True)


def _json(path: Path) -> pd.DataFrame:
    """Return the rows of a JSON mapping from clients to samples, or to those of each part."""
    import pandas as pd

    tree = json_of(path.read_bytes())
    require(isinstance(tree, dict), "path", str(path), "must map clients to lists of samples")
    rows: list[tuple[str, str, Any]] = []
    for client, held in tree.items():
        parts = held if isinstance(held, dict) else {"train": held}
        rows += [(client, part, sample) for part, samples in parts.items() for sample in samples]
    return pd.DataFrame(rows, columns=["client", "part", "sample"])


def _numbered(column: pd.Series, facts: Mapping[str, Any], path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the client number of each row, and the names of all clients.

    Names that are all numbers are sorted as numbers, other names as texts. If different texts are the same
    number, such as 1 and 01, all names are texts.
    """
    import pandas as pd

    if not pd.api.types.is_integer_dtype(column):
        texts, row = np.unique(_texts(column, "client", path), return_inverse=True)
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


def _texts(column: pd.Series, name: str, path: Path) -> np.ndarray:
    """Return a column as texts; refuse empty ones."""
    texts = np.array([str(value).strip() for value in column])
    bare = np.flatnonzero(column.isna().to_numpy() | (texts == ""))
    row = int(bare[0]) + 1 if len(bare) else 0
    require(not len(bare), "path", str(path), f"has no {name} in row {row}: name one in each row")
    return texts


def _whole(column: pd.Series, name: str, path: Path) -> np.ndarray:
    """Return a column as whole numbers; refuse negative ones and other values."""
    import pandas as pd

    numbers = pd.to_numeric(column, errors="coerce")
    wrong = np.flatnonzero(~(numbers.notna() & (numbers >= 0) & (numbers == np.floor(numbers))).to_numpy())
    row = int(wrong[0]) if len(wrong) else 0
    says = f"{name} {str(column.iloc[row])!r} of row {row + 1} is not a number from zero"
    remedy = f"{says}: give whole numbers"
    require(not len(wrong), "path", str(path), remedy)
    return np.asarray(numbers.to_numpy(np.int64))
