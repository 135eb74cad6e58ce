"""One tree of dataclasses = one YAML tree = one tree of command-line options.

A section that offers a choice (algorithm, model, data source, scenario) is a mapping whose `name` picks a
class from a catalogue; its other keys are that class's fields. `name` may also be `file.py:Class` or
`package.module:Class`. Command-line options win over the file, the file over its `base`, the base over the
defaults.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from mpifl.aggregation.collective_choice import COSTS, ByBytes
from mpifl.algorithms import CATALOGUE
from mpifl.comm.mpi_startup import AUTO, DEVICE, MAIN
from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.textfiles import MAX_DEPTH, check_name, yaml_file, yaml_of
from mpifl.data import SCENARIOS, SOURCES, DataConfig
from mpifl.models import MODELS
from mpifl.runtime.client_errors import ABORT, DROP
from mpifl.runtime.run_state import CheckpointConfig
from mpifl.simulation.clock import CLOCKS, VirtualTime
from mpifl.simulation.delays import DELAYS, Constant, Delay
from mpifl.simulation.durations import Availability
from mpifl.simulation.network import NETWORKS, Links, Network
from mpifl.simulation.policies import POLICIES, ClientDecides, Synchronous
from mpifl.simulation.upload_triggers import UPLOADS
from mpifl.traffic.compression import COMPRESSIONS
from mpifl.traffic.payload import Payload
from mpifl.training import LocalConfig


@dataclass(frozen=True)
class Seeds:
    """Seeds, one per kind of randomness; a single number sets all of them.

    Attributes:
        data: splits and scenarios. model: initial weights. training: batches and method. system: cohorts and
            delays.
    """

    data: int = 0
    model: int = 0
    training: int = 0
    system: int = 0


@dataclass(frozen=True)
class EvaluationConfig:
    """When and where models are evaluated.

    Attributes:
        every: rounds between evaluations; 0 for the last round only (always evaluated).
        first: also before the first round.
        clients: how many clients are evaluated, evenly spaced; None for all.
        finetune_epochs: evaluate each client once more after so many epochs on its training data
            (`accuracy_finetuned`): the personalised accuracy of a shared model; 0 for not.
    """

    every: int = 1
    first: bool = False
    clients: int | None = None
    finetune_epochs: int = 0

    def __post_init__(self) -> None:
        epochs = self.finetune_epochs
        require(epochs >= 0, "finetune_epochs", epochs, "take 0 (do not fine-tune) or more epochs")
        require(self.every >= 0, "every", self.every, "take 0 (last round only) or more rounds")
        require(
            self.clients is None or self.clients >= 1,
            "clients",
            self.clients,
            "take 1 or more, or null for all",
        )


@dataclass(frozen=True)
class SystemConfig:
    """How the program runs; nothing here changes a number, except `sums: fast`, `stack` and `compiled`.

    Attributes:
        ranks: demand this many MPI ranks; None takes what the launcher gives.
        threads: threads per rank; 0 takes what the CPU masks give every worker, the same for all.
        device: `cpu`, `cuda` or `auto`.
        sums: `exact` (same bits for any number of ranks) or `fast` (float32, half the bytes).
        collective: `auto`, `reduce` or `gather`.
        cost: what `auto` goes by: `bytes`, `given` or `measured` seconds.
        shuffle: a seed that deals clients to ranks at random; None balances them.
        stopped_s: seconds after which a rank that is stopped (SIGSTOP) is ended, so that the others do not
            wait for it; 0 never.
        watchdog_s: seconds without any sign of life (several times the longest round) after which every rank
            writes its stacks to `logs/` in the run folder and the job ends; 0 never.
        scratch: folder for node-local client state; None picks shared memory or the temporary folder.
        stack: so many clients of a cohort are trained at once (`docs/performance.md`): other last bits than
            one after the other, the same for any number of ranks; 0 takes what measures fastest at the start.
        compiled: train networks of dense layers, small convolutions, ReLU and 2x2 pooling by loops in C (CPU
            only): several times faster than PyTorch's steps, other last bits (`docs/performance.md`).
        graphs: replay steps of SGD as CUDA graphs (GPUs only; `docs/performance.md`).
        deterministic: have a GPU give the same bits each time, which costs some speed.
        mpi_memory: what MPI is given of sums made on a GPU: `main`, a copy in page-locked main memory;
            `device`, the GPU's own memory, and no run where MPI is not CUDA-aware; `auto`, that where it is.
        keep_mb: megabytes of clients' finished samples that each rank keeps at hand; 0 for none. Nothing is
            kept where all clients' samples are more than eight times that.
    """

    ranks: int | None = None
    threads: int = 1
    device: str = "auto"
    sums: str = "exact"
    collective: str = "auto"
    cost: Any = field(default_factory=ByBytes)
    shuffle: int | None = None
    scratch: str | None = None
    stopped_s: float = 30.0
    watchdog_s: float = 0.0
    keep_mb: int = 128
    stack: int = 1
    compiled: bool = True
    graphs: bool = False
    deterministic: bool = True
    mpi_memory: str = MAIN

    def __post_init__(self) -> None:
        require(self.stack >= 0, "stack", self.stack, "take 1 (no stack) or more clients, or 0 to measure")
        require(self.keep_mb >= 0, "keep_mb", self.keep_mb, "take 0 or more megabytes")
        require(self.ranks is None or self.ranks >= 1, "ranks", self.ranks, "take 1 or more, or null")
        require(self.stopped_s >= 0, "stopped_s", self.stopped_s, "take 0 (never) or more seconds")
        require(self.watchdog_s >= 0, "watchdog_s", self.watchdog_s, "take 0 (never) or more seconds")
        require(self.threads >= 0, "threads", self.threads, "take 1 or more, or 0 for the CPU mask")
        remedy = "take cpu, cuda or auto; a rank drives one GPU, chosen by its number on the node"
        require(self.device in ("cpu", "cuda", "auto"), "device", self.device, remedy)
        require(self.sums in ("exact", "fast"), "sums", self.sums, "take exact or fast")
        memory, kinds = self.mpi_memory, (MAIN, DEVICE, AUTO)
        require(memory in kinds, "mpi_memory", memory, f"take one of {', '.join(kinds)}")
        remedy = "fast sums are made in main memory; take exact ones, or main"
        require(memory != DEVICE or self.sums == "exact", "mpi_memory", memory, remedy)
        known = ("auto", "reduce", "gather")
        require(self.collective in known, "collective", self.collective, f"take one of {', '.join(known)}")


@dataclass(frozen=True)
class Newcomers:
    """Clients that are not there at first: they miss one-shot clustering, and join the cohorts later.

    Attributes:
        share: of the clients, drawn by the system seed. joins: the first round they may take part in.
        groups: all clients of these true groups instead.
    """

    share: float = 0.0
    joins: int = 2
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, "share", self.share, "take a share in [0, 1)")
        require(self.joins >= 1, "joins", self.joins, "take a round, 1 or more")
        either = not (self.share and self.groups)
        require(either, "groups", list(self.groups), "newcomers are a share or groups, not both")


@dataclass(frozen=True)
class OutputConfig:
    """Where results go.

    Attributes:
        folder: parent of the run folders.
        id: name of the run's folder after `<name>-`; None takes date and time.
        model: write the final rows.
    """

    folder: str = "runs"
    id: str | None = None
    model: bool = True

    def __post_init__(self) -> None:
        check_name("id", self.id or "")


@dataclass(frozen=True)
class Config:
    """A run.

    Attributes:
        name: first part of the run folder's name.
        rounds: server steps.
        participation: share of the clients in (0, 1], or a number of them: per round, or under way at a time.
        on_client_error: what happens when a client raises, runs out of memory or returns numbers that are not
            finite: `abort` ends the run; `drop` tries its visit once more, then leaves it out of the step and
            lists it in dropped.csv.
        newcomers: clients that are not there at first.
        policy: when the server steps. delay, network, availability: how long visits take. clock: what orders
            arrivals.
        payload: the form in which numbers travel between clients and server.
        vary: for `mpifl study`: keys, and the values that each takes; null for none.
    """

    algorithm: Algorithm = field(metadata={"catalogue": CATALOGUE})
    model: Any = field(metadata={"catalogue": MODELS})
    name: str = "run"
    rounds: int = 10
    participation: float = 1.0
    on_client_error: str = ABORT
    seed: Seeds = Seeds()
    local: LocalConfig = field(default_factory=LocalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = EvaluationConfig()
    system: SystemConfig = field(default_factory=SystemConfig)
    output: OutputConfig = OutputConfig()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    newcomers: Newcomers = Newcomers()
    policy: Any = field(default_factory=Synchronous)
    delay: Delay = field(default_factory=Constant)
    network: Network = field(default_factory=Links)
    payload: Payload = field(default_factory=Payload)
    availability: Availability = field(default_factory=Availability)
    clock: Any = field(default_factory=VirtualTime)
    vary: dict | None = None  # any keys

    def __post_init__(self) -> None:
        error = self.on_client_error
        require(error in (DROP, ABORT), "on_client_error", error, f"take {DROP} or {ABORT}")
        require(self.rounds >= 1, "rounds", self.rounds, "take at least one round")
        share, remedy = self.participation, "take a share in (0, 1], or a whole number of clients above 1"
        require(0 < share <= 1 or (share > 1 and share == int(share)), "participation", share, remedy)
        check_name("name", self.name)
        require(bool(self.name), "name", self.name, "take a name")


CHOICES: dict[tuple[type, str], Mapping[str, type]] = {
    (Config, "algorithm"): CATALOGUE,
    (Config, "model"): MODELS,
    (Config, "policy"): POLICIES,
    (Config, "delay"): DELAYS,
    (Config, "clock"): CLOCKS,
    (Config, "network"): NETWORKS,
    (ClientDecides, "uploads"): UPLOADS,
    (Payload, "compression"): COMPRESSIONS,
    (SystemConfig, "cost"): COSTS,
    (DataConfig, "source"): SOURCES,
    (DataConfig, "public"): SOURCES,
    (DataConfig, "scenario"): SCENARIOS,
}
CONFIGS = Path(__file__).parent / "configs"  # where a wheel keeps them
MAX_BASES = 32  # one below the other
MAX_INTEGER = 2**63 - 1


# -- reading -------------------------------------------------------------------------------------------------


def find(name: str) -> Path:
    """Return the file of a configuration: a path, or the name of one that travels with mpifl."""
    roots = [Path(), Path(__file__).parent.parent / "configs", CONFIGS]
    for root in roots:
        for path in (root / name, root / f"{name}.yaml"):
            if os.path.isfile(path):
                return path
    require(not os.path.exists(name), "CONFIG", name, "is no file; name a YAML file")
    shipped = sorted({p.relative_to(r).as_posix() for r in roots[1:] for p in r.rglob("*.yaml")})
    near = get_close_matches(name, shipped, n=3, cutoff=0.5)
    places = sorted({f"{folder}/" if (folder := p.rpartition("/")[0]) else p for p in shipped})
    also = f"do you mean {' or '.join(near)}?" if near else f"there are {', '.join(places) or 'none'}"
    raise UserError("CONFIG", name, f"no such file; {also}")


def read(name: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping in a configuration file, laid over its `base` (a path relative to the file)."""
    path = find(name)
    require(path.resolve() not in above, "base", str(path), "is its own base; take another or none")
    require(len(above) <= MAX_BASES, "base", str(path), f"has more than {MAX_BASES} above it; join some")
    tree = yaml_file(path, "CONFIG") or {}
    require(isinstance(tree, dict), "CONFIG", str(path), "must hold a mapping of keys to values")
    base = tree.pop("base", None)
    return merged(read(str(path.parent / str(base)), (*above, path.resolve())), tree) if base else tree


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `under` with `over` laid on it; a section that changes its `name` starts anew."""
    out = dict(under)
    for name, value in over.items():
        old = out.get(name)
        old = {"name": old} if isinstance(old, str) and isinstance(value, dict) else old
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            out[name] = merged(old, value)
        else:
            out[name] = value
    return out


def overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Return the tree of `--key.path value` (or `--key.path=value`) options; values are YAML."""
    tree: dict[str, Any] = {}
    tokens = [part for t in tokens for part in (t.split("=", 1) if t.startswith("--") else [t])]
    while tokens:
        key, *tokens = tokens
        require(key.startswith("--"), "option", key, "options are --key.path value")
        require(bool(tokens), "option", key, "needs a value")
        value, *tokens = tokens
        node, *path = key[2:].split(".")[::-1]
        require(len(path) < MAX_DEPTH, "option", key, f"has more than {MAX_DEPTH} parts")
        leaf = {node: _parsed(key, value)}
        for part in path:
            leaf = {part: leaf}
        tree = merged(tree, leaf)
    return tree


