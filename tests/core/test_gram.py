"""What Gram matrices say, by hand."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose

from mpifl.core.gram import cosine_matrix, squared_distances


def test_cosines_come_from_products():
    """(3, 4) and (1, 0): product 3, lengths 5 and 1, cosine 3/5. The zero vector has cosine 0 with all."""
    rows = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    expected = [[1, 0.6, 0], [0.6, 1, 0], [0, 0, 0]]
    assert_allclose(cosine_matrix(rows @ rows.T), expected, atol=1e-12)


def test_squared_distances_come_from_products():
    """(3, 4) - (1, 0) = (2, 4): 4 + 16 = 20. (3, 4) to the origin: 25. (1, 0) to the origin: 1."""
    rows = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    assert_allclose(squared_distances(rows @ rows.T), [[0, 20, 25], [20, 0, 1], [25, 1, 0]])


def test_squared_distances_are_never_negative():
    """Rows that nearly coincide: without a floor, rounding makes some of these distances -1e-8."""
    rng = np.random.default_rng(0)
    rows = 1e3 * rng.normal(size=(1, 50)) + 1e-9 * rng.normal(size=(12, 50))
    squares, products = np.square(rows).sum(1), rows @ rows.T
    assert (squares[:, None] + squares - 2 * products).min() < 0
    assert (squared_distances(rows @ rows.T) >= 0).all()
