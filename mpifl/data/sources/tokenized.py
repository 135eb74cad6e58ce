"""Texts as the tokens of a tokenizer in the format of Hugging Face, with the labels of their positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import IGNORED, MASKED_AS_MASK, MASKED_AS_OTHER
from mpifl.core.optional_packages import silent_transformers, transformers_package
from mpifl.core.progress import each
from mpifl.core.rng import key
from mpifl.data.sources.base import in_one_line

KEY = "data.source.tokenizer"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")  # beside a tokenizer
BATCH = 1000  # texts that are tokenised at a time
ROLES = {
    "pad_token_id": "padding",
    "mask_token_id": "mask",
    "cls_token_id": "class",
    "sep_token_id": "separator",
    "unk_token_id": "unknown",
    "bos_token_id": "begin",
    "eos_token_id": "end",
}  # attribute of a tokenizer -> role of its token


class Encoded(NamedTuple):
    """Texts as tokens.

    Attributes:
        x: tokens int32 [m, T].
        y: labels of the positions int32 [m, T], `IGNORED` where none counts; None if samples have labels.
        row: the text of each sample, int64 [m] ascending: a text may be cut into several.
        special: special tokens by role.
    """

    x: np.ndarray
    y: np.ndarray | None
    row: np.ndarray
    special: tuple[tuple[str, int], ...]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that may belong to a tokenizer: all but weights."""
    if not folder.is_dir():
        return [folder / "tokenizer.json"]
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [path for path in files if path.suffix not in WEIGHTS] or [folder / "tokenizer.json"]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of transformers.

    Attributes:
        inner: the object of transformers.
        path: its folder, as the user names it.
        length: largest number of tokens of a sample, special ones included.
    """

    inner: Any
    path: str
    length: int

    @classmethod
    def of(cls, folder: Path, path: str, length: int, pair: bool = False) -> Tokenizer:
        """Read a tokenizer from its folder, without a network.

        Args:
            folder: its folder.
            path: the folder as the user names it.
            length: largest number of tokens of a sample.
            pair: whether samples are pairs of texts.

        Raises:
            UserError: transformers is not installed, the folder holds no tokenizer, it has neither a token
                for padding nor one for the end of a text, or it adds `length` tokens.
        """
        transformers = transformers_package("huggingface", KEY, path)
        try:
            with silent_transformers():
                inner = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # a damaged file can make its readers raise anything
            remedy = f"holds no tokenizer of transformers ({in_one_line(error)}): give a folder with "
            raise UserError(KEY, path, f"{remedy}tokenizer.json, written by save_pretrained") from error
        remedy = "is written in Python alone, and cannot tell words from their pieces; give a tokenizer.json"
        require(bool(inner.is_fast), KEY, path, remedy)
        found = cls(inner, path, length)
        remedy = "has neither a token for padding nor one for the end of a text; set its pad_token"
        require(found.padding is not None, KEY, path, remedy)
        added = int(inner.num_special_tokens_to_add(pair=pair))
        remedy = f"the tokenizer adds {added} tokens to a sample: use more than these"
        require(length > added, "data.source.length", length, remedy)
        return found

    @property
    def vocabulary(self) -> int:
        """Number of different tokens, those included that were added to it."""
        return max(len(self.inner), 1 + max(token for _, token in self.special))

    @property
    def padding(self) -> int | None:
        """The token that follows the end of a sample: that for padding or, without one, for the end."""
        found = self.inner.pad_token_id
        return self.inner.eos_token_id if found is None else int(found)

    @property
    def special(self) -> tuple[tuple[str, int], ...]:
        """Special tokens by role."""
        named = {role: getattr(self.inner, name) for name, role in ROLES.items()}
        named["padding"] = self.padding
        found = [(role, int(token)) for role, token in named.items() if token is not None]
        others = sorted(set(self.inner.all_special_ids) - {token for _, token in found})
        return (*found, *((f"special {token}", int(token)) for token in others))

    def texts(self, texts: Sequence[str], second: Sequence[str] | None = None) -> Encoded:
        """Return texts, or pairs of texts, as one sample each; longer ones are cut.

        Raises:
            UserError: the tokenizer tells two texts apart in a way that tokens do not show.
        """
        rows: list[list[int]] = []
        parts: list[list[int]] = []
        for at in self._blocks(len(texts)):
            pair = () if second is None else (list(second[at]),)
            given = self._called(
                list(texts[at]),
                *pair,
                truncation=True,
                max_length=self.length,
                return_token_type_ids=second is not None,
            )
            rows += given["input_ids"]
            parts += given.get("token_type_ids") or []
        special = self.special
        if second is not None and any(map(any, parts)):
            after = self.inner.sep_token_id
            told = after is not None and all(
                _second(row, after) == part for row, part in zip(rows, parts, strict=True)
            )
            remedy = (
                "numbers the texts of a pair in a way that is not supported; leave data.source.second out"
            )
            require(told, KEY, self.path, remedy)
            special = (*special, ("second", int(after)))
        return Encoded(self._padded(rows), None, np.arange(len(rows)), special)

    def words(self, rows: Sequence[Sequence[str]], tags: Sequence[Sequence[int]]) -> Encoded:
        """Return lists of words as one sample each, and the tag of each word at its first token."""
        found: list[list[int]] = []
        labels: list[list[int]] = []
        for at in self._blocks(len(rows)):
            given = self._called(
                [list(row) for row in rows[at]],
                is_split_into_words=True,
                truncation=True,
                max_length=self.length,
            )
            found += given["input_ids"]
            for i, own in enumerate(tags[at]):
                of = given.word_ids(i)
                first = [w is not None and (j == 0 or of[j - 1] != w) for j, w in enumerate(of)]
                labels.append([own[w] if new else IGNORED for w, new in zip(of, first, strict=True)])
        x = self._padded(found)
        return Encoded(x, _filled(labels, x.shape[1], IGNORED), np.arange(len(found)), self.special)

    def following(self, texts: Sequence[str]) -> Encoded:
        """Return texts, cut into samples of `length` tokens, and the token that follows each of theirs."""
        rows, of = self._pieces(texts, self.length + 1)
        kept = [i for i, row in enumerate(rows) if len(row) > 1]
        remedy = "makes no text longer than a token: there is nothing to predict"
        require(bool(kept), KEY, self.path, remedy)
        x = self._padded([rows[i][:-1] for i in kept])
        y = _filled([rows[i][1:] for i in kept], x.shape[1], IGNORED)
        return Encoded(x, y, of[kept], self.special)

    def masked(self, texts: Sequence[str], share: float) -> Encoded:
        """Return texts, cut into samples of `length` tokens, some of which are hidden, and what they hide.

        Devlin et al., NAACL 2019: a mask takes the place of 0.8 of the tokens that are chosen, another token
        that of 0.1, and 0.1 stay. At least one token of each sample is chosen.
        """
        mask = self.inner.mask_token_id
        remedy = "has no token for masks: use one of a masked language model, or data.source.labels: next"
        require(mask is not None, KEY, self.path, remedy)
        rows, of = self._pieces(texts, self.length)
        special = np.array([token for _, token in self.special])
        kept = [i for i, row in enumerate(rows) if not np.isin(row, special).all()]
        require(bool(kept), KEY, self.path, "makes no text of other tokens than special ones")
        tokens, numbers = self._padded([rows[i] for i in kept]), range(self.vocabulary)
        others = np.setdiff1d(numbers, special)
        x, y = hidden(tokens, special, others, int(mask), share, key(0, "masks").numpy())
        return Encoded(x, y, of[kept], self.special)

    def _pieces(self, texts: Sequence[str], length: int) -> tuple[list[list[int]], np.ndarray]:
        """Return the tokens of texts in pieces of at most `length`, and the text of each piece, int64."""
        rows: list[list[int]] = []
        of: list[int] = []
        for at in self._blocks(len(texts)):
            given = self._called(
                list(texts[at]), truncation=True, max_length=length, return_overflowing_tokens=True
            )
            rows += given["input_ids"]
            of += [at.start + i for i in given["overflow_to_sample_mapping"]]
        return rows, np.array(of, np.int64)

    def _called(self, *texts: Any, **options: Any) -> Any:
        try:
            return self.inner(*texts, **options, padding=False, return_attention_mask=False)
        except Exception as error:  # of the library in Rust
            raise UserError(KEY, self.path, f"texts cannot be tokenised ({in_one_line(error)})") from error

    @staticmethod
    def _blocks(count: int) -> Iterator[slice]:
        for start in each(range(0, count, BATCH), "tokenising texts", "blocks"):
            yield slice(start, min(start + BATCH, count))

    def _padded(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return tokens int32 [n, T], T the length of the longest."""
        remedy = "makes no token of any text"
        require(any(map(len, rows)), KEY, self.path, remedy)
        assert self.padding is not None
        return _filled(rows, max(map(len, rows)), self.padding)


