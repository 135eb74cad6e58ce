"""FLT and PCA+kM+HC by hand: what a client sends, who is related to whom, and how newcomers are taken in."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms import pca_km_hc
from mpifl.algorithms.flt import FLT
from mpifl.algorithms.pca_km_hc import PCAKMHC
from mpifl.algorithms.registry import CATALOGUE
from mpifl.clustering.server_plans import linked_clients, related_plan, related_server
from mpifl.clustering.umap_projection import umap_plane
from mpifl.core.algorithm import apply_plan
from mpifl.core.client import Trained
from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData, Split
from mpifl.core.parameters import Layout, width
from mpifl.core.types import ProblemInfo
from mpifl.forecast.traffic import forecast
from mpifl.training.config import LocalConfig

HEAD = Layout(("head.weight",), ((2, 1),), 2, num_outputs=2)  # of the model: two classes
CODER = Layout(("encoder.w", "decoder.w"), ((1,), (1,)), 2)


def world(n: list[int], public: tuple = ()) -> ProblemInfo:
    """Return a federation of clients with `n` samples."""
    return ProblemInfo(len(n), 2, np.array(n), HEAD, lambda j: torch.full((2,), float(j)), public=public)


class Coder(byhand.Quadratic):
    """The autoencoder of a client: training adds 10 an epoch to its two numbers, the code of x is w_encoder
    x.
    """

    def __init__(self, data: ClientData) -> None:
        super().__init__([0.0, 0.0], init=[7.0, 8.0])
        self.layout, self._data, self.calls = CODER, data, []

    data = property(lambda self: self._data)

    def sgd(self, start, key, *, loss=None, split=None, **changes):
        self.calls.append((start, key, loss, split, changes))
        return Trained(start + 10.0 * changes["epochs"], 1, 0.0, changes["lr"])

    def embed(self, vector, x, *, train_mode=False):
        return vector[0] * x


class Encoding(byhand.Quadratic):
    """A client with an autoencoder; training images 1, 2, 5 with labels 0, 0, 1."""

    def __init__(self) -> None:
        super().__init__([0.0])
        x, y = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([0, 0, 1])
        self._data = ClientData(Split(x, y), Split(x + 50, y), Split(x + 90, y))
        self.layout, self.auxiliary = HEAD, Coder(self._data)

    data = property(lambda self: self._data)
    auxiliary = None


# ---- what a client sends


def test_the_autoencoder_is_trained_as_the_paper_says_whatever_the_classifier_takes():
    """No mirrored images, no bfloat16; `local` says how clients train their models."""
    client = Encoding()
    FLT(code=1).fingerprint(client, {"autoencoder": torch.tensor([[3.0, 4.0]])}, byhand.KEY)
    changes = client.auxiliary.calls[0][-1]
    fixed = {f.name for f in fields(LocalConfig)} - {"steps", "gamma", "keep_optimizer", "trainer"}
    assert fixed <= set(changes)
    assert (changes["augment"], changes["precision"]) == ("none", "float32")


def test_a_client_tunes_the_servers_autoencoder_and_sends_the_centroids_of_its_codes():
    """Shown (3, 4), 5 epochs: (53, 54). Codes of the training images 1, 2, 5: 53, 106, 265, each its own
    centroid of at most five; nothing is known of the other two.
    """
    client = Encoding()
    report = FLT(code=1).fingerprint(client, {"autoencoder": torch.tensor([[3.0, 4.0]])}, byhand.KEY)
    nan = np.nan
    assert_allclose(report.notes["centroids"], [[53.0], [106.0], [265.0], [nan], [nan]])
    ((start, _, _, split, how),) = client.auxiliary.calls
    assert_close(start, torch.tensor([3.0, 4.0]))
    assert split is None, "it trains on its own training data"
    expected = {"optimizer": "adam", "lr": 1e-3, "epochs": 5, "batch_size": 32, "weight_decay": 0.0}
    assert {name: how[name] for name in expected} == expected


def test_without_tuning_a_client_downloads_the_encoder_only():
    """Shown 3: the decoder stays the initial 8; codes 3, 6, 15."""
    client = Encoding()
    method = FLT(code=1, finetune_epochs=0, centroids=3)
    report = method.fingerprint(client, {"autoencoder": torch.tensor([[3.0]])}, byhand.KEY)
    assert_allclose(report.notes["centroids"], [[3.0], [6.0], [15.0]])
    assert_close(client.auxiliary.calls[0][0], torch.tensor([3.0, 8.0]))
    assert client.auxiliary.calls[0][4]["epochs"] == 0


def test_a_client_may_send_a_centroid_for_each_of_its_classes():
    """Two labels, codes 1, 2, 5 times 3: centroids 4.5 and 15; room for the two classes of the model."""
    method = FLT(code=1, finetune_epochs=0, centroids=0)
    report = method.fingerprint(Encoding(), {"autoencoder": torch.tensor([[3.0]])}, byhand.KEY)
    assert_allclose(report.notes["centroids"], [[4.5], [15.0]])


@pytest.mark.parametrize(("tuning", "shown"), [(5, [[257.0, 258.0]]), (0, [[257.0]])])
def test_the_server_trains_the_autoencoder_on_all_of_its_own_images(tuning, shown):
    """From the initial (7, 8), 25 epochs: (257, 258); sets of three images each. Without tuning only the
    encoder is sent.
    """
    public = tuple(Encoding() for _ in range(2))
    method = FLT(code=1, finetune_epochs=tuning)
    assert_close(method.shows(world([1], public), byhand.KEY)["autoencoder"], torch.tensor(shown))
    ((start, _, _, split, how),) = public[0].auxiliary.calls
    assert_close(start, torch.tensor([7.0, 8.0]))
    assert_close(split.x[:, 0], torch.tensor([1.0, 2.0, 5.0, 1.0, 2.0, 5.0]))
    assert how["epochs"] == 25
    assert not public[1].auxiliary.calls


@pytest.mark.parametrize("name", ["mse", "bce"])
def test_the_autoencoder_is_trained_to_give_its_input_back(name):
    """x = 0.5 becomes 0.25: (0.25)^2, or -(ln 0.25 + ln 0.75) / 2. Labels do not matter."""
    client = Encoding()
    FLT(code=1, loss=name).fingerprint(client, {"autoencoder": torch.tensor([[3.0, 4.0]])}, byhand.KEY)
    loss = client.auxiliary.calls[0][2]
    value = loss(lambda x: x / 2, torch.tensor([[0.5]]), torch.tensor([1]), torch.tensor([0]))
    assert_allclose(float(value), 0.0625 if name == "mse" else -np.log(0.25 * 0.75) / 2, rtol=1e-6)


# ---- who is related: the plane shrinks codes by ten


@pytest.fixture
def planes(monkeypatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Let the plane be a tenth of the codes; return what it was fitted to and what was placed on it."""
    calls = []

    def plane(points, new):
        calls.append((points, new))
        return np.vstack([points, new]) / 10

    monkeypatch.setattr("mpifl.algorithms.flt.umap_plane", plane)
    return calls


