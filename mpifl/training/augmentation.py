"""Random augmentations of training images, addressed by key: equal for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from mpifl.core.rng import Key

MARGIN = 4  # pixels


def unchanged(x: torch.Tensor, key: Key) -> torch.Tensor:
    """Return `x`."""
    return x


def crop_flip(x: torch.Tensor, key: Key) -> torch.Tensor:
    """Return randomly shifted images, half of them mirrored. He et al., CVPR 2016, section 4.2.

    Args:
        x: images [n, C, H, W]; shifts are at most MARGIN pixels, and zeros are shifted in.
        key: addresses the draws.
    """
    rng, (n, _, height, width) = key.numpy(), x.shape
    top, left = rng.integers(0, 2 * MARGIN + 1, (2, n, 1))
    row, column = (
        top + np.arange(height),
        left + np.arange(width),
    )  # [n, H], [n, W]: where each pixel comes from
    column = np.where(rng.random((n, 1)) < 0.5, column[:, ::-1], column)
    image = np.arange(n)[:, None, None]
    picked = F.pad(x, (MARGIN,) * 4)[image, :, row[:, :, None], column[:, None, :]]  # [n, H, W, C]
    return picked.permute(0, 3, 1, 2).contiguous()


AUGMENTATIONS: dict[str, Callable[[torch.Tensor, Key], torch.Tensor]] = {
    "none": unchanged,
    "crop_flip": crop_flip,
}
