"""Conversion of arrays, texts and columns to the samples and labels of a pool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import FEATURES, IMAGES, TOKENS, InputPart
from mpifl.core.rng import key
from mpifl.data.pool import Pool, count_classes, images_of, labels_of, masks_of, stratified, void_of
from mpifl.data.sources.base import TEST, TRAIN
from mpifl.data.sources.columns import (
    index_of,
    lines_on_columns,
    lines_on_names,
    lines_on_texts,
    numbers_in,
    refuse_gaps,
    row_of,
    stripped,
)

if TYPE_CHECKING:
    import pandas as pd

KINDS = (IMAGES, FEATURES, TOKENS)
PADDING, UNKNOWN = 0, 1  # reserved tokens in sequences of words
AS_FEATURES = "numbers of any size are features: data.source.inputs features"  # for sources with that key
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".gif", ".tif", ".tiff")  # endings
WORD = re.compile(r"\w+|[^\w\s]")
TEST_SHARE = 0.2  # default of sources
LABELS = ("classes", "numbers")  # values of the key `labels` of sources whose labels are arrays
BINS = 8  # ranges of a number to predict, by which the test part is stratified
ROUNDING = 0.01  # of the deviation of a column: numbers of float32 may be rounded by this share of it
NOISE = 1e-12  # of the largest value of a column: smaller deviations are those of rounded float64 numbers


def inputs_of(array: np.ndarray, name: str, kind: str | None = None, otherwise: str = "") -> np.ndarray:
    """Return samples as a pool stores them.

    Args:
        array: [n, ...]; for images see `images_of`.
        name: where the array comes from, for error messages.
        kind: `images`, `features` or `tokens`. None: floats [n, F] are features, integers [n, T] of more than
            a byte are tokens, all others images.
        otherwise: advice for error messages if the array does not hold images.

    Raises:
        UserError: the array has a shape or type that does not fit its kind.
    """
    array = np.asarray(array)
    require(array.dtype.kind in "biuf", name, str(array.dtype), "samples must be real numbers")
    real, whole = np.issubdtype(array.dtype, np.floating), np.issubdtype(array.dtype, np.integer)
    if kind is None and array.ndim == 2 and (real or (whole and array.dtype.itemsize > 1)):
        kind = FEATURES if real else TOKENS
    if kind == FEATURES:
        remedy = "features must be numbers, [n, ...]"
        require((real or whole) and array.ndim >= 2, name, f"{array.dtype} {list(array.shape)}", remedy)
        refuse_not_finite(array, name)
        return array if array.dtype in (np.float16, np.float32) else as_float32(array, name)
    if kind == TOKENS:
        remedy = "tokens must be whole numbers, [n, T]"
        require(whole and array.ndim == 2, name, f"{array.dtype} {list(array.shape)}", remedy)
        return array.astype(np.int32) if array.dtype.itemsize < 2 or array.dtype.kind == "u" else array
    return images_of(array, name, otherwise)


EXACT = 1 << 24  # float32 holds all whole numbers up to it


def pack(*given: Mapping[str, np.ndarray], name: str) -> tuple[list[np.ndarray], tuple[InputPart, ...]]:
    """Return samples of several inputs as a pool stores them, float32 [n, F], and what they are.

    The type of an array says what it holds: bytes [n, H, W], [n, H, W, C] or [n, C, H, W] are images, floats
    [n, ...] features, whole numbers [n, T] of more than a byte tokens.

    Args:
        *given: name -> array, with the same names: the training part and, if there is one, the test part.
        name: where they come from, for error messages.

    Raises:
        UserError: an array holds something else, the numbers of samples differ, or a token is too large for
            float32.
    """
    names = [*given[0]]
    for other in given[1:]:
        remedy = f"give the same inputs in both parts: {', '.join(names)}"
        require({*other} == {*names}, name, ", ".join(other), remedy)
    made: list[list[np.ndarray]] = [[] for _ in given]
    parts = []
    for called in names:
        held = [_input_of(np.asarray(one[called]), f"{name}: {called}") for one in given]
        (kind, first), shapes = held[0], {x.shape[1:] for _, x in held}
        remedy = "the same input in both parts must have one type and one shape"
        require(
            len(shapes) == 1 and len({kind for kind, _ in held}) == 1, f"{name}: {called}", shapes, remedy
        )
        largest = max((int(x.max(initial=0)) for _, x in held), default=0) if kind == TOKENS else 0
        remedy = f"tokens of several inputs must be whole numbers from 0, below {EXACT}: number them anew"
        lowest = min(int(x.min(initial=0)) for _, x in held) if kind == TOKENS else 0
        require(
            lowest >= 0 and largest < EXACT, f"{name}: {called}", lowest if lowest < 0 else largest, remedy
        )
        parts.append(InputPart(called, first.shape[1:], kind, largest + 1 if kind == TOKENS else 0))
        for rows, (_, x) in zip(made, held, strict=True):
            remedy = f"samples of {called} for {len(rows[0]) if rows else 0} of {names[0]}: give one for each"
            require(not rows or len(x) == len(rows[0]), name, len(x), remedy)
            rows.append(x.reshape(len(x), -1).astype(np.float32))
    return [np.concatenate(rows, 1) for rows in made], tuple(parts)


def _input_of(array: np.ndarray, name: str) -> tuple[str, np.ndarray]:
    """Return the kind of one of several inputs, and its samples [n, *shape]."""
    if np.issubdtype(array.dtype, np.floating):
        return FEATURES, inputs_of(array, name, FEATURES)
    if array.dtype == np.uint8:
        return IMAGES, images_of(array, name)
    return TOKENS, inputs_of(array, name, TOKENS)


def refuse_not_finite(array: np.ndarray, name: str, rows: pd.Series | None = None) -> None:
    """Raise `UserError` for NaN or infinity in an array [n, ...]; names the row.

    Args:
        array: numbers.
        name: where they come from.
        rows: any column with the index of the rows (`index_of`); None: rows are those of the array.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        at = tuple(np.argwhere(~np.isfinite(array))[0])
        where = f"row {at[0] + 1}" if rows is None else row_of(rows, int(at[0]))
        remedy = f"is not finite, in {where}: fill it in or leave the row out"
        raise UserError(name, float(array[at]), remedy)


