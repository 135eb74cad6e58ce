"""Joins everything: from a configuration to a finished run folder. The only module that knows everyone."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.calibration import costs_of
from mpifl.aggregation.client_store import ClientStore
from mpifl.comm import Transport, on_server
from mpifl.comm.mpi_startup import DEVICE, MAIN
from mpifl.core.errors import UserError, require
from mpifl.core.federation import Federation
from mpifl.core.parameters import Layout, flatten
from mpifl.core.process import age
from mpifl.core.rng import key
from mpifl.core.types import ProblemInfo
from mpifl.data import CacheMissing, PoolFederation, open_federation, open_public
from mpifl.kernels import bindings
from mpifl.models import AUTOENCODERS
from mpifl.results import run_folder as folders
from mpifl.results.identity import identity, line
from mpifl.results.logging import RankLog
from mpifl.results.recorder import Recorder
from mpifl.results.supervision import Progress, Signals, Watchdog
from mpifl.runtime.asynchronous import Events
from mpifl.runtime.client_errors import DROP
from mpifl.runtime.server_step import ServerStep, StepConfig
from mpifl.runtime.synchronous import Record
from mpifl.simulation.clock import Replay
from mpifl.simulation.policies import Synchronous
from mpifl.simulation.sampling import cohort_size, newcomers
from mpifl.training import Learner, public_clients, settle

from . import loader
from .checkpoints import Checkpoints, aloud
from .engines import begin, engine, figures, stack_of
from .engines import check as check_engine
from .finish import finish
from .placement import CPU, Place, check_places, mpi_memory, place, table, threads_of, workers_of
from .schema import Config


@dataclass(frozen=True)
class RunContext:
    """What a configuration became on this rank."""

    config: Config
    transport: Transport
    federation: Federation
    problem: ProblemInfo
    learner: Learner
    num_sampled: int
    places: tuple[Place, ...] = ()  # of all ranks; on rank 0
    mpi_memory: str = MAIN
    stack: int = 0  # clients that are trained together; 0: not decided yet

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the last bits of numbers here, on rank 0; nothing elsewhere."""
        system, on_cpu = self.config.system, self.learner.device.type == CPU
        options: dict[str, Any] = {"sums": system.sums}
        if on_cpu:
            options["compiled"] = system.kernels
        else:
            options |= {"graphs": system.cuda_graphs, "deterministic": system.deterministic}
        if system.sums != "exact":
            options |= {"ranks": self.transport.size, "collective": system.collective}
        options |= {"stack": self.stack, "threads": torch.get_num_threads()}
        return identity(options, [p["machine"] for p in workers_of(self.places)]) if self.places else {}

    @property
    def late(self) -> tuple[int, ...]:
        """The clients that are not there at first."""
        groups = self.config.newcomers.groups
        if groups and self.federation.groups is not None:
            return tuple(np.flatnonzero(np.isin(self.federation.groups, groups)).tolist())
        return newcomers(self.config.newcomers.share, self.problem.num_clients, key(self.config.seed.system))


def initial_vectors(
    config: Config, shape: tuple[int, int, int], num_classes: int
) -> Callable[[int], torch.Tensor]:
    """Return j -> the j-th independent initial vector, addressed by the model seed."""

    def init(j: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(config.seed.model, "init", j).entropy >> 65)
            return flatten(config.model.build(shape, num_classes))

    return init


