"""A small federation in memory for tests, and functions that run a method on it.

Images are 1 x 4 x 4, in three classes around fixed means. In group g, a pattern of the group is added to the
images and the labels are shifted by g: groups differ in their images and in the meaning of labels.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.testing import assert_close

import mpifl
from mpifl.aggregation.client_store import ClientStore
from mpifl.comm.mpi_startup import MAIN
from mpifl.comm.single import Single
from mpifl.comm.transport import Transport
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import CAPABILITIES
from mpifl.core.client import Client
from mpifl.core.federation import ClientData, Federation, Split
from mpifl.core.parameters import Layout
from mpifl.core.plan import Plan
from mpifl.core.rng import Key, key
from mpifl.core.types import Notes, Server
from mpifl.experiment import build
from mpifl.experiment.context import RunContext, with_newcomers
from mpifl.experiment.schema import Config, EvaluationConfig, Seeds
from mpifl.experiment.section_checks import check_sections
from mpifl.models import MODELS
from mpifl.runtime.engine import Engine, Record
from mpifl.runtime.server_step import ServerStep
from mpifl.simulation.policies import EveryArrival
from mpifl.simulation.sampling import RoundPlan, Sampler
from mpifl.training.config import LocalConfig
from mpifl.training.passes import Passes

Told = Callable[[str, tuple[Any, ...], Any], None]  # hook, arguments, result
CLASSES, SHAPE = 3, (1, 4, 4)
PYTHONPATH = {"PYTHONPATH": str(Path(mpifl.__file__).parents[1])}  # for programs started elsewhere
LOCAL = LocalConfig(epochs=1, batch_size=5, lr=0.05)
CONSTANTS = (int, float, str, type(None))  # nobody can change one
FLOPS: dict[str, tuple[dict[Any, Any], dict[Any, int]]] = {}
LEAVES = (torch.Tensor, np.ndarray, *CONSTANTS)


class Tiny(Federation):
    """N clients in contiguous groups.

    Args:
        num_clients: N.
        num_groups: number of groups.
        equal: whether all have the same number of training samples; otherwise 8, 11, 14, 17, 8, ...
        repeated: whether client k holds one common training set k + 1 times: equal gradients, unequal sizes.
    """

    def __init__(
        self, num_clients: int = 6, num_groups: int = 2, equal: bool = False, repeated: bool = False
    ) -> None:
        self.num_clients, self.num_classes, self.shape = num_clients, CLASSES, SHAPE
        self.repeated = repeated
        self.groups = np.repeat(np.arange(num_groups), -(-num_clients // num_groups))[:num_clients]
        n = np.full(num_clients, 12) if equal else 8 + 3 * (np.arange(num_clients) % 4)
        n = 6 * (np.arange(num_clients) + 1) if repeated else n
        self.sizes = np.stack([n, np.full(num_clients, 6), np.full(num_clients, 9)], 1).astype(np.int64)

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the same data at every visit."""
        if self.repeated:
            one = draw("train", 0, 6, 0)
            train = Split(one.x.repeat(k + 1, 1, 1, 1), one.y.repeat(k + 1))
        else:
            train = self._split(k, "train", 0)
        return ClientData(train, self._split(k, "val", 1), self._split(k, "test", 2))

    def _split(self, k: int, name: str, column: int) -> Split:
        return draw(name, k, int(self.sizes[k, column]), int(self.groups[k]))

    def public(self) -> tuple[Split, ...]:
        """Return the server's own samples, a dozen of each group."""
        return tuple(draw("public", g, 12, g) for g in range(int(self.groups.max()) + 1))


class Drifting(Tiny):
    """Clients with new samples at every visit."""

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the data of one visit."""
        train, val, test = (
            self._split(k, f"{name}{visit}", i) for i, name in enumerate(("train", "val", "test"))
        )
        return ClientData(train, val, test)


@cache
def means() -> np.ndarray:
    """Return the mean image of each class."""
    return key(0, "means").numpy().normal(size=(CLASSES, *SHAPE))


@cache
def pattern(group: int) -> np.ndarray:
    """Return the pattern that is added to the images of a group."""
    return 2 * key(0, "pattern", group).numpy().normal(size=SHAPE)


@lru_cache(2000)
def drawn(name: str, k: int, n: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels for `draw`, which must not be written to."""
    y = np.arange(n) % CLASSES
    x = means()[y] + pattern(group) + 0.3 * key(0, name, k).numpy().normal(size=(n, *SHAPE))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy((y + group) % CLASSES).long()


def draw(name: str, k: int, n: int, group: int) -> Split:
    """Return `n` samples addressed by name and number, with the pattern and labels of a group."""
    x, y = drawn(name, k, n, group)
    return Split(x.clone(), y.clone())


def mlp(*hidden: int) -> Any:
    """Return the configuration of a fully connected network."""
    return MODELS["mlp"](hidden=hidden)


