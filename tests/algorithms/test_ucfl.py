"""UCFL by hand: sigma, the kernel, mixtures, streams, and how many there are."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from support.refusal import refusal_of
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.algorithms.ucfl import UCFL
from mpifl.core.federation import ClientData, Split
from mpifl.core.rng import key

# ---- sigma


class Line(byhand.Quadratic):
    """A client of twelve samples 0, 1, ..., 11, whose gradient at w is the mean of w - x."""

    data = ClientData(*[Split(torch.arange(12.0)[:, None], torch.zeros(12).long())] * 3)

    def gradient(self, vector, split=None):
        """Return the mean of w - x."""
        return (vector - (split or self.data.train).x).mean(0)


def sigma2(noise_batch: float, draw: int) -> float:
    """Return sigma^2 of one draw of the batches."""
    client = Line([0.0])
    client.num_samples = 12
    report = UCFL(noise_batch=noise_batch).fingerprint(client, {"init": torch.zeros(1, 1)}, key(draw))
    return float(report.notes["variance"])


@pytest.mark.in_turn
def test_sigma_falls_to_zero_as_a_batch_grows_to_all_samples():
    """A mean of b of n = 12 samples drawn without putting back has variance S^2 / b (1 - b / n), S^2 = 13.

    One batch of 8 is no reason to be alone; one of 12 is: the paper's limit.
    """
    found = {b: np.mean([sigma2(b, draw) for draw in range(1000)]) for b in (2, 6, 8, 11, 12)}
    assert_allclose(
        [found[b] for b in (2, 6, 8, 11)], [13 / b * (1 - b / 12) for b in (2, 6, 8, 11)], rtol=0.1
    )
    assert found[12] == 0.0


# ---- how many streams

PLACES = [[0.0], [0.1], [4.0], [4.1], [30.0], [30.1]]  # gradients: three pairs, two of them near each other


def streams(**options) -> tuple[int, dict[int, float]]:
    """Return m_t and all s_k of six users whose collaboration is W ~ exp(-Delta / 16)."""
    fingerprints = byhand.notes([5] * 6, gram=byhand.gram(PLACES), variance=[8.0] * 6)
    method = UCFL(streams=-1, noise_batch=2, **options)
    method.check(byhand.problem([5] * 6))
    server = method.setup(byhand.problem([5] * 6), fingerprints, byhand.KEY)
    scores = {int(k): float(s) for k, s in server.algorithm_state["silhouette"]}
    assert len(np.unique(server.assign)) == len(server.algorithm_state["weights"])
    return len(server.algorithm_state["weights"]), scores


def test_without_a_cost_the_silhouette_chooses():
    """Three pairs: s_3 is the largest."""
    found, s = streams()
    assert found == max(s, key=s.get) == 3
    assert set(s) == {1, 2, 3, 4, 5, 6}


def test_a_stream_is_bought_while_it_brings_more_silhouette_than_it_costs():
    """c(k, s) = s - cost k: the third stream is taken while s_3 - s_2 > cost; s_k themselves stay."""
    _, s = streams()
    gain = s[3] - s[2]
    assert 0.01 < gain < 0.9
    for cost, expected in ((0.9 * gain, 3), (1.1 * gain, 2)):
        found, again = streams(stream_cost=cost)
        assert found == expected
        assert again == s


@pytest.fixture
def file(tmp_path):
    """Return a file with functions c(k, s)."""
    path = tmp_path / "mine.py"
    path.write_text(
        "four = lambda k, s: -abs(k - 4)\n"
        "thrifty = lambda k, s: s / k\n"
        "one = lambda k, s: -k\n"
        "all = lambda k, s: k\n"
        "nothing = lambda k, s: float('nan')\n"
        "stumbling = lambda k, s: 1 / 0\n"
    )
    return path


def test_a_function_of_the_users_own_chooses(file):
    _, s = streams()
    assert streams(tradeoff=f"{file}:four")[0] == 4
    values = {k: v / k for k, v in s.items()}
    assert streams(tradeoff=f"{file}:thrifty")[0] == max(values, key=values.get)
    assert streams(tradeoff=f"{file}:one")[0] == 1, "FedAvg"
    assert streams(tradeoff=f"{file}:all")[0] == 6, "a stream for each user"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "return a finite number"),
        ("stumbling", "ZeroDivisionError"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_function_that_does_not_serve_is_refused_before_the_run(file, name, why):
    with refusal_of("tradeoff", why):
        UCFL(streams=-1, tradeoff=f"{file}:{name}").check(byhand.problem([5] * 6))


@pytest.mark.parametrize(
    ("options", "key_"),
    [
        ({"stream_cost": 0.1}, "stream_cost"),
        ({"stream_cost": 0.1, "streams": 4}, "stream_cost"),
        ({"stream_cost": -0.1, "streams": -1}, "stream_cost"),
        ({"tradeoff": "a.py:c", "streams": 4}, "tradeoff"),
        ({"tradeoff": "a.py:c", "streams": -1, "stream_cost": 0.1}, "tradeoff"),
    ],
)
def test_options_without_effect_are_refused(options, key_):
    with refusal_of(key_):
        UCFL(**options)


# ---- steps


def test_ucfls_variance_is_that_of_disjoint_batches():
    """Gradients of batches of 2 of 5 samples around the whole one: (1/2) sum_b |g_b - g|^2, b over the first
    four of a permutation; the fifth sample is in no batch.
    """

    class Client(byhand.Quadratic):
        data = ClientData(*[Split(torch.arange(5.0)[:, None], torch.zeros(5).long())] * 3)

        def gradient(self, vector, split=None):
            return (vector - (split or self.data.train).x).mean(0)

    client = Client([0.0])
    client.num_samples = 5
    k = key(3, "fingerprint", 0)
    order = k.numpy().permutation(5)
    means = [order[:2].mean(), order[2:4].mean()]
    report = CATALOGUE["ucfl"](noise_batch=2).fingerprint(client, {"init": torch.zeros(1, 1)}, k)
    assert_allclose(report.notes["variance"], np.mean([(m - 2.0) ** 2 for m in means]))
    assert_close(report.vectors["gradient"], torch.tensor([-2.0]))


def two_streams(parallel: bool = True) -> tuple[object, object]:
    """Return UCFL with two streams of three users, and its server: W = (1/2, 3/8, 1/8), (0, 1/4, 3/4)."""
    algorithm_state = {
        "collaboration": np.full((3, 3), 1 / 3),
        "weights": [[0.5, 0.375, 0.125], [0.0, 0.25, 0.75]],
    }
    server = byhand.server(3, algorithm_state, model=[[0.0], [2.0]])
    server.assign[:] = [0, 1, 1]
    return CATALOGUE["ucfl"](streams=2, parallel=parallel), server


def test_in_parallel_every_user_trains_every_stream():
    """From 0 and 2 towards 4, eta = 0.5: 2 and 3. Each stream draws batches of its own."""
    method, server = two_streams()
    assert method.reads(server, 2) == {"model": (0, 1)}
    assert method.serves(server, 2) == {"model": (1,)}
    client, keys = byhand.Quadratic([4.0]), []
    plain = client.sgd
    client.sgd = lambda w, key, **changes: (keys.append(key), plain(w, key, **changes))[1]
    report, _ = method.local_update(byhand.message(model=[[0.0], [2.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([[2.0], [3.0]]))
    assert keys == [byhand.KEY.of("stream", 0), byhand.KEY.of("stream", 1)]
    alone, server = two_streams(parallel=False)
    assert alone.reads(server, 2) == {"model": (1,)}
    report, _ = alone.local_update(byhand.message(model=[[2.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([[3.0]]))
    assert keys[2] == byhand.KEY


def test_in_parallel_a_stream_mixes_its_own_component_of_each_upload():
    """Users 0 and 2 took part: W over them is (4/5, 1/5), (0, 1). Uploads hold two components each."""
    method, server = two_streams()
    (mixing,) = method.aggregate(server, byhand.notes([1, 9], client=[0, 2])).mixings
    assert_allclose(mixing.weights, [[4 / 5, 0, 1 / 5, 0], [0, 0, 0, 1]])
    alone, server = two_streams(parallel=False)
    (mixing,) = alone.aggregate(server, byhand.notes([1, 9], client=[0, 2])).mixings
    assert_allclose(mixing.weights, [[4 / 5, 1 / 5], [0, 1]])


def test_a_users_own_mixture_is_over_those_who_took_part():
    """W row 0 is (1/2, 1/3, 1/6), row 2 is (1/4, 1/4, 1/2); users 0 and 2 took part; user 1 keeps its row."""
    W = [[1 / 2, 1 / 3, 1 / 6], [1, 0, 0], [1 / 4, 1 / 4, 1 / 2]]
    server = byhand.server(3, {"collaboration": W}, model=[[0.0]] * 3)
    (mixing,) = CATALOGUE["ucfl"]().aggregate(server, byhand.notes([1, 9], client=[0, 2])).mixings
    assert_allclose(mixing.weights, [[3 / 4, 1 / 4], [0, 0], [1 / 3, 2 / 3]])
    assert_array_equal(mixing.keep, [0, 1, 0])


@pytest.mark.parametrize(
    ("kernel", "exponent"), [("paper", [[0, -2.0], [-0.5, 0]]), ("geo", [[0, -1.0], [-1.0, 0]])]
)
def test_ucfls_kernel(kernel, exponent):
    """Gradients 0 and 2, Delta = 4; sigma^2 = 1 and 4: exponents -4 / 2 and -4 / 8, or -4 / (2 * 2) for both.

    n = 2, 6: w_01 = 3 e^x / (1 + 3 e^x), w_10 = e^x / (e^x + 3).
    """
    fingerprints = byhand.notes([2, 6], gram=byhand.gram([[0.0], [2.0]]), variance=[1.0, 4.0])
    server = CATALOGUE["ucfl"](noise_batch=1, kernel=kernel).setup(
        byhand.problem([2, 6]), fingerprints, byhand.KEY
    )
    W = np.array([1, 3]) * np.exp(exponent)
    assert_allclose(server.algorithm_state["collaboration"], W / W.sum(1, keepdims=True))


def test_ucfls_streams_are_the_means_of_rows():
    """Two pairs of equal gradients, far apart: rows (1/2, 1/2, 0, 0) and (0, 0, 1/2, 1/2); two streams are
    those.
    """
    fingerprints = byhand.notes([2] * 4, gram=byhand.gram([[0.0], [0.0], [99.0], [99.0]]), variance=[1.0] * 4)
    for streams in (2, -1):
        server = CATALOGUE["ucfl"](noise_batch=1, streams=streams).setup(
            byhand.problem([2] * 4), fingerprints, byhand.KEY
        )
        assert_array_equal(server.assign, [0, 0, 1, 1])
        assert_allclose(server.algorithm_state["weights"], [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], atol=1e-12)


@pytest.mark.parametrize(
    ("noise_batch", "alone"), [(5.0, 0), (9.0, 0), (10.0, 1), (25.0, 2), (30.0, 3), (0.5, 0), (0.75, 0)]
)
def test_ucfl_tells_how_many_clients_hold_too_few_samples_for_a_variance(noise_batch, alone):
    """10, 20 and 30 samples: of a batch that holds all samples, sigma is 0 and its client is alone."""
    fingerprints = byhand.notes([10, 20, 30], gram=byhand.gram([[0.0], [1.0], [2.0]]), variance=[1.0] * 3)
    method = CATALOGUE["ucfl"](noise_batch=noise_batch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        method.setup(byhand.problem([10, 20, 30]), fingerprints, byhand.KEY)
    assert [f"{alone} of 3 clients" in str(w.message) for w in told] == [True] * bool(alone)
    assert all("the paper's limit" in str(w.message) for w in told)


def test_new_gradients_are_compared_with_those_that_are_kept():
    """Gradients 0, 1, 3; user 2 sends 1.5 instead. Squares of distances: 0.25 to user 1, 2.25 to user 0.

    sigma^2 = 1/2 and equal samples: W_ij ~ exp(-distance^2). Two streams: users 0 and 1 had row 0, user 2 had
    row 1; now 1 and 2 are closest, and their stream starts half from each row.
    """
    apart = np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]])
    state = {"known": [True] * 3, "apart": apart, "variance": [0.5] * 3, "num_samples": [4] * 3}
    server = byhand.server(3, state, model=[[0.0], [1.0]], gradient=[[0.0], [1.0], [3.0]])
    server.assign[:] = [0, 0, 1]
    method = UCFL(streams=2, keep_gradients=True)
    sent = byhand.notes([4], client=[2], row_distance=[[1.5, 0.5, 1.5]], gram=[[2.25]], variance=[0.5])
    plan = method.assign_new_clients(server, sent)
    now = np.array([[0.0, 1.0, 2.25], [1.0, 0.0, 0.25], [2.25, 0.25, 0.0]])
    assert plan.algorithm_state is not None
    assert_array_equal(plan.algorithm_state["apart"], now)
    W = np.exp(-now) / np.exp(-now).sum(1, keepdims=True)
    assert_allclose(plan.algorithm_state["collaboration"], W)
    assert_array_equal(plan.assign, [0, 1, 1])
    kept, streams = plan.mixings
    assert_array_equal(kept.weights, [[0.0], [0.0], [1.0]])
    assert_array_equal(kept.keep, [1.0, 1.0, 0.0])
    assert_array_equal(streams.keep, [[1.0, 0.0], [0.5, 0.5]])
