"""The two autoencoders with which FLT encodes images. Jamali-Rad et al., 2022 (FLT), HEAD of hjraad/FLT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mpifl.core.errors import require
from mpifl.core.options import PositiveInt

from .base import Shape, chain, need_side


class Autoencoder(nn.Module):
    """An encoder to a code, and a decoder back to images.

    Attributes:
        encoder: [n, C, H, W] -> [n, code].
        decoder: [n, code] -> [n, C, H, W].
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the codes [n, code] of images [n, C, H, W]."""
        codes: torch.Tensor = self.encoder(x)
        return codes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the reconstruction [n, C, H, W] of images of the same shape."""
        images: torch.Tensor = self.decoder(self.encoder(x))
        return images


class ResidualBlock(nn.Module):
    """x + conv1(ReLU(conv3(ReLU(x)))), without bias: 128 channels through 32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(128, 32, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(32, 128, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 128, H, W] to the same shape."""
        residual: torch.Tensor = self.conv2(torch.relu(self.conv1(torch.relu(x))))
        return x + residual


def _quarter(name: str, shape: Shape) -> tuple[int, int]:
    """Return the sides of the image after halving it twice."""
    _, h, w = shape
    need_side(name, shape, 4)
    remedy = f"needs images whose sides are multiples of 4, but the data has {h}x{w}"
    require(h % 4 == 0 and w % 4 == 0, "model.name", name, remedy)
    return h // 4, w // 4


@dataclass(frozen=True)
class FltAE:
    """FLT ConvAE for 28x28 images in [0, 1]: 51,577 parameters with a code of 128.

    Encoder conv3 -> 16, ReLU, pool; conv3 -> 4, ReLU, pool; fc 196 -> code (no activation). Decoder
    fc code -> 196 (no activation), transposed conv2 of stride 2 -> 16, ReLU, the same -> C, sigmoid.

    Attributes:
        code: width of the code.
    """

    code: PositiveInt = 128

    def build(self, shape: Shape) -> Autoencoder:
        """Return the autoencoder for images of `shape`."""
        h, w = _quarter("flt_ae", shape)
        encoder = chain(
            conv1=nn.Conv2d(shape[0], 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 4, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(4 * h * w, self.code),
        )
        decoder = chain(
            fc=nn.Linear(self.code, 4 * h * w),
            unflatten=nn.Unflatten(1, (4, h, w)),
            deconv1=nn.ConvTranspose2d(4, 16, 2, stride=2),
            relu=nn.ReLU(),
            deconv2=nn.ConvTranspose2d(16, shape[0], 2, stride=2),
            sigmoid=nn.Sigmoid(),
        )
        return Autoencoder(encoder, decoder)


def _normed(layer: nn.Module, width: int, *more: nn.Module) -> nn.Sequential:
    """Return a convolution followed by batch norm and `more`."""
    return nn.Sequential(layer, nn.BatchNorm2d(width), *more)


def _encoder(channels: int, pixels: int, code: int) -> nn.Sequential:
    return chain(
        conv1=_normed(nn.Conv2d(channels, 64, 4, 2, padding=1), 64, nn.ReLU()),
        conv2=_normed(nn.Conv2d(64, 128, 4, 2, padding=1), 128, nn.ReLU()),
        conv3=_normed(nn.Conv2d(128, 128, 3, padding=1), 128),
        residual1=ResidualBlock(),
        residual2=ResidualBlock(),
        conv4=_normed(nn.Conv2d(128, 64, 1), 64, nn.ReLU()),
        conv5=_normed(nn.Conv2d(64, 8, 1), 8, nn.ReLU()),
        flatten=nn.Flatten(),
        fc=nn.Linear(8 * pixels, code),
    )


def _decoder(channels: int, h: int, w: int, code: int) -> nn.Sequential:
    return chain(
        fc=nn.Linear(code, 8 * h * w),
        unflatten=nn.Unflatten(1, (8, h, w)),
        deconv5=_normed(nn.ConvTranspose2d(8, 64, 1), 64, nn.ReLU()),
        deconv4=_normed(nn.ConvTranspose2d(64, 128, 1), 128),
        residual2=ResidualBlock(),
        residual1=ResidualBlock(),
        deconv3=_normed(nn.ConvTranspose2d(128, 128, 3, padding=1), 128, nn.ReLU()),
        deconv2=_normed(nn.ConvTranspose2d(128, 64, 4, 2, padding=1), 64, nn.ReLU()),
        deconv1=nn.ConvTranspose2d(64, channels, 4, 2, padding=1),
    )


@dataclass(frozen=True)
class FltAECifar:
    """FLT ConvAE for 32x32 colour images; mean squared error, no squashing of the output.

    Encoder conv4 stride 2 -> 64; conv4 stride 2 -> 128; conv3 -> 128; two residual blocks; conv1 -> 64;
    conv1 -> 8; each convolution with batch norm; fc 512 -> code. The decoder mirrors it. We read it with a
    ReLU after each batch norm, unless a residual block follows, which starts with a ReLU.

    Attributes:
        code: width of the code (64 in the submission branch, 128 at HEAD).
    """

    code: PositiveInt = 128

    def build(self, shape: Shape) -> Autoencoder:
        """Return the autoencoder for images of `shape`."""
        h, w = _quarter("flt_ae_cifar", shape)
        return Autoencoder(_encoder(shape[0], h * w, self.code), _decoder(shape[0], h, w, self.code))
