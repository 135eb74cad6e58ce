"""`mpifl check`: tests in small runs whether your own method keeps the rules that every method must keep.

Or your own trainer: under FedAvg, and under methods that ask for what it says that it gives. Or your own
compression: alone, and in runs of FedAvg that compress uploads and downloads.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.mpi_startup import mpirun
from mpifl.comm.single import Single
from mpifl.core.algorithm import Algorithm, plain_visit
from mpifl.core.capabilities import ServerEvaluation, uses
from mpifl.core.errors import CodeFailed, Stopped, UserError, first_of, is_whole, require
from mpifl.core.imports import load_object
from mpifl.core.registry import Registry
from mpifl.core.rng import key
from mpifl.core.trainer import GIFTS, Gift, LocalTrainer, trainer_of
from mpifl.core.types import CohortReads, Server
from mpifl.driver.run import run
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.experiment.section_checks import check_sections
from mpifl.results.reader import Run, load
from mpifl.runtime.hooks import ServerHooks
from mpifl.traffic.compression import COMPRESSIONS, Codec, Compression, coded
from mpifl.training.trainers import TRAINERS

Tree = dict[str, Any]
ROUNDS, CLIENTS = 4, 6
WORLD: Tree = {  # two rotations of scikit-learn's digits
    "name": "check",
    "rounds": ROUNDS,
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"epochs": 2, "batch_size": 32, "lr": 0.1},
    "data": {
        "source": "digits",
        "scenario": {"name": "rotated", "angles": [0, 180], "clients": CLIENTS, "validation": 0.2},
    },
    "evaluation": {"every": 1, "at_start": True},
}
ONE_UPLOAD: Tree = {"policy": "client_decides", "rounds": ROUNDS * CLIENTS, "evaluation": {"every": CLIENTS}}
SERVER_SETS: Tree = {  # labelled sets of the server, for methods that evaluate there
    "data": {
        "scenario": {
            **{"name": "ccfl", "clusters": 2, "clients": CLIENTS, "smallest": 40, "largest": 80},
            **{"test_images": 20, "public": 40, "exam": 40},
        }
    }
}
PARTIAL: Tree = {"cohort_size": CLIENTS // 2}
LENGTHS = (1, 2, 63, 1000)  # of the vectors that a compression codes alone
ARGUMENTS = {  # hook -> arguments that it must not modify
    "local_update": ("message", "state"),
    "aggregate": ("server", "notes"),
    "server_update": ("old server", "new server"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one trial.

    Attributes:
        passed: whether it passed; None if it was not tried, or is a note.
        text: one line.
        remedy: advice; empty if there is nothing to fix.
    """

    passed: bool | None
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        head = {True: "ok   ", False: "FAIL ", None: "note "}[self.passed]
        return head + self.text + (f"\n     {self.remedy}" if self.remedy else "")


def check(name: str, options: Sequence[str], ranks: int, say: Callable[[str], None]) -> bool:
    """Try a method, a trainer or a compression; return whether nothing failed.

    Args:
        name: `file.py:Class`, `package.module:Class`, or a name of the catalogues.
        options: configuration keys that override those of the trials' small configuration.
        ranks: number of ranks of the trial under MPI; 1 leaves out this trial.
        say: prints a line.

    Raises:
        UserError: there is no such class, it is neither, or the options do not fit it.
    """
    trials, world = KINDS[_kind(name)]
    tree = world(name, options)
    config: Config = loader.from_tree(Config, tree)
    algorithm = config.algorithm
    remedy = "is no subclass of mpifl.Algorithm, mpifl.Trainer or mpifl.traffic.compression.Compression"
    require(isinstance(algorithm, Algorithm), "check", name, remedy)
    check_sections(config)
    say(f"{name} in {config.rounds} server steps with {_clients(config)} clients")
    passed = True
    with tempfile.TemporaryDirectory(prefix="mpifl-check-") as folder:
        for finding in trials(tree, config, Path(folder), ranks).all():
            say(str(finding))
            passed = passed and finding.passed is not False
    return passed


def _world(name: str, options: Sequence[str]) -> Tree:
    """Return the configuration of the trials, as this method needs it."""
    tree = loader.merged(WORLD, {"algorithm": {"name": name}})
    over = loader.overrides(options)
    algorithm = loader.from_tree(Config, loader.merged(tree, over)).algorithm
    if isinstance(algorithm, Algorithm) and algorithm.needs.single_upload:
        tree = loader.merged(tree, ONE_UPLOAD)
    if isinstance(algorithm, Algorithm) and uses(algorithm, ServerEvaluation):
        tree = loader.merged(tree, SERVER_SETS)
    return loader.merged(tree, over)


