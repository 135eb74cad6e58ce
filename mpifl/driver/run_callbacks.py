"""Calls the callbacks of a run, and ends the run on every rank if one of them raises an exception."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mpifl.comm.transport import RankLost, on_server
from mpifl.core.errors import Stopped
from mpifl.experiment import loader
from mpifl.experiment.context import RunContext
from mpifl.experiment.schema import Config
from mpifl.results.callbacks import Callbacks, made
from mpifl.results.reader import load
from mpifl.results.run_events import Evaluation, Round, RunInfo, frozen
from mpifl.runtime.engine import Record
from mpifl.runtime.run_state import Saved
from mpifl.supervision.signals import Signals

Clients = Sequence[Mapping[str, Any]]  # rows of clients.csv
Bytes = Mapping[str, int]  # direction -> bytes
OPEN = ".callbacks.open"  # this file is in the run folder until `on_end` has been called
COMPLETE = "the run itself is complete"


class RunCallbacks:
    """The callbacks of a run, as a context manager around it; every rank calls.

    An exception in a callback requests a stop, as a signal does: the state is written after the step, and the
    exception is raised on every rank.

    Args:
        context: context of the run.
        given: callbacks in addition to those of `output.callbacks`.
        folder: the run folder.
        signals: object through which a stop is requested.
    """

    def __init__(self, context: RunContext, given: Sequence[Any], folder: Path, signals: Signals) -> None:
        self.context, self.given, self.folder, self.signals = context, given, folder, signals
        self.any = bool(given or context.config.output.callbacks)
        self.callbacks = Callbacks(())
        self.info: RunInfo | None = None

    def start(self, run_id: str, resumed: bool, saved: Saved | None) -> None:
        """Create the callbacks and call their `on_start`.

        Args:
            run_id: identifier of the run, on rank 0.
            resumed: whether the run is resumed.
            saved: the state from which it resumes, on rank 0.
        """
        if not self.any:
            return
        config, problem = self.context.config, self.context.problem
        tree = loader.to_tree(config)

        def tell() -> None:
            self.callbacks = made(config.output.callbacks, self.given)
            self.info = RunInfo(
                id=run_id,
                name=config.name,
                folder=self.folder,
                config=frozen(tree),
                method=tree["algorithm"]["name"],
                rounds=config.rounds,
                num_clients=problem.num_clients,
                num_parameters=problem.layout.size,
                ranks=self.context.transport.size,
                step=0 if saved is None else saved.step,
                resumed=resumed,
                restored=saved is not None,
            )
            (self.folder / OPEN).touch()
            self.callbacks.call("on_start", self.info, "before the first step")
            self.callbacks.check("nothing was trained")

        on_server(self.context.transport, tell, everywhere=False)

    def step(self, record: Record, row: Mapping[str, Any] | None, clients: Clients, moved: Bytes) -> None:
        """Call the callbacks' `on_round` and `on_evaluation` after a step; on rank 0.

        Args:
            record: record of the step.
            row: row of `metrics.csv`; None if the step was not evaluated.
            clients: the scores of each evaluated client.
            moved: bytes that the federation has sent so far, up and down.
        """
        if self.info is None:
            return
        now = self.info, record.step, record.seconds, record.virtual_seconds, moved["up"], moved["down"]
        when = f"after step {record.step}"
        if record.step and not record.again:
            done = Round(*now, tuple(record.cohort.tolist()))
            self.callbacks.call("on_round", done, when)
        if row is not None:
            scores = {int(c["client"]): {n: v for n, v in c.items() if n != "client"} for c in clients}
            found = Evaluation(*now, frozen(row), frozen(scores))
            self.callbacks.call("on_evaluation", found, when)
        if self.callbacks.failure is not None:
            self.signals.stop = True

    def end(self) -> None:
        """Call the callbacks' `on_end`; the run folder is complete."""
        complete = f"{COMPLETE}: {self.folder}"

        def tell() -> None:
            self.callbacks.call("on_end", load(self.folder), "after the last step")
            (self.folder / OPEN).unlink(missing_ok=True)
            self.callbacks.check(complete)

        if not self.any:
            return
        try:
            on_server(self.context.transport, tell, everywhere=False, purpose="end")
        except RankLost:  # the ranks have no common work left
            if self.context.transport.is_server:
                self.callbacks.check(complete)

    def __enter__(self) -> RunCallbacks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.any or error is None:
            return
        self.callbacks.stop(str(error) or type(error).__name__)
        if self.context.transport.is_server:
            (self.folder / OPEN).unlink(missing_ok=True)
        if isinstance(error, Stopped):  # raised on every rank
            state = str(error)
            on_server(
                self.context.transport, lambda: self.callbacks.check(state), everywhere=False, purpose="end"
            )


def end_late(folder: Path, given: Sequence[Any] = ()) -> None:
    """Call `on_end` for a complete run that was killed before its callbacks were called; on rank 0.

    Args:
        folder: the run folder.
        given: callbacks in addition to those of `output.callbacks`.
    """
    if not (folder / OPEN).is_file():
        return
    run, config = load(folder), loader.from_tree(Config, loader.read(str(folder / "config.yaml")))
    callbacks = made(config.output.callbacks, given)
    info = RunInfo(
        id=json.loads((folder / "run.json").read_text())["id"],
        name=config.name,
        folder=folder,
        config=frozen(loader.to_tree(config)),
        method=run.summary["algorithm"],
        rounds=run.summary["rounds"],
        num_clients=run.summary["clients"],
        num_parameters=run.summary["model_parameters"],
        ranks=run.summary["ranks"],
        step=run.summary["rounds"],
        resumed=True,
        restored=True,
    )
    callbacks.call("on_start", info, "after the last step")
    callbacks.call("on_end", run, "after the last step")
    if callbacks.failure is not None:
        callbacks.stop(f"{COMPLETE}: {folder}")
    (folder / OPEN).unlink(missing_ok=True)
    callbacks.check(f"{COMPLETE}: {folder}")
