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
from mpifl.runtime.server_step import ServerStep
from mpifl.traffic.ledger import Moved

from . import loader
from .placement import Place, place
from .traffic_forecast import settled

if TYPE_CHECKING:
    from .build import RunContext

MOVED = tuple(f.name for f in fields(Moved))  # columns of visits.csv


def _rows(moved: Sequence[Moved]) -> Iterator[dict[str, Any]]:
    read = attrgetter(*MOVED)
    return (dict(zip(MOVED, read(m), strict=True)) for m in moved)


def _together(context: RunContext, server_step: ServerStep, server: Server | None) -> tuple[Any, ...]:
    """Return the tables, the places of all ranks and what they sent, on rank 0; again if a rank is lost."""
    transport = context.transport
    while True:
        try:
            names = transport.bcast(sorted(server.tables) if server is not None else None, "end")
            tables = {name: server_step.tables.whole(name) for name in names}
            places = transport.gather(place(transport, str(context.learner.device)), "end")
            wire = transport.gather_traffic()
            transport.barrier()
            transport.traffic.clear()  # of a study, each case counts its own
            return tables, places, wire
        except RankLost:
            regroup(server_step)


def finish(
    context: RunContext,
    server_step: ServerStep,
    recorder: Recorder | None,
    server: Server | None,
    start: float,
    more: Mapping[str, Any],
) -> None:
    """Collect what is spread over ranks and write the end of the run folder; every rank calls.

    Args:
        more: figures for the summary.
    """
    config, transport = context.config, context.transport
    tables, places, wire = _together(context, server_step, server)
    if recorder is None or server is None or places is None or wire is None:
        return
    whole = {name: table.contiguous() for name, table in tables.items() if table is not None}
    folders.write_json(
        recorder.folder / "environment.json", folders.environment(_layout(context, server_step, places))
    )
    summary = _summary(
        context, server_step, recorder.last, digest(whole, server.assign, server.algorithm_state)
    )
    summary["federation_bytes_expected"] = settled(context, server_step.ledger)
    summary["mpi_bytes"] = sum(row["bytes"] for row in wire)
    summary["peak_bytes"] = [rank["peak_bytes"] for rank in places]
    summary["wall_seconds"] = round(perf_counter() - start, 3)
    if server_step.dropped:
        summary["visits_dropped"] = len(server_step.dropped)
        folders.write_csv(recorder.folder / "dropped.csv", map(vars, server_step.dropped))
    if transport.lost:
        summary["ranks_lost"] = transport.lost
    if more:
        summary["asynchronous"] = more
    files = {**whole, "assign": torch.from_numpy(np.asarray(server.assign, np.int64).copy())}
    ledger = server_step.ledger.rows()
    folders.write_csv(recorder.folder / "client_traffic.csv", server_step.ledger.per_client())
    folders.write_csv(recorder.folder / "visits.csv", _rows(server_step.ledger.moved), MOVED)
    rows = files if config.output.model else None
    recorder.close(rows, ledger, wire, context.federation.sizes, server.algorithm_state, summary)


def _layout(context: RunContext, server_step: ServerStep, places: Sequence[Place]) -> dict[str, Any]:
    """Return what `environment.json` says of the ranks."""
    transport, costs = context.transport, server_step.mixer.costs
    return {
        "ranks": transport.size,
        "threads_per_rank": torch.get_num_threads(),
        "mpi": getattr(transport, "library", None),
        "mpi_cuda_aware": cuda_aware() if transport.size > 1 else None,
        "mpi_memory": context.mpi_memory,
        "mpi_costs": None if costs is None else costs.tree(),
        "processes": places,
    }


def _summary(
    context: RunContext, server_step: ServerStep, last: Mapping[str, float | int], sha: str
) -> dict[str, Any]:
    """Return the final figures of a run."""
    tree = loader.to_tree(context.config)
    figures = ("accuracy_mean", "accuracy_worst", "accuracy_std", "ari", "num_clusters", "num_unplaced")
    return {
        "format": folders.FORMAT,
        "name": context.config.name,
        "algorithm": tree["algorithm"]["name"],
        "rounds": context.config.rounds,
        "seed": tree["seed"],
        "ranks": context.transport.size,
        "clients": context.problem.num_clients,
        "model_parameters": context.problem.layout.size,
        "digest": sha,
        "identity": context.identity,
        **{name: last[name] for name in figures},
        "federation_bytes_up": server_step.ledger.total("up"),
        "federation_bytes_down": server_step.ledger.total("down"),
    }
