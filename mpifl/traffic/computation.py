"""The ledger of computation: what clients and the server compute, by step, client and purpose.

It stands beside the ledger of bytes and follows its rules: counts are exact integers, they become permanent
with the step that made them, and a step that is repeated counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpifl.core.computation import COLUMNS, FIGURES, NOTHING, PURPOSES, Purpose, Work
from mpifl.core.errors import require

from .ledger import Undoable

FIRST = COLUMNS.index(FIGURES[0])


class ComputationLedger(Undoable):
    """Counts computation by step and purpose, and by client and purpose.

    Args:
        num_clients: N, number of clients.

    Attributes:
        entries: (step, purpose) -> the work of all clients, or of the server.
    """

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self.entries: dict[tuple[int, Purpose], Work] = {}
        self._which: np.ndarray | None = None  # clients whose own counts are kept, ascending; None: all
        self._num_kept = num_clients
        self._of: dict[Purpose, np.ndarray] = {}  # purpose -> figures of each kept client [k, 5]
        self.joules: np.ndarray | None = None  # of each client [N]

    def remember(self, clients: np.ndarray) -> None:
        """Keep the counts of these clients only; totals still count all clients."""
        self._which, self._num_kept = np.sort(clients), len(clients)

    def count_energy(self, num_clients: int) -> None:
        """Count energy from now on; without this there is no column of it."""
        self.joules = np.zeros(num_clients)

    def add_energy(self, client: int, joules: float) -> None:
        """Add the energy of a client's computing."""
        assert self.joules is not None
        of, before = self.joules, float(self.joules[client])
        of[client] += joules
        self._undo.append(lambda: of.__setitem__(client, before))

    def add(self, step: int, table: np.ndarray) -> None:
        """Count what a rank has computed.

        Args:
            step: server step that it was computed for; 0 before training.
            table: `Computation.table` of the rank, int64 [rows, 7].
        """
        for number in np.unique(table[:, 1]).tolist():
            purpose, rows = PURPOSES[number], table[table[:, 1] == number]
            total = Work(*map(_sum, rows[:, FIRST:].T))
            self._add(step, purpose, total, rows[:, 0], rows[:, FIRST:])
            undone = total.times(-1), rows[:, 0], -rows[:, FIRST:]
            self._undo.append(lambda at=(step, purpose), undone=undone: self._add(*at, *undone))  # type: ignore[misc]

    def _add(self, step: int, purpose: Purpose, total: Work, who: np.ndarray, figures: np.ndarray) -> None:
        self.entries[step, purpose] = self.entries.get((step, purpose), NOTHING).plus(total)
        if self.entries[step, purpose] == NOTHING:
            del self.entries[step, purpose]
        if purpose == "server":
            return
        if self._which is not None:
            kept = np.isin(who, self._which)
            who, figures = np.searchsorted(self._which, who[kept]), figures[kept]
        if len(who):
            of = self._of.setdefault(purpose, np.zeros((self._num_kept, len(FIGURES)), np.int64))
            np.add.at(of, who, figures)

    def total(self, *purposes: Purpose) -> Work:
        """Return the work for some purposes in the whole run."""
        found = NOTHING
        for (_, purpose), work in self.entries.items():
            if purpose in purposes:
                found = found.plus(work)
        return found

    def columns(self) -> dict[str, float]:
        """Return the columns of `metrics.csv`: the work so far.

        `flops`, the passes and samples are those of the clients, without what only evaluates their models.
        """
        of: dict[Purpose, Work] = dict.fromkeys(PURPOSES, NOTHING)
        for (_, purpose), work in self.entries.items():
            of[purpose] = of[purpose].plus(work)
        clients = of["training"].plus(of["choice"]).plus(of["statistics"])
        return {
            "flops": clients.flops,
            **{f"flops_{purpose}": work.flops for purpose, work in of.items()},
            **{name: n for name, n in clients._asdict().items() if name != "flops"},
            **({} if self.joules is None else {"joules": float(self.joules.sum())}),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `computation.csv`: one for each step and purpose."""
        ordered = sorted(self.entries, key=lambda at: (at[0], PURPOSES.index(at[1])))
        return [
            {"step": step, "purpose": purpose, **self.entries[step, purpose]._asdict()}
            for step, purpose in ordered
        ]

    def per_client(self) -> dict[str, np.ndarray]:
        """Return the columns of `client_computation.csv`: each kept client's work by purpose in the run."""
        which = np.arange(self._num_kept) if self._which is None else self._which
        names = [p for p in PURPOSES if p in self._of]
        of = (
            np.stack([self._of[p] for p in names], 1)
            if names
            else np.zeros((len(which), 0, len(FIGURES)), int)
        )
        worked = of.any(2).reshape(-1)
        columns = {
            "client": np.repeat(which, len(names))[worked],
            "purpose": np.tile(np.array(names, dtype=str), len(which))[worked],
        }
        return columns | dict(zip(FIGURES, of.reshape(-1, len(FIGURES))[worked].T, strict=True))

    def energy(self) -> dict[str, np.ndarray]:
        """Return the columns of `client_energy.csv`: each kept client's energy; empty if none is counted."""
        if self.joules is None:
            return {}
        which = np.arange(len(self.joules)) if self._which is None else self._which
        return {"client": which, "joules": self.joules[which]}

    def of_client(self, client: int, purpose: Purpose) -> Work:
        """Return the work of a kept client for a purpose in the whole run."""
        place = client if self._which is None else int(np.searchsorted(self._which, client))
        return Work(*self._of[purpose][place].tolist()) if purpose in self._of else NOTHING

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all counts as arrays; totals as text, because they may exceed 64 bits."""
        steps, purposes = [s for s, _ in self.entries], [p for _, p in self.entries]
        totals = np.array([[*map(str, work)] for work in self.entries.values()], str)
        return {
            "step": np.array(steps, np.int64),
            "purpose": np.array(purposes, str),
            "totals": totals.reshape(-1, len(FIGURES)),
            **{f"of_{purpose}": of for purpose, of in self._of.items()},
            **({} if self.joules is None else {"joules": self.joules}),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the counts that `state_dict` returned.

        Raises:
            UserError: a checkpoint of a version that did not count computation.
        """
        require("totals" in state, "RUN", "a checkpoint without counts of computation", "run it again")
        known = {str(p): p for p in PURPOSES}
        heads = zip(state["step"].tolist(), state["purpose"].tolist(), state["totals"].tolist(), strict=True)
        self.entries = {(step, known[purpose]): Work(*map(int, row)) for step, purpose, row in heads}
        self.joules = state["joules"].copy() if "joules" in state else self.joules
        self._of = {p: state[f"of_{p}"].copy() for p in PURPOSES if f"of_{p}" in state}


def _sum(column: np.ndarray) -> int:
    """Return the sum of numbers up to 2^63, which may exceed 64 bits."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())
