"""TensorFlow Federated's data sets in HDF5, with a group for each client; read by h5py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.optional_packages import optional
from mpifl.core.options import PositiveInt
from mpifl.core.progress import each
from mpifl.data.pool import Pool
from mpifl.data.sources import arrays, columns
from mpifl.data.sources.base import Source, reading
from mpifl.data.sources.leaf import LETTERS

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = "examples"  # group of the clients
SQLITE = (".sqlite", ".sqlite3", ".db", ".lzma", ".xz")
PARTS = ("train", "test")
INPUTS, LABEL_NAMES, TEXTS = ("pixels", "image", "x"), ("label", "labels", "y"), "snippets"
TWICE = "two clients have this name, but for blanks at its ends: rename one"


@dataclass(frozen=True)
class TensorFlowFederated(Source):
    """A data set of TensorFlow Federated: NAME_train.h5 and NAME_test.h5.

    FEMNIST's `pixels`, CIFAR-100's `image` and numbers under `x` are used as samples; `snippets` of text
    (Shakespeare) give a sample for each character that follows `length` others. Clients are the origins, so
    scenario natural makes each of them a client.

    Attributes:
        path: below data.root: common name of both files, without `_train.h5`.
        label: name of the labels; null: label, labels or y. CIFAR-100 has `coarse_label`, too.
        labels: classes or numbers, for labels of one number each whose type says otherwise, such as classes
            that are stored as floats; null: whole numbers are classes, floats numbers.
        length: for snippets, the number of characters before the one to predict.
    """

    name: ClassVar[str] = "tff"
    readable_labels: ClassVar[tuple[str, ...]] = arrays.LABELS

    path: str = "fed_emnist"
    label: str | None = None
    labels: Literal["classes", "numbers"] | None = None
    length: PositiveInt = 80

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "SQLite is not read: name TFF's HDF5 files, or save the samples by `datasets` (huggingface)"
        require(not self.path.endswith(SQLITE), "path", self.path, remedy)

    def files(self, root: Path) -> list[Path]:
        """Return both files, training part first."""
        return [root / f"{self.path}_{part}.h5" for part in PARTS]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read all samples; clients are numbered by name."""
        import pandas as pd  # heavy: only when files are read

        train, test = map(self._read, self.files(root))
        name = str(root / self.path)
        remedy = "training and test part need some; fetch them again"
        require(bool(train and test), name, "no clients", remedy)
        held = arrays.rows_of_clients(train, test)
        try:
            x, y = np.concatenate(held.samples), np.concatenate(held.labels)
        except ValueError as error:
            raise UserError(name, "shapes", "samples of all clients must have one shape") from error
        index, text = pd.Series(0, held.index), x.dtype.kind == "U"
        arrays.refuse_not_finite(x, f"{name}: x", index)
        inputs = (
            arrays.characters_of(x.tolist(), LETTERS, f"{name}: {TEXTS}")
            if text
            else arrays.inputs_of(x, name)
        )
        labels, classes = self._labels(y, name, index)
        parts = (inputs[: held.count], labels[: held.count]), (inputs[held.count :], labels[held.count :])
        names, vocabulary = (tuple(map(repr, LETTERS)), len(LETTERS)) if text else (classes, 0)
        return arrays.pool_of(*parts, name, names, vocabulary, 0.0, held.origin, held.names, f"{name}: x")

    def _labels(self, y: np.ndarray, name: str, rows: pd.Series) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return labels, and the names of classes where they are texts.

        Args:
            y: the labels of all clients.
            name: the file.
            rows: where they are from, see `refuse_not_finite`.
        """
        if y.dtype.kind not in "OSU":
            return arrays.any_labels_of(y, f"{name}: labels", self.labels, rows), ()
        texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in y.ravel().tolist()]
        import pandas as pd

        column = pd.Series(texts, rows.index, dtype=object)
        return arrays.labels_of_texts(column, name, self.label or "labels", self.labels)

    def _read(self, path: Path) -> dict[str, arrays.Held]:
        """Return the clients of a file; those without a sample are left out."""
        h5py = optional("h5py", "tff", "data.source.name", "tff")
        found: dict[str, arrays.Held] = {}
        with reading(path, "an HDF5 file"), h5py.File(path) as file:
            require(EXAMPLES in file, str(path), [*file], f"has no group {EXAMPLES}; fetch it again")
            for name in each([*file[EXAMPLES]], "reading clients", "clients"):
                x, y = self._samples(file[EXAMPLES][name], f"{path}: client {name}")
                client = columns.clean_name(name, f"{path}: clients")
                require(client not in found, f"{path}: client {client}", "twice", TWICE)
                if len(y):
                    found[client] = x, y
        return found

    def _samples(self, group: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples and labels of a client."""
        if TEXTS in group:
            return self._characters([bytes(t).decode("utf-8", "replace") for t in group[TEXTS][()]])
        wanted = LABEL_NAMES if self.label is None else (self.label,)
        x = next((name for name in INPUTS if name in group), None)
        y = next((name for name in wanted if name in group), None)
        remedy = f"needs one of {', '.join(INPUTS)} and one of {', '.join(wanted)}"
        if x is None or y is None:
            raise UserError(where, ", ".join(group), remedy)
        samples, labels = np.asarray(group[x][()]), np.asarray(group[y][()])
        for name, array in ((x, samples), (y, labels)):
            require(array.ndim > 0, where, name, "is one value: give an array, one for each sample")
        require(len(samples) == len(labels), where, len(labels), f"labels for {len(samples)} samples")
        return samples, labels

    def _characters(self, snippets: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return a text of `length` characters and the number of the next one, for each place in snippets.

        Characters that LEAF's alphabet lacks are left out.
        """
        number = {character: i for i, character in enumerate(LETTERS)}
        known = ["".join(c for c in snippet if c in number) for snippet in snippets]
        places = [(s, i) for s in known for i in range(len(s) - self.length)]
        x = np.array([s[i : i + self.length] for s, i in places], f"U{self.length}")
        return x, np.array([number[s[i + self.length]] for s, i in places], np.int64)
