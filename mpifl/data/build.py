"""From configuration and seed to a federation: pool and partition, each prepared once and memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mpifl.core.errors import UserError, code_failed, is_ours, name_of, no_memory, require, within_memory
from mpifl.core.federation import CLASSES, FEATURES, IMAGES, MASKS, TOKENS, Split
from mpifl.core.files import same_folder
from mpifl.core.options import Options, PositiveShare
from mpifl.core.process import check_memory
from mpifl.core.progress import doing, each
from mpifl.core.rng import key
from mpifl.data.partition.csr import Csr, thinned

from . import prepared_cache as cache
from .federation import PoolFederation
from .pool import Pool, check_pool, repeated, sparing_categories, standardised
from .prepared_cache import Progress
from .scenario import (
    CLIENT_BYTES,
    FixedPartition,
    Scenario,
    ScenarioSpec,
    check_drift,
    check_ops,
    check_spec,
    check_splits,
)
from .scenarios.partition_file import FORMATS, check_format, exported, write
from .scenarios.relations import Relations
from .scenarios.rotated import Rotated
from .sources.base import MEASURED, NORMALISATIONS, Source, in_one_line
from .sources.scikit import Digits, Photos
from .transforms import ToFeatures, ToInputs, ToTensor, ToTokens

MATERIALIZE_LIMIT_BYTES = 8 * 2**30  # above it, operations run at every visit; their results are not stored
ARRAYS = ("inputs", "labels", "origin", "mean", "std")  # fields of a pool; the others are facts


@dataclass(frozen=True)
class DataConfig(Options):
    """Configuration of the data.

    Attributes:
        root: folder that holds the source's files; null: the environment variable MPIFL_DATA.
        cache: folder for prepared data; null: `root`/.mpifl, or ~/.cache/mpifl if that cannot be written.
        source: the data set that the samples come from.
        scenario: how the samples are divided among clients and transformed.
        public: images that the server owns, for methods that pre-train an auxiliary network (FLT).
        evaluate_on: the samples that clients are evaluated on: `test`, or `validation`, with which options
            are chosen (section `tune` of a sweep); the test samples are then not used. Further test sets
            stay what they are.
        share: share of each client's training, validation and test samples that it keeps, drawn at random, at
            least one of each: a smaller federation with the same clients and groups.
    """

    root: str | None = None
    cache: str | None = None
    source: Source = field(default_factory=Digits)
    scenario: Scenario = field(default_factory=Rotated)
    public: Source = field(default_factory=Photos)
    evaluate_on: Literal["test", "validation"] = "test"
    share: PositiveShare = 1.0

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
    cache_bytes: int = 0,
) -> PoolFederation:
    """Open the federation that `config` and `seed` describe: the same bytes on every rank and in any order.

    Args:
        config: source and scenario.
        seed: the data seed.
        progress: called with a line for everything that is prepared or found corrupt.
        build: whether to prepare what the cache lacks.
        verify: whether to compare the checksums of the cache; None: as `build`.
        cache_bytes: maximum size of the federation's cache of splits as tensors.

    Raises:
        CacheMissing: the cache lacks something and `build` is false.
        UserError: source or scenario cannot be built as configured.
    """
    say = progress or (lambda line: None)
    verify = build if verify is None else verify
    place, pool = _prepared_pool(config, say, build, verify)
    with _under("data.scenario"):
        _check_fits(config, pool)
        with doing("composing the scenario"):
            spec = _composed(config, pool, seed)
        to_inputs, normalisation = _to_inputs(config, spec, pool)
        content = {"samples": cache.content(place, "images", "labels", "origin")}
        content["normalisation"] = normalisation
        name = name_of(config.scenario)
        if spec.drift is not None:
            remedy = "clients draw their samples when they are visited; use test, or another scenario"
            require(config.evaluate_on == "test", "data.evaluate_on", config.evaluate_on, remedy)
            remedy = (
                "clients draw their samples when they are visited; use 1, and fewer samples in the scenario"
            )
            require(config.share == 1, "data.share", config.share, remedy)
            with _of_users(config.scenario, "drift"):
                check_drift(spec, spec.drift, pool, name)
            check_memory("clients", len(spec.drift.sizes), CLIENT_BYTES)
            return PoolFederation(pool, spec, spec.drift, to_inputs, content, cache_bytes)
        code, kind = cache.code_digest(type(config.scenario)), type(config.scenario).__name__
        files = config.scenario.files()
        read = [_file_state(path) for path in files]
        share = () if config.share == 1 else (config.share,)
        tag = cache.digest(place.name, kind, read, asdict(config.scenario), seed, code, *share)  # type: ignore[call-overload]
        folder = config.home / f"scenario-{tag}"
        cache.ensure(folder, lambda to: _write_scenario(name, spec, pool, to, say, files), say, build, verify)
    noted, arrays = cache.facts(folder), cache.load_all(folder)
    for line in noted["remarks"]:
        say(line)
    content["split"] = cache.content(folder, "labels", *(name for name in arrays if name != "images"))
    if noted["files"]:
        content["files"] = noted["files"]
    splits = {
        name: Csr(*(arrays.get(f"{name}_{part}") for part in ("offsets", "index", "row")))  # type: ignore[arg-type]
        for name in noted["splits"]
    }
    if noted["materialized"]:
        labels, plain = arrays["labels"], {name: () for name in spec.split_ops}
        pool = Pool(arrays["images"], labels, len(labels), pool.num_classes, class_names=pool.class_names)
        spec = replace(spec, blocks=None, ops=(), split_ops=plain, resize=None)
    if config.evaluate_on == "validation":
        remedy = "clients hold no validation samples; set data.scenario.validation, or use test"
        require(bool(splits["val"].sizes.any()), "data.evaluate_on", config.evaluate_on, remedy)
        splits["test"], noted = splits["val"], {**noted, "test_pool": noted["val_pool"]}
        spec = replace(spec, split_ops={**spec.split_ops, "test": spec.split_ops.get("val", spec.ops)})
    table = FixedPartition(splits, spec.op_groups, noted["test_pool"])
    return PoolFederation(pool, spec, table, to_inputs, content, cache_bytes)


def export_partition(config: DataConfig, seed: int, path: Path, key_of_path: str) -> int:
    """Write the partition to a file that scenario `partition` reads.

    Args:
        config: source and scenario.
        seed: the data seed.
        path: .csv or .parquet.
        key_of_path: the option that names the file, for error messages.

    Returns:
        The number of rows.

    Raises:
        UserError: the clients change from visit to visit, or the file cannot be written.
    """
    check_format(path, key_of_path, FORMATS[:2])
    _, pool = _prepared_pool(config, lambda line: None, True, True)
    with _under("data.scenario"):
        spec = _composed(config, pool, seed)
        name = name_of(config.scenario)
        table = exported(spec, pool, config.source.name, {"scenario": name, "seed": seed})
    write(table, path, key_of_path)
    return len(table.frame)


def open_public(config: DataConfig, like: PoolFederation) -> Split:
    """Return the training part of `public` in the shape and normalisation of the clients' images.

    Raises:
        UserError: the clients' samples, or those of `public`, are not images, or `public` has a normalisation
            of its own.
    """
    for name in ("normalise", "mean"):
        remedy = "has no effect: the server's images are normalised as those of the clients; leave it out"
        value = getattr(config.public, name)
        require(value is None, f"data.public.{name}", value, remedy)
    remedy = "the server pre-trains on its own images, and these samples are not images; use another method"
    require(like.info.inputs == IMAGES, "data.source.name", config.source.name, remedy)
    config = replace(config, source=config.public)
    _, pool = _prepared_pool(config, lambda line: None, True, True)
    remedy = f"its samples are {pool.kind}, not images; use a source of images, such as fashionmnist"
    require(pool.kind == IMAGES, "data.public", config.public.name, remedy)
    images, labels = pool.images[pool.train], pool.labels[pool.train]
    channels, height, width = like.shape
    grey = images.mean(1, keepdims=True, dtype=np.float32)
    x = like.to_tensor(images if images.shape[1] == channels else np.repeat(grey, channels, axis=1))
    if x.shape[-2:] != (height, width):
        x = torch.nn.functional.interpolate(x, (height, width), mode="bilinear", antialias=True)
    return Split(x.contiguous(), torch.from_numpy(np.array(labels)))


def _composed(config: DataConfig, pool: Pool, seed: int) -> ScenarioSpec:
    """Return the specification of the scenario, which may draw from the global generators if it is a user's.

    Its splits are thinned to `config.share`.

    Raises:
        UserError: something else is returned, or the specification has fields that nothing can use.
        CodeFailed: the user's own code raised an exception.
    """
    scenario = config.scenario
    address, name = key(seed, "data"), name_of(scenario)
    with address.of("composed").seeded(), _of_users(scenario, "compose"):
        spec = scenario.compose(pool, address)
    check_spec(spec, pool, name)
    known = f"known: {', '.join(NORMALISATIONS)}"
    require(spec.normalise is None or spec.normalise in NORMALISATIONS, "normalise", spec.normalise, known)
    if not is_ours(scenario):
        with _of_users(scenario, "ops"):
            check_ops(spec, pool, name)

    def splits() -> Mapping[str, Csr]:
        with address.of("splits").seeded(), _of_users(scenario, "splits"):
            whole = spec.splits()
        if config.share == 1:
            return whole
        check_splits(spec, whole, pool, name)
        draws = address.of("share")
        return {name: thinned(csr, config.share, draws.of(name).numpy()) for name, csr in whole.items()}

    return replace(spec, splits=splits)


@contextmanager
def _of_users(options: Source | Scenario, what: str) -> Iterator[None]:
    """Raise `CodeFailed` for an exception of a user's class; its traceback starts at the user's code.

    The working folder stays what it is.
    """
    try:
        with same_folder():
            yield
    except Exception as error:
        if isinstance(error, UserError) or no_memory(error) or is_ours(options):
            raise
        kind = "source" if isinstance(options, Source) else "scenario"
        raise code_failed(f"{kind} {type(options).__name__}.{what}", error) from error


def _check_fits(config: DataConfig, pool: Pool) -> None:
    """Raise `UserError` for a scenario that reads classes or changes images if the source has none."""
    if not (why := _misfit(config, pool)):
        return
    kept = _proposed(config.scenario, pool)[1]
    options = ", ".join(f"{n}: {value}" for n, value in {"name": "relations", **kept}.items())
    given = f"'{{{options}}}'" if kept else "relations"
    others = f"use iid, lognormal, powerlaw or natural, or for known groups --data.scenario {given}"
    others += ", rotated, composed or mixed" if pool.label_kind == MASKS else ""
    raise UserError("name", name_of(config.scenario), f"{why}; {others}")


def _misfit(config: DataConfig, pool: Pool) -> str:
    """Return why a scenario cannot serve the samples of a source; empty if it can."""
    scenario, source = type(config.scenario), config.source.name
    fits = pool.label_kind == CLASSES or not scenario.by_class
    if not (fits or (pool.label_kind == MASKS and scenario.of_masks)):
        return f"it divides the samples by class, but labels of {source} are {pool.label_kind}"
    if pool.kind != IMAGES and scenario.of_images:
        return f"it changes images, but samples of {source} are {pool.kind}"
    return ""


def _proposed(scenario: Scenario, pool: Pool) -> tuple[Relations, dict[str, Any]]:
    """Return a scenario of known groups that fits any source, and those of its options that are no defaults.

    Args:
        scenario: the scenario in whose place it is; the number of clients and the validation share are kept.
        pool: the samples.
    """
    kept = {n: value for n in ("clients", "validation") if (value := getattr(scenario, n, None)) is not None}
    if pool.categories or pool.parts or pool.label_kind == MASKS:
        kept["permutes"] = "labels"
    if (clients := int(kept.get("clients", Relations.clients))) % Relations.groups and clients > 1:
        kept["groups"] = next(g for g in range(2, clients + 1) if clients % g == 0)  # of equal size
    kept = {n: value for n, value in kept.items() if value != getattr(Relations, n)}
    return Relations(**kept), kept


def scenario_in_place(config: DataConfig, say: Progress) -> tuple[Scenario, str] | None:
    """Return the scenario to take where the configured one cannot serve the samples of the source.

    The source is prepared if the cache lacks it.

    Args:
        config: source and scenario.
        say: called with a line if the source has to be prepared.

    Returns:
        The scenario that the refusal of the configured one proposes, and why that cannot serve; None if it
        can.

    Raises:
        UserError: the source cannot be opened.
    """
    place, _ = _ensured_pool(config, say, build=True, verify=False)
    pool = _open_pool(place)
    why = _misfit(config, pool)
    return (_proposed(config.scenario, pool)[0], why) if why else None


def _prepared_pool(config: DataConfig, say: Progress, build: bool, verify: bool) -> tuple[Path, Pool]:
    """Return the folder of the source's pool, and the pool."""
    place, filled = _ensured_pool(config, say, build, verify)
    if not filled and (remark := config.source.unwatched()):
        say(remark)
    pool = _open_pool(place)
    for line in pool.remarks:
        say(line)
    return place, pool