def any_labels_of(
    array: np.ndarray, name: str, kind: str | None = None, rows: pd.Series | None = None
) -> np.ndarray:
    """Return labels as a pool stores them; their type determines their kind, see `Pool`.

    Args:
        array: integers [n] or [n, 1] (classes), bytes or booleans [n, L] (multi-hot), floats [n] or [n, L]
            (numbers), integers [n, T] (tokens), integers [n, H, W] (masks).
        name: where the array comes from, for error messages.
        kind: `classes` or `numbers` for labels of one number each whose type says otherwise; None: by type.
        rows: where each is from, as for `refuse_not_finite`.

    Raises:
        UserError: the labels are one-hot, not finite, or have another shape or type.
    """
    array = np.asarray(array)
    single = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    if kind is not None:
        remedy = f"labels: {kind} is for one number for each sample: leave it out"
        require(single and array.dtype.kind in "iufb", name, f"{array.dtype} {list(array.shape)}", remedy)
    if kind == "classes" and array.dtype.kind == "f":
        array = classes_of_floats(array, name, rows)
    elif kind == "numbers":
        array = array.astype(np.float64)
    if np.issubdtype(array.dtype, np.floating) and array.ndim in (1, 2):
        refuse_not_finite(array, name, rows)
        return as_float32(array.reshape(len(array), -1), name)
    if array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind in "iub":
        one_hot = len(array) > 1 and bool(((array == 1).sum(1) == 1).all() and (array == 0).sum(1).min() > 0)
        one_hot = one_hot and bool(((array == 0) | (array == 1)).all())
        remedy = "labels of unexpected shape, one-hot: give the number of the class, y.argmax(1)"
        require(not one_hot, name, array.shape, remedy)
        return array.astype(np.int64) if array.dtype.kind == "u" and array.dtype.itemsize > 1 else array
    if array.ndim == 3 and array.dtype.kind in "iub":
        return masks_of(array, name)
    return labels_of(array.astype(np.uint8) if array.dtype == np.bool_ else array, name)


