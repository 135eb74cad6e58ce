"""Client-side steps of several methods: choose a model, train and evaluate a mixture, fine-tune.

Also the changes of whole state dicts, which the EMD-CFL repository uses as updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mpifl.core.client import Client, Trained, WeightedLoss
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.metric import least_finite, warn_of_no_finite
from mpifl.core.parameters import Layout, take
from mpifl.core.rng import Key, key
from mpifl.core.types import Vector


def counter_weight(layout: Layout) -> float | None:
    """Return sqrt(L) for a model with L layers that keep running statistics; None if there is no such layer.

    Each of these layers counts its batches in an integer, `num_batches_tracked`, which is not part of a flat
    vector. The L counters of a state dict are equal, so in products and norms of state dicts one coordinate
    of sqrt(L) times the count replaces them.
    """
    layers = sum(name.rpartition(".")[2] == "running_mean" for name in layout.names)
    return math.sqrt(layers) if layers else None


def state_change(client: Client, start: Vector, trained: Trained) -> Vector:
    """Return the change of a client's state dict, which the EMD-CFL repository uses as the update.

    It covers parameters, running statistics and the batch counters, which grow by the steps taken.

    Args:
        client: the client.
        start: the model [d] that it trained from.
        trained: the outcome.

    Returns:
        [d + 1], or [d] for a model without running statistics. Inner products of these vectors equal those of
        the changes of the state dicts.
    """
    change, weight = trained.vector - start, counter_weight(client.layout)
    return change if weight is None else torch.cat([change, change.new_tensor([weight * trained.steps])])


def change_on_arrival(change: Vector, sent: Vector, arrived: Vector) -> Vector:
    """Return the change [p], [d] or [d + 1] of a model that was sent as one vector and arrives as another."""
    change, d = change.clone(), min(len(change), len(sent))
    change[:d] += (arrived - sent)[:d]
    return change


def best_model(
    client: Client, models: Sequence[Vector] | torch.Tensor, split: Split | None = None, batch: int = 0
) -> int:
    """Return argmin_j F(w_j), the first of equals, never one with F NaN. IFCA, HypCluster and FeSEM.

    Args:
        client: the client.
        models: [K, d].
        split: data on which F is computed; None for the training data.
        batch: size of consecutive batches; F is the mean of their mean losses. 0: F is the mean over samples.
    """
    if not batch:
        return int(least_finite([client.loss(w, split) for w in models]))
    losses = (client.losses(w, split).double().split(batch) for w in models)
    return int(least_finite([float(torch.stack([part.mean() for part in parts]).mean()) for parts in losses]))


def fitting_model(
    client: Client, models: Sequence[Vector] | torch.Tensor, split: Split | None = None
) -> Vector:
    """Return the model [d] to evaluate a client with: the only one it received, or the `best_model`."""
    return models[best_model(client, models, split) if len(models) > 1 else 0]


def component_losses(client: Client, models: torch.Tensor, split: Split | None = None) -> torch.Tensor:
    """Return the loss [K, n] of each model [K, d] on each sample of `split` (default: training).

    A loss that is NaN is infinite here: no other model explains a sample worse.
    """
    losses = torch.stack([client.losses(w, split) for w in models])
    return losses.masked_fill(losses.isnan(), torch.inf)


def counts_of_best(losses: torch.Tensor) -> torch.Tensor:
    """Return how many samples each model explains best, float64 [K], from losses [K, n]. FedSoft.

    A sample that no model explains, because all losses are infinite, counts equally for all of them.
    """
    losses = losses.cpu()
    known = torch.isfinite(losses).any(0)
    counts = torch.bincount(losses[:, known].argmin(0), minlength=len(losses)).double()
    if bool(known.all()):
        return counts
    warn_of_no_finite("counts those samples equally for all")
    return counts + float((~known).sum()) / len(losses)


def responsibilities(scores: torch.Tensor) -> torch.Tensor:
    """Return the share [K, n] of each component in each sample, the softmax of `scores` [K, n]. FedEM, FedRC.

    Shares are equal where all scores are minus infinity: the losses of all components are infinite there.
    """
    return torch.softmax(scores.masked_fill(scores.isneginf().all(0), 0.0), 0)


def train_components(
    client: Client, models: torch.Tensor, q: torch.Tensor, key: Key
) -> tuple[torch.Tensor, float]:
    """Train each model [K, d] on the loss (1/B) sum_s q[k, s] l(theta_k; s), all on the same batches.

    Args:
        client: the client.
        models: components [K, d].
        q: weight [K, n] of each training sample in each component.
        key: random key of the order of the batches.

    Returns:
        The trained models [K, d] and the sum of their mean losses.

    Raises:
        UserError: the task's loss is not a mean over samples.
    """
    remedy = "this method weighs the losses of samples, and the loss of this task is not their mean"
    require(client.task.has_total, "task.name", client.task.name, remedy)
    losses = [WeightedLoss(q_k, client.task) for q_k in q]
    trained = [client.sgd(w, key, loss=loss) for w, loss in zip(models, losses, strict=True)]
    return torch.stack([t.vector for t in trained]), sum(t.loss for t in trained)


def mean_loss(batches: Sequence[tuple[float, int]]) -> float:
    """Return the mean loss over the samples of some batches, (mean loss, samples); NaN without any."""
    size = sum(n for _, n in batches)
    return sum(loss * n for loss, n in batches) / size if size else math.nan


def evaluate_mixture(client: Client, models: torch.Tensor, pi: Vector, split: Split) -> dict[str, float]:
    """Return metrics and loss of the weighted predictions sum_k pi_k theta_k(x) on `split`; NaN if empty.

    For classes, predictions are the probabilities softmax(theta_k(x)), and the user's metrics get the
    logarithms of their weighted means as logits (`Task.mix`).
    """
    if not len(split):
        return client.evaluate(models[0], split)
    shares = pi.cpu()
    taking_part = [k for k, share in enumerate(shares.tolist()) if share] or [0]  # a share of 0 drops NaN
    task, outputs = client.task, [client.logits(models[k], split.x) for k in taking_part]
    y = split.y.to(outputs[0].device)
    mixed = task.mix(outputs, shares[taking_part])
    return {**task.evaluate_mixed(mixed, y), **client.measure(mixed.float(), y)}


def evaluate_tuned(
    client: Client, vector: Vector, split: Split, epochs: int, part: str = "all", *, sizes: bool = False
) -> dict[str, float]:
    """Fine-tune a model on the training data, then evaluate it.

    The order of the batches depends on client and visit, not on the training seed.

    Args:
        client: the client.
        vector: the model [d].
        split: data to evaluate on.
        epochs: passes over the training data.
        part: the part of the vector that is tuned.
        sizes: whether to measure how far each module of the model moves.

    Returns:
        The metrics and `loss` after tuning (`accuracy`), and those before tuning (`accuracy_initial`). With
        `sizes` also the L2 norm of each module's change (`tuned_size_conv1`).
    """
    moving = None if part == "all" else client.layout.part(part)
    address = key(0, "tune", client.id, client.visit)
    tuned = client.sgd(vector, address, part=moving, epochs=epochs).vector
    before = {f"{name}_initial": value for name, value in client.evaluate(vector, split).items()}
    modules = client.layout.module_parts() if sizes else {}
    moved = {f"tuned_size_{name}": float(take(tuned - vector, p).norm()) for name, p in modules.items()}
    return {**client.evaluate(tuned, split), **before, **moved}