def _ensured_pool(config: DataConfig, say: Progress, build: bool, verify: bool) -> tuple[Path, bool]:
    """Return the folder of the source's pool, and whether it was prepared now."""
    place = config.home / f"pool-{_pool_digest(config, _states(config))}"
    filled: list[str] = []

    def fill(to: Path) -> Mapping[str, Any]:
        filled.append(place.name)
        return _write_pool(config, to, say)

    with within_memory("data.source", config.source):
        cache.ensure(place, fill, say, build, verify)
    return place, bool(filled)


def prepare(
    config: DataConfig, seed: int, download: bool = True, progress: Progress | None = None
) -> PoolFederation:
    """Download missing files, fill the cache, and return the federation.

    Args:
        config: source, scenario and public images.
        seed: the data seed.
        download: whether to fetch missing files of source and public images, if they can be downloaded.
        progress: called with a line for every step.

    Raises:
        UserError: there is no data root, a missing file cannot be fetched, or see `open_federation`.
    """
    say, root = progress or (lambda line: None), config.folder
    for source in (config.source, config.public):
        if not (source.needs_root and download):
            continue
        remedy = "say where to put the files: --data.root DIR, or set MPIFL_DATA"
        require(root is not None, "data.root", None, remedy)
        assert root is not None
        missing = [path for path in _files(source, root) if not os.path.exists(path)]
        if missing and not _is_offered(source):
            raise _not_there(source, root, missing[0])
        if missing:
            say(f"fetching {source.name} into {root}")
            with doing(f"fetching {source.name}"):
                source.download(root)
    return open_federation(config, seed, progress)