@dataclass
class Run:
    """The results of a few steps on a tiny federation.

    Attributes:
        server_step: takes the steps.
        servers: the server after setup and after each step.
        notes: the notes that each step was decided from.
        plans: the decision of each step.
        scores: scores of the last evaluation, [N].
        scored: step -> scores, of a run with an engine.
        reported: evaluated step -> means of the clients' metrics and figures of the engine.
        served: client -> message, state and client of its last evaluation.
        engine: the engine of an asynchronous run.
        arrivals: events of an asynchronous run.
        times: virtual seconds of each step of an asynchronous run.
        records: the engine's record of each step, and of the state before the first one.
    """

    server_step: ServerStep = field(init=False)
    servers: list[Server] = field(default_factory=list)
    notes: list[Notes] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    scored: dict[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    reported: dict[int, Mapping[str, float]] = field(default_factory=dict)
    served: dict[int, tuple[Any, Any, Client]] = field(default_factory=dict)
    engine: Engine | None = None
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    times: list[float | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def server(self) -> Server:
        """The last server."""
        return self.servers[-1]

    def hear(self, hook: str, args: tuple[Any, ...], result: Any) -> None:
        """Remember plans, and what clients were evaluated with."""
        if hook == "aggregate":
            self.plans.append(result)
        if hook == "evaluate":
            message, state, client, _ = args
            self.served[client.id] = (message, state, client)

    def hear_all(self, hook: str, args: tuple[Any, ...], result: Any) -> None:
        """Remember notes too."""
        self.hear(hook, args, result)
        if hook == "aggregate":
            self.notes.append(args[1])

    def observe(self, record: Record) -> None:
        """Remember a step of an engine."""
        self.records.append(record)
        self.servers.append(record.server)
        self.times.append(record.virtual_seconds)
        self.scores = record.scores or self.scores
        if record.scores is not None:
            self.scored[record.step] = record.scores
            self.reported[record.step] = record.train

    def model(self, k: int) -> torch.Tensor:
        """Return the vector that client `k` is evaluated with."""
        return self.server_step.algorithm.model_of(*self.served[k])

    def models(self) -> torch.Tensor:
        """Return the vectors [N, d] that the clients are evaluated with."""
        return torch.stack([self.model(k) for k in sorted(self.served)])


def config_of(algorithm: Algorithm, **changes: Any) -> Config:
    """Return a configuration of a method: an MLP of 8 units, one epoch of batches of 5."""
    return Config(**{"algorithm": algorithm, "model": mlp(8), "local": LOCAL, "seed": Seeds(), **changes})


def device_of(config: Config) -> str:
    """Return where clients train."""
    return "cuda" if config.system.device == "cuda" else "cpu"


def context_of(config: Config, federation: Federation, transport: Transport | None = None) -> RunContext:
    """Return the context that `build` would return, for an existing federation."""
    check_sections(config)
    config.policy.prepare(federation)
    transport, device = transport or Single(), device_of(config)
    public = build.public_sets(config.algorithm, config.data, federation, True)
    parts = build.build_parts(config, federation, public, device)
    decisions = build.decide(config, parts, MAIN, transport.size)
    parts = with_newcomers(parts, config.policy, decisions.joins, decisions.leaves)
    if config.model == mlp(8):
        share_flops(parts.learner.passes, repr(config.task))
    return RunContext(**vars(parts), config=config, transport=transport, decisions=decisions)


def share_flops(passes: Passes, task: str) -> None:
    """Let networks of one architecture, task and choice of trained parameters measure their FLOPs once."""
    module = passes.context.flat.module
    moving = [param.requires_grad for param in module.parameters()]
    of = f"{module} {moving} {task} {passes.context.counts}"
    passes._lines, passes._flops = FLOPS.setdefault(of, ({}, {}))


def start(
    algorithm: Algorithm,
    federation: Federation,
    folder: Path,
    transport: Transport | None = None,
    told: Told | None = None,
    **changes: Any,
) -> tuple[ServerStep, Sampler]:
    """Return the server step of a method on a federation, and the sampler of cohorts.

    `told` is called after every call of a hook.
    """
    context = context_of(config_of(algorithm, **changes), federation, transport)
    n, m = federation.num_clients, context.decisions.num_sampled
    sampler = Sampler(n, m, context.system_key)
    context = context if told is None else observed(context, told)
    return build.build_server_step(context, ClientStore("test", str(folder))), sampler


def run(
    algorithm: Algorithm,
    federation: Federation,
    folder: Path,
    steps: int = 3,
    evaluate: bool = True,
    **changes: Any,
) -> Run:
    """Take some steps in this process alone; `changes` are fields of `Config`."""
    if algorithm.needs.single_upload:
        return events(algorithm, federation, folder, steps, **changes)
    out = Run()
    server_step, sampler = start(algorithm, federation, folder, told=out.hear, **changes)
    out.server_step = server_step
    out.servers.append(server_step.initialize())
    for step in range(1, steps + 1):
        server, notes = step_of(server_step, out.server, sampler(step))
        out.servers.append(server)
        out.notes.append(notes)
    if evaluate:
        out.scores = server_step.evaluate(out.server, np.arange(federation.num_clients))
    return out


def step_of(
    server_step: ServerStep, server: Server | None, cohort: np.ndarray
) -> tuple[Server | None, Notes | None]:
    """Train a cohort and return the next server and the notes it was decided from, on rank 0."""
    result = server_step.step(server, RoundPlan(cohort))
    return (None, None) if result is None else (result.server, result.notes)


def walk(algorithm: Algorithm, federation: Federation, folder: Path, **changes: Any) -> Iterator[Run]:
    """Take one step after the other, and yield the run so far with all clients evaluated."""
    out = Run()
    server_step, sampler = start(algorithm, federation, folder, told=out.hear, **changes)
    out.server_step = server_step
    out.servers.append(server_step.initialize())
    for step in count(1):
        server, notes = step_of(server_step, out.server, sampler(step))
        out.servers.append(server)
        out.notes.append(notes)
        out.scores = server_step.evaluate(server, np.arange(federation.num_clients))
        yield out


def events(algorithm: Algorithm, federation: Federation, folder: Path, steps: int = 3, **changes: Any) -> Run:
    """Take some asynchronous steps in this process alone, one upload each unless a policy is given."""
    asked = {
        "rounds": steps,
        "policy": EveryArrival(),
        "evaluation": EvaluationConfig(every=0, at_start=True),
    }
    context = context_of(config_of(algorithm, **(asked | changes)), federation)
    out = Run()
    seen = observed(context, out.hear_all)
    server_step = out.server_step = build.build_server_step(seen, ClientStore("test", str(folder)))
    out.engine = build.build_engine(context, server_step, out.arrivals.extend)
    out.engine.run(out.observe)
    return out


def plane(points: np.ndarray, new: np.ndarray | None = None, dims: int = 2, seed: int = 42) -> np.ndarray:
    """Return the first coordinates of the points; replaces `umap_plane`, which compiles for ten seconds."""
    everything = points if new is None else np.vstack([points, new])
    return np.ascontiguousarray(everything[:, :dims], np.float64)


# -- observed methods ----------------------------------------------------------------------------------------


def observed(context: RunContext, told: Told) -> RunContext:
    """Return a context whose method is observed."""
    algorithm = observed_method(context.config.algorithm, told)
    return dataclasses.replace(context, config=dataclasses.replace(context.config, algorithm=algorithm))


def observed_method(algorithm: Algorithm, told: Told) -> Algorithm:
    """Return a method whose hooks are checked to leave their arguments unchanged.

    `told` is called after every call that the engine makes, not after calls by the method itself.
    """

    def observe(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **named: Any) -> Any:
            before = {path: copied(value) for path, value in arrays([args, named]).items()}
            result = found(*args, **named)
            same(before, arrays([args, named]), f"{type(algorithm).__name__}.{name} changed its arguments")
            told(name, args, result)
            return result

        return hook

    return with_hooks(algorithm, observe)


def with_hooks(algorithm: Algorithm, wrapped: Callable[[str, Callable[..., Any]], Any]) -> Algorithm:
    """Return a method with every hook, those of its capabilities included, replaced by `wrapped`'s result."""
    out = copy.copy(algorithm)
    for name in {name for cls in (Algorithm, *CAPABILITIES) for name in dir(cls)}:
        found = getattr(algorithm, name, None)
        if not name.startswith("_") and callable(found):
            object.__setattr__(out, name, wrapped(name, found))  # the dataclass is frozen
    return out


def arrays(value: Any, path: str = "args") -> dict[str, Any]:
    """Return all tensors, arrays and numbers inside a value, by path."""
    found: dict[str, Any] = {}
    _gather(value, path, found)
    return found


def _gather(value: Any, path: str, found: dict[str, Any]) -> None:
    if isinstance(value, LEAVES):
        found[path] = value
        return
    if isinstance(value, (dict, Mapping)):  # the first is told sooner
        inside: Mapping[Any, Any] = value
    elif isinstance(value, (list, tuple)):
        inside = dict(enumerate(value))
    elif isinstance(value, Client):
        inside = {"init": value.init, "train": value.data.train, "val": value.data.val}
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, Key, Layout)):
        inside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        assert isinstance(value, (Key, Layout)) or callable(value), f"cannot look into {value!r}"
        return
    for name, item in inside.items():
        _gather(item, f"{path}.{name}", found)


def copied(value: Any) -> Any:
    """Return a copy of a tensor or array, anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def same(a: Mapping[str, Any], b: Mapping[str, Any], message: str = "") -> None:
    """Raise unless two collections of arrays hold the same names and bits."""
    assert a.keys() == b.keys(), f"{message}: {a.keys() ^ b.keys()}"
    for name, x in a.items():
        if b[name] is x and isinstance(x, CONSTANTS):
            continue
        if isinstance(x, torch.Tensor):
            if not torch.equal(b[name], x):  # ten times as fast; NaN are equal below
                assert_close(b[name], x, rtol=0, atol=0, equal_nan=True, msg=f"{message}: {name}")
        elif not np.array_equal(b[name], x):
            np.testing.assert_array_equal(b[name], x, err_msg=f"{message}: {name}")


def state_of(server: Server) -> dict[str, Any]:
    """Return everything a server remembers, by name."""
    return arrays({"tables": server.tables, "assign": server.assign, "memo": server.algorithm_state})
