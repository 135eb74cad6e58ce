"""The sizes of messages, and the rows from which the difference of an upload is taken.

The row is the downloaded one of the same name. If several were downloaded, but not one for each row of the
upload, it is the nearest. An upload of any other name is a difference already.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mpifl.aggregation.update_filter import UpdateFilters
from mpifl.core.types import Message, Reads, Report

from .ledger import StatisticsSize, count_numbers, row_bytes
from .payload import NumberFormat


def download_bytes(reads: Reads, widths: Mapping[str, int], payload: NumberFormat) -> int:
    """Return the size in bytes of the rows that a client downloads; a mixture of rows is one vector.

    Args:
        reads: the rows, by table.
        widths: length of a row of each table.
        payload: the form in which they are sent.
    """
    rows = {name: 1 if isinstance(which, np.ndarray) else len(which) for name, which in reads.items()}
    return sum(row_bytes(payload, name, widths[name], n) for name, n in rows.items())


def time_stamp_bytes(payload: NumberFormat, time_stamps: bool) -> int:
    """Return the size in bytes of the time stamp of each download and upload; 0 if `time_stamps` is False."""
    return payload.size(1, note=True) if time_stamps else 0


def upload_bytes(payload: NumberFormat, filters: UpdateFilters, report: Report, message: Message) -> int:
    """Return the size in bytes of a report: its encoded vectors and its notes.

    Args:
        payload: the form in which they are sent.
        filters: what happens to the report on its way.
        report: the client's report.
        message: the client's download.
    """
    notes = {name: count_numbers(v) for name, v in report.notes.items() if name not in report.unsent}
    vectors = sum(filters.sizes(payload.vector_bytes(report), report, message).values())
    return vectors + sum(payload.size(numbers, note=True) for numbers in notes.values())


def hidden_bytes(
    payload: NumberFormat, filters: UpdateFilters, report: Report, message: Message, clients: int
) -> tuple[int, int]:
    """Return the bytes (down, up) that a client moves in a round only because filters hide its vectors.

    Args:
        payload: the form in which they are sent.
        filters: what happens to the report on its way.
        report: the client's report.
        message: the client's download.
        clients: number of clients in the round.
    """
    clear = filters.sizes(payload.vector_bytes(report), report, message)
    down, sent = filters.traffic(clear, report, clients, payload.header_bytes)
    return down, sum(sent.values()) - sum(clear.values())


def statistics_size(
    payload: NumberFormat, shown: Mapping[str, torch.Tensor], report: Report
) -> StatisticsSize:
    """Return what a client moves for one-shot statistics.

    Args:
        payload: the form in which they are sent.
        shown: name -> rows [r, width] that all clients download.
        report: the client's report.
    """
    down = sum(row_bytes(payload, name, x.shape[-1], len(x)) for name, x in shown.items())
    vectors = {n: (report.vectors[n].numel(), size) for n, size in payload.vector_bytes(report).items()}
    counts = {name: count_numbers(v) for name, v in report.notes.items() if name not in report.unsent}
    notes = {name: (count, payload.size(count, note=True)) for name, count in counts.items()}
    return StatisticsSize(down, vectors, notes)


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


def chooses(upload: torch.Tensor, rows: torch.Tensor | None) -> bool:
    """Return whether an upload [C, d] must name the row from which its difference is taken."""
    return rows is not None and _fits(upload, rows) and len(rows) not in (1, len(upload))


def base_of(upload: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the rows [C, d] that are subtracted from an upload [C, d] before it is encoded."""
    if rows is None or not _fits(upload, rows):
        return torch.zeros_like(upload)
    if not chooses(upload, rows):
        return rows.cpu().expand_as(upload)
    nearest = [int((rows.cpu() - u).double().norm(dim=1).argmin()) for u in upload]
    return rows.cpu()[nearest]
