"""Network models: the links between the clients of a simulated federation and its server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf
from typing import Annotated, Literal

from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.options import FiniteNonNegative, NonNegativeFloat, Options, PositiveFloat
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.textfiles import check_per_client, read_per_client

from .delays import Delay, ShiftedExponential

MEGABIT = 125_000  # bytes
LINK_COLUMNS = ("uplink_bytes_s", "downlink_bytes_s", "latency_s")  # of files, and keys of a class of devices


@dataclass(frozen=True)
class LinkRates:
    """A client's link.

    Attributes:
        down: bytes per second of a download; infinite without a limit.
        up: bytes per second of an upload; infinite without a limit.
        latency_s: seconds until the first byte of a message arrives.
    """

    down: float = inf
    up: float = inf
    latency_s: float = 0.0


class Network(Options, ABC):
    """A model of links.

    Attributes:
        cast: `unicast` sends each client its rows over its own link, to all clients at the same time. `group`
            sends each row once, one row after the other, at the rate of the slowest client of the cohort; the
            clients start when the last row is sent (UCFL, section IV).
        server_bytes_s: bytes per second of the server's own link, which the messages of each direction use
            one after the other; null for no limit.
    """

    cast: Literal["unicast", "group"] = "unicast"
    server_bytes_s: PositiveFloat | None = None

    @abstractmethod
    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        """Return a client's link at a visit.

        Args:
            client: number of the client.
            visit: number of its visits before this one.
            key: random key of the draws.
            model_bytes: bytes of the whole model in float32.
        """

    @property
    def computing(self) -> Delay | None:
        """The computing times that the network defines; None: those of the section `delay`."""
        return None

    @property
    def counts_bytes(self) -> bool:
        """Whether the sizes of messages matter."""
        return True

    @property
    def same_for_all(self) -> bool:
        """Whether all clients have the same link at every visit."""
        return False

    def check(self, num_clients: int) -> None:
        """Raise `UserError` if the model does not fit the number of clients."""
        return

    @property
    def decides(self) -> Mapping[str, tuple[str, ...]]:
        """Keys of the section, of those that are given -> what of a link each decides, of `LINK_COLUMNS`.

        Default: none, for networks that bring more than links.
        """
        return {}

    @property
    def shared(self) -> bool:
        """Whether a message of one client delays those of others."""
        return self.cast == "group" or self.server_bytes_s is not None


@dataclass(frozen=True)
class Links(Network):
    """Every client has its own link to the server.

    Attributes:
        uplink_bytes_s: bytes per second of uploads; null for no limit.
        downlink_bytes_s: bytes per second of downloads; null for no limit.
        rho: T_ul / T_dl, the time of an upload divided by that of a download of the same size; instead of
            `uplink_bytes_s`.
        latency_s: seconds until the first byte of a message arrives, in either direction.
        spread: standard deviation of the logarithm of a factor on a client's rates, drawn once per client.
        cast: see `Network`.
        server_bytes_s: see `Network`.
    """

    uplink_bytes_s: PositiveFloat | None = None
    downlink_bytes_s: PositiveFloat | None = None
    rho: PositiveFloat | None = None
    latency_s: NonNegativeFloat = 0.0
    spread: NonNegativeFloat = 0.0
    cast: Literal["unicast", "group"] = "unicast"
    server_bytes_s: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.rho is None or (self.uplink_bytes_s is None and self.downlink_bytes_s is not None)
        remedy = "has no effect on links without a limit; give uplink_bytes_s or downlink_bytes_s"
        limited = self.uplink_bytes_s is not None or self.downlink_bytes_s is not None
        require(limited or not self.spread, "spread", self.spread, remedy)
        require(both, "rho", self.rho, "needs downlink_bytes_s, and takes the place of uplink_bytes_s")

    @property
    def counts_bytes(self) -> bool:
        """Whether any rate has a limit."""
        rates = (self.uplink_bytes_s, self.downlink_bytes_s, self.server_bytes_s)
        return any(rate is not None for rate in rates)

    @property
    def decides(self) -> Mapping[str, tuple[str, ...]]:
        """The rates and the latency that are given."""
        keys = {name: (name,) for name in LINK_COLUMNS} | {"rho": ("uplink_bytes_s",)}
        return {name: columns for name, columns in keys.items() if getattr(self, name)}

    @property
    def same_for_all(self) -> bool:
        """Whether no factors are drawn."""
        return not self.spread

    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        """Return the same rates for all, times the client's factor."""
        down = inf if self.downlink_bytes_s is None else self.downlink_bytes_s
        up = inf if self.uplink_bytes_s is None else self.uplink_bytes_s
        up = up if self.rho is None else down / self.rho
        if self.spread:
            factor = float(key.of("link", client).numpy().lognormal(0.0, self.spread))
            down, up = down * factor, up * factor
        return LinkRates(down, up, self.latency_s)


class System(Network):
    """Links and computing times in units of a model's download T_dl; group broadcasts. UCFL, figure 5.

    A round takes rho T_dl + T_min + H_m / mu + (number of streams) T_dl on average.

    Attributes:
        download_s: T_dl, seconds to download one model in float32.
        rho: T_ul / T_dl, the time of an upload divided by that of a download of the same size.
        min_s: T_min, minimum computing time in seconds.
        mean_s: 1 / mu, mean of the random part of the computing time in seconds.
    """

    download_s: PositiveFloat
    rho: PositiveFloat
    min_s: FiniteNonNegative
    mean_s: FiniteNonNegative
    cast = "group"

    @property
    def computing(self) -> Delay:
        """Computing times T_min + Exp(mu)."""
        return ShiftedExponential(self.min_s, self.mean_s)

    @property
    def decides(self) -> Mapping[str, tuple[str, ...]]:
        """The rates, by the keys that are not those of the preset."""
        keys = {"download_s": ("uplink_bytes_s", "downlink_bytes_s"), "rho": ("uplink_bytes_s",)}
        preset = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        return {name: rates for name, rates in keys.items() if getattr(self, name) != preset[name]}

    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        """Return rates at which a model takes T_dl to download and rho T_dl to upload."""
        down = model_bytes / self.download_s
        return LinkRates(down, down / self.rho)


