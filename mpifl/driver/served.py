"""The rows of the server that each client is evaluated with, at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from mpifl.core.parameters import take
from mpifl.core.types import Server
from mpifl.experiment.context import RunContext
from mpifl.runtime.engine import repeated
from mpifl.runtime.server_step import ServerStep

UNKNOWN = -1  # of a client that was not evaluated


class Newcomers(NamedTuple):
    """The evaluated clients that no visit has reached, and the models that they choose.

    Attributes:
        clients: their numbers, int64 ascending.
        models: their models [n, d], on rank 0.
    """

    clients: np.ndarray
    models: torch.Tensor | None


def newcomers(context: RunContext, server_step: ServerStep, server: Server | None) -> Newcomers | None:
    """Return the models of the evaluated clients that were not visited; None if the run need not say rows.

    Every rank calls. The models are gathered again if a rank is lost.

    Raises:
        UserError, CodeFailed: the method failed at a client; on every rank.
    """
    config, known = context.config, context.evaluated_clients

    def gather() -> Newcomers:
        some = None if server is None else known[server_step.taken[known] == 0]
        unseen = context.transport.bcast(some, "end")
        return Newcomers(unseen, server_step.client_models(server, unseen) if len(unseen) else None)

    rows = config.algorithm.evaluates_rows and config.output.model and not server_step.config.filters.narrows
    return repeated(server_step, gather) if rows else None


def served_rows(
    context: RunContext,
    server_step: ServerStep,
    server: Server,
    tables: Mapping[str, torch.Tensor],
    new: Newcomers,
) -> dict[str, np.ndarray]:
    """Return which row of each table each client is evaluated with, int64 [N]; `UNKNOWN` if it was not.

    Args:
        context: context of the run.
        server_step: the server step, after the last step.
        server: the server.
        tables: name -> all rows of a table.
        new: the clients that were not visited.
    """
    clients, layout, holds = context.evaluated_clients, context.problem.layout, context.config.algorithm.holds
    found = {name: np.full(context.problem.num_clients, UNKNOWN, np.int64) for name in tables}
    for k, reads in server_step.serves(server, clients).items():
        for name, rows in found.items():
            read = reads.get(name, ())
            rows[k] = int(read[-1]) if len(read) and not isinstance(read, np.ndarray) else UNKNOWN
    for k, model in zip(new.clients.tolist(), new.models if new.models is not None else (), strict=True):
        for name, rows in found.items():
            own = take(model, layout.part(holds.get(name, "all")))
            if tables[name].shape[1] < len(own):  # holds no part of the model
                continue
            alike = (tables[name][:, : len(own)] == own).all(1)
            rows[k] = int(alike.int().argmax()) if alike.any() else UNKNOWN
    return found
