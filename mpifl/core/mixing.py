"""Builders of mixings: every aggregation as one affine map, rows <- keep @ rows + weights @ uploads."""

from __future__ import annotations

import numpy as np

from .errors import require
from .plan import Mixing as Mixing  # for methods, which find all of a plan here
from .plan import Plan as Plan
from .types import Notes


def updated(values: np.ndarray, at: np.ndarray | int, new: np.ndarray | bool) -> np.ndarray:
    """Return a copy of `values` whose entries `at` are `new`."""
    copy = values.copy()
    copy[at] = new
    return copy


def sample_weights(notes: Notes) -> np.ndarray:
    """Return n_k / sum n [m].

    Raises:
        UserError: no client has samples.
    """
    n = notes.num_samples.astype(np.float64)
    require(n.sum() > 0, "num_samples", n.tolist(), "nobody has samples to share by")
    return np.asarray(n / n.sum())


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
    labels: np.ndarray, num_rows: int, weights: np.ndarray, into: str = "model", of: str = "model"
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
