"""The synchronous engine: cohorts, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from mpifl.core.types import Server
from mpifl.simulation.durations import VisitDuration
from mpifl.simulation.sampling import Sampler

from .recovery import obey, say
from .run_state import SAVE, STOP, Checkpointer, Never, Saved, save, take_stepper
from .server_step import ServerStep


@dataclass(frozen=True)
class Record:
    """What rank 0 knows after a step.

    Attributes:
        step: 0 before the first.
        cohort: who took part.
        scores: name -> value of each evaluated client; None where the step was not evaluated.
        evaluated: the evaluated clients.
        train: means of what the clients reported.
        seconds: since the run began.
        virtual_seconds: on the clock of the simulated federation, where there is one.
        timing: rank -> phase -> seconds since the last record with scores; empty otherwise.
    """

    step: int
    server: Server
    cohort: np.ndarray
    evaluated_clients: np.ndarray
    scores: dict[str, np.ndarray] | None
    train: dict[str, float]
    seconds: float
    timing: list[dict[str, float]]
    virtual_seconds: float | None = None


@dataclass
class Rounds:
    """Runs `num_rounds` synchronous rounds. Rank 0 says what is done next, every rank does it: a rank that
    was lost on the way only means that the word is said again.

    Attributes:
        server_step: takes the steps.
        sampler: draws the cohorts.
        judge_every: rounds between evaluations; the last round is always evaluated. 0: only the last.
        evaluated: the clients that are evaluated.
        judge_first: whether to evaluate before the first round.
        duration: how long visits take in virtual seconds; a round takes as long as its slowest client.
        checkpointer: writes the state between rounds.
    """

    server_step: ServerStep
    sampler: Sampler
    num_rounds: int
    evaluated_clients: np.ndarray
    judge_every: int = 1
    judge_first: bool = False
    duration: VisitDuration | None = None
    checkpointer: Checkpointer = field(default_factory=Never)
    server: Server | None = field(default=None, init=False)  # on rank 0
    virtual: float = field(default=0.0, init=False)  # seconds on the federation's clock
    _saved: Saved | None = field(default=None, init=False)
    _start: float = field(default=0.0, init=False)
    _cohort: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    _scores: Any = field(default=None, init=False)  # of the last judging, and the timing of all ranks

    def run(self, observe: Callable[[Record], None], saved: Saved | None = None) -> Server | None:
        """Run all rounds; `observe` is called on rank 0 after each. Return the last server on rank 0.

        Args:
            saved: a state to go on from, on rank 0.
        """
        self._saved, self._start = saved, perf_counter()
        if not self.server_step.transport.is_server:
            obey(self.server_step, self._act)
            return None
        self._say("begin" if saved is None else "restore")
        assert self.server is not None
        if self.judge_first and saved is None:
            self._record(observe)
        while self.server.version < self.num_rounds:
            if word := self.checkpointer.due(self.server.version):
                self._say(word)
            self._say("step")
            self._record(observe)
        self._say("end")
        return self.server

    def _say(self, word: str) -> None:
        say(self.server_step, word, self._act)

    def _act(self, word: str) -> None:
        """Do what rank 0 says; every rank calls."""
        server_step, server = self.server_step, self.server
        if word == "begin":
            self.server = server_step.initialize()
            self.virtual = self._end(0, self._cohort, server_step.visits)
        elif word == "restore":
            self._restore()
        elif word == "step":
            self._step()
        elif word == "evaluate":
            scores = server_step.evaluate(server, self.evaluated_clients)
            self._scores = scores, server_step.transport.gather(server_step.watch.take(), "timing")
        elif word in (SAVE, STOP):
            save(server_step, server, self.checkpointer, self._state(), alone=False)
            if word == STOP:
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
        if self.server is None:
            return None
        values = {"virtual": self.virtual, "seconds": perf_counter() - self._start}
        return Saved(self.server.version, values=values)

    def _restore(self) -> None:
        if self._saved is not None:
            take_stepper(self._saved, self.server_step)
            self.server = self._saved.take_server("server")
            self.virtual = self._saved.values["virtual"]
            self._start = perf_counter() - self._saved.values["seconds"]
        self.server_step.distribute(self.server)

    def _end(self, step: int, cohort: np.ndarray, visits: np.ndarray) -> float:
        """Return when a step is over, in virtual seconds; on rank 0.

        Args:
            visits: of each client before the step [N].
        """
        if self.duration is None or not self.server_step.transport.is_server:
            return self.virtual
        ledger = self.server_step.ledger
        return self.duration.round_end(
            self.virtual, ledger.close(step, cohort, visits), ledger.cast_bytes(step)
        )

    def _due(self, step: int) -> bool:
        return step in (0, self.num_rounds) or bool(self.judge_every and step % self.judge_every == 0)

    def _record(self, observe: Callable[[Record], None]) -> None:
        """Judge if it is due, and tell what is known; on rank 0."""
        assert self.server is not None
        scores, timing = None, None
        if self._due(self.server.version):
            self._say("evaluate")
            scores, timing = self._scores
        observe(
            Record(
                self.server.version,
                self.server,
                self._cohort,
                self.evaluated_clients,
                scores,
                self.server_step.train_metrics,
                perf_counter() - self._start,
                timing or [],
                self.virtual if self.duration is not None else None,
            )
        )
