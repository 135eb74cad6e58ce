"""Lossy compression: the size of a compressed vector, and the vector that the other side decodes.

Of uploads, the difference from the downloaded row is compressed (`encoding.base_of`), not the model; where
the row is one of several, its index is sent as well. Random draws depend on client and visit, not on the
ranks. Of downloads, the row itself is compressed, once for all clients that read it: draws depend on the row
and the version of the server. The client trains from the row that it decodes, and is evaluated with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Interval

from mpifl.aggregation.update_filter import FilteredVisit, UpdateFilter
from mpifl.core.errors import MethodError, require
from mpifl.core.options import Options, PositiveInt, PositiveShare
from mpifl.core.parameters import VectorParts, put, put_, take
from mpifl.core.parameters import width as length
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.types import Message, Report

from .encoding import base_of, chooses, rows_under
from .ledger import travels_whole
from .payload import NumberFormat

INDEX_BYTES, SCALE_BYTES, SEED_BYTES = 4, 4, 8
RESIDUALS = "error"  # what error feedback keeps at a client, in its store


class Compression(Options, ABC):
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


class Codec(Compression, ABC):
    """A compression that makes the bytes it sends, so that its size is checked against them.

    The bytes and the length of the vector are all that the other side knows.
    """

    sends_values = False

    @abstractmethod
    def encode(self, x: torch.Tensor, key: Key, unbiased: bool) -> bytes:
        """Return the bytes of a vector, as many as `size` says.

        Args:
            x: the vector [d], float32 in main memory.
            key: random key of the draws.
            unbiased: whether the expectation of what is decoded must be x; False with error feedback.
        """

    @abstractmethod
    def decode(self, data: bytes, d: int) -> torch.Tensor:
        """Return the vector [d], float32, that the bytes hold."""

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return what `decode` makes of the bytes of `encode`.

        Raises:
            MethodError: they are more or fewer bytes than `size` says.
        """
        data = self.encode(x, key, unbiased)
        told = self.size(len(x), x.element_size())
        if len(data) != told:
            what = f"{told} bytes for {len(x)} numbers, and encode returns {len(data)}"
            raise MethodError(f"{type(self).__name__}.size", what, "return the length of these bytes")
        return self.decode(data, len(x))


