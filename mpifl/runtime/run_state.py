"""The state of a run between two steps, and its collection from all ranks for a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.core.client import ClientStates
from mpifl.core.devices import aligned
from mpifl.core.progress import doing
from mpifl.core.types import Server

from .server_step import ServerStep

SAVE, STOP = "save", "stop"  # commands: write a checkpoint; write one and end the run
BOOKS = ("ledger", "computation")  # parts of the state of a server step that are arrays by name
COUNTS = ("visits", "taken", "read", "losses")  # its arrays of numbers of clients; the last one in some runs
FileSums = dict[str, tuple[int, str]]  # file name -> (bytes, SHA-256)


@dataclass
class Saved:
    """The state of a run between two steps; nothing in it depends on the number of ranks.

    Attributes:
        step: number of server steps taken.
        tensors: rows of tables, and rows that visits under way have read.
        arrays: small arrays, of numbers or short strings.
        values: values that JSON can hold.
        kept: entries of the method's state -> the mapping of them that the server gets.
    """

    step: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    kept: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict

    def put_arrays(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays under a prefix."""
        self.arrays |= {f"{prefix}/{name}": np.asarray(value) for name, value in arrays.items()}

    def arrays_under(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays under a prefix."""
        start = f"{prefix}/"
        return {n.removeprefix(start): a for n, a in self.arrays.items() if n.startswith(start)}

    def put_server(self, prefix: str, server: Server, tables: Mapping[str, torch.Tensor]) -> None:
        """Add a server under a prefix.

        Args:
            prefix: distinguishes the server from other servers.
            server: the server; its tables may be spread over ranks.
            tables: its tables with all rows.
        """
        self.tensors |= {f"{prefix}/{name}": rows for name, rows in tables.items()}
        self.put_arrays(f"{prefix}/memo", server.algorithm_state)
        self.arrays[f"{prefix}/assign"] = np.asarray(server.assign)
        self.values[prefix] = {
            "version": server.version,
            "tables": list(tables),
            "memo": list(server.algorithm_state),
        }

    def server_under(self, prefix: str) -> Server:
        """Return the server under a prefix."""
        about = self.values[prefix]
        return Server(
            tables={name: aligned(self.tensors[f"{prefix}/{name}"]) for name in about["tables"]},
            assign=self.arrays[f"{prefix}/assign"],
            algorithm_state=self.kept({n: self.arrays[f"{prefix}/memo/{n}"] for n in about["memo"]}),
            version=about["version"],
        )

    def put_step_state(self, server_step: ServerStep) -> None:
        """Add the state of the server step."""
        state = server_step.state_dict()
        for name in BOOKS:
            self.put_arrays(name, state.pop(name))
        self.arrays |= {name: state.pop(name) for name in COUNTS if name in state}
        self.values |= state

    def load_step_state(self, server_step: ServerStep) -> None:
        """Restore the state of the server step."""
        state: dict[str, Any] = {name: self.arrays_under(name) for name in BOOKS}
        state |= {name: self.arrays[name] for name in COUNTS if name in self.arrays}
        server_step.load_state_dict({**self.values, **state})


class Checkpointer(ABC):
    """Decides when to write a checkpoint, and writes it."""

    @abstractmethod
    def begins(self, server_step: ServerStep, values: Mapping[str, Any]) -> None:
        """Take note of the layout of the state before the first step, or before it is restored; on rank 0.

        Args:
            server_step: takes the steps.
            values: the engine's values; a dataclass stands for a list of its objects.

        Raises:
            UserError: the run goes on from a checkpoint that other code wrote, in another layout.
        """

    def restoring(self) -> AbstractContextManager[None]:
        """Return a context in which a state is restored; on rank 0.

        What goes wrong there with a checkpoint of another version is raised as `UserError`.
        """
        return nullcontext()

    @abstractmethod
    def due(self, step: int) -> str:
        """Return `SAVE`, `STOP` (save, then end) or nothing; on rank 0, between steps."""

    @property
    @abstractmethod
    def clients(self) -> Path:
        """The folder for copies of the files in which clients keep state between visits."""

    @property
    @abstractmethod
    def held(self) -> Mapping[str, tuple[int, str]]:
        """The clients' files in the last checkpoint; on rank 0."""

    @abstractmethod
    def write(self, saved: Saved, files: FileSums) -> None:
        """Write a checkpoint; on rank 0.

        Args:
            saved: the state.
            files: the clients' files that belong to the state.
        """

    def write_failed(self, step: int, error: OSError) -> None:
        """Handle an error that kept some rank from writing the state after a step; on rank 0."""
        raise error

    @abstractmethod
    def stop(self, step: int) -> None:
        """Raise `Stopped`; every rank calls."""


class NoCheckpoints(Checkpointer):
    """Writes no checkpoints."""

    clients, held = Path(), {}

    def begins(self, server_step: ServerStep, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def due(self, step: int) -> str:
        """Return nothing."""
        return ""

    def write(self, saved: Saved, files: FileSums) -> None:
        """Write nothing: it is never due."""

    def stop(self, step: int) -> None:
        """Do nothing: it is never due."""


def save(
    server_step: ServerStep,
    server: Server | None,
    checkpointer: Checkpointer,
    saved: Saved | None,
    alone: bool,
) -> None:
    """Write a checkpoint; every rank calls, or only rank 0 if `alone`.

    Args:
        server_step: server step of this rank.
        server: the server, on rank 0; None elsewhere.
        checkpointer: writes the checkpoint.
        saved: the engine's part of the state, on rank 0; the other parts are added here.
        alone: whether only rank 0 calls; it must be able to read all tables and all files of clients.
    """
    with doing("collecting the state for a checkpoint"):
        files, problem = _keep_client_states(server_step, checkpointer, alone)
    tables: dict[str, torch.Tensor | None] = {}
    if alone:
        assert server is not None
        tables = dict(server.tables)
    else:
        names = sorted(server.tables) if server is not None else None
        names = server_step.transport.bcast(names, "checkpoint")
        tables = {name: server_step.tables.whole(name) for name in names}
    if server is None or saved is None:
        return
    saved.put_server("server", server, {n: t for n, t in tables.items() if t is not None})
    saved.put_step_state(server_step)
    try:
        if problem is not None:
            raise problem
        with doing("writing a checkpoint"):
            checkpointer.write(saved, files)
    except OSError as error:
        checkpointer.write_failed(saved.step, error)


def needs_workers(server_step: ServerStep) -> bool:
    """Return whether clients keep state on nodes whose files rank 0 cannot read."""
    transport = server_step.transport
    here = transport.nodes[transport.rank]
    return server_step.scheduler.pinned and any(node != here for node in transport.nodes)


def client_states(server_step: ServerStep) -> list[tuple[str, int, int]]:
    """Return (kind, client, visit) of all state that clients keep between visits; on rank 0."""
    algorithm = server_step.algorithm
    remembers = server_step.config.remembered is not None
    kinds = ["state"] * algorithm.needs.client_state + ["upload"] * remembers
    kinds += ["optimizer"] * server_step.config.clients.keeps_optimizer
    kinds += server_step.config.filters.remembered
    visited = np.flatnonzero(server_step.visits).tolist() if kinds else []
    return [(kind, k, int(server_step.visits[k])) for kind in kinds for k in visited]


def _keep_client_states(
    server_step: ServerStep, checkpointer: Checkpointer, alone: bool
) -> tuple[FileSums, OSError | None]:
    """Copy the clients' files that the last checkpoint lacks into the checkpoints' folder.

    Return, on rank 0, all files, and the first error if some file was not copied.
    """
    transport, store = server_step.transport, server_step.store
    names_of_ranks, held = None, {}
    if transport.is_server:
        names = {store.name(*which): which[1] for which in client_states(server_step)}
        held = {name: checkpointer.held[name] for name in names if name in checkpointer.held}
        todo = {name: k for name, k in names.items() if name not in held}
        ranks = [0] * len(todo) if alone else server_step.scheduler.reach([*todo.values()])
        names_of_ranks = [
            [n for n, r in zip(todo, ranks, strict=True) if r == rank] for rank in range(transport.size)
        ]
    if alone:
        assert names_of_ranks is not None
        files, problem = _keep(store, names_of_ranks[0], checkpointer.clients)
        return held | files, problem
    mine = transport.scatter(names_of_ranks, "checkpoint")
    parts = transport.gather(_keep(store, mine, checkpointer.clients), "checkpoint") or ()
    files = {name: sums for part in (held, *(files for files, _ in parts)) for name, sums in part.items()}
    return files, next((problem for _, problem in parts if problem is not None), None)


def _keep(store: ClientStates, names: Sequence[str], folder: Path) -> tuple[FileSums, OSError | None]:
    """Copy files to a folder; return their sizes and checksums, and the error if copying failed."""
    try:
        return store.keep(names, folder), None
    except OSError as error:
        return {}, error
