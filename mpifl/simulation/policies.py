"""Policies: when the server steps and which clients train, one class per kind of federation.

A policy is the section `policy` of a configuration. It checks that a method can run under it, prepares the
clients' data and opens the clock. Its base class says which engine runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import (
    ComparedUploads,
    RememberedUploads,
    declared,
    mixes_remembered,
    upload_named,
    uses,
)
from mpifl.core.errors import UserError, name_of, require
from mpifl.core.federation import Federation
from mpifl.core.options import (
    FiniteNonNegative,
    FinitePositive,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveInt,
    PositiveShare,
    Remedy,
    UnitInterval,
)
from mpifl.core.registry import Registry
from mpifl.core.rng import Key

from .availability import LEAST_S
from .clock import Clock, ClockConfig, ClockMaker, PlannedClock, VirtualClock, VirtualTime, WallClock
from .durations import VisitDuration
from .round_rules import FirstArrivals, RoundRule, ShortenedVisits
from .staleness import step_sizes
from .upload_triggers import OneEachStep, UploadTrigger
from .visits import DispatchState, Start


@dataclass(frozen=True)
class ClockParts:
    """The parts from which the clock of a run is created.

    Attributes:
        clock: the section `clock`.
        duration: how long visits take on the clients' devices and links.
        federation: the clients.
        num_sampled: m, number of clients in a cohort.
        key: random key of the system seed.
        rounds: number of server steps of the run.
    """

    clock: ClockConfig
    duration: VisitDuration
    federation: Federation
    num_sampled: int
    key: Key
    rounds: int


class Policy(Options, ABC):
    """Decides when the server steps and which clients train.

    Attributes:
        synchronous: whether a cohort trains and is mixed at once, by collectives over all ranks. If so,
            tables may be sharded, clients may be trained together in one stack, and clients may join after
            the first step.
        fixed_visits: whether it is known before the run which clients train in which step and for how long,
            independently of the duration of their visits. If so, a finished run can be re-timed.
        traffic_depends_on: what the traffic depends on that only a run can show; empty for nothing.
        leaves_out: whether clients that have begun a round may be left out of it.
        under_way: how many visits are in flight, if `participation` and `cohort_size` do not determine it;
            empty if they do.
    """

    synchronous: ClassVar[bool] = False
    fixed_visits: ClassVar[bool] = False
    traffic_depends_on: ClassVar[str] = ""
    leaves_out: ClassVar[bool] = False
    under_way: ClassVar[str] = ""

    @property
    def in_seconds(self) -> bool:
        """Whether virtual time is in seconds, determined by delays and links; if not, it counts steps."""
        return True

    @property
    def joins_by_step(self) -> bool:
        """Whether newcomers join at a server step; if not, at a time in seconds on the run's clock."""
        return True

    def uploads_per_step(self, num_sampled: int) -> int:
        """Return the largest number of uploads that a server step takes.

        Args:
            num_sampled: m, the size of a cohort.
        """
        return num_sampled

    def least_uploads(self, num_sampled: int, ties: bool = False, away: bool = False) -> int:
        """Return the smallest number of uploads of a server step if no client fails. Default: the largest.

        Args:
            num_sampled: m, the size of a cohort.
            ties: whether all visits of a cohort may end at the same time.
            away: whether clients may be away when they are drawn.
        """
        return self.uploads_per_step(num_sampled)

    @property
    def late_send(self) -> bool:
        """Whether clients that are left out upload nevertheless."""
        return False

    def num_started(self, wanted: int, num_clients: int) -> int:
        """Return the number of clients to draw if `wanted` clients are needed."""
        return wanted

    @abstractmethod
    def check(self, algorithm: Algorithm) -> None:
        """Raise `UserError` for a method that cannot run under the policy."""

    @abstractmethod
    def check_clock(self, clock: ClockConfig) -> None:
        """Raise `UserError` for a clock that has no effect under the policy."""

    def prepare(self, federation: Federation) -> None:
        """Prepare the clients' data; called on every rank. Default: leave them as they are."""
        return

    @abstractmethod
    def open_clock(self, given: ClockParts) -> Clock | None:
        """Return the clock of a run; None for rounds, which last as long as their slowest client.

        Args:
            given: the parts of the clock.

        Raises:
            UserError: clock, network and number of clients do not fit together.
        """


