"""Which rank trains which client."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from mpifl.comm.transport import CannotRecover
from mpifl.core.rng import key
from mpifl.runtime.scheduler import Scheduler, balance


def test_ten_equal_clients_on_two_workers_are_five_and_five():
    assert_array_equal(np.bincount(balance(np.full(10, 100.0), [1, 2])), [0, 5, 5])


def test_ten_equal_clients_sampled_from_many_are_five_and_five_too():
    """Whoever is sampled: clients belong to no worker."""
    scheduler = Scheduler((0, 0, 0), (1, 2), np.full(100, 60))
    for step in range(20):
        cohort = key(step).numpy().choice(100, 10, replace=False)
        assert_array_equal(np.bincount(scheduler.assign(cohort, np.full(10, 60.0)), minlength=3), [0, 5, 5])


def test_the_longest_task_goes_first_to_the_least_loaded():
    """7 to A, 6 to B, 5 to B (6 < 7), 4 to A (7 < 11), 3 to A (11 = 11: the lower rank): A 14, B 11."""
    assert_array_equal(balance(np.array([3.0, 7.0, 5.0, 6.0, 4.0]), [1, 2]), [1, 1, 2, 2, 1])


def test_a_worker_twice_as_fast_gets_twice_the_work():
    assert_array_equal(np.bincount(balance(np.ones(9), [0, 1], [1.0, 2.0])), [3, 6])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_no_worker_has_more_than_four_thirds_of_what_is_unavoidable(costs, workers):
    """Graham (1969): longest processing time first stays within 4/3 of the best; the best is at least these
    two.
    """
    owner = balance(np.array(costs, float), range(workers))
    loads = np.bincount(owner, weights=costs, minlength=workers)
    ordered = sorted(costs, reverse=True)
    pair = ordered[workers - 1] + ordered[workers] if len(costs) > workers else 0
    unavoidable = max(sum(costs) / workers, ordered[0], pair)
    assert loads.max() <= 4 / 3 * unavoidable + 1e-9


def test_a_pinned_client_stays_on_its_node():
    """Ranks 0 1 2 on node 0, ranks 3 4 on node 1; all four workers share the clients' samples evenly."""
    sizes = np.array([10, 20, 30, 40, 50, 60, 70, 80])
    scheduler = Scheduler((0, 0, 0, 1, 1), (1, 2, 3, 4), sizes, pinned=True)
    home = scheduler.home.copy()
    assert_allclose(np.bincount(home, weights=sizes), [180, 180])
    for step in range(10):
        cohort = np.sort(key(step).numpy().choice(8, 5, replace=False))
        ranks = scheduler.assign(cohort, sizes[cohort].astype(float))
        assert_array_equal(np.where(ranks <= 2, 0, 1), home[cohort])
    owners = scheduler.row_owners()
    assert_array_equal(np.where(owners <= 2, 0, 1), home)
    assert_array_equal(np.bincount(owners)[1:], [2, 2, 2, 2])


def test_without_pins_any_worker_of_any_node_may_train_any_client():
    scheduler = Scheduler((0, 0, 1), (1, 2), np.ones(4))
    assert_array_equal(np.bincount(scheduler.assign(np.array([0, 1]), np.ones(2)), minlength=3), [0, 1, 1])
    home = scheduler.home
    same = np.flatnonzero(home == home[0])[:2]
    assert_array_equal(np.bincount(scheduler.assign(same, np.ones(2)), minlength=3), [0, 1, 1])


def test_a_shuffled_schedule_is_random_reproducible_and_different_each_time():
    def placed() -> list[list[int]]:
        scheduler = Scheduler((0,) * 4, (1, 2, 3), np.ones(30), shuffle=key(1, "shuffle"))
        return [scheduler.assign(np.arange(30), np.ones(30)).tolist() for _ in range(3)]

    first = placed()
    assert first == placed()
    assert first[0] != first[1] != first[2]
    assert {1, 2, 3} == set(first[0])


