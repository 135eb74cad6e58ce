"""Checks that need the data, the model or the ranks: what does not fit is refused or said before training."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.collective_costs import ByBytes
from mpifl.aggregation.exchange_choice import OverMpi
from mpifl.core.algorithm import Algorithm, vector_parts
from mpifl.core.capabilities import (
    INITIAL_CLIENTS,
    NewClients,
    RememberedUploads,
    ServerEvaluation,
    hooks_of,
    uses,
)
from mpifl.core.errors import UserError, code_failed, first_of, is_ours, name_of, require
from mpifl.core.federation import CLASSES, IMAGES, MASKS, DataInfo, Federation
from mpifl.core.parameters import Layout, width, within
from mpifl.core.rng import key
from mpifl.core.task import Task
from mpifl.core.trainer import Trainer
from mpifl.core.types import ProblemInfo
from mpifl.data import DataConfig
from mpifl.data.scenario import Scenario
from mpifl.data.sources.base import Source
from mpifl.models import LoRA, ModelOptions, build_model, check_adapted, described, seeded_model
from mpifl.models.lora import ADAPTERS, PRODUCT
from mpifl.models.pretrained import ASSIGN, read_state
from mpifl.models.user_module import WRITES, Custom, returned, rows_for_dense
from mpifl.protection.accountant import Accountant
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy, Privacy
from mpifl.protection.robust_rules import NoRule, Rule
from mpifl.protection.secure_sum import MaskedSums, SecureConfig
from mpifl.simulation.policies import Policy
from mpifl.supervision.logging import warn_once
from mpifl.training.config import LocalConfig
from mpifl.training.learner import outputs_of
from mpifl.training.per_client import SECTION, PerClient, given_keys
from mpifl.training.tasks import Classification

from .context import Parts
from .schema import Config, EvaluationConfig, StartConfig, SystemConfig
from .section_checks import check_local
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
    algorithm, model, local, info = config.algorithm, config.model, config.local, parts.federation.info
    check_folder("system.statistics_cache", config.system.statistics_cache)
    check_earlier(config.start, model, config.seed.model, info, parts.problem.layout)
    check_labels(config.task, config.data.source, info)
    check_outputs(model, config.task, parts.federation, parts.learner.trainer)
    if parts.learner.trainer is not None:
        parts.learner.trainer.check_module(parts.learner.flat.module)
    warn_of_numbered_categories(model, info)
    check_method(algorithm, model, config.data.scenario, parts)
    ways = [local, *parts.differing.values()]
    check_local(algorithm.needs, local, config.per_client, config.system.stack, ways)
    check_augmentation(local, config.per_client, info)
    check_batches(ways, parts.learner.drop_single)
    warn_of_ignored(algorithm, local, config.per_client, bool(config.evaluation.finetune_epochs))
    warn_of_ignored_options(algorithm)
    warn_of_idle_options(config, parts.federation.changes)
    warn_of_another_policy(algorithm, config.policy)
    if config.policy.under_way and (config.participation < 1 or config.cohort_size is not None):
        name = "participation" if config.cohort_size is None else "cohort_size"
        warn_once(f"{name}: without effect: {config.policy.under_way} are under way at a time")
    warn_of_unused_public(algorithm, config.data)
    warn_of_unused_collective(config.system, config.policy)
    check_client_sizes(config.data.scenario, parts.federation, config.evaluation.train)
    warn_of_idle_clients(algorithm, local, parts)
    warn_of_same_starts(algorithm, config.start, parts.problem)
    warn_of_statistics_of_all(algorithm, config.policy, config.seed.training, parts.problem)
    check_evaluation(config.evaluation, parts)
    check_average(config.lora, algorithm, parts.problem.layout)


def check_average(lora: LoRA, algorithm: Algorithm, layout: Layout) -> None:
    """Raise `UserError` if products of adapters are to be averaged, and the method averages none."""
    parts = [layout.part(part) for part in algorithm.holds.values()] or [layout.part("all")]
    averaged = any(
        within((layout.slices[name],), part)
        for name in layout.names
        if name.rpartition(".")[2] in ADAPTERS
        for part in parts
    )
    remedy = f"has no effect: {type(algorithm).__name__} averages no part with adapters; leave it out"
    require(lora.average != PRODUCT or averaged, "model.lora.average", lora.average, remedy)


def warn_of_numbered_categories(model: Any, info: DataInfo) -> None:
    """Warn if a network of the user's gets the numbers of categories, whose size and order mean nothing."""
    coded = sum(count > 0 for count in info.categories)
    if coded and not described(model):
        remedy = "inherit from ShapeModel, which makes them zeros and ones, or take them apart in the network"
        what = f"gets {coded} columns of categories as numbers from 0 ({list(info.categories)} categories)"
        warn_once(f"model.name = {name_of(model)!r}: {what}; {remedy}")