def related(method: FLT, *clouds: list[float]) -> np.ndarray:
    """Return who is linked among clients with these centroids, of one number each."""
    width = max(map(len, clouds))
    told = np.array([c + [np.nan] * (width - len(c)) for c in clouds])[:, :, None]
    server = method.setup(
        world([1] * len(clouds)), byhand.notes([1] * len(clouds), centroids=told), byhand.KEY
    )
    assert_array_equal(server.algorithm_state["centroids"], told)
    return server.algorithm_state["linked"]


def test_those_near_on_the_plane_are_related_and_not_those_far_away(planes):
    """{0, 30}, {3, 34}, {60, 90}: on the plane 0.3 and 0.4 apart, matched: 0.5 / 2 = 0.25; the third is 6
    away.
    """
    assert_array_equal(related(FLT(), [0, 30], [3, 34], [60, 90]), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    assert_array_equal(planes[0][0][:, 0], [0, 30, 3, 34, 60, 90])


def test_a_distance_of_gamma_does_not_relate(planes):
    """Single centroids 0, 10, 19: 1 and 0.9 apart on the plane."""
    assert_array_equal(related(FLT(gamma=1.0), [0], [10], [19]), [[1, 0, 0], [0, 1, 1], [0, 1, 1]])


@pytest.mark.parametrize(("distance", "linked"), [("matching", 0), ("closest", 1)])
def test_clients_that_share_one_centroid_are_related_by_the_closest_pair_only(distance, linked, planes):
    """{0, 3} and {0, -3} on the plane: closest 0. Matched at least cost, 0 with -3 and 3 with 0: sqrt(18) /
    2.
    """
    assert_array_equal(related(FLT(distance=distance), [0, 30], [0, -30]), [[1, linked], [linked, 1]])


def test_clients_with_fewer_centroids_are_compared_by_those_they_have(planes):
    """{0, 50} and {2}: one is matched, 0.2 apart. Nothing that is no number reaches the plane."""
    assert_array_equal(related(FLT(), [0, 50], [2]), [[1, 1], [1, 1]])
    assert_array_equal(planes[0][0][:, 0], [0, 50, 2])


def test_flt_in_its_second_case_averages_inside_ward_clusters(planes):
    """0 ~ 1 ~ 2 in a chain, 3 ~ 4 apart: case I keeps the chain, case II with C = 2 joins all three."""
    clouds = [0.0], [8.0], [16.0], [50.0], [52.0]
    chain = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    assert_array_equal(related(FLT(), *clouds)[:3, :3], chain)
    linked = related(FLT(case="ward", num_clusters=2), *clouds)
    assert_array_equal(linked[:3, :3], np.ones((3, 3)))
    assert_array_equal(linked[3:, :3], np.zeros((2, 3)))


def test_newcomers_of_flt_are_placed_on_the_plane_of_the_founders(planes):
    """Founders 1, 3 and 5 of six at 0, 40 and 200. First comes 4 at 42: it joins 3. Then 0 and 2 at 5 and 90:
    0 joins 1, 2 is alone and starts from the initial model.
    """
    n, method = [1] * 6, FLT()
    fingerprints = byhand.notes([1, 1, 1], client=[1, 3, 5], centroids=[[[0.0]], [[40.0]], [[200.0]]])
    server = method.setup(world(n), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [3, 0, 3, 1, 3, 2])
    assert_array_equal(server.algorithm_state["founders"], [1, 3, 5])

    first = method.assign_new_clients(server, byhand.notes([1], client=[4], centroids=[[[42.0]]]))
    assert_array_equal(first.assign, [3, 0, 3, 1, 1, 2])
    assert_array_equal(first.mixings[0].keep, np.eye(4))
    server = apply_plan(server, first, server.tables)
    plan = method.assign_new_clients(
        server, byhand.notes([1, 1], client=[0, 2], centroids=[[[5.0]], [[90.0]]])
    )
    assert_array_equal(plan.assign, [0, 0, 1, 2, 2, 3])
    assert_array_equal(plan.mixings[0].keep, np.eye(4)[[0, 3, 1, 2, 3]])
    assert_array_equal(plan.algorithm_state["known"], [1] * 6)
    assert_allclose(plan.algorithm_state["centroids"][:, 0, 0], [5, 0, 90, 40, 42, 200])
    for points, new, later in zip(*zip(*planes, strict=True), [[], [42], [5, 90, 42]], strict=True):
        assert_array_equal(points[:, 0], [0, 40, 200])
        assert_array_equal(new[:, 0], later)
    assert_array_equal(method.new_clients(server, np.arange(5)), [0, 2])


@pytest.mark.nightly
def test_flt_on_the_real_plane():
    """Two groups of four initial clients around points 20 apart in eight dimensions, five centroids
    each; then a new client of each group, which joins its own.
    """
    rng = np.random.default_rng(0)
    group = np.array([0, 1, 0, 1, 0, 1, 0, 1, 1, 0])
    codes = np.where(group[:, None, None], 20.0, 0.0) + rng.normal(size=(10, 5, 8))
    method = FLT(gamma=3.0)
    server = method.setup(world([1] * 10), byhand.notes([1] * 8, centroids=codes[:8]), byhand.KEY)
    same = group[:, None] == group[None, :]
    assert_array_equal(server.algorithm_state["linked"][:8, :8], same[:8, :8])
    plan, again = (
        method.assign_new_clients(server, byhand.notes([1, 1], client=[8, 9], centroids=codes[8:]))
        for _ in range(2)
    )
    assert_array_equal(plan.algorithm_state["linked"], same)
    assert_array_equal(plan.assign, group)
    assert_array_equal(again.algorithm_state["linked"], same)


@pytest.mark.parametrize(("clients", "size", "plane"), [([0], 2, False), ([0, 1], 2, False), ([0], 1, True)])
def test_a_plane_needs_three_points_unless_there_is_one_alone(clients, size, plane, planes):
    """One centroid each: a newcomer cannot be placed on the plane of one point; two points have no plane."""
    notes = byhand.notes([1] * len(clients), centroids=np.zeros((len(clients), 1, 2)))
    method = FLT(centroids=1)
    if plane:
        assert method.setup(world([1] * size), notes, byhand.KEY).tables["model"].shape[0] == 2
    else:
        with pytest.raises(UserError, match=rf"algorithm\.centroids = 1: .* through {len(clients)} point"):
            method.setup(world([1] * size), notes, byhand.KEY)


@pytest.mark.nightly
def test_the_real_plane_is_the_same_at_every_call():
    points = np.random.default_rng(1).normal(size=(20, 4))
    assert_array_equal(umap_plane(points[:15], points[15:]), umap_plane(points[:15], points[15:]))


# ---- PCA+kM+HC


def sent(x: list[list[float]], **options: int) -> np.ndarray:
    """Return the centroids that a client with training images `x` [n, D] sends."""
    train = Split(torch.tensor(x)[:, None, None, :], torch.zeros(len(x)).long())
    other = Split(100 * torch.ones(4, 1, 1, 2), torch.zeros(4).long())
    client = SimpleNamespace(data=ClientData(train, other, other), report=lambda notes: notes)
    return PCAKMHC(**options).fingerprint(client, {}, byhand.KEY)["centroids"]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_scores_are_centred_and_the_largest_is_positive(sign, order):
    """Images t (0.6, 0.8) for t = 0, 0, 6, or their negatives: scores t - 2 = -2, -2, 4 along the line,
    whatever the direction that the decomposition took; two centroids, -2 and 4.
    """
    x = [[sign * 0.6 * t, sign * 0.8 * t] for t in (0.0, 0.0, 6.0)]
    found = sent([x[i] for i in order], components=1, centroids=2)
    assert_allclose(sorted(found[:, 0]), [-2, 4], atol=1e-6)


def test_scores_are_along_the_widest_directions_of_the_clients_own_images():
    """Widths 3 along the second pixel and 1 along the first: scores (3, 0), (-3, 0), (0, 1), (0, -1), signs
    apart.
    """
    found = sent([[0.0, 3.0], [0.0, -3.0], [1.0, 0.0], [-1.0, 0.0]], components=2, centroids=4)
    assert_allclose(np.abs(found).round(6), [[3, 0], [3, 0], [0, 1], [0, 1]], atol=1e-6)
    narrow = sent([[0.0, 3.0], [0.0, -3.0], [1.0, 0.0], [-1.0, 0.0]], components=1, centroids=4)
    assert narrow.shape == (4, 1)


def test_a_client_with_fewer_images_than_components_repeats_them():
    """Two images of three pixels, 2 apart: scores 1 and -1 on the first of three components; of five
    centroids three are unknown.
    """
    found = sent([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], components=9, centroids=5)
    assert_allclose(np.abs(found[:2]), [[1, 0, 0], [1, 0, 0]], atol=1e-6)
    assert np.isnan(found[2:]).all()
    assert found.shape == (5, 3), "no more components than pixels"


def test_a_threshold_that_is_just_met_does_not_relate():
    fingerprints = byhand.notes([1] * 3, centroids=[[[0.0]], [[0.5]], [[0.9]]])
    server = PCAKMHC(threshold=0.5).setup(world([1] * 3), fingerprints, byhand.KEY)
    assert_array_equal(server.algorithm_state["linked"], [[1, 0, 0], [0, 1, 1], [0, 1, 1]])


def test_newcomers_of_pca_are_related_to_all_who_are_known():
    """Known are 0 and 3 at 0 and 9; 1 comes at 0.5 and joins 0, 2 at 5 is alone and starts from the initial
    model.
    """
    method = PCAKMHC(threshold=1.0)
    fingerprints = byhand.notes([1, 1], client=[0, 3], centroids=[[[0.0]], [[9.0]]])
    server = method.setup(world([1] * 4), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 2, 2, 1])
    plan = method.assign_new_clients(
        server, byhand.notes([1, 1], client=[1, 2], centroids=[[[0.5]], [[5.0]]])
    )
    assert_array_equal(plan.assign, [0, 0, 1, 2])
    assert_array_equal(plan.mixings[0].keep, [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]])
    assert_allclose(plan.algorithm_state["centroids"][:, 0, 0], [0, 0.5, 5, 9])
    assert_array_equal(plan.algorithm_state["known"], [1] * 4)