def test_a_worker_that_was_slow_lately_gets_less():
    """Speeds 10, 10, 10; then 10/3 for rank 3: 10 - 0.3 * (10 - 10/3) = 8, and in the end 10/3."""
    scheduler = Scheduler((0,) * 4, (1, 2, 3), np.ones(12))
    scheduler.record_speeds([0.0, 10.0, 10.0, 10.0], [0.0, 1.0, 1.0, 1.0])
    assert_array_equal(np.bincount(scheduler.assign(np.arange(12), np.ones(12)))[1:], [4, 4, 4])
    scheduler.record_speeds([0.0, 0.0, 0.0, 10.0], [0.0, 0.0, 0.0, 3.0])
    assert scheduler.speed == pytest.approx({1: 1.0, 2: 1.0, 3: 0.8})
    for _ in range(40):
        scheduler.record_speeds([0.0, 0.0, 0.0, 10.0], [0.0, 0.0, 0.0, 3.0])
    assert scheduler.speed[3] == pytest.approx(1 / 3, rel=1e-4)
    assert_array_equal(np.bincount(scheduler.assign(np.arange(14), np.ones(14)))[1:], [6, 6, 2])
    scheduler.record_speeds([10.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0])  # rank 0 hosts nobody, 3 did nothing
    assert scheduler.speed[3] == pytest.approx(1 / 3, rel=1e-4)
    scheduler.speed[3] = 1e-6  # however slow, a worker is tried again
    assert np.bincount(scheduler.assign(np.arange(3), np.ones(3)), minlength=4)[3] == 1


def hosted(work, nodes, pinned=False) -> Scheduler:
    """Return a scheduler whose workers, ranks 1 to P - 1, host groups of clients with these loads."""
    work = np.array(work)
    return Scheduler(nodes, range(1, len(nodes)), work, pinned, hosted=work)


def test_groups_are_balanced_by_work_and_every_task_goes_to_its_host():
    """7 to rank 1, 6 to 2, 5 to 2 (6 < 7), 4 to 1 (7 < 11), 3 to 1 (11 = 11: the lower rank)."""
    scheduler = hosted([3, 7, 5, 6, 4], (0, 0, 0))
    assert_array_equal(scheduler.hosts, [1, 1, 2, 2, 1])
    cohort = np.array([1, 4])
    for costs in ([1.0, 1.0], [100.0, 1.0]):
        assert_array_equal(scheduler.assign(cohort, np.array(costs)), [1, 1], "also where rank 2 is idle")
    assert [scheduler.candidates(k) for k in range(5)] == [[1], [1], [2], [2], [1]]
    assert_array_equal(scheduler.row_owners(), scheduler.hosts)
    assert scheduler.reach([3, 0]) == [2, 1]


def test_the_clients_of_a_lost_worker_are_handed_on_and_the_others_stay():
    """9 to rank 1, 8 to 2, 7 to 3, 6 to 4, 5 to 4 (11), 4 to 3 (11), 3 to 2 (11).

    Rank 3 dies, rank 4 is 3 now. 7 goes to rank 1 (9 -> 16), 4 to rank 2 (11 = 11: the lower). Then rank 1
    dies, with 9 and 7; ranks 2 and 3, now 1 and 2, have 15 and 11: 9 goes to rank 2 (20), 7 to rank 1.
    """
    scheduler = hosted([3, 7, 5, 6, 4, 9, 8], (0, 0, 0, 0, 0))
    assert_array_equal(scheduler.hosts, [2, 3, 4, 4, 3, 1, 2])
    scheduler.regroup((0, 0, 0, 0), (1, 2, 3), (0, 1, 2, 4))
    assert_array_equal(scheduler.hosts, [2, 1, 3, 3, 2, 1, 2])
    scheduler.regroup((0, 0, 0), (1, 2), (0, 2, 4))
    assert_array_equal(scheduler.hosts, [1, 1, 2, 2, 1, 2, 1])


@pytest.mark.parametrize(("pinned", "after"), [(True, [1, 1, 2, 2]), (False, [2, 1, 2, 2])])
def test_clients_that_are_pinned_are_handed_on_within_their_node(pinned, after):
    """Ranks 1 (9) and 2 (8) on node 0, rank 3 (3 and 1) on node 1, which has the least work."""
    scheduler = hosted([9, 8, 3, 1], (0, 0, 0, 1), pinned)
    assert_array_equal(scheduler.hosts, [1, 2, 3, 3])
    assert_array_equal(scheduler.home, [0, 0, 1, 1])
    scheduler.regroup((0, 0, 1), (1, 2), (0, 2, 3))
    assert_array_equal(scheduler.hosts, after)


def test_a_node_without_workers_cannot_be_replaced_where_clients_are_pinned():
    scheduler = hosted([9, 8, 3, 1], (0, 0, 0, 1), pinned=True)
    with pytest.raises(CannotRecover):
        scheduler.regroup((0, 0, 0), (1, 2), (0, 1, 2))


def test_a_server_that_is_left_alone_hosts_everybody():
    scheduler = hosted([3, 7, 5], (0, 0, 0))
    scheduler.regroup((0,), (0,), (0,))
    assert_array_equal(scheduler.hosts, [0, 0, 0])
