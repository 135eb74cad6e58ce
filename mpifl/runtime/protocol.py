"""Data that rank 0 and the workers exchange: tasks on the way out, report headers on the way back.

Both travel as columns and without vectors: uploads stay at the worker that made them until a mixing moves
them. Rank 0 collects all reports of a step in `GatheredReports`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import nan
from typing import Any, overload

import numpy as np
import torch

from mpifl.aggregation.update_filter import UpdateFilters
from mpifl.comm.transport import bytes_of
from mpifl.core.errors import MethodError
from mpifl.core.types import Notes, Reads
from mpifl.traffic.ledger import count_numbers

COLUMNS = ("number", "client", "num_samples")  # columns of a `ReportTable`: one number per report
COLUMN_GROUPS = ("notes", "findings", "metrics", "max_abs", "note_sizes")  # name -> one value per report
SHARED_READS = 16  # up to this number of distinct reads, every rank receives all of them
Exchanges = Mapping[tuple[str, str, int], tuple[int, int]]
Kind = tuple[
    tuple[str, int], ...
]  # table -> rows of it that are read, `MIXED` for a mixture; see `kind_of_visit`
MIXED = -1


def kind_of_visit(reads: Reads, filters: UpdateFilters, client: int) -> Kind:
    """Return how many rows of each table a client reads, and what else decides the size of its upload.

    Visits of one kind upload equally many bytes.
    """
    rows = ((name, MIXED if isinstance(r, np.ndarray) else len(r)) for name, r in reads.items())
    return (*rows, *filters.kind(client))


@dataclass(frozen=True)
class ClientTask:
    """One visit of one client, for one worker.

    Attributes:
        number: number of its report in the step.
        client: number of the client.
        visit: number of earlier visits of the client.
        reads: rows that it downloads.
        fresh: False to return the remembered upload instead of training.
        told: what the server tells the filters, by name (`UpdateFilter.told`).
        work: share of its mini-batches after which it stops; None trains on all.
    """

    number: int
    client: int
    visit: int
    reads: Reads
    fresh: bool = True
    told: Mapping[str, float] = field(default_factory=dict)
    work: Fraction | None = None

    @property
    def data_visit(self) -> int:
        """The visit on whose data the upload is made, or on whose data the remembered upload was made."""
        return self.visit - (not self.fresh)


@dataclass(frozen=True)
class TaskTable(Sequence[ClientTask]):
    """Tasks column by column.

    Attributes:
        columns: int64 [n, 4]: number of the report in the step; client; number of its earlier visits; index
            into `reads`, or -1 to return a remembered upload.
        reads: the distinct reads of the clients.
        told: see `ClientTask`.
        work: client -> share of its mini-batches, for clients that do not train on all.
    """

    columns: np.ndarray
    reads: Sequence[Reads]
    told: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[int, Fraction] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, i: int) -> ClientTask: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[ClientTask]: ...
    def __getitem__(self, i: int | slice) -> ClientTask | Sequence[ClientTask]:
        return tuple(self)[i]

    def __iter__(self) -> Iterator[ClientTask]:
        for number, client, visit, which in self.columns.tolist():
            reads, work = self.reads[which] if which >= 0 else {}, self.work.get(client)
            yield ClientTask(number, client, visit, reads, which >= 0, self.told, work)

    def split_by_rank(
        self, owners: np.ndarray, num_ranks: int
    ) -> tuple[list[TaskTable], np.ndarray, list[int]]:
        """Return the tasks split by rank: tables without columns, and the columns separately.

        If reads are few and there is nothing else per task, all ranks get the same table object.

        Args:
            owners: rank of each task [n].
            num_ranks: P, number of ranks.

        Returns:
            Tables without columns, one for each rank; the columns of all tasks in rank order; the number of
            tasks of each rank.
        """
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=num_ranks)
        columns, nothing = self.columns[order], self.columns[:0]
        if len(self.reads) <= SHARED_READS and not self.work:
            return [replace(self, columns=nothing)] * num_ranks, columns, counts.tolist()
        out, start = [], 0
        for count in counts.tolist():
            mine = columns[start : start + count]  # a view: reads are renumbered in place
            used, which = np.unique(mine[:, 3], return_inverse=True)
            skipped = int(len(used) > 0 and used[0] < 0)
            mine[:, 3] = which - skipped
            reads = [self.reads[i] for i in used[skipped:].tolist()]
            work = {k: self.work[k] for k in mine[:, 1].tolist() if k in self.work}
            out.append(TaskTable(nothing, reads, self.told, work))
            start += count
        return out, columns, counts.tolist()


@dataclass(frozen=True)
class LookPlan:
    """Which clients of a step look at which after training, and where they are.

    Attributes:
        clients: the clients of the step in the order of their reports, int64 [m].
        visits: the visit on whose data each of them looks and is looked at [m].
        owners: rank that has the task of each [m].
        pairs: whether a client (row) looks at another, bool [m, m]; None if all look at all.
    """

    clients: np.ndarray
    visits: np.ndarray
    owners: np.ndarray
    pairs: np.ndarray | None = None

    @property
    def clients_and_visits(self) -> list[tuple[int, int]]:
        """(client, visit) of each client."""
        return [*zip(self.clients.tolist(), self.visits.tolist(), strict=True)]

    def asks(self, i: int) -> bool:
        """Return whether a client, given by its place in the step, has a question."""
        return self.pairs is None or bool(self.pairs[i].any())

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how many questions [m] and answers [m] each client makes."""
        asks = np.array([self.asks(i) for i in range(len(self.clients))], np.int64)
        return asks, np.asarray(self.matrix().sum(0))

    def peers(self, i: int) -> np.ndarray:
        """Return the places of the clients that client `i` looks at, without itself."""
        others = np.arange(len(self.clients)) != i
        return np.flatnonzero(others if self.pairs is None else self.pairs[i] & others)

    def matrix(self) -> np.ndarray:
        """Return which client (row) looks at which other, bool [m, m]."""
        others = ~np.eye(len(self.clients), dtype=bool)
        return others if self.pairs is None else self.pairs & others


