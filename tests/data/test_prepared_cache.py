"""The cache detects truncated and altered files, reports them, and is safe under concurrent builders."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mpifl.core.errors import UserError
from mpifl.core.imports import load_object
from mpifl.data import SCENARIOS, SOURCES, CacheMissing, DataConfig, PoolFederation, open_federation
from mpifl.data import prepared_cache as cache
from mpifl.data.sources import Source


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


def changed(**changes: object):
    """Return what writes another tree into a meta file."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pipe(path: Path) -> None:
    """Put a pipe where a file was."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[1, 2]"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        pipe,
        changed(facts={"answer": 43}),
        changed(files={}),
        changed(files=[]),
        changed(files={"numbers.npy": 3}),
    ],
)
def test_a_meta_file_of_any_other_form_is_rebuilt(tmp_path, harm):
    place = cache.ensure(tmp_path / "a", fill, lambda line: None)
    harm(place / "meta.json")
    said: list[str] = []
    cache.ensure(place, fill, said.append)
    assert "meta.json" in said[0]
    assert "rebuilding" in said[0]
    assert cache.facts(place) == {"answer": 42}
    assert cache.flaw(place, verify=True) == ""
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_file_in_place_of_a_prepared_folder_makes_way(tmp_path):
    (tmp_path / "a").write_text("")
    cache.ensure(tmp_path / "a", fill, lambda line: None)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def opened(tmp_path: Path, **config: object) -> tuple[PoolFederation, list[str]]:
    """Return a federation, and what was said while it was opened."""
    said: list[str] = []
    folders = {"root": str(tmp_path), "cache": str(tmp_path / "cache")}
    return open_federation(DataConfig(**folders, **config), 0, said.append), said


def repaint(path: Path, grey: int) -> None:
    """Overwrite a picture in place by one of the same number of bytes, at another time."""
    before = path.stat() if path.exists() else None
    Image.new("L", (8, 8), grey).save(path)
    if before is not None:
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_a_picture_overwritten_in_place_is_prepared_again(tmp_path):
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        repaint(tmp_path / "images" / f"{name}.png", 100)
    config = {"source": SOURCES["folder"](side=8, test_share=0.0), "scenario": SCENARIOS["iid"](clients=1)}
    first, _ = opened(tmp_path, **config)
    assert not opened(tmp_path, **config)[1], "nothing has changed"
    folder = (tmp_path / "images" / "a").stat()
    repaint(tmp_path / "images" / "a" / "1.png", 200)
    os.utime(tmp_path / "images" / "a", ns=(folder.st_atime_ns, folder.st_mtime_ns))
    again, _ = opened(tmp_path, **config)
    assert np.unique(first.samples(0)[0]).tolist() == [100]
    assert np.unique(again.samples(0)[0]).tolist() == [100, 200]


OWN = """
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpifl.data.scenarios.usual import Iid
from mpifl.data.sources.scikit import Digits


class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return np.full((4, 4), len(Path(__file__).with_name("read.txt").read_text()), np.uint8), i % 2


@dataclass(frozen=True)
class ScenarioSpec(Iid):
    def owners(self, labels, rng):
        return np.arange(len(labels)) % self.clients


@dataclass(frozen=True)
class Source(Digits):
    def load(self, root, scratch):
        pool = super().load(root, scratch)
        pool.images[:] = 7
        return pool
