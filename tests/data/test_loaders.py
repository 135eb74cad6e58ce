"""Loaders of tables, arrays, LEAF's JSON and Hugging Face's folders: each reads small files in its format."""

from __future__ import annotations

import json
from decimal import Decimal
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.sources.leaf import LETTERS

RNG = np.random.default_rng(0)


def load(source: str, root: Path, **options):
    """Return the pool of a source without any cache."""
    return SOURCES[source](**options).load(root, root)


def opened(root: Path, source: str, scenario, **options):
    """Return a federation."""
    return open_federation(
        DataConfig(str(root), str(root / "cache"), SOURCES[source](**options), scenario), 0
    )


# -- tables --------------------------------------------------------------------------------------------------


def a_table(n: int = 40) -> pd.DataFrame:
    """Return rows of two numbers, a category, a client with its group, and two targets."""
    client = np.arange(n) % 4
    a, colour = RNG.normal(size=n), np.array(["red", "blue", "green"])[RNG.integers(0, 3, n)]
    return pd.DataFrame(
        {
            "a": a,
            "b": RNG.integers(0, 5, n),
            "colour": colour,
            "who": [f"client {c}" for c in client],
            "site": client // 2,
            "price": 3.0 * a + client // 2,
            "sold": np.where(a > 0, "yes", "no"),
        }
    )


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_columns_of_a_table_have_roles(tmp_path, ending):
    frame = a_table()
    frame.to_csv(tmp_path / "t.csv", index=False)
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(tmp_path / "t.parquet", index=False)
    roles = {"features": ("a", "b", "colour"), "client": "who", "group": "site", "test_share": 0.25}
    pool = load("table", tmp_path, path=f"t{ending}", target=("sold",), **roles)
    assert (pool.kind, pool.label_kind, pool.class_names) == ("features", "classes", ("no", "yes"))
    assert pool.categories == (0, 0, 3)
    assert pool.num_train == 30
    assert pool.origin_names == tuple(f"client {c}" for c in range(4))
    assert pool.origin_groups == (0, 0, 1, 1)
    codes = {"blue": 0, "green": 1, "red": 2}
    columns = frame.a.astype(np.float32), frame.colour.map(codes), frame.sold == "yes"
    found = zip(pool.inputs[:, 0], pool.inputs[:, 2].astype(int), pool.labels == 1, strict=True)
    assert set(found) == set(zip(*columns, strict=True))
    scenario = SCENARIOS["natural"](test="own")
    federation = opened(tmp_path, "table", scenario, path=f"t{ending}", target=("sold",), **roles)
    assert federation.groups.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("ending", [".csv", ""])