def labels_of_texts(
    column: pd.Series, key: str, name: str, kind: str | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels that are written as texts, and the names of classes, which are in the order of numbers.

    Args:
        column: the texts.
        key: where they come from, for error messages.
        name: name of their column.
        kind: `classes` or `numbers`; None: texts are classes, and so are whole numbers.

    Raises:
        UserError: one is missing; most are numbers and some are not; or none are, and `kind` is `numbers`.
    """
    refuse_gaps(column, key, name)
    numbers = numbers_in(column, key, name)
    remedy = "holds texts, which are no numbers: use labels: classes"
    require(kind != "numbers" or numbers is not None, key, name, remedy)
    if numbers is None:
        return numbered(stripped(column).tolist())
    whole = bool((numbers % 1 == 0).all())
    if kind == "numbers" or (kind is None and not whole):
        return as_float32(numbers[:, None], key, name), ()
    return numbered((numbers.astype(np.int64) if whole else numbers).tolist())


def classes_of_floats(array: np.ndarray, name: str, rows: pd.Series | None = None) -> np.ndarray:
    """Return class numbers that are stored as floats as int64; refuse other floats, and name the first."""
    flat = array.ravel()
    wrong = np.flatnonzero(~(np.isfinite(flat) & (flat >= 0) & (flat % 1 == 0)))
    row = int(wrong[0]) if len(wrong) else 0
    at = float(flat[row]) if len(flat) else 0.0
    where = f"row {row + 1}" if rows is None or not len(wrong) else row_of(rows, row)
    remedy = f"no class number, in {where}: give whole numbers from 0, or leave labels out"
    require(not len(wrong), name, at, remedy)
    return array.astype(np.int64)


def as_float32(values: np.ndarray, name: str, column: str = "") -> np.ndarray:
    """Return numbers [n, ...] as float32.

    Args:
        values: numbers of any type.
        name: where they come from, for error messages.
        column: name of their column; empty: columns are numbered.

    Raises:
        UserError: float32 does not hold the differences between the numbers of a column.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
        if np.can_cast(values.dtype, np.float32) or not len(values):
            return narrow
        lost, spread = np.abs(values - narrow).max(0), values.std(0, dtype=np.float64)
        coarse = (lost > ROUNDING * spread) & (spread > NOISE * np.abs(values).max(0))
    if coarse.any():
        at = tuple(map(int, np.argwhere(coarse)[0]))
        remedy = (
            f"its values would be rounded by up to {lost[at]:.3g}, to float32, and their deviation is "
            f"{spread[at]:.3g}: subtract a constant near {values.mean(0)[at]:.6g}"
        )
        raise UserError(name, column or f"column {', '.join(map(str, at))}", remedy)
    return narrow


def pool_of(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray] | None,
    name: str,
    class_names: tuple[str, ...] = (),
    vocabulary: int = 0,
    test_share: float = TEST_SHARE,
    origin: np.ndarray | None = None,
    origin_names: tuple[str, ...] = (),
    columns: str = "",
) -> Pool:
    """Return the pool of samples and labels as `inputs_of` and `any_labels_of` return them.

    Args:
        train: samples and labels of the training part.
        test: those of the test part; None sets a share of `train` aside, the same for every seed.
        name: where the samples come from, for error messages.
        class_names: names of classes, labels or targets.
        vocabulary: number of different tokens; 0: the largest plus one.
        test_share: share of each class, or of each range of the first number, set aside if `test` is None.
        origin: int64 [n] of training samples, then test samples.
        origin_names: names of the origins.
        columns: where columns of numbers come from, if lines are to tell what is wrong with them.

    Raises:
        UserError: samples, labels and names do not fit together.
    """
    refuse_unused_share(test_share, test is not None)
    parts = [train] if test is None else [train, test]
    for x, y in parts:
        require(len(x) == len(y), name, len(y), f"labels for {len(x)} samples: give one for each")
        remedy = f"samples of another size than {list(train[0].shape[1:])}: all must be of one"
        require(x.shape[1:] == train[0].shape[1:], name, list(x.shape[1:]), remedy)
    x = train[0] if test is None else np.concatenate([train[0], test[0]])
    y = train[1] if test is None else np.concatenate([train[1], test[1]])
    require(len(train[0]) > 0, name, 0, "no samples: give some")
    is_class, tokens = y.ndim == 1, x.dtype.kind in "iu" and x.ndim == 2
    if is_class:
        width = len(class_names) or count_classes(y, name)
        remedy = f"names for classes 0 to {int(y.max())}: give one to each"
        require(int(y.max()) < width, name, len(class_names), remedy)
    elif y.ndim == 3:
        width = int(np.max(y, where=y != void_of(y.dtype), initial=0)) + 1
        require(x.ndim == 4, name, list(y.shape), f"masks for samples {list(x.shape)}: give images")
        types = sorted({str(labels.dtype) for _, labels in parts})
        require(len(types) == 1, name, types, "masks of training and test part: give both in one type")
    else:
        several = y.dtype.kind == "i" and y.dtype.itemsize > 1
        width = max(int(y.max()) + 1, vocabulary) if several else y.shape[1]
    vocabulary = (vocabulary or int(x.max()) + 1) if tokens else 0
    width = max(width, len(class_names))
    remedy = f"names for {width} classes, labels or targets: give one to each"
    require(len(class_names) in (0, width), name, len(class_names), remedy)
    n = len(train[0])
    told = lines_on_columns(x, columns, y, width) if columns and x.dtype.kind == "f" and x.ndim == 2 else []
    if is_class and not tokens:
        told += lines_on_classes(train[1], None if test is None else test[1], width, class_names, name)
    told += lines_on_names(origin_names, name, "clients") + lines_on_names(class_names, name, "classes")
    if test is None:
        order, n = with_test(y, test_share)
        x, y, origin = x[order], y[order], None if origin is None else origin[order]
    return Pool(x, y, n, width, origin, origin_names, class_names, vocabulary, remarks=tuple(told))


