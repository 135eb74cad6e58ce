"""Exact sums: every backend gives the bits of the definition, for any order and split of the uploads."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.each import for_each
from support.fake_device import FakeDevice, on_device

from mpifl.aggregation import exact_sum as exact
from mpifl.aggregation.exact_sum import exact_sum, finish, float32_sum, kept_rows, spacings
from mpifl.aggregation.local_mixing import mix_exact
from mpifl.core.devices import CPU, to_main_memory
from mpifl.core.plan import Mixing
from mpifl.kernels import bindings

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BACKENDS = {"numpy": exact._add_numpy, "torch": exact._add_torch}
if bindings.AVAILABLE:
    BACKENDS["kernel"] = bindings.exact_sum_add

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
weight = st.one_of(st.just(0.0), st.floats(-8.0, 8.0), st.floats(1e-30, 1e-20), st.floats(1e10, 1e20))


@st.composite
def mixtures(draw):
    """Uploads float32 [m, b] of any magnitude, zeros and denormals among them, and weights float64 [K, m].

    Up to 19 uploads and 5 rows: tiles of 8 uploads, pairs of rows with 4, and what is left over.
    """
    m, b, k = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 19])), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    uploads = draw(st.lists(st.lists(singles, min_size=b, max_size=b), min_size=m, max_size=m))
    row = st.lists(weight, min_size=m, max_size=m) | st.lists(st.floats(0.1, 8), min_size=m, max_size=m)
    weights = draw(st.lists(row, min_size=k, max_size=k))
    return torch.tensor(uploads, dtype=torch.float32), np.array(weights, np.float64)


def spacing_of(uploads: torch.Tensor, weights: np.ndarray) -> np.ndarray:
    """Return the spacing of each row."""
    return spacings(weights, uploads.abs().amax(1).numpy().astype(np.float64))


def sums_of(uploads: torch.Tensor, weights: np.ndarray, spacing: np.ndarray) -> torch.Tensor:
    """Return the grid sums int64 [K, b] of one rank."""
    return exact_sum(list(uploads), weights, spacing, uploads.shape[1])


def defined(uploads: torch.Tensor, weights: np.ndarray, spacing: np.ndarray) -> list[list[int]]:
    """Return sum_j round(w_kj x_j / g_k) by its definition: products in float64, halves to even."""
    every = uploads.double().t().tolist()
    return [
        [sum(round(Fraction(w * x) / Fraction(g)) for w, x in zip(row, xs, strict=True)) for xs in every]
        for row, g in zip(weights.tolist(), spacing.tolist(), strict=True)
    ]


@pytest.mark.in_turn
@settings(max_examples=200)
@given(mixtures(), st.randoms(use_true_random=False), st.sampled_from([1, 2, 8, 1 << 22]))
def test_every_backend_in_any_order_and_split_gives_the_bits_of_the_definition(mixture, random, scratch):
    """Each of four ranks adds some of the uploads in some order; then one rank mixes them all."""
    uploads, weights = mixture
    spacing = spacing_of(uploads, weights)
    expected = defined(uploads, weights, spacing)
    order = list(range(len(uploads)))
    random.shuffle(order)
    rank = [random.randrange(4) for _ in order]
    parts = [[j for j in order if rank[j] == r] for r in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "TORCH_SCRATCH", scratch)
        patch.setattr(exact, "NUMPY_SCRATCH", min(scratch, 2))
        for name, backend in BACKENDS.items():
            patch.setattr(exact, "_backend", lambda _, backend=backend: backend)
            assert sums_of(uploads, weights, spacing).tolist() == expected, name
            total = sum(sums_of(uploads[p], weights[:, p], spacing) for p in parts)
            assert total.tolist() == expected, name
    old, largest = torch.zeros(len(weights), uploads.shape[1]), uploads.abs().amax(1).double().numpy()
    mixed = mix_exact(Mixing(weights), old, list(uploads), largest)
    assert torch.equal(mixed, finish(torch.tensor(expected), spacing, None))


@given(mixtures())
def test_the_sum_is_the_true_one_up_to_the_grid(mixture):
    """Each term is rounded once, by half a spacing at most; a product in float64 errs by 2^-53 of itself."""
    uploads, weights = mixture
    spacing = spacing_of(uploads, weights)
    found = sums_of(uploads, weights, spacing)
    for k, row in enumerate(weights):
        for c in range(uploads.shape[1]):
            terms = [Fraction(float(w)) * Fraction(float(x)) for w, x in zip(row, uploads[:, c], strict=True)]
            slack = sum(map(abs, terms)) * Fraction(1, 2**53) + Fraction(1, 2**1074)
            allowed = len(terms) * Fraction(float(spacing[k])) / 2 + slack
            assert abs(int(found[k, c]) * Fraction(float(spacing[k])) - sum(terms)) <= allowed


@example((torch.ones(2, 1), np.array([[1.5, 2.0**48]])))  # log2 of their sum rounds to 48
@example((torch.ones(1, 1), np.array([[2.0**-30]])))
@given(mixtures())
def test_the_spacing_is_a_power_of_two_that_leaves_room_for_every_sum(mixture):
    uploads, weights = mixture
    spacing = spacing_of(uploads, weights)
    assert_array_equal(np.frexp(spacing)[0], 0.5)
    bound = np.abs(weights) @ uploads.abs().amax(1).numpy().astype(np.float64)
    assert (bound <= spacing * 2.0**50).all()
    tight = (bound > spacing * 2.0**49) | (bound == 0) | (spacing == 2.0**-951)
    assert tight.all(), "and no more than it takes"
    assert (bound[bound > 1e-250] >= (spacing * 2.0**47)[bound > 1e-250]).all(), "coarser than it needs to be"
    assert (sums_of(uploads, weights, spacing).abs() <= 2**50 + len(uploads)).all()


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_a_thousand_uploads_are_averaged_to_float32(seed):
    rng = np.random.default_rng(seed)
    uploads = torch.from_numpy(
        (rng.normal(size=(1000, 7)) * 10.0 ** rng.integers(-6, 3, (1000, 1))).astype(np.float32)
    )
    weights = rng.random((2, 1000))
    weights /= weights.sum(1, keepdims=True)
    spacing = spacing_of(uploads, weights)
    found = finish(sums_of(uploads, weights, spacing), spacing, None)
    truth = weights @ uploads.numpy().astype(np.float64)
    largest = float(uploads.abs().max())
    assert_allclose(found, truth, rtol=2.0**-23, atol=largest * 2.0**-40)


@for_each(
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
    spacing = spacing_of(x, w)
    assert_array_equal(finish(sums_of(x, w, spacing), spacing, None)[0], np.float32(expected))


def test_weights_of_one_copy_the_upload():
    """A number of at least 2^-26 of the largest has its 24 bits on the grid: nothing is lost."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(2.0**-20, 1.0, (1, 5000)).astype(np.float32))
    spacing = spacing_of(x, np.eye(1))
    assert torch.equal(finish(sums_of(x, np.eye(1), spacing), spacing, None), x)


