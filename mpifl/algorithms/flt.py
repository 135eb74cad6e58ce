"""FLT: clients whose images an autoencoder encodes alike are averaged together.

Jamali-Rad, Abdizadeh and Singh, "Federated Learning with Taskonomy for Non-IID Data", TNNLS 2022, sections 3
and 4. The server pre-trains an autoencoder on images of its own (`data.public`: FashionMNIST for Enc2, EMNIST
for Enc1 of the MNIST tasks). A client fine-tunes it for F epochs (Enc2; 0: Enc1), encodes its images, and
sends the k centroids of the codes. Legend: Z_i centroids of client i after UMAP, A_ij distance of Z_i and
Z_j, A~_ij = 1[A_ij < gamma]. Case I (`full`): w_i <- sum_j A~_ij n_j w_j / sum_j A~_ij n_j; case II (`ward`):
FedAvg inside Ward clusters of the rows of A~.

Our reading: a distance below gamma links two clients (as printed, far clients would be linked). Averages are
convex. A_ij is the cost of the best matching as in the code (`distance="closest"`: the paper's closest pair).
k = 5 for all clients (0: the client's number of classes, which is what the code's leak amounts to). Every
client fine-tunes its own copy of the server's encoder. w_j is the last local model, or the initial one for a
client never visited, unless `all_clients` is off. Clients with equal rows of A~ share a row of the table. The
points are those of the plane that UMAP fitted; the code transforms each client's points once more (0 of 1600
links differ with k = 5, 6 with k = 2, digits of 40 clients). New clients are placed on the plane of the
initial clients.

A~ depends on the order of a client's samples: k-means draws its starting samples by their index, and most
clients reach another local optimum under another order. On scenario 1 of MNIST (100 clients) another order
changes 3 to 4 % of the links without fine-tuning and 4 to 7 % with it, all inside the true clusters
(docs/methods.md). UMAP, which depends on the order of equal centroids, contributes less than 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import nn

from mpifl.clustering.distances import closest_pair, matching_distance, pairwise
from mpifl.clustering.server_plans import client_centroids
from mpifl.clustering.umap_projection import umap_plane
from mpifl.core.computation import Asked, Held
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.method import Client, Key, Needs
from mpifl.core.options import NonNegativeInt, PositiveFloat, PositiveInt
from mpifl.core.parameters import put, take
from mpifl.core.types import Notes, ProblemInfo, Report, Server, Vector

from .related_clients import Look, RelatedClients, cloud

ROUNDING = 1e-5  # of pixels that were resized
DISTANCES = {"matching": matching_distance, "closest": closest_pair}


@dataclass(frozen=True)
class FLT(RelatedClients):
    """One row per set of related clients, and the initial model.

    Attributes:
        gamma: distance on the plane below which two clients are related.
        centroids: k, centroids of a client; 0: its number of classes.
        distance: distance of two clients' sets of centroids: `matching` (of least cost) or `closest` (pair).
        autoencoder: `flt_ae` (grey, 28 x 28) or `flt_ae_cifar` (colour).
        code: e, width of a code.
        pretrain_epochs: epochs of pre-training of the autoencoder at the server.
        finetune_epochs: epochs of fine-tuning of the autoencoder at a client.
        loss: loss of the autoencoder: `mse` or `bce`; the latter needs pixels in [0, 1].
    """

    gamma: PositiveFloat = 1.0
    centroids: Annotated[int, Interval(ge=0, le=1000)] = 5
    distance: Literal["matching", "closest"] = "matching"
    autoencoder: Literal["flt_ae", "flt_ae_cifar"] = "flt_ae"
    code: PositiveInt = 128
    pretrain_epochs: NonNegativeInt = 25
    finetune_epochs: NonNegativeInt = 5
    loss: Literal["mse", "bce"] = "mse"

    paper = "jamalirad2022federated"
    needs = Needs(averages=True, classes=True, inputs=("images",))
    shown_from = ("autoencoder", "code", "pretrain_epochs", "finetune_epochs", "loss")
    statistics_from = ("autoencoder", "code", "finetune_epochs", "loss", "centroids")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "needs outputs in [0, 1], and those of flt_ae_cifar are any numbers; use mse, or flt_ae"
        require(self.loss == "mse" or self.autoencoder == "flt_ae", "loss", self.loss, remedy)

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` for `bce` with pixels outside of [0, 1], or too few centroids for a plane."""
        super().check(problem)
        for client in problem.public if self.loss == "bce" else ():
            least, most = client.data.train.x.aminmax()
            remedy = f"needs pixels in [0, 1], and these are in [{least:.3g}, {most:.3g}]; use mse, or "
            inside = float(least) >= -ROUNDING and float(most) <= 1 + ROUNDING
            require(inside, "loss", self.loss, remedy + "data.source.normalise unit")
        k = self.centroids or problem.num_classes
        self._check_points(int(np.minimum(problem.num_samples, k).sum()), False, "centroids")

    def _check_points(self, count: int, joined: bool, key: str) -> None:
        """Raise `UserError` if UMAP cannot fit a plane: two points, or one point that others join later."""
        remedy = f"there is no plane through {count} point{'s' * (count > 1)}, the centroids of all"
        remedy += " initial clients; use more centroids, or more clients"
        require(count > 2 or (count == 1 and not joined), key, self.centroids, remedy)

    def auxiliary(self) -> Mapping[str, Any]:
        """Name the autoencoder."""
        return {"name": self.autoencoder, "code": self.code}

    def _fit(self, client: Client, w: Vector, key: Key, epochs: int, split: Split | None = None) -> Vector:
        """Train the autoencoder with Adam; the settings in `local` are for the clients' models only."""
        lr = {"lr": 1e-3, "lr_decay": 1.0, "milestones": ()}
        plain = {"augment": "none", "precision": "float32"}
        how: dict[str, Any] = {"optimizer": "adam", "momentum": 0.0, "weight_decay": 0.0, **lr, **plain}
        distance = F.mse_loss if self.loss == "mse" else F.binary_cross_entropy

        def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return distance(module(x), x)

        return client.sgd(w, key, loss=loss, split=split, epochs=epochs, batch_size=32, **how).vector

    def _part(self, client: Client) -> tuple[slice, ...]:
        """Return the part clients download: the encoder, and the decoder if they fine-tune."""
        return client.layout.part("all" if self.finetune_epochs else "encoder")

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Pre-train the autoencoder on the server's own images."""
        house, sets = problem.public[0].auxiliary, [c.data.train for c in problem.public]
        images = Split(torch.cat([s.x for s in sets]), torch.cat([s.y for s in sets]))
        w = self._fit(house, house.init, key, self.pretrain_epochs, images)
        return {"autoencoder": take(w, self._part(house)).cpu()[None]}

    def statistics_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the fine-tuning of the autoencoder, and the codes."""
        tuned = {"epochs": self.finetune_epochs, "steps": None, "batch_size": 32}
        fit = Asked("sgd", held.train, changes=tuned, auxiliary=True)
        return [fit, Asked("embed", held.train, auxiliary=True)]

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return M_k, the centroids [k, e] of the codes; rows of NaN where there are fewer."""
        ae = client.auxiliary
        w = self._fit(ae, put(ae.init, self._part(ae), shown["autoencoder"][0]), key, self.finetune_epochs)
        codes = ae.embed(w, ae.data.train.x).cpu().numpy()
        classes = client.layout.num_classes
        k = self.centroids or len(torch.unique(client.data.train.y))
        return client.report({"centroids": client_centroids(codes, k, self.centroids or classes)})

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Link the initial clients, whose centroids fit the plane."""
        assert fingerprints is not None
        found = np.isfinite(fingerprints["centroids"][:, :, 0]).sum()
        joined = len(fingerprints.client) < problem.num_clients
        self._check_points(int(found), joined, "algorithm.centroids")
        server = super().setup(problem, fingerprints, key)
        founders = {"founders": fingerprints.client}
        return replace(server, algorithm_state={**server.algorithm_state, **founders})

    def related(self, look: Look) -> np.ndarray:
        """Return A < gamma, A measured on the plane fitted to the initial clients, anew at each look."""
        clouds = [cloud(look.centroids[k]) for k in look.clients]
        points, start = np.concatenate(clouds), sum(map(len, clouds[: look.num_initial]))
        plane = umap_plane(points[:start], points[start:])
        Z = np.split(plane, np.cumsum([len(c) for c in clouds])[:-1])
        return self.gamma > pairwise(Z, DISTANCES[self.distance])
