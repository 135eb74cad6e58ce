"""What a run must remember to go on as if nothing had happened, and how the parts of an engine become it.

When the state of a run is written, and how its parts come together; every rank walks `save`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.core.errors import require
from mpifl.core.types import Server

from .hook_errors import Dropped
from .server_step import ServerStep


@dataclass
class Saved:
    """The state of a run between two steps; nothing in it depends on the number of ranks.

    Attributes:
        step: server steps taken.
        tensors: rows of tables, and rows that visits under way have read.
        arrays: small arrays, of numbers or short strings.
        values: what JSON can hold.
        states: (kind, client, visit) of what clients keep between visits; lives in files of its own.
    """

    step: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    states: tuple[tuple[str, int, int], ...] = ()

    def put_arrays(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays under a prefix."""
        self.arrays |= {f"{prefix}/{name}": np.asarray(value) for name, value in arrays.items()}

    def take_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays under a prefix."""
        start = f"{prefix}/"
        return {n.removeprefix(start): a for n, a in self.arrays.items() if n.startswith(start)}

    def put_server(self, prefix: str, server: Server, tables: Mapping[str, torch.Tensor]) -> None:
        """Add a server, its rows being `tables`."""
        self.tensors |= {f"{prefix}/{name}": rows for name, rows in tables.items()}
        self.put_arrays(f"{prefix}/memo", server.algorithm_state)
        self.arrays[f"{prefix}/assign"] = np.asarray(server.assign)
        self.values[prefix] = {
            "version": server.version,
            "tables": list(tables),
            "memo": list(server.algorithm_state),
        }

    def take_server(self, prefix: str) -> Server:
        """Return the server under a prefix."""
        about = self.values[prefix]
        return Server(
            tables={name: self.tensors[f"{prefix}/{name}"] for name in about["tables"]},
            assign=self.arrays[f"{prefix}/assign"],
            algorithm_state={name: self.arrays[f"{prefix}/memo/{name}"] for name in about["memo"]},
            version=about["version"],
        )


def states_of(server_step: ServerStep) -> tuple[tuple[str, int, int], ...]:
    """Return (kind, client, visit) of what clients keep now; on rank 0."""
    needs = server_step.algorithm.needs
    kinds = ["state"] * needs.state + ["upload"] * (needs.memory is not None)
    kinds += ["error"] * server_step.ledger.payload.error_feedback
    met = np.flatnonzero(server_step.visits).tolist() if kinds else []
    return tuple((kind, k, int(server_step.visits[k])) for kind in kinds for k in met)


def put_stepper(saved: Saved, server_step: ServerStep) -> None:
    """Add what the server_step remembers between steps."""
    saved.put_arrays("ledger", server_step.ledger.state())
    saved.arrays["visits"] = server_step.visits
    saved.values["dropped"] = [asdict(d) for d in server_step.dropped]
    saved.states = states_of(server_step)


def take_stepper(saved: Saved, server_step: ServerStep) -> None:
    """Give the server_step back what it remembered."""
    server_step.ledger.restore(saved.take_arrays("ledger"))
    server_step.visits = saved.arrays["visits"].copy()
    server_step.dropped = [Dropped(**d) for d in saved.values["dropped"]]


SAVE, STOP = "save", "stop"
FileSums = dict[str, tuple[int, str]]  # file name -> (bytes, SHA-256)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of a run is written so that `mpifl resume` can go on from it. Whatever is set here,
    SIGUSR1 writes and goes on; SIGTERM, SIGINT and SIGUSR2 finish the step, write, and end with exit code 75.
    Unless both are 0, the first one is written after the first step.

    Attributes:
        every: server steps between checkpoints; 0 for none by steps.
        minutes: real minutes between checkpoints; 0 for none by time.
        keep: how many are kept.
    """

    every: int = 0
    minutes: float = 10.0
    keep: int = 2

    def __post_init__(self) -> None:
        require(self.every >= 0, "every", self.every, "take 0 (none by steps) or more steps")
        require(self.minutes >= 0, "minutes", self.minutes, "take 0 (none by time) or more minutes")
        require(self.keep >= 2, "keep", self.keep, "take 2 or more: one may turn out damaged")