def check_labels(task: Task, source: Source, info: DataInfo) -> None:
    """Raise `UserError` if the task cannot use the labels; names the key that reads them in another way."""
    try:
        task.check(info)
    except UserError as error:
        other = next(
            (kind for kind in task.labels if kind in source.readable_labels and kind != info.labels), None
        )
        if other is None:
            raise
        remedy = f"{error.remedy}; data.source.labels {other} reads these as {other}"
        raise UserError(error.key, error.value, remedy) from None


def check_method(algorithm: Algorithm, model: Any, scenario: Scenario, parts: Parts) -> None:
    """Raise `UserError` if data or model lack something that the method needs."""
    needs, sizes, info = algorithm.needs, parts.federation.sizes, parts.federation.info
    remedy = f"it reads the classes of samples, but labels of this source are {info.labels}"
    fits, name = not needs.classes or info.labels == CLASSES, name_of(algorithm)
    require(fits, "algorithm.name", name, f"{remedy}; use another method")
    remedy = f"it compares {' or '.join(needs.inputs)}, and samples of this source are {info.inputs}"
    fits = not needs.inputs or info.inputs in needs.inputs
    require(fits, "algorithm.name", name, f"{remedy}; use another method")
    try:
        algorithm.check(parts.problem)
    except UserError as error:
        raise error.under("algorithm") from error
    layout = parts.problem.layout
    for part in (name for name in ("body", "head") if name in algorithm.holds.values()):
        there = any(s.start < min(s.stop, layout.num_parameters) for s in layout.part(part))
        remedy = f"{type(algorithm).__name__} trains and sends its {part} apart, which holds no parameter; "
        remedy += "use a model with hidden layers, or another method"
        require(there, "model.name", name_of(model), remedy)
    remedy = "this method needs labelled sets of the server's own; use a scenario that has them (ccfl)"
    has_public = bool(parts.problem.public) or not uses(algorithm, ServerEvaluation)
    require(has_public, "data.scenario", name_of(scenario), remedy)
    empty = np.flatnonzero(sizes[:, 1] < 2)
    if needs.validation and len(empty):
        found = f"two samples or more of each client, and client {empty[0]} has {sizes[empty[0], 1]}"
        remedy = f"this method needs validation data, {found}; use a larger share or larger clients"
        name, value = scenario.option("validation")
        raise UserError(f"data.scenario.{name}", value, remedy)


def check_batches(ways: Sequence[LocalConfig], drop_single: bool) -> None:
    """Raise `UserError` if batches have one sample, and batches of one sample are left out."""
    single = drop_single and any(way.batch_size == 1 for way in ways)
    remedy = "batch norm leaves out batches of one sample: use 2 or more, or a model without batch norm"
    require(not single, "local.batch_size", 1, remedy)


