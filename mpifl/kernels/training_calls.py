"""Bindings of training.c: SGD on networks, visits in one call, and the permutations of NumPy's generators.

Check `bindings.TRAINING_AVAILABLE` first; the last bits differ from PyTorch's.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double

import numpy as np
import torch

from .bindings import LAYER, VISIT, array_pointer, call, pointer

CONV, RELU, MAX_POOL, AVG_POOL, RELU_AVG_POOL, FLATTEN, DENSE, DROPOUT = range(8)  # Layer.kind, as in C
BAD_LABEL, BAD_INDEX, SMALL_WORKSPACE = -1, -2, -3  # errors; as in training.c


Sgd = tuple[float, float, float]  # learning rate, momentum, weight decay


def workspace_size(layers: np.ndarray, batch: int) -> int:
    """Return how many floats of workspace `forward` and `train` need.

    Args:
        layers: `LAYER` [layers].
        batch: samples per step.
    """
    return int(call("workspace_size", array_pointer(layers, "layers", LAYER), len(layers), batch))


def _network(layers: np.ndarray, batch: int) -> tuple[int, int]:
    """Return the address of a network's layers, and their number.

    Raises:
        ValueError: the batch is empty, or `layers` is not a contiguous array of `LAYER`.
    """
    if batch < 1:
        raise ValueError(f"a batch must have at least one sample, got {batch}")
    return array_pointer(layers, "layers", LAYER), len(layers)


def _num_inputs(layers: np.ndarray) -> int:
    """Return how many numbers one sample consists of."""
    first = layers[0]
    return int(first["in_channels"] * first["in_height"] * first["in_width"])


def _check(status: int, batch: int, workspace: torch.Tensor) -> None:
    """Raise the error that a return value of the training kernels stands for, if any."""
    if status == SMALL_WORKSPACE:
        raise ValueError(f"{batch} samples need a larger workspace than {len(workspace)} floats")
    if status in (BAD_LABEL, BAD_INDEX):
        raise IndexError(
            "a label is not a class" if status == BAD_LABEL else "an index in order is not that of a sample"
        )


def forward(
    layers: np.ndarray,
    weights: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    batch: int,
    workspace: torch.Tensor,
) -> torch.Tensor:
    """Write the outputs of a network for `x` to `out` and return it.

    Args:
        layers: `LAYER` [layers].
        weights: float32 [p].
        x: float32 [n, ...].
        out: float32 [n, outputs], contiguous; updated in place.
        batch: number of samples computed at a time.
        workspace: float32, at least `workspace_size` elements.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    network, inputs = _network(layers, batch), len(x) * _num_inputs(layers)
    tensors = (pointer(weights, "weights"), pointer(x, "images", numel=inputs), pointer(out, "outputs"))
    space = pointer(workspace, "workspace"), workspace.numel()
    _check(call("forward", *network, *tensors, len(x), batch, *space), batch, workspace)
    return out


