"""A run from its configuration to its complete run folder."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from mpifl.aggregation.client_store import ClientStore
from mpifl.comm.mpi_startup import cuda_aware
from mpifl.comm.transport import RankLost, Transport, on_server
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import ServerEvaluation, uses
from mpifl.core.errors import CodeFailed, UserError
from mpifl.core.federation import DataInfo
from mpifl.core.files import safetensors_file, write_atomically, write_json
from mpifl.core.metric import ACCURACY, METRICS, with_figures
from mpifl.core.parameters import take
from mpifl.core.progress import VisitCounter, doing
from mpifl.core.rng import key
from mpifl.core.torch_state import pinned, restore, state
from mpifl.core.types import Server
from mpifl.experiment import loader
from mpifl.experiment.build import Say, build, build_engine, build_server_step
from mpifl.experiment.client_matrices import compare_clients
from mpifl.experiment.context import RunContext
from mpifl.experiment.placement import CPU, Place, place, table, unlike
from mpifl.experiment.schema import Config
from mpifl.forecast.traffic import compared
from mpifl.forecast.trials import has_trials, try_outcomes
from mpifl.kernels import bindings
from mpifl.models.pretrained import read_state, uploads_none
from mpifl.protection.accountant import Accountant
from mpifl.results import run_folder as folders
from mpifl.results.columns import with_diverged
from mpifl.results.identity import line
from mpifl.results.metrics import client_distances, mixture_kl
from mpifl.results.recorder import Recorder, RunningFigures, digest, written_clients
from mpifl.runtime.engine import Engine, Record, regroup
from mpifl.runtime.run_state import Saved
from mpifl.runtime.server_step import ServerStep
from mpifl.supervision.logging import rank_log, warn_once
from mpifl.supervision.progress import Progress, ProgressFile
from mpifl.supervision.signals import Signals, Watchdog
from mpifl.training.batched import stackable

from .checkpoints import Checkpoints, locked
from .resumption import about, check_same
from .run_callbacks import RunCallbacks


def run(
    config: Config,
    transport: Transport,
    quiet: bool = False,
    resumed: Path | None = None,
    bind_report: bool = False,
    from_start: bool = True,
    asked_to_stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Any] = (),
) -> Path | None:
    """Run a configuration over all ranks; return the run folder on rank 0, None elsewhere.

    Args:
        config: the configuration.
        transport: connects the ranks; every rank calls.
        quiet: whether to print no progress.
        resumed: folder of the run to resume; None begins a new run.
        bind_report: whether to print where each rank runs.
        from_start: whether a resumed run that has written no checkpoint begins again.
        asked_to_stop: returns whether to stop even without a signal; called between steps.
        callbacks: objects that are called during the run, in addition to those of `output.callbacks`. Every
            rank must pass the same number of them; only those of rank 0 are called.

    Raises:
        UserError: the run cannot begin; on every rank, before anything is trained.
        CodeFailed: a callback raised an exception; on every rank, after the state of the run was written.
        Stopped: a signal ended the run after a step.
    """
    start = perf_counter()
    if transport.is_server:
        folders.commit()  # now, while the checkout still equals the loaded code
    silent = quiet or not transport.is_server
    bar = Progress(config.rounds, config.name, silent)
    lock: IO[str] | None = None
    if resumed:  # before data and model are opened, so that `mpifl watch` sees the run continue
        lock = on_server(transport, lambda: locked(resumed), everywhere=False)
    transport.begin_run()
    transport.watch_stopped(config.system.stopped_timeout_s)
    heard = Signals(lambda: asked_to_stop() or transport.stop_asked(), not silent, transport.ask_to_stop)
    calling = pinned(warn_once if transport.is_server else ignore)
    with calling, lock or nullcontext(), bar as progress, heard as signals:
        with doing("opening data and model"):
            context = build(config, transport, progress.say)
            if has_trials(config):
                on_server(transport, lambda: try_outcomes(context, resumed is not None))
        announce(context, progress.say, bind_report)
        folder = on_server(transport, lambda: resumed or new_folder(config))
        signals.folder = str(folder)
        recorder = open_recorder(context, folder) if transport.is_server else None
        terms = about_of(context) if transport.is_server else {}
        checkpoints = Checkpoints(
            folder, terms, signals, recorder, progress.say, lock, **vars(config.checkpoint)
        )
        begin = partial(go_on, checkpoints, config, from_start) if resumed else checkpoints.create
        with closing(checkpoints), RunCallbacks(context, callbacks, folder, signals) as observed:
            saved = on_server(transport, begin, everywhere=False)
            observed.start(checkpoints.run_id if transport.is_server else "", resumed is not None, saved)
            elapsed = start - seconds_before(saved)
            fault = train(context, checkpoints, recorder, saved, progress, observed, elapsed)
            if transport.is_server:
                checkpoints.remove()
                progress.say(f"results: {folder}")
            if fault is not None:
                raise fault
            observed.end()
        return Path(folder) if transport.is_server else None


def train(
    context: RunContext,
    checkpoints: Checkpoints,
    recorder: Recorder | None,
    saved: Saved | None,
    progress: Progress,
    observed: RunCallbacks,
    start: float,
) -> UserError | CodeFailed | None:
    """Take all steps of a run and write its results; every rank calls.

    Args:
        context: context of the run.
        checkpoints: checkpoints of the run folder.
        recorder: recorder of the run folder, on rank 0.
        saved: the state to resume from; None begins the run.
        progress: shows each step.
        observed: calls the callbacks after each step.
        start: start of the run by `perf_counter`, minus the seconds before the checkpoint of a resumed run.

    Returns:
        The return value of `finish`.
    """
    config, transport, folder = context.config, context.transport, checkpoints.run_folder
    token = on_server(transport, lambda: f"{checkpoints.run_id}-{secrets.token_hex(4)}")
    store = ClientStore(token, config.system.scratch, checkpoints.clients)
    log = folder / "logs" / f"{socket.gethostname()}-{transport.rank}.log"
    watchdog = partial(Watchdog, config.system.watchdog_s, lambda: transport.last_call, log)
    with closing(store), rank_log(log, transport.is_server):
        counter = VisitCounter(store.folder, transport.rank, transport.size)
        server_step = build_server_step(context, store, counter)
        if recorder is not None and recorder.written is not None:
            server_step.ledger.remember(recorder.written)
        arrived = ignore if recorder is None else recorder.arrived
        engine = build_engine(context, server_step, arrived, checkpoints)
        with progress_file(context, folder, saved, counter) as file:
            with watchdog():
                see: Callable[[Record], None] = ignore  # workers record no steps
                if recorder is not None:
                    see = observer(context, server_step, engine, recorder, progress, observed, file)
                server = engine.run(see, saved)
            with doing("writing results"):
                terms = checkpoints.about
                origin = {"settings": loader.settings(config), "identity": terms.get("surroundings", {})}
                origin |= {"files": terms["files"]} if terms.get("files") else {}
                return finish(context, server_step, engine, recorder, server, start, origin, watchdog)


def open_recorder(context: RunContext, folder: Path) -> Recorder:
    """Return the recorder that writes the tables of the run folder; on rank 0."""
    config = context.config
    return Recorder(
        folder,
        context.federation,
        by=config.evaluation.by,
        devices=context.duration.devices,
        own=[path.rpartition(":")[2] for path in config.evaluation.metrics],
        task=config.task,
        written=written_clients(
            config.output.clients, context.problem.num_clients, key(config.seed.training)
        ),
    )


def announce(context: RunContext, say: Say, bind_report: bool) -> None:
    """Print remarks, warnings and hints before the first step; only on rank 0."""
    if not context.places:
        return
    config = context.config
    if bind_report:
        print(table(context.places), flush=True)
    if config.clock.remark:
        say(config.clock.remark)
    say(line(context.identity))
    if differing := unlike(context.places):
        warn_once(differing)
    on_gpus = all(place["device"] != CPU for place in context.places)
    if on_gpus and not config.system.cuda_graphs and config.local.optimizer == "sgd":
        learner = context.learner
        stacks = config.policy.synchronous and stackable(learner.flat.module)
        faster = "--system.stack 0 --system.cuda_graphs true" if stacks else "--system.cuda_graphs true"
        times = "about twice" if learner.replays else "several times"
        if stacks or not learner.replays:
            say(f"hint: on a GPU, small networks train {times} as fast with {faster}")
    if bindings.PROBLEM and config.system.kernels and config.system.device != "cuda":
        warn_once(
            f"{bindings.PROBLEM}; PyTorch trains instead: slower, with other last bits and another digest"
        )


def new_folder(config: Config) -> Path:
    """Create the run folder and write the configuration to it; on rank 0."""
    folder = folders.create(config.output.folder, config.name, config.output.id)
    (folder / "config.yaml").write_text(loader.dump(config))
    return folder


def about_of(context: RunContext) -> dict[str, Any]:
    """Return what the numbers of a run depend on, see `resumption.about`; on rank 0."""
    return about(context.config, context.identity, context.federation.content, start_checksum(context))


def start_checksum(context: RunContext) -> str:
    """Return a checksum of the weights that the run reads from files; empty if all are drawn.

    Weights that are drawn are left out, because their last bits may differ between machines.
    """
    config = context.config
    weights, start = config.weights, config.start
    if weights is None and start.run is None:
        return ""
    found = hashlib.sha256()
    if weights is not None:
        for name, tensor in sorted(read_state(weights).items()):
            found.update(f"{name} ".encode() + tensor.contiguous().numpy().tobytes())
    if start.run is not None:
        vector = context.problem.init(0)
        if start.part == "body":
            vector = take(vector, context.problem.layout.part("body"))
        found.update(vector.numpy().tobytes())
    return found.hexdigest()[:16]


def go_on(checkpoints: Checkpoints, config: Config, from_start: bool) -> Saved | None:
    """Return the state to resume from, None to start again; on rank 0.

    The configuration of the resumed run is written to the run folder: it may have more rounds.
    """
    folder = checkpoints.run_folder
    saved = checkpoints.find(from_start, partial(check_same, config, folder, checkpoints.about))
    file, text = folder / "config.yaml", loader.dump(config)
    if file.read_text() != text:
        write_atomically(file, text)
    return saved


def seconds_before(saved: Saved | None) -> float:
    """Return the wall time that the engine had run when a state was saved; 0 without a state."""
    if saved is None:
        return 0.0
    return float(np.ravel(saved.values["seconds"])[0])  # asynchronous runs also save processor seconds


def progress_file(
    context: RunContext, folder: Path, saved: Saved | None, counter: VisitCounter
) -> ProgressFile:
    """Return the progress file of the run folder; on workers, one that writes nothing."""
    mine = folder if context.transport.is_server else None
    first = 0 if saved is None else saved.step
    return ProgressFile(mine, context.config.rounds, first, context.places or (), counter.by_rank)


def ignore(what: object) -> None:
    """Do nothing; used on workers, because only rank 0 writes to the run folder."""


# -- after each step -----------------------------------------------------------------------------------------


def observer(
    context: RunContext,
    server_step: ServerStep,
    engine: Engine,
    recorder: Recorder,
    progress: Progress,
    observed: RunCallbacks,
    file: ProgressFile,
) -> Callable[[Record], None]:
    """Return the function to call after each step; on rank 0.

    It writes the scores, shows the progress and calls the callbacks.
    """
    ledger, hooks, settings = server_step.ledger, server_step.hooks, state()

    def moved() -> dict[str, int]:
        return {way: ledger.total(way) for way in ("up", "down")}

    def evaluated(record: Record, timing: Sequence[Mapping[str, float]]) -> dict[str, float | int]:
        assert record.scores is not None
        each = privacy_of_clients(context.accountant, engine.num_uploads, record.evaluated_clients)
        return recorder.record_evaluation(
            record.step,
            record.seconds,
            scores={**record.scores, **each},
            clients=record.evaluated_clients,
            labels=hooks.labels(record.server),
            train=columns(context, record, server_step, engine, recorder.running),
            traffic={f"federation_bytes_{way}": total for way, total in moved().items()},
            timing=timing,
            virtual_seconds=record.virtual_seconds,
            placed=hooks.placed(record.server, server_step.taken > 0),
            visits=server_step.visits,
        )

    def observe(record: Record) -> None:
        restore(settings)  # a policy of the user's own runs on rank 0 only
        timing = by_number(context.transport, record.timing)
        file.step, file.timing = record.step, timing or file.timing
        if record.updates:
            recorder.record_updates(record.step, record.updates)
        for client, divergence in estimated(context, record):
            recorder.running.estimated(client, divergence)
        row = None if record.scores is None else evaluated(record, timing)
        progress.step(record.step, "" if row is None else in_short(context, row))
        if observed.any:
            observed.step(record, row, recorder.clients, moved())

    return observe


def in_short(context: RunContext, row: Mapping[str, float | int]) -> str:
    """Return the text that the progress shows for a row of `metrics.csv`."""
    metric = context.config.task.metric.name
    note = f"{metric} {row[f'{metric}_mean']:.4f}  worst {row[f'{metric}_worst']:.4f}"
    if context.federation.groups is not None:
        note += f"  ARI {row['ari']:.2f}"
        note += f" without {row['num_unplaced']} unplaced clients" if row["num_unplaced"] else ""
    note += f"  clusters {row['num_clusters']}"
    return note + (f"  epsilon {row['epsilon']:.3g}" if context.accountant.counts else "")


def by_number(transport: Transport, timing: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the timing of each rank, in the order of ranks when the run began; empty for lost ranks."""
    found = dict(zip(transport.numbers, timing, strict=False))
    return [found.get(number, {}) for number in range(max(found, default=-1) + 1)]


