"""How the uploads of a server step are compared and mixed: over MPI, on rank 0 alone, or not at all.

`ServerStep` decides; an aggregator carries out. The synchronous engine leaves uploads with the workers and
aggregates over MPI; the asynchronous engine has them on rank 0; a forecast has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from mpifl.aggregation.mixer import Mixer, mix_exact, mix_float32
from mpifl.aggregation.tables import Tables, row_distances
from mpifl.comm.transport import Single, Transport
from mpifl.core.mixing import Plan
from mpifl.core.parameters import Layout, Part, take, width
from mpifl.core.types import Server

from .protocol import GatheredReports

Uploads = Mapping[str, Sequence[torch.Tensor]]  # name -> vectors [w], all components of all uploads


class Aggregator(Protocol):
    """Compares the uploads of a step and mixes them into tables.

    Every rank that holds uploads calls each method, in the same order; ranks other than 0 pass None for what
    only rank 0 knows, and what is returned counts on rank 0.
    """

    def gram(self, reports: GatheredReports | None, uploads: Uploads, name: str) -> np.ndarray | None:
        """Return the pairwise products float64 [m, m] of an upload.

        Args:
            reports: whose uploads they are; None on rank 0 too where they are not wanted.
            uploads: of this rank.
            name: of the upload.
        """

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray | None:
        """Return the distances [m, K] of an upload to the rows of the table of its name; on rank 0.

        Returns:
            None where the workers measured them at the visits.
        """

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes.

        Args:
            server: before the step.
            plan: what is mixed.
            reports: whose uploads they are.
            uploads: of this rank.
        """


class MpiAggregator:
    """Uploads lie with the workers; sums and products are made by collectives.

    Args:
        transport: the ranks.
        mixer: carries out the mixings.
    """

    def __init__(self, transport: Transport, mixer: Mixer) -> None:
        self.transport, self.mixer = transport, mixer

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise products float64 [m, m] of an upload, or of a part of it; every rank calls.

        Components are joined to one vector. A part is that of uploads of one component.
        """
        wanted = None
        if reports is not None:
            counts = np.bincount(reports.owners, minlength=self.transport.size)
            components = reports.max_abs[name].shape[1]
            columns = components * reports.widths[name] if part is None else width(part)
            wanted = tuple(int(c) for c in counts), columns, components
        wanted = self.transport.bcast(wanted, "plan")
        if wanted is None:
            return None
        owners = reports.owners if reports is not None else None
        mine = _joined(uploads.get(name, []), wanted[2])
        mine = mine if part is None else [take(u, part) for u in mine]
        return self.mixer.gram(mine, wanted[0], owners, wanted[1])

    def row_distances(self, server: Server, reports: GatheredReports, uploads: Uploads, name: str) -> None:
        """Return nothing: the workers measure distances at the visits, where the uploads are."""

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the central tables that a plan changes, on rank 0.

        Rows of sharded tables stay with the ranks that own them.
        """
        info = reports.upload_info if reports is not None else None
        return self.mixer.mix(plan.mixings if plan is not None else None, info, uploads)


class LocalAggregator:
    """All uploads lie on rank 0, which is the only one to call.

    Args:
        layout: of the model; its buffers do not count in distances.
        exact: the sums that `MpiAggregator` makes; otherwise float32 sums.
    """

    def __init__(self, layout: Layout, exact: bool = True) -> None:
        self.layout, self.exact = layout, exact
        self._mixer = Mixer(Single(), Tables(Single()))

    def gram(self, reports: GatheredReports | None, uploads: Uploads, name: str) -> np.ndarray | None:
        """Return the pairwise products float64 [m, m] of an upload, its components joined to one vector."""
        if reports is None:
            return None
        x = _joined(uploads[name], reports.max_abs[name].shape[1])
        return self._mixer.gram(x, (len(x),), np.zeros(len(x), np.int64), len(x[0]))

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray:
        """Return the distances [m, K] of an upload to the rows of the table of its name."""
        rows = server.tables[name]
        return np.stack([row_distances(u, rows, self.layout) for u in uploads[name]])

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes."""
        assert server is not None
        assert plan is not None
        assert reports is not None
        changed: dict[str, torch.Tensor] = {}
        for m in plan.mixings:
            old, of = changed.get(m.into, server.tables[m.into]), uploads.get(m.of, [])
            if self.exact:
                max_abs = reports.upload_info(m.of)[0] if m.of else np.zeros(0)
                changed[m.into] = mix_exact(m, old, of, max_abs)
            else:
                changed[m.into] = mix_float32(m, old, of)
        return changed


class DryAggregator:
    """No uploads, for forecasts: the sizes of a real step without its numbers."""

    def gram(self, reports: GatheredReports | None, uploads: Uploads, name: str) -> np.ndarray | None:
        """Return products [m, m] of uploads that are orthogonal."""
        return None if reports is None else np.eye(len(reports.notes))

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray:
        """Return distances [m, K] of 1."""
        return np.ones((len(reports.notes), len(server.tables[name])))

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return tables with as many rows as a plan leaves: the server's, or copies of its first one.

        What a method computes from mixed rows finds numbers: norms of zeros would be divided by.
        """
        assert server is not None
        assert plan is not None
        out = {}
        for m in plan.mixings:
            old = server.tables[m.into]
            out[m.into] = old if len(old) == m.num_rows else old[:1].expand(m.num_rows, -1)
        return out


class FiguringAggregator(Aggregator, Protocol):
    """An aggregator that has something to say of its last mixing.

    Attributes:
        figures: name of a metric -> value.
    """

    @property
    def figures(self) -> Mapping[str, float]:
        """Return metrics of the last mixing."""


class RobustMeans(Protocol):
    """Makes aggregators that take means by a robust rule (`runtime/robust.py`)."""

    def over_ranks(self, inner: MpiAggregator) -> FiguringAggregator:
        """Return the robust form of an aggregator over MPI."""

    def on_one_rank(self, inner: LocalAggregator) -> FiguringAggregator:
        """Return the robust form of an aggregator on rank 0."""


def _joined(vectors: Sequence[torch.Tensor], components: int) -> Sequence[torch.Tensor]:
    """Return one vector for each report of those of its components."""
    if components == 1:
        return vectors
    return [torch.cat(list(vectors[i : i + components])) for i in range(0, len(vectors), components)]