def _parsed(key: str, value: str) -> Any:
    """Return the value of an option."""
    return yaml_of(value, key, value) if value else value


def load(name: str, options: Sequence[str] = ()) -> Config:
    """Return the configuration in a file under the command line's options."""
    return build(Config, merged(read(name), overrides(options)))


# -- building ------------------------------------------------------------------------------------------------


def build(cls: type, tree: Mapping[str, Any], path: str = "") -> Any:
    """Return an instance of dataclass `cls` from a mapping; errors name the key below `path`."""
    require(
        isinstance(tree, Mapping),
        path or "CONFIG",
        tree,
        f"must be a section with {', '.join(options_of(cls))}",
    )
    known = options_of(cls)
    for name in tree:
        if name not in known:
            raise UserError(
                f"{path}.{name}".lstrip("."), tree[name], f"unknown key; {nearest(str(name), known)}"
            )
    values = {name: _value(cls, name, value, f"{path}.{name}".lstrip(".")) for name, value in tree.items()}
    for f in dataclasses.fields(cls):
        if f.name not in values and (cls, f.name) in CHOICES and f.default_factory is dataclasses.MISSING:
            choice = f"name one of {', '.join(CHOICES[cls, f.name])}"
            raise UserError(f"{path}.{f.name}".lstrip("."), None, f"is missing; {choice}")
    try:
        return cls(**values)
    except UserError as error:
        raise error.under(path) from None


