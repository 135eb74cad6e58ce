"""Where the server's rows are: on rank 0, with copies at the workers, or spread over the ranks that read
them.

What is read of a table, and how far an upload is from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from mpifl.comm.liveness import CannotGoOn
from mpifl.comm.transport import Transport
from mpifl.core.errors import UserError
from mpifl.core.files import new_array

from .exact_sum import kept_rows

SHARED = 1 << 22  # numbers of a table that are shared at a time while it is spread


class ShardedTable:
    """A table whose rows live in files that all ranks of a node map; only the owner writes a row.

    A row has a place in each of two files: one holds what is committed, the other what is being written. Only
    rows that are written change places, so that a step costs what its rows cost.

    Attributes:
        owner: rank of each row [K].
        turn: which of the files holds the committed row, uint8 [K].
    """

    def __init__(self, path: Path, shape: tuple[int, int], owner: np.ndarray) -> None:
        self.owner, self.width = owner, shape[1]
        self.turn = np.zeros(shape[0], np.uint8)
        self._files = [f"{path}-{which}" for which in "ab"]
        self._maps: list[torch.Tensor] = []

    def make(self, rows: np.ndarray) -> UserError | None:
        """Make the files, with room for these rows, and return what is wrong; one rank of the node, before
        any opens them.
        """
        try:
            for name in self._files:
                new_array(Path(name), np.float32, (len(self.owner), self.width), rows)
            return None
        except OSError as error:
            remedy = f"no room for the rows of a table ({error.strerror}); name another folder"
            return UserError("system.scratch", str(Path(self._files[0]).parent), remedy)

    def open(self) -> None:
        """Map the files; every rank of the node, once they exist."""
        self._maps = [torch.from_numpy(np.lib.format.open_memmap(f, "r+")) for f in self._files]

    def read(self, rows: Sequence[int] | np.ndarray, columns: slice = slice(None)) -> torch.Tensor:
        """Return committed rows [r, w]; a single one is no copy."""
        numbers = np.asarray(rows, np.int64)
        turns = self.turn[numbers]
        if len(rows) == 1:
            file, row = self._maps[int(turns[0])], int(numbers[0])
            return file[row : row + 1, columns]
        width = len(range(*columns.indices(self.width)))
        out = torch.empty(len(numbers), width)
        for i, (turn, row) in enumerate(zip(turns.tolist(), numbers.tolist(), strict=True)):
            out[i].copy_(self._maps[turn][row, columns])
        return out

    def write(self, rows: np.ndarray, columns: slice, values: torch.Tensor) -> None:
        """Write rows [r, w] of this rank beside the committed ones."""
        for turn, file in enumerate(self._maps):
            here = np.flatnonzero(self.turn[rows] == 1 - turn)
            for i in here.tolist():  # quicker than all at once
                file[int(rows[i]), columns].copy_(values[i])

    def commit(self, rows: np.ndarray) -> None:
        """Take what was written for these rows, by whichever rank; every rank calls."""
        self.turn[rows] ^= 1


def new_owner(ranks: Sequence[int], k: int) -> int:
    """Return which of `ranks` takes over row `k`.

    Raises:
        CannotGoOn: there is none.
    """
    if not ranks:
        raise CannotGoOn("all workers of a node, which holds rows of tables, were lost")
    return ranks[k % len(ranks)]


class Tables:
    """The rows of all tables, as far as this rank has them.

    Attributes:
        central: name -> rows [K, w] on rank 0, the truth.
        spread: name -> rows that live with their readers.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.central: dict[str, torch.Tensor] = {}
        self.sharded: dict[str, ShardedTable] = {}
        self._held: dict[str, dict[int, torch.Tensor]] = {}  # at workers
        self._fresh: dict[str, set[int]] = {}  # at rank 0: rows whose copies at the workers are current

    def width(self, name: str) -> int:
        """Return the width of a table; on rank 0."""
        return self.sharded[name].width if name in self.sharded else self.central[name].shape[1]

    def publish(self, tables: Mapping[str, torch.Tensor]) -> None:
        """Take new tables on rank 0; copies of rows whose bits changed are out of date."""
        for name, new in tables.items():
            old, fresh = self.central.get(name), self._fresh.setdefault(name, set())
            if old is not new:
                fresh &= {
                    k for k in fresh if old is not None and k < len(new) and torch.equal(old[k], new[k])
                }
            self.central[name] = new

    def missing(self, needed: Mapping[str, set[int]]) -> dict[str, tuple[list[int], int]]:
        """Return, on rank 0, the rows that must be shared before `needed` can be read, and their width."""
        out = {}
        for name, numbers in needed.items():
            if name not in self.sharded:
                todo = sorted(numbers - self._fresh.setdefault(name, set()))
                out[name] = (todo, self.central[name].shape[1])
        return {name: what for name, what in out.items() if what[0]}

    def share(self, missing: Mapping[str, tuple[Sequence[int], int]]) -> None:
        """Bring the missing rows to every worker; every rank calls with the same argument."""
        if self.transport.size == 1:
            return
        for name, (numbers, width) in missing.items():
            held = self._held.setdefault(name, {})
            for k in numbers:
                row = self.central[name][k].contiguous() if self.transport.is_server else torch.empty(width)
                for lo in range(0, width, 1 << 26):
                    self.transport.Bcast(row[lo : lo + (1 << 26)], f"rows:{name}")
                if not self.transport.is_server:
                    held[k] = row
            if self.transport.is_server:
                self._fresh[name] |= set(numbers)

    def rows(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Return rows [r, w] at a worker."""
        if name in self.sharded:
            return self.sharded[name].read(numbers)
        if self.transport.size == 1:
            table = self.central[name]
            return table[numbers[0]][None] if len(numbers) == 1 else table[list(numbers)]
        held = self._held[name]
        return held[numbers[0]][None] if len(numbers) == 1 else torch.stack([held[k] for k in numbers])

    def shard(
        self, name: str, owner: np.ndarray, shape: tuple[int, int], folder: Path, identical: bool = False
    ) -> None:
        """Move a table from rank 0 to the ranks `owner` [K]; every rank calls with the same arguments.

        Args:
            identical: whether all rows are the same one.

        Raises:
            UserError: a node has no room for its rows; on every rank.
        """
        transport = self.transport
        node = transport.nodes[transport.rank]  # in the file's name: nodes on one machine share a folder
        spread, problem = ShardedTable(folder / f"table-{name}-{node}", shape, owner), None
        if transport.nodes.index(node) == transport.rank:
            problem = spread.make(np.flatnonzero(np.array(transport.nodes)[owner] == node))
        problem = next(filter(None, transport.gather(problem, "layout") or ()), None)
        if (problem := transport.bcast(problem, "layout")) is not None:
            raise problem
        spread.open()
        mine, step = np.flatnonzero(owner == transport.rank), max(1, SHARED // shape[1])
        for lo in range(0, 1 if identical else shape[0], step):
            hi = 1 if identical else min(lo + step, shape[0])
            rows = self.central[name][lo:hi].contiguous() if transport.is_server else None
            rows = torch.empty(hi - lo, shape[1]) if rows is None else rows
            transport.Bcast(rows, f"rows:{name}")
            chosen = mine if identical else mine[(mine >= lo) & (mine < hi)]
            spread.write(
                chosen, slice(None), rows.expand(len(chosen), -1) if identical else rows[chosen - lo]
            )
        spread.commit(np.arange(shape[0]))
        transport.barrier()
        self.sharded[name] = spread
        self.central.pop(name, None)

    def regroup(self, left: Sequence[int], nodes: Sequence[int]) -> None:
        """Go on with fewer ranks; every one of them calls. Rows of a lost rank go to others of its node.

        Args:
            left: old number of each rank. nodes: of the old ranks.
        """
        self._held.clear()
        self._fresh.clear()
        turns = self.transport.bcast({name: s.turn for name, s in self.sharded.items()}, "layout")
        number, workers = {old: new for new, old in enumerate(left)}, self.transport.workers
        for name, spread in self.sharded.items():
            heirs = {node: [r for r in workers if self.transport.nodes[r] == node] for node in set(nodes)}
            owner = [
                number[r] if r in number else new_owner(heirs[nodes[r]], k)
                for k, r in enumerate(spread.owner.tolist())
            ]
            spread.turn, spread.owner = turns[name], np.array(owner, np.int64)

    def whole(self, name: str, block_rows: int = 0) -> torch.Tensor | None:
        """Return a table [K, w] on rank 0, wherever its rows live; every rank calls."""
        if name not in self.sharded:
            return self.central.get(name)
        spread, transport = self.sharded[name], self.transport
        block_rows = block_rows or max(1, SHARED // spread.width)
        out = torch.empty(len(spread.owner), spread.width) if transport.is_server else None
        for lo in range(0, len(spread.owner), block_rows):
            owner = spread.owner[lo : lo + block_rows]
            counts = [int((owner == r).sum()) for r in range(transport.size)]
            mine = lo + np.flatnonzero(owner == transport.rank)
            rows = transport.Gatherv(spread.read(mine).contiguous(), counts, f"rows:{name}")
            if out is not None and rows is not None:
                order = np.concatenate([lo + np.flatnonzero(owner == r) for r in range(transport.size)])
                out[torch.from_numpy(order)] = rows
        return out


def read_rows(
    rows: Callable[[str, list[int]], torch.Tensor], name: str, which: tuple[int, ...] | np.ndarray
) -> torch.Tensor:
    """Return what is downloaded of a table [r, w]: rows, or one mixture, summed in ascending order of
    rows.
    """
    if not isinstance(which, np.ndarray):
        return rows(name, list(which))
    used = np.flatnonzero(which)
    mixed = kept_rows(which[None, used], rows(name, used.tolist()))
    assert mixed is not None
    return mixed.float()


def rows_of(which: tuple[int, ...] | np.ndarray) -> list[int]:
    """Return the numbers of the rows a download takes part of."""
    return np.flatnonzero(which).tolist() if isinstance(which, np.ndarray) else list(which)


def row_distances(upload: torch.Tensor, rows: torch.Tensor, p: int) -> np.ndarray:
    """Return the distances [K] of an upload [d] to rows [K, d], over the first `p` numbers."""
    return np.array([float((upload[:p] - row[:p]).double().norm()) for row in rows])
