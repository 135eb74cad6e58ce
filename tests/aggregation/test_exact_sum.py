"""Sums that are exact in any order: the same bits for any permutation and split, and close to the truth."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.pretended import Pretended, there

from mpifl.aggregation import exact_sum as exact
from mpifl.aggregation.exact_sum import fast_sums, finish, kept_rows, partial_sums, spacings, sums_by_device
from mpifl.core.devices import CPU, staged
from mpifl.kernels import bindings

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
weight = st.one_of(st.just(0.0), st.floats(-8.0, 8.0), st.floats(1e-30, 1e-20), st.floats(1e10, 1e20))


@st.composite
def mixtures(draw):
    """Uploads float32 [m, b] of any magnitude, zeros and denormals among them, and weights float64 [K, m]."""
    m, b, k = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    uploads = draw(st.lists(st.lists(singles, min_size=b, max_size=b), min_size=m, max_size=m))
    weights = draw(st.lists(st.lists(weight, min_size=m, max_size=m), min_size=k, max_size=k))
    return torch.tensor(uploads, dtype=torch.float32), np.array(weights, np.float64)


def grid_of(uploads: torch.Tensor, weights: np.ndarray) -> np.ndarray:
    """Return the spacing of each row."""
    return spacings(weights, uploads.abs().amax(1).numpy().astype(np.float64))


def sums_of(uploads: torch.Tensor, weights: np.ndarray, grid: np.ndarray) -> torch.Tensor:
    """Return the grid sums int64 [K, b] of one rank."""
    out = torch.full((len(weights), uploads.shape[1]), 7, dtype=torch.int64)
    return partial_sums(list(uploads), weights, grid, out)


@given(mixtures(), st.randoms(use_true_random=False))
def test_any_order_and_any_split_give_the_same_bits(mixture, random):
    uploads, weights = mixture
    grid = grid_of(uploads, weights)
    whole = sums_of(uploads, weights, grid)
    order = list(range(len(uploads)))
    random.shuffle(order)
    rank = [random.randrange(4) for _ in order]
    parts = [[j for j in order if rank[j] == r] for r in range(4)]
    total = sum(sums_of(uploads[p], weights[:, p], grid) for p in parts)
    assert torch.equal(total, whole)


@given(mixtures())
def test_the_sum_is_the_true_one_up_to_the_grid(mixture):
    """Each term is rounded once, by half a spacing at most; a product in float64 errs by 2^-53 of itself."""
    uploads, weights = mixture
    grid = grid_of(uploads, weights)
    found = sums_of(uploads, weights, grid)
    for k, row in enumerate(weights):
        for c in range(uploads.shape[1]):
            terms = [Fraction(float(w)) * Fraction(float(x)) for w, x in zip(row, uploads[:, c], strict=True)]
            slack = sum(map(abs, terms)) * Fraction(1, 2**53) + Fraction(1, 2**1074)
            allowed = len(terms) * Fraction(float(grid[k])) / 2 + slack
            assert abs(int(found[k, c]) * Fraction(float(grid[k])) - sum(terms)) <= allowed


@example((torch.ones(2, 1), np.array([[1.5, 2.0**48]])))  # log2 of their sum rounds to 48
@example((torch.ones(1, 1), np.array([[2.0**-30]])))
@given(mixtures())
def test_the_spacing_is_a_power_of_two_that_leaves_room_for_every_sum(mixture):
    uploads, weights = mixture
    grid = grid_of(uploads, weights)
    assert_array_equal(np.frexp(grid)[0], 0.5)
    bound = np.abs(weights) @ uploads.abs().amax(1).numpy().astype(np.float64)
    assert (bound <= grid * 2.0**50).all()
    assert ((bound > grid * 2.0**49) | (bound == 0) | (grid == 2.0**-951)).all(), "and no more than it takes"
    assert (bound[bound > 1e-250] >= (grid * 2.0**47)[bound > 1e-250]).all(), "coarser than it needs to be"
    assert (sums_of(uploads, weights, grid).abs() <= 2**50 + len(uploads)).all()


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_a_thousand_uploads_are_averaged_to_float32(seed):
    rng = np.random.default_rng(seed)
    uploads = torch.from_numpy(
        (rng.normal(size=(1000, 7)) * 10.0 ** rng.integers(-6, 3, (1000, 1))).astype(np.float32)
    )
    weights = rng.random((2, 1000))
    weights /= weights.sum(1, keepdims=True)
    grid = grid_of(uploads, weights)
    found = finish(sums_of(uploads, weights, grid), grid, None)
    truth = weights @ uploads.numpy().astype(np.float64)
    largest = float(uploads.abs().max())
    assert_allclose(found, truth, rtol=2.0**-23, atol=largest * 2.0**-40)


@pytest.mark.parametrize(
    ("uploads", "weights", "expected"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], [0.5, 0.5], [0.0, 0.0]),
        ([[1.0, -1.0], [2.0, 5.0]], [0.0, 0.0], [0.0, 0.0]),
        ([[3.0, 1e-30]], [1.0], [3.0, 0.0]),  # 1e-30 is below the grid of 3: 2^-48
        ([[2.0**-149, 0.0]], [1.0], [2.0**-149, 0.0]),  # the smallest denormal
        ([[2.0**-149], [2.0**-149]], [0.5, 0.5], [2.0**-149]),
        ([[3.0e38], [-3.0e38]], [1.0, 1.0], [0.0]),
        ([[3.4e38], [3.4e38]], [0.5, 0.5], [3.4e38]),
        ([[3.0e38], [3.0e38]], [1.0, 1.0], [np.inf]),  # as float32 would
        ([[1e8], [1.0], [-1e8]], [1.0, 1.0, 1.0], [1.0]),  # float32 gives 0
        ([[1.0], [1.0]], [1e-300, 1e-300], [0.0]),
    ],
)
def test_extremes(uploads, weights, expected):
    x, w = torch.tensor(uploads, dtype=torch.float32), np.array([weights])
    grid = grid_of(x, w)
    assert_array_equal(finish(sums_of(x, w, grid), grid, None)[0], np.float32(expected))


def test_weights_of_one_copy_the_upload():
    """A number of at least 2^-26 of the largest has its 24 bits on the grid: nothing is lost."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(2.0**-20, 1.0, (1, 5000)).astype(np.float32))
    grid = grid_of(x, np.eye(1))
    assert torch.equal(finish(sums_of(x, np.eye(1), grid), grid, None), x)