def _files(source: Source, root: Path) -> list[Path]:
    """Return the files that a source reads; refuse a root that cannot be searched."""
    try:
        return source.files(root)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        remedy = f"cannot be looked into ({in_one_line(error)}); name another folder"
        raise UserError("data.root", str(root), remedy) from error


FileState = tuple[str, int, int]  # absolute name, bytes, time of the last change in ns


def _states(config: DataConfig) -> list[FileState]:
    """Return the states of the files that the source reads; refuse a root that lacks one."""
    source, root = config.source, config.folder
    if source.needs_root:
        require(root is not None, "data.root", None, f"source {source.name} needs files: {_how(source)}")
    states = []
    for path in _files(source, root or Path()):
        try:
            states.append(_file_state(path))
        except (OSError, ValueError) as error:  # ValueError: no valid file name
            if source.needs_root:
                raise _not_there(source, root or Path(), path) from error
            remedy = "no such file; give its path, absolute, below data.root or in the working folder"
            raise UserError("data.source.path", str(path), remedy) from error
    return states


def _is_offered(source: Source) -> bool:
    """Return whether the files of a source can be downloaded."""
    return type(source).download is not Source.download


def _how(source: Source) -> str:
    """Return advice on how to get the files of a source below data.root."""
    named = "name the folder that holds them (--data.root or MPIFL_DATA)"
    if _is_offered(source):
        return f"fetch them with `mpifl prepare CONFIG --data.root DIR`, or {named}"
    return f"{source.name} cannot be downloaded; put them there by hand, or {named}"


