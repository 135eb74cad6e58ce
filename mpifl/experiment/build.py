"""Build a run from its configuration: resources, data, model and checks, then server step and engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.calibration import costs_of
from mpifl.aggregation.client_store import ClientStore
from mpifl.comm.mpi_startup import DEVICE
from mpifl.comm.transport import Transport, on_server
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import ServerEvaluation, uses
from mpifl.core.devices import use_deterministic_algorithms
from mpifl.core.errors import UserError, name_of, require, within_memory
from mpifl.core.federation import CLASSES, DataInfo, Federation, Split
from mpifl.core.imports import code_of
from mpifl.core.parameters import Layout, flatten, put, take
from mpifl.core.process import FreedMemory, age
from mpifl.core.progress import VisitCounter
from mpifl.core.rng import key
from mpifl.core.task import Task
from mpifl.core.timing import NO_TIMELINE, Timeline
from mpifl.core.torch_state import Originals, kept
from mpifl.core.trainer import trainer_of
from mpifl.core.types import ProblemInfo
from mpifl.data import CacheMissing, DataConfig, PoolFederation, open_federation, open_public
from mpifl.data.drift import lines_on
from mpifl.models import (
    AUTOENCODERS,
    REPLAYED,
    LoRA,
    ModelOptions,
    checksum,
    count_whole,
    seeded_model,
    start_apart,
    starts_alike,
)
from mpifl.models.peft_files import FOLDER as ADAPTERS
from mpifl.protection.accountant import Accountant, Spending
from mpifl.protection.attacks import Attack
from mpifl.runtime.asynchronous import AsynchronousEngine
from mpifl.runtime.engine import Engine, EvaluationSchedule
from mpifl.runtime.hook_errors import DROP
from mpifl.runtime.measures import ModelProducts, compare_updates
from mpifl.runtime.plain_visits import in_one_call
from mpifl.runtime.run_state import Checkpointer
from mpifl.runtime.scheduler import visit_work
from mpifl.runtime.server_step import Measure, ServerStep
from mpifl.runtime.step_config import StepConfig, StepEvaluation, Sums
from mpifl.runtime.synchronous import SynchronousEngine
from mpifl.runtime.virtual_rounds import VirtualRounds
from mpifl.simulation.client_devices import Alike
from mpifl.simulation.delays import Constant
from mpifl.simulation.durations import visit_duration
from mpifl.simulation.newcomers import JOINS, LEAVES, leavers, line_on_leavers, newcomers, times_of
from mpifl.simulation.policies import AsynchronousPolicy, ClockParts, Policy, RoundsPolicy
from mpifl.simulation.sampling import cohort_size
from mpifl.supervision.logging import warn_once
from mpifl.training.batched import draws, sample_weights, stackable
from mpifl.training.client import LocalClients, public_clients
from mpifl.training.config import LocalConfig
from mpifl.training.cuda_graph import Replayed
from mpifl.training.learner import Learner, pick_stack
from mpifl.training.own_metrics import metrics_of
from mpifl.training.per_client import clients_of, local_configs
from mpifl.training.precision import FLOAT32, check_precision, set_tf32
from mpifl.training.tasks import Classification

from . import loader
from .checks import (
    check_cohort,
    check_folder,
    check_noise,
    check_parts,
    check_private_statistics,
    check_rule,
    warn_of_unused_exchange,
)
from .context import Decisions, Parts, RunContext, with_newcomers
from .filters import adapter_ranks, build_filters
from .placement import CPU, Place, check_places, mpi_memory, place, threads_of
from .pretraining_cache import PretrainingCache
from .schema import GROUPS, Config, Leavers, Newcomers, StartConfig, SystemConfig
from .shared_beginning import shared_beginning
from .starting_model import FILE, check_base, earlier_privacy, read_model
from .visit_loads import visit_loads

FLOAT_BYTES = 4

Say = Callable[[str], None]
InitialVectors = Callable[[int], torch.Tensor]


def build(config: Config, transport: Transport, say: Say = lambda text: None) -> RunContext:
    """Open the data, build the model and check that everything fits; every rank calls.

    Rank 0 goes first: it prepares the data if necessary, and checks the run. It then sends its decisions, or
    the error, to the other ranks.

    Args:
        config: the configuration; its sections were checked against each other (`check_sections`).
        transport: connects the ranks.
        say: called with lines of progress, on rank 0.

    Raises:
        UserError: the run cannot begin; on every rank. Names the key, its value and a remedy.
    """
    codes = code_of(loader.texts(config)), loader.plugins_of(config)
    resources = take_resources(config.system, config.local.precision, codes, transport)
    with kept():  # a module may set a default when it is imported
        return _built(config, transport, say, resources)


def _built(config: Config, transport: Transport, say: Say, resources: Resources) -> RunContext:
    """Return the context of a run on a rank with its resources."""
    parts: Parts | None = None
    start = None if (folder := config.start.run) is None else on_server(transport, lambda: read_model(folder))

    def open_parts(is_server: bool, tell: Say) -> Parts:
        federation = open_data(config, is_server, tell)
        public = public_sets(config.algorithm, config.data, federation, is_server)
        return build_parts(config, federation, public, resources.device, start)

    def go_first() -> Decisions:
        nonlocal parts  # not returned, because `on_server` sends its result to all ranks
        memory = check_resources(config.system, resources)
        parts = open_parts(True, say)
        decisions = decide(config, parts, memory, resources.num_ranks)
        if leaves := decisions.leaves:
            say(line_on_leavers(leaves, parts.problem.num_clients, config.policy.joins_by_step))
        return decisions

    decisions = on_server(transport, go_first)
    if parts is None:
        parts = open_parts(False, lambda text: None)
        remedy = f"its frozen weights differ on {socket.gethostname()}; use the same file on all machines"
        same = checksum(parts.learner.flat.module) == decisions.base
        require(same, "model.weights", config.weights, remedy)
    parts, places = with_newcomers(parts, config.policy, decisions.joins, decisions.leaves), resources.places
    return RunContext(**vars(parts), config=config, transport=transport, decisions=decisions, places=places)


# -- resources -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """The resources of a rank.

    Attributes:
        device: device of the model, `cpu` or `cuda:i`.
        num_ranks: number of ranks of the job.
        places: places of all ranks, on rank 0; empty elsewhere.
        faults: error of each rank, None if it has none; on rank 0, empty elsewhere.
    """

    device: str
    num_ranks: int
    places: tuple[Place, ...]
    faults: tuple[UserError | None, ...]


def take_resources(
    system: SystemConfig, precision: str, codes: tuple[str, str], transport: Transport
) -> Resources:
    """Set the threads and the device of this rank and report them to rank 0; every rank calls.

    Args:
        system: the section `system`.
        precision: precision of local training, to see whether the device has it.
        codes: hash of the modules that the configuration names, and the packages of its plug-ins.
        transport: connects the ranks.
    """
    torch.set_num_threads(threads_of(transport, system.threads))
    device, fault = CPU, None
    try:
        device = device_of(system, transport.device_rank)
        check_precision(precision, torch.device(device))
        check_folder("system.scratch", system.scratch)
    except UserError as error:
        fault = error
    if device != CPU:
        torch.cuda.set_device(device)  # otherwise page-locked memory and MPI open a context on another GPU
        torch.cuda.reset_peak_memory_stats(device)  # of earlier runs in this process
        set_tf32(torch.device(device), False)  # PyTorch's default uses it in convolutions
    if system.deterministic:
        use_deterministic_algorithms(torch.device(device))
    if "ready" not in transport.started:  # only the first of several runs in a process starts anything
        now = {"ready": round(age(), 2), "cpu": round(process_time(), 2)}
        transport.started = {**transport.started, **now}
    ranks = transport.gather((place(transport, device, *codes), fault), "start") or []
    places, faults = (tuple(rank[i] for rank in ranks) for i in (0, 1))
    return Resources(device, transport.size, places, faults)


def replayed_steps(
    system: SystemConfig, model: Any, task: Task, local: LocalConfig, device: str
) -> Replayed | None:
    """Return which steps of SGD are replayed as CUDA graphs; None for none.

    Args:
        system: the section `system`. If its `cuda_graphs` is None, the steps of `local` are replayed if this
            changes no bit.
        model: the section `model`.
        task: the section `task`.
        local: how clients train.
        device: device of the model, `cpu` or `cuda:i`.
    """
    if system.cuda_graphs is not None:
        return Replayed() if system.cuda_graphs else None
    known = name_of(model) in REPLAYED and not model.lora.rank and type(task) is Classification
    exact = system.deterministic and system.stack == 1 and local.precision == FLOAT32
    return Replayed(local) if device != CPU and known and exact else None


def device_of(system: SystemConfig, number: int) -> str:
    """Return the device of a rank; ranks use the GPUs of their node in turn.

    Args:
        system: the section `system`.
        number: number of the rank on its node, `Transport.device_rank`.

    Raises:
        UserError: a GPU is required and none is visible, or CUDA graphs are asked for on the CPU.
    """
    if system.device == "cpu" or (system.device == "auto" and not torch.cuda.is_available()):
        remedy = "CUDA graphs need a GPU, and this run trains on the CPU; leave them out"
        require(not system.cuda_graphs, "system.cuda_graphs", True, remedy)
        return CPU
    remedy = "no GPU is visible to PyTorch here; use cpu or auto"
    require(torch.cuda.is_available(), "system.device", system.device, remedy)
    return f"cuda:{number % torch.cuda.device_count()}"


def check_resources(system: SystemConfig, resources: Resources) -> str:
    """Check the ranks, and return the memory from which MPI sends, `main` or `device`; on rank 0.

    Raises:
        UserError: a rank has a fault, there are more or fewer ranks than asked for, or the ranks do not fit
            together.
    """
    for fault in resources.faults:
        if fault is not None:
            raise fault
    wanted, found = system.ranks, resources.num_ranks
    remedy = f"this job has {found}; start it with mpirun -n {wanted}, or leave the key out"
    require(wanted in (None, found), "system.ranks", wanted, remedy)
    check_places(resources.places, system.kernels)
    return mpi_memory(system.mpi_memory, resources.places)


# -- data and model ------------------------------------------------------------------------------------------


def open_data(config: Config, prepares: bool, say: Say = lambda text: None) -> Federation:
    """Return the federation with its attackers, its data prepared as the policy requires.

    Args:
        config: the configuration.
        prepares: whether to add missing files to the cache. If false, files are added only if those that
            rank 0 prepared are not visible to this rank.
        say: called with lines of progress.

    Raises:
        UserError: the data cannot be opened, or the attack does not fit them.
    """
    data, seed, cache_bytes = config.data, config.seed.data, 10**6 * config.system.sample_cache_mb
    try:
        federation = open_federation(data, seed, say, build=prepares, cache_bytes=cache_bytes)
    except CacheMissing:
        federation = open_federation(data, seed, cache_bytes=cache_bytes)
    if config.drift.kind is not None:
        try:
            federation.drift(config.drift, key(seed, "drift"))
            for line in lines_on(config.drift, federation.data_sets):
                say(line)
        except UserError as error:
            raise error.under("drift") from error
    config.policy.prepare(federation)
    if isinstance(config.attack, Attack):
        try:
            clients = config.attack.attackers(federation.num_clients, key(seed, "attack"))
            wrong = config.attack.labels(federation.num_classes)
            remedy = f"gives samples other classes, but labels of this source are {federation.info.labels}"
            fits = wrong is None or federation.info.labels == CLASSES
            require(fits, "name", name_of(config.attack), f"{remedy}; use an attack on uploads")
            federation.attack(clients, wrong)
        except UserError as error:
            raise error.under("attack") from error
    return federation


def public_sets(
    algorithm: Algorithm, data: DataConfig, federation: Federation, is_server: bool
) -> tuple[Split, ...]:
    """Return the labelled sets of the server; empty if the method does not need them.

    Methods that evaluate uploads on these sets get them on every rank, methods with an auxiliary network only
    on rank 0.
    """
    if uses(algorithm, ServerEvaluation):
        return federation.public()
    if algorithm.auxiliary() is None or not is_server:
        return ()
    if sets := federation.public():
        if data.public != DataConfig().public:
            warn_once("data.public: without effect: the server pre-trains on its sets of data.scenario")
        return sets
    assert isinstance(federation, PoolFederation)
    return (open_public(data, federation),)


def build_parts(
    config: Config,
    federation: Federation,
    public: tuple[Split, ...],
    device: str,
    start: torch.Tensor | None = None,
) -> Parts:
    """Build the model, the auxiliary network, the method's view of the problem, and the visit durations.

    Args:
        config: the configuration.
        federation: the clients' data.
        public: the labelled sets of the server.
        device: device of the model, `cpu` or `cuda:i`.
        start: the model [d] of an earlier run from which this run starts; None for none.

    Raises:
        UserError: that model has another size.
    """
    info, seed = federation.info, config.seed
    init = initial_vectors(config.model, seed.model, info, config.algorithm.needs.different_starts)
    module = seeded_model(config.model, info, seed.model)  # its frozen weights stay as drawn
    layout, whole_bytes = Layout.of(module), FLOAT_BYTES * count_whole(module)
    if start is not None:
        init = from_earlier(start, config.start, layout, init)
    trainer = trainer_of(config.local.trainer)
    learner = Learner(
        module,
        device,
        kernels=config.system.kernels,
        graphs=replayed_steps(config.system, config.model, config.task, config.local, device),
        init=init(0),
        auxiliary=auxiliary_learner(config.algorithm, seed.model, info, device),
        task=config.task.prepared(info),
        trainer=trainer,
        rounds=config.rounds,
        parts=info.parts,
    )
    informed = config.algorithm.needs.groups
    problem = ProblemInfo(
        num_clients=federation.num_clients,
        num_classes=info.num_classes,
        num_samples=federation.sizes[:, 0].astype(np.int64),
        layout=layout,
        init=init,
        groups=federation.groups if informed else None,
        regrouped=regroupings(federation) if informed else {},
        public=public_clients(federation, learner, config.local, public) if public else (),
    )
    system, n = key(seed.system), problem.num_clients
    fleet = config.devices.fleet(n, system.of("devices"))
    differing = local_configs(config.local, config.per_client, fleet.names, n)
    samples = _TrainedSamples(federation, config.local, differing, learner.drop_single)
    fleet = replace(fleet, samples=samples, cycle=samples.cycle)
    delay, network, availability = config.delay, config.network, config.availability
    times = delay, network, availability, system, n, whole_bytes, config.devices, fleet
    loads = visit_loads(config, federation, problem, learner, differing) if config.costs == "all" else None
    duration = visit_duration(*times, loads)
    return Parts(federation, problem, learner, duration, differing, client_ranks(config.lora, fleet.names, n))


def client_ranks(lora: LoRA, devices: Sequence[str], num_clients: int) -> tuple[int, ...]:
    """Return the rank of each client's adapters [N]; empty if all are alike.

    Args:
        lora: `model.lora`.
        devices: the device of each client; empty if all are alike.
        num_clients: N, number of clients.

    Raises:
        UserError: a key of `ranks` names a client that does not exist.
    """
    if not lora.ranks:
        return ()
    names = clients_of("model.lora.ranks", lora.ranks, devices, num_clients)
    return tuple(lora.ranks[names[k]] if k in names else lora.rank for k in range(num_clients))


def regroupings(federation: Federation) -> dict[int, np.ndarray]:
    """Return server step -> the true groups [N] from that step on, where they change."""
    later = ((step, federation.groups_at(step)) for step in federation.regroups)
    return {step: groups for step, groups in later if groups is not None}


@dataclass(frozen=True)
class _TrainedSamples:
    """(client, cycle) -> samples that training on that data set takes, each pass counted.

    Pickled without the data.

    Attributes:
        federation: the clients' data; None on ranks that have no clock.
        local: how clients train.
        differing: client -> its own `local`, for clients that train in another way.
        drop_single: whether batches of one sample are left out.
    """

    federation: Federation | None
    local: LocalConfig
    differing: dict[int, LocalConfig]
    drop_single: bool

    def __call__(self, client: int, cycle: int) -> int:
        local = self.differing.get(client, self.local)
        return local.num_trained(self._data.num_samples_in(client, cycle), self.drop_single)

    def cycle(self, client: int, visit: int) -> int:
        """Return the number of the data set of a visit."""
        return self._data.cycle(client, visit)

    @property
    def _data(self) -> Federation:
        assert self.federation is not None, "rank 0 alone asks what it was told"
        return self.federation

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.local, self.differing, self.drop_single)


def initial_vectors(model: Any, seed: int, info: DataInfo, apart: bool = False) -> InitialVectors:
    """Return j -> the j-th independent initial vector [d].

    Args:
        model: the section `model` of the configuration.
        seed: the model seed.
        info: description of samples and labels.
        apart: whether initial models must compute different functions, see `Needs.different_starts`.
    """
    adapted = apart and isinstance(model, ModelOptions) and model.lora.rank > 0
    adapted = adapted and not model.starts_from_adapters
    if not adapted or not starts_alike(*(seeded_model(model, info, seed, j) for j in range(2))):
        return lambda j: flatten(seeded_model(model, info, seed, j))

    def init(j: int) -> torch.Tensor:
        net = seeded_model(model, info, seed, j)
        with key(seed, "init", j, "apart").seeded():
            start_apart(net)
        return flatten(net)

    return init


def from_earlier(
    start: torch.Tensor, config: StartConfig, layout: Layout, drawn: InitialVectors
) -> InitialVectors:
    """Return j -> the j-th initial vector [d] of a run that starts from an earlier model.

    Args:
        start: the earlier model [d].
        config: the section `start`, which says which part of it is used.
        layout: layout of this run's model.
        drawn: j -> the j-th initial vector without the earlier model.

    Raises:
        UserError: the earlier model has another size.
    """
    remedy = f"its model has {len(start)} numbers, this run's has {layout.size}; use the same model and data"
    require(len(start) == layout.size, "start.run", config.run, remedy)
    if config.part == "all":
        return lambda j: start.clone()
    body = layout.part("body")
    return lambda j: put(drawn(j), body, take(start, body))


def auxiliary_learner(algorithm: Algorithm, seed: int, info: DataInfo, device: str) -> Learner | None:
    """Return the learner of the auxiliary network; None if the method has none.

    Args:
        algorithm: the method.
        seed: the model seed.
        info: description of the samples, which are images.
        device: device of the network.
    """
    options = dict(algorithm.auxiliary() or {})
    if not options:
        return None
    with key(seed, "auxiliary").seeded(), within_memory("algorithm", algorithm):
        return Learner(AUTOENCODERS[options.pop("name")](**options).build(info.shape), device)


# -- checks --------------------------------------------------------------------------------------------------


def decide(config: Config, parts: Parts, memory: str, num_ranks: int) -> Decisions:
    """Check that data, model, method, policy and clock fit, and return what is decided for all; on rank 0.

    `check_sections` has already checked what needs neither data nor model.

    Args:
        config: the configuration.
        parts: the parts that rank 0 built.
        memory: the return value of `check_resources`.
        num_ranks: number of ranks of the job.

    Raises:
        UserError: something does not fit; names the key, its value and a remedy.
    """
    check_parts(config, parts)
    warn_of_unused_exchange(config.system, num_ranks)
    n = parts.problem.num_clients
    num_sampled = cohort_size(config.participation, config.cohort_size, n)
    joins, system = newcomers_of(config, parts.federation), key(config.seed.system)
    if not joins and config.newcomers != Newcomers():
        warn_once("newcomers.joins: without effect: no client is a newcomer; give share or groups")
    leaves = leavers_of(config, parts.federation, tuple(joins))
    if not leaves and config.leavers != Leavers():
        warn_once("leavers.leaves: without effect: no client leaves; give share or groups")
    present = n - sum(when > 1 for when in joins.values()) if config.policy.joins_by_step else n - len(joins)
    present -= len(leaves)  # the fewest that there are at a time
    parts = with_newcomers(parts, config.policy, joins, leaves)
    ties = isinstance(config.delay, Constant) and isinstance(config.devices, Alike)
    away = not parts.duration.presence.always
    check_cohort(config.algorithm, config.policy, num_sampled, present, ties, away)
    check_rule(config.robust, config.algorithm, config.policy, num_sampled, present)
    check_noise(config.privacy, num_sampled, n)
    check_private_statistics(
        config.algorithm, config.privacy, config.secure_aggregation, parts.problem.layout
    )
    for k in range(min(n, 10)):  # find durations that are far too long before anything is trained
        parts.duration.end(k, 0, 0.0)
    duration, rounds = parts.duration, config.rounds
    clock_parts = ClockParts(config.clock, duration, parts.federation, num_sampled, system, rounds)
    clock = config.policy.open_clock(clock_parts)
    stack = stack_of(config.system.stack, config.policy, config.local, parts, num_sampled, num_ranks)
    base = checksum(parts.learner.flat.module)
    if config.start.run is not None:
        check_base(config.start.run, config.weights, config.lora, config.seed.model, base)
    accountant = Accountant(config.privacy, n, num_sampled)
    spent = privacy_spent_before(config.start, config.weights, accountant, parts.federation.content)
    return Decisions(num_sampled, joins, leaves, memory, stack, clock, base, spent)


def newcomers_of(config: Config, federation: Federation) -> dict[int, float]:
    """Return when the clients join that are absent at first: at a step or, by the policy, at a time."""
    late, system = config.newcomers, config.seed.system
    absent = absent_clients(late, system, federation)
    return times_of(absent, (late.joins, late.spread), (late.joins_s, late.spread_s), key(system).of(JOINS))


def leavers_of(config: Config, federation: Federation, absent: tuple[int, ...]) -> dict[int, float]:
    """Return when clients leave for good: at a step or, by the policy, at a time.

    Args:
        config: the configuration.
        federation: the clients' data.
        absent: the clients that are absent at first; they stay once they have joined.

    Raises:
        UserError: `leavers.groups` names groups that do not exist or are absent at first, or leaves nobody;
            or `leavers.share` is too small for one client.
    """
    left, system = config.leavers, key(config.seed.system)
    there = np.setdiff1d(np.arange(federation.num_clients), np.asarray(absent, np.int64))
    if left.groups:
        found = _in_groups("leavers.groups", left.groups, federation)
        remedy = "name groups that are there at first, and leave a client behind"
        good = set(found) < set(there.tolist())
        require(good, "leavers.groups", list(left.groups), remedy)
    else:
        found = leavers(left.share, federation.num_clients, there, system)
        remedy = f"has no effect: none of {len(there)} clients leaves; use a larger share, or 0"
        require(bool(found) or not left.share, "leavers.share", left.share, remedy)
    return times_of(found, (left.leaves, left.spread), (left.leaves_s, left.spread_s), system.of(LEAVES))


def absent_clients(late: Newcomers, seed: int, federation: Federation) -> tuple[int, ...]:
    """Return the clients that are absent at first, ascending.

    Args:
        late: the section `newcomers`.
        seed: the system seed.
        federation: the clients' data.

    Raises:
        UserError: `newcomers.groups` names groups that do not exist, or all groups; or `newcomers.share` is
            too small for one client.
    """
    num_clients = federation.num_clients
    if not late.groups:
        absent = newcomers(late.share, num_clients, key(seed))
        remedy = f"has no effect: it makes none of {num_clients} clients newcomers; use a larger share, or 0"
        require(bool(absent) or not late.share, "newcomers.share", late.share, remedy)
        return absent
    return _in_groups("newcomers.groups", late.groups, federation)


def _in_groups(path: str, names: tuple[int, ...], federation: Federation) -> tuple[int, ...]:
    """Return the clients of some, not all, of the true groups, ascending; a key `path` names them."""
    groups = np.zeros(0) if federation.groups is None else federation.groups
    known = np.unique(groups).tolist()
    remedy = f"name some, not all, of the groups {known}"
    require(set(names) < set(known), path, list(names), remedy)
    return tuple(np.flatnonzero(np.isin(groups, names)).tolist())


def privacy_spent_before(
    start: StartConfig, weights: str | None, accountant: Accountant, content: Mapping[str, str]
) -> tuple[Spending, ...]:
    """Return what earlier runs over the same clients spent on the first model, and say what follows.

    Args:
        start: the section `start`.
        weights: the file from which the model's weights are read; None if they are drawn.
        accountant: accountant of this run alone.
        content: description of the data, see `Federation.content`.
    """
    folders = {} if start.run is None else {"start.run": start.run}
    if weights is not None and Path(weights).name == FILE:
        folders["model.weights"] = str(Path(weights).parent)
    elif weights is not None and Path(weights).parent.name == ADAPTERS:
        folders["model.weights"] = str(Path(weights).parent.parent)
    found = [earlier_privacy(k, folder, content, accountant) for k, folder in folders.items()]
    for one in found:
        if one.line:
            warn_once(one.line)
    return tuple(s for one in found for s in one.spent)


def stack_of(
    asked: int, policy: Policy, local: LocalConfig, parts: Parts, num_sampled: int, num_ranks: int
) -> int:
    """Return how many clients are trained together: `system.stack`, or the fastest by measurement if it is 0.

    Args:
        asked: `system.stack`.
        policy: the section `policy`.
        local: how clients train.
        parts: the parts that rank 0 built.
        num_sampled: m, the number of clients in a round.
        num_ranks: number of ranks of the job.

    Raises:
        UserError: the model or the task cannot be trained in stacks.
    """
    federation, learner = parts.federation, parts.learner
    if learner.trainer is not None:
        remedy = f"trainer {learner.trainer.name} trains one client at a time; use 1"
        require(asked <= 1, "system.stack", asked, remedy)
        return 1
    if asked > 1:
        remedy = "a model with dropout, batch norm, buffers, an LSTM or hooks cannot be stacked; use 1"
        module, few = learner.flat.module, federation.client(0).train.x[:2]
        fits = stackable(module) and not draws(module, few.to(learner.device))
        require(fits, "system.stack", asked, remedy)
        remedy = "the loss of a batch under this task is not the mean of its samples' losses; use 1"
        require(sample_weights(learner.task) is not None, "system.stack", asked, remedy)
    if asked or not policy.synchronous or local.keep_optimizer:
        return max(asked, 1)
    typical = int(np.argsort(federation.sizes[:, 0])[federation.num_clients // 2])
    most = max(1, num_sampled // max(1, num_ranks - 1))
    train, way = federation.client(typical).train, parts.differing.get(typical, local)
    return pick_stack(learner, train, way, most)


# -- server step and engine ----------------------------------------------------------------------------------


def build_server_step(
    context: RunContext,
    store: ClientStore,
    counter: VisitCounter | None = None,
    beginning: Mapping[str, Path] | None = None,
    timeline: Timeline = NO_TIMELINE,
) -> ServerStep:
    """Return the object that takes the server steps of a run; every rank calls.

    Args:
        context: context of the run.
        store: holds the state that clients keep between their visits.
        counter: counts the visits of this rank, so that progress can be shown; None if nobody reads it.
        beginning: phase -> folder of its results that cases of a sweep share; None shares nothing.
        timeline: is told what this rank does and when.
    """
    config, system, decisions = context.config, context.config.system, context.decisions
    ranks = adapter_ranks(context)
    return ServerStep(
        StepConfig(
            transport=context.transport,
            algorithm=config.algorithm,
            federation=context.federation,
            clients=LocalClients(
                context.federation,
                context.learner,
                config.local,
                context.differing,
                metrics_of(config.evaluation.metrics, config.local.trainer),
                None if ranks is None else partial(ranks.held, "model"),
            ),
            problem=context.problem,
            store=store,
            seed=key(config.seed.training),
            sums=Sums(
                exact=system.sums == "exact",
                collective=None if system.collective == "auto" else system.collective,
                costs=costs_of(system.cost, context.transport),
                direct=decisions.mpi_memory == DEVICE,
            ),
            exchange=system.exchange,
            shuffle=None if system.placement_seed is None else key(system.placement_seed, "shuffle"),
            absent=decisions.absent,
            recluster=config.recluster,
            evaluation=StepEvaluation(
                training_data=config.evaluation.train,
                finetune_epochs=config.evaluation.finetune_epochs,
                updates=config.output.updates,
            ),
            payload=context.payload,
            stack=decisions.stack,
            hosts_groups=system.hosting == GROUPS,
            drops=config.on_client_error == DROP,
            pretraining_cache=pretraining_cache(context),
            beginning=shared_beginning(context, beginning or {}),
            synchronous=config.policy.synchronous,
            effort=effort(context),
            counter=counter or VisitCounter(),
            give_back=FreedMemory().give_back,
            filters=build_filters(context),
            in_one_call=in_one_call,
            kept=kept,
            check_code=Originals().check,
            timeline=timeline,
        ),
        measures(context),
    )


def effort(context: RunContext) -> np.ndarray | None:
    """Return the length of each client's visits [N] relative to `local`; None if all train as it says."""
    if not context.differing:
        return None
    sizes, single = context.federation.sizes[:, 0].tolist(), context.learner.drop_single
    usual = [max(context.config.local.num_trained(n, single), 1) for n in sizes]
    return np.array([context.local_of(k).num_trained(n, single) / usual[k] for k, n in enumerate(sizes)])


