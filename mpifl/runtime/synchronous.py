"""The synchronous engine: one cohort after the other, with uploads mixed by collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from mpifl.core.metric import with_figures
from mpifl.core.progress import ROUND, doing
from mpifl.core.types import Server
from mpifl.simulation.sampling import RoundPlan

from .engine import END, Engine, Evaluated, EvaluationSchedule, Observe, Record, command_loop, run_command
from .run_state import SAVE, STOP, Checkpointer, NoCheckpoints, Saved, save
from .server_step import ServerStep, StepResult


class RoundClock:
    """The time of the simulated federation, on rank 0; here there is none, and all drawn clients train."""

    @property
    def virtual(self) -> float | None:
        """Seconds since the run began; None without a clock."""
        return None

    @property
    def late_uploads(self) -> np.ndarray | int:
        """How many uploads each client has sent too late [N]."""
        return 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Columns of `metrics.csv` for the last round."""
        return {}

    def start(self) -> None:
        """Begin, after the one-shot statistics were sent."""

    def plan(self, server: Server, step: int, cohort: np.ndarray) -> RoundPlan:
        """Return who of the drawn clients takes part in a round, and how much each trains."""
        return RoundPlan(cohort)

    def finish(self, server: Server, plan: RoundPlan, result: StepResult) -> None:
        """Advance to the end of a round.

        Args:
            server: the server before the round.
            plan: the plan of the round.
            result: the result of its step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds, in a form that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class SynchronousEngine(Engine):
    """Runs synchronous rounds.

    Rank 0 gives one command at a time, and every rank executes it. After the loss of a rank, the remaining
    ranks repeat the command.

    Args:
        server_step: takes the steps.
        sampler: returns the cohort of a round, by its number.
        num_rounds: number of rounds to run.
        evaluation: which clients are evaluated, and when.
        clock: the time of the simulated federation; None for no clock.
        checkpointer: writes the state between rounds; None for no checkpoints.
    """

    def __init__(
        self,
        server_step: ServerStep,
        sampler: Callable[[int], np.ndarray],
        num_rounds: int,
        evaluation: EvaluationSchedule,
        clock: RoundClock | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.server_step, self.sampler, self.num_rounds = server_step, sampler, num_rounds
        self.evaluation, self.clock = evaluation, clock or RoundClock()
        self.checkpointer = checkpointer or NoCheckpoints()
        server_step.seconds = lambda: self.clock.virtual or 0.0
        self.server: Server | None = None  # on rank 0
        self._saved: Saved | None = None
        self._start = 0.0
        self._arrived = np.arange(0)  # clients whose uploads arrived in the last round
        self._evaluated = Evaluated()  # result of the last evaluation

    def run(self, observe: Observe, saved: Saved | None = None) -> Server | None:
        """Run all rounds; see `Engine`."""
        self._saved, self._start, server_step = saved, perf_counter(), self.server_step
        if not server_step.transport.is_server:
            command_loop(server_step, self.execute)
            return None
        self.checkpointer.begins(server_step, self._values())
        self._command("begin" if saved is None else "restore")
        assert self.server is not None
        if self.evaluation.first and saved is None:
            self._record(observe)
        with doing(ROUND, self.num_rounds, first=self.server.version, main=True) as rounds:
            over = False
            while self.server.version < self.num_rounds and not over:
                with server_step.watch("checkpoint"):
                    command = self.checkpointer.due(self.server.version)
                if command:
                    self._command(command)
                if server_step.data_change(self.server.version + 1):
                    self._command("change")
                    self.server = server_step.with_groups(self.server)
                self._command("step")
                over = self._record(observe)
                rounds.done = self.server.version
        self._command(END)
        return self.server

    def _command(self, command: str) -> None:
        run_command(self.server_step, command, self.execute)

    def execute(self, command: str) -> None:
        """Execute a command of rank 0.

        They are `begin`, `restore`, `change`, `step`, `evaluate`, `save`, `stop` and `end`.
        """
        server_step, server = self.server_step, self.server
        if command == "begin":
            self.server = server_step.initialize()
            if self.server is not None:
                self.clock.start()
        elif command == "restore":
            self._restore()
        elif command == "change":
            server_step.tell_changes()
        elif command == "step":
            self._step()
        elif command == "evaluate":
            scores = server_step.evaluate(server, self.evaluation.clients)
            timing = server_step.watch.take()
            with server_step.watch("wait"):
                found = server_step.transport.gather(timing, "timing")
            self._evaluated = Evaluated(scores, found)
        elif command in (SAVE, STOP):
            with server_step.watch("checkpoint"):
                save(server_step, server, self.checkpointer, self._state(), alone=False)
            if command == STOP:
                server_step.transport.barrier()  # if a rank is lost before this, all ranks repeat the command
                self.checkpointer.stop(server.version if server is not None else 0)
        elif command == END:
            server_step.transport.barrier()  # if a rank is lost before this, all ranks repeat the command

    def _step(self) -> None:
        before, plan = self.server, RoundPlan(np.arange(0))
        if before is not None:
            step = before.version + 1
            with self.server_step.watch("select"):
                plan = self.clock.plan(before, step, self.sampler(step))
        result = self.server_step.step(before, plan)
        if before is not None and result is not None:
            self.server, self._arrived = result.server, self.server_step.arrived
            with self.server_step.watch("collect"):
                self.clock.finish(before, plan, result)

    @property
    def num_uploads(self) -> np.ndarray:
        """Uploads of each client [N]: those taken, and, if late clients upload too, those that were late."""
        return np.asarray(self.server_step.taken + self.clock.late_uploads)

    def _state(self) -> Saved | None:
        """Return the engine's part of the state, on rank 0."""
        if self.server is None:
            return None
        return Saved(self.server.version, values=self._values())

    def _values(self) -> dict[str, Any]:
        return {"seconds": perf_counter() - self._start, **self.clock.state_dict()}

    def _restore(self) -> None:
        if self._saved is not None:
            with self.checkpointer.restoring():
                self._saved.load_step_state(self.server_step)
                self.server = self._saved.server_under("server")
                self.clock.load_state_dict(self._saved.values)
                self._start = perf_counter() - self._saved.values["seconds"]
        self.server_step.distribute(self.server)

    def _record(self, observe: Observe) -> bool:
        """Evaluate if an evaluation is due, and pass on the record of the step; on rank 0.

        Returns whether the step is the last one.
        """
        assert self.server is not None
        due = self.evaluation.due(self.server.version, self.num_rounds)
        return self._observed(self._seen, due, observe)

    def _seen(self, evaluated: bool) -> Record:
        """Return the record of the step."""
        assert self.server is not None
        scores, timing = Evaluated()
        if evaluated:
            self._command("evaluate")
            scores, timing = self._evaluated
        with self.server_step.watch("record"):
            visits = self.server_step.visits[self._arrived] - 1
            return Record(
                step=self.server.version,
                server=self.server,
                cohort=self._arrived,
                accepted=[*zip(self._arrived.tolist(), visits.tolist(), strict=True)],
                evaluated_clients=self.evaluation.clients,
                scores=scores,
                train=with_figures(self.server_step.train_metrics, self.clock.metrics),
                seconds=perf_counter() - self._start,
                timing=timing or [],
                virtual_seconds=self.clock.virtual,
                updates=self.server_step.updates,
            )
