"""UCFL: what becomes of sigma as its batches grow, and how many streams there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms.test_hard_clustering import gram, world
from numpy.testing import assert_allclose
from support import byhand

from mpifl.algorithms.ucfl import UCFL
from mpifl.core.errors import UserError
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


def test_sigma_falls_to_zero_as_a_batch_grows_to_all_samples():
    """A mean of b of n = 12 samples drawn without putting back has variance S^2 / b (1 - b / n), S^2 = 13.

    One batch of 8 is no reason to be alone; one of 12 is: the paper's limit.
    """
    found = {b: np.mean([sigma2(b, draw) for draw in range(3000)]) for b in (2, 6, 8, 11, 12)}
    assert_allclose(
        [found[b] for b in (2, 6, 8, 11)], [13 / b * (1 - b / 12) for b in (2, 6, 8, 11)], rtol=0.1
    )
    assert found[12] == 0.0


# ---- how many streams

PLACES = [[0.0], [0.1], [4.0], [4.1], [30.0], [30.1]]  # gradients: three pairs, two of them near each other


def streams(**options) -> tuple[int, dict[int, float]]:
    """Return m_t and all s_k of six users whose collaboration is W ~ exp(-Delta / 16)."""
    fingerprints = byhand.notes([5] * 6, gram=gram(PLACES), variance=[8.0] * 6)
    method = UCFL(streams=-1, noise_batch=2, **options)
    method.check(world([5] * 6))
    server = method.setup(world([5] * 6), fingerprints, byhand.KEY)
    scores = {int(k): float(s) for k, s in server.algorithm_state["silhouette"]}
    assert len(np.unique(server.assign)) == len(server.algorithm_state["weights"])
    return len(server.algorithm_state["weights"]), scores


def test_without_a_cost_the_silhouette_chooses():
    """Three pairs: s_3 is the largest."""
    found, s = streams()
    assert found == max(s, key=s.get) == 3
    assert set(s) == {2, 3, 4, 5}


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
        "nothing = lambda k, s: float('nan')\n"
        "stumbling = lambda k, s: 1 / 0\n"
    )
    return path


def test_a_function_of_the_users_own_chooses(file):
    _, s = streams()
    assert streams(tradeoff=f"{file}:four")[0] == 4
    values = {k: v / k for k, v in s.items()}
    assert streams(tradeoff=f"{file}:thrifty")[0] == max(values, key=values.get)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "return a finite number"),
        ("stumbling", "ZeroDivisionError"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_function_that_does_not_serve_is_refused_before_the_run(file, name, why):
    with pytest.raises(UserError, match=why) as error:
        UCFL(streams=-1, tradeoff=f"{file}:{name}").check(world([5] * 6))
    assert error.value.key == "tradeoff"


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
    with pytest.raises(UserError) as error:
        UCFL(**options)
    assert error.value.key == key_
