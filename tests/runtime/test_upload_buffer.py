"""Uploads in the buffer are what was put there, until the next step takes their place."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from support.fake_device import DEVICE, FakeDevice, on_device

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.devices import CPU, to_main_memory
from mpifl.runtime import worker
from mpifl.runtime.worker import UploadBuffer


def test_rows_are_used_again_after_clear_and_not_before(monkeypatch):
    monkeypatch.setattr(worker, "LEAST", 0)
    monkeypatch.setattr(worker, "CHUNK", 6)
    place, a, b = UploadBuffer(), torch.arange(3.0), torch.arange(6.0).reshape(2, 3)
    (first,), second, other = place.put(a, 2), place.put(b, 2), place.put(torch.ones(2), 2)
    a += 9
    assert_array_equal(first, [0, 1, 2])
    assert_array_equal(torch.stack(second), b)
    assert_array_equal(other[0], [1, 1])
    place.clear()
    assert place.put(torch.zeros(3), 2)[0].data_ptr() == first.data_ptr()


def test_small_uploads_are_not_copied():
    vector = torch.zeros(10)
    assert UploadBuffer().put(vector, 5)[0].data_ptr() == vector.data_ptr()


@pytest.mark.nightly
def test_uploads_stay_on_their_device_as_long_as_there_is_room(monkeypatch):
    place = UploadBuffer()
    with FakeDevice():
        for least in (1 << 40, 0):  # those that come to main memory lie as they are, or are copied to rows
            monkeypatch.setattr(worker, "LEAST", least)
            place.clear(room=8 * 4)
            vectors = [on_device(torch.full((2, 3), float(j))) for j in range(3)]
            rows = [row for vector in vectors for row in place.put(vector, 3)]
            assert [row.device for row in rows] == [DEVICE] * 2 + [CPU] * 4
            assert_array_equal(torch.stack([to_main_memory(row) for row in rows])[:, 0], [0, 0, 1, 1, 2, 2])
            place.clear()
            assert place.put(vectors[0], 3)[0].device == CPU


def test_runs_do_not_depend_on_the_buffer(monkeypatch, tmp_path):
    """Several uploads of several widths: control variates, and the statistics before training."""
    for name in ("scaffold", "ucfl", "fedem"):
        options = {"noise_batch": 4.0} if name == "ucfl" else {}
        runs = []
        for least in (1 << 40, 0):
            monkeypatch.setattr(worker, "LEAST", least)
            method = CATALOGUE[name](**options)
            runs.append(toy.run(method, toy.Tiny(), tmp_path / f"{name}-{least}", participation=0.5))
        toy.same(toy.state_of(runs[0].server), toy.state_of(runs[1].server))
