"""Mixings in which a robust rule replaces the mean, computed over ranks that each see a block of coordinates.

`Alltoallv` redistributes the uploads in passes: each rank owns a block of columns and receives the values of
all uploads in that block. So no rank holds all uploads, and the work is spread evenly. Each rank sends its
results to rank 0: the rule's values for its columns (`Gatherv`), or its part of the distances (`Reduce`).
From the distances, rank 0 computes weights of the uploads, and an ordinary mixing with these weights follows.

Results do not depend on the number of ranks: members are ordered as their reports, coordinates are
independent of each other, and distances are added over tiles of fixed width as multiples of two grid
spacings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from mpifl.aggregation.exact_sum import kept_rows, spacings
from mpifl.aggregation.mixer import Mixer, check_uploads, gather_order, parts_of, stacked
from mpifl.comm.transport import Transport
from mpifl.core.devices import to_main_memory
from mpifl.core.errors import MethodError
from mpifl.core.parameters import Part, VectorParts
from mpifl.core.plan import Mixing, statistics_of, weights_of

from .robust_rules import CoordinateRule, DistanceRule, Rule, total

TILE = 256  # columns over which distances are added at a time; fixed, because the bits depend on it
LINE = 64  # for coordinate rules, columns are assigned to ranks in multiples of this
FINE_BITS = 60  # of an int64 that the sum over tiles takes on the fine grid
SCRATCH = 1 << 20  # numbers in a block of all uploads on one rank: 4 MB
LARGEST_COUNT = (1 << 31) - 1  # most numbers in one MPI message


@dataclass(frozen=True)
class ExchangePlan:
    """What every rank knows about one mixing.

    Attributes:
        into: name of the table.
        of: name of the uploads.
        part: slices of an upload that are mixed; None for all.
        width: columns of the table.
        counts: number of uploads on each rank.
        order: position of each upload [m] in an exchanged block, whose rows are in rank order.
        groups: for each active row, the uploads [n] that enter it (its members), ascending.
        centres: whether distances of each active row's members are measured from the old row, bool [Ka];
            otherwise from 0.
        rows: indices of the active rows [Ka].
        max_abs: largest absolute value of each upload [m].
        row_max_abs: largest absolute value of the old row of each active row [Ka]; 0 where it is not used.
        unmeasured: columns that do not count in distances: running statistics.
    """

    into: str
    of: str
    part: Part | None
    width: int
    counts: tuple[int, ...]
    order: np.ndarray
    groups: tuple[np.ndarray, ...]
    centres: np.ndarray
    rows: np.ndarray
    max_abs: np.ndarray
    row_max_abs: np.ndarray
    unmeasured: Part = ()

    @property
    def num_centres(self) -> int:
        """Number of old rows that rank 0 sends with its uploads."""
        return int(self.centres.sum())

    @property
    def height(self) -> int:
        """Number of rows of a block: all uploads, and the old rows."""
        return len(self.order) + self.num_centres


class RobustMixer:
    """Carries out mixings in which a robust rule replaces the mean.

    Args:
        transport: connects the ranks.
        mixer: carries out the ordinary mixings; its tables are the ones that are mixed into.
        rule: the robust rule.
        statistics: names of uploads that do not represent parameters (`Rule.applies`).
        parts: which columns hold running statistics, whose distances mean nothing; None for no column.

    Attributes:
        num_too_small: number of rows in the last call of `mix` whose groups were too small for the rule,
            without those of statistics; on rank 0.
    """

    def __init__(
        self,
        transport: Transport,
        mixer: Mixer,
        rule: Rule,
        statistics: Collection[str] = (),
        parts: VectorParts | None = None,
    ) -> None:
        self.transport, self.mixer, self.rule, self.statistics = transport, mixer, rule, statistics
        self.parts = parts
        self.num_too_small = 0

    def mix(
        self,
        mixings: Sequence[Mixing] | None,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]] | None,
        uploads: Mapping[str, Sequence[torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Apply mixings in order; return the new tables by name on rank 0. Collective.

        Args:
            mixings: the mixings, on rank 0; None elsewhere.
            upload_info: returns, for a name, the largest absolute value and the rank of each upload [m]; on
                rank 0.
            uploads: this rank's uploads [w] by name, in ascending order of their number.

        Raises:
            MethodError: on rank 0, if a mixing is not an average, or has new rows where the rule needs old
                ones.
        """
        self.num_too_small = 0
        found: tuple[Mixing, Mixing] | None = None  # of weights that are mixed apart, and what the rule made
        changed: dict[str, torch.Tensor] = {}
        count = self.transport.bcast(None if mixings is None else len(mixings), "plan")
        for i in range(count):
            mixing = None if mixings is None else mixings[i]
            plan = None
            if mixing is not None and found is not None and _goes_with(mixing, found[0]):
                mixing = alike(mixing, *found)
            elif mixing is not None and upload_info is not None:
                plan = self._plan(mixing, upload_info, changed)
            plan = self.transport.bcast(plan, "plan")
            if plan is not None and isinstance(self.rule, CoordinateRule):
                new = self._coordinates(plan, uploads, mixing, changed, self.rule)
                if new is not None:
                    changed[plan.into] = new
                continue
            if plan is not None:
                assert isinstance(self.rule, DistanceRule)
                squares = self._distances(plan, uploads, changed, self.rule)
                if mixing is not None and squares is not None:
                    found = mixing, reweighted(mixing, plan, squares, self.rule)
                    mixing = found[1]
            one = None if mixing is None else [mixing]
            changed |= self.mixer.mix(one, upload_info, uploads, changed)
        return changed

    # -- plans -----------------------------------------------------------------------------------------------

    def _plan(
        self,
        mixing: Mixing,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]],
        changed: Mapping[str, torch.Tensor],
    ) -> ExchangePlan | None:
        """Return the plan of a mixing; None if no upload enters it, or if the rule does not apply."""
        rows = np.flatnonzero(mixing.weights.any(1)) if mixing.of else np.zeros(0, np.int64)
        old = self.mixer.table_before(mixing.into, changed)
        if not len(rows) or not old.shape[1] or not self.rule.applies(mixing.of, self.statistics):
            return None
        if (mixing.weights < 0).any():
            what = f"mixing into {mixing.into!r}: negative weights are not an average"
            raise MethodError("aggregate", what, "leave out Needs(averages=True), or robust")
        max_abs, owners = upload_info(mixing.of)
        groups = tuple(np.flatnonzero(mixing.weights[k]) for k in rows)
        if mixing.of not in self.statistics:
            self.num_too_small += sum(self.rule.too_small(len(g)) for g in groups)
        centres = np.zeros(len(rows), bool)
        if isinstance(self.rule, DistanceRule) and self.rule.from_row:
            centres = np.isclose(mixing.row_sums()[rows], 1.0, atol=1e-9)
            if (rows[centres] >= len(old)).any():
                what = f"mixing into {mixing.into!r}: rows that were not there before have no update to bound"
                raise MethodError("aggregate", what, "declare Needs(new_rows=True)")
        used = zip(rows.tolist(), centres.tolist(), strict=True)
        row_max = np.array([float(old[k].abs().max()) if centred else 0.0 for k, centred in used])
        return ExchangePlan(
            into=mixing.into,
            of=mixing.of,
            part=mixing.part,
            width=old.shape[1],
            counts=tuple(int(c) for c in np.bincount(owners, minlength=self.transport.size)),
            order=_places(owners, int(centres.sum())),
            groups=groups,
            centres=centres,
            rows=rows,
            max_abs=max_abs,
            row_max_abs=row_max,
            unmeasured=() if self.parts is None else self.parts.statistics(mixing.into, old.shape[1]),
        )

    # -- blocks of columns -----------------------------------------------------------------------------------

    def _blocks(
        self,
        plan: ExchangePlan,
        uploads: Mapping[str, Sequence[torch.Tensor]],
        changed: Mapping[str, torch.Tensor],
        unit: int,
    ) -> Iterator[tuple[list[slice], torch.Tensor]]:
        """Yield the columns of each rank, and all uploads' values [m + centres, b] in this rank's columns.

        Uploads are in the order of their reports, followed by the old rows.
        """
        transport, mine = self.transport, parts_of(uploads.get(plan.of, []), plan.part)
        count, who = plan.counts[transport.rank], f"rank {transport.rank}"
        check_uploads(mine, plan.width, f"robust:{plan.into}", who, count)
        rows = None
        if transport.is_server and plan.num_centres:
            rows = self.mixer.table_before(plan.into, changed)[torch.from_numpy(plan.rows[plan.centres])]
        heights = list(plan.counts)
        heights[0] += plan.num_centres
        places = torch.from_numpy(np.concatenate([plan.order, plan.counts[0] + np.arange(plan.num_centres)]))
        transport.barrier()
        for columns in columns_of_ranks(plan.width, transport.size, plan.height, unit):
            blocks = []
            for c in columns:
                block = to_main_memory(stacked([u[c] for u in mine], c.stop - c.start))
                blocks.append(block.reshape(-1))
                if rows is not None:
                    blocks.append(rows[:, c].reshape(-1))
            own = columns[transport.rank]
            sent = [heights[transport.rank] * (c.stop - c.start) for c in columns]
            received = [h * (own.stop - own.start) for h in heights]
            got = transport.Alltoallv(torch.cat(blocks), sent, received, f"robust:{plan.into}")
            yield columns, got.view(plan.height, -1)[places]

    # -- coordinates -----------------------------------------------------------------------------------------

    def _coordinates(
        self,
        plan: ExchangePlan,
        uploads: Mapping[str, Sequence[torch.Tensor]],
        mixing: Mixing | None,
        changed: Mapping[str, torch.Tensor],
        rule: CoordinateRule,
    ) -> torch.Tensor | None:
        """Return the new table [K, w] according to a coordinate rule, on rank 0."""
        new = None if mixing is None else torch.empty(mixing.num_rows, plan.width, dtype=torch.float32)
        for columns, block in self._blocks(plan, uploads, changed, LINE):
            values, active = block.numpy(), len(plan.groups)
            found = np.empty((active, values.shape[1]), np.float32)
            for i, group in enumerate(plan.groups):
                found[i] = rule.row(values if len(group) == len(values) else values[group])
            counts = [active * (c.stop - c.start) for c in columns]
            flat = torch.from_numpy(found).reshape(-1, 1)
            everything = self.transport.Gatherv(flat, counts, f"robust:{plan.into}")
            if everything is None or mixing is None or new is None:
                continue
            old = self.mixer.table_before(plan.into, changed)
            for c, piece in zip(columns, everything.view(-1).split(counts), strict=True):
                new[:, c] = placed(mixing, plan.rows, piece.view(active, -1), old[:, c])
        return new

    # -- distances -------------------------------------------------------------------------------------------

    def _distances(
        self,
        plan: ExchangePlan,
        uploads: Mapping[str, Sequence[torch.Tensor]],
        changed: Mapping[str, torch.Tensor],
        rule: DistanceRule,
    ) -> list[np.ndarray] | None:
        """Return the squared distances that a rule needs, one array for each active row; on rank 0."""
        grids = _grids(plan, rule)
        sums = np.zeros(grids.shape, np.int64)
        centre = np.cumsum(plan.centres) - 1  # index of each active row's old row among those sent
        for columns, block in self._blocks(plan, uploads, changed, TILE):
            own = columns[self.transport.rank]
            for s in plan.unmeasured:
                block[:, max(s.start - own.start, 0) : max(s.stop - own.start, 0)] = 0.0
            for lo in range(0, block.shape[1], TILE):
                tile = block[:, lo : lo + TILE].double()
                found = []
                for i, group in enumerate(plan.groups):
                    members = tile[torch.from_numpy(group)]
                    if not rule.from_row:
                        found.append(torch.nn.functional.pdist(members).square_())
                        continue
                    if plan.centres[i]:
                        members = members - tile[len(plan.order) + int(centre[i])]
                    found.append(members.square().sum(1))
                rest = torch.cat(found).numpy()
                for spacing, total_of_grid in zip(grids, sums, strict=True):
                    multiples = np.rint(rest / spacing)
                    total_of_grid += multiples.astype(np.int64)
                    rest = rest - multiples * spacing
        found_sums = torch.from_numpy(sums)
        self.transport.Reduce(found_sums, f"robust:{plan.into}", torch.int64)
        if not self.transport.is_server:
            return None
        squares, first = (found_sums.numpy() * grids).sum(0), 0
        out = []
        for group in plan.groups:
            n = len(group)
            count = n if rule.from_row else n * (n - 1) // 2
            some, first = squares[first : first + count], first + count
            out.append(some if rule.from_row else _square(some, n))
        return out