def estimated(context: RunContext, record: Record) -> Iterator[tuple[int, float]]:
    """Yield the client and KL(true || estimated mixture) of each upload of a step, in nats; on rank 0.

    The true mixture is that of the data on which the upload was trained. An upload that the step did not take
    gives no estimate.

    Args:
        context: context of the run.
        record: record of the step.
    """
    u = context.config.algorithm.mixtures(record.server)  # [N, K]
    if u is None:
        return
    for k, visit in record.accepted:
        truth = context.federation.mixture(k, visit)
        if truth is not None and truth.shape == u[k].shape:
            yield k, mixture_kl(truth, u[k])


def columns(
    context: RunContext, record: Record, server_step: ServerStep, engine: Engine, running: RunningFigures
) -> dict[str, float]:
    """Return the columns of an evaluation that are not computed from the clients' scores; on rank 0.

    Args:
        context: context of the run.
        record: record of a step with scores.
        server_step: the server step, after the step.
        engine: counts the uploads of each client.
        running: running figures of the run; the clusters' scores are added.
    """
    return with_figures(
        record.train,
        figures(context, record, server_step.visits, running),
        distances(context, record, server_step),
        privacy_spent(context.accountant, engine.num_uploads, record.step),
        server_step.config.filters.figures(),
    )


