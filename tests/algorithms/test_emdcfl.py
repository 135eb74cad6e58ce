"""EMD-CFL by hand: what clients exchange, what they measure, whom they link, and the frozen groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.federation import ClientData, Split
from mpifl.core.parameters import Layout
from mpifl.core.rng import key


def linked(distance: list[list[float]], n: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, assignment and labels of EMD-CFL's first round with epsilon 0.1."""
    method, server = CATALOGUE["emdcfl"](epsilon=0.1), byhand.server(len(n), model=[[0.0]])
    peer = np.tile(np.arange(len(n)), (len(n), 1))
    plan = method.aggregate(server, byhand.notes(n, distance=distance, peer=peer))
    (mixing,) = plan.mixings
    return mixing.weights, plan.assign, plan.algorithm_state["labels"]


def test_emdcfl_averages_neighbourhoods_which_need_not_be_clusters():
    """0 ~ 1 ~ 2, not 0 ~ 2; n = 1, 2, 3: rows (1, 2, 0) / 3, (1, 2, 3) / 6, (0, 2, 3) / 5."""
    near, far = 0.05, 0.5
    weights, assign, labels = linked([[0, near, far], [near, 0, near], [far, near, 0]], [1, 2, 3])
    assert_allclose(weights, [[1 / 3, 2 / 3, 0], [1 / 6, 2 / 6, 3 / 6], [0, 2 / 5, 3 / 5]])
    assert_array_equal(assign, [0, 1, 2])
    assert_array_equal(labels, [0, 1, 2])


def test_emdcfl_links_only_where_both_are_near_and_everyone_with_itself():
    """0 finds 1 near, 1 finds 0 far; 2 and 3 are near although 3 is far from itself; 0.1 is not below 0.1."""
    distance = np.full((4, 4), 0.9)
    distance[0, 1] = distance[2, 3] = distance[3, 2] = 0.05
    distance[0, 2] = distance[2, 0] = 0.1
    distance[1, 2], distance[2, 1] = 0.05, 0.1
    weights, _, labels = linked(distance.tolist(), [1, 1, 1, 3])
    assert_array_equal(labels, [0, 1, 2, 2])
    assert_allclose(weights, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0.25, 0.75]])


class Seen(byhand.Quadratic):
    """A client whose images are told: training, validation, test; under w the embedding of x is w x."""

    def __init__(self, number: int, *splits: list[float]) -> None:
        super().__init__([1.0, 1.0], init=[0.0, 0.0])
        self.layout = Layout(("body.w", "head.weight"), ((1,), (1,)), 2, ("head",))
        self.id = number
        self._data = ClientData(
            *(Split(torch.tensor(x)[:, None], torch.zeros(len(x)).long()) for x in splits)
        )

    data = property(lambda self: self._data)

    def embed(self, vector, x, *, train_mode=False):
        return vector[0] * x


def ask(method, client: Seen, *w: float):
    """Return the question of a client whose model is `w`: extractor and head."""
    return method.ask(client, {"model": torch.tensor(w)}, byhand.KEY)


def distance(method, own: Seen, other: Seen, *w: float) -> float:
    """Return what the server finds when it compares two clients."""
    question = ask(method, own, *w)
    shown = method.show(question.shown, own.id, other.id, byhand.KEY)
    return method.compare(shown, method.answer(other, question.payload, byhand.KEY), question.notes)[
        "distance"
    ]


@pytest.mark.parametrize(("against", "found"), [("val", 8.0), ("train", 18.0)])
def test_a_client_of_emdcfl_measures_others_under_its_own_extractor(against, found):
    """Extractor 2; own images 0 and 2 in training, 1 and 3 in validation: tau = 2 |1 - 0| = 2.

    The other has 5, 7 in validation: 2 * 5 = 10, less tau 8; in training 10, 12: 20 - 2 = 18. Test images, 90
    and 99, count nowhere.
    """
    own, other = (
        Seen(0, [0.0, 2.0], [1.0, 3.0], [90.0, 90.0]),
        Seen(1, [10.0, 12.0], [5.0, 7.0], [99.0, 99.0]),
    )
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, against=against)
    assert distance(method, own, other, 2.0, 7.0) == pytest.approx(found, abs=1e-4)
    question = ask(method, own, 2.0, 7.0)
    assert_allclose(question.notes["tau"], 2.0, rtol=1e-6)
    assert_close(question.payload, torch.tensor([2.0]))
    assert_close(question.shown.abs().sort(0).values, torch.tensor([[0.0], [4.0]]))


