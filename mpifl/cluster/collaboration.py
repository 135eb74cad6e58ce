"""Collaboration graphs: how much of whose model enters mine. Shared by pFedGraph and FedSaC."""

from __future__ import annotations

import numpy as np
import torch

from mpifl.core.mixing import Plan, own_rows
from mpifl.core.types import Notes, Server, World

from .distances import cosine_matrix


def own_models(world: World, directions: bool) -> Server:
    """Return a server with one row for each client, all alike, and a graph of clients that are alone.

    Args:
        directions: add table `direction`, zeros, for the mixtures of the models' directions.
    """
    num_clients = world.num_clients
    tables = {"model": world.init(0)[None].expand(num_clients, -1)}
    if directions:
        tables["direction"] = torch.zeros(num_clients, world.layout.num_parameters)
    return Server(tables, np.arange(num_clients), {"graph": np.eye(num_clients)})


def dissimilarity(gram: np.ndarray, clip: float | None = -0.9) -> np.ndarray:
    """Return d_ij = -cos(dw_i, dw_j) [m, m] from the products of updates; below `clip` it is -1.

    pFedGraph and FedSaC, code; None: no clipping.
    """
    d = -cosine_matrix(gram)
    return d if clip is None else np.where(d < clip, -1.0, d)


def graph_plan(server: Server, notes: Notes, X: np.ndarray) -> Plan:
    """Return the plan that mixes all tables by the rows of the graph `X` [m, m] over those who take part."""
    graph = server.memo["graph"].copy()
    graph[notes.client] = 0.0
    graph[np.ix_(notes.client, notes.client)] = X
    mixings = [own_rows(X, notes, len(server.assign), into=name, of=name) for name in server.tables]
    return Plan(mixings, memo={"graph": graph})
