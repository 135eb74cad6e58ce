"""A run from its configuration to its complete run folder."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np

from mpifl.aggregation.client_store import ClientStore
from mpifl.comm.transport import Transport, on_server
from mpifl.core.beginning import STEPS
from mpifl.core.errors import CodeFailed, UserError
from mpifl.core.files import write_atomically
from mpifl.core.parameters import take
from mpifl.core.progress import VisitCounter, doing
from mpifl.core.rng import key
from mpifl.core.torch_state import pinned, restore, state
from mpifl.experiment import loader
from mpifl.experiment.build import Say, build, build_engine, build_server_step
from mpifl.experiment.context import RunContext
from mpifl.experiment.placement import CPU, table, unlike
from mpifl.experiment.schema import GROUPS, Config
from mpifl.forecast.hosting import groups_of
from mpifl.forecast.trials import has_trials, try_outcomes
from mpifl.kernels import bindings
from mpifl.models import ModelOptions
from mpifl.models.pretrained import read_state
from mpifl.results import run_folder as folders
from mpifl.results.identity import line
from mpifl.results.recorder import Recorder, written_clients
from mpifl.runtime.engine import Engine, EvaluationSchedule, Observe, Record
from mpifl.runtime.run_state import Saved
from mpifl.runtime.server_step import ServerStep
from mpifl.simulation.stop_rules import StopRules
from mpifl.supervision.logging import rank_log, warn_once
from mpifl.supervision.progress import Progress, ProgressFile
from mpifl.supervision.signals import Signals, watchdog
from mpifl.training.batched import stackable

from . import ending
from .checkpoints import Checkpoints, locked
from .existing import remove_replaced
from .figures import columns, estimated, privacy_of_clients
from .outputs import finish
from .resumption import about, check_same
from .run_callbacks import RunCallbacks
from .shared_steps import SharedSteps
from .tracing import traced


def run(
    config: Config,
    transport: Transport,
    quiet: bool = False,
    resumed: Path | None = None,
    bind_report: bool = False,
    from_start: bool = True,
    asked_to_stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Any] = (),
    beginning: Mapping[str, Path] | None = None,
    is_new: Callable[[str], bool] = lambda text: True,
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
        beginning: of a case of a sweep, phase -> folder of the results that it shares with other cases; the
            same on every rank.
        is_new: of a case of a sweep, returns whether no other case has printed the line that says how numbers
            are computed.

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
        if config.system.share_beginnings and not beginning and transport.is_server:
            warn_once("system.share_beginnings: without effect: no other case of a sweep has this beginning")
        with doing("opening data and model"):
            context = build(config, transport, progress.say)
            if has_trials(config):
                on_server(transport, lambda: try_outcomes(context, resumed is not None))
        announce(context, progress.say, bind_report, is_new)
        folder = on_server(transport, lambda: resumed or new_folder(config))
        signals.folder = str(folder)
        recorder = open_recorder(context, folder) if transport.is_server else None
        terms = about_of(context) if transport.is_server else {}
        shared = shared_steps(context, (beginning or {}).get(STEPS))
        checkpoints = Checkpoints(
            folder, terms, signals, recorder, progress.say, lock, shared=shared, **vars(config.checkpoint)
        )
        with closing(checkpoints), RunCallbacks(context, callbacks, folder, signals) as observed:
            rules = ending.rules_of(config, observed)
            begin = partial(first_state, checkpoints, config, resumed is not None, from_start, rules)
            saved = on_server(transport, begin, everywhere=False)
            observed.start(checkpoints.run_id if transport.is_server else "", resumed is not None, saved)
            with checkpoints.restoring():
                elapsed = start - seconds_before(saved)
            fault = train(
                context, checkpoints, recorder, saved, progress, observed, rules, elapsed, beginning
            )
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
    rules: StopRules,
    start: float,
    beginning: Mapping[str, Path] | None = None,
) -> UserError | CodeFailed | None:
    """Take all steps of a run and write its results; every rank calls.

    Args:
        context: context of the run.
        checkpoints: checkpoints of the run folder.
        recorder: recorder of the run folder, on rank 0.
        saved: the state to resume from; None begins the run.
        progress: shows each step.
        observed: calls the callbacks after each step.
        rules: may end the run before its last round.
        start: start of the run by `perf_counter`, minus the seconds before the checkpoint of a resumed run.
        beginning: phase -> folder of its results that cases of a sweep share; None shares nothing.

    Returns:
        The return value of `finish`.
    """
    config, transport, folder = context.config, context.transport, checkpoints.run_folder
    token = on_server(transport, lambda: f"{checkpoints.run_id}-{secrets.token_hex(4)}")
    store = ClientStore(token, config.system.scratch, checkpoints.clients)
    log = folder / "logs" / f"{socket.gethostname()}-{transport.rank}.log"
    recording = traced(context, folder, recorder)
    with closing(store), rank_log(log, transport.is_server), recording as trace:
        alive = partial(watchdog, config.system.watchdog_s, lambda: transport.last_call, log)
        guard = partial(alive, before_end=trace.write)
        counter = VisitCounter(store.folder, transport.rank, transport.size)
        server_step = build_server_step(context, store, counter, beginning, trace.timeline)
        if recorder is not None and recorder.written is not None:
            server_step.ledger.remember(recorder.written)
            server_step.computation.remember(recorder.written)
        arrived = ignore if recorder is None else recorder.arrived
        engine = build_engine(context, server_step, arrived, checkpoints)
        with progress_file(context, folder, saved, counter) as file:
            with guard():
                see: Observe = ignore  # workers record no steps
                if recorder is not None:
                    see = observer(context, server_step, engine, recorder, progress, observed, rules, file)
                with server_step.watch("engine"):
                    server = engine.run(see, saved)
            with doing("writing results"):
                terms = checkpoints.about
                origin = {"settings": loader.settings(config), "identity": terms.get("surroundings", {})}
                origin |= {"files": terms["files"]} if terms.get("files") else {}
                if (end := rules.ending) is not None and end.step < config.rounds:
                    progress.say(ending.in_words(end, context))
                    origin |= ending.origin_of(end, config.rounds, origin["identity"])
                return finish(context, server_step, engine, recorder, server, start, origin, guard)


def shared_steps(context: RunContext, folder: Path | None) -> SharedSteps | None:
    """Return the steps that a case of a sweep shares with others, None without their folder."""
    if folder is None:
        return None
    config, regroups = context.config, bool(context.federation.regroups)
    name, drifts = f"{config.name}-{config.output.id}", config.drift.kind is not None
    return SharedSteps(folder, name, drifts, regroups, tells_costs=drifts or bool(config.recluster))


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


def announce(
    context: RunContext, say: Say, bind_report: bool, is_new: Callable[[str], bool] = lambda text: True
) -> None:
    """Print remarks, warnings and hints before the first step; only on rank 0; see `run`."""
    if not context.places:
        return
    config = context.config
    if bind_report:
        print(table(context.places), flush=True)
        if config.system.hosting == GROUPS:
            print("\n".join(groups_of(context, context.transport.size).lines()), flush=True)
    if config.system.hosting == GROUPS and len(context.places) <= 2 and context.learner.device.type == CPU:
        warn_once("system.hosting: without effect: there is one worker, which trains all clients")
    evaluations = EvaluationSchedule(context.evaluated_clients, config.evaluation.every)
    if config.stop.patience is not None and config.stop.patience >= evaluations.num_due(0, config.rounds):
        warn_once(f"stop.patience: without effect: {config.rounds} rounds have no more evaluations than that")
    if config.clock.remark:
        say(config.clock.remark)
    if is_new(computed := line(context.identity)):
        say(computed)
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
    remove_replaced(config)
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
    start, model = config.start, config.model
    files = model.weight_files() if isinstance(model, ModelOptions) else ()
    if not files and start.run is None:
        return ""
    found = hashlib.sha256()
    for weights in files:
        for name, tensor in sorted(read_state(weights).items()):
            found.update(f"{name} ".encode() + tensor.contiguous().numpy().tobytes())
    if start.run is not None:
        vector = context.problem.init(0)
        if start.part == "body":
            vector = take(vector, context.problem.layout.part("body"))
        found.update(vector.numpy().tobytes())
    return found.hexdigest()[:16]


def first_state(
    checkpoints: Checkpoints, config: Config, resumed: bool, from_start: bool, rules: StopRules
) -> Saved | None:
    """Return the state from which a run goes on, None to begin with the first step; on rank 0.

    A new run may go on from steps that it shares with other cases. The configuration of a resumed run is
    written to the run folder: it may have more rounds, and other rules that end it.
    """
    folder = checkpoints.run_folder
    if resumed:
        saved = checkpoints.find(from_start, partial(check_same, config, folder, checkpoints.about))
    else:
        saved = checkpoints.create()
    if saved is not None and config.stop.given:
        ending.restore(rules, config, folder / "metrics.csv")
    file, text = folder / "config.yaml", loader.dump(config)
    if resumed and file.read_text() != text:
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
    rules: StopRules,
    file: ProgressFile,
) -> Observe:
    """Return the function to call after each step; on rank 0.

    It writes the scores, shows the progress, calls the callbacks, and returns whether the run ends.
    """
    ledger, hooks, settings = server_step.ledger, server_step.hooks, state()
    asked = observed.any or context.config.stop.bytes is not None  # a sum over all clients after each step

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
            computation=server_step.computation.columns(),
            timing=timing,
            virtual_seconds=record.virtual_seconds,
            placed=hooks.placed(record.server, server_step.taken > 0),
            visits=server_step.visits,
        )

    def observe(record: Record) -> bool:
        restore(settings)  # a policy of the user's own runs on rank 0 only
        timing = by_number(context.transport, record.timing)
        file.step, file.timing = record.step, timing or file.timing
        if context.config.drift.kind is not None:
            seconds, changes = record.virtual_seconds or 0.0, context.federation.change_steps
            recorder.running.stepped(record.step, seconds, changes)
        if record.updates and not record.again:
            recorder.record_updates(record.step, record.updates)
        for client, divergence in () if record.again else estimated(context, record):
            recorder.running.estimated(client, divergence)
        row = None if record.scores is None else evaluated(record, timing)
        progress.step(record.step, "" if row is None else in_short(context, row))
        sent = moved() if asked else {}
        if observed.any:
            observed.step(record, row, recorder.clients, sent)
        figures = ending.spent(record, sent) if row is None else row
        return rules.after(figures, evaluated=row is not None) is not None

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