def _refuse_single_uploads(policy: Policy, algorithm: Algorithm) -> None:
    """Raise `UserError` for a method that takes one upload at a time; for policies with several per step."""
    name = type(algorithm).__name__
    remedy = f"{name} takes one upload at a time; use policy every_arrival or client_decides"
    require(not algorithm.needs.single_upload, "policy.name", name_of(policy), remedy)


class RoundsPolicy(Policy):
    """Base of policies with synchronous rounds; for methods that take several uploads per step."""

    synchronous = True

    @property
    def rule(self) -> RoundRule | None:
        """The rule that depends on time; None for no rule."""
        return None

    def check(self, algorithm: Algorithm) -> None:
        """Accept every method that takes several uploads per step."""
        _refuse_single_uploads(self, algorithm)

    def check_clock(self, clock: ClockConfig) -> None:
        """Accept only the default clock."""
        remedy = "has no effect under policy rounds, whose virtual time follows delay and network"
        require(clock == VirtualTime(), "clock", clock, f"{remedy}; leave it out")

    def open_clock(self, given: ClockParts) -> None:
        """Return None; raise `UserError` if a rule is used and the ends of visits depend on each other."""
        remedy = "who is back first is known for links of the clients' own; use unicast, no server_bytes_s"
        network = given.duration.network
        require(self.rule is None or not network.shared, "network.cast", network.cast, remedy)


@dataclass(frozen=True)
class Synchronous(RoundsPolicy):
    """Synchronous rounds: a cohort trains in parallel, and collectives over the ranks mix its uploads."""

    fixed_visits = True


@dataclass(frozen=True)
class OverSelection(RoundsPolicy):
    """Rounds that draw more clients than they need and keep the first to finish; stragglers are left out.

    m (1 + extra) clients download and train. The server steps with the first m uploads in virtual time, or
    with those that have arrived at the deadline (Bonawitz et al., MLSys 2019, section 2). Clients that are
    left out keep nothing of the round.

    Attributes:
        extra: additional clients to draw, as a fraction of the clients that a round needs.
        deadline_s: seconds after which a round ends with the clients that are back, or with the first one to
            come back; null ends it when as many as it needs are back.
        late: what the clients that are left out do, for the ledger. `stopped` tells them to stop, and they
            upload nothing; with `sent` they upload nevertheless, and the uploads are not used.
    """

    paper = "bonawitz2019towards"

    extra: FiniteNonNegative = 0.3
    deadline_s: FinitePositive | None = None
    late: Literal["stopped", "sent"] = "stopped"
    traffic_depends_on = "who is back in time"
    leaves_out = True

    @property
    def rule(self) -> RoundRule:
        """The rule that keeps the first arrivals."""
        return FirstArrivals(self.deadline_s, self.late_send)

    @property
    def late_send(self) -> bool:
        """Whether `late` is `sent`."""
        return self.late == "sent"

    def least_uploads(self, num_sampled: int, ties: bool = False, away: bool = False) -> int:
        """Return 1 if there is a deadline, which may end a round with a single upload; otherwise m."""
        return self.uploads_per_step(num_sampled) if self.deadline_s is None else 1

    def num_started(self, wanted: int, num_clients: int) -> int:
        """Return m (1 + extra), rounded up, at most the number of clients."""
        return min(num_clients, ceil(wanted * (1 + self.extra) - 1e-9))

    def open_clock(self, given: ClockParts) -> None:
        """Return None; raise `UserError` for rounds of all clients, which leave no extra clients to draw."""
        remedy = "has no effect on rounds of all clients; use cohort_size or participation, or 0"
        more = self.num_started(given.num_sampled, given.federation.num_clients) > given.num_sampled
        require(more or not self.extra, "policy.extra", self.extra, remedy)
        super().open_clock(given)


@dataclass(frozen=True)
class PartialWork(RoundsPolicy):
    """Rounds in which slow clients do less: as many mini-batches or epochs as fit before a deadline.

    These are the inexact solutions of FedProx (Li et al., MLSys 2020, section 3.2): the partial work of a
    straggler is mixed like the work of the others. A client does at least one mini-batch or epoch, and the
    round waits for it. If a method trains several times in a visit, it does the same fraction of each
    training.

    Attributes:
        deadline_s: seconds from the start of a round within which a client downloads, computes and uploads;
            null for no deadline.
        stragglers: fraction of the clients that are drawn in each round to do only a part of their work,
            uniform from 1 unit to all, as FedProx's authors simulate stragglers; they return earlier.
        unit: unit of partial work: `steps` for mini-batches, `epochs` for whole passes.
    """

    paper = "li2020federated"

    deadline_s: FinitePositive | None = None
    stragglers: UnitInterval = 0.0
    unit: Literal["steps", "epochs"] = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        late = self.deadline_s
        remedy = "says how much slow clients do; give deadline_s, or stragglers"
        require(late is not None or self.stragglers > 0, "deadline_s", late, remedy)

    @property
    def rule(self) -> RoundRule:
        """The rule that shortens visits."""
        return ShortenedVisits(self.deadline_s, self.stragglers, self.unit == "epochs")


