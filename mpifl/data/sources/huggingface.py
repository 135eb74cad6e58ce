"""Data sets in the formats of Hugging Face: folders of `datasets.save_to_disk`, files of the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from mpifl.core.errors import UserError, require
from mpifl.core.federation import MASKED, TAGS, TOKENS
from mpifl.core.optional_packages import optional
from mpifl.core.options import PositiveInt, PositiveShare, ShareBelowOne
from mpifl.core.progress import each
from mpifl.core.textfiles import RepeatedKey, json_of, text_of
from mpifl.data import prepared_cache as cache
from mpifl.data.pool import Pool
from mpifl.data.sources import arrays, columns
from mpifl.data.sources.base import TEST, TRAIN, Source, part_of, place_of, reading, roles_of
from mpifl.data.sources.pictures import decoded, is_grey
from mpifl.data.sources.tokenized import Encoded, Tokenizer, tokenizer_files

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

IMAGE_NAMES, LABEL_NAMES = ("image", "img"), ("label", "labels", "fine_label", "target", "class")
TEXT_NAMES = ("text", "sentence", "content")
WORDS_NAMES, TAG_NAMES = ("tokens", "words"), ("ner_tags", "pos_tags", "tags", "labels")
FILES = (".parquet", ".csv", ".jsonl")
MASK_SHARE = 0.15  # Devlin et al., NAACL 2019


@dataclass(frozen=True)
class HuggingFace(Source):
    """A data set saved by `save_to_disk` of `datasets`, or a folder of its files; read by pyarrow.

    Pictures are decoded once. Lists of floats are features, lists of whole numbers are tokens (padded with
    0), texts are sequences of words, or of the tokens of a tokenizer. Arrow files are mapped, not copied to
    memory.

    Attributes:
        path: folder, absolute, below data.root or in the working folder. It holds dataset_dict.json and a
            folder for each split, or one split, or train-*.parquet and test-*.parquet, also below data/.
            Files .csv and .jsonl are named likewise. Or it is one such file.
        inputs: column of the samples; null: image, img, text, sentence or content, or, with a tokenizer and
            a column of tags, tokens or words.
        label: column of the labels; null: label, labels, fine_label, target or class, or, with a tokenizer,
            ner_tags, pos_tags or tags.
        labels: classes or numbers, for labels of one number each whose type says otherwise, such as classes
            that are stored as floats; null: whole numbers are classes, floats numbers. With a tokenizer also
            next (the token that follows each) or masked (the token that a mask hides), which need no label.
        tokenizer: folder of a tokenizer in the format of transformers, absolute, below data.root or in the
            working folder; null: texts are words. Lists of words with lists of tags of the same length have
            the tag of a word at its first token. Under `labels: next` and `masked`, a text that is longer
            than `length` makes several samples.
        second: column of the second text, for samples that are pairs of texts; needs a tokenizer.
        mask_share: share of the tokens that are hidden under `labels: masked`, once, when the data are
            prepared; a mask takes the place of 0.8 of them, another token that of 0.1. Trainings draw others
            (task `masked_token`).
        client: column with the owner of each sample; scenario natural makes each owner a client.
        group: column with the hidden group of the owner; it is the ground truth of scenario natural.
        side: side of pictures in pixels; the shorter side is scaled to it, the middle is kept; null: no
            change.
        length: largest number of tokens of a text or a list; longer ones are cut.
        vocabulary: largest number of tokens for texts: 0 for padding, 1 for unknown words, and the most
            frequent words of the training part.
        test_share: share of every class set aside for testing if there is no test split.
        validation: use of a split validation beside train and test: `drop` leaves it out, `train` adds it to
            the training part. Without a split test, validation is the test part.
    """

    name: ClassVar[str] = "huggingface"
    needs_root: ClassVar[bool] = False
    readable_labels: ClassVar[tuple[str, ...]] = arrays.LABELS

    path: str = "dataset"
    inputs: str | None = None
    label: str | None = None
    labels: Literal["classes", "numbers", "next", "masked"] | None = None
    tokenizer: str | None = None
    second: str | None = None
    mask_share: PositiveShare = MASK_SHARE
    client: str | None = None
    group: str | None = None
    side: PositiveInt | None = None
    length: PositiveInt = 128
    vocabulary: Annotated[int, Ge(3)] = 10_000
    test_share: ShareBelowOne = arrays.TEST_SHARE
    validation: Literal["drop", "train"] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.group is None or self.client is not None, "group", self.group, "needs client, too")
        if self.tokenizer is None:
            remedy = "needs a tokenizer: give data.source.tokenizer, the folder of one"
            for name in ("second", "mask_share"):
                value = getattr(self, name)
                require(value == getattr(HuggingFace, name), name, value, remedy)
            require(self.labels not in ("next", "masked"), "labels", self.labels, remedy)
            return
        remedy = "has no effect: the tokenizer has a vocabulary of its own; leave it out"
        require(self.vocabulary == HuggingFace.vocabulary, "vocabulary", self.vocabulary, remedy)
        if self.labels in ("next", "masked"):
            remedy = f"has no effect under labels: {self.labels}, which are tokens of the texts; leave it out"
            for name in ("label", "second"):
                require(getattr(self, name) is None, name, getattr(self, name), remedy)
        remedy = "has no effect without labels: masked; leave it out"
        unused = self.labels != "masked" and self.mask_share != MASK_SHARE
        require(not unused, "mask_share", self.mask_share, remedy)

    def files(self, root: Path) -> list[Path]:
        """Return the files of the training part, the test part, what names classes, and the tokenizer."""
        top = place_of(self.path, root)
        found = [file for split in splits_of(top).values() for file in split]
        if not found:
            return [top / "dataset_dict.json"]
        return [*found, *_descriptions(top), *self._tokenizer_files(root)]

    def _tokenizer_files(self, root: Path) -> list[Path]:
        if self.tokenizer is None:
            return []
        folder = place_of(self.tokenizer, root)
        remedy = "there is no such folder; give one that save_pretrained of a tokenizer wrote"
        require(folder.is_dir(), "data.source.tokenizer", self.tokenizer, remedy)
        return tokenizer_files(folder)

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the columns."""
        pa = optional("pyarrow", "parquet", "data.source.name", "huggingface")
        rows = self._rows(place_of(self.path, root))
        if self.tokenizer is not None:
            return self._tokenised(root, rows)
        held = _column(self.inputs, (*IMAGE_NAMES, *TEXT_NAMES), "inputs", rows.names)
        label = _column(self.label, LABEL_NAMES, "label", rows.names)
        y, names = self._labels(rows.column(label), rows.features.get(label), label)
        origin, origin_names, groups = self._owners(rows)
        n, rows = rows.count, rows.with_test(y, self.test_share)
        kind = rows.schema.field(held).type
        if _is_image(kind):
            arrays.refuse_unused_share(self.test_share, rows.tested)
            chunks = [chunk for table in rows.tables.values() for chunk in table.column(held).chunks]
            images, said = self._pictures(pa.chunked_array(chunks, kind), rows, scratch)
            origin = None if origin is None else origin[rows.order]
            width = len(names) or (int(y.max()) + 1 if y.ndim == 1 else y.shape[1])
            pool = Pool(images, y[rows.order], rows.count, width, origin, origin_names, names)
            said += columns.lines_on_names(origin_names, f"data.source.client: {self.client}", "clients")
            return replace(pool, remarks=(*rows.remarks, *said), origin_groups=groups)
        x, vocabulary, said = self._samples(rows.column(held), held, rows.order[: rows.count])
        train, test = (x[:n], y[:n]), (x[n:], y[n:]) if rows.tested else None
        share, key = self.test_share, f"data.source.inputs: {held}"
        pool = arrays.pool_of(
            train, test, "data.source.path", names, vocabulary, share, origin, origin_names, key
        )
        return replace(pool, remarks=(*rows.remarks, *pool.remarks, *said), origin_groups=groups)

    def _rows(self, top: Path) -> _Rows:
        """Return the rows of all parts that are used, the training part first."""
        splits, remarks = self._splits(top)
        tables = {file: _table(file) for files in splits.values() for file in files}
        n = sum(len(tables[file]) for file in splits[TRAIN])
        features = _features(top, tables[splits[TRAIN][0]].schema)
        every = np.arange(sum(map(len, tables.values())))
        return _Rows(top, tables, features, remarks, TEST in splits, every, n)

    def _owners(self, rows: _Rows) -> tuple[np.ndarray | None, tuple[str, ...], tuple[int, ...]]:
        """Return the owner of each row int64 [n] (None without a key), names of owners, and their groups."""
        if self.client is None:
            return None, (), ()
        _column(self.client, (), "client", rows.names)
        owners = rows.column(self.client)
        columns.refuse_gaps(owners, "data.source.client", self.client)
        origin, named = arrays.numbered(columns.stripped(owners).tolist())
        if self.group is None:
            return origin, named, ()
        _column(self.group, (), "group", rows.names)
        held = rows.column(self.group)
        columns.refuse_gaps(held, "data.source.group", self.group)
        group, _ = arrays.numbered(columns.stripped(held).tolist())
        return origin, named, arrays.groups_of(group, origin, named, self.group)

    def _tokenised(self, root: Path, rows: _Rows) -> Pool:
        """Return the pool of texts as tokens of the tokenizer; see `load`."""
        assert self.tokenizer is not None
        place, pair = place_of(self.tokenizer, root), self.second is not None
        tokenizer = Tokenizer.of(place, self.tokenizer, self.length, pair)
        arrays.refuse_unused_share(self.test_share, rows.tested)
        labels = self._text_labels(rows)
        listed = WORDS_NAMES if labels.tags is not None else ()
        held = _column(self.inputs, (*listed, *TEXT_NAMES), "inputs", rows.names)
        rows = rows.with_test(labels.y, self.test_share)
        column = rows.column(held).iloc[rows.order]
        if labels.tags is not None:
            words = _words(column, held)
            of = [labels.tags[i] for i in rows.order.tolist()]
            for i, (some, own) in enumerate(zip(words, of, strict=True)):
                where = columns.row_of(column, i)
                remedy = f"{where} has {len(own)} tags for {len(some)} words: give one each"
                require(len(some) == len(own), "data.source.label", labels.column, remedy)
            return self._pool_of_tokens(rows, labels, tokenizer.words(words, of), tokenizer.vocabulary)
        texts = _texts(column, "inputs", held)
        rows = replace(
            rows, remarks=(*rows.remarks, *columns.lines_on_texts(column, f"data.source.inputs: {held}"))
        )
        if self.labels == "next":
            found = tokenizer.following(texts)
        elif self.labels == "masked":
            found = tokenizer.masked(texts, self.mask_share)
        else:
            others: list[str] | None = None
            if self.second is not None:
                _column(self.second, (), "second", rows.names)
                others = _texts(rows.column(self.second).iloc[rows.order], "second", self.second)
            found = tokenizer.texts(texts, others)
        return self._pool_of_tokens(rows, labels, found, tokenizer.vocabulary)

    def _text_labels(self, rows: _Rows) -> _Labels:
        """Return the labels of texts: classes, numbers or tags; zeros where they are tokens of the texts."""
        if self.labels in ("next", "masked"):
            return _Labels(None, np.zeros(len(rows.order), np.int64), ())
        remedy = "; or give data.source.labels: next or masked, which are tokens of the texts"
        name = _column(self.label, (*LABEL_NAMES, *TAG_NAMES), "label", rows.names, remedy)
        column, feature = rows.column(name), rows.features.get(name)
        if (found := _tags(column, name, feature)) is None:
            return _Labels(name, *self._labels(column, feature, name))
        tags, names = found
        remedy = "holds a tag for each word: leave labels out, or second"
        require(self.labels is None and self.second is None, "data.source.label", name, remedy)
        return _Labels(name, np.zeros(len(rows.order), np.int64), names, tags)

    def _splits(self, top: Path) -> tuple[dict[str, list[Path]], tuple[str, ...]]:
        """Return the files of the training part, those of the test part, and lines about other splits."""
        found = splits_of(top)
        known = [name for name in found if part_of(name)]
        roles, remarks = roles_of(known, self.validation, str(top))
        splits = {role: [f for n in roles if roles[n] == role for f in found[n]] for role in (TRAIN, TEST)}
        if others := sorted(set(found) - set(known)):
            remarks = (*remarks, f"{top}: splits that are no part are left out: {', '.join(others[:3])}")
        return {role: files for role, files in splits.items() if files}, remarks

    def _pool_of_tokens(self, rows: _Rows, labels: _Labels, found: Encoded, vocabulary: int) -> Pool:
        """Return the pool of tokenised texts.

        Args:
            rows: the rows, in the order of the texts.
            labels: their labels.
            found: the samples, in the order of their texts, the training part first.
            vocabulary: number of tokens of the tokenizer.
        """
        origin, origin_names, groups = self._owners(rows)
        origin = None if origin is None else origin[rows.order][found.row]
        split = int(np.searchsorted(found.row, rows.count))
        y = labels.y[rows.order][found.row] if found.y is None else found.y
        key, x = f"data.source.inputs with the tokenizer {self.tokenizer}", found.x
        require(split > 0, "data.source.path", self.path, "has no training sample of tokens: give some")
        test = (x[split:], y[split:]) if split < len(x) else None
        share = arrays.TEST_SHARE if test is not None else 0.0
        named = labels.names if found.y is None else ()
        made = arrays.pool_of(
            (x[:split], y[:split]), test, key, named, vocabulary, share, origin, origin_names
        )
        tags = labels.tags is not None
        kind = TAGS if tags else MASKED if self.labels == "masked" else TOKENS
        return replace(
            made,
            num_classes=len(labels.names) if tags else made.num_classes,
            class_names=labels.names if tags else made.class_names,
            of_positions=kind,
            special=found.special,
            origin_groups=groups,
            remarks=(*rows.remarks, *made.remarks),
        )

    def _labels(self, column: pd.Series, feature: Any, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return labels, and the names of classes."""
        key = "data.source.label"
        columns.refuse_gaps(column, key, name)
        values = column.tolist()
        if values and isinstance(values[0], str):
            return arrays.labels_of_texts(column, key, name, self.labels)
        known = (feature.get("names") if isinstance(feature, Mapping) else None) or []
        good = isinstance(known, list) and not any(isinstance(one, (float, list, dict)) for one in known)
        remedy = "are the names of classes in its description, and must be texts: save the data set again"
        require(good, f"{key}: {name}", known, remedy)
        return arrays.any_labels_of(np.asarray(values), f"{key}: {name}", self.labels, column), tuple(
            map(str, known)
        )

    def _samples(self, column: pd.Series, name: str, learnt: np.ndarray) -> tuple[np.ndarray, int, list[str]]:
        """Return samples that are not pictures, the number of different tokens (0 for features), and lines.

        Args:
            column: the samples of all splits.
            name: its name.
            learnt: rows of the training part, whose words are the vocabulary, int64 [n].
        """
        key = "data.source.inputs"
        columns.refuse_gaps(column, key, name, column.isna().to_numpy(bool))
        rows = column.tolist()
        if rows and isinstance(rows[0], str):
            arrays.refuse_pictures(rows, f"{key}: {name}")
            numbers = columns.numbers_of_texts(column, key, name)
            if numbers is not None:
                return arrays.as_float32(numbers[:, None], key, name), 0, []
            return arrays.words_of_rows(
                column, f"{key}: {name}", learnt.tolist(), self.vocabulary, self.length
            )
        first = next((row[0] for row in rows if isinstance(row, list) and row), None)
        if isinstance(first, int):
            return self._tokens(column, name)
        if isinstance(first, str):
            return columns.numbers_of_lists(column, key, name), 0, []
        return arrays.numbers_of_rows(column, key, name), 0, []

    def _tokens(self, column: pd.Series, name: str) -> tuple[np.ndarray, int, list[str]]:
        """Return lists of whole numbers, cut or padded to one length, and the number of different tokens."""
        rows = column.tolist()
        out = np.zeros((len(rows), min(self.length, max(map(len, rows)))), np.int32)
        for i, row in enumerate(rows):
            try:
                out[i, : len(row)] = row[: out.shape[1]]
            except (TypeError, OverflowError) as error:
                remedy = f"{columns.row_of(column, i)} holds no tokens: give whole numbers below 2**31"
                raise UserError("data.source.inputs", name, remedy) from error
        return out, int(out.max(initial=0)) + 1, []

    def _pictures(self, column: Any, rows: _Rows, scratch: Path) -> tuple[np.ndarray, list[str]]:
        """Decode the pictures into `scratch`, one at a time; uint8 [n, C, H, W], and lines for the user.

        C is 1 if all are grey, otherwise 3.
        """
        import pandas as pd

        top, where = rows.top, pd.Series(0, rows.index)

        def place(i: int) -> str:
            return f"{top}: {columns.row_of(where, i)}"

        def content(i: int) -> bytes:
            row = column[i].as_py()
            held = row.get("bytes") if isinstance(row, Mapping) else None
            remedy = "holds no bytes of a picture: save the data set with its files embedded"
            require(held is not None, place(i), None, remedy)
            return bytes(held or b"")

        order: list[int] = rows.order.tolist()
        grey = sum(is_grey(content(i), place(i)) for i in each(order, "looking for colours", "pictures"))
        colour = grey < len(order)
        images: np.ndarray | None = None
        for target, i in enumerate(each(order, "decoding pictures", "pictures")):
            pixels = decoded(BytesIO(content(i)), place(i), self.side, colour)
            if images is None:
                images = cache.allocate(scratch, "images", (len(order), *pixels.shape))
            remedy = f"a picture of {list(pixels.shape)} among those of {list(images.shape[1:])}: set side"
            require(pixels.shape == images.shape[1:], place(i), list(pixels.shape), remedy)
            images[target] = pixels
        assert images is not None
        mixed = f"{top}: {grey} of {len(order)} pictures are grey and read as RGB, as the others are"
        return images, [mixed] if colour and grey else []


@dataclass(frozen=True)
class _Rows:
    """The rows of a data set.

    Attributes:
        top: folder or file of the data set.
        tables: file -> its rows, the training part first.
        features: column -> its description by `datasets`.
        remarks: lines for the user about the parts.
        tested: whether there is a test part.
        order: the row of each sample, those of the training part first, int64 [n].
        count: number of samples of the training part.
    """

    top: Path
    tables: Mapping[Path, pa.Table]
    features: Mapping[str, Any]
    remarks: tuple[str, ...]
    tested: bool
    order: np.ndarray
    count: int

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        return next(iter(self.tables.values())).schema

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.schema.names)

    @cached_property
    def index(self) -> pd.Index[Any]:
        """File and number of each row, for messages."""
        return columns.index_of([(file, len(table)) for file, table in self.tables.items()])

    def column(self, name: str) -> pd.Series:
        """Return a column, in the order of the files."""
        import pandas as pd

        held = (value for table in self.tables.values() for value in table.column(name).to_pylist())
        return pd.Series(list(held), self.index, dtype=object)

    def with_test(self, labels: np.ndarray, share: float) -> _Rows:
        """Return the same rows with a share of each class set aside, if there is no test part."""
        if self.tested:
            return self
        order, count = arrays.with_test(labels, share)
        return replace(self, order=order, count=count)


@dataclass(frozen=True)
class _Labels:
    """Labels of texts.

    Attributes:
        column: their column; None where they are tokens of the texts.
        y: the label of each row [n, ...]; zeros where labels are those of positions.
        names: names of classes or tags.
        tags: a list of tags for each row; None if labels are no tags.
    """

    column: str | None
    y: np.ndarray
    names: tuple[str, ...]
    tags: list[list[int]] | None = None


def _tags(column: pd.Series, name: str, feature: Any) -> tuple[list[list[int]], tuple[str, ...]] | None:
    """Return a column whose values are lists, as numbers of tags, and their names; None if they are none."""
    rows = column.tolist()
    if not any(isinstance(row, list) for row in rows):
        return None
    columns.refuse_gaps(column, "data.source.label", name, column.isna().to_numpy(bool))
    kinds = {type(tag) for row in rows for tag in row}
    remedy = "holds lists that are no tags: give whole numbers from 0, or names"
    require(kinds in ({int}, {str}), "data.source.label", name, remedy)
    if kinds == {str}:
        known = sorted({tag for row in rows for tag in row})
        number = {tag: i for i, tag in enumerate(known)}
        return [[number[tag] for tag in row] for row in rows], tuple(known)
    most, least = max(max(row, default=0) for row in rows), min(min(row, default=0) for row in rows)
    require(least >= 0, "data.source.label", name, f"holds the tag {least}: give whole numbers from 0")
    inner = feature.get("feature", feature) if isinstance(feature, Mapping) else {}
    named = inner.get("names") if isinstance(inner, Mapping) else None
    good = isinstance(named, list) and len(named) > most
    return rows, tuple(map(str, named)) if good and named else tuple(map(str, range(most + 1)))


def _texts(column: pd.Series, key: str, name: str) -> list[str]:
    """Return a column of texts; refuse gaps and other values."""
    columns.refuse_gaps(column, f"data.source.{key}", name, column.isna().to_numpy(bool))
    wrong = np.array([not isinstance(value, str) for value in column.tolist()], bool)
    remedy = f"{columns.first_of(column, wrong)}, which is no text: a tokenizer needs texts"
    require(not wrong.any(), f"data.source.{key}", name, remedy)
    return list(column.tolist())


def _words(column: pd.Series, name: str) -> list[list[str]]:
    """Return a column of lists of words; refuse gaps and other values."""
    columns.refuse_gaps(column, "data.source.inputs", name, column.isna().to_numpy(bool))
    rows = column.tolist()
    good = [isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows]
    remedy = f"{columns.first_of(column, ~np.array(good, bool))}: tags belong to the words of a list"
    require(all(good), "data.source.inputs", name, remedy)
    return [list(row) for row in rows]


def splits_of(top: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a folder, by its name; empty where the folder holds no data set."""
    if (top / "dataset_dict.json").is_file():
        return {p.name: _arrow_files(p) for p in sorted(top.iterdir()) if (p / "state.json").is_file()}
    if (top / "state.json").is_file():
        return {TRAIN: _arrow_files(top)}
    if top.is_file() and top.suffix in FILES:
        return {TRAIN: [top]}
    for suffix in FILES:
        found: dict[str, list[Path]] = {}
        for file in (*sorted(top.glob(f"*{suffix}")), *sorted((top / "data").glob(f"*{suffix}"))):
            found.setdefault(file.name.split("-")[0].removesuffix(suffix), []).append(file)
        if found:
            return found
    return {}


def _arrow_files(folder: Path) -> list[Path]:
    """Return the Arrow files that a split's state.json names."""
    state = folder / "state.json"
    with reading(state, "the state of a data set"):
        files = json_of(text_of(state, "data.source.path"))["_data_files"]
        names = [str(file["filename"]) for file in files]
    inside = all(Path(name).name == name for name in names)
    require(inside, str(state), names[:2], "names files of other folders: save the data set again")
    return [folder / name for name in names]


def _table(file: Path) -> pa.Table:
    """Return the rows of an Arrow file (mapped), or of a file of `FILES`."""
    import pyarrow as pa
    from pyarrow import csv, ipc, json, parquet

    with reading(
        file, {".csv": "a CSV file", ".jsonl": "a JSON Lines file"}.get(file.suffix, "an Arrow file")
    ):
        if file.suffix == ".parquet":
            table = parquet.read_table(file, memory_map=True)
        elif file.suffix == ".csv":
            table = csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True))
        elif file.suffix == ".jsonl":
            table = json.read_json(file)
        else:
            try:
                table = ipc.open_stream(pa.memory_map(str(file))).read_all()  # as `save_to_disk` writes
            except pa.ArrowInvalid:
                table = ipc.open_file(pa.memory_map(str(file))).read_all()  # with an index
        table.validate(full=True)  # a corrupt offset could point anywhere
    return table


