"""Checks of the sections of a configuration against each other, which need neither data nor a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mpifl.aggregation.exchange_choice import Local, OverMpi
from mpifl.core.algorithm import Algorithm, Needs, asked_of_trainer
from mpifl.core.capabilities import (
    NO_SINGLE_MODEL,
    ComparedUploads,
    NewClients,
    OneShotStatistics,
    RememberedUploads,
    RowUpdates,
    SecondLook,
    hooks_of,
    uses,
)
from mpifl.core.directions import HIGHER, LOWER, begins, direction
from mpifl.core.errors import MethodError, UserError, name_of, nearest, require
from mpifl.core.metric import SPREADS, metric_of_column
from mpifl.core.task import Task
from mpifl.core.trainer import GIFTS, trainer_of
from mpifl.models import LoRA
from mpifl.models.lora import PRODUCT
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy, Privacy
from mpifl.protection.robust_rules import DistanceRule, NoRule, Rule
from mpifl.protection.secure_sum import MaskedSums
from mpifl.results.callbacks import check_entries
from mpifl.simulation.availability import Availability
from mpifl.simulation.delays import Constant
from mpifl.simulation.network import Links
from mpifl.simulation.policies import AsynchronousPolicy, Policy, RoundsPolicy, Synchronous
from mpifl.supervision.logging import warn_once
from mpifl.training.config import OF_SGD, LocalConfig
from mpifl.training.own_metrics import load_metrics, metrics_of
from mpifl.training.per_client import SECTION, PerClient, check_changes, check_clients, given_keys
from mpifl.training.precision import FLOAT32

from .exclusions import check_exclusions
from .schema import Config, EvaluationConfig, Leavers, Newcomers, OutputConfig


def check_needs(algorithm: Algorithm) -> None:
    """Raise `MethodError` if `needs` of a method of one's own is something else."""
    needs: Any = algorithm.needs
    if not isinstance(needs, Needs):
        what, name = f"is a {type(needs).__name__}", f"{type(algorithm).__name__}.needs"
        raise MethodError(name, what, "assign Needs(...), which mpifl.core.method has")


def check_sections(config: Config) -> None:
    """Check the sections against each other, as far as this needs neither data nor a model.

    Raises:
        UserError: sections do not fit together; names a key, its value and a remedy.
    """
    policy, clock, computing = config.policy, config.clock, config.network.computing
    check_needs(config.algorithm)
    known = isinstance(policy, RoundsPolicy | AsynchronousPolicy)
    remedy = "no engine runs it; inherit from RoundsPolicy or AsynchronousPolicy"
    require(known, "policy.name", name_of(policy), remedy)
    check_entries(config.output.callbacks)
    load_metrics(config.evaluation.metrics, [metric.name for metric in config.task.scored])
    check_trainer(config)
    policy.check(config.algorithm)
    policy.check_clock(clock)
    if not policy.synchronous:
        check_without_rounds(config.evaluation, config.output, config.system.stack)
    remedy = "has no effect: this network has its own computing times; leave it out"
    remedy += f" ({_option_for('delay', config.delay, Constant())})"
    require(computing is None or config.delay == Constant(), "delay", config.delay, remedy)
    away = config.availability
    remedy = "has no effect while off_s is 0 (always there); leave it out, or give off_s"
    require(bool(away.off_s) or away.on_s == Availability().on_s, "availability.on_s", away.on_s, remedy)
    if not config.lora.rank:
        replaced = config.start.run is not None and config.start.part == "all"
        remedy = "has no effect beside start.run, which gives all weights; leave it out, or use start.part"
        require(config.weights is None or not replaced, "model.weights", config.weights, f"{remedy} body")
    check_changes(config.local, config.per_client, config.devices.names)
    check_adapters(config.lora, config.algorithm, config.local, config.devices.names)
    config.devices.check(config.delay, config.network, away)
    check_privacy(config.privacy, config.algorithm, config.policy, config.newcomers, config.leavers)
    check_secure_aggregation(config)
    check_exchange(config.system.exchange, config.algorithm)
    check_exclusions(vars(config), config.algorithm.needs, type(config.algorithm).__name__)
    check_sample_losses(config.task, config.algorithm)
    check_robust(config.robust, config.algorithm)
    if why := clock.lacks_computing(policy.in_seconds):
        require(config.costs == "training", "costs", config.costs, f"has no effect: {why}; leave it out")
        remedy = f"has no effect: {why}; leave watts out"
        require(not config.devices.has_power, "devices.watts", config.devices, remedy)
    if why := clock.ignores_delays(policy.in_seconds):
        remedy = f"has no effect: {why}; --devices alike leaves it out"
        require(not config.devices.is_timed, "devices", config.devices, remedy)
        for name, plain in (("delay", Constant()), ("network", Links()), ("availability", Availability())):
            value = getattr(config, name)
            remedy = f"has no effect: {why}; {_option_for(name, value, plain)} leaves it out"
            require(value == plain, name, value, remedy)
    check_stop(config)
    check_local(config.algorithm.needs, config.local, config.per_client, config.system.stack, [config.local])
    check_output(config.algorithm, config.output, config.evaluation)
    check_newcomers(config)
    check_drift(config)
    check_recluster(config)