def trained_samples(context: RunContext) -> np.ndarray:
    """Return the training samples of each client [N], scaled by `effort` for clients that train longer."""
    return visit_work(context.federation.sizes[:, 0], effort(context))


def measures(context: RunContext) -> list[Measure]:
    """Return what is measured of the uploads of each round."""
    evaluation, rounds = context.config.evaluation, context.config.rounds
    found: list[Measure] = [compare_updates] if context.config.output.updates else []
    if evaluation.distances:
        schedule = EvaluationSchedule(context.evaluated_clients, evaluation.every)
        found.insert(0, ModelProducts(lambda step: schedule.due(step, rounds)))
    elif "parameters" in evaluation.matrices:
        any_last = context.config.stop.given  # any step can be the last one
        found.insert(0, ModelProducts(lambda step: any_last or step == rounds))
    return found


def pretraining_cache(context: RunContext) -> PretrainingCache | None:
    """Return the cache of networks that the server trains for one-shot statistics; None without a cache."""
    folder = context.config.system.statistics_cache
    if folder is None:
        return None
    about = {"local": asdict(context.config.local), "identity": context.identity}
    return PretrainingCache(Path(folder), about)


OnArrivals = Callable[[Sequence[dict[str, Any]]], None]


def build_engine(
    context: RunContext,
    server_step: ServerStep,
    on_arrivals: OnArrivals = lambda rows: None,
    checkpointer: Checkpointer | None = None,
) -> Engine:
    """Return the engine of the configured policy.

    Args:
        context: context of the run.
        server_step: the return value of `build_server_step`.
        on_arrivals: called with new rows of events.csv, on rank 0.
        checkpointer: writes the state between steps; None writes nothing.
    """
    config, policy, sampler = context.config, context.config.policy, context.sampler
    evaluation = EvaluationSchedule(
        context.evaluated_clients, config.evaluation.every, config.evaluation.at_start
    )
    if isinstance(policy, RoundsPolicy):
        duration, num_wanted = context.duration, context.decisions.num_sampled
        rounds = VirtualRounds(server_step, duration, policy.rule, num_wanted, sampler.key.of("rounds"))
        return SynchronousEngine(server_step, sampler, config.rounds, evaluation, rounds, checkpointer)
    clock = context.decisions.clock
    assert isinstance(policy, AsynchronousPolicy)
    assert clock is not None, "the policy opened one"
    return AsynchronousEngine(
        server_step=server_step,
        policy=policy,
        clock=clock,
        sampler=sampler,
        num_steps=config.rounds,
        evaluation=evaluation,
        key=context.system_key,
        on_arrivals=on_arrivals,
        checkpointer=checkpointer,
    )
