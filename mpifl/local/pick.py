"""How many clients to stack, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from mpifl.core.federation import Split
from mpifl.core.rng import key

from .sgd import Learner, LocalConfig
from .stacked import Request, stackable, train_all

SIZES = (4, 16, 64, 256)
GAIN = 1.1  # a stack must be so many times faster than one client after the other


def pick_stack(learner: Learner, split: Split, config: LocalConfig, most: int) -> int:
    """Return the fastest size of a stack for clients like `split`; 1 where one after the other is as fast.

    Args:
        most: no larger than this.
    """
    if not stackable(learner.flat.module) or most < 2:
        return 1
    start, address = learner.init, key(0, "pick")
    single = _seconds(lambda: learner.sgd(start, split, config, address), learner)
    best, size = single / GAIN, 1
    for c in sorted({min(c, most) for c in SIZES}):
        requests = [Request(start, split, config, address.of(i), 1) for i in range(c)]
        try:
            each = _seconds(lambda r=requests: train_all(learner, r), learner) / c  # type: ignore[misc]
        except torch.OutOfMemoryError:
            break
        if each < best:
            best, size = each, c
    return size


def _seconds(work: Callable[[], object], learner: Learner) -> float:
    """Return the least time of three, after one to warm up."""
    work()
    found = []
    for _ in range(3):
        start = perf_counter()
        work()
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)
        found.append(perf_counter() - start)
    return min(found)