def test_a_rank_without_uploads_adds_nothing():
    sums = exact_sum([], np.zeros((2, 0)), np.ones(2), 3)
    assert sums.device == CPU
    assert_array_equal(sums, np.zeros((2, 3)))


def test_kept_rows_by_hand():
    """keep (0.5, 2) of rows 4, 3: 2, 6. Matrix (0 1; 1 1; 0 0): 3, 7, 0."""
    old = torch.tensor([[4.0], [3.0]])
    assert kept_rows(None, old) is None
    assert_array_equal(kept_rows(np.array([0.5, 2.0]), old), [[2.0], [6.0]])
    assert_array_equal(kept_rows(np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), old), [[3.0], [7.0], [0.0]])


def test_finish_adds_what_was_kept_before_rounding():
    """1 + 2^-30 - 1 is 2^-30 in float64; float32 would have lost it."""
    sums, spacing = torch.tensor([[1]]), np.array([2.0**-30])
    kept = torch.tensor([[1.0]], dtype=torch.float64)
    assert float(finish(sums, spacing, kept.clone() - 1)) == 2.0**-30
    assert float(finish(sums, spacing, kept)) == 1.0


def test_float32_sums_agree_up_to_rounding():
    rng = np.random.default_rng(2)
    x, w = torch.from_numpy(rng.normal(size=(8, 100)).astype(np.float32)), rng.random((3, 8))
    w[1, :] = 0
    found = float32_sum(list(x), w, 100)
    assert_allclose(found, w @ x.numpy(), rtol=1e-5, atol=1e-5)
    assert_array_equal(found[1], 0)


