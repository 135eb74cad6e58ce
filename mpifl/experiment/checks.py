"""Checks that need the data, the model or the ranks: what does not fit is refused or said before training."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.collective_choice import ByBytes
from mpifl.core.algorithm import Needs, vector_parts
from mpifl.core.capabilities import NewClients, RememberedUploads, ServerEvaluation, hooks_of, uses
from mpifl.core.errors import UserError, code_failed, first_of, name_of, require
from mpifl.core.federation import CLASSES, IMAGES, DataInfo, Federation
from mpifl.core.parameters import Layout, width
from mpifl.core.rng import key
from mpifl.core.task import Task
from mpifl.core.types import ProblemInfo
from mpifl.data import DataConfig
from mpifl.models import LoRA, ModelOptions, build_model, check_adapted, described, seeded_model
from mpifl.models.pretrained import ASSIGN, read_state
from mpifl.models.user_module import WRITES, Custom, returned
from mpifl.protection.accountant import Accountant
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy
from mpifl.protection.robust_rules import Rule
from mpifl.protection.secure_sum import MaskedSums
from mpifl.simulation.client_devices import Alike
from mpifl.simulation.delays import Constant
from mpifl.supervision.logging import warn_once
from mpifl.training.config import LocalConfig
from mpifl.training.per_client import SECTION
from mpifl.training.tasks import Classification

from .context import Parts
from .schema import Config, check_local
from .starting_model import FILE, check_network


def check_folder(key: str, folder: str | None) -> None:
    """Raise `UserError` if this rank cannot write to a folder that `key` names."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}) on {socket.gethostname()}; give another folder"
        raise UserError(key, folder, remedy) from error


def check_parts(config: Config, parts: Parts) -> None:
    """Refuse data, model, method and policy that do not fit, and warn of what has no effect; on rank 0."""
    check_folder("system.statistics_cache", config.system.statistics_cache)
    check_model(config, parts)
    check_method(config, parts)
    check_local_training(config, parts)
    warn_of_ignored(config)
    warn_of_ignored_options(config)
    warn_of_ignored_cohort(config)
    warn_of_unused_public(config)
    warn_of_unused_collective(config)
    check_client_sizes(config, parts.federation)
    warn_of_idle_clients(config, parts)
    warn_of_same_starts(config, parts.problem)
    warn_of_statistics_of_all(config, parts.problem)
    check_evaluation(config, parts)


def check_model(config: Config, parts: Parts) -> None:
    """Raise `UserError` if the model differs from that of the earlier run, or does not fit the data."""
    check_earlier(config, parts.federation.info, parts.problem.layout)
    check_labels(config, parts.federation.info)
    check_outputs(config, parts.federation)
    warn_of_numbered_categories(config, parts.federation.info)


def warn_of_numbered_categories(config: Config, info: DataInfo) -> None:
    """Warn if a network of the user's gets the numbers of categories, whose size and order mean nothing."""
    coded = sum(count > 0 for count in info.categories)
    if coded and not described(config.model):
        remedy = "inherit from ShapeModel, which makes them zeros and ones, or take them apart in the network"
        what = f"gets {coded} columns of categories as numbers from 0 ({list(info.categories)} categories)"
        warn_once(f"model.name = {name_of(config.model)!r}: {what}; {remedy}")


def check_labels(config: Config, info: DataInfo) -> None:
    """Raise `UserError` if the task cannot use the labels; names the key that reads them in another way."""
    task, readable = config.task, config.data.source.readable_labels
    try:
        task.check(info)
    except UserError as error:
        other = next((kind for kind in task.labels if kind in readable and kind != info.labels), None)
        if other is None:
            raise
        remedy = f"{error.remedy}; data.source.labels {other} reads these as {other}"
        raise UserError(error.key, error.value, remedy) from None


