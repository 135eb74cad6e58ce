"""Matrices over pairs of clients at the end of a run, for `matrices.npz` (EMD-CFL, figures 14 to 16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from mpifl.algorithms.pacfl import PACFL
from mpifl.clustering.distances import cosine_matrix, squared_distances
from mpifl.comm.transport import RankLost, Transport, on_all
from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import CodeFailed, UserError, code_failed, require
from mpifl.core.federation import CLASSES
from mpifl.core.parameters import take
from mpifl.core.rng import key
from mpifl.runtime.engine import repeated
from mpifl.runtime.server_step import ServerStep
from mpifl.supervision.logging import warn_once
from mpifl.training.client import LocalClient

from .context import RunContext

Matrices = dict[str, np.ndarray]  # name -> [N, N]
Made = TypeVar("Made")
KEY = "evaluation.matrices"


def check_matrices(context: RunContext) -> None:
    """Compute the part of client 0 before training, so that a run does not fail after it; on rank 0.

    Raises:
        UserError: PACFL cannot compare this data.
        CodeFailed: the part of client 0 raised an exception.
    """
    matrices, info = context.config.evaluation.matrices, context.federation.info
    if "angles" in matrices:
        needs, leave = pacfl_of(context.config.algorithm).needs, "leave angles out"
        remedy = (
            f"angles compare the samples of each class, but labels of this source are {info.labels}; {leave}"
        )
        require(info.labels == CLASSES, KEY, list(matrices), remedy)
        known = " or ".join(needs.inputs)
        remedy = f"angles compare {known}, and samples of this source are {info.inputs}; {leave}"
        require(not needs.inputs or info.inputs in needs.inputs, KEY, list(matrices), remedy)
    for name in matrices:
        if name in PARTS:
            _guarded(lambda name=name: PARTS[name](context, 0))  # type: ignore[misc]


def compare_clients(
    context: RunContext, server_step: ServerStep
) -> tuple[Matrices, UserError | CodeFailed | None]:
    """Return the matrices of `evaluation.matrices` on rank 0, and why one is missing, on every rank.

    Every rank calls. Repeated if a rank is lost.

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
    fault: UserError | CodeFailed | None = None
    for name in context.config.evaluation.matrices:
        try:
            found |= repeated(server_step, partial(makers[name], context, server_step))
        except (UserError, CodeFailed) as error:  # on every rank
            fault = fault or error
    return found, fault


def parameters(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return the L2 distances of the clients' last uploads; NaN for clients that never uploaded."""
    products = server_step.client_products
    if products is None:
        if context.transport.is_server:  # which steps are the last was not known before
            what = "a callback ended the run after a round whose uploads were not compared; use rules of stop"
            warn_once(f"evaluation.matrices: parameters is left out: {what}")
        return {}
    out = np.full((context.problem.num_clients,) * 2, np.nan)
    out[np.ix_(products.clients, products.clients)] = np.sqrt(squared_distances(products.parameters))
    return {"parameters": out}


def gradients(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return the cosines of the gradients of the mean training loss at the common initial model."""
    transport, layout = context.transport, context.problem.layout
    mine = _on_all(transport, lambda: [gradient_of(context, k) for k in _mine(context)])
    owners = _owners(context)
    counts = tuple(int(c) for c in np.bincount(owners, minlength=transport.size))
    known = owners if transport.is_server else None
    gram = server_step.mixer.gram(mine, counts, known, layout.num_parameters)
    return {} if gram is None else {"gradients": cosine_matrix(gram)}


def gradient_of(context: RunContext, k: int) -> torch.Tensor:
    """Return the gradient [number of parameters] of client k's mean training loss at its initial model."""
    client = _client(context, k)
    return take(client.gradient(client.init), context.problem.layout.part("parameters")).cpu()


def angles(context: RunContext, server_step: ServerStep) -> Matrices:
    """Return PACFL's angles and the smallest principal angles between clients' data, in degrees.

    Signatures are those of PACFL at the clients' first visit, with the run's options if the method is PACFL.
    """
    mine = _on_all(context.transport, lambda: {k: basis_of(context, k) for k in _mine(context)})
    parts = context.transport.gather(mine, "end")

    def compared() -> Matrices:
        everyone = {k: basis for part in parts or () for k, basis in part.items()}
        bases = np.stack([everyone[k] for k in range(context.problem.num_clients)])
        method = pacfl_of(context.config.algorithm)
        kinds = {"angles": method, "smallest_angles": replace(method, angle="smallest")}
        return {name: way.angles(bases) for name, way in kinds.items()}

    return _on_all(context.transport, lambda: {} if parts is None else compared())


def basis_of(context: RunContext, k: int) -> np.ndarray:
    """Return PACFL's signature [D, columns] of client k's data."""
    found = pacfl_of(context.config.algorithm).fingerprint(_client(context, k), {}, key(0)).notes["basis"]
    return np.asarray(found)


def pacfl_of(algorithm: Algorithm) -> PACFL:
    """Return the method that compares clients' data: the run's if it is PACFL, else PACFL's defaults."""
    return algorithm if isinstance(algorithm, PACFL) else PACFL()


PARTS: dict[str, Callable[[RunContext, int], object]] = {"gradients": gradient_of, "angles": basis_of}


def _guarded(work: Callable[[], Made]) -> Made:
    """Return the result of `work`, its exceptions as those of `evaluation.matrices`."""
    try:
        return work()
    except (RankLost, CodeFailed):
        raise
    except UserError as error:
        raise error.under(KEY) from error
    except Exception as error:
        raise code_failed(KEY, error) from error


def _on_all(transport: Transport, work: Callable[[], Made]) -> Made:
    """Return the result of `work` on this rank, after all ranks have theirs; every rank calls."""
    return on_all(transport, partial(_guarded, work))


def _owners(context: RunContext) -> np.ndarray:
    """Return the rank [N] that computes each client's part: the workers in turn."""
    workers = np.array(context.transport.workers)
    return np.asarray(workers[np.arange(context.problem.num_clients) % len(workers)])


def _mine(context: RunContext) -> list[int]:
    """Return the clients whose part this rank computes, ascending."""
    return [int(k) for k in np.flatnonzero(_owners(context) == context.transport.rank)]


def _client(context: RunContext, k: int) -> LocalClient:
    return LocalClient(k, context.federation, context.learner, context.local_of(k), home=torch.device("cpu"))