def figures(
    context: RunContext, record: Record, visits: np.ndarray, running: RunningFigures
) -> dict[str, float]:
    """Compute the figures of only some methods, add them to the running figures, and return the columns.

    On rank 0. The columns are:
    `mixture_kl`: mean over the evaluated clients of KL(true || estimated mixture) of the last upload from
    which the client's mixture was estimated; `mixture_kl_uploads`: mean over all such uploads of all clients
    so far.
    `accuracy_cluster`: mean over the groups of row k's accuracy on group k's own test set, for methods in
    which each row belongs to one of the server's own sets; `accuracy_cluster_std` is the standard deviation
    over the groups.
    `accuracy_cluster_all` and `accuracy_cluster_all_std`: the same for each row's mean over all evaluations.
    The names of the cluster columns begin with the name of the task's metric, here `accuracy`.

    Args:
        context: context of the run.
        record: record of a step with scores.
        visits: number of visits of each client so far [N].
        running: running figures of the run; the clusters' scores are added.
    """
    out = running.mixture(record.evaluated_clients.tolist())
    out |= before_training(context, record, visits)
    if scores := cluster_scores(context, record):
        out |= running.of_clusters(record.step, scores, context.config.task.metric.name)
    return out


def before_training(context: RunContext, record: Record, visits: np.ndarray) -> dict[str, float]:
    """Return `accuracy_before` and `accuracy_before_std` of asynchronous runs in which nobody downloads.

    These are mean and standard deviation over the clients that have trained and have a score, which are
    evaluated with their own models (Local). Other methods report these figures themselves.

    Args:
        context: context of the run.
        record: record of a step with scores.
        visits: number of visits of each client so far [N].
    """
    alone = not context.config.policy.synchronous and not context.config.algorithm.reads(record.server, 0)
    if record.scores is None or not alone:
        return {}
    metric, scored = context.config.task.metric.name, context.config.task.scored
    scores = with_diverged(record.scores, scored)[metric]
    before = scores[(visits[record.evaluated_clients] > 0) & ~np.isnan(scores)]
    if not before.size:
        return {}
    with np.errstate(invalid="ignore"):  # in a run that diverges
        return {f"{metric}_before": float(before.mean()), f"{metric}_before_std": float(before.std())}