class Checkpointer(ABC):
    """Decides when to write, and writes."""

    @abstractmethod
    def due(self, step: int) -> str:
        """Return `SAVE`, `STOP` (save, then end) or nothing; on rank 0, between steps."""

    @property
    @abstractmethod
    def clients(self) -> Path:
        """The folder of what clients keep between visits."""

    @property
    @abstractmethod
    def held(self) -> Mapping[str, tuple[int, str]]:
        """The files of clients that the last checkpoint holds; on rank 0."""

    @abstractmethod
    def write(self, saved: Saved, files: FileSums) -> None:
        """Write a checkpoint; `files` are those of `saved.states`. On rank 0."""

    def fail(self, step: int, error: OSError) -> None:
        """The state after a step could not be written, here or on another rank; on rank 0."""
        raise error

    @abstractmethod
    def stop(self, step: int) -> None:
        """Raise `Stopped`; every rank."""


class Never(Checkpointer):
    """Writes nothing."""

    clients, held = Path(), {}

    def due(self, step: int) -> str:
        """Never."""
        return ""

    def write(self, saved: Saved, files: FileSums) -> None:
        """Nothing is ever due."""

    def stop(self, step: int) -> None:
        """Nobody asks."""


def save(
    server_step: ServerStep,
    server: Server | None,
    checkpointer: Checkpointer,
    saved: Saved | None,
    alone: bool,
) -> None:
    """Write a checkpoint. Every rank calls, unless rank 0 does it `alone`: where all is at hand.

    Args:
        saved: what the engine adds, on rank 0.
    """
    tables: dict[str, torch.Tensor | None] = {}
    files, problem = _keep_states(server_step, checkpointer, alone)
    if alone:
        assert server is not None
        tables = dict(server.tables)
    else:
        names = server_step.transport.bcast(
            sorted(server.tables) if server is not None else None, "checkpoint"
        )
        tables = {name: server_step.tables.whole(name) for name in names}
    if server is None or saved is None:
        return
    saved.put_server("server", server, {n: t for n, t in tables.items() if t is not None})
    put_stepper(saved, server_step)
    try:
        if problem is not None:
            raise problem
        checkpointer.write(saved, files)
    except OSError as error:
        checkpointer.fail(saved.step, error)


def needs_workers(server_step: ServerStep) -> bool:
    """Return whether other ranks hold what rank 0 cannot reach: states of clients on other nodes."""
    transport = server_step.transport
    here = transport.nodes[transport.rank]
    return server_step.scheduler.pinned and any(node != here for node in transport.nodes)


def _keep_states(
    server_step: ServerStep, checkpointer: Checkpointer, alone: bool
) -> tuple[FileSums, OSError | None]:
    """Bring what clients keep into the checkpoints' folder, each file once; return on rank 0 all files, and
    why one could not be written.
    """
    transport, store = server_step.transport, server_step.store
    task_batches, held = None, {}
    if transport.is_server:
        names = {store.name(*which): which[1] for which in states_of(server_step)}
        held = {name: checkpointer.held[name] for name in names if name in checkpointer.held}
        todo = {name: k for name, k in names.items() if name not in held}
        ranks = [0] * len(todo) if alone else server_step.scheduler.reach([*todo.values()])
        task_batches = [
            [n for n, r in zip(todo, ranks, strict=True) if r == rank] for rank in range(transport.size)
        ]
    if alone:
        assert task_batches is not None
        files, problem = _kept(store, task_batches[0], checkpointer.clients)
        return held | files, problem
    mine = transport.scatter(task_batches, "checkpoint")
    parts = transport.gather(_kept(store, mine, checkpointer.clients), "checkpoint") or ()
    files = {name: sums for part in (held, *(files for files, _ in parts)) for name, sums in part.items()}
    return files, next((problem for _, problem in parts if problem is not None), None)


def _kept(store: ClientStore, names: Sequence[str], folder: Path) -> tuple[FileSums, OSError | None]:
    """Return the files that were brought to a folder, and why one could not be."""
    try:
        return store.keep(names, folder), None
    except OSError as error:
        return {}, error