def columns_of_ranks(columns: int, ranks: int, height: int, unit: int) -> Iterator[list[slice]]:
    """Yield, for each pass, the columns of each rank; widths are multiples of `unit`, except the last.

    Args:
        columns: number of columns of the table.
        ranks: P, number of ranks.
        height: rows of a block; a block has at most about `SCRATCH` numbers.
        unit: number of columns that are not divided further.
    """
    units = -(-columns // unit)
    each = max(1, min(SCRATCH // (unit * max(height, 1)), -(-units // ranks)))
    each = min(each, max(1, LARGEST_COUNT // (unit * max(height, 1) * ranks)))  # a rank's message, all parts
    for first in range(0, units, each * ranks):
        edges = [min(columns, (first + r * each) * unit) for r in range(ranks + 1)]
        yield [slice(a, b) for a, b in pairwise(edges)]


def busiest_bytes(rows: int, uploads: int, d: int, ranks: int, rule: Rule) -> int:
    """Return the bytes that the busiest rank receives before the rule's mixing.

    Args:
        rows: K, number of rows that receive uploads.
        uploads: m, number of uploads; each enters one row.
        d: columns of the table.
        ranks: P, number of ranks.
        rule: the robust rule.
    """
    if ranks == 1:
        return 0
    unit = LINE if isinstance(rule, CoordinateRule) else TILE
    share = min(d, -(-d // (unit * ranks)) * unit)  # columns of a rank
    if isinstance(rule, CoordinateRule):
        return 4 * uploads * share + 4 * rows * (d - share)  # rank 0: its columns, and results of other ranks
    assert isinstance(rule, DistanceRule)
    centres = rows if rule.from_row else 0
    each = -(-uploads // rows)
    values = uploads if rule.from_row else rows * each * (each - 1) // 2
    return 4 * uploads * share + max(16 * values, 4 * centres * share)


def placed(mixing: Mixing, rows: np.ndarray, found: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return all new rows, float32 [K, b]: the kept parts of the old rows plus s times the rule's value.

    Args:
        mixing: the mixing; s is the sum of its weights in a row.
        rows: indices of the active rows [Ka].
        found: the rule's values for these rows, float32 [Ka, b].
        old: the table before the mixing, float32 [K0, b].
    """
    scale = total(mixing.weights[rows])
    kept = kept_rows(mixing.keep, old)
    out = torch.zeros(mixing.num_rows, old.shape[1], dtype=torch.float64) if kept is None else kept
    out[torch.from_numpy(rows)] += found.double() * torch.from_numpy(scale)[:, None]
    return out.float()


def reweighted(
    mixing: Mixing, plan: ExchangePlan, squares: Sequence[np.ndarray], rule: DistanceRule
) -> Mixing:
    """Return a mixing with the weights of a rule; the old row keeps the weight that the rule removes.

    Args:
        mixing: mixing of the method.
        plan: the mixing's active rows and their members.
        squares: for each active row, the squared distances for `DistanceRule.weights`.
        rule: the robust rule.
    """
    weights = np.zeros_like(mixing.weights)
    rest = np.zeros(mixing.num_rows)
    for k, group, apart, centred in zip(plan.rows, plan.groups, squares, plan.centres, strict=True):
        before = mixing.weights[k, group]
        weights[k, group] = rule.weights(apart, before)
        if centred:
            rest[k] = (before - weights[k, group]).sum()
    return replace(mixing, weights=weights, keep=_with_rest(mixing.keep, rest))


def _goes_with(mixing: Mixing, weights: Mixing) -> bool:
    """Return whether a mixing is that of the statistics beside a mixing of weights (`core/mixing.py`)."""
    base = weights.into.removesuffix(weights_of(""))
    return weights.into == weights_of(base) and mixing.into == statistics_of(base)


def alike(mixing: Mixing, before: Mixing, after: Mixing) -> Mixing:
    """Return a mixing of statistics in which each upload has the share that a rule gave to its weights.

    Args:
        mixing: the mixing of the statistics.
        before: mixing of the weights, by the method.
        after: the same, by the rule. The old row keeps what the rule removes.
    """
    sums = total(before.weights)
    shares = after.weights / np.where(sums, sums, 1.0)[:, None]
    weights, keep = shares * total(mixing.weights)[:, None], mixing.keep
    rest = total(mixing.weights) - weights.sum(1)
    rest = np.where(np.isclose(rest, 0.0, atol=1e-9), 0.0, rest)
    return replace(mixing, weights=weights, keep=_with_rest(keep, rest))


def _with_rest(keep: np.ndarray | None, rest: np.ndarray) -> np.ndarray | None:
    """Return the weights of old rows, each with `rest` [K] more of its own row."""
    if not rest.any():
        return keep
    own = rest if keep is None or keep.ndim == 1 else np.eye(*keep.shape) * rest[:, None]
    return own if keep is None else keep + own


def _places(owners: np.ndarray, centres: int) -> np.ndarray:
    """Return the position of each upload [m] among all that ranks send; rank 0's are followed by old rows."""
    places = np.argsort(gather_order(owners))
    return np.where(owners > 0, places + centres, places)


def _grids(plan: ExchangePlan, rule: DistanceRule) -> np.ndarray:
    """Return the two grid spacings of each squared distance that is measured, coarse and fine [2, n].

    The coarse grid has room for the largest distance that the uploads can have, and real ones may be much
    smaller: models differ little. The fine grid takes what a tile has beside multiples of the coarse one, of
    which at most half a spacing is left; int64 has room for the sum over all tiles.
    """
    bounds = []
    for i, group in enumerate(plan.groups):
        a = plan.max_abs[group]
        if rule.from_row:
            sums = a + plan.row_max_abs[i]
        else:
            first, second = np.triu_indices(len(group), 1)
            sums = a[first] + a[second]
        bounds.append(plan.width * sums**2)
    coarse = spacings(np.concatenate(bounds)[:, None], np.ones(1))
    tiles = -(-plan.width // TILE)
    return np.stack([coarse, coarse * 2.0 ** (tiles.bit_length() - FINE_BITS)])


def _square(upper: np.ndarray, n: int) -> np.ndarray:
    """Return the symmetric matrix [n, n] whose upper triangle is given row by row."""
    out = np.zeros((n, n))
    out[np.triu_indices(n, 1)] = upper
    return out + out.T