def cluster_scores(context: RunContext, record: Record) -> list[float]:
    """Return the score of each row k on group k's own test set; empty if rows and groups do not match."""
    evaluates = uses(context.config.algorithm, ServerEvaluation)
    group_test_sets = context.federation.group_test_sets() if evaluates else ()
    rows = record.server.tables.get("model", ())
    if not group_test_sets or len(rows) != len(group_test_sets):
        return []
    name, evaluate = context.config.task.metric.name, context.problem.public[0].evaluate
    return [evaluate(w, split)[name] for w, split in zip(rows, group_test_sets, strict=True)]


def distances(context: RunContext, record: Record, server_step: ServerStep) -> dict[str, float]:
    """Return the columns of `evaluation.distances`; on rank 0.

    Args:
        context: context of the run.
        record: record of a step with scores.
        server_step: has the products of the models that clients uploaded in the step, if they were measured.
    """
    products = server_step.client_products
    if products is None or not context.config.evaluation.distances:
        return {}
    clients, groups = products.clients, context.federation.groups
    labels = server_step.hooks.labels(record.server)[clients]
    groups = None if groups is None else groups[clients]
    kinds = ("client_distance", products.parameters), ("head_distance", products.head)
    return {k: v for name, x in kinds for k, v in client_distances(x, labels, groups, name).items()}