@pytest.mark.parametrize(("tau", "found"), [("plain", [2 * 2**0.5]), ("shared", [0.0, 4.0])])
def test_emdcfl_measures_tau_on_unprojected_embeddings_if_asked(tau, found):
    """Embeddings (2 x, 2 x): unprojected |1 - 0| is 2 sqrt(2); through one column of signs it is 4 or 0."""

    class Wide(Seen):
        def embed(self, vector, x, *, train_mode=False):
            return (vector[0] * x).repeat(1, 2)

    own = Wide(0, [0.0, 2.0], [1.0, 3.0], [9.0])
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=0.5, tau=tau)
    assert any(ask(method, own, 2.0, 7.0).notes["tau"] == pytest.approx(value) for value in found)


def test_emdcfl_adds_noise_to_the_embeddings_that_are_sent():
    """A thousand zeros with noise 3: what is shown and answered has a deviation of 3, each its own."""
    own, other = Seen(0, [0.0] * 1000, [0.0], [9.0]), Seen(1, [0.0] * 1000, [0.0] * 1000, [9.0])
    own.num_samples = other.num_samples = 1000
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, noise=3.0, sample_cap=1000)
    question = ask(method, own, 1.0, 0.0)
    shown, again = (method.show(question.shown, 0, k, byhand.KEY) for k in (1, 2))
    answered = method.answer(other, question.payload, byhand.KEY)
    for noise in (shown, again, answered):
        assert float(noise.std()) == pytest.approx(3.0, rel=0.1)
    for one, two in ((answered, shown), (again, shown)):
        assert float((one - two).std()) == pytest.approx(3 * 2**0.5, rel=0.1)
    assert question.notes["tau"] == 0.0


def test_emdcfl_looks_at_no_more_images_than_its_cap():
    """Five images each, cap 3: three embeddings go to the server."""
    own, other = Seen(0, [1.0] * 5, [1.0] * 5, [9.0]), Seen(1, [4.0] * 5, [4.0] * 5, [9.0])
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, sample_cap=3)
    question = ask(method, own, 1.0, 0.0)
    assert len(question.shown) == len(method.answer(other, question.payload, byhand.KEY)) == 3
    assert distance(method, own, other, 1.0, 0.0) == pytest.approx(3.0, abs=1e-4)


@pytest.mark.parametrize(("share", "sent"), [(1.0, 20), (0.25, 7), (0.01, 2)])
def test_emdcfl_takes_a_share_of_a_clients_images(share, sent):
    """Of 20 images in training and 8 in validation 0.25 are 7, and two are the least; no cap of 512."""
    own, other = Seen(0, [1.0] * 20, [1.0] * 8, [9.0]), Seen(1, [4.0] * 20, [4.0] * 8, [9.0])
    own.num_samples = other.num_samples = 20
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, sample_share=share)
    question = ask(method, own, 1.0, 0.0)
    assert len(question.shown) == sent
    assert len(method.answer(other, question.payload, byhand.KEY)) == min(sent, 8)


@pytest.mark.parametrize(
    ("looks", "pairs"),
    [
        ("together", [[False, False, False], [False, False, True], [False, True, False]]),
        ("once", [[False, False, True], [False, False, True], [True, True, False]]),
        ("seen", [[True] * 3] * 3),
    ],
)
def test_pairs_of_emdcfl_look_once_and_in_the_repository_again_and_again(looks, pairs):
    """0 and 1 have looked at each other; now 1 and 2 take part, 0 was seen before."""
    W = np.full((4, 4), np.nan)
    W[:2, :2] = [[0, 0.3], [0.2, 0]]
    server = byhand.server(4, {"distance": W}, model=[[0.0]])
    clients, fresh = np.array([0, 1, 2]), np.array([False, True, True])
    assert_array_equal(CATALOGUE["emdcfl"](looks=looks).pairs(server, clients, fresh), pairs)