def train(
    layers: np.ndarray,
    weights: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor | None,
    samples: tuple[torch.Tensor, torch.Tensor],
    order: np.ndarray,
    batch: int,
    sgd: Sgd,
    steps_done: int,
    last: bool,
    workspace: torch.Tensor,
    sample_weights: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> float:
    """Take SGD steps on the samples in `order`; return the sum of the mean losses of the batches.

    The loss of a batch counts by its samples, in units of the first batch.

    Args:
        layers: `LAYER` [layers].
        weights: float32 [p]; updated in place.
        momentum: float32 [p]; updated in place.
        gradient: None to take steps; or float32 [p], which receives the gradient of one batch while weights
            and momentum stay unchanged.
        samples: images float32 [N, ...] and labels int64 [N], contiguous.
        order: indices of samples, int64 [n].
        batch: samples per step.
        sgd: learning rate, momentum, weight decay.
        steps_done: number of earlier steps; if it is 0, the momentum is not read.
        last: whether no further steps follow; if so, the last step does not write the momentum.
        workspace: float32, at least `workspace_size` elements.
        sample_weights: factor of each sample's loss, float32 [N], contiguous; None for 1.
        factors: factors of dropout, ordered by batch, then by layer, float32; None drops nothing.

    Raises:
        IndexError: a label is not a class, or an index in `order` is not a sample.
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    network, space = _network(layers, batch), (pointer(workspace, "workspace"), workspace.numel())
    x, y = samples
    p, inputs, loss = weights.numel(), len(y) * _num_inputs(layers), c_double()
    drawn = None
    if factors is not None:
        numel = len(order) * int(layers["out_channels"][layers["kind"] == DROPOUT].sum())
        drawn = pointer(factors, "factors of dropout", numel=numel)
    arguments = (
        pointer(weights, "weights"),
        pointer(momentum, "momentum", numel=p),
        None if gradient is None else pointer(gradient, "a gradient", numel=p),
        pointer(x, "images", numel=inputs),
        pointer(y, "labels", torch.int64),
        None if sample_weights is None else pointer(sample_weights, "weights of samples", numel=len(y)),
        len(y),
        array_pointer(order, "order", np.int64),
        drawn,
        len(order),
        batch,
    )
    status = call("train", *network, *arguments, *sgd, steps_done, last, *space, ctypes.addressof(loss))
    _check(status, batch, workspace)
    return loss.value


def train_visits(
    layers: np.ndarray,
    visits: np.ndarray,
    num_weights: int,
    table: torch.Tensor | None,
    order: np.ndarray,
    batch: int,
    sgd: Sgd,
    momentum: torch.Tensor,
    workspace: torch.Tensor,
    mu: float | None = None,
    change: bool = False,
) -> None:
    """Train visits one after the other, each from its own weights, and write their losses to `visits`.

    The memory that the addresses in `visits` point to is not checked here; `Network.train_visits` sets them.

    Args:
        layers: `LAYER` [layers].
        visits: `VISIT` [visits]; `loss` and `max_abs` are written.
        num_weights: p.
        table: value of each possible byte in each channel, float32 [channels, 256]; None if samples are
            stored as floats.
        order: indices of the samples of all visits, int64 [n].
        batch: samples per step.
        sgd: learning rate, momentum, weight decay.
        momentum: scratch memory, float32 [p].
        workspace: float32, at least `workspace_size` elements.
        mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
        change: whether to write w - start instead of the weights w.

    Raises:
        IndexError: a label is not a class, or an index in `order` is not a sample.
        ValueError: a tensor or array has the wrong type, device, layout or length.
    """
    network, space = _network(layers, batch), (pointer(workspace, "workspace"), workspace.numel())
    arguments = (
        num_weights,
        array_pointer(visits, "visits", VISIT),
        len(visits),
        *_stored(layers, visits, table, order),
        batch,
        *sgd,
        mu is not None,
        mu or 0.0,
        change,
        pointer(momentum, "momentum", numel=num_weights),
    )
    _check(call("train_visits", *network, *arguments, *space), batch, workspace)


def visit_outputs(
    layers: np.ndarray,
    visits: np.ndarray,
    models: np.ndarray,
    table: torch.Tensor | None,
    order: np.ndarray,
    batch: int,
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Write the outputs of several models for the samples of each visit.

    The memory that the addresses in `visits` and `models` point to is not checked here;
    `Network.visit_outputs` sets them.

    Args:
        layers: `LAYER` [layers].
        visits: `VISIT` [visits]; where the samples are stored, and which ones to use.
        models: addresses of weights, int64 [visits, models].
        table: as for `train_visits`.
        order: as for `train_visits`.
        batch: number of samples computed at a time.
        out: float32 [models, samples of all visits, outputs]; updated in place.
        workspace: float32, at least `workspace_size` elements.

    Raises:
        IndexError: a label is not a class, or an index in `order` is not a sample.
        ValueError: a tensor or array has the wrong type, device, layout or length.
    """
    network, space = _network(layers, batch), (pointer(workspace, "workspace"), workspace.numel())
    numel = models.shape[1] * int(visits["count"].sum()) * int(layers[-1]["out_channels"])
    arguments = (
        array_pointer(visits, "visits", VISIT),
        len(visits),
        array_pointer(models, "models", np.int64, len(visits) * models.shape[1]),
        models.shape[1],
        *_stored(layers, visits, table, order),
        batch,
        pointer(out, "outputs", numel=numel),
    )
    _check(call("visit_outputs", *network, *arguments, *space), batch, workspace)


def _stored(
    layers: np.ndarray, visits: np.ndarray, table: torch.Tensor | None, order: np.ndarray
) -> tuple[int | None, int, int]:
    """Return the address of the table of pixels, the number of its channels, and the address of `order`.

    Raises:
        ValueError: a tensor or array has the wrong type, device, layout or length, or samples cannot have so
            many channels.
    """
    channels = 1 if table is None else len(table)
    if len(visits) and int((visits["first"] + visits["count"]).max()) > len(order):
        raise ValueError("visits take more samples than there are in order")
    if _num_inputs(layers) % channels:
        raise ValueError(f"samples of {_num_inputs(layers)} numbers have no {channels} channels")
    numbers = None if table is None else pointer(table, "table", numel=256 * channels)
    return numbers, channels, array_pointer(order, "order", np.int64)


def permutations(entropy: bytes, sizes: np.ndarray) -> np.ndarray:
    """Return permutations of 0 .. size - 1, concatenated, as NumPy's generators draw them.

    Args:
        entropy: 16 bytes for each permutation, little-endian, which seed its NumPy generator,
            `Generator(Philox(SeedSequence(...)))`.
        sizes: int64 [permutations], each below 2^32.

    Raises:
        ValueError: there are not 16 bytes for each permutation, or a size is negative or too large.
    """
    words = np.frombuffer(entropy, "<u4")
    if len(words) != 4 * len(sizes) or ((sizes < 0) | (sizes >= 1 << 32)).any():
        raise ValueError(f"{len(sizes)} permutations of {sizes} samples do not fit {len(entropy)} bytes")
    out = np.empty(int(sizes.sum()), np.int64)
    arguments = array_pointer(words, "entropy", np.uint32), array_pointer(sizes, "sizes", np.int64)
    call("permutations", *arguments, len(sizes), array_pointer(out, "out", np.int64))
    return out


def sgd_step(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, sgd: Sgd, steps_done: int
) -> None:
    """Take one SGD step.

    Args:
        weights: float32 [p]; updated in place.
        momentum: float32 [p]; updated in place.
        gradient: float32 [p].
        sgd: learning rate, momentum, weight decay.
        steps_done: number of earlier steps; if it is 0, the momentum is not read.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    p = gradient.numel()
    vectors = (pointer(v, "a vector", numel=p) for v in (weights, momentum, gradient))
    call("sgd_step", *vectors, p, *sgd, steps_done)