@dataclass(frozen=True)
class TaskBatch:
    """The tasks of one worker in one step; it travels without their columns, which `having` adds.

    Attributes:
        step: number of the server step, from 1; 0 before training.
        version: version of the server whose rows are read.
        visits: the worker's tasks.
        missing: table -> (rows that are broadcast first, their width).
        looks: who looks at whom after training; None if nobody does.
        compared: a table and its number of rows: distances to all of them are measured for the upload with
            the table's name.
        outdated: clients whose remembered uploads are too old to count if their visits or looks fail.
    """

    step: int
    version: int
    visits: Sequence[ClientTask]
    missing: Mapping[str, tuple[list[int], int]]
    looks: LookPlan | None = None
    compared: tuple[str, int] | None = None
    outdated: tuple[int, ...] = ()

    def having(self, rows: memoryview) -> TaskBatch:
        """Return a batch that came without columns, with its tasks read from the bytes of the columns."""
        assert isinstance(self.visits, TaskTable)
        columns = np.frombuffer(rows, np.int64).reshape(-1, self.visits.columns.shape[1])
        return replace(self, visits=tuple(replace(self.visits, columns=columns)))


@dataclass(frozen=True)
class ScatteredTasks:
    """The tasks of all ranks, as they are sent.

    Attributes:
        batches: batch of each rank, without the columns of its tasks.
        columns: columns of all tasks, in rank order, int64 [n, 4].
        counts: number of tasks of each rank.
    """

    batches: Sequence[TaskBatch]
    columns: np.ndarray
    counts: Sequence[int]


