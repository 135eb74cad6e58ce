"""Rules of synchronous rounds that depend on time: which clients are kept, and how much each client trains.

Times are known before any training, so the server decides at the start of a round. Clients that are left out
are not trained at all, because their results would not be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf

import numpy as np

from mpifl.core.rng import Key

from .sampling import RoundPlan


@dataclass(frozen=True)
class RoundStart:
    """The information that a rule gets when a round begins.

    Attributes:
        step: number of the round, from 1.
        clients: clients drawn for the round, int64 ascending.
        wanted: number of clients that the round keeps.
        start: start time in seconds on the run's clock.
        end: (client, fraction of its mini-batches) -> arrival of its upload, in seconds on the run's clock.
        steps: client -> (mini-batches of its whole visit, mini-batches of one pass).
        key: random key of the rule's draws.
    """

    step: int
    clients: np.ndarray
    wanted: int
    start: float
    end: Callable[[int, Fraction], float]
    steps: Callable[[int], tuple[int, int]]
    key: Key


class RoundRule(ABC):
    """Decides which clients a round keeps and how much they train.

    Attributes:
        late_send: whether clients that are left out upload nevertheless.
    """

    late_send: bool = False

    @abstractmethod
    def plan(self, begin: RoundStart) -> RoundPlan:
        """Return the plan of a round that begins."""


@dataclass(frozen=True)
class FirstArrivals(RoundRule):
    """Keeps the first arrivals.

    Attributes:
        deadline_s: seconds from the start of a round after which the server stops waiting, if at least one
            client is back; None: it waits for as many clients as the round wants.
        late_send: whether clients that are left out upload nevertheless.
    """

    deadline_s: float | None
    late_send: bool

    def plan(self, begin: RoundStart) -> RoundPlan:
        """Keep the first arrivals up to the deadline, at least one of them."""
        deadline = inf if self.deadline_s is None else begin.start + self.deadline_s
        ends = sorted((begin.end(k, Fraction(1)), k) for k in begin.clients.tolist())
        kept = [k for end, k in ends[: begin.wanted] if end <= deadline] or [k for _, k in ends[:1]]
        late = np.setdiff1d(begin.clients, kept)
        until = deadline if len(kept) < min(begin.wanted, len(ends)) else -inf
        return RoundPlan(np.array(sorted(kept), np.int64), late, self.late_send, until=until)


@dataclass(frozen=True)
class ShortenedVisits(RoundRule):
    """Shortens the visits of clients that would be late, and of stragglers drawn at random.

    Attributes:
        deadline_s: seconds from the start of a round within which a client must be back; None for no limit.
        stragglers: fraction of a round's clients that are drawn as stragglers; each does a random part.
        whole_epochs: whether visits consist of whole passes; otherwise of mini-batches.
    """

    deadline_s: float | None
    stragglers: float
    whole_epochs: bool

    def plan(self, begin: RoundStart) -> RoundPlan:
        """Give each client as many passes or mini-batches as fit, at least one."""
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
        """Return the largest number of parts, at most `most`, after which a client is back in time."""
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