def check_method(config: Config, parts: Parts) -> None:
    """Raise `UserError` if the data lack something that the method needs."""
    algorithm, needs, sizes = config.algorithm, config.algorithm.needs, parts.federation.sizes
    check_needs(needs, config, parts.federation.info)
    try:
        algorithm.check(parts.problem)
    except UserError as error:
        raise error.under("algorithm") from error
    layout = parts.problem.layout
    for part in (name for name in ("body", "head") if name in algorithm.holds.values()):
        there = any(s.start < min(s.stop, layout.num_parameters) for s in layout.part(part))
        remedy = f"{type(algorithm).__name__} trains and sends its {part} apart, which holds no parameter; "
        remedy += "use a model with hidden layers, or another method"
        require(there, "model.name", name_of(config.model), remedy)
    remedy = "this method needs labelled sets of the server's own; use a scenario that has them (ccfl)"
    has_public = bool(parts.problem.public) or not uses(algorithm, ServerEvaluation)
    require(has_public, "data.scenario", name_of(config.data.scenario), remedy)
    empty = np.flatnonzero(sizes[:, 1] < 2)
    if needs.validation and len(empty):
        found = f"two samples or more of each client, and client {empty[0]} has {sizes[empty[0], 1]}"
        remedy = f"this method needs validation data, {found}; use a larger share or larger clients"
        name, value = config.data.scenario.option("validation")
        raise UserError(f"data.scenario.{name}", value, remedy)


def check_local_training(config: Config, parts: Parts) -> None:
    """Raise `UserError` if clients cannot train as `local` and `per_client` say."""
    ways = [config.local, *parts.differing.values()]
    check_local(config, ways)
    check_augmentation(config, parts.federation.info)
    single = parts.learner.drop_single and any(way.batch_size == 1 for way in ways)
    remedy = "batch norm leaves out batches of one sample: use 2 or more, or a model without batch norm"
    require(not single, "local.batch_size", 1, remedy)


def warn_of_idle_clients(config: Config, parts: Parts) -> None:
    """Say how many clients have too few samples for a step, or take none because their options say so."""
    sizes, single = parts.federation.sizes[:, 0], parts.learner.drop_single
    ways = {config.local, *parts.differing.values()}
    own: dict[str, Any] = {"epochs": 1, "steps": None}  # a method that ignores a key has steps of its own
    own = {name: value for name, value in own.items() if name in config.algorithm.needs.ignores}
    takes = {way: replace(way, **own).num_steps for way in ways}
    idle = {way: [int(n) for n in np.unique(sizes) if not takes[way](int(n), single)] for way in ways}
    if not any(idle.values()):
        return
    names = [str(k) for k, n in enumerate(sizes.tolist()) if n in idle[parts.differing.get(k, config.local)]]
    if names:
        why = "epochs or steps are 0, or batch norm leaves out their only sample"
        does = "their uploads are what they received, and what they keep of their training stays"
        warn_once(
            f"local: {len(names)} of {len(sizes)} clients take no step ({first_of(names)}): {why}; {does}"
        )


def check_client_sizes(config: Config, federation: Federation) -> None:
    """Raise `UserError` if a client has no training data, or no client has data to be evaluated on."""
    name, value = config.data.scenario.option("clients")
    empty = np.flatnonzero(federation.sizes[:, 0] < 1)
    if len(empty):
        remedy = f"client {empty[0]} has no training data; use fewer clients or a larger source"
        raise UserError(f"data.scenario.{name}", value, remedy)
    if config.evaluation.train or federation.has_test_data():
        return
    remedy = "use fewer clients, a larger source or a share for testing"
    if config.data.scenario.option("test_images") == ("test_images", 0):
        name, value, remedy = "test_images", 0, "use some"
    remedy += ", or evaluation.train, which evaluates on training data"
    raise UserError(f"data.scenario.{name}", value, f"no client has test data; {remedy}")


def warn_of_same_starts(config: Config, problem: ProblemInfo) -> None:
    """Warn if all initial models are the same, but the method needs them to differ."""
    if config.algorithm.needs.different_starts and torch.equal(problem.init(0), problem.init(1)):
        where = "model.weights" if config.start.run is None else "start.run"
        remedy = "draw the last layer (start.part body), or expect clusters that never differ"
        name = type(config.algorithm).__name__
        warn_once(f"{where}: all initial models of {name} are the same; {remedy}")