class AsynchronousPolicy(Policy):
    """A policy under which uploads arrive one by one.

    Attributes:
        max_staleness: largest lag in server steps of an upload that the server accepts; null accepts all.
        rate: step size of an upload without lag, for methods that have no rule of their own for stale or
            single uploads and mix none that they remember; see `staleness_a`.
        staleness_a: exponent a by which the step size decreases with the lag, rate (1 + lag)^-a.
        refills: whether a client that comes back may start at once if a place is free.
    """

    max_staleness: NonNegativeInt | None
    rate: PositiveShare
    staleness_a: NonNegativeFloat
    refills: ClassVar[bool] = True
    traffic_depends_on = "which visits are under way at the end: they have downloaded and not uploaded"

    @property
    def joins_by_step(self) -> bool:
        """Whether virtual time counts steps; in seconds, newcomers join at a time."""
        return not self.in_seconds

    @abstractmethod
    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the number of visits that are under way at a time."""

    @abstractmethod
    def ready(self, waiting: int, in_flight: int) -> bool:
        """Return whether the server steps now.

        Args:
            waiting: number of uploads that have arrived since the last step.
            in_flight: number of visits under way.
        """

    def next_tick(self, after: float) -> float:
        """Return the first time later than `after` at which the server steps regardless of arrivals.

        Args:
            after: a time in seconds on the run's clock.

        Returns:
            That time; infinity if only arrivals trigger steps.
        """
        return inf

    def refuses(self, lag: int) -> bool:
        """Return whether an upload with a lag of `lag` server steps is too stale."""
        return self.max_staleness is not None and lag > self.max_staleness

    @property
    def single_upload(self) -> bool:
        """Whether each step takes one upload."""
        return False

    @property
    def fresh_uploads(self) -> bool:
        """Whether every upload was trained on the rows that it is mixed into."""
        return False

    @property
    def num_versions(self) -> int:
        """The number of versions of the rows that the server keeps."""
        return 1

    def check_read(self, client: int, version: int, newest: int) -> None:
        """Raise `UserError` if a trace lets a client read rows that the server does not keep.

        Args:
            client: number of the client.
            version: the version that it reads.
            newest: current server version.
        """
        remedy = f"reads version {version}, and the server is at {newest}: this is not a trace of such a run"
        there = newest - self.num_versions < version <= newest
        require(there, "clock.trace", f"client {client}", remedy)

    def check(self, algorithm: Algorithm) -> None:
        """Raise `UserError` for a method that cannot run under the policy, or a policy key without effect."""
        needs, name, policy = algorithm.needs, type(algorithm).__name__, name_of(self)
        if not self.single_upload:
            _refuse_single_uploads(self, algorithm)
        remedy = f"{name} with these options counts on rounds; it runs under policy rounds only"
        require(not needs.round_number, "policy.name", policy, remedy)
        remedy = f"{name} needs fresh uploads; use rounds or barrier"
        require(self.fresh_uploads or not needs.fresh_uploads, "policy.name", policy, remedy)
        remedy = f"a client of {name} relies on its last upload, which must not be refused; use null"
        late = self.max_staleness
        require(late is None or not needs.every_upload, "policy.max_staleness", late, remedy)
        remedy = f"{name} compares the uploads of a step; use policy rounds, barrier or buffer"
        remembers = uses(algorithm, RememberedUploads)
        if not remembers and RememberedUploads in declared(type(algorithm)):
            remedy += ", or algorithm.max_age: null, which lets the last uploads of other clients count"
        several = needs.min_cohort > 1 or upload_named(algorithm, ComparedUploads, "gram")
        require(remembers or not (several and self.single_upload), "policy.name", policy, remedy)
        own = f"has no effect on {name}, which weighs stale uploads by options of its own; leave it out"
        kept = f"has no effect on {name}, whose steps are means over the last uploads of many clients; "
        kept += "leave it out"
        fresh = "has no effect where no upload is stale; leave it out"
        idle = {"rate": own, "staleness_a": own} if needs.weighs_staleness else {}
        idle |= {"rate": kept, "staleness_a": kept} if mixes_remembered(algorithm) else {}
        idle |= {"staleness_a": fresh, "max_staleness": fresh} if self.fresh_uploads else {}
        for key, remedy in idle.items():
            value = getattr(self, key)
            require(value == getattr(type(self), key), f"policy.{key}", value, remedy)

    def check_clock(self, clock: ClockConfig) -> None:
        """Accept every clock."""

    def open_clock(self, given: ClockParts) -> Clock:
        """Return the clock of the section `clock`; see `Policy`."""
        remedy = "group broadcasts and the server's shared link are timed under policy rounds; use unicast"
        network, num_clients = given.duration.network, given.federation.num_clients
        require(not network.shared, "network.cast", network.cast, remedy)
        self.concurrency(num_clients, given.num_sampled)  # checks its numbers
        duration = self.upload_interval(given.duration, given.federation)
        clock = given.clock.open(self.clock_maker, duration, num_clients, given.key)
        clock.check_length(given.rounds, self.waits_for(given.num_sampled))
        return clock

    @property
    def clock_maker(self) -> ClockMaker:
        """What makes the clock. Default: the policy."""
        return self

    def waits_for(self, num_sampled: int) -> int:
        """Return how many uploads a step waits for, also if clients fail or are away. Default: 0, unknown.

        Args:
            num_sampled: m, the size of a cohort.
        """
        return 0

    def upload_interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return how long a client takes from a download to its upload.

        Args:
            duration: duration of computing and transfers on the clients' devices and links.
            federation: the clients.
        """
        return duration

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run in virtual time. Default: visits arrive after their duration."""
        return VirtualClock(duration)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock of a run in real time."""
        return WallClock(duration, scale)

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Return the visits that start now. Default: first the cohort of step 1, later any idle clients."""
        chosen: list[int] = []
        if not dispatch.num_started:
            chosen = [k for k in self.first_clients(dispatch) if dispatch.is_available(k)]
        while len(dispatch.busy) + len(chosen) < dispatch.concurrency:
            client = dispatch.draw(chosen, dispatch.num_started + len(chosen))
            if client is None:
                break
            chosen.append(client)
        return [(k, dispatch.version) for k in chosen]

    def first_clients(self, dispatch: DispatchState) -> list[int]:
        """Return the clients that start when the run begins."""
        cohort: list[int] = dispatch.sampler(1).tolist()
        return cohort

    def step_sizes(self, lag: np.ndarray) -> np.ndarray:
        """Return the step sizes [m] of uploads with a lag [m] in server steps; see `staleness`."""
        return step_sizes(lag, self.rate, self.staleness_a)


class OneUploadPolicy(AsynchronousPolicy):
    """The server steps at every upload."""

    @property
    def single_upload(self) -> bool:
        """True."""
        return True

    def uploads_per_step(self, num_sampled: int) -> int:
        """Return 1."""
        return 1

    def waits_for(self, num_sampled: int) -> int:
        """Return 1."""
        return 1

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Return whether an upload has arrived."""
        return waiting >= 1