# ---- table 6


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("tuning", [0, 1])
def test_the_bytes_of_a_run_are_those_of_the_papers_formulas(tuning):
    """Table 6, numbers of 4 bytes: FLT N W_enc + k N e once, then 2 rho N W T; FedSEM 2 rho N W T; IFCA rho N
    W T (C + 1), and the choice of each participant. Who tunes the autoencoder downloads its decoder, too.
    """
    N, m, T, C, k, e = 6, 3, 4, 3, 2, 8
    methods = {
        "flt": FLT(centroids=k, code=e, pretrain_epochs=1, finetune_epochs=tuning),
        "fesem": CATALOGUE["fesem"](num_clusters=C),
        "ifca": CATALOGUE["ifca"](num_clusters=C),
    }
    total, W, W_enc = {}, 0, 0
    for name, method in methods.items():
        config = toy.config_of(method, rounds=T, participation=0.5)
        context = toy.context_of(config, toy.Tiny(N))
        total[name], W = forecast(context).total, context.problem.layout.size
        if name == "flt":
            layout = context.problem.public[0].auxiliary.layout
            W_enc = width(layout.part("all" if tuning else "encoder"))
    assert total["flt"] == (4 * (N * W_enc + m * W * T), 4 * (k * N * e + m * W * T))
    assert total["fesem"] == (4 * m * W * T, 4 * m * W * T)
    assert total["ifca"] == (4 * m * W * T * C, 4 * (m * W * T + m * T))


