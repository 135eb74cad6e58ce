"""A partition that is read from a file, written by mpifl or by another simulator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import CLASSES, SPLITS
from mpifl.core.options import ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, everyone, from_lists, hold_out
from mpifl.data.partition.table import PartitionTable, facts_of, read
from mpifl.data.pool import Pool
from mpifl.data.scenario import TEST_SHARE, Scenario, ScenarioSpec, check_test_share
from mpifl.data.scenarios.relations import PermuteFeatures, PermuteTargets, PermuteTokens
from mpifl.data.scenarios.usual import strata, test_like
from mpifl.data.sources.columns import lines_on_names
from mpifl.data.transforms import Border, Colour, Noise, Op, Patch, PermuteLabels, Rotate

VERSION = 1
OPS: dict[str, type[Op]] = {
    op.__name__: op
    for op in (
        *(Border, Colour, Noise, Patch, PermuteLabels, Rotate),
        *(PermuteFeatures, PermuteTargets, PermuteTokens),
    )
}
ALTERED = "its first line was altered: export it again, or remove that line"


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
        return [Path(os.path.expanduser(self.path))]

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition, with the facts and operations in a file of mpifl."""
        facts = facts_of(self.files()[0], "path")
        if not facts:
            table = read(self.files()[0], "path")
            own = {"clients": list(table.clients)}
            groups = self._groups(table)
            return ScenarioSpec(
                lambda: self._splits(pool, key, table),
                groups,
                facts=own,
                remarks=lambda splits: [
                    *self._remarks(splits, [*self._numbered_by_part(pool, table), *_shared(table)]),
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
        require(
            facts["version"] == VERSION, "path", self.path, f"is of version {facts['version']}: update mpifl"
        )
        for name, here in (("samples", len(pool.labels)), ("train", pool.num_train)):
            what = "samples" if name == "samples" else "training samples"
            made = f"was made for {facts['source']} with {facts[name]} {what}"
            remedy = f"{made}, and the source has {here}: name that source"
            require(facts[name] == here, "path", self.path, remedy)
        groups, blocks = (
            None if facts[name] is None else np.array(facts[name], np.int64) for name in ("groups", "blocks")
        )
        return ScenarioSpec(
            lambda: self._splits(pool, key, read(self.files()[0], "path")),
            groups,
            blocks,
            ops=ops_of(facts["ops"]),
            split_ops={name: ops_of(ops) for name, ops in facts["split_ops"].items()},
            materialize=bool(facts["materialize"]),
            resize=facts["resize"],
            normalise=facts["normalise"],
            names=tuple(facts["names"]),
            targets=facts["targets"],
            facts=facts["facts"],
            remarks=self._remarks,
        )

    def _groups(self, table: PartitionTable) -> np.ndarray | None:
        """Return the group of each client, if the file has a column of them."""
        if table.group is None:
            return None
        groups = np.full(len(table.clients), -1, np.int64)
        groups[table.client] = table.group
        if (groups[table.client] != table.group).any():
            k = int(table.client[np.flatnonzero(groups[table.client] != table.group)[0]])
            remedy = f"client {table.clients[k]} is in several groups: give it one"
            raise UserError("path", self.path, remedy)
        return np.unique(groups, return_inverse=True)[1]

    def _splits(self, pool: Pool, key: Key, table: PartitionTable) -> dict[str, Csr]:
        self._check(pool, table)
        names = list(dict.fromkeys([*SPLITS, *np.unique(table.part).tolist()]))
        splits = {name: self._rows(table, name) for name in names}
        bare = np.flatnonzero(splits["train"].sizes == 0)
        if len(bare):
            who = table.clients[int(bare[0])]
            raise UserError("path", self.path, f"client {who} has no training samples: give it some")
        splits["train"], splits["test"] = self._test(pool, key, table, splits)
        if not len(splits["val"].index):  # type: ignore[arg-type]
            splits["train"], splits["val"] = self._held_out(splits["train"], key)
        else:
            remedy = "the file says which samples validate: leave it out"
            require(self.validation is None, "validation", self.validation, remedy)
        return splits

    def _check(self, pool: Pool, table: PartitionTable) -> None:
        """Refuse samples that the source does not have, labels unlike its own, and unknown parts."""
        most = int(table.sample.max())
        few = f"names sample {most}, and the source has {len(pool.labels)}: name the source that it is of"
        require(most < len(pool.labels), "path", self.path, few)
        least, largest = int(table.client.min()), int(table.client.max())
        require(least >= 0 and largest < len(table.clients), "path", self.path, ALTERED)
        known = (*SPLITS, *table.facts.get("split_ops", ()))
        for part in np.unique(table.part):
            require(
                part in known, "path", self.path, f"names part {str(part)!r}: known are {', '.join(known)}"
            )
        if table.label is not None and self.labels == "check" and pool.label_kind == CLASSES:
            wrong = np.flatnonzero(np.asarray(pool.labels)[table.sample] != table.label)
            if len(wrong):
                i = int(wrong[0])
                says = (
                    f"{len(wrong)} labels differ; sample {table.sample[i]} has label {table.label[i]} in it"
                )
                here = f"{says} and {pool.labels[table.sample[i]]} in the source: another data set or order"
                raise UserError("path", self.path, f"{here}; labels: ignore reads it")

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

    @staticmethod
    def _numbered_by_part(pool: Pool, table: PartitionTable) -> list[str]:
        """Return words about a foreign file that seems to number the source's test part from 0."""
        tested = table.sample[table.part == "test"]
        if pool.num_train == len(pool.labels) or not len(tested) or tested.max() >= pool.num_train:
            return []
        says = f"all {len(tested)} test samples are of the source's training part"
        begins = f"its test part begins at {pool.num_train}: add that where the file numbers it from 0"
        return [f"{says} ({begins})"]

    @staticmethod
    def _rows(table: PartitionTable, part: str) -> Csr:
        chosen = np.flatnonzero(table.part == part)
        order = chosen[np.argsort(table.client[chosen], kind="stable")]
        sizes = np.bincount(table.client[chosen], minlength=len(table.clients))
        return from_lists(np.split(table.sample[order], np.cumsum(sizes)[:-1]))

    def _test(self, pool: Pool, key: Key, table: PartitionTable, splits: dict[str, Csr]) -> tuple[Csr, Csr]:
        """Return (train, test) of the file, or as the key `test` says."""
        train, test, clients = splits["train"], splits["test"], len(table.clients)
        if test.index is not None and len(test.index):
            remedy = "the file says which samples test: leave it out"
            require(self.test is None, "test", self.test, remedy)
            return train, test
        if self.test is None and table.facts:  # exported from a federation in which nobody is tested
            return train, test
        if self.test == "own":
            return hold_out(self._mixed(train, key.of("own")), self.test_share)
        assert train.index is not None
        assert splits["val"].index is not None
        named = np.unique(np.concatenate([train.index, splits["val"].index]))
        tested = int((named >= pool.num_train).sum())
        says = f"{tested} samples that train or validate in the file are of the source's test part"
        remedy = f"{says}, on which clients would be tested; use own, or leave their rows out"
        require(not tested, "test", self.test or "like", remedy)
        if self.test == "all":
            return train, everyone(pool.test, clients)
        labels = strata(pool)
        owner = np.repeat(np.arange(clients), train.sizes)
        return train, test_like(pool, labels[train.index], owner, clients, key.of("test").numpy())

    def _held_out(self, train: Csr, key: Key) -> tuple[Csr, Csr]:
        held = self.validation or 0.0
        return hold_out(self._mixed(train, key.of("validation")) if held else train, held)

    @staticmethod
    def _mixed(rows: Csr, key: Key) -> Csr:
        """Return the rows in random order: those of a file may be sorted by label."""
        held = [np.asarray(rows.of(k)) for k in range(len(rows.sizes))]
        return from_lists([key.of(k).numpy().permutation(samples) for k, samples in enumerate(held)])


def _shared(table: PartitionTable) -> list[str]:
    """Return words that count samples of a foreign file which several clients hold to train or to test."""
    found = []
    for what, parts in (("training", ("train", "val")), ("test", ("test",))):
        of = np.isin(table.part, parts)
        pairs = np.unique(np.stack([table.sample[of], table.client[of]]), axis=1)
        sample, clients = np.unique(pairs[0], return_counts=True)
        if (twice := clients > 1).any():
            first = pairs[1][pairs[0] == sample[twice][0]][:2]
            who = " and ".join(table.clients[k] for k in first.tolist())
            says = f"{int(twice.sum())} of {len(sample)} {what} samples are held by several clients"
            found.append(f"{says} (sample {int(sample[twice][0])} by {who})")
    return found


def exported(spec: ScenarioSpec, pool: Pool, source: str, of: Mapping[str, Any]) -> PartitionTable:
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
    rows = {name: csr for name, csr in spec.splits().items() if csr.sizes.any()}
    held = [np.asarray(_indices(csr, pool)) for csr in rows.values()]
    client, part, sample = (
        np.concatenate(columns)
        for columns in (
            [np.repeat(np.arange(len(csr.sizes)), csr.sizes) for csr in rows.values()],
            [np.full(len(index), name) for name, index in zip(rows, held, strict=True)],
            held,
        )
    )
    order = np.argsort(client, kind="stable")
    facts = {
        **of,
        "version": VERSION,
        "source": source,
        "samples": len(pool.labels),
        "train": pool.num_train,
        "clients": len(next(iter(rows.values())).sizes),
        "groups": None if spec.groups is None else spec.groups.tolist(),
        "blocks": None if spec.blocks is None else spec.blocks.tolist(),
        "ops": [told(op) for op in spec.ops],
        "split_ops": {name: [told(op) for op in ops] for name, ops in spec.split_ops.items()},
        "materialize": spec.materialize,
        "resize": spec.resize,
        "normalise": spec.normalise,
        "names": list(spec.names),
        "targets": spec.targets,
        "facts": dict(spec.facts),
    }
    labels = np.asarray(pool.labels)
    return PartitionTable(
        client[order],
        part[order],
        sample[order].astype(np.int64),
        None if spec.groups is None else spec.groups[client[order]],
        labels[sample[order]] if labels.ndim == 1 else None,
        facts=facts,
    )


def _indices(csr: Csr, pool: Pool) -> np.ndarray:
    everything = np.arange(len(pool.labels))
    return np.concatenate([everything[csr.of(k)] for k in range(len(csr.sizes))])


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