@dataclass(frozen=True)
class Barrier(AsynchronousPolicy):
    """Synchronous rounds, message by message: a cohort starts together, and the server waits for all of it.

    `participation` or `cohort_size` gives the size of the cohort.
    """

    refills: ClassVar[bool] = False

    max_staleness: NonNegativeInt | None = None
    rate: PositiveShare = 1.0
    staleness_a: NonNegativeFloat = 0.0

    @property
    def joins_by_step(self) -> bool:
        """True: a cohort is drawn for each step, and the server waits for all of it."""
        return True

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the size of the cohort."""
        return num_sampled

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Return whether the whole cohort has arrived."""
        return in_flight == 0

    @property
    def fresh_uploads(self) -> bool:
        """True: the server does not step while clients train."""
        return True

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Start the next cohort when no visit is under way."""
        if dispatch.busy:
            return []
        return [(k, dispatch.version) for k in dispatch.sampler(dispatch.version + 1).tolist()]


@dataclass(frozen=True)
class EveryArrival(OneUploadPolicy):
    """Fully asynchronous: the server steps at every arrival, with a cohort of visits under way at any time.

    Attributes:
        max_staleness: see `AsynchronousPolicy`.
        rate: see `AsynchronousPolicy`; the default is FedAsync's.
        staleness_a: see `AsynchronousPolicy`; the default is FedAsync's.
    """

    paper = "xie2020asynchronous"

    max_staleness: NonNegativeInt | None = None
    rate: PositiveShare = 0.6
    staleness_a: NonNegativeFloat = 0.5

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the size of the cohort."""
        return num_sampled


