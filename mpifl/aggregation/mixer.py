"""Mixing of uploads into table rows over ranks, and pairwise products of uploads.

Rank 0 plans, every rank adds its own uploads, and each row ends up where it is read. All work is
done in column blocks, so that no rank needs more than a few blocks of scratch memory and no message exceeds
MPI's count limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from mpifl.comm.transport import Mismatch, Transport, check_block
from mpifl.core.devices import to_main_memory
from mpifl.core.parameters import Part, take
from mpifl.core.plan import Mixing, RankMasks

from .collective_choice import BLOCK, GATHER, REDUCE, SCATTER, CostModel, choose, far_ranks
from .exact_sum import exact_sum, finish, float32_sum, kept_rows, spacings
from .tables import Tables

GRAM_BLOCK = 8192  # columns per block of a Gram matrix; fixed, because the bits depend on it
GRAM_ROWS = 2048  # rows of a Gram matrix computed at a time; fixed for the same reason


@dataclass(frozen=True)
class RankMixPlan:
    """One mixing as one rank sees it. Its Ka active rows are the rows that it changes.

    Attributes:
        collective: `REDUCE`, `GATHER` or `SCATTER`.
        into: name of the table.
        of: name of the uploads.
        part: slices of an upload that are mixed; None for all.
        width: columns of the table.
        rows: indices of the active rows [Ka], in the order in which they travel.
        weights: float64 [Ka, uploads that this rank adds].
        spacing: grid spacing of each active row [Ka].
        num_uploads: number of uploads on all ranks.
        counts: number of uploads on each rank; on rank 0.
        owned: number of active rows on each rank; for `SCATTER` only.
        keep: factor of the old value of each active row [Ka]; for `SCATTER` only.
        masks: masks that hide single uploads; None if nothing hides them.
        scale: factors by which the sums of the active rows are multiplied [Ka]; None for 1.
    """

    collective: str
    into: str
    of: str
    part: Part | None
    width: int
    rows: np.ndarray
    weights: np.ndarray
    spacing: np.ndarray
    num_uploads: int
    counts: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    keep: np.ndarray | None = None
    masks: RankMasks | None = None
    scale: np.ndarray | None = None


class Mixer:
    """Carries out mixings and pairwise products over a transport.

    Args:
        transport: connects the ranks.
        tables: the tables whose rows are mixed.
        exact: whether to add in int64, with the same bits for any number of ranks; otherwise in float32.
        collective: the collective to use; None chooses by `costs`, or by bytes if there are no costs.
        costs: cost model of the collectives.
        direct: whether MPI reads GPU memory; otherwise GPU tensors are copied to main memory first.

    Attributes:
        last_collectives: the collective of each mixing in the last call of `mix`; on rank 0.
    """

    def __init__(
        self,
        transport: Transport,
        tables: Tables,
        exact: bool = True,
        collective: str | None = None,
        costs: CostModel | None = None,
        direct: bool = False,
    ) -> None:
        self.transport, self.tables, self.exact, self.collective = transport, tables, exact, collective
        self.costs, self.direct = costs, direct
        self._sum_type = torch.int64 if exact else torch.float32
        self.last_collectives: list[str] = []

    def mix(
        self,
        mixings: Sequence[Mixing] | None,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]] | None,
        uploads: Mapping[str, Sequence[torch.Tensor]],
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Apply mixings in order; return the new central tables by name on rank 0. Collective.

        Args:
            mixings: the mixings, on rank 0; None elsewhere.
            upload_info: returns, for a name, the largest absolute value and the rank of each upload [m]; on
                rank 0, if any mixing has uploads.
            uploads: this rank's uploads [w] by name, in ascending order of their number.
            before: tables that were already changed in this step, on rank 0; None if there are none.

        Raises:
            Mismatch: this rank's uploads are not those of the plan; no collective has begun.
        """
        plans: Sequence[Sequence[RankMixPlan]] | None = None
        weights, counts = None, list[int]()
        if self.transport.is_server:
            assert mixings is not None
            assert upload_info is not None or not any(m.of for m in mixings)
            none = (np.zeros(0), np.zeros(0, np.int64))
            info = [upload_info(m.of) if m.of and upload_info is not None else none for m in mixings]
            plans, weights, counts = self._by_rank(mixings, info)
            self.last_collectives = [p.collective for p in plans[0]]
        changed: dict[str, torch.Tensor] = {}
        mine_of, sent = self.transport.scatter_rows(plans, weights, counts, "plan")
        own = np.frombuffer(sent, float)
        for i, (plan, mine) in enumerate(self._checked(mine_of, own, uploads)):
            if plan.collective == SCATTER:
                self._scatter(plan, mine)
            else:
                mixing = mixings[i] if mixings is not None else None
                new = self._to_server(plan, mine, mixing, {**(before or {}), **changed})
                if new is not None:
                    changed[plan.into] = new
        return changed

    def _checked(
        self, plans: Sequence[RankMixPlan], weights: np.ndarray, uploads: Mapping[str, Sequence[torch.Tensor]]
    ) -> list[tuple[RankMixPlan, Sequence[torch.Tensor]]]:
        """Return this rank's plans with their weights, and the uploads of each.

        Args:
            plans: this rank's plans.
            weights: the weights that rank 0 has sent this rank, flat.
            uploads: this rank's uploads.

        Raises:
            Mismatch: rank 0 has planned with another number of uploads, or with another width.
        """
        out, start, who = list[tuple[RankMixPlan, Sequence[torch.Tensor]]](), 0, f"rank {self.transport.rank}"
        for plan in plans:
            given, num_rows = uploads.get(plan.of, []), len(plan.rows)
            mine = parts_of(given, plan.part)
            check_uploads(mine, plan.width, f"mix:{plan.into}", who)
            if not (self.transport.is_server and plan.collective == GATHER):  # else its plan has all weights
                part = weights[start : start + len(given) * num_rows]
                start += len(given) * num_rows
                if len(part) == len(given) * num_rows:
                    transposed = np.ascontiguousarray(part.reshape(len(given), num_rows).T)
                    plan = replace(plan, weights=transposed)
            out.append((plan, mine))
        if start != len(weights):
            held = ", ".join(f"{len(uploads.get(p.of, []))} for {p.into!r}" for p in plans)
            raise Mismatch(
                f"plan: {who} holds uploads ({held}) that need {start} weights, not {len(weights)}"
            )
        return out

    def _by_rank(
        self, mixings: Sequence[Mixing], info: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[list[list[RankMixPlan]], np.ndarray, list[int]]:
        """Return the plans of each rank, and separately the weights that the ranks need.

        Plans have no weights, except those of rank 0 for a `GATHER`, where rank 0 adds all uploads. Workers
        have the same plans, unless masks hide uploads.

        Args:
            mixings: the mixings, as decided on rank 0.
            info: for each mixing, the largest absolute value and the rank of each upload [m].

        Returns:
            The plans; the weights to send, ordered by rank, mixing and upload; the number of weights for each
            rank.
        """
        size = self.transport.size
        plans = [self._plan(m, *of) for m, of in zip(mixings, info, strict=True)]
        rest = [replace(p, weights=p.weights[:, :0], counts=()) for p in plans]
        parts: list[list[np.ndarray]] = []
        for i, (p, (_, owners)) in enumerate(zip(plans, info, strict=True)):
            order, gathered = gather_order(owners), p.collective == GATHER
            plans[i] = replace(p, weights=p.weights[:, order] if gathered else p.weights[:, :0])
            sent = p.weights.T[order].astype(float)
            ends = [0, *np.cumsum(p.counts).tolist()]
            parts.append([sent[lo:hi].reshape(-1) for lo, hi in pairwise(ends)])
            if gathered:
                parts[-1][0] = np.zeros(0)
        by_rank = [plans, *[rest] * (size - 1)]
        if any(mixing.masks is not None for mixing in mixings):
            by_rank = [
                [_hidden(p, m, owners, r) for p, m, (_, owners) in zip(some, mixings, info, strict=True)]
                for r, some in enumerate(by_rank)
            ]
        flat = [x for some in zip(*parts, strict=True) for x in some]
        counts = [sum(map(len, some)) for some in zip(*parts, strict=True)]
        return by_rank, np.concatenate([np.zeros(0), *flat]), counts or [0] * size

    def _plan(self, mixing: Mixing, max_abs: np.ndarray, owners: np.ndarray) -> RankMixPlan:
        """Return the plan for `mixing` with the weights of all ranks, without masks.

        Args:
            mixing: the mixing, as decided on rank 0.
            max_abs: largest absolute value of each upload [m].
            owners: rank of each upload [m].
        """
        size, sharded = self.transport.size, self.tables.sharded.get(mixing.into)
        rows = np.flatnonzero(np.abs(mixing.weights).sum(1))
        collective = choose(len(rows), len(owners), self.exact, sharded is not None)
        if self.costs is not None and sharded is None:
            width = self.tables.width(mixing.into)
            far = int(np.isin(owners, far_ranks(self.transport.nodes)).sum())
            collective = self.costs.choose(len(rows), len(owners), width, size, self.exact, far)
        if self.collective in (REDUCE, GATHER) and sharded is None:
            collective = self.collective
        masks = mixing.masks
        if masks is not None:
            assert sharded is None, "masked sums are of central tables"
            assert self.exact, "masked sums are exact sums"
            collective = REDUCE
        owned: tuple[int, ...] = ()
        if sharded is not None:
            stays = np.zeros(mixing.num_rows, bool) if mixing.keep is None else mixing.keep == 1
            moving = np.flatnonzero(mixing.weights.any(1) | ~stays)
            rows = moving[np.lexsort((moving, sharded.owner[moving]))]
            owned = tuple(np.bincount(sharded.owner[rows], minlength=size))
        weights = mixing.weights[rows]
        spacing = spacings(weights, max_abs)
        if masks is not None:
            spacing = masks.grid_factor * spacings(masks.grid_weights[rows], max_abs)
        keep = None if mixing.keep is None or sharded is None else mixing.keep[rows]
        counts = tuple(int(c) for c in np.bincount(owners, minlength=size))
        return RankMixPlan(
            collective=collective,
            into=mixing.into,
            of=mixing.of,
            part=mixing.part,
            width=self.tables.width(mixing.into),
            rows=rows,
            weights=weights,
            spacing=spacing,
            num_uploads=len(owners),
            counts=counts,
            owned=tuple(int(o) for o in owned),
            keep=keep,
            scale=None if masks is None else masks.scale[rows],
        )

    def table_before(self, name: str, changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a table [K0, w] before a mixing; on rank 0.

        Args:
            name: name of the table.
            changed: the tables that earlier mixings of the same step have changed.
        """
        return changed[name] if name in changed else self.tables.central[name]

    def _to_server(
        self,
        plan: RankMixPlan,
        mine: Sequence[torch.Tensor],
        mixing: Mixing | None,
        changed: Mapping[str, torch.Tensor],
    ) -> torch.Tensor | None:
        """Carry out a mixing by `REDUCE` or `GATHER`; return the new table [K, w] on rank 0."""
        old = new = None
        if mixing is not None:
            old = self.table_before(plan.into, changed)
            new = torch.empty(mixing.num_rows, plan.width, dtype=torch.float32)
        for columns in column_blocks(
            plan.width, plan.num_uploads if plan.collective == GATHER else len(plan.rows)
        ):
            block = [u[columns] for u in mine]
            given = self._given(plan, block, columns)
            if columns.start == 0:  # ranks wait for each other here, with a free core, instead of inside MPI
                self.transport.barrier()
            sums = self._collected(plan, given, columns)
            if mixing is not None and new is not None and old is not None and sums is not None:
                new[:, columns] = self._placed(plan, mixing, sums, old[:, columns])
        return new

    def _given(self, plan: RankMixPlan, block: Sequence[torch.Tensor], columns: slice) -> torch.Tensor:
        """Return what this rank contributes: sums of its uploads, or the uploads if rank 0 adds them."""
        width = columns.stop - columns.start
        if plan.collective == GATHER:
            return self._for_mpi(stacked(block, width))
        if plan.masks is not None:
            return plan.masks.sums(block, plan.weights, plan.spacing, columns)
        return self._for_mpi(self._sums(plan, block, width))

    def _collected(self, plan: RankMixPlan, given: torch.Tensor, columns: slice) -> torch.Tensor | None:
        """Return the sums of all ranks on rank 0."""
        if plan.collective == GATHER:
            everything = self.transport.Gatherv(given, plan.counts, f"mix:{plan.into}")
            return None if everything is None else self._sums(plan, list(everything), given.shape[1])
        self.transport.Reduce(given, f"mix:{plan.into}", self._sum_type)
        unmask = plan.masks is not None and self.transport.is_server
        return plan.masks.unmasked(given, columns) if plan.masks is not None and unmask else given

    def _placed(
        self, plan: RankMixPlan, mixing: Mixing, sums: torch.Tensor, old: torch.Tensor
    ) -> torch.Tensor:
        """Return all new rows [K, b] from the sums of the active rows [Ka, b] and the old rows [K0, b]."""
        kept = kept_rows(mixing.keep, old)
        step = plan.spacing if plan.scale is None else plan.spacing * plan.scale
        if len(plan.rows) == mixing.num_rows:
            return self._finish(sums, step, kept)
        full = torch.zeros(mixing.num_rows, sums.shape[1], dtype=sums.dtype)
        full[torch.from_numpy(plan.rows)] = sums
        spacing = np.ones(mixing.num_rows)
        spacing[plan.rows] = step
        return self._finish(full, spacing, kept)

    def _scatter(self, plan: RankMixPlan, mine: Sequence[torch.Tensor]) -> None:
        """Mix the active rows of a sharded table; each row ends up at the worker that owns it."""
        table = self.tables.sharded[plan.into]
        if table.width != plan.width:
            raise Mismatch(f"mix:{plan.into}: rows of {table.width} numbers, the plan says {plan.width}")
        start = sum(plan.owned[: self.transport.rank])
        own = slice(start, start + plan.owned[self.transport.rank])
        rows = plan.rows[own]
        self.transport.barrier()
        active = len(plan.rows) if self.transport.is_worker else 0
        for columns in column_blocks(plan.width, active) if active else ():
            block = [u[columns] for u in mine]
            sums = to_main_memory(self._sums(plan, block, columns.stop - columns.start))
            sums = self.transport.Reduce_scatter(sums, plan.owned, f"mix:{plan.into}", self._sum_type)
            keep = None if plan.keep is None else plan.keep[own]
            kept = None if keep is None else kept_rows(keep, table.read(rows, columns))
            table.write(rows, columns, self._finish(sums, plan.spacing[own], kept))
        self.transport.barrier()
        table.commit(plan.rows)

    def _sums(self, plan: RankMixPlan, block: Sequence[torch.Tensor], width: int) -> torch.Tensor:
        """Return the weighted sums of uploads for the active rows [Ka, b]."""
        if self.exact:
            return exact_sum(block, plan.weights, plan.spacing, width)
        return float32_sum(block, plan.weights, width)

    def _finish(self, sums: torch.Tensor, spacing: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
        """Return float32 rows: sums plus the kept parts of the old rows."""
        if self.exact:
            return finish(sums, spacing, kept)
        return sums if kept is None else kept.add_(sums).float()

    def _for_mpi(self, block: torch.Tensor) -> torch.Tensor:
        """Return a block in memory that MPI can read; on rank 0, always main memory."""
        return block if self.direct and not self.transport.is_server else to_main_memory(block)

    def gram(
        self, vectors: Sequence[torch.Tensor], counts: Sequence[int], owners: np.ndarray | None, width: int
    ) -> np.ndarray | None:
        """Return the inner products of all pairs of vectors of all ranks, float64 [m, m], on rank 0.

        Column blocks of fixed width are gathered and multiplied on rank 0 in the order of the reports, so
        the bits do not depend on which rank held which vector.

        Args:
            vectors: this rank's vectors, float32 [width].
            counts: number of vectors on each rank.
            owners: rank of each report [m], on rank 0; None elsewhere.
            width: length of a vector.

        Raises:
            Mismatch: this rank has other vectors than `counts` and `width` say; no collective has begun.
        """
        check_uploads(vectors, width, "gram", f"rank {self.transport.rank}", counts[self.transport.rank])
        out = order = None
        if owners is not None:
            order = torch.from_numpy(np.argsort(gather_order(owners)))
            out = torch.zeros(len(order), len(order), dtype=torch.float64)
        self.transport.barrier()
        for lo in range(0, width, GRAM_BLOCK):
            columns = slice(lo, min(lo + GRAM_BLOCK, width))
            block = self._for_mpi(stacked([v[columns] for v in vectors], columns.stop - lo))
            everything = self.transport.Gatherv(block, counts, "gram")
            if out is not None and everything is not None:
                x = everything[order].double()
                for top in range(0, len(out), GRAM_ROWS):  # in parts, to avoid a second matrix [m, m]
                    out[top : top + GRAM_ROWS] += x[top : top + GRAM_ROWS] @ x.T
        return None if out is None else out.numpy()


def column_blocks(width: int, height: int, size: int | None = None) -> Iterator[slice]:
    """Yield column blocks of a matrix [height, width], each of about `size` numbers (default: `BLOCK`)."""
    step = max(1024, (BLOCK if size is None else size) // max(height, 1))
    for lo in range(0, width, step):
        yield slice(lo, min(lo + step, width))


def _hidden(plan: RankMixPlan, mixing: Mixing, owners: np.ndarray, rank: int) -> RankMixPlan:
    """Return a rank's plan with the masks that hide its uploads, if the mixing has masks."""
    if mixing.masks is None:
        return plan
    return replace(plan, masks=mixing.masks.of_rank(plan.rows, np.flatnonzero(owners == rank), rank == 0))


def check_uploads(
    uploads: Sequence[torch.Tensor], width: int, purpose: str, who: str = "rank 0", count: int | None = None
) -> None:
    """Check vectors that enter a sum or a collective.

    Args:
        uploads: the vectors, or their parts.
        width: the length that has been agreed on.
        purpose: label of the call.
        who: whose vectors they are.
        count: how many there must be; None for any number.

    Raises:
        Mismatch: one is not float32 [width], or there are more or fewer.
    """
    if count not in (None, len(uploads)):
        raise Mismatch(f"{purpose}: {who} holds {len(uploads)} uploads, rank 0 has counted {count}")
    for u in uploads:
        if u.dtype is not torch.float32 or u.shape != (width,):
            check_block(u.contiguous(), purpose, torch.float32, (width,), f"an upload on {who}")


def parts_of(uploads: Sequence[torch.Tensor], part: Part | None) -> Sequence[torch.Tensor]:
    """Return the slices of uploads that are mixed."""
    return uploads if part is None else [take(u, part) for u in uploads]


def stacked(block: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return vectors as one contiguous tensor [n, width], in main memory if their devices differ."""
    if len({u.device for u in block}) > 1:
        block = [to_main_memory(u) for u in block]
    return torch.stack(list(block)) if len(block) else torch.empty(0, width)


def gather_order(owners: np.ndarray) -> np.ndarray:
    """Return the numbers of the uploads [m] in the order in which a gather delivers them."""
    return np.argsort(owners, kind="stable")
