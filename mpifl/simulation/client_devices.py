"""The devices of simulated clients: all alike, resampled from measured ones, or of a few classes.

A device defines how fast its client computes, its link, and when it is available; the sections `delay`,
`network` and `availability` define the rest. The device of each client and the measurement of each visit are
drawn by random keys, so they are the same for all methods and any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import name_of, require
from mpifl.core.options import FinitePositive, NonNegativeFloat, Options, PositiveFloat, UnitInterval
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.textfiles import csv_file, is_file
from mpifl.core.units import ENDINGS, quantity

from .availability import Availability
from .delays import Constant, Delay
from .network import LINK_COLUMNS, LinkRates, Network

Samples = Callable[[int, int], int]  # (client, cycle) -> number of samples trained on, in all passes
Cycle = Callable[[int, int], int]  # (client, visit) -> index of the data set that the visit trains on
NO_KEY = Key(())
SECONDS, PER_SAMPLE = "seconds", "seconds_per_sample"
SHIPPED = Path(__file__).parents[1] / "configs" / "devices"  # files that are part of mpifl


def cycle_of_visit(client: int, visit: int) -> int:
    """Return `visit`: if clients skip no data set, each visit trains on the next one."""
    return visit


@dataclass(frozen=True)
class Fleet:
    """The devices of all clients.

    A cycle is the time for which a client has one data set; each cycle draws a measurement. A visit lasts one
    cycle, or several where clients await drift, and ends in the cycle of the data that it trains on.

    Attributes:
        names: name of the device of each client; empty if all are alike.
        key: random key of the draws of single cycles.
        samples: (client, cycle) -> number of samples trained on; None if no device needs it.
        cycle: (client, visit) -> the cycle in which the visit ends.
    """

    names: tuple[str, ...] = ()
    key: Key = NO_KEY
    samples: Samples | None = None
    cycle: Cycle = cycle_of_visit


class Devices(Options, ABC):
    """A model of the clients' devices.

    Attributes:
        is_timed: whether it determines times; if not, devices only have names, for `per_client`.
        needs_samples: whether times depend on the number of samples that a client trains on.
        has_power: whether devices have watts, from which a run counts energy.
    """

    is_timed: bool = True
    needs_samples: bool = False
    has_power: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the devices that clients may have; empty if all are alike."""
        return ()

    def watts_of(self, fleet: Fleet, num_clients: int) -> tuple[float, ...]:
        """Return the power of each client's device while it computes [N]; empty (default): not given."""
        return ()

    @abstractmethod
    def fleet(self, num_clients: int, key: Key) -> Fleet:
        """Return the device of each client.

        Args:
            num_clients: N, number of clients.
            key: random key of the draws.

        Raises:
            UserError: the file of measurements is missing or invalid.
        """

    def check(self, delay: Delay, network: Network, availability: Availability) -> None:
        """Raise `UserError` if a setting of another section would have no effect."""
        return

    def delay(self, plain: Delay, fleet: Fleet) -> Delay:
        """Return the computing times on these devices; `plain` is the model of the section `delay`."""
        return plain

    def network(self, plain: Network, fleet: Fleet) -> Network:
        """Return the links of these devices; `plain` is the model of the section `network`."""
        return plain

    def availability(self, plain: Availability, fleet: Fleet) -> Callable[[int], Availability] | None:
        """Return client -> its availability; None: that of the section `availability` for all clients."""
        return None


@dataclass(frozen=True)
class Alike(Devices):
    """All clients have the device that `delay`, `network` and `availability` define.

    Attributes:
        watts: power of a device while it computes, from which a run counts energy; null counts none.
    """

    is_timed = False
    watts: NonNegativeFloat | None = None

    @property
    def has_power(self) -> bool:  # type: ignore[override]  # an attribute of Devices
        """Whether the device has watts."""
        return self.watts is not None

    def watts_of(self, fleet: Fleet, num_clients: int) -> tuple[float, ...]:
        """Return the same power for all."""
        return () if self.watts is None else (self.watts,) * num_clients

    def fleet(self, num_clients: int, key: Key) -> Fleet:
        """Return a fleet without names."""
        return Fleet()