def _option_for(name: str, value: Any, plain: Any) -> str:
    """Return the options that set a section back to its default; it may have been set by a base file.

    Args:
        name: name of the section.
        value: the object of the section.
        plain: its default object.
    """
    if type(value) is not type(plain):
        called = name_of(plain)
        return f"--{name} {called}"
    differing = [f.name for f in fields(value) if getattr(value, f.name) != getattr(plain, f.name)]
    return " ".join(f"--{name}.{key} {_as_yaml(getattr(plain, key))}" for key in differing)


def _as_yaml(value: Any) -> Any:
    return "null" if value is None else value


def check_adapters(lora: LoRA, algorithm: Algorithm, local: LocalConfig, devices: Sequence[str]) -> None:
    """Raise `UserError` for adapters whose ranks or averages the method cannot have.

    Args:
        lora: `model.lora`.
        algorithm: the method.
        local: how clients train.
        devices: names of the devices that clients may have.
    """
    check_clients("model.lora.ranks", lora.ranks, devices)
    name, needs = type(algorithm).__name__, algorithm.needs
    compares = "compares the numbers of uploads" if uses(algorithm, ComparedUploads) else ""
    why = "sends statistics before training" if uses(algorithm, OneShotStatistics) else compares
    why = "shows clients the models of others" if uses(algorithm, SecondLook) else why
    remedy = f"{name} {why}, which differ by their ranks; leave it out, or use a method that only averages"
    require(not lora.ranks or not why, "model.lora.ranks", lora.ranks, remedy)
    if lora.average != PRODUCT:
        return
    why = (
        "keeps state at its clients, which may hold factors"
        if needs.client_state and not algorithm.holds
        else compares
    )
    why = "averages changes of models" if algorithm.changes else why
    mixes = type(algorithm).mixtures is not Algorithm.mixtures
    why = "mixes the numbers of models at its clients" if mixes else why
    why = "changes averages by a step of its own" if needs.server_update else why
    remedy = f"{name} {why}, and factors of one product differ from round to round; use factors"
    require(not why, "model.lora.average", lora.average, remedy)
    remedy = f"has no effect: clients of {name} send nothing; leave it out"
    require(not needs.alone, "model.lora.average", lora.average, remedy)
    remedy = "the momentum of factors means nothing in the next round, whose factors differ; use factors"
    require(not local.keep_optimizer, "local.keep_optimizer", True, f"under lora.average product, {remedy}")


def check_without_rounds(evaluation: EvaluationConfig, output: OutputConfig, stack: int) -> None:
    """Raise `UserError` if an option needs rounds; called for policies that have none.

    Args:
        evaluation: the section `evaluation`.
        output: the section `output`.
        stack: `system.stack`.
    """
    remedy = "models of one round are compared; use policy rounds, or leave it out"
    require(not evaluation.distances, "evaluation.distances", True, remedy)
    matrices = evaluation.matrices
    require("parameters" not in matrices, "evaluation.matrices", list(matrices), remedy)
    remedy = "updates are compared in rounds only, under policy rounds; leave it out"
    require(not output.updates, "output.updates", True, remedy)
    remedy = "events.csv names the client of each upload, and clock.trace repeats them; use all"
    require(output.clients == "all", "output.clients", output.clients, remedy)
    remedy = "clients are stacked under policy rounds only; use 1"
    require(stack <= 1, "system.stack", stack, remedy)


