"""Client state in node-local memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from mpifl.aggregation.client_store import OWNER, ClientStore, scratch_root
from mpifl.core.errors import UserError


@pytest.fixture
def store(tmp_path) -> ClientStore:
    """An empty store."""
    return ClientStore("token", str(tmp_path))


def one(value: float) -> dict[str, torch.Tensor]:
    """Return a state."""
    return {"head": torch.full((3,), value)}


def test_before_the_first_visit_there_is_nothing(store):
    assert store.load("state", 0, 0) == {}
    assert store.load("state", 0, 4) == {}


def test_what_one_visit_leaves_the_next_finds(store):
    tensors = {"a": torch.randn(2, 3), "b": torch.arange(4), "c": torch.randn(6, 4)[:, 1]}
    store.save("state", 7, 1, tensors)
    found = store.load("state", 7, 1)
    assert set(found) == {"a", "b", "c"}
    for name, t in tensors.items():
        assert_close(found[name], t, rtol=0, atol=0)
    assert store.load("state", 7, 2) == {}
    assert store.load("state", 8, 1) == {}
    assert store.load("upload", 7, 1) == {}


def test_a_step_that_is_redone_overwrites_nothing_that_was_committed(store):
    """Visit 2 reads what visit 1 left. Killed and redone, it must find the same again."""
    store.save("state", 0, 1, one(1.0))
    store.save("state", 0, 2, one(2.0))
    assert_close(store.load("state", 0, 1), one(1.0))
    store.save("state", 0, 2, one(2.5))
    assert_close(store.load("state", 0, 1), one(1.0))
    assert_close(store.load("state", 0, 2), one(2.5))


def test_only_two_visits_are_kept(store):
    for visit in (1, 2, 3, 4):
        store.save("state", 0, visit, one(float(visit)))
    assert store.load("state", 0, 1) == store.load("state", 0, 2) == {}
    assert_close(store.load("state", 0, 3), one(3.0))
    assert sorted(path.name for path in store.folder.glob("state-*")) == ["state-0-3", "state-0-4"]


def test_another_process_of_the_node_reads_it(store, tmp_path):
    store.save("state", 0, 1, one(5.0))
    assert_close(ClientStore("token", str(tmp_path)).load("state", 0, 1), one(5.0))
    assert ClientStore("other", str(tmp_path)).load("state", 0, 1) == {}


def test_two_names_for_one_vector_may_be_kept(store):
    vector = torch.arange(6.0)
    store.save("state", 0, 1, {"model": vector, "anchor": vector, "body": vector[:4], "head": vector[4:]})
    found = store.load("state", 0, 1)
    assert_close(found["anchor"], vector)
    assert_close(found["head"], vector[4:])


def test_closing_removes_the_folder(store):
    store.save("state", 0, 1, one(1.0))
    store.close()
    assert not store.folder.exists()
    store.close()  # another rank of the node may have been first


@pytest.mark.parametrize("moment", ["mkdir", "open"])
def test_a_folder_that_another_rank_removes_meanwhile_is_created_again(tmp_path, monkeypatch, moment):
    """A rank that has ended closes its store while a slower one of the node creates the same."""
    owner, calls = (Path, os), []
    real = getattr(owner[moment == "open"], moment)

    def late(place, *args, **kwargs):
        calls.append(place)
        folder = Path(place) if moment == "mkdir" else Path(place).parent
        if len(calls) == 1:
            if moment == "mkdir":
                raise FileExistsError(17, "was there, and is no folder any more", str(place))
            folder.rmdir()
        return real(place, *args, **kwargs)

    monkeypatch.setattr(owner[moment == "open"], moment, late)
    store = ClientStore("token", str(tmp_path))
    assert (store.folder / OWNER).exists()
    assert len(calls) > 1


def test_the_scratch_folder_can_be_written_and_falls_back_where_memory_is_short():
    assert os.access(scratch_root(), os.W_OK)
    assert str(scratch_root(need_bytes=1 << 60)) != "/dev/shm"


def test_what_a_killed_job_left_goes_when_the_next_one_starts(tmp_path):
    dead, young, elsewhere, alive = (ClientStore(f"{c * 16}-{c * 8}", str(tmp_path)) for c in "abcd")
    dead.save("state", 0, 1, one(1.0))
    for store in (dead, young, elsewhere):
        store._release()  # as when the process ends
    (elsewhere.folder / OWNER).write_text("another-host")
    for store in (dead, elsewhere, alive):
        os.utime(store.folder / OWNER, (time.time() - 120.0,) * 2)
    (tmp_path / "mpifl-notes").mkdir()
    own = ClientStore("e" * 16 + "-" + "e" * 8, str(tmp_path))
    left = {store.folder for store in (young, elsewhere, alive, own)}
    assert {*tmp_path.iterdir()} == left | {tmp_path / "mpifl-notes"}


@contextmanager
def full(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_half_of_a_state_and_names_the_folder(store):
    store.save("state", 0, 1, one(1.0))
    with full(4096), pytest.raises(UserError, match=r"system.scratch.*more room"):
        store.save("state", 0, 2, {"head": torch.zeros(10000)})
    assert [path.name for path in store.folder.glob("state*")] == ["state-0-1"]


def test_a_store_that_is_dropped_without_being_closed_keeps_no_file_open(tmp_path):
    def open_files() -> list[str]:
        return [
            link for fd in Path("/proc/self/fd").iterdir() if (link := os.path.realpath(fd)).endswith(OWNER)
        ]

    store = ClientStore("token", str(tmp_path))
    owner = os.path.realpath(store.folder / OWNER)
    assert owner in open_files()
    del store
    assert owner not in open_files()