def _kind(name: str) -> type:
    """Return the key of `KINDS` that a name belongs to."""
    others = {kind: catalogue for kind, catalogue in OTHERS.items() if ":" in name or name in catalogue}
    if ":" not in name:
        return Algorithm if name in CATALOGUE else next(iter(others), Algorithm)
    found = load_object(name, "check")
    return next((k for k in others if isinstance(found, type) and issubclass(found, k)), Algorithm)


def _trainer_world(name: str, options: Sequence[str]) -> Tree:
    """Return the configuration of a trainer's trials."""
    local = {key: value for key, value in WORLD["local"].items() if key != "lr"}
    tree = {**WORLD, "algorithm": {"name": "fedavg"}, "local": {**local, "trainer": {"name": name}}}
    return loader.merged(tree, loader.overrides(options))


def _compression_world(name: str, options: Sequence[str]) -> Tree:
    """Return the configuration of a compression's trials; downloads take its options for uploads."""
    payload = {"compression": {"name": name}, "error_feedback": True}
    tree = loader.merged({**WORLD, "algorithm": "fedavg", "payload": payload}, loader.overrides(options))
    return loader.merged({"payload": {"downloads": tree["payload"]["compression"]}}, tree)


def _clients(config: Config) -> str:
    name, value = config.data.scenario.option("clients")
    return str(value) if name == "clients" else "the scenario's"


