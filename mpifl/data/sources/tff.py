"""HDF5 files of TensorFlow Federated's simulation data sets: a group for each client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.progress import each
from mpifl.data.pool import Pool
from mpifl.data.sources.arrays import any_labels_of, characters_of, inputs_of, pool_of
from mpifl.data.sources.base import Source, reading
from mpifl.data.sources.leaf import LETTERS

EXAMPLES = "examples"  # the group that holds those of the clients
INPUTS, LABELS, TEXTS = ("pixels", "image", "x"), ("label", "labels", "y"), "snippets"
Held = dict[str, tuple[np.ndarray, np.ndarray]]  # client -> samples, labels


@dataclass(frozen=True)
class TensorFlowFederated(Source):
    """A data set of TensorFlow Federated as HDF5: NAME_train.h5 and NAME_test.h5, by h5py.

    FEMNIST's `pixels`, CIFAR-100's `image` and numbers under `x` are samples as they stand; `snippets` of
    text (Shakespeare) give a sample for each character that follows `length` others. Clients are origins:
    scenario natural makes each a client. Its newer SQLite files hold protocol buffers and are not read.

    Attributes:
        path: both files without `_train.h5`, below data.root.
        label: name of the labels; None: label, labels or y. CIFAR-100 has `coarse_label`, too.
        length: characters before the one to predict, of snippets.
    """

    name: ClassVar[str] = "tff"

    path: str = "fed_emnist"
    label: str | None = None
    length: int = 80

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.length > 0, "length", self.length, "counts characters")

    def files(self, root: Path) -> list[Path]:
        """Return both files, training part first."""
        return [root / f"{self.path}_{part}.h5" for part in ("train", "test")]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read both files; clients are numbered by name."""
        train, test = map(self._read, self.files(root))
        clients = sorted(train.keys() | test.keys())
        rows = [(i, held[c]) for held in (train, test) for i, c in enumerate(clients) if c in held]
        name = str(root / self.path)
        require(bool(train) and bool(test), name, "no clients", "both files need some; fetch them again")
        try:
            x, y = (np.concatenate([held[column] for _, held in rows]) for column in (0, 1))
        except ValueError as error:
            raise UserError(name, "shapes", "samples of all clients must have one shape") from error
        count = sum(len(labels) for _, labels in train.values())
        text = x.dtype.kind == "U"
        inputs = characters_of(x.tolist(), LETTERS, f"{name}: {TEXTS}") if text else inputs_of(x, name)
        labels = any_labels_of(y, f"{name}: labels")
        origin = np.repeat([i for i, _ in rows], [len(held[1]) for _, held in rows]).astype(np.int64)
        parts = (inputs[:count], labels[:count]), (inputs[count:], labels[count:])
        names, vocabulary = (tuple(map(repr, LETTERS)), len(LETTERS)) if text else ((), 0)
        return pool_of(*parts, name, names, vocabulary, 0.0, origin, tuple(clients))

    def _read(self, path: Path) -> Held:
        """Return the clients of a file; those without a sample are left out."""
        try:
            import h5py
        except ImportError as error:
            raise UserError("data.source.name", "tff", 'needs h5py: pip install "mpifl[tff]"') from error
        found: Held = {}
        with reading(path, "an HDF5 file"), h5py.File(path) as file:
            require(EXAMPLES in file, str(path), [*file], f"has no group {EXAMPLES}; fetch it again")
            for client in each([*file[EXAMPLES]], "reading clients", "clients"):
                x, y = self._samples(file[EXAMPLES][client], f"{path}: client {client}")
                if len(y):
                    found[client] = x, y
        return found

    def _samples(self, group: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples and labels of a client."""
        if TEXTS in group:
            return self._characters([bytes(t).decode("utf-8", "replace") for t in group[TEXTS][()]])
        wanted = LABELS if self.label is None else (self.label,)
        x = next((name for name in INPUTS if name in group), None)
        y = next((name for name in wanted if name in group), None)
        remedy = f"needs one of {', '.join(INPUTS)} and one of {', '.join(wanted)}"
        if x is None or y is None:
            raise UserError(where, ", ".join(group), remedy)
        samples, labels = np.asarray(group[x][()]), np.asarray(group[y][()])
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
