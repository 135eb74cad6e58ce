"""FedBN: FedAvg in which each client keeps its own batch normalisation.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, Algorithm
1. Parameters and running statistics of batch-norm layers are client state; the rest is averaged by samples.
With a model that has no batch norm this is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shared_part import SharedPart


@dataclass(frozen=True)
class FedBN(SharedPart):
    """One table, `shared`; batch norm is client state, the common initial one before the first visit."""

    paper = "li2021fedbn"
    names = "shared", "norm"

    @property
    def parts(self) -> tuple[str, str]:
        """Everything but the norms is shared."""
        return "unnormed", "norm"
