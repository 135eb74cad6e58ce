"""Duration of visits of the simulated clients: computing, transfers, and times of absence.

Both engines use it, so synchronous rounds and asynchronous visits have the same time axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from mpifl.core.rng import Key
from mpifl.traffic.ledger import Moved, Moves

from .availability import Availability, Presence
from .client_devices import Alike, Devices, Fleet
from .delays import Delay, Load, Loaded
from .network import LinkRates, Network


class LookLoads(NamedTuple):
    """What second looks compute, in units of one local training.

    Attributes:
        question: the work of a client's question.
        answer: the work of an answer to another client.
    """

    question: Load
    answer: Load

    def work(
        self, clients: np.ndarray, visits: np.ndarray, questions: np.ndarray, answers: np.ndarray
    ) -> Iterator[tuple[int, float]]:
        """Yield each client of a second look and its work in it; all arguments are [m].

        Args:
            clients: the clients.
            visits: the visit on whose data each of them looks and is looked at.
            questions: how many questions each of them makes.
            answers: how many answers each of them makes.
        """
        columns = (column.tolist() for column in (clients, visits, questions, answers))
        for k, visit, asked, answered in zip(*columns, strict=True):
            yield k, asked * self.question(k, visit) + answered * self.answer(k, visit)


class Loads(NamedTuple):
    """What clients compute, in units of one local training; see `Config.costs`.

    Attributes:
        visit: the work of a visit.
        statistics: the work of one-shot statistics before training.
        looks: the work of second looks; None if clients compute nothing in them.
    """

    visit: Load
    statistics: Load
    looks: LookLoads | None = None


@dataclass(frozen=True)
class VisitDuration:
    """How long visits and rounds last.

    Attributes:
        delay: computing times.
        key: random key of the draws of `delay`.
        network: the links.
        links: random key of the draws of `network`.
        presence: when clients are available.
        model_bytes: bytes of the whole model in float32.
        devices: name of the device of each client; empty if all are alike.
        computing: the computing times of visits, without what a client waits for; None: `delay`.
        statistics: computing times of one-shot statistics before training; None: they take no time.
        training: computing times of one local training, the unit of `looks`; None: `delay`.
        looks: the work of second looks; None: they take no time.
        watts: power of each client's device while it computes [N]; empty if no energy is counted.
    """

    delay: Delay
    key: Key
    network: Network
    links: Key
    presence: Presence
    model_bytes: int = 0
    devices: tuple[str, ...] = ()
    computing: Delay | None = None
    statistics: Delay | None = None
    training: Delay | None = None
    looks: LookLoads | None = None
    watts: tuple[float, ...] = ()

    def joules(self, client: int, visit: int, share: float = 1.0) -> float:
        """Return the energy that a client's computing takes at a visit, of which it does a `share`."""
        return self.watts[client] * share * (self.computing or self.delay).seconds(client, visit, self.key)

    def joules_of_look(self, client: int, visit: int, work: float) -> float:
        """Return the energy that `work` in a second look takes, in units of one local training."""
        return self.watts[client] * self._look_seconds(client, visit, work)

    def _look_seconds(self, client: int, visit: int, work: float) -> float:
        return work * (self.training or self.delay).seconds(client, visit, self.key) if work else 0.0

    def joules_of_statistics(self, client: int) -> float:
        """Return the energy that one-shot statistics before training take; 0 where they take no time."""
        return self.watts[client] * self._statistics_seconds(client)

    def _statistics_seconds(self, client: int) -> float:
        return 0.0 if self.statistics is None else self.statistics.seconds(client, 0, self.key)

    def _beside_training(self, m: Moved) -> float:
        """Return the computing seconds of a client that does not train: of statistics before training."""
        return 0.0 if m.step else self._statistics_seconds(m.client)

    def end(
        self,
        client: int,
        visit: int,
        start: float,
        down: int = 0,
        up: int = 0,
        share: float = 1.0,
        look: float = 0.0,
    ) -> float:
        """Return the end of a visit, in seconds on the run's clock.

        Args:
            client: number of the client.
            visit: number of its visits before this one.
            start: start time in seconds on the run's clock.
            down: bytes of the download.
            up: bytes of the upload.
            share: fraction of the visit's computing that is done.
            look: work in second looks beside it, in units of one local training.
        """
        rates = self.rates(client, visit)
        computing = share * self.delay.seconds(client, visit, self.key)
        work = computing + self._look_seconds(client, visit, look) + 2 * rates.latency_s
        return self.presence.end(client, start, work + (down / rates.down + up / rates.up))

    @property
    def same_for_all(self) -> bool:
        """Whether the end of a visit depends on its start and its bytes alone, not on the client."""
        alike = self.delay.same_for_all and self.network.same_for_all
        return alike and self.presence.always and not self.network.shared

    def rates(self, client: int, visit: int) -> LinkRates:
        """Return a client's link at a visit."""
        return self.network.rates(client, visit, self.links, self.model_bytes)

    def round_end(
        self,
        start: float,
        moved: Sequence[Moved],
        cast_bytes: int,
        shares: Mapping[int, float] | None = None,
        looks: Mapping[int, float] | None = None,
    ) -> float:
        """Return the end of a round, in seconds on the run's clock.

        Args:
            start: start time in seconds on the run's clock.
            moved: bytes that each client downloads and uploads.
            cast_bytes: bytes of the downloads, each row counted once.
            shares: client -> fraction of its computing that is done, for clients that do not do all of it;
                has no effect on shared links.
            looks: client -> its work in the second look of the round, in units of one local training.
        """
        looked = looks or {}
        if not self.network.shared:
            done, ends = shares or {}, list[float]()
            for m in moved:
                k, look = m.client, looked.get(m.client, 0.0)
                if m.trains:
                    share = done.get(k, 1.0)
                    ends.append(self.end(k, m.visit, start, m.bytes_down, m.bytes_up, share, look))
                else:
                    beside = self._look_seconds(k, m.visit, look)
                    ends.append(self.presence.end(k, start, beside + self._only_moving(m)))
            return max(ends, default=start)
        downloads = self._downloads(moved, cast_bytes)
        ready = []
        for m, download in zip(moved, downloads, strict=True):
            trains = m.trains and self.delay.seconds(m.client, m.visit, self.key)
            work = trains or self._beside_training(m)
            work += self._look_seconds(m.client, m.visit, looked.get(m.client, 0.0))
            ready.append(self.presence.end(m.client, start, download + work))
        return self._uploads(moved, ready, start)

    def statistics_end(self, moved: Moves) -> float:
        """Return the time in seconds when the one-shot statistics at the start of a run have all arrived.

        Args:
            moved: bytes that each client downloads and uploads before it trains; not for shared links.
        """
        return self.round_end(0.0, moved.sizes() if self.same_for_all else moved, 0)

    def _only_moving(self, m: Moved) -> float:
        """Return the seconds of a client that only downloads and uploads."""
        rates = self.rates(m.client, m.visit)
        moving = 2 * rates.latency_s + (m.bytes_down / rates.down + m.bytes_up / rates.up)
        return self._beside_training(m) + moving

    def _downloads(self, moved: Sequence[Moved], cast_bytes: int) -> list[float]:
        """Return the seconds of each client's download over shared links."""
        links = [self.rates(m.client, m.visit) for m in moved]
        capacity = self.network.server_bytes_s or inf
        if self.network.cast == "group" and moved:
            rate = min(capacity, min(link.down for link in links))
            return [cast_bytes / rate + link.latency_s for link in links]
        out, free = [], 0.0  # the server's link serves the clients one after the other, in their order
        for m, link in zip(moved, links, strict=True):
            out.append(max(free + m.bytes_down / capacity, free + m.bytes_down / link.down) + link.latency_s)
            free += m.bytes_down / capacity
        return out

    def _uploads(self, moved: Sequence[Moved], ready: Sequence[float], start: float) -> float:
        """Return the time when the last upload arrives; a server link with a rate takes one at a time.

        An absent client sends later; the server link does not wait for it.
        """
        capacity, last, free = self.network.server_bytes_s or inf, start, start
        for i in sorted(range(len(moved)), key=lambda i: (ready[i], moved[i].client)):
            m, link = moved[i], self.rates(moved[i].client, moved[i].visit)
            begin = max(free, ready[i]) if capacity < inf else ready[i]
            free = begin + m.bytes_up / capacity
            arrival = max(free, begin + m.bytes_up / link.up) + link.latency_s
            if not self.presence.always:
                arrival = self.presence.end(m.client, begin, arrival - begin)
            last = max(last, arrival)
        return last


