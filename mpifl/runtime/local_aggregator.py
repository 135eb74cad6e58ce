"""What rank 0 does with uploads that are all at hand: compare them, mix them into its rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mpifl.aggregation.mixer import Mixer, mix_exact, mix_float32
from mpifl.aggregation.tables import Tables, read_rows, row_distances
from mpifl.comm import Single
from mpifl.core.algorithm import apply_plan
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.types import Notes, Server
from mpifl.simulation.policies import Policy

from .hooks import deciding
from .server_step import ServerStep

Uploads = Mapping[str, list[torch.Tensor]]


class LocalAggregator:
    """Takes uploads in, for the asynchronous engine."""

    def __init__(self, server_step: ServerStep, policy: Policy) -> None:
        self.server_step, self.policy = server_step, policy
        self.mixer = Mixer(Single(), Tables(Single()))  # for the products of uploads that are all here

    def compared(self, server: Server, notes: Notes, uploads: Uploads) -> Notes:
        """Return the notes with what the method wants compared."""
        algorithm = self.server_step.algorithm
        name = algorithm.needs.gram
        with deciding(algorithm, "compares"):
            wanted = bool(name) and algorithm.compares(server)
        if name and wanted:
            x = uploads[name]
            gram = self.mixer.gram(x, (len(x),), np.zeros(len(x), int), len(x[0]))
            assert gram is not None
            notes = notes.having(gram=gram)
        if self.server_step.compared(server, name := algorithm.needs.row_distance) and name:
            rows, p = server.tables[name], self.server_step.problem.layout.num_parameters
            notes = notes.having(row_distance=np.stack([row_distances(u, rows, p) for u in uploads[name]]))
        return notes

    def mixed(self, server: Server, plan: Plan, uploads: Uploads) -> Server:
        """Return the server after a plan."""
        tables = dict(server.tables)
        with self.server_step.watch("reduce"):
            for m in plan.mixings:
                tables[m.into] = self._mix(m, tables[m.into], uploads.get(m.of, []))
        new = apply_plan(server, plan, tables)
        new = self.server_step.polished(server, new)
        with self.server_step.watch("evaluate"):
            new = self.server_step.appraised(server, new)
        self.server_step.tables.publish(new.tables)
        return new

    def _mix(self, mixing: Mixing, old: torch.Tensor, uploads: list[torch.Tensor]) -> torch.Tensor:
        if self.policy.singly:
            return mix_float32(mixing, old, uploads)
        max_abs = self.server_step.max_abs(mixing.of).reshape(-1) if mixing.of else np.zeros(0)
        return mix_exact(mixing, old, uploads, max_abs)


def largest_weight(plan: Plan, j: int, m: int) -> float:
    """Return the largest weight of report j in any row of the first mixing; 0 where it takes no uploads."""
    if not plan.mixings or not plan.mixings[0].of:
        return 0.0
    weights = plan.mixings[0].weights
    return float(np.abs(weights.reshape(len(weights), m, -1)[:, j]).max())


def rows_read(server: Server, name: str, which: tuple[int, ...] | np.ndarray) -> torch.Tensor:
    """Return what is downloaded of a table; a single row is no copy, since tables are never written to."""
    table = server.tables[name]
    if not isinstance(which, np.ndarray) and len(which) == 1:
        return table[which[0] : which[0] + 1]
    return read_rows(lambda _, rows: table[rows], name, which)