def options_of(cls: type) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [f.name for f in dataclasses.fields(cls) if f.init]


def _value(cls: type, name: str, value: Any, path: str) -> Any:
    """Return `value` as field `name` of `cls` wants it."""
    if (cls, name) in CHOICES:
        return chosen(CHOICES[cls, name], {"name": value} if isinstance(value, str) else value, path)
    hint = get_type_hints(cls)[name]
    if hint is Seeds and not isinstance(value, Mapping):
        seed = coerced(int, value, path)
        return Seeds(seed, seed, seed, seed)
    return coerced(hint, value, path)


def chosen(catalogue: Mapping[str, type], tree: Any, path: str) -> Any:
    """Return the object a section describes: `name` picks its class."""
    require(isinstance(tree, Mapping) and "name" in tree, path, tree, f"name one of {', '.join(catalogue)}")
    name, rest = tree["name"], {k: v for k, v in tree.items() if k != "name"}
    require(isinstance(name, str), f"{path}.name", name, f"name one of {', '.join(catalogue)}")
    if ":" in name:
        from mpifl.core.imports import load_object

        cls = load_object(name, f"{path}.name")
        require(
            dataclasses.is_dataclass(cls),
            f"{path}.name",
            name,
            "is not a dataclass; its fields are the options",
        )
        return build(cls, rest, path)
    if name not in catalogue:
        raise UserError(f"{path}.name", name, f"unknown name; {nearest(str(name), list(catalogue))}")
    return build(catalogue[name], rest, path)