def privacy_spent(accountant: Accountant, uploads: np.ndarray, step: int) -> dict[str, float]:
    """Return epsilon so far as a column of `metrics.csv`; on rank 0.

    Args:
        accountant: accountant of the run.
        uploads: number of uploads of each client so far [N].
        step: number of rounds so far.

    Returns:
        `epsilon` (under local privacy, that of the client with most uploads); nothing without privacy.
    """
    if not accountant.counts:
        return {}
    times = uploads if accountant.per_client else step
    return {"epsilon": accountant.epsilon(times)}


def privacy_of_clients(
    accountant: Accountant, uploads: np.ndarray, clients: np.ndarray
) -> dict[str, np.ndarray]:
    """Return epsilon of some clients, as a column of `clients.csv`, under local privacy.

    Args:
        accountant: accountant of the run.
        uploads: number of uploads of each client so far [N].
        clients: the clients [n].
    """
    return {"epsilon": accountant.of_clients(uploads[clients], clients)} if accountant.per_client else {}


# -- at the end ----------------------------------------------------------------------------------------------


def finish(
    context: RunContext,
    server_step: ServerStep,
    engine: Engine,
    recorder: Recorder | None,
    server: Server | None,
    start: float,
    origin: Mapping[str, Any],
    watchdog: Callable[[], Watchdog],
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
        watchdog: returns a watchdog for work that all ranks do together.

    Returns:
        Why a matrix of `evaluation.matrices`, or `client_models.safetensors`, is missing, on every rank; None
        if none is.
    """
    asynchronous = {} if server is None else engine.summary()
    found, fault = compare_clients(context, server_step)
    try:
        own = client_models(context, server_step, server)
    except (UserError, CodeFailed) as error:  # on every rank
        own, fault = None, fault or error
    with watchdog():
        tables, places, traffic = collect(context, server_step, server)
    if recorder is None or server is None or places is None or traffic is None:
        return fault
    folder, layout = recorder.folder, _layout(context, server_step, places)
    write_json(folder / "environment.json", folders.environment(layout))
    whole = {name: table.contiguous() for name, table in tables.items() if table is not None}
    sha = digest(whole, server.assign, server.algorithm_state)
    summary = {
        **_summary(context, server_step, recorder.last, sha, origin),
        "federation_bytes_expected": compared(context, server_step.ledger),
        "mpi_bytes": sum(row["bytes"] for row in traffic),
        "peak_bytes": [rank["peak_bytes"] for rank in places],
        "wall_seconds": round(perf_counter() - start, 3),
        **_of_some_runs(context, server_step, engine, server),
        **({"asynchronous": asynchronous} if asynchronous else {}),
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
    recorder.write_traffic(server_step.ledger.moved.columns(), server_step.ledger.per_client())
    recorder.close(
        files if context.config.output.model else None,
        ledger=server_step.ledger.rows(),
        mpi_traffic=traffic,
        algorithm_state=server.algorithm_state,
        summary=summary,
        layout=context.problem.layout,
    )
    return fault


def client_models(context: RunContext, server_step: ServerStep, server: Server | None) -> torch.Tensor | None:
    """Return the models of the evaluated clients [n, d] on rank 0; None without `output.client_models`.

    Every rank calls. The models are gathered again if a rank is lost.
    """
    while context.config.output.client_models:
        try:
            models = server_step.client_models(server, context.evaluated_clients)
            context.transport.barrier()  # if a rank is lost before this, all ranks repeat the gather
            return models
        except RankLost:
            regroup(server_step)
    return None


def uses_rows(context: RunContext, server_step: ServerStep, server: Server) -> bool:
    """Return whether each evaluated client is evaluated with its unchanged row of the table `model`."""
    if type(context.config.algorithm).model_of is not Algorithm.model_of or "model" not in server.tables:
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
    while True:
        try:
            names = transport.bcast(sorted(server.tables) if server is not None else None, "end")
            tables = {name: server_step.tables.whole(name) for name in names}
            places = transport.gather(place(transport, str(context.learner.device)), "end")
            traffic = transport.gather_traffic()
            transport.barrier()
            transport.traffic.clear()  # each of several runs in a process counts only its own traffic
            return Collected(tables, places, traffic)
        except RankLost:
            regroup(server_step)


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
    if server_step.dropped:
        out["visits_dropped"] = len(server_step.dropped)
    if context.transport.lost:
        out["ranks_lost"] = context.transport.lost
        out["mpi_bytes_complete"] = False  # the traffic of lost ranks is unknown
    return out
