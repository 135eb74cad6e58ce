"""The server's part of privacy: equal weights of clipped updates, noise on their sums, an adaptive clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp

import numpy as np
import torch

from mpifl.aggregation.update_filter import FilteredVisit, PlannedStep, UpdateFilter
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import RowUpdates, upload_named
from mpifl.core.errors import MethodError
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import Key
from mpifl.core.types import Notes, Reads, Report, Server

from .privacy import CLIPPED, CentralPrivacy, LocalPrivacy, protect, with_noise


def trained_rows(
    reads: Mapping[int, Reads], notes: Notes, table: str, trained: str | None
) -> tuple[int, ...]:
    """Return, for each upload of a step, the row of a table that it updates.

    Args:
        reads: client -> the rows it downloaded.
        notes: notes of the step.
        table: name of the table.
        trained: see `RowUpdates`.
    """
    rows = []
    for j, k in enumerate(notes.client.tolist()):
        read = reads[k][table]
        rows.append(int(read[0] if len(read) == 1 else read[int(notes[str(trained)][j])]))
    return tuple(rows)


class PrivateStep(UpdateFilter):
    """Clipping and noise of a run, at the client and at the server.

    Args:
        privacy: privacy configuration of the run.
        algorithm: the method; it declares `RowUpdates`.
        num_sampled: m, the expected number of clients of a round.
        key: address of the server's random draws.
    """

    at_clients = at_server = True
    state = "privacy"

    def __init__(
        self, privacy: CentralPrivacy | LocalPrivacy, algorithm: Algorithm, num_sampled: int, key: Key
    ) -> None:
        self.privacy, self.num_sampled, self.key = privacy, num_sampled, key
        self.clip = privacy.clip
        self.trained = upload_named(algorithm, RowUpdates, "trained")
        self.moves_rows = isinstance(privacy, CentralPrivacy)  # a failed client counts as an update of 0
        self._next_clip = self.clip
        self._scales: dict[str, np.ndarray] = {}  # table -> standard deviation of the noise of each row

    def told(self) -> Mapping[str, float]:
        """Return the largest norm of an update that a client may send in the next round."""
        return {} if self.clip is None else {"clip": self.clip}

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return a report with a clipped update, and noise under local privacy; see `privacy.protect`."""
        clip = visit.told.get("clip")
        return protect(report, visit.message, self.privacy, self.trained, clip, visit.key)

    def plan(self, plan: Plan | None, step: PlannedStep) -> Plan:
        """Return a plan that makes each row the old row + the sum of its clipped updates / D.

        D is the expected number of updates of the row, or their released noisy number. Under local privacy,
        the plan stays as it is. Without any upload, rows stay as they are but still receive noise.

        Raises:
            MethodError: an upload does not enter exactly the row that it updates.
        """
        server, nobody = step.server, np.zeros(0, np.int64)
        if plan is None:
            heights = {name: len(server.tables[name]) for name in step.reads(np.zeros(1, np.int64))[0]}
            empty = [Mixing(np.zeros((h, 0)), np.ones(h), name, name) for name, h in heights.items()]
            plan = self._summed(Plan(empty), server, {}, Notes.of_nobody(), nobody)
            return replace(plan, mixings=[replace(m, of="") for m in plan.mixings])
        return self._summed(plan, server, step.reads(step.notes.client), step.notes, step.lost)

    def _summed(
        self, plan: Plan, server: Server, reads: Mapping[int, Reads], notes: Notes, lost: np.ndarray
    ) -> Plan:
        privacy = self.privacy
        if not isinstance(privacy, CentralPrivacy):
            return plan
        step, m = server.version + 1, self.num_sampled
        self._follow(privacy, notes, step, lost)
        key = self.key.of(step)
        counts: dict[int, np.ndarray] = {}  # number of rows -> counts, released once for all such tables
        scale = privacy.noise_of_updates(m, counts=self.counts_rows(server)) * (self.clip or 0.0)
        mixings: list[Mixing] = []
        self._scales = {}
        for mixing in plan.mixings:
            rows = trained_rows(reads, notes, mixing.into, self.trained)
            members = entered(mixing, rows)
            number = len(members)
            share = np.full(number, m / number)
            if number > 1 and privacy.count_noise is not None:
                if number not in counts:
                    noise = privacy.count_noise * key.of("count").numpy().standard_normal(number)
                    counts[number] = np.maximum(members.sum(1) + noise, 1.0)
                share = counts[number]
            weights = members / share[:, None]
            keep = 1.0 - members.sum(1) / share
            mixings.append(replace(mixing, weights=weights, keep=keep if keep.any() else None))
            if scale:
                self._scales[mixing.into] = scale / share
        return replace(plan, mixings=mixings)

    def counts_rows(self, server: Server) -> bool:
        """Return whether the number of uploads of each row is released."""
        several = any(len(rows) > 1 for rows in server.tables.values())
        return several and isinstance(self.privacy, CentralPrivacy) and self.privacy.count_noise is not None

    def server(self, server: Server) -> Server:
        """Return the server after a step, with noise on all rows that could have been trained in it."""
        if not self._scales:
            return server
        tables, key = dict(server.tables), self.key.of(server.version)
        for name, scales in self._scales.items():
            rows = [
                with_noise(row, float(s), key.of("noise", name, k))
                for k, (row, s) in enumerate(zip(tables[name], scales, strict=True))
            ]
            tables[name] = torch.stack(rows)
        return replace(server, tables=tables)

    def _follow(self, privacy: CentralPrivacy, notes: Notes, step: int, lost: np.ndarray) -> None:
        """Set the clip of the next round: C exp(-lr (noisy share of updates within C - quantile)).

        A client that is absent or lost counts as half within C.
        """
        self._next_clip = self.clip
        if privacy.quantile is None or self.clip is None:
            return
        m, bits = self.num_sampled, notes[CLIPPED] - 0.5 if len(notes) else np.zeros(0)
        bits = bits[~np.isin(notes.client, lost)]
        noise = 0.0
        if privacy.noise_multiplier:
            draw = self.key.of(step, "quantile").numpy().standard_normal()
            noise = privacy.noise_of_quantile(m) * float(draw)
        within = (float(bits.sum()) + noise) / m + 0.5
        self._next_clip = self.clip * exp(-privacy.clip_lr * (within - privacy.quantile))

    def commit(self) -> None:
        """Start the next round, after the step was taken."""
        self.clip = self._next_clip

    def figures(self) -> Mapping[str, float]:
        """Return the clip of the next round."""
        return {} if self.clip is None else {"clip": self.clip}

    def state_dict(self) -> dict[str, float | None]:
        """Return the state that the next round depends on."""
        return {"clip": self.clip}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore what `state_dict` returned."""
        self.clip = self._next_clip = state["clip"]


def entered(mixing: Mixing, rows: tuple[int, ...]) -> np.ndarray:
    """Return which row each upload enters, [K, m] of ones and zeros.

    Args:
        mixing: mixing of the method.
        rows: row that each upload updates [m].

    Raises:
        MethodError: the mixing is not a mean of updates by row: an upload enters another row, a weight is not
            positive, the weights of a row do not add up to 1, or rows are mixed with each other.
    """
    members = np.arange(mixing.num_rows)[:, None] == np.array(rows, np.int64)[None, :]
    fits = mixing.weights.shape == members.shape and mixing.of == mixing.into and mixing.part is None
    fits = fits and bool(((mixing.weights > 0) == members).all())
    fits = fits and (mixing.keep is None or mixing.keep.ndim == 1)
    fits = fits and bool(np.allclose(mixing.row_sums(), 1.0))
    if not fits:
        what = f"a mixing into {mixing.into!r} is not a mean of the updates of each row"
        raise MethodError("privacy", what, "use a method whose clients' updates are averaged by row")
    return np.asarray(members, np.float64)
