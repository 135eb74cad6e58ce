"""What the two engines share: their interface, the record of a step, and when models are evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpifl.core.types import Server

from .run_state import Saved


@dataclass(frozen=True)
class Record:
    """What rank 0 knows after a step.

    Attributes:
        step: server steps taken; 0 before the first.
        server: after the step.
        cohort: clients whose uploads were mixed.
        accepted: (client, visit) of the uploads that the step took.
        evaluated_clients: the clients that are evaluated.
        scores: name -> value of each evaluated client; None where the step was not evaluated.
        train: means of what the clients reported.
        seconds: real seconds since the run began.
        timing: phase -> seconds of each rank since the last record with scores; empty without scores.
        virtual_seconds: on the clock of the simulated federation, where that is in seconds.
        updates: how the updates of the step agree with their mean (`ServerStep.updates`), where asked for.
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
    updates: Sequence[dict[str, Any]] = ()
    accepted: Sequence[tuple[int, int]] = ()


class Evaluated(NamedTuple):
    """What an evaluation found, on rank 0; nothing on the others.

    Attributes:
        scores: name -> value of each evaluated client.
        timing: phase -> seconds of each rank since the last evaluation.
    """

    scores: dict[str, np.ndarray] | None = None
    timing: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class EvaluationSchedule:
    """Which clients are evaluated, and after which steps.

    Attributes:
        clients: the evaluated clients.
        every: steps between evaluations; the last step is always evaluated. 0: only the last.
        first: whether to evaluate before the first step.
    """

    clients: np.ndarray
    every: int = 1
    first: bool = False

    def due(self, step: int, num_steps: int) -> bool:
        """Return whether the state after a step, of so many, is evaluated."""
        return step in (0, num_steps) or bool(self.every and step % self.every == 0)

    def num_due(self, done: int, num_steps: int) -> int:
        """Return how many states are evaluated after the first `done` of so many steps."""
        if done >= num_steps:
            return 0
        if not self.every:
            return 1
        return -(-num_steps // self.every) - done // self.every


class Engine(ABC):
    """Runs the server steps of an experiment over all ranks."""

    @abstractmethod
    def run(self, observe: Callable[[Record], None], saved: Saved | None = None) -> Server | None:
        """Run all steps; every rank calls. Return the last server on rank 0.

        Args:
            observe: is called on rank 0 after each step.
            saved: a state to resume from, on rank 0.
        """

    @property
    @abstractmethod
    def num_uploads(self) -> np.ndarray:
        """How many uploads each client has sent [N], those included that came too late; on rank 0."""

    def summary(self) -> dict[str, Any]:
        """Return figures of the run for its summary, on rank 0."""
        return {}