def _not_there(source: Source, root: Path, path: Path) -> UserError:
    """Return the error for a missing file of a source; its key is the one that the user set."""
    named = getattr(source, "path", None)
    if named is None:
        return UserError("data.root", str(root), f"{path} is not there: {_how(source)}")
    remedy = f"{path} is not there; give a path that holds such files, absolute or below data.root ({root})"
    return UserError("data.source.path", named, remedy)


def _file_state(path: Path) -> FileState:
    """Return the state of a file; its name is absolute, because the working folder may change."""
    status = path.stat()
    return os.path.abspath(path), status.st_size, status.st_mtime_ns


def _pool_digest(config: DataConfig, states: list[FileState]) -> str:
    options = asdict(config.source)
    for name in ("normalise", "mean", "std"):  # applied at every visit, not stored
        options.pop(name, None)
    if config.source.hands_on_root:
        options["root"] = os.path.abspath(config.folder or Path())
    code = cache.code_digest(type(config.source))
    return cache.digest(config.source.name, options, states, code)


def _write_pool(config: DataConfig, to: Path, say: Progress) -> Mapping[str, Any]:
    say(f"preparing {config.source.name}" + (f" from {config.folder}" if config.source.needs_root else ""))
    drawing = key(0, "source").seeded()  # a user's source may draw: the same when it is prepared again
    with doing(f"reading {config.source.name}"), _of_users(config.source, "load"), drawing:
        pool = config.source.load(config.folder or Path(), to)
    check_pool(pool, "data.source")
    with doing("looking for test samples that also train"):
        if line := repeated(pool):
            pool = replace(pool, remarks=(*pool.remarks, f"source {config.source.name}: {line}"))
    if pool.kind != IMAGES or config.source.published is None:
        pool = standardised(pool)
    labels = pool.labels.astype(np.int64) if pool.label_kind == CLASSES else pool.labels
    origin = None if pool.origin is None else pool.origin.astype(np.int64)
    arrays = {"images": pool.inputs, "labels": labels, "origin": origin, "mean": pool.mean, "std": pool.std}
    for name, array in arrays.items():
        if array is not None and not (name == "images" and (to / "images.npy").exists()):
            cache.save(to, name, array)
    return {f.name: getattr(pool, f.name) for f in fields(pool) if f.name not in ARRAYS}