NO_BUFFER = Remedy("a buffer needs at least one report; use every_arrival for none")


@dataclass(frozen=True)
class Buffer(AsynchronousPolicy):
    """Semi-asynchronous (FedBuff): the server steps when `size` uploads have arrived.

    Attributes:
        size: number of uploads per step, B in the paper.
        max_staleness: see `AsynchronousPolicy`.
        rate: see `AsynchronousPolicy`.
        staleness_a: see `AsynchronousPolicy`.
    """

    paper = "nguyen2022federated"

    size: Annotated[PositiveInt, NO_BUFFER] = 10
    max_staleness: NonNegativeInt | None = None
    rate: PositiveShare = 1.0
    staleness_a: NonNegativeFloat = 0.5

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the size of the cohort; raise `UserError` if it cannot fill the buffer."""
        remedy = f"only {num_sampled} visits are under way at a time: the server would wait for ever"
        require(self.size <= num_sampled, "policy.size", self.size, remedy)
        return num_sampled

    def uploads_per_step(self, num_sampled: int) -> int:
        """Return `size`."""
        return self.size

    def waits_for(self, num_sampled: int) -> int:
        """Return `size`."""
        return self.size

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Return whether the buffer is full."""
        return waiting >= self.size


@dataclass(frozen=True)
class Waves(AsynchronousPolicy):
    """Semi-asynchronous waves: the server steps with the first arrivals, and clients start only after a step.

    A wave ends when `size` uploads have arrived, or at each multiple of `every_s` at which an upload waits.
    Then idle clients read the new rows, until as many visits are under way as `participation` or
    `cohort_size` gives. Stragglers continue; their uploads enter a later wave, stale by the number of waves
    since their download. Steps with the first arrivals are those of SAFA (Wu et al., IEEE Trans. Computers
    2021), without its cache of the other clients' models. Steps at fixed times are those of FedAT's tiers
    (Chai et al., SC 2021), without tiers.

    Attributes:
        size: number of uploads that end a wave; null ends waves by time alone.
        every_s: seconds between the times at which waves end, on the run's clock (real seconds with clock
            `wall`); null ends waves by uploads alone.
        max_staleness: see `AsynchronousPolicy`.
        rate: see `AsynchronousPolicy`.
        staleness_a: see `AsynchronousPolicy`.
    """

    paper = "wu2021safa"
    refills: ClassVar[bool] = False

    size: PositiveInt | None = None
    every_s: Annotated[float, Interval(ge=LEAST_S, lt=inf)] | None = None
    max_staleness: NonNegativeInt | None = None
    rate: PositiveShare = 1.0
    staleness_a: NonNegativeFloat = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "a wave ends with so many uploads, or every so many seconds; give size, every_s or both"
        require(self.size is not None or self.every_s is not None, "size", None, remedy)

    def papers(self) -> tuple[str, ...]:
        """Return the papers on steps with the first arrivals, and on steps at fixed times."""
        first = (self.paper,) if self.size is not None else ()
        return (*first, "chai2021fedat") if self.every_s is not None else first

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the size of the cohort; raise `UserError` if it cannot fill a wave."""
        remedy = f"only {num_sampled} visits are under way at a time; use at most so many"
        require(self.size is None or self.size <= num_sampled, "policy.size", self.size, remedy)
        return num_sampled

    def uploads_per_step(self, num_sampled: int) -> int:
        """Return `size`, or the size of the cohort if only time ends waves."""
        return num_sampled if self.size is None else self.size

    def least_uploads(self, num_sampled: int, ties: bool = False, away: bool = False) -> int:
        """Return `size`, or what ties leave for the last wave.

        1 if time may end a wave, or if uploads may be refused or clients be away, so that none is left to
        fill it.
        """
        if self.every_s is not None or self.size is None or self.max_staleness is not None or away:
            return 1
        return (num_sampled % self.size if ties else 0) or self.size

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Return whether the wave is full or, without `every_s`, no client is left to fill it."""
        full = self.size is not None and waiting >= self.size
        return full or (self.every_s is None and in_flight == 0)

    def next_tick(self, after: float) -> float:
        """Return the next multiple of `every_s`."""
        if self.every_s is None:
            return inf
        number = floor(after / self.every_s) + 1
        while number * self.every_s <= after:  # rounded down
            number += 1
        return number * self.every_s

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Start idle clients after a step, or a whole cohort if no visit is under way; none within a wave.

        If no client of the cohort is available, other available clients start.
        """
        if dispatch.filled == dispatch.version and (dispatch.busy or dispatch.waiting):
            return []
        if dispatch.busy:
            return super().starts(dispatch)
        cohort = [k for k in dispatch.sampler(dispatch.version + 1).tolist() if dispatch.is_available(k)]
        return [(k, dispatch.version) for k in cohort] or super().starts(dispatch)


@dataclass(frozen=True)
class ClientDecides(OneUploadPolicy):
    """Client-centred (CCFL): visits of all clients are always under way, and each decides when it uploads.

    Attributes:
        uploads: when a client uploads: if it is drawn for a step, when its visit is over, at its own rate, or
            when its data drift.
        max_staleness: see `AsynchronousPolicy`.
        rate: see `AsynchronousPolicy`.
        staleness_a: see `AsynchronousPolicy`.
    """

    paper = "li2024towards"

    uploads: UploadTrigger = field(default_factory=OneEachStep)
    max_staleness: NonNegativeInt | None = None
    rate: PositiveShare = 0.6
    staleness_a: NonNegativeFloat = 0.5
    under_way = "all clients"

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the number of clients."""
        return num_clients

    def first_clients(self, dispatch: DispatchState) -> list[int]:
        """Return all clients."""
        return list(range(dispatch.sampler.num_clients))

    @property
    def in_seconds(self) -> bool:
        """Whether the trigger's virtual time is in seconds."""
        return self.uploads.in_seconds

    def prepare(self, federation: Federation) -> None:
        """Prepare the data for the trigger."""
        self.uploads.prepare(federation)

    def upload_interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return the trigger's interval."""
        return self.uploads.interval(duration, federation)

    @property
    def clock_maker(self) -> ClockMaker:
        """The trigger."""
        return self.uploads


