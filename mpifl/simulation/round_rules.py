"""Rules of synchronous rounds that look at the clock: who is kept, and how much each client trains.

Times are known before anything is trained, so the server decides at the start of a round. Clients that are
left out are not trained at all: nothing of theirs would be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

import numpy as np

from mpifl.core.rng import Key
from mpifl.traffic.encoding import StatisticsSize


@dataclass(frozen=True)
class RoundStart:
    """What a rule knows when a round begins.

    Attributes:
        step: number of the round, from 1.
        clients: those drawn for it, int64 ascending.
        wanted: how many of them the round is to keep.
        start: seconds on the run's clock.
        end: (client, share of its mini-batches) -> when its upload arrives, in seconds on the run's clock.
        steps: client -> (mini-batches of its whole visit, mini-batches of one pass).
        key: address of the rule's draws.
    """

    step: int
    clients: np.ndarray
    wanted: int
    start: float
    end: Callable[[int, Fraction], float]
    steps: Callable[[int], tuple[int, int]]
    key: Key


NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RoundPlan:
    """What happens in a round.

    Attributes:
        cohort: clients that train and are mixed, int64 ascending.
        late: clients that download and are left out, int64 ascending.
        late_send: whether those upload all the same.
        statistics: late client that is new -> what it moves for one-shot statistics before it trains.
        work: client -> share of its mini-batches, of those that do not take them all.
        until: when the round ends at the earliest; it lasts until the last of the cohort is back, too.
    """

    cohort: np.ndarray
    late: np.ndarray = field(default_factory=lambda: NOBODY)
    late_send: bool = False
    statistics: Mapping[int, StatisticsSize] = field(default_factory=dict)
    work: Mapping[int, Fraction] = field(default_factory=dict)
    until: float = -inf

    @property
    def metrics(self) -> dict[str, float]:
        """Figures for `metrics.csv`."""
        shares = [float(self.work.get(k, 1)) for k in self.cohort.tolist()]
        return {"late_clients": float(len(self.late)), "work_mean": float(np.mean(shares)) if shares else 0.0}


class RoundRule(ABC):
    """Decides what happens in a round.

    Attributes:
        late_send: whether those who are left out upload all the same.
    """

    late_send: bool = False

    @abstractmethod
    def plan(self, begin: RoundStart) -> RoundPlan:
        """Return what happens in a round that begins."""


@dataclass(frozen=True)
class FirstArrivals(RoundRule):
    """Keeps the first arrivals.

    Attributes:
        deadline_s: seconds from the start of a round until the server waits no longer, unless nobody is back;
            None: until all that are wanted are back.
        late_send: whether those who are left out upload all the same.
    """

    deadline_s: float | None
    late_send: bool

    def plan(self, begin: RoundStart) -> RoundPlan:
        """Keep the first of all; one of them at least."""
        deadline = inf if self.deadline_s is None else begin.start + self.deadline_s
        ends = sorted((begin.end(k, Fraction(1)), k) for k in begin.clients.tolist())
        kept = [k for end, k in ends[: begin.wanted] if end <= deadline] or [k for _, k in ends[:1]]
        late = np.setdiff1d(begin.clients, kept)
        until = deadline if len(kept) < min(begin.wanted, len(ends)) else -inf
        return RoundPlan(np.array(sorted(kept), np.int64), late, self.late_send, until=until)


@dataclass(frozen=True)
class ShortenedVisits(RoundRule):
    """Shortens the visits of clients that would come late, and of some that are drawn.

    Attributes:
        deadline_s: seconds from the start of a round in which a client is to be back; None for any.
        stragglers: share of a round's clients that are drawn, and do a part that is drawn, too.
        whole_epochs: whether parts are whole passes; otherwise mini-batches.
    """

    deadline_s: float | None
    stragglers: float
    whole_epochs: bool

    def plan(self, begin: RoundStart) -> RoundPlan:
        """Give each client as many parts as fit, one at least."""
        work: dict[int, Fraction] = {}
        drawn = self._drawn(begin)
        for k in begin.clients.tolist():
            steps, of_pass = begin.steps(k)
            part = of_pass if self.whole_epochs else 1
            parts = -(-steps // part) if part else 0
            most = parts
            if k in drawn:
                most = 1 + begin.key.of("part", begin.step, k).below(parts) if parts else 0
            if self.deadline_s is not None:
                most = self._fitting(begin, k, steps, part, most)
            if most < parts:
                work[k] = Fraction(most * part, steps)
        return RoundPlan(begin.clients, work=work)

    def _drawn(self, begin: RoundStart) -> set[int]:
        """Return the stragglers of a round."""
        count = round(self.stragglers * len(begin.clients))
        order = begin.key.of("stragglers", begin.step).numpy().permutation(len(begin.clients))
        return {int(begin.clients[i]) for i in order[:count]}

    def _fitting(self, begin: RoundStart, k: int, steps: int, part: int, most: int) -> int:
        """Return the largest number of parts, of so many at most, after which a client is back in time."""
        assert self.deadline_s is not None
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            share = Fraction(min(middle * part, steps), steps)
            if begin.end(k, share) <= begin.start + self.deadline_s:
                low = middle
            else:
                high = middle - 1
        return min(low, most)
