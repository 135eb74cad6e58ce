"""The synchronous engine: cohorts, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from mpifl.core.types import Server

from .pace import Pace
from .sampler import Sampler
from .step import Stepper


@dataclass(frozen=True)
class Record:
    """What rank 0 knows after a step.

    Attributes:
        step: 0 before the first.
        cohort: who took part.
        scores: name -> value of each judged client; None where the step was not judged.
        judged: the judged clients.
        train: means of what the clients reported.
        seconds: since the run began.
        virtual_seconds: on the clock of the simulated federation, where there is one.
        timing: rank -> phase -> seconds since the last record with scores; empty otherwise.
    """

    step: int
    server: Server
    cohort: np.ndarray
    judged: np.ndarray
    scores: dict[str, np.ndarray] | None
    train: dict[str, float]
    seconds: float
    timing: list[dict[str, float]]
    virtual_seconds: float | None = None


@dataclass(frozen=True)
class Rounds:
    """Runs `num_rounds` synchronous rounds.

    Attributes:
        stepper: takes the steps.
        sampler: draws the cohorts.
        judge_every: rounds between evaluations; the last round is always judged. 0: only the last.
        judged: the clients that are evaluated.
        judge_first: whether to evaluate before the first round.
        pace: how long visits take in virtual seconds; a round takes as long as its slowest client.
    """

    stepper: Stepper
    sampler: Sampler
    num_rounds: int
    judged: np.ndarray
    judge_every: int = 1
    judge_first: bool = False
    pace: Pace | None = None

    def run(self, observe: Callable[[Record], None]) -> Server | None:
        """Run all rounds; `observe` is called on rank 0 after each. Return the last server on rank 0."""
        start = perf_counter()
        virtual = 0.0
        server = self.stepper.begin()
        none = np.zeros(0, np.int64)
        virtual = self._end(0, none, self.stepper.visits, virtual)
        if self.judge_first:
            self._record(0, server, none, start, observe, virtual)
        for step in range(1, self.num_rounds + 1):
            cohort = self.sampler(step)
            visits = self.stepper.visits.copy()
            server, _ = self.stepper.step(server, cohort)
            virtual = self._end(step, cohort, visits, virtual)
            self._record(step, server, cohort, start, observe, virtual)
        return server

    def _end(self, step: int, cohort: np.ndarray, visits: np.ndarray, start: float) -> float:
        """Return when a step that starts at `start` is over, in virtual seconds; on rank 0.

        Args:
            visits: of each client before the step [N].
        """
        if self.pace is None or not self.stepper.transport.is_server:
            return start
        ledger = self.stepper.ledger
        return self.pace.round_end(start, ledger.close(step, cohort, visits), ledger.cast_bytes(step))

    def _due(self, step: int) -> bool:
        return step == self.num_rounds or bool(self.judge_every and step % self.judge_every == 0)

    def _record(
        self,
        step: int,
        server: Server | None,
        cohort: np.ndarray,
        start: float,
        observe: Callable[[Record], None],
        virtual: float = 0.0,
    ) -> None:
        scores, timing = None, None
        if self._due(step) or step == 0:
            scores = self.stepper.judge(server, self.judged)
            timing = self.stepper.transport.collect(self.stepper.watch.take(), "timing")
        if server is not None:
            observe(
                Record(
                    step,
                    server,
                    cohort,
                    self.judged,
                    scores,
                    self.stepper.train_metrics,
                    perf_counter() - start,
                    timing or [],
                    virtual if self.pace is not None else None,
                )
            )
