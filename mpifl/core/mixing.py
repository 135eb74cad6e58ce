"""Every aggregation as one affine map: tables[into] <- keep @ tables[into] + weights @ uploads[of]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .errors import require
from .parameters import Part
from .types import Notes


class RankMasks(Protocol):
    """Hides the uploads of one rank in a mixing."""

    def sums(
        self, block: Sequence[torch.Tensor], weights: np.ndarray, spacing: np.ndarray, columns: slice
    ) -> torch.Tensor:
        """Return the sums of this rank's masked uploads, int64 [Ka, b]."""

    def unmasked(self, sums: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return the sums of all ranks' uploads, int64 [Ka, b]; on rank 0."""


class Masks(Protocol):
    """Hides the uploads of a mixing from the server (`aggregation/secure_sum.py`).

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
        algorithm_state: replaces the method's state; None: unchanged.
    """

    mixings: Sequence[Mixing]
    assign: np.ndarray | None = None
    algorithm_state: Mapping[str, np.ndarray] | None = None


def sample_weights(notes: Notes) -> np.ndarray:
    """Return n_k / sum n [m].

    Raises:
        UserError: no client has samples.
    """
    n = notes.num_samples.astype(np.float64)
    require(n.sum() > 0, "num_samples", n.tolist(), "nobody has samples to share by")
    return np.asarray(n / n.sum())


shares = sample_weights  # the name in releases up to 0.2.0


def average(
    notes: Notes, weights: np.ndarray | None = None, into: str = "model", of: str = "model"
) -> Mixing:
    """Return the mixing of one row: the mean of all uploads.

    Args:
        notes: of the step.
        weights: [m]; None weights by samples. If all are 0 the row stays unchanged.
        into: name of the table.
        of: name of the uploads.
    """
    w = notes.num_samples if weights is None else weights
    return rows(np.asarray(w, np.float64)[None], into=into, of=of)


def by_cluster(
    labels: np.ndarray,
    num_rows: int,
    weights: np.ndarray,
    into: str = "model",
    of: str = "model",
) -> Mixing:
    """Return the mixing whose row k is the mean of the uploads with label k.

    Args:
        labels: [m], the row of each upload; -1 for none.
        num_rows: K.
        weights: [m], of each upload within its row; a row without uploads stays unchanged.
        into: name of the table.
        of: name of the uploads.
    """
    one_hot = (np.arange(num_rows)[:, None] == np.asarray(labels)[None, :]) * np.asarray(weights, np.float64)
    return rows(one_hot, into=into, of=of)


def rows(weights: np.ndarray, into: str = "model", of: str = "model") -> Mixing:
    """Return the mixing whose row k is the mean of the uploads by row k of `weights`.

    Args:
        weights: [K, m], normalised here; a row of zeros leaves its row unchanged.
        into: name of the table.
        of: name of the uploads.

    Raises:
        UserError: weights of a row are not finite, or cancel each other.
    """
    total, empty = weights.sum(1), np.asarray(~weights.any(1))
    bad = np.flatnonzero(~np.isfinite(total) | ((total == 0) & ~empty))
    if len(bad):
        require(
            False, f"weights of row {bad[0]}", weights[bad[0]].tolist(), "their sum must be finite and not 0"
        )
    normal = weights / np.where(empty, 1.0, total)[:, None]
    return Mixing(normal, keep=empty.astype(np.float64) if empty.any() else None, into=into, of=of)


def own_rows(
    weights: np.ndarray, notes: Notes, num_clients: int, into: str = "model", of: str = "model"
) -> Mixing:
    """Return the mixing whose row k belongs to client k: the mean of the uploads by its row of `weights`.

    Args:
        weights: [m, m], a row for each client of the step; rows of absent clients stay unchanged.
        notes: of the step.
        num_clients: N.
        into: name of the table.
        of: name of the uploads.
    """
    everyone = np.zeros((num_clients, len(notes)))
    everyone[notes.client] = weights
    return rows(everyone, into=into, of=of)


def componentwise(weights: np.ndarray) -> np.ndarray:
    """Return weights [K, m * K] by which row k mixes component k of each upload, from `weights` [K, m]."""
    k = len(weights)
    return (weights[:, :, None] * np.eye(k)[:, None, :]).reshape(k, -1)


def add(weights: np.ndarray, into: str = "model", of: str = "model") -> Mixing:
    """Return the mixing whose row k is itself plus the uploads weighted by row k of `weights` [K, m]."""
    weights = np.atleast_2d(np.asarray(weights, np.float64))
    return Mixing(weights, keep=np.ones(len(weights)), into=into, of=of)


def carry(keep: np.ndarray, into: str = "model") -> Mixing:
    """Return the mixing of old rows alone, by `keep` [K, K0]; no upload enters."""
    return Mixing(np.zeros((len(keep), 0)), keep=keep, into=into, of="")


def blend(rates: np.ndarray, into: str = "model", of: str = "model") -> Mixing:
    """Return the mixing whose row k is (1 - sum_j a_kj) of itself plus a_kj of upload j (a [K, m])."""
    rates = np.atleast_2d(np.asarray(rates, np.float64))
    return Mixing(rates, keep=1.0 - rates.sum(1), into=into, of=of)


def in_turn(
    rates: np.ndarray, into: str = "model", of: str = "model", order: np.ndarray | None = None
) -> Mixing:
    """Return the mixing that blends uploads in one after the other: row <- (1 - a_kj) row + a_kj upload j.

    Args:
        rates: a [K, m].
        into: name of the table.
        of: name of the uploads.
        order: the uploads in the order in which they are blended in, int64 [m] (`Notes.arrival`); None: the
            given order.
    """
    rates = np.atleast_2d(np.asarray(rates, np.float64))
    order = np.arange(rates.shape[1]) if order is None else order
    later = np.cumprod((1 - rates)[:, order[::-1]], axis=1)[:, ::-1]  # prod of (1 - a_ki), j and after
    left = np.concatenate([later[:, 1:], np.ones((len(rates), 1))], axis=1)
    weights = np.empty_like(rates)
    weights[:, order] = rates[:, order] * left
    return Mixing(weights, keep=later[:, 0], into=into, of=of)
