"""Delay models: computing times of clients in virtual seconds, drawn by (client, visit)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Annotated

import numpy as np
from annotated_types import Interval, MinLen

from mpifl.core.errors import require
from mpifl.core.options import FiniteNonNegative, FinitePositive, NonNegativeFloat, Options
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.textfiles import check_per_client, read_per_client

Load = Callable[[int, int], float]  # (client, visit) -> work, in units of one local training
MOST_SIGMA = 20.0  # limit on sigma of a logarithm: a draw of ten sigma is then e^200 times the median


class Delay(Options, ABC):
    """A model of the seconds between a client's download and its upload."""

    @abstractmethod
    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the duration of one visit.

        Args:
            client: number of the client.
            visit: number of its visits before this one.
            key: random key of the draws.
        """

    @property
    def same_for_all(self) -> bool:
        """Whether all visits of all clients take the same time."""
        return False

    def check(self, num_clients: int) -> None:
        """Raise `UserError` if the model does not fit the number of clients."""
        return


@dataclass(frozen=True)
class Constant(Delay):
    """Every visit takes the same time.

    Attributes:
        value_s: seconds of a visit.
    """

    value_s: FiniteNonNegative = 1.0

    @property
    def same_for_all(self) -> bool:
        """True."""
        return True

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the constant."""
        return self.value_s


@dataclass(frozen=True)
class Uniform(Delay):
    """Durations are uniform between two bounds.

    Attributes:
        low_s: lower bound, seconds.
        high_s: upper bound, seconds.
    """

    low_s: FiniteNonNegative = 0.5
    high_s: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low_s <= self.high_s < inf, "high_s", self.high_s, "use at least low_s")

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Draw a duration."""
        return float(key.of(client, visit).numpy().uniform(self.low_s, self.high_s))


@dataclass(frozen=True)
class Exponential(Delay):
    """Durations are exponential: many short visits, a few long ones.

    Attributes:
        mean_s: mean, seconds.
    """

    mean_s: FiniteNonNegative = 1.0

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Draw a duration."""
        return float(key.of(client, visit).numpy().exponential(self.mean_s))


@dataclass(frozen=True)
class ShiftedExponential(Delay):
    """Durations are T_min + Exp(mu) (UCFL, section IV); the slowest of m takes T_min + H_m / mu on average.

    Attributes:
        min_s: T_min, seconds.
        mean_s: 1 / mu, mean of the random part in seconds.
    """

    min_s: FiniteNonNegative = 1.0
    mean_s: FiniteNonNegative = 1.0

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Draw a duration."""
        return self.min_s + float(key.of(client, visit).numpy().exponential(self.mean_s))


@dataclass(frozen=True)
class LogNormal(Delay):
    """Durations are log-normal: exp(N(log median, sigma^2)).

    Attributes:
        median_s: median in seconds.
        sigma: standard deviation of the logarithm.
    """

    median_s: FinitePositive = 1.0
    sigma: Annotated[float, Interval(ge=0, le=MOST_SIGMA)] = 0.5

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Draw a duration."""
        return self.median_s * float(np.exp(self.sigma * key.of(client, visit).numpy().standard_normal()))


@dataclass(frozen=True)
class Tiers(Delay):
    """Each client belongs to one tier for the whole run; visits vary by a tenth of the tier's time.

    Attributes:
        tiers_s: seconds of each tier.
        shares: probability of each tier.
    """

    tiers_s: Annotated[tuple[FiniteNonNegative, ...], MinLen(1)] = (1.0, 3.0, 10.0)
    shares: tuple[NonNegativeFloat, ...] = (0.5, 0.3, 0.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.shares) == len(self.tiers_s) and abs(sum(self.shares) - 1) < 1e-9
        require(
            fits and min(self.shares) >= 0, "shares", self.shares, "use one share per tier; they sum to 1"
        )

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Draw a duration."""
        tier = int(key.of("tier", client).numpy().choice(len(self.tiers_s), p=self.shares))
        return self.tiers_s[tier] * float(key.of(client, visit).numpy().uniform(0.9, 1.1))


@dataclass(frozen=True)
class Measured(Delay):
    """Durations come from a file; after its last row a client starts again with its first.

    Attributes:
        file: a CSV file with the columns `client` and `seconds`; every client has at least one row.
    """

    file: str = ""

    def check(self, num_clients: int) -> None:
        """Raise `UserError` unless each of the clients, and no other, has rows."""
        check_per_client(_durations(self.file), num_clients, self.file, "delay.file")

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the duration in the client's row for this visit."""
        rows = _durations(self.file)[client]
        return rows[visit % len(rows)]


@lru_cache(maxsize=4)
def _durations(file: str) -> dict[int, list[float]]:
    """Return client -> its durations, in the order of the file."""

    def parse(row: Mapping[str, str], place: str) -> float:
        seconds = float(row["seconds"])
        require(0 <= seconds < inf, place, seconds, "use 0 or more seconds")
        return seconds

    return read_per_client(file, "delay.file", "client, seconds", "a client and its seconds", parse)


@dataclass(frozen=True)
class Loaded(Delay):
    """The seconds of one local training, times the work of a visit in units of it; see `Config.costs`.

    Attributes:
        training: the seconds of one local training.
        load: the work of a visit.
    """

    training: Delay
    load: Load

    def check(self, num_clients: int) -> None:
        """Check the model of the training."""
        self.training.check(num_clients)

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the seconds of all that the visit computes."""
        return self.training.seconds(client, visit, key) * self.load(client, visit)


DELAYS: Registry[type[Delay]] = Registry(
    "delays",
    Delay,
    {
        "constant": Constant,
        "uniform": Uniform,
        "exponential": Exponential,
        "shifted_exponential": ShiftedExponential,
        "lognormal": LogNormal,
        "tiers": Tiers,
        "measured": Measured,
    },
)