"""


def test_a_users_scenario_or_source_that_was_edited_is_prepared_again(tmp_path):
    file = tmp_path / "own.py"
    iid = {"scenario": SCENARIOS["iid"](clients=2), "source": SOURCES["digits"]()}
    for name, what, old, new in (
        ("ScenarioSpec", "scenario", "% self.clients", "% self.clients ^ 1"),
        ("Source", "source", "= 7", "= 9"),
    ):
        made = []
        for text in (OWN, OWN.replace(old, new)):
            file.write_text(text)
            own = load_object(f"{file}:{name}", "key")()
            made.append(opened(tmp_path, **iid | {what: own})[0].samples(0))
        assert not all(np.array_equal(a, b) for a, b in zip(*made, strict=True)), name


def test_a_users_scenario_whose_helper_was_edited_is_prepared_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file, made = tmp_path / "own.py", []
    file.write_text(OWN.replace("np.arange(len(labels)) % self.clients", "dealt(labels, self.clients)"))
    file.write_text(f"from dealing import dealt\n{file.read_text()}")
    for change in ("", "  ^ 1"):
        helper = f"import numpy as np\ndef dealt(labels, n): return np.arange(len(labels)) % n{change}\n"
        (tmp_path / "dealing.py").write_text(helper)
        own = load_object(f"{file}:ScenarioSpec", "key")(clients=2)
        made.append(opened(tmp_path, scenario=own, source=SOURCES["digits"]())[0].samples(0))
    assert not all(np.array_equal(a, b) for a, b in zip(*made, strict=True))
    del sys.modules["dealing"]


def test_the_help_texts_of_another_python_are_prepared_anew(tmp_path, monkeypatch):
    made, names = [], ("pydoc_data", "pydoc_data.topics")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for version in ("one", "two"):
        module = tmp_path / version / "pydoc_data" / "topics.py"
        module.parent.mkdir(parents=True)
        (module.parent / "__init__.py").touch()
        module.write_text(f"topics = {{'a': {version * 400!r}}}")
        monkeypatch.syspath_prepend(str(tmp_path / version))
        source = {"source": SOURCES["text"](), "scenario": SCENARIOS["iid"](clients=1)}
        made.append(np.array(opened(tmp_path, **source)[0].samples(0)[0]))
        for name in names:
            sys.modules.pop(name, None)
    assert not np.array_equal(*made)


def test_what_a_users_data_set_reads_is_looked_at_where_it_is_named(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    for reads, pixel in (((), 3), (("read.txt",), 5)):
        source = SOURCES["dataset"](path=f"{tmp_path}/own.py:Numbers", test_share=0.0, reads=reads)
        config = {"source": source, "scenario": SCENARIOS["iid"](clients=1)}
        (tmp_path / "read.txt").write_text("abc")
        opened(tmp_path, **config)
        (tmp_path / "read.txt").write_text("abcde")
        again, said = opened(tmp_path, **config)
        assert np.unique(again.samples(0)[0]).tolist() == [pixel]
        assert any("data.source.reads" in line for line in said) == (not reads), "said where it may be stale"


def test_a_users_data_set_is_prepared_for_each_data_root(tmp_path):
    """Its constructor gets the root; the file that it reads there is not named in `reads`."""
    (tmp_path / "own.py").write_text(
        "import numpy as np\nfrom pathlib import Path\n"
        "def rows(root): return [(np.load(Path(root) / 'x.npy'), i % 2) for i in range(8)]\n"
    )
    source = SOURCES["dataset"](path=f"{tmp_path}/own.py:rows", test_share=0.0)
    for shade in (3, 5, 3):
        root = tmp_path / f"root{shade}"
        root.mkdir(exist_ok=True)
        np.save(root / "x.npy", np.full((4, 4), shade, np.uint8))
        config = DataConfig(str(root), str(tmp_path / "cache"), source, SCENARIOS["iid"](clients=1))
        assert np.unique(open_federation(config, 0).samples(0)[0]).tolist() == [shade]


@pytest.mark.parametrize("path", ["own.py", "own_numbers"])
def test_a_users_data_set_whose_helper_was_edited_is_prepared_again(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = OWN.replace('len(Path(__file__).with_name("read.txt").read_text())', "shade()")
    (tmp_path / f"{path.removesuffix('.py')}.py").write_text(f"from shades import shade\n{text}")
    for reads, pixels in (((), (3, 15)), (("read.txt",), (4, 16))):
        (tmp_path / "read.txt").write_text("abc")
        for pixel in pixels:
            (tmp_path / "shades.py").write_text(f"def shade(): return {pixel}{' ' * pixel}\n")
            for name in ("shades", "own_numbers"):
                sys.modules.pop(name, None)
            importlib.invalidate_caches()
            source = SOURCES["dataset"](path=f"{path}:Numbers", test_share=0.0, reads=reads)
            made = opened(tmp_path, source=source, scenario=SCENARIOS["iid"](clients=1))[0].samples(0)
            assert np.unique(made[0]).tolist() == [pixel]
    del sys.modules["shades"]


@pytest.mark.parametrize("kind", ["npz", "text", "partition"])
def test_files_of_one_relative_name_in_two_working_folders_are_prepared_each(kind, tmp_path, monkeypatch):
    """They are equal in bytes and in the time of their last change."""
    monkeypatch.delenv("MPIFL_DATA", raising=False)
    digits, made = SOURCES["digits"](), []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        x = np.full((8, 4, 4), 3 if folder == "a" else 5, np.uint8)
        np.savez("own", x_train=x, y_train=np.arange(8) % 2)
        Path("own.txt").write_text(f"{folder}c" * 400)
        Path("own.csv").write_text(f"client,sample\n0,{'1' if folder == 'a' else '2'}\n1,3\n")
        for name in ("own.npz", "own.txt", "own.csv"):
            os.utime(name, (1, 1))
        source = {"npz": SOURCES["npz"](path="own.npz", test_share=0.0), "partition": digits}.get(
            kind, SOURCES["text"](path="own.txt")
        )
        fixed = SCENARIOS["partition"](path="own.csv")
        scenario = fixed if kind == "partition" else SCENARIOS["iid"](clients=1)
        config = DataConfig(None, str(tmp_path / "cache"), source, scenario)
        made.append(np.array(open_federation(config, 0).samples(0)[0]))
    assert not np.array_equal(*made)


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


def counted_build(folder: str) -> None:
    """Build `folder`, and leave a file beside it for each time that it was really built."""

    def noted(place: Path) -> dict:
        with (Path(folder).parent / "built").open("a") as file:
            file.write("x")
        return fill(place)

    cache.ensure(Path(folder), noted, lambda line: None)


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as workers:
        workers.map_async(counted_build, [str(tmp_path / "a")] * 16, chunksize=1).get(timeout=60)
    assert (tmp_path / "built").read_text() == "x"


def test_who_waits_for_another_builder_says_so_and_uses_its_folder(tmp_path):
    """The other process holds the lock until this one has said that it waits."""
    place, said, other = tmp_path / "a", [], (tmp_path / ".a.lock").open("w")
    assert cache.try_lock(other)

    def progress(line: str) -> None:
        said.append(line)
        cache._build(place, fill, lambda line: None, "is not there")
        other.close()

    def twice(folder: Path) -> dict:
        raise AssertionError("built again")

    assert cache.ensure(place, twice, progress) == place
    assert said == [f"another process prepares {place}: waiting for it"]


def test_who_locks_just_after_a_builder_has_finished_uses_its_folder(tmp_path, monkeypatch):
    """The other process finishes between this one's look at the folder and its lock."""
    place, try_lock = tmp_path / "a", cache.try_lock

    def late(file) -> bool:
        cache._build(place, fill, lambda line: None, "is not there")
        return try_lock(file)

    def twice(folder: Path) -> dict:
        raise AssertionError("built again")

    monkeypatch.setattr(cache, "try_lock", late)
    assert cache.ensure(place, twice, lambda line: None) == place
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_where_nothing_can_be_locked_the_first_to_finish_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "try_lock", lambda file: True)
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


