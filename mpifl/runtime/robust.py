"""Server steps whose means are taken by a robust rule, in rounds and in asynchronous runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.robust_mixer import RobustMixer
from mpifl.aggregation.robust_rules import Rule
from mpifl.aggregation.tables import Tables
from mpifl.comm.transport import Single
from mpifl.core.mixing import Plan
from mpifl.core.types import Server

from .aggregators import Aggregator, LocalAggregator, MpiAggregator, Uploads
from .protocol import GatheredReports


class RobustAggregator:
    """Takes the means of a step by a robust rule; products and distances are those of another aggregator.

    Args:
        inner: compares the uploads.
        mixer: mixes them.
        local: whether all uploads lie on rank 0, which is the only one to call.
    """

    def __init__(self, inner: Aggregator, mixer: RobustMixer, local: bool) -> None:
        self.inner, self.mixer, self.local = inner, mixer, local

    @property
    def figures(self) -> Mapping[str, float]:
        """What is written of the last step: rows whose groups were too small for the rule."""
        return {"robust_too_small": float(self.mixer.num_too_small)}

    def gram(self, reports: GatheredReports | None, uploads: Uploads, name: str) -> np.ndarray | None:
        """Return the pairwise products float64 [m, m] of an upload."""
        return self.inner.gram(reports, uploads, name)

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray | None:
        """Return the distances [m, K] of an upload to the rows of the table of its name."""
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
    """Makes aggregators that take means by a rule.

    Attributes:
        rule: takes the place of the mean.
        statistics: names of uploads that do not stand for parameters.
    """

    rule: Rule
    statistics: tuple[str, ...] = ()

    def over_ranks(self, inner: MpiAggregator) -> RobustAggregator:
        """Return the robust form of an aggregator over MPI."""
        mixer = RobustMixer(inner.transport, inner.mixer, self.rule, self.statistics)
        return RobustAggregator(inner, mixer, local=False)

    def on_one_rank(self, inner: LocalAggregator) -> RobustAggregator:
        """Return the robust form of an aggregator on rank 0."""
        alone = Single()
        mixer = RobustMixer(alone, Mixer(alone, Tables(alone), inner.exact), self.rule, self.statistics)
        return RobustAggregator(inner, mixer, local=True)
