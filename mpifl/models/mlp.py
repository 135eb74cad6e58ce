"""Fully connected networks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import nn

from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.models import modules

from .base import Shape, ShapeModel, chain


def _mlp(hidden: tuple[int, ...], shape: Shape, num_classes: int) -> modules.Net:
    """Return fully connected layers with ReLU; the last hidden layer is the embedding."""
    widths = (prod(shape), *hidden)
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for i, (before, after) in enumerate(zip(widths, hidden, strict=False), 1):
        layers |= {f"fc{i}": nn.Linear(before, after), f"relu{i}": nn.ReLU()}
    stage = [f"fc{len(hidden)}"] if hidden else []
    return modules.Net(chain(**layers), nn.Linear(widths[-1], num_classes), stage)


@dataclass(frozen=True)
class MLP(ShapeModel):
    """Fully connected layers with ReLU; embedding = last hidden layer (the pixels if there is none).

    Attributes:
        hidden: units of each hidden layer.
    """

    hidden: tuple[PositiveInt, ...] = (200,)

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        return _mlp(self.hidden, shape, num_classes)


@dataclass(frozen=True)
class IfcaMLP(ShapeModel):
    """One hidden layer of 200 with ReLU. Ghosh et al., NeurIPS 2020 (IFCA), MNIST: 159,010 parameters."""

    paper = "ghosh2020efficient"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        return _mlp((200,), shape, num_classes)


@dataclass(frozen=True)
class FltMLP(ShapeModel):
    """One hidden layer: linear, dropout, then ReLU (in this order). Jamali-Rad et al., 2022 (FLT), MLP.

    159,010 parameters for MNIST, 169,462 for EMNIST (62), 616,610 for CIFAR-10. Embedding = the hidden layer.

    Attributes:
        hidden: units of the hidden layer.
        dropout: share of the units that are dropped in training.
    """

    paper = "jamalirad2022federated"

    hidden: PositiveInt = 200
    dropout: ShareBelowOne = 0.5

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        body = chain(
            flatten=nn.Flatten(),
            fc1=nn.Linear(prod(shape), self.hidden),
            dropout=nn.Dropout(self.dropout),
            relu=nn.ReLU(),
        )
        return modules.Net(body, nn.Linear(self.hidden, num_classes), ["fc1"])