def visit_duration(
    delay: Delay,
    network: Network,
    availability: Availability,
    key: Key,
    num_clients: int,
    model_bytes: int = 0,
    devices: Devices | None = None,
    fleet: Fleet | None = None,
    loads: Loads | None = None,
) -> VisitDuration:
    """Return how long visits last by the sections `delay`, `network`, `availability` and `devices`.

    Args:
        delay: computing times, unless the network defines them.
        network: the links.
        availability: when clients are available.
        key: random key of the system seed.
        num_clients: N, to check files.
        model_bytes: bytes of the whole model in float32.
        devices: the clients' devices; None: all are alike.
        fleet: the device of each client, if already drawn; None draws it.
        loads: what visits, statistics and second looks compute; None: a visit takes the time of one local
            training, and the others none.

    Raises:
        UserError: a file does not fit the clients.
    """
    computing, devices = network.computing or delay, devices or Alike()
    computing.check(num_clients)
    network.check(num_clients)
    fleet = devices.fleet(num_clients, key.of("devices")) if fleet is None else fleet
    presence = Presence(availability, key.of("presence"), devices.availability(availability, fleet))
    computing, network = devices.delay(computing, fleet), devices.network(network, fleet)
    visits, statistics = computing, None
    if loads is not None:
        visits, statistics = (Loaded(computing, load) for load in (loads.visit, loads.statistics))
    return VisitDuration(
        visits,
        key.of("delay"),
        network,
        key.of("network"),
        presence,
        model_bytes,
        fleet.names,
        visits,
        statistics,
        computing,
        None if loads is None else loads.looks,
        devices.watts_of(fleet, num_clients),
    )