def device_of(config: Config, local_rank: int) -> str:
    """Return the device of a rank: GPUs of a node in turn by local rank."""
    if config.system.device == "cpu" or (config.system.device == "auto" and not torch.cuda.is_available()):
        remedy = "CUDA graphs need a GPU, and this run trains on the CPU; leave them out"
        require(not config.system.cuda_graphs, "system.cuda_graphs", True, remedy)
        return "cpu"
    remedy = "no GPU is visible to PyTorch here; take cpu or auto"
    require(torch.cuda.is_available(), "system.device", config.system.device, remedy)
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def check(config: Config, federation: Federation, problem: ProblemInfo) -> int:
    """Raise `UserError` for what cannot run; return the cohort's size."""
    needs, local = config.algorithm.needs, config.local
    try:
        config.algorithm.check(problem)
    except UserError as error:
        raise error.under("algorithm") from error
    if needs.validation:
        empty = np.flatnonzero(federation.sizes[:, 1] < 2)
        remedy = f"client {empty[0] if len(empty) else 0} has no validation data, which this method needs"
        require(not len(empty), "data.scenario.validation", 0, remedy)
    if needs.plain_sgd:
        plain = local.optimizer == "sgd" and local.momentum == 0
        require(plain, "local.momentum", local.momentum, "this method needs plain SGD without momentum")
    empty = np.flatnonzero(federation.sizes[:, 0] < 1)
    require(not len(empty), "data.scenario", f"client {empty[:1]}", "has no training data")
    late = config.newcomers
    together = not (late.share or late.groups) or isinstance(config.policy, Synchronous)
    require(together, "newcomers.share", late.share, "newcomers join under policy rounds only")
    truth = () if federation.groups is None else np.unique(federation.groups).tolist()
    some = not late.groups or set(late.groups) < set(truth)
    require(some, "newcomers.groups", list(late.groups), f"name some, not all, of the groups {truth}")
    return cohort_size(config.participation, config.cohort_size, federation.num_clients)


def auxiliary_learner(config: Config, federation: Federation, device: str | torch.device) -> Learner | None:
    """Return the learner of the network beside the model; None where the method has none."""
    options = dict(config.algorithm.auxiliary() or {})
    if not options:
        return None
    build = AUTOENCODERS[options.pop("name")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(config.seed.model, "auxiliary").entropy >> 65)
        return Learner(build(**options).build(federation.shape), device)


def with_public(
    config: Config, federation: Federation, problem: ProblemInfo, learner: Learner, is_server: bool = True
) -> ProblemInfo:
    """Return the problem with the labelled sets that the server owns, where the method needs them."""
    if config.algorithm.needs.inspect:
        problem = replace(problem, public=public_clients(federation, learner, config.local))
        remedy = "this method needs labelled sets of the server's own; take a scenario that has them (ccfl)"
        require(bool(problem.public), "data.scenario", type(config.data.scenario).__name__, remedy)
    elif learner.auxiliary is not None and is_server:
        images = federation.public()
        if not images:
            assert isinstance(federation, PoolFederation)
            images = (open_public(config.data, federation),)
        problem = replace(problem, public=public_clients(federation, learner, config.local, images))
    return problem


def _settle(config: Config, transport: Transport) -> None:
    """Take the threads asked for; refuse another number of ranks than is asked for."""
    torch.set_num_threads(threads_of(transport, config.system.threads))
    wanted = config.system.ranks
    if wanted not in (None, transport.size):
        remedy = f"this job has {transport.size}; start it with mpirun -n {wanted}, or leave the key out"
        raise UserError("system.ranks", wanted, remedy)


def _take_device(config: Config, transport: Transport) -> str:
    """Return this rank's device, ready for use."""
    device = device_of(config, getattr(transport, "local_rank", 0))
    if device != CPU:
        torch.cuda.set_device(device)  # page-locked memory, and MPI, would open a context on another GPU
    if config.system.deterministic:
        settle(torch.device(device))
    return device


def _seats(transport: Transport, device: str, compiled: bool) -> tuple[Place, ...]:
    """Return the places of all ranks on rank 0, none elsewhere; refuse a rank several GPUs of its own."""
    if "ready" not in transport.started:  # of a study, only the first case starts anything
        now = {"ready": round(age(), 2), "cpu": round(process_time(), 2)}
        transport.started = {**transport.started, **now}
    places = transport.gather(place(transport, device), "start")
    on_server(transport, lambda: check_places(places or (), compiled))
    return tuple(places or ())


