"""The base class of models, and the checks they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import nn

from mpifl.core.errors import require

Shape = tuple[int, int, int]  # (C, H, W) of one image


class Net(nn.Module):
    """A body that ends in the embedding, and the last linear layer; the body comes first in `parameters()`.

    Attributes:
        body: [n, C, H, W] -> [n, e].
        head: the last layer, [n, e] -> [n, num_classes].
        blocks: module-name prefixes of FedCUAU's cluster block: the last stage of the body, and the head.
    """

    blocks: tuple[str, ...]

    def __init__(self, body: nn.Module, head: nn.Linear, stage: Iterable[str] = ()) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.blocks = (*(f"body.{name}" for name in stage), "head")

    @property
    def sequence(self) -> tuple[nn.Module, ...]:
        """The modules that `forward` applies one after the other."""
        return self.body, self.head

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [n, e] of images [n, C, H, W]: the input of the last layer."""
        embedding: torch.Tensor = self.body(x)
        return embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, num_classes] of images [n, C, H, W]."""
        logits: torch.Tensor = self.head(self.embed(x))
        return logits


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return the layers one after the other, under their names."""
    return nn.Sequential(OrderedDict(layers))


def need_side(name: str, shape: Shape, least: int) -> None:
    """Raise `UserError` unless both sides of the images are at least `least` pixels."""
    _, h, w = shape
    require(
        min(h, w) >= least,
        "model.name",
        name,
        f"needs images of at least {least}x{least} pixels, but the data has {h}x{w}: enlarge the images "
        f"or take another model (mlp takes any size)",
    )


def need_channels(name: str, shape: Shape, allowed: tuple[int, ...]) -> None:
    """Raise `UserError` unless the images have an allowed number of channels."""
    known = " or ".join(map(str, allowed))
    require(
        shape[0] in allowed,
        "model.name",
        name,
        f"takes images of {known} channels, but the data has {shape[0]}: take another model",
    )


def need_positive(key: str, *widths: int) -> None:
    """Raise `UserError` unless all widths of layers are at least 1."""
    value = widths[0] if len(widths) == 1 else widths
    require(
        min(widths, default=1) >= 1, f"model.{key}", value, "a layer needs at least one unit; give 1 or more"
    )


def need_pair(key: str, widths: tuple[int, ...]) -> None:
    """Raise `UserError` unless there are two widths, each at least 1."""
    require(len(widths) == 2, f"model.{key}", widths, "give one number for each of the two convolutions")
    need_positive(key, *widths)


def need_rate(key: str, rate: float) -> None:
    """Raise `UserError` unless a dropout rate lies in [0, 1)."""
    require(0 <= rate < 1, f"model.{key}", rate, "a dropout rate lies in [0, 1); give 0 for none")


def positions(name: str, shape: Shape, lost: int) -> int:
    """Return the pixels after two convolutions, each shortening a side by `lost` and pooled by 2."""
    need_side(name, shape, 4 + 3 * lost)
    h, w = (((side - lost) // 2 - lost) // 2 for side in shape[1:])
    return h * w
