"""The ledger: the bytes that a real federation would have sent, derived from what methods read and report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from mpifl.core.types import Reads

from .payload import Payload

TIME_STAMP = "time_stamp"  # the server's version, with a download and back with the upload
KINDS: dict[str, str] = {  # name of a vector or note in the methods -> kind
    **dict.fromkeys(("model", "init", "delta"), "model"),
    **dict.fromkeys(("body", "head", "block", "trunk", "shared", "extractor", "last_layer"), "part"),
    **dict.fromkeys(("gradient", "direction", "profile"), "gradient"),
    **dict.fromkeys(("embedding", "basis", "signature"), "embedding"),
    "centroids": "centroid",
    "cluster": "assignment",
    "labels": "statistic",
    "seed": "seed",
    **dict.fromkeys(("control", TIME_STAMP), "control"),
    **dict.fromkeys(("secure_keys", "secure_grid", "secure_shares", "secure_unmasking"), "control"),
}


def kind_of(name: str, is_note: bool = False) -> str:
    """Return the kind of a payload by its name; an unknown vector is a model, an unknown note a statistic.

    Args:
        name: what the method calls it.
        is_note: whether it is a note.
    """
    return KINDS.get(name, "statistic" if is_note else "model")


@dataclass(slots=True)
class Entry:
    """Traffic of one step, direction, name, cast and stream.

    Attributes:
        step: server step in which it was sent.
        direction: `up` or `down`.
        kind: model, part, gradient, embedding, statistic, centroid, assignment, seed or control.
        name: what the method calls it.
        cast: how a multicast link would send it: `unicast`, `group` (several of the cohort read the row) or
            `broadcast` (all of them do).
        stream: the row that is sent, or that the sender had read; empty for none or several.
        messages: sent by unicast.
        bytes: sent by unicast.
        group_messages: where a row that several clients read is sent once.
        group_bytes: where a row that several clients read is sent once.
        numbers: in the unicast messages, before compression.
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
            messages: by unicast.
            size: their bytes in all.
            groups: messages where each row is sent once.
            group_size: their bytes in all.
            numbers: in the unicast messages.
        """
        self.messages += messages
        self.bytes += size
        self.group_messages += groups
        self.group_bytes += group_size
        self.numbers += numbers


@dataclass(frozen=True, slots=True)
class Moved:
    """What one client downloaded and uploaded in a step, in bytes, by unicast.

    Attributes:
        step: 0 before training.
        client: who.
        visit: how many visits it had made before.
        trains: whether it was in the cohort; other clients may send statistics, or answer a probe.
        bytes_down: downloaded.
        bytes_up: uploaded.
    """

    step: int
    client: int
    visit: int
    trains: bool
    bytes_down: int
    bytes_up: int


def count_numbers(value: Any) -> int:
    """Return how many numbers a vector or a note holds; NaN is padding and not counted."""
    if isinstance(value, torch.Tensor):
        return int(value.numel())
    return int(np.size(value) - np.count_nonzero(np.isnan(value)))


class Ledger:
    """Counts the federation's bytes by step, direction, name, cast and stream, and per client.

    Args:
        num_clients: N.
        payload: the form in which numbers travel.

    Attributes:
        up: bytes that each client uploaded [N].
        down: bytes that each client downloaded [N], by unicast.
        moved: what each client moved in each synchronous step that is closed.
    """

    def __init__(self, num_clients: int, payload: Payload | None = None) -> None:
        self.payload = payload or Payload()
        self.entries: dict[tuple[int, str, str, str, str], Entry] = {}
        self.up = np.zeros(num_clients, np.int64)
        self.down = np.zeros(num_clients, np.int64)
        self.moved: list[Moved] = []
        self._open: dict[int, list[int]] = {}  # client -> [down, up] of the step under way
        self._streams: dict[int, int | str] = {}  # client -> the row that it read last
        self._totals: Counter[tuple[str, int]] = Counter()
        self._casts: Counter[int] = Counter()  # step -> downloaded bytes, each stream once
        self._undo: list[Callable[[], object]] = []  # undo what was counted since a commit

    def commit(self) -> None:
        """Make what was counted permanent."""
        self._undo.clear()

    def roll_back(self) -> None:
        """Undo what was counted since the last commit."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

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

    def _count(self, step: int, direction: str, client: int, size: int) -> None:
        self._count_bytes(step, direction, client, size)
        self._undo.append(lambda: self._count_bytes(step, direction, client, -size))

    def _count_bytes(self, step: int, direction: str, client: int, size: int) -> None:
        (self.up if direction == "up" else self.down)[client] += size
        self._open.setdefault(client, [0, 0])[direction == "up"] += size
        self._totals[direction, step] += size

    def add_up(
        self,
        step: int,
        name: str,
        client: int,
        numbers: int,
        size: int | None = None,
        messages: int = 1,
        note: bool = False,
    ) -> None:
        """Count what a client uploads.

        Args:
            step: server step.
            name: of the vector or note.
            client: who uploads.
            numbers: before compression.
            size: bytes; None: those of the numbers in the payload's form.
            messages: how many.
            note: whether it is a note.
        """
        if size is None:
            size = self.payload.size(numbers, messages, note)
        stream = self._streams.get(client, "")
        entry = self._entry(step, "up", name, "unicast", stream, note)
        self._add(entry, messages, size, messages, size, numbers)
        self._count(step, "up", client, size)

    def add_down(
        self,
        step: int,
        name: str,
        client: int,
        numbers: int,
        messages: int = 1,
        note: bool = False,
        size: int | None = None,
    ) -> None:
        """Count what is sent to one client alone.

        Args:
            step: server step.
            name: of the vector or note.
            client: who downloads.
            numbers: in all messages.
            messages: how many.
            note: whether it is a note.
            size: bytes; None: those of the numbers in the payload's form.
        """
        if size is None:
            size = self.payload.size(numbers, messages, note)
        entry = self._entry(step, "down", name, "unicast", "", note)
        self._add(entry, messages, size, messages, size, numbers)
        self._count(step, "down", client, size)
        self._cast(step, size)

    def add_reads(self, step: int, reads: Mapping[int, Reads], widths: Mapping[str, int]) -> None:
        """Count the rows that the clients of a cohort download.

        Args:
            step: server step.
            reads: client -> the rows that it reads; a mixture of rows is one vector for one client.
            widths: numbers in a row of each table.
        """
        readers: dict[tuple[str, int], int] = {}
        for client, tables in reads.items():
            self._streams[client] = _stream(tables)
            for name, which in tables.items():
                if isinstance(which, np.ndarray):
                    self.add_down(step, name, client, widths[name])
                    continue
                for row in which:
                    readers[name, row] = readers.get((name, row), 0) + 1
                self._count(step, "down", client, self.payload.size(widths[name] * len(which), len(which)))
        for (name, row), count in readers.items():
            cast = "unicast" if count == 1 else "broadcast" if count == len(reads) else "group"
            size = self.payload.size(widths[name], 1)
            entry = self._entry(step, "down", name, cast, row, False)
            self._add(entry, count, count * size, 1, size, count * widths[name])
            self._cast(step, size)

    def total(self, direction: str, step: int | None = None) -> int:
        """Return the unicast bytes of one direction, of one step or of the whole run."""
        if step is not None:
            return self._totals[direction, step]
        return int((self.up if direction == "up" else self.down).sum())

    def cast_bytes(self, step: int) -> int:
        """Return the bytes downloaded in a step if each row is sent once to all its readers."""
        return self._casts[step]

    def close(self, step: int, cohort: np.ndarray, visits: np.ndarray) -> list[Moved]:
        """Close a synchronous step; return what each client moved since the last call.

        Args:
            step: 0 before training.
            cohort: clients that trained.
            visits: how many visits each client had made before the step [N].
        """
        taking_part = set(cohort.tolist())
        moved = {**dict.fromkeys(taking_part, (0, 0)), **self._open}
        done = [Moved(step, k, int(visits[k]), k in taking_part, *moved[k]) for k in sorted(moved)]
        self._open = {}
        self.moved += done
        return done

    def per_client(self) -> list[dict[str, int]]:
        """Return what each client moved in the whole run, by unicast, ready for `client_traffic.csv`."""
        both = zip(self.up.tolist(), self.down.tolist(), strict=True)
        return [{"client": k, "bytes_up": u, "bytes_down": d} for k, (u, d) in enumerate(both)]

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
        """Return all counts, as arrays."""
        entries = self.entries.values()
        out = {f.name: np.array([getattr(e, f.name) for e in entries]) for f in fields(Entry)}
        out["is_row"] = np.array([isinstance(e.stream, int) for e in entries], bool)
        out["stream"] = np.array([str(e.stream) for e in entries], str)
        moved = [[m.step, m.client, m.visit, m.trains, m.bytes_down, m.bytes_up] for m in self.moved]
        return out | {
            "up_of": self.up,
            "down_of": self.down,
            "moved": np.array(moved, np.int64).reshape(-1, 6),
            "open": np.array([[k, *sizes] for k, sizes in self._open.items()], np.int64).reshape(-1, 3),
            "readers": np.array([*self._streams], np.int64),
            "read": np.array([str(row) for row in self._streams.values()], str),
            "casts": np.array([*self._casts.items()], np.int64).reshape(-1, 2),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        columns = [state[f.name].tolist() for f in fields(Entry)]
        self.entries, self._totals = {}, Counter()
        for row, is_row in zip(zip(*columns, strict=True), state["is_row"].tolist(), strict=True):
            entry = Entry(*row)
            entry.stream = int(entry.stream) if is_row else entry.stream
            self.entries[*_place(entry), str(entry.stream)] = entry
            self._totals[entry.direction, entry.step] += entry.bytes
        self.up, self.down = state["up_of"].copy(), state["down_of"].copy()
        moved = state["moved"].tolist()
        self.moved = [Moved(t, k, visit, bool(trains), *sizes) for t, k, visit, trains, *sizes in moved]
        self._open = {k: sizes for k, *sizes in state["open"].tolist()}
        read = [int(row) if row else row for row in state["read"].tolist()]
        self._streams = dict(zip(state["readers"].tolist(), read, strict=True))
        self._casts = Counter(dict(state["casts"].tolist()))


def _stream(tables: Reads) -> int | str:
    """Return the one row that a client reads; empty for none or several."""
    rows: set[int] = set()
    for which in tables.values():
        if isinstance(which, np.ndarray):
            return ""
        rows.update(which)
    return next(iter(rows)) if len(rows) == 1 else ""


def _place(e: Entry) -> tuple[int, str, str, str]:
    return e.step, e.direction, e.name, e.cast


def _number(stream: int | str) -> int:
    return stream if isinstance(stream, int) else -1
