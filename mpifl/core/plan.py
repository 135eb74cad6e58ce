"""The decision of a method about a step: affine maps of rows, tables <- keep @ tables + weights @ uploads.

Mixings of models whose running statistics are mixed by weights of their own are made here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from .parameters import Part, VectorParts, beyond, put_, take, width


class RankMasks(Protocol):
    """Hides the uploads of one rank in a mixing."""

    def sums(
        self, block: Sequence[torch.Tensor], weights: np.ndarray, spacing: np.ndarray, columns: slice
    ) -> torch.Tensor:
        """Return the sums of this rank's masked uploads, int64 [Ka, b]."""

    def unmasked(self, sums: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return the sums of all ranks' uploads, int64 [Ka, b]; on rank 0."""


class Masks(Protocol):
    """Hides the uploads of a mixing from the server (`protection/secure_sum.py`).

    Attributes:
        grid_weights: float64 [K, m], weights that determine the grid of the exact sums, including those of
            uploads that do not arrive.
        scale: float64 [K], factors by which the sums are multiplied.
        grid_factor: how much coarser the grid is than without masks.
    """

    @property
    def grid_weights(self) -> np.ndarray:
        """Weights [K, m]."""

    @property
    def scale(self) -> np.ndarray:
        """Factors [K]."""

    @property
    def grid_factor(self) -> float:
        """How much coarser the grid is."""

    def of_rank(self, rows: np.ndarray, uploads: np.ndarray, is_server: bool) -> RankMasks:
        """Return what one rank needs, for the active rows and the rank's uploads."""


@dataclass(frozen=True)
class Mixing:
    """One affine step of one table.

    Attributes:
        weights: float64 [K, m], how much of each upload enters each row.
        keep: weights of the old rows: None (nothing is kept), [K] (one factor per row) or [K, K0] (each new
            row as a combination of old rows).
        into: name of the table.
        of: name of the uploads; empty if no upload enters.
        part: slices of the upload that are mixed, when the table is narrower than the upload.
        masks: the masks that hide single uploads; set by the engine under secure aggregation.
    """

    weights: np.ndarray
    keep: np.ndarray | None = None
    into: str = "model"
    of: str = "model"
    part: Part | None = None
    masks: Masks | None = None

    @property
    def num_rows(self) -> int:
        """K, rows of the table after the step."""
        return len(self.weights)

    def row_sums(self) -> np.ndarray:
        """Return keep + weights summed over each row [K]: ones for a convex step on models."""
        kept = 0.0 if self.keep is None else self.keep if self.keep.ndim == 1 else self.keep.sum(1)
        return np.asarray(self.weights.sum(1) + kept)


@dataclass(frozen=True)
class Plan:
    """The decision of the server about one step.

    Attributes:
        mixings: applied in order.
        assign: int64 [N], replaces the assignment; None: unchanged.
        algorithm_state: the entries of the method's state that change; None: none.
    """

    mixings: Sequence[Mixing]
    assign: np.ndarray | None = None
    algorithm_state: Mapping[str, np.ndarray] | None = None


def statistics_of(name: str) -> str:
    """Return the name of the statistics beside an upload, or of the statistics of a table mixed apart."""
    return f"{name}.statistics"


def weights_of(name: str) -> str:
    """Return the name of the weights of a table mixed apart."""
    return f"{name}.weights"


@dataclass(frozen=True)
class MixingsApart:
    """Mixings in which the statistics of some tables are mixed by weights of their own.

    Attributes:
        mixings: the mixings; each one into such a table is two, into a table of the weights and into one of
            the statistics.
        tables: these two tables, for each table that is mixed apart.
        columns: table -> the columns of its weights and of its statistics.
    """

    mixings: Sequence[Mixing]
    tables: Mapping[str, torch.Tensor]
    columns: Mapping[str, tuple[Part, Part]]

    def joined(self, changed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the changed tables, with those joined that were mixed apart."""
        out = {name: rows for name, rows in changed.items() if name not in self.tables}
        for name, parts in self.columns.items():
            pieces = [changed[weights_of(name)], changed[statistics_of(name)]]
            rows = pieces[0].new_empty(len(pieces[0]), sum(map(width, parts)))
            for piece, part in zip(pieces, parts, strict=True):
                put_(rows, part, piece)
            out[name] = rows
        return out


def with_statistics_apart(
    mixings: Sequence[Mixing],
    tables: Mapping[str, torch.Tensor],
    parts: VectorParts,
    values: Collection[str] = (),
) -> MixingsApart:
    """Return mixings whose statistics are means of what arrived, whatever step the weights of a model take.

    A mixing whose rows are means, with no negative factor, is left as it is. Masked mixings are, too.

    Args:
        mixings: the mixings of a plan.
        tables: the tables before it, float32 [K, w]; others are left as they are.
        parts: what the vectors hold.
        values: uploads that are changes, whose statistics were uploaded as well (`statistics_of`).
    """
    apart = {
        m.into
        for m in mixings
        if m.into in tables
        and parts.held(m.into, tables[m.into].shape[1])
        and parts.statistics(m.into, tables[m.into].shape[1])
        and mixing_of_statistics(m, m.of in values) is not m
    }
    apart -= {m.into for m in mixings if m.masks is not None}
    out, columns = list[Mixing](), dict[str, tuple[Part, Part]]()
    split: dict[str, torch.Tensor] = {}
    for m in mixings:
        if m.into not in apart:
            out.append(m)
            continue
        size = tables[m.into].shape[1]
        weights, statistics = parts.weights(m.into, size), parts.statistics(m.into, size)
        columns[m.into] = weights, statistics
        split[weights_of(m.into)] = take(tables[m.into], weights)
        split[statistics_of(m.into)] = take(tables[m.into], statistics)
        whole = (slice(0, size),) if m.part is None else m.part
        out.append(replace(m, into=weights_of(m.into), part=beyond(weights, whole)))
        valued = m.of in values and m.part is None
        beside = replace(mixing_of_statistics(m, valued), into=statistics_of(m.into))
        if valued:
            out.append(replace(beside, of=statistics_of(m.of)))
        else:
            out.append(replace(beside, part=beyond(statistics, whole)))
    return MixingsApart(out, split, columns)


def mixing_of_statistics(m: Mixing, values: bool) -> Mixing:
    """Return the mixing of statistics beside a mixing of weights; `m` itself if its rows are means.

    Rows that are sums of factors over uploads and old rows become means: negative factors count as 0, and the
    others sum to 1. For changes of models, which are added to an old row, factors sum to at most 1; if their
    statistics arrive as values, a row is the mean of those, without the old row.

    Args:
        m: the mixing.
        values: whether the uploads are changes, and their statistics values.
    """
    up = np.maximum(m.weights, 0.0)  # [K, m]
    keep = np.zeros(m.num_rows) if m.keep is None else m.keep
    kept = np.maximum(keep, 0.0)
    old = kept if kept.ndim == 1 else kept.sum(1)
    into, sums = up.sum(1), m.row_sums()
    negative = (m.weights < 0).any(1) | ((keep < 0) if keep.ndim == 1 else (keep < 0).any(1))
    means = np.isclose(sums, 1.0, atol=1e-6)
    enters = into > 0
    drops_old = enters & values
    shrinks = ~drops_old & ~means & np.isclose(old, 1.0, atol=1e-6) & ((into > 1 + 1e-9) | negative)
    scaled = ~drops_old & means & negative & (into + old > 0)
    other = drops_old | shrinks | scaled
    if not other.any():
        return m
    divisor = np.where(scaled, into + old, np.where(enters, into, 1.0))
    factor = np.where(drops_old, 0.0, np.where(scaled, 1 / np.where(scaled, divisor, 1.0), 1.0))
    weights = np.where(other[:, None], up / divisor[:, None], m.weights)
    if m.keep is None:
        return replace(m, weights=weights)
    if keep.ndim == 2:
        other, factor = other[:, None], factor[:, None]
    return replace(m, weights=weights, keep=np.where(other, kept * factor, keep))
