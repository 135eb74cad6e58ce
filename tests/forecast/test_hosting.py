"""Groups of clients that workers host: their sizes, and what they cost in balance, before a run."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.runs import CONFIG

from mpifl.algorithms.registry import CATALOGUE
from mpifl.cli import main
from mpifl.experiment.schema import SystemConfig
from mpifl.forecast.hosting import group_of_most, groups_of, round_balance
from mpifl.forecast.time import Ranks
from mpifl.training.per_client import LocalChanges

TINY = str(CONFIG)


def context_of(**changes):
    """Return the context of six clients with 8, 11, 14, 17, 8 and 11 samples."""
    return toy.context_of(toy.config_of(CATALOGUE["fedavg"](), **changes), toy.Tiny())


def test_groups_are_those_of_the_scheduler_by_hand():
    """17 to rank 1, 14 to 2, 11 (client 1) to 2 (25), 11 (5) to 1 (28), 8 (0) to 2 (33), 8 (4) to 1 (36)."""
    groups = groups_of(context_of(), 3)
    assert [*groups.ranks] == [1, 2]
    assert_array_equal(groups.clients, [3, 3])
    assert_array_equal(groups.samples, [36, 33])
    assert_allclose(groups.work, [36, 33])
    assert groups.busiest == pytest.approx(36 / 34.5)
    assert groups.lines()[1].split() == ["1", "3", "36", f"{36 / 34.5:.3f}"]
    assert_array_equal(group_of_most(context_of(), 3), [3, 4, 5])


def test_work_is_samples_times_the_length_of_the_training():
    """Client 0 trains five epochs: 40, so it alone is more than the others of a worker."""
    groups = groups_of(context_of(per_client={"0": LocalChanges(epochs=5)}), 3)
    assert_allclose(sorted(groups.work), [50, 51])


def test_the_balance_of_a_round_by_hand():
    """All clients: 36 and 33 either way. Of a round of one client, one of two workers has everything."""
    for hosting in ("any", "groups"):
        assert round_balance(context_of(), 3, hosting) == pytest.approx(36 / 34.5)
        assert round_balance(context_of(cohort_size=1), 3, hosting) == 2.0
    pairs = context_of(cohort_size=2, rounds=40)
    assert round_balance(pairs, 3, "any") < 1.25 < round_balance(pairs, 3, "groups") < 2
    cohorts = [pairs.sampler(step) for step in range(1, 41)]
    host = np.array([2, 2, 2, 1, 1, 1])
    sizes = np.array([8, 11, 14, 17, 8, 11])
    loads = [np.bincount(host[c], sizes[c], 3)[1:] for c in cohorts]
    assert round_balance(pairs, 3, "groups") == pytest.approx(np.mean([x.max() / x.mean() for x in loads]))


def test_visits_of_hosted_clients_wait_for_their_host_in_a_forecast():
    """Four visits of a second, all of clients of rank 1; rank 2 is idle."""
    ranks, free = Ranks(3), Ranks(3)
    for number in range(4):
        ranks.submit(number, 0.0, 1.0, host=1)
        free.submit(number, 0.0, 1.0)
    for number in range(4):
        ranks.result(number)
        free.result(number)
    assert (ranks.now, free.now) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("ranks", "line"), [("4", "groups of 2 to 3 (median 3) clients"), ("2", "one worker hosts all clients")]
)
def test_the_plan_shows_the_groups(ranks, line, capsys):
    assert main(["plan", TINY, "--system.hosting", "groups", "--system.ranks", ranks]) == 0
    page = capsys.readouterr().out
    assert line in page
    assert ("in a round" in page) == (ranks == "4")
    assert main(["plan", TINY, "--system.ranks", ranks]) == 0
    assert "hosting" not in capsys.readouterr().out


def test_a_worker_of_a_plan_holds_its_share_of_the_samples(tmp_path):
    """The samples of ten equal groups are copied and kept as tensors: a tenth of each."""
    from mpifl.comm.single import Single
    from mpifl.experiment import loader
    from mpifl.experiment.build import build
    from mpifl.forecast.memory import _sample_bytes, _visited_share

    options = ["--data.scenario", "{name: iid, clients: 20}", "--participation", "1", "--rounds", "50"]
    any_worker, hosted = (
        build(loader.load(TINY, [*options, "--system.hosting", hosting]), Single())
        for hosting in ("any", "groups")
    )
    share = _visited_share(hosted, 10)
    assert share == pytest.approx(0.1)
    held = _sample_bytes(hosted, share, 10)
    assert held < 0.2 * _sample_bytes(any_worker, _visited_share(any_worker, 10), 10)
    finished, own = hosted.federation.hosted_bytes(group_of_most(hosted, 11), 10)
    assert held == pytest.approx(own + finished, rel=0.01)
    assert SystemConfig().hosting == "any"
