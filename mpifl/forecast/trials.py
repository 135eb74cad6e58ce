"""What a run computes after its first step or at its end, tried before training on what is there."""

from __future__ import annotations

import torch

from mpifl.core.errors import is_ours
from mpifl.core.torch_state import kept
from mpifl.experiment.client_matrices import check_matrices
from mpifl.experiment.context import RunContext
from mpifl.experiment.schema import Config
from mpifl.simulation.clock import Replay
from mpifl.training.client import LocalClient
from mpifl.training.own_metrics import metrics_of

from .time import check_replay
from .traffic import check_uploads, compares_uploads


def has_trials(config: Config) -> bool:
    """Return whether `try_outcomes` has anything to try."""
    evaluated = config.evaluation.matrices or uses_own_scores(config)
    return bool(compares_uploads(config) or evaluated or isinstance(config.clock, Replay))


def uses_own_scores(config: Config) -> bool:
    """Return whether code of the user takes part in the evaluation of a client."""
    return bool(config.evaluation.metrics) or not is_ours(config.task)


def try_outcomes(context: RunContext, resumed: bool = False) -> None:
    """Try what would fail after training only; on rank 0.

    Args:
        context: context of the run.
        resumed: whether the run has trained before: it then goes on, and writes what it has.

    Raises:
        UserError: uploads cannot be compared, or data or arrivals are not such as the configuration needs.
        MethodError, CodeFailed: a metric or a matrix of client 0 failed.
    """
    with kept():
        check_uploads(context)
        if not resumed:
            check_matrices(context)
            check_metrics(context)
            check_replay(context)


def check_metrics(context: RunContext) -> None:
    """Evaluate the initial model on one client if the user's code takes part in it.

    Raises:
        MethodError, CodeFailed: a metric, or the task, of the user failed.
    """
    config, sizes = context.config, context.federation.sizes
    if not uses_own_scores(config):
        return
    k = next((int(k) for k in context.evaluated_clients if sizes[k, 2]), int(context.evaluated_clients[0]))
    metrics = metrics_of(config.evaluation.metrics, config.local.trainer)
    where = torch.device("cpu")
    client = LocalClient(
        k, context.federation, context.learner, context.local_of(k), home=where, metrics=metrics
    )
    client.evaluate(context.problem.init(0))
