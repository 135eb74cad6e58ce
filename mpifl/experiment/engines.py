"""What drives a run: rounds, or events under a policy and a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpifl.core.errors import require
from mpifl.core.federation import Federation
from mpifl.core.rng import key
from mpifl.results.metrics import mixture_kl
from mpifl.results.recorder import Recorder
from mpifl.runtime.asynchronous import Events
from mpifl.runtime.run_state import Checkpointer, Never
from mpifl.runtime.server_step import ServerStep
from mpifl.runtime.synchronous import Record, Rounds
from mpifl.simulation.clock import Clock
from mpifl.simulation.durations import VisitDuration, visit_duration
from mpifl.simulation.policies import Synchronous, open_clock
from mpifl.simulation.sampling import Sampler
from mpifl.training import pick_stack, stackable

from .schema import Config, check_sections

if TYPE_CHECKING:
    from .build import RunContext


def evaluated_clients(context: RunContext) -> np.ndarray:
    """Return the clients that are evaluated: all, or some evenly spaced."""
    num_clients = context.problem.num_clients
    count = min(context.config.evaluation.clients or num_clients, num_clients)
    return np.unique(np.linspace(0, num_clients - 1, count).astype(np.int64))


def pace_of(context: RunContext) -> VisitDuration:
    """Return how long visits take."""
    config = context.config
    system = key(config.seed.system)
    n, model_bytes = context.problem.num_clients, 4 * context.problem.layout.size
    return visit_duration(config.delay, config.network, config.availability, system, n, model_bytes)


def begin(config: Config, federation: Federation) -> None:
    """Prepare the clients' data as the policy wants them; every rank calls."""
    if not isinstance(config.policy, Synchronous):
        config.policy.begin(federation)


def check(context: RunContext) -> Clock | None:
    """Return the clock of an asynchronous run; raise `UserError` where method, policy and clock do not
    fit.
    """
    config, n, duration = context.config, context.problem.num_clients, pace_of(context)
    for k in range(min(n, 10)):  # what is far too long shall be found before anything is trained
        duration.end(k, 0, 0.0)
    if isinstance(config.policy, Synchronous):
        return None
    remedy = "group broadcasts and the server's shared link are timed under policy rounds; take unicast"
    require(not config.network.shared, "network.cast", config.network.cast, remedy)
    check_sections(config)
    config.policy.concurrency(n, context.num_sampled)
    duration = config.policy.paced(duration, context.federation)
    return open_clock(config.clock, config.policy, duration, n, key(config.seed.system))


def engine(
    context: RunContext,
    server_step: ServerStep,
    recorder: Recorder | None,
    clock: Clock | None,
    checkpointer: Checkpointer | None = None,
) -> Rounds | Events:
    """Return the engine; `clock` as `check` gave it."""
    config = context.config
    system = key(config.seed.system)
    sampler = Sampler(
        context.problem.num_clients, context.num_sampled, system, context.late, config.newcomers.joins
    )
    if clock is None:
        return Rounds(
            server_step=server_step,
            sampler=sampler,
            num_rounds=config.rounds,
            evaluated_clients=evaluated_clients(context),
            judge_every=config.evaluation.every,
            judge_first=config.evaluation.at_start,
            duration=pace_of(context),
            checkpointer=checkpointer or Never(),
        )
    return Events(
        server_step=server_step,
        policy=config.policy,
        clock=clock,
        sampler=sampler,
        num_steps=config.rounds,
        evaluated_clients=evaluated_clients(context),
        judge_every=config.evaluation.every,
        judge_first=config.evaluation.at_start,
        key=system,
        on_events=recorder.arrived if recorder else lambda rows: None,
        checkpointer=checkpointer,
    )


def stack_of(context: RunContext) -> int:
    """Return how many clients are trained together; where it is measured, rank 0 does, for all."""
    config, learner, transport = context.config, context.learner, context.transport
    asked, synchronous = config.system.stack, isinstance(config.policy, Synchronous)
    if asked > 1:
        require(synchronous, "system.stack", asked, "clients are stacked under policy rounds only; take 1")
        remedy = "a model with dropout, batch norm, buffers or hooks cannot be stacked; take 1"
        require(stackable(learner.flat.module), "system.stack", asked, remedy)
    if asked or not synchronous:
        return max(asked, 1)
    share = max(1, context.num_sampled // len(transport.workers))

    def pick() -> int:
        typical = int(np.argsort(context.federation.sizes[:, 0])[context.problem.num_clients // 2])
        return pick_stack(learner, context.federation.client(typical).train, config.local, share)

    return int(transport.bcast(pick() if transport.is_server else 1, "start"))


def figures(context: RunContext, record: Record, visits: np.ndarray) -> dict[str, float]:
    """Return what only some methods can be asked; on rank 0.

    `mixture_kl`: mean over the evaluated clients of KL(true || estimated mixture) of their last visit.
    `accuracy_cluster`: mean over the groups of row k's accuracy on group k's own test set, for methods whose
    rows belong to the sets that the server owns.

    Args:
        visits: of each client so far [N].
    """
    out = {}
    u = context.config.algorithm.mixtures(record.server)  # [N, K]
    last = [(k, max(int(visits[k]) - 1, 0)) for k in record.evaluated_clients.tolist()]
    truth = [] if u is None else [context.federation.mixture(k, visit) for k, visit in last]
    known = [t for t in truth if t is not None]
    if u is not None and len(known) == len(last) and known[0].shape == u[0].shape:
        out["mixture_kl"] = mixture_kl(np.stack(known), u[record.evaluated_clients])
    group_test_sets = context.federation.group_test_sets() if context.config.algorithm.needs.inspect else ()
    if group_test_sets:
        rows = record.server.tables["model"]
        evaluate = context.problem.public[0].evaluate
        out["accuracy_cluster"] = float(
            np.mean([evaluate(w, split)["accuracy"] for w, split in zip(rows, group_test_sets, strict=True)])
        )
    return out
