"""The ledger: the bytes that a real federation would have sent, derived from what methods read and report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, overload

import numpy as np
import torch

from mpifl.core.types import CohortReads, Reads

from .payload import NumberFormat

Clients: TypeAlias = "int | np.ndarray"  # one client, or several distinct ones [c]
Sizes: TypeAlias = "int | np.ndarray"  # one value for all clients, or one for each [c]
SEVERAL = -1  # stream of a client that read no row, or several rows
TIME_STAMP = "time_stamp"  # the server's version, sent with a download and back with the upload
KINDS: dict[str, str] = {  # name of a vector or note in the methods -> kind
    **dict.fromkeys(("model", "init", "delta"), "model"),
    **dict.fromkeys(("body", "head", "block", "trunk", "shared", "extractor", "last_layer"), "part"),
    **dict.fromkeys(("gradient", "direction", "profile"), "gradient"),
    **dict.fromkeys(("embedding", "basis", "signature"), "embedding"),
    "centroids": "centroid",
    "cluster": "assignment",
    "labels": "statistic",
    "samples": "sample",
    "seed": "seed",
    **dict.fromkeys(("control", TIME_STAMP), "control"),
    **dict.fromkeys(("secure_keys", "secure_grid", "secure_shares", "secure_unmasking"), "control"),
}


def kind_of(name: str, is_note: bool = False) -> str:
    """Return the kind of a payload by its name; unknown vectors are models, unknown notes statistics.

    Args:
        name: name of the vector or note in the method.
        is_note: whether it is a note.
    """
    return KINDS.get(name, "statistic" if is_note else "model")


def travels_whole(name: str) -> bool:
    """Return whether the numbers of a vector are never rounded and have the size of those in notes: seeds."""
    return kind_of(name) == "seed"


def row_bytes(payload: NumberFormat, name: str, width: int, rows: int = 1) -> int:
    """Return the size in bytes of downloaded rows of a table.

    Args:
        payload: the form in which they are sent.
        name: name of the table.
        width: length of a row.
        rows: number of rows.
    """
    return payload.row_bytes(name, width, rows, travels_whole(name))


@dataclass(slots=True)
class Entry:
    """Traffic of one step, direction, name, cast and stream.

    Attributes:
        step: server step in which it was sent.
        direction: `up` or `down`.
        kind: model, part, gradient, embedding, statistic, sample, centroid, assignment, seed or control.
        name: name of the vector or note in the method.
        cast: how a multicast link would send it: `unicast`, `group` (several of the cohort read the row) or
            `broadcast` (all of them do).
        stream: the row that is sent, or that the sender had read; empty for none or several.
        messages: number of messages if all are sent by unicast.
        bytes: bytes if all messages are sent by unicast.
        group_messages: number of messages if a row that several clients read is sent once.
        group_bytes: bytes if a row that several clients read is sent once.
        numbers: count of numbers in the unicast messages, before compression.
    """

    step: int
    direction: str
    kind: str
    name: str
    cast: str
    stream: int | str
    messages: int = 0
    bytes: int = 0
    group_messages: int = 0
    group_bytes: int = 0
    numbers: int = 0

    def add(self, messages: int, size: int, groups: int, group_size: int, numbers: int) -> None:
        """Add to the counts.

        Args:
            messages: number of unicast messages.
            size: their bytes in total.
            groups: number of messages if each row is sent once.
            group_size: their bytes in total.
            numbers: count of numbers in the unicast messages.
        """
        self.messages += messages
        self.bytes += size
        self.group_messages += groups
        self.group_bytes += group_size
        self.numbers += numbers


@dataclass(frozen=True, slots=True)
class Moved:
    """The unicast bytes that one client downloaded and uploaded in a step.

    Attributes:
        step: server step; 0 before training.
        client: number of the client.
        visit: number of its visits before this step.
        trains: whether it was in the cohort; other clients may send statistics or answer a probe.
        bytes_down: bytes downloaded.
        bytes_up: bytes uploaded.
    """

    step: int
    client: int
    visit: int
    trains: bool
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class StatisticsSize:
    """What a client moves for one-shot statistics.

    Attributes:
        down: bytes that it downloads for them.
        vectors: vector that it uploads -> how many numbers it has, and its bytes.
        notes: note that it uploads -> how many numbers it has, and its bytes.
    """

    down: int
    vectors: Mapping[str, tuple[int, int]]
    notes: Mapping[str, tuple[int, int]]

    @property
    def up(self) -> int:
        """Bytes that it uploads."""
        return sum(size for sent in (self.vectors, self.notes) for _, size in sent.values())


class Undoable:
    """Counts that become permanent with a commit; a step that is repeated takes back what it counted.

    Subclasses append to `_undo` a call that takes back each count.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []  # these calls undo all counts since a commit

    def commit(self) -> None:
        """Make all counts permanent."""
        self._undo.clear()

    def roll_back(self) -> None:
        """Undo all counts since the last commit."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


MOVED = tuple(f.name for f in fields(Moved))  # columns of visits.csv


class Moves(Sequence[Moved]):
    """The bytes that clients moved in closed steps, stored as columns.

    Args:
        table: int64 [n, 6], the fields of `Moved`.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, i: int) -> Moved: ...
    @overload
    def __getitem__(self, i: slice) -> Moves: ...
    def __getitem__(self, i: int | slice) -> Moved | Moves:
        if isinstance(i, slice):
            return Moves(self.table[i])
        step, client, visit, trains, down, up = self.table[i].tolist()
        return Moved(step, client, visit, bool(trains), down, up)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `visits.csv`, as views."""
        columns = dict(zip(MOVED, self.table.T, strict=True))
        return columns | {"trains": columns["trains"].astype(bool)}

    def without(self, clients: np.ndarray) -> Moves:
        """Return the moves of all other clients."""
        return Moves(self.table[~np.isin(self.table[:, MOVED.index("client")], clients)])

    def sizes(self) -> Moves:
        """Return one move for each distinct (trains, bytes down, bytes up)."""
        kinds = self.table[:, MOVED.index("trains") :]
        if (kinds == kinds[:1]).all():  # faster
            return Moves(self.table[:1])
        return Moves(self.table[np.unique(kinds, axis=0, return_index=True)[1]])


def is_among(clients: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Return which of the clients are in `some`, bool [c].

    Args:
        clients: [c].
        some: clients to look for, ascending.
    """
    if clients is some or not len(some):
        return np.full(len(clients), clients is some)
    found: np.ndarray = some[np.minimum(np.searchsorted(some, clients), len(some) - 1)] == clients
    return found


