"""Privacy accounting: epsilon at a given delta, computed by the dp-accounting library.

A round of central privacy is a Gaussian mechanism on a sample of clients. With samples of fixed size,
neighbouring federations differ in one client that is replaced by another. This changes a sum of clipped
updates by up to 2 C, so noise of standard deviation z C is a Gaussian event of noise multiplier z / 2. With
Poisson sampling, neighbours differ in one client that is present or not. This changes the sum by up to C, so
the multiplier is z. Under local privacy, the update of one visit is replaced by any other, at most 2 C away:
the multiplier is z / 2, once for each visit of the client, without amplification by sampling.

A run that starts from the model of a run over the same clients adds its events to those of the earlier run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from mpifl.core.errors import UserError

from .privacy import CentralPrivacy, LocalPrivacy, Privacy

REPLACED, PRESENT = "REPLACE_ONE", "ADD_OR_REMOVE_ONE"  # neighbouring relations, by the library's names
RELATIONS = {"fixed": REPLACED, "visit": REPLACED, "poisson": PRESENT}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's warnings about orders that it leaves out, which can only make epsilon larger."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        remedy = 'epsilon needs the dp-accounting library: pip install "mpifl[privacy]"'
        raise UserError("privacy", "central or local", remedy) from error
    return dp_accounting


@dataclass(frozen=True)
class Mechanism:
    """One round of central privacy, or one visit under local privacy.

    Attributes:
        sampling: `fixed` or `poisson` for a round, see `CentralPrivacy`; `visit` for a visit.
        noise_multiplier: z.
        num_clients: N, number of clients.
        num_sampled: m, number of clients sampled in a round.
    """

    sampling: str
    noise_multiplier: float
    num_clients: int
    num_sampled: int

    def __post_init__(self) -> None:
        assert self.sampling in RELATIONS, self.sampling

    @property
    def relation(self) -> str:
        """The difference between two neighbouring federations, by the library's name."""
        return RELATIONS[self.sampling]

    def event(self) -> Any:
        """Return the library's event."""
        dp, n, m = _library(), self.num_clients, self.num_sampled
        if self.sampling == "poisson":
            return dp.PoissonSampledDpEvent(m / n, dp.GaussianDpEvent(self.noise_multiplier))
        gaussian = dp.GaussianDpEvent(self.noise_multiplier / 2)
        if self.sampling == "visit" or m >= n:
            return gaussian
        return dp.SampledWithoutReplacementDpEvent(n, m, gaussian)

    @cached_property
    def loss(self) -> tuple[np.ndarray, np.ndarray]:
        """The orders, and the Renyi divergence of the event at each order; infinite without noise."""
        dp = _library()
        with _quiet():
            accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation[self.relation])
            if self.noise_multiplier == 0:
                return accountant.orders, np.full(len(accountant.orders), inf)
            accountant.compose(self.event())
        return accountant.orders, accountant.rdp


@dataclass(frozen=True)
class Spending:
    """The privacy that a run has spent: how often its mechanism was used.

    Attributes:
        mechanism: what it used.
        times: how often: rounds, the same for all clients, or visits of each client; int64 [N].
    """

    mechanism: Mechanism
    times: np.ndarray

    def tree(self) -> dict[str, Any]:
        """Return plain values for `summary.json`; clients with as many visits stand together."""
        counts = {int(t): np.flatnonzero(self.times == t).tolist() for t in np.unique(self.times) if t}
        alike = self.mechanism.sampling != "visit"
        used: Any = int(self.times.max()) if alike else {str(t): clients for t, clients in counts.items()}
        return {**asdict(self.mechanism), "times": used}

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Spending:
        """Return what `tree` made.

        Raises:
            KeyError, TypeError, ValueError, IndexError, AssertionError: the tree is something else.
        """
        options = {**tree}
        used = options.pop("times")
        mechanism = Mechanism(**options)
        times = np.zeros(mechanism.num_clients, np.int64)
        for t, clients in used.items() if isinstance(used, Mapping) else [(used, slice(None))]:
            times[clients] = int(t)
        return cls(mechanism, times)


