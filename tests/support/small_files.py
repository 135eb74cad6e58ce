"""Small files in the formats of the field, as other programs write them: image archives, tables, texts."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

KINDS = ("images-idx3", "labels-idx1")
MNIST_NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in KINDS]
WORDS = ("sea", "wind", "stone", "river", "night", "cloud", "ember", "moss", "salt", "thorn")
MODULE = '''
"""A data set, a model, a trainer and metrics of a user."""

from dataclasses import dataclass

import mpifl
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


class Own(Dataset):
    def __init__(self, root, train):
        rng = np.random.default_rng(int(train))
        self.y = np.arange(240 if train else 60) % 3
        self.x = (rng.normal(size=(len(self.y), 5)) + self.y[:, None]).astype(np.float32)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


class Net(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        size = int(np.prod(shape))
        self.mask = nn.Parameter(torch.ones(size))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(size, 6), nn.LayerNorm(6), nn.Tanh())
        self.head = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.head(self.body(x * self.mask.reshape(x.shape[1:])))


@dataclass(frozen=True)
class Signs(mpifl.Trainer):
    gives = ("direction", "loss", "part", "gradient", "outputs")

    def fit(self, module, data, context):
        params, total, samples = [p for p in module.parameters() if p.requires_grad], 0.0, 0
        for x, y, index in data.batches():
            loss = context.loss(module, x, y, index)
            loss.backward()
            context.direct()
            for p in params:
                if p.grad is not None:  # tensors of its own, and draws of the global generators
                    p.data = p.data - 0.002 * (p.grad + 1e-4 * np.random.rand() * torch.randn(p.shape)).sign()
                    p.grad = None
            total, samples = total + loss.item() * len(x), samples + len(x)
        return mpifl.Fit(total / samples, context.num_steps, samples, {"told": total})


def spread(outputs, labels):
    return float(outputs.float().std())
'''


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an idx file of unsigned bytes or of 32-bit integers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    code, data = (8, array.astype(np.uint8)) if array.dtype == np.uint8 else (12, array.astype(">i4"))
    path.write_bytes(
        struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + data.tobytes()
    )


def labels_with(counts: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Return labels in random order, counts[c] of class c."""
    return rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.uint8)


def write_family(root: Path, folder: str, counts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Write training and test images 28 x 28 and their labels; the first pixel of each image is its label."""
    rng = np.random.default_rng(0)
    for i, count in enumerate(counts):
        labels = labels_with(count, rng)
        images = rng.integers(1, 256, (len(labels), 28, 28), dtype=np.uint8)
        images[:, 0, 0] = labels
        write_idx(root / folder / "raw" / names[2 * i], images)
        write_idx(root / folder / "raw" / names[2 * i + 1], labels)


def write_cifar(root: Path) -> None:
    """Write CIFAR-10's batches with 200 images each, 20 of each class."""
    rng = np.random.default_rng(1)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (200, 3072), dtype=np.uint8)
        labels = rng.permutation(np.arange(200) % 10).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": labels, "batch_label": name}))


def write_writers(root: Path) -> None:
    """Write 6 writers' archive as FEMNIST's, writer i with 10 + i training and 2 test images."""
    rng = np.random.default_rng(2)
    counts = [(10 + i, 2) for i in range(6)]
    writer = np.concatenate([np.full(sum(c), i) for i, c in enumerate(counts)]).astype(np.uint16)
    held = np.concatenate([np.repeat([0, 1], c) for c in counts]).astype(np.uint8)
    x = rng.integers(0, 256, (len(writer), 28, 28), dtype=np.uint8)
    y = rng.integers(0, 62, len(writer)).astype(np.uint8)
    (root / "femnist").mkdir(parents=True)
    users = np.array([f"f{9 - i}" for i in range(6)])  # not in the order of their names
    archive = root / "femnist" / "femnist_leaf_writers.npz"
    np.savez(archive, x=x, y=y, writer=writer, is_test=held, users=users)