def test_numbers_and_texts_of_one_column_are_the_same_names_in_all_rows(tmp_path, ending):
    """pandas reads a long file in pieces, the first of which hold numbers alone; so does one of two files."""
    count = 6_000 if ending else 30
    who = [*(str(i % 3) for i in range(10 * count)), *(str(i % 3) for i in range(count)), "x1"]
    frame = pd.DataFrame({"who": who, "a": 1.5, "y": ["yes", "no"] * (len(who) // 2) + ["no"]})
    if ending:
        frame.to_csv(tmp_path / "t.csv", index=False)
    else:
        (tmp_path / "t").mkdir()
        frame[: 10 * count].to_csv(tmp_path / "t" / "1.csv", index=False)
        frame[10 * count :].to_csv(tmp_path / "t" / "2.csv", index=False)
    options = {"path": f"t{ending}", "target": ("y",), "client": "who", "test_share": 0.0}
    pool = load("table", tmp_path, features=("a", "who"), categories=("who",), **options)
    assert pool.origin_names == ("0", "1", "2", "x1")
    assert pool.categories == (0, 4)
    assert np.bincount(pool.origin).tolist() == [frame.who.eq(w).sum() for w in pool.origin_names]


def test_targets_of_a_table_are_numbers_or_several_labels(tmp_path):
    frame = a_table()
    frame.to_csv(tmp_path / "t.csv", index=False)
    pool = load("table", tmp_path, path="t.csv", target=("price",), features=("a", "b"))
    assert (pool.label_kind, pool.num_classes, pool.class_names) == ("numbers", 1, ("price",))
    np.testing.assert_allclose(pool.labels[: pool.num_train].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(pool.labels[: pool.num_train].std(), 1, atol=1e-6)
    frame = frame[["a", "b"]].assign(big=(frame.a > 1).astype(int), red=(frame.colour == "red").astype(int))
    frame.to_csv(tmp_path / "m.csv", index=False)
    pool = load("table", tmp_path, path="m.csv", target=("big", "red"), labels="multi_hot", categories=("b",))
    assert (pool.label_kind, pool.num_classes, pool.categories) == ("multi_hot", 2, (0, 5))


def test_large_targets_of_many_rows_are_standardised_to_mean_zero_and_deviation_one(tmp_path):
    """Sums in float32 would lose them: 20,000 numbers near 1e5 add up to 2e9, where steps are of 128."""
    rows = {"a": RNG.normal(size=20_000), "y": 1e5 + RNG.normal(size=20_000), "z": RNG.normal(size=20_000)}
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    pool = load("table", tmp_path, path="t.csv", target=("y", "z"), test_share=0.0)
    stored = np.stack([rows["y"], rows["z"]], 1).astype(np.float32).astype(np.float64)
    expected = (stored - stored.mean(0)) / stored.std(0)
    np.testing.assert_allclose(pool.labels, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "values", "told"),
    [(None, 10, True), ("classes", 10, False), ("numbers", 10, False), (None, 4, False)],
)
def test_whole_numbers_of_many_values_are_classes_and_a_line_says_so(tmp_path, labels, values, told):
    a_table().assign(age=[20 + i % values for i in range(40)]).to_csv(tmp_path / "t.csv", index=False)
    pool = load("table", tmp_path, path="t.csv", target=("age",), features=("a", "b"), labels=labels)
    line = "data.source.target = age: 10 different whole numbers in 40 rows are taken for classes"
    remedy = "labels: numbers predicts their values, labels: classes leaves out this line"
    assert pool.remarks == ((f"{line}; {remedy}",) if told else ())


def test_the_test_part_of_a_table_is_a_file_or_a_column(tmp_path):
    frame = a_table().assign(part=["train"] * 30 + ["test"] * 10)
    frame.iloc[:30].to_csv(tmp_path / "a.csv", index=False)
    frame.iloc[30:].to_csv(tmp_path / "b.csv", index=False)
    frame.iloc[::-1].to_csv(tmp_path / "t.csv", index=False)
    features = {"features": ("a",), "target": ("price",), "standardise_target": False}
    two = load("table", tmp_path, path="a.csv", test_path="b.csv", **features)
    one = load("table", tmp_path, path="t.csv", part="part", **features)
    assert two.num_train == one.num_train == 30
    np.testing.assert_allclose(two.inputs[30:, 0], frame.a[30:], rtol=1e-6)
    np.testing.assert_array_equal(one.labels[:30], two.labels[:30][::-1])


def test_a_table_without_a_training_row_is_refused(tmp_path):
    """Its test part is not trained on."""
    frame = a_table().assign(part="test")
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame[:0].to_csv(tmp_path / "none.csv", index=False)
    empty = {"path": "none.csv"}
    for options in ({"path": "t.csv", "part": "part"}, {**empty, "test_path": "t.csv"}, empty):
        with pytest.raises(UserError, match=r"data.source.path = .*csv': has no training row: give some"):
            load("table", tmp_path, target=("price",), features=("a",), **options)


def test_a_file_without_a_row_in_a_folder_changes_nothing(tmp_path):
    """Columns of no values have no type: numbers would become categories."""
    (tmp_path / "t").mkdir()
    for i, rows in enumerate((slice(0), slice(None))):
        a_table()[rows].to_csv(tmp_path / "t" / f"{i}.csv", index=False)
    for paths in ({"path": "t"}, {"path": "t/1.csv", "test_path": "t/0.csv"}):
        pool = load("table", tmp_path, target=("price",), features=("a", "colour"), **paths)
        assert (pool.categories, pool.label_kind, len(pool.labels)) == ((0, 3), "numbers", 40)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": ("prise",)}, r"data.source.target = 'prise': the table has no such column; it has a, b"),
        ({"features": ("x",)}, r"data.source.features = 'x': the table has no such column"),
        ({"target": ("sold", "price"), "labels": "classes"}, r"labels = 'classes': multi_hot or numbers"),
        ({"target": ("sold",), "labels": "numbers"}, r"data.source.target = 'sold': holds texts"),
        ({"group": "site"}, r"group = 'site': needs client"),
        ({"client": "who", "group": "b"}, r"data.source.group = 'b': client .* is in several groups"),
        ({"part": "sold"}, r"data.source.part = 'sold': row 1 holds 'yes': its values must be train"),
        (
            {"target": ("a", "b"), "labels": "multi_hot", "features": ("sold",)},
            r"labels = 'multi_hot': needs two columns",
        ),
        ({"features": ("gap",)}, r"data.source.features = 'gap': lacks a value in row 3"),
    ],
)
def test_roles_that_columns_do_not_have_are_refused(tmp_path, options, says):
    frame = a_table().assign(gap=1.0)
    frame.loc[2, "gap"] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(UserError, match=says):
        load("table", tmp_path, path="t.csv", **{"target": ("price",), "features": ("a",), **options})


@pytest.mark.parametrize(
    ("column", "kind"), [("paid", "decimal"), ("when", "datetime64"), ("day", "date"), ("list", "mixed")]
)
@pytest.mark.parametrize("role", ["features", "target"])
def test_decimals_times_and_lists_are_not_taken_for_categories(tmp_path, column, kind, role):
    pytest.importorskip("pyarrow")
    times = pd.to_datetime(np.arange(40), unit="D")
    paid = [Decimal(i) / 4 for i in range(40)]
    frame = a_table().assign(paid=paid, when=times, day=times.date, list=[[i, 1.0] for i in range(40)])
    frame.to_parquet(tmp_path / "t.parquet")
    options = {"target": ("price",), "features": ("a",), role: (column,)}
    says = f"data.source.{role} = '{column}': holds values of kind {kind}: make them numbers or texts"
    with pytest.raises(UserError, match=says):
        load("table", tmp_path, path="t.parquet", **options)


@pytest.mark.parametrize("role", ["features", "target"])
def test_numbers_that_float32_would_make_equal_are_refused(tmp_path, role):
    """Seconds since 1970 are near 1.76e9, where float32 has steps of 128: an hour would have 29 values."""
    hour = 1_763_000_000 + 90.0 * np.arange(40)
    frame = a_table().assign(hour=hour, day=hour - hour.mean(), fixed=1_763_000_001.0)
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {"target": ("price",), "features": ("a",)}
    says = rf"data.source.{role} = 'hour': .* rounded by up to 64, .* deviation is 1.04e\+03: subtract"
    with pytest.raises(UserError, match=says):
        load("table", tmp_path, path="t.csv", **options | {role: ("hour",)})
    load("table", tmp_path, path="t.csv", **options | {role: ("day",)})
    load("table", tmp_path, path="t.csv", **options | {role: ("fixed",)})


@pytest.mark.parametrize("source", ["npz", "leaf", "huggingface"])
@pytest.mark.parametrize("coarse", ["samples", "labels"])
def test_sources_of_arrays_refuse_numbers_that_float32_would_make_equal(tmp_path, source, coarse):
    hour = 1_763_000_000 + 90.0 * np.arange(40)
    noise = 0.3 + 1e-16 * np.arange(40)  # a constant, but for rounding
    x, y = np.stack([noise, RNG.random(40), RNG.random(40)], axis=1), np.arange(40) / 40
    if coarse == "samples":
        x[:, 2] = hour
    else:
        y = hour

    def write(folder: Path, x: np.ndarray, y: np.ndarray) -> None:
        folder.mkdir()
        if source == "npz":
            np.savez(folder / "a.npz", x_train=x, y_train=y)
        elif source == "leaf":
            write_leaf(folder / "a", {"u": (x.tolist(), y.tolist())})
        else:
            save_split(folder / "a", {"x": x.tolist(), "label": y.tolist()}, {})

    options = {"path": "a.npz" if source == "npz" else "a"}
    options |= {"inputs": "x"} if source == "huggingface" else {}
    write(tmp_path / "good", x - x.mean(0), y - y.mean(0))
    assert load(source, tmp_path / "good", **options).inputs.dtype == np.float32
    write(tmp_path / "bad", x, y)
    column = "column 2" if coarse == "samples" else "column 0"
    says = rf"= '{column}': its values would be rounded by up to 64, to float32, .* subtract a constant near"
    with pytest.raises(UserError, match=says):
        load(source, tmp_path / "bad", **options)


def test_features_of_a_table_are_standardised(tmp_path):
    a_table(80).to_csv(tmp_path / "t.csv", index=False)
    options = {"path": "t.csv", "target": ("price",), "client": "who", "group": "site"}
    scenario = SCENARIOS["natural"](test="own", test_share=0.0)
    federation = opened(tmp_path, "table", scenario, features=("a", "b", "colour"), test_share=0.0, **options)
    x = np.concatenate([federation.client(k).train.x.numpy() for k in range(4)])
    np.testing.assert_allclose(x[:, :2].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x[:, :2].std(0), 1, atol=1e-6)
    assert set(x[:, 2]) == {0, 1, 2}
    assert federation.info.categories == (0, 0, 3)


def test_own_means_leave_categories_as_they_are(tmp_path):
    """A model looks categories up by their numbers."""
    frame = a_table(80)
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {"path": "t.csv", "target": ("price",), "features": ("a", "colour"), "test_share": 0.0}
    scenario = SCENARIOS["iid"](clients=1, test="own", test_share=0.0)
    for mean, std in (((0.5,), (2.0,)), ((0.5, 9.0), (2.0, 9.0))):
        x = opened(tmp_path, "table", scenario, mean=mean, std=std, **options).client(0).train.x.numpy()
        expected = (np.sort(frame.a.to_numpy(np.float32)) - 0.5) / 2
        np.testing.assert_allclose(np.sort(x[:, 0]), expected, atol=1e-6)
        assert np.unique(x[:, 1]).tolist() == [0, 1, 2]


# -- arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_tokens_to_predict_may_be_unsigned(tmp_path, kind):
    """20 different tokens in sequences of 32, then 40 in sequences of 8: the width is the number of them."""
    for count, length in ((20, 32), (40, 8)):
        tokens = (np.arange(30 * (length + 1)) * 7 % count).reshape(30, length + 1).astype(kind)
        np.savez(tmp_path / "a.npz", x_train=tokens[:, :-1], y_train=tokens[:, 1:])
        pool = load("npz", tmp_path, path="a.npz")
        assert (pool.kind, pool.label_kind) == ("tokens", "tokens")
        assert (pool.vocabulary, pool.num_classes) == (count, count)
        federation = opened(tmp_path, "npz", SCENARIOS["relations"](clients=4), path="a.npz")
        for k in range(4):
            x, y = federation.samples(k)
            np.testing.assert_array_equal(x[:, 1:], y[:, :-1], "labels are renamed as samples are")


def test_a_share_to_set_aside_is_refused_where_the_source_has_a_test_part(tmp_path):
    rows = {f"x_{part}": np.ones((10, 3)) for part in ("train", "test")}
    rows |= {f"y_{part}": np.arange(10) % 2 for part in ("train", "test")}
    np.savez(tmp_path / "a.npz", **rows)
    pictures = [{"bytes": png(10 * i), "path": None} for i in range(4)]
    for split in ("train", "test"):
        save_split(tmp_path / "pets" / split, {"image": pictures, "label": [0, 1, 0, 1]}, CLASSES)
    (tmp_path / "pets" / "dataset_dict.json").write_text("{}")
    for source, path in (("npz", "a.npz"), ("huggingface", "pets")):
        assert load(source, tmp_path, path=path, test_share=0.0).num_train in (4, 10)
        with pytest.raises(UserError, match=r"data.source.test_share = 0.4: has no effect: .* test part"):
            load(source, tmp_path, path=path, test_share=0.4)


def test_an_archive_holds_features_tokens_numbers_or_labels(tmp_path):
    y = np.arange(12) % 3
    spectra = RNG.random((12, 4, 9)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x_train=spectra, y_train=y)
    pool = load("npz", tmp_path, path="a.npz", inputs="features")
    assert (pool.kind, pool.shape, pool.label_kind) == ("features", (4, 9), "classes")
    assert load("npz", tmp_path, path="a.npz").kind == "images"
    np.savez(tmp_path / "a.npz", x_train=RNG.integers(0, 7, (12, 5)), y_train=RNG.normal(size=12))
    pool = load("npz", tmp_path, path="a.npz", vocabulary=9)
    assert (pool.kind, pool.vocabulary, pool.label_kind, pool.num_classes) == ("tokens", 9, "numbers", 1)
    many = RNG.integers(0, 2, (12, 5)).astype(np.uint8)
    np.savez(
        tmp_path / "a.npz",
        x_train=RNG.normal(size=(12, 3)),
        y_train=many,
        x_test=np.ones((4, 3)),
        y_test=many[:4],
    )
    pool = load("npz", tmp_path, path="a.npz")
    assert (pool.kind, pool.label_kind, pool.num_train, pool.num_classes) == ("features", "multi_hot", 12, 5)


ITEMS = """
import numpy as np
import torch


class Items:
    def __init__(self, train: bool):
        self.n = 12 if train else 5

    def __len__(self):
        return self.n


class Signals(Items):
    def __getitem__(self, i):
        return torch.full((3,), 10.0 * i), 0.5 * i


class Tags(Items):
    def __getitem__(self, i):
        return np.array([i, 1, 2]), np.array([i % 2, 1, 0], bool)


class Spectra(Items):
    def __getitem__(self, i):
        return np.full((4, 9), -float(i)), torch.tensor(i % 3)
"""


def test_a_data_set_of_ones_own_has_samples_and_labels_of_any_kind(tmp_path):
    (tmp_path / "items.py").write_text(ITEMS)
    for name, options, found in (
        ("Signals", {}, ("features", (3,), "numbers", 1)),
        ("Tags", {"vocabulary": 20}, ("tokens", (3,), "multi_hot", 3)),
        ("Spectra", {"inputs": "features"}, ("features", (4, 9), "classes", 3)),
    ):
        pool = load("dataset", tmp_path, path=f"{tmp_path / 'items.py'}:{name}", **options)
        assert (pool.kind, pool.shape, pool.label_kind, pool.num_classes) == found
        assert (pool.num_train, len(pool.labels)) == (12, 17)
    with pytest.raises(UserError, match="uint8, or floats between 0 and 1"):
        load("dataset", tmp_path, path=f"{tmp_path / 'items.py'}:Spectra")


def write_medmnist(path: Path, shape: tuple[int, ...], labels: np.ndarray) -> None:
    """Write an archive as MedMNIST's are: images and labels [n, 1] or [n, L] of train, val and test."""
    ends = {"train": (0, 12), "val": (12, 16), "test": (16, 20)}
    images = RNG.integers(0, 256, (20, *shape), dtype=np.uint8)
    parts = {f"{p}_images": images[a:b] for p, (a, b) in ends.items()}
    np.savez(path, **parts, **{f"{p}_labels": labels[a:b] for p, (a, b) in ends.items()})


def test_medmnist_archives_are_read(tmp_path):
    write_medmnist(tmp_path / "pathmnist.npz", (28, 28, 3), (np.arange(20) % 9)[:, None].astype(np.uint8))
    pool = load("medmnist", tmp_path, path="pathmnist.npz")
    assert (pool.shape, pool.num_train, len(pool.labels), pool.num_classes) == ((3, 28, 28), 16, 20, 9)
    assert pool.class_names[0] == "adipose"
    assert load("medmnist", tmp_path, path="pathmnist.npz", validation="drop").num_train == 12
    write_medmnist(tmp_path / "chestmnist.npz", (28, 28), RNG.integers(0, 2, (20, 14)).astype(np.uint8))
    pool = load("medmnist", tmp_path, path="chestmnist.npz")
    assert (pool.shape, pool.label_kind, pool.num_classes) == ((1, 28, 28), "multi_hot", 14)
    write_medmnist(tmp_path / "nodulemnist3d.npz", (6, 6, 6), (np.arange(20) % 2)[:, None].astype(np.uint8))
    pool = load("medmnist", tmp_path, path="nodulemnist3d.npz")
    assert (pool.kind, pool.shape) == ("features", (1, 6, 6, 6))
    np.savez(tmp_path / "bad.npz", train_images=np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(UserError, match="lacks the array train_labels"):
        load("medmnist", tmp_path, path="bad.npz")


# -- LEAF ----------------------------------------------------------------------------------------------------


def write_leaf(root: Path, users: dict[str, tuple[list, list]], held: int = 1) -> None:
    """Write shards as LEAF does; the last `held` samples of each user test."""
    for part, cut in (("train", slice(0, -held)), ("test", slice(-held, None))):
        (root / part).mkdir(parents=True)
        data = {user: {"x": x[cut], "y": y[cut]} for user, (x, y) in users.items()}
        counts = [len(held["y"]) for held in data.values()]
        document = {"users": list(data), "num_samples": counts, "user_data": data, "hierarchies": []}
        (root / part / f"all_data_niid_0_keep_0_{part}_9.json").write_text(json.dumps(document))


def test_shakespeare_is_next_characters_of_leafs_alphabet(tmp_path):
    text = "To be, or not to be: that is the question.\n"
    play = {
        f"HAMLET_{i}": ([text[j : j + 8] for j in range(4)], [text[j + 8] for j in range(4)])
        for i in range(3)
    }
    write_leaf(tmp_path / "shakespeare", play)
    pool = load("leaf", tmp_path)
    assert (pool.kind, pool.shape, pool.vocabulary, pool.num_classes) == ("tokens", (8,), 80, 80)
    assert pool.inputs[0].tolist() == [LETTERS.index(c) for c in text[:8]]
    assert pool.labels[0] == LETTERS.index(text[8])
    assert (pool.num_train, len(pool.labels)) == (9, 12)
    assert pool.origin_names == ("HAMLET_0", "HAMLET_1", "HAMLET_2")
    assert pool.origin.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 1, 2]
    federation = opened(tmp_path, "leaf", SCENARIOS["natural"]())
    assert federation.client(2).train.x.shape == (3, 8)


def test_sent140_is_words(tmp_path):
    def tweet(text):
        return ["1467810369", "Mon Apr 06 2009", "NO_QUERY", "user", text, "training"]

    texts = ["I am so happy!", "so sad today", "happy happy day", "sad, sad rain"]
    users = {
        "ann": ([tweet(t) for t in texts], [1, 0, 1, 0]),
        "bob": ([tweet(t) for t in texts], ["4", "0", "4", "0"]),
    }
    write_leaf(tmp_path / "one", {"ann": users["ann"]})
    pool = load("leaf", tmp_path, path="one", length=6, vocabulary=8)
    assert (pool.kind, pool.shape, pool.num_classes) == ("tokens", (6,), 2)
    assert pool.vocabulary == 8
    assert pool.inputs[2].tolist() == [2, 2, 6, 0, 0, 0]  # happy, so, !, am, day, i: by frequency, alphabet
    assert pool.inputs[3].tolist() == [1, 1, 1, 1, 0, 0]
    write_leaf(tmp_path / "two", {"bob": users["bob"]})
    assert load("leaf", tmp_path, path="two").class_names == ("0", "4")


def test_names_of_pictures_are_not_read_as_texts(tmp_path):
    """LEAF's CelebA holds names of files; their words are 000001, . and jpg."""
    names = [f"{i:06}.jpg" for i in range(1, 5)]
    write_leaf(tmp_path / "celeba", {"a": (names, [0, 1, 0, 1])})
    with pytest.raises(UserError, match=r"celeba: x = 000001\.jpg: is the name of a picture"):
        load("leaf", tmp_path, path="celeba")
    save_split(tmp_path / "faces", {"image": names, "label": [0, 1, 0, 1]}, CLASSES)
    with pytest.raises(UserError, match=r"inputs: image = 000001\.jpg: is the name of a picture"):
        load("huggingface", tmp_path, path="faces")


def test_leafs_numbers_are_features(tmp_path):
    users = {f"u{i}": (RNG.random((5, 6)).tolist(), [0, 1, 1, 0, 1]) for i in range(2)}
    write_leaf(tmp_path / "synthetic", users)
    assert load("leaf", tmp_path, path="synthetic").shape == (6,)
    assert load("leaf", tmp_path, path="synthetic", shape=(2, 3)).shape == (2, 3)
    shard = next((tmp_path / "synthetic" / "test").glob("*.json"))
    tree = json.loads(shard.read_text())
    tree["num_samples"][0] = 9
    shard.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"user u0 = .*x, y and num_samples differ"):
        load("leaf", tmp_path, path="synthetic")


