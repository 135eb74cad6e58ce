"""From configuration and seed to a federation: pool and partition, each prepared once and mapped by all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.core.errors import UserError, require
from mpifl.core.federation import Split
from mpifl.core.rng import key
from mpifl.data.partition.csr import Csr

from . import prepared_cache as cache
from .federation import PoolFederation
from .pool import Pool, check_pool
from .prepared_cache import Progress
from .scenario import Scenario, ScenarioSpec, Table
from .scenarios import Rotated
from .sources import Digits, Photos, Source, in_one_line, normalisation
from .transforms import Finish

BAKE_LIMIT_BYTES = 8 * 2**30
"""Above this, operations run at every visit instead of being stored."""


@dataclass(frozen=True)
class DataConfig:
    """Where data come from and how they are spread over clients.

    Attributes:
        root: folder that holds the source's files; the environment variable MPIFL_DATA if not given.
        cache: folder for prepared data; by default `root`/.mpifl, or ~/.cache/mpifl where that cannot be
            written.
        source: the images.
        scenario: the world made of them.
        public: images of the server's own, for methods that pre-train a network beside the model (FLT).
    """

    root: str | None = None
    cache: str | None = None
    source: Source = field(default_factory=Digits)
    scenario: Scenario = field(default_factory=Rotated)
    public: Source = field(default_factory=Photos)

    @property
    def folder(self) -> Path | None:
        """Return the data root as the user or MPIFL_DATA gives it, None if neither does."""
        root = self.root or os.environ.get("MPIFL_DATA")
        return cache.folder_of(root, "data.root") if root else None

    @property
    def home(self) -> Path:
        """Return the folder for prepared data."""
        folder = self.folder if self.source.needs_root else None
        return cache.home_of(str(folder) if folder else None, self.cache)


def open_federation(
    config: DataConfig,
    seed: int,
    progress: Progress | None = None,
    build: bool = True,
    verify: bool | None = None,
) -> PoolFederation:
    """Open the federation that (`config`, `seed`) describe; the same bytes on every rank and in every order
    of access.

    Args:
        config: source and scenario.
        seed: the data seed.
        progress: told, a line at a time, what is prepared or found corrupt.
        build: prepare what the cache lacks. If False and something lacks, `CacheMissing` is raised at once.
        verify: compare the checksums of the cache; by default whoever may build also verifies.
    """
    say = progress or (lambda line: None)
    verify = build if verify is None else verify
    place, pool = _prepared_pool(config, say, build, verify)
    with _under("data.scenario"):
        world = config.scenario.world(pool, key(seed, "data"))
        if world.drift is not None:
            return PoolFederation(pool, world, world.drift, _finish(config, world, pool))
        name = type(config.scenario).__name__
        code = cache.code_digest(type(config.scenario))
        tag = cache.digest(place.name, name, asdict(config.scenario), seed, code)  # type: ignore[call-overload]
        folder = config.home / f"world-{tag}"
        cache.ensure(folder, lambda to: _fill_world(world, pool, to, say), say, build, verify)
    return _open_world(config, world, pool, folder)


def open_public(config: DataConfig, like: PoolFederation) -> Split:
    """Return the training part of `public` in the shape and normalisation of the clients' images."""
    config = replace(config, source=config.public)
    _, pool = _prepared_pool(config, lambda line: None, True, True)
    images, labels = pool.images[pool.train], pool.labels[pool.train]
    channels, height, width = like.shape
    grey = images.mean(1, keepdims=True, dtype=np.float32)
    x = like.finish(images if images.shape[1] == channels else np.repeat(grey, channels, axis=1))
    if x.shape[-2:] != (height, width):
        x = torch.nn.functional.interpolate(x, (height, width), mode="bilinear", antialias=True)
    return Split(x.contiguous(), torch.from_numpy(np.array(labels)))


def _prepared_pool(config: DataConfig, say: Progress, build: bool, verify: bool) -> tuple[Path, Pool]:
    """Return the folder of the source's pool, and the pool."""
    place = config.home / f"pool-{_pool_digest(config, _states(config))}"
    filled: list[str] = []

    def fill(to: Path) -> Mapping[str, Any]:
        filled.append(place.name)
        return _fill_pool(config, to, say)

    cache.ensure(place, fill, say, build, verify)
    if not filled and (remark := config.source.unwatched()):
        say(remark)
    return place, _open_pool(place)


def prepare(
    config: DataConfig, seed: int, download: bool = True, progress: Progress | None = None
) -> PoolFederation:
    """Fetch what source and public images lack (if `download`), fill the cache, and return the federation."""
    say, root = progress or (lambda line: None), config.folder
    for source in (config.source, config.public):
        if not (source.needs_root and download):
            continue
        remedy = "say where to put the files: --data.root DIR, or set MPIFL_DATA"
        require(root is not None, "data.root", None, remedy)
        assert root is not None
        if any(not os.path.exists(path) for path in _files(source, root)):
            say(f"fetching {source.name} into {root}")
            source.download(root)
    return open_federation(config, seed, progress)


def _files(source: Source, root: Path) -> list[Path]:
    """Return the files that a source reads; refuse names that no folder can have."""
    try:
        return source.files(root)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        remedy = f"cannot be looked into ({in_one_line(error)}); name another folder"
        raise UserError("data.root", str(root), remedy) from error


FileState = tuple[str, int, int]  # name, bytes, time of the last change in ns