def _descriptions(top: Path) -> list[Path]:
    """Return the files that may name the classes of a data set, if there are any."""
    places = (top / "dataset_info.json", top / TRAIN / "dataset_info.json")
    return [place for place in places if place.is_file()]


def _features(top: Path, schema: pa.Schema) -> Mapping[str, Any]:
    """Return the description of the columns by `datasets`, from the schema or dataset_info.json."""
    text = (schema.metadata or {}).get(b"huggingface")
    try:
        tree = json_of(text)["info"] if text else {}
        for place in _descriptions(top):
            if not tree.get("features"):
                tree = json_of(text_of(place, "data.source.path"))
        features = tree.get("features") or {}
    except RepeatedKey as error:
        raise UserError("data.source.path", str(top), str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return features if isinstance(features, dict) else {}


def _column(
    given: str | None, usual: Sequence[str], role: str, names: Sequence[str], otherwise: str = ""
) -> str:
    """Return the name of the column for a role; refuse a missing one."""
    if given is not None:
        there = f"there is no such column; there are {', '.join(names)}"
        require(given in names, f"data.source.{role}", given, there)
        return given
    found = next((name for name in usual if name in names), None)
    remedy = f"name the column; there are {', '.join(names)}{otherwise}"
    require(found is not None, f"data.source.{role}", None, remedy)
    assert found is not None
    return found


def _is_image(kind: Any) -> bool:
    """Return whether a column holds pictures: bytes and path of each."""
    from pyarrow import types

    return bool(types.is_struct(kind)) and {field.name for field in kind} >= {"bytes"}