# ---- averages and clusters


def test_flt_averages_over_related_clients_with_the_models_of_the_absent():
    """0 ~ 1 ~ 2, not 0 ~ 2; n = 1, 2, 3; client 2 was never there: it counts with the initial model, 3 / 5
    and 3 / 6.

    Without the absent: (1, 2) / 3 for rows 0 and 1, and client 1 alone for row 2.
    """
    linked = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)
    server = related_server(byhand.problem([1, 2, 3]), np.arange(3), linked)
    assert_array_equal(server.assign, [0, 1, 2])
    (mixing,) = related_plan(server, byhand.notes([1, 2]), all_clients=True).mixings
    assert_allclose(mixing.weights, [[1 / 3, 2 / 3], [1 / 6, 2 / 6], [0, 2 / 5], [0, 0]])
    assert_allclose(mixing.keep[:, 3], [0, 3 / 6, 3 / 5, 1])
    (mixing,) = related_plan(server, byhand.notes([1, 2]), all_clients=False).mixings
    assert_allclose(mixing.weights, [[1 / 3, 2 / 3], [1 / 3, 2 / 3], [0, 1], [0, 0]])


@pytest.mark.parametrize("method", [FLT, PCAKMHC])
def test_a_number_of_clusters_is_refused_where_nothing_is_clustered(method):
    with pytest.raises(UserError, match="num_clusters = 3: has no effect under case full; use case ward"):
        method(num_clusters=3)
    assert method(num_clusters=3, case="ward").num_clusters == 3


