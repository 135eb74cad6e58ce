"""Groups of clients that workers host for a whole run (`system.hosting: groups`), and their balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpifl.experiment.build import trained_samples
from mpifl.experiment.context import RunContext
from mpifl.experiment.schema import GROUPS
from mpifl.runtime.scheduler import Scheduler

MOST_ROUNDS = 200  # whose cohorts are drawn to predict the balance of a round


@dataclass(frozen=True)
class Groups:
    """The groups of all workers.

    Attributes:
        ranks: rank of each worker [W].
        clients: number of clients that each hosts [W].
        samples: number of their training samples [W].
        work: predicted work of a visit of each of them, in samples [W].
    """

    ranks: Sequence[int]
    clients: np.ndarray
    samples: np.ndarray
    work: np.ndarray

    @property
    def busiest(self) -> float:
        """Work of the group with the most work, over the mean."""
        return float(self.work.max() / max(self.work.mean(), 1e-300))

    def lines(self) -> list[str]:
        """Return a table: a line for each worker."""
        form = "{:>4}  {:>8} {:>9} {:>7}"
        rows = zip(
            self.ranks, self.clients, self.samples, self.work / max(self.work.mean(), 1e-300), strict=True
        )
        body = [form.format(rank, n, samples, f"{work:.3f}") for rank, n, samples, work in rows]
        return [form.format("rank", "clients", "samples", "work"), *body, "work: of the group, over the mean"]


def scheduler_of(context: RunContext, num_ranks: int, hosting: str | None = None) -> Scheduler:
    """Return the scheduler of a run on ranks of one node before it has placed any task.

    Args:
        context: context of the run.
        num_ranks: P, the number of ranks.
        hosting: in place of `system.hosting`.
    """
    workers, sizes = tuple(range(1, num_ranks)) or (0,), context.federation.sizes[:, 0]
    grouped = (hosting or context.config.system.hosting) == GROUPS
    return Scheduler(
        (0,) * num_ranks,
        workers,
        sizes,
        stack=context.decisions.stack,
        hosted=trained_samples(context) if grouped else None,
    )


def groups_of(context: RunContext, num_ranks: int) -> Groups:
    """Return the groups of a run on a number of ranks, as if `system.hosting` were `groups`."""
    scheduler, work = scheduler_of(context, num_ranks, GROUPS), trained_samples(context)
    hosts = scheduler.hosts
    assert hosts is not None
    counts, samples, loads = (
        np.bincount(hosts, weights, num_ranks)[scheduler.workers]
        for weights in (None, context.federation.sizes[:, 0], work)
    )
    return Groups(scheduler.workers, counts, samples.astype(np.int64), loads)


def group_of_most(context: RunContext, num_ranks: int) -> np.ndarray:
    """Return the clients of the group with the most samples, int64 ascending."""
    scheduler, sizes = scheduler_of(context, num_ranks, GROUPS), context.federation.sizes.sum(1)
    assert scheduler.hosts is not None
    return np.flatnonzero(scheduler.hosts == np.bincount(scheduler.hosts, sizes).argmax())


def round_balance(context: RunContext, num_ranks: int, hosting: str) -> float:
    """Return the work of the busiest worker of a round over the mean of all workers, as a mean over rounds.

    Args:
        context: context of the run, under a policy with rounds.
        num_ranks: P, the number of ranks.
        hosting: `any` or `groups`.
    """
    scheduler, work = scheduler_of(context, num_ranks, hosting), trained_samples(context)
    found = []
    for step in range(1, min(context.config.rounds, MOST_ROUNDS) + 1):
        cohort = context.sampler(step)
        loads = np.bincount(scheduler.assign(cohort, work[cohort]), work[cohort], num_ranks)
        loads = loads[scheduler.workers]
        if loads.any():
            found.append(loads.max() / loads.mean())
    return float(np.mean(found)) if found else 1.0
