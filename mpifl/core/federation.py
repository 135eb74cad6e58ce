"""The interface to the data of a federation: clients, their splits, their hidden groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from .errors import UserError


@dataclass(frozen=True)
class Split:
    """Samples ready for training: `x` float32 [n, C, H, W], `y` int64 [n], both contiguous."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """The splits of one client at one visit.

    Attributes:
        train: training samples.
        val: validation samples.
        test: test samples.
        extra: further test sets by name (a backdoor, say).
    """

    train: Split
    val: Split
    test: Split
    extra: Mapping[str, Split] = field(default_factory=dict)


class Federation(ABC):
    """A population of clients. Every rank opens the same one; the order of access does not change the data.

    Attributes:
        num_clients: N.
        num_classes: L, the number of labels.
        shape: (C, H, W) of one sample as `client` returns it.
        sizes: int64 [N, 3], samples for training, validation and test of each client (at its first visit,
            where they change).
        groups: int64 [N], the hidden group of each client, or None where there is no ground truth.
        attackers: int64, the clients that attack (section `attack`), or None.
        targets: int64, the clients whose accuracy is reported by itself (those a backdoor is aimed at), or
            None.
    """

    num_clients: int
    num_classes: int
    shape: tuple[int, int, int]
    sizes: np.ndarray
    groups: np.ndarray | None
    targets: np.ndarray | None = None
    attackers: np.ndarray | None = None

    @abstractmethod
    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the data of client `k` at its `visit`-th visit (a static federation ignores `visit`)."""

    def num_samples(self, k: int, visit: int = 0) -> int:
        """Return the number of training samples of client `k` at its `visit`-th visit, without reading them.

        Default: `sizes`, for data that do not change.
        """
        return int(self.sizes[k, 0])

    def pixels(self, k: int, split: str = "train", visit: int = 0) -> Split:
        """Return a split of client `k`, `train`, `val` or `test`, with its images as they are stored.

        Default: as `client` returns it, for federations that store nothing else.
        """
        found: Split = getattr(self.client(k, visit), split)
        return found

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together."""
        return int(self.sizes[:, 2].sum())

    def public(self) -> tuple[Split, ...]:
        """Return the labelled sets the server itself owns, one for each group (none by default)."""
        return ()

    def group_test_sets(self) -> tuple[Split, ...]:
        """Return labelled test sets of whole groups that nobody trains on. Default: none."""
        return ()

    def mixture(self, k: int, visit: int = 0) -> np.ndarray | None:
        """Return the true share [groups] of each group in client `k`'s data, None where it has no meaning."""
        if self.groups is None:
            return None
        return np.asarray(np.eye(int(self.groups.max()) + 1)[self.groups[k]])

    def cycle(self, k: int, visit: int) -> int:
        """Return the number of the data of client `k` at a visit: the visit's, unless it awaits drift."""
        return visit

    def await_drift(self, threshold: float, longest: int) -> None:
        """Let a visit meet the first data that differ enough from those of the visit before.

        Args:
            threshold: total variation distance between the shares of the groups.
            longest: most data that a visit skips.

        Raises:
            UserError: the data never change.
        """
        remedy = "the data of these clients do not change from visit to visit; take data.scenario ccfl"
        raise UserError("policy.uploads", "drift", remedy)