def count_numbers(value: Any) -> int:
    """Return the count of numbers in a vector or note; NaN in a note is padding and not counted."""
    if isinstance(value, torch.Tensor):
        return int(value.numel())
    return int(np.size(value) - np.count_nonzero(np.isnan(value)))


class Ledger(Undoable):
    """Counts the federation's bytes by step, direction, name, cast and stream, and per client.

    Args:
        num_clients: N, number of clients.
        payload: the form in which numbers are sent.

    Attributes:
        up: bytes that each client uploaded [N].
        down: bytes that each client downloaded [N], by unicast.
        clustering: (direction, step) -> bytes that serve clustering alone, see `for_clustering`.
    """

    def __init__(self, num_clients: int, payload: NumberFormat | None = None) -> None:
        super().__init__()
        self.payload = payload or NumberFormat()
        self.entries: dict[tuple[int, str, str, str, str], Entry] = {}
        self.up = np.zeros(num_clients, np.int64)
        self.down = np.zeros(num_clients, np.int64)
        self._moved: list[np.ndarray] = []  # [m, 6] for each closed step
        self._open: dict[int, list[int]] = {}  # client -> [down, up] in the current step
        self._open_columns: list[tuple[np.ndarray, str, Sizes]] = []  # the same for several clients at once
        self._streams = np.full(num_clients, SEVERAL, np.int32)  # the row that each client read last
        self._totals: Counter[tuple[str, int]] = Counter()
        self._casts: Counter[int] = Counter()  # step -> downloaded bytes, each row once
        self.clustering: Counter[tuple[str, int]] = Counter()
        self._is_clustering = False
        self._kept: np.ndarray | None = None  # clients whose moves are remembered, bool [N]; None: all

    @property
    def moved(self) -> Moves:
        """The bytes that each client moved in each closed synchronous step."""
        return Moves(np.concatenate([np.zeros((0, len(MOVED)), np.int64), *self._moved]))

    def remember(self, clients: np.ndarray) -> None:
        """Keep the moves of these clients only, step by step; totals still count all clients."""
        self._kept = np.zeros(len(self.up), bool)
        self._kept[clients] = True

    @contextmanager
    def for_clustering(self) -> Iterator[None]:
        """Count what is booked in a block also under `clustering`: one-shot statistics, second looks.

        What clients report with their uploads of what they found counts with these uploads.
        """
        before, self._is_clustering = self._is_clustering, True
        try:
            yield
        finally:
            self._is_clustering = before

    def _entry(self, step: int, direction: str, name: str, cast: str, stream: int | str, note: bool) -> Entry:
        at = (step, direction, name, cast, str(stream))
        if at not in self.entries:
            self.entries[at] = Entry(step, direction, kind_of(name, note), name, cast, stream)
            self._undo.append(lambda: self.entries.pop(at))
        return self.entries[at]

    def _add(self, entry: Entry, *counts: int) -> None:
        entry.add(*counts)
        self._undo.append(lambda: entry.add(*(-n for n in counts)))

    def _cast(self, step: int, size: int) -> None:
        self._casts[step] += size
        self._undo.append(lambda: self._casts.update({step: -size}))

    def _count(self, step: int, direction: str, client: Clients, size: Sizes) -> None:
        self._count_bytes(step, direction, client, size)
        self._undo.append(lambda: self._count_bytes(step, direction, client, -size))
        if self._is_clustering and (total := _sum(size, client)):
            self.clustering[direction, step] += total
            self._undo.append(lambda: self.clustering.subtract({(direction, step): total}))

    def _count_bytes(self, step: int, direction: str, client: Clients, size: Sizes) -> None:
        (self.up if direction == "up" else self.down)[client] += size
        self._totals[direction, step] += _sum(size, client)
        if isinstance(client, np.ndarray):
            self._open_columns.append((client, direction, size))
        else:
            self._open.setdefault(client, [0, 0])[direction == "up"] += int(size)

    def _moved_so_far(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the clients with traffic in the current step [c], ascending, and their bytes down and up."""
        parts = self._open_columns
        if self._open or not parts:
            single = np.array([[k, *sizes] for k, sizes in self._open.items()], np.int64).reshape(-1, 3)
            who, down, up = single.T
            parts = [(who, "down", down), (who, "up", up), *parts]
        who = parts[0][0]
        if (who[:-1] < who[1:]).all() and all(np.array_equal(client, who) for client, _, _ in parts):
            everywhere: list[Any] = [slice(None)] * len(parts)  # all of them move the same clients
        else:
            who, at = np.unique(np.concatenate([client for client, _, _ in parts]), return_inverse=True)
            everywhere = np.split(at, np.cumsum([len(client) for client, _, _ in parts])[:-1])
        sums = {way: np.zeros(len(who), np.int64) for way in ("down", "up")}
        for (_, way, size), places in zip(parts, everywhere, strict=True):
            sums[way][places] += size  # each client once
        return who, sums["down"], sums["up"]

    def add_up(
        self,
        step: int,
        name: str,
        client: Clients,
        numbers: Sizes,
        size: Sizes | None = None,
        messages: int = 1,
        note: bool = False,
    ) -> None:
        """Count the upload of a client, or the uploads of several clients.

        Args:
            step: server step.
            name: name of the vector or note.
            client: the client, or several distinct clients [c].
            numbers: count of numbers of a client before compression, the same for all or one for each [c].
            size: bytes of a client, the same for all or one for each [c]; None: those of the numbers in the
                payload's form.
            messages: number of messages of each client.
            note: whether it is a note.
        """
        if size is None:
            size = self.payload.size(numbers, messages, note)
        for stream, count, n, b in self._by_stream(client, numbers, size):
            entry = self._entry(step, "up", name, "unicast", stream, note)
            self._add(entry, count * messages, b, count * messages, b, n)
        self._count(step, "up", client, size)

    def _by_stream(
        self, client: Clients, numbers: Sizes, size: Sizes
    ) -> Iterator[tuple[int | str, int, int, int]]:
        """Yield each stream that clients had read, their count, and the sums of their numbers and sizes."""
        if not isinstance(client, np.ndarray):
            row = int(self._streams[client])
            yield "" if row == SEVERAL else row, 1, int(numbers), int(size)
            return
        streams = self._streams[client]
        if (streams == streams[:1]).all():
            rows, sums = streams[:1], [[_sum(x, client)] for x in (1, numbers, size)]
        else:
            rows, at = np.unique(streams, return_inverse=True)
            each = [np.broadcast_to(x, at.shape) for x in (1, numbers, size)]
            sums = [np.bincount(at, x).astype(np.int64).tolist() for x in each]
        for stream, *found in zip(rows.tolist(), *sums, strict=True):
            yield "" if stream == SEVERAL else stream, *found

    def add_down(
        self,
        step: int,
        name: str,
        client: Clients,
        numbers: int,
        messages: int = 1,
        note: bool = False,
        size: int | None = None,
    ) -> None:
        """Count what is sent to one client alone, or to each of several clients separately.

        Args:
            step: server step.
            name: name of the vector or note.
            client: the client, or several distinct clients [c].
            numbers: count of numbers in all messages to one client.
            messages: number of messages to one client.
            note: whether it is a note.
            size: bytes to one client; None: those of the numbers in the payload's form.
        """
        if size is None:
            size = self.payload.size(numbers, messages, note)
        count = _sum(1, client)
        entry = self._entry(step, "down", name, "unicast", "", note)
        self._add(entry, count * messages, count * size, count * messages, count * size, count * numbers)
        self._count(step, "down", client, size)
        self._cast(step, count * size)

    def add_reads(
        self,
        step: int,
        reads: Mapping[int, Reads],
        widths: Mapping[str, int],
        width_of: Callable[[str, int, int], int] | None = None,
    ) -> None:
        """Count the rows that the clients of a cohort download.

        Args:
            step: server step.
            reads: client -> the rows that it reads; a mixture of rows is one vector for one client.
            widths: length of a row of each table.
            width_of: maps a table, its width and a client to how many numbers of a row the client gets; None:
                all. A row that is sent once has the numbers of the reader with the most.
        """
        if width_of is not None:
            self._add_narrow_reads(step, reads, widths, width_of)
            return
        readers, mixed = Counter[tuple[str, int]](), defaultdict[str, list[int]](list)
        streams, sizes = list[int](), list[int]()
        for number, (tables, count) in enumerate(_counted(reads)):
            streams.append(_stream(tables))
            sizes.append(0)
            for name, which in tables.items():
                if isinstance(which, np.ndarray):
                    mixed[name].append(number)
                    continue
                for row in which:
                    readers[name, row] += count
                sizes[-1] += row_bytes(self.payload, name, widths[name], len(which))
        if isinstance(reads, CohortReads):
            self._streams[reads.clients] = np.array(streams, np.int64)[reads.which]
            self._count(step, "down", reads.clients, np.array(sizes, np.int64)[reads.which])
            for name, numbers in mixed.items():
                clients = reads.clients[np.isin(reads.which, numbers)]
                size = row_bytes(self.payload, name, widths[name])
                self.add_down(step, name, clients, widths[name], size=size)
        else:
            for client, stream, size in zip(reads, streams, sizes, strict=True):
                self._streams[client] = stream
                self._count(step, "down", client, size)
            for name, numbers in mixed.items():
                size = row_bytes(self.payload, name, widths[name])
                for number in numbers:
                    self.add_down(step, name, [*reads][number], widths[name], size=size)
        for (name, row), count in readers.items():
            cast = "unicast" if count == 1 else "broadcast" if count == len(reads) else "group"
            size = row_bytes(self.payload, name, widths[name])
            entry = self._entry(step, "down", name, cast, row, False)
            self._add(entry, count, count * size, 1, size, count * widths[name])
            self._cast(step, size)

    def _add_narrow_reads(
        self,
        step: int,
        reads: Mapping[int, Reads],
        widths: Mapping[str, int],
        width_of: Callable[[str, int, int], int],
    ) -> None:
        """Count the rows that clients download of which each gets only some numbers; see `add_reads`."""
        readers = defaultdict[tuple[str, int], list[int]](list)  # row -> numbers that each reader gets
        for client, tables in reads.items():
            self._streams[client] = _stream(tables)
            for name, which in tables.items():
                numbers = width_of(name, widths[name], client)
                if isinstance(which, np.ndarray):
                    self.add_down(step, name, client, numbers)
                    continue
                for row in which:
                    readers[name, row].append(numbers)
                size = self.payload.size(numbers * len(which), len(which), travels_whole(name))
                self._count(step, "down", client, size)
        for (name, row), each in readers.items():
            count, note = len(each), travels_whole(name)
            cast = "unicast" if count == 1 else "broadcast" if count == len(reads) else "group"
            sizes = [self.payload.size(numbers, 1, note) for numbers in each]
            entry = self._entry(step, "down", name, cast, row, False)
            self._add(entry, count, sum(sizes), 1, max(sizes), sum(each))
            self._cast(step, max(sizes))

    def total(self, direction: str, step: int | None = None) -> int:
        """Return the unicast bytes of one direction, of one step or of the whole run."""
        if step is not None:
            return self._totals[direction, step]
        return int((self.up if direction == "up" else self.down).sum())

    def cast_bytes(self, step: int) -> int:
        """Return the bytes downloaded in a step if each row is sent once to all its readers."""
        return self._casts[step]

    def close(self, step: int, cohort: np.ndarray, visits: Callable[[np.ndarray], np.ndarray]) -> Moves:
        """Close a synchronous step; return the bytes that each client moved since the last call.

        Args:
            step: server step; 0 before training.
            cohort: clients that trained.
            visits: maps clients [c] to their numbers of visits before the step [c].
        """
        self._open_columns.append((cohort, "down", 0))  # includes clients that moved nothing
        done = self.moved_in(step, cohort, visits)
        self._open, self._open_columns = {}, []
        kept = done.table if self._kept is None else done.table[self._kept[done.columns()["client"]]]
        self._moved.append(kept)
        return done

    def moved_in(self, step: int, cohort: np.ndarray, visits: Callable[[np.ndarray], np.ndarray]) -> Moves:
        """Return the bytes that each client has moved in the current step; see `close`."""
        who, down, up = self._moved_so_far()
        trains = is_among(who, cohort)
        return Moves(np.stack([np.full(len(who), step), who, visits(who), trains, down, up], axis=1))

    def per_client(self) -> dict[str, np.ndarray]:
        """Return each remembered client's bytes in the whole run: the columns of `client_traffic.csv`."""
        which = np.arange(len(self.up)) if self._kept is None else np.flatnonzero(self._kept)
        return {"client": which, "bytes_up": self.up[which], "bytes_down": self.down[which]}

    def rows(self) -> list[dict[str, object]]:
        """Return one row per entry, ready for `ledger.csv`."""
        names = [f.name for f in fields(Entry)]
        ordered = sorted(self.entries.values(), key=lambda e: (*_place(e), _number(e.stream)))
        return [{name: getattr(e, name) for name in names} for e in ordered]

    def totals(self) -> list[dict[str, object]]:
        """Return the bytes of the whole run by direction, kind, name and cast."""
        found: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for e in self.entries.values():
            found[e.direction, e.kind, e.name, e.cast].update(
                messages=e.messages, bytes=e.bytes, group_bytes=e.group_bytes, numbers=e.numbers
            )
        heads = ("direction", "kind", "name", "cast")
        return [{**dict(zip(heads, at, strict=True)), **found[at]} for at in sorted(found)]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all counts as arrays."""
        entries = self.entries.values()
        out = {f.name: np.array([getattr(e, f.name) for e in entries]) for f in fields(Entry)}
        out["is_row"] = np.array([isinstance(e.stream, int) for e in entries], bool)
        out["stream"] = np.array([str(e.stream) for e in entries], str)
        readers = np.flatnonzero(self._streams != SEVERAL)
        return out | {
            "up_of": self.up,
            "down_of": self.down,
            "moved": self.moved.table,
            "open": np.stack(self._moved_so_far(), axis=1),
            "readers": readers,
            "read": self._streams[readers].astype(str),
            "casts": np.array([*self._casts.items()], np.int64).reshape(-1, 2),
            "clustering": np.array(
                [(way == "up", step, size) for (way, step), size in self.clustering.items()], np.int64
            ).reshape(-1, 3),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the counts that `state_dict` returned."""
        columns = [state[f.name].tolist() for f in fields(Entry)]
        self.entries, self._totals = {}, Counter()
        for row, is_row in zip(zip(*columns, strict=True), state["is_row"].tolist(), strict=True):
            entry = Entry(*row)
            entry.stream = int(entry.stream) if is_row else entry.stream
            self.entries[*_place(entry), str(entry.stream)] = entry
            self._totals[entry.direction, entry.step] += entry.bytes
        self.up, self.down = state["up_of"].copy(), state["down_of"].copy()
        self._moved = [state["moved"]]
        self._open, self._open_columns = {k: sizes for k, *sizes in state["open"].tolist()}, []
        self._streams[:] = SEVERAL
        self._streams[state["readers"]] = [int(row) if row else SEVERAL for row in state["read"].tolist()]
        self._casts = Counter(dict(state["casts"].tolist()))
        clustering = state["clustering"].tolist()
        self.clustering = Counter({("up" if up else "down", step): size for up, step, size in clustering})


def _stream(tables: Reads) -> int:
    """Return the row that a client reads; `SEVERAL` if it reads none or several."""
    rows: set[int] = set()
    for which in tables.values():
        if isinstance(which, np.ndarray):
            return SEVERAL
        rows.update(which)
    return next(iter(rows)) if len(rows) == 1 else SEVERAL


def _sum(size: Sizes, client: Clients) -> int:
    """Return the sum over clients of a value that is the same for all, or given for each."""
    if isinstance(size, np.ndarray):
        return int(size.sum())
    return size * len(client) if isinstance(client, np.ndarray) else size


def _counted(reads: Mapping[int, Reads]) -> Iterable[tuple[Reads, int]]:
    """Return (reads, number of clients): one for each distinct reads, or for each client if not grouped."""
    if not isinstance(reads, CohortReads):
        return [(tables, 1) for tables in reads.values()]
    counts = np.bincount(reads.which, minlength=len(reads.distinct)).tolist()
    return zip(reads.distinct, counts, strict=True)


def _place(e: Entry) -> tuple[int, str, str, str]:
    return e.step, e.direction, e.name, e.cast


def _number(stream: int | str) -> int:
    return stream if isinstance(stream, int) else -1
