"""Aggregators compare and mix the uploads of a server step: over MPI, on rank 0 alone, or without uploads.

`ServerStep` decides what to do, and an aggregator carries it out. The synchronous engine leaves uploads with
the workers and aggregates over MPI; the asynchronous engine has them on rank 0; a forecast has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch

from mpifl.aggregation.mixer import Mixer, mix_exact, mix_float32
from mpifl.aggregation.tables import Tables, row_distances
from mpifl.aggregation.update_filter import RowMixer, UpdateFilters
from mpifl.comm.transport import Single, Transport
from mpifl.core.mixing import Plan
from mpifl.core.parameters import Layout, Part, take, width
from mpifl.core.types import Server

from .protocol import GatheredReports

Uploads: TypeAlias = "Mapping[str, Sequence[torch.Tensor]]"  # name -> vectors [w], all of all uploads


class Aggregator(Protocol):
    """Compares the uploads of a step and mixes them into tables.

    Every rank that holds uploads calls each method, in the same order. Ranks other than 0 pass None for
    arguments that only rank 0 knows; only the result on rank 0 is used.
    """

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m].

        Args:
            reports: reports of the uploads; None on rank 0 too if no products are wanted.
            uploads: uploads of this rank.
            name: name of the upload. Its components are joined to one vector.
            part: the part; None for all. Allowed only for uploads with a single component.
        """

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray | None:
        """Return the distances [m, K] of an upload to the rows of the table with its name; on rank 0.

        Returns:
            The distances; None if the workers already measured them during the visits.
        """

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes.

        Args:
            server: the server before the step.
            plan: the mixings to carry out.
            reports: reports of the uploads.
            uploads: uploads of this rank.
        """


class MpiAggregator:
    """Aggregates uploads that stay with the workers, by collectives.

    Args:
        transport: connects the ranks.
        mixer: compares uploads.
        rows: carries out the mixings; None for the mixer.
    """

    def __init__(self, transport: Transport, mixer: Mixer, rows: RowMixer | None = None) -> None:
        self.transport, self.mixer, self.rows = transport, mixer, rows or mixer

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m]; every rank calls.

        `part` is rank 0's.
        """
        wanted = None
        if reports is not None:
            counts = np.bincount(reports.owners, minlength=self.transport.size)
            components = reports.max_abs[name].shape[1]
            columns = components * reports.widths[name] if part is None else width(part)
            wanted = tuple(int(c) for c in counts), columns, components, part
        wanted = self.transport.bcast(wanted, "plan")
        if wanted is None:
            return None
        owners = reports.owners if reports is not None else None
        mine, part = _joined(uploads.get(name, []), wanted[2]), wanted[3]
        mine = mine if part is None else [take(u, part) for u in mine]
        return self.mixer.gram(mine, wanted[0], owners, wanted[1])

    def row_distances(self, server: Server, reports: GatheredReports, uploads: Uploads, name: str) -> None:
        """Return None: the workers measure distances during the visits, where the uploads are."""

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the central tables that a plan changes, on rank 0.

        New rows of sharded tables stay with the ranks that own them.
        """
        info = reports.upload_info if reports is not None else None
        return self.rows.mix(plan.mixings if plan is not None else None, info, uploads)


class LocalAggregator:
    """Aggregates uploads that are all on rank 0; only rank 0 calls its methods.

    Args:
        layout: layout of the model; its buffers do not count in distances.
        exact: whether to use the exact sums of `MpiAggregator`; otherwise float32 sums.
        filters: may replace the mixings.
    """

    def __init__(self, layout: Layout, exact: bool = True, filters: UpdateFilters | None = None) -> None:
        self.layout, self.exact = layout, exact
        self._mixer, self._tables = Mixer(Single(), Tables(Single())), Tables(Single())
        self._rows = filters.mixer(Mixer(Single(), self._tables, exact)) if filters else None

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m]."""
        if reports is None:
            return None
        x = _joined(uploads[name], reports.max_abs[name].shape[1])
        x = x if part is None else [take(u, part) for u in x]
        return self._mixer.gram(x, (len(x),), np.zeros(len(x), np.int64), len(x[0]))

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray:
        """Return the distances [m, K] of an upload to the rows of the table with its name."""
        rows = server.tables[name]
        return np.stack([row_distances(u, rows, self.layout) for u in uploads[name]])

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes."""
        assert server is not None
        assert plan is not None
        assert reports is not None
        if self._rows is not None:
            self._tables.publish(server.tables)
            return self._rows.mix(plan.mixings, reports.upload_info, uploads)
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
    """Aggregates nothing, for forecasts: results have the sizes of a real step, but made-up values."""

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the products [m, m] of orthonormal uploads: the identity matrix."""
        return None if reports is None else np.eye(len(reports.notes))

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray:
        """Return distances [m, K], all 1."""
        return np.ones((len(reports.notes), len(server.tables[name])))

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return tables with the numbers of rows that a plan makes: the old rows, or copies of the first one.

        Rows are not 0, because a method may divide by the norms of mixed rows.
        """
        assert server is not None
        assert plan is not None
        out = {}
        for m in plan.mixings:
            old = server.tables[m.into]
            out[m.into] = old if len(old) == m.num_rows else old[:1].expand(m.num_rows, -1)
        return out


def _joined(vectors: Sequence[torch.Tensor], components: int) -> Sequence[torch.Tensor]:
    """Return one vector for each report: its components, concatenated."""
    if components == 1:
        return vectors
    return [torch.cat(list(vectors[i : i + components])) for i in range(0, len(vectors), components)]
