"""The synchronous engine: cohorts, one after the other, over collectives."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from mpifl.core.types import Server
from mpifl.simulation.durations import VisitDuration
from mpifl.simulation.sampling import Sampler

from .engine import Engine, EvaluationSchedule, Record
from .recovery import END, run_command, serve_commands
from .run_state import SAVE, STOP, Checkpointer, NoCheckpoints, Saved, save
from .server_step import ServerStep


class SynchronousEngine(Engine):
    """Runs synchronous rounds.

    Rank 0 gives one command at a time, every rank executes it. After the loss of a rank the command is given
    again to those that are left.

    Args:
        server_step: takes the steps.
        sampler: draws the cohorts.
        num_rounds: how many to run.
        evaluation: which clients are evaluated, and when.
        duration: how long visits last in virtual seconds; a round lasts as long as its slowest client. None:
            virtual time is not recorded.
        checkpointer: writes the state between rounds; None: nobody does.
    """

    def __init__(
        self,
        server_step: ServerStep,
        sampler: Sampler,
        num_rounds: int,
        evaluation: EvaluationSchedule,
        duration: VisitDuration | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.server_step, self.sampler, self.num_rounds = server_step, sampler, num_rounds
        self.evaluation, self.duration = evaluation, duration
        self.checkpointer = checkpointer or NoCheckpoints()
        self.server: Server | None = None  # on rank 0
        self.virtual = 0.0  # seconds on the federation's clock, on rank 0
        self._saved: Saved | None = None
        self._start = 0.0
        self._cohort = np.zeros(0, np.int64)
        self._scores: Any = None  # of the last evaluation, and the timing of all ranks

    def run(self, observe: Callable[[Record], None], saved: Saved | None = None) -> Server | None:
        """Run all rounds; see `Engine`."""
        self._saved, self._start = saved, perf_counter()
        if not self.server_step.transport.is_server:
            serve_commands(self.server_step, self.execute)
            return None
        self._command("begin" if saved is None else "restore")
        assert self.server is not None
        if self.evaluation.first and saved is None:
            self._record(observe)
        while self.server.version < self.num_rounds:
            if command := self.checkpointer.due(self.server.version):
                self._command(command)
            self._command("step")
            self._record(observe)
        self._command(END)
        return self.server

    def _command(self, command: str) -> None:
        run_command(self.server_step, command, self.execute)

    def execute(self, command: str) -> None:
        """Execute a command of rank 0: `begin`, `restore`, `step`, `evaluate`, `save`, `stop` or `end`."""
        server_step, server = self.server_step, self.server
        if command == "begin":
            self.server = server_step.initialize()
            self.virtual = self._end(0, self._cohort, server_step.visits)
        elif command == "restore":
            self._restore()
        elif command == "step":
            self._step()
        elif command == "evaluate":
            scores = server_step.evaluate(server, self.evaluation.clients)
            self._scores = scores, server_step.transport.gather(server_step.watch.take(), "timing")
        elif command in (SAVE, STOP):
            save(server_step, server, self.checkpointer, self._state(), alone=False)
            if command == STOP:
                self.checkpointer.stop(server.version if server is not None else 0)

    def _step(self) -> None:
        server_step, step = self.server_step, 0
        if self.server is not None:
            step = self.server.version + 1
            self._cohort = self.sampler(step)
        visits = server_step.visits.copy()
        self.server, _ = server_step.step(self.server, self._cohort)
        self.virtual = self._end(step, self._cohort, visits)

    def _state(self) -> Saved | None:
        """Return the engine's part of the state, on rank 0."""
        if self.server is None:
            return None
        values = {"virtual": self.virtual, "seconds": perf_counter() - self._start}
        return Saved(self.server.version, values=values)

    def _restore(self) -> None:
        if self._saved is not None:
            self._saved.load_step_state(self.server_step)
            self.server = self._saved.server_under("server")
            self.virtual = self._saved.values["virtual"]
            self._start = perf_counter() - self._saved.values["seconds"]
        self.server_step.distribute(self.server)

    def _end(self, step: int, cohort: np.ndarray, visits: np.ndarray) -> float:
        """Return when a step is over, in virtual seconds; on rank 0.

        Args:
            step: 0 before the first.
            cohort: clients that took part.
            visits: of each client before the step [N].
        """
        if self.duration is None or not self.server_step.transport.is_server:
            return self.virtual
        ledger = self.server_step.ledger
        moved = ledger.close(step, cohort, visits)
        return self.duration.round_end(self.virtual, moved, ledger.cast_bytes(step))

    def _record(self, observe: Callable[[Record], None]) -> None:
        """Evaluate if that is due, and pass on the record of the step; on rank 0."""
        assert self.server is not None
        scores, timing = None, None
        if self.evaluation.due(self.server.version, self.num_rounds):
            self._command("evaluate")
            scores, timing = self._scores
        observe(
            Record(
                step=self.server.version,
                server=self.server,
                cohort=self._cohort,
                evaluated_clients=self.evaluation.clients,
                scores=scores,
                train=self.server_step.train_metrics,
                seconds=perf_counter() - self._start,
                timing=timing or [],
                virtual_seconds=self.virtual if self.duration is not None else None,
                updates=self.server_step.updates,
            )
        )
