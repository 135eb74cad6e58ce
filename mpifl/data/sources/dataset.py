"""A user's own `torch.utils.data.Dataset`, named by import path."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.imports import load_object
from mpifl.data.pool import Pool, images_of
from mpifl.data.sources.base import Source
from mpifl.data.sources.npz import labels_of, with_test_part
from mpifl.data.world import check_fraction


@dataclass(frozen=True)
class Dataset(Source):
    """A map-style data set of (image, label): PIL images, uint8 arrays, or floats in [0, 1]; all of one size.

    It is called with those of the arguments `root` and `train` that it takes. Without `train` a stratified
    share is set aside as the test part.

    Attributes:
        path: "package.module:Name" or "file.py:Name", Name being the class or a function that returns a data
            set.
        test_share: share of every class set aside if Name takes no `train`.
    """

    name: ClassVar[str] = "dataset"
    needs_root: ClassVar[bool] = False

    path: str = ""
    test_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        where, _, what = self.path.rpartition(":")
        require(
            bool(where and what), "path", self.path, 'name a class: "package.module:Name" or "file.py:Name"'
        )
        check_fraction("test_share", self.test_share)

    def files(self, root: Path) -> list[Path]:
        """Return the file that defines the data set: it is prepared anew when that changes."""
        where = self.path.rpartition(":")[0]
        if where.endswith(".py"):
            return [Path(where).expanduser()]
        try:
            spec = importlib.util.find_spec(where)
        except ImportError:
            spec = None
        if spec is None:
            raise UserError("data.source.path", self.path, f"there is no module {where} to import")
        return [Path(spec.origin)] if spec.origin and Path(spec.origin).exists() else []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read every item."""
        factory = load_object(self.path, "data.source.path")
        takes = inspect.signature(factory).parameters
        parts = [
            self._read(factory, takes, str(root), train) for train in (True, False)[: 1 + ("train" in takes)]
        ]
        if len(parts) == 1:
            return with_test_part(*parts[0], self.test_share, None)
        images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return Pool(images, labels, len(parts[0][1]), int(labels.max()) + 1)

    def _read(
        self, factory: Callable[..., Any], takes: Any, root: str, train: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        given = {name: value for name, value in (("root", root), ("train", train)) if name in takes}
        try:
            items = factory(**given)
        except Exception as error:
            remedy = f"cannot be made from {', '.join(given) or 'nothing'} ({type(error).__name__}: {error})"
            raise UserError("data.source.path", self.path, remedy) from error
        try:
            pairs = [items[i] for i in range(len(items))]
            images = np.stack([np.asarray(image) for image, _ in pairs])
            labels = np.array([int(label) for _, label in pairs], np.int64)
        except (TypeError, ValueError) as error:
            remedy = f"every item must be (image, label), all images of one shape ({error})"
            raise UserError("data.source.path", self.path, remedy) from error
        return images_of(images, "data.source.path"), labels_of(labels, "data.source.path")