def in_files(root: Path) -> dict[str, Source]:
    """Write a table, a LEAF data set and a text of some 100,000 numbers each; return their sources."""
    x = np.arange(100_000, dtype=np.int32).reshape(500, 200) % 1000
    table = pd.DataFrame(x, columns=[f"f{i}" for i in range(200)])
    table.assign(y=np.arange(500) % 2, who=np.arange(500) % 50).to_csv(root / "t.csv", index=False)
    text = {"x": ["abcdefghij" * 8] * 800, "y": ["a"] * 800}
    for part in ("train", "test"):
        shard = {"users": [part], "num_samples": [800], "user_data": {part: text}}
        (root / "plays" / part).mkdir(parents=True)
        (root / "plays" / part / "a.json").write_text(json.dumps(shard))
    (root / "text.txt").write_text("a text of many words, line by line\n" * 4000)
    return {
        "table": SOURCES["table"](path="t.csv", target=("y",), client="who"),
        "leaf": SOURCES["leaf"](path="plays"),
        "text": SOURCES["text"](path="text.txt"),
    }


def test_once_prepared_samples_of_tables_and_texts_are_mapped_and_not_copied(tmp_path):
    """Opening and reading one client takes less than half of the bytes that all samples have."""
    for name, source in in_files(tmp_path).items():
        config = DataConfig(str(tmp_path), str(tmp_path / "cache"), source, SCENARIOS["iid"](clients=50))
        open_federation(config, 0)
        tracemalloc.start()
        federation = open_federation(config, 0, build=False)
        federation.client(3).train.x.sum()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert isinstance(federation.pool.inputs.base, np.memmap), name
        assert peak < federation.pool.inputs.nbytes / 2, name
