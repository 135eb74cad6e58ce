"""The mixing step over ranks: rank 0 decides, every rank adds its uploads, rows end up where they are read.

Works in column blocks, so that no rank needs more than a few blocks of scratch and no message meets MPI's
count limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mpifl.comm.transport import Transport
from mpifl.core.devices import staged
from mpifl.core.mixing import Mixing
from mpifl.core.parameters import Part, take

from .collective_choice import BLOCK, GATHER, REDUCE, SCATTER, Costs, choose, far_ranks
from .exact_sum import fast_sums, finish, kept_rows, spacings, sums_by_device
from .tables import Tables

GRAM_BLOCK = 8192  # columns per block of a Gram matrix; fixed, since it shapes the sums
GRAM_ROWS = 2048  # of it at a time; fixed for the same reason


def _stacked(block: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return the vectors as one contiguous [n, width], in main memory where not all are on one device."""
    if len({u.device for u in block}) > 1:
        block = [staged(u) for u in block]
    return torch.stack(list(block)) if len(block) else torch.empty(0, width)


def in_rank_order(owners: np.ndarray) -> np.ndarray:
    """Return the numbers of the uploads [m] in the order in which a gather delivers them."""
    return np.argsort(owners, kind="stable")


@dataclass(frozen=True)
class RankMixPlan:
    """What one rank must know of one mixing.

    Attributes:
        rows: numbers [Ka] of the rows that receive anything, in the order they travel.
        weights: float64 [Ka, uploads of this rank]; grid: [Ka].
        counts: uploads on each rank; owned: travelling rows on each rank (scatter only).
        keep: what stays of each travelling row [Ka] (scatter only).
    """

    collective: str
    into: str
    of: str
    part: Part | None
    width: int
    rows: np.ndarray
    weights: np.ndarray
    grid: np.ndarray
    counts: tuple[int, ...]
    owned: tuple[int, ...] = ()
    keep: np.ndarray | None = None


