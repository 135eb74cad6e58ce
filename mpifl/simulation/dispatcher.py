"""The loop of an asynchronous run: which visits start, and which upload arrives next.

The engine trains these visits; the forecast of a run only lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from mpifl.core.rng import Key
from mpifl.traffic.ledger import Moves

from .clock import Clock, TrainingPool
from .policies import AsynchronousPolicy
from .sampling import Sampler
from .visits import DispatchState, Visit


class Dispatcher:
    """Starts visits and returns their arrivals, according to a policy and a clock.

    Args:
        policy: decides when the server steps and which clients start.
        clock: decides which upload arrives next.
        sampler: draws cohorts.
        key: random key of the draws of single clients.
        on_time: called when the clock advances, with the time and the number of visits under way until then.

    Attributes:
        busy: clients whose visits are under way.
        num_started: number of visits started so far.
        filled: server version at the last start of visits; -1 before the first.
        tick: next time at which the server steps regardless of arrivals.
    """

    def __init__(
        self,
        policy: AsynchronousPolicy,
        clock: Clock,
        sampler: Sampler,
        key: Key,
        on_time: Callable[[float, int], None] = lambda time, under_way: None,
    ) -> None:
        self.policy, self.clock, self.sampler, self.key = policy, clock, sampler, key
        self.concurrency = policy.concurrency(sampler.num_clients, sampler.num_sampled)
        self.on_time = on_time
        self.busy: set[int] = set()
        self.num_started = 0
        self.filled = -1
        self.tick = policy.next_tick(0.0)

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Advance to the time when all one-shot statistics have arrived; no client trains before.

        Args:
            moved: bytes that each client downloaded and uploaded for them; empty if there are none.
            pool: the pool in which visits are trained.
        """
        self.clock.take_statistics(moved, pool)
        self._went_on()
        self.tick = self.policy.next_tick(self.clock.now)

    def fill(
        self,
        version: int,
        waiting: int,
        pool: TrainingPool,
        start: Callable[[int, int], None],
        prepare: Callable[[Sequence[int]], None] = lambda clients: None,
    ) -> None:
        """Start visits until as many are under way as the policy wants, or no client can start.

        No visit starts between two simultaneous arrivals.

        Args:
            version: current server version.
            waiting: number of uploads that have arrived since the last step.
            pool: the pool in which visits are trained.
            start: called with a client and the version of the rows that it reads; calls `begin`.
            prepare: called with all clients that start together, before any of them does.
        """
        if self.clock.is_tied():
            return
        while True:
            state = DispatchState(
                busy=self.busy,
                num_started=self.num_started,
                version=version,
                concurrency=self.concurrency,
                sampler=self.sampler,
                key=self.key,
                available=self.clock.available,
                waiting=waiting,
                filled=self.filled,
            )
            starts = self.clock.starts(state)
            if starts is None:
                starts = self.policy.starts(state)
            if starts:
                prepare([client for client, _ in starts])
            for client, read in starts:
                start(client, read)
                self.filled = version
            if self.clock.goes_to_start(self.tick, self._awaited(), pool):
                self._went_on()
                continue
            if self.busy or (waiting and self.tick < inf):
                return
            self.clock.advance(self.sampler.num_clients, pool)
            self._went_on()
            if self.tick < inf:
                self.tick = self.policy.next_tick(self.clock.now)

    def _awaited(self) -> Collection[int]:
        """Return the clients that may start as soon as they come back; none if no visit may start then."""
        if not self.policy.refills or len(self.busy) >= self.concurrency or self.clock.available is None:
            return ()
        return [k for k in range(self.sampler.num_clients) if k not in self.busy]

    def begin(self, client: int, visit: int, version: int, down: int, up: int, look: float = 0.0) -> Visit:
        """Add a visit that starts now to those under way, and return it.

        Args:
            client: number of the client.
            visit: number of its visits before this one.
            version: server version that it reads.
            down: bytes of its download.
            up: bytes of its upload.
            look: work in second looks beside it, in units of one local training.
        """
        due = self.clock.due(client, visit, down, up, look)
        started = Visit(due, self.num_started, client, visit, version, self.clock.now)
        self.add(started)
        self.num_started += 1
        return started

    def add(self, visit: Visit) -> None:
        """Add a visit to those under way; a resumed run adds those that had started before."""
        self.clock.add(visit)
        self.busy.add(visit.client)

    def next_arrival(self, pool: TrainingPool) -> Visit | None:
        """Return the next visit to arrive; None if the server steps first, regardless of arrivals."""
        visit = self.clock.pop(pool, self.tick)
        self._went_on()
        if visit is None:
            self.tick = self.policy.next_tick(self.clock.now)
        else:
            self.busy.discard(visit.client)
        return visit

    def server_steps(self, visit: Visit | None, waiting: int) -> bool:
        """Return whether the server steps now.

        Args:
            visit: result of `next_arrival`.
            waiting: number of uploads that have arrived since the last step and were not too stale.
        """
        return waiting > 0 and (visit is None or self.policy.ready(waiting, len(self.busy)))

    def _went_on(self) -> None:
        self.on_time(self.clock.now, len(self.busy))