def check_newcomers(config: Config) -> None:
    """Raise `UserError` for newcomers that method or policy cannot take in; leavers that it cannot have."""
    late, policy, algorithm = config.newcomers, config.policy, config.algorithm
    who, once = late.share or list(late.groups), uses(algorithm, OneShotStatistics)
    remedy = "this method looks at its clients once, before training, and accepts none later; leave it out"
    require(not (who and once) or uses(algorithm, NewClients), "newcomers", who, remedy)
    left = config.leavers
    going = left.share or list(left.groups)
    for key, what, step, seconds, some in (
        ("newcomers.joins", "newcomers join", late.joins, late.joins_s, who),
        ("leavers.leaves", "clients leave", left.leaves, left.leaves_s, going),
    ):
        if policy.joins_by_step:
            remedy = f"{what} at a server step under this policy; use {key}"
            require(seconds is None, f"{key}_s", seconds, remedy)
            continue
        remedy = f"{what} at a time under this policy, whose clock counts seconds; give {key}_s"
        require(not some or seconds is not None, key, step, remedy)
        why = config.clock.ignores_delays(policy.in_seconds)
        require(not (some and why), f"{key}_s", seconds, f"has no effect: {why}")


def check_drift(config: Config) -> None:
    """Raise `UserError` for steps of `drift` that the run never reaches, or times that it cannot have."""
    at, rounds, seconds = config.drift.at, config.rounds, list(config.drift.at_s)
    remedy = "the clock counts server steps under this policy; use drift.at"
    require(not seconds or config.policy.in_seconds, "drift.at_s", seconds, remedy)
    remedy = f"the run has {rounds} steps; give rounds that reach the last of these, or leave it out"
    require(not at or at[-1] <= rounds, "drift.at", list(at), remedy)


def check_recluster(config: Config) -> None:
    """Raise `UserError` for a method or policy that takes no statistics twice, or rounds never reached."""
    again, name = config.recluster, type(config.algorithm).__name__
    if not again:
        return
    value = {name: list(given) if name == "at" else given for name, given in vars(again).items()}
    remedy = (
        f"{name} takes no statistics of clients after training has begun; leave it out, or use another method"
    )
    look = hooks_of(config.algorithm, SecondLook) if uses(config.algorithm, SecondLook) else None
    can = uses(config.algorithm, NewClients) or (look is not None and look.forgets)
    require(can, "recluster", value, remedy)
    remedy = f"clients of {name} store samples at the server once; use samples: clients, or leave it out"
    require(look is None or not look.at_server, "recluster", value, remedy)
    remedy = f"the run has {config.rounds} server steps; give fewer, or leave it out"
    require(again.every < config.rounds, "recluster.every", again.every, remedy)
    require(not again.at or again.at[-1] <= config.rounds, "recluster.at", list(again.at), remedy)
    remedy = "the clock counts server steps under this policy; use recluster.every"
    require(not again.seconds or config.policy.in_seconds, "recluster.seconds", again.seconds, remedy)


def stop_metric(config: Config) -> tuple[str, int]:
    """Return the metric that `stop.target` and `stop.patience` look at, and its direction.

    Returns:
        Name of the metric, and 1 if more is better, -1 if less is, 0 if that is not known.
    """
    stop, main = config.stop, config.task.metric
    name = stop.metric or main.name
    if stop.better is not None:
        return name, 1 if stop.better == "more" else -1
    own = {metric.name: metric.better for metric in config.task.scored}
    own |= {
        metric.name: metric.better for metric in metrics_of(config.evaluation.metrics, config.local.trainer)
    }
    mine = max((one for one in own if begins(name, [one])), key=len, default=None)
    return name, direction(name, main, None if mine is None else (mine, own[mine]))


def check_stop(config: Config) -> None:
    """Raise `UserError` for a rule of `stop` that cannot hold in this run, or whose metric is unknown."""
    stop, rule = config.stop, "target" if config.stop.target is not None else "patience"
    if stop.seconds is not None:
        remedy = "the virtual time of this policy counts steps, not seconds; use rounds, or stop.bytes"
        require(config.policy.in_seconds, "stop.seconds", stop.seconds, remedy)
    if not stop.evaluates:
        return
    remedy = "has no effect: evaluation.every is 0, and the last round alone is evaluated; use 1 or more"
    require(config.evaluation.every > 0, f"stop.{rule}", getattr(stop, rule), remedy)
    name, better = stop_metric(config)
    known = [metric.name for metric in config.task.scored]
    own = metrics_of(config.evaluation.metrics, config.local.trainer)
    known += [*(metric.name for metric in own), *HIGHER, *LOWER]
    remedy = f"is no metric of this run ({nearest(name, known)}), or it is not known whether more is better: "
    require(better != 0, "stop.metric", name, f"{remedy}say stop.better more, or less")
    metric = metric_of_column(name)
    share = metric is not None and metric.percent and not any(word in name for word in SPREADS)
    remedy = "is in the unit of metrics.csv: use a share in [0, 1]"
    require(not share or stop.target is None or 0 <= stop.target <= 1, "stop.target", stop.target, remedy)


