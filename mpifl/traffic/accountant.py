"""What noise is worth: epsilon at a given delta, by the accountant of the dp-accounting library.

A round of central privacy is a Gaussian mechanism on a sample of clients. With samples of fixed size
neighbours differ in one client who is replaced by another, which moves a sum of clipped updates by up to 2 C:
noise of z C is a Gaussian event of multiplier z / 2. With Poisson samples neighbours differ in one client who
is there or not, which moves it by up to C: multiplier z. Local privacy: the update of one visit is replaced
by any other, 2 C away: multiplier z / 2, once for each visit of the client; nobody hides in a sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from mpifl.core.errors import UserError

from .privacy import CentralPrivacy, LocalPrivacy, Privacy


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's remarks on orders that it leaves out, which only make epsilon larger."""
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


class Accountant:
    """Tells epsilon after so many rounds, or visits.

    Args:
        privacy: the run's.
        num_clients: N.
        num_sampled: m of a round.
    """

    def __init__(self, privacy: Privacy, num_clients: int, num_sampled: int) -> None:
        self.privacy, self.num_clients, self.num_sampled = privacy, num_clients, num_sampled

    @property
    def counts(self) -> bool:
        """Whether there is anything to tell."""
        return isinstance(self.privacy, (CentralPrivacy, LocalPrivacy))

    def check(self) -> None:
        """Raise `UserError` where the library is missing."""
        _library()

    @property
    def per_client(self) -> bool:
        """Whether each client has an epsilon of its own, by its visits."""
        return isinstance(self.privacy, LocalPrivacy)

    @property
    def delta(self) -> float:
        """Delta, at which epsilon is told."""
        assert isinstance(self.privacy, (CentralPrivacy, LocalPrivacy)), "there is no mechanism"
        return self.privacy.delta

    @property
    def neighbours(self) -> str:
        """What two neighbouring federations differ in, in words."""
        if isinstance(self.privacy, LocalPrivacy):
            return "one client's data replaced"
        if isinstance(self.privacy, CentralPrivacy) and self.privacy.sampling == "poisson":
            return "one client added or removed"
        return "one client replaced by another"

    def event(self) -> Any:
        """Return the library's event of one round, or of one visit under local privacy."""
        dp, privacy, n, m = _library(), self.privacy, self.num_clients, self.num_sampled
        assert isinstance(privacy, (CentralPrivacy, LocalPrivacy)), "there is no mechanism"
        if isinstance(privacy, CentralPrivacy) and privacy.sampling == "poisson":
            return dp.PoissonSampledDpEvent(m / n, dp.GaussianDpEvent(privacy.noise_multiplier))
        gaussian = dp.GaussianDpEvent(privacy.noise_multiplier / 2)
        if isinstance(privacy, LocalPrivacy) or m >= n:
            return gaussian
        return dp.SampledWithoutReplacementDpEvent(n, m, gaussian)

    @cached_property
    def _one(self) -> tuple[np.ndarray, np.ndarray]:
        """Orders, and the Renyi divergence of one event at each."""
        dp, relation = _library(), _library().NeighboringRelation
        poisson = isinstance(self.privacy, CentralPrivacy) and self.privacy.sampling == "poisson"
        how = relation.ADD_OR_REMOVE_ONE if poisson else relation.REPLACE_ONE
        with _quiet():
            accountant = dp.rdp.RdpAccountant(neighboring_relation=how).compose(self.event())
        return accountant.orders, accountant.rdp

    def epsilon(self, times: int) -> float:
        """Return epsilon after so many rounds; under local privacy, visits of a client.

        Raises:
            UserError: the library is not there.
        """
        privacy = self.privacy
        assert isinstance(privacy, (CentralPrivacy, LocalPrivacy)), "there is no mechanism"
        if times == 0:
            return 0.0
        if privacy.noise_multiplier == 0:
            return inf
        orders, divergence = self._one
        with _quiet():
            return float(_library().rdp.compute_epsilon(orders, times * divergence, privacy.delta)[0])

    def of_clients(self, visits: np.ndarray) -> np.ndarray:
        """Return epsilon of each client after so many visits, float64 [N]; for local privacy."""
        values, where = np.unique(visits, return_inverse=True)
        return np.array([self.epsilon(int(v)) for v in values])[where]
