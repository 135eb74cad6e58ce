"""Label skew by Dirichlet draws: over the clients of each class, or over the classes of each client."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np


def owners_by_class(
    labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Divide each class over users by p_c ~ Dir(alpha 1_N), cut at cumulative proportions; sizes vary.

    Yurochkin et al., ICML 2019; UCFL's label shift.

    Args:
        labels: [n].
        num_clients: N.
        alpha: concentration; small values give strong skew.
        rng: one stream for all classes.

    Returns:
        The owner of each sample, int64 [n].
    """
    owner = np.empty(len(labels), np.int64)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        share = dirichlet(rng, alpha, (num_clients,))
        owner[members] = _cut_by_weights(np.cumsum(share), len(members))
    return owner


def owners_by_client(
    labels: np.ndarray, sizes: np.ndarray, alpha: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Give client k sizes[k] samples whose classes follow q_k ~ Dir(alpha 1_L) (latent Dirichlet allocation).

    Hsu et al., 2019. A class that is used up is no longer drawn, and q_k is renormalised over the others.

    Args:
        labels: [n].
        sizes: samples of each client [N].
        alpha: concentration; small values give strong skew.
        rng: one stream for all clients.

    Returns:
        The owner of each sample int64 [n] (-1: nobody) and the mixtures q float64 [N, L] as drawn.
    """
    classes = np.unique(labels)
    mixtures = dirichlet(rng, alpha, (len(sizes), len(classes)))
    return _owners_of_mixtures(labels, mixtures, sizes, rng), mixtures


def owners_by_shares(
    labels: np.ndarray, sizes: np.ndarray, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Give client k sizes[k] samples with class shares q_k[c] proportional to n_c p_c[k].

    p_c ~ Dir(alpha 1_N) over clients: the label shift of `owners_by_class`, for clients of given sizes. A
    class that is used up is no longer drawn.

    Args:
        labels: [n].
        sizes: samples of each client [N].
        alpha: concentration; small values give strong skew.
        rng: one stream for all draws.

    Returns:
        The owner of each sample, int64 [n] (-1: nobody).
    """
    _, stock = np.unique(labels, return_counts=True)
    return _owners_of_mixtures(labels, mixtures_by_shares(stock, len(sizes), alpha, rng), sizes, rng)


def mixtures_by_shares(
    stock: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Return q_k[c] of each client, proportional to n_c p_c[k] with p_c ~ Dir(alpha 1_N), float64 [N, L].

    With a tiny alpha, all shares of a client may underflow; such rows are normalised in log space.
    """
    logs = _log_weights(rng, alpha, (len(stock), num_clients))
    weights = np.exp(logs)
    totals = weights.sum(axis=-1, keepdims=True)
    mixtures = (weights / totals * stock[:, None]).T  # [N, L]
    faint = mixtures.sum(axis=1) < np.finfo(np.float64).tiny
    if faint.any():
        exact = (logs - np.log(totals) + np.log(stock)[:, None]).T[faint]
        mixtures[faint] = np.exp(exact - exact.max(axis=1, keepdims=True))
    return np.asarray(mixtures / mixtures.sum(axis=1, keepdims=True))


def _owners_of_mixtures(
    labels: np.ndarray, mixtures: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return the owner of each sample, int64 [n] (-1: nobody), of clients with class shares [N, L]."""
    classes, inverse, stock = np.unique(labels, return_inverse=True, return_counts=True)
    order = rng.permutation(len(labels))
    order = order[np.argsort(inverse[order], kind="stable")]
    taken = take_by_mixture(mixtures, sizes, stock, rng)  # [N, L]
    owner = np.full(len(labels), -1, np.int64)
    starts = np.cumsum(stock) - stock
    for c in range(len(classes)):
        used = int(taken[:, c].sum())
        owner[order[starts[c] : starts[c] + used]] = np.repeat(np.arange(len(sizes)), taken[:, c])
    return owner


def take_by_mixture(
    mixtures: np.ndarray, sizes: np.ndarray, stock: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return how many samples of each class each client takes, int64 [N, L], from a finite stock [L].

    Clients draw in order; draws of an exhausted class are repeated over the other classes.
    """
    left = stock.astype(np.int64).copy()
    taken = np.zeros(mixtures.shape, np.int64)
    for k, (q, size) in enumerate(zip(mixtures, sizes, strict=True)):
        wanted = int(size)
        while wanted > 0:
            p = np.where(left > 0, q, 0.0)
            total = p.sum()
            p = p / total if total > 1e-12 else left / left.sum()
            got = np.minimum(rng.multinomial(wanted, p), left)
            taken[k] += got
            left -= got
            wanted -= int(got.sum())
    return taken


def owners_like(
    labels: np.ndarray,
    model_labels: np.ndarray,
    model_owner: np.ndarray,
    num_clients: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Partition samples so that each class is divided in the proportions of another partition.

    Args:
        labels: [n], of the samples to partition.
        model_labels: [m], of the samples of the other partition.
        model_owner: [m], their owners; -1 for none.
        num_clients: N.
        rng: orders the samples of a class.

    Returns:
        The owner of each sample, int64 [n]; -1 for classes that no client holds.
    """
    owner = np.full(len(labels), -1, np.int64)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        holders = model_owner[(model_labels == c) & (model_owner >= 0)]
        if len(holders):
            held = np.cumsum(np.bincount(holders, minlength=num_clients))
            owner[members] = _cut_by_weights(held / held[-1], len(members))
    return owner


def _cut_by_weights(cumulative: np.ndarray, n: int) -> np.ndarray:
    """Return the owner of each of `n` samples in order, int64 [n], cut at floor(cumulative share * n)."""
    ends = np.floor(cumulative * n + 1e-9).astype(np.int64)
    ends[-1] = n
    ends = np.minimum(ends, n)
    return np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))


def dirichlet(rng: np.random.Generator, alpha: float, size: tuple[int, ...]) -> np.ndarray:
    """Return symmetric Dirichlet(alpha) draws of shape `size`, each last axis summing to one.

    A tiny alpha gives a one-hot vector instead of 0 / 0.
    """
    weights: np.ndarray = np.exp(_log_weights(rng, alpha, size))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _log_weights(rng: np.random.Generator, alpha: float, size: tuple[int, ...]) -> np.ndarray:
    """Return logarithms of Gamma(alpha) draws of shape `size`, minus the maximum of the last axis.

    Gamma(alpha) is drawn as Gamma(alpha + 1) U^(1 / alpha).
    """
    uniform = np.maximum(rng.random(size), np.finfo(np.float64).tiny)
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, size)) + np.log(uniform) / alpha
    return np.asarray(log_gamma - log_gamma.max(axis=-1, keepdims=True))


def at_least(owner: np.ndarray, num_rows: int, minimum: int, rng: np.random.Generator) -> np.ndarray:
    """Return `owner` changed as little as needed for every row to own `minimum` samples.

    The largest rows give samples away: they are all cut down to one level, the highest possible.

    Args:
        owner: row of each sample, int [n], none negative, n >= num_rows * minimum.
        num_rows: number of rows.
        minimum: number of samples that each row must own.
        rng: chooses which samples move, and to whom.
    """
    sizes = np.bincount(owner, minlength=num_rows)
    missing = np.maximum(minimum - sizes, 0)
    wanted = int(missing.sum())
    if wanted == 0:
        return owner
    assert len(owner) >= num_rows * minimum
    higher = range(minimum + 1, int(sizes.max()) + 1)  # `wanted` samples lie above the first
    level = minimum + bisect_right(higher, -wanted, key=lambda level: -np.maximum(sizes - level, 0).sum())
    mixed = rng.permutation(len(owner))
    order = mixed[np.argsort(owner[mixed], kind="stable")]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spare = order[place >= level]
    given = rng.choice(spare, wanted, replace=False) if len(spare) > wanted else spare
    changed = owner.copy()
    changed[given] = np.repeat(np.arange(num_rows), missing)
    return changed