def lines_on_classes(
    train: np.ndarray, test: np.ndarray | None, width: int, names: Sequence[str], key: str
) -> list[str]:
    """Return lines for the user on classes that occur in one part alone, or in none, and on a single class.

    Args:
        train: classes of the training part [n], or of all samples if a share of them is set aside.
        test: classes of the test part, if there is one.
        width: number of classes.
        names: their names, or empty.
        key: where they come from.
    """
    every = np.arange(width)
    there = np.isin(every, train), np.ones(width, bool) if test is None else np.isin(every, test)
    told = []
    for part, bare in (("training", ~there[0]), ("test", there[0] & ~there[1])):
        first = [names[i] if names else str(i) for i in np.flatnonzero(bare)[:3].tolist()]
        more = ", ..." if bare.sum() > 3 else ""
        what = f"{int(bare.sum())} of {width} classes have no {part} sample: {', '.join(first)}{more}"
        hint = "; classes count from 0" if part == "training" and bare[0] and not names else ""
        told += [f"{key}: {what}{hint}"] if bare.any() else []
    return told or ([f"{key}: all samples are of one class"] if there[0].sum() == 1 else [])


def refuse_unused_share(share: float, has_test: bool) -> None:
    """Refuse a share for testing that is set, and not 0, for a source with a test part."""
    remedy = "has no effect: the source has a test part; leave it out"
    require(not has_test or share in (0.0, TEST_SHARE), "data.source.test_share", share, remedy)


def with_test(labels: np.ndarray, share: float) -> tuple[np.ndarray, int]:
    """Return (order, size of the training part); the order puts a fixed test share behind the rest."""
    if not share:
        return np.arange(len(labels)), len(labels)
    train, test = stratified(strata_of(labels), share, key(0, "test part"))
    return np.concatenate([train, test]), len(train)


def strata_of(labels: np.ndarray) -> np.ndarray:
    """Return the stratum of each sample, int64 [n]: its class, the range of its first number, otherwise 0."""
    if labels.ndim == 1:
        return labels.astype(np.int64)
    if labels.dtype.kind != "f":
        return np.zeros(len(labels), np.int64)
    ends = np.quantile(labels[:, 0], np.linspace(0, 1, BINS + 1)[1:-1])
    return np.asarray(np.digitize(labels[:, 0], ends), np.int64)


# -- columns of Python values -------------------------------------------------------------------------------


def numbers_of_rows(column: pd.Series, key: str, name: str, shape: Sequence[int] = ()) -> np.ndarray:
    """Return samples that are numbers or lists of numbers as features.

    Args:
        column: the samples.
        key: where they come from, for error messages.
        name: name of their column.
        shape: shape of a sample; empty: as the lists are nested.

    Raises:
        UserError: they are something else, differ in shape, or are not finite.
    """
    try:
        x = np.asarray(column.tolist(), np.float64)
    except (ValueError, TypeError) as error:
        what = f"samples must be pictures, texts, or lists of numbers of one shape ({type(error).__name__})"
        raise UserError(key, name, what) from error
    x = x.reshape(len(x), *(shape or ((-1,) if x.ndim == 1 else x.shape[1:])))
    refuse_gaps(column, key, name, np.asarray(np.isnan(x).reshape(len(x), -1).any(1)))
    refuse_not_finite(x, f"{key}: {name}", column)
    return inputs_of(x, f"{key}: {name}", FEATURES)


def words_of_rows(
    column: pd.Series, key: str, learnt: Iterable[int], vocabulary: int, length: int
) -> tuple[np.ndarray, int, list[str]]:
    """Return texts as sequences of words, the number of different tokens, and lines for the user.

    Args:
        column: the texts.
        key: where they come from.
        learnt: rows of the training part, whose words are the vocabulary.
        vocabulary: largest number of tokens.
        length: number of tokens of a sequence; longer texts are cut, shorter ones padded.
    """
    texts = column.tolist()
    known = vocabulary_of((texts[i] for i in learnt), vocabulary)
    return tokens_of(texts, known, length), len(known) + 2, lines_on_texts(column, key)