@dataclass(frozen=True)
class WirelessSlow(System):
    """Wireless links and slow users: rho = 4, T_min = T_dl = 1 / mu. Fields: see `System`."""

    download_s: PositiveFloat = 1.0
    rho: PositiveFloat = 4.0
    min_s: FiniteNonNegative = 1.0
    mean_s: FiniteNonNegative = 1.0


@dataclass(frozen=True)
class WirelessFast(System):
    """Wireless links and fast users: rho = 2, T_min = T_dl, 1 / mu = 0. Fields: see `System`."""

    download_s: PositiveFloat = 1.0
    rho: PositiveFloat = 2.0
    min_s: FiniteNonNegative = 1.0
    mean_s: FiniteNonNegative = 0.0


@dataclass(frozen=True)
class Wired(System):
    """Wired links, as fast up as down: rho = 1, T_min = T_dl, 1 / mu = 0. Fields: see `System`."""

    download_s: PositiveFloat = 1.0
    rho: PositiveFloat = 1.0
    min_s: FiniteNonNegative = 1.0
    mean_s: FiniteNonNegative = 0.0


TIERS: dict[str, LinkRates] = {  # round figures of everyday links, not measurements
    "lte": LinkRates(20 * MEGABIT, 5 * MEGABIT, 0.05),
    "wifi": LinkRates(100 * MEGABIT, 40 * MEGABIT, 0.01),
    "wan": LinkRates(1000 * MEGABIT, 1000 * MEGABIT, 0.03),
}


@dataclass(frozen=True)
class NetworkTiers(Network):
    """Each client has one kind of link for the whole run, drawn with given probabilities.

    The kinds, with the rates of downloads and uploads and the latency, are lte (20 and 5 Mbit/s, 50 ms), wifi
    (100 and 40 Mbit/s, 10 ms) and wan (1000 and 1000 Mbit/s, 30 ms).

    Attributes:
        tiers: names of the kinds of links.
        shares: probability of each kind.
        cast: see `Network`.
        server_bytes_s: see `Network`.
    """

    tiers: Annotated[tuple[Literal["lte", "wifi", "wan"], ...], MinLen(1)] = ("lte", "wifi", "wan")
    shares: tuple[NonNegativeFloat, ...] = (0.4, 0.4, 0.2)
    cast: Literal["unicast", "group"] = "unicast"
    server_bytes_s: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.shares) == len(self.tiers) and abs(sum(self.shares) - 1) < 1e-9
        require(fits, "shares", list(self.shares), "use one share per tier; they sum to 1")

    @property
    def decides(self) -> Mapping[str, tuple[str, ...]]:
        """All of a link, by its tier."""
        return {"tiers": LINK_COLUMNS}

    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        """Return the rates of the client's tier."""
        tier = int(key.of("tier", client).numpy().choice(len(self.tiers), p=self.shares))
        return TIERS[self.tiers[tier]]


@dataclass(frozen=True)
class NetworkTrace(Network):
    """Links come from a file; after its last row a client starts again with its first.

    Attributes:
        file: a CSV file with the columns `client`, `downlink_bytes_s`, `uplink_bytes_s` and, optionally,
            `latency_s`; every client has at least one row.
        cast: see `Network`.
        server_bytes_s: see `Network`.
    """

    file: str = ""
    cast: Literal["unicast", "group"] = "unicast"
    server_bytes_s: PositiveFloat | None = None

    @property
    def decides(self) -> Mapping[str, tuple[str, ...]]:
        """All of a link, by its row."""
        return {"file": LINK_COLUMNS}

    def check(self, num_clients: int) -> None:
        """Raise `UserError` unless each of the clients, and no other, has rows."""
        check_per_client(_links(self.file), num_clients, self.file, "network.file")

    def rates(self, client: int, visit: int, key: Key, model_bytes: int) -> LinkRates:
        """Return the link in the client's row for this visit."""
        rows = _links(self.file)[client]
        return rows[visit % len(rows)]


@lru_cache(maxsize=4)
def _links(file: str) -> dict[int, list[LinkRates]]:
    """Return client -> its links, in the order of the file."""

    def parse(row: Mapping[str, str], place: str) -> LinkRates:
        down, up = float(row["downlink_bytes_s"]), float(row["uplink_bytes_s"])
        latency = float(row.get("latency_s") or 0.0)
        require(down > 0 and up > 0, place, [down, up], "use positive rates")
        require(0 <= latency < inf, place, latency, "use 0 or more seconds")
        return LinkRates(down, up, latency)

    needs = "a client, downlink_bytes_s and uplink_bytes_s"
    return read_per_client(file, "network.file", "links", needs, parse)


NETWORKS: Registry[type[Network]] = Registry(
    "networks",
    Network,
    {
        "links": Links,
        "wireless-slow": WirelessSlow,
        "wireless-fast": WirelessFast,
        "wired": Wired,
        "tiers": NetworkTiers,
        "trace": NetworkTrace,
    },
)
