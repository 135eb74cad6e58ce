"""User-defined scenarios for tests: four clients whose test sets differ in size by visit, or by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_lists
from mpifl.data.pool import Pool
from mpifl.data.scenario import Partition, SampleIndex, Scenario, ScenarioSpec

SIZES = {"train": (40, 50, 60, 70), "val": (0, 0, 0, 0), "test": (120, 9, 30, 71), "hard": (11, 150, 90, 5)}


class Turning(Partition):
    """At visit v, client k has the samples of client (k + v) % 4; its training set is that of visit 0."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.sizes = np.array([SIZES[name] for name in ("train", "val", "test")]).T

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the samples."""
        return SampleIndex(dealt(self.pool, split)[k if split == "train" else (k + visit) % 4], 0)


@dataclass(frozen=True)
class TurningScenario(Scenario):
    """Clients whose test sets differ in size from visit to visit."""

    of_images: ClassVar[bool] = False

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the drift, with a further test set."""
        return ScenarioSpec(drift=Turning(pool), split_ops={"hard": ()})


@dataclass(frozen=True)
class FurtherScenario(Scenario):
    """The same clients without drift: their further test set differs in size from their test set."""

    of_images: ClassVar[bool] = False

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the splits."""
        return ScenarioSpec(lambda: self._splits(pool), split_ops={"hard": ()})

    @staticmethod
    def _splits(pool: Pool) -> dict[str, Csr]:
        return {name: from_lists(dealt(pool, name)) for name in SIZES}


def dealt(pool: Pool, split: str) -> list[np.ndarray]:
    """Return the samples of each client in a split; the first two clients have only some of the classes."""
    samples = pool.train if split in ("train", "val") else pool.test
    labels = np.asarray(pool.labels)[samples]
    known = [samples[labels < 4], samples[labels < 7], samples, samples]
    return [rows[:n] for rows, n in zip(known, SIZES[split], strict=True)]
