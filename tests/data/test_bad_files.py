"""Files that are not what they should be: refused in one line that names them, at once, nothing run."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
import struct
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy
from PIL import Image
from support.refusal import refusal_of

from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation, prepare
from mpifl.data.sources import base

MNIST = "MNIST/raw/train-images-idx3-ubyte"
LABELS = "MNIST/raw/train-labels-idx1-ubyte"
X, Y = np.zeros((40, 6, 6), np.uint8), np.arange(40) % 4


def refusal(root: Path, source: str, **options: object) -> str:
    """Return the one line with which a source below `root` is refused."""
    config = DataConfig(
        str(root), str(root / "cache"), SOURCES[source](**options), SCENARIOS["iid"](clients=2)
    )
    start = time.process_time()
    with pytest.raises(UserError) as error:
        open_federation(config, 0)
    assert time.process_time() - start < 5
    assert "\n" not in str(error.value)
    return str(error.value)


def idx(array: np.ndarray, shape: tuple[int, ...] = ()) -> bytes:
    """Return an idx file of bytes; `shape` is what its header says."""
    shape = shape or array.shape
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + array.astype(np.uint8).tobytes()


def flipped(data: bytes, place: float = 0.5) -> bytes:
    """Return bytes with one bit changed."""
    changed = bytearray(data)
    changed[int(place * len(data))] ^= 0x10
    return bytes(changed)


def mnist(root: Path, **files: bytes | None) -> None:
    """Write a small MNIST but for some files, given by the beginning of their name; None: not there."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 40), ("t10k", 8)):
        for kind, array in (("images-idx3", np.zeros((n, 28, 28))), ("labels-idx1", np.arange(n) % 10)):
            data = files.get(f"{part}_{kind[:6]}", idx(array))
            if data is not None:
                (raw / f"{part}-{kind}-ubyte").write_bytes(data)


IMAGES, NUMBERS = idx(np.zeros((40, 28, 28))), np.arange(40) % 10
IDX = {
    "label of no class": ({"train_labels": idx(np.where(NUMBERS == 3, 99, NUMBERS))}, LABELS, "below 10"),
    "header of 10^28 bytes": ({"train_images": idx(X, (2**31,) * 3)}, MNIST, "unpack"),
    "too many bytes": ({"train_images": IMAGES + b"x"}, MNIST, "too many"),
    "other size in test": ({"t10k_images": idx(np.zeros((8, 32, 32)))}, "t10k-images", "another size"),
    "labels in three dimensions": ({"train_labels": idx(np.zeros((40, 1, 1)))}, LABELS, "one label"),
    "fewer labels": ({"train_labels": idx(NUMBERS[1:])}, LABELS, "39 labels"),
    "empty": ({"train_images": b""}, MNIST, "not an idx"),
}


@pytest.mark.parametrize("name", IDX)
def test_bad_idx_files_are_named(tmp_path, name):
    files, file, word = IDX[name]
    mnist(tmp_path, **files)
    said = refusal(tmp_path, "mnist")
    assert file in said
    assert word in said


def bomb(header: bytes) -> bytes:
    """Return a gzip file of 3 MB that unpacks to the header and two gigabytes of zeros."""
    whole = io.BytesIO()
    with gzip.open(whole, "wb", compresslevel=1) as file:
        file.write(header)
    part = gzip.compress(bytes(1 << 24), compresslevel=1)
    return whole.getvalue() + part * 128


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (flipped(gzip.compress(IMAGES + bytes(999))), "idx file"),
        (gzip.compress(IMAGES)[:-30], "truncated"),
        (b"no gzip", "gzip"),
        (bomb(IMAGES[:4] + struct.pack(">3I", 2_739_136, 28, 28)), "unpack"),
        (bomb(IMAGES), "too many"),
    ],
    ids=["flipped", "cut", "no gzip", "bomb", "bomb behind the data"],
)
def test_bad_gzip_files_are_named(tmp_path, data, word):
    mnist(tmp_path, train_images=None)
    (tmp_path / f"{MNIST}.gz").write_bytes(data)
    said = refusal(tmp_path, "mnist")
    assert f"{MNIST}.gz" in said
    assert word in said


def pipe(path: Path) -> None:
    """Put a pipe, which nobody will ever write to, where a file was."""
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    """Put a folder where a file was."""
    path.unlink()
    path.mkdir()