@pytest.mark.parametrize("name", ["pretrain_epochs", "finetune_epochs"])
def test_a_negative_number_of_epochs_of_flt_is_refused_by_its_own_name(name):
    with pytest.raises(UserError, match=rf"^{name} = -1: "):
        FLT(**{name: -1})


def test_flts_ward_clusters_are_those_of_the_rows_of_the_relatedness():
    """Rows 110, 110, 001 have distances 0 and sqrt(3): two clusters are {0, 1} and {2}."""
    related = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool)
    expected = [[True, True, False], [True, True, False], [False, False, True]]
    assert_array_equal(linked_clients(related, "ward", 2), expected)
    assert_array_equal(linked_clients(related, "full"), related)


def test_ward_never_parts_clients_with_the_same_links():
    """Two distinct rows, four clusters asked for: two are made."""
    related = np.kron(np.eye(2), np.ones((3, 3))).astype(bool)
    assert_array_equal(linked_clients(related, "ward", 4), related)


def test_pca_links_clients_whose_centroids_match():
    """Centroids {0, 1}, {0, 1.2}, {9}: matching distances 0.1, and 8 or more to the third."""
    fingerprints = byhand.notes([1, 1, 1], centroids=[[[0.0], [1.0]], [[1.2], [0.0]], [[9.0], [np.nan]]])
    method = CATALOGUE["pca_km_hc"](threshold=0.5, case="full")
    server = method.setup(byhand.problem([1] * 3), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1])
    assert_array_equal(server.algorithm_state["linked"], [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_pca_km_hc_finds_again_what_it_would_find_if_it_measured_all_distances_again(monkeypatch):
    """Ten clients, of which three send other centroids each time: 3 x 10 matchings instead of 10 x 10."""
    random, counts, real = np.random.default_rng(2), [], pca_km_hc.matching_distance

    def matched(x, y):
        counts.append(1)
        return real(x, y)

    monkeypatch.setattr(pca_km_hc, "matching_distance", matched)
    drawn = random.normal(size=(10, 2, 3))
    kept = PCAKMHC(threshold=1.0)
    server = kept.setup(world([1] * 10), byhand.notes([1] * 10, centroids=drawn), byhand.KEY)
    for i in range(3):
        sent = byhand.notes([1] * 3, [i, 5, 9], centroids=random.normal(size=(3, 2, 3)))
        counts.clear()
        plan = kept.assign_new_clients(server, sent)
        assert len(counts) == 3 * 10
        other = PCAKMHC(threshold=1.0).assign_new_clients(server, sent)
        linked = plan.algorithm_state["linked"]
        assert_array_equal(linked, other.algorithm_state["linked"])
        assert 10 < linked.sum() < 100
        server = apply_plan(server, plan, {"model": torch.zeros(len(plan.mixings[0].keep), 1)})