def write_all(root: Path, clients: int) -> None:
    """Write one of each: images, texts, tables and pictures of several owners, code, and times of clients.

    Args:
        root: an empty folder.
        clients: number of owners, and of clients whose times are given.
    """
    import h5py
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    random, rng = Random(0), np.random.default_rng(0)
    write_family(root, "MNIST", ([32] * 10, [12] * 10), MNIST_NAMES)
    write_writers(root)

    def sentences(count: int, seed: int) -> str:
        return " ".join(Random(seed).choices(WORDS[seed % 4 :], k=count))

    (root / "text.txt").write_text("\n\n".join(sentences(90, k) for k in range(clients)))

    rows = [
        f"{random.gauss(0, 1):.3f},{random.gauss(5, 2):.3f},{random.choice('xyz')},w{i % clients},"
        f"s{i % clients % 2},{random.choice(('no', 'yes'))},{random.gauss(0, 1):.3f},{i % 2},{i % 3 % 2}"
        for i in range(240)
    ]
    (root / "table.csv").write_text("\n".join(["a,b,colour,who,site,sold,price,new,hot", *rows]))

    y = np.arange(300) % 3
    x = (rng.normal(size=(300, 5)) + y[:, None]).astype(np.float32)
    parts = {"train": slice(0, 240), "test": slice(240, 300)}
    archive = {f"{name}_{part}": v[cut] for part, cut in parts.items() for name, v in (("x", x), ("y", y))}
    np.savez(root / "data.npz", **archive)
    images = rng.integers(0, 256, (300, 28, 28), dtype=np.uint8)
    parts = {"train": slice(0, 200), "val": slice(200, 240), "test": slice(240, 300)}
    archive = {f"{part}_images": images[cut] for part, cut in parts.items()}
    archive |= {f"{part}_labels": (y[cut] % 2)[:, None] for part, cut in parts.items()}
    np.savez(root / "breastmnist.npz", **archive)

    for domain in ("art", "photo"):
        for name in ("cat", "dog"):
            folder = root / "pictures" / domain / name
            folder.mkdir(parents=True)
            for i in range(40):
                Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")

    for part, count in (("train", 24), ("test", 6)):
        (root / "play" / part).mkdir(parents=True)
        data = {}
        for k in range(clients):
            text = sentences(40, k)
            data[f"user{k}"] = {
                "x": [text[j : j + 8] for j in range(count)],
                "y": [text[j + 8] for j in range(count)],
            }
        document = {"users": list(data), "num_samples": [count] * clients, "user_data": data}
        (root / "play" / part / "all_data.json").write_text(json.dumps(document))

        size = 4 * count
        columns = {
            "text": [sentences(6, j) for j in range(size)],
            "label": [j % 2 for j in range(size)],
            "owner": [f"o{j % clients}" for j in range(size)],
        }
        (root / "hub" / "data").mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(columns), root / "hub" / "data" / f"{part}-00000-of-00001.parquet")

        with h5py.File(root / f"fed_emnist_{part}.h5", "w") as file:
            for k in range(clients):
                pixels = rng.random((count, 28, 28)).astype(np.float32)
                file[f"examples/f{k}/pixels"] = pixels
                file[f"examples/f{k}/label"] = (np.arange(count) % 5).astype(np.int32)

    (root / "own.py").write_text(MODULE)
    dealt = "".join(f"{i % clients},train,{i}\n" for i in range(200))
    (root / "split.csv").write_text(f"client,part,sample\n{dealt}")
    each = range(clients)
    (root / "seconds.csv").write_text(
        "client,seconds\n" + "".join(f"{k},{1 + k / 4}\n{k},{2 - k / 8}\n" for k in each)
    )
    links = "".join(f"{k},{9000 + 1000 * k},{5000 + 700 * k},0.02\n" for k in each)
    (root / "links.csv").write_text(f"client,downlink_bytes_s,uplink_bytes_s,latency_s\n{links}")
    (root / "means.csv").write_text("client,mean_s\n" + "".join(f"{k},{1 + k}\n" for k in each))
    (root / "phones.csv").write_text("device,seconds\nold,3\nold,4\nnew,1\n")
