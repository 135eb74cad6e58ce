"""Forecasts what the clients of a run compute, from what its method declares (`Algorithm.visit_passes`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpifl.core.capabilities import NewClients, OneShotStatistics, SecondLook, hooks_of, uses
from mpifl.core.computation import NOTHING, OF_CALL, PURPOSES, Asked, Purpose, Work
from mpifl.core.errors import name_of
from mpifl.experiment.context import RunContext
from mpifl.experiment.visit_loads import WorkOf, declared_statistics
from mpifl.runtime.hook_errors import DROP
from mpifl.traffic.computation import ComputationLedger

from .traffic import planned_run

UNDECLARED = "what {} computes in a visit, which it does not declare (visit_passes)"
OF_STATISTICS = "what the statistics of {} compute, which it does not declare (statistics_passes)"
VISITS = "which visits the run makes"
CHOSEN = "who sends statistics"
AT_MOST = "the round: some visits compute less"
LOOKS = "second looks"
FAILED = "some clients failed, or trained on fewer samples than planned"
GIGA = 1e9


@dataclass(frozen=True)
class ComputationForecast:
    """What clients compute, without evaluation.

    Attributes:
        visit: purpose -> work of the first visit of client 0; empty if the method does not declare it.
        total: purpose -> work of all clients in the run; None if it is not known before.
        why: what the total depends on, if it is None.
    """

    visit: Mapping[Purpose, Work]
    total: Mapping[Purpose, Work] | None
    why: str = ""

    @property
    def flops(self) -> int | None:
        """FLOPs of all clients in the run; None if they are not known before."""
        return None if self.total is None else sum(work.flops for work in self.total.values())


def forecast_computation(context: RunContext) -> ComputationForecast:
    """Return what the clients of a run will compute; on rank 0."""
    algorithm, config = context.config.algorithm, context.config
    told = context.federation, context.problem, context.learner, config.local, context.differing
    visits, statistics = WorkOf(algorithm.visit_passes, *told), WorkOf(declared_statistics(algorithm), *told)
    held = visits.held(0)
    asked, name = visits.declared(held, context.problem), name_of(algorithm)
    if asked is None:
        return ComputationForecast({}, None, UNDECLARED.format(name))
    visit = _by_purpose(visits, asked, 0)
    why = ""
    if not config.policy.fixed_visits or context.sampler.poisson:
        why = VISITS
    elif any(one.at_most for one in asked):
        why = AT_MOST
    elif statistics.declared(held, context.problem) is None:
        why = OF_STATISTICS.format(name)
    elif uses(algorithm, NewClients) and _some_later(context):
        why = CHOSEN
    elif uses(algorithm, SecondLook) and hooks_of(algorithm, SecondLook).look_passes(held) is None:
        why = LOOKS
    if why:
        return ComputationForecast(visit, None, why)
    total: Counter[tuple[Purpose, str]] = Counter()
    made = np.zeros(context.problem.num_clients, np.int64)
    for step in range(1, config.rounds + 1):
        made[context.sampler(step)] += 1
    known: dict[Any, Mapping[Purpose, Work]] = {}

    def add(work: WorkOf, k: int, visit: int, times: int, purpose: Purpose | None = None) -> None:
        at = purpose, work.held(k, visit), context.local_of(k)
        if at not in known:
            known[at] = _by_purpose(work, work.declared(at[1], context.problem) or (), k, purpose)
        for of, found in known[at].items():
            total.update({(of, name): times * n for name, n in found._asdict().items()})

    changing = context.federation.changes
    for k, count in enumerate(made.tolist()):
        if uses(algorithm, OneShotStatistics):
            add(statistics, k, 0, 1, "statistics")
        for visit_number in range(count if changing else min(count, 1)):
            add(visits, k, visit_number, 1 if changing else count)
    if uses(algorithm, SecondLook):
        found_in_looks = _of_looks(context, visits)
        total.update({("statistics", name): n for name, n in found_in_looks._asdict().items()})
    found = {p: Work(*(total[p, name] for name in Work._fields)) for p in PURPOSES}
    return ComputationForecast(visit, {p: work for p, work in found.items() if work != NOTHING})


def _of_looks(context: RunContext, visits: WorkOf) -> Work:
    """Return what clients compute in second looks; nothing where the server has their samples."""
    looking, found, known = hooks_of(context.config.algorithm, SecondLook), NOTHING, dict[Any, Work]()

    def work(k: int, answers: bool) -> Work:
        held = visits.held(k)
        at = held, answers, context.local_of(k)
        if at not in known:
            asked = looking.look_passes(held) or ((), ())
            known[at] = visits.learner.work(asked[answers], visits.form, at[2])
        return known[at]

    for look in () if looking.at_server else looking.planned_looks(planned_run(context)):
        asks: list[bool] = np.asarray(look.pairs.any(1)).tolist()
        pairs = look.pairs & ~np.eye(len(look.clients), dtype=bool)
        for k, question, answers in zip(look.clients.tolist(), asks, pairs.sum(0).tolist(), strict=True):
            found = found.plus(work(k, False)) if question else found
            found = found.plus(work(k, True).times(answers))
    return found


def _some_later(context: RunContext) -> bool:
    """Return whether some clients send their statistics later than others."""
    some = type(context.config.algorithm).initial_clients is not NewClients.initial_clients  # type: ignore[attr-defined]
    return some or bool(context.decisions.absent)


def _by_purpose(
    work: WorkOf, asked: Sequence[Asked], client: int, purpose: Purpose | None = None
) -> dict[Purpose, Work]:
    """Return the work of what is asked of a client, by purpose."""
    out: dict[Purpose, Work] = {}
    local = work.differing.get(client, work.local)
    for one in asked:
        of = purpose or OF_CALL[one.call]
        out[of] = out.get(of, NOTHING).plus(work.learner.work([one], work.form, local))
    return out


def compared_computation(context: RunContext, ledger: ComputationLedger) -> dict[str, Any]:
    """Return the forecast of a finished run for its summary, and why the ledger differs; on rank 0.

    Returns:
        `flops` of the clients without evaluation, None if there is no forecast; `why` it is missing or wrong,
        or "".
    """
    try:
        found = forecast_computation(context)
    except Exception as error:  # raised by the method; a missing forecast must not lose a finished run
        return {"flops": None, "why": f"no forecast: {type(error).__name__}: {error}"}
    differs = found.flops is not None and found.flops != ledger.columns()["flops"]
    return {"flops": found.flops, "why": FAILED if differs else found.why}


def computation_lines(found: ComputationForecast, drops: str) -> list[str]:
    """Return the lines of `mpifl plan` about computation.

    Args:
        found: the forecast.
        drops: `on_client_error` of the run.
    """
    lines = []
    if found.visit:
        parts = [f"{work.flops / GIGA:.4g} GFLOP {purpose}" for purpose, work in found.visit.items()]
        lines = [f"computation of client 0 {', '.join(parts)} in a visit"]
    if found.total is None:
        return [*lines, f"computation in all      not known before: it depends on {found.why}"]
    parts = [f"{work.flops / GIGA:.5g} {purpose}" for purpose, work in found.total.items()]
    flops = f"{(found.flops or 0) / GIGA:.5g} GFLOP of clients ({found.flops} FLOPs)"
    more = f": {', '.join(parts)}" if len(parts) > 1 else ""
    less = ", less if clients fail" if drops == DROP else ""
    return [*lines, f"computation in all      {flops}{more}{less}"]
