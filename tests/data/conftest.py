"""Small data roots in the official formats, written by the tests; the real one where MPIFL_DATA names it."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.pool import Pool


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an idx file of unsigned bytes or of 32-bit integers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    code, data = (8, array.astype(np.uint8)) if array.dtype == np.uint8 else (12, array.astype(">i4"))
    path.write_bytes(
        struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + data.tobytes()
    )


def labels_with(counts: list[int], rng: np.random.Generator) -> np.ndarray:
    """Return labels in random order, counts[c] of class c."""
    return rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.uint8)


def write_family(root: Path, folder: str, counts: tuple[list[int], list[int]], names: list[str]) -> None:
    """Write training and test images 28 x 28 and their labels; the first pixel of each image is its label."""
    rng = np.random.default_rng(0)
    for i, count in enumerate(counts):
        labels = labels_with(count, rng)
        images = rng.integers(1, 256, (len(labels), 28, 28), dtype=np.uint8)
        images[:, 0, 0] = labels
        write_idx(root / folder / "raw" / names[2 * i], images)
        write_idx(root / folder / "raw" / names[2 * i + 1], labels)


MNIST_NAMES = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def write_cifar(root: Path) -> None:
    """Write CIFAR-10's batches with 200 images each, 20 of each class."""
    rng = np.random.default_rng(1)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (200, 3072), dtype=np.uint8)
        labels = rng.permutation(np.arange(200) % 10).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": labels, "batch_label": name}))


def write_writers(root: Path) -> None:
    """Write 6 writers' archive as FEMNIST's, writer i with 10 + i training and 2 test images."""
    rng = np.random.default_rng(2)
    counts = [(10 + i, 2) for i in range(6)]
    writer = np.concatenate([np.full(sum(c), i) for i, c in enumerate(counts)]).astype(np.uint16)
    held = np.concatenate([np.repeat([0, 1], c) for c in counts]).astype(np.uint8)
    x = rng.integers(0, 256, (len(writer), 28, 28), dtype=np.uint8)
    y = rng.integers(0, 62, len(writer)).astype(np.uint8)
    (root / "femnist").mkdir(parents=True)
    users = np.array([f"f{9 - i}" for i in range(6)])  # not in the order of their names
    archive = root / "femnist" / "femnist_leaf_writers.npz"
    np.savez(archive, x=x, y=y, writer=writer, is_test=held, users=users)


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data root of small generated files: MNIST with uneven classes, EMNIST, CIFAR-10, FEMNIST."""
    root = tmp_path_factory.mktemp("root")
    uneven = [130, 150, 140, 140, 135, 121, 140, 145, 130, 138]
    for folder in ("MNIST", "FashionMNIST", "KMNIST"):
        write_family(root, folder, (uneven, [50, 52, 51, 50, 49, 48, 50, 50, 50, 50]), MNIST_NAMES)
    for split, classes in (("balanced", 47), ("byclass", 62)):
        names = [f"emnist-{split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in _KINDS]
        write_family(root, "EMNIST", ([48] * classes, [8] * classes), names)
    write_cifar(root)
    write_writers(root)
    return root


_KINDS = ("images-idx3", "labels-idx1")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache folder for the whole session: nothing is decoded twice."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def open_small(small_root: Path, cache: Path):
    """Return a function (source, scenario, seed=0, **options) that opens a federation of small files."""

    def opened(source: str, scenario: str, seed: int = 0, source_options: dict | None = None, **options):
        chosen = SOURCES[source](**(source_options or {}))
        config = DataConfig(str(small_root), str(cache), chosen, SCENARIOS[scenario](**options))
        return open_federation(config, seed)

    return opened


@pytest.fixture(scope="session")
def open_real(cache: Path):
    """Return a function (source, scenario, **options) that opens real files, or skips the test."""
    root = os.environ.get("MPIFL_DATA")

    def opened(source: str, scenario: str, seed: int = 0, **options):
        if not root:
            pytest.skip("MPIFL_DATA names no data root")
        chosen = SOURCES[source]()
        if any(not path.exists() for path in chosen.files(Path(root))):
            pytest.skip(f"the data root holds no {source}")
        return open_federation(DataConfig(root, str(cache), chosen, SCENARIOS[scenario](**options)), seed)

    return opened


@pytest.fixture
def tiny_pool() -> Pool:
    """Return 60 training and 30 test images of 4 x 4, three classes in turn; image i is filled with i."""
    labels = (np.arange(90) % 3).astype(np.int64)
    images = np.broadcast_to(np.arange(90, dtype=np.uint8)[:, None, None, None], (90, 1, 4, 4))
    return Pool(images, labels, 60, 3)


@pytest.fixture(scope="session")
def formats():
    """Return the writers of idx files, for tests that break them."""
    return write_idx