# -- TensorFlow Federated ------------------------------------------------------------------------------------


def write_tff(root: Path, name: str, **parts: dict[str, dict[str, object]]) -> None:
    """Write HDF5 as TensorFlow Federated does: examples/CLIENT/NAME."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install mpifl[tff]")
    for part, clients in parts.items():
        with h5py.File(root / f"{name}_{part}.h5", "w") as file:
            for client, arrays in clients.items():
                for key, array in arrays.items():
                    file[f"examples/{client}/{key}"] = array


def test_federated_emnist_has_a_client_for_each_writer(tmp_path):
    def writer(n):
        return {"pixels": RNG.random((n, 28, 28)).astype(np.float32), "label": np.arange(n, dtype=np.int32)}

    train = {"f1": writer(3), "f0": writer(2)}
    write_tff(tmp_path, "fed_emnist", train=train, test={"f0": writer(1), "f2": writer(1)})
    pool = load("tff", tmp_path)
    assert (pool.kind, pool.shape, pool.num_classes, pool.num_train) == ("images", (1, 28, 28), 3, 5)
    assert pool.origin_names == ("f0", "f1", "f2")
    assert pool.origin.tolist() == [0, 0, 1, 1, 1, 0, 2]
    assert pool.labels.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert np.array_equal(pool.inputs[2, 0], np.rint(train["f1"]["pixels"][0] * 255).astype(np.uint8))
    with pytest.raises(
        UserError, match="client f0 = 'label, pixels': needs one of pixels, image, x and one of c"
    ):
        load("tff", tmp_path, label="coarse_label")


def test_snippets_of_text_give_the_characters_that_follow(tmp_path):
    plays = {"ANTONY": {"snippets": np.array([b"To be.", b"O!"])}}
    write_tff(tmp_path, "plays", train=plays, test=plays)
    pool = load("tff", tmp_path, path="plays", length=4)
    assert (pool.kind, pool.shape, pool.vocabulary, pool.num_classes) == ("tokens", (4,), 80, 80)
    assert [LETTERS[i] for i in pool.inputs[1]] == list("o be")
    assert [LETTERS[i] for i in pool.labels[:2]] == list("e.")
    assert len(pool.labels) == 4, "O! is too short"


@pytest.mark.parametrize("path", ["emnist_all.sqlite", "emnist_all.sqlite.lzma"])
def test_sqlite_is_refused_with_the_formats_that_are_read(tmp_path, path):
    with pytest.raises(UserError, match=r"path = '.*': SQLite is not read: name TFF's HDF5 files"):
        load("tff", tmp_path, path=path)


def test_a_file_that_is_no_hdf5_is_named(tmp_path):
    pytest.importorskip("h5py", reason="h5py is not installed: pip install mpifl[tff]")
    for part in ("train", "test"):
        (tmp_path / f"fed_emnist_{part}.h5").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"fed_emnist_train\.h5 = .*truncated or not an HDF5 file"):
        load("tff", tmp_path)


# -- Hugging Face --------------------------------------------------------------------------------------------


def png(value: int) -> bytes:
    """Return a grey picture of 6 x 6 as PNG."""
    out = BytesIO()
    Image.fromarray(np.full((6, 6), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def save_split(folder: Path, columns: dict, features: dict) -> None:
    """Write a split as `Dataset.save_to_disk` does: two Arrow streams, state.json and dataset_info.json."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table, names = pa.table(columns), []
    for i, part in enumerate((table.slice(0, 3), table.slice(3))):
        names.append(f"data-{i:05}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "f",
        "_split": folder.name,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


CLASSES = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}


