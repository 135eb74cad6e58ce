"""Networks of torchvision, with an optional local file of weights. Grey images get three equal channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpifl.core.errors import require
from mpifl.core.optional_packages import torchvision_package
from mpifl.models import modules

from .base import Shape, ShapeModel, chain, need_channels, need_side

BODY = "body.net."  # prefix of the names of torchvision's modules


def _models(name: str) -> Any:
    """Return torchvision's models, of which one is needed.

    Raises:
        UserError: torchvision is not installed.
    """
    return torchvision_package("model.name", name).models


def _split(name: str, module: nn.Module, last: str, stage: Sequence[str], shape: Shape) -> modules.Net:
    """Return `module` with its last layer, called `last`, taken off as the head."""
    need_channels(name, shape, (1, 3))
    head = module.get_submodule(last)
    assert isinstance(head, nn.Linear)
    module.set_submodule(last, nn.Identity())
    return modules.Net(chain(rgb=modules.ToRGB(), net=module), head, [f"net.{s}" for s in stage])


@dataclass(frozen=True)
class ResNet18(ShapeModel):
    """ResNet-18 of torchvision (He et al., CVPR 2016); EMD-CFL on CIFAR-10 and PACS.

    11,181,642 parameters with 10 classes. Embedding = the 512 pooled channels.

    `model.weights` takes torchvision's names.
    """

    paper = "he2016deep"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        module = _models("resnet18").resnet18(num_classes=num_classes)
        return _split("resnet18", module, "fc", ["layer4"], shape)

    def published(self) -> dict[str, str]:
        """Return torchvision's names of body and head."""
        return {"body": BODY, "head": "fc"}


@dataclass(frozen=True)
class ResNet50(ShapeModel):
    """ResNet-50 of torchvision (He et al., CVPR 2016); EMD-CFL, larger networks.

    25,557,032 parameters with 1000 classes. Embedding = the 2048 pooled channels.

    `model.weights` takes torchvision's names.
    """

    paper = "he2016deep"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        module = _models("resnet50").resnet50(num_classes=num_classes)
        return _split("resnet50", module, "fc", ["layer4"], shape)

    def published(self) -> dict[str, str]:
        """Return torchvision's names of body and head."""
        return {"body": BODY, "head": "fc"}


@dataclass(frozen=True)
class EfficientNetB3(ShapeModel):
    """EfficientNet-B3 of torchvision (Tan and Le, ICML 2019); EMD-CFL, larger networks.

    12,233,232 parameters with 1000 classes. Embedding = the 1536 pooled channels (after dropout in training).

    `model.weights` takes torchvision's names.
    """

    paper = "tan2019efficientnet"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        module = _models("efficientnet_b3").efficientnet_b3(num_classes=num_classes)
        return _split("efficientnet_b3", module, "classifier.1", ["features.7", "features.8"], shape)

    def published(self) -> dict[str, str]:
        """Return torchvision's names of body and head."""
        return {"body": BODY, "head": "classifier.1"}


@dataclass(frozen=True)
class ViTB16(ShapeModel):
    """Vision transformer B/16 of torchvision (Dosovitskiy et al., ICLR 2021); EMD-CFL, larger networks.

    86,567,656 parameters at 224x224 with 1000 classes. Embedding = the class token (768). Images must be
    square, their side a multiple of 16; published weights need 224.

    `model.weights` takes torchvision's names.
    """

    paper = "dosovitskiy2021image"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        _, h, w = shape
        remedy = (
            f"needs square images with a side that is a multiple of 16, but the data has {h}x{w}: resize them"
        )
        require(h == w and h % 16 == 0, "model.name", "vit_b_16", remedy)
        module = _models("vit_b_16").vit_b_16(num_classes=num_classes, image_size=h)
        stage = ["encoder.layers.encoder_layer_11", "encoder.ln"]
        return _split("vit_b_16", module, "heads.head", stage, shape)

    def published(self) -> dict[str, str]:
        """Return torchvision's names of body and head."""
        return {"body": BODY, "head": "heads.head"}


@dataclass(frozen=True)
class ConvNeXtBase(ShapeModel):
    """ConvNeXt-Base of torchvision (Liu et al., CVPR 2022); EMD-CFL, larger networks.

    88,591,464 parameters with 1000 classes. Embedding = the 1024 pooled, normalised channels.

    `model.weights` takes torchvision's names.
    """

    paper = "liu2022convnet"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        need_side("convnext_base", shape, 32)
        module = _models("convnext_base").convnext_base(num_classes=num_classes)
        stage = ["features.6", "features.7", "classifier.0"]
        return _split("convnext_base", module, "classifier.2", stage, shape)

    def published(self) -> dict[str, str]:
        """Return torchvision's names of body and head."""
        return {"body": BODY, "head": "classifier.2"}
