"""State of a client's optimisers from one visit to the next (`local.keep_optimizer`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass
class KeptOptimizer:
    """State of an optimiser that is kept for later; a training continues from it and updates it.

    Attributes:
        steps: steps taken so far.
        momentum: momentum of SGD, or Adam's first moment, float32 [p]; None before the first step.
        square: Adam's second moment [p]; None for SGD.
    """

    steps: int = 0
    momentum: torch.Tensor | None = None
    square: torch.Tensor | None = None


class OptimizerMemory:
    """The optimisers of a client between visits: the j-th training of a visit continues with the j-th one.

    Args:
        tensors: result of `tensors` after the last visit; empty before the first.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._kept: list[KeptOptimizer] = []
        self._asked = 0
        while f"{len(self._kept)}.steps" in tensors:
            j = len(self._kept)
            vectors = (tensors.get(f"{j}.{name}") for name in ("momentum", "square"))
            self._kept.append(KeptOptimizer(int(tensors[f"{j}.steps"]), *vectors))

    def next(self) -> KeptOptimizer:
        """Return the optimiser of the visit's next training."""
        if self._asked == len(self._kept):
            self._kept.append(KeptOptimizer())
        self._asked += 1
        return self._kept[self._asked - 1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state of all optimisers, by name."""
        out = {}
        for j, kept in enumerate(self._kept):
            out[f"{j}.steps"] = torch.tensor(kept.steps)
            for name, vector in (("momentum", kept.momentum), ("square", kept.square)):
                if vector is not None:
                    out[f"{j}.{name}"] = vector
        return out
