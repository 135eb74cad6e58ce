"""Small data roots in the official formats, written by the tests; the real one where MPIFL_DATA names it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.small_files import KINDS, MNIST_NAMES, write_cifar, write_family, write_idx, write_writers

from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.pool import Pool


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test draw from the start of its module's `RNG`: so it draws the same without the others."""
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data root of small generated files: MNIST with uneven classes, EMNIST, CIFAR-10, FEMNIST."""
    root = tmp_path_factory.mktemp("root")
    uneven = [130, 150, 140, 140, 135, 121, 140, 145, 130, 138]
    for folder in ("MNIST", "FashionMNIST", "KMNIST"):
        write_family(root, folder, (uneven, [50, 52, 51, 50, 49, 48, 50, 50, 50, 50]), MNIST_NAMES)
    for split, classes in (("balanced", 47), ("byclass", 62)):
        names = [f"emnist-{split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in KINDS]
        write_family(root, "EMNIST", ([48] * classes, [8] * classes), names)
    write_cifar(root)
    write_writers(root)
    return root


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
