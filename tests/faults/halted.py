"""Runs that are halted after a step, written to disk, read back and gone on with, all in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import toy

from mpifl.aggregation.client_store import ClientStore
from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import Stopped
from mpifl.core.federation import Federation
from mpifl.experiment.build import build_engine, build_server_step
from mpifl.experiment.schema import EvaluationConfig
from mpifl.results import checkpoint_files as checkpoint
from mpifl.runtime.asynchronous import AsynchronousEngine
from mpifl.runtime.run_state import SAVE, STOP, Checkpointer, FileSums, Saved
from mpifl.runtime.server_step import ServerStep
from mpifl.simulation.policies import EveryArrival, Synchronous

RUN = "a1b2"  # identity


class Disk(Checkpointer):
    """Writes a checkpoint after a step and stops, or writes after every step where `at` is None."""

    held: Mapping[str, tuple[int, str]] = {}

    def __init__(self, folder: Path, at: int | None) -> None:
        self.folder, self.at = folder / "checkpoints", at

    def begins(self, server_step: ServerStep, values: Mapping[str, Any]) -> None:
        """Take no note: one version writes and reads."""

    def due(self, step: int) -> str:
        """After `at`, or always."""
        return SAVE if self.at is None else STOP if step == self.at else ""

    @property
    def clients(self) -> Path:
        """The folder of what clients keep."""
        return self.folder / "clients"

    def write(self, saved: Saved, files: FileSums) -> None:
        """Write all that a real run would, but for what the recorder adds."""
        content = checkpoint.Content(
            saved.step, RUN, saved.tensors, saved.arrays, {"engine": saved.values}, clients=files
        )
        checkpoint.write(self.folder, content)
        self.held = files

    def stop(self, step: int) -> None:
        """Stop."""
        raise Stopped(step, str(self.folder.parent))


def read(folder: Path, step: int) -> Saved:
    """Return what was written after a step."""
    content = checkpoint.read(folder / "checkpoints", step, RUN)
    return Saved(step, dict(content.tensors), dict(content.arrays), content.values["engine"])


def run(
    algorithm: Algorithm,
    federation: Federation,
    folder: Path,
    steps: int = 3,
    at: int | None = None,
    saved: Saved | None = None,
    **changes: Any,
) -> toy.Run:
    """Run an engine for some steps; stop and write after step `at` (-1: never); go on from `saved`."""
    policy = EveryArrival() if algorithm.needs.single_upload else Synchronous()
    asked = {"rounds": steps, "policy": policy, "evaluation": EvaluationConfig(every=1)} | changes
    context = toy.context_of(toy.config_of(algorithm, **asked), federation)
    disk = Disk(folder, at)
    token = "again" if saved else "first"
    server_step = build_server_step(context, ClientStore(token, str(folder), disk.clients))
    out = toy.Run()
    out.server_step = server_step
    out.engine = engine = build_engine(context, server_step, out.arrivals.extend, disk)
    try:
        engine.run(out.observe, saved)
    except Stopped:
        assert out.servers[-1].version == at
    return out


def compare(one: toy.Run, first: toy.Run, then: toy.Run) -> None:
    """Raise unless an undisturbed run and the two halves of another are the same."""
    toy.same(toy.state_of(one.server), toy.state_of(then.server))
    toy.same(dict(one.scores), dict(then.scores))
    toy.same(toy.arrays(one.reported), toy.arrays(first.reported | then.reported))
    assert one.arrivals == first.arrivals + then.arrivals
    assert one.times == first.times + then.times
    assert one.server_step.ledger.rows() == then.server_step.ledger.rows()
    assert one.server_step.ledger.moved == then.server_step.ledger.moved
    assert (one.server_step.visits == then.server_step.visits).all()
    toy.same(*(toy.arrays(run.server_step.computation.joules) for run in (one, then)))
    if isinstance(one.engine, AsynchronousEngine) and isinstance(then.engine, AsynchronousEngine):
        mine, theirs = (e.summary() for e in (one.engine, then.engine))
        exact = ("arrivals", "refused", "staleness_mean", "concurrency", "clock_seconds")
        assert {name: mine[name] for name in exact} == {name: theirs[name] for name in exact}
