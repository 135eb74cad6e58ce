"""Privacy accounting: epsilon at a given delta, computed by the dp-accounting library.

A round of central privacy is a Gaussian mechanism on a sample of clients. With samples of fixed size,
neighbouring federations differ in one client that is replaced by another. This changes a sum of clipped
updates by up to 2 C, so noise of standard deviation z C is a Gaussian event of noise multiplier z / 2. With
Poisson sampling, neighbours differ in one client that is present or not. This changes the sum by up to C, so
the multiplier is z. Under local privacy, the update of one visit is replaced by any other, at most 2 C away:
the multiplier is z / 2, once for each visit of the client, without amplification by sampling.
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


class Accountant:
    """Computes epsilon after a number of rounds or visits.

    Args:
        privacy: privacy mechanism of the run.
        num_clients: N, number of clients.
        num_sampled: m, number of clients sampled in a round.
    """

    def __init__(self, privacy: Privacy, num_clients: int, num_sampled: int) -> None:
        self.privacy, self.num_clients, self.num_sampled = privacy, num_clients, num_sampled

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
        """The orders, and the Renyi divergence of one event at each order."""
        dp, relation = _library(), _library().NeighboringRelation
        poisson = isinstance(self.privacy, CentralPrivacy) and self.privacy.sampling == "poisson"
        how = relation.ADD_OR_REMOVE_ONE if poisson else relation.REPLACE_ONE
        with _quiet():
            accountant = dp.rdp.RdpAccountant(neighboring_relation=how).compose(self.event())
        return accountant.orders, accountant.rdp

    def epsilon(self, times: int) -> float:
        """Return epsilon after a number of rounds or, under local privacy, of visits of one client.

        Raises:
            UserError: the library is missing.
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
        """Return the epsilon of each client after its number of visits [N], float64; for local privacy."""
        values, where = np.unique(visits, return_inverse=True)
        return np.array([self.epsilon(int(v)) for v in values])[where]
