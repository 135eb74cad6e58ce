"""Residual networks for small images: a 3x3 stem and no pooling before the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from mpifl.core.options import PositiveInt
from mpifl.models import modules

from .base import Shape, ShapeModel, chain

# channels before and after -> module that halves the image
Shortcut: TypeAlias = "Callable[[int, int], nn.Module]"


def project(before: int, after: int) -> nn.Module:
    """Return the shortcut with a 1x1 convolution of stride 2. He et al., option B."""
    return nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after))


def _body(channels: int, widths: tuple[int, ...], depth: int, shortcut: Shortcut) -> nn.Sequential:
    """Return stem, stages of `depth` blocks (all but the first halve the image), and the mean over pixels."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(widths[0]),
        "relu": nn.ReLU(),
    }
    before = widths[0]
    for i, width in enumerate(widths, 1):
        first = (
            modules.BasicBlock(before, width, 1, nn.Identity())
            if i == 1
            else modules.BasicBlock(before, width, 2, shortcut(before, width))
        )
        rest = [modules.BasicBlock(width, width, 1, nn.Identity()) for _ in range(depth - 1)]
        layers[f"layer{i}"] = nn.Sequential(first, *rest)
        before = width
    return chain(**layers, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())


@dataclass(frozen=True)
class ResNet18Cifar(ShapeModel):
    """ResNet-18 for small images: 3x3 stem, no stem pool, four stages of two blocks. CCFL and FedCUAU, CIFAR.

    11,173,962 parameters with 10 classes, 11,220,132 with 100. Embedding = the 512 pooled channels.

    Attributes:
        width: channels of the first stage; each further stage has twice as many.
    """

    paper = "he2016deep"

    width: PositiveInt = 64

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        widths = tuple(self.width * 2**i for i in range(4))
        body = _body(shape[0], widths, 2, project)
        return modules.Net(body, nn.Linear(widths[-1], num_classes), ["layer4"])


@dataclass(frozen=True)
class ResNet20(ShapeModel):
    """ResNet-20 for CIFAR: 16, 32, 64 channels, shortcuts without parameters. He et al., CVPR 2016.

    Three blocks a stage; 269,722 parameters with 10 classes. Convolutions and the last layer are drawn
    He-normal. Embedding = the 64 pooled channels. `model.weights` takes the names of
    akamaster/pytorch_resnet_cifar10 (`resnet20-12fca82f.th`).
    """

    paper = "he2016deep"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        net = modules.Net(
            _body(shape[0], (16, 32, 64), 3, modules.Subsample), nn.Linear(64, num_classes), ["layer3"]
        )
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
        return net

    def published(self) -> dict[str, str]:
        """Return the names of body and head in akamaster/pytorch_resnet_cifar10."""
        return {"body": "body.", "head": "linear"}
