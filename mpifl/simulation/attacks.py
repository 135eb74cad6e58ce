"""Attackers: clients that lie, by the labels of their data or by what they upload.

Who attacks is drawn once, with the data seed. An attack on labels is done to the client's own training and
validation data. An attack on uploads is done to what a client would send: to its update, the difference of
each upload from the row that it downloaded; uploads that are updates are changed as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mpifl.core.errors import require
from mpifl.core.parameters import Layout
from mpifl.core.rng import Key
from mpifl.core.types import Message, Report
from mpifl.traffic.encoding import base_of, rows_under


@dataclass(frozen=True)
class NoAttack:
    """All clients are honest."""


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Who attacks.

    Attributes:
        share: fraction of the clients that attack, in (0, 1); drawn with the data seed.
        clients: numbers of the clients that attack; instead of `share`.
    """

    share: float = 0.0
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, "share", self.share, "take a share in (0, 1)")
        either = bool(self.share) != bool(self.clients)
        remedy = "say who attacks by a share of the clients or by their numbers: one of the two"
        require(either, "share", self.share, remedy)
        distinct = len(set(self.clients)) == len(self.clients)
        require(distinct, "clients", list(self.clients), "name each client once")

    def attackers(self, num_clients: int, key: Key) -> tuple[int, ...]:
        """Return the clients that attack, ascending.

        Args:
            num_clients: N.
            key: of the data's draws.

        Raises:
            UserError: there are no such clients, or nobody, or everybody, would attack.
        """
        if self.clients:
            known = min(self.clients) >= 0 and max(self.clients) < num_clients
            require(known, "clients", list(self.clients), f"clients are numbered from 0 to {num_clients - 1}")
            some = len(self.clients) < num_clients
            require(some, "clients", list(self.clients), "somebody must be honest; name fewer")
            return tuple(sorted(self.clients))
        count = round(self.share * num_clients)
        remedy = f"makes {count} of {num_clients} clients attackers; take a share that makes some, not all"
        require(0 < count < num_clients, "share", self.share, remedy)
        drawn = key.of("attackers").numpy().permutation(num_clients)[:count]
        return tuple(int(k) for k in np.sort(drawn))

    @abstractmethod
    def labels(self, num_classes: int) -> np.ndarray | None:
        """Return the label [L] that attackers give to samples of each label; None leaves them."""


class UploadAttack(Attack):
    """An attack on what is uploaded."""

    def labels(self, num_classes: int) -> None:
        """Leave them."""

    @abstractmethod
    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return the update [C, w] that is sent in the place of an honest one.

        Args:
            update: float32 [C, w] in main memory.
            key: of the visit and the upload.
        """

    def report(
        self, report: Report, message: Message, layout: Layout, statistics: Sequence[str], key: Key
    ) -> Report:
        """Return what an attacker sends in the place of an honest report; notes and metrics stay.

        Changed are vectors that are sent and stand for parameters: those named like a table that was
        downloaded, those that say what they are based on, and those as long as the model.

        Args:
            report: the honest one.
            message: what was downloaded.
            layout: of the model.
            statistics: names of uploads that do not stand for parameters.
            key: of the visit; the draws of an upload that is neither alone nor `model` have its name, too.
        """
        lengths = (layout.size, layout.num_parameters)
        vectors = dict(report.vectors)
        for name, x in report.vectors.items():
            rows, upload = rows_under(name, report, message), x.reshape(-1, x.shape[-1])
            named = name in report.based_on or (rows is not None and rows.shape[-1] == x.shape[-1])
            if name in (*statistics, *report.unsent) or (not named and x.shape[-1] not in lengths):
                continue
            base = base_of(upload.cpu(), rows)
            place = key if name == "model" or len(report.vectors) == 1 else key.of(name)
            sent = base + self.changed(upload.cpu() - base, place)
            vectors[name] = sent.reshape(x.shape).to(x.device)
        return replace(report, vectors=vectors)


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Attackers train on wrong labels: label y becomes L - 1 - y, or one label another.

    The first as in Fang, Cao, Jia and Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated
    Learning", USENIX Security 2020; the second as in Tolpegin, Truex, Gursoy and Liu, "Data Poisoning Attacks
    Against Federated Learning Systems", ESORICS 2020.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        source: the only label that is changed; null changes all.
        target: what it becomes.
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
    """Attackers send their update times -factor.

    Li, Xu, Chen, Giannakis and Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed
    Learning from Heterogeneous Datasets", AAAI 2019.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        factor: above 0.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor > 0, "factor", self.factor, "take a factor above 0; the sign is changed anyway")

    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return -factor times the update."""
        return update * -self.factor


@dataclass(frozen=True, kw_only=True)
class Scale(UploadAttack):
    """Attackers send their update times factor, so that it drowns the others' (boosting, model replacement).

    Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020. For the
    data of a backdoor take a backdoor scenario, and name its attackers.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        factor: above 0, not 1.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.factor > 0 and self.factor != 1
        require(fits, "factor", self.factor, "take a factor above 0; 1 has no effect")

    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return factor times the update."""
        return update * self.factor


@dataclass(frozen=True, kw_only=True)
class Noise(UploadAttack):
    """Attackers send the model that they downloaded plus Gaussian noise, instead of what they trained.

    Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017, section 5.1.

    Attributes:
        share: fraction of the clients that attack.
        clients: numbers of the clients that attack; instead of `share`.
        sigma: standard deviation of each number, in units of the weights of the model.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.sigma > 0, "sigma", self.sigma, "take a standard deviation above 0")

    def changed(self, update: torch.Tensor, key: Key) -> torch.Tensor:
        """Return noise."""
        return self.sigma * torch.randn(update.shape, generator=key.of("attack").torch())


ATTACKS: dict[str, type] = {
    "none": NoAttack,
    "label_flip": LabelFlip,
    "sign_flip": SignFlip,
    "scale": Scale,
    "noise": Noise,
}