@dataclass(frozen=True)
class ReportHeader:
    """A report without its vectors.

    Attributes:
        number: number of the report in its step.
        client: number of the client.
        num_samples: number of the client's training samples.
        fresh: False for a remembered upload.
        notes: notes of the method, from the visit and from the second look.
        findings: values that the server computes where the upload is; they cause no traffic.
        metrics: numbers for the observer.
        max_abs: upload -> largest absolute value of each of its components [C].
        sizes: upload -> how many numbers it has.
        widths: upload -> how many numbers each component has.
        bytes: upload -> its bytes as a federation would send it.
        shapes: upload -> its shape, [d] or [C, d].
        exchanges: (kind, direction, client) -> (numbers, messages) exchanged with peers in the second look.
        unsent: names of uploads and notes that are not sent and cause no traffic.
    """

    number: int
    client: int
    num_samples: int
    fresh: bool
    notes: Mapping[str, Any]
    findings: Mapping[str, Any]
    metrics: Mapping[str, float]
    max_abs: Mapping[str, list[float]]
    sizes: Mapping[str, int]
    widths: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    exchanges: Exchanges = field(default_factory=dict)
    unsent: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def shaped(self, name: str, components: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an upload in the shape in which it was reported, from its components."""
        return components[0] if len(self.shapes[name]) == 1 else torch.stack(list(components))

    def having(
        self, notes: Mapping[str, Any], findings: Mapping[str, Any], exchanges: Exchanges
    ) -> ReportHeader:
        """Return this header with what a second look has found."""
        notes, findings = {**self.notes, **notes}, {**findings, **self.findings}
        return replace(self, notes=notes, findings=findings, exchanges=exchanges)

    @property
    def note_sizes(self) -> Mapping[str, int]:
        """Note -> how many numbers it has."""
        return {name: count_numbers(value) for name, value in self.notes.items()}

    @property
    def form(self) -> tuple[Any, ...]:
        """Properties that are equal for all reports of a table, such as names and shapes."""
        notes, findings = (tuple((n, np.shape(v)) for n, v in x.items()) for x in (self.notes, self.findings))
        sent = (tuple(x.items()) for x in (self.sizes, self.widths, self.bytes))
        return (self.fresh, notes, findings, tuple(self.metrics), *sent, self.unsent)


@dataclass(frozen=True)
class ReportTable:
    """Reports of one form without their vectors, column by column; see `ReportHeader`.

    Attributes:
        number: int64 [m], ascending.
        client: int64 [m].
        num_samples: int64 [m].
        fresh: the same for all reports.
        notes: name -> [m, ...].
        findings: name -> [m, ...].
        metrics: name -> float64 [m].
        max_abs: upload -> float64 [m, C].
        sizes: upload -> size, the same for all reports.
        widths: upload -> width, the same for all reports.
        bytes: upload -> bytes, the same for all reports.
        note_sizes: note -> how many numbers it has, int64 [m].
        exchanges: the sums over all reports.
        unsent: the same for all reports.
    """

    number: np.ndarray
    client: np.ndarray
    num_samples: np.ndarray
    fresh: bool
    notes: Mapping[str, np.ndarray]
    findings: Mapping[str, np.ndarray]
    metrics: Mapping[str, np.ndarray]
    max_abs: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]
    widths: Mapping[str, int]
    bytes: Mapping[str, int]
    note_sizes: Mapping[str, np.ndarray]
    exchanges: Exchanges
    unsent: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.number)

    def header(self) -> ReportHeader:
        """Return the only report of this table."""
        return ReportHeader(
            number=int(self.number[0]),
            client=int(self.client[0]),
            num_samples=int(self.num_samples[0]),
            fresh=self.fresh,
            notes={name: column[0] for name, column in self.notes.items()},
            findings={name: column[0] for name, column in self.findings.items()},
            metrics={name: float(column[0]) for name, column in self.metrics.items()},
            max_abs={name: column[0].tolist() for name, column in self.max_abs.items()},
            sizes=self.sizes,
            widths=self.widths,
            bytes=self.bytes,
            exchanges=self.exchanges,
            unsent=self.unsent,
        )

    def _columns(self) -> list[np.ndarray]:
        own = [getattr(self, name) for name in COLUMNS]
        return [*own, *(c for name in COLUMN_GROUPS for c in getattr(self, name).values())]

    def _with(self, columns: Iterable[np.ndarray]) -> ReportTable:
        """Return the same table with other columns, in the order of `_columns`."""
        left = iter(columns)
        changed: dict[str, Any] = {name: next(left) for name in COLUMNS}
        for name in COLUMN_GROUPS:
            changed[name] = {key: next(left) for key in getattr(self, name)}
        return replace(self, **changed)

    def _row_type(self) -> np.dtype[Any]:
        return np.dtype([(str(i), c.dtype, c.shape[1:]) for i, c in enumerate(self._columns())])

    def packed(self) -> tuple[ReportTable, memoryview]:
        """Return the table without its reports, which is equal on all ranks, and the bytes of the reports.

        A table whose columns hold Python objects stays whole.
        """
        kind = self._row_type()
        if kind.hasobject:
            return self, memoryview(b"")
        rows = np.empty(len(self), kind)
        for name, column in zip(kind.names or (), self._columns(), strict=True):
            rows[name] = column
        return self._with(c[:0] for c in self._columns()), bytes_of(rows)

    def unpacked(self, rows: Sequence[memoryview]) -> tuple[ReportTable, np.ndarray]:
        """Return this table with the reports of several ranks, and each report's index into `rows` [m].

        Args:
            rows: bytes of each rank's reports, as `packed` returned them.
        """
        if len(self):
            return self, np.zeros(len(self), np.int64)
        kind = self._row_type()
        found = np.frombuffer(b"".join(rows), kind)
        owners = np.repeat(np.arange(len(rows)), [len(part) // kind.itemsize for part in rows])
        order = np.argsort(found["0"])
        return self._with(found[name][order] for name in kind.names or ()), owners[order]


def joined_tables(
    heads: Sequence[Sequence[ReportTable]], rows: Sequence[Sequence[memoryview]]
) -> tuple[list[ReportTable], list[np.ndarray]]:
    """Return the tables of all ranks, joining those of one form, and the rank of each of their reports.

    Args:
        heads: tables without reports, for each rank; ranks with the same list object have the same forms.
        rows: bytes of the reports of these tables, for each rank.
    """
    forms: dict[tuple[int, int], tuple[ReportTable, list[int], list[memoryview]]] = {}
    for rank, (some, parts) in enumerate(zip(heads, rows, strict=True)):
        for place, (head, part) in enumerate(zip(some, parts, strict=True)):
            _, ranks, found = forms.setdefault((id(some), place), (head, [], []))
            ranks.append(rank)
            found.append(part)
    tables, owners = [], []
    for head, ranks, found in forms.values():
        table, numbers = head.unpacked(found)
        tables.append(table)
        owners.append(np.array(ranks)[numbers])
    return tables, owners


def report_tables(headers: Sequence[ReportHeader]) -> list[ReportTable]:
    """Return reports as tables, one for each form; `headers` must be in the order of their numbers."""
    groups: dict[tuple[Any, ...], list[ReportHeader]] = {}
    for header in headers:
        groups.setdefault(header.form if len(headers) > 1 else (), []).append(header)
    return [_table(group) for group in groups.values()]


def _table(headers: Sequence[ReportHeader]) -> ReportTable:
    first = headers[0]
    exchanges: dict[tuple[str, str, int], tuple[int, int]] = {}
    for header in headers:
        for place, (numbers, messages) in header.exchanges.items():
            before = exchanges.get(place, (0, 0))
            exchanges[place] = (before[0] + numbers, before[1] + messages)
    return ReportTable(
        number=np.array([h.number for h in headers], np.int64),
        client=np.array([h.client for h in headers], np.int64),
        num_samples=np.array([h.num_samples for h in headers], np.int64),
        fresh=first.fresh,
        notes={name: np.stack([np.asarray(h.notes[name]) for h in headers]) for name in first.notes},
        findings={name: np.stack([np.asarray(h.findings[name]) for h in headers]) for name in first.findings},
        metrics={name: np.array([h.metrics[name] for h in headers], float) for name in first.metrics},
        max_abs={name: np.array([h.max_abs[name] for h in headers]) for name in first.max_abs},
        sizes=first.sizes,
        widths=first.widths,
        bytes=first.bytes,
        note_sizes={n: np.array([count_numbers(h.notes[n]) for h in headers], np.int64) for n in first.notes},
        exchanges=exchanges,
        unsent=first.unsent,
    )


@dataclass(frozen=True)
class GatheredReports:
    """All reports of one step on rank 0, in the order of their numbers.

    Attributes:
        tables: tables of the m reports.
        owners: rank that holds the uploads of each report, int64 [m].
        notes: notes that the method decides from.
        max_abs: upload -> largest absolute value of each component [m, C].
    """

    tables: Sequence[ReportTable]
    owners: np.ndarray
    notes: Notes
    max_abs: Mapping[str, np.ndarray]

    @property
    def widths(self) -> Mapping[str, int]:
        """Upload -> how many numbers each component has."""
        return self.tables[0].widths

    def having(self, **columns: np.ndarray) -> GatheredReports:
        """Return these reports with more columns among their notes."""
        return replace(self, notes=self.notes.having(**columns))

    def upload_info(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the largest absolute value and the rank of each component [m * C] of an upload."""
        max_abs = self.max_abs[name]
        return max_abs.reshape(-1), np.repeat(self.owners, max_abs.shape[1])


def gathered_reports(
    tables: Sequence[ReportTable],
    owners: Sequence[np.ndarray],
    staleness: np.ndarray,
    hook: str,
    arrival: np.ndarray | None = None,
) -> GatheredReports:
    """Return all reports of a step as one value.

    Args:
        tables: tables of the m reports.
        owners: for each table, the rank that holds the uploads of each report.
        staleness: server steps since each client read the server [m], in the order of the report numbers.
        hook: class and hook that made the reports, for errors.
        arrival: see `Notes`.

    Raises:
        MethodError: clients differ in the names or shapes of their uploads, or in the shapes of their notes.
    """
    pairs = sorted(zip(tables, owners, strict=True), key=lambda pair: int(pair[0].number[0]))
    tables = [table for table, _ in pairs]
    first, order = tables[0], _order(tables)
    for table in tables:
        if _shapes(table) != _shapes(first):  # of which clients may send fewer numbers than others
            (a, b), (k, other) = map(_uploads, (first, table)), (int(t.client[0]) for t in (first, table))
            what = f"client {k} uploads {a}, client {other} {b}"
            raise MethodError(hook, what, "all uploads of a step have the same names and shapes")
    notes = Notes(
        client=_joined([t.client for t in tables], order),
        num_samples=_joined([t.num_samples for t in tables], order),
        staleness=staleness,
        fresh=_joined([np.full(len(t), t.fresh) for t in tables], order),
        columns={name: _joined(parts, order) for name, parts in _note_columns(tables, hook).items()},
        arrival=arrival,
    )
    max_abs = {name: _joined([t.max_abs[name] for t in tables], order) for name in first.max_abs}
    return GatheredReports(tables, _joined([ranks for _, ranks in pairs], order), notes, max_abs)


def _order(tables: Sequence[ReportTable]) -> np.ndarray | None:
    """Return the indices that sort the reports of some tables by number; None if they are already sorted."""
    return None if len(tables) == 1 else np.argsort(_joined([t.number for t in tables]))


def _joined(parts: Sequence[np.ndarray], order: np.ndarray | None = None) -> np.ndarray:
    """Return several columns joined to one, reordered if an order is given."""
    if len(parts) == 1:  # the report numbers of a table ascend
        return parts[0]
    whole = np.concatenate(parts)
    return whole if order is None else whole[order]


def _uploads(table: ReportTable) -> str:
    """Return the names and shapes of the uploads of a table, in words."""
    return ", ".join(f"{name!r} {list(shape)}" for name, shape in _shapes(table).items()) or "nothing"


def _shapes(table: ReportTable) -> dict[str, tuple[int, int]]:
    """Return upload -> how many components it has, and how many numbers each of them."""
    return {name: (table.max_abs[name].shape[1], width) for name, width in table.widths.items()}


def _note_columns(tables: Sequence[ReportTable], hook: str) -> dict[str, list[np.ndarray]]:
    """Return the notes and findings of all tables; NaN in tables that lack one.

    Args:
        tables: tables of a step.
        hook: class and hook that made the notes, for the error.

    Returns:
        Name of a note -> a column [m, ...] for each table.

    Raises:
        MethodError: a note does not have the same shape for all clients.
    """
    found = [{**t.notes, **t.findings} for t in tables]
    out = {}
    for name in dict.fromkeys(n for columns in found for n in columns):
        example = next(columns[name] for columns in found if name in columns).shape[1:]
        parts = []
        for table, columns in zip(tables, found, strict=True):
            parts.append(columns[name] if name in columns else np.full((len(table), *example), np.nan))
            if parts[-1].shape[1:] != example:
                shape, client = parts[-1].shape[1:], int(table.client[0])
                what = f"note {name!r} of client {client} has shape {shape}, not {example}"
                raise MethodError(hook, what, "a note has one shape for all clients: pad it with NaN")
        out[name] = parts
    return out


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean of those values [n] that are not NaN; NaN if their weights [n] sum to 0."""
    known = ~np.isnan(values)
    return float(np.average(values[known], weights=weights[known])) if weights[known].any() else nan


def mean_metrics(tables: Sequence[ReportTable], lost: np.ndarray | None = None) -> dict[str, float]:
    """Return the means of the clients' metrics, weighted by samples; remembered uploads do not count.

    Args:
        tables: tables of all reports of a step.
        lost: clients whose reports do not count, because their uploads did not arrive; None for nobody.

    Returns:
        Name of a metric -> mean over the clients that report it, without those that report NaN, such as the
        `train_loss` of a visit without a step; NaN if none of the others has a sample.
    """
    fresh = sorted((t for t in tables if t.fresh), key=lambda t: int(t.number[0]))
    out = {}
    for name in dict.fromkeys(name for t in fresh for name in t.metrics):
        having = [t for t in fresh if name in t.metrics]
        order = _order(having)  # sums must not depend on the number of ranks
        n = _joined([t.num_samples for t in having], order).astype(float)
        values = _joined([t.metrics[name] for t in having], order)
        if lost is not None and len(lost):
            values = np.where(np.isin(_joined([t.client for t in having], order), lost), nan, values)
        out[name] = weighted_mean(values, n)
    return out
