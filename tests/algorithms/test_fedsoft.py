"""FedSoft: counts, proximal step and selection by hand, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedsoft import FedSoft, selection
from mpifl.algorithms.local import Local
from mpifl.core.federation import ClientData

CENTRES = [[0.0], [1.0], [2.0]]


def test_samples_are_counted_where_their_loss_is_lowest():
    """Ten samples: losses 1 under centre 0, 2 or 0 under centre 1, 3 under centre 2; four are better under
    centre 1.

    n_is = (6, 4, 0), and sigma n = 0.01 * 10 = 0.1 where there is none.
    """
    client = byhand.Told([[1.0] * 10, [0.0] * 4 + [2.0] * 6, [3.0] * 10])
    counts = FedSoft(num_clusters=3, sigma=0.01)._counts(torch.tensor(CENTRES), client)
    assert_allclose(counts, [6, 4, 0.1], rtol=1e-6)


def test_samples_that_no_centre_explains_count_equally():
    """Of four samples, two have NaN or infinite losses everywhere: n_is = (1 + 1, 1 + 1); batchwise (2, 2).

    Otherwise a client whose losses are all NaN would be counted for centre 0 alone.
    """
    nan, inf = float("nan"), float("inf")
    losses = [[1.0, 3.0, nan, inf], [2.0, 0.0, inf, nan]]
    with pytest.warns(UserWarning, match="no model has a finite loss for a client"):
        counts = FedSoft()._counts(torch.tensor(CENTRES[:2]), byhand.Told(losses))
    assert_allclose(counts, [2, 2])
    emdcfl = FedSoft(variant="emdcfl")
    with pytest.warns(UserWarning, match="no model has a finite loss for a client"):
        counts = emdcfl._counts(torch.tensor(CENTRES[:2]), Validated([[nan] * 4, [nan] * 4]))
    assert_allclose(counts, [2, 2])


def test_the_proximal_step_by_hand():
    """F(w) = (w - 4)^2 / 2, eta = 0.5, lambda = 0.5; c = (1, 5), u = (1/4, 3/4), w = 2.

    w <- 2 - 0.5 (2 - 4 + 0.5 (1/4 (2 - 1) + 3/4 (2 - 5))) = 2 - 0.5 (-2 - 1) = 3.5.
    """
    client = byhand.Quadratic([4.0])
    client.num_samples = 40  # others than when they were counted, a round ago: the shares stay
    counts = torch.tensor([2.5, 7.5], dtype=torch.float64)
    state = {"model": torch.tensor([2.0]), "counts": counts, "samples": torch.tensor(10)}
    method = FedSoft(num_clusters=2, lam=0.5, tau=2)
    report, new = method.local_update(byhand.message(step=2, model=[[1.0], [5.0]]), state, client, byhand.KEY)
    assert_close(new["model"], torch.tensor([3.5]))
    assert not report.notes, "no counts are due in round 2 of tau = 2"


@pytest.mark.parametrize(
    ("variant", "tau", "due"), [("paper", None, False), ("emdcfl", None, True), ("emdcfl", 2, False)]
)
def test_the_emdcfl_variant_counts_in_every_round(variant, tau, due):
    """Round 2: the paper counts in every second round, the EMD-CFL repository in each."""
    client = byhand.Told([[1.0] * 10, [2.0] * 10], val=[[1.0] * 10, [2.0] * 10])
    client.num_samples = 40  # others than when they were counted, a round ago: the shares stay
    counts = torch.tensor([2.5, 7.5], dtype=torch.float64)
    state = {"model": torch.tensor([2.0]), "counts": counts, "samples": torch.tensor(10)}
    method = FedSoft(num_clusters=2, tau=tau, variant=variant)
    report, _ = method.local_update(byhand.message(step=2, model=CENTRES[:2]), state, client, byhand.KEY)
    assert ("counts" in report.notes) == due


def test_the_pull_grows_with_the_sum_of_shares():
    """As above with u = (1/4, 1/2): 2 - 0.5 (2 - 4 + 0.5 (1/4 (2 - 1) + 1/2 (2 - 5))) = 3.3125."""
    counts = torch.tensor([2.5, 5.0], dtype=torch.float64)
    state = {"model": torch.tensor([2.0]), "counts": counts, "samples": torch.tensor(10)}
    message = byhand.message(step=2, model=[[1.0], [5.0]])
    method = FedSoft(num_clusters=2, lam=0.5, tau=2)
    _, new = method.local_update(message, state, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(new["model"], torch.tensor([3.3125]))


def test_centres_by_hand():
    """n_is: client 0 (6, 2), client 2 (2, 6); client 1 is absent. v = (6/8, 2/8) and (2/8, 6/8)."""
    method = FedSoft(num_clusters=2)
    server = byhand.server(3, {"counts": np.full((3, 2), [0.0, 9.0]), "seed": 0}, model=[[0.0], [0.0]])
    plan = method.aggregate(server, byhand.notes([8, 8], client=[0, 2], counts=[[6.0, 2.0], [2.0, 6.0]]))
    assert_allclose(plan.mixings[0].weights, [[0.75, 0.25], [0.25, 0.75]])
    assert_array_equal(plan.assign, [0, 1, 1])
    assert_array_equal(server.algorithm_state["counts"], np.full((3, 2), [0.0, 9.0]))


def test_counts_that_were_not_sent_stay():
    """Where only a newcomer counts, the other client's column is NaN and its old count is taken."""
    server = byhand.server(2, {"counts": [[1.0, 3.0], [0.0, 0.0]], "seed": 0}, model=[[0.0], [0.0]])
    plan = FedSoft().aggregate(server, byhand.notes([4, 4], counts=[[np.nan, np.nan], [3.0, 1.0]]))
    assert_allclose(plan.algorithm_state["counts"], [[1, 3], [3, 1]])


