"""LG-FedAvg: private representations, a shared head.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020,
Algorithm 1. The mirror image of FedPer: body and head are trained together, the head is averaged by samples,
the body never leaves the client. The authors start from a model trained by FedAvg; here all clients start
from the common initial model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .shared_part import SharedPart

PRIVATE = {"head": "body", "block": "trunk"}  # what is shared -> what stays


@dataclass(frozen=True)
class LGFedAvg(SharedPart):
    """One table, `shared`; the rest is client state, the common initial one before the first visit.

    Attributes:
        shared: the part that is averaged: `head` (last layer) or `block` (last stage and head).
    """

    shared: Literal["head", "block"] = "head"

    paper = "liang2020think"
    names = "shared", "private"

    @property
    def parts(self) -> tuple[str, str]:
        """The head, or the last stage with it, is shared."""
        return self.shared, PRIVATE[self.shared]