def warn_of_idle_clients(algorithm: Algorithm, local: LocalConfig, parts: Parts) -> None:
    """Say how many clients have too few samples for a step, or take none because their options say so."""
    sizes, single = parts.federation.sizes[:, 0], parts.learner.drop_single
    ways = {local, *parts.differing.values()}
    own: dict[str, Any] = {"epochs": 1, "steps": None}  # a method that ignores a key has steps of its own
    own = {name: value for name, value in own.items() if name in algorithm.needs.ignores}
    takes = {way: replace(way, **own).num_steps for way in ways}
    idle = {way: [int(n) for n in np.unique(sizes) if not takes[way](int(n), single)] for way in ways}
    if not any(idle.values()):
        return
    names = [str(k) for k, n in enumerate(sizes.tolist()) if n in idle[parts.differing.get(k, local)]]
    if names:
        why = "epochs or steps are 0, or batch norm leaves out their only sample"
        does = "their uploads are what they received, and what they keep of their training stays"
        warn_once(
            f"local: {len(names)} of {len(sizes)} clients take no step ({first_of(names)}): {why}; {does}"
        )


def check_client_sizes(scenario: Scenario, federation: Federation, on_training: bool) -> None:
    """Raise `UserError` if a client has no training data, or no client has data to be evaluated on.

    Args:
        scenario: the section `data.scenario`.
        federation: the clients' data.
        on_training: whether clients are evaluated on their training data.
    """
    name, value = scenario.option("clients")
    empty = np.flatnonzero(federation.sizes[:, 0] < 1)
    if len(empty):
        remedy = f"client {empty[0]} has no training data; use fewer clients or a larger source"
        raise UserError(f"data.scenario.{name}", value, remedy)
    if on_training or federation.has_test_data():
        return
    remedy = "use fewer clients, a larger source or a share for testing"
    if scenario.option("test_images") == ("test_images", 0):
        name, value, remedy = "test_images", 0, "use some"
    remedy += ", or evaluation.train, which evaluates on training data"
    raise UserError(f"data.scenario.{name}", value, f"no client has test data; {remedy}")


def warn_of_same_starts(algorithm: Algorithm, start: StartConfig, problem: ProblemInfo) -> None:
    """Warn if all initial models are the same, but the method needs them to differ."""
    if algorithm.needs.different_starts and torch.equal(problem.init(0), problem.init(1)):
        where = "model.weights" if start.run is None else "start.run"
        remedy = "draw the last layer (start.part body), or expect clusters that never differ"
        name = type(algorithm).__name__
        warn_once(f"{where}: all initial models of {name} are the same; {remedy}")


def warn_of_statistics_of_all(algorithm: Algorithm, policy: Policy, seed: int, problem: ProblemInfo) -> None:
    """Warn if all clients give statistics before training, although the method would begin with some."""
    if policy.synchronous or not uses(algorithm, NewClients):
        return
    everyone, address = np.arange(problem.num_clients), key(seed, INITIAL_CLIENTS)
    first = len(hooks_of(algorithm, NewClients).initial_clients(problem, everyone, address))
    if first < len(everyone):
        name = type(algorithm).__name__
        remedy = f"{name} would begin with {first} and take the others as they join; policy rounds does that"
        warn_once(f"policy: all {len(everyone)} clients give their statistics before training, {remedy}")


def check_evaluation(evaluation: EvaluationConfig, parts: Parts) -> None:
    """Raise `UserError` if `evaluation.by` names groups or devices and clients have none."""
    by, wanted, n = evaluation.by, evaluation.clients, parts.problem.num_clients
    if wanted is not None and wanted > n:
        warn_once(f"evaluation.clients = {wanted}: there are no more than {n} clients, all are evaluated")
    remedy = "this scenario has no true groups to average over; use cluster, or leave it out"
    require("group" not in by or parts.federation.groups is not None, "evaluation.by", list(by), remedy)
    remedy = "all clients are on one kind of device; name classes in `devices`, or leave it out"
    require("device" not in by or bool(parts.duration.devices), "evaluation.by", list(by), remedy)