def pictures(root: Path) -> Path:
    """Write two classes of five pictures; return the path of one."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 5, 30, 30, 3), dtype=np.uint8)
    for c, i in np.ndindex(2, 5):
        (root / "images" / "ab"[c]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise[c, i]).save(root / "images" / "ab"[c] / f"{i}.png")
    return root / "images" / "a" / "1.png"


def archive(root: Path, **arrays: np.ndarray) -> Path:
    """Write an archive of a user's own."""
    np.savez(root / "a.npz", **({"x_train": X, "y_train": Y} | arrays))
    return root / "a.npz"


def shards(root: Path, **changes: object) -> Path:
    """Write LEAF shards of two writers; `changes` are of the second one's training data."""
    for part in ("train", "test"):
        data = {name: {"x": [[0.5] * 784] * 3, "y": [1, 2, 3]} for name in ("f1", "f2")}
        data["f2"] |= changes if part == "train" else {}
        shard = {"users": ["f1", "f2"], "num_samples": [3, 3], "user_data": data}
        (root / "femnist" / part).mkdir(parents=True)
        (root / "femnist" / part / "a.json").write_text(json.dumps(shard))
    return root / "femnist" / "train" / "a.json"


@pytest.mark.parametrize("instead", [pipe, folder])
@pytest.mark.parametrize(
    ("source", "written", "options"),
    [("folder", pictures, {}), ("npz", archive, {"path": "a.npz"}), ("femnist", shards, {})],
    ids=["folder", "npz", "femnist"],
)
def test_what_is_no_file_is_not_waited_for(tmp_path, source, written, options, instead):
    path = written(tmp_path)
    instead(path)
    assert str(path) in refusal(tmp_path, source, **options)


def test_a_file_that_this_user_may_not_read_is_said_to_be_so(tmp_path, monkeypatch):
    path = archive(tmp_path)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(zipfile, "ZipFile", denied)
    said = refusal(tmp_path, "npz", path="a.npz")
    assert str(path) in said
    assert "Permission denied" in said


def spoilt(array: np.ndarray, value: float) -> np.ndarray:
    """Return an array whose fourth number is another."""
    changed = array.copy()
    changed.flat[3] = value
    return changed


NPZ: dict[str, tuple[dict[str, np.ndarray], str, str]] = {
    "label of 10^12": ({"y_train": spoilt(Y, 10**12)}, "y_train", "below"),
    "label of 2^63": ({"y_train": spoilt(Y.astype(np.uint64), 2**63)}, "y_train", "below"),
    "more classes than images": ({"y_train": spoilt(Y, 5000)}, "y_train", "5000"),
    "negative label": ({"y_train": spoilt(Y, -1)}, "y_train", "from zero"),
    "one-hot labels": ({"y_train": np.eye(4, dtype=int)[Y]}, "y_train", "shape"),
    "pixel that is not a number": ({"x_train": spoilt(X / 255, np.nan)}, "x_train", "between 0 and 1"),
    "pixel of 10^9": ({"x_train": spoilt(X / 255, 1e9)}, "x_train", "between 0 and 1"),
    "strings": ({"x_train": np.full((40, 6, 6), "a")}, "x_train", "real numbers"),
    "images of no height": ({"x_train": X[:, :0]}, "data.source", "uint8"),
    "no images": ({"x_train": X[:0], "y_train": Y[:0]}, "y_train", "no samples"),
    "labels without images": ({"y_test": Y}, "y_test", "belong together"),
    "images without labels": ({"x_test": X}, "y_test", "lacks"),
    "test images of another size": ({"x_test": X[:, 1:], "y_test": Y}, "a.npz", "another size"),
    "fewer origins": ({"origin_train": Y[1:]}, "a.npz", "number"),
    "origin of 10^12": ({"origin_train": spoilt(Y, 10**12)}, "origin", "below"),
    "origins without origins": ({"origin_train": Y, "x_test": X, "y_test": Y}, "origin_test", "lacks"),
}


@pytest.mark.parametrize("name", NPZ)
def test_bad_arrays_are_named(tmp_path, name):
    arrays, where, word = NPZ[name]
    archive(tmp_path, **arrays)
    said = refusal(tmp_path, "npz", path="a.npz")
    assert where in said
    assert word in said


