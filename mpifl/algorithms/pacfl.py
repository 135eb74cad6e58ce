"""PACFL: clients whose images span similar subspaces share a model.

Vahidian et al., "Efficient Distribution Similarity Identification in Clustered Federated Learning via
Principal Angles between Client Data Subspaces", AAAI 2023, Algorithm 1. Before training a client sends, for
every class it has, the first p left singular vectors of its images, U_i [D, p L_i]. The server merges the
closest clients while they are no further apart than a threshold in degrees. Then FedAvg runs inside each
cluster. New clients extend the matrix of angles and join the cluster they fall into; if it has no old member,
they form a new one.

Our reading: `angle="columns"` (the code) takes angles of single columns with their signs; the paper takes the
smallest principal angle (`smallest`) or the sum of the angles (`sum`). Training images enter as they are
stored, D = C H W (the code, pixels from 0 to 255). The pixels decide the result: with raw ones, 100 CIFAR-10
clients of two classes each are clustered without an error; with normalised ones no threshold achieves this.
Texts enter as the counts of their tokens (modulo 4096, without padding), a column of a term-document matrix.
Variant `emdcfl`, the EMD-CFL repository: normalised validation images, in which every colour plane is a
column of its own, D = H W.

With `budget`, a class gets p in proportion to its share of the samples. The authors' code has such a rule for
Dirichlet partitions, with a budget of 20, but it never takes effect: the code searches the labels for a list
that holds the label, finds none, and takes p for every class. Its published rows are those of `budget: 0`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from mpifl.clustering.distances import KeptDistances, column_angles, rounded_columns, subspace_angle
from mpifl.clustering.partitions import merge_closest
from mpifl.clustering.server_plans import clustered_plan, clustered_server, inherited, joined
from mpifl.core.computation import Asked, Held
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.method import Algorithm, Client, Key, Needs, NewClients, PlainVisits, Plan
from mpifl.core.mixing import updated
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt
from mpifl.core.types import Notes, ProblemInfo, Report, Server, Vector

Numbered: TypeAlias = "tuple[int, np.ndarray]"  # a client and its basis [D, columns]
TERMS = 4096  # different tokens that are counted; others share their counts


@dataclass(frozen=True)
class PACFL(NewClients, PlainVisits, Algorithm):
    """One row per cluster, and the initial model.

    Attributes:
        threshold: degrees up to which clusters merge.
        p: singular vectors of each class.
        budget: singular vectors of all classes together, shared out by samples; 0: `p` of each class.
        angle: distance of two clients: `columns` (smallest angle between two columns), `smallest` (smallest
            principal angle) or `sum` (sum of the principal angles).
        linkage: `average` (plain mean of two rows), `maximum` or `minimum`.
        variant: `paper`, or `emdcfl` (validation images, every colour plane a column of its own).
        pixels: `raw`, as they are stored, or `normalised`, as the model sees them; null: raw, or normalised
            for variant `emdcfl`.
    """

    threshold: NonNegativeFloat = 12.0
    p: PositiveInt = 3
    budget: NonNegativeInt = 0
    angle: Literal["columns", "smallest", "sum"] = "columns"
    linkage: Literal["average", "maximum", "minimum"] = "average"
    variant: Literal["paper", "emdcfl"] = "paper"
    pixels: Literal["raw", "normalised"] | None = None

    paper = "vahidian2023efficient"
    fingerprints_vary = True
    statistics_from = ("p", "budget", "variant", "pixels")

    @property
    def needs(self) -> Needs:
        """Classes of samples of one input; validation data in variant `emdcfl`."""
        inputs = ("images", "features", "tokens")
        return Needs(averages=True, classes=True, validation=self.variant == "emdcfl", inputs=inputs)

    def ignored_options(self) -> Mapping[str, str]:
        """`budget` replaces `p`."""
        return {"p": "budget gives the number of singular vectors"} if self.budget else {}

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send nothing: a client needs its own images only."""
        return {}

    def statistics_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return nothing: the bases are computed without a network."""
        return []

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return U [D, p L]; columns of classes that the client lacks are NaN."""
        split = "train" if self.variant == "paper" else "val"
        raw = (self.pixels or ("raw" if self.variant == "paper" else "normalised")) == "raw"
        data = client.pixels(split) if raw else getattr(client.data, split)
        if data.x.ndim == 2 and not data.x.is_floating_point():
            data = Split(counts(data.x.long()), data.y)
        require(len(data) > 0, "variant", self.variant, f"client {client.id} has no validation data")
        bases = [self._basis(data, c) for c in torch.unique(data.y).tolist()]
        classes, D = client.layout.num_classes, len(bases[0])
        width = min(self.budget + classes if self.budget else self.p * classes, D * classes)
        U = np.full((D, width), np.nan, np.float32)
        found = np.concatenate(bases, 1)
        U[:, : found.shape[1]] = found
        return client.report({"basis": U})

    def _basis(self, data: Split, c: int) -> np.ndarray:
        """Return the first left singular vectors [D, p] of the images of class `c`."""
        x = data.x[data.y == c]
        X = (
            x.flatten(1).T if self.variant == "paper" else x.flatten(0, 1).flatten(1).T
        ).float()  # [D, n] or [H W, C n]
        p = max(1, round(self.budget * len(x) / len(data))) if self.budget else self.p
        return np.asarray(np.linalg.svd(X.cpu().numpy(), full_matrices=False)[0][:, :p])

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the initial clients."""
        assert fingerprints is not None
        bases = np.full((problem.num_clients, *fingerprints["basis"].shape[1:]), np.nan, np.float32)
        bases[fingerprints.client] = fingerprints["basis"]
        apart = self._known.among(fingerprints.client, bases, self._item(bases))
        labels = merge_closest(apart, self.threshold, self.linkage)
        return clustered_server(problem, fingerprints.client, labels, bases=bases)

    @cached_property
    def _known(self) -> KeptDistances[Any]:
        """The angles between clients."""
        measure: Callable[[Sequence[Any], Sequence[Any]], np.ndarray]
        measure = column_angles if self.angle == "columns" else self._principal
        return KeptDistances(measure)

    def _item(self, bases: np.ndarray) -> Callable[[int], Any]:
        """Return client -> what `_known` measures: the columns that it has, from bases [N, D, columns]."""

        def item(k: int) -> Any:
            span = bases[k][:, ~np.isnan(bases[k, 0])]
            return rounded_columns(span) if self.angle == "columns" else (k, span)

        return item

    def _principal(self, some: Sequence[Numbered], others: Sequence[Numbered]) -> np.ndarray:
        """Return the distances [m, n] of numbered bases, in degrees, the first client's basis first."""
        pairs = ((sorted((a, b), key=lambda one: one[0]) for b in others) for a in some)
        return np.array([[subspace_angle(u, v, self.angle) for (_, u), (_, v) in row] for row in pairs])

    def angles(self, bases: np.ndarray) -> np.ndarray:
        """Return the distances of clients in degrees [n, n], from bases [n, D, columns]."""
        return KeptDistances(self._known.measure).among(np.arange(len(bases)), bases, self._item(bases))

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Cluster the known and the new clients together; those that sent nothing keep their clusters."""
        before, who = server.algorithm_state["bases"], fingerprints.client
        bases = updated(before, who, fingerprints["basis"])
        everyone = np.union1d(np.flatnonzero(server.algorithm_state["known"]), who)
        old = np.where(server.algorithm_state["known"], server.assign, -1)[everyone]
        sent = np.isin(everyone, who)
        apart = self._known.among(everyone, bases, self._item(bases), before, who)
        found = merge_closest(apart, self.threshold, self.linkage)
        labels, parents = inherited(found, old, len(server.tables["model"]) - 1, sent)
        return joined(server, who, labels[sent], parents, bases=bases)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average each cluster by samples."""
        return clustered_plan(server, notes)


def counts(x: torch.Tensor) -> torch.Tensor:
    """Return how often each token, modulo `TERMS`, occurs in each sample int64 [n, T]: [n, TERMS].

    The run of one token at the end of a sample is left out: it is padding, or says as little.
    """
    others = (x != x[:, -1:]).flip(1).cumsum(1).flip(1) > 0
    found = torch.zeros(len(x), TERMS)
    return found.scatter_add_(1, x % TERMS, others.float())
