"""The end of a run: what is spread over ranks comes together, and the run folder is completed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpifl.comm import RankLost
from mpifl.comm.mpi_startup import cuda_aware
from mpifl.core.types import Server
from mpifl.results import run_folder as folders
from mpifl.results.recorder import Recorder, digest
from mpifl.runtime.recovery import regroup
from mpifl.runtime.server_step import Stepper
from mpifl.traffic.ledger import Moved

from . import config as configuration
from .placement import Place, place
from .traffic_forecast import settled

if TYPE_CHECKING:
    from .build import Bench

MOVED = tuple(f.name for f in fields(Moved))  # columns of visits.csv


def _rows(moved: Sequence[Moved]) -> Iterator[dict[str, Any]]:
    read = attrgetter(*MOVED)
    return (dict(zip(MOVED, read(m), strict=True)) for m in moved)


def _together(bench: Bench, taker: Stepper, server: Server | None) -> tuple[Any, ...]:
    """Return the tables, the places of all ranks and what they sent, on rank 0; again if a rank is lost."""
    transport = bench.transport
    while True:
        try:
            names = transport.bcast(sorted(server.tables) if server is not None else None, "end")
            tables = {name: taker.tables.whole(name) for name in names}
            places = transport.gather(place(transport, str(bench.learner.device)), "end")
            wire = transport.gather_traffic()
            transport.barrier()
            transport.traffic.clear()  # of a study, each case counts its own
            return tables, places, wire
        except RankLost:
            regroup(taker)


def finish(
    bench: Bench,
    taker: Stepper,
    recorder: Recorder | None,
    server: Server | None,
    start: float,
    more: Mapping[str, Any],
) -> None:
    """Collect what is spread over ranks and write the end of the run folder; every rank calls.

    Args:
        more: figures for the summary.
    """
    config, transport = bench.config, bench.transport
    tables, places, wire = _together(bench, taker, server)
    if recorder is None or server is None or places is None or wire is None:
        return
    whole = {name: table.contiguous() for name, table in tables.items() if table is not None}
    folders.write_json(
        recorder.folder / "environment.json", folders.environment(_layout(bench, taker, places))
    )
    summary = _summary(bench, taker, recorder.last, digest(whole, server.assign, server.algorithm_state))
    summary["federation_bytes_expected"] = settled(bench, taker.ledger)
    summary["mpi_bytes"] = sum(row["bytes"] for row in wire)
    summary["peak_bytes"] = [rank["peak_bytes"] for rank in places]
    summary["wall_seconds"] = round(perf_counter() - start, 3)
    if taker.dropped:
        summary["visits_dropped"] = len(taker.dropped)
        folders.write_csv(recorder.folder / "dropped.csv", map(vars, taker.dropped))
    if transport.lost:
        summary["ranks_lost"] = transport.lost
    if more:
        summary["asynchronous"] = more
    files = {**whole, "assign": torch.from_numpy(np.asarray(server.assign, np.int64).copy())}
    ledger = taker.ledger.rows()
    folders.write_csv(recorder.folder / "traffic.csv", taker.ledger.per_client())
    folders.write_csv(recorder.folder / "visits.csv", _rows(taker.ledger.moved), MOVED)
    rows = files if config.output.model else None
    recorder.close(rows, ledger, wire, bench.federation.sizes, server.algorithm_state, summary)


def _layout(bench: Bench, taker: Stepper, places: Sequence[Place]) -> dict[str, Any]:
    """Return what `environment.json` says of the ranks."""
    transport, costs = bench.transport, taker.mixer.costs
    return {
        "ranks": transport.size,
        "threads_per_rank": torch.get_num_threads(),
        "mpi": getattr(transport, "library", None),
        "mpi_cuda_aware": cuda_aware() if transport.size > 1 else None,
        "mpi_memory": bench.mpi_memory,
        "mpi_costs": None if costs is None else costs.tree(),
        "places": places,
    }


def _summary(bench: Bench, taker: Stepper, last: Mapping[str, float | int], sha: str) -> dict[str, Any]:
    """Return the final figures of a run."""
    tree = configuration.to_tree(bench.config)
    figures = ("accuracy_mean", "accuracy_worst", "accuracy_std", "ari", "num_clusters", "num_unplaced")
    return {
        "format": folders.FORMAT,
        "name": bench.config.name,
        "algorithm": tree["algorithm"]["name"],
        "rounds": bench.config.rounds,
        "seed": tree["seed"],
        "ranks": bench.transport.size,
        "clients": bench.problem.num_clients,
        "model_numbers": bench.problem.layout.size,
        "digest": sha,
        "identity": bench.identity,
        **{name: last[name] for name in figures},
        "federation_bytes_up": taker.ledger.total("up"),
        "federation_bytes_down": taker.ledger.total("down"),
    }