class Mixer:
    """Carries mixings and pairwise products over a transport.

    Args:
        exact: int64 sums, equal for any number of ranks; otherwise float32 sums.
        collective: forces one collective; None chooses, by `costs` where there are any, otherwise by size.
        direct: MPI is given the memory of a device; otherwise what is made there is staged in main memory.
    """

    def __init__(
        self,
        transport: Transport,
        tables: Tables,
        exact: bool = True,
        collective: str | None = None,
        costs: Costs | None = None,
        direct: bool = False,
    ) -> None:
        self.transport, self.tables, self.exact, self.collective = transport, tables, exact, collective
        self.costs, self.direct = costs, direct
        self.last: list[str] = []

    def mix(
        self,
        mixings: Sequence[Mixing] | None,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]] | None,
        uploads: Mapping[str, Sequence[torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Apply mixings in order; return the new central tables on rank 0.

        Args:
            mixings: on rank 0.
            upload_info: name of an upload -> (largest absolute value, rank) of each [m], on rank 0.
            uploads: name -> this rank's uploads [w], in ascending order of their number.
        """
        task_batches = None
        if self.transport.is_server:
            assert mixings is not None
            assert upload_info is not None
            none = (np.zeros(0), np.zeros(0, np.int64))
            plans = [self._plan(m, *(upload_info(m.of) if m.of else none)) for m in mixings]
            task_batches = [[p[r] for p in plans] for r in range(self.transport.size)]
            self.last = [p[0].collective for p in plans]
        changed: dict[str, torch.Tensor] = {}
        for i, rank_plan in enumerate(self.transport.scatter(task_batches, "plan")):
            mine = uploads.get(rank_plan.of, [])
            mine = [u if rank_plan.part is None else take(u, rank_plan.part) for u in mine]
            if rank_plan.collective == SCATTER:
                self._scatter(rank_plan, mine)
            else:
                mixing = mixings[i] if mixings is not None else None
                new = self._to_server(rank_plan, mine, mixing, changed)
                if new is not None:
                    changed[rank_plan.into] = new
        return changed

    def _plan(self, mixing: Mixing, max_abs: np.ndarray, owners: np.ndarray) -> list[RankMixPlan]:
        """Return what each rank must know of `mixing`."""
        size, spread = self.transport.size, self.tables.sharded.get(mixing.into)
        rows = np.flatnonzero(np.abs(mixing.weights).sum(1))
        collective = choose(len(rows), len(owners), self.exact, spread is not None)
        if self.costs is not None and spread is None:
            width = self.tables.width(mixing.into)
            far = int(np.isin(owners, far_ranks(self.transport.nodes)).sum())
            collective = self.costs.choose(len(rows), len(owners), width, size, self.exact, far)
        if self.collective in (REDUCE, GATHER) and spread is None:
            collective = self.collective
        owned: tuple[int, ...] = ()
        if spread is not None:
            stays = np.zeros(mixing.num_rows, bool) if mixing.keep is None else mixing.keep == 1
            moving = np.flatnonzero(mixing.weights.any(1) | ~stays)
            rows = moving[np.lexsort((moving, spread.owner[moving]))]
            owned = tuple(np.bincount(spread.owner[rows], minlength=size))
        weights = mixing.weights[rows]
        everyone = in_rank_order(owners)
        grid = spacings(weights, max_abs)
        keep = None if mixing.keep is None or spread is None else mixing.keep[rows]
        counts = tuple(int(c) for c in np.bincount(owners, minlength=size))
        return [
            RankMixPlan(
                collective=collective,
                into=mixing.into,
                of=mixing.of,
                part=mixing.part,
                width=self.tables.width(mixing.into),
                rows=rows,
                weights=weights[:, everyone] if collective == GATHER and r == 0 else weights[:, owners == r],
                grid=grid,
                counts=counts,
                owned=tuple(int(o) for o in owned),
                keep=keep,
            )
            for r in range(size)
        ]

    def _to_server(
        self,
        s: RankMixPlan,
        mine: Sequence[torch.Tensor],
        mixing: Mixing | None,
        changed: Mapping[str, torch.Tensor],
    ) -> torch.Tensor | None:
        """Reduce or gather; return the new table [K, w] on rank 0."""
        old = new = None
        if mixing is not None:
            old = changed.get(s.into, self.tables.central[s.into])
            new = torch.empty(mixing.num_rows, s.width)
        self.transport.barrier()
        for columns in self._blocks(s, sum(s.counts) if s.collective == GATHER else len(s.rows)):
            block = [u[columns] for u in mine]
            carry = self._gathered if s.collective == GATHER else self._reduced
            sums = carry(s, block, columns.stop - columns.start)
            if mixing is not None and new is not None and old is not None and sums is not None:
                new[:, columns] = self._placed(s, mixing, sums, old[:, columns])
        return new

    def _placed(self, s: RankMixPlan, mixing: Mixing, sums: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return the new rows [K, b]: the travelling rows' sums plus what each row keeps."""
        kept = kept_rows(mixing.keep, old)
        if len(s.rows) == mixing.num_rows:
            return self._finish(sums, s.grid, kept)
        full = torch.zeros(mixing.num_rows, sums.shape[1], dtype=sums.dtype)
        full[torch.from_numpy(s.rows)] = sums
        grid = np.ones(mixing.num_rows)
        grid[s.rows] = s.grid
        return self._finish(full, grid, kept)

    def _finish(self, sums: torch.Tensor, grid: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
        if self.exact:
            return finish(sums, grid, kept)
        return sums if kept is None else kept.add_(sums).float()

    def _sums(self, s: RankMixPlan, block: Sequence[torch.Tensor], width: int) -> torch.Tensor:
        """Return this rank's share of the travelling rows [Ka, b], made where its uploads are."""
        if not self.exact:
            return fast_sums(block, s.weights, torch.empty(len(s.rows), width))
        total, *others = sums_by_device(block, s.weights, s.grid, width)
        for sums in others:
            total = staged(total).add_(staged(sums))
        return total

    def _lent(self, block: torch.Tensor) -> torch.Tensor:
        """Return a block in memory that MPI takes; what rank 0 has is added to in main memory."""
        return block if self.direct and not self.transport.is_server else staged(block)

    def _reduced(self, s: RankMixPlan, block: Sequence[torch.Tensor], width: int) -> torch.Tensor:
        sums = self._lent(self._sums(s, block, width))
        self.transport.Reduce(sums, f"mix:{s.into}")
        return sums

    def _gathered(self, s: RankMixPlan, block: Sequence[torch.Tensor], width: int) -> torch.Tensor | None:
        mine = self._lent(_stacked(block, width))
        everything = self.transport.Gatherv(mine, s.counts, f"mix:{s.into}")
        return None if everything is None else self._sums(s, list(everything), width)

    def _scatter(self, s: RankMixPlan, mine: Sequence[torch.Tensor]) -> None:
        """Leave each travelling row, mixed, with the worker that owns it."""
        spread = self.tables.sharded[s.into]
        start = sum(s.owned[: self.transport.rank])
        here = slice(start, start + s.owned[self.transport.rank])
        rows = s.rows[here]
        self.transport.barrier()
        moving = len(s.rows) if self.transport.is_worker else 0
        for columns in self._blocks(s, moving) if moving else ():
            block = [u[columns] for u in mine]
            sums = staged(self._sums(s, block, columns.stop - columns.start))  # as are the rows it ends in
            sums = self.transport.Reduce_scatter(sums, s.owned, f"mix:{s.into}")
            keep = None if s.keep is None else s.keep[here]
            kept = None if keep is None else kept_rows(keep, spread.read(rows, columns))
            spread.write(rows, columns, self._finish(sums, s.grid[here], kept))
        self.transport.barrier()
        spread.commit(s.rows)

    def _blocks(self, s: RankMixPlan, height: int) -> Iterator[slice]:
        step = max(1024, BLOCK // max(height, 1))
        for lo in range(0, s.width, step):
            yield slice(lo, min(lo + step, s.width))

    def gram(
        self, vectors: Sequence[torch.Tensor], counts: Sequence[int], owners: np.ndarray | None, width: int
    ) -> np.ndarray | None:
        """Return all pairwise products [m, m] of the vectors of all ranks on rank 0, in float64.

        Column blocks of fixed width go to rank 0 and are multiplied in the order of the reports: the sums do
            not depend
        on how the vectors were split.

        Args:
            vectors: this rank's [width] each; counts: how many each rank has.
            owners: rank of each report [m]; on rank 0.
        """
        out = order = None
        if owners is not None:
            order = torch.from_numpy(np.argsort(in_rank_order(owners)))
            out = torch.zeros(len(order), len(order), dtype=torch.float64)
        self.transport.barrier()
        for lo in range(0, width, GRAM_BLOCK):
            columns = slice(lo, min(lo + GRAM_BLOCK, width))
            block = self._lent(_stacked([v[columns] for v in vectors], columns.stop - lo))
            everything = self.transport.Gatherv(block, counts, "gram")
            if out is not None and everything is not None:
                x = everything[order].double()
                for top in range(0, len(out), GRAM_ROWS):  # no second matrix of all pairs
                    out[top : top + GRAM_ROWS] += x[top : top + GRAM_ROWS] @ x.T
        return None if out is None else out.numpy()
