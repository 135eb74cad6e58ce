"""Uploads that stay on the device where they were made, and are summed there: the same numbers."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import fake_device, toy
from support.cases import OPTIONS
from support.fake_device import DEVICE
from support.nightly import mostly_nightly
from torch.testing import assert_close

from mpifl.aggregation import mixer as mix
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.devices import CPU
from mpifl.runtime import worker
from mpifl.simulation.network import Links
from mpifl.simulation.policies import Buffer
from mpifl.traffic.compression import Payload, TopK

LOCAL = replace(toy.LOCAL, steps=1)
# a sum; control variates; components; parts of two tables; products, and rows that split; statistics whose
# products are read; statistics whose distances to rows are measured
FORMS = ("fedavg", "scaffold", "fedem", "fedcuau", "cfl", "ucfl", "flexcfl")


@pytest.fixture
def kept(monkeypatch) -> list[torch.device]:
    """Where each upload was in the end."""
    found: list[torch.device] = []
    put = worker.UploadBuffer.put

    def told(self, vector, number):
        rows = put(self, vector, number)
        found.extend(row.device for row in rows)
        return rows

    monkeypatch.setattr(worker.UploadBuffer, "put", told)
    return found


def run(name: str, folder: Path, room: int, **changes) -> toy.Run:
    """Take two steps of a method on the device."""
    with fake_device.gpu(room):
        method = CATALOGUE[name](**OPTIONS.get(name, {}))
        return toy.run(method, toy.Tiny(), folder, steps=2, evaluate=False, local=LOCAL, **changes)


@pytest.mark.parametrize("name", mostly_nightly(FORMS, ["fedavg", "fedem", "cfl", "flexcfl"]))
def test_uploads_give_the_same_bits_wherever_they_are(name, tmp_path, kept):
    found = {}
    for room in (0, 3000, 1 << 40):  # none may stay, some, all
        kept.clear()
        found[room] = run(name, tmp_path / str(room), room).server
        assert set(kept) == {0: {CPU}, 3000: {CPU, DEVICE}, 1 << 40: {DEVICE}}[room]
    for server in found.values():
        toy.same(toy.state_of(found[0]), toy.state_of(server))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("emdcfl", {}), ("oracle", {}), ("fedavg", {"payload": Payload(compression=TopK(0.5))})],
)
def test_uploads_that_more_is_done_with_than_sums_come_to_main_memory(name, changes, tmp_path, kept):
    run(name, tmp_path, 1 << 40, **changes)
    assert set(kept) == {CPU}


def test_arrivals_over_links_come_at_the_times_and_with_the_bits_of_a_run_on_a_cpu(tmp_path):
    """Uploads are measured before the first leaves, and travel one by one."""
    found = []
    for place in (nullcontext(), fake_device.gpu()):
        options = {"network": Links(uplink_bytes_s=1e3), "policy": Buffer(2), "local": LOCAL}
        with place:
            folder = tmp_path / str(len(found))
            found.append(toy.events(CATALOGUE["fedbuff"](), toy.Tiny(), folder, steps=2, **options))
    cpu, gpu = found
    assert gpu.times == cpu.times
    assert cpu.times[-1] > 0
    assert_close(gpu.server.tables["model"], cpu.server.tables["model"], rtol=0, atol=1e-5)


@pytest.mark.in_turn
def test_nothing_of_a_round_stays_on_the_device(monkeypatch, tmp_path):
    """Its uploads are there when they are mixed, and are gone once the step is over."""
    seen: list[weakref.ref[torch.Tensor]] = []
    carry = mix.exact_sum

    def watched(uploads, *rest):
        seen.extend(weakref.ref(u) for u in uploads)
        return carry(uploads, *rest)

    monkeypatch.setattr(mix, "exact_sum", watched)
    with fake_device.gpu():
        server_step, sampler = toy.start(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path)
        toy.step_of(server_step, server_step.initialize(), sampler(1))
    gc.collect()
    assert len(seen) == 6
    assert all(upload() is None for upload in seen)
