"""The encoding of messages (rounding to the payload's type, compression of uploads), and their sizes.

Encoding runs on the client's rank. Random draws depend on client and visit, not on the ranks. An upload is
encoded as its difference from the downloaded row of the same name. If several rows were downloaded, but not
one for each row of the upload, the difference is that from the nearest row, whose index is sent as well. An
upload of any other name is encoded without a difference. Statistics (`Algorithm.statistics`, and a model's
running means and variances) are not compressed: with missing or enlarged terms they could become negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.core.parameters import VectorParts, put, put_, take, width
from mpifl.core.rng import Key
from mpifl.core.types import Message, Reads, Report

from .compression import INDEX_BYTES
from .ledger import count_numbers, travels_whole
from .payload import Payload


def sizes(payload: Payload, report: Report, message: Message | None, parts: VectorParts) -> dict[str, int]:
    """Return the size in bytes of each vector that a report sends.

    Args:
        payload: the form in which numbers are sent.
        report: the client's report.
        message: the client's download, as in `Coder.up`.
        parts: which numbers of a vector are statistics, which are not compressed.
    """
    sent = {name: x for name, x in report.vectors.items() if name not in report.unsent}
    if message is None or not payload.compresses:
        return {name: payload.size(x.numel()) for name, x in sent.items()}
    out = {}
    for name, x in sent.items():
        count, d = x.numel() // max(x.shape[-1], 1), x.shape[-1]
        whole = width(parts.statistics(name, d))
        if whole == d:
            out[name] = payload.size(x.numel())
            continue
        chosen = _chooses(x.reshape(-1, d), rows_under(name, report, message))
        each = payload.compression.size(d - whole, payload.number_bytes) + (INDEX_BYTES if chosen else 0)
        each += whole * payload.number_bytes
        out[name] = payload.header_bytes + count * each
    return out


def download_bytes(reads: Reads, widths: Mapping[str, int], payload: Payload) -> int:
    """Return the size in bytes of the rows that a client downloads; a mixture of rows is one vector.

    Args:
        reads: the rows, by table.
        widths: length of a row of each table.
        payload: the form in which they are sent.
    """
    rows = {name: 1 if isinstance(which, np.ndarray) else len(which) for name, which in reads.items()}
    return sum(payload.size(widths[name] * n, n, travels_whole(name)) for name, n in rows.items())


def time_stamp_bytes(payload: Payload, time_stamps: bool) -> int:
    """Return the size in bytes of the time stamp of each download and upload; 0 if `time_stamps` is False."""
    return payload.size(1, note=True) if time_stamps else 0


def upload_bytes(payload: Payload, report: Report, message: Message | None, parts: VectorParts) -> int:
    """Return the size in bytes of a report: its encoded vectors and its notes.

    Args:
        payload: the form in which they are sent.
        report: the client's report.
        message: the client's download, as in `Coder.up`.
        parts: which numbers of a vector are statistics, which are not compressed.
    """
    notes = {name: count_numbers(v) for name, v in report.notes.items() if name not in report.unsent}
    vectors = sum(sizes(payload, report, message, parts).values())
    return vectors + sum(payload.size(numbers, note=True) for numbers in notes.values())


@dataclass(frozen=True)
class StatisticsSize:
    """What a client moves for one-shot statistics.

    Attributes:
        down: bytes that it downloads for them.
        vectors: vector that it uploads -> how many numbers it has, and its bytes.
        notes: note that it uploads -> how many numbers it has, and its bytes.
    """

    down: int
    vectors: Mapping[str, tuple[int, int]]
    notes: Mapping[str, tuple[int, int]]

    @property
    def up(self) -> int:
        """Bytes that it uploads."""
        return sum(size for sent in (self.vectors, self.notes) for _, size in sent.values())


def statistics_size(payload: Payload, shown: Mapping[str, torch.Tensor], report: Report) -> StatisticsSize:
    """Return what a client moves for one-shot statistics.

    Args:
        payload: the form in which they are sent.
        shown: name -> rows [r, width] that all clients download.
        report: the client's report.
    """
    down = sum(payload.size(count_numbers(x), len(x), travels_whole(name)) for name, x in shown.items())
    sent = {name: x.numel() for name, x in report.vectors.items() if name not in report.unsent}
    vectors = {name: (numbers, payload.size(numbers)) for name, numbers in sent.items()}
    counts = {name: count_numbers(v) for name, v in report.notes.items() if name not in report.unsent}
    notes = {name: (count, payload.size(count, note=True)) for name, count in counts.items()}
    return StatisticsSize(down, vectors, notes)


class Coder:
    """Encodes the messages of the clients of this rank.

    Args:
        payload: the form in which numbers are sent.
        store: keeps the residuals of error feedback.
        parts: what the vectors hold; statistics are not compressed.
    """

    def __init__(self, payload: Payload, store: ClientStore, parts: VectorParts) -> None:
        self.payload, self.store, self.parts = payload, store, parts

    def down(self, message: Message) -> Message:
        """Return a message as it arrives at the client."""
        if self.payload.dtype == "float32":
            return message
        vectors = message.vectors.items()
        arrived = {name: x if travels_whole(name) else self._rounded(name, x) for name, x in vectors}
        return replace(message, vectors=arrived)

    def up(
        self, report: Report, message: Message | None, visit: int, key: Key
    ) -> tuple[Report, Mapping[str, int]]:
        """Return a report as it arrives at the server, and the sizes of its vectors in bytes.

        Args:
            report: the client's report.
            message: the client's download; None if this is not a training: nothing is compressed then.
            visit: number of the client's visits before this one.
            key: random key of the draws.
        """
        payload, arrived = self.payload, dict(report.vectors)
        if payload.dtype == "float32" and (message is None or not payload.compresses):
            return report, sizes(payload, report, message, self.parts)
        feeds_back = payload.error_feedback and message is not None
        errors = self.store.load("error", report.client, visit) if feeds_back else {}
        for name, x in report.vectors.items():
            if name in report.unsent:
                continue
            weights = self.parts.weights(name, x.shape[-1])
            if message is None or not payload.compresses or not weights:
                arrived[name] = self._rounded(name, x)
                continue
            rows, where = rows_under(name, report, message), key.of("compress", name)
            arrived[name], errors[name] = self._compressed(name, x, rows, errors.get(name), where)
        if feeds_back:
            self.store.save("error", report.client, visit + 1, errors)
        return replace(report, vectors=arrived), sizes(payload, report, message, self.parts)

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
        parts = [how.code(take(row, weights), key.of(c), unbiased) for c, row in enumerate(wanted)]
        decoded = torch.stack(parts)
        sent = self._rounded(name, decoded) if how.sends_values else decoded
        if width(weights) == d:
            return (base + sent).reshape(x.shape).to(x.device), wanted - sent
        arrived = put(self._rounded(name, upload), weights, take(base, weights) + sent)
        left = put_(torch.zeros_like(wanted), weights, take(wanted, weights) - sent)
        return arrived.reshape(x.shape).to(x.device), left


def rows_under(name: str, report: Report, message: Message) -> torch.Tensor | None:
    """Return the rows from which the difference of an upload is taken; None for no difference.

    Args:
        name: name of the upload.
        report: the client's report; `based_on` may give the rows.
        message: the client's download; otherwise gives the rows of the table `name`.
    """
    if name not in report.based_on:
        return message.vectors.get(name)
    base = report.based_on[name]
    return None if base is None else base.reshape(-1, base.shape[-1])


def _fits(upload: torch.Tensor, rows: torch.Tensor | None) -> bool:
    return rows is not None and len(rows) > 0 and rows.shape[-1] == upload.shape[1]


def _chooses(upload: torch.Tensor, rows: torch.Tensor | None) -> bool:
    """Return whether an upload [C, d] must name the row from which its difference is taken."""
    return rows is not None and _fits(upload, rows) and len(rows) not in (1, len(upload))


def base_of(upload: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the rows [C, d] that are subtracted from an upload [C, d] before it is encoded."""
    if rows is None or not _fits(upload, rows):
        return torch.zeros_like(upload)
    if not _chooses(upload, rows):
        return rows.cpu().expand_as(upload)
    nearest = [int((rows.cpu() - u).double().norm(dim=1).argmin()) for u in upload]
    return rows.cpu()[nearest]
