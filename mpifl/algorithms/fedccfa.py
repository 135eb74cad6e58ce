"""FedCCFA: one extractor; class by class, clients whose classifiers agree share class vectors and anchors.

Chen et al., "Classifier Clustering and Feature Alignment for Federated Learning under Distributed Concept
Drift", NeurIPS 2024. Legend: phi_k,c class vector of client k (the weights and bias of class c in its last
layer), A_k,c its anchor (mean embedding of its samples of class c), p_k its shares of the classes, H entropy.
In a visit a client trains (1) from the initial classifier, under the received extractor, a balanced
classifier on as many samples of each class; (2) its own classifier; (3) the extractor under it, with loss
CE + H(p_k) / gamma * align, align = -log( exp(cos(z, A_y) / tau) / sum_c exp(cos(z, A_c) / tau) ). Extractors
are averaged by samples over all clients. For each class the server clusters the balanced class vectors by
DBSCAN on the mean absolute differences of their cosines; the class vectors and anchors of a cluster are
averaged, and its members receive the averages.

Our reading: of the paper only the abstract and summaries could be read here, so that equations and defaults
are those of the authors' code: the samples of a balanced set, DBSCAN with one core point (connected
components), alignment from round 21 on, equal weights within clusters. In that code every client has every
class; here a client takes part in the clusters of a class only if it has samples of it, and a class without
anchor is left out of `align`. Fewer than three clients have no third to compare them with: they are not
clustered. Two effects of that code are not taken over: at its first visit a client goes on from its
balanced classifier, and with equal weights the anchors of one client of a round are summed over all.
A label (`ari`) stands for clients that were last clustered together in all classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval

from mpifl.clustering.distances import cosine_matrix, madc
from mpifl.clustering.partitions import canonical, last_uploads, merge_closest
from mpifl.core.computation import Asked, Held
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.method import Algorithm, Client, Key, Loss, Needs, Plan
from mpifl.core.mixing import average, rows, updated
from mpifl.core.module_calls import embedding_of
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mpifl.core.parameters import Layout, put, take, width
from mpifl.core.task import Task
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector


@dataclass(frozen=True)
class FedCCFA(Algorithm):
    """Table `body` has one row; tables `head` and `anchors` have one for each client, which reads its own.

    Attributes:
        eps: classifiers of a class whose distance is at most this are in one cluster.
        gamma: divisor of the entropy in the weight of the alignment.
        align: weight of the alignment for all clients; None: entropy of the client's classes over gamma.
        align_from: rounds without alignment.
        temperature: tau, temperature of the alignment.
        head_lr: learning rate of classifiers; `local.lr` is that of the extractor.
        head_epochs: epochs of the own classifier in each visit.
        balanced_epochs: epochs of the balanced classifier.
        balanced_samples: most samples of each class in the balanced set; as many of each as the rarest has.
        weighted: average in a cluster by the samples of the class; otherwise with equal weights.
    """

    eps: Annotated[float, Interval(ge=0, le=2)] = 0.1
    gamma: PositiveFloat = 20.0
    align: NonNegativeFloat | None = None
    align_from: NonNegativeInt = 20
    temperature: PositiveFloat = 0.1
    head_lr: PositiveFloat = 0.1
    head_epochs: NonNegativeInt = 1
    balanced_epochs: NonNegativeInt = 5
    balanced_samples: PositiveInt = 5
    weighted: bool = False

    paper = "chen2024classifier"
    asks = ("loss", "part", "sgd")
    statistics = ("anchors",)
    holds = MappingProxyType({"body": "body", "head": "head"})
    needs = Needs(min_cohort=3, classes=True, server_update=True)

    def ignored_options(self) -> Mapping[str, str]:
        """Without a weight by entropy `gamma` is not read, without alignment neither are its options."""
        why = {} if self.align is None else {"gamma": "align sets the weight"}
        if self.align == 0:
            why |= dict.fromkeys(("align_from", "temperature"), "align is 0")
        return why

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` unless the last layer has one row of weights for each class."""
        super().check(problem)
        e, numbers = embedding_size(problem.layout), width(problem.layout.part("head"))
        remedy = "class vectors are clustered; use a model whose head is an nn.Linear with an output a class"
        fits = e > 0 and numbers in (problem.num_classes * e, problem.num_classes * (e + 1))
        require(fits, "model.name", f"a head of {numbers} numbers", remedy)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all clients alike, without anchors (zeros) and clusters (-1)."""
        w, N, C = problem.init(0), problem.num_clients, problem.num_classes
        body, head = (take(w, problem.layout.part(name))[None] for name in ("body", "head"))
        anchors = torch.zeros(N, C * embedding_size(problem.layout))
        tables = {"body": body, "head": head.repeat(N, 1), "anchors": anchors}
        memory = {
            "cluster": np.full((N, C), -1),  # first client of the cluster of each class vector
            "counts": np.zeros((N, C), np.int64),
            "fresh": np.zeros(N, bool),
        }
        return Server(tables, np.arange(N), memory)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the extractor, and the own classifier and anchors."""
        return {"body": (0,), "head": (k,), "anchors": (k,)}

    def serves(self, server: Server, k: int) -> Reads:
        """Evaluate with the extractor and the own classifier."""
        return {"body": (0,), "head": (k,)}

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the extractor with the own classifier."""
        w = put(client.init, client.layout.part("body"), message["body"][0])
        return put(w, client.layout.part("head"), message["head"][0])

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the three trainings, and the embeddings for the anchors."""
        few = min(held.train, self.balanced_samples * problem.num_classes)
        even, own = ({"epochs": e, "steps": None} for e in (self.balanced_epochs, self.head_epochs))
        return [
            Asked("sgd", few, changes=even, part="head", at_most=True),
            Asked("sgd", held.train, changes=own, part="head"),
            Asked("sgd", held.train, part="body"),
            Asked("embed", held.train),
        ]

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the balanced classifier, the own one and the extractor; make the anchors."""
        body, head = client.layout.part("body"), client.layout.part("head")
        train, C = client.data.train, client.layout.num_classes
        counts = torch.bincount(train.y, minlength=C)  # [C]
        anchors = message["anchors"][0].reshape(C, -1)
        how: dict[str, Any] = {"part": head, "lr": self.head_lr}
        first = put(client.init, body, message["body"][0])
        few = balanced(train, self.balanced_samples, key.of("samples"))
        even = client.sgd(first, key.of("balanced"), split=few, epochs=self.balanced_epochs, **how).vector
        w = self.model_of(message, state, client)
        w = client.sgd(w, key.of("head"), epochs=self.head_epochs, **how).vector
        weight = entropy(counts) / self.gamma if self.align is None else self.align
        aligns = weight > 0 and message.step > self.align_from and bool(anchors.any())
        loss = aligned(anchors, weight, self.temperature, client.task) if aligns else None
        trained = client.sgd(w, key, part=body, loss=loss)
        z = client.embed(trained.vector, train.x).flatten(1)  # [n, e]
        sums = F.one_hot(train.y, C).T.to(z) @ z
        notes = {"balanced": take(even, head).cpu().numpy(), "counts": counts.cpu().numpy()}
        report = client.report(
            notes,
            {"train_loss": trained.loss},
            body=take(trained.vector, body).clone(),
            head=take(trained.vector, head).clone(),
            anchors=(sums / counts.clamp(min=1)[:, None]).flatten(),
        )
        return report, {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the extractors and cluster; classifiers and anchors enter their clients' rows."""
        last = last_uploads(notes.client)
        k, memory = notes.client[last], server.algorithm_state
        own = np.zeros((len(server.assign), len(notes)))
        own[k, last] = 1
        has = notes["counts"][last] > 0  # [m, C]
        e = server.tables["anchors"].shape[1] // has.shape[1]
        clusters = self.clusters(notes["balanced"][last], has, e)  # [m, C]
        found = {
            "cluster": updated(memory["cluster"], k, np.where(clusters < 0, -1, k[clusters])),
            "counts": updated(memory["counts"], k, notes["counts"][last]),
            "fresh": updated(np.zeros_like(memory["fresh"]), k, True),
        }
        mixings = [rows(own, into=name, of=name) for name in ("head", "anchors")]
        return Plan([average(notes, into="body", of="body"), *mixings], algorithm_state=found)

    def clusters(self, heads: np.ndarray, has: np.ndarray, e: int) -> np.ndarray:
        """Return the first member [m, C] of the cluster of each class vector; -1 for classes without samples.

        Args:
            heads: balanced classifiers [m, width].
            has: which client has samples of which class, bool [m, C].
            e: size of an embedding.
        """
        out, C = np.full(has.shape, -1), has.shape[1]
        for c in range(C):
            there = np.flatnonzero(has[:, c])
            v = heads[np.ix_(there, class_vector(c, C, e, heads.shape[1]))].astype(np.float64)
            out[there, c] = there
            if len(there) > 2:
                apart = madc(cosine_matrix(np.einsum("id,jd->ij", v, v)))
                _, first, label = np.unique(
                    merge_closest(apart, self.eps, "minimum"), return_index=True, return_inverse=True
                )
                out[there, c] = there[first[label]]
        return out

    def server_update(self, old: Server, new: Server) -> Server:
        """Replace class vectors and anchors of this step by the means of their clusters."""
        head, anchors = new.tables["head"].clone(), new.tables["anchors"].clone()
        memory, C = new.algorithm_state, new.algorithm_state["cluster"].shape[1]
        e = anchors.shape[1] // C
        fresh = np.flatnonzero(memory["fresh"])
        for c in range(C):
            own = memory["cluster"][fresh, c]
            for first in np.unique(own[own >= 0]):
                members = fresh[own == first]
                n = memory["counts"][members, c] if self.weighted else np.ones(len(members))
                share = torch.from_numpy(n / n.sum())[:, None]
                of_head = torch.from_numpy(class_vector(c, C, e, head.shape[1]))
                for table, columns in ((head, of_head), (anchors, torch.arange(c * e, (c + 1) * e))):
                    at = torch.from_numpy(members)[:, None], columns
                    table[at] = (share * table[at].double()).sum(0).float()
        return replace(new, tables={**new.tables, "head": head, "anchors": anchors})

    def labels(self, server: Server) -> np.ndarray:
        """Return one label [N] for clients that are in one cluster in every class."""
        _, label = np.unique(server.algorithm_state["cluster"], axis=0, return_inverse=True)
        return canonical(label.reshape(-1))


