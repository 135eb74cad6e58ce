"""Networks with an output for each pixel, [n, H, W, L]: for labels that are masks (task `segmentation`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from annotated_types import MaxLen, MinLen
from torch import nn

from mpifl.core.federation import MASKS
from mpifl.core.options import PositiveInt
from mpifl.models import modules

from .base import Shape, ShapeModel, chain, need_side

Widths = Annotated[tuple[PositiveInt, ...], MinLen(1), MaxLen(8)]
Norm = Literal["none", "batch"]


@dataclass(frozen=True)
class FCN(ShapeModel):
    """3x3 convolutions at the size of the image, each seeing twice as far as the one before it.

    Long et al., CVPR 2015 (fully convolutional); Yu and Koltun, ICLR 2016 (convolution i has dilation 2^i).
    The embedding of a pixel = the channels of the last convolution. With the defaults, 1 channel and 5
    classes: 4,885 parameters, and a pixel sees 15 x 15 pixels.

    Attributes:
        channels: output channels of each convolution.
        norm: `batch` for batch norm after each convolution, or none.
    """

    paper = "long2015fully"

    labels: ClassVar[tuple[str, ...]] = (MASKS,)

    channels: Widths = (16, 16, 16)
    norm: Norm = "none"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        before, layers = shape[0], dict[str, nn.Module]()
        for i, width in enumerate(self.channels):
            layers |= _convolution(str(i + 1), before, width, self.norm, 2**i)
            before = width
        body = chain(**layers, last=modules.PixelsLast())
        return modules.Net(body, nn.Linear(before, num_classes), [f"conv{len(self.channels)}"])


@dataclass(frozen=True)
class UNet(ShapeModel):
    """U-Net: two 3x3 convolutions at each of several sizes, down and up again.

    Ronneberger et al., MICCAI 2015, with convolutions that keep the size. The embedding of a pixel = the
    channels of the last convolution. With the defaults, 1 channel and 5 classes: 29,357 parameters.

    Attributes:
        channels: channels at each size, which is halved from one to the next.
        norm: `batch` for batch norm after each convolution, or none (as in the paper).
    """

    paper = "ronneberger2015unet"

    labels: ClassVar[tuple[str, ...]] = (MASKS,)

    channels: Widths = (8, 16, 32)
    norm: Norm = "none"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`, whose sides may be odd."""
        need_side("unet", shape, 2 ** (len(self.channels) - 1))
        before = shape[0], *self.channels[:-1]
        down = [_two(a, b, self.norm) for a, b in zip(before, self.channels, strict=True)]
        growing = self.channels[::-1]
        up = [modules.Up(a, b, _two(2 * b, b, self.norm)) for a, b in pairwise(growing)]
        body = chain(unet=modules.UNet(down, up), last=modules.PixelsLast())
        last = f"unet.up.{len(up) - 1}" if up else "unet.down.0"
        return modules.Net(body, nn.Linear(self.channels[0], num_classes), [last])


def _two(before: int, after: int, norm: Norm) -> nn.Sequential:
    """Return two convolutions that keep the size, with ReLU."""
    return chain(**_convolution("1", before, after, norm), **_convolution("2", after, after, norm))


def _convolution(number: str, before: int, after: int, norm: Norm, dilation: int = 1) -> dict[str, nn.Module]:
    """Return a 3x3 convolution that keeps the size, batch norm if there is one, and ReLU."""
    bias = norm == "none"
    layers: dict[str, nn.Module] = {
        f"conv{number}": nn.Conv2d(before, after, 3, padding=dilation, dilation=dilation, bias=bias)
    }
    if norm == "batch":
        layers[f"bn{number}"] = nn.BatchNorm2d(after)
    return {**layers, f"relu{number}": nn.ReLU()}
