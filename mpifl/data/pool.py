"""A pool: all samples of a source in one array, the training part first, then the test part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from mpifl.core.errors import UserError, is_whole, require
from mpifl.core.federation import (
    CLASSES,
    FEATURES,
    IGNORED,
    IMAGES,
    MASKS,
    MULTI_HOT,
    NUMBERS,
    SEQUENCES,
    SEVERAL,
    TOKENS,
    DataInfo,
    InputPart,
)
from mpifl.core.rng import Key, key
from mpifl.core.textfiles import readable

MAX_ORIGINS = 1 << 24
VOID = 255  # `IGNORED` in masks of bytes, as in PASCAL VOC and Cityscapes
BLOCK = 1 << 22  # numbers that are processed at a time
DETAIL = 0.1  # of the deviation between images: pixels may be rounded by this share of it


@dataclass(frozen=True)
class Pool:
    """Samples and labels of one source; sample i belongs to the training part if i < num_train.

    The type and shape of an array determine its kind:

    | `inputs` | samples |
    |---|---|
    | uint8 [n, C, H, W] | images, normalised at every visit |
    | floats [n, ...] | features of any shape: a table [n, F], spectrograms [n, C, H, W] |
    | an integer type [n, T] | sequences of tokens, from 0 to `vocabulary` - 1 |
    | floats [n, F], with `parts` | several inputs side by side |

    | `labels` | labels |
    |---|---|
    | an integer type [n] | classes, from 0 to `num_classes` - 1 |
    | uint8 or bool [n, L] | multi-hot: which of L labels apply |
    | float32 (or float16, float64) [n, L] | L numbers to predict |
    | int16, int32 or int64 [n, T] | tokens, or as `of_positions` says; -100 for ignored positions |
    | an integer type [n, H, W] | masks: a class for each pixel; ignored ones are -100, or 255 in uint8 |

    Attributes:
        inputs: [n, ...], memory-mapped if read from the cache.
        labels: [n] or [n, ...].
        num_train: size of the training part.
        num_classes: L, the width of a model's output: number of classes, labels, numbers or different tokens.
        origin: int64 [n], the origin of each sample (writer, domain), or None if unknown.
        origin_names: names of the origins, if they have any.
        class_names: names of the classes, labels or numbers, if they have any.
        vocabulary: number of different tokens of `inputs`; 0 if they are not tokens.
        categories: number of categories of each column of a table (`DataInfo.categories`).
        parts: the inputs that lie side by side in [n, F], if there are several (`DataInfo.parts`). Pixels are
            0 to 255, tokens whole numbers; `sources.arrays.pack` makes such samples of arrays.
        mean: mean over the training part. For features, float32 [*shape], 0 in columns of categories. For
            several inputs, float32 [F]: of a pixel that of its channel, 0 of tokens. For images whose source
            publishes no statistics, the mean of each channel of pixels in [0, 1], float64 [C]. None for other
            samples, and before `standardised` computes it.
        std: standard deviation in the same form; 1 in columns of categories and where values are constant.
        origin_groups: hidden group of each origin, or empty.
        of_positions: kind of labels of an integer type [n, T]: `tokens`, `masked_tokens` or `tags`.
        special: special tokens by role (`DataInfo.special`).
        remarks: lines for the user, such as what was left out; printed at every start.
    """

    inputs: np.ndarray
    labels: np.ndarray
    num_train: int
    num_classes: int
    origin: np.ndarray | None = None
    origin_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    vocabulary: int = 0
    categories: tuple[int, ...] = ()
    parts: tuple[InputPart, ...] = ()
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    remarks: tuple[str, ...] = ()
    origin_groups: tuple[int, ...] = ()
    of_positions: str = TOKENS
    special: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(InputPart(*part) for part in self.parts))  # also from JSON

    @property
    def images(self) -> np.ndarray:
        """Return `inputs` of a source of images, uint8 [n, C, H, W]."""
        return self.inputs

    @property
    def kind(self) -> str:
        """Return the kind of the samples: `images`, `features`, `tokens` or `several inputs`."""
        if self.parts:
            return SEVERAL
        if self.inputs.dtype == np.uint8 and self.inputs.ndim == 4:
            return IMAGES
        return FEATURES if np.issubdtype(self.inputs.dtype, np.floating) else TOKENS

    @property
    def label_kind(self) -> str:
        """Return the kind of the labels (`DataInfo.labels`)."""
        if np.issubdtype(self.labels.dtype, np.floating):
            return NUMBERS
        if self.labels.ndim == 1:
            return CLASSES
        if self.labels.ndim == 3:
            return MASKS
        return MULTI_HOT if self.labels.dtype in (np.uint8, np.bool_) else self.of_positions

    @cached_property
    def classes(self) -> np.ndarray:
        """Return the classes that occur, int64 ascending, of labels that are classes or masks."""
        found = np.unique(self.labels)
        return found if self.label_kind == CLASSES else found[found != void_of(found.dtype)].astype(np.int64)

    @property
    def info(self) -> DataInfo:
        """Return the description of samples and labels before any operation of a scenario."""
        kinds = self.kind, self.label_kind
        columns = self.categories, self.parts
        return DataInfo(self.shape, self.num_classes, *kinds, self.vocabulary, *columns, self.special)

    @property
    def train(self) -> np.ndarray:
        """Return the addresses of the training part, int64 [num_train]."""
        return np.arange(self.num_train)

    @property
    def test(self) -> np.ndarray:
        """Return the addresses of the test part, int64 [n - num_train]."""
        return np.arange(self.num_train, len(self.labels))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one stored sample; (C, H, W) of an image."""
        return self.inputs.shape[1:]


