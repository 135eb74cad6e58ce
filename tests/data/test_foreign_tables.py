"""Tables and labels as other programs and people write them: a number, a line, or a refusal by name.

Each file is small and made by the library that users make theirs with.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.pool import Pool
from mpifl.models import MODELS

N = 40
RNG = np.random.default_rng(7)
A = RNG.permutation(np.arange(N) * 3 % 37 + 100)
Y = RNG.integers(0, 2, N)


def texts(row: int, value: str) -> list[str]:
    """Return the numbers of a column as texts, with another text in one row (counted from 1)."""
    return [value if i == row - 1 else str(a) for i, a in enumerate(A)]


def frame_of(**columns: object) -> pd.DataFrame:
    return pd.DataFrame({"a": A, "b": RNG.normal(size=N), "y": Y} | columns)


def write(folder: Path, frame: pd.DataFrame, ending: str = "csv", **options: object) -> str:
    """Write a table in a format; return the name of its file."""
    if ending == "csv":
        frame.to_csv(folder / "t.csv", index=False, **options)
    else:
        pytest.importorskip("pyarrow")
        frame.to_parquet(folder / "t.parquet", index=False)
    return f"t.{ending}"


def load(folder: Path, name: str = "table", **options: object) -> Pool:
    """Load a table, whose target is y unless `options` say otherwise."""
    (folder / "scratch").mkdir(exist_ok=True)
    usual = {"target": ("y",)} if name == "table" else {}
    return SOURCES[name](**usual | options).load(folder, folder / "scratch")


def column(pool: Pool, rows: int) -> np.ndarray:
    """Return the first column, sorted: the test part is set aside at random."""
    assert len(pool.inputs) == rows
    return np.sort(np.asarray(pool.inputs[:, 0]))


# -- columns of numbers --------------------------------------------------------------------------------------

MARKS = ["?", "NA", "n/a", "-", "--", "null", "None", "", " ", "NaN", "#N/A", "#DIV/0!", ".", "missing"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_for_a_missing_number_is_refused_by_row_and_dropped_or_filled_on_demand(
    tmp_path, mark, ending
):
    path = write(tmp_path, frame_of(a=texts(18, mark)), ending)
    with pytest.raises(UserError, match=r"data.source.features = 'a': lacks a value in row 18"):
        load(tmp_path, path=path)
    pool = load(tmp_path, path=path, missing="drop", test_share=0.0)
    np.testing.assert_array_equal(column(pool, N - 1), np.sort(np.delete(A, 17)).astype(np.float32))
    assert any("1 of 40 rows" in line for line in pool.remarks)
    pool = load(tmp_path, path=path, missing="mean", test_share=0.0)
    mean = np.delete(A, 17).mean()
    np.testing.assert_allclose(pool.inputs[17, 0], mean, rtol=1e-6)
    assert pool.categories == ()
    assert any("1 missing values" in line for line in pool.remarks)


WRONG = ["1,234", "21,0", "200 mg", "12%", "<5", "$7", "3 000", "abc", "12:30", "1e", "7kg", "£2", "1.2.3"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("value", WRONG)
def test_a_text_among_numbers_is_refused_by_column_and_row(tmp_path, value, ending):
    path = write(tmp_path, frame_of(a=texts(5, value)), ending)
    with pytest.raises(UserError, match=r"data.source.features = 'a': row 5 holds '.*no plain number"):
        load(tmp_path, path=path)
    pool = load(tmp_path, path=path, categories=("a",))
    assert pool.categories[0] == len(set(texts(5, value)))


@pytest.mark.parametrize("form", ["{:.1f}", "{} mg", "{},5", "1,{:03d}", "{}%"])
def test_a_column_of_numbers_in_another_notation_is_not_a_category(tmp_path, form):
    values = [form.format(int(a)) if "d" in form or "{}" in form else form.format(float(a)) for a in A]
    path = write(tmp_path, frame_of(a=values))
    if form == "{:.1f}":
        np.testing.assert_array_equal(column(load(tmp_path, path=path), N), np.sort(A))
        return
    with pytest.raises(UserError, match=r"data.source.features = 'a': row 1 holds"):
        load(tmp_path, path=path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_decimal_commas_and_separators_are_read_by_keys(tmp_path, separator):
    frame = frame_of(a=A + 0.5)
    path = write(tmp_path, frame, sep=separator, decimal=",")
    pool = load(tmp_path, path=path, separator=separator, decimal=",")
    np.testing.assert_array_equal(column(pool, N), np.sort(A + 0.5))
    if separator != ",":
        with pytest.raises(UserError, match=r"set data\.source\.separator"):
            load(tmp_path, path=path)


def test_points_under_a_decimal_comma_are_separators_of_thousands_and_refused(tmp_path):
    path = write(tmp_path, frame_of(a=[f"1.{a}" for a in A]), sep=";")
    with pytest.raises(UserError, match=r"features = 'a': row 1 holds '1\.\d+'"):
        load(tmp_path, path=path, separator=";", decimal=",", features=("a",))


def test_numbers_written_as_texts_are_numbers_in_parquet_too(tmp_path):
    path = write(tmp_path, frame_of(a=[f" {a} " for a in A]), "parquet")
    pool = load(tmp_path, path=path)
    assert pool.categories == ()
    np.testing.assert_array_equal(column(pool, N), np.sort(A))


@pytest.mark.parametrize("form", ["2024-01-%02d", "%02d/03/2024", "2024-01-%02d 10:30:00", "10:%02d"])
def test_dates_in_texts_are_refused_as_those_of_parquet_are(tmp_path, form):
    path = write(tmp_path, frame_of(a=[form % (1 + i % 28) for i in range(N)]))
    with pytest.raises(UserError, match=r"data.source.features = 'a': holds dates or times"):
        load(tmp_path, path=path)


def test_booleans_and_their_texts_are_two_categories(tmp_path):
    for values in (Y == 1, ["yes" if y else "no " for y in Y], ["True" if y else "False" for y in Y]):
        path = write(tmp_path, frame_of(a=values, y=RNG.integers(0, 2, N)))
        assert load(tmp_path, path=path).categories[0] == 2


def test_a_gap_in_a_category_takes_the_most_frequent_of_the_training_part(tmp_path):
    values = ["red"] * 25 + ["blue"] * 14 + ["?"]
    path = write(tmp_path, frame_of(a=values))
    with pytest.raises(UserError, match=r"features = 'a': lacks a value in row 40"):
        load(tmp_path, path=path)
    pool = load(tmp_path, path=path, missing="mean", test_share=0.0)
    assert (pool.categories[0], pool.inputs[39, 0]) == (2, 1)
    assert load(tmp_path, path=path, categories=("a",)).categories[0] == 3


def test_the_mean_is_that_of_the_training_part(tmp_path):
    part = ["train"] * 30 + ["test"] * 10
    values = [*map(str, A[:29]), "?", *["100000"] * 10]
    path = write(tmp_path, frame_of(a=values, part=part))
    pool = load(tmp_path, path=path, part="part", missing="mean")
    np.testing.assert_allclose(pool.inputs[29, 0], A[:29].mean(), rtol=1e-6)
    assert pool.num_train == 30
    assert load(tmp_path, path=path, part="part", missing="drop").num_train == 29


@pytest.mark.parametrize("how", ["folder", "test file", "part"])
@pytest.mark.parametrize("role", ["missing", "text", "target"])
def test_a_refusal_names_the_row_of_the_file_that_it_is_in(tmp_path, how, role):
    """Rows count from 1 in each file, wherever its rows stand among all."""
    value = {"missing": "?", "text": "7 mg"}.get(role, "1")
    bad = frame_of(a=texts(9, value), part=["test", "train"] * (N // 2))
    if role == "target":
        bad["y"] = [None if i == 8 else y for i, y in enumerate(Y)]
    files = {"folder": ("d/0.csv", "d/1.csv"), "test file": ("0.csv", "1.csv"), "part": ("1.csv",)}[how]
    (tmp_path / "d").mkdir()
    for name in files:
        (frame_of(part="train") if "0" in name else bad).to_csv(tmp_path / name, index=False)
    options = {"path": "d", "features": ("a", "b")}
    if how != "folder":
        options = {"path": files[0], "features": ("a", "b")}
        options |= {"test_path": "1.csv"} if how == "test file" else {"part": "part"}
    where = "row 9" if how == "part" else rf"row 9 of {tmp_path}.*1\.csv"
    with pytest.raises(
        UserError, match=rf"data.source.{'target' if role == 'target' else 'features'} = .*{where}"
    ):
        load(tmp_path, **options)


def test_a_test_file_that_lacks_a_column_is_refused(tmp_path):
    frame_of().to_csv(tmp_path / "0.csv", index=False)
    frame_of().drop(columns="b").to_csv(tmp_path / "1.csv", index=False)
    with pytest.raises(UserError, match=r"1\.csv = \['a', 'y'\]: other columns than .*0\.csv has"):
        load(tmp_path, path="0.csv", test_path="1.csv")


def test_a_test_file_may_have_its_columns_in_another_order(tmp_path):
    frame_of().to_csv(tmp_path / "0.csv", index=False)
    frame_of()[["y", "b", "a"]].to_csv(tmp_path / "1.csv", index=False)
    pool = load(tmp_path, path="0.csv", test_path="1.csv")
    np.testing.assert_array_equal(pool.inputs[N:, 0], A)


# -- headers -------------------------------------------------------------------------------------------------


def test_the_row_numbers_of_pandas_are_refused(tmp_path):
    frame_of().to_csv(tmp_path / "t.csv")
    with pytest.raises(UserError, match=r"features = 'Unnamed: 0': .*index=False"):
        load(tmp_path, path="t.csv")
    assert load(tmp_path, path="t.csv", features=("a",)).inputs.shape[1] == 1


def test_a_row_with_more_fields_than_the_header_is_refused(tmp_path):
    rows = "\n".join(f"{a},{y},9" for a, y in zip(A, Y, strict=True))
    (tmp_path / "t.csv").write_text(f"a,y\n{rows}\n")
    with pytest.raises(UserError, match="more fields than the first line has names"):
        load(tmp_path, path="t.csv")


@pytest.mark.parametrize("head", ["a,b,a,y", "a,b, a,y"])
def test_two_columns_of_one_name_are_refused(tmp_path, head):
    rows = "\n".join(f"{a},1,{a + 1},{y}" for a, y in zip(A, Y, strict=True))
    (tmp_path / "t.csv").write_text(f"{head}\n{rows}\n")
    with pytest.raises(UserError, match=r"= 'a': two columns have this name"):
        load(tmp_path, path="t.csv")


def test_blanks_in_names_and_a_byte_order_mark_do_not_count(tmp_path):
    frame = frame_of().rename(columns={"b": "b ", "y": " y "})
    path = write(tmp_path, frame, encoding="utf-8-sig")
    assert load(tmp_path, path=path, features=("a", "b")).inputs.shape == (N, 2)


def test_names_that_differ_by_case_are_told(tmp_path):
    path = write(tmp_path, frame_of(A=A[::-1]))
    assert any("'a' and 'A' differ by case" in line for line in load(tmp_path, path=path).remarks)


# -- names of clients, groups, classes -----------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_blanks_do_not_make_another_client_group_category_or_class(tmp_path, ending):
    def twins(count: int) -> list[str]:
        return [f" s{i % count}" if i % 5 else f"s{i % count} " for i in range(N)]

    frame = frame_of(site=twins(4), region=twins(2), colour=twins(2), y=[" yes" if y else "no " for y in Y])
    path = write(tmp_path, frame, ending)
    pool = load(tmp_path, path=path, client="site", group="region", features=("a", "colour"))
    assert pool.origin_names == ("s0", "s1", "s2", "s3")
    assert pool.origin_groups == (0, 1, 0, 1)
    assert pool.class_names == ("no", "yes")
    assert pool.categories == (0, 2)


ROLES = {
    "clients": {"client": "s"},
    "groups": {"client": "of", "group": "s"},
    "classes": {"target": ("s",)},
    "categories": {},
}


@pytest.mark.parametrize("what", ROLES)
@pytest.mark.parametrize("other", ["new york", "New  York", "NewYork", "New\u00a0York"])
def test_values_that_differ_by_case_or_blanks_are_told(tmp_path, what, other):
    values = ["New York" if i % 3 else other for i in range(N)]
    path = write(tmp_path, frame_of(s=values, of=[f"c{i % 3}" for i in range(N)]))
    pool = load(tmp_path, path=path, **ROLES[what])
    [line] = [line for line in pool.remarks if "differ by case or blanks" in line]
    assert f"{what} 'New York' and" in line or f"{what} {other!r} and" in line


@pytest.mark.parametrize("mark", ["?", "-", "null", " "])
@pytest.mark.parametrize("role", ["client", "target"])
def test_a_missing_client_or_target_is_refused_and_no_class(tmp_path, mark, role):
    path = write(tmp_path, frame_of(s=[mark if i == 6 else f"s{i % 3}" for i in range(N)]), "parquet")
    options = {"client": "s"} if role == "client" else {"target": ("s",)}
    for missing in ("refuse", "mean"):
        with pytest.raises(UserError, match=rf"data.source.{role} = 's': lacks a value in row 7"):
            load(tmp_path, path=path, missing=missing, **options)
    assert len(load(tmp_path, path=path, missing="drop", **options).labels) == N - 1


def test_a_target_of_numbers_with_one_text_is_refused(tmp_path):
    path = write(tmp_path, frame_of(y=texts(9, "12 mg")))
    with pytest.raises(UserError, match=r"data.source.target = 'y': row 9 holds '12 mg'"):
        load(tmp_path, path=path)


# -- columns that are no features ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.arange(N) + 1000, "numbers the rows"),
        (np.arange(N)[::-1], "numbers the rows"),
        ([f"patient {i}" for i in range(N)], "names the rows"),
        (np.full(N, 3.5), "one value alone"),
        (["much" if y else "little" for y in Y], "decides the target alone"),
        (Y * 2.5 + RNG.uniform(0, 1, N), "decides the target alone"),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_column_that_tells_too_much_or_nothing_is_told(tmp_path, values, says, ending):
    pool = load(tmp_path, path=write(tmp_path, frame_of(z=values), ending))
    assert [line for line in pool.remarks if "features = z" in line and says in line]
    assert not any("features = a" in line or "features = b" in line for line in pool.remarks)


def test_a_copy_of_a_number_to_predict_is_told(tmp_path):
    y = RNG.normal(size=N)
    pool = load(tmp_path, path=write(tmp_path, frame_of(y=y, z=3 * y + 1)))
    assert ["features = z: it decides the target alone" in line for line in pool.remarks] == [True]


# -- labels stored as floats ---------------------------------------------------------------------------------


def float_labels(folder: Path, source: str, y: np.ndarray) -> dict[str, object]:
    """Write samples whose labels are floats in the format of a source; return its options."""
    x = RNG.normal(size=(len(y), 3))
    if source == "npz":
        np.savez(folder / "a.npz", x_train=x, y_train=y)
        return {"path": "a.npz", "test_share": 0.0}
    if source == "tff":
        return tff(folder, x, y)
    if source == "leaf":
        for part in ("train", "test"):
            (folder / "a" / part).mkdir(parents=True)
            held = {"users": [part], "num_samples": [len(y)]}
            held["user_data"] = {part: {"x": x.tolist(), "y": y.tolist()}}
            (folder / "a" / part / "all_data_0.json").write_text(json.dumps(held))
        return {"path": "a"}
    if source == "huggingface":
        parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(pa.table({"x": x.tolist(), "label": y}), folder / "train-0.parquet")
        return {"path": ".", "inputs": "x", "test_share": 0.0}
    pd.DataFrame({"a": x[:, 0], "y": y}).to_csv(folder / "t.csv", index=False)
    return {"path": "t.csv", "test_share": 0.0}


@pytest.mark.parametrize("source", ["npz", "leaf", "huggingface", "table", "tff"])
def test_classes_stored_as_floats_are_read_by_a_key(tmp_path, source):
    y = np.arange(12) % 3 * 1.0
    options = float_labels(tmp_path, source, y)
    assert load(tmp_path, source, **options).label_kind == "numbers"
    pool = load(tmp_path, source, labels="classes", **options)
    assert (pool.label_kind, pool.num_classes) == ("classes", 3)
    np.testing.assert_array_equal(pool.labels[:12], y)
    assert pool.class_names in ((), ("0", "1", "2"))
    assert "classes" in SOURCES[source].readable_labels


@pytest.mark.parametrize("source", ["npz", "leaf", "huggingface", "tff"])
@pytest.mark.parametrize("wrong", [0.5, -1.0, np.nan])
def test_floats_that_are_no_class_numbers_are_refused_by_row(tmp_path, source, wrong):
    y = np.where(np.arange(12) == 4, wrong, 1.0)
    options = float_labels(tmp_path, source, y)
    with pytest.raises(UserError, match=r"row 5"):
        load(tmp_path, source, labels="classes", **options)


@pytest.mark.parametrize("source", ["npz", "leaf", "huggingface", "tff"])
def test_whole_numbers_are_numbers_to_predict_by_a_key(tmp_path, source):
    options = float_labels(tmp_path, source, np.arange(12) % 3)
    assert load(tmp_path, source, **options).label_kind == "classes"
    assert load(tmp_path, source, labels="numbers", **options).label_kind == "numbers"


@pytest.mark.parametrize(("column", "value"), [("label", "?"), ("site", "-"), ("site", None)])
def test_the_same_marks_are_refused_in_data_sets_of_hugging_face(tmp_path, column, value):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    held = {"label": ["yes", " no", "no ", "yes"], "site": ["a", "a ", " b", "b"]}
    x = {"x": RNG.normal(size=(4, 2)).tolist()}
    options = {"path": ".", "inputs": "x", "client": "site", "test_share": 0.0}
    parquet.write_table(pa.table(x | held), tmp_path / "train-0.parquet")
    pool = load(tmp_path, "huggingface", **options)
    assert (pool.class_names, pool.origin_names) == (("no", "yes"), ("a", "b"))
    held[column][2] = value
    parquet.write_table(pa.table(x | held), tmp_path / "train-0.parquet")
    with pytest.raises(
        UserError, match=rf"data.source.{'label' if column == 'label' else 'client'} = .*row 3"
    ):
        load(tmp_path, "huggingface", **options)


# -- Hugging Face, LEAF and TensorFlow Federated ------------------------------------------------------------


def hugging(folder: Path, **columns: object) -> dict[str, object]:
    """Write two Parquet files of a training split, half of the rows in each; return the source's options."""
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pa.table({"label": [i % 2 for i in range(N)]} | columns)
    for i in range(2):
        parquet.write_table(table.slice(i * N // 2, N // 2), folder / f"train-{i}.parquet")
    return {"path": ".", "inputs": "x", "test_share": 0.0}


def leaf(folder: Path, x: list, y: list | None = None, *users: str) -> dict[str, object]:
    """Write shards of LEAF, the samples dealt to the users in turn, and the first four again as test part."""
    users = users or ("a", "b")
    y = [i % 2 for i in range(len(x))] if y is None else y
    for part, rows in (("train", range(len(x))), ("test", range(4))):
        data = {u: {"x": [], "y": []} for u in users}
        for i in rows:
            data[users[i % len(users)]]["x"].append(x[i])
            data[users[i % len(users)]]["y"].append(y[i])
        held = {"users": list(users), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}
        (folder / "l" / part).mkdir(parents=True, exist_ok=True)
        (folder / "l" / part / "0.json").write_text(json.dumps(held))
    return {"path": "l"}


def tff(folder: Path, x: np.ndarray, y: object, *clients: str) -> dict[str, object]:
    """Write both HDF5 files of TensorFlow Federated, in which each client has all samples."""
    h5py = pytest.importorskip("h5py")
    for part in ("train", "test"):
        with h5py.File(folder / f"t_{part}.h5", "w") as file:
            for client in clients or ("a", "b"):
                group = file.create_group(f"examples/{client}")
                group["x"] = x
                group["label"] = y
    return {"path": "t"}


WORDS = [f"the {i} good words" for i in range(N)]


def edited(values: list, row: int, value: object) -> list:
    """Return a copy with another value in a row, counted from 1."""
    return [value if i == row - 1 else v for i, v in enumerate(values)]


ROWS = RNG.normal(size=(N, 3)).tolist()
SAMPLES = {
    "a mark among numbers": (edited([str(a) for a in A], 25, "?"), "lacks a value in {25}"),
    "a decimal comma": (edited([str(a) for a in A], 25, "21,5"), "{25} holds '21,5'"),
    "a unit": (edited([str(a) for a in A], 25, "7 mg"), "{25} holds '7 mg'"),
    "decimal commas": ([f"{a},5" for a in A], "{1} holds '\\d+,5'"),
    "dates": ([f"2024-01-{1 + i % 28:02}" for i in range(N)], "holds dates"),
    "a number without a value": (edited(ROWS, 25, [0.5, None, 1.0]), "lacks a value in {25}"),
    "NaN": (edited(ROWS, 25, [0.5, float("nan"), 1.0]), "lacks a value in {25}"),
    "infinity": (edited(ROWS, 25, [0.5, float("inf"), 1.0]), "is not finite"),
    "no sample": (edited(ROWS, 25, None), "lacks a value in {25}"),
    "no text": (edited(WORDS, 25, None), "lacks a value in {25}"),
    "another length": (edited(ROWS, 25, [0.5, 1.0]), "lists of numbers of one"),
    "texts of numbers, one missing": (
        edited([[str(a), "1.5"] for a in A], 25, ["3", "-"]),
        "lacks a value in {25}",
    ),
    "texts of numbers, a unit": (edited([[str(a), "1.5"] for a in A], 25, ["3", "4 m"]), "{25} holds '4 m'"),
}


@pytest.mark.parametrize("source", ["huggingface", "leaf"])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_with_gaps_or_other_notations_are_refused_by_row(tmp_path, source, name):
    x, says = SAMPLES[name]
    if source == "huggingface":
        options = hugging(tmp_path, x=x)
        says = re.sub(
            r"\{25\}", r"row 5 of .*train-1.parquet", re.sub(r"\{1\}", "row 1 of .*train-0.parquet", says)
        )
    else:
        options = leaf(tmp_path, x)
        says = re.sub(
            r"\{25\}", "row 13 of user a in train", re.sub(r"\{1\}", "row 1 of user a in train", says)
        )
    with pytest.raises(UserError, match=says) as error:
        load(tmp_path, source, **options)
    assert "decimal:" not in str(error.value), "there is no such key"


@pytest.mark.parametrize("source", ["huggingface", "leaf"])
@pytest.mark.parametrize("width", [1, 2])
def test_samples_of_numbers_in_texts_are_numbers(tmp_path, source, width):
    x = [f" {a}.5" for a in A] if width == 1 else [[f"{a}.5", "2e1"] for a in A]
    options = hugging(tmp_path, x=x) if source == "huggingface" else leaf(tmp_path, x)
    pool = load(tmp_path, source, **options)
    assert (pool.kind, pool.shape) == ("features", (width,))
    np.testing.assert_array_equal(np.sort(pool.inputs[: pool.num_train, 0]), np.sort(A + 0.5))


@pytest.mark.parametrize("source", ["huggingface", "leaf"])
def test_texts_that_stand_for_nothing_are_counted(tmp_path, source):
    x = edited(edited(WORDS, 25, "N/A"), 31, " ")
    options = hugging(tmp_path, x=x) if source == "huggingface" else leaf(tmp_path, x)
    pool = load(tmp_path, source, **options)
    [line] = [line for line in pool.remarks if "stand for a missing value" in line]
    assert re.search(r"2 of 4[04] texts .*'N/A' in row (5 of .*train-1.parquet|13 of user a)", line)
    assert load(tmp_path, source, **options).kind == "tokens"


@pytest.mark.parametrize("bad", [2**31, None])
def test_lists_of_whole_numbers_with_something_else_are_refused_by_row(tmp_path, bad):
    with pytest.raises(UserError, match=r"row 5 of .*train-1.parquet holds no tokens"):
        load(tmp_path, "huggingface", **hugging(tmp_path, x=edited([[1, 2]] * N, 25, [3, bad])))


LABELS = {
    "numbers in their order": ([str(9 + i % 3) for i in range(N)], ("9", "10", "11")),
    "blanks": (["yes" if i % 2 else " no" if i % 4 else "no " for i in range(N)], ("no", "yes")),
    "a mark": (edited([["no", "yes"][i % 2] for i in range(N)], 7, "?"), "lacks a value in row"),
    "a unit": (edited([str(i % 3) for i in range(N)], 7, "1 kg"), "holds '1 kg'"),
    "numbers to predict": ([f"{i}.5" for i in range(N)], "numbers"),
}


@pytest.mark.parametrize("source", ["huggingface", "leaf", "tff"])
@pytest.mark.parametrize("name", LABELS)
def test_labels_written_as_texts_are_read_alike(tmp_path, source, name):
    y, expected = LABELS[name]
    if source == "tff":
        options = tff(tmp_path, np.array(ROWS), np.array(y, "S"))
    else:
        options = hugging(tmp_path, x=ROWS, label=y) if source == "huggingface" else leaf(tmp_path, ROWS, y)
    if isinstance(expected, str) and expected != "numbers":
        with pytest.raises(UserError, match=expected):
            load(tmp_path, source, **options)
        return
    pool = load(tmp_path, source, **options)
    if expected == "numbers":
        assert pool.label_kind == "numbers"
    else:
        assert pool.class_names == expected


@pytest.mark.parametrize("source", ["huggingface", "leaf", "tff"])
def test_names_of_clients_are_read_alike(tmp_path, source):
    """Blanks at the ends do not count, marks for missing names are refused, twins but for case are said."""

    def written(*names: str) -> dict[str, object]:
        if source == "tff":
            return tff(tmp_path, np.array(ROWS), np.arange(N) % 2, *names)
        if source == "leaf":
            return leaf(tmp_path, ROWS, None, *names)
        return hugging(tmp_path, x=ROWS, who=[names[i % len(names)] for i in range(N)]) | {"client": "who"}

    pool = load(tmp_path, source, **written(" Ann", "bob ", "ann"))
    assert pool.origin_names == ("Ann", "ann", "bob")
    assert [line for line in pool.remarks if "clients 'Ann' and 'ann' differ by case" in line]
    for mark in ("NaN", "null", "?", " "):
        with pytest.raises(UserError, match=r"missing name|lacks a value in row 2"):
            load(tmp_path, source, **written("Ann", mark))
    if source != "huggingface":
        with pytest.raises(UserError, match=r"client Ann = 'twice'|user Ann = 'twice'"):
            load(tmp_path, source, **written("Ann", "Ann "))


@pytest.mark.parametrize("source", ["huggingface", "leaf", "npz"])
def test_columns_of_samples_that_tell_too_much_are_told(tmp_path, source):
    x = np.stack([RNG.normal(size=N), np.arange(N), np.arange(N) % 2 * 3.0, np.ones(N), np.arange(N) % 2], 1)
    if source == "npz":
        np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(N) % 2)
        pool = load(tmp_path, source, path="a.npz")
    else:
        many = leaf(tmp_path, x.tolist(), None, "a") if source == "leaf" else hugging(tmp_path, x=x.tolist())
        pool = load(tmp_path, source, **many)
    told = [line for line in pool.remarks if "column" in line]
    assert sum("2 columns, the first is 2: it decides the target alone" in line for line in told) == 1
    assert sum("column 1: it numbers the rows" in line for line in told) == (source != "leaf")
    assert len(told) == 1 + (source != "leaf")


@pytest.mark.parametrize("part", ["x", "y", "num_samples"])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("source", ["leaf", "femnist"])
def test_what_json_does_not_have_is_refused(tmp_path, part, word, source):
    """Python's json writes and reads NaN and Infinity, which are no JSON."""
    x = [[0.25] * 784] * 4 if source == "femnist" else ROWS[:4]
    leaf(tmp_path, x, None, "a")
    path = tmp_path / "l" / "train" / "0.json"
    tree = json.loads(path.read_text())
    if part == "num_samples":
        tree["num_samples"][0] = float(word)
    elif part == "x":
        tree["user_data"]["a"]["x"][1] = [float(word), *x[1][1:]]
    else:
        tree["user_data"]["a"]["y"][1] = float(word)
    path.write_text(json.dumps(tree))
    assert word in path.read_text()
    reader = SOURCES[source](**{"path" if source == "leaf" else "folder": "l"})
    with pytest.raises(UserError) as error:
        reader.load(tmp_path, tmp_path)
    assert "\n" not in str(error.value)


# -- roles of columns ----------------------------------------------------------------------------------------

HALVES = {"part": ["train"] * 30 + ["test"] * 10}
KEYS = {
    "infinity": ({"a": edited(A.tolist(), 9, np.inf)}, {}, "features = 'a': row 9 holds inf"),
    "a number beyond float64": ({"a": texts(9, "1e999")}, {}, "features = 'a': row 9 holds inf"),
    "infinity to predict": (
        {"y": edited(A.tolist(), 9, np.inf)},
        {},
        "target = y = inf: is not finite, in row 9",
    ),
    "the target among the features": ({}, {"features": ("a", "y")}, "features = 'y': is the target"),
    "a feature twice": ({}, {"features": ("a", "a")}, "features = 'a': is there twice"),
    "categories without such a column": ({}, {"categories": ("q",)}, "categories = 'q': is no column"),
    "categories that are no features": ({}, {"categories": ("b",), "features": ("a",)}, "'b': is no column"),
    "a part in capitals": ({"part": ["Train"] * 30 + ["TEST "] * 10}, {"part": "part"}, ()),
    "a third part": ({"part": ["train"] * 39 + ["val"]}, {"part": "part"}, "row 40 holds 'val'"),
    "no test part": (
        {"part": ["train"] * 40},
        {"part": "part"},
        "part = 'part': names no row of the test part",
    ),
    "one class": ({"y": "a"}, {}, ("target = y: all samples are of one class",)),
    "a class for each row": (
        {"y": [f"u{i}" for i in range(N)]},
        {},
        ("target = y: 40 different texts in 40 rows are taken for classes",),
    ),
    "a class in the test part alone": (
        HALVES | {"y": ["u", "w"] * 15 + ["u", "w", "v"] * 3 + ["v"]},
        {"part": "part"},
        ("target = y: 1 of 3 classes have no training sample: v",),
    ),
    "classes in the training part alone": (
        HALVES | {"y": ["u", "w", "v"] * 10 + ["u"] * 10},
        {"part": "part"},
        ("target = y: 2 of 3 classes have no test sample: v, w",),
    ),
    "a category in the test part alone": (
        HALVES | {"c": ["u", "w"] * 15 + ["u", "v"] * 5},
        {"part": "part", "features": ("a", "c")},
        ("features = c: 1 of 3 categories have no training row",),
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_roles_that_cannot_be_meant_are_refused_or_told(tmp_path, name):
    columns, options, expected = KEYS[name]
    path = write(tmp_path, frame_of(**columns))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load(tmp_path, path=path, **options)
        return
    told = load(tmp_path, path=path, **options).remarks
    assert len(told) == len(expected), told
    assert all(says in line for says, line in zip(expected, told, strict=True))


# -- files of SciPy, h5py, NumPy and pandas ------------------------------------------------------------------

RANDOM = np.random.default_rng(11)
REAL, TWO = RANDOM.normal(size=(N, 3)), np.arange(N) % 2
TWO_COLUMNS = np.c_[REAL[:, 0], TWO]
ARFF = "@relation t\n@attribute a numeric\n@attribute y {no,yes}\n@data\n"


def matlab(name: str, **arrays: object):
    """Return the writer of a MATLAB file."""
    from scipy.io import savemat

    return lambda root: savemat(root / name, arrays)


def written(name: str, text: str):
    """Return the writer of a text."""
    return lambda root: (root / name).write_text(text)


def numpy_file(**arrays: object):
    """Return the writer of an archive of arrays."""
    return lambda root: np.savez(root / "t.npz", **arrays)


def pandas_file(how: str, name: str, **options: object):
    """Return the writer of a table by a method of pandas."""
    return lambda root: getattr(pd.DataFrame({"a": REAL[:, 0], "y": TWO}), how)(root / name, **options)


def hdf5(name: str, **arrays: object):
    """Return the writer of an HDF5 file."""

    def write_it(root: Path) -> None:
        h5py = pytest.importorskip("h5py")
        with h5py.File(root / name, "w") as file:
            for key, array in arrays.items():
                file[key.replace("__", "/")] = array

    return write_it


def clients(top: str = "examples/", **held: dict[str, object]):
    """Return the writer of both files of TensorFlow Federated."""
    arrays = {f"{top}{who}/{key}": array for who, of in held.items() for key, array in of.items()}
    return lambda root: [hdf5(f"t_{part}.h5", **arrays)(root) for part in ("train", "test")]


def one(**changes: object) -> dict[str, object]:
    """Return what a client of TensorFlow Federated holds; None leaves an array out."""
    return {k: v for k, v in ({"x": REAL, "label": TWO} | changes).items() if v is not None}


def house_numbers(**changes: object):
    """Return the writer of both files of SVHN; None leaves an array out."""
    x = RANDOM.integers(0, 256, (32, 32, 3, 12)).astype(np.uint8)
    arrays = {"X": x, "y": (np.arange(12) % 10 + 1)[:, None], **changes}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    return lambda root: [matlab(f"{part}_32x32.mat", **arrays)(root) for part in ("train", "test")]


def sparse(rows: int = N) -> object:
    """Return a sparse matrix of SciPy."""
    from scipy.sparse import csr_matrix

    return csr_matrix(np.eye(rows, 6))


def save_sparse(root: Path) -> None:
    from scipy.sparse import save_npz

    save_npz(root / "t.npz", sparse())


def packed(value: object) -> np.ndarray:
    """Return an array that holds one Python object."""
    out = np.empty((), object)
    out[()] = value
    return out


TABLE, NPZ = ({"name": name} for name in ("table", "npz"))
TFF, SVHN = {"name": "tff", "path": "t"}, {"name": "svhn"}
READ = {"classes": {"label_kind": "classes", "num_classes": 2}, "numbers": {"label_kind": "numbers"}}
FOREIGN = {  # file -> writer, source, what is read or what refuses it
    "mat as a table": (matlab("t.mat", x=REAL), TABLE | {"path": "t.mat"}, "read it with scipy.io.loadmat"),
    "mat as npz": (matlab("t.mat", x_train=REAL), NPZ | {"path": "t.mat"}, "scipy.io.loadmat .*numpy.savez"),
    "mat named csv": (matlab("t.csv", x=REAL), TABLE | {"path": "t.csv"}, "t.csv = 'unreadable'"),
    "mat 7.3 as npz": (hdf5("t.mat", x_train=REAL), NPZ | {"path": "t.mat"}, "read it with scipy.io.loadmat"),
    "HDF5 as a table": (hdf5("t.h5", x=REAL), TABLE | {"path": "t.h5"}, "read it with h5py.File, or pandas"),
    "HDF5 as npz": (hdf5("t.hdf5", x=REAL), NPZ | {"path": "t.hdf5"}, "read it with h5py.File, or pandas"),
    "ARFF": (written("t.arff", ARFF + "1.5,yes\n" * N), TABLE | {"path": "t.arff"}, "scipy.io.arff.loadarff"),
    "ARFF named csv": (written("t.csv", ARFF + "1.5,yes\n"), TABLE | {"path": "t.csv"}, "scipy.io.arff.load"),
    "ARFF with a comment": (written("t.csv", "% 1987\n" + ARFF), TABLE | {"path": "t.csv"}, "scipy.io.arff"),
    "SVMlight": (written("t.svm", "1 1:0.5\n" * N), TABLE | {"path": "t.svm"}, "load_svmlight_file"),
    "SVMlight named csv": (
        written("t.csv", "1 1:0.5 3:2\n" * N),
        TABLE | {"path": "t.csv"},
        "'1 1:0.5 3:2': no CSV: read it with sklearn.datasets.load_svmlight_file",
    ),
    "Octave's header": (
        written("t.csv", "# by Octave\n# a,y\n1,0\n"),
        TABLE | {"path": "t.csv"},
        "begins with a comment",
    ),
    "savetxt without header": (
        lambda root: np.savetxt(root / "t.csv", TWO_COLUMNS, delimiter=","),
        TABLE | {"path": "t.csv"},
        "target = 'y': the table has no such column",
    ),
    "savetxt with header": (
        lambda root: np.savetxt(root / "t.csv", TWO_COLUMNS, delimiter=",", header="a,y"),
        TABLE | {"path": "t.csv", "features": ("a",), "labels": "classes"},
        READ["classes"],
    ),
    "savetxt with blanks": (
        lambda root: np.savetxt(root / "t.csv", TWO_COLUMNS, header="a y", comments=""),
        TABLE | {"path": "t.csv"},
        "set data.source.separator to ' '",
    ),
    "savetxt with blanks, said": (
        lambda root: np.savetxt(root / "t.csv", TWO_COLUMNS, header="a y", comments=""),
        TABLE | {"path": "t.csv", "separator": " ", "labels": "classes"},
        READ["classes"],
    ),
    "gzip": (pandas_file("to_csv", "t.csv.gz", index=False), TABLE | {"path": "t.csv.gz"}, READ["classes"]),
    "tabs": (pandas_file("to_csv", "t.tsv", sep="\t"), TABLE | {"path": "t.tsv"}, r"separator to '\\t'"),
    "JSON lines": (
        pandas_file("to_json", "t.jsonl", orient="records", lines=True),
        TABLE | {"path": "t.jsonl"},
        "read it with pandas.read_json",
    ),
    "a pickle": (pandas_file("to_pickle", "t.pkl"), TABLE | {"path": "t.pkl"}, "pandas.read_pickle"),
    "Stata": (pandas_file("to_stata", "t.dta"), TABLE | {"path": "t.dta"}, "pandas.read_stata"),
    "npz as a table": (numpy_file(x=REAL), TABLE | {"path": "t.npz"}, "read it with numpy.load"),
    "npy as npz": (lambda root: np.save(root / "t.npy", REAL), NPZ | {"path": "t.npy"}, "numpy.load .*savez"),
    "a sparse matrix": (save_sparse, NPZ | {"path": "t.npz"}, r"sparse matrix of SciPy: write X.toarray\(\)"),
    "a sparse matrix in npz": (
        numpy_file(x_train=packed(sparse()), y_train=TWO),
        NPZ | {"path": "t.npz"},
        "holds Python objects",
    ),
    "other names in npz": (numpy_file(X=REAL, y=TWO), NPZ | {"path": "t.npz"}, "lacks the array x_train"),
    "complex": (numpy_file(x_train=REAL + 0j, y_train=TWO), NPZ | {"path": "t.npz"}, "must be real numbers"),
    "records": (
        numpy_file(x_train=np.zeros(N, [("a", "f4")]), y_train=TWO),
        NPZ | {"path": "t.npz"},
        "must be real numbers",
    ),
    "times": (
        numpy_file(x_train=REAL.astype("M8[s]"), y_train=TWO),
        NPZ | {"path": "t.npz"},
        "must be real numbers",
    ),
    "text labels in npz": (
        numpy_file(x_train=REAL, y_train=np.array(["a", "b"])[TWO]),
        NPZ | {"path": "t.npz"},
        "must be integers from zero",
    ),
    "booleans": (numpy_file(x_train=REAL, y_train=TWO == 1), NPZ | {"path": "t.npz"}, READ["classes"]),
    "extended precision": (
        numpy_file(x_train=REAL.astype(np.longdouble), y_train=TWO),
        NPZ | {"path": "t.npz"},
        READ["classes"],
    ),
    "NaN in npz": (
        numpy_file(x_train=np.where(REAL[26, 1] == REAL, np.nan, REAL), y_train=TWO),
        NPZ | {"path": "t.npz"},
        "x_train = nan: is not finite, in row 27",
    ),
    "classes from 1": (
        numpy_file(x_train=REAL, y_train=TWO + 1),
        NPZ | {"path": "t.npz"},
        {"says": "1 of 3 classes have no training sample: 0; classes count from 0"},
    ),
    "samples last": (numpy_file(x_train=REAL.T, y_train=TWO), NPZ | {"path": "t.npz"}, "differ in number"),
    "one label": (
        numpy_file(x_train=REAL, y_train=np.int64(1)),
        NPZ | {"path": "t.npz"},
        "give one for each",
    ),
    "no rows": (numpy_file(x_train=REAL[:0], y_train=TWO[:0]), NPZ | {"path": "t.npz"}, "no samples"),
    "TFF": (clients(a=one(), b=one()), TFF, READ["classes"]),
    "TFF below another group": (clients("data/", a=one()), TFF, "has no group examples"),
    "TFF without a group": (clients("", a=one()), TFF, "has no group examples"),
    "TFF without labels": (clients(a=one(label=None)), TFF, "client a = 'x': needs one of"),
    "TFF under other names": (
        clients(a={"features": REAL, "target": TWO}),
        TFF,
        "needs one of pixels, image",
    ),
    "TFF with one label": (clients(a=one(label=1)), TFF, "client a = 'label': is one value"),
    "TFF with fewer labels": (clients(a=one(label=TWO[:-1])), TFF, "client a = 39: labels for 40 samples"),
    "TFF of two widths": (clients(a=one(), b=one(x=REAL[:, :2])), TFF, "must have one shape"),
    "TFF with an empty client": (clients(a=one(), b=one(x=REAL[:0], label=TWO[:0])), TFF, READ["classes"]),
    "TFF with float labels": (clients(a=one(label=TWO * 1.0)), TFF, READ["numbers"]),
    "TFF with float classes": (clients(a=one(label=TWO * 1.0)), TFF | {"labels": "classes"}, READ["classes"]),
    "TFF with NaN": (
        clients(a=one(), b=one(x=np.where(REAL[26, 1] == REAL, np.nan, REAL))),
        TFF,
        "not finite, in row 27 of client b in train",
    ),
    "TFF with texts": (
        clients(a=one(label=np.array([b"yes ", b" no"])[TWO])),
        TFF,
        {"class_names": ("no", "yes")},
    ),
    "TFF with a text for nothing": (
        clients(a=one(), b=one(label=np.array([b"yes", b"?"])[TWO])),
        TFF,
        "labels",
    ),
    "TFF, one-hot": (clients(a=one(label=np.eye(2, dtype=np.int64)[TWO])), TFF, "one-hot"),
    "TFF with a column of labels": (clients(a=one(label=TWO[:, None])), TFF, READ["classes"]),
    "TFF with classes below 0": (clients(a=one(label=TWO - 1)), TFF, "-1: must be integers from zero"),
    "TFF, big-endian": (clients(a=one(x=REAL.astype(">f4"), label=TWO.astype(">i2"))), TFF, READ["classes"]),
    "TFF of records": (clients(a=one(x=np.zeros(N, [("a", "f4")]))), TFF, "must be real numbers"),
    "TFF of texts under x": (clients(a=one(x=np.array([b"a", b"b"])[TWO])), TFF, "must be real numbers"),
    "TFF of pixels up to 255": (
        clients(a=one(x=None, pixels=RANDOM.uniform(0, 255, (N, 4, 4)))),
        TFF,
        "images must be uint8, or floats between 0 and 1",
    ),
    "TFF that is text": (
        lambda root: [(root / f"t_{part}.h5").write_text("hi") for part in ("train", "test")],
        TFF,
        "t_train.h5 = 'unreadable'",
    ),
    "TFF without a test file": (hdf5("t_train.h5", examples__a__x=REAL), TFF, "t_test.h5"),
    "SVHN": (house_numbers(), SVHN, {"num_classes": 10}),
    "SVHN in MATLAB 7.3": (
        lambda root: [hdf5(f"{part}_32x32.mat", X=REAL)(root) for part in ("train", "test")],
        SVHN,
        "train_32x32.mat = 'unreadable'",
    ),
    "SVHN of floats": (house_numbers(X=RANDOM.random((32, 32, 3, 12))), SVHN, "not SVHN's images"),
    "SVHN, samples first": (house_numbers(X=np.zeros((12, 32, 32, 3), np.uint8)), SVHN, "not SVHN's images"),
    "SVHN with classes from 0": (house_numbers(y=(np.arange(12) % 10)[:, None]), SVHN, "integers from zero"),
    "SVHN without labels": (house_numbers(y=None), SVHN, "train_32x32.mat = 'unreadable'"),
    "SVHN with a row of labels": (house_numbers(y=np.arange(12)[None] % 10 + 1.0), SVHN, {"num_classes": 10}),
    "SVHN with half a label": (
        house_numbers(y=np.full((12, 1), 1.5)),
        SVHN,
        "y = 1.5: no whole number, in row",
    ),
    "SVHN with a struct": (house_numbers(y={"a": 1}), SVHN, "not SVHN's images"),
    "SVHN with sparse labels": (house_numbers(y=sparse(2)), SVHN, "train_32x32.mat = "),
}


@pytest.mark.filterwarnings("ignore:.*NumPy 1.25")
@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_programs_are_read_right_or_refused_in_one_line(tmp_path, name):
    write_it, source, expected = FOREIGN[name]
    write_it(tmp_path)
    options = ({"target": ("y",)} if source["name"] == "table" else {}) | source
    config = DataConfig(
        str(tmp_path),
        str(tmp_path / "cache"),
        SOURCES[options.pop("name")](**options),
        SCENARIOS["iid"](clients=2),
    )
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected) as error:
            open_federation(config, 0)
        assert "\n" not in str(error.value)
        return
    lines: list[str] = []
    pool = open_federation(config, 0, lines.append).pool
    says = expected.get("says")
    assert {key: getattr(pool, key) for key in expected if key != "says"} == {
        key: value for key, value in expected.items() if key != "says"
    }
    assert says is None or any(re.search(says, line) for line in lines)


# -- categories in models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "logistic", "table_mlp"])
def test_the_number_of_a_category_is_no_magnitude_in_a_model(name):
    """The first layer has weights for each category, or a place in an embedding."""
    import torch

    info = DataInfo((2,), 2, "features", "classes", 0, (0, 7))
    torch.manual_seed(0)
    model = MODELS[name]().make_for(info)
    linear = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    coded = 7 if name != "table_mlp" else 4
    assert linear.in_features == 1 + coded
    x = torch.tensor([[0.0, c] for c in range(7)])
    with torch.no_grad():
        assert model(x).unique(dim=0).shape[0] == 7
