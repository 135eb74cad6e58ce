"""Which of several models fits a client's data. IFCA, HypCluster and FeSEM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpifl.core.client import Client
from mpifl.core.federation import Split
from mpifl.core.types import Vector


def best_model(client: Client, models: Sequence[Vector] | torch.Tensor, split: Split | None = None) -> int:
    """Return argmin_j F(w_j) over `models` [K, d] on `split` (default: training data), the first of
    equals.
    """
    return int(np.argmin([client.loss(w, split) for w in models]))


def fitting_model(
    client: Client, models: Sequence[Vector] | torch.Tensor, split: Split | None = None
) -> Vector:
    """Return the model that a client is judged by: the one that was served, or `best_model` of several."""
    return models[best_model(client, models, split) if len(models) > 1 else 0]
