"""How long a visit takes on the simulated devices: computing, the link, and the times when nobody is there.

Both engines ask here, so synchronous rounds and asynchronous visits share one time axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mpifl.core.errors import require
from mpifl.core.rng import Key
from mpifl.core.types import Message, Reads, Server
from mpifl.local import LocalClient

from .delay import Delay
from .ledger import NUMBER_BYTES, count_numbers
from .visits import Worker, read_rows


@dataclass(frozen=True)
class Link:
    """Every client's own link to the server.

    Attributes:
        uplink_bytes_s, downlink_bytes_s: bytes per second; None is without limit.
        latency_s: seconds until a message's first byte is there, in either direction.
    """

    uplink_bytes_s: float | None = None
    downlink_bytes_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("uplink_bytes_s", "downlink_bytes_s"):
            rate = getattr(self, name)
            require(rate is None or rate > 0, name, rate, "take a positive rate, or null for no limit")
        require(self.latency_s >= 0, "latency_s", self.latency_s, "take 0 or more seconds")

    @property
    def counts_bytes(self) -> bool:
        """Whether the sizes of messages matter."""
        return self.uplink_bytes_s is not None or self.downlink_bytes_s is not None

    def seconds(self, down: int, up: int) -> float:
        """Return the time of a download of `down` bytes and an upload of `up`."""
        rates = ((down, self.downlink_bytes_s), (up, self.uplink_bytes_s))
        return 2 * self.latency_s + sum(size / rate for size, rate in rates if rate is not None)


@dataclass(frozen=True)
class Availability:
    """Clients drop out and come back; their work waits for them.

    Attributes:
        on_s, off_s: mean seconds of presence and of absence, both exponential. off_s = 0: always there.
    """

    on_s: float = 100.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.on_s > 0, "on_s", self.on_s, "take a positive number of seconds")
        require(self.off_s >= 0, "off_s", self.off_s, "take 0 (always there) or more seconds")


class Presence:
    """When each client is there: phases of presence and absence in turn, drawn by (client, phase)."""

    def __init__(self, model: Availability, key: Key) -> None:
        self.model, self.key = model, key
        self._ends: dict[int, list[float]] = {}  # client -> ends of its phases

    def _first(self, client: int) -> bool:
        """Return whether a client is there at time 0."""
        share = self.model.on_s / (self.model.on_s + self.model.off_s)
        return bool(self.key.of("first", client).numpy().random() < share)

    def _phase(self, client: int, time: float) -> tuple[bool, float]:
        """Return whether a client is there at `time`, and until when that stays so."""
        ends, there = self._ends.setdefault(client, []), self._first(client)
        while not ends or ends[-1] <= time:
            mean = self.model.on_s if there == (len(ends) % 2 == 0) else self.model.off_s
            length = float(self.key.of(client, len(ends)).numpy().exponential(mean))
            ends.append((ends[-1] if ends else 0.0) + length)
        number = int(np.searchsorted(ends, time, side="right"))
        return there == (number % 2 == 0), ends[number]

    def here(self, client: int, time: float) -> bool:
        """Return whether a client is there."""
        return not self.model.off_s or self._phase(client, time)[0]

    def back(self, client: int, time: float) -> float:
        """Return when a client is next there: now, or at its return."""
        here, until = (True, time) if not self.model.off_s else self._phase(client, time)
        return time if here else until

    def end(self, client: int, start: float, work: float) -> float:
        """Return when a client that begins at `start` has been there for `work` seconds."""
        if not self.model.off_s:
            return start + work
        while True:
            here, until = self._phase(client, start)
            if here and start + work < until:
                return start + work
            work -= (until - start) if here else 0.0
            start = until


@dataclass(frozen=True)
class Pace:
    """When a visit that starts now is over.

    Attributes:
        key: address of the delays.
    """

    delay: Delay
    key: Key
    link: Link
    presence: Presence

    def end(self, client: int, visit: int, start: float, down: int = 0, up: int = 0) -> float:
        """Return the end of a visit that downloads and uploads so many bytes."""
        work = self.delay.seconds(client, visit, self.key) + self.link.seconds(down, up)
        return self.presence.end(client, start, work)


def open_pace(delay: Delay, link: Link, availability: Availability, key: Key, num_clients: int) -> Pace:
    """Return the pace of a run whose system key is `key`."""
    delay.check(num_clients)
    return Pace(delay, key.of("delay"), link, Presence(availability, key.of("presence")))


def bytes_down(reads: Reads, widths: Mapping[str, int]) -> int:
    """Return the bytes of a download; a mixture is one vector."""
    rows = {name: 1 if isinstance(which, np.ndarray) else len(which) for name, which in reads.items()}
    return NUMBER_BYTES * sum(widths[name] * count for name, count in rows.items())


def bytes_up(worker: Worker, server: Server) -> int:
    """Return the bytes of an upload: those of client 0 after training for no epoch."""
    reads = worker.algorithm.reads(server, 0)
    vectors = {
        name: read_rows(lambda t, rows: server.tables[t][rows], name, which) for name, which in reads.items()
    }
    still = replace(worker.local, epochs=0)
    client = LocalClient(0, worker.federation, worker.learner, still)
    report, _ = worker.algorithm.local_update(Message(vectors, reads), {}, client, worker.key.of("size"))
    sent = {**report.vectors, **report.notes}
    return NUMBER_BYTES * sum(count_numbers(v) for name, v in sent.items() if name not in report.unsent)
