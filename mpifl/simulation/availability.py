"""Availability of simulated clients: at random times, or by the time of day."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor, inf, isfinite
from typing import Annotated

from annotated_types import Interval

from mpifl.core.errors import require
from mpifl.core.options import Options, UnitInterval
from mpifl.core.rng import Key

LEAST_S, MOST_S = 1e-3, 1e9  # limits on the mean seconds of a phase
MOST_PHASES = 10_000  # limit on the expected number of phases during a visit
LEAST_PRESENT = 0.01  # lower limit on the largest probability in a day's profile
DAY_S = 86400.0


@dataclass(frozen=True)
class Availability(Options):
    """Clients leave and return, at random times or by a daily profile; their work pauses while they are away.

    Attributes:
        on_s: mean seconds of a phase of presence, exponentially distributed.
        off_s: mean seconds of a phase of absence, exponentially distributed; 0 keeps clients always
            available.
        profile: daily profile, instead of `off_s`: for each of several slots of equal length, the probability
            in [0, 1] that a client is available during the whole slot, drawn again for each client and day;
            0 and 1 are not random. Empty for none.
        day_s: seconds of a day.
        shift_s: seconds from the start of the run to the start of the clients' day.
        spread_s: upper limit in seconds of a further delay of each client's day, uniform on [0, spread_s).
    """

    on_s: Annotated[float, Interval(ge=LEAST_S, le=MOST_S)] = 100.0
    off_s: float = 0.0
    profile: tuple[UnitInterval, ...] = ()
    day_s: Annotated[float, Interval(ge=LEAST_S, le=MOST_S)] = DAY_S
    shift_s: Annotated[float, Interval(ge=-MOST_S, le=MOST_S)] = 0.0
    spread_s: Annotated[float, Interval(ge=0, le=MOST_S)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"{LEAST_S} to {MOST_S:g} seconds: phases are drawn one by one"
        away = self.off_s == 0 or LEAST_S <= self.off_s <= MOST_S
        require(away, "off_s", self.off_s, f"use 0 (always there), or {remedy}")
        shares = list(self.profile)
        remedy = f"use probabilities in [0, 1], the largest at least {LEAST_PRESENT}"
        require(max(shares, default=1) >= LEAST_PRESENT, "profile", shares, remedy)
        remedy = "clients come and go at random times (off_s) or by a profile; leave one of them out"
        require(not (self.off_s and shares), "profile", shares, remedy)
        least = LEAST_S * max(len(shares), 1)
        remedy = f"use {least:g} seconds or more: slots last at least {LEAST_S} s"
        require(least <= self.day_s, "day_s", self.day_s, remedy)
        for name, plain in (("day_s", DAY_S), ("shift_s", 0.0), ("spread_s", 0.0)):
            value = getattr(self, name)
            require(bool(shares) or value == plain, name, value, "has no effect without profile; give one")

    @property
    def always(self) -> bool:
        """Whether clients are always available."""
        return not self.off_s and min(self.profile, default=1.0) >= 1

    @property
    def phase_s(self) -> float:
        """Mean seconds of presence between two changes; used for limits."""
        if not self.profile:
            return self.on_s
        return self.day_s / len(self.profile) * sum(self.profile) / len(self.profile)


class Presence:
    """When each client is available: phases of presence and absence, drawn by (client, phase).

    Args:
        model: availability of all clients.
        key: random key of the draws.
        of: client -> its own availability, instead of `model`; None if all clients have `model`.
        joins: client -> when it joins, on the run's clock, for clients that are absent until then.
        leaves: client -> when it leaves for good; it finishes the work that it has begun.
    """

    def __init__(
        self,
        model: Availability,
        key: Key,
        of: Callable[[int], Availability] | None = None,
        joins: Mapping[int, float] | None = None,
        leaves: Mapping[int, float] | None = None,
    ) -> None:
        self.model, self.key, self.of = model, key, of
        self.joins, self.leaves = dict(joins or {}), dict(leaves or {})
        self.always = model.always and of is None and not self.joins and not self.leaves
        self._ends: dict[int, list[float]] = {}  # client -> ends of its phases
        self._shifts: dict[int, float] = {}  # client -> when its day begins

    def within(self, joins: Mapping[int, float], leaves: Mapping[int, float]) -> Presence:
        """Return the same availability with clients that are absent until they join, or once they leave."""
        return Presence(self.model, self.key, self.of, joins, leaves) if joins or leaves else self

    def _has_left(self, client: int, time: float) -> bool:
        return time >= self.leaves.get(client, inf)

    def model_of(self, client: int) -> Availability:
        """Return the availability model of a client."""
        return self.model if self.of is None else self.of(client)

    def _first(self, client: int, model: Availability) -> bool:
        """Return whether a client is available at time 0."""
        share = model.on_s / (model.on_s + model.off_s)
        return bool(self.key.of("first", client).numpy().random() < share)

    def _phase(self, client: int, time: float) -> tuple[bool, float]:
        """Return whether a client is available at `time`, and the earliest time at which this may change."""
        if time < (joined := self.joins.get(client, -inf)):
            return False, joined
        model = self.model_of(client)
        if model.always:
            return True, inf
        if model.profile:
            return self._slot(client, time, model)
        ends, there = self._ends.setdefault(client, []), self._first(client, model)
        while not ends or ends[-1] <= time:
            mean = model.on_s if there == (len(ends) % 2 == 0) else model.off_s
            length = float(self.key.of(client, len(ends)).numpy().exponential(mean))
            ends.append((ends[-1] if ends else 0.0) + length)
        number = bisect_right(ends, time)
        return there == (number % 2 == 0), ends[number]

    def _slot(self, client: int, time: float, model: Availability) -> tuple[bool, float]:
        """Return whether a client is available in its day's slot at `time`, and the end of the slot."""
        if client not in self._shifts:
            own = model.spread_s * float(self.key.of("shift", client).numpy().random())
            self._shifts[client] = model.shift_s + own
        length, shift = model.day_s / len(model.profile), self._shifts[client]
        number = floor((time - shift) / length)
        while shift + (number + 1) * length <= time:  # rounded down
            number += 1
        share = model.profile[number % len(model.profile)]
        draw = self.key.of("slot", client, number).below(2**53) if 0 < share < 1 else 0
        return draw < share * 2**53, shift + (number + 1) * length

    def is_available(self, client: int, time: float) -> bool:
        """Return whether a client is available at `time`."""
        return self.always or (not self._has_left(client, time) and self._phase(client, time)[0])

    def next_available(self, client: int, time: float) -> float:
        """Return `time` if a client is available, otherwise the time of its return: infinite if it left."""
        here, until = (True, time) if self.always else self._phase(client, time)
        while not here:
            time = until
            here, until = self._phase(client, time)
        return inf if self._has_left(client, time) else time

    def end(self, client: int, start: float, work: float) -> float:
        """Return the time at which a client has been available for `work` seconds since `start`.

        Args:
            client: number of the client.
            start: start time in seconds on the run's clock.
            work: seconds of presence.

        Raises:
            UserError: the work never ends, or spans too many phases.
        """
        require(isfinite(work), "delay", work, f"a visit of client {client} would never end; use less")
        if self.always:
            return start + work
        model = self.model_of(client)
        remedy = f"a client that works for {work:.3g} s would come and go more than {MOST_PHASES} times"
        name, value = ("profile", list(model.profile)) if model.profile else ("on_s", model.on_s)
        few = model.always or work <= MOST_PHASES * model.phase_s
        require(few, f"availability.{name}", value, remedy)
        while True:
            here, until = self._phase(client, start)
            if here and start + work <= until:
                return start + work
            work -= (until - start) if here else 0.0
            start = until