def warn_of_statistics_of_all(config: Config, problem: ProblemInfo) -> None:
    """Warn if all clients give statistics before training, although the method would begin with some."""
    algorithm, everyone = config.algorithm, np.arange(problem.num_clients)
    if config.policy.synchronous or not uses(algorithm, NewClients):
        return
    address = key(config.seed.training, "founders")
    first = len(hooks_of(algorithm, NewClients).initial_clients(problem, everyone, address))
    if first < len(everyone):
        name = type(algorithm).__name__
        remedy = f"{name} would begin with {first} and take the others as they join; policy rounds does that"
        warn_once(f"policy: all {len(everyone)} clients give their statistics before training, {remedy}")


def check_evaluation(config: Config, parts: Parts) -> None:
    """Raise `UserError` if `evaluation.by` names groups or devices and clients have none."""
    by, wanted, n = config.evaluation.by, config.evaluation.clients, parts.problem.num_clients
    if wanted is not None and wanted > n:
        warn_once(f"evaluation.clients = {wanted}: there are no more than {n} clients, all are evaluated")
    remedy = "this scenario has no true groups to average over; use cluster, or leave it out"
    require("group" not in by or parts.federation.groups is not None, "evaluation.by", list(by), remedy)
    remedy = "all clients are on one kind of device; name classes in `devices`, or leave it out"
    require("device" not in by or bool(parts.duration.devices), "evaluation.by", list(by), remedy)


def check_cohort(config: Config, num_sampled: int, num_clients: int, num_absent: int, away: bool) -> None:
    """Raise `UserError` if a step may have too few uploads for the method or the robust rule.

    Args:
        config: the configuration.
        num_sampled: m, the number of clients in a round, or of visits under way at the same time.
        num_clients: N.
        num_absent: number of clients that are absent at first.
        away: whether clients may be away when they are drawn.
    """
    algorithm, policy = config.algorithm, config.policy
    there = num_clients - num_absent if config.newcomers.joins > 1 else num_clients  # in the first round
    smallest = min(num_sampled, there)
    min_cohort = algorithm.needs.min_cohort
    ties = isinstance(config.delay, Constant) and isinstance(config.devices, Alike)
    least, needed = (
        policy.least_uploads(smallest, ties, away),
        f"{type(algorithm).__name__} needs {min_cohort}",
    )
    while_absent = " while newcomers are absent" if smallest < num_sampled else ""
    remedy = f"a step may have {least} upload{while_absent}, and {needed}; use "
    early = (
        "a larger cohort, and nothing that ends a step early (a time, max_staleness, clients that are away)"
    )
    remedy += "fewer newcomers" if while_absent else early
    require(least >= min_cohort, "cohort_size, policy", smallest, remedy)
    if isinstance(config.robust, Rule):
        remembers = uses(algorithm, RememberedUploads)
        try:
            config.robust.check(there if remembers else policy.uploads_per_step(smallest))
        except UserError as error:
            raise error.under("robust") from error


def check_noise(config: Config, num_sampled: int, num_clients: int) -> None:
    """Raise `UserError` if `privacy` leaves no noise for updates, or the accountant's library is missing."""
    if isinstance(config.privacy, CentralPrivacy):
        config.privacy.noise_of_updates(num_sampled, config.privacy.count_noise is not None)
    accountant = Accountant(config.privacy, num_clients, num_sampled)
    if accountant.counts:
        accountant.check()


def check_private_statistics(config: Config, layout: Layout) -> None:
    """Raise `UserError` if clients of a private run send running statistics, to which no noise is added.

    Masked sums are refused with central privacy, also without noise: its sums of updates over a fixed number
    may lead beyond what arrived, and the server cannot make a mean of statistics that it does not see.
    """
    method, privacy = config.algorithm, config.privacy
    noise = privacy.noise_multiplier if isinstance(privacy, (CentralPrivacy, LocalPrivacy)) else 0.0
    hidden = isinstance(config.secure_aggregation, MaskedSums) and isinstance(privacy, CentralPrivacy)
    if not noise and not hidden:
        return
    vectors = vector_parts(method, layout)
    sent = {name: width(layout.part(part)) for name, part in method.holds.items()}
    for name, size in (sent or {"model": layout.size}).items():
        for s in vectors.statistics(name, size):
            what = f"clients send running statistics ({vectors.tensor_at(name, size, s.start)})"
            remedy = (
                "which no noise may change; use a model without batch norm (group norm has none), or fedbn"
            )
            if noise:
                raise UserError("privacy.noise_multiplier", noise, f"{what}, {remedy}")
            remedy = f"{what}, whose mean is hidden in masked sums of updates; leave one of the two out"
            raise UserError("secure_aggregation, privacy", "masks, central", remedy)