# -- measured devices ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """One row of a file of measurements.

    Attributes:
        seconds: computing time, in total or per sample.
        up: bytes per second of uploads; None: not measured.
        down: bytes per second of downloads; None: not measured.
        latency_s: latency in seconds; None: not measured.
    """

    seconds: float
    up: float | None = None
    down: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class Measured(Devices):
    """Computing times and links resampled from a file of measured devices: 15 phones can serve 40 clients.

    Each client is assigned a device of the file. Each of its visits draws one of the device's rows uniformly.
    The row gives the computing time and, if the file has these columns, the link. If clients await drift,
    each cycle draws a row; the row of a visit's last cycle gives the link.

    Attributes:
        file: a CSV file with one row for each measurement. Required columns are `device` and either `seconds`
            (of a visit) or `seconds_per_sample` (of each sample in each pass that `local` asks for; anything
            a method trains in addition is not counted). Optional columns are `uplink_bytes_s`,
            `downlink_bytes_s` and `latency_s`. Values may have units (`10Mbit/s`, `20ms`). `phones.csv` is
            part of mpifl: 15 invented phones.
        assign: `drawn` assigns each client a device at random, independently of the others; `round_robin`
            assigns the devices in turn, in the order of the file.
    """

    file: str
    assign: Literal["drawn", "round_robin"] = "drawn"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the devices in the file."""
        return tuple(read_measurements(self.file).rows)

    @property
    def needs_samples(self) -> bool:  # type: ignore[override]  # an attribute of Devices
        """Whether the file gives seconds per sample."""
        return read_measurements(self.file).per_sample

    def fleet(self, num_clients: int, key: Key) -> Fleet:
        """Return a device of the file for each client."""
        names = [*read_measurements(self.file).rows]
        at = range(num_clients)
        if self.assign == "drawn":
            numbers = [key.of("device", k).below(len(names)) for k in at]
        else:
            numbers = [k % len(names) for k in at]
        return Fleet(tuple(names[i] for i in numbers), key)

    def check(self, delay: Delay, network: Network, availability: Availability) -> None:
        """Refuse a second source of computing times, or of a rate that the file has."""
        found = read_measurements(self.file)
        remedy = f"has no effect: computing times are those of {self.file}; leave it out"
        require(delay == Constant(), "delay", delay, remedy)
        remedy = f"has computing times of its own, and so has {self.file}; use network links"
        require(network.computing is None, "network", name_of(network), remedy)
        _check_links(network, found.columns, self.file)

    def row(self, fleet: Fleet, client: int, cycle: int) -> Measurement:
        """Return the measurement drawn for a cycle of a client."""
        rows = read_measurements(self.file).rows[fleet.names[client]]
        return rows[fleet.key.of("row", client, cycle).below(len(rows)) if len(rows) > 1 else 0]

    def delay(self, plain: Delay, fleet: Fleet) -> Delay:
        """Return the computing times in the visits' rows."""
        return _MeasuredDelay(self, fleet)

    def network(self, plain: Network, fleet: Fleet) -> Network:
        """Return the links of the visits' rows, as far as they were measured."""
        columns = read_measurements(self.file).columns
        return _MeasuredNetwork(plain, bool({*columns} - {"latency_s"}), self, fleet) if columns else plain


@dataclass(frozen=True)
class Measurements:
    """A file of measurements.

    Attributes:
        rows: device -> its measurements, devices and rows in the order of the file.
        per_sample: whether seconds are per sample.
        columns: the columns of `LINK_COLUMNS` that the file has.
    """

    rows: Mapping[str, list[Measurement]]
    per_sample: bool
    columns: tuple[str, ...]