class Accountant:
    """Computes epsilon after a number of rounds or visits.

    Args:
        privacy: privacy mechanism of the run.
        num_clients: N, number of clients.
        num_sampled: m, number of clients sampled in a round.
        earlier: what earlier runs over the same clients spent, from whose model this run starts; their
            neighbouring federations differ as this run's do.
    """

    def __init__(
        self, privacy: Privacy, num_clients: int, num_sampled: int, earlier: Sequence[Spending] = ()
    ) -> None:
        self.privacy, self.num_clients, self.num_sampled = privacy, num_clients, num_sampled
        self.earlier = tuple(earlier)

    @property
    def counts(self) -> bool:
        """Whether the run has a privacy mechanism to account for."""
        return isinstance(self.privacy, (CentralPrivacy, LocalPrivacy))

    def check(self) -> None:
        """Raise `UserError` if the library is missing."""
        _library()

    @property
    def per_client(self) -> bool:
        """Whether each client has its own epsilon, which depends on its number of visits."""
        return isinstance(self.privacy, LocalPrivacy)

    @property
    def delta(self) -> float:
        """The delta at which epsilon is computed."""
        assert isinstance(self.privacy, (CentralPrivacy, LocalPrivacy)), "there is no mechanism"
        return self.privacy.delta

    @property
    def neighbours(self) -> str:
        """The difference between two neighbouring federations, in words."""
        if isinstance(self.privacy, LocalPrivacy):
            return "one client's data replaced"
        if isinstance(self.privacy, CentralPrivacy) and self.privacy.sampling == "poisson":
            return "one client added or removed"
        return "one client replaced by another"

    @cached_property
    def mechanism(self) -> Mechanism:
        """One round of the run, or one visit under local privacy."""
        privacy = self.privacy
        assert isinstance(privacy, (CentralPrivacy, LocalPrivacy)), "there is no mechanism"
        sampling = privacy.sampling if isinstance(privacy, CentralPrivacy) else "visit"
        return Mechanism(sampling, privacy.noise_multiplier, self.num_clients, self.num_sampled)

    def spent(self, times: int | np.ndarray) -> list[Spending]:
        """Return what earlier runs and this one have spent after `times` rounds, or visits [N]."""
        everyone = np.broadcast_to(np.asarray(times, np.int64), self.num_clients)
        return [*self.earlier, Spending(self.mechanism, everyone)]

    def epsilon(self, times: int | np.ndarray) -> float:
        """Return the largest epsilon of any client, with what earlier runs spent.

        Args:
            times: number of rounds or, under local privacy, of visits: of each client [N] or of all.

        Raises:
            UserError: the library is missing.
        """
        if not self.earlier:
            return self._epsilon([(self.mechanism, int(np.max(times)))])
        return float(self.of_clients(np.broadcast_to(times, self.num_clients)).max())

    def of_clients(self, times: np.ndarray, clients: np.ndarray | None = None) -> np.ndarray:
        """Return the epsilon of clients, with what earlier runs spent on them, float64 [n].

        Args:
            times: rounds, or visits of each of the clients [n].
            clients: the clients [n]; None for all.
        """
        which = slice(None) if clients is None else clients
        used = np.stack([*(s.times[which] for s in self.earlier), times], axis=1)
        values, where = np.unique(used, axis=0, return_inverse=True)
        mechanisms = [*(s.mechanism for s in self.earlier), self.mechanism]
        each = [self._epsilon([*zip(mechanisms, row, strict=True)]) for row in values.tolist()]
        return np.array(each)[where.reshape(-1)]

    def _epsilon(self, used: Sequence[tuple[Mechanism, int]]) -> float:
        """Return epsilon after each mechanism was used so often."""
        used = [(mechanism, times) for mechanism, times in used if times]
        if not used:
            return 0.0
        if not all(mechanism.noise_multiplier for mechanism, _ in used):
            return inf
        orders, total = used[0][0].loss[0], sum(times * mechanism.loss[1] for mechanism, times in used)
        with _quiet():
            return float(_library().rdp.compute_epsilon(orders, total, self.delta)[0])
