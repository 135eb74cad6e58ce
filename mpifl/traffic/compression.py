"""Lossy compression of uploads: the size of a compressed vector, and the vector that the server decodes.

The difference from the downloaded row is compressed (see `encoding`), not the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch

from mpifl.core.errors import catalogue, require
from mpifl.core.rng import Key

INDEX_BYTES, SCALE_BYTES, SEED_BYTES = 4, 4, 8


class Compression(ABC):
    """A lossy compression of vectors.

    Attributes:
        sends_values: whether values are sent as numbers of the payload's type; otherwise they are sent as
            levels and float32 scales, which are not rounded to that type.
    """

    sends_values: ClassVar[bool] = True

    @abstractmethod
    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of a compressed vector in bytes.

        Args:
            d: length of the vector.
            number_bytes: size of an uncompressed number in bytes.
        """

    @abstractmethod
    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return the vector [d] that the server decodes.

        Args:
            x: the vector [d].
            key: random key of the draws.
            unbiased: whether the expectation over draws must be x; False with error feedback.
        """


@dataclass(frozen=True)
class Uncompressed(Compression):
    """No compression."""

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of all numbers in bytes."""
        return d * number_bytes

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return x."""
        return x


def _check_share(share: float) -> None:
    require(0 < share <= 1, "share", share, "use a share in (0, 1]")


@dataclass(frozen=True)
class TopK(Compression):
    """Send the numbers of largest absolute value and their indices. Aji and Heafield, EMNLP 2017.

    Attributes:
        share: fraction of the numbers to send; at least one number is sent.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        _check_share(self.share)

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of values and indices in bytes."""
        return _kept(self.share, d) * (number_bytes + INDEX_BYTES)

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return x with all numbers but the largest ones set to zero."""
        chosen = x.abs().topk(_kept(self.share, len(x)), sorted=False).indices
        out = torch.zeros_like(x)
        out[chosen] = x[chosen]
        return out


@dataclass(frozen=True)
class RandomK(Compression):
    """Send the numbers at random indices, given by a seed. Konecny et al., 2016, "random mask".

    Attributes:
        share: fraction of the numbers to send; at least one number is sent.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        _check_share(self.share)

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of values and seed in bytes."""
        return _kept(self.share, d) * number_bytes + SEED_BYTES

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return x with all but the k chosen numbers set to zero; these are scaled by d / k if unbiased."""
        k = _kept(self.share, len(x))
        chosen = torch.randperm(len(x), generator=key.torch())[:k]
        out = torch.zeros_like(x)
        out[chosen] = x[chosen] * (len(x) / k if unbiased and k else 1.0)
        return out


@dataclass(frozen=True)
class QSGD(Compression):
    """Round numbers at random to 2^(bits - 1) - 1 levels of a bucket's norm. Alistarh et al., NeurIPS 2017.

    Each number takes a fixed number of bits; there is no entropy coding.

    Attributes:
        bits: bits of each number, including its sign.
        bucket: number of consecutive numbers that share a norm.
    """

    sends_values = False
    bits: int = 8
    bucket: int = 512

    def __post_init__(self) -> None:
        require(2 <= self.bits <= 16, "bits", self.bits, "use 2 to 16 bits")
        require(self.bucket >= 1, "bucket", self.bucket, "use at least one number")

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of numbers and norms in bytes."""
        return ceil(d * self.bits / 8) + SCALE_BYTES * ceil(d / self.bucket)

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return the rounded numbers; if not unbiased, scaled down so that residuals do not grow."""
        rows, s = _buckets(x, self.bucket), 2 ** (self.bits - 1) - 1
        norm = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        noise = torch.rand(rows.shape, generator=key.torch())
        levels: torch.Tensor = (rows.abs() / norm * s + noise).floor_()
        spread = min(rows.shape[1] / s**2, rows.shape[1] ** 0.5 / s)  # lemma 3.1: variance / ||x||^2
        scale = norm / s if unbiased else norm / (s * (1 + spread))
        rounded: torch.Tensor = levels * rows.sign() * scale
        return rounded.reshape(-1)[: len(x)]


@dataclass(frozen=True)
class Int8(Compression):
    """Round numbers to 8 bits: the nearest of 255 levels of a bucket's largest absolute value.

    Attributes:
        bucket: number of consecutive numbers that share a scale.
    """

    sends_values = False
    bucket: int = 512

    def __post_init__(self) -> None:
        require(self.bucket >= 1, "bucket", self.bucket, "use at least one number")

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of numbers and scales in bytes."""
        return d + SCALE_BYTES * ceil(d / self.bucket)

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return the rounded numbers."""
        rows = _buckets(x, self.bucket)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / 127
        nearest: torch.Tensor = (rows / scale).round_() * scale
        return nearest.reshape(-1)[: len(x)]


def _kept(share: float, d: int) -> int:
    """Return the number of the d numbers that are sent."""
    return min(d, max(1, round(share * d)))


def _buckets(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x as rows of length `size`, the last one padded with zeros."""
    out = x.new_zeros(-(-len(x) // size) * size)
    out[: len(x)] = x
    return out.reshape(-1, size)


COMPRESSIONS: dict[str, type[Compression]] = catalogue(
    {"none": Uncompressed, "top_k": TopK, "random_k": RandomK, "qsgd": QSGD, "int8": Int8}
)