def test_a_rank_without_uploads_adds_nothing():
    out = torch.full((2, 3), 9, dtype=torch.int64)
    assert partial_sums([], np.zeros((2, 0)), np.ones(2), out) is out
    assert_array_equal(out, 0)


def test_narrow_scratch_does_not_change_the_bits(monkeypatch):
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(5, 5000)).astype(np.float32))
    w = rng.random((3, 5))
    grid = grid_of(x, w)
    whole = sums_of(x, w, grid)
    monkeypatch.setattr(exact, "SCRATCH", 1)  # blocks of 1024 columns
    assert torch.equal(sums_of(x, w, grid), whole)


def test_kept_rows_by_hand():
    """keep (0.5, 2) of rows 4, 3: 2, 6. Matrix (0 1; 1 1; 0 0): 3, 7, 0."""
    old = torch.tensor([[4.0], [3.0]])
    assert kept_rows(None, old) is None
    assert_array_equal(kept_rows(np.array([0.5, 2.0]), old), [[2.0], [6.0]])
    assert_array_equal(kept_rows(np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), old), [[3.0], [7.0], [0.0]])


def test_finish_adds_what_was_kept_before_rounding():
    """1 + 2^-30 - 1 is 2^-30 in float64; float32 would have lost it."""
    sums, grid = torch.tensor([[1]]), np.array([2.0**-30])
    kept = torch.tensor([[1.0]], dtype=torch.float64)
    assert float(finish(sums, grid, kept.clone() - 1)) == 2.0**-30
    assert float(finish(sums, grid, kept)) == 1.0


def test_fast_sums_agree_up_to_float32():
    rng = np.random.default_rng(2)
    x, w = torch.from_numpy(rng.normal(size=(8, 100)).astype(np.float32)), rng.random((3, 8))
    w[1, :] = 0
    found = fast_sums(list(x), w, torch.full((3, 100), np.nan))
    assert_allclose(found, w @ x.numpy(), rtol=1e-5, atol=1e-5)
    assert_array_equal(found[1], 0)


@given(mixtures(), st.sampled_from([1, 2, 8, 1 << 22]))
def test_sums_on_a_device_have_the_same_bits(mixture, scratch):
    """What runs on GPUs, here on a CPU: with scratch for one upload at a time, for some, for all."""
    uploads, weights = mixture
    grid = grid_of(uploads, weights)
    found = torch.zeros(len(weights), uploads.shape[1], dtype=torch.int64)
    with mock.patch.object(exact, "SCRATCH_THERE", scratch):
        exact._add_there(found, list(uploads), weights, exact.MAGIC * grid)
    expected = np.zeros(found.shape, np.int64)
    exact._add(expected, list(uploads.numpy()), weights, exact.MAGIC * grid)
    assert_array_equal(found, expected)
    assert torch.equal(found, sums_of(uploads, weights, grid))