@pytest.mark.parametrize("away", ["none", "some", "all"])
def test_sums_are_made_where_the_uploads_are(away):
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(6, 1000)).astype(np.float32))
    w = rng.random((3, 6)) * (rng.random((3, 6)) < 0.6)
    spacing = spacing_of(x, w)
    far = {"none": (), "some": (0, 2, 5), "all": range(6)}[away]
    with FakeDevice():
        uploads = [on_device(u) if j in far else u for j, u in enumerate(x)]
        with pytest.MonkeyPatch.context() as patch:
            devices, backend = [], exact._backend
            patch.setattr(exact, "_backend", lambda device: devices.append(device) or backend(device))
            found = exact_sum(uploads, w, spacing, 1000)
        assert sorted(map(str, devices)) == sorted({str(u.device) for u in uploads})
        assert found.device == (uploads[0].device if away == "all" else CPU)
        assert torch.equal(to_main_memory(found), sums_of(x, w, spacing))


def wide(rows: int, uploads: int, width: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return uploads [m, b] of very different magnitude and weights [K, m], some of them 0."""
    rng = np.random.default_rng(rows)
    x = torch.from_numpy(rng.standard_normal((uploads, width)).astype(np.float32))
    x *= 10.0 ** torch.from_numpy(rng.integers(-44, 30, (uploads, 1)))
    return x, rng.standard_normal((rows, uploads)) * ((rng.random((rows, uploads)) < 0.7) | (rows == 5))


@gpu
@pytest.mark.parametrize(("rows", "uploads", "width"), [(1, 1, 5), (3, 7, 1000), (20, 40, 50000)])
def test_a_gpu_adds_to_the_same_bits(rows, uploads, width):
    """Products and sums of float64 must not be contracted to one rounding, nor small numbers be flushed."""
    x, w = wide(rows, uploads, width)
    spacing = spacing_of(x, w)
    found = exact_sum([u.cuda() for u in x], w, spacing, width)
    assert torch.equal(found.cpu(), sums_of(x, w, spacing))


@pytest.mark.parametrize(
    ("rows", "uploads", "width"), [(1, 1, 5), (3, 7, 1000), (20, 40, 9000), (5, 11, 9000), (2, 19, 33000)]
)
def test_backends_agree_on_wide_uploads(rows, uploads, width, monkeypatch):
    """Beyond the blocks of columns of each backend, with tails of any length."""
    x, w = wide(rows, uploads, width)
    spacing, found = spacing_of(x, w), []
    for backend in BACKENDS.values():
        monkeypatch.setattr(exact, "_backend", lambda _, backend=backend: backend)
        found.append(sums_of(x, w, spacing))
    assert all(torch.equal(found[0], other) for other in found)
    assert found[0].any()


@pytest.mark.parametrize("kernels", [True, False])
def test_the_largest_absolute_value(kernels, monkeypatch):
    monkeypatch.setattr(bindings, "AVAILABLE", kernels and bindings.AVAILABLE)
    vector = torch.randn(1003, generator=torch.Generator().manual_seed(1))
    for number in (-7.5, 9.25, -np.inf, np.inf):
        vector[500] = number
        assert exact.max_abs(vector) == abs(number)
        assert exact.max_abs(vector[::2]) == abs(number), "every other number"
    vector[3] = np.nan
    assert np.isnan(exact.max_abs(vector))
    assert exact.max_abs(torch.zeros(5)) == 0


@pytest.mark.parametrize("kept", [False, True])
def test_new_rows_are_the_same_with_and_without_the_kernels(kept, monkeypatch):
    rng = np.random.default_rng(4)
    sums = torch.from_numpy(rng.integers(-(2**51), 2**51, (3, 1001)))
    spacing = np.exp2([-40.0, -3.0, -60.0])
    old = torch.from_numpy(rng.standard_normal((3, 1001))) if kept else None
    found = finish(sums, spacing, old)
    monkeypatch.setattr(bindings, "AVAILABLE", False)
    assert torch.equal(found, finish(sums, spacing, old))