def member(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """Return an .npy file whose header says `shape`."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def encrypted(data: bytes) -> bytes:
    """Return an archive whose members are marked as encrypted."""
    out = bytearray(data)
    for sign, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = out.find(sign)
        while place >= 0:
            out[place + flags] |= 1
            place = out.find(sign, place + 4)
    return bytes(out)


class Evil:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_bad_archives_are_named(tmp_path):
    path = archive(tmp_path)
    whole = path.read_bytes()
    np.save(tmp_path / "b.npy", X)
    for data, word in (
        ((tmp_path / "b.npy").read_bytes(), "zip"),
        (encrypted(whole), "encrypted"),
        (flipped(whole, 0.2), "CRC"),
        (whole[:-40], "zip"),
        (pickle.dumps(Evil(tmp_path / "ran")), "zip"),
    ):
        path.write_bytes(data)
        said = refusal(tmp_path, "npz", path="a.npz")
        assert f"{path}" in said
        assert word in said
    objects = np.empty((40, 6, 6), object)
    objects[:] = Evil(tmp_path / "ran")
    archive(tmp_path, x_train=objects)
    assert "objects" in refusal(tmp_path, "npz", path="a.npz")
    assert not (tmp_path / "ran").exists()


def test_archives_take_no_room_before_their_size_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "UNPACKED", 1 << 20)
    path, labels = tmp_path / "a.npz", io.BytesIO()
    np.save(labels, Y)
    for images, word in (
        (member((10**12, 6, 6), b"abc"), "its header says"),
        (member((3000, 36, 36), bytes(3_888_000)), "unpack"),
    ):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.writestr("x_train.npy", images)
            file.writestr("y_train.npy", labels.getvalue())
        assert word in refusal(tmp_path, "npz", path="a.npz")


LEAF: dict[str, tuple[dict[str, object], str]] = {
    "fewer labels": ({"y": [1, 2]}, "differ"),
    "more labels": ({"y": [1, 2, 3, 4]}, "differ"),
    "pixel that is not a number": ({"x": [[float("nan")] * 784] * 3}, "between 0 and 1"),
    "pixel of 10^9": ({"x": [[1e9] * 784] * 3}, "between 0 and 1"),
    "label 62": ({"y": [1, 2, 62]}, "below 62"),
    "label -1": ({"y": [1, 2, -1]}, "from zero"),
    "label 1.5": ({"y": [1, 2, 1.5]}, "integers"),
    "label of 400 digits": ({"y": [1, 2, 10**400]}, "integers"),
}


@pytest.mark.parametrize("name", LEAF)
def test_the_client_of_a_bad_leaf_shard_is_named(tmp_path, name):
    changes, word = LEAF[name]
    path = shards(tmp_path, **changes)
    said = refusal(tmp_path, "femnist")
    assert f"{path}: user f2" in said
    assert word in said


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: [tree],
        lambda tree: tree | {"users": 3},
        lambda tree: tree | {"num_samples": [3]},
        lambda tree: tree | {"users": ["f1", "f1"]},
        lambda tree: tree | {"users": ["f1"], "num_samples": [3]},
        lambda tree: tree | {"users": [], "num_samples": [], "user_data": {}},
        lambda tree: tree | {"user_data": {"f1": {"x": [[0.5] * 783], "y": [1]}}},
        lambda tree: tree | {"user_data": {"f1": {"x": [[0.5] * 784, [1]], "y": [1, 2]}}},
        lambda tree: {},
    ],
    ids=["list", "users", "count", "twice", "unlisted", "none", "783", "ragged", "empty"],
)
def test_leaf_shards_of_another_shape_are_named(tmp_path, change):
    path = shards(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert str(path.parent) in refusal(tmp_path, "femnist")


def test_deep_json_is_refused(tmp_path):
    path = shards(tmp_path)
    path.write_text("[" * 100_000)
    assert str(path) in refusal(tmp_path, "femnist")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda batch: batch | {"labels": [10] * 200}, "below 10"),
        (lambda batch: batch | {"labels": batch["labels"][1:]}, "199 labels"),
        (lambda batch: batch | {"labels": [10**400] * 200}, "integers"),
        (lambda batch: batch | {"data": batch["data"][:, 1:]}, "CIFAR"),
        (lambda batch: batch | {"data": batch["data"] / 255}, "uint8"),
        (lambda batch: [batch], "CIFAR"),
    ],
)
def test_bad_cifar_batches_are_named(tmp_path, small_root, change, word):
    for path in (small_root / "cifar-10-batches-py").iterdir():
        batch = pickle.loads(path.read_bytes())
        batch = change(batch) if path.name == "data_batch_2" else batch
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / path.name).write_bytes(pickle.dumps(batch))
    said = refusal(tmp_path, "cifar10")
    assert "data_batch_2" in said
    assert word in said


def png(mode: str, size: tuple[int, int]) -> bytes:
    """Return a picture of one colour."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "picture"),
        (b"hello", "picture"),
        (png("L", (30, 30))[:50], "picture"),
        (partial(png, "1", (20_000, 20_000)), "pixels"),
        (partial(png, "1", (12_000, 12_000)), "pixels"),
        (png("L", (1, 60_000)), "pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n", "picture"),
    ],
    ids=["empty", "text", "cut", "400 million pixels", "144 million pixels", "thin", "a program"],
)
def test_bad_pictures_are_named(tmp_path, data, word):
    path = pictures(tmp_path)
    path.write_bytes(data() if callable(data) else data)
    said = refusal(tmp_path, "folder")
    assert str(path) in said
    assert word in said


