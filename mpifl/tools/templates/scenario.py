"""MyScenario: which client holds which images, and how they are transformed.

    mpifl data quickstart --data.scenario '{name: "my_scenario.py:MyScenario"}'
    mpifl run quickstart --data.scenario '{name: "my_scenario.py:MyScenario"}'

As it stands, the second half of the clients sees its images upside down: a ground truth for clustering. The
scenarios in `mpifl/data/scenarios` are short; `mpifl/data/scenario.py` explains the fields of `ScenarioSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_owner, hold_out
from mpifl.data.pool import Pool
from mpifl.data.scenario import Scenario, ScenarioSpec, check_clients, grouped
from mpifl.data.transforms import Rotate


@dataclass(frozen=True)
class MyScenario(Scenario):
    """Random equal parts; the second half of the clients sees its images upside down.

    Attributes:
        clients: number of clients N, even.
        validation: share of each client's training images set aside for validation.
    """

    clients: PositiveInt = 20
    validation: ShareBelowOne = 0.2

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Return the specification; nothing is read or drawn before `_splits` is called."""
        check_clients(self.clients, pool.num_train)
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=grouped(self.clients, 2),
            ops=(Rotate((0.0, 180.0)),),  # an angle for each group
            names=("upright", "upside down"),
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        """Deal the images at random. All draws come from `key`, so all ranks get the same result."""
        train = self._dealt(pool.train, key.of("train").numpy())
        kept, held = hold_out(train, self.validation)
        return {"train": kept, "val": held, "test": self._dealt(pool.test, key.of("test").numpy())}

    def _dealt(self, samples: np.ndarray, rng: np.random.Generator) -> Csr:
        owner = rng.permutation(np.arange(len(samples)) % self.clients)  # the client of each sample
        return from_owner(owner, samples, self.clients, rng)