def _open_pool(place: Path) -> Pool:
    facts = {name: _as_tuple(value) for name, value in cache.facts(place).items()}
    arrays: dict[str, Any] = cache.load_all(place)
    return Pool(arrays.pop("images"), **arrays, **facts)


def _as_tuple(value: Any) -> Any:
    """Return a JSON value with its lists as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _write_scenario(
    name: str, spec: ScenarioSpec, pool: Pool, to: Path, say: Progress, files: Sequence[Path]
) -> Mapping[str, Any]:
    with doing("splitting the samples"):
        splits = spec.splits()
        check_splits(spec, splits, pool, name)
        remarks = list(spec.remarks(splits))
    table = FixedPartition(splits, spec.op_groups)
    say(f"splitting {len(pool.labels)} samples over {len(table.sizes)} clients")
    shared = any(csr.row is not None for csr in splits.values())  # each client would store a copy
    whole = spec.public or spec.group_test_sets  # addresses in the source, which are not stored
    materialized = spec.materialize and pool.kind == IMAGES and not shared and not whole
    if materialized:
        plain = PoolFederation(pool, spec, table, ToTensor((0.0,), (1.0,)))
        size = int(np.prod(plain.samples(0)[0].shape[1:]))
        materialized = size * sum(int(csr.offsets[-1]) for csr in splits.values()) <= MATERIALIZE_LIMIT_BYTES
        splits = _materialize(plain, splits, to) if materialized else splits
    for split, csr in splits.items():
        for part, array in vars(csr).items():
            if array is not None:
                cache.save(to, f"{split}_{part}", array)
    noted = {"splits": list(splits), "materialized": materialized}
    noted |= {f"{split}_pool": table.different(split) for split in ("val", "test")}
    read = [cache.sha256_of(path) for path in files]
    return {**noted, "remarks": remarks, "files": cache.digest(read) if read else ""}


def _materialize(federation: PoolFederation, splits: Mapping[str, Csr], to: Path) -> dict[str, Csr]:
    """Store every client's transformed images one after the other; return their partition."""
    total = sum(len(csr.index) for csr in splits.values() if csr.index is not None)
    x, y = federation.samples(0)
    images = cache.allocate(to, "images", (total, *x.shape[1:]))
    labels = np.empty((total, *y.shape[1:]), y.dtype)
    materialized, start = {}, 0
    for name, csr in splits.items():
        assert csr.row is None, "only partitions of one row for each client can be materialized"
        materialized[name] = Csr(csr.offsets + start)
        for k in each(range(federation.num_clients), f"transforming the {name} images", "clients"):
            rows = materialized[name].of(k)
            images[rows], labels[rows] = federation.samples(k, name)
        start = int(materialized[name].offsets[-1])
    images.flush()  # type: ignore[attr-defined]
    cache.save(to, "labels", labels)
    return materialized