def _filled(rows: Sequence[Sequence[int]], width: int, value: int) -> np.ndarray:
    out = np.full((len(rows), width), value, np.int32)
    for held, row in zip(out, rows, strict=True):
        held[: len(row)] = row
    return out


def _second(row: Sequence[int], after: int) -> list[int]:
    """Return 1 for the tokens of a second text, which follows the first token `after`; 0 for the others."""
    end = list(row).index(after) if after in row else len(row)
    return [int(i > end) for i in range(len(row))]


def hidden(
    tokens: np.ndarray,
    special: np.ndarray,
    others: np.ndarray,
    mask: int,
    share: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens some of which are hidden, and those tokens, `IGNORED` elsewhere; both int32 [n, T].

    Args:
        tokens: int32 [n, T].
        special: tokens that are never hidden.
        others: tokens that may take the place of a hidden one.
        mask: the token of the mask.
        share: share of the tokens that are hidden.
        rng: draws them.
    """
    plain = ~np.isin(tokens, special)
    drawn = np.where(plain, rng.random(tokens.shape), 2.0)
    chosen = plain & ((drawn < share) | (drawn == drawn.min(1, keepdims=True)))
    how, other = rng.random(tokens.shape), rng.choice(others, tokens.shape)
    shown = np.where(how < MASKED_AS_MASK, mask, tokens)
    shown = np.where((how >= MASKED_AS_MASK) & (how < MASKED_AS_MASK + MASKED_AS_OTHER), other, shown)
    x = np.where(chosen, shown, tokens).astype(np.int32)
    return x, np.where(chosen, tokens, IGNORED).astype(np.int32)
