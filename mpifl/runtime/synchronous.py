"""The synchronous engine: one cohort after the other, with uploads mixed by collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from time import perf_counter
from typing import Any

import numpy as np

from mpifl.core.capabilities import SecondLook, uses
from mpifl.core.metric import with_figures
from mpifl.core.progress import ROUND, doing
from mpifl.core.types import Server
from mpifl.simulation.durations import VisitDuration
from mpifl.simulation.round_rules import RoundPlan, RoundRule, RoundStart
from mpifl.simulation.sampling import Sampler
from mpifl.traffic.encoding import download_bytes, time_stamp_bytes
from mpifl.traffic.ledger import is_among

from .engine import Engine, Evaluated, EvaluationSchedule, Record
from .recovery import END, command_loop, run_command
from .run_state import SAVE, STOP, Checkpointer, NoCheckpoints, Saved, save
from .server_step import ServerStep
from .upload_size import UploadSizes

LOOKS = (
    "network: what clients send in the second look counts towards the time of a round, but not "
    "towards its plan; times of return are approximate, and a deadline may be missed"
)


class SynchronousEngine(Engine):
    """Runs synchronous rounds.

    Rank 0 gives one command at a time, and every rank executes it. After the loss of a rank, the remaining
    ranks repeat the command.

    Args:
        server_step: takes the steps.
        sampler: draws the cohorts.
        num_rounds: number of rounds to run.
        evaluation: which clients are evaluated, and when.
        duration: how long visits take in virtual seconds; a round lasts as long as its slowest client. None
            records no virtual time.
        checkpointer: writes the state between rounds; None for no checkpoints.
        rule: decides from the clock, when a round begins, who is kept and how much each client trains. None:
            all drawn clients do all their work.
        num_wanted: how many of the drawn clients a round keeps; None for all.
    """

    def __init__(
        self,
        server_step: ServerStep,
        sampler: Sampler,
        num_rounds: int,
        evaluation: EvaluationSchedule,
        duration: VisitDuration | None = None,
        checkpointer: Checkpointer | None = None,
        rule: RoundRule | None = None,
        num_wanted: int | None = None,
    ) -> None:
        self.server_step, self.sampler, self.num_rounds = server_step, sampler, num_rounds
        self.evaluation, self.duration = evaluation, duration
        self.checkpointer = checkpointer or NoCheckpoints()
        self.server: Server | None = None  # on rank 0
        self.virtual = 0.0  # seconds on the federation's clock, on rank 0
        self._saved: Saved | None = None
        self._start = 0.0
        self._cohort = self._trained = self._arrived = np.zeros(0, np.int64)
        self.rule, self.num_wanted = rule, num_wanted
        self.left_out = np.zeros(len(server_step.visits), np.int64)  # times each client was; on rank 0
        self._round_plan: RoundPlan | None = None  # of the last round, if there is a rule; on rank 0
        self._upload_sizes = UploadSizes(server_step)  # used if links have a rate
        self._evaluated = Evaluated()  # result of the last evaluation

    def run(self, observe: Callable[[Record], None], saved: Saved | None = None) -> Server | None:
        """Run all rounds; see `Engine`."""
        self._saved, self._start = saved, perf_counter()
        if not self.server_step.transport.is_server:
            command_loop(self.server_step, self.execute)
            return None
        self._command("begin" if saved is None else "restore")
        assert self.server is not None
        if self.evaluation.first and saved is None:
            self._record(observe)
        with doing(ROUND, self.num_rounds, first=self.server.version, main=True) as rounds:
            while self.server.version < self.num_rounds:
                if command := self.checkpointer.due(self.server.version):
                    self._command(command)
                self._command("step")
                self._record(observe)
                rounds.done = self.server.version
        self._command(END)
        return self.server

    def _command(self, command: str) -> None:
        run_command(self.server_step, command, self.execute)

    def execute(self, command: str) -> None:
        """Execute a command of rank 0: `begin`, `restore`, `step`, `evaluate`, `save`, `stop` or `end`."""
        server_step, server = self.server_step, self.server
        if command == "begin":
            self.server = server_step.initialize()
            self.virtual = self._end(0, self._cohort, self._cohort[:0])
        elif command == "restore":
            self._restore()
        elif command == "step":
            self._step()
        elif command == "evaluate":
            scores = server_step.evaluate(server, self.evaluation.clients)
            timing = server_step.transport.gather(server_step.watch.take(), "timing")
            self._evaluated = Evaluated(scores, timing)
        elif command in (SAVE, STOP):
            save(server_step, server, self.checkpointer, self._state(), alone=False)
            if command == STOP:
                server_step.transport.barrier()  # if a rank is lost before this, all ranks repeat the command
                self.checkpointer.stop(server.version if server is not None else 0)
        elif command == END:
            server_step.transport.barrier()  # if a rank is lost before this, all ranks repeat the command

    def _step(self) -> None:
        server_step, step = self.server_step, 0
        if self.server is not None:
            step = self.server.version + 1
            self._cohort = self.sampler(step)
            self._round_plan = self._planned(self.server, step)
            self._cohort = self._cohort if self._round_plan is None else self._round_plan.cohort
        self.server, notes = server_step.step(self.server, self._cohort, self._round_plan)
        self._trained = self._cohort[:0] if notes is None else notes.client[notes.fresh]
        self._arrived = self._cohort[:0] if notes is None else server_step.arrived
        self.virtual = self._end(step, self._cohort, self._trained)
        if self._round_plan is not None:
            self.left_out[self._round_plan.late] += 1

    @property
    def num_uploads(self) -> np.ndarray:
        """Uploads of each client [N]: those taken, and, if late clients upload too, those that were late."""
        late = self.left_out if self.rule is not None and self.rule.late_send else 0
        return np.asarray(self.server_step.taken + late)

    def _planned(self, server: Server, step: int) -> RoundPlan | None:
        """Return the rule's plan for the drawn clients; None if there is no rule."""
        server_step, duration = self.server_step, self.duration
        if self.rule is None or duration is None:
            return None
        down: dict[int, int] = {}
        up: dict[int, int] = {}
        if duration.network.counts_bytes:
            widths = {name: server_step.tables.width(name) for name in server.tables}
            payload = server_step.ledger.payload
            reads = server_step.hooks.reads("reads", server, self._cohort)
            stamp = time_stamp_bytes(payload, server_step.algorithm.needs.time_stamps)
            for k, rows in reads.items():
                up[k], beside = self._upload_sizes.in_round(server, rows, len(self._cohort))
                down[k] = download_bytes(rows, widths, payload) + beside + stamp
            server_step.expect_uploads({} if server_step.config.filters.hides_uploads else up)
            for k, size in self._upload_sizes.statistics(server, self._cohort).items():
                down[k], up[k] = down[k] + size.down, up[k] + size.up
            if uses(server_step.algorithm, SecondLook):
                server_step.say_sizes(LOOKS)
        started = server_step.visits + self.left_out

        def end(k: int, share: Fraction) -> float:
            return duration.end(k, int(started[k]), self.virtual, down.get(k, 0), up.get(k, 0), float(share))

        def steps(k: int) -> tuple[int, int]:
            return server_step.config.clients.num_steps(k, int(server_step.visits[k]))

        wanted = len(self._cohort) if self.num_wanted is None else self.num_wanted
        key = self.sampler.key.of("rounds")
        plan = self.rule.plan(RoundStart(step, self._cohort, wanted, self.virtual, end, steps, key))
        return replace(plan, statistics=self._upload_sizes.statistics(server, plan.late))

    def _state(self) -> Saved | None:
        """Return the engine's part of the state, on rank 0."""
        if self.server is None:
            return None
        values: dict[str, Any] = {"virtual": self.virtual, "seconds": perf_counter() - self._start}
        if self.rule is not None:
            values["left_out"] = self.left_out.tolist()
            values["upload_sizes"] = self._upload_sizes.state_dict()
        return Saved(self.server.version, values=values)

    def _restore(self) -> None:
        if self._saved is not None:
            self._saved.load_step_state(self.server_step)
            self.server = self._saved.server_under("server")
            self.virtual = self._saved.values["virtual"]
            self._start = perf_counter() - self._saved.values["seconds"]
            if self.rule is not None:
                self.left_out = np.array(self._saved.values["left_out"], np.int64)
                self._upload_sizes.load_state_dict(self._saved.values["upload_sizes"])
        self.server_step.distribute(self.server)

    def _end(self, step: int, cohort: np.ndarray, trained: np.ndarray) -> float:
        """Return when a step ends, in virtual seconds; on rank 0.

        Args:
            step: number of the step; 0 before the first.
            cohort: clients that took part.
            trained: clients whose visits in the step are already counted.
        """
        if self.duration is None or not self.server_step.transport.is_server:
            return self.virtual
        ledger = self.server_step.ledger
        counted, round_plan = self.server_step.visits, self._round_plan

        def visits(clients: np.ndarray) -> np.ndarray:
            """Return how many visits each client had begun before the step."""
            before: np.ndarray = counted[clients] - is_among(clients, trained) + self.left_out[clients]
            return before

        moved = ledger.close(step, cohort, visits)
        if round_plan is None:
            moved = moved.sizes() if self.duration.same_for_all else moved
            return self.duration.round_end(self.virtual, moved, ledger.cast_bytes(step))
        kept = moved.without(round_plan.late)
        shares = {k: float(share) for k, share in round_plan.work.items()}
        return max(
            round_plan.until, self.duration.round_end(self.virtual, kept, ledger.cast_bytes(step), shares)
        )

    def _record(self, observe: Callable[[Record], None]) -> None:
        """Evaluate if an evaluation is due, and pass on the record of the step; on rank 0."""
        assert self.server is not None
        scores, timing = Evaluated()
        if self.evaluation.due(self.server.version, self.num_rounds):
            self._command("evaluate")
            scores, timing = self._evaluated
        visits = self.server_step.visits[self._arrived] - 1
        observe(
            Record(
                step=self.server.version,
                server=self.server,
                cohort=self._arrived,
                accepted=[*zip(self._arrived.tolist(), visits.tolist(), strict=True)],
                evaluated_clients=self.evaluation.clients,
                scores=scores,
                train=with_figures(
                    self.server_step.train_metrics,
                    self._round_plan.metrics if self._round_plan is not None else {},
                ),
                seconds=perf_counter() - self._start,
                timing=timing or [],
                virtual_seconds=self.virtual if self.duration is not None else None,
                updates=self.server_step.updates,
            )
        )
