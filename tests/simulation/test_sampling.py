"""Who takes part: cohorts of a share of the clients, and clients that come later."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.each import for_each

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.experiment.schema import Newcomers
from mpifl.simulation.newcomers import newcomers
from mpifl.simulation.sampling import Sampler, cohort_size


@for_each(
    ("share", "num_clients", "m"),
    [
        (0.29, 100, 29),  # 28.999999999999996
        (0.57, 100, 57),  # 56.99999999999999
        (0.1, 25, 2),  # half to even, as round does
        (0.3, 5, 2),
        (0.1, 26, 3),
        (0.001, 100, 1),  # never nobody
        (1.0, 7, 7),
        (1, 7, 7),  # a share: one client alone is 1 / 7
        (2, 7, 2),
        (7.0, 7, 7),
    ],
)
def test_a_cohort_is_the_nearest_number_to_its_share(share, num_clients, m):
    assert cohort_size(min(share, 1.0), int(share) if share > 1 else None, num_clients) == m


@pytest.mark.parametrize(
    ("share", "num_clients", "count"),
    [(0.0, 9, 0), (0.29, 100, 29), (0.1, 26, 3), (0.04, 10, 0), (0.99, 10, 9)],
)
def test_newcomers_are_the_nearest_number_to_their_share_and_never_everybody(share, num_clients, count):
    late = newcomers(share, num_clients, key(0))
    assert len(set(late)) == len(late) == count
    assert list(late) == sorted(late)
    assert set(late) <= set(range(num_clients))


def test_other_seeds_have_other_newcomers():
    assert newcomers(0.5, 40, key(0)) != newcomers(0.5, 40, key(1))


@pytest.mark.parametrize("joins", [1, 3])
def test_newcomers_may_be_drawn_from_the_very_round_they_join(joins):
    """8 clients, 4 of them late; cohorts of 4 are all that are there, and from `joins` on some of all."""
    late = (1, 2, 5, 6)
    sampler = Sampler(8, 4, key(3), dict.fromkeys(late, joins))
    cohorts = {step: sampler(step) for step in range(1, 60)}
    for step in range(1, joins):
        assert_array_equal(cohorts[step], [0, 3, 4, 7])
    drawn = np.bincount(np.concatenate([c for step, c in cohorts.items() if step >= joins]), minlength=8)
    assert (drawn > 10).all(), "old and new alike"
    assert_array_equal(cohorts[joins], Sampler(8, 4, key(3))(joins), "as if they had been there all the time")
    everyone = Sampler(8, 8, key(3), dict.fromkeys(late, joins))
    assert_array_equal(everyone(joins), np.arange(8))


def test_the_first_round_of_newcomers_is_where_they_are_there_for_the_first_time(tmp_path):
    """All who are there take part: 3 of 6 in rounds 1 and 2, 6 in round 3."""
    config = toy.config_of(CATALOGUE["fedavg"](), newcomers=Newcomers(share=0.5, joins=3), rounds=4)
    context = toy.context_of(config, toy.Tiny())
    assert len(context.decisions.absent) == 3
    assert context.decisions.absent == newcomers(0.5, 6, key(config.seed.system))
    assert [len(context.sampler(step)) for step in (1, 2, 3, 4)] == [3, 3, 6, 6]


def test_newcomers_may_be_the_clients_of_a_group():
    config = toy.config_of(CATALOGUE["fedavg"](), newcomers=Newcomers(groups=(1,)))
    assert toy.context_of(config, toy.Tiny()).decisions.absent == (3, 4, 5)


def test_cohorts_are_addressed_by_step_and_nothing_else():
    one, other = (Sampler(50, 10, key(3)) for _ in range(2))
    cohorts = [one(step) for step in range(1, 6)]
    for step in (4, 1, 5, 2, 3):
        assert_array_equal(other(step), cohorts[step - 1])
    for cohort in cohorts:
        assert_array_equal(cohort, np.unique(cohort))
        assert len(cohort) == 10
    assert not np.array_equal(cohorts[0], cohorts[1])
    assert not np.array_equal(Sampler(50, 10, key(4))(1), cohorts[0])


def test_everyone_is_sampled_alike():
    """400 draws of 3 of 10: each client 120 times, standard deviation 9."""
    counts = np.bincount(np.concatenate([Sampler(10, 3, key(0))(t) for t in range(400)]), minlength=10)
    assert counts.sum() == 1200
    assert_allclose(counts, 120, atol=4 * 9.2)


@pytest.mark.parametrize(
    ("participation", "count", "size"),
    [(1.0, None, 20), (0.5, None, 10), (0.01, None, 1), (0.26, None, 5), (1.0, 2, 2), (1.0, 20, 20)],
)
def test_the_size_of_a_cohort(participation, count, size):
    assert cohort_size(participation, count, 20) == size
    assert len(Sampler(20, size, key(0))(1)) == size


def test_a_cohort_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="cohort_size = 21: there are 20 clients"):
        cohort_size(1.0, 21, 20)


def test_poisson_cohorts_have_the_size_asked_for_in_the_mean():
    """10 of 100 clients: in 200 rounds 10 on average, give or take 4 x 3 / sqrt(200) = 0.85."""
    sampler = Sampler(100, 10, key(0), poisson=True)
    assert abs(np.mean([len(sampler(step)) for step in range(1, 201)]) - 10) < 0.85