def check_output(algorithm: Algorithm, output: OutputConfig, evaluation: EvaluationConfig) -> None:
    """Raise `UserError` if the method or the evaluation rules out an option of `output`."""
    remedy = "this method evaluates clients by mixtures of several models; leave it out"
    mixed = algorithm.needs.several_models
    require(not (mixed and output.client_models), "output.client_models", True, remedy)
    remembers = uses(algorithm, RememberedUploads)
    require(not (remembers and output.updates), "output.updates", True, NO_SINGLE_MODEL)
    remedy = "evaluation.matrices are ordered by the clusters of all clients; use all, or leave them out"
    allowed = output.clients == "all" or not evaluation.matrices
    require(allowed, "output.clients", output.clients, remedy)


def check_trainer(config: Config) -> None:
    """Check that the trainer gives what the method asks for, and say which keys of `local` it does not use.

    Raises:
        UserError: it does not, or one of its options does not fit.
    """
    trainer, algorithm, task = trainer_of(config.local.trainer), config.algorithm, config.task
    if trainer is None:
        return
    asked, key = asked_of_trainer(algorithm), "local.trainer"
    for gift in asked:
        remedy = f"{name_of(algorithm)} {GIFTS[gift]}, which this trainer does not give; "
        remedy += f"`mpifl list algorithms --trainer {trainer.name}` lists the methods that ask for less"
        require(gift in trainer.gives, key, trainer.name, remedy)
    remedy = "gives no outputs for the task's metrics; define evaluate, or outputs"
    require(trainer.evaluates or "outputs" in trainer.gives, key, trainer.name, remedy)
    if "outputs" not in trainer.gives:
        warn_once(f"FLOPs are not counted: trainer {trainer.name} gives no outputs to compute them by")
    try:
        trainer.check(task, asked)
    except UserError as error:
        raise error.under(key) from error
    unused, given = OF_SGD - {*trainer.uses}, given_keys(config.local, config.per_client)
    found = [f"{section}.{name}" for section, keys in given.items() for name in sorted(unused & keys.keys())]
    if found:
        warn_once(f"{', '.join(found)}: without effect: trainer {trainer.name} has options of its own")


def check_local(
    needs: Needs, local: LocalConfig, per_client: PerClient, stack: int, ways: Sequence[LocalConfig]
) -> None:
    """Raise `UserError` if the method cannot train as `local` or `per_client` say.

    Args:
        needs: needs of the method.
        local: how clients train.
        per_client: how some of them train otherwise.
        stack: `system.stack`.
        ways: `local`, and the different configurations of clients in `per_client`, as far as known.
    """
    remedy = "this method computes gradients of its own, in float32; use float32"
    require(not needs.own_gradients or local.precision == FLOAT32, "local.precision", local.precision, remedy)
    if needs.sgd:
        remedy = "this method needs SGD; use sgd"
        require(local.optimizer == "sgd", "local.optimizer", local.optimizer, remedy)
    if needs.sgd == "plain":
        given = [("local", local.momentum)]
        given += [(f"{SECTION}.{clients}", c.momentum or 0.0) for clients, c in per_client.items()]
        wrong = next((g for g in given if g[1]), None) if any(way.momentum for way in ways) else None
        if wrong is not None:
            remedy = "this method needs SGD without momentum; use 0"
            raise UserError(f"{wrong[0]}.momentum", wrong[1], remedy)
    if local.keep_optimizer:
        remedy = "SGD without momentum has nothing to keep; use local.momentum, or local.optimizer adam"
        require(all(way.remembers for way in ways), "local.keep_optimizer", True, remedy)
        remedy = "this method begins every training with a new optimiser; use false"
        require(not needs.new_optimizer, "local.keep_optimizer", True, remedy)
        remedy = "clients that are stacked begin with new optimisers; use 1, or local.keep_optimizer false"
        require(stack <= 1, "system.stack", stack, remedy)