def images_of(array: np.ndarray, name: str, otherwise: str = "") -> np.ndarray:
    """Return images as uint8 [n, C, H, W].

    Args:
        array: [n, H, W], [n, H, W, C] or [n, C, H, W] with C = 1 or 3; uint8, or floats in [0, 1].
        name: where the array comes from, for error messages.
        otherwise: advice for error messages if the array does not hold images.

    Raises:
        UserError: the array has another shape, type or range.
    """
    array = np.asarray(array)
    remedy = "images of unexpected shape: give [n, H, W], [n, H, W, C] or [n, C, H, W]"
    require(array.ndim in (3, 4), name, array.shape, remedy)
    if array.dtype != np.uint8:
        remedy = "images must be uint8, or floats between 0 and 1"
        remedy += f"; {otherwise}" if otherwise else ""
        require(np.issubdtype(array.dtype, np.floating), name, str(array.dtype), remedy)
        low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
        require(low >= 0.0 and high <= 1.0, name, f"{array.dtype} in [{low:g}, {high:g}]", remedy)  # no NaN
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[1] not in (1, 3):
        remedy = "images of unexpected shape: one axis must hold 1 or 3 colour channels"
        require(array.shape[3] in (1, 3), name, array.shape, remedy)
        array = array.transpose(0, 3, 1, 2)
    return array if array.dtype == np.uint8 else _rounded(array, name, otherwise)


def _rounded(images: np.ndarray, name: str, otherwise: str) -> np.ndarray:
    """Return floats in [0, 1], [n, C, H, W], as 256 steps; refuse a channel whose detail that would lose.

    Args:
        images: floats in [0, 1], [n, C, H, W].
        name: where they come from, for error messages.
        otherwise: further advice.
    """
    pixels: np.ndarray = np.rint(images * 255).astype(np.uint8)
    for channel in range(images.shape[1]):
        held = images[:, channel]
        if not held.size:
            continue
        lost = float(np.abs(held - pixels[:, channel] / held.dtype.type(255)).max())
        spread = _deviation(held)
        what = f"channel {channel} would be rounded by up to {lost:.3g}, to 256 steps between 0 and 1"
        what = f"{what}, and the deviation between images is {spread:.3g}"
        remedy = f"{what}: scale the images so that what differs fills [0, 1]"
        remedy += f"; {otherwise}" if otherwise else ""
        value = f"{held.dtype} in [{held.min():g}, {held.max():g}]"
        require(spread <= _noise(held) or lost <= DETAIL * spread, name, value, remedy)
    return pixels