def check_earlier(config: Config, info: DataInfo, layout: Layout) -> None:
    """Raise `UserError` if `start.run` or `model.weights` is from a run with another network.

    Args:
        config: the configuration.
        info: description of samples and labels.
        layout: layout of this run's model.
    """
    if config.start.run is not None:
        file = Path(config.start.run).expanduser() / FILE
        check_network("start.run", config.start.run, file, layout)
    model = config.model
    if isinstance(model, ModelOptions) and model.weights is not None:
        file = Path(model.weights).expanduser()
        if file.suffix == ".safetensors" and ASSIGN in read_state(model.weights):
            plain = replace(model, weights=None, lora=LoRA())  # adapters are added to the weights read
            whole = Layout.of(seeded_model(plain, info, config.seed.model))
            check_network("model.weights", model.weights, file, whole)


def check_needs(needs: Needs, config: Config, info: DataInfo) -> None:
    """Raise `UserError` if the method needs other kinds of labels or samples than the source has."""
    name = name_of(config.algorithm)
    remedy = f"it reads the classes of samples, but labels of this source are {info.labels}"
    require(
        not needs.classes or info.labels == CLASSES, "algorithm.name", name, f"{remedy}; use another method"
    )
    remedy = f"it compares {' or '.join(needs.inputs)}, and samples of this source are {info.inputs}"
    fits = not needs.inputs or info.inputs in needs.inputs
    require(fits, "algorithm.name", name, f"{remedy}; use another method")


def check_augmentation(config: Config, info: DataInfo) -> None:
    """Raise `UserError` if samples are to be augmented as images, but are no images."""
    given = {"local": config.local.augment}
    given |= {f"{SECTION}.{clients}": c.augment or "none" for clients, c in config.per_client.items()}
    shape = list(info.shape)
    remedy = f"shifts and mirrors images [C, H, W], but samples of this source are {info.inputs} {shape}; "
    for section, augment in given.items():
        fits = augment == "none" or len(shape) == 3
        require(fits, f"{section}.augment", augment, f"{remedy}use none")


def warn_of_ignored(config: Config) -> None:
    """Warn of keys of local training that are set but have no effect, under this method or in general."""
    ignores, default = config.algorithm.needs.ignores, LocalConfig()
    if config.evaluation.finetune_epochs:  # fine-tuning trains as `local` says, except for its length
        ignores = {name: own for name, own in ignores.items() if name in ("epochs", "steps")}
    found = {
        f"local.{name}": name for name in ignores if getattr(config.local, name) != getattr(default, name)
    }
    for clients, changes in config.per_client.items():
        given = {name for name, value in asdict(changes).items() if value is not None}
        found |= {f"{SECTION}.{clients}.{name}": name for name in ignores if name in given}
    if config.local.optimizer == "adam" and "momentum" not in ignores:
        warn_of_momentum(config)
    if config.local.gamma != default.gamma and not config.local.milestones:
        warn_once("local.gamma: without effect while there are no milestones; set local.milestones")
    if not found:
        return
    own = [text for text in dict.fromkeys(ignores[name] for name in found.values()) if text]
    remedy = f"; set {', '.join(own)}" if own else ""
    warn_once(f"{', '.join(found)}: without effect on how {type(config.algorithm).__name__} trains{remedy}")


def warn_of_momentum(config: Config) -> None:
    """Warn of momenta that are set but have no effect, because Adam has moments of its own."""
    changes = {f"{SECTION}.{clients}": c.momentum for clients, c in config.per_client.items()}
    momenta = {"local": config.local.momentum, **changes}
    if unused := [f"{section}.momentum" for section, momentum in momenta.items() if momentum]:
        warn_once(f"{', '.join(unused)}: without effect under local.optimizer adam; use sgd")