def _to_inputs(config: DataConfig, spec: ScenarioSpec, pool: Pool) -> tuple[ToInputs, str]:
    """Return the conversion of samples to a model's inputs, and the name of the normalisation.

    Raises:
        UserError: the normalisation does not fit the samples.
    """
    source = config.source
    chosen, given = source.normalise or spec.normalise or "standard", source.mean is not None
    name, mean, std = "given" if given else chosen, source.mean or (), source.std or ()
    if pool.kind != IMAGES:
        what = f"samples are {pool.kind}, not images; leave it out"
        require(not given or pool.kind == FEATURES, "data.source.mean", list(mean), what)
        allowed = (None,) if pool.kind == TOKENS else (None, "standard", "unit")
        require(source.normalise in allowed, "data.source.normalise", source.normalise, f"these {what}")
        if pool.kind == TOKENS:
            return ToTokens(), name
        if given:
            remedy = f"give one number, or {pool.shape[-1]}: one for each feature"
            require(len(mean) in (1, pool.shape[-1]), "data.source.mean", list(mean), remedy)
            numbers = np.array(mean, np.float32), np.array(std, np.float32)
            return ToFeatures(*sparing_categories(pool, *numbers)), name
        return (_as_units(pool) if source.normalise == "unit" else ToFeatures(pool.mean, pool.std)), name
    channels = pool.shape[0]
    for op in spec.ops:
        channels = op.channels(channels)
    if not given:
        known = NORMALISATIONS[chosen] or source.published
        name = chosen if known else MEASURED
        assert pool.mean is not None or known
        mean, std = known or (tuple(map(float, pool.mean)), tuple(map(float, pool.std)))  # type: ignore[arg-type]
    key, value = ("mean", str(list(mean))) if given else ("normalise", chosen)
    remedy = "give one number, or one for each channel" if given else "use standard, unit or half"
    has = f"has {len(mean)} channels but the images have {channels}"
    require(len(mean) in (1, channels), f"data.source.{key}", value, f"{has}; {remedy}")
    times = channels if len(mean) == 1 else 1
    return ToTensor(mean * times, std * times, spec.resize), name


def _as_units(pool: Pool) -> ToFeatures:
    """Return the conversion that leaves features as they are; images of several inputs are pixels / 255."""
    if not pool.parts:
        return ToFeatures()
    unit = [np.full(part.width, 255.0 if part.inputs == IMAGES else 1.0, np.float32) for part in pool.parts]
    return ToFeatures(np.zeros(pool.shape, np.float32), np.concatenate(unit))


@contextmanager
def _under(section: str) -> Iterator[None]:
    """Prefix the key of a user error with `section`, unless it already names a section."""
    try:
        yield
    except UserError as error:
        raise (error if error.key.startswith("data.") else error.under(section)) from error.__cause__