def check_privacy(
    privacy: Privacy, algorithm: Algorithm, policy: Policy, late: Newcomers, left: Leavers
) -> None:
    """Check that the noise of `privacy` covers all that clients send, and that other sections fit it.

    Raises:
        UserError: it does not.
    """
    name = type(algorithm).__name__
    if not isinstance(privacy, (CentralPrivacy, LocalPrivacy)):
        return
    kind = "central" if isinstance(privacy, CentralPrivacy) else "local"
    remedy = f"{name} sends more than updates of rows that are averaged, which no noise covers; use none"
    fits = uses(algorithm, RowUpdates) and not uses(algorithm, OneShotStatistics)
    require(fits, "privacy.name", kind, remedy)
    chooses = hooks_of(algorithm, RowUpdates).trained is not None
    if isinstance(privacy, LocalPrivacy):
        remedy = f"clients of {name} tell the server the row they chose, and no noise covers it; use central"
        require(not chooses, "privacy.name", kind, remedy)
        return
    remedy = "the server adds noise to sums of rounds; use policy rounds, or privacy.name local"
    require(type(policy) is Synchronous, "privacy.name", kind, remedy)
    remedy = "the accountant assumes that all clients are equally likely to be drawn; leave it out"
    for path, some in (("newcomers", late), ("leavers", left)):
        require(not (some.share or some.groups), path, some.share or list(some.groups), remedy)
    remedy = f"has no effect: {name} has tables of one row, whose count is known; leave it out"
    require(chooses or privacy.count_noise is None, "privacy.count_noise", privacy.count_noise, remedy)


def check_secure_aggregation(config: Config) -> None:
    """Check that nothing in a run needs single uploads if the server may see only sums.

    Raises:
        UserError: something needs them.
    """
    if not isinstance(config.secure_aggregation, MaskedSums):
        return
    algorithm, name, system = config.algorithm, "secure_aggregation.name", config.system
    remedy = f"the server of {type(algorithm).__name__} needs more than sums of uploads by row; use none"
    require(uses(algorithm, RowUpdates), name, "masks", remedy)
    remedy = "masks cancel among the clients of a round; use policy rounds"
    require(config.policy.synchronous and not config.policy.leaves_out, name, "masks", remedy)
    remedy = "masks cancel in exact sums only; use exact"
    require(system.sums == "exact", "system.sums", system.sums, remedy)
    remedy = "brings single uploads to the server; use auto or reduce"
    require(system.collective != "gather", "system.collective", system.collective, remedy)
    remedy = "compares single uploads, which nobody has; leave it out"
    require(not config.evaluation.distances, "evaluation.distances", True, remedy)
    matrices = config.evaluation.matrices
    require("parameters" not in matrices, "evaluation.matrices", list(matrices), remedy)
    require(not config.output.updates, "output.updates", True, remedy)


def check_exchange(exchange: OverMpi | Local, algorithm: Algorithm) -> None:
    """Raise `UserError` for another exchange than the usual one if clients exchange nothing."""
    remedy = f"no client of {type(algorithm).__name__} looks at another; leave it out"
    unused = exchange == OverMpi() or uses(algorithm, SecondLook)
    require(unused, "system.exchange", name_of(exchange), remedy)


def check_sample_losses(task: Task, algorithm: Algorithm) -> None:
    """Raise `UserError` for a task whose loss is no mean over samples if the method weighs samples."""
    remedy = f"{type(algorithm).__name__} weighs the losses of samples, and the loss of this task is not "
    remedy += "their mean; define `losses`, or `total_loss` and `count`"
    fits = task.has_total or not algorithm.needs.sample_losses
    require(fits, "task.name", type(task).__name__, remedy)


def check_robust(rule: Rule | NoRule, algorithm: Algorithm) -> None:
    """Raise `UserError` if the method takes no averages, or reassigns rows that the rule bounds around."""
    if isinstance(rule, NoRule):
        return
    name, needs, method = name_of(rule), algorithm.needs, type(algorithm).__name__
    remedy = f"{method} averages no uploads over all clients or over groups (Needs.averages); leave it out"
    require(needs.averages, "robust.name", name, remedy)
    bounded = isinstance(rule, DistanceRule) and rule.from_row
    remedy = f"{method} reassigns its rows: an upload has no row to be bounded around; use another rule"
    require(not (bounded and needs.new_rows), "robust.name", name, remedy)
