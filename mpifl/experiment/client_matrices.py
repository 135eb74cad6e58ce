"""Matrices over pairs of clients at the end of a run, for `matrices.npz` (EMD-CFL, figures 14 to 16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from mpifl.algorithms.pacfl import PACFL
from mpifl.clustering.distances import cosine_matrix, squared_distances
from mpifl.comm.transport import RankLost
from mpifl.core.parameters import take
from mpifl.core.rng import key
from mpifl.runtime.recovery import regroup
from mpifl.runtime.server_step import ServerStep
from mpifl.training.client import LocalClient

from .context import RunContext

Matrices = dict[str, np.ndarray]  # name -> [N, N]


def compare_clients(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return the matrices of `evaluation.matrices` on rank 0; every rank calls. Repeated if a rank is lost.

    Args:
        context: context of the run.
        server_step: the server step, after the last step.
    """
    makers: dict[str, Callable[[RunContext, ServerStep], Matrices]] = {
        "parameters": parameters,
        "gradients": gradients,
        "angles": angles,
    }
    found: Matrices = {}
    for name in context.config.evaluation.matrices:
        while True:
            try:
                made = makers[name](context, server_step)
                context.transport.barrier()  # if a rank is lost before this, all ranks repeat the matrix
                found |= made
                break
            except RankLost:
                regroup(server_step)
    return found


def parameters(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return the L2 distances of the clients' last uploads; NaN for clients that never uploaded."""
    products = server_step.client_products
    if products is None:
        return {}
    out = np.full((context.problem.num_clients,) * 2, np.nan)
    out[np.ix_(products.clients, products.clients)] = np.sqrt(squared_distances(products.parameters))
    return {"parameters": out}


def gradients(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return the cosines of the gradients of the mean training loss at the common initial model."""
    transport, layout = context.transport, context.problem.layout
    mine = []
    for k in _mine(context):
        client = _client(context, k)
        mine.append(take(client.gradient(client.init), layout.part("parameters")).cpu())
    owners = _owners(context)
    counts = tuple(int(c) for c in np.bincount(owners, minlength=transport.size))
    known = owners if transport.is_server else None
    gram = server_step.mixer.gram(mine, counts, known, layout.num_parameters)
    return {} if gram is None else {"gradients": cosine_matrix(gram)}


def angles(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return PACFL's angles and the smallest principal angles between clients' data, in degrees.

    Signatures are those of PACFL at the clients' first visit, with the run's options if the method is PACFL.
    """
    method = context.config.algorithm
    method = method if isinstance(method, PACFL) else PACFL()
    mine = {k: method.fingerprint(_client(context, k), {}, key(0)).notes["basis"] for k in _mine(context)}
    parts = context.transport.gather(mine, "end")
    if parts is None:
        return {}
    everyone = {k: basis for part in parts for k, basis in part.items()}
    bases = np.stack([everyone[k] for k in range(context.problem.num_clients)])
    kinds = {"angles": method, "smallest_angles": replace(method, angle="smallest")}
    return {name: way.angles(bases) for name, way in kinds.items()}


def _owners(context: RunContext) -> np.ndarray:
    """Return the rank [N] that computes each client's part: the workers in turn."""
    workers = np.array(context.transport.workers)
    return np.asarray(workers[np.arange(context.problem.num_clients) % len(workers)])


def _mine(context: RunContext) -> list[int]:
    """Return the clients whose part this rank computes, ascending."""
    return [int(k) for k in np.flatnonzero(_owners(context) == context.transport.rank)]


def _client(context: RunContext, k: int) -> LocalClient:
    return LocalClient(k, context.federation, context.learner, context.local_of(k), home=torch.device("cpu"))