def test_selection_by_hand():
    """v = (1/2, 1/2, 0): two draws without replacement take clients 0 and 1, each 1/2 of the centre.

    v = (1/2, 1/4, 1/4), one draw: client 0 in half of the cases.
    """
    both = selection(np.array([[0.5, 0.5, 0.0]]), 2, byhand.KEY)
    assert_array_equal(both, [[1, 1, 0]])
    draws = [selection(np.array([[0.5, 0.25, 0.25]]), 1, byhand.KEY.of(i)) for i in range(2000)]
    assert_allclose(np.mean(draws, axis=0), [[0.5, 0.25, 0.25]], atol=0.04)
    method = FedSoft(num_clusters=2, selected=1)
    server = byhand.server(2, {"counts": np.zeros((2, 2)), "seed": 3}, model=[[0.0], [0.0]])
    weights = (
        method.aggregate(server, byhand.notes([8, 8], counts=[[8.0, 1e-9], [1e-9, 8.0]])).mixings[0].weights
    )
    assert_allclose(weights, np.eye(2))


class Validated(byhand.Told):
    """A client whose losses on validation samples are told; F(w) = (w - 8)^2 / 2 on its training data."""

    def __init__(self, val: list[list[float]]) -> None:
        super().__init__([], val=val)
        self.target.fill_(8.0)

    @property
    def data(self):
        return ClientData(byhand.images(0, 10), byhand.images(1, self.given[1].shape[1]), byhand.images(2, 6))


def test_emdcfl_counts_batches_of_validation_samples():
    """70 validation samples are batches of 64 and 6. The first fits centre 0 on average, although 40 of its
    samples fit centre 1; the second fits centre 1: n_is = (64, 6).

    The visit starts from (64 * 0 + 6 * 1) / 70 and has no proximal term: half way to 8.
    """
    client = Validated([[1.0] * 64 + [2.0] * 6, [0.0] * 40 + [9.0] * 24 + [1.0] * 6])
    method, message = FedSoft(variant="emdcfl"), byhand.message(model=[[0.0], [1.0]])
    report, state = method.local_update(message, {}, client, byhand.KEY)
    assert_allclose(report.notes["counts"], [64, 6])
    assert_allclose(state["counts"], [64, 6])
    assert_close(report.vectors["model"], torch.tensor([(6 / 70 + 8) / 2]))


@pytest.mark.parametrize(("n", "least"), [(70, 1), (3000, 3)])
def test_emdcfl_leaves_no_centre_without_a_thousandth_of_the_samples(n, least):
    client = Validated([[1.0] * n, [2.0] * n])
    counts = FedSoft(variant="emdcfl")._counts(torch.tensor([[0.0], [1.0]]), client)
    assert_allclose(counts, [n, least])


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedsoft_without_pull_is_local_training(participation, tmp_path):
    """For those who took part: a client that never did is evaluated by the centres."""
    fedsoft, local = (
        toy.run(a, toy.Tiny(), tmp_path / str(a), participation=participation)
        for a in (FedSoft(lam=0.0), Local())
    )
    seen = np.unique(np.concatenate([n.client for n in local.notes]))
    assert_close(fedsoft.models()[seen], local.models()[seen], rtol=1e-4, atol=2e-6)


def test_the_centre_of_one_cluster_is_the_mean_by_samples():
    plan = FedSoft(num_clusters=1).aggregate(
        byhand.server(2, {"counts": np.zeros((2, 1)), "seed": 0}, model=[[0.0]]),
        byhand.notes([1, 3], counts=[[1.0], [3.0]]),
    )
    assert_allclose(plan.mixings[0].weights, [[0.25, 0.75]])