def coerced(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as type `hint`, or raise a UserError that names the type wanted."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return coerced(next(a for a in args if a is not type(None)), value, path)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)  # type: ignore[arg-type]
    if origin is tuple:
        require(isinstance(value, (list, tuple)), path, value, "must be a list")
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        require(len(kinds) == len(value), path, value, f"must be a list of {len(kinds)} values")
        return tuple(coerced(k, v, path) for k, v in zip(kinds, value, strict=True))
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return _number(value, path)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    kind = origin or hint
    wrong = isinstance(kind, type) and not isinstance(value, kind)
    wrong = wrong or (hint is int and isinstance(value, bool))
    require(not wrong, path, value, f"must be of type {getattr(hint, '__name__', hint)}")
    if isinstance(value, int):
        require(abs(value) <= MAX_INTEGER, path, value, f"is too large; take at most {MAX_INTEGER}")
    if isinstance(value, str):
        require(value.isprintable(), path, value, "holds characters that cannot be printed; leave them out")
    return value


def _number(value: float | str, path: str) -> float:
    """Return a finite number."""
    try:
        number = float(value)
    except ValueError as error:
        raise UserError(path, value, "must be of type float") from error
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    require(math.isfinite(number), path, value, "must be a finite number")
    return number


# -- writing -------------------------------------------------------------------------------------------------


def to_tree(value: Any, owner: type | None = None, name: str = "") -> Any:
    """Return the mapping that `build` would turn into `value` again."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return list(value) if isinstance(value, tuple) else value
    tree = {f: to_tree(getattr(value, f), type(value), f) for f in options_of(type(value))}
    catalogue = CHOICES.get((owner, name)) if owner else None
    if catalogue is None:
        return tree
    known = {cls: key for key, cls in catalogue.items()}
    return {"name": known.get(type(value), getattr(type(value), "imported_as", "?")), **tree}


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML."""
    return yaml.safe_dump(to_tree(config), sort_keys=False)
