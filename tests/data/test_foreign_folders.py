"""Folders, archives and splits as other programs and people leave them: each is read right, refused, or said.

The writers are PIL, NumPy, pyarrow, h5py, SciPy and json; the mistakes are those that people make.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.federation import PoolFederation
from mpifl.data.pool import Pool, check_pool, repeated

RNG = np.random.default_rng(0)
Writer = Callable[[Path], object]
Check = Callable[[PoolFederation], None]


@dataclass(frozen=True)
class Case:
    """What a program or a person leaves, and what must happen.

    Attributes:
        write: writes it below a root.
        refused: pattern of the one line that refuses it; empty: it is read.
        said: patterns of the lines about the data, in their order; no other line may name them.
        check: compares what was read.
        source: name and options of the source.
        scenario: name and options of the scenario.
    """

    write: Writer
    refused: str = ""
    said: tuple[str, ...] = ()
    check: Check = lambda federation: None
    source: dict[str, Any] = field(default_factory=dict)
    scenario: dict[str, Any] = field(default_factory=dict)


def opened(root: Path, case: Case) -> tuple[PoolFederation, list[str]]:
    """Return the federation of a case, and the lines about its data when it is opened again."""
    lines: list[str] = []
    source, scenario = dict(case.source), {"name": "iid", "clients": 2, "test": "all", **case.scenario}
    if scenario["name"] != "iid":
        scenario = dict(case.scenario)
    places = {name: str(root / value) for name, value in scenario.items() if name == "path"}
    config = DataConfig(
        str(root),
        str(root / "cache"),
        SOURCES[source.pop("name")](**source),
        SCENARIOS[scenario.pop("name")](**{**scenario, **places}),
    )
    open_federation(config, 0)
    return open_federation(config, 0, lines.append), lines


def met(root: Path, case: Case) -> None:
    """Assert that a case gets its answer."""
    case.write(root)
    if case.refused:
        with pytest.raises(UserError, match=case.refused) as error:
            opened(root, case)
        assert "\n" not in str(error.value)
        return
    federation, lines = opened(root, case)
    assert len(lines) == len(case.said), lines
    for line, pattern in zip(lines, case.said, strict=True):
        assert re.search(pattern, line), line
    case.check(federation)


# -- pictures in folders -------------------------------------------------------------------------------------

SIDE = 6


def noise(red: int, mode: str = "RGB") -> Image.Image:
    """Return a picture of its own whose red tells where it belongs."""
    pixels = RNG.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    pixels[..., 0] = red
    return Image.fromarray(pixels).convert(mode)


def pictures(counts: dict[str, int], reds: dict[str, int] | None = None, ending: str = "png") -> Writer:
    """Return the writer of folders of so many pictures; `reds` maps words in a folder's name to red."""

    def write(root: Path) -> None:
        for name, count in counts.items():
            folder = root / "pictures" / name
            folder.mkdir(parents=True, exist_ok=True)
            red = next((value for word, value in (reds or {}).items() if word in name), 0)
            for i in range(count):
                noise(red).save(folder / f"{i}.{ending}")

    return write


def both(*writers: Writer) -> Writer:
    """Return a writer that calls several."""
    return lambda root: [write(root) for write in writers]


def put(name: str, content: bytes = b"x") -> Writer:
    """Return the writer of one file."""

    def write(root: Path) -> None:
        path = root / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return write


def saved(name: str, make: Callable[[], Image.Image], **options: Any) -> Writer:
    """Return the writer of one picture."""

    def write(root: Path) -> None:
        path = root / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        make().save(path, **options)

    return write


def sizes(train: int, test: int, *classes: str, reds: tuple[int, int] | None = None, **more: Any) -> Check:
    """Return a check of the sizes of both parts, of the names of the classes, and of red in each part."""

    def check(federation: PoolFederation) -> None:
        pool = federation.pool
        assert (pool.num_train, len(pool.labels) - pool.num_train) == (train, test)
        assert not classes or pool.class_names == classes
        if reds:
            assert {int(x) for x in pool.inputs[: pool.num_train, 0, 0, 0]} == {reds[0]}
            assert {int(x) for x in pool.inputs[pool.num_train :, 0, 0, 0]} == {reds[1]}
        for name, value in more.items():
            assert getattr(pool, name) == value

    return check


FOLDER = {"name": "folder", "path": "pictures", "side": SIDE}
CATS_AND_DOGS = {"cat": 5, "dog": 5}


