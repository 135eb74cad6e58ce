"""Forecasts the peak resident memory of each rank of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib import import_module
from math import exp

import numpy as np
import torch

from mpifl.aggregation.exchange_choice import OverMpi, most_held
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import (
    OneShotStatistics,
    RememberedUploads,
    SecondLook,
    hooks_of,
    upload_named,
    uses,
)
from mpifl.core.process import peak_bytes
from mpifl.core.rng import key
from mpifl.core.types import Report, Server
from mpifl.data import PoolFederation
from mpifl.experiment.context import RunContext
from mpifl.experiment.schema import GROUPS
from mpifl.results.metrics import import_scipy_optimize
from mpifl.results.trackers import CALLBACKS, Tracker
from mpifl.runtime.server_step import MODEL_BLOCK
from mpifl.simulation.policies import AsynchronousPolicy
from mpifl.traffic.ledger import count_numbers

from .hosting import group_of_most
from .traffic import TrafficForecast, planned_run, statistics_report, without_training

FLOAT_BYTES = 4
MPI_BYTES = 16 << 20  # the library and its buffers; measured with Open MPI 5 and a handful of ranks
CLIENT_BYTES = 56  # counters and indices per registered client, on every rank: 57 of a million, 51 of ten


@dataclass(frozen=True)
class MeasuredMemory:
    """Resident bytes of Python, PyTorch, the model and its buffers, measured in this process.

    Attributes:
        opened: after data and model are opened.
        recording: added by the server's figures.
        training: added by training on one batch.
        statistics: added by the one-shot statistics of one client, mainly by their libraries.
        setup: added by the method's set-up at the server, without tables and products, which `StateMemory`
            counts.
    """

    opened: int
    recording: int
    training: int
    statistics: int = 0
    setup: int = 0

    @classmethod
    def of(cls, context: RunContext) -> MeasuredMemory:
        """Measure a run that has been built; call it before other work, because peaks never go down."""
        opened = peak_bytes()
        import_scipy_optimize()
        _load_trackers(context.config.output.callbacks)
        recording = peak_bytes()
        _train_on_one_batch(context)
        training = peak_bytes()
        if uses(context.config.algorithm, OneShotStatistics):
            statistics_report(without_training(context), 0)
        return cls(opened, recording - opened, training - recording, peak_bytes() - training)

    def with_setup(self, traffic: TrafficForecast, state: StateMemory) -> MeasuredMemory:
        """Return a copy with the memory that the set-up added during the traffic forecast.

        Args:
            traffic: traffic forecast of the run.
            state: memory of federation and method.
        """
        tables = sum(table_bytes(table, False) for table in traffic.server.tables.values())
        return replace(self, setup=max(0, traffic.setup_memory - tables - state.gram))


@dataclass(frozen=True)
class StateMemory:
    """Memory that depends on the federation and the method, in bytes.

    Attributes:
        central: rows of the tables that the server holds.
        sharded: rows of the tables that the workers hold.
        read: download of one visit.
        upload: upload of one visit.
        algorithm_state: state of the method at the server.
        fingerprints: one-shot statistics of all clients.
        gram: products of all pairs of clients' statistics.
        viewed: tables of which a visit downloads a single row; without a copy, it keeps the whole table.
        copied: rows that are copied for the download of one visit.
    """

    central: int
    sharded: int
    read: int
    upload: int
    algorithm_state: int
    fingerprints: int
    gram: int
    viewed: int = 0
    copied: int = 0

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        server: Server,
        report: Report,
        fingerprints: int,
        mixed: Set[str],
        sharded: Set[str],
    ) -> StateMemory:
        """Compute the memory of a method.

        Args:
            algorithm: the method.
            server: the server before the first round.
            report: report of one client.
            fingerprints: bytes of the one-shot statistics of all clients.
            mixed: names of the tables that steps change.
            sharded: names of the tables that the workers hold.
        """
        tables = {name: table_bytes(table, name in mixed) for name, table in server.tables.items()}
        compares = upload_named(algorithm, OneShotStatistics, "statistics_gram")
        arrays = {id(array): np.asarray(array).nbytes for array in server.algorithm_state.values()}
        reads = algorithm.reads(server, 0)
        single = {name for name, rows in reads.items() if not isinstance(rows, np.ndarray) and len(rows) == 1}
        copies = {name: 1 if isinstance(reads[name], np.ndarray) else len(reads[name]) for name in reads}
        return cls(
            central=sum(size for name, size in tables.items() if name not in sharded),
            sharded=sum(size for name, size in tables.items() if name in sharded),
            read=sum(len(rows) * server.tables[name].shape[1] * FLOAT_BYTES for name, rows in reads.items()),
            upload=sum(count_numbers(v) for v in report.vectors.values()) * FLOAT_BYTES,
            algorithm_state=sum(arrays.values()),
            fingerprints=fingerprints,
            gram=8 * len(server.assign) ** 2 if compares else 0,
            viewed=sum(tables[name] for name in single),
            copied=sum(
                rows * server.tables[name].shape[1] * FLOAT_BYTES
                for name, rows in copies.items()
                if name not in single
            ),
        )


def peak_memory(
    measured: MeasuredMemory, state: StateMemory, context: RunContext, num_ranks: int
) -> tuple[int, int]:
    """Return the peak resident bytes of rank 0 and of the busiest worker.

    Args:
        measured: memory measured in this process.
        state: memory of federation and method.
        context: context of the run.
        num_ranks: number of ranks that the run will have; one rank is server and worker.
    """
    workers = max(1, num_ranks - 1)
    visited = _visited_share(context, workers)
    one_by_one = num_ranks == 1 and isinstance(context.config.policy, AsynchronousPolicy)
    trained = 0 if one_by_one else -(-context.decisions.num_sampled // workers)  # see `_under_way`
    uploads = max(state.upload * trained, state.fingerprints // workers)
    # old and new rows; a copy of both at the start or at the end
    serving = measured.recording + 4 * state.central + state.sharded + state.algorithm_state + state.gram
    serving += measured.setup + _under_way(state, context, num_ranks)
    # sharded rows are held twice; a message is copied when it is read and when it arrives
    rows = state.central + 2 * state.read + int(2 * max(visited, 1 / workers) * state.sharded)
    working = (
        measured.training + rows + uploads + _sample_bytes(context, visited, workers) + measured.statistics
    )
    everywhere = measured.opened + CLIENT_BYTES * context.problem.num_clients
    models, block = _kept_models(context)
    serving += models + block
    if num_ranks == 1:
        return everywhere + serving + working, everywhere + serving + working
    at_server, at_worker = _look_bytes(context, num_ranks)
    serving, working = serving + at_server, working + at_worker
    serving += measured.statistics  # the set-up was measured after them, with the same libraries
    return everywhere + MPI_BYTES + serving, everywhere + MPI_BYTES + working + block // workers


def _look_bytes(context: RunContext, num_ranks: int) -> tuple[int, int]:
    """Return the bytes that rank 0 and a worker hold of second looks that travel between ranks."""
    algorithm, exchange = context.config.algorithm, context.config.system.exchange
    if not uses(algorithm, SecondLook) or not isinstance(exchange, OverMpi):
        return 0, 0
    sizes = hooks_of(algorithm, SecondLook).look_sizes(planned_run(context))
    if sizes is None:
        return 0, 0
    n, m = context.problem.num_clients, context.decisions.num_sampled
    most = int(max(sizes.shown.max(), sizes.answered.max()))
    clients, compares = n if uses(algorithm, RememberedUploads) else m, exchange.distances == "server"
    server, worker = most_held(sizes.question, most, clients, num_ranks, compares)
    return FLOAT_BYTES * server, FLOAT_BYTES * worker


def _under_way(state: StateMemory, context: RunContext, num_ranks: int) -> int:
    """Return what an asynchronous run keeps at rank 0 for visits: uploads and older rows.

    Workers train all visits under way ahead of time, so their uploads may all wait for their turn, beside
    those that the next step takes. One process trains a visit when its upload is due. Some methods remember
    the last upload of each client.
    """
    policy, num_sampled = context.config.policy, context.decisions.num_sampled
    if not isinstance(policy, AsynchronousPolicy):
        return 0
    visits = policy.concurrency(context.problem.num_clients, num_sampled)
    taken = policy.uploads_per_step(num_sampled)
    older = min(context.config.rounds, -(-visits // taken)) - 1  # each step starts as many visits as it takes
    uploads = taken if num_ranks == 1 else visits + (taken - 1) * policy.refills
    uploads += context.problem.num_clients * uses(context.config.algorithm, RememberedUploads)
    return uploads * state.upload + older * state.viewed + visits * state.copied


def table_bytes(table: torch.Tensor, mixed: bool) -> int:
    """Return the bytes of a table.

    Args:
        table: rows [K, width]; with stride 0 all rows share the memory of one.
        mixed: whether steps change the table; then each row needs its own memory.
    """
    rows = len(table) if mixed or table.stride(0) else 1
    return rows * table.shape[1] * FLOAT_BYTES


def _kept_models(context: RunContext) -> tuple[int, int]:
    """Return the bytes of the models that `output.client_models` keeps, and of those gathered at a time."""
    if not context.config.output.client_models:
        return 0, 0
    clients, d = len(context.evaluated_clients), context.problem.layout.size
    return FLOAT_BYTES * clients * d, FLOAT_BYTES * min(clients, max(1, MODEL_BLOCK // d)) * d


def _visited_share(context: RunContext, workers: int) -> float:
    """Return the share of the clients that one worker has visited after all rounds."""
    visits = context.config.rounds * context.decisions.num_sampled / context.problem.num_clients
    if context.config.system.hosting == GROUPS:
        return (1 - exp(-visits)) / workers
    return 1 - exp(-visits / workers)


def _sample_bytes(context: RunContext, visited: float, workers: int) -> int:
    """Return the bytes of the samples cached after all rounds, and of the pixels behind them.

    Pixels are mapped or, of clients that the worker hosts, copied.
    """
    federation, limit = context.federation, context.config.system.sample_cache_mb * 10**6
    if not isinstance(federation, PoolFederation):
        return 0
    if context.config.system.hosting == GROUPS and workers > 1:
        largest = group_of_most(context, workers + 1)
        finished, own = federation.hosted_bytes(largest, workers)
        cached = min(limit, int(visited * workers * finished)) * federation.caches(limit, largest)
        if own:
            return own + cached
    images = int(federation.pool.images.nbytes)
    pixels = min(int(federation.sizes.sum()) * int(np.prod(federation.shape)), images)
    return pixels + min(limit, int(visited * federation.finished_bytes)) * federation.caches(limit)


def _load_trackers(callbacks: Sequence[object]) -> None:
    """Import the libraries of trackers among the callbacks; in a run only the server imports them."""
    for entry in callbacks:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        kind = CALLBACKS.get(name) if isinstance(name, str) and ":" not in name else None
        if isinstance(kind, type) and issubclass(kind, Tracker):
            import_module(kind.package)


def _train_on_one_batch(context: RunContext) -> None:
    learner, sizes = context.learner, context.federation.sizes[:, 0]
    locals_ = [context.config.local, *context.differing.values()]
    config = replace(max(locals_, key=lambda local: local.batch_size), steps=1)
    largest = int(sizes.argmax())
    learner.sgd(learner.init, context.federation.client(largest).train, config, key(0, "footprint"))