Held = tuple[Any, Any]  # samples and labels of a client, lists or arrays


@dataclass(frozen=True)
class ClientRows:
    """Samples of the clients of a training part, then of those of a test part, clients in order of name.

    Attributes:
        samples: those of each client of each part.
        labels: like `samples`.
        count: number of samples of the training part.
        origin: number of the client of each sample, int64 [n].
        names: names of the clients.
        index: where each sample is from, see `index_of`.
    """

    samples: list[Any]
    labels: list[Any]
    count: int
    origin: np.ndarray
    names: tuple[str, ...]
    index: pd.Index[Any]


def rows_of_clients(train: Mapping[str, Held], test: Mapping[str, Held], what: str = "client") -> ClientRows:
    """Return the samples of clients; `what` is the word for a client in messages."""
    names = sorted(train.keys() | test.keys())
    rows = [
        (part, i, *held[name])
        for part, held in ((TRAIN, train), (TEST, test))
        for i, name in enumerate(names)
        if name in held
    ]
    index = index_of([(f"{what} {names[i]} in {part}", len(y)) for part, i, _, y in rows])
    count = sum(len(y) for _, y in train.values())
    origin = np.repeat([i for _, i, *_ in rows], [len(y) for *_, y in rows])
    samples, labels = [x for *_, x, _ in rows], [y for *_, y in rows]
    return ClientRows(samples, labels, count, origin.astype(np.int64), tuple(names), index)


# -- texts ---------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case."""
    return WORD.findall(text.lower())


def refuse_pictures(texts: Sequence[str], name: str) -> None:
    """Refuse texts that are names of pictures."""
    remedy = "is the name of a picture, not text; read the pictures with source folder, npz or dataset"
    named = len(texts) > 0 and all(text.lower().endswith(PICTURES) for text in texts)
    require(not named, name, texts[0] if named else "", remedy)


def vocabulary_of(texts: Iterable[str], size: int) -> dict[str, int]:
    """Return the most frequent words, numbered from 2; 0 pads, 1 stands for all others.

    Args:
        texts: texts of the training part.
        size: largest number of tokens, including these two.
    """
    counts = Counter(word for text in texts for word in words_of(text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: number for number, word in enumerate(frequent, start=2)}


def tokens_of(texts: Sequence[str], known: dict[str, int], length: int) -> np.ndarray:
    """Return the first `length` words of each text, int32 [n, length], padded with 0 at the end."""
    out = np.full((len(texts), length), PADDING, np.int32)
    for row, text in zip(out, texts, strict=True):
        numbers = [known.get(word, UNKNOWN) for word in words_of(text)[:length]]
        row[: len(numbers)] = numbers
    return out


def characters_of(texts: Sequence[str], alphabet: str, name: str) -> np.ndarray:
    """Return texts of one length as numbers of their characters, int32 [n, T]; refuse unknown characters."""
    number = {character: i for i, character in enumerate(alphabet)}
    lengths = {len(text) for text in texts}
    require(len(lengths) <= 1, name, sorted(lengths)[:4], "texts of different lengths: all must be of one")
    try:
        return np.array([[number[character] for character in text] for text in texts], np.int32)
    except KeyError as error:
        raise UserError(name, str(error.args[0]), "a character that the alphabet does not have") from error


def numbered(values: Sequence[object]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the rank of each value, int64 [n], and the different values as texts, numbers by size.

    If there are both numbers and texts, 1 and "1" are one value.
    """
    try:
        known = sorted(set(values))  # type: ignore[type-var]
    except TypeError:
        return numbered([str(value) for value in values])
    number = {value: i for i, value in enumerate(known)}
    return np.array([number[value] for value in values], np.int64), tuple(map(str, known))


def groups_of(group: np.ndarray, origin: np.ndarray, clients: Sequence[str], name: str) -> tuple[int, ...]:
    """Return the group of each client.

    Args:
        group: group of each row, int64 [n].
        origin: client of each row, int64 [n].
        clients: names of the clients.
        name: name of the column of groups.

    Raises:
        UserError: a client is in several groups.
    """
    of = np.full(len(clients), -1)
    of[origin] = group
    wrong = origin[of[origin] != group]
    who = clients[wrong[0]] if len(wrong) else ""
    require(not len(wrong), "data.source.group", name, f"client {who} is in several groups: give it one")
    return tuple(of.tolist())