def parts(**counts: int) -> dict[str, int]:
    """Return counts of the pictures of two classes in each part."""
    return {f"{part}/{name}": count for part, count in counts.items() for name in ("cat", "dog")}


FOLDERS = {
    "train and test": Case(
        pictures(parts(train=4, test=2), {"test": 255}), check=sizes(8, 4, "cat", "dog", reds=(0, 255))
    ),
    "Training and TEST": Case(
        pictures(parts(Training=4, TEST=2), {"TEST": 255}), check=sizes(8, 4, "cat", "dog", reds=(0, 255))
    ),
    "train and val": Case(
        pictures(parts(train=4, val=2), {"val": 255}),
        said=("val is the test part",),
        check=sizes(8, 4, reds=(0, 255)),
    ),
    "train, valid and test": Case(
        pictures(parts(train=4, valid=3, test=2), {"valid": 128, "test": 255}),
        said=("valid is left out; data.source.validation: train adds",),
        check=sizes(8, 4, reds=(0, 255)),
    ),
    "validation added": Case(
        pictures(parts(train=4, validation=3, test=2), {"test": 255}),
        check=sizes(14, 4, reds=(0, 255)),
        source={"validation": "train"},
    ),
    "validation added, and there is none": Case(
        pictures(parts(train=4, test=2)),
        "validation = 'train': has no effect",
        source={"validation": "train"},
    ),
    "validation added without parts": Case(
        pictures(CATS_AND_DOGS), "validation = 'train': has no effect", source={"validation": "train"}
    ),
    "train alone": Case(pictures(parts(train=5)), check=sizes(8, 2, "cat", "dog")),
    "test alone": Case(pictures(parts(test=5)), "holds no training part"),
    "parts as domains": Case(
        pictures(parts(train=4, test=2)),
        r"\['test', 'train'\]: are parts.* domains: false",
        source={"domains": True},
    ),
    "parts above domains": Case(
        pictures(
            {f"{part}/{d}/{c}": 3 for part in ("train", "test") for d in ("ink", "oil") for c in "ab"},
            {"test": 255},
        ),
        check=sizes(12, 12, "a", "b", reds=(0, 255), origin_names=("ink", "oil")),
        source={"domains": True},
    ),
    "parts below domains": Case(
        pictures(
            {f"{d}/{part}/{c}": 3 for part in ("Train", "Test") for d in ("ink", "oil") for c in "ab"},
            {"Test": 255},
        ),
        check=sizes(12, 12, "a", "b", reds=(0, 255), origin_names=("ink", "oil")),
        source={"domains": True},
    ),
    "parts above domains, key forgotten": Case(
        pictures({f"train/{d}/{c}": 3 for d in ("ink", "oil") for c in "ab"}), "set domains: true"
    ),
    "train twice": Case(pictures(parts(train=4, Train=4, test=2)), "is the same part as"),
    "a part beside classes": Case(
        pictures({**parts(train=4, test=2), "bird": 3}), r"\['bird'\]: .*beside folders of parts"
    ),
    "parts without classes": Case(
        pictures({"train": 4, "test": 3}), "put a folder for each class below each"
    ),
    "a class called train": Case(pictures({"car": 5, "train": 5}), check=sizes(8, 2, "car", "train")),
    "a class in test only": Case(
        pictures({**parts(train=4, test=2), "test/fox": 2}),
        said=("1 of 3 classes have no training sample: fox",),
        check=sizes(8, 6, "cat", "dog", "fox"),
    ),
    "a class in training only": Case(
        pictures({**parts(train=4, test=2), "train/fox": 2}),
        said=("1 of 3 classes have no test sample: fox",),
    ),
    "an empty class": Case(pictures({**CATS_AND_DOGS, "fox": 0}), r"\['fox'\]: no pictures in the folder"),
    "a share beside a test part": Case(
        pictures(parts(train=4, test=2)), "test_share = 0.5: has no effect", source={"test_share": 0.5}
    ),
    "nested classes": Case(
        pictures({"cat": 5, "dog": 5, "dog/poodle": 2}),
        said=(r"not lie in a folder of a class are not read: dog/poodle/0.png and 1 more",),
        check=sizes(8, 2, "cat", "dog"),
    ),
    "hidden files": Case(
        both(
            pictures(CATS_AND_DOGS),
            *(put(f"{name}") for name in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "dog/._0.png")),
            *(put(f"{name}/0.png") for name in (".ipynb_checkpoints", "__MACOSX", "cat/@eaDir")),
        ),
        check=sizes(8, 2, "cat", "dog"),
    ),
    "suffixes in capitals": Case(
        both(pictures({"cat": 5}, ending="JPG"), pictures({"dog": 5}, ending="jpeg")), check=sizes(8, 2)
    ),
    "other formats": Case(
        both(
            pictures(CATS_AND_DOGS),
            saved("cat/a.gif", lambda: noise(0, "P")),
            saved("cat/b.tif", lambda: noise(0)),
        ),
        said=("files of other formats are not read .*: cat/a.gif and 1 more",),
        check=sizes(8, 2),
    ),
    "a truncated picture": Case(
        both(pictures(CATS_AND_DOGS), put("cat/x.png", b"\x89PNG\r\n\x1a\n")), r"cat/x.png = 'unreadable'"
    ),
    "a truncated picture left out": Case(
        both(pictures(CATS_AND_DOGS), put("cat/x.png", b"\x89PNG\r\n\x1a\n")),
        said=("left out: .*cat/x.png",),
        check=sizes(8, 2),
        source={"broken": "skip"},
    ),
    "16 bits": Case(
        both(
            pictures(CATS_AND_DOGS),
            saved("cat/x.png", lambda: Image.fromarray(np.full((6, 6), 999, np.uint16))),
        ),
        "cat/x.png = 'I;16': has values of more than 8 bits",
    ),
    "palette, alpha, grey, CMYK, one bit": Case(
        both(
            pictures(CATS_AND_DOGS),
            *(saved(f"cat/mode-{m}.png", lambda m=m: noise(9, m)) for m in ("P", "RGBA", "L", "LA", "1")),
            saved("cat/cmyk.jpg", lambda: noise(9, "CMYK")),
        ),
        check=sizes(13, 3),
    ),
    "an animation": Case(
        both(
            pictures(CATS_AND_DOGS),
            saved(
                "cat/a.png", lambda: noise(0, "P"), format="GIF", save_all=True, append_images=[noise(9, "P")]
            ),
        ),
        check=sizes(9, 2),
    ),
    "one picture under two endings": Case(
        both(pictures(CATS_AND_DOGS), saved("cat/0.bmp", lambda: noise(0))), check=sizes(9, 2)
    ),
    "a folder called like a picture": Case(
        both(pictures(CATS_AND_DOGS), put("cat/x.png/readme.txt")), "x.png = 'no file'"
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_pictures(tmp_path, name):
    case = FOLDERS[name]
    met(tmp_path, Case(case.write, case.refused, case.said, case.check, {**FOLDER, **case.source}))


def test_hidden_folders_are_not_searched(tmp_path, monkeypatch):
    """A repository or the thumbnails of a server may hold more files than the pictures are."""
    hidden = (".git/objects/00", "cat/@eaDir/0.png")
    both(pictures(CATS_AND_DOGS), *(put(f"{name}/0.gif") for name in hidden))(tmp_path)
    entered, listed = [], os.scandir

    def scandir(path="."):
        entered.append(Path(path).relative_to(tmp_path / FOLDER["path"]).as_posix())
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert SOURCES["folder"](path=FOLDER["path"])._not_read(tmp_path / FOLDER["path"], []) != ()
    assert sorted(entered) == [".", "cat", "dog"]


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    """Orientation 3: upside down. The bright upper half of the file is the lower half of the picture."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[: SIDE // 2] = 200
    exif = Image.Exif()
    exif[0x0112] = 3
    for name in ("a/0", "a/1", "b/0", "b/1"):
        saved(f"{name}.png", lambda: Image.fromarray(pixels), exif=exif)(tmp_path)
    federation, _ = opened(tmp_path, Case(put, source={**FOLDER, "test_share": 0.0}))
    np.testing.assert_array_equal(federation.pool.inputs[0, 0], pixels[::-1, :, 0])


# -- splits of Hugging Face ----------------------------------------------------------------------------------


def encoded(red: int, mode: str = "RGB", side: int = SIDE) -> dict[str, object]:
    """Return a picture as a column of `datasets` holds it."""
    out = BytesIO()
    noise(red).resize((side, side)).convert(mode).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def hub(info: str = "", **splits: list[dict[str, object]]) -> Writer:
    """Return the writer of Parquet files as the Hub has them, one a split, whose samples are pictures."""

    def write(root: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        (root / "hub" / "data").mkdir(parents=True)
        for split, column in splits.items():
            table = pa.table({"image": column, "label": [i % 2 for i in range(len(column))]})
            table = table.replace_schema_metadata({b"huggingface": info.encode()} if info else {})
            parquet.write_table(table, root / "hub" / "data" / f"{split}-00000-of-00001.parquet")

    return write


def some(count: int, red: int = 0) -> list[dict[str, object]]:
    """Return pictures of one red."""
    return [encoded(red) for _ in range(count)]


def shape(*expected: int) -> Check:
    """Return a check of the shape of one sample."""

    def check(federation: PoolFederation) -> None:
        assert federation.pool.shape == expected

    return check


HUB = {"name": "huggingface", "path": "hub"}
HUBS = {
    "validation beside test": Case(
        hub(train=some(8), validation=some(4, 128), test=some(4, 255)),
        said=("validation is left out; data.source.validation: train adds",),
        check=sizes(8, 4, reds=(0, 255)),
    ),
    "validation added": Case(
        hub(train=some(8), validation=some(4), test=some(4, 255)),
        check=sizes(12, 4, reds=(0, 255)),
        source={"validation": "train"},
    ),
    "validation alone": Case(
        hub(train=some(8), validation=some(4, 255)),
        said=("validation is the test part",),
        check=sizes(8, 4, reds=(0, 255)),
    ),
    "a split that is no part": Case(
        hub(train=some(8), unsupervised=some(4, 9), test=some(4, 255)),
        said=("splits that are no part are left out: unsupervised",),
        check=sizes(8, 4, reds=(0, 255)),
    ),
    "no training split": Case(hub(test=some(4)), "holds no training part"),
    "grey among colours": Case(
        hub(train=[encoded(9, "L" if i % 5 == 3 else "RGB") for i in range(20)]),
        said=("4 of 20 pictures are grey and read as RGB",),
        check=shape(3, SIDE, SIDE),
    ),
    "grey first": Case(
        hub(train=[encoded(9, "RGB" if i else "L") for i in range(20)]),
        said=("1 of 20 pictures are grey",),
        check=shape(3, SIDE, SIDE),
    ),
    "grey in the test part alone": Case(
        hub(train=some(8), test=[encoded(9, "L") for _ in range(4)]),
        said=("4 of 12",),
        check=shape(3, SIDE, SIDE),
    ),
    "grey alone": Case(hub(train=[encoded(9, "L") for _ in range(20)]), check=shape(1, SIDE, SIDE)),
    "palette and alpha": Case(
        hub(train=[encoded(9, ("P", "RGBA", "RGB", "LA")[i % 4]) for i in range(20)]),
        check=shape(3, SIDE, SIDE),
    ),
    "two sizes": Case(
        hub(train=[*some(8), encoded(9, side=9)]), r"a picture of \[3, .* among those of \[3, .*: set side"
    ),
    "two sizes, scaled": Case(
        hub(train=[*some(8), encoded(9, side=9)]), check=shape(3, SIDE, SIDE), source={"side": SIDE}
    ),
    "no bytes": Case(hub(train=[*some(8), {"bytes": None, "path": "a.png"}]), "row 9 = None: holds no bytes"),
    "a truncated picture": Case(
        hub(train=[*some(8), {"bytes": b"\x89PNG", "path": None}]), "row 9 = 'unreadable'"
    ),
    "names of classes that are numbers": Case(
        hub('{"info": {"features": {"label": {"names": [7, 9]}}}}', train=some(8)),
        check=sizes(8, 0, "7", "9"),
        source={"test_share": 0.0},
    ),
    "a class name that is NaN": Case(
        hub('{"info": {"features": {"label": {"names": ["a", NaN]}}}}', train=some(8)),
        "names of classes .* must be texts",
    ),
    "names of classes in one text": Case(
        hub('{"info": {"features": {"label": {"names": "ab"}}}}', train=some(8)),
        "names of classes .* must be texts",
    ),
    "a key twice in its description": Case(
        hub('{"info": {"features": {"label": {"names": ["a", "b"], "names": ["b", "a"]}}}}', train=some(8)),
        "the key 'names' appears twice",
    ),
}


@pytest.mark.parametrize("name", HUBS)
def test_splits_of_hugging_face(tmp_path, name):
    case = HUBS[name]
    met(tmp_path, Case(case.write, case.refused, case.said, case.check, {**HUB, **case.source}))


# -- archives ------------------------------------------------------------------------------------------------


def archive(**changes: Any) -> Writer:
    """Return the writer of an archive of images 6 x 6, 40 and 8 of them; None leaves an array out."""
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 40), ("test", 8)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (n, 6, 6)).astype(np.uint8)
        arrays[f"y_{part}"] = np.arange(n) % 4
    kept = {name: made for name, made in {**arrays, **changes}.items() if made is not None}
    return lambda root: np.savez(root / "x.npz", **kept)


def floats(low: float, high: float, *size: int, kind: type = np.float32) -> np.ndarray:
    """Return uniform numbers."""
    return np.random.default_rng(2).uniform(low, high, size).astype(kind)


X = np.random.default_rng(3).integers(0, 256, (40, 6, 6)).astype(np.uint8)
ALONE: dict[str, Any] = {"x_test": None, "y_test": None}
NPZ = {"name": "npz", "path": "x.npz"}


def inputs(expected: np.ndarray) -> Check:
    """Return a check of all samples, in any order."""

    def check(federation: PoolFederation) -> None:
        found = federation.pool.inputs
        assert found.dtype == expected.dtype
        order = [np.lexsort(a.reshape(len(a), -1).T) for a in (found, expected)]
        np.testing.assert_array_equal(found[order[0]], expected[order[1]])

    return check


TINY = r"channel 0 would be rounded by up to .*, to 256 steps"
ARCHIVES = {
    "grey": Case(archive(), check=sizes(40, 8)),
    "Fortran order": Case(archive(x_train=np.asfortranarray(X), **ALONE), check=inputs(X[:, None])),
    "channels first": Case(
        archive(x_train=np.repeat(X[:, None], 3, 1), **ALONE), check=inputs(np.repeat(X[:, None], 3, 1))
    ),
    "channels last": Case(
        archive(x_train=np.repeat(X[..., None], 3, 3), **ALONE), check=inputs(np.repeat(X[:, None], 3, 1))
    ),
    "big-endian": Case(archive(x_train=(X / 255).astype(">f4"), **ALONE), check=inputs(X[:, None])),
    "float64 of bytes": Case(archive(x_train=X / 255, **ALONE), check=inputs(X[:, None])),
    "floats that fill the range": Case(
        archive(x_train=floats(0, 1, 40, 6, 6), **ALONE),
        check=inputs(np.rint(floats(0, 1, 40, 6, 6) * 255).astype(np.uint8)[:, None]),
    ),
    "scans of 16 bits": Case(archive(x_train=floats(0, 0.0015, 40, 6, 6), **ALONE), TINY),
    "little contrast": Case(archive(x_train=floats(0.5, 0.51, 40, 6, 6), **ALONE), TINY),
    "little contrast, float64": Case(
        archive(x_train=floats(0, 0.01, 40, 6, 6, kind=np.float64), **ALONE), TINY
    ),
    "little contrast in blue": Case(
        archive(x_train=floats(0, 1, 40, 6, 6, 3) * np.float32([1, 1, 0.01]), **ALONE),
        "channel 2 would be rounded",
    ),
    "little contrast on a background": Case(
        archive(x_train=floats(0, 0.001, 40, 6, 6) + floats(0, 0.99, 6, 6), **ALONE), TINY
    ),
    "little contrast beside bright pixels": Case(
        archive(x_train=np.concatenate([floats(0, 0.001, 40, 6, 5), np.ones((40, 6, 1))], 2), **ALONE), TINY
    ),
    "one image of little contrast among others": Case(
        archive(x_train=np.concatenate([floats(0, 1, 39, 6, 6), floats(0, 0.01, 1, 6, 6)]), **ALONE),
        check=sizes(32, 8),
    ),
    "borders that hardly vary": Case(
        archive(
            x_train=np.pad(floats(0, 1, 40, 4, 4), ((0, 0), (1, 1), (1, 1))) * 0.9999
            + floats(0, 1e-4, 40, 6, 6)
        ),
        check=sizes(40, 8),
    ),
    "one image": Case(
        archive(x_train=floats(0, 0.001, 1, 6, 6), y_train=np.zeros(1, np.int64), x_test=None, y_test=None),
        TINY,
    ),
    "little contrast in the test part": Case(
        archive(x_train=X / 255, x_test=floats(0, 0.01, 8, 6, 6)), f"x_test = .*{TINY}"
    ),
    "little contrast as features": Case(
        archive(x_train=floats(0, 0.0015, 40, 6, 6), **ALONE),
        check=inputs(floats(0, 0.0015, 40, 6, 6)),
        source={"inputs": "features"},
    ),
    "one value": Case(
        archive(x_train=np.full((40, 6, 6), 0.3), **ALONE), said=("8 of 8 test samples stand in",)
    ),
    "floats up to 255": Case(
        archive(x_train=X.astype(np.float32), **ALONE), r"float32 in \[0, 255\]': images must be"
    ),
    "floats around 0": Case(
        archive(x_train=floats(-1, 1, 40, 6, 6), **ALONE), "images must be uint8, or floats"
    ),
    "NaN": Case(archive(x_train=np.where(X > 250, np.nan, X / 255), **ALONE), "nan"),
    "16 bits": Case(archive(x_train=X.astype(np.uint16), **ALONE), "uint16"),
    "four channels": Case(archive(x_train=np.repeat(X[..., None], 4, 3), **ALONE), "1 or 3 colour channels"),
    "Python objects": Case(
        archive(x_train=np.array([*X, None], object)[:40], **ALONE), "holds Python objects"
    ),
    "other sizes in test": Case(archive(x_test=X[:8, :5]), "samples of another size"),
    "fewer labels": Case(archive(y_train=np.arange(39) % 4), "differ in number"),
    "one-hot labels": Case(archive(y_train=np.eye(4, dtype=np.int64)[np.arange(40) % 4], **ALONE), "one-hot"),
    "negative labels": Case(archive(y_train=np.arange(40) % 4 - 1, **ALONE), "must be integers from zero"),
    "labels of a column": Case(archive(y_train=(np.arange(40) % 4)[:, None], **ALONE), check=sizes(32, 8)),
    "no labels": Case(archive(y_train=None, **ALONE), "lacks the array y_train"),
    "one picture in both parts": Case(
        archive(x_train=X, x_test=np.concatenate([X[7:8], 255 - X[:7]])),
        said=(r"1 of 8 test samples stand in .*\(the first, test sample 0, is training sample 7\)",),
    ),
    "one row in both parts": Case(
        archive(
            x_train=floats(0, 9, 40, 3),
            x_test=np.concatenate([floats(10, 19, 6, 3), floats(0, 9, 40, 3)[[30, 2]]]),
        ),
        said=("2 of 8 test samples stand in .*test sample 6, is training sample 30",),
    ),
    "one sequence in both parts": Case(
        archive(
            x_train=np.arange(120).reshape(40, 3),
            x_test=np.array([[0, 1, 3], [0, 1, 2], [1, 2, 3]]),
            y_test=np.arange(3),
        ),
        said=("1 of 3 test samples stand in",),
    ),
    "a copy that is set aside for testing": Case(
        archive(x_train=np.repeat(X[::2], 2, 0), **ALONE),
        said=("test samples stand in the training part, too",),
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(tmp_path, name):
    case = ARCHIVES[name]
    met(tmp_path, Case(case.write, case.refused, case.said, case.check, {**NPZ, **case.source}))


def test_samples_that_differ_are_not_taken_for_one_another(monkeypatch):
    """Equal hashes do not make samples equal, and the number of the twin is that of the first equal one."""
    pool = Pool(np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), np.zeros(6, np.int64), 4, 1)
    assert repeated(pool) == ""
    monkeypatch.setattr("mpifl.data.pool._hashes", lambda inputs: np.zeros(len(inputs), np.uint64))
    assert repeated(pool) == ""


@pytest.mark.parametrize("names", [{"class_names": ("a", 1)}, {"origin_names": (None,)}])
def test_names_that_are_no_texts_are_refused(names):
    pool = Pool(np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), np.arange(6) % 2, 4, 2, **names)
    with pytest.raises(UserError, match="make it a text"):
        check_pool(pool, "data.source")


# -- partitions ----------------------------------------------------------------------------------------------


def partition(content: object, name: str = "p.json") -> Writer:
    """Return the writer of an archive and of a partition of it: 40 samples to train, then 8 to test."""
    text = content if isinstance(content, str) else json.dumps(content)
    return both(archive(), lambda root: (root / name).write_text(text))


def held(*clients: tuple[int, int, int]) -> Check:
    """Return a check of the numbers of samples of each client: train, val, test."""

    def check(federation: PoolFederation) -> None:
        assert [tuple(row) for row in federation.sizes.tolist()] == list(clients)

    return check


BY_PART = r"all 4 test samples are of the source's training part \(its test part begins at 40"
PARTITIONS = {
    "lists": Case(
        partition({"0": [1, 2], "1": [3]}), check=held((2, 0, 8), (1, 0, 8)), scenario={"test": "all"}
    ),
    "test part numbered from 0": Case(
        partition({str(k): {"train": [10 + k], "test": [2 * k, 2 * k + 1]} for k in range(2)}),
        said=(BY_PART,),
        check=held((1, 0, 2), (1, 0, 2)),
    ),
    "test part numbered through": Case(
        partition({str(k): {"train": [10 + k], "test": [40 + k]} for k in range(2)}),
        check=held((1, 0, 1), (1, 0, 1)),
    ),
    "test part numbered from 0, as a table": Case(
        partition(
            "client,part,sample\n0,train,9\n1,train,8\n" + "".join(f"{i % 2},test,{i}\n" for i in range(4)),
            "p.csv",
        ),
        said=(BY_PART,),
        scenario={"path": "p.csv"},
    ),
    "parts called otherwise": Case(
        partition(
            {
                "0": {"training": [1], "valid": [2], "testing": [41]},
                "1": {"train": [3], "val": [4], "test": [42]},
            }
        ),
        check=held((1, 1, 1), (1, 1, 1)),
    ),
    "an unknown part": Case(partition({"0": {"train": [1], "holdout": [2]}}), "names part 'holdout'"),
    "numbers from 1": Case(partition({"0": [1, 2], "1": [47, 48]}), "names sample 48, and the source has 48"),
    "a negative number": Case(partition({"0": [1, -2]}), "sample '?-2'? of row 2 is not a number from zero"),
    "numbers as texts": Case(
        partition({"0": ["1", "2"], "1": ["3"]}), check=held((2, 0, 8), (1, 0, 8)), scenario={"test": "all"}
    ),
    "a number that is not whole": Case(partition({"0": [1.5, 2]}), "1.5"),
    "NaN": Case(partition('{"0": [1, NaN]}'), "row 2 is not a number from zero"),
    "a name": Case(partition({"0": ["a.png"]}), "'a.png' of row 1 is not a number"),
    "a client twice": Case(partition('{"0": [1, 2], "1": [3], "0": [4]}'), "the key '0' appears twice"),
    "a part twice": Case(partition('{"0": {"train": [1], "train": [2]}}'), "the key 'train' appears twice"),
    "a sample of two clients": Case(
        partition({"0": [1, 2], "1": [2, 3]}),
        said=(r"1 of 3 training samples are held by several clients \(sample 2 by 0 and 1\)$",),
        check=held((2, 0, 8), (2, 0, 8)),
        scenario={"test": "all"},
    ),
    "test samples of several clients": Case(
        partition({k: {"train": [i], "test": [41, 42 + i]} for i, k in enumerate("abc")}),
        said=(r"1 of 4 test samples are held by several clients \(sample 41 by a and b\)$",),
        check=held((1, 0, 2), (1, 0, 2), (1, 0, 2)),
    ),
    "clients that differ by case": Case(
        partition({"Ann": [1, 2], "ann": [3]}),
        said=("clients 'Ann' and 'ann' differ by case or blanks",),
        scenario={"test": "all"},
    ),
    "a client without a name": Case(partition({"0": [1], " ": [2]}), "has no client in row 2"),
    "a sample twice": Case(
        partition({"0": [1, 1], "1": [3]}),
        said=("1 rows repeat a sample of their client",),
        scenario={"test": "all"},
    ),
    "a sample that trains and tests": Case(
        partition({"0": {"train": [1], "test": [1]}, "1": {"train": [2], "test": [41]}}),
        said=("1 of 2 test samples also train",),
    ),
    "a client without training samples": Case(
        partition({"0": [1], "1": {"test": [41]}}), "client 1 has no training samples"
    ),
    "lists of lists": Case(partition([[1, 2], [3]]), "must map clients to lists of samples"),
    "a byte order mark": Case(
        partition("\ufeff" + json.dumps({"0": [1], "1": [2]})),
        check=held((1, 0, 8), (1, 0, 8)),
        scenario={"test": "all"},
    ),
    "no JSON": Case(partition("{'0': [1]}"), "cannot be read as a partition"),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions(tmp_path, name):
    case = PARTITIONS[name]
    scenario = {"name": "partition", "path": "p.json", **case.scenario}
    met(tmp_path, Case(case.write, case.refused, case.said, case.check, NPZ, scenario))


# -- users ---------------------------------------------------------------------------------------------------


def shards(top: str, **parts: dict[str, int] | str) -> Writer:
    """Return the writer of LEAF's shards: so many samples of each user in each part, or a text."""

    def write(root: Path) -> None:
        rng = np.random.default_rng(4)
        for part, users in parts.items():
            (root / top / part).mkdir(parents=True)
            if isinstance(users, str):
                text = users
            else:
                data = {
                    u: {"x": rng.random((n, 3)).tolist(), "y": [i % 2 for i in range(n)]}
                    for u, n in users.items()
                }
                text = json.dumps(
                    {"users": list(users), "num_samples": list(users.values()), "user_data": data}
                )
            (root / top / part / "0.json").write_text(text)

    return write


USER = '{"x": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], "y": [0, 1]}'
TWICE = (
    f'{{"users": ["a", "b"], "num_samples": [2, 2], "user_data": {{"a": {USER}, "b": {USER}, "a": {USER}}}}}'
)
LEAF = {"name": "leaf", "path": "leaf"}
NATURAL = {"name": "natural"}
USERS = {
    "a user in test only": Case(
        shards("leaf", train={"a": 4, "b": 4}, test={"a": 2, "b": 2, "c": 2}),
        said=("1 of 3 origins are no clients: 1 have test samples only",),
        check=held((4, 0, 2), (4, 0, 2)),
    ),
    "users with too few samples": Case(
        shards("leaf", train={"a": 4, "b": 1, "c": 1, "d": 4}, test={"a": 2, "b": 2, "d": 2}),
        said=("2 of 4 origins are no clients: 2 have fewer than 2 training samples",),
        check=held((4, 0, 2), (4, 0, 2)),
    ),
    "a user without test samples": Case(
        shards("leaf", train={"a": 4, "b": 4}, test={"a": 2}),
        said=("1 of 2 clients have no test samples of their own",),
        check=held((4, 0, 2), (4, 0, 0)),
    ),
    "users of both kinds": Case(
        shards("leaf", train={"a": 4, "b": 4, "c": 1}, test={"a": 2, "d": 2}),
        said=(
            "2 of 4 origins are no clients: 1 have test samples only, 1 have fewer",
            "1 of 2 clients have no test",
        ),
    ),
    "one sample is enough": Case(
        shards("leaf", train={"a": 4, "b": 1}, test={"a": 2, "b": 2}),
        check=held((4, 0, 2), (1, 0, 2)),
        scenario={"min_samples": 1},
    ),
    "a user twice": Case(
        shards("leaf", train=TWICE, test={"a": 2}), "0.json = 'unreadable': the key 'a' appears twice"
    ),
    "a writer twice": Case(
        shards("femnist", train=TWICE, test={"a": 2}),
        "0.json = 'unreadable': the key 'a' appears twice",
        source={"name": "femnist"},
    ),
}


@pytest.mark.parametrize("name", USERS)
def test_users(tmp_path, name):
    case = USERS[name]
    source = case.source or LEAF
    met(tmp_path, Case(case.write, case.refused, case.said, case.check, source, {**NATURAL, **case.scenario}))


# -- data sets of PyTorch ------------------------------------------------------------------------------------

ITEMS = """
import numpy as np
from PIL import Image

class Items:
    draws = {draws}

    def __init__(self, train):
        self.rng = np.random.default_rng(int(train))
        self.held = self.rng.integers(0, 256, (12, 6, 6, 3)).astype(np.uint8)

    def __len__(self):
        return len(self.held)

    def __getitem__(self, i):
        x = self.held[i]
        if self.draws and self.rng.random() < 0.5:
            x = x[:, ::-1]
        return Image.fromarray(np.ascontiguousarray(x)).convert({modes}[i % 4]), i % 2
"""


def items(draws: bool = False, *modes: str) -> Writer:
    """Return the writer of a data set whose items flip at random, or are of several modes."""
    text = ITEMS.format(draws=draws, modes=modes or ("RGB",) * 4)
    return lambda root: (root / "items.py").write_text(text)


DATASETS = {
    "always the same": Case(items(), check=sizes(12, 12)),
    "random flips": Case(items(True), said=("items differ when read again; its transforms draw once",)),
    "grey among colours": Case(items(False, "RGB", "RGB", "L", "RGB"), check=shape(3, 6, 6)),
    "palette, alpha and CMYK": Case(items(False, "P", "RGBA", "CMYK", "LA"), check=shape(3, 6, 6)),
    "grey and one bit": Case(items(False, "L", "1", "L", "1"), check=shape(1, 6, 6)),
    "more than 8 bits": Case(items(False, "I", "I", "I", "I"), "has values of more than 8 bits"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_of_pytorch(tmp_path, name):
    case = DATASETS[name]
    source = {"name": "dataset", "path": f"{tmp_path}/items.py:Items", "reads": ("items.py",)}
    met(tmp_path, Case(case.write, case.refused, case.said, case.check, source))
