"""Which of several values is the least."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpifl.core.metric import METRICS, least

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((NAN, 0.5), 1),
        ((0.5, NAN, 0.25), 2),
        ((NAN, INF), 1),
        ((INF, NAN, INF), 0),
        ((NAN, NAN), 0),
        ((2.0, 1.0, 1.0), 1),
        ((NAN, -INF), 1),
    ],
)
def test_nan_is_never_the_least(values, expected):
    assert int(least(values)) == expected


def test_the_least_along_either_axis():
    table = np.array([[NAN, 1.0, INF], [2.0, NAN, NAN]])
    assert_array_equal(least(table, 0), [1, 0, 0])
    assert_array_equal(least(table, 1), [1, 0])


def test_errors_are_better_when_they_are_lower_and_nothing_else_is():
    lower = {name for name, metric in METRICS.items() if metric.better == -1}
    assert lower == {"mse", "mae", "rmse", "perplexity"}
    assert all(METRICS[name].better == 1 for name in METRICS.keys() - lower)
