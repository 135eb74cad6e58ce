"""Server steps in which a robust rule replaces means, in rounds and in asynchronous runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.transport import Single
from mpifl.core.mixing import Plan
from mpifl.core.parameters import Part, VectorParts
from mpifl.core.types import Server
from mpifl.runtime.aggregators import Aggregator, LocalAggregator, MpiAggregator, Uploads
from mpifl.runtime.protocol import GatheredReports

from .robust_mixer import RobustMixer
from .robust_rules import Rule


class RobustAggregator:
    """Replaces the means of a step by a robust rule; another aggregator computes products and distances.

    Args:
        inner: compares the uploads.
        mixer: mixes the uploads.
        local: whether all uploads are on rank 0 and only rank 0 calls.
    """

    def __init__(self, inner: Aggregator, mixer: RobustMixer, local: bool) -> None:
        self.inner, self.mixer, self.local = inner, mixer, local

    @property
    def figures(self) -> Mapping[str, float]:
        """Metrics of the last step: the number of rows whose groups were too small for the rule."""
        return {"robust_too_small": float(self.mixer.num_too_small)}

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m]."""
        return self.inner.gram(reports, uploads, name, part)

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray | None:
        """Return the distances [m, K] of an upload to the rows of the table with its name."""
        return self.inner.row_distances(server, reports, uploads, name)

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes, on rank 0."""
        info = reports.upload_info if reports is not None else None
        tables = server.tables if self.local and server is not None else None
        return self.mixer.mix(plan.mixings if plan is not None else None, info, uploads, tables)


@dataclass(frozen=True)
class RobustSteps:
    """Makes aggregators that replace means by a robust rule.

    Attributes:
        rule: the robust rule.
        statistics: names of uploads that do not represent parameters.
        parts: which numbers of a vector are running statistics; None for none.
    """

    rule: Rule
    statistics: tuple[str, ...] = ()
    parts: VectorParts | None = None

    def over_ranks(self, inner: MpiAggregator) -> RobustAggregator:
        """Return the robust form of an aggregator over MPI."""
        mixer = RobustMixer(inner.transport, inner.mixer, self.rule, self.statistics, self.parts)
        return RobustAggregator(inner, mixer, local=False)

    def on_one_rank(self, inner: LocalAggregator) -> RobustAggregator:
        """Return the robust form of an aggregator on rank 0."""
        alone = Single()
        exact = Mixer(alone, Tables(alone), inner.exact)
        mixer = RobustMixer(alone, exact, self.rule, self.statistics, self.parts)
        return RobustAggregator(inner, mixer, local=True)
