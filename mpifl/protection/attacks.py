"""Attackers: malicious clients that falsify the labels of their data or their uploads.

The attackers are drawn once, with the data seed. An attack on labels changes the client's own training and
validation data. An attack on uploads changes the client's update, which is the difference of each upload from
the row that it downloaded; uploads that are updates already are changed directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch

from mpifl.aggregation.update_filter import FilteredVisit, UpdateFilter
from mpifl.core.errors import require
from mpifl.core.options import Options, PositiveFloat, ShareBelowOne
from mpifl.core.parameters import VectorParts
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.types import Report
from mpifl.traffic.encoding import base_of, rows_under


@dataclass(frozen=True)
class NoAttack(Options):
    """All clients are honest."""


@dataclass(frozen=True, kw_only=True)
class Attack(Options, ABC):
    """An attack by some of the clients.

    Attributes:
        share: fraction of the clients that attack, in (0, 1); drawn with the data seed.
        clients: numbers of the clients that attack; instead of `share`.
    """

    share: ShareBelowOne = 0.0
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        either = bool(self.share) != bool(self.clients)
        remedy = "say who attacks by a share of the clients or by their numbers: one of the two"
        require(either, "share", self.share, remedy)
        distinct = len(set(self.clients)) == len(self.clients)
        require(distinct, "clients", list(self.clients), "name each client once")

    def attackers(self, num_clients: int, key: Key) -> tuple[int, ...]:
        """Return the clients that attack, ascending.

        Args:
            num_clients: N, number of clients.
            key: random key of the data seed.

        Raises:
            UserError: there are no such clients, or none or all of the clients would attack.
        """
        if self.clients:
            known = min(self.clients) >= 0 and max(self.clients) < num_clients
            require(known, "clients", list(self.clients), f"clients are numbered from 0 to {num_clients - 1}")
            some = len(self.clients) < num_clients
            require(some, "clients", list(self.clients), "somebody must be honest; name fewer")
            return tuple(sorted(self.clients))
        count = round(self.share * num_clients)
        remedy = f"makes {count} of {num_clients} clients attackers; use a share that makes some, not all"
        require(0 < count < num_clients, "share", self.share, remedy)
        drawn = key.of("attackers").numpy().permutation(num_clients)[:count]
        return tuple(int(k) for k in np.sort(drawn))

    @abstractmethod
    def labels(self, num_classes: int) -> np.ndarray | None:
        """Return the label [L] that attackers give to samples of each label; None leaves labels unchanged."""


class UploadAttack(Attack):
    """An attack on uploads."""

    def labels(self, num_classes: int) -> None:
        """Return None: labels stay unchanged."""

    @abstractmethod
    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return the update [C, w] that is sent instead of an honest one.

        Args:
            update: the honest update, float32 [C, w] in main memory.
            key: random key of the visit and the upload.
        """


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Attackers train on wrong labels: label y becomes L - 1 - y, or one label becomes another.

    The first variant is that of Fang, Cao, Jia and Gong, "Local Model Poisoning Attacks to Byzantine-Robust
    Federated Learning", USENIX Security 2020; the second that of Tolpegin, Truex, Gursoy and Liu, "Data
    Poisoning Attacks Against Federated Learning Systems", ESORICS 2020.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        source: the only label that is changed; null changes all labels.
        target: the label that `source` becomes.
    """

    source: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        both = (self.source is None) == (self.target is None)
        require(both, "target", self.target, "give source and target, or neither")
        differ = self.source is None or self.source != self.target
        require(differ, "target", self.target, "has no effect: it is the source")

    def labels(self, num_classes: int) -> np.ndarray:
        """Return the wrong label of each label."""
        if self.source is None or self.target is None:
            return np.arange(num_classes)[::-1].copy()
        table = np.arange(num_classes)
        for name, label in (("source", self.source), ("target", self.target)):
            require(0 <= label < num_classes, name, label, f"labels are 0 to {num_classes - 1}")
        table[self.source] = self.target
        return table


@dataclass(frozen=True, kw_only=True)
class SignFlip(UploadAttack):
    """Attackers multiply their update by -factor.

    Li, Xu, Chen, Giannakis and Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed
    Learning from Heterogeneous Datasets", AAAI 2019.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        factor: positive factor of the update, whose sign is reversed.
    """

    factor: PositiveFloat = 1.0

    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return -factor times the update."""
        return update * -self.factor


@dataclass(frozen=True, kw_only=True)
class Scale(UploadAttack):
    """Attackers multiply their update by a factor, to dominate the others (boosting, model replacement).

    Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020. For the
    data of a backdoor choose a backdoor scenario, and name its attackers.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        factor: factor of the update; positive, not 1.
    """

    paper = "bagdasaryan2020how"

    factor: PositiveFloat = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor != 1, "factor", self.factor, "has no effect; use another")

    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return factor times the update."""
        return update * self.factor


@dataclass(frozen=True, kw_only=True)
class Noise(UploadAttack):
    """Attackers send the model that they downloaded plus Gaussian noise, instead of a trained model.

    Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017, section 5.1.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        sigma: standard deviation of each number, in units of the weights of the model.
    """

    sigma: PositiveFloat = 1.0

    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return noise."""
        return self.sigma * torch.randn(update.shape, generator=key.of("attack").torch())


@dataclass(frozen=True)
class AttackedUploads(UpdateFilter):
    """Lets attackers send other uploads than they trained.

    Attributes:
        attack: how they change their updates.
        attackers: the clients that attack.
        parts: what the vectors hold.
    """

    at_clients = True
    attack: UploadAttack
    attackers: frozenset[int]
    parts: VectorParts

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return the report that an attacker sends instead of an honest one; notes and metrics stay the same.

        The attack changes the sent vectors that represent parameters: vectors with the name of a downloaded
        table (and the width of its rows), vectors in `based_on`, and vectors as long as the model. Running
        statistics stay as they are. An upload that is neither alone nor `model` appends its name to the key.
        """
        if report.client not in self.attackers:
            return report
        parts, vectors = self.parts, dict(report.vectors)
        lengths = (parts.layout.size, parts.layout.num_parameters)
        for name, x in report.vectors.items():
            rows, upload = rows_under(name, report, visit.message), x.reshape(-1, x.shape[-1])
            named = name in report.based_on or (rows is not None and rows.shape[-1] == x.shape[-1])
            if name in (*parts.no_weights, *report.unsent) or (not named and x.shape[-1] not in lengths):
                continue
            base = base_of(upload.cpu(), rows)
            place = visit.key if name == "model" or len(report.vectors) == 1 else visit.key.of(name)
            sent = base + self.attack.changed(upload.cpu() - base, place)
            for s in parts.statistics(name, x.shape[-1]):
                sent[:, s] = upload[:, s].cpu()
            vectors[name] = sent.reshape(x.shape).to(x.device)
        return replace(report, vectors=vectors)


ATTACKS: Registry[type[Options]] = Registry(
    "attacks",
    Attack,
    {"none": NoAttack, "label_flip": LabelFlip, "sign_flip": SignFlip, "scale": Scale, "noise": Noise},
)