def coded(how: Compression, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
    """Return the vector [d] that the other side decodes, checked.

    Args:
        how: the compression.
        x: the vector [d].
        key: random key of the draws.
        unbiased: whether the expectation over draws must be x.

    Raises:
        MethodError: it is no finite float32 vector [d].
    """
    out: Any = how.code(x, key, unbiased)
    given = f"{out.dtype} {[*out.shape]}" if isinstance(out, torch.Tensor) else type(out).__name__
    fits = isinstance(out, torch.Tensor) and out.dtype == x.dtype and out.shape == x.shape
    if fits and bool(out.isfinite().all()):
        decoded: torch.Tensor = out
        return decoded
    what = "numbers that are not finite" if fits else f"{given} for a float32 vector {[*x.shape]}"
    raise MethodError(f"{type(how).__name__}.code", what, "return the finite vector that is decoded")


@dataclass(frozen=True)
class Uncompressed(Compression):
    """No compression."""

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of all numbers in bytes."""
        return d * number_bytes

    def code(self, x: torch.Tensor, key: Key, unbiased: bool) -> torch.Tensor:
        """Return x."""
        return x


@dataclass(frozen=True)
class TopK(Compression):
    """Send the numbers of largest absolute value and their indices. Aji and Heafield, EMNLP 2017.

    Attributes:
        share: fraction of the numbers to send; at least one number is sent.
    """

    paper = "aji2017sparse"

    share: PositiveShare = 0.1

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

    paper = "konecny2016federated"

    share: PositiveShare = 0.1

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

    paper = "alistarh2017qsgd"

    sends_values = False
    bits: Annotated[int, Interval(ge=2, le=16)] = 8
    bucket: PositiveInt = 512

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
    bucket: PositiveInt = 512

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


COMPRESSIONS: Registry[type[Compression]] = Registry(
    "compressions",
    Compression,
    {"none": Uncompressed, "top_k": TopK, "random_k": RandomK, "qsgd": QSGD, "int8": Int8},
)


@dataclass(frozen=True)
class Payload(NumberFormat):
    """The form of a federation's messages. Numbers are rounded to it, so results depend on it.

    Attributes:
        dtype: number format of vectors, in both directions: `float32`, `float16` or `bfloat16`.
        header_bytes: bytes of the header of each message. Each row, vector and note is a message. As a guide,
            TCP and IPv4 take 40 bytes of each packet of 1500, HTTP/2 with gRPC 14 bytes of each message.
        compression: compression of the vectors that clients upload after training.
        downloads: compression of the rows that clients download, for statistics, to train or to be evaluated:
            of the whole row, not of its change, so that `top_k` and `random_k` lose most of a model. Running
            means and variances, and seeds, are sent as they are.
        error_feedback: whether the client keeps the residual of compression and adds it to its next upload.
            Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
    """

    compression: Compression = field(default_factory=Uncompressed)
    downloads: Compression = field(default_factory=Uncompressed)
    error_feedback: bool = False

    def papers(self) -> tuple[str, ...]:
        """Return the paper on error feedback if there is any."""
        return ("karimireddy2019error",) if self.error_feedback else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        loses = self.compresses or not self.error_feedback
        require(loses, "error_feedback", True, "nothing is left out without compression; name one")

    @property
    def compresses(self) -> bool:
        """Whether uploads are compressed."""
        return not isinstance(self.compression, Uncompressed)

    @property
    def compresses_downloads(self) -> bool:
        """Whether downloads are compressed."""
        return not isinstance(self.downloads, Uncompressed)

    def sent(self, parts: VectorParts) -> NumberFormat:
        """Return the form of messages, with the sizes of compressed downloads.

        Args:
            parts: what the vectors hold.
        """
        if not self.compresses_downloads:
            return self
        return CompressedRows(self.dtype, self.header_bytes, self.downloads, parts)


@dataclass(frozen=True)
class CompressedRows(NumberFormat):
    """The form of messages whose downloads are compressed.

    Attributes:
        downloads: compression of downloaded rows.
        parts: what the vectors hold.
    """

    downloads: Compression = field(default_factory=Uncompressed)
    parts: VectorParts | None = None

    def row_bytes(self, name: str, width: int, rows: int, whole: bool) -> int:
        """Return the size in bytes of rows that a client downloads, compressed but for their statistics."""
        assert self.parts is not None
        kept = length(self.parts.statistics(name, width))
        if whole or kept == width:
            return super().row_bytes(name, width, rows, whole)
        each = self.downloads.size(width - kept, self.number_bytes) + kept * self.number_bytes
        return rows * (self.header_bytes + each)


class Coder(UpdateFilter):
    """Encodes messages: rounds them to the payload's type, and compresses uploads and downloads.

    Statistics (`Algorithm.statistics`, and a model's running means and variances) are not compressed: with
    missing or enlarged terms they could become negative.

    Args:
        payload: the form of messages.
        parts: what the vectors hold.
        where: key of the draws for downloads.
    """

    at_clients = True

    def __init__(self, payload: Payload, parts: VectorParts, where: Key) -> None:
        self.payload, self.parts, self.where = payload, parts, where
        self.remembers = RESIDUALS if payload.error_feedback else ""
        self.in_main_memory = payload.compresses

    def download(self, message: Message, client: int) -> Message:
        """Return a message with rounded or compressed rows."""
        arrived = dict(message.vectors)
        for name, x in message.vectors.items():
            if travels_whole(name):
                continue
            weights = self.parts.weights(name, x.shape[-1])
            arrived[name] = self._rounded(name, x)
            if self.payload.compresses_downloads and weights:
                which = message.rows[name]
                mixed = isinstance(which, np.ndarray)  # one row, for this client alone
                places = [("mixed", client)] if mixed else [("row", int(row)) for row in which]
                keys = [self.where.of(name, *place, message.version) for place in places]
                arrived[name] = self._decoded(name, x, arrived[name], keys)
        return replace(message, vectors=arrived)

    def _decoded(
        self, name: str, x: torch.Tensor, rounded: torch.Tensor, keys: Sequence[Key]
    ) -> torch.Tensor:
        """Return rows [r, width] as they are decoded; their statistics as in `rounded`."""
        how, weights = self.payload.downloads, self.parts.weights(name, x.shape[-1])
        rows = x.reshape(-1, x.shape[-1]).cpu()
        parts = [coded(how, take(row, weights), one, True) for row, one in zip(rows, keys, strict=True)]
        sent = torch.stack(parts) if parts else take(rows, weights)
        sent = self._rounded(name, sent) if how.sends_values else sent
        return put(rounded.reshape(rows.shape).cpu(), weights, sent).reshape(x.shape).to(x.device)

    def statistics(self, report: Report) -> Report:
        """Return a report with rounded vectors."""
        unsent = report.unsent
        return replace(
            report, vectors={n: x if n in unsent else self._rounded(n, x) for n, x in report.vectors.items()}
        )

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return a report with compressed or rounded vectors."""
        payload, arrived, store = self.payload, dict(report.vectors), visit.store
        errors: dict[str, torch.Tensor] = {}
        if self.remembers and store is not None:
            errors = {**store.load(self.remembers, report.client, visit.visit)}
        for name, x in report.vectors.items():
            if name in report.unsent:
                continue
            weights = self.parts.weights(name, x.shape[-1])
            if not payload.compresses or not weights:
                arrived[name] = self._rounded(name, x)
                continue
            rows, where = rows_under(name, report, visit.message), visit.key.of("compress", name)
            arrived[name], errors[name] = self._compressed(name, x, rows, errors.get(name), where)
        if self.remembers and store is not None:
            store.save(self.remembers, report.client, visit.visit + 1, errors)
        return replace(report, vectors=arrived)

    def sizes(self, sizes: Mapping[str, int], report: Report, message: Message) -> Mapping[str, int]:
        """Return the bytes of the vectors of a report, compressed."""
        payload, out = self.payload, dict(sizes)
        for name in sizes if payload.compresses else ():
            x = report.vectors[name]
            count, d = x.numel() // max(x.shape[-1], 1), x.shape[-1]
            whole = length(self.parts.statistics(name, d))
            if whole == d:
                continue
            chosen = chooses(x.reshape(-1, d), rows_under(name, report, message))
            each = payload.compression.size(d - whole, payload.number_bytes) + (INDEX_BYTES if chosen else 0)
            each += whole * payload.number_bytes
            out[name] = payload.header_bytes + count * each
        return out

    def _rounded(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a vector rounded to the payload's type; an error names the tensor that overflows."""
        return self.payload.rounded(x, lambda place: self.parts.tensor_at(name, x.shape[-1], place) or name)

    def _compressed(
        self, name: str, x: torch.Tensor, rows: torch.Tensor | None, error: torch.Tensor | None, key: Key
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an upload [d] or [C, d] as it arrives, and the residual [C, d], 0 for statistics."""
        how, upload = self.payload.compression, x.reshape(-1, x.shape[-1]).cpu()  # [C, d]
        base, d = base_of(upload, rows), x.shape[-1]
        wanted = upload - base
        if error is not None and error.shape == wanted.shape:
            wanted = wanted + error
        unbiased, weights = not self.payload.error_feedback, self.parts.weights(name, d)
        parts = [coded(how, take(row, weights), key.of(c), unbiased) for c, row in enumerate(wanted)]
        decoded = torch.stack(parts)
        sent = self._rounded(name, decoded) if how.sends_values else decoded
        if length(weights) == d:
            return (base + sent).reshape(x.shape).to(x.device), wanted - sent
        arrived = put(self._rounded(name, upload), weights, take(base, weights) + sent)
        left = put_(torch.zeros_like(wanted), weights, take(wanted, weights) - sent)
        return arrived.reshape(x.shape).to(x.device), left
