"""FedSaC: a collaboration graph that rewards similar updates and complementary features.

Yan et al., "Balancing Similarity and Complementarity for Federated Learning", ICML 2024. As pFedGraph, with
the overlap c_ij of the clients' feature spaces: row i minimises ||x||^2 + (lambda1 c_i + lambda2 d_i - 2p)'x
on the simplex, which is the projection of p - (lambda1 c_i + lambda2 d_i) / 2. Legend: d_ij = -cos(dw_i,
dw_j), p_j = n_j / n, phi angles of the three principal directions of the training features, paired greedily,
c_ij = cos(mean phi). As in the authors' code, a direction has a sign (its largest entry is positive), cosines
above 0.9 count as 1, and dw is the change since the initial model, without buffers. That code has the wrong
sign in the cosine term of the local loss (variant `repo`).

Variant `emdcfl` follows the EMD-CFL repository: dw is the change of the whole state dict since the start of
the round, including batch counters (`num_batches_tracked`; on a ResNet all cosines are then near 1, and only
complementarity matters); cosines are not clipped; features are computed with batch statistics; the local term
pulls towards the received model, with lam 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval

from mpifl.clustering.partitions import simplex_projection
from mpifl.core.errors import require
from mpifl.core.method import Client, Trained
from mpifl.core.mixing import sample_weights
from mpifl.core.options import NonNegativeFloat
from mpifl.core.types import Notes

from .pfedgraph import CollaborationGraph

ROUNDING = 1e-6  # of features in float32


@dataclass(frozen=True)
class FedSaC(CollaborationGraph):
    """N rows, one for each client, which reads its own.

    Attributes:
        lambda1: weight of complementarity, a penalty on overlapping features.
        lambda2: weight of similarity.
        num_directions: number of principal directions a client sends, k_principal in the authors' code.
        lam: weight of the cosine term in local training; None: 0.01, or 1 for variant `emdcfl`.
        variant: `paper`, `repo` (opposite sign of the cosine term) or `emdcfl` (changes of whole state dicts
            since the start of the round, cosines not clipped, features in training mode, local term towards
            the received model with `lam` 1).
    """

    lambda1: NonNegativeFloat = 0.9
    lambda2: NonNegativeFloat = 1.4
    num_directions: Annotated[int, Interval(ge=1, le=1000)] = 3
    lam: NonNegativeFloat | None = None

    paper = "yan2024balancing"

    def pull(self) -> float:
        """Return lam."""
        return self.lam if self.lam is not None else 1.0 if self.variant == "emdcfl" else 0.01

    def notes_of(self, trained: Trained, client: Client) -> dict[str, np.ndarray]:
        """Return the principal directions of the features."""
        x, emdcfl = client.data.train.x, self.variant == "emdcfl"
        features = client.embed(trained.vector, x, train_mode=emdcfl).cpu().double().numpy()
        features = features.reshape(-1, features.shape[-1])  # of sequences: a row for each position
        width = features.shape[1]
        remedy = f"embeddings have {width} numbers; use {width} or fewer"
        require(self.num_directions <= width, "algorithm.num_directions", self.num_directions, remedy)
        return {"basis": principal_directions(features, self.num_directions)}

    def graph(self, d: np.ndarray, notes: Notes) -> np.ndarray:
        """Return the graph that rewards similar updates and complementary features."""
        return graph(overlap(notes["basis"]), d, sample_weights(notes), self.lambda1, self.lambda2)


def graph(c: np.ndarray, d: np.ndarray, p: np.ndarray, lambda1: float, lambda2: float) -> np.ndarray:
    """Return argmin of ||x_i||^2 + (lambda1 c_i + lambda2 d_i - 2p)'x_i on the simplex, row by row [m, m]."""
    return simplex_projection(p - (lambda1 * c + lambda2 * d) / 2)


def principal_directions(features: np.ndarray, count: int) -> np.ndarray:
    """Return the first principal directions [count, e] of features [n, e]; zeros where there are fewer.

    n samples have at most n - 1 directions; a direction that is only float32 rounding does not count.
    """
    _, lengths, rows = np.linalg.svd(features - features.mean(0), full_matrices=False)
    rows = rows[:count][lengths[:count] > ROUNDING * lengths.max(initial=0.0)]
    signs = np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(1)])
    out = np.zeros((count, features.shape[1]), np.float32)
    out[: len(rows)] = rows * signs[:, None]
    return out


def overlap(bases: np.ndarray) -> np.ndarray:
    """Return c_ij = cos(mean angle) [m, m] of bases [m, k, e], their directions paired greedily by cosine.

    Rows of zeros are not directions: the mean is over the pairs of other rows, and without a pair c_ij = 0.
    """
    cosines = np.einsum("iae,jbe->ijab", bases, bases, dtype=np.float64)  # [m, m, k, k]
    m, k = bases.shape[:2]
    there = np.asarray(bases.any(2))  # [m, k]
    cosines[~(there[:, None, :, None] & there[None, :, None, :])] = -np.inf
    pairs = np.minimum(there.sum(1)[:, None], there.sum(1))  # [m, m]
    i, j = np.ogrid[:m, :m]
    angles = np.zeros((m, m))
    for taken in range(k):
        best = cosines.reshape(m, m, -1).argmax(-1)
        a, b = best // k, best % k
        angle = np.arccos(np.clip(cosines[i, j, a, b], -1.0, 1.0))
        angles += np.where(taken < pairs, angle / np.maximum(pairs, 1), 0.0)
        cosines[i, j, a, :] = -np.inf
        cosines[i, j, :, b] = -np.inf
    return np.where(pairs > 0, np.cos(angles), 0.0)
