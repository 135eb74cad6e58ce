"""Epsilon is the library's own for the same schedule, composed event by event."""

from __future__ import annotations

import json
from math import inf

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mpifl.core.errors import UserError
from mpifl.protection import accountant as module
from mpifl.protection.accountant import Accountant, Spending
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy, Privacy

dp = pytest.importorskip("dp_accounting")
RELATION = dp.NeighboringRelation


def composed(event, times: int, relation) -> float:
    """Return what the library says of one event after the other."""
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    for _ in range(times):
        accountant.compose(event)
    return accountant.get_epsilon(1e-5)


@pytest.mark.in_turn
def test_samples_without_replacement_of_clients_who_are_replaced():
    """10 of 100 clients, 3 rounds; a client who is replaced moves the sum by 2 C: z = 4 counts as 2."""
    event = dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0))
    assert_allclose(
        Accountant(CentralPrivacy(1.0, 4.0), 100, 10).epsilon(3),
        composed(event, 3, RELATION.REPLACE_ONE),
        rtol=1e-12,
    )


def test_poisson_samples_of_clients_who_are_there_or_not():
    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.1))
    ours = Accountant(CentralPrivacy(1.0, 1.1, sampling="poisson"), 100, 10).epsilon(3)
    assert_allclose(ours, composed(event, 3, RELATION.ADD_OR_REMOVE_ONE), rtol=1e-12)
    assert ours < Accountant(CentralPrivacy(1.0, 1.1), 100, 10).epsilon(3)


def test_all_clients_and_single_clients_are_not_hidden_in_a_sample():
    """Everybody takes part: a Gaussian event. So is each visit under local privacy, by a client's visits."""
    expected = [composed(dp.GaussianDpEvent(2.0), t, RELATION.REPLACE_ONE) for t in (1, 4)]
    assert_allclose(Accountant(CentralPrivacy(1.0, 4.0), 9, 9).epsilon(4), expected[1], rtol=1e-12)
    local = Accountant(LocalPrivacy(1.0, 4.0), 9, 3)
    assert_allclose(local.of_clients(np.array([1, 0, 4, 1])), [expected[0], 0, expected[1], expected[0]])


@pytest.mark.in_turn
def test_what_an_earlier_run_spent_on_the_same_clients_is_added():
    """3 rounds of 10 of 100, then 2 visits of client 1 and 5 of client 2; it survives being written down."""
    first = Accountant(CentralPrivacy(1.0, 4.0), 100, 10)
    spent = [Spending.of(json.loads(json.dumps(one.tree()))) for one in first.spent(3)]
    visits = np.zeros(100, np.int64)
    visits[[1, 2]] = 2, 5
    second = Accountant(LocalPrivacy(1.0, 6.0), 100, 10, spent)
    expected = []
    for times in (0, 2, 5):
        library = dp.rdp.RdpAccountant(neighboring_relation=RELATION.REPLACE_ONE)
        library.compose(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0)), 3)
        for _ in range(times):
            library.compose(dp.GaussianDpEvent(3.0))
        expected.append(library.get_epsilon(1e-5))
    assert_allclose(second.of_clients(visits)[:3], expected, rtol=1e-12)
    assert_allclose(second.of_clients(visits[[2, 0]], np.array([2, 0])), expected[::-2], rtol=1e-12)
    assert_allclose(second.epsilon(visits), expected[2], rtol=1e-12)

    spent = [Spending.of(json.loads(json.dumps(one.tree()))) for one in second.spent(visits)]
    third = Accountant(CentralPrivacy(1.0, 4.0), 100, 10, spent[1:])  # without the first run's 3 rounds
    library = dp.rdp.RdpAccountant(neighboring_relation=RELATION.REPLACE_ONE)
    library.compose(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0)))
    library.compose(dp.GaussianDpEvent(3.0), 5)
    assert_allclose(third.epsilon(1), library.get_epsilon(1e-5), rtol=1e-12)


def test_epsilon_by_hand_for_one_gaussian_event():
    """Renyi divergence alpha / (2 z^2): at most min over alpha of that + log(1/delta) / (alpha - 1)."""
    alpha = np.linspace(1.01, 64, 20000)
    z = 2.0
    bound = float(np.min(alpha / (2 * z**2) + np.log(1e5) / (alpha - 1)))
    ours = Accountant(CentralPrivacy(1.0, 2 * z), 5, 5).epsilon(1)
    assert 0.8 * bound < ours <= bound


def test_nothing_and_no_noise():
    assert not Accountant(Privacy(), 5, 5).counts
    assert Accountant(CentralPrivacy(1.0, 0.0), 5, 5).epsilon(1) == inf
    assert Accountant(CentralPrivacy(1.0, 1.0), 5, 5).epsilon(0) == 0.0


def test_without_the_library_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r'pip install "mpifl\[privacy\]"'):
        module.Accountant(CentralPrivacy(1.0, 1.0), 5, 5).epsilon(1)


def test_the_rate_of_poisson_samples_is_that_of_presence():
    event = Accountant(CentralPrivacy(clip=1.0, sampling="poisson"), 100, 10).mechanism.event()
    assert event.sampling_probability == pytest.approx(0.1)
