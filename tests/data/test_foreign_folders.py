"""Folders, archives and splits as other programs and people leave them: each is read right, refused, or said.

The writers are PIL, NumPy, pyarrow, h5py, SciPy and json; the mistakes are those that people make.
"""

from __future__ import annotations

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
        said=("1 of 3 classes have no training picture: fox",),
        check=sizes(8, 6, "cat", "dog", "fox"),
    ),
    "a class in training only": Case(
        pictures({**parts(train=4, test=2), "train/fox": 2}),
        said=("1 of 3 classes have no test picture: fox",),
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
    "no bytes": Case(hub(train=[*some(8), {"bytes": None, "path": "a.png"}]), "row 8 = None: holds no bytes"),
    "a truncated picture": Case(
        hub(train=[*some(8), {"bytes": b"\x89PNG", "path": None}]), "row 8 = 'unreadable'"
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
