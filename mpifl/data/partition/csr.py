"""A partition as two arrays: the samples of all clients one after the other, and where each row begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Csr:
    """Compressed rows: row r holds samples index[offsets[r] : offsets[r + 1]].

    Attributes:
        offsets: int64 [R + 1].
        index: addresses in the pool [total], or None if row r holds the samples from offsets[r] up to, but
            not including, offsets[r + 1].
        row: int64 [N], the row of each client, or None if client k has row k. Clients may share a row.
    """

    offsets: np.ndarray
    index: np.ndarray | None = None
    row: np.ndarray | None = None

    def of(self, k: int) -> np.ndarray | slice:
        """Return the addresses of client `k`, in an order that is part of the partition."""
        r = k if self.row is None else int(self.row[k])
        start, stop = int(self.offsets[r]), int(self.offsets[r + 1])
        return slice(start, stop) if self.index is None else self.index[start:stop]

    def of_all(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of several clients, one after the other, int64 [n], and sizes, int64 [m]."""
        rows = clients if self.row is None else self.row[clients]
        starts, sizes = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
        return (places if self.index is None else self.index[places]).astype(np.int64), sizes

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of samples of each client, int64 [N]."""
        sizes = np.diff(self.offsets)
        return sizes if self.row is None else sizes[self.row]


def from_lists(rows: Sequence[np.ndarray], row: np.ndarray | None = None) -> Csr:
    """Return the partition whose row r is `rows[r]`."""
    index = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return Csr(_offsets(np.array([len(r) for r in rows], np.int64)), _small(index), row)


def from_owner(owner: np.ndarray, samples: np.ndarray, num_rows: int, rng: np.random.Generator) -> Csr:
    """Return the partition that gives samples[i] to row owner[i] (-1: to nobody), each row shuffled."""
    mixed = rng.permutation(len(owner))
    order = mixed[np.argsort(owner[mixed], kind="stable")]
    order = order[int(np.count_nonzero(owner < 0)) :]
    sizes = np.bincount(owner[owner >= 0], minlength=num_rows)
    return Csr(_offsets(sizes), _small(samples[order]))


def everyone(samples: np.ndarray, num_clients: int) -> Csr:
    """Return the partition in which all clients share one and the same row."""
    return Csr(_offsets(np.array([len(samples)])), _small(samples), np.zeros(num_clients, np.int64))


def hold_out(whole: Csr, fraction: float) -> tuple[Csr, Csr]:
    """Split each row in (kept, held): its first ceil(fraction n) samples are held, at least one is kept.

    Rows must be in random order, as `from_owner` leaves them; then this is a plain random split.
    """
    assert whole.index is not None
    sizes = np.diff(whole.offsets)
    counts = np.maximum(np.minimum(_rounded_up(fraction, sizes), sizes - 1), 0)
    held = _first(counts, sizes)
    return (
        Csr(_offsets(sizes - counts), whole.index[~held], whole.row),
        Csr(_offsets(counts), whole.index[held], whole.row),
    )


def thinned(whole: Csr, share: float, rng: np.random.Generator) -> Csr:
    """Return the partition in which each row keeps ceil(share n) of its n samples, drawn at random.

    Args:
        whole: the partition.
        share: in (0, 1].
        rng: draws which ones; the order in a row stays.
    """
    sizes = np.diff(whole.offsets)
    start, total = int(whole.offsets[0]), int(sizes.sum())
    index = np.arange(start, start + total) if whole.index is None else whole.index[start : start + total]
    row = np.repeat(np.arange(len(sizes)), sizes)
    mixed = rng.permutation(total)
    order = mixed[np.argsort(row[mixed], kind="stable")]  # by rows, each in random order
    counts = _rounded_up(share, sizes)
    kept = np.sort(order[_first(counts, sizes)])
    return Csr(_offsets(counts), _small(index[kept]), whole.row)


def train_val_test(whole: Csr, test: Csr, validation: float) -> dict[str, Csr]:
    """Return the three partitions of a scenario.

    Args:
        whole: training samples, rows in random order.
        test: test samples.
        validation: share of each row of `whole` set aside for validation, see `hold_out`.
    """
    kept, held = hold_out(whole, validation)
    return {"train": kept, "val": held, "test": test}


def stack(parts: Sequence[Csr]) -> Csr:
    """Return the partition whose clients are those of each part in turn."""
    index = np.concatenate([part.index for part in parts if part.index is not None])
    return Csr(_offsets(np.concatenate([np.diff(part.offsets) for part in parts])), _small(index))


def _rounded_up(share: float, sizes: np.ndarray) -> np.ndarray:
    """Return ceil(share n) of each size n, int64 [R]."""
    return np.ceil(np.round(share * sizes, 9)).astype(np.int64)


def _first(counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return which samples are among the first counts[r] of a row, bool [total], of rows of such sizes."""
    place = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.asarray(place < np.repeat(counts, sizes))


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _small(index: np.ndarray) -> np.ndarray:
    """Halve the memory of addresses that fit in 32 bits."""
    return index.astype(np.int32) if index.size == 0 or index.max() < 2**31 else index.astype(np.int64)