def test_a_class_without_pictures_is_named(tmp_path):
    pictures(tmp_path)
    (tmp_path / "images" / "c").mkdir()
    assert "'c'" in refusal(tmp_path, "folder")


def test_a_class_whose_name_is_no_text_is_named(tmp_path):
    """A folder named in Latin 1; a report, written in UTF-8, would end with a traceback."""
    pictures(tmp_path)
    os.rename(tmp_path / "images" / "b", os.fsencode(tmp_path / "images") + b"/caf\xe9")
    said = refusal(tmp_path, "folder")
    assert said == r"data.source = 'caf\\udce9': is a name that is not UTF-8 text: give it another"
    said.encode()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"y": np.full((30, 1), 11)}, "below 10"),
        ({"y": np.full((30, 1), np.nan)}, "from zero"),
        ({"X": np.zeros((31, 32, 3, 30), np.uint8)}, "32 x 32"),
        ({"X": {"a": 1}}, "32 x 32"),
        ({"y": np.ones((29, 1))}, "32 x 32"),
    ],
    ids=["label 11", "no number", "31 rows", "struct", "29 labels"],
)
def test_bad_matlab_files_are_named(tmp_path, changes, word):
    from scipy.io import savemat

    for part in ("train", "test"):
        whole = {"X": np.zeros((32, 32, 3, 30), np.uint8), "y": (np.arange(30) % 10 + 1)[:, None]}
        savemat(tmp_path / f"{part}_32x32.mat", whole | (changes if part == "test" else {}))
    said = refusal(tmp_path, "svhn")
    assert "test_32x32.mat" in said
    assert word in said


def test_a_bit_changed_in_a_matlab_file_is_found(tmp_path):
    from scipy.io import savemat

    whole = {"X": np.zeros((32, 32, 3, 30), np.uint8), "y": (np.arange(30) % 10 + 1)[:, None]}
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", whole, do_compression=True)
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(flipped(path.read_bytes()))
    assert str(path) in refusal(tmp_path, "svhn")


LINE = "3 " + " ".join(f"{i + 1}:0.5" for i in range(256))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (LINE.replace("3", "11", 1), "below 10"),
        (LINE.replace("0.5", "nan", 1), "between -1 and 1"),
        (LINE.replace("0.5", "1e9", 1), "between -1 and 1"),
        (f"{LINE}\n{LINE[:-8]}", "libsvm"),
        ("", "integers"),
    ],
    ids=["label 11", "no number", "1e9", "ragged", "empty"],
)
def test_bad_usps_files_are_named(tmp_path, text, word):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(LINE.encode()))
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress(text.encode(), 1))
    said = refusal(tmp_path, "usps")
    assert "usps.t.bz2" in said
    assert word in said


def test_a_text_that_unpacks_to_more_than_usps_is_named(tmp_path):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(bytes(1 << 23)) * 9)
    (tmp_path / "usps.t.bz2").write_bytes(b"")
    assert "larger" in refusal(tmp_path, "usps")


@pytest.mark.parametrize("key", ["root", "cache"])
@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "~nobody-of-that-name"])
def test_names_that_no_folder_can_have_are_refused(tmp_path, key, name):
    source = SOURCES["digits" if key == "cache" else "mnist"]()
    config = DataConfig(**({"root": str(tmp_path), "cache": str(tmp_path)} | {key: name}), source=source)
    for opens in (open_federation, prepare):
        with refusal_of(f"data.{key}"):
            opens(config, 0)


@pytest.mark.parametrize("path", ["a" * 300, "a\0b", "~nobody-of-that-name/a.npz"])
def test_names_that_no_file_can_have_are_refused(tmp_path, path):
    assert "data.source.path" in refusal(tmp_path, "npz", path=path)