@pytest.mark.parametrize("away", ["none", "some", "all"])
def test_sums_are_made_where_the_uploads_are(away):
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(6, 1000)).astype(np.float32))
    w = rng.random((3, 6)) * (rng.random((3, 6)) < 0.6)
    grid = grid_of(x, w)
    far = {"none": (), "some": (0, 2, 5), "all": range(6)}[away]
    with Pretended():
        uploads = [there(u) if j in far else u for j, u in enumerate(x)]
        parts = sums_by_device(uploads, w, grid, 1000)
        assert {p.device for p in parts} == {u.device for u in uploads}
        assert torch.equal(sum(staged(p) for p in parts), sums_of(x, w, grid))


def test_where_there_are_no_uploads_the_sums_are_zeros_in_main_memory():
    (sums,) = sums_by_device([], np.zeros((2, 0)), np.ones(2), 3)
    assert sums.device == CPU
    assert_array_equal(sums, np.zeros((2, 3)))


@gpu
@pytest.mark.parametrize(("rows", "uploads", "width"), [(1, 1, 5), (3, 7, 1000), (20, 40, 50000), (2, 0, 3)])
def test_a_gpu_adds_to_the_same_bits(rows, uploads, width):
    """Products and sums of float64 must not be contracted to one rounding, nor small numbers be flushed."""
    rng = np.random.default_rng(rows)
    x = torch.from_numpy(rng.standard_normal((uploads, width)).astype(np.float32))
    x *= 10.0 ** torch.from_numpy(rng.integers(-44, 30, (uploads, 1)))
    w = rng.standard_normal((rows, uploads)) * ((rng.random((rows, uploads)) < 0.7) | (rows == 5))
    grid = exact.spacings(w, x.abs().amax(1).numpy().astype(np.float64) if uploads else np.zeros(0))
    out = torch.empty(rows, width, dtype=torch.int64, device="cuda")
    found = partial_sums([u.cuda() for u in x], w, grid, out)
    assert torch.equal(found.cpu(), sums_of(x, w, grid))


@pytest.mark.skipif(not bindings.AVAILABLE, reason="the loops in C were not built")
@pytest.mark.parametrize(
    ("rows", "uploads", "width"), [(1, 1, 5), (3, 7, 1000), (20, 40, 9000), (5, 11, 9000), (2, 0, 3)]
)
def test_the_loops_in_c_give_the_bits_of_numpy(rows, uploads, width):
    rng = np.random.default_rng(rows + 1)
    vectors = [rng.standard_normal(width).astype(np.float32) * 10.0 ** (j % 30) for j in range(uploads)]
    weights = rng.standard_normal((rows, uploads)) * ((rng.random((rows, uploads)) < 0.7) | (rows == 5))
    grid = exact.spacings(weights, np.array([np.abs(v).max() for v in vectors]))
    found = np.full((2, rows, width), 3, np.int64)
    found[0] = 0
    exact._add(found[0], vectors, weights, exact.MAGIC * grid)
    partial_sums([torch.from_numpy(v) for v in vectors], weights, grid, torch.from_numpy(found[1]))
    assert_array_equal(found[0], found[1])
    assert found[0].any() == weights.any()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_largest_absolute_value(compiled, monkeypatch):
    monkeypatch.setattr(bindings, "AVAILABLE", compiled and bindings.AVAILABLE)
    vector = torch.randn(1003, generator=torch.Generator().manual_seed(1))
    for number in (-7.5, 9.25, -np.inf, np.inf):
        vector[500] = number
        assert exact.peak(vector) == abs(number)
        assert exact.peak(vector[::2]) == abs(number), "every other number"
    vector[3] = np.nan
    assert np.isnan(exact.peak(vector))
    assert exact.peak(torch.zeros(5)) == 0


@pytest.mark.parametrize("kept", [False, True])
def test_new_rows_are_the_same_with_and_without_the_loops_in_c(kept, monkeypatch):
    rng = np.random.default_rng(4)
    sums = torch.from_numpy(rng.integers(-(2**51), 2**51, (3, 1001)))
    grid = np.exp2([-40.0, -3.0, -60.0])
    old = torch.from_numpy(rng.standard_normal((3, 1001))) if kept else None
    found = finish(sums, grid, old)
    monkeypatch.setattr(bindings, "AVAILABLE", False)
    assert torch.equal(found, finish(sums, grid, old))