class Trials:
    """The trials of one method, in order; a run that fails ends them.

    Args:
        tree: the configuration.
        config: the same, built.
        folder: folder for run folders.
        ranks: number of ranks of the trial under MPI.
    """

    def __init__(self, tree: Tree, config: Config, folder: Path, ranks: int) -> None:
        self.tree, self.config, self.folder, self.ranks = tree, config, folder, ranks

    def all(self) -> Iterator[Finding]:
        """Yield the result of each trial."""
        try:
            with _changes(type(self.config.algorithm)) as changed, _reads() as seen:
                first = self._run("first", {})
        except (UserError, CodeFailed) as error:
            yield _failed("a run", error)
            return
        yield self._learns(first)
        yield from seen.findings()
        yield _leaves_arguments(changed)
        yield (repeats := self._repeats(first))
        if repeats.passed:
            yield self._resumes(first)
            if plain_visit(self.config.algorithm) is not None:
                yield self._one_by_one(first)
        if self.config.policy.synchronous:
            yield self._partial()
        yield self._over_ranks(first)
        yield self._bytes(first)
        yield from self._computation(first)
        yield self._cites()

    def _of_any_kind(self, first: Run) -> Iterator[Finding]:
        """Yield the results of the trials that trainers and compressions have in common."""
        yield self._learns(first)
        yield (repeats := self._repeats(first))
        if repeats.passed:
            yield self._resumes(first)
        yield self._over_ranks(first)
        yield self._bytes(first)

    def _config(self, label: str, changes: Tree) -> Config:
        """Return the configuration with changes and its own run folder."""
        output = {"output": {"folder": str(self.folder), "id": label}}
        tree = loader.merged(loader.merged(self.tree, changes), output)
        config: Config = loader.from_tree(Config, tree)
        check_sections(config)
        return config

    def _run(self, label: str, changes: Tree) -> Run:
        """Run the configuration with changes in this process."""
        folder = run(self._config(label, changes), Single(), quiet=True)
        assert folder is not None
        return load(folder)

    def _learns(self, first: Run) -> Finding:
        accuracy = [float(row["accuracy_mean"]) for row in first.rows("metrics.csv")]
        text = f"a run: accuracy {accuracy[0]:.3f} before, {max(accuracy[1:]):.3f} at best after"
        if max(accuracy[1:]) > accuracy[0]:
            return Finding(True, text)
        return Finding(None, text, "nothing was learned: do uploads reach the rows that clients read?")

    def _repeats(self, first: Run) -> Finding:
        if self._run("again", {}).summary["digest"] == first.summary["digest"]:
            return Finding(True, "the same run again: the same digest")
        remedy = 'draw from `key` alone, as in key.of("noise").numpy(); keep nothing in the object or module'
        return Finding(False, "the same run again: another digest", remedy)

    def _resumes(self, first: Run) -> Finding:
        """Stop a run half-way, and resume it from its checkpoint."""
        config, half = self._config("stopped", {}), max(1, self.config.rounds // 2)
        what, step = f"stopped after {half} steps and resumed", count(1)
        folder = self.folder / f"{config.name}-stopped"
        with suppress(Stopped):
            run(config, Single(), quiet=True, asked_to_stop=lambda: next(step) >= half)
        try:
            run(self._config("stopped", {}), Single(), quiet=True, resumed=folder)  # a new object
        except (UserError, CodeFailed) as error:
            return _failed(what, error)
        if load(folder).summary["digest"] == first.summary["digest"]:
            return Finding(True, f"{what}: the same digest")
        remedy = "keep what outlives a step in `state` of clients and `algorithm_state` of the server"
        return Finding(False, f"{what}: another digest", remedy)

    def _one_by_one(self, first: Run) -> Finding:
        """Run `local_update` itself instead of what `plain_visit` describes."""
        what = "`local_update` itself instead of what `plain_visit` says"
        with patch.object(type(self.config.algorithm), "plain_visit", lambda method: None):
            found = self._run("one-by-one", {})
        if found.summary["digest"] == first.summary["digest"]:
            return Finding(True, f"{what}: the same digest")
        remedy = "return a `PlainVisit` that does the same, or None: it counts only where the kernels train"
        return Finding(False, f"{what}: another digest", remedy)

    def _partial(self) -> Finding:
        what = f"rounds with {CLIENTS // 2} clients"
        try:
            self._run("partial", PARTIAL)
        except (UserError, CodeFailed) as error:
            return _failed(what, error)
        return Finding(True, what)

    def _over_ranks(self, first: Run) -> Finding:
        """Run over several ranks, in a separate MPI job."""
        what = f"{self.ranks} ranks"
        if self.ranks == 1:
            return Finding(None, "over several ranks: not tried (--ranks 1)")
        try:
            start = mpirun(self.ranks)
        except UserError:
            remedy = "there is no mpirun on the PATH; activate an environment with an MPI"
            return Finding(None, f"{what}: not tried", remedy)
        path = self.folder / "ranks.yaml"
        path.write_text(loader.dump(self._config("ranks", {})))
        command = [*start, "mpifl", "run", str(path), "-q"]
        more = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", **os.environ}  # P > cores
        closed = subprocess.DEVNULL
        done = subprocess.run(command, capture_output=True, text=True, stdin=closed, env=more, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            ours = [line for line in lines if line.startswith("mpifl:")] or lines[-5:]
            return Finding(False, f"{what}: exit code {done.returncode}", "\n     ".join(ours))
        found = load(self.folder / f"{self.config.name}-ranks").summary
        different = [
            key
            for key in ("digest", "federation_bytes_down", "federation_bytes_up")
            if found[key] != first.summary[key]
        ]
        if not different:
            return Finding(True, f"{what}: the same digest and bytes")
        remedy = (
            "does a hook keep something in the object or module? Clients keep things in `state`, "
            "the server in `algorithm_state`"
        )
        return Finding(False, f"{what}: another {' and '.join(different)}", remedy)

    def _bytes(self, first: Run) -> Finding:
        """Compare the forecast of federation bytes with the ledger."""
        forecast = first.summary["federation_bytes_expected"]
        text = "bytes: {federation_bytes_down} down, {federation_bytes_up} up".format(**first.summary)
        if forecast["down"] is None:
            return Finding(None, f"{text}; no forecast: {forecast['why']}")
        if not forecast["why"]:
            return Finding(True, f"{text}, as forecast")
        remedy = "do rounds differ? Add what is missing in `extra_bytes`, or say why in `traffic_depends_on`"
        return Finding(False, f"{text}; the forecast was {forecast['down']} and {forecast['up']}", remedy)

    def _computation(self, first: Run) -> Iterator[Finding]:
        """Compare what the method declares that its clients compute with what they computed."""
        forecast, flops = first.summary["flops_expected"], first.summary["flops"]
        if forecast["flops"] is None:
            return
        text = f"computation: {flops} FLOPs of clients"
        if not forecast["why"]:
            yield Finding(True, f"{text}, as declared")
            return
        remedy = "say in `visit_passes` (statistics_passes, look_passes) what clients are asked for"
        yield Finding(False, f"{text}; declared were {forecast['flops']}", remedy)

    def _cites(self) -> Finding:
        if self.config.algorithm.paper:
            return Finding(True, "it names its paper")
        return Finding(None, "no paper", "set `paper` to a BibTeX entry, for `mpifl cite`")


ASKING: Mapping[Gift, tuple[Tree, Tree]] = {  # gift -> two methods that differ only in what they ask for
    "direction": ({"name": "fedprox", "mu": 0.01}, {"name": "fedprox", "mu": 10.0}),
    "loss": ({"name": "moon", "mu": 0.01}, {"name": "moon", "mu": 10.0}),
    "part": ({"name": "fedbabu"}, {"name": "fedavg"}),
    "rate": ({"name": "scaffold"}, {"name": "fedavg"}),
    "gradient": ({"name": "ucfl", "streams": 2}, {"name": "fedavg"}),
    "outputs": ({"name": "hypcluster", "num_clusters": 2}, {"name": "fedavg"}),
}


class TrainerTrials(Trials):
    """The trials of one trainer, in order; a run that fails ends them."""

    def all(self) -> Iterator[Finding]:
        """Yield the result of each trial."""
        try:
            first = self._run("first", {})
        except (UserError, CodeFailed) as error:
            yield _failed("a run", error)
            return
        yield from self._of_any_kind(first)
        trainer = trainer_of(self.config.local.trainer)
        for gift in () if trainer is None else trainer.gives:
            if gift in ASKING:
                yield self._given(gift)

    def _given(self, gift: Gift) -> Finding:
        """Run two methods that differ in what they ask of the trainer."""
        one, other = ASKING[gift]
        what = f"gives `{gift}`: {one['name']} {GIFTS[gift]}"
        base = {"rounds": 2, "local": {"epochs": 1}}
        found = []
        for label, method in (("one", one), ("other", other)):
            tree = {**self.tree, "algorithm": method}
            trials = TrainerTrials(tree, self.config, self.folder, self.ranks)
            try:
                found.append(trials._run(f"{gift}-{label}", base).summary["digest"])
            except (UserError, CodeFailed) as error:
                return _failed(what, error)
        if found[0] != found[1]:
            return Finding(True, what)
        remedy = "call context.loss for the loss, and context.direct between backward pass and step"
        return Finding(False, f"{what}, and that changes nothing", remedy)


class CompressionTrials(Trials):
    """The trials of one compression, in order; a run that fails ends them."""

    def all(self) -> Iterator[Finding]:
        """Yield the result of each trial."""
        how = self.config.payload.compression
        try:
            yield (alone := _alone(how))
            if not alone.passed:
                return
            first = self._run("first", {})
        except (UserError, CodeFailed) as error:
            yield _failed("a run", error)
            return
        yield from self._of_any_kind(first)
        if isinstance(how, Codec):
            for way in ("up", "down"):
                yield self._witnessed(way)
        else:
            remedy = "let it be a mpifl.traffic.compression.Codec, which makes the bytes"
            yield Finding(None, "no bytes are made, against which `size` could be checked", remedy)

    def _witnessed(self, way: str) -> Finding:
        """Compare the ledger with the lengths of what `encode` returns in a run, one way of messages."""
        payload = self.tree["payload"]
        one = {"compression": payload["compression"]} if way == "up" else {"downloads": payload["downloads"]}
        tree = {**self.tree, "payload": one, "evaluation": {"every": 0}}
        how, made = type(self.config.payload.compression), list[int]()
        encode = how.encode  # type: ignore[attr-defined]

        def witnessed(self: Codec, *given: Any) -> Any:
            made.append(len(data := encode(self, *given)))
            return data

        with patch.object(how, "encode", witnessed):
            trials = CompressionTrials(tree, self.config, self.folder, self.ranks)
            summary = trials._run(f"witness-{way}", {}).summary
        counted = summary[f"federation_bytes_{way}"]
        # uncounted: the upload of the visit that is tried beforehand, and the downloads of the evaluation
        uncounted = made[0] * (1 if way == "up" else summary["clients"])
        text = f"bytes {way}: {counted} in the ledger"
        if sum(made) == counted + uncounted:
            return Finding(True, f"{text}, as many as `encode` has made")
        text += f", and {sum(made) - uncounted} that `encode` has made"
        remedy = "return from `size` the length of what `encode` returns"
        return Finding(False, text, remedy)


def _alone(how: Compression) -> Finding:
    """Code vectors of several lengths, each twice with the same key."""
    sizes = []
    for d in LENGTHS:
        x = torch.randn(d, generator=key(0, d).torch())
        before, size = x.clone(), how.size(d, x.element_size())
        if not is_whole(size) or size < 0:
            return Finding(False, f"size({d}) is {size!r}", "return the bytes, an integer")
        for unbiased in (True, False):
            where = key(0, "codec", d)
            one = coded(how, x, where, unbiased)
            if not torch.equal(x, before):
                return Finding(False, f"{d} numbers: `code` changes its argument", "work on a copy")
            if not torch.equal(one, coded(how, x, where, unbiased)):
                return Finding(False, f"{d} numbers coded twice: two results", "draw from `key` alone")
        sizes.append(f"{size} bytes for {d}")
    return Finding(True, f"alone: the same twice; {', '.join(sizes)}")


OTHERS: Mapping[type, Registry[Any]] = {LocalTrainer: TRAINERS, Compression: COMPRESSIONS}
KINDS: Mapping[type, tuple[type[Trials], Callable[[str, Sequence[str]], Tree]]] = {
    Algorithm: (Trials, _world),
    LocalTrainer: (TrainerTrials, _trainer_world),
    Compression: (CompressionTrials, _compression_world),
}


@contextmanager
def _changes(method: type[Algorithm]) -> Iterator[set[str]]:
    """Yield a set that collects, in words, the arguments that hooks of a class change while they run."""
    changed: set[str] = set()

    def watched(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Algorithm, *given: Any) -> Any:
            mine = dict(zip(ARGUMENTS[name], given, strict=False))
            before = copy.deepcopy(mine)
            made = hook(self, *given)
            changed.update(
                f"{name} changed its {word}" for word in mine if not _same(mine[word], before[word])
            )
            return made

        return call

    hooks: dict[str, Any] = {name: watched(name, getattr(method, name)) for name in ARGUMENTS}
    with patch.multiple(method, **hooks):
        yield changed


@dataclass
class Seen:
    """Which rows of the server clients download, to train or to be evaluated, in a run.

    Attributes:
        rows: table -> number of its rows, when clients last read it.
        read: table -> the rows that some client has read.
    """

    rows: dict[str, int] = field(default_factory=dict)
    read: dict[str, set[int]] = field(default_factory=dict)

    def add(self, server: Server, found: CohortReads) -> None:
        """Add what some clients read of a server."""
        for reads in found.distinct:
            for name, rows in reads.items():
                self.rows[name] = len(server.tables[name])
                self.read.setdefault(name, set()).update(np.asarray(rows, int).tolist())

    def findings(self) -> Iterator[Finding]:
        """Yield whether clients have read all rows of each table of several.

        A row that nobody reads is no failure: clusters may be empty.
        """
        for name, rows in self.rows.items():
            unread = sorted({*range(rows)} - self.read[name])
            if rows > 1 and not unread:
                yield Finding(True, f"clients read each of the {rows} rows of table {name!r}")
            elif unread:
                which = first_of([str(row) for row in unread])
                text = f"{len(unread)} of the {rows} rows of table {name!r} are read by no client"
                remedy = (
                    "does `aggregate` assign clients to them (`Plan.assign`)? If clusters may stay empty, "
                )
                yield Finding(None, f"{text}: row {which}", f"{remedy}as in IFCA, there is nothing to do")


@contextmanager
def _reads() -> Iterator[Seen]:
    """Yield what collects the rows that clients read while runs are made."""
    seen, reads = Seen(), ServerHooks.reads

    def watched(self: ServerHooks, hook: str, server: Server, clients: np.ndarray) -> CohortReads:
        found = reads(self, hook, server, clients)
        seen.add(server, found)
        return found

    with patch.object(ServerHooks, "reads", watched):
        yield seen


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, recursively in their fields and items; NaN equals NaN."""
    if dataclasses.is_dataclass(one):
        one, other = vars(one), vars(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return bool(one == other)


def _leaves_arguments(changed: set[str]) -> Finding:
    """Return the finding on the arguments that hooks changed."""
    if not changed:
        return Finding(True, "hooks leave their arguments as they were")
    remedy = (
        "work on a copy, .clone() of a tensor, .copy() of an array: others read the same numbers after it"
    )
    return Finding(False, "; ".join(sorted(changed)), remedy)


def _failed(what: str, error: UserError | CodeFailed) -> Finding:
    trace = error.trace if isinstance(error, CodeFailed) else ""
    return Finding(False, f"{what}: {error}", trace.replace("\n", "\n     ").rstrip())
