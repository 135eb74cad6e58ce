"""Mixings whose means are taken by a robust rule, over ranks that each see a block of the coordinates.

Uploads change places by `Alltoallv`: in a pass, each rank gives every other rank its own uploads' values of
that rank's block of columns, and has the values of all uploads for its own block. So no rank holds all
uploads, and the work is spread evenly. What a rank finds goes to rank 0: the rule's values of its columns
(`Gatherv`), or its part of the distances (`Reduce`), from which rank 0 weighs the uploads; the mixing is then
an ordinary one.

Results do not depend on the number of ranks: members stand in the order of their reports, coordinates are
independent of each other, and distances are added over tiles of fixed width as multiples of a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from mpifl.comm.transport import Transport
from mpifl.core.devices import to_main_memory
from mpifl.core.errors import MethodError
from mpifl.core.mixing import Mixing
from mpifl.core.parameters import Part

from .exact_sum import kept_rows, spacings
from .mixer import Mixer, gather_order, parts_of, stacked
from .robust_rules import CoordinateRule, DistanceRule, Rule, total

TILE = 256  # columns over which distances are added at a time; fixed, because the bits depend on it
LINE = 64  # columns are dealt to ranks in multiples of this where coordinates stand alone
SCRATCH = 1 << 20  # numbers of a block of all uploads on one rank: 4 MB
LARGEST_COUNT = (1 << 31) - 1  # numbers in one message of MPI


@dataclass(frozen=True)
class ExchangePlan:
    """What every rank knows of one mixing.

    Attributes:
        into: name of the table.
        of: name of the uploads.
        part: slices of an upload that are mixed; None for all.
        width: columns of the table.
        counts: uploads on each rank.
        order: where each upload [m] stands among those that ranks send, in rank order.
        groups: the uploads [n] that enter each active row, ascending.
        centres: whether the members of each active row are measured from the old row, bool [Ka]; else
            from 0.
        rows: indices of the active rows [Ka].
        max_abs: largest absolute value of each upload [m].
        row_max_abs: of the old row of each active row [Ka]; 0 where it is not used.
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

    @property
    def num_centres(self) -> int:
        """Old rows that rank 0 sends with its uploads."""
        return int(self.centres.sum())

    @property
    def height(self) -> int:
        """Lines of a block: all uploads, and old rows."""
        return len(self.order) + self.num_centres


class RobustMixer:
    """Carries out mixings in which a rule takes the place of the mean.

    Args:
        transport: the ranks.
        mixer: carries out what is left to add; its tables are those that are mixed into.
        rule: takes the place of the mean.
        statistics: names of uploads that do not stand for parameters (`Rule.applies`).

    Attributes:
        num_too_small: rows of the last call of `mix` whose groups were too small for the rule; on rank 0.
    """

    def __init__(
        self, transport: Transport, mixer: Mixer, rule: Rule, statistics: Collection[str] = ()
    ) -> None:
        self.transport, self.mixer, self.rule, self.statistics = transport, mixer, rule, statistics
        self.num_too_small = 0

    def mix(
        self,
        mixings: Sequence[Mixing] | None,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]] | None,
        uploads: Mapping[str, Sequence[torch.Tensor]],
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Apply mixings in order; return the new tables by name on rank 0. Collective.

        Args:
            mixings: on rank 0; None elsewhere.
            upload_info: returns largest absolute value and rank of each upload [m] of a name; on rank 0.
            uploads: this rank's uploads [w] by name, in ascending order of their number.
            tables: the tables that are mixed into, on rank 0; None: those that the mixer has.

        Raises:
            MethodError: a mixing is no average, on rank 0.
        """
        if tables is not None:
            self.mixer.tables.publish(tables)
        self.num_too_small = 0
        changed: dict[str, torch.Tensor] = {}
        count = self.transport.bcast(None if mixings is None else len(mixings), "plan")
        for i in range(count):
            mixing = None if mixings is None else mixings[i]
            plan = None
            if mixing is not None and upload_info is not None:
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
                    mixing = reweighted(mixing, plan, squares, self.rule)
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
        """Return the plan of a mixing; None where no upload enters, or the rule does not apply."""
        rows = np.flatnonzero(mixing.weights.any(1)) if mixing.of else np.zeros(0, np.int64)
        old = self._old(mixing.into, changed)
        if not len(rows) or not old.shape[1] or not self.rule.applies(mixing.of, self.statistics):
            return None
        if (mixing.weights < 0).any():
            what = f"mixing into {mixing.into!r}: weights below 0 are no average"
            raise MethodError("aggregate", what, "leave out Needs(averages=True), or robust")
        max_abs, owners = upload_info(mixing.of)
        groups = tuple(np.flatnonzero(mixing.weights[k]) for k in rows)
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
        )

    def _old(self, name: str, changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a table [K0, w] before the mixing; on rank 0."""
        return changed[name] if name in changed else self.mixer.tables.central[name]

    # -- blocks of columns -----------------------------------------------------------------------------------

    def _blocks(
        self,
        plan: ExchangePlan,
        uploads: Mapping[str, Sequence[torch.Tensor]],
        changed: Mapping[str, torch.Tensor],
        unit: int,
    ) -> Iterator[tuple[list[slice], torch.Tensor]]:
        """Yield the columns of each rank, and all uploads' values [m + centres, b] of this rank's columns.

        Uploads stand in the order of their reports, old rows after them.
        """
        transport, mine = self.transport, parts_of(uploads.get(plan.of, []), plan.part)
        rows = None
        if transport.is_server and plan.num_centres:
            rows = self._old(plan.into, changed)[torch.from_numpy(plan.rows[plan.centres])]
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
        """Return the new table [K, w] by a rule of coordinates, on rank 0."""
        new = None if mixing is None else torch.empty(mixing.num_rows, plan.width)
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
            old = self._old(plan.into, changed)
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
        """Return the squared distances that a rule asks for, one array for each active row; on rank 0."""
        spacing = _spacings(plan, rule)
        sums = np.zeros(len(spacing), np.int64)
        centre = np.cumsum(plan.centres) - 1  # of each active row, among the old rows that were sent
        for _, block in self._blocks(plan, uploads, changed, TILE):
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
                sums += np.rint(torch.cat(found).numpy() / spacing).astype(np.int64)
        found_sums = torch.from_numpy(sums)
        self.transport.Reduce(found_sums, f"robust:{plan.into}")
        if not self.transport.is_server:
            return None
        squares, first = found_sums.numpy() * spacing, 0
        out = []
        for group in plan.groups:
            n = len(group)
            count = n if rule.from_row else n * (n - 1) // 2
            some, first = squares[first : first + count], first + count
            out.append(some if rule.from_row else _square(some, n))
        return out


