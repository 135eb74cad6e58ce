"""The cache notices what was truncated or altered, says so, and is safe from concurrent builders."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES, CacheMissing, DataConfig, cache, open_federation


def fill(folder: Path) -> dict:
    """Write one array of 1000 numbers."""
    cache.save(folder, "numbers", np.arange(1000))
    return {"answer": 42}


def build_in(folder: str) -> int:
    """Build `folder` and return the sum of what is in it (runs in another process)."""
    place = cache.ensure(Path(folder), fill, lambda line: None)
    return int(cache.load(place, "numbers").sum())


def test_a_folder_is_built_once_and_then_found(tmp_path):
    built = []

    def counted(folder: Path) -> dict:
        built.append(folder)
        return fill(folder)

    for _ in range(2):
        place = cache.ensure(tmp_path / "a", counted, lambda line: None)
    assert len(built) == 1
    assert cache.facts(place) == {"answer": 42}
    np.testing.assert_array_equal(cache.load(place, "numbers"), np.arange(1000))


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "altered"),
        (lambda path: path.unlink(), "truncated"),
    ],
)
def test_a_harmed_file_is_named_and_rebuilt_after_saying_so(tmp_path, harm, word):
    place = cache.ensure(tmp_path / "a", fill, lambda line: None)
    harm(place / "numbers.npy")
    said: list[str] = []
    cache.ensure(place, fill, said.append)
    assert len(said) == 1
    assert "numbers.npy" in said[0]
    assert word in said[0]
    assert "rebuilding" in said[0]
    assert cache.flaw(place, verify=True) == ""


def test_an_unreadable_meta_file_is_rebuilt(tmp_path):
    place = cache.ensure(tmp_path / "a", fill, lambda line: None)
    (place / "meta.json").write_text("{")
    said: list[str] = []
    cache.ensure(place, fill, said.append)
    assert "meta.json" in said[0]


def test_sizes_are_checked_even_without_checksums(tmp_path):
    place = cache.ensure(tmp_path / "a", fill, lambda line: None)
    path = place / "numbers.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    assert cache.flaw(place, verify=False) == ""
    path.write_bytes(whole[:-1])
    assert "truncated" in cache.flaw(place, verify=False)


def test_who_may_not_build_is_told_at_once(tmp_path):
    with pytest.raises(CacheMissing, match="is not there"):
        cache.ensure(tmp_path / "a", fill, lambda line: None, build=False)
    place = cache.ensure(tmp_path / "a", fill, lambda line: None)
    (place / "numbers.npy").write_bytes(b"")
    with pytest.raises(CacheMissing, match=r"numbers\.npy"):
        cache.ensure(place, fill, lambda line: None, build=False)


def test_concurrent_builders_do_not_harm_each_other(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as workers:
        sums = workers.map_async(build_in, [str(tmp_path / "a")] * 64, chunksize=1).get(timeout=60)
    assert sums == [499_500] * 64
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "nothing temporary may be left"


def test_a_builder_that_finishes_second_uses_the_first_ones_folder(tmp_path):
    place = tmp_path / "a"

    def late(folder: Path) -> dict:
        cache.ensure(place, fill, lambda line: None)  # somebody else is quicker
        return fill(folder)

    assert cache.ensure(place, late, lambda line: None) == place
    assert cache.flaw(place, verify=True) == ""
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fails(folder: Path) -> dict:
        fill(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.ensure(tmp_path / "a", fails, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache.*--data\.cache"):
        cache.ensure(tmp_path / "file" / "a", fill, lambda line: None)


def test_the_cache_lies_in_the_root_or_with_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.home_of(str(tmp_path), None) == tmp_path / ".mpifl"
    assert cache.home_of(None, None) == tmp_path / "xdg" / "mpifl"
    assert cache.home_of(str(tmp_path), "/elsewhere") == Path("/elsewhere")
    monkeypatch.setattr(cache.os, "access", lambda path, mode: path != tmp_path / "locked")
    (tmp_path / "locked").mkdir()
    assert cache.home_of(str(tmp_path / "locked"), None) == tmp_path / "xdg" / "mpifl"


def test_a_corrupt_federation_is_rebuilt_to_the_same_bytes(tmp_path):
    config = DataConfig(cache=str(tmp_path), source=SOURCES["digits"](), scenario=SCENARIOS["rotated"]())
    first = [open_federation(config, 0).client(k).train.x.clone() for k in range(3)]
    for file in tmp_path.glob("*/images.npy"):
        file.write_bytes(file.read_bytes()[:-10])
    said: list[str] = []
    again = open_federation(config, 0, said.append)
    assert sum("images.npy" in line and "rebuilding" in line for line in said) == 2
    for k in range(3):
        np.testing.assert_array_equal(again.client(k).train.x, first[k])


def test_a_worker_opens_what_rank_0_built_and_fails_at_once_otherwise(tmp_path):
    config = DataConfig(cache=str(tmp_path), source=SOURCES["digits"](), scenario=SCENARIOS["iid"]())
    with pytest.raises(CacheMissing):
        open_federation(config, 0, build=False)
    built = open_federation(config, 0)
    opened = open_federation(config, 0, build=False)
    np.testing.assert_array_equal(built.client(7).train.x, opened.client(7).train.x)
