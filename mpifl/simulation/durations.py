"""How long a visit takes on the simulated clients: computing, transfers, and times of absence.

Both engines use it, so synchronous rounds and asynchronous visits share one time axis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from mpifl.core.errors import require
from mpifl.core.rng import Key
from mpifl.traffic.ledger import Moved

from .delays import Delay
from .network import LinkRates, Network

LEAST_S, MOST_S = 1e-3, 1e9  # mean seconds of a phase
MOST_PHASES = 10_000  # during a visit, in the mean


@dataclass(frozen=True)
class Availability:
    """Clients go away and come back; their work pauses meanwhile.

    Attributes:
        on_s: mean seconds of a phase of presence, exponential.
        off_s: mean seconds of a phase of absence, exponential; 0: clients are always there.
    """

    on_s: float = 100.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        remedy = f"{LEAST_S} to {MOST_S:g} seconds: phases are drawn one by one"
        require(LEAST_S <= self.on_s <= MOST_S, "on_s", self.on_s, f"take {remedy}")
        away = self.off_s == 0 or LEAST_S <= self.off_s <= MOST_S
        require(away, "off_s", self.off_s, f"take 0 (always there), or {remedy}")


class Presence:
    """When each client is there: alternating phases of presence and absence, drawn by (client, phase).

    Args:
        model: mean lengths of the phases.
        key: address of the draws.
    """

    def __init__(self, model: Availability, key: Key) -> None:
        self.model, self.key = model, key
        self._ends: dict[int, list[float]] = {}  # client -> ends of its phases

    def _first(self, client: int) -> bool:
        """Return whether a client is there at time 0."""
        share = self.model.on_s / (self.model.on_s + self.model.off_s)
        return bool(self.key.of("first", client).numpy().random() < share)

    def _phase(self, client: int, time: float) -> tuple[bool, float]:
        """Return whether a client is there at `time`, and when that changes."""
        ends, there = self._ends.setdefault(client, []), self._first(client)
        while not ends or ends[-1] <= time:
            mean = self.model.on_s if there == (len(ends) % 2 == 0) else self.model.off_s
            length = float(self.key.of(client, len(ends)).numpy().exponential(mean))
            ends.append((ends[-1] if ends else 0.0) + length)
        number = bisect_right(ends, time)
        return there == (number % 2 == 0), ends[number]

    def is_available(self, client: int, time: float) -> bool:
        """Return whether a client is there at `time`."""
        return not self.model.off_s or self._phase(client, time)[0]

    def next_available(self, client: int, time: float) -> float:
        """Return `time` if a client is there, otherwise the time of its return."""
        here, until = (True, time) if not self.model.off_s else self._phase(client, time)
        return time if here else until

    def end(self, client: int, start: float, work: float) -> float:
        """Return when a client has been there for `work` seconds since `start`.

        Args:
            client: who works.
            start: in seconds on the run's clock.
            work: seconds of presence.

        Raises:
            UserError: the work never ends, or spans too many phases.
        """
        require(isfinite(work), "delay", work, f"a visit of client {client} would never end; take less")
        if not self.model.off_s:
            return start + work
        remedy = f"a client that works for {work:.3g} s would come and go more than {MOST_PHASES} times"
        require(work <= MOST_PHASES * self.model.on_s, "availability.on_s", self.model.on_s, remedy)
        while True:
            here, until = self._phase(client, start)
            if here and start + work < until:
                return start + work
            work -= (until - start) if here else 0.0
            start = until


@dataclass(frozen=True)
class VisitDuration:
    """How long visits and rounds last.

    Attributes:
        delay: computing times.
        key: address of the draws of `delay`.
        network: the links.
        links: address of the draws of `network`.
        presence: when clients are there.
        model_bytes: of the whole model in float32.
    """

    delay: Delay
    key: Key
    network: Network
    links: Key
    presence: Presence
    model_bytes: int = 0

    def end(self, client: int, visit: int, start: float, down: int = 0, up: int = 0) -> float:
        """Return the end of a visit, in seconds on the run's clock.

        Args:
            client: who trains.
            visit: how many visits it made before.
            start: in seconds on the run's clock.
            down: bytes of the download.
            up: bytes of the upload.
        """
        rates = self.rates(client, visit)
        work = self.delay.seconds(client, visit, self.key) + 2 * rates.latency_s
        return self.presence.end(client, start, work + (down / rates.down + up / rates.up))

    def rates(self, client: int, visit: int) -> LinkRates:
        """Return a client's link at a visit."""
        return self.network.rates(client, visit, self.links, self.model_bytes)

    def round_end(self, start: float, moved: Sequence[Moved], cast_bytes: int) -> float:
        """Return the end of a round, in seconds on the run's clock.

        Args:
            start: in seconds on the run's clock.
            moved: what each client downloads and uploads.
            cast_bytes: bytes of the downloads, each row once.
        """
        if not self.network.shared:
            ends = [self.end(m.client, m.visit, start, m.bytes_down, m.bytes_up) for m in moved if m.trains]
            ends += [start + self._only_moving(m) for m in moved if not m.trains]
            return max(ends, default=start)
        downloads = self._downloads(moved, cast_bytes)
        ready = []
        for m, download in zip(moved, downloads, strict=True):
            work = self.delay.seconds(m.client, m.visit, self.key) if m.trains else 0.0
            ready.append(self.presence.end(m.client, start, download + work))
        return self._uploads(moved, ready, start)

    def _only_moving(self, m: Moved) -> float:
        """Return how long a client takes that only downloads and uploads."""
        rates = self.rates(m.client, m.visit)
        return 2 * rates.latency_s + (m.bytes_down / rates.down + m.bytes_up / rates.up)

    def _downloads(self, moved: Sequence[Moved], cast_bytes: int) -> list[float]:
        """Return how long the download of each client takes, over links that are shared."""
        links = [self.rates(m.client, m.visit) for m in moved]
        capacity = self.network.server_bytes_s or inf
        if self.network.cast == "group" and moved:
            rate = min(capacity, min(link.down for link in links))
            return [cast_bytes / rate + link.latency_s for link in links]
        out, free = [], 0.0  # the server's link sends to one after the other, in the order of the clients
        for m, link in zip(moved, links, strict=True):
            out.append(max(free + m.bytes_down / capacity, free + m.bytes_down / link.down) + link.latency_s)
            free += m.bytes_down / capacity
        return out

    def _uploads(self, moved: Sequence[Moved], ready: Sequence[float], start: float) -> float:
        """Return when the last upload arrives; over a server's link with a rate, one follows the other."""
        capacity, last, free = self.network.server_bytes_s or inf, start, start
        for i in sorted(range(len(moved)), key=lambda i: (ready[i], moved[i].client)):
            m, link = moved[i], self.rates(moved[i].client, moved[i].visit)
            begin = max(free, ready[i]) if capacity < inf else ready[i]
            free = begin + m.bytes_up / capacity
            last = max(last, max(free, begin + m.bytes_up / link.up) + link.latency_s)
        return last


def visit_duration(
    delay: Delay,
    network: Network,
    availability: Availability,
    key: Key,
    num_clients: int,
    model_bytes: int = 0,
) -> VisitDuration:
    """Return how long the visits of a run last.

    Args:
        delay: computing times, unless the network brings its own.
        network: the links.
        availability: when clients are there.
        key: of the system's draws.
        num_clients: N, to check files.
        model_bytes: of the whole model in float32.

    Raises:
        UserError: a file does not fit the clients.
    """
    computing = network.computing or delay
    computing.check(num_clients)
    network.check(num_clients)
    presence = Presence(availability, key.of("presence"))
    return VisitDuration(computing, key.of("delay"), network, key.of("network"), presence, model_bytes)