@dataclass(frozen=True)
class DrawnStaleness(OneUploadPolicy):
    """Staleness drawn at random, as the FedAsync paper simulates it; virtual time is the number of steps.

    The upload of each step was trained on rows that are s steps old, with s uniform on 0..most.

    Attributes:
        most: largest staleness to draw, in steps.
        rate: see `AsynchronousPolicy`.
        staleness_a: see `AsynchronousPolicy`.
    """

    paper = "xie2020asynchronous"

    most: NonNegativeInt = 4
    rate: PositiveShare = 0.6
    staleness_a: NonNegativeFloat = 0.5
    max_staleness = None
    under_way = "policy.most + 1 visits"

    @property
    def in_seconds(self) -> bool:
        """Return False: steps take no time."""
        return False

    @property
    def num_versions(self) -> int:
        """One version for each staleness that can be drawn."""
        return self.most + 1

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the number of visits that may be under way before the oldest arrives.

        Raises:
            UserError: there are not so many clients.
        """
        remedy = f"up to {self.most + 1} visits are under way, and there are {num_clients} clients"
        require(self.most < num_clients, "policy.most", self.most, remedy)
        return self.most + 1

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return a clock under which each step has a visit that was planned for it."""
        return PlannedClock(self.version_read, duration.presence)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Raise `UserError`: real arrivals would not have the drawn staleness."""
        raise UserError("clock.name", "wall", "policy drawn_staleness fixes the order; use clock virtual")

    def version_read(self, step: int, key: Key) -> int:
        """Return the version of the rows that the visit of a step reads.

        Args:
            step: version of the server before it takes the upload.
            key: address of the draws.
        """
        return max(0, step - key.of("staleness", step).below(self.most + 1))


POLICIES: Registry[type[Policy]] = Registry(
    "policies",
    Policy,
    {
        "rounds": Synchronous,
        "over_selection": OverSelection,
        "partial_work": PartialWork,
        "barrier": Barrier,
        "every_arrival": EveryArrival,
        "buffer": Buffer,
        "waves": Waves,
        "client_decides": ClientDecides,
        "drawn_staleness": DrawnStaleness,
    },
)