def warn_of_ignored_options(config: Config) -> None:
    """Warn of options of the method that are set but have no effect beside its others."""
    method = config.algorithm
    for name, why in method.ignored_options().items():
        if getattr(method, name) != getattr(type(method), name):  # the default
            warn_once(f"algorithm.{name}: without effect: {why}")


def warn_of_ignored_cohort(config: Config) -> None:
    """Warn of `participation` or `cohort_size` under a policy that draws no cohorts."""
    name = "participation" if config.cohort_size is None else "cohort_size"
    if config.policy.under_way and (config.participation < 1 or config.cohort_size is not None):
        warn_once(f"{name}: without effect: {config.policy.under_way} are under way at a time")


def warn_of_unused_public(config: Config) -> None:
    """Warn of `data.public` where the server pre-trains nothing on these images."""
    given = config.data.public != DataConfig().public
    pre_trains = config.algorithm.auxiliary() is not None and not uses(config.algorithm, ServerEvaluation)
    if given and not pre_trains:
        warn_once("data.public: without effect: the method has no network that the server pre-trains")


def warn_of_unused_collective(config: Config) -> None:
    """Warn of a collective, or of costs to choose one by, where none is called or chosen."""
    system, unused = config.system, []
    named, by_costs = system.collective != "auto", not isinstance(system.cost, ByBytes)
    if not config.policy.synchronous:
        why = "under this policy the server mixes alone"
        unused = ["system.collective"] * named + ["system.cost"] * by_costs
    elif named and by_costs:
        why, unused = "system.collective names the collective; use auto", ["system.cost"]
    if unused:
        warn_once(f"{', '.join(unused)}: without effect: {why}")


def check_outputs(config: Config, federation: Federation) -> None:
    """Raise `UserError` if the model cannot take the samples, or the task cannot take the model's outputs."""
    module = build_model(config.model, federation.info)
    few = federation.client(int(np.argmax(federation.sizes[:, 0] > 0))).train  # of the first that has any
    rows = [0, min(1, len(few) - 1)] if len(few) else []  # twice the only one: batch norm needs two
    x, y = few.x[rows], few.y[rows]
    key, name = "model.name", name_of(config.model)
    if isinstance(config.model, Custom):
        key, name = "model.path", config.model.path
    given, shape = x.clone(), list(federation.shape)
    try:
        with torch.no_grad():
            output = module.eval()(given)
    except Exception as error:
        remedy = f"does not take samples of shape {shape} ({type(error).__name__}: {error})"
        raise UserError(key, name, f"{remedy}; use another model") from error
    require(isinstance(output, torch.Tensor), key, name, returned(output))
    require(torch.equal(given, x), key, name, WRITES)
    try:
        trained = check_adapted(module, x)
    except UserError:
        raise
    except Exception as error:
        remedy = f"its forward fails in training ({type(error).__name__}: {error})"
        raise UserError(key, name, remedy) from error
    remedy = f"in training {returned(trained)}"
    require(isinstance(trained, torch.Tensor), key, name, remedy)
    made, like = list(trained.shape), list(output.shape)
    remedy = f"its forward returns {made} in training and {like} in evaluation; return the same shape"
    require(made == like, key, name, remedy)
    if type(config.task) is Classification and federation.info.labels == CLASSES:
        wanted = [len(x), federation.info.num_classes]
        remedy = f"returns {like} for {len(x)} samples; return {wanted}, one number for each class"
        require(len(like) == 2 and like[0] == wanted[0] and like[1] >= wanted[1], key, name, remedy)
    if not (federation.info.inputs == IMAGES and federation.info.labels == CLASSES):
        try:
            config.task.losses(output, y)
        except (RuntimeError, ValueError, IndexError) as error:
            remedy = f"its loss does not take outputs {like} and labels {list(y.shape)}"
            raise UserError(
                "task.name", config.task.name, f"{remedy} ({error}); use another model"
            ) from error
    check_task(config.task, output, y)


def check_task(task: Task, output: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise an error unless the task makes a loss and all scores of a model's output.

    Raises:
        UserError: it makes something else.
        CodeFailed: its own code raised an exception.
    """
    try:
        task.check_results(output, labels)
    except UserError:
        raise
    except Exception as error:
        raise code_failed(f"task {task.name}", error) from error