def check_cohort(
    algorithm: Algorithm, policy: Policy, num_sampled: int, num_present: int, ties: bool, away: bool
) -> None:
    """Raise `UserError` if a step may have too few uploads for the method.

    Args:
        algorithm: the method.
        policy: the section `policy`.
        num_sampled: m, the number of clients in a round, or of visits under way at the same time.
        num_present: number of clients that take part from the first round on.
        ties: whether all visits of a cohort may end at the same time.
        away: whether clients may be away when they are drawn.
    """
    smallest, min_cohort = min(num_sampled, num_present), algorithm.needs.min_cohort
    least = policy.least_uploads(smallest, ties, away)
    while_absent = " while newcomers are absent" if smallest < num_sampled else ""
    needed = f"{type(algorithm).__name__} needs {min_cohort}"
    early = "nothing that ends a step early (a time, max_staleness, clients that are away)"
    use = "fewer newcomers" if while_absent else f"a larger cohort, and {early}"
    remedy = f"a step may have {least} upload{while_absent}, and {needed}; use {use}"
    require(least >= min_cohort, "cohort_size, policy", smallest, remedy)


def check_rule(
    rule: Rule | NoRule, algorithm: Algorithm, policy: Policy, num_sampled: int, num_present: int
) -> None:
    """Raise `UserError` if a step has too few uploads for the robust rule; arguments: see `check_cohort`."""
    if isinstance(rule, NoRule):
        return
    remembers = uses(algorithm, RememberedUploads)
    uploads = num_present if remembers else policy.uploads_per_step(min(num_sampled, num_present))
    try:
        rule.check(uploads)
    except UserError as error:
        raise error.under("robust") from error


def check_noise(privacy: Privacy, num_sampled: int, num_clients: int) -> None:
    """Raise `UserError` if `privacy` leaves no noise for updates, or the accountant's library is missing."""
    if isinstance(privacy, CentralPrivacy):
        privacy.noise_of_updates(num_sampled, privacy.count_noise is not None)
    accountant = Accountant(privacy, num_clients, num_sampled)
    if accountant.counts:
        accountant.check()


def check_private_statistics(
    algorithm: Algorithm, privacy: Privacy, secure: SecureConfig, layout: Layout
) -> None:
    """Raise `UserError` if clients of a private run send running statistics, to which no noise is added.

    Masked sums are refused with central privacy, also without noise: its sums of updates over a fixed number
    may lead beyond what arrived, and the server cannot make a mean of statistics that it does not see.
    """
    noise = privacy.noise_multiplier if isinstance(privacy, (CentralPrivacy, LocalPrivacy)) else 0.0
    hidden = isinstance(secure, MaskedSums) and isinstance(privacy, CentralPrivacy)
    if not noise and not hidden:
        return
    vectors = vector_parts(algorithm, layout)
    sent = {name: width(layout.part(part)) for name, part in algorithm.holds.items()}
    for name, size in (sent or {"model": layout.size}).items():
        for s in vectors.statistics(name, size):
            what = f"clients send running statistics ({vectors.tensor_at(name, size, s.start)})"
            if noise:
                remedy = "use a model without batch norm (group norm has none), or fedbn"
                raise UserError(
                    "privacy.noise_multiplier", noise, f"{what}, which no noise may change; {remedy}"
                )
            remedy = f"{what}, whose mean is hidden in masked sums of updates; leave one of the two out"
            raise UserError("secure_aggregation, privacy", "masks, central", remedy)


def check_earlier(start: StartConfig, model: Any, seed: int, info: DataInfo, layout: Layout) -> None:
    """Raise `UserError` if `start.run` or `model.weights` is from a run with another network.

    Args:
        start: the section `start`.
        model: the section `model`.
        seed: the model seed.
        info: description of samples and labels.
        layout: layout of this run's model.
    """
    if start.run is not None:
        check_network("start.run", start.run, Path(start.run).expanduser() / FILE, layout)
    if isinstance(model, ModelOptions) and model.weights is not None:
        file = Path(model.weights).expanduser()
        if file.suffix == ".safetensors" and ASSIGN in read_state(model.weights):
            plain = replace(model, weights=None, lora=LoRA())  # adapters are added to the weights read
            whole = Layout.of(seeded_model(plain, info, seed))
            check_network("model.weights", model.weights, file, whole)