@lru_cache(maxsize=4)
def read_measurements(file: str) -> Measurements:
    """Return the content of a file of measurements.

    Raises:
        UserError: there is no such file, it has no rows, or a row is invalid; names the line.
    """
    form = f"give a CSV of device and {SECONDS} or {PER_SAMPLE}"
    path = Path(file) if is_file(file, "devices.file") else SHIPPED / file
    require(bool(file) and path.is_file(), "devices.file", file, f"there is no such file; {form}")
    rows: dict[str, list[Measurement]] = {}
    time, columns = "", tuple[str, ...]()
    for place, row in csv_file(path, "devices.file", ("device",)):
        times = [name for name in (SECONDS, PER_SAMPLE) if name in row]
        remedy = f"needs one of the columns {SECONDS} and {PER_SAMPLE}"
        require(len(times) == 1, "devices.file", file, remedy)
        time, columns = times[0], tuple(name for name in LINK_COLUMNS if name in row)
        seconds = quantity(row[time], ENDINGS["_s"], f"{place}: {time}")
        require(0 <= seconds < inf, f"{place}: {time}", seconds, "use 0 or more seconds")
        link: dict[str, float] = {}
        for name in columns:
            is_rate = name.endswith("bytes_s")
            link[name] = quantity(row[name], ENDINGS["bytes_s" if is_rate else "_s"], f"{place}: {name}")
            good = link[name] > 0 if is_rate else 0 <= link[name] < inf
            remedy = "use a positive rate" if is_rate else "use 0 or more seconds"
            require(good, f"{place}: {name}", link[name], remedy)
        measured = Measurement(seconds, *(link.get(name) for name in LINK_COLUMNS))
        require(bool(row["device"].strip()), place, row["device"], "name the device")
        rows.setdefault(row["device"].strip(), []).append(measured)
    require(bool(rows), "devices.file", file, f"has no row; {form}")
    return Measurements(rows, time == PER_SAMPLE, columns)


# -- classes of devices --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceClass(Options):
    """A class of devices.

    Attributes:
        share: fraction of the clients, exact up to rounding; the shares of all classes sum to 1.
        speed: factor by which its devices compute faster than `delay` says.
        uplink_bytes_s: bytes per second of uploads; null uses `network`.
        downlink_bytes_s: bytes per second of downloads; null uses `network`.
        latency_s: seconds until the first byte of a message arrives; null uses `network`.
        availability: availability of its devices; null uses the section `availability`.
        watts: power of a device while it computes, from which a run counts energy; either all classes have
            it, or none.
    """

    share: UnitInterval
    speed: FinitePositive = 1.0
    uplink_bytes_s: PositiveFloat | None = None
    downlink_bytes_s: PositiveFloat | None = None
    latency_s: NonNegativeFloat | None = None
    availability: Availability | None = None
    watts: NonNegativeFloat | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it determines times."""
        return self != DeviceClass(self.share, watts=self.watts)


@dataclass(frozen=True)
class Classes(Devices):
    """A few classes of devices, each with a share of the clients; `per_client` may give them other options.

    Attributes:
        classes: name of each class -> its share and properties.
    """

    classes: Annotated[dict[str, DeviceClass], MinLen(1)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        total = sum(c.share for c in self.classes.values())
        shares = [c.share for c in self.classes.values()]
        require(abs(total - 1) < 1e-9, "classes", shares, f"the shares sum to {total:g}; let them sum to 1")
        without = [name for name, c in self.classes.items() if c.watts is None]
        remedy = f"the other classes have watts; give {', '.join(without)} some, or leave them out"
        require(len(without) in (0, len(self.classes)), "classes.watts", None, remedy)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(self.classes)

    @property
    def has_power(self) -> bool:  # type: ignore[override]  # an attribute of Devices
        """Whether the classes have watts."""
        return any(c.watts is not None for c in self.classes.values())

    @property
    def is_timed(self) -> bool:  # type: ignore[override]  # an attribute of Devices
        """Whether any class determines times."""
        return any(c.is_timed for c in self.classes.values())

    def check(self, delay: Delay, network: Network, availability: Availability) -> None:
        """Refuse what every class replaces."""
        used = [c for c in self.classes.values() if c.share]
        replaced = tuple(n for n in LINK_COLUMNS if all(getattr(c, n) is not None for c in used))
        _check_links(network, replaced, "every class")
        seen = availability == Availability() or any(c.availability is None for c in used)
        remedy = "has no effect: every class has availability; leave one of them out"
        require(seen, "availability", availability, remedy)

    def fleet(self, num_clients: int, key: Key) -> Fleet:
        """Return a class for each client: exact shares in random order."""
        counts = exact_counts([c.share for c in self.classes.values()], num_clients)
        names = np.repeat([*self.classes], counts)
        out = np.empty(num_clients, names.dtype)
        out[key.of("classes").numpy().permutation(num_clients)] = names
        return Fleet(tuple(map(str, out)), key)

    def watts_of(self, fleet: Fleet, num_clients: int) -> tuple[float, ...]:
        """Return the power of the client's class."""
        given = {name: c.watts for name, c in self.classes.items()}
        return tuple(w for name in fleet.names if (w := given[name]) is not None)

    def delay(self, plain: Delay, fleet: Fleet) -> Delay:
        """Return the computing times of `plain`, divided by the speed of the client's class."""
        if all(c.speed == 1 for c in self.classes.values()):
            return plain
        return _ClassDelay(plain, tuple(self.classes[name].speed for name in fleet.names))

    def network(self, plain: Network, fleet: Fleet) -> Network:
        """Return the links of `plain`, with the changes of the client's class."""
        of = [self.classes[name] for name in fleet.names]
        rated = any(c.uplink_bytes_s is not None or c.downlink_bytes_s is not None for c in of)
        slow = any(c.latency_s is not None for c in of)
        return _ClassNetwork(plain, rated, of) if rated or slow else plain

    def availability(self, plain: Availability, fleet: Fleet) -> Callable[[int], Availability] | None:
        """Return client -> the availability of its class; None if no class has its own."""
        if all(c.availability is None for c in self.classes.values()):
            return None
        models = [self.classes[name].availability or plain for name in fleet.names]
        return models.__getitem__


