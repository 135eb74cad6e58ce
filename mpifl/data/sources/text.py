"""Characters of a text, cut into sequences: prediction of the next character without a download."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.options import NonNegativeInt, PositiveInt
from mpifl.data.pool import Pool
from mpifl.data.sources.base import Source

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"()-_"
TEST_EVERY = 5  # the last of every TEST_EVERY sequences is a test sample


@dataclass(frozen=True)
class Text(Source):
    """Characters of a text: the help texts that ship with Python (`pydoc_data.topics`), or a file.

    Letters become lower case, white space becomes one blank, and characters outside of the alphabet (49:
    blank, letters, digits, punctuation) are left out. Documents are cut into sequences that do not overlap;
    every fifth is a test sample. A document is a help topic, or a block between empty lines of a file.
    Documents are the origins, so scenario natural makes each a client. Other versions of Python have other
    help texts.

    Attributes:
        path: a text file in UTF-8 below data.root; empty: Python's help texts, which need no root.
        length: number T of characters of a sequence.
        predict: every (the next character after each position, for task next_token) or last (the character
            after the sequence, as a class, as in LEAF's Shakespeare).
        samples: largest number of sequences, from the beginning; 0: all.
    """

    name: ClassVar[str] = "text"
    needs_root: ClassVar[bool] = False

    path: str = ""
    length: PositiveInt = 32
    predict: Literal["every", "last"] = "every"
    samples: NonNegativeInt = 0

    def files(self, root: Path) -> list[Path]:
        """Return the text file, if one is named, or the module of Python's help texts."""
        if self.path:
            return [root / self.path]
        topics = find_spec("pydoc_data.topics")
        return [Path(topics.origin)] if topics and topics.origin and Path(topics.origin).is_file() else []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Cut the documents into sequences; those for testing come last."""
        rows, origin = self._sequences(self._documents(root))
        remedy = f"{len(rows)} sequences of {self.length} characters: use a longer text or shorter sequences"
        require(len(rows) >= 2 * TEST_EVERY, "data.source.length", self.length, remedy)
        test = np.arange(len(rows)) % TEST_EVERY == TEST_EVERY - 1
        order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])
        rows, origin = rows[order], origin[order]
        after = rows[:, 1:] if self.predict == "every" else rows[:, -1].astype(np.int64)
        before, after, size = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(after), len(ALPHABET)
        return Pool(before, after, int((~test).sum()), size, origin, vocabulary=size)

    def _documents(self, root: Path) -> list[str]:
        if not self.path:
            from pydoc_data.topics import topics

            return [topics[name] for name in sorted(topics)]
        file = root / self.path
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = f"cannot be read ({type(error).__name__}): give a file in UTF-8 below data.root"
            raise UserError("data.source.path", self.path, remedy) from error
        return [part for part in text.split("\n\n") if part.strip()]

    def _sequences(self, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences int16 [n, T + 1], and the document of each, int64 [n]."""
        code = {character: i for i, character in enumerate(ALPHABET)}
        rows: list[np.ndarray] = []
        origin: list[int] = []
        for number, document in enumerate(documents):
            plain = " ".join(document.lower().split())
            coded = np.array([code[c] for c in plain if c in code], np.int16)
            count = len(coded) // (self.length + 1)
            rows.append(coded[: count * (self.length + 1)].reshape(count, self.length + 1))
            origin += [number] * count
        found, of = np.concatenate(rows), np.array(origin, np.int64)
        return (found[: self.samples], of[: self.samples]) if self.samples else (found, of)