def prepare(config: Config, transport: Transport, say: Callable[[str], None]) -> RunContext:
    """Open data, build the model, check that everything fits; every rank calls."""
    _settle(config, transport)
    federation = None
    if transport.is_server:
        federation = _open_or_error(config, say)
    problem = transport.bcast(federation if isinstance(federation, UserError) else None, "start")
    if problem is not None:
        raise problem
    if not isinstance(federation, Federation):
        federation = _open(config)
    if isinstance(federation, PoolFederation):
        federation.keep(config.system.sample_cache_mb)
    begin(config, federation)
    init = initial_vectors(config, federation.shape, federation.num_classes)

    def built() -> None:
        model = config.model.build(federation.shape, federation.num_classes)
        with torch.no_grad():
            model.eval()(federation.client(0).train.x[:2])

    on_server(transport, built)
    model = config.model.build(federation.shape, federation.num_classes)
    start = init(0)
    problem = ProblemInfo(
        num_clients=federation.num_clients,
        num_classes=federation.num_classes,
        num_samples=federation.sizes[:, 0].astype(np.int64),
        layout=Layout.of(model),
        init=init,
        groups=federation.groups if config.algorithm.needs.groups else None,
    )
    num_sampled = on_server(transport, lambda: check(config, federation, problem))
    device = _take_device(config, transport)
    if config.algorithm.auxiliary() is not None:  # what is wrong with it must be said on every rank
        on_server(transport, lambda: auxiliary_learner(config, federation, device) and None)
    learner = Learner(
        model,
        device,
        kernels=config.system.kernels,
        graphs=config.system.cuda_graphs,
        init=start,
        auxiliary=auxiliary_learner(config, federation, device),
    )
    places = _seats(transport, device, config.system.kernels)
    memory = on_server(transport, lambda: mpi_memory(config.system.mpi_memory, places))
    if config.algorithm.auxiliary() is not None:
        on_server(transport, lambda: with_public(config, federation, problem, learner) and None)
    problem = with_public(config, federation, problem, learner, transport.is_server)
    return RunContext(config, transport, federation, problem, learner, num_sampled, places, memory)


def _open_or_error(config: Config, say: Callable[[str], None]) -> Federation | UserError:
    """Open the data on rank 0, preparing them if need be."""
    try:
        return open_federation(config.data, config.seed.data, say)
    except UserError as error:
        return error


def _open(config: Config) -> Federation:
    """Open the data that rank 0 prepared; prepare them again where its files cannot be seen."""
    try:
        return open_federation(config.data, config.seed.data, build=False)
    except CacheMissing:
        return open_federation(config.data, config.seed.data)


def build_server_step(context: RunContext, store: ClientStore) -> ServerStep:
    """Return what takes the server steps of a context."""
    config, system = context.config, context.config.system
    shuffle = None if system.placement_seed is None else key(system.placement_seed, "shuffle")
    return ServerStep(
        StepConfig(
            transport=context.transport,
            algorithm=config.algorithm,
            federation=context.federation,
            learner=context.learner,
            local=config.local,
            problem=context.problem,
            store=store,
            seed=key(config.seed.training),
            exact=system.sums == "exact",
            collective=None if system.collective == "auto" else system.collective,
            shuffle=shuffle,
            absent=context.late,
            finetune_epochs=config.evaluation.finetune_epochs,
            payload=config.payload,
            costs=costs_of(system.cost, context.transport),
            stack=context.stack or stack_of(context),
            drops=config.on_client_error == DROP,
            direct=context.mpi_memory == DEVICE,
        )
    )


