"""What rank 0 makes of the headers of a step."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from mpifl.core.types import Notes
from mpifl.runtime.protocol import GatheredReports


def test_largest_values_and_ranks_of_components_go_together():
    """Upload 0, on rank 1, has components with max_abs 1 and 2; upload 1, on rank 2, with 3 and 4."""
    two, ones = np.zeros(2, np.int64), np.ones(2, bool)
    notes = Notes(np.arange(2), two, two, ones)
    reports = GatheredReports((), np.array([1, 2]), notes, {"model": np.array([[1.0, 2.0], [3.0, 4.0]])})
    max_abs, owners = reports.upload_info("model")
    assert_array_equal(max_abs, [1, 2, 3, 4])
    assert_array_equal(owners, [1, 1, 2, 2])