def check_augmentation(local: LocalConfig, per_client: PerClient, info: DataInfo) -> None:
    """Raise `UserError` if samples are to be augmented as images, but are no images."""
    given = {"local": local.augment}
    given |= {f"{SECTION}.{clients}": c.augment or "none" for clients, c in per_client.items()}
    shape = list(info.shape)
    remedy = f"shifts and mirrors images [C, H, W], but samples of this source are {info.inputs} {shape}; "
    for section, augment in given.items():
        fits = augment == "none" or len(shape) == 3
        require(fits, f"{section}.augment", augment, f"{remedy}use none")
        what = "shifts and mirrors images alone, and the labels of this source are masks; use none"
        require(augment == "none" or info.labels != MASKS, f"{section}.augment", augment, what)


def warn_of_ignored(algorithm: Algorithm, local: LocalConfig, per_client: PerClient, finetunes: bool) -> None:
    """Warn of keys of local training that are set but have no effect, under this method or in general.

    Args:
        algorithm: the method.
        local: how clients train.
        per_client: how some of them train otherwise.
        finetunes: whether models are fine-tuned before they are evaluated.
    """
    ignores, given = algorithm.needs.ignores, given_keys(local, per_client)
    if finetunes:  # as `local` says, except for its length
        ignores = {name: own for name, own in ignores.items() if name in ("epochs", "steps")}
    momenta = [f"{section}.momentum" for section, keys in given.items() if keys.get("momentum")]
    if local.optimizer == "adam" and "momentum" not in ignores and momenta:
        warn_once(f"{', '.join(momenta)}: without effect under local.optimizer adam; use sgd")
    if "gamma" in given["local"] and not local.milestones:
        warn_once("local.gamma: without effect while there are no milestones; set local.milestones")
    found = {f"{section}.{name}": name for section, keys in given.items() for name in ignores if name in keys}
    if not found:
        return
    instead = [text for text in dict.fromkeys(ignores[name] for name in found.values()) if text]
    remedy = f"; set {', '.join(instead)}" if instead else ""
    warn_once(f"{', '.join(found)}: without effect on how {type(algorithm).__name__} trains{remedy}")


def warn_of_ignored_options(algorithm: Algorithm) -> None:
    """Warn of options of the method that are set but have no effect beside its others."""
    for name, why in algorithm.ignored_options().items():
        if getattr(algorithm, name) != getattr(type(algorithm), name):  # the default
            warn_once(f"algorithm.{name}: without effect: {why}")


def warn_of_idle_options(config: Config, changes: bool) -> None:
    """Warn of options of the method that act on what does not happen in the run.

    Args:
        config: the configuration.
        changes: whether clients may hold other data at another visit.
    """
    algorithm = config.algorithm
    happens = {
        "newcomers": bool(config.newcomers.share or config.newcomers.groups),
        "recluster": bool(config.recluster),
        "drift": changes,
    }
    for name, sections in algorithm.acts_with.items():
        idle = not any(happens[section] for section in sections)
        if idle and getattr(algorithm, name) != getattr(type(algorithm), name):
            warn_once(f"algorithm.{name}: without effect: the run has no {' and no '.join(sections)}")


def warn_of_another_policy(algorithm: Algorithm, policy: Policy) -> None:
    """Say that a method that was published with one policy runs under another."""
    name, published = name_of(policy), algorithm.policies
    if published and name not in published:
        known = " or ".join(published)
        warn_once(f"algorithm {name_of(algorithm)} was published with policy {known}; it runs under {name}")


