"""PCA+kM+HC: clients whose images have similar principal components are averaged together.

The baseline of FLT, after k-FED: Jamali-Rad, Abdizadeh and Singh, "Federated Learning with Taskonomy for
Non-IID Data", TNNLS 2022; Dennis, Li and Smith, "Heterogeneity for the Win: One-Shot Federated Clustering",
ICML 2021. A client projects its images on its own e principal components and sends the k centroids of the
scores. Clients whose centroids match within a threshold are related; the rest is FLT, case I or II.

Our reading: the threshold is 1.2 and e is 128, as at the repository's HEAD. The published rows were most
likely made with the values of its submission, a threshold of 3 and, on CIFAR-10, an e of 64
(papers/flt/table1-order and table2-order). Every client has a basis of its own, so that scores are comparable
only as far as the bases agree. A client with fewer than e images repeats them.

Links depend on the order of a client's samples, because k-means starts from it. On scenario 1 of MNIST (100
clients) another order changes 36 to 39 % of the links, since many distances are close to the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import numpy as np
import torch
from annotated_types import Interval

from mpifl.clustering.distances import KeptDistances, matching_distance
from mpifl.clustering.server_plans import client_centroids
from mpifl.core.method import Client, Key, Needs
from mpifl.core.options import PositiveFloat, PositiveInt
from mpifl.core.types import ProblemInfo, Report, Vector

from .related_clients import Look, RelatedClients, cloud

Numbered: TypeAlias = "tuple[int, np.ndarray]"  # a client and its centroids [k, e]


@dataclass(frozen=True)
class PCAKMHC(RelatedClients):
    """One row per set of related clients, and the initial model.

    Attributes:
        threshold: matching distance below which two clients are related.
        components: e, number of principal components; at most the number of pixels.
        centroids: k, centroids of a client.
    """

    threshold: PositiveFloat = 1.2
    components: PositiveInt = 128
    centroids: Annotated[int, Interval(ge=1, le=1000)] = 5

    paper = "dennis2021heterogeneity"
    statistics_from = ("components", "centroids")
    needs = Needs(averages=True, inputs=("images", "features"))

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send nothing: a client needs its own images only."""
        return {}

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return the centroids [k, e] of the scores; rows of NaN where there are fewer images."""
        x = client.data.train.x.flatten(1).cpu().numpy().astype(np.float64)  # [n, D]
        e = min(self.components, x.shape[1])
        rows = np.tile(x, (-(-e // len(x)), 1))
        scores = _scores(rows, e)[: len(x)]
        return client.report({"centroids": client_centroids(scores, self.centroids, self.centroids)})

    @cached_property
    def _known(self) -> KeptDistances[Numbered]:
        """The matching distances between clients."""
        return KeptDistances(_matching)

    def related(self, look: Look) -> np.ndarray:
        """Return A < threshold, A the matching distances of the centroids."""

        def item(k: int) -> Numbered:
            return k, cloud(look.centroids[k])

        return self.threshold > self._known.among(look.clients, look.centroids, item, look.before, look.new)


def _matching(some: Sequence[Numbered], others: Sequence[Numbered]) -> np.ndarray:
    """Return the matching distances [m, n] of numbered clients; the first comes first, for equal sums."""
    return np.array(
        [[matching_distance(x, y) if i < j else matching_distance(y, x) for j, y in others] for i, x in some]
    )


def _scores(x: np.ndarray, e: int) -> np.ndarray:
    """Return the scores [n, e] of images [n, D] on their principal components; the largest is positive."""
    left, values, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    signs = np.sign(left[np.abs(left).argmax(0), np.arange(left.shape[1])])
    return np.asarray((left * signs * values)[:, :e])
