"""Tables of model rows: on rank 0 with copies at the workers, or sharded over the ranks that read them.

This module also computes a client's download from a table, and the distances of an upload from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from mpifl.comm.transport import CannotRecover, Mismatch, Transport
from mpifl.core.errors import UserError
from mpifl.core.mapped_arrays import new_array
from mpifl.core.parameters import Layout

from .exact_sum import kept_rows

SHARD_BLOCK = 1 << 22  # numbers per message while a table is sharded or collected
DIFFERENCES = 1 << 22  # numbers of which differences from an upload are held at once
BCAST_BLOCK = 1 << 26  # numbers of a row per broadcast, which must stay below MPI's count limit


class ShardedTable:
    """A table in files that all ranks of a node map into memory; each row is written by its owner only.

    Each row has a place in two files: one holds the committed row, the other the row being written. Only
    rows that are written change places, so the cost of a step depends on these rows alone.

    Args:
        path: path of the files without their suffixes `-a` and `-b`.
        shape: rows and columns of the table.
        owner: rank of each row [K].

    Attributes:
        owner: rank of each row [K].
        width: columns of the table.
        committed: file (0 or 1) that holds the committed row, uint8 [K].
    """

    def __init__(self, path: Path, shape: tuple[int, int], owner: np.ndarray) -> None:
        self.owner, self.width = owner, shape[1]
        self.committed = np.zeros(shape[0], np.uint8)
        self._files = [f"{path}-{which}" for which in "ab"]
        self._maps: list[torch.Tensor] = []

    def make(self, rows: np.ndarray) -> UserError | None:
        """Create the files with space for some rows; one rank of the node calls it, before any calls `open`.

        Args:
            rows: indices of the rows of this node.

        Returns:
            The error if the disk is full or cannot be written; None for success.
        """
        try:
            for name in self._files:
                new_array(Path(name), np.float32, (len(self.owner), self.width), rows)
            return None
        except OSError as error:
            remedy = f"no room for the rows of a table ({error.strerror}); name another folder"
            return UserError("system.scratch", str(Path(self._files[0]).parent), remedy)

    def open(self) -> None:
        """Map the files into memory; every rank of the node calls it."""
        self._maps = [torch.from_numpy(np.lib.format.open_memmap(f, "r+")) for f in self._files]

    def read(self, rows: Sequence[int] | np.ndarray, columns: slice = slice(None)) -> torch.Tensor:
        """Return committed rows, float32 [r, w]; a single row is a view."""
        numbers = np.asarray(rows, np.int64)
        files = self.committed[numbers]
        if len(rows) == 1:
            file, row = self._maps[int(files[0])], int(numbers[0])
            return file[row : row + 1, columns]
        width = len(range(*columns.indices(self.width)))
        out = torch.empty(len(numbers), width, dtype=torch.float32)
        for i, (which, row) in enumerate(zip(files.tolist(), numbers.tolist(), strict=True)):
            out[i].copy_(self._maps[which][row, columns])
        return out

    def write(self, rows: np.ndarray, columns: slice, values: torch.Tensor) -> None:
        """Write new values [r, w] of rows of this rank, next to the committed ones."""
        for which, file in enumerate(self._maps):
            chosen = np.flatnonzero(self.committed[rows] == 1 - which)
            for i in chosen.tolist():  # faster than all at once
                file[int(rows[i]), columns].copy_(values[i])

    def commit(self, rows: np.ndarray) -> None:
        """Commit the new values of these rows, whichever rank wrote them; every rank calls it."""
        self.committed[rows] ^= 1


def new_owner(ranks: Sequence[int], k: int) -> int:
    """Return which of `ranks` takes over row `k` of a lost rank.

    Raises:
        CannotRecover: `ranks` is empty.
    """
    if not ranks:
        raise CannotRecover("all workers of a node, which holds rows of tables, were lost")
    return ranks[k % len(ranks)]


class Tables:
    """This rank's part of all tables.

    Args:
        transport: connects the ranks.

    Attributes:
        central: name -> table, float32 [K, w]; on rank 0.
        sharded: name -> table whose rows are stored at the ranks that read them; on every rank.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.central: dict[str, torch.Tensor] = {}
        self.sharded: dict[str, ShardedTable] = {}
        self._copies: dict[str, dict[int, torch.Tensor]] = {}  # of central rows; on workers
        self._fresh: dict[str, set[int]] = {}  # rows whose copies are up to date; on rank 0

    def width(self, name: str) -> int:
        """Return the number of columns of a table; on rank 0."""
        return self.sharded[name].width if name in self.sharded else self.central[name].shape[1]

    def publish(self, tables: Mapping[str, torch.Tensor]) -> None:
        """Replace central tables on rank 0; workers' copies of rows whose bits changed become stale."""
        for name, new in tables.items():
            if new.dtype is not torch.float32 or new.ndim != 2:
                raise Mismatch(f"rows:{name}: a table is {new.dtype} {list(new.shape)}, not float32 [K, w]")
            old, fresh = self.central.get(name), self._fresh.setdefault(name, set())
            if old is not new:
                fresh &= {
                    k for k in fresh if old is not None and k < len(new) and torch.equal(old[k], new[k])
                }
            self.central[name] = new

    def discard(self, names: Iterable[str]) -> None:
        """Forget central tables that no client reads; on rank 0."""
        for name in names:
            self.central.pop(name, None)
            self._fresh.pop(name, None)

    def missing(self, needed: Mapping[str, set[int]]) -> dict[str, tuple[list[int], int]]:
        """Return the rows that must be broadcast before workers can read `needed`; on rank 0.

        Args:
            needed: table -> indices of rows.

        Returns:
            Table -> (indices of rows, number of columns of the table).
        """
        out = {}
        for name, numbers in needed.items():
            if name not in self.sharded:
                todo = sorted(numbers - self._fresh.setdefault(name, set()))
                out[name] = (todo, self.central[name].shape[1])
        return {name: what for name, what in out.items() if what[0]}

    def bcast_rows(self, missing: Mapping[str, tuple[Sequence[int], int]]) -> None:
        """Broadcast rows to every worker. Collective, with the same argument on every rank.

        Args:
            missing: rows to broadcast, as returned by `missing`.
        """
        if self.transport.size == 1:
            return
        for name, (numbers, width) in missing.items():
            copies = self._copies.setdefault(name, {})
            for k in numbers:
                row = (
                    self.central[name][k].contiguous()
                    if self.transport.is_server
                    else torch.empty(width, dtype=torch.float32)
                )
                for lo in range(0, width, BCAST_BLOCK):
                    self.transport.Bcast(row[lo : lo + BCAST_BLOCK], f"rows:{name}")
                if not self.transport.is_server:
                    copies[k] = row
            if self.transport.is_server:
                self._fresh[name] |= set(numbers)

    def rows(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Return rows of a table, float32 [r, w], for a client on this rank; a single row is a view."""
        if name in self.sharded:
            return self.sharded[name].read(numbers)
        if self.transport.size == 1:
            table = self.central[name]
            return table[numbers[0]][None] if len(numbers) == 1 else table[list(numbers)]
        copies = self._copies[name]
        return copies[numbers[0]][None] if len(numbers) == 1 else torch.stack([copies[k] for k in numbers])

    def shard(
        self, name: str, owner: np.ndarray, shape: tuple[int, int], folder: Path, identical: bool = False
    ) -> None:
        """Move a central table to the ranks that own its rows. Collective, with equal arguments everywhere.

        Args:
            name: name of the table.
            owner: rank of each row [K].
            shape: rows and columns of the table.
            folder: node-local folder for its files.
            identical: whether all rows are equal; then only one is broadcast.

        Raises:
            UserError: a node has no room for its rows; on every rank.
        """
        transport = self.transport
        node = transport.nodes[
            transport.rank
        ]  # in the file name, because nodes on one machine share a folder
        table, problem = ShardedTable(folder / f"table-{name}-{node}", shape, owner), None
        if transport.nodes.index(node) == transport.rank:
            problem = table.make(np.flatnonzero(np.array(transport.nodes)[owner] == node))
        problem = next(filter(None, transport.gather(problem, "layout") or ()), None)
        if (problem := transport.bcast(problem, "layout")) is not None:
            raise problem
        table.open()
        mine, step = np.flatnonzero(owner == transport.rank), max(1, SHARD_BLOCK // shape[1])
        for lo in range(0, 1 if identical else shape[0], step):
            hi = 1 if identical else min(lo + step, shape[0])
            rows = self.central[name][lo:hi].contiguous() if transport.is_server else None
            rows = torch.empty(hi - lo, shape[1], dtype=torch.float32) if rows is None else rows
            transport.Bcast(rows, f"rows:{name}")
            chosen = mine if identical else mine[(mine >= lo) & (mine < hi)]
            table.write(chosen, slice(None), rows.expand(len(chosen), -1) if identical else rows[chosen - lo])
        table.commit(np.arange(shape[0]))
        transport.barrier()
        self.sharded[name] = table
        self.central.pop(name, None)

    def regroup(self, left: Sequence[int], nodes: Sequence[int]) -> None:
        """Continue with fewer ranks: rows of a lost rank go to other ranks of its node. Collective.

        Args:
            left: old rank of each remaining rank.
            nodes: node of each old rank.
        """
        self._copies.clear()
        self._fresh.clear()
        committed = self.transport.bcast({name: s.committed for name, s in self.sharded.items()}, "layout")
        number, workers = {old: new for new, old in enumerate(left)}, self.transport.workers
        for name, table in self.sharded.items():
            successors = {
                node: [r for r in workers if self.transport.nodes[r] == node] for node in set(nodes)
            }
            owner = [
                number[r] if r in number else new_owner(successors[nodes[r]], k)
                for k, r in enumerate(table.owner.tolist())
            ]
            table.committed, table.owner = committed[name], np.array(owner, np.int64)

    def whole(self, name: str, block_rows: int = 0) -> torch.Tensor | None:
        """Return a table, central or sharded, float32 [K, w] on rank 0; None elsewhere. Collective.

        Args:
            name: name of the table.
            block_rows: rows per message; 0 for the default.
        """
        if name not in self.sharded:
            return self.central.get(name)
        table, transport = self.sharded[name], self.transport
        block_rows = block_rows or max(1, SHARD_BLOCK // table.width)
        out = torch.empty(len(table.owner), table.width, dtype=torch.float32) if transport.is_server else None
        for lo in range(0, len(table.owner), block_rows):
            owner = table.owner[lo : lo + block_rows]
            counts = [int((owner == r).sum()) for r in range(transport.size)]
            mine = lo + np.flatnonzero(owner == transport.rank)
            rows = transport.Gatherv(table.read(mine).contiguous(), counts, f"rows:{name}")
            if out is not None and rows is not None:
                order = np.concatenate([lo + np.flatnonzero(owner == r) for r in range(transport.size)])
                out[torch.from_numpy(order)] = rows
        return out


def read_rows(
    rows: Callable[[str, list[int]], torch.Tensor], name: str, which: tuple[int, ...] | np.ndarray
) -> torch.Tensor:
    """Return the rows that a client downloads from a table, float32 [r, w].

    Args:
        rows: function (table, indices) -> rows of the table.
        name: name of the table.
        which: indices of rows, or the weights of all rows [K] in one mixture.
    """
    if not isinstance(which, np.ndarray):
        return rows(name, list(which))
    used = np.flatnonzero(which)
    mixed = kept_rows(which[None, used], rows(name, used.tolist()))
    assert mixed is not None
    return mixed.float()


def rows_of(which: tuple[int, ...] | np.ndarray) -> list[int]:
    """Return the indices of the rows that a download reads; `which` as for `read_rows`."""
    return np.flatnonzero(which).tolist() if isinstance(which, np.ndarray) else list(which)


def row_distances(upload: torch.Tensor, rows: torch.Tensor, layout: Layout) -> np.ndarray:
    """Return the Euclidean distances [K] of an upload [w] from rows [K, w].

    If the upload is as long as the model's vector, only its parameters count, not its buffers. Any other
    upload counts in full.
    """
    p = layout.num_parameters if len(upload) == layout.size else len(upload)
    blocks = rows[:, :p].split(max(1, DIFFERENCES // max(p, 1)))
    gaps = ((upload[:p] - block).double() for block in blocks)  # one block at a time
    return np.concatenate([torch.linalg.vector_norm(gap, dim=1).numpy() for gap in gaps])