def _states(config: DataConfig) -> list[FileState]:
    """Return the states of the files that the source reads; refuse a root that lacks one."""
    source, root = config.source, config.folder
    how = (
        "fetch them with `mpifl prepare CONFIG --data.root DIR`, "
        "or name the folder that holds them (--data.root or MPIFL_DATA)"
    )
    if source.needs_root:
        require(root is not None, "data.root", None, f"source {source.name} needs files: {how}")
    states = []
    for path in _files(source, root or Path()):
        try:
            status = path.stat()
        except (OSError, ValueError) as error:  # a name may be none
            if source.needs_root:
                raise UserError("data.root", str(root), f"{path} is not there: {how}") from error
            remedy = "no such file; give its path, absolute or below data.root"
            raise UserError("data.source.path", str(path), remedy) from error
        states.append((str(path), status.st_size, status.st_mtime_ns))
    return states


def _pool_digest(config: DataConfig, states: list[FileState]) -> str:
    options = asdict(config.source)
    options.pop("normalise")  # applied at every visit, not stored
    code = cache.code_digest(type(config.source))
    return cache.digest(config.source.name, options, states, code)


def _fill_pool(config: DataConfig, to: Path, say: Progress) -> Mapping[str, Any]:
    say(f"preparing {config.source.name}" + (f" from {config.folder}" if config.source.needs_root else ""))
    pool = config.source.load(config.folder or Path(), to)
    check_pool(pool, "data.source")
    if not (to / "images.npy").exists():
        cache.save(to, "images", pool.images)
    cache.save(to, "labels", pool.labels.astype(np.int64))
    if pool.origin is not None:
        cache.save(to, "origin", pool.origin.astype(np.int64))
    return {"num_train": pool.num_train, "num_classes": pool.num_classes, "origin_names": pool.origin_names}


def _open_pool(place: Path) -> Pool:
    noted = cache.facts(place)
    origin = cache.load(place, "origin") if (place / "origin.npy").exists() else None
    names = tuple(noted["origin_names"])
    images, labels = cache.load(place, "images"), cache.load(place, "labels")
    return Pool(images, labels, noted["num_train"], noted["num_classes"], origin, names)


def _fill_world(world: ScenarioSpec, pool: Pool, to: Path, say: Progress) -> Mapping[str, Any]:
    splits = world.splits()
    table = Table(splits, world.op_groups)
    say(f"splitting {len(pool.labels)} samples over {len(table.sizes)} clients")
    baked = world.bake and _bytes(world, pool, table) <= BAKE_LIMIT_BYTES
    if baked:
        splits = _bake(PoolFederation(pool, world, table, Finish((0.0,), (1.0,))), splits, to)
    for name, csr in splits.items():
        for part, array in (("offsets", csr.offsets), ("index", csr.index), ("row", csr.row)):
            if array is not None:
                cache.save(to, f"{name}_{part}", array)
    return {"splits": list(splits), "baked": baked}


def _bake(federation: PoolFederation, splits: Mapping[str, Csr], to: Path) -> dict[str, Csr]:
    """Write every client's finished pixels one after the other; return the partition of what was written."""
    total = sum(len(csr.index) for csr in splits.values() if csr.index is not None)
    shape = federation.samples(0)[0].shape[1:]
    images, labels = cache.allocate(to, "images", (total, *shape)), np.empty(total, np.int64)
    baked, start = {}, 0
    for name, csr in splits.items():
        assert csr.row is None, "only partitions of one row for each client can be baked"
        baked[name] = Csr(csr.offsets + start)
        for k in range(federation.num_clients):
            rows = baked[name].of(k)
            images[rows], labels[rows] = federation.samples(k, name)
        start = int(baked[name].offsets[-1])
    images.flush()  # type: ignore[attr-defined]
    cache.save(to, "labels", labels)
    return baked


def _bytes(world: ScenarioSpec, pool: Pool, table: Table) -> int:
    sample = PoolFederation(pool, world, table, Finish((0.0,), (1.0,))).samples(0)[0]
    size = int(np.prod(sample.shape[1:]))
    return size * sum(int(csr.offsets[-1]) for csr in table.splits.values())


def _open_world(config: DataConfig, world: ScenarioSpec, pool: Pool, folder: Path) -> PoolFederation:
    noted = cache.facts(folder)
    splits = {name: _open_csr(folder, name) for name in noted["splits"]}
    finish = _finish(config, world, pool)
    if noted["baked"]:
        images, labels = cache.load(folder, "images"), cache.load(folder, "labels")
        pool = Pool(images, labels, len(labels), pool.num_classes)
        world = replace(world, blocks=None, ops=(), special={name: () for name in world.special}, resize=None)
    return PoolFederation(pool, world, Table(splits, world.op_groups), finish)


def _open_csr(folder: Path, name: str) -> Csr:
    def array(part: str) -> np.ndarray | None:
        return cache.load(folder, f"{name}_{part}") if (folder / f"{name}_{part}.npy").exists() else None

    return Csr(np.asarray(cache.load(folder, f"{name}_offsets")), array("index"), array("row"))


def _finish(config: DataConfig, world: ScenarioSpec, pool: Pool) -> Finish:
    chosen = config.source.normalise or world.normalise or "standard"
    channels = pool.shape[0]
    for op in world.ops:
        channels = op.channels(channels)
    mean, std = normalisation(config.source, chosen, channels)
    return Finish(mean, std, world.resize)


@contextmanager
def _under(section: str) -> Iterator[None]:
    """Place the key of a user error below `section`, unless it already says where it belongs."""
    try:
        yield
    except UserError as error:
        raise (error if error.key.startswith("data.") else error.under(section)) from error.__cause__