def run(
    config: Config,
    transport: Transport,
    quiet: bool = False,
    resumed: Path | None = None,
    bind_report: bool = False,
    from_start: bool = True,
) -> Path | None:
    """Run a configuration over all ranks; return the run folder on rank 0.

    Args:
        resumed: the folder of a run to go on with. bind_report: print where every rank is.
        from_start: whether a run that has written no checkpoint begins again.
    """
    start = perf_counter()
    quiet = quiet or not transport.is_server
    bar = Progress(config.rounds, config.name, quiet, bar=transport.size == 1)
    transport.watch(config.system.stopped_timeout_s)
    with bar as progress, Signals() as signals:
        context = prepare(config, transport, progress.say)
        if bind_report and context.places:
            print(table(context.places), flush=True)
        clock = on_server(transport, lambda: check_engine(context))
        if isinstance(config.clock, Replay) and not isinstance(config.policy, Synchronous):
            progress.say(f"times are those of {config.clock.trace}, not of delay, network and availability")
        context = replace(context, stack=stack_of(context))
        if context.identity:
            progress.say(line(context.identity))
            _say_problem(config)
        if config.system.scratch is not None:
            _check_scratch(config.system.scratch, transport)
        folder = on_server(transport, lambda: resumed or _new_folder(context))
        keeper = Checkpoints(folder, config, context.identity, signals, progress.say)
        begin = partial(keeper.find, from_start) if resumed else keeper.create
        saved = on_server(transport, begin, everywhere=False)
        token = on_server(transport, lambda: f"{keeper.identity}-{secrets.token_hex(4)}")
        store = ClientStore(token, config.system.scratch, keeper.clients)
        log = folder / "logs" / f"{socket.gethostname()}-{transport.rank}.log"
        dog = Watchdog(config.system.watchdog_s, lambda: transport.alive, log)
        with closing(keeper), closing(store), RankLog(log, transport.is_server):
            server_step = build_server_step(context, store)
            recorder = keeper.recorder = Recorder(folder, context.federation) if transport.is_server else None
            if saved is not None and recorder is not None:
                keeper.restore(recorder)
            driver = engine(context, server_step, recorder, clock, keeper)
            with dog:
                server = driver.run(_observer(context, server_step, recorder, progress), saved)
            more = driver.summary() if isinstance(driver, Events) and transport.is_server else {}
            finish(context, server_step, recorder, server, start, more)
        if recorder is not None:
            keeper.done()
            progress.say(f"results: {folder}")
        return folder if recorder is not None else None


def _say_problem(config: Config) -> None:
    """Say, once in a process, that numbers are not those that the loops in C give."""
    if bindings.PROBLEM and config.system.kernels and config.system.device != "cuda":
        once(f"{bindings.PROBLEM}; PyTorch trains instead: slower, with other last bits and another digest")


once = cache(aloud)


def _check_scratch(scratch: str, transport: Transport) -> None:
    """Raise `UserError` where a rank cannot write to its scratch folder, before the run folder is made."""
    fault = None
    try:
        Path(scratch).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=scratch).close()
    except OSError as error:
        fault = f"cannot be written ({error.strerror}) on {socket.gethostname()}; give another folder"
    faults = transport.gather(fault, "start")

    def evaluate() -> None:
        first = next((f for f in faults or () if f), None)
        require(first is None, "system.scratch", scratch, str(first))

    on_server(transport, evaluate)


def _new_folder(context: RunContext) -> Path:
    config = context.config
    folder = folders.create(config.output.folder, config.name, config.output.id)
    (folder / "config.yaml").write_text(loader.dump(config))
    return folder


def _observer(
    context: RunContext, server_step: ServerStep, recorder: Recorder | None, progress: Progress
) -> Callable[[Record], None]:
    def observe(record: Record) -> None:
        note = ""
        if recorder is not None and record.scores is not None:
            ledger = server_step.ledger
            traffic = {f"federation_bytes_{way}": ledger.total(way) for way in ("up", "down")}
            row = recorder.record_evaluation(
                record.step,
                record.seconds,
                record.scores,
                record.evaluated_clients,
                context.config.algorithm.labels(record.server),
                {**record.train, **figures(context, record, server_step.visits)},
                traffic,
                record.timing,
                record.virtual_seconds,
                context.config.algorithm.placed(record.server, server_step.visits > 0),
            )
            note = f"accuracy {row['accuracy_mean']:.4f}  worst {row['accuracy_worst']:.4f}"
            if context.federation.groups is not None:
                note += f"  ARI {row['ari']:.2f}"
                note += f" without {row['num_unplaced']} unplaced clients" if row["num_unplaced"] else ""
            note += f"  clusters {row['num_clusters']}"
        progress.step(record.step, note)

    return observe