def test_a_folder_of_save_to_disk_with_pictures_is_read(tmp_path):
    top = tmp_path / "pets"
    for split, n in (("train", 8), ("test", 4)):
        pictures = [{"bytes": png(10 * i), "path": None} for i in range(n)]
        columns = {
            "image": pictures,
            "label": [i % 2 for i in range(n)],
            "who": [f"w{i % 3}" for i in range(n)],
        }
        save_split(top / split, columns, {"image": {"_type": "Image"}, **CLASSES})
    (top / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    pool = load("huggingface", tmp_path, path="pets", client="who")
    assert (pool.shape, pool.num_train, len(pool.labels)) == ((1, 6, 6), 8, 12)
    assert pool.inputs[:, 0, 0, 0].tolist() == [*range(0, 80, 10), 0, 10, 20, 30]
    assert (pool.class_names, pool.origin_names) == (("cat", "dog"), ("w0", "w1", "w2"))
    federation = opened(tmp_path, "huggingface", SCENARIOS["iid"](clients=2), path="pets", side=4)
    assert federation.shape == (1, 4, 4)
    with pytest.raises(
        UserError, match=r"data.source.label = 'kind': there is no such column; there are image"
    ):
        load("huggingface", tmp_path, path="pets", label="kind")


def test_a_data_set_whose_classes_were_renamed_is_prepared_again(tmp_path):
    save_split(tmp_path / "films", {"text": ["good film"] * 8, "label": [0, 1] * 4}, CLASSES)
    scenario = SCENARIOS["iid"](clients=2)
    assert opened(tmp_path, "huggingface", scenario, path="films").class_names == ("cat", "dog")
    three = {"label": {"names": ["bad", "good", "neither"], "_type": "ClassLabel"}}
    (tmp_path / "films" / "dataset_info.json").write_text(json.dumps({"features": three}))
    again = opened(tmp_path, "huggingface", scenario, path="films")
    assert (again.class_names, again.num_classes) == (("bad", "good", "neither"), 3)


def test_pictures_may_have_numbers_to_predict(tmp_path):
    pictures = [{"bytes": png(8 * i), "path": None} for i in range(30)]
    columns = {"label": [8.0 * i for i in range(30)], "who": [f"w{i:02}" for i in range(30)]}
    save_split(tmp_path / "ages", {"image": pictures, **columns}, {})
    pool = opened(tmp_path, "huggingface", SCENARIOS["iid"](clients=2), path="ages", client="who").pool
    assert (pool.kind, pool.label_kind, pool.num_classes) == ("images", "numbers", 1)
    np.testing.assert_array_equal(pool.labels[:, 0], pool.inputs[:, 0, 0, 0])
    assert pool.num_train < 30
    np.testing.assert_array_equal(8 * pool.origin, pool.inputs[:, 0, 0, 0])


def test_words_of_the_share_set_aside_for_testing_are_unknown(tmp_path):
    """Every text has a word of its own; the vocabulary is that of the training part."""
    texts = [f"film w{i}" for i in range(20)]
    save_split(tmp_path / "films", {"text": texts, "label": [0, 1] * 10}, CLASSES)
    pool = load("huggingface", tmp_path, path="films", length=2, test_share=0.2)
    assert (pool.num_train, pool.vocabulary) == (16, 2 + 17)  # padding, unknown, film, 16 words
    assert len({*pool.inputs[:16, 1].tolist()} - {1}) == 16
    assert pool.inputs[16:].tolist() == [[2, 1]] * 4


def test_one_split_of_texts_and_one_of_numbers_are_read(tmp_path):
    texts = ["good film", "bad film", "good good", "very bad", "good!", "bad bad"]
    save_split(tmp_path / "films", {"text": texts, "label": [1, 0, 1, 0, 1, 0]}, CLASSES)
    pool = load("huggingface", tmp_path, path="films", length=3, test_share=0.34)
    assert (pool.kind, pool.shape, pool.num_train, pool.num_classes) == ("tokens", (3,), 4, 2)
    rows = {"x": [[0.1 * i, 2.0, 3.0] for i in range(6)], "label": [0.5 * i for i in range(6)]}
    save_split(tmp_path / "numbers", rows, {})
    pool = load("huggingface", tmp_path, path="numbers", inputs="x", test_share=0.0)
    assert (pool.kind, pool.shape, pool.label_kind) == ("features", (3,), "numbers")


def test_parquet_files_of_the_hub_are_read(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "hub" / "data").mkdir(parents=True)
    info = {"info": {"features": {"img": {"_type": "Image"}, **CLASSES}}}
    for split, n in (("train", 6), ("test", 2)):
        table = pa.table(
            {"img": [{"bytes": png(i), "path": ""} for i in range(n)], "label": [i % 2 for i in range(n)]}
        )
        table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
        parquet.write_table(table, tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    pool = load("huggingface", tmp_path, path="hub")
    assert (pool.num_train, len(pool.labels), pool.class_names) == (6, 8, ("cat", "dog"))


def test_folders_that_are_no_data_set_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data.source.path = .*no such file"):
        opened(tmp_path, "huggingface", SCENARIOS["iid"](clients=2), path="empty")
    save_split(tmp_path / "x", {"text": ["a"] * 5, "label": [0] * 5}, {})
    (tmp_path / "x" / "data-00001-of-00002.arrow").write_bytes(b"no arrow")
    with pytest.raises(
        UserError, match=r"data-00001-of-00002.arrow = 'unreadable': truncated or not an Arrow"
    ):
        load("huggingface", tmp_path, path="x")


def test_arrow_files_with_spoilt_texts_are_refused(tmp_path):
    save_split(tmp_path / "x", {"text": ["good film"] * 8, "label": [0, 1] * 4}, CLASSES)
    file = tmp_path / "x" / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes().replace(b"good", b"g\xffod"))
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow = 'unreadable'"):
        load("huggingface", tmp_path, path="x")