def columns_of_ranks(columns: int, ranks: int, height: int, unit: int) -> Iterator[list[slice]]:
    """Yield, for each pass, the columns of each rank; multiples of `unit` wide but for the last.

    Args:
        columns: of the table.
        ranks: P.
        height: lines of a block; a block has about `SCRATCH` numbers at most.
        unit: columns are not divided further.
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
        rows: K, rows that receive uploads.
        uploads: m; each enters one row.
        d: columns of the table.
        ranks: P.
        rule: which.
    """
    if ranks == 1:
        return 0
    unit = LINE if isinstance(rule, CoordinateRule) else TILE
    share = min(d, -(-d // (unit * ranks)) * unit)  # columns of a rank
    if isinstance(rule, CoordinateRule):
        return 4 * uploads * share + 4 * rows * (d - share)  # rank 0: its columns, and the others' results
    assert isinstance(rule, DistanceRule)
    centres = rows if rule.from_row else 0
    each = -(-uploads // rows)
    values = uploads if rule.from_row else rows * each * (each - 1) // 2
    return 4 * uploads * share + max(8 * values, 4 * centres * share)


def placed(mixing: Mixing, rows: np.ndarray, found: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return all new rows, float32 [K, b]: what is kept of the old rows, and s times the rule.

    Args:
        mixing: its weights of row k add up to s.
        rows: indices of the active rows [Ka].
        found: what the rule found for them, float32 [Ka, b].
        old: the table before, float32 [K0, b].
    """
    scale = total(mixing.weights[rows])
    kept = kept_rows(mixing.keep, old)
    out = torch.zeros(mixing.num_rows, old.shape[1], dtype=torch.float64) if kept is None else kept
    out[torch.from_numpy(rows)] += found.double() * torch.from_numpy(scale)[:, None]
    return out.float()


def reweighted(
    mixing: Mixing, plan: ExchangePlan, squares: Sequence[np.ndarray], rule: DistanceRule
) -> Mixing:
    """Return a mixing with the weights of a rule; what they lack of the method's stays with the old row.

    Args:
        mixing: of the method.
        plan: its active rows and their members.
        squares: for each active row, what `DistanceRule.weights` takes.
        rule: which.
    """
    weights, keep = np.zeros_like(mixing.weights), mixing.keep
    rest = np.zeros(mixing.num_rows)
    for k, group, apart, centred in zip(plan.rows, plan.groups, squares, plan.centres, strict=True):
        before = mixing.weights[k, group]
        weights[k, group] = rule.weights(apart, before)
        if centred:
            rest[k] = (before - weights[k, group]).sum()
    if rest.any():
        own = rest if keep is None or keep.ndim == 1 else np.eye(*keep.shape) * rest[:, None]
        keep = own if keep is None else keep + own
    return replace(mixing, weights=weights, keep=keep)


def _places(owners: np.ndarray, centres: int) -> np.ndarray:
    """Return where each upload [m] stands among those that ranks send; rank 0 adds old rows to its own."""
    places = np.argsort(gather_order(owners))
    return np.where(owners > 0, places + centres, places)


def _spacings(plan: ExchangePlan, rule: DistanceRule) -> np.ndarray:
    """Return the grid spacing of each squared distance that is measured."""
    bounds = []
    for i, group in enumerate(plan.groups):
        a = plan.max_abs[group]
        if rule.from_row:
            sums = a + plan.row_max_abs[i]
        else:
            first, second = np.triu_indices(len(group), 1)
            sums = a[first] + a[second]
        bounds.append(plan.width * sums**2)
    return spacings(np.concatenate(bounds)[:, None], np.ones(1))


def _square(upper: np.ndarray, n: int) -> np.ndarray:
    """Return the symmetric matrix [n, n] whose upper triangle is given line by line."""
    out = np.zeros((n, n))
    out[np.triu_indices(n, 1)] = upper
    return out + out.T
