"""How much memory each rank of a run will have resident at its peak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp

import numpy as np
import torch

from mpifl.core.algorithm import Algorithm
from mpifl.core.process import peak_bytes
from mpifl.core.rng import key
from mpifl.core.types import Report, Server
from mpifl.data import PoolFederation
from mpifl.results.metrics import load
from mpifl.traffic.ledger import count_numbers

from .context import RunContext

FLOAT_BYTES = 4
MPI_BYTES = 16 << 20  # of the library and its buffers; measured with Open MPI 5 and a handful of ranks
CLIENT_BYTES = 80  # a registered client's counters and indices, at every rank


@dataclass(frozen=True)
class Base:
    """What Python, PyTorch, the model and its buffers take, measured in this process.

    Attributes:
        plain: resident bytes once data and model are open. recording: what the server's figures add.
            training: what training on one batch adds.
    """

    plain: int
    recording: int
    training: int

    @classmethod
    def measured(cls, context: RunContext) -> Base:
        """Measure, before anything else needs memory: max_abs never go back."""
        plain = peak_bytes()
        load(truth=context.federation.groups is not None)
        recording = peak_bytes()
        _train_on_one_batch(context)
        return cls(plain, recording - plain, peak_bytes() - recording)


@dataclass(frozen=True)
class Held:
    """What grows with the federation, in bytes.

    Attributes:
        rows: of the tables that the server holds. spread: of those that live with their readers.
        read: what one visit downloads. upload: what it uploads. algorithm_state: of the method at the server.
        prints: one-shot statistics of all clients. pairs: the products of all pairs of them.
    """

    rows: int
    spread: int
    read: int
    algorithm_state: int
    pairs: int
    upload: int
    fingerprints: int

    @classmethod
    def by(
        cls,
        algorithm: Algorithm,
        server: Server,
        report: Report,
        fingerprints: int,
        mixed: set[str],
        spread: set[str],
    ) -> Held:
        """Return what a method holds.

        Args:
            report: of one client. prints: bytes. mixed, spread: names of tables.
        """
        tables = {name: table_bytes(t, name in mixed) for name, t in server.tables.items()}
        algorithm_state = {id(v): np.asarray(v).nbytes for v in server.algorithm_state.values()}
        return cls(
            rows=sum(size for name, size in tables.items() if name not in spread),
            spread=sum(size for name, size in tables.items() if name in spread),
            read=sum(
                len(which) * server.tables[name].shape[1] * FLOAT_BYTES
                for name, which in algorithm.reads(server, 0).items()
            ),
            algorithm_state=sum(algorithm_state.values()),
            pairs=8 * len(server.assign) ** 2 if algorithm.needs.fingerprint_gram else 0,
            upload=sum(count_numbers(v) for v in report.vectors.values()) * FLOAT_BYTES,
            fingerprints=fingerprints,
        )


def footprint(base: Base, held: Held, context: RunContext, ranks: int) -> tuple[int, int]:
    """Return the peak resident bytes of rank 0 and of the busiest worker."""
    workers = max(1, ranks - 1)
    met = _share_met(context, workers)
    uploads = max(held.upload * -(-context.decisions.num_sampled // workers), held.fingerprints // workers)
    # old and new rows, and at the end or when it starts the same once more
    serving = base.recording + 4 * held.rows + held.spread + held.algorithm_state + held.pairs
    # spread rows have two places; a message is copied when it is read and when it arrives
    rows = held.rows + 2 * held.read + int(2 * max(met, 1 / workers) * held.spread)
    working = base.training + rows + uploads + _samples(context, met)
    everywhere = base.plain + CLIENT_BYTES * context.problem.num_clients
    if ranks == 1:
        return everywhere + serving + working, everywhere + serving + working
    return everywhere + MPI_BYTES + serving, everywhere + MPI_BYTES + working


def table_bytes(table: torch.Tensor, mixed: bool) -> int:
    """Return the bytes a table takes; equal rows that are never mixed take those of one."""
    rows = len(table) if mixed or table.stride(0) else 1
    return rows * table.shape[1] * FLOAT_BYTES


def _share_met(context: RunContext, workers: int) -> float:
    """Return the share of the clients that a worker has met after all rounds."""
    visits = context.config.rounds * context.decisions.num_sampled / workers
    return 1 - exp(-visits / context.problem.num_clients)


def _samples(context: RunContext, met: float) -> int:
    """Return the bytes of clients' samples that stay at hand after all rounds, and of the mapped pixels
    behind them.
    """
    federation, limit = context.federation, context.config.system.sample_cache_mb * 10**6
    if not isinstance(federation, PoolFederation):
        return 0
    images = int(federation.pool.images.nbytes)
    pixels = min(int(federation.sizes.sum()) * int(np.prod(federation.shape)), images)
    return pixels + min(limit, int(met * federation.finished_bytes)) * federation.keeps(limit)


def _train_on_one_batch(context: RunContext) -> None:
    learner = context.learner
    largest = int(context.federation.sizes[:, 0].argmax())
    split = context.federation.client(largest).train
    learner.sgd(learner.init, split, replace(context.config.local, steps=1), key(0, "footprint"))