def embedding_size(layout: Layout) -> int:
    """Return e, the inputs of the last layer; 0 if its weights are no matrix of the vector."""
    shape = dict(zip(layout.names, layout.shapes, strict=True)).get("head.weight", ())
    return shape[1] if len(shape) == 2 else 0


def class_vector(c: int, num_classes: int, e: int, numbers: int) -> np.ndarray:
    """Return where a classifier of so many numbers holds the e weights of class `c`, and its bias if any."""
    bias = [num_classes * e + c] if numbers > num_classes * e else []
    return np.array([*range(c * e, (c + 1) * e), *bias], np.int64)


def balanced(split: Split, most: int, key: Key) -> Split:
    """Return as many random samples of each class there, at most `most` and as many as the rarest has."""
    y = split.y.cpu().numpy()
    numpy = key.numpy()
    found = [np.flatnonzero(y == c) for c in np.unique(y)]
    n = min([most, *map(len, found)])
    index = np.concatenate([numpy.choice(of_class, n, replace=False) for of_class in found] or [y[:0]])
    chosen = torch.from_numpy(index.astype(np.int64)).to(split.y.device)
    return Split(split.x[chosen], split.y[chosen])


def entropy(counts: torch.Tensor) -> float:
    """Return H of the shares of the classes, in nats."""
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log()).sum())


def aligned(anchors: torch.Tensor, weight: float, tau: float, task: Task) -> Loss:
    """Return the loss with alignment.

    Args:
        anchors: [C, e]; zeros where a class has none, which is left out, with its samples.
        weight: of the alignment.
        tau: its temperature.
        task: the task.
    """
    known = anchors.any(1)

    def loss(module: Any, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        z = embedding_of(module, x)
        near = F.cosine_similarity(z.flatten(1)[:, None], anchors[None], dim=2) / tau  # [b, C]
        near = near.masked_fill(~known, -torch.inf)
        align = F.cross_entropy(near[known[y]], y[known[y]], reduction="sum") / len(y)
        return task.loss(module.head(z), y) + weight * align

    return loss
