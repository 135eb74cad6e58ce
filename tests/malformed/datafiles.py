"""Malformed data files: every format that a source reads, with bytes changed, cut, of another kind, bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from malformed.case import CONFIG, EITHER, REFUSED, Case, mutated_bytes
from PIL import Image
from scipy.io import savemat

Files = Mapping[str, bytes]  # path below the root -> content


def idx(array: np.ndarray) -> bytes:
    """Return an idx file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def npz(compress: bool = False, **arrays: np.ndarray) -> bytes:
    """Return an archive of arrays."""
    out = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(out, **arrays)
    return out.getvalue()


def png(pixels: np.ndarray) -> bytes:
    """Return a picture."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def formats() -> dict[str, tuple[str, Files]]:
    """Return, for each format, the source's section and its files, all of them right."""
    rng = np.random.default_rng(0)
    y = (np.arange(200) % 10).astype(np.uint8)
    x = rng.integers(0, 256, (200, 28, 28), dtype=np.uint8)
    raw = {
        f"MNIST/raw/{part}-{kind}": idx(array)
        for part in ("train", "t10k")
        for kind, array in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y))
    }
    small = rng.integers(0, 256, (40, 3072), dtype=np.uint8)
    batches = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    cifar = {
        f"cifar-10-batches-py/{name}": pickle.dumps({"data": small, "labels": [i % 10 for i in range(40)]})
        for name in batches
    }
    mat = io.BytesIO()
    digits = np.where(y == 0, 10, y)[:40]
    savemat(mat, {"X": rng.integers(0, 256, (32, 32, 3, 40), dtype=np.uint8), "y": digits[:, None]})
    lines = "".join(
        f"{label + 1} " + " ".join(f"{i}:{v:.2f}" for i, v in enumerate(rng.uniform(-1, 1, 256), 1)) + "\n"
        for label in y[:40].tolist()
    )
    writers = {"x": x, "y": y, "writer": (np.arange(200) % 5).astype(np.uint16)}
    writers |= {"is_test": (np.arange(200) // 5 % 4 == 0).astype(np.uint8), "users": np.array([*"abcde"])}
    users = {
        f"u{i}": {"x": (x[i::5][:6].reshape(6, -1) / 255).tolist(), "y": y[i::5][:6].tolist()}
        for i in range(5)
    }
    shard = {"users": [*users], "num_samples": [6] * 5, "user_data": users}
    pictures = {f"pictures/{c}/{i}.png": png(x[i, :8, :8]) for c in ("cat", "dog") for i in range(12)}
    numbers = {"x_train": x[:, :8, :8], "y_train": y}
    leaf = {f"femnist/data/{part}/all_data_0.json": json.dumps(shard).encode() for part in ("train", "test")}
    return {
        "mnist": ("{name: mnist}", raw),
        "mnist.gz": ("{name: mnist}", {f"{name}.gz": gzip.compress(data) for name, data in raw.items()}),
        "cifar10": ("{name: cifar10}", cifar),
        "svhn": ("{name: svhn}", {f"{part}_32x32.mat": mat.getvalue() for part in ("train", "test")}),
        "usps": ("{name: usps}", dict.fromkeys(("usps.bz2", "usps.t.bz2"), bz2.compress(lines.encode()))),
        "femnist": ("{name: femnist}", {"femnist/femnist_leaf_writers.npz": npz(**writers)}),
        "femnist json": ("{name: femnist, folder: femnist/data}", leaf),
        "npz": ("{name: npz}", {"data.npz": npz(**numbers)}),
        "npz compressed": ("{name: npz}", {"data.npz": npz(compress=True, **numbers)}),
        "folder": ("{name: folder, path: pictures, side: 8}", pictures),
    }


def kinds() -> dict[str, Callable[[], bytes]]:
    """Return whole files that are wrong in themselves."""

    def zipped(content: bytes, encrypted: bool = False) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x_train.npy", content)
        data = bytearray(out.getvalue())
        if encrypted:  # the flag alone, in both of its places
            data[6] |= 1
            data[data.index(b"PK\x01\x02") + 8] |= 1
        return bytes(data)

    return {
        "text": lambda: b"no data at all\n",
        "html": lambda: b"<!DOCTYPE html><html><body>404</body></html>",
        "zeros": lambda: bytes(5000),
        "a pickle that calls": lambda: b"cos\ngetcwd\n(tR.",
        "a gzip bomb": lambda: gzip.compress(bytes(200 << 20), 9),
        "a bzip2 bomb": lambda: bz2.compress(bytes(200 << 20)),
        "a zip bomb": lambda: zipped(bytes(200 << 20)),
        "an encrypted zip": lambda: zipped(b"x" * 1000, encrypted=True),
        "a huge header": lambda: npz(x_train=np.zeros(2)).replace(b"(2,)", b"(9" + b"9" * 17 + b",)"),
        "objects": lambda: npz(x_train=np.array([{}, []], dtype=object), y_train=np.zeros(2)),
        "NaN": lambda: npz(x_train=np.full((40, 8, 8), np.nan), y_train=np.arange(40) % 4),
        "labels of no class": lambda: npz(
            x_train=np.zeros((4, 8, 8), np.uint8), y_train=np.array([0, 1, 2, 10**12])
        ),
        "a .npy": lambda: _npy(np.zeros((4, 4))),
        "JSON": lambda: b'{"users": [1], "user_data": []}',
        "deep JSON": lambda: b"[" * 100_000,
        "a large picture": lambda: _large_picture(),
    }


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _large_picture() -> bytes:
    """Return a picture whose head says 60,000 x 60,000 pixels."""
    data = png(np.zeros((8, 8), np.uint8))
    head = data.index(b"IHDR")
    return data[: head + 4] + struct.pack(">II", 60_000, 60_000) + data[head + 12 :]


def make(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Write and yield the cases."""
    rng, right, wrong = random.Random(f"data {seed}"), formats(), kinds()

    def case(name: str, section: str, files: Files, codes: tuple[int, ...]) -> Case:
        nonlocal count
        count -= 1
        root = folder / f"{count}"
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        data_options = [
            "--data.source",
            section,
            "--data.root",
            str(root),
            "--data.cache",
            str(root / "cache"),
        ]
        world = ["--data.scenario", "{name: iid, clients: 2}", "--output.folder", str(root / "runs")]
        return Case(name, ["run", str(CONFIG), "-q", *data_options, *world], codes)

    for name, (section, files) in right.items():
        yield case(f"{name}: right", section, files, (0,))
    pipe = case("folder: a pipe", right["folder"][0], right["folder"][1], REFUSED)
    place = folder / f"{count}" / "pictures" / "cat" / "0.png"
    place.unlink()
    os.mkfifo(place)
    yield pipe
    contents = {name: make_one() for name, make_one in wrong.items()}
    while count > 0:
        name = rng.choice([*right])
        section, files = right[name]
        path = rng.choice([*files])
        if rng.random() < 0.4:
            what, data = rng.choice([*contents.items()])
            yield case(
                f"{name}: {what}", section, {**files, path: data}, REFUSED if name != "folder" else EITHER
            )
        elif rng.random() < 0.1:
            yield case(
                f"{name}: {path} missing", section, {p: d for p, d in files.items() if p != path}, EITHER
            )
        else:
            what, data = mutated_bytes(files[path], rng)
            yield case(f"{name}: {what}", section, {**files, path: data}, EITHER)
