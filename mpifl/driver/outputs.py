"""The last files of a run folder: `summary.json`, `environment.json`, models, matrices and traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from mpifl.comm.mpi_startup import cuda_aware
from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import CodeFailed, UserError
from mpifl.core.federation import DataInfo
from mpifl.core.files import safetensors_file, write_json
from mpifl.core.metric import ACCURACY, METRICS
from mpifl.core.types import Server
from mpifl.experiment import loader
from mpifl.experiment.client_matrices import compare_clients
from mpifl.experiment.context import RunContext
from mpifl.experiment.placement import Place, place
from mpifl.experiment.shared_beginning import record
from mpifl.forecast.computation import compared_computation
from mpifl.forecast.traffic import compared
from mpifl.models import ModelOptions
from mpifl.models.pretrained import uploads_none
from mpifl.results import run_folder as folders
from mpifl.results.recorder import Recorder, digest
from mpifl.results.run_models import SERVED
from mpifl.runtime.engine import Engine, repeated
from mpifl.runtime.server_step import ServerStep
from mpifl.supervision.logging import warn_once

from .figures import costs_since, privacy_spent, recoveries_of
from .served import newcomers, served_rows


def finish(
    context: RunContext,
    server_step: ServerStep,
    engine: Engine,
    recorder: Recorder | None,
    server: Server | None,
    start: float,
    origin: Mapping[str, Any],
    guard: Callable[[], AbstractContextManager[None]],
) -> UserError | CodeFailed | None:
    """Collect the results from all ranks and write the last files of the run folder; every rank calls.

    Args:
        context: context of the run.
        server_step: the server step, after the last step.
        engine: the engine that ran the steps.
        recorder: recorder of the run folder, on rank 0.
        server: the server after the last step, on rank 0.
        start: start of the run by `perf_counter`, minus the seconds before the checkpoint of a resumed run.
        origin: entries of `summary.json` about what decides the run's numbers, on rank 0.
        guard: returns a watchdog for work that all ranks do together.

    Returns:
        Why a matrix of `evaluation.matrices`, or `client_models.safetensors`, is missing, on every rank; None
        if none is.
    """
    asynchronous = {} if server is None else engine.summary()
    unreached = context.config.drift.at_s[len(context.federation.change_steps) :]
    if unreached and recorder is not None:
        warn_once(f"drift.at_s: the run ended before {list(unreached)}: these changes did not happen")
    found, fault = compare_clients(context, server_step)
    own, new = None, None
    try:
        own = client_models(context, server_step, server)
        new = newcomers(context, server_step, server)
    except (UserError, CodeFailed) as error:  # on every rank
        fault = fault or error
    with guard():
        tables, places, traffic = collect(context, server_step, server)
    if recorder is None or server is None or places is None or traffic is None:
        return fault
    folder, layout = recorder.folder, _layout(context, server_step, places)
    write_json(folder / "environment.json", folders.environment(layout))
    whole = {name: table.contiguous() for name, table in tables.items() if table is not None}
    sha = digest(whole, server.assign, server.algorithm_state)
    taken = replace(context, config=replace(context.config, rounds=server.version))  # it may have ended early
    changes = recoveries_of(context, recorder.running)
    summary = {
        **_summary(taken, server_step, recorder.last, sha, origin),
        "federation_bytes_expected": compared(taken, server_step.ledger),
        "flops_expected": compared_computation(taken, server_step.computation),
        "mpi_bytes": sum(row["bytes"] for row in traffic),
        "peak_bytes": [rank["peak_bytes"] for rank in places],
        "wall_seconds": round(perf_counter() - start, 3),
        **_of_some_runs(context, server_step, engine, server),
        **({"asynchronous": asynchronous} if asynchronous else {}),
        **({"drift": costs_since(changes, server_step)} if context.config.drift.kind else {}),
    }
    if own is not None:
        clients = torch.from_numpy(context.evaluated_clients)
        with safetensors_file(folder / "client_models.safetensors") as file:
            save_file({"clients": clients, "models": own}, file)
    if found:
        np.savez(folder / "matrices.npz", **found)  # type: ignore[arg-type]
    if server_step.dropped:
        folders.write_csv(folder / "dropped.csv", map(vars, server_step.dropped))
    if uploads_none(summary):
        whole.pop("model", None)  # nobody trained it
    files = {**whole, "assign": torch.from_numpy(np.asarray(server.assign, np.int64).copy())}
    if new is not None and summary["client_models"] == "own":
        rows = served_rows(context, server_step, server, whole, new)
        files |= {f"{SERVED}.{name}": torch.from_numpy(held) for name, held in rows.items()}
        holds = context.config.algorithm.holds
        summary |= {"client_models": SERVED, SERVED: {name: holds.get(name, "all") for name in rows}}
    if context.config.output.model:
        export(folder, context, server, whole, own, summary)
    ledger, computation = server_step.ledger, server_step.computation
    of_clients = ledger.per_client(), computation.per_client(), computation.energy()
    recorder.write_traffic(ledger.moved.columns(), *of_clients)
    recorder.close(
        files if context.config.output.model else None,
        ledger=ledger.rows(),
        computation=computation.rows(),
        mpi_traffic=traffic,
        algorithm_state=server.algorithm_state,
        summary=summary,
        layout=context.problem.layout,
        presence=presence(context, server.version, recorder.virtual_seconds),
    )
    return fault


def presence(context: RunContext, step: int, seconds: float) -> list[dict[str, Any]] | None:
    """Return the rows of `presence.csv`: which clients have joined and left, in the order of time.

    Args:
        context: context of the run.
        step: the last server step.
        seconds: time on the run's clock after it.

    Returns:
        Rows with `client`, `event` (`joins` or `leaves`), and the first `step` in which the client takes
        part, or takes part no more; under policies that count seconds, `seconds` on the run's clock. None if
        all clients are there from the first step to the last.
    """
    by_step, decisions = context.config.policy.joins_by_step, context.decisions
    if not decisions.joins and not decisions.leaves:
        return None
    unit, end = ("step", step) if by_step else ("seconds", seconds)
    found = [
        {unit: when, "client": client, "event": event}
        for event, whose in (("joins", decisions.joins), ("leaves", decisions.leaves))
        for client, when in whose.items()
        if when <= end
    ]
    return sorted(found, key=lambda row: (row[unit], row["client"]))


def export(
    folder: Path,
    context: RunContext,
    server: Server,
    tables: Mapping[str, torch.Tensor],
    own: torch.Tensor | None,
    summary: Mapping[str, Any],
) -> None:
    """Write the models that are served in the format in which they are published, if they have one.

    Args:
        folder: the run folder.
        context: context of the run.
        server: the server after the last step.
        tables: name -> table of the server, without those that nobody trained.
        own: models of the evaluated clients [n, d]; None if they are not kept.
        summary: content of `summary.json`.
    """
    model, rows = context.config.model, tables.get("model")
    if not isinstance(model, ModelOptions):
        return
    models: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    if rows is not None and rows.ndim == 2 and rows.shape[1] == context.problem.layout.size:
        serves = summary["client_models"] == "rows"
        used = np.unique(server.assign).tolist() if serves else range(len(rows))
        models |= {f"model-{i}": rows[i] for i in used}
    if own is not None:
        named = zip(context.evaluated_clients.tolist(), own, strict=True)
        models |= {f"client-{k}": vector for k, vector in named}
        ranks = {f"client-{k}": rank for k, rank in enumerate(context.ranks)}
    model.export(folder, models, context.federation.info, context.config.seed.model, ranks)


def client_models(context: RunContext, server_step: ServerStep, server: Server | None) -> torch.Tensor | None:
    """Return the models of the evaluated clients [n, d] on rank 0; None without `output.client_models`.

    Every rank calls. The models are gathered again if a rank is lost.
    """
    if not context.config.output.client_models:
        return None
    return repeated(server_step, lambda: server_step.client_models(server, context.evaluated_clients))


def uses_rows(context: RunContext, server_step: ServerStep, server: Server) -> bool:
    """Return whether each evaluated client is evaluated with its unchanged row of the table `model`."""
    if type(context.config.algorithm).model_of is not Algorithm.model_of or "model" not in server.tables:
        return False
    if server_step.config.filters.narrows:
        return False
    whole = server.tables["model"].shape[1] == context.problem.layout.size
    serves = server_step.serves(server, context.evaluated_clients)
    return whole and all(
        not isinstance(reads.get("model"), np.ndarray) and reads.get("model") == (int(server.assign[k]),)
        for k, reads in serves.items()
    )


class Collected(NamedTuple):
    """Data collected from all ranks, on rank 0; None elsewhere.

    Attributes:
        tables: name -> table of the server.
        places: places of all ranks.
        traffic: traffic of each rank, as rows of `mpi_traffic.csv`.
    """

    tables: dict[str, torch.Tensor | None]
    places: list[Place] | None
    traffic: list[dict[str, Any]] | None


def collect(context: RunContext, server_step: ServerStep, server: Server | None) -> Collected:
    """Collect data from all ranks; every rank calls. Repeated if a rank is lost."""
    transport = context.transport

    def gather() -> Collected:
        names = transport.bcast(sorted(server.tables) if server is not None else None, "end")
        tables = {name: server_step.tables.whole(name) for name in names}
        places = transport.gather(place(transport, str(context.learner.device)), "end")
        return Collected(tables, places, transport.gather_traffic())

    found = repeated(server_step, gather)
    transport.traffic.clear()  # each of several runs in a process counts only its own traffic
    return found


def _layout(context: RunContext, server_step: ServerStep, places: Sequence[Place]) -> dict[str, Any]:
    """Return the part of `environment.json` about the ranks."""
    transport, costs = context.transport, server_step.mixer.costs
    return {
        "ranks": transport.size,
        "threads_per_rank": torch.get_num_threads(),
        "mpi": transport.library,
        "mpi_cuda_aware": cuda_aware() if transport.size > 1 else None,
        "mpi_memory": context.decisions.mpi_memory,
        "mpi_costs": None if costs is None else costs.tree(),
        "processes": places,
    }


def _data_facts(info: DataInfo) -> dict[str, Any]:
    """Return the facts about the data, beside shape and number of classes, needed to rebuild a model."""
    return {} if info == DataInfo(info.shape, info.num_classes) else {"data_info": asdict(info)}


def _summary(
    context: RunContext,
    server_step: ServerStep,
    last: Mapping[str, float | int],
    sha: str,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the final figures of a run."""
    tree = loader.to_tree(context.config)
    metric = context.config.task.metric
    shown = {} if metric == ACCURACY else {"metric": asdict(metric)}
    clients = server_step.config.clients
    directions = dict(zip(clients.metric_names, clients.metric_directions, strict=True))
    directions |= {m.name: m.better for m in context.config.task.scored if m.name not in METRICS}
    figures = [*(f"{metric.name}_{what}" for what in ("mean", "worst", "std")), "ari"]
    figures += ["num_clusters", "num_unplaced"]
    return {
        "format": folders.FORMAT,
        "name": context.config.name,
        "algorithm": tree["algorithm"]["name"],
        "rounds": context.config.rounds,
        "seed": tree["seed"],
        "ranks": context.transport.size,
        "clients": context.problem.num_clients,
        "model_parameters": context.problem.layout.size,
        **({"whole_model_bytes": context.duration.model_bytes} if context.decisions.base else {}),
        **({"drop_single": True} if context.learner.drop_single else {}),
        "input_shape": list(context.federation.shape),
        "num_classes": context.federation.num_classes,
        **({"class_names": list(names)} if (names := context.federation.class_names) else {}),
        "digest": sha,
        **origin,
        "data": dict(context.federation.content),
        **{name: last[name] for name in figures},
        **shown,
        **_data_facts(context.federation.info),
        **({"samples_change": True} if context.federation.changes else {}),
        **{f"{name}_mean": last[f"{name}_mean"] for name in clients.metric_names},
        **({"directions": directions} if directions else {}),
        "federation_bytes_up": server_step.ledger.total("up"),
        "federation_bytes_down": server_step.ledger.total("down"),
        **server_step.computation.columns(),
    }


def _of_some_runs(
    context: RunContext, server_step: ServerStep, engine: Engine, server: Server
) -> dict[str, Any]:
    """Return the figures of `summary.json` that only some runs have, and which models the clients use."""
    out: dict[str, Any] = {}
    if spent := privacy_spent(context.accountant, engine.num_uploads, server.version):
        spent |= server_step.config.filters.told()
        finite = {name: value if isfinite(value) else None for name, value in spent.items()}
        accountant = context.accountant
        about = {"delta": accountant.delta, "neighbours": accountant.neighbours}
        used = accountant.spent(engine.num_uploads if accountant.per_client else server.version)
        out["privacy"] = {**finite, **about, "spent": [one.tree() for one in used]}
    whose = "several" if context.config.algorithm.needs.several_models else "own"
    out["client_models"] = "rows" if uses_rows(context, server_step, server) else whose
    if server_step.beginning:
        out["beginning"] = record(server_step.beginning)
    if server_step.dropped:
        out["visits_dropped"] = len(server_step.dropped)
    if context.transport.lost:
        out["ranks_lost"] = context.transport.lost
        out["mpi_bytes_complete"] = False  # the traffic of lost ranks is unknown
    return out
