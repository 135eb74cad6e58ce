"""What travels between rank 0 and the workers: tasks on the way out, report headers on the way back.

Vectors do not travel with these: uploads stay with the worker that made them until a mixing moves them.
`GatheredReports` is what rank 0 makes of all headers of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from mpifl.core.errors import MethodError
from mpifl.core.types import Notes, Reads

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
        looks_at: which of the batch's `peers` it looks at in a probe, bool [m]; None for all.
        clip: longest update that it sends, where privacy clips; None: that of the configuration.
        work: share of its mini-batches after which it stops; None takes them all.
    """

    number: int
    client: int
    visit: int
    reads: Reads
    fresh: bool = True
    looks_at: np.ndarray | None = None
    clip: float | None = None
    work: Fraction | None = None


@dataclass(frozen=True)
class TaskBatch:
    """What one worker does in one step.

    Attributes:
        step: number of the server step, from 1; 0 before training.
        version: of the server whose rows are read.
        visits: the worker's tasks.
        missing: table -> the rows that are broadcast first, and their width.
        peers: (client, visit) of all clients that probes look at.
        compared: a table and its number of rows: uploads of its name are measured against all of them.
    """

    step: int
    version: int
    visits: tuple[ClientTask, ...]
    missing: Mapping[str, tuple[list[int], int]]
    peers: tuple[tuple[int, int], ...] = ()
    compared: tuple[str, int] | None = None

    def shortened(self, work: Mapping[int, Fraction]) -> TaskBatch:
        """Return the same tasks; those of the clients in `work` end after a share of their mini-batches."""
        visits = tuple(replace(t, work=work[t.client]) if t.client in work else t for t in self.visits)
        return replace(self, visits=visits)


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


@dataclass(frozen=True)
class GatheredReports:
    """All reports of one step on rank 0, in the order of their numbers.

    Attributes:
        headers: of the m reports.
        owners: rank that holds the uploads of each, int64 [m].
        notes: what the method decides from.
        max_abs: upload -> largest absolute value of each component [m, C].
    """

    headers: Sequence[ReportHeader]
    owners: np.ndarray
    notes: Notes
    max_abs: Mapping[str, np.ndarray]

    @property
    def widths(self) -> Mapping[str, int]:
        """Upload -> numbers in each component."""
        return self.headers[0].widths

    def having(self, **columns: np.ndarray) -> GatheredReports:
        """Return these reports with more columns among their notes."""
        return replace(self, notes=self.notes.having(**columns))

    def upload_info(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return largest absolute value and rank of all components [m * C] of an upload."""
        max_abs = self.max_abs[name]
        return max_abs.reshape(-1), np.repeat(self.owners, max_abs.shape[1])


def gathered_reports(
    headers: Sequence[ReportHeader], owners: np.ndarray, staleness: np.ndarray, hook: str
) -> GatheredReports:
    """Return all reports of a step as one value.

    Args:
        headers: of the m reports, in the order of their numbers.
        owners: rank that holds the uploads of each [m].
        staleness: server steps since each read the server [m].
        hook: class and hook that made the reports, for the errors.

    Raises:
        MethodError: clients upload or note other names or shapes.
    """
    first = headers[0]
    for header in headers:
        if header.widths != first.widths or any(
            len(header.max_abs[name]) != len(max_abs) for name, max_abs in first.max_abs.items()
        ):
            (a, b), (k, other) = map(_uploads, (first, header)), (first.client, header.client)
            what = f"client {k} uploads {a}, client {other} {b}"
            raise MethodError(hook, what, "all uploads of a step have the same names and shapes")
    notes = Notes(
        client=np.array([header.client for header in headers]),
        num_samples=np.array([header.num_samples for header in headers]),
        staleness=staleness,
        fresh=np.array([header.fresh for header in headers]),
        columns=_stacked_notes(headers, hook),
    )
    max_abs = {name: np.array([header.max_abs[name] for header in headers]) for name in first.max_abs}
    return GatheredReports(headers, owners, notes, max_abs)


def _uploads(header: ReportHeader) -> str:
    """Return the names and shapes of a report's uploads, in words."""
    shapes = [f"{name!r} [{len(header.max_abs[name])}, {width}]" for name, width in header.widths.items()]
    return ", ".join(shapes) or "nothing"


def _stacked_notes(headers: Sequence[ReportHeader], hook: str = "notes") -> dict[str, np.ndarray]:
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