def exact_counts(shares: list[float], total: int) -> list[int]:
    """Return integers that sum to `total`, as close to the shares as possible (largest remainders)."""
    exact = [share * total for share in shares]
    counts = [int(x + 1e-9) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _check_links(network: Network, replaced: Collection[str], by: str) -> None:
    """Raise `UserError` for keys of a network without effect, because devices replace what they determine.

    Args:
        network: the network.
        replaced: those of `LINK_COLUMNS` that devices replace, for all clients.
        by: where the devices have them, for the message.
    """
    for name, columns in network.decides.items():
        remedy = f"has no effect: {by} has {', '.join(columns)}; leave one of them out"
        require(not set(columns) <= set(replaced), f"network.{name}", getattr(network, name), remedy)


# -- delays and links of devices -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _MeasuredDelay(Delay):
    devices: Measured
    fleet: Fleet

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the seconds of a cycle; `visit` is its number, see `upload_triggers.Drift`."""
        seconds = self.devices.row(self.fleet, client, visit).seconds
        if not self.devices.needs_samples:
            return seconds
        assert self.fleet.samples is not None
        return self.fleet.samples(client, visit) * seconds


@dataclass(frozen=True)
class _ClassDelay(Delay):
    plain: Delay
    speeds: tuple[float, ...]

    def seconds(self, client: int, visit: int, key: Key) -> float:
        return self.plain.seconds(client, visit, key) / self.speeds[client]


class _DeviceNetwork(Network):
    """A network whose links the devices change.

    Args:
        plain: the network without devices.
        rated: whether devices have their own rates.
    """

    def __init__(self, plain: Network, rated: bool) -> None:
        self.plain, self.rated = plain, rated
        self.cast, self.server_bytes_s = plain.cast, plain.server_bytes_s

    @property
    def counts_bytes(self) -> bool:
        return self.rated or self.plain.counts_bytes


class _MeasuredNetwork(_DeviceNetwork):
    def __init__(self, plain: Network, rated: bool, devices: Measured, fleet: Fleet) -> None:
        super().__init__(plain, rated)
        self.devices, self.fleet = devices, fleet

    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        row = self.devices.row(self.fleet, client, self.fleet.cycle(client, visit))
        return changed(self.plain.rates(client, visit, key, model_bytes), row.up, row.down, row.latency_s)


class _ClassNetwork(_DeviceNetwork):
    def __init__(self, plain: Network, rated: bool, of: list[DeviceClass]) -> None:
        super().__init__(plain, rated)
        self.of = of

    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        c, link = self.of[client], self.plain.rates(client, visit, key, model_bytes)
        return changed(link, c.uplink_bytes_s, c.downlink_bytes_s, c.latency_s)


def changed(link: LinkRates, up: float | None, down: float | None, latency_s: float | None) -> LinkRates:
    """Return a link with other rates or another latency; None keeps the value of the link."""
    return LinkRates(
        link.down if down is None else down,
        link.up if up is None else up,
        link.latency_s if latency_s is None else latency_s,
    )


DEVICES: Registry[type[Devices]] = Registry(
    "devices", Devices, {"alike": Alike, "measured": Measured, "classes": Classes}
)
