"""The configuration of a run: one tree of dataclasses = one YAML tree = one tree of command-line options.

A section that offers a choice (algorithm, model, data source, policy, ...) holds an object. `CHOICES` lists
the classes that this object can have. The docstring of a class describes each of its keys under
`Attributes:`; `mpifl show` prints these descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Interval, MinLen

from mpifl.aggregation.collective_costs import ByBytes, Given, Measured
from mpifl.aggregation.exchange_choice import Local, OverMpi
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import require
from mpifl.core.options import (
    FiniteNonNegative,
    FinitePositive,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveInt,
    PositiveShare,
    Remedy,
    ShareBelowOne,
    types_of,
)
from mpifl.core.registry import Registry
from mpifl.core.task import Task
from mpifl.core.textfiles import check_name
from mpifl.data import SCENARIOS, SOURCES, DataConfig, Drift
from mpifl.models import MODELS, LoRA, ModelOptions
from mpifl.protection.attacks import ATTACKS, Attack, NoAttack
from mpifl.protection.privacy import PRIVACIES, Privacy
from mpifl.protection.robust_rules import RULES, NoRule, Rule
from mpifl.protection.secure_sum import SECURE, SecureConfig
from mpifl.simulation.availability import Availability
from mpifl.simulation.client_devices import DEVICES, Alike, Devices
from mpifl.simulation.clock import CLOCKS, ClockConfig, VirtualTime
from mpifl.simulation.delays import DELAYS, Constant, Delay
from mpifl.simulation.network import NETWORKS, Links, Network
from mpifl.simulation.policies import POLICIES, ClientDecides, Policy, Synchronous
from mpifl.simulation.reclustering import Recluster
from mpifl.simulation.stop_rules import StopConfig
from mpifl.simulation.upload_triggers import UPLOAD_TRIGGERS
from mpifl.traffic.compression import COMPRESSIONS, Payload
from mpifl.training.config import LocalConfig
from mpifl.training.per_client import LocalChanges
from mpifl.training.tasks import TASKS, Classification
from mpifl.training.trainers import TRAINERS

from .table_layout import TableConfig, TuneConfig


@dataclass(frozen=True)
class Seeds(Options):
    """One seed for each kind of randomness; `seed: 3` sets all of them.

    Attributes:
        data: seed of splits and scenarios.
        model: seed of the initial weights.
        training: seed of mini-batches and of the method's own draws.
        system: seed of cohorts, delays and links.
    """

    data: int = 0
    model: int = 0
    training: int = 0
    system: int = 0


MOST_RANKS = 1_000_000
ONE_GPU = Remedy("use cpu, cuda or auto; a rank drives one GPU, chosen by its number on the node")


@dataclass(frozen=True)
class CheckpointConfig(Options):
    """When checkpoints are written, from which `mpifl resume` can continue a run.

    With any setting, SIGUSR1 writes a checkpoint and the run continues; SIGTERM, SIGINT and SIGUSR2 finish
    the step, write a checkpoint, and end the run with exit code 75. Unless `every` and `minutes` are both 0,
    the first checkpoint is written after the first step.

    Attributes:
        every: server steps between checkpoints; 0 for none by steps.
        minutes: real minutes between checkpoints; 0 for none by time.
        keep: number of checkpoints to keep.
    """

    every: NonNegativeInt = 0
    minutes: NonNegativeFloat = 10.0
    keep: Annotated[int, Ge(2)] = 2


@dataclass(frozen=True)
class EvaluationConfig(Options):
    """When models are evaluated, and on which clients.

    Attributes:
        every: number of server steps between evaluations. The last step is always evaluated; with 0, only
            that one.
        at_start: whether to evaluate before the first step as well.
        clients: number of clients to evaluate, evenly spaced over all clients; null evaluates all.
        finetune_epochs: evaluate each client a second time, after this many epochs on its training data
            (column `accuracy_finetuned`). This is the personalised accuracy of a shared model. 0 turns it
            off.
        by: additional averages of the accuracy. `group` averages over the clients of each true group (column
            `accuracy_group0_mean`, ...), `cluster` over those of each estimated cluster
            (`accuracy_cluster0_mean`, ...), and `device` over those of each class of devices
            (`accuracy_device_phone_mean`, ...).
        train: whether to evaluate each client on its training data as well, with the same model (columns
            `accuracy_train_*`; `accuracy_variance` is the variance in percent squared).
        distances: whether to measure the mean L2 distances between the models that clients upload, after
            local training and before averaging. Columns `client_distance*` cover all parameters, columns
            `head_distance*` the last linear layer; each has means over all pairs, over pairs of the same true
            group and over pairs of the same estimated cluster. Requires policy rounds, and gathers all
            models.
        matrices: quantities to compare between all pairs of clients at the end and to write to
            `matrices.npz`. `parameters` are L2 distances of the last uploads, `gradients` cosines of
            full-batch gradients on training data at the common initial model, `angles` PACFL's angles between
            the clients' data in degrees (with the run's options if the method is PACFL) and the smallest
            principal angles.
        metrics: your own metrics of a client, as `package.module:function` or `file.py:function`. The
            function gets the logits [n, L] and labels [n] of the client's samples. Columns are `NAME_mean`,
            `NAME_std`, `NAME_min` and `NAME_max`; `clients.csv` has each client's value. `NAME.better = 1` or
            `-1` beside the function says whether higher or lower values are better.
    """

    every: NonNegativeInt = 1
    at_start: bool = False
    clients: PositiveInt | None = None
    finetune_epochs: NonNegativeInt = 0
    by: tuple[Literal["group", "cluster", "device"], ...] = ()
    train: bool = False
    distances: bool = False
    matrices: tuple[Literal["parameters", "gradients", "angles"], ...] = ()
    metrics: tuple[str, ...] = ()


GROUPS = "groups"  # `system.hosting`


@dataclass(frozen=True)
class SystemConfig(Options):
    """How the program runs. Numbers do not depend on it, except on `sums: fast`, `stack` and `kernels`.

    Attributes:
        ranks: number of MPI ranks that the run requires; null accepts any number.
        threads: number of threads of each rank. 0 takes the largest number that the CPU masks allow every
            worker, the same for all.
        device: `cpu`, `cuda`, or `auto`, which uses a GPU if there is one.
        sums: `exact` (the same bits for any number of ranks) or `fast` (float32, half the bytes).
        collective: `reduce`, `gather`, or `auto`, which chooses the cheaper one for each mixing.
        cost: what `collective: auto` compares: `bytes`, `given` or `measured` seconds.
        exchange: for methods whose clients look at each other (EMD-CFL): whether what they ask and answer
            travels between ranks (`mpi`), or the rank of the client that looks computes everything (`local`).
        placement_seed: seed of a random placement of clients on ranks; null balances the ranks instead.
        hosting: `any` lets any worker train any client. `groups` gives each worker a fixed group of clients
            for the whole run, balanced by samples times effort: their samples stay with it, on its GPU if
            there is room, and it reads no others. If a worker is lost, the remaining ones take its clients.
        scratch: folder for the client state of a node; null uses shared memory or the temporary folder.
        stopped_timeout_s: seconds after which a rank that was stopped (SIGSTOP) is killed, so that the others
            do not wait for it; 0 never kills it.
        watchdog_s: seconds without progress after which every rank writes its stacks to `logs/` in the run
            folder and the job ends. Choose several times the length of the longest round. 0 turns the
            watchdog off.
        sample_cache_mb: megabytes of transformed samples that each rank keeps in memory; 0 keeps none.
            Nothing is kept if the samples of all clients need more than eight times this size.
        statistics_cache: folder for networks that the server trains for one-shot statistics (FLT's
            autoencoder). Later runs that would train the same network read it from there. null keeps none.
        share_beginnings: whether cases of a sweep that have equal beginnings (`docs/sweeps.md`) compute them
            once; no number changes but measured times and MPI bytes. null does so, unless the sweep's table
            shows a measured time. A run by itself shares nothing.
        stack: number of clients of a cohort that are trained at once (`docs/performance.md`). The last bits
            differ from training one client after the other, but are the same for any number of ranks. 0
            chooses the number that measures fastest at the start.
        kernels: whether to use kernels in C (CPU only). They train networks of dense layers, small
            convolutions, ReLU, 2x2 pooling and dropout, and compute the wide convolutions (3x3, 5x5) of any
            model. They are several times faster than PyTorch and differ in the last bits
            (`docs/performance.md`).
        cuda_graphs: whether to replay the steps of SGD as CUDA graphs (GPU only; `docs/performance.md`). null
            does so where it is known to change no bit: mlp, ifca_mlp and lenet5 on classes, in float32.
        deterministic: whether a GPU must give the same bits each time; costs some speed.
        mpi_memory: memory from which MPI reads sums that were computed on a GPU: `main`, a copy in
            page-locked main memory; `device`, the GPU's own memory, an error if MPI is not CUDA-aware;
            `auto`, `device` where possible, otherwise `main`.
    """

    ranks: Annotated[int, Interval(ge=1, le=MOST_RANKS)] | None = None
    threads: NonNegativeInt = 1
    device: Annotated[Literal["cpu", "cuda", "auto"], ONE_GPU] = "auto"
    sums: Literal["exact", "fast"] = "exact"
    collective: Literal["auto", "reduce", "gather"] = "auto"
    cost: Any = field(default_factory=ByBytes)
    exchange: Any = field(default_factory=OverMpi)
    placement_seed: int | None = None
    hosting: Literal["any", "groups"] = "any"
    scratch: str | None = None
    stopped_timeout_s: NonNegativeFloat = 30.0
    watchdog_s: NonNegativeFloat = 0.0
    sample_cache_mb: NonNegativeInt = 128
    statistics_cache: str | None = None
    share_beginnings: bool | None = None
    stack: NonNegativeInt = 1
    kernels: bool = True
    cuda_graphs: bool | None = None
    deterministic: bool = True
    mpi_memory: Literal["main", "device", "auto"] = "main"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "fast sums are made in main memory; use exact ones, or main"
        fits = self.mpi_memory != "device" or self.sums == "exact"
        require(fits, "mpi_memory", self.mpi_memory, remedy)
        if self.hosting == GROUPS:
            remedy = "has no effect beside hosting groups, which fixes who trains whom; leave it out"
            require(self.placement_seed is None, "placement_seed", self.placement_seed, remedy)
            remedy = "the clients of a stack may be hosted by several workers; use 1, or hosting any"
            require(self.stack == 1, "stack", self.stack, remedy)


@dataclass(frozen=True)
class StartConfig(Options):
    """Start from the final model of an earlier run.

    Attributes:
        run: folder of a finished run from whose final model this run starts; all clients of that run must
            use one model, which replaces every initial model. null draws the initial models with the model
            seed.
        part: the part of that model to use: `all`, or `body`, which is all but the last layer; each initial
            model then draws its own last layer. Methods whose K models differ only in their initial weights
            (IFCA) need `body`.
    """

    run: Annotated[str, MinLen(1)] | None = None
    part: Literal["all", "body"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "has no effect without start.run; name a run folder, or leave it out"
        require(self.run is not None or self.part == "all", "part", self.part, remedy)


@dataclass(frozen=True)
class Newcomers(Options):
    """Clients that are absent at first: they miss one-shot clustering and join later.

    Attributes:
        share: fraction of the clients, in [0, 1), that are absent at first; drawn with the system seed.
        joins: first server step (under `rounds`: first round) in which they may take part; for policies that
            draw a cohort or a client for each step.
        spread: number of steps over which they join one by one: each from a step of its own on, drawn
            uniformly from joins..joins + spread.
        joins_s: seconds of virtual time from which on they are there, instead of `joins`; for asynchronous
            policies whose virtual time is in seconds.
        spread_s: seconds over which they join one by one: each at a time of its own, drawn uniformly from
            [joins_s, joins_s + spread_s).
        groups: true groups whose clients are absent at first; instead of `share`.
    """

    share: ShareBelowOne = 0.0
    joins: PositiveInt = 2
    spread: NonNegativeInt = 0
    joins_s: FinitePositive | None = None
    spread_s: FiniteNonNegative = 0.0
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_when(self, "joins", "newcomers join")


@dataclass(frozen=True)
class Leavers(Options):
    """Clients that leave for good during the run: they finish a visit that is under way, and begin no other.

    The server is not told. What a method remembers of them counts on, as far as its options let it
    (`algorithm.max_age`), and they are evaluated like all clients. Newcomers do not leave.

    Attributes:
        share: fraction of the clients, in [0, 1), that leave; drawn with the system seed.
        leaves: first server step (under `rounds`: first round) in which they take no part any more; for
            policies that draw a cohort or a client for each step.
        spread: number of steps over which they leave one by one: each at a step of its own, drawn uniformly
            from leaves..leaves + spread.
        leaves_s: seconds of virtual time after which they begin no visit, instead of `leaves`; for
            asynchronous policies whose virtual time is in seconds.
        spread_s: seconds over which they leave one by one: each at a time of its own, drawn uniformly from
            [leaves_s, leaves_s + spread_s).
        groups: true groups whose clients leave; instead of `share`.
    """

    share: ShareBelowOne = 0.0
    leaves: PositiveInt = 2
    spread: NonNegativeInt = 0
    leaves_s: FinitePositive | None = None
    spread_s: FiniteNonNegative = 0.0
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_when(self, "leaves", "clients leave")


def _check_when(given: Newcomers | Leavers, at: str, what: str) -> None:
    """Raise `UserError` for clients that are a share and groups, or come or go at a step and at a time."""
    seconds = getattr(given, f"{at}_s")
    remedy = f"has no effect beside {at}_s: {what} at a step or at a time; leave one of them out"
    for name in (at, "spread"):
        value = getattr(given, name)
        require(seconds is None or value == getattr(type(given), name), name, value, remedy)
    remedy = f"has no effect without {at}_s; give it, or use spread"
    require(seconds is not None or not given.spread_s, "spread_s", given.spread_s, remedy)
    either = not (given.share and given.groups)
    require(either, "groups", list(given.groups), "they are a share or groups, not both")


REFUSE: Final = "refuse"  # values of `output.existing`
REUSE: Final = "reuse"
REPLACE: Final = "replace"


@dataclass(frozen=True)
class OutputConfig(Options):
    """Where results are written.

    Attributes:
        folder: parent of the run folders.
        id: name of the run folder after `<name>-`; null uses date and time.
        existing: what happens if there is a run folder of that name and id. `refuse` ends with a message.
            `reuse` returns a complete run with the same options, code, files and data, and goes on with an
            unfinished one. `replace` deletes the run folder. A sweep with this id is continued by `refuse`
            and `reuse`, and deleted by `replace`.
        model: whether to write the final models to `model.safetensors`. Cases of a sweep write them only if
            the sweep sets this to true.
        updates: whether to write `updates.csv`. For each client of each round and each module of the model it
            has the size of the update, its cosine with the mean update and its distance to that mean (in the
            last layer: FedCUAU's CUAU). Only for methods whose clients download one model and train it.
        label: name of the run in tables, reports and legends, followed by the values in which it differs from
            other runs with the same label; null uses the name of the method. Cases of a sweep have the labels
            of its `vary`.
        client_models: whether to write the model of each evaluated client, as it is evaluated, to
            `client_models.safetensors`, for `Run.model(client=...)`. Not needed for methods whose clients use
            rows of the server's table unchanged.
        clients: clients that have rows in `clusters.csv`, `assignments.csv`, `groups.csv`,
            `client_traffic.csv`, `client_computation.csv` and `visits.csv`: `all`; `sample`, 1000 clients
            drawn with `seed.training`; or `none`, which omits these files and `clients.csv`. Totals and
            metrics always count all clients. `sample` and `none` require synchronous rounds.
        trace: whether to write `trace.json`, what each rank did and when, which https://ui.perfetto.dev and
            Chrome's `chrome://tracing` open: a row for each rank with a bar for each phase, with its client
            and visit, and for each MPI call, with its bytes; under asynchronous policies also a row for each
            client in virtual time (`docs/performance.md`). No number changes.
        callbacks: objects that are called at the run's start, rounds, evaluations and end: `tensorboard`,
            `wandb`, `mlflow`, your own class as `package.module:Name`, or a mapping of `name` and options.
    """

    folder: str = "runs"
    id: str | None = None
    existing: Literal["refuse", "reuse", "replace"] = "refuse"
    model: bool = True
    updates: bool = False
    label: str | None = None
    client_models: bool = False
    clients: Literal["all", "sample", "none"] = "all"
    trace: bool = False
    callbacks: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("id", self.id or "")
        remedy = "has no effect without output.id: each run has a folder of its own; give an id"
        require(self.id is not None or self.existing == REFUSE, "existing", self.existing, remedy)
        require(self.label is None or bool(self.label.strip()), "label", self.label, "use a text, or null")
        remedy = "writes a row for each client of each round; use output.clients: all, or leave it out"
        require(self.clients == "all" or not self.updates, "updates", self.updates, remedy)


@dataclass(frozen=True)
class Config(Options):
    """A run.

    Attributes:
        algorithm: the method; its name and its own keys.
        model: the network that clients train.
        name: first part of the run folder's name.
        rounds: number of server steps; with `stop`, the largest number.
        stop: when the run ends before that: a target, patience, or a budget of time or bytes.
        participation: fraction of the clients, in (0, 1], that take part in a round, or at the same time
            under an asynchronous policy.
        cohort_size: number of clients that take part; replaces `participation`. null uses `participation`.
        on_client_error: what happens when a client raises an exception, runs out of memory or returns numbers
            that are not finite. `abort` ends the run. `drop` tries the visit once more, then leaves the
            client out of the step and lists it in dropped.csv. A client that fails to give one-shot
            statistics ends the run in either case.
        seed: the seeds, one for each kind of randomness.
        local: how a client trains.
        task: what models are trained for: loss and metrics.
        data: the samples, and how they are distributed over clients.
        evaluation: when models are evaluated, and on which clients.
        system: how the program runs.
        output: where results are written.
        checkpoint: when the state of the run is written.
        newcomers: clients that are absent at first.
        leavers: clients that leave for good.
        drift: data of clients that change during the run.
        recluster: when clients send the statistics again by which they are clustered.
        start: the model of an earlier run, from which this one starts.
        policy: when the server takes a step.
        delay: how long clients compute.
        costs: what the computing time of a visit is charged for. `training`: one local training as `local`
            says, whatever the visit does, and nothing for one-shot statistics. `all`: all that a client
            computes (several trainings, losses by which it chooses a model, statistics, second looks), in
            proportion to the FLOPs of that one training; for methods that declare what a visit asks for.
        network: how long messages take.
        payload: number format and compression of the messages between clients and server.
        privacy: clipping of the clients' updates, and noise on them.
        secure_aggregation: whether the server sees single uploads or only their sums.
        availability: when clients are present.
        devices: devices of the clients: all alike, resampled from measured devices, or of a few classes.
        per_client: keys of the section `local` that differ for some clients. Maps a client (`3`), a range of
            clients (`4-7`) or the name of a device to these keys. A client's number takes precedence over its
            device.
        robust: rule that replaces the mean of uploads, so that attackers do little harm.
        attack: which clients attack, and how.
        clock: what determines the order of arrivals in an asynchronous run.
        vary: for `mpifl sweep`, the keys to vary and the values of each; null for a single run.
        table: for `mpifl sweep`, the layout of its table beside a paper's figures; null for none.
        tune: for `mpifl sweep`, the values among which options of rows are chosen on validation data; null
            for none.
    """

    algorithm: Algorithm
    model: Any
    name: Annotated[str, MinLen(1)] = "run"
    rounds: PositiveInt = 10
    stop: StopConfig = field(default_factory=StopConfig)
    participation: Annotated[PositiveShare, Remedy("use a fraction in (0, 1], or give cohort_size")] = 1.0
    cohort_size: PositiveInt | None = None
    on_client_error: Literal["abort", "drop"] = "abort"
    seed: Seeds = Seeds()
    local: LocalConfig = field(default_factory=LocalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = EvaluationConfig()
    system: SystemConfig = field(default_factory=SystemConfig)
    output: OutputConfig = OutputConfig()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    newcomers: Newcomers = Newcomers()
    leavers: Leavers = Leavers()
    drift: Drift = field(default_factory=Drift)
    recluster: Recluster = field(default_factory=Recluster)
    start: StartConfig = StartConfig()
    policy: Policy = field(default_factory=Synchronous)
    delay: Delay = field(default_factory=Constant)
    costs: Literal["training", "all"] = "training"
    network: Network = field(default_factory=Links)
    payload: Payload = field(default_factory=Payload)
    privacy: Privacy = field(default_factory=Privacy)
    secure_aggregation: SecureConfig = field(default_factory=SecureConfig)
    availability: Availability = field(default_factory=Availability)
    devices: Devices = field(default_factory=Alike)
    per_client: dict[str, LocalChanges] = field(default_factory=dict)
    robust: Rule | NoRule = field(default_factory=NoRule)
    attack: Attack | NoAttack = field(default_factory=NoAttack)
    clock: ClockConfig = field(default_factory=VirtualTime)
    vary: dict[str, Any] | None = None  # any keys
    table: TableConfig | None = None
    tune: TuneConfig | None = None
    task: Task = field(default_factory=Classification)

    def __post_init__(self) -> None:
        super().__post_init__()
        share, size = self.participation, self.cohort_size
        remedy = f"participation = {share} is another number of clients; leave one of them out"
        require(size is None or share == 1, "cohort_size", size, remedy)
        check_name("name", self.name)

    @property
    def decided_by_time(self) -> Mapping[str, Any]:
        """The keys, and their values, by which virtual seconds decide what is computed under any policy."""
        seconds = {
            "stop.seconds": self.stop.seconds,
            "drift.at_s": list(self.drift.at_s),
            "recluster.seconds": self.recluster.seconds,
        }
        return {key: value for key, value in seconds.items() if value}

    @property
    def weights(self) -> str | None:
        """The file from which the model's weights are read; None if they are drawn."""
        return self.model.weights if isinstance(self.model, ModelOptions) else None

    @property
    def lora(self) -> LoRA:
        """The adapters of the model; of rank 0 if it has none."""
        return self.model.lora if isinstance(self.model, ModelOptions) else LoRA()


COSTS: Registry[type[Options]] = Registry(
    "", Options, {"bytes": ByBytes, "given": Given, "measured": Measured}
)
EXCHANGES: Registry[type[Options]] = Registry("", Options, {"mpi": OverMpi, "local": Local})
CHOICES: dict[tuple[type, str], Registry[Any]] = {
    (Config, "algorithm"): CATALOGUE,
    (Config, "model"): MODELS,
    (Config, "task"): TASKS,
    (LocalConfig, "trainer"): TRAINERS,
    (Config, "policy"): POLICIES,
    (Config, "delay"): DELAYS,
    (Config, "devices"): DEVICES,
    (Config, "clock"): CLOCKS,
    (Config, "network"): NETWORKS,
    (Config, "robust"): RULES,
    (Config, "attack"): ATTACKS,
    (ClientDecides, "uploads"): UPLOAD_TRIGGERS,
    (Payload, "compression"): COMPRESSIONS,
    (Payload, "downloads"): COMPRESSIONS,
    (Config, "privacy"): PRIVACIES,
    (Config, "secure_aggregation"): SECURE,
    (SystemConfig, "cost"): COSTS,
    (SystemConfig, "exchange"): EXCHANGES,
    (DataConfig, "source"): SOURCES,
    (DataConfig, "public"): SOURCES,
    (DataConfig, "scenario"): SCENARIOS,
}


@cache
def defaults_of(cls: type) -> dict[str, Any]:
    """Return the keys of a section that have a default, and this default."""
    keys = {f.name: f for f in fields(cls) if f.init}
    made = {name: f.default_factory() for name, f in keys.items() if f.default_factory is not MISSING}
    return made | {name: f.default for name, f in keys.items() if f.default is not MISSING}


def sections_of(cls: type, name: str) -> Mapping[str, type]:
    """Return the classes whose fields are the keys below a key; none for a plain value.

    Args:
        cls: the class that has the key.
        name: the key.

    Returns:
        Name in the catalogue of the key -> class; the name is empty for a section without a choice.
    """
    hint = types_of(cls)[name]
    return CHOICES.get((cls, name)) or ({"": hint} if isinstance(hint, type) and is_dataclass(hint) else {})


def is_in(path: str, section: str) -> bool:
    """Return whether a dotted path is that of a section, or of a key inside it."""
    return f"{path}.".startswith(f"{section}.")


def walk(
    cls: type = Config, above: str = "", of: str = "", within: str = ""
) -> Iterator[tuple[str, type, str, str]]:
    """Yield all keys: sections before their keys, choices in the order of their catalogues.

    Args:
        cls: the class whose keys are yielded, and all keys below them.
        above: dotted path of its section.
        of: name of the choice that has its keys; empty if every configuration has them.
        within: only this key or section, and what contains it or is inside it; empty for all.

    Yields:
        Dotted path, class and key, and the choice that has it as for `of`.
    """
    for name in types_of(cls):
        path = f"{above}.{name}".lstrip(".")
        if within and not (is_in(path, within) or is_in(within, path)):
            continue
        yield path, cls, name, of
        for choice, section in sections_of(cls, name).items():
            yield from walk(section, path, choice or of, within)
