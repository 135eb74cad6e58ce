"""The virtual clock of synchronous rounds: when uploads arrive, and which clients a rule leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from mpifl.core.capabilities import SecondLook, uses
from mpifl.core.rng import Key
from mpifl.core.types import Server
from mpifl.simulation.durations import VisitDuration
from mpifl.simulation.round_rules import RoundRule, RoundStart
from mpifl.simulation.sampling import RoundPlan
from mpifl.traffic.encoding import download_bytes, time_stamp_bytes
from mpifl.traffic.ledger import Moves, is_among

from .protocol import GatheredReports, Kind, ReportTable, kind_of_visit
from .server_step import ServerStep, StepResult
from .synchronous import RoundClock
from .upload_size import UploadSizes

LOOKS = (
    "network, costs: what clients send and compute in the second look counts towards the time of a round, "
    "not towards its plan; times of return are approximate, and a deadline may be missed"
)


class VirtualRounds(RoundClock):
    """Rounds whose visits and transfers take virtual seconds; a round lasts as long as its slowest client.

    Args:
        server_step: takes the steps.
        duration: how long visits take.
        rule: decides, when a round begins, who is kept and how much each client trains. None: all drawn
            clients do all their work.
        num_wanted: how many of the drawn clients a round keeps.
        key: random key of the rule's draws.
    """

    def __init__(
        self,
        server_step: ServerStep,
        duration: VisitDuration,
        rule: RoundRule | None,
        num_wanted: int,
        key: Key,
    ) -> None:
        self.server_step, self.duration, self.rule = server_step, duration, rule
        self.num_wanted, self.key = num_wanted, key
        self.now = 0.0  # in seconds
        self.left_out = np.zeros(len(server_step.visits), np.int64)  # times each client was
        self._sizes = UploadSizes(server_step)  # used if links have a rate
        if duration.watts:
            server_step.computation.count_energy(len(server_step.visits))
        self._metrics: Mapping[str, float] = {}

    def start(self) -> None:
        """Set the clock to the time when the one-shot statistics have arrived."""
        self.now = self._end(0, RoundPlan(np.arange(0)), np.arange(0))

    def plan(self, server: Server, step: int, cohort: np.ndarray) -> RoundPlan:
        """Return the rule's plan for the drawn clients."""
        if self.rule is None:
            return RoundPlan(cohort)
        server_step, duration = self.server_step, self.duration
        down: dict[int, int] = {}
        up: dict[int, int] = {}
        if duration.network.counts_bytes:
            widths = {name: server_step.tables.width(name) for name in server.tables}
            payload = server_step.ledger.payload
            reads = server_step.hooks.reads("reads", server, cohort)
            stamp = time_stamp_bytes(payload, server_step.algorithm.needs.time_stamps)
            for k, rows in reads.items():
                up[k], beside = self._sizes.in_round(server, rows, len(cohort), k)
                own = server_step.config.filters.widths(widths, k)
                down[k] = download_bytes(rows, own, payload) + beside + stamp
            self._sizes.expected = {} if server_step.config.filters.hides_uploads else {**up}
            for k, size in self._sizes.statistics(server, cohort).items():
                down[k], up[k] = down[k] + size.down, up[k] + size.up
        if uses(server_step.algorithm, SecondLook) and (duration.network.counts_bytes or duration.looks):
            self._sizes.warn(LOOKS)
        started = server_step.visits + self.left_out

        def end(k: int, share: Fraction) -> float:
            return duration.end(k, int(started[k]), self.now, down.get(k, 0), up.get(k, 0), float(share))

        def steps(k: int) -> tuple[int, int]:
            return server_step.config.clients.num_steps(k, int(server_step.visits[k]))

        plan = self.rule.plan(RoundStart(step, cohort, self.num_wanted, self.now, end, steps, self.key))
        self._metrics = plan.metrics
        return replace(plan, statistics=self._sizes.statistics(server, plan.late))

    def finish(self, server: Server, plan: RoundPlan, result: StepResult) -> None:
        """Advance to the end of a round, and book the uploads of late clients."""
        if result.reports is not None:
            for table in result.reports.tables:
                self._sizes.compare(table)
            if plan.late_send and len(plan.late):
                self._book_late(server, result.reports, plan.late)
        self.now = self._end(result.server.version, plan, result.notes.client[result.notes.fresh])
        self.left_out[plan.late] += 1

    def _book_late(self, server: Server, reports: GatheredReports, late: np.ndarray) -> None:
        """Book late uploads, which are not used, with the size of the first used upload of the same kind."""
        fresh = [table for table in reports.tables if table.fresh]
        clients = np.concatenate([late, *(table.client for table in fresh)])
        reads = self.server_step.hooks.reads("reads", server, clients)
        filters = self.server_step.config.filters
        first: dict[Kind, tuple[ReportTable, int]] = {}
        for table in fresh:
            for i, k in enumerate(table.client.tolist()):
                first.setdefault(kind_of_visit(reads[k], filters, k), (table, i))
        alike: dict[Kind, list[int]] = {}
        for k in late.tolist():
            alike.setdefault(kind_of_visit(reads[k], filters, k), []).append(k)
        for kind, some in alike.items():
            if kind not in first:
                self._sizes.warn(
                    f"late uploads of clients {some[:3]} have the size of another's in the ledger"
                )
            table, i = first.get(kind, (fresh[0], 0))
            sizes = {name: each[i : i + 1].repeat(len(some)) for name, each in table.note_sizes.items()}
            like = replace(table, client=np.array(some), note_sizes=sizes, exchanges={})
            self.server_step.book(server.version + 1, like)

    def _end(self, step: int, plan: RoundPlan, trained: np.ndarray) -> float:
        """Return when a step ends, in virtual seconds.

        Args:
            step: number of the step; 0 before the first.
            plan: who takes part.
            trained: clients whose visits in the step are already counted.
        """
        ledger, counted = self.server_step.ledger, self.server_step.visits

        def visits(clients: np.ndarray) -> np.ndarray:
            """Return how many visits each client had begun before the step."""
            before: np.ndarray = counted[clients] - is_among(clients, trained) + self.left_out[clients]
            return before

        moved = ledger.close(step, plan.cohort, visits).without(plan.late)
        shares = {k: float(share) for k, share in plan.work.items()}
        looks = self._look_work() if step else {}
        if self.duration.watts:
            self._book_energy(moved, shares, looks)
        if self.duration.same_for_all and not shares:
            moved = moved.sizes()
        ends = self.duration.round_end(self.now, moved, ledger.cast_bytes(step), shares, looks)
        return max(plan.until, ends)

    def _look_work(self) -> dict[int, float]:
        """Return client -> its work in the last second look, in units of one local training.

        As for visits, what a client was asked for is charged, also if it failed.
        """
        looks, loads = self.server_step.looks, self.duration.looks
        if looks is None or loads is None:
            return {}
        return dict(loads.work(looks.clients, looks.visits, *looks.counts()))

    def _book_energy(self, moved: Moves, shares: Mapping[int, float], looks: Mapping[int, float]) -> None:
        """Book the energy of those who have computed in a step, given what they moved."""
        duration, add = self.duration, self.server_step.computation.add_energy
        for m in moved:
            if m.trains:
                add(m.client, duration.joules(m.client, m.visit, shares.get(m.client, 1.0)))
            elif m.step == 0:
                add(m.client, duration.joules_of_statistics(m.client))
            if look := looks.get(m.client):
                add(m.client, duration.joules_of_look(m.client, m.visit, look))

    @property
    def virtual(self) -> float:
        """Seconds since the run began."""
        return self.now

    @property
    def late_uploads(self) -> np.ndarray | int:
        """How many uploads each client has sent too late [N]."""
        return self.left_out if self.rule is not None and self.rule.late_send else 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the rule adds to `metrics.csv` in the last round."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the time, and what the rule needs, in a form that JSON can hold."""
        state: dict[str, Any] = {"virtual": self.now}
        if self.rule is not None:
            state |= {"left_out": self.left_out.tolist(), "upload_sizes": self._sizes.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.now = state["virtual"]
        if self.rule is not None:
            self.left_out = np.array(state["left_out"], np.int64)
            self._sizes.load_state_dict(state["upload_sizes"])
