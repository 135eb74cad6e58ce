"""What travels between rank 0 and the workers: tasks on the way out, report headers on the way back.

Vectors do not travel with these: uploads stay with the worker that made them until a mixing moves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpifl.core.errors import MethodError
from mpifl.core.types import Reads

Exchanges = Mapping[tuple[str, str, int], tuple[int, int]]


@dataclass(frozen=True)
class ClientTask:
    """One visit of one client, for one worker.

    Attributes:
        number: of its report in the step.
        client: who.
        visit: number of visits the client made before.
        reads: the rows it downloads.
        fresh: False to bring back the remembered upload instead of training.
    """

    number: int
    client: int
    visit: int
    reads: Reads
    fresh: bool = True


@dataclass(frozen=True)
class TaskBatch:
    """What one worker does in one step.

    Attributes:
        step: number of the server step, from 1; 0 before training.
        version: of the server whose rows are read.
        visits: the worker's tasks.
        missing: table -> the rows that are broadcast first, and their width.
        peers: (client, visit) of all clients that a probe looks at.
        compared: a table and its number of rows: uploads of its name are measured against all of them.
    """

    step: int
    version: int
    visits: tuple[ClientTask, ...]
    missing: Mapping[str, tuple[list[int], int]]
    peers: tuple[tuple[int, int], ...] = ()
    compared: tuple[str, int] | None = None


@dataclass(frozen=True)
class ReportHeader:
    """A report without its vectors.

    Attributes:
        number: of the report in its step.
        client: who reports.
        num_samples: the client's training samples.
        fresh: False for a remembered upload.
        notes: what the method noted, at the visit and in a probe.
        findings: what the server computes where the upload is; no traffic of its own.
        metrics: numbers for the observer.
        max_abs: upload -> largest absolute value of each of its components [C].
        sizes: upload -> numbers in it.
        widths: upload -> numbers in each component.
        bytes: upload -> its bytes as a federation would send it.
        exchanges: (kind, direction, client) -> (numbers, messages) exchanged with peers in a probe.
        unsent: names of uploads and notes that are no traffic.
    """

    number: int
    client: int
    num_samples: int
    fresh: bool
    notes: Mapping[str, Any]
    findings: Mapping[str, Any]
    metrics: Mapping[str, float]
    max_abs: Mapping[str, list[float]]
    sizes: Mapping[str, int]
    widths: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    exchanges: Exchanges = field(default_factory=dict)
    unsent: tuple[str, ...] = ()


def stacked_notes(headers: Sequence[ReportHeader], hook: str = "notes") -> dict[str, np.ndarray]:
    """Stack the notes and findings of all reports; a report without one gets NaN.

    Args:
        headers: of all reports of a step.
        hook: class and hook that noted them, for the error.

    Returns:
        Name of a note -> array [m, ...].

    Raises:
        MethodError: a note does not have the same shape for all clients.
    """
    tables = [{**header.notes, **header.findings} for header in headers]
    out = {}
    for name in dict.fromkeys(n for t in tables for n in t):
        example = np.asarray(next(t[name] for t in tables if name in t))
        blank = np.full(example.shape, np.nan)
        column = [np.asarray(t[name]) if name in t else blank for t in tables]
        other = next((j for j, value in enumerate(column) if value.shape != example.shape), None)
        if other is not None:
            shape, client = column[other].shape, headers[other].client
            what = f"note {name!r} of client {client} has shape {shape}, not {example.shape}"
            raise MethodError(hook, what, "a note has one shape for all clients: pad it with NaN")
        out[name] = np.stack(column)
    return out


def mean_metrics(headers: Sequence[ReportHeader]) -> dict[str, float]:
    """Return the means of the clients' metrics, weighted by samples; remembered uploads do not count.

    Args:
        headers: of all reports of a step.

    Returns:
        Name of a metric -> mean over the clients that report it.
    """
    fresh = [header for header in headers if header.fresh]
    out = {}
    for name in dict.fromkeys(name for header in fresh for name in header.metrics):
        having = [header for header in fresh if name in header.metrics]
        n = np.array([header.num_samples for header in having], float)
        out[name] = float(np.average([header.metrics[name] for header in having], weights=n))
    return out