def _deviation(images: np.ndarray) -> float:
    """Return by how much images [n, H, W] differ from one another: a root mean square over their pixels.

    A background that all share does not count. Of images that are all alike, the deviation of their pixels.
    """
    mean = images.mean(0, dtype=np.float64)
    rows, total = max(1, BLOCK // max(1, mean.size)), 0.0
    for start in range(0, len(images), rows):
        total += float(((images[start : start + rows] - mean) ** 2).sum())
    apart = math.sqrt(total / images.size)
    return apart if apart > _noise(images) else float(images.std(dtype=np.float64))


def _noise(images: np.ndarray) -> float:
    """Return the largest deviation that rounding errors of equal values can make."""
    return 8 * float(np.finfo(images.dtype).eps) * float(images.max())


def labels_of(array: np.ndarray | None, name: str, num_classes: int | None = None) -> np.ndarray:
    """Return labels as int64 [n].

    Args:
        array: integers [n] or [n, 1].
        name: where the array comes from, for error messages.
        num_classes: L; None if unknown.

    Raises:
        UserError: the array has another shape or type, or a label outside 0 .. L - 1.
    """
    if array is None or not np.issubdtype(array.dtype, np.integer):
        dtype = None if array is None else str(array.dtype)
        raise UserError(name, dtype, "must be integers from zero")
    flat = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    require(flat, name, array.shape, "labels of unexpected shape: give one for each image, [n]")
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    limit, remedy = 2**31 if num_classes is None else num_classes, "must be integers from zero"
    require(low >= 0 and high < limit, name, low if low < 0 else high, f"{remedy}, below {limit}")
    return array.astype(np.int64).ravel()


def void_of(dtype: np.dtype) -> int:
    """Return the label of an ignored pixel in masks of a type: 255 in bytes, otherwise -100."""
    return VOID if dtype == np.uint8 else IGNORED


def masks_of(array: np.ndarray, name: str, num_classes: int | None = None) -> np.ndarray:
    """Return masks as a pool stores them: uint8, or a signed type.

    Args:
        array: integers or booleans [n, H, W]; a class for each pixel, 255 in bytes and -100 in other types
            for pixels that are ignored.
        name: where the array comes from, for error messages.
        num_classes: L; None if unknown.

    Raises:
        UserError: the array has another shape or type, or a class outside 0 .. L - 1.
    """
    whole = array.ndim == 3 and array.dtype.kind in "iub" and min(array.shape[1:]) > 0
    given = f"{array.dtype} {list(array.shape)}"
    require(whole, name, given, "masks must be whole numbers [n, H, W]: a class for each pixel")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    counts = array != void_of(array.dtype)
    low, high = int(np.min(array, where=counts, initial=0)), int(np.max(array, where=counts, initial=0))
    limit = 2**31 if num_classes is None else num_classes
    remedy = f"classes of pixels must be whole numbers from 0, below {limit}; ignored pixels are "
    remedy += f"{void_of(array.dtype)} in {array.dtype}"
    require(0 <= low <= high < limit, name, low if low < 0 else high, remedy)
    return array


def count_classes(labels: np.ndarray, name: str) -> int:
    """Return L, the largest of `labels` [n] plus one; raise `UserError` if n is 0 or smaller than L."""
    require(labels.size > 0, name, 0, "no samples: give some")
    largest = int(labels.max())
    remedy = f"more classes than the {len(labels)} samples: number the classes 0, 1, 2, ..."
    require(largest < len(labels), name, largest, remedy)
    return largest + 1


def check_pool(pool: Pool, name: str) -> None:
    """Raise `UserError` unless a source's pool is valid; its labels and tokens later serve as indices."""
    require(isinstance(pool, Pool), name, type(pool).__name__, "a source must load a Pool (mpifl.data.pool)")
    for part in ("inputs", "labels"):
        held = getattr(pool, part)
        remedy = f"{part} must be an array; make one by np.asarray"
        require(isinstance(held, np.ndarray) and held.ndim > 0, name, type(held).__name__, remedy)
    for part in ("num_train", "num_classes"):
        count = getattr(pool, part)
        require(is_whole(count), name, count, f"{part} must be a whole number")
    inputs, n = pool.inputs, len(pool.labels)
    require(n == len(inputs), name, n, f"labels for {len(inputs)} samples: give one for each")
    require(0 < pool.num_train <= n, name, pool.num_train, f"training samples of {n}: give some")
    given = f"{inputs.dtype} {list(inputs.shape)}"
    if inputs.dtype == np.uint8:
        remedy = "images must be uint8 [n, C, H, W], none of C, H and W zero"
        require(inputs.ndim == 4 and min(inputs.shape[1:]) > 0, name, given, remedy)
    elif pool.kind in (FEATURES, SEVERAL):
        remedy = "features must be [n, ...], no axis empty"
        require(inputs.ndim >= 2 and min(inputs.shape[1:]) > 0, name, given, remedy)
        _check_finite(inputs, f"{name}: features")
    else:
        whole = np.issubdtype(inputs.dtype, np.integer) and inputs.ndim == 2 and inputs.shape[1] > 0
        remedy = "samples must be uint8 images [n, C, H, W], floats [n, ...] or tokens, integers [n, T]"
        require(whole, name, given, remedy)
        _check_tokens(inputs, pool.vocabulary, f"{name}: tokens")
    _check_columns(pool, name)
    _check_labels(pool, name)
    for called in (*pool.class_names, *pool.origin_names):
        remedy = "is a name of a class or a client: make it a text"
        require(isinstance(called, str), name, called, remedy)
        shown = readable(called)
        require(called == shown, name, shown, "is a name that is not UTF-8 text: give it another")
    if pool.origin is not None:
        require(len(pool.origin) == n, name, len(pool.origin), f"origins for {n} samples: give one for each")
        labels_of(pool.origin, f"{name}: origin", MAX_ORIGINS)


def _check_columns(pool: Pool, name: str) -> None:
    """Raise `UserError` if categories or packed inputs do not fit the columns."""
    if pool.categories:
        remedy = f"category counts for samples of shape {list(pool.shape)}: give one for each column"
        require(pool.shape == (len(pool.categories),), name, len(pool.categories), remedy)
        for column, count in enumerate(pool.categories):
            if count:
                values = pool.inputs[:, column]
                whole = (values == np.floor(values)) & (values >= 0) & (values < count)
                remedy = f"categories must be whole numbers from 0 to {count - 1}"
                require(bool(whole.all()), f"{name}: column {column}", float(values.max()), remedy)
    if pool.parts:
        _check_parts(pool, name)


def _check_parts(pool: Pool, name: str) -> None:
    """Raise `UserError` if packed inputs do not fit the columns, or hold what their kind does not."""
    total = sum(part.width for part in pool.parts)
    remedy = f"numbers of the packed inputs, but samples are of shape {list(pool.shape)}"
    require(pool.shape == (total,), name, total, remedy)
    floats = np.issubdtype(pool.inputs.dtype, np.floating)
    require(
        floats, name, str(pool.inputs.dtype), "several inputs are packed in floats: see sources.arrays.pack"
    )
    names = [part.name for part in pool.parts]
    for called in names:
        remedy = "is a name of an input: give each another one that a Python function can have"
        require(isinstance(called, str) and called.isidentifier(), name, called, remedy)
    require(len(names) == len(set(names)) > 1, name, names, "several inputs need names that differ")
    remedy = "labels of every position are for samples of one input: give one label for each sample"
    require(pool.label_kind not in (*SEQUENCES, MASKS), name, pool.label_kind, remedy)
    start = 0
    for part in pool.parts:
        values, start = pool.inputs[:, start : start + part.width], start + part.width
        if part.inputs == FEATURES:
            continue
        high = 255 if part.inputs == IMAGES else part.vocabulary - 1
        remedy = f"{part.inputs} must be whole numbers from 0 to {high}"
        rows = max(1, BLOCK // part.width)
        for at in range(0, len(values), rows):
            block = values[at : at + rows]
            wrong = block[(block != np.floor(block)) | (block < 0) | (block > high)]
            require(not len(wrong), f"{name}: {part.name}", float(wrong[0]) if len(wrong) else 0.0, remedy)


def _check_labels(pool: Pool, name: str) -> None:
    """Raise `UserError` unless the labels have a form that `Pool` lists."""
    labels, kind, count = pool.labels, pool.label_kind, pool.num_classes
    if kind == CLASSES:
        labels_of(labels, name, count)
    elif kind in SEQUENCES:
        require(labels.ndim == 2, f"{name}: labels", list(labels.shape), "give one for each token, [n, T]")
        _check_tokens(labels, count, f"{name}: labels", IGNORED)
    elif kind == MASKS:
        masks_of(labels, f"{name}: labels", count)
        remedy = f"masks for samples of shape {list(pool.shape)}: give a class for each pixel, [n, H, W]"
        fits = len(pool.shape) == 3 and labels.shape[1:] == pool.shape[1:]
        require(fits, f"{name}: labels", list(labels.shape), remedy)
    else:
        remedy = f"give [n, {count}]: one number for each output"
        require(labels.shape[1:] == (count,), f"{name}: labels", list(labels.shape), remedy)
        if kind == MULTI_HOT:
            require(int(labels.max()) <= 1, f"{name}: labels", int(labels.max()), "give 0 or 1")
        else:
            _check_finite(labels, f"{name}: labels")


def _check_finite(values: np.ndarray, name: str) -> None:
    rows = max(1, BLOCK // max(1, int(np.prod(values.shape[1:]))))
    for start in range(0, len(values), rows):
        bad = np.argwhere(~np.isfinite(values[start : start + rows]))
        if len(bad):
            place = ", ".join(map(str, (start + int(bad[0][0]), *bad[0][1:].tolist())))
            value = float(values[start : start + rows][tuple(bad[0])])
            raise UserError(f"{name}[{place}]", value, "is not finite; fill it in or leave the sample out")


def _check_tokens(tokens: np.ndarray, count: int, name: str, also: int | None = None) -> None:
    """Raise `UserError` unless every token lies in 0 .. count - 1 or equals `also`."""
    low = int(np.min(tokens, where=True if also is None else tokens != also, initial=0))
    high = int(tokens.max(initial=0))
    remedy = f"tokens must be whole numbers from 0 to {count - 1}, one less than the vocabulary"
    require(low >= 0 and high < count, name, low if low < 0 else high, remedy)


def standardised(pool: Pool) -> Pool:
    """Return the pool with mean and standard deviation of its features or pixels, computed if missing."""
    if pool.kind == TOKENS or pool.mean is not None:
        return pool
    if pool.kind == IMAGES:
        return _with_statistics_of_pixels(pool)
    rows = max(1, BLOCK // max(1, int(np.prod(pool.shape))))
    total, square = np.zeros(pool.shape), np.zeros(pool.shape)
    first = np.asarray(pool.inputs[0], np.float64)  # differences from it suffer less from cancellation
    for start in range(0, pool.num_train, rows):
        block = np.asarray(pool.inputs[start : min(start + rows, pool.num_train)], np.float64) - first
        total += block.sum(0)
        square += (block**2).sum(0)
    mean = total / pool.num_train
    std = np.sqrt(np.maximum(square / pool.num_train - mean**2, 0.0))
    mean, std = _of_parts(pool, mean + first, std)
    mean, std = sparing_categories(pool, mean, np.where(std > np.finfo(np.float32).tiny, std, 1.0))
    return replace(pool, mean=mean.astype(np.float32), std=std.astype(np.float32))


def _of_parts(pool: Pool, mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of packed inputs [F]: one of each channel of an image, 0 and 1 of tokens.

    Args:
        pool: the samples; for those of one input, the numbers are returned unchanged.
        mean: of each number.
        std: of each number.
    """
    start = 0
    for part in pool.parts:
        at, start = slice(start, start + part.width), start + part.width
        if part.inputs == TOKENS:
            mean[at], std[at] = 0.0, 1.0
        elif part.inputs == IMAGES:
            of_pixels, spread = mean[at].reshape(part.shape[0], -1), std[at].reshape(part.shape[0], -1)
            channel = of_pixels.mean(1, keepdims=True)
            whole = np.sqrt((spread**2 + (of_pixels - channel) ** 2).mean(1))
            mean[at] = np.repeat(channel, of_pixels.shape[1])
            std[at] = np.repeat(whole, of_pixels.shape[1])
    return mean, std


def repeated(pool: Pool) -> str:
    """Return a line that counts test samples which are, number by number, training samples; or nothing."""
    if pool.num_train == len(pool.labels):
        return ""
    hashes = _hashes(pool.inputs)
    train, test = hashes[: pool.num_train], hashes[pool.num_train :]
    order = np.argsort(train, kind="stable")
    place = np.searchsorted(train[order], test)
    alike = np.flatnonzero(train[order][np.minimum(place, len(train) - 1)] == test)
    twin = order[place[alike]]
    rows = max(1, BLOCK // max(1, int(np.prod(pool.shape))))
    same = np.zeros(len(alike), np.bool_)
    for start in range(0, len(alike), rows):  # equal hashes do not prove it
        both = (at[start : start + rows] for at in (twin, pool.num_train + alike))
        one, two = (np.asarray(pool.inputs[at]) for at in both)
        same[start : start + rows] = (one == two).reshape(len(one), -1).all(1)
    if not same.any():
        return ""
    at = int(same.argmax())
    first = f"the first, test sample {int(alike[at])}, is training sample {int(twin[at])}"
    return f"{int(same.sum())} of {len(test)} test samples stand in the training part, too ({first})"


def _hashes(inputs: np.ndarray) -> np.ndarray:
    """Return a number for each sample [n, ...], uint64 [n]; equal samples have equal numbers."""
    width = int(np.prod(inputs.shape[1:])) * inputs.dtype.itemsize
    words = -(-width // 8)
    drawn = key(0, "hash of samples").numpy().integers(0, 1 << 63, words, np.uint64)
    weights = drawn * np.uint64(2) + np.uint64(1)
    rows = max(1, BLOCK // max(1, words))
    out = np.empty(len(inputs), np.uint64)
    for start in range(0, len(inputs), rows):
        block = np.ascontiguousarray(inputs[start : start + rows]).reshape(-1)
        held = np.zeros((len(out[start : start + rows]), 8 * words), np.uint8)
        held[:, :width] = block.view(np.uint8).reshape(-1, width)
        mixed = held.view(np.uint64)
        mixed ^= mixed >> np.uint64(29)
        out[start : start + rows] = np.einsum("nw,w->n", mixed, weights)
    return out


def sparing_categories(pool: Pool, mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of features that leave columns of categories as they are.

    A model looks categories up by their numbers.

    Args:
        pool: the samples.
        mean: mean of each feature [F], or one for all [1].
        std: standard deviation, like `mean`.
    """
    if not pool.categories:
        return mean, std
    are = np.array(pool.categories) > 0
    return np.where(are, 0.0, mean), np.where(are, 1.0, std)


def _with_statistics_of_pixels(pool: Pool) -> Pool:
    """Return the pool with mean and standard deviation per channel, from exact integer sums of pixels."""
    channels, pixels = pool.shape[0], int(np.prod(pool.shape[1:]))
    counts = np.zeros((channels, 256), np.int64)  # how often each channel has each value
    rows = max(1, BLOCK // (channels * pixels))
    for start in range(0, pool.num_train, rows):
        block = pool.inputs[start : min(start + rows, pool.num_train)]
        for channel in range(channels):
            counts[channel] += np.bincount(block[:, channel].ravel(), minlength=256)
    value, n = np.arange(256, dtype=np.int64), pool.num_train * pixels
    total, square = counts @ value, counts @ value**2
    mean = total / n / 255.0
    spread = [float(Fraction(int(q) * n - int(t) ** 2, n * n)) for q, t in zip(square, total, strict=True)]
    std = np.sqrt(np.array(spread)) / 255.0
    return replace(pool, mean=mean, std=np.where(std > 0, std, 1.0))


def stratified(labels: np.ndarray, fraction: float, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Return indices (kept, held out): of each class of n samples, round(`fraction` n) are held out.

    At least one sample of each class is kept, and of two or more at least one is held out.
    """
    held = []
    for label in np.unique(labels):
        members = key.of(int(label)).numpy().permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held.append(members[:count])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out
