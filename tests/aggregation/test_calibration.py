"""Measured costs: the fit, and a run that measures."""

from __future__ import annotations

from numpy.testing import assert_allclose

from mpifl.aggregation.calibration import fit
from mpifl.aggregation.collective_costs import Line


def test_the_fit_finds_the_line_behind_its_points():
    line = Line(2e-3, 5e-4, 8e-8)
    shapes = ((1, 8_000), (8, 64_000), (1, 500_000), (4, 2_000_000))
    found = fit([(calls, size, line.seconds(calls, size)) for calls, size in shapes])
    assert_allclose((found.once_s, found.block_s, found.byte_s), (2e-3, 5e-4, 8e-8), rtol=1e-6)
    noisy = fit([(calls, size, 1e-3) for calls, size in shapes])
    assert min(noisy.once_s, noisy.block_s, noisy.byte_s) >= 0
