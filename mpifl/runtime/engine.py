"""What both engines share: their interface, the record of a step, the schedule of evaluations, and commands.

Rank 0 gives commands, and every rank executes them; they are repeated after the loss of a rank.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpifl.comm.transport import RankLost
from mpifl.core.types import Server

from .run_state import Saved
from .server_step import ServerStep

Made = TypeVar("Made")
Execute = Callable[[str], None]
Observe = Callable[["Record"], bool | None]  # gets the record of a step; returns whether it is the last
LOG = logging.getLogger("mpifl.failures")
END = "end"  # the last command


@dataclass(frozen=True)
class Record:
    """What rank 0 knows after a step.

    Attributes:
        step: number of server steps taken; 0 before the first.
        server: the server after the step.
        cohort: clients whose uploads were mixed.
        accepted: (client, visit) of the uploads that the step accepted.
        evaluated_clients: clients that are evaluated.
        scores: name -> value for each evaluated client; None if the step was not evaluated.
        train: mean training metrics, from the clients' reports.
        seconds: real seconds since the run began.
        timing: for each rank, phase -> seconds since the last record with scores; empty without scores.
        virtual_seconds: time on the clock of the simulated federation; None if there is none in seconds.
        again: whether the record was passed on before, without scores: the run ends after this step.
        updates: how the step's updates agree with their mean and with each other (`ServerStep.updates`), if
            requested.
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
    again: bool = False


class Evaluated(NamedTuple):
    """The result of an evaluation on rank 0; empty on the other ranks.

    Attributes:
        scores: name -> value for each evaluated client.
        timing: for each rank, phase -> seconds since the last evaluation.
    """

    scores: dict[str, np.ndarray] | None = None
    timing: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class EvaluationSchedule:
    """Which clients are evaluated, and after which steps.

    Attributes:
        clients: the evaluated clients.
        every: steps between evaluations; the last step is always evaluated. 0 evaluates only the last.
        first: whether to evaluate before the first step.
    """

    clients: np.ndarray
    every: int = 1
    first: bool = False

    def due(self, step: int, num_steps: int) -> bool:
        """Return whether the state after `step` of `num_steps` steps is evaluated."""
        return step in (0, num_steps) or bool(self.every and step % self.every == 0)

    def num_due(self, done: int, num_steps: int) -> int:
        """Return how many evaluations remain after the first `done` of `num_steps` steps."""
        if done >= num_steps:
            return 0
        if not self.every:
            return 1
        return -(-num_steps // self.every) - done // self.every


class Engine(ABC):
    """Runs the server steps of an experiment over all ranks.

    Attributes:
        server_step: takes the steps.
    """

    server_step: ServerStep

    @abstractmethod
    def run(self, observe: Observe, saved: Saved | None = None) -> Server | None:
        """Run all steps and return the last server on rank 0, None elsewhere; every rank calls.

        Args:
            observe: called on rank 0 after each step. If it returns True, no other step is taken; the last
                one is then evaluated, and passed on once more if it was not evaluated before.
            saved: state to resume from, on rank 0; None for a new run.
        """

    @property
    @abstractmethod
    def num_uploads(self) -> np.ndarray:
        """How many uploads each client has sent [N], including those that arrived too late; on rank 0."""

    def summary(self) -> dict[str, Any]:
        """Return figures of the run for its summary, on rank 0."""
        return {}

    def _observed(self, see: Callable[[bool], Record], due: bool, observe: Observe) -> bool:
        """Pass on the record of a step, evaluated if it is the last one; return whether it is.

        Args:
            see: returns the record; its argument says whether the step is evaluated.
            due: whether an evaluation is due.
            observe: see `run`.
        """
        record = see(due)
        with self.server_step.watch("record"):
            over = bool(observe(record))
        if over and not due:
            record = replace(see(True), again=True)
            with self.server_step.watch("record"):
                observe(record)
        return over


# -- commands --------------------------------------------------------------------------------------------


def run_command(server_step: ServerStep, command: str, execute: Execute) -> None:
    """Have every rank execute a command, and repeat it if a rank is lost meanwhile; on rank 0.

    Args:
        server_step: server step of this rank.
        command: one word.
        execute: executes the command on this rank. Before a repetition, the ledgers and the list of
            dropped visits are rolled back.
    """
    known = len(server_step.dropped)
    while True:
        try:
            with server_step.watch("wait"):
                server_step.transport.bcast(command, "control")
            with server_step.config.timeline.command(command):
                execute(command)
            server_step.commit()
            return
        except RankLost:
            server_step.roll_back()
            del server_step.dropped[known:]
            regroup(server_step)


def command_loop(server_step: ServerStep, execute: Execute) -> None:
    """Execute the commands of rank 0, up to the last one; on the other ranks."""
    command = ""
    while command != END:
        try:
            with server_step.watch("wait"):
                command = server_step.transport.bcast(None, "control")
            with server_step.config.timeline.command(command):
                execute(command)
        except RankLost:
            command = ""
            regroup(server_step)


def repeated(server_step: ServerStep, make: Callable[[], Made]) -> Made:
    """Return what `make` returns; every rank calls, and all repeat it if one is lost before they have it."""
    while True:
        try:
            made = make()
            server_step.transport.barrier()
            return made
        except RankLost:
            regroup(server_step)


def regroup(server_step: ServerStep) -> None:
    """Continue with the remaining ranks, and log the loss; all of them call."""
    transport, start = server_step.transport, perf_counter()
    known, before = len(transport.lost), transport.numbers
    with server_step.watch("recover"):
        server_step.regroup()
    for number in before if transport.is_server else ():
        if number not in transport.numbers:
            server_step.config.timeline.lost(number)
    lost = "; ".join(transport.lost[known:])
    text = f"lost {lost}. {transport.size} ranks go on, after {perf_counter() - start:.2f} s"
    LOG.warning(text)
    if transport.is_server:
        print(f"mpifl: {text}; what it held is done again", file=sys.stderr, flush=True)
