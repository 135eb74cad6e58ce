"""Files that are mapped have their room on the disk from the start."""

from __future__ import annotations

import errno
import os
import resource

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.refusal import refusal_of

from mpifl.aggregation.tables import Tables
from mpifl.comm.single import Single
from mpifl.core.files import safetensors_file, write_atomically
from mpifl.core.mapped_arrays import new_array, reserve
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation


@pytest.fixture
def full_disk(monkeypatch):
    """A disk on which no file gets room."""

    def refuse(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_an_array_has_its_room_before_it_is_written(tmp_path):
    array = new_array(tmp_path / "a.npy", np.float32, (1000, 300))
    status = (tmp_path / "a.npy").stat()
    assert status.st_blocks * 512 >= array.nbytes
    array[999] = 7.0
    array.flush()
    again = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert (again.dtype, again.shape, again[:999].any(), again[999].min()) == (
        np.float32,
        (1000, 300),
        False,
        7,
    )
    assert status.st_size == (tmp_path / "a.npy").stat().st_size


def test_an_array_may_be_empty(tmp_path):
    assert new_array(tmp_path / "a.npy", np.uint8, (0, 3)).shape == (0, 3)


def test_room_leaves_what_a_file_holds(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    reserve(tmp_path / "a", 10_000)
    assert (tmp_path / "a").read_bytes() == b"abc".ljust(10_000, b"\0")


def test_a_file_without_room_is_not_left_behind(tmp_path, full_disk):
    with pytest.raises(OSError, match="No space"):
        new_array(tmp_path / "a.npy", np.uint8, (10,))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["synthetic", "digits"])
def test_prepared_data_without_room_are_refused_in_one_line(tmp_path, full_disk, source):
    config = DataConfig(cache=str(tmp_path), source=SOURCES[source](), scenario=SCENARIOS["rotated"]())
    with refusal_of("data.cache", "No space"):
        open_federation(config, 0)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_rows_without_room_are_refused_in_one_line(tmp_path, full_disk):
    tables = Tables(Single())
    with refusal_of("system.scratch", "No space"):
        tables.shard("model", np.zeros(3, np.int64), (3, 2), tmp_path)


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_leaves_a_file_as_it_was(durable, tmp_path):
    write_atomically(tmp_path / "a", "old", durable)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=str(tmp_path / "a")):
            write_atomically(tmp_path / "a", bytes(10000), durable)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_files_of_safetensors_have_the_mode_of_all_others(tmp_path):
    with safetensors_file(tmp_path / "rows.safetensors") as file:
        save_file({"a": np.ones(3, np.float32)}, file)
    (tmp_path / "other").write_text("")
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert load_file(file)["a"].sum() == 3