def test_what_pairs_of_emdcfl_found_once_counts_for_ever():
    """0 ~ 1 were found near in round 1; round 2 adds 1 ~ 2, 0 is absent. 0 and 2 have not met, 3 nobody."""
    W = np.full((4, 4), np.nan)
    W[:2, :2] = [[0, 0.01], [0.01, 0]]
    server = byhand.server(4, {"distance": W}, version=1, model=[[0.0]])
    nobody = [np.nan] * 3
    new, peer = [nobody, [np.nan, 0, 0.02], [np.nan, 0.02, 0]], [nobody, [0, 1, 2], [0, 1, 2]]
    notes = byhand.notes([1, 1, 2], [0, 1, 2], distance=new, peer=peer)
    plan = CATALOGUE["emdcfl"](epsilon=0.1).aggregate(server, notes)
    found = plan.algorithm_state["distance"]
    assert_allclose(found[:3, :3], [[0, 0.01, np.nan], [0.01, 0, 0.02], [np.nan, 0.02, 0]])
    assert np.isnan(found[3]).all()
    assert_array_equal(
        plan.algorithm_state["linked"], [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    )
    assert "frozen" not in plan.algorithm_state


def test_emdcfl_finds_the_groups_and_freezes_them(tmp_path):
    done = toy.run(CATALOGUE["emdcfl"](epsilon=0.1), toy.Tiny(), tmp_path)
    assert_array_equal(done.server.algorithm_state["labels"], [0, 0, 0, 1, 1, 1])
    W = done.server.algorithm_state["distance"]
    assert_array_equal(np.diag(W), 0)
    assert W[:3, :3].max() < 0.1 < W[:3, 3:].min()
    assert "distance" not in done.notes[1].columns, "one look is enough"
    assert_array_equal(W, np.round(W, 4))


def test_the_projection_of_emdcfl_has_rows_of_unit_length_and_belongs_to_its_client():
    from mpifl.algorithms.emdcfl import _projection

    R = _projection(40, 36, key(0, "ask", 1))
    assert R.shape == (40, 36)
    assert_close(R.norm(dim=1), torch.ones(40))
    assert_close(R, _projection(40, 36, key(0, "ask", 1)), rtol=0, atol=0)
    assert float((R - _projection(40, 36, key(0, "ask", 2))).abs().max()) > 0.1


def test_emdcfl_with_samples_at_the_server_finds_the_same_and_sends_them_once(tmp_path):
    """Section 3.1, O(C |w|): six clients of 8, 11, 14, 17, 8, 11 training and 6 validation images [1, 4, 4].

    All of them enter; without a projection, distances do not depend on R. Nothing goes in pairs, tau is
    found by the server, and the images go up once: 4 * 16 * (69 + 36) bytes.
    """
    options = {"epsilon": 0.1, "projection": 1.0, "metric": "euclidean"}

    class Plain(CATALOGUE["emdcfl"]):
        def _own_projection(self, e, key):
            return torch.eye(e)

    found = {}
    for samples in ("clients", "server"):
        method = Plain(**options, samples=samples)
        found[samples] = toy.run(method, toy.Tiny(), tmp_path / samples, steps=2, evaluate=False)
    W = [done.server.algorithm_state["distance"] for done in found.values()]
    assert_allclose(W[1], W[0], atol=1e-3)
    ledger = found["server"].server_step.ledger.rows()
    assert {row["name"] for row in ledger} == {"model", "samples"}
    (sent,) = (row for row in ledger if row["name"] == "samples")
    assert (sent["direction"], sent["step"], sent["messages"]) == ("up", 1, 6)
    assert sent["bytes"] == 4 * 16 * (8 + 11 + 14 + 17 + 8 + 11 + 6 * 6)


def test_samples_at_the_server_are_those_of_the_first_visit_and_always_the_same(tmp_path):
    """Four clients whose data change come in turns; each stores once, and is compared by what it stored."""
    seen = {}

    class Watched(CATALOGUE["emdcfl"]):
        def _sample(self, client, split, key):
            x = super()._sample(client, split, key)
            seen.setdefault((client.id, split), []).append(x)
            return x

    method = Watched(samples="server", sample_cap=4, looks="seen")
    done = toy.run(method, toy.Drifting(4), tmp_path, steps=4, evaluate=False, participation=0.5)
    assert sum(row["messages"] for row in done.server_step.ledger.rows() if row["name"] == "samples") == len(
        {k for k, _ in seen}
    )
    for (k, split), every in seen.items():
        assert len(every) > 1
        data = getattr(toy.Drifting(4).client(k), split).x
        for x in every:
            assert torch.equal(x, every[0])
        assert all(any(torch.equal(image, other) for other in data) for image in every[0])


def test_emdcfl_without_sent_embeddings_has_no_noise_on_them():
    method = CATALOGUE["emdcfl"](samples="server", noise=3.0)
    assert "noise" in method.ignored_options()
    assert_close(method.show(torch.zeros(2, 2), 0, 1, byhand.KEY), torch.zeros(2, 2))
    assert "noise" not in CATALOGUE["emdcfl"](noise=3.0).ignored_options()