def warn_of_unused_public(algorithm: Algorithm, data: DataConfig) -> None:
    """Warn of `data.public` where the server pre-trains nothing on these images."""
    pre_trains = algorithm.auxiliary() is not None and not uses(algorithm, ServerEvaluation)
    if data.public != DataConfig().public and not pre_trains:
        warn_once("data.public: without effect: the method has no network that the server pre-trains")


def warn_of_unused_collective(system: SystemConfig, policy: Policy) -> None:
    """Warn of a collective, or of costs to choose one by, where none is called or chosen."""
    named, by_costs = system.collective != "auto", not isinstance(system.cost, ByBytes)
    if not policy.synchronous:
        why = "under this policy the server mixes alone"
        unused = ["system.collective"] * named + ["system.cost"] * by_costs
    else:
        why = "system.collective names the collective; use auto"
        unused = ["system.cost"] * (named and by_costs)
    if unused:
        warn_once(f"{', '.join(unused)}: without effect: {why}")


def warn_of_unused_exchange(system: SystemConfig, num_ranks: int) -> None:
    """Warn of an exchange between ranks that was chosen for one process."""
    if num_ranks == 1 and system.exchange != OverMpi():
        warn_once("system.exchange: without effect: one process computes everything")


def check_outputs(model: Any, task: Task, federation: Federation, trainer: Trainer | None = None) -> None:
    """Raise `UserError` if the model cannot take the samples, or the task cannot take the model's outputs.

    Args:
        model: the section `model`.
        task: the task.
        federation: the clients' data.
        trainer: reads the outputs of the model; a trainer that gives none is not asked. None: the model does.
    """
    if trainer is not None and "outputs" not in trainer.gives:
        return
    info = federation.info
    module = build_model(model, info)
    for line in getattr(module, "remarks", ()) if is_ours(model) else ():
        warn_once(line)
    few = federation.client(int(np.argmax(federation.sizes[:, 0] > 0))).train  # of the first that has any
    rows = [0, min(1, len(few) - 1)] if len(few) else []  # twice the only one: batch norm needs two
    x, y = few.x[rows], few.y[rows]
    key, name = ("model.path", model.path) if isinstance(model, Custom) else ("model.name", name_of(model))
    given = x.clone()
    shape = ", ".join(f"{part.name} {list(part.shape)}" for part in info.parts) or list(info.shape)
    forward = None if trainer is None else outputs_of(trainer, info.parts)
    try:
        with torch.no_grad():
            output = module.eval()(given) if forward is None else forward(module.eval(), given)
    except UserError:
        raise
    except Exception as error:
        remedy = f"does not take samples of shape {shape} ({type(error).__name__}: {error})"
        flat = "" if info.parts else rows_for_dense(error, info.shape)
        raise UserError(key, name, f"{remedy}; {flat or 'use another model'}") from error
    require(isinstance(output, torch.Tensor), key, name, returned(output))
    require(torch.equal(given, x), key, name, WRITES)
    try:
        trained = check_adapted(module, x, forward)
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
    if type(task) is Classification and info.labels == CLASSES:
        wanted = [len(x), info.num_classes]
        remedy = f"returns {like} for {len(x)} samples; return {wanted}, one number for each class"
        require(len(like) == 2 and like[0] == wanted[0] and like[1] >= wanted[1], key, name, remedy)
    if info.labels == MASKS and is_ours(task):
        wanted = [*y.shape, info.num_classes]
        remedy = f"returns {like} for {len(x)} samples; return {wanted}, the classes last"
        remedy += ": x.movedim(1, -1)" if like[:1] + like[2:] == wanted[:-1] else ""
        fits = like[:-1] == wanted[:-1] and like[-1] >= wanted[-1]
        require(fits, key, name, remedy)
    if not (info.inputs == IMAGES and info.labels == CLASSES):
        try:
            task.losses(output, y)
        except (RuntimeError, ValueError, IndexError) as error:
            remedy = f"its loss does not take outputs {like} and labels {list(y.shape)}"
            raise UserError("task.name", task.name, f"{remedy} ({error}); use another model") from error
    check_task(task, output, y)


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
