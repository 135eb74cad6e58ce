"""How much memory each rank of a run will have resident at its peak."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from .core.memory import peak_bytes
from .core.rng import key
from .core.types import Report, Server
from .engine.ledger import count_numbers

if TYPE_CHECKING:
    from .experiment import Bench

FLOAT_BYTES = 4
MPI_BYTES = 25 << 20  # of the library and its buffers; measured with Open MPI 5 and a handful of ranks
CLIENT_BYTES = 80  # a registered client's counters and indices, at every rank


def footprint(bench: Bench, server: Server, report: Report, ranks: int) -> tuple[int, int]:
    """Return the peak resident bytes of rank 0 and of the busiest worker.

    What Python, PyTorch, the model and its buffers take is measured here and now, one batch of one client
    included; what grows with the federation is added.
    """
    base = peak_bytes() + (MPI_BYTES if ranks > 1 else 0)
    trained = base + _one_batch(bench)
    workers, n = max(1, ranks - 1), bench.world.num_clients
    rows = sum(map(held, server.tables.values()))
    upload = sum(count_numbers(v) for v in report.vectors.values()) * FLOAT_BYTES
    memo = sum(np.asarray(v).nbytes for v in server.memo.values())
    clients = CLIENT_BYTES * n
    serving = 2 * rows + memo + clients
    working = rows + upload * -(-bench.num_sampled // workers) + clients + _samples(bench)
    if ranks == 1:
        return trained + serving + working, trained + serving + working
    return base + serving, trained + working


def held(table: torch.Tensor) -> int:
    """Return the bytes a table takes (an expanded one takes one row)."""
    return table.shape[1] * FLOAT_BYTES * (1 if table.stride(0) == 0 else len(table))


def _samples(bench: Bench) -> int:
    """Return the bytes of clients' samples that stay at hand, and of the mapped pixels behind them."""
    numbers = int(np.prod(bench.federation.shape))
    total = int(bench.federation.sizes.sum()) * numbers
    kept = min(bench.config.system.keep_mb * 10**6, total * FLOAT_BYTES)
    pool = getattr(bench.federation, "pool", None)
    return kept + (min(total, int(pool.images.nbytes)) if pool is not None else 0)


def _one_batch(bench: Bench) -> int:
    """Return by how much the peak grows when a client trains on one batch."""
    learner, before = bench.learner, peak_bytes()
    idle, learner.idle = learner.idle, False
    largest = int(bench.federation.sizes[:, 0].argmax())
    split = bench.federation.client(largest).train
    learner.sgd(learner.init, split, replace(bench.config.local, steps=1), key(0, "footprint"))
    learner.idle = idle
    return peak_bytes() - before
