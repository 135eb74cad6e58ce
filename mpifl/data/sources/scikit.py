"""Tables that ship with scikit-learn: regression and classification without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.rng import key
from mpifl.data.pool import Pool, stratified
from mpifl.data.sources.base import Source

TEST_SHARE = 0.2
BINS = 8  # ranges of a number to predict, by which the test part is stratified


@dataclass(frozen=True)
class ScikitLearn(Source):
    """A table that ships with scikit-learn.

    For regression: diabetes (442 x 10, one number) and linnerud (20 x 3, three numbers). For classification:
    breast_cancer (569 x 30, 2 classes), wine (178 x 13, 3 classes) and iris (150 x 4, 3 classes).

    None has an official test part: a fixed fifth of each class, or of each range of the first number, is set
    aside for testing, the same for every seed. Numbers to predict are standardised by the training part.

    Attributes:
        table: diabetes, breast_cancer, wine, iris or linnerud.
    """

    name: ClassVar[str] = "sklearn"
    needs_root: ClassVar[bool] = False

    table: Literal["diabetes", "breast_cancer", "wine", "iris", "linnerud"] = "diabetes"

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the tables are inside scikit-learn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Put the test fifth behind the rest."""
        from sklearn import datasets  # heavy: only when a table is read

        data = getattr(datasets, f"load_{self.table}")()
        x, y = np.asarray(data.data, np.float32), np.asarray(data.target)
        numbers = self.table in ("diabetes", "linnerud")
        first = y.reshape(len(y), -1)[:, 0]
        strata = np.digitize(first, np.quantile(first, np.linspace(0, 1, BINS + 1)[1:-1])) if numbers else y
        train, test = stratified(strata.astype(np.int64), TEST_SHARE, key(0, "sklearn", self.table))
        order = np.concatenate([train, test])
        if not numbers:
            names = tuple(map(str, data.target_names))
            return Pool(x[order], y[order].astype(np.int64), len(train), len(names), class_names=names)
        y = y.reshape(len(y), -1).astype(np.float64)
        y = ((y - y[train].mean(0)) / y[train].std(0)).astype(np.float32)
        names = tuple(map(str, data.target_names)) if self.table == "linnerud" else ("progression",)
        return Pool(x[order], y[order], len(train), y.shape[1], class_names=names)
