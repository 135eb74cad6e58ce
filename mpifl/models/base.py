"""The base class of models, how they are built for some data, and the checks they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from mpifl.core.errors import UserError, require
from mpifl.core.federation import FEATURES, IMAGES, TOKENS, DataInfo

Shape = tuple[int, int, int]  # (C, H, W) of one image


class ModelOptions(ABC):
    """Options of a model that must know more of the data than shape and number of classes.

    Subclasses are frozen dataclasses whose fields are the keys of the section `model`. A model that needs no
    more than the two is a dataclass with `build(shape, num_classes)` instead; it gets images and features.

    Attributes:
        takes: the kinds of samples that it takes (`DataInfo.inputs`).
    """

    takes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def build_for(self, info: DataInfo) -> Net:
        """Return the network for such data: from samples [n, *info.shape] to [n, ..., info.num_classes]."""


def build_model(options: Any, info: DataInfo) -> nn.Module:
    """Return the network that a section `model` describes, for such data; draws its initial weights.

    Args:
        options: the section.
        info: what samples and labels are like.

    Raises:
        UserError: the model takes other samples.
    """
    name = getattr(type(options), "imported_as", type(options).__name__)
    takes = options.takes if isinstance(options, ModelOptions) else (IMAGES, FEATURES)
    remedy = f"takes {' or '.join(takes)}, but the samples of this source are {info.inputs}"
    example = {TOKENS: "an embedding first: lstm or transformer", FEATURES: "mlp", IMAGES: "mlp or emdcnn"}
    require(info.inputs in takes, "model.name", name, f"{remedy}; take {example[info.inputs]}")
    if isinstance(options, ModelOptions):
        return options.build_for(info)
    try:
        module: nn.Module = options.build(info.shape, info.num_classes)
    except (ValueError, IndexError, TypeError) as error:
        if isinstance(error, UserError) or len(info.shape) == 3:
            raise
        remedy = f"does not take samples of shape {list(info.shape)} ({error}); take mlp"
        raise UserError("model.name", name, remedy) from error
    return module


class Net(nn.Module):
    """A body that ends in the embedding, and the last linear layer; the body comes first in `parameters()`.

    Attributes:
        body: samples [n, ...] -> [n, e]; [n, T, e] where every token has an output.
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
        """Return the embeddings [n, e] of samples [n, ...]: the input of the last layer."""
        embedding: torch.Tensor = self.body(x)
        return embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [n, num_classes] for samples [n, ...]."""
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
