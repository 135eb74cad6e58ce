"""Every source reads its official format, agrees with torchvision, and names what it cannot read."""

from __future__ import annotations

import bz2
import gzip
import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.refusal import refusal_of

from mpifl.core.errors import UserError
from mpifl.core.torchvision_compat import torchvision
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.sources.idx import read_idx


def load(source: str, root: Path, scratch: Path | None = None, **options):
    """Return the pool of a source without any cache."""
    return SOURCES[source](**options).load(root, scratch or root)


@pytest.mark.parametrize(
    ("source", "name"), [("mnist", "MNIST"), ("fashionmnist", "FashionMNIST"), ("kmnist", "KMNIST")]
)
def test_the_mnist_family_reads_what_torchvision_reads(small_root, source, name):
    pool = load(source, small_root)
    for train, part in ((True, pool.train), (False, pool.test)):
        other = getattr(torchvision().datasets, name)(str(small_root), train=train)
        np.testing.assert_array_equal(pool.images[part][:, 0], other.data.numpy())
        np.testing.assert_array_equal(pool.labels[part], other.targets.numpy())


@pytest.mark.parametrize("split", ["balanced", "byclass"])
def test_emnist_reads_what_torchvision_reads_and_turns_it_upright(small_root, split):
    lying = load("emnist", small_root, split=split, upright=False)
    upright = load("emnist", small_root, split=split)
    other = torchvision().datasets.EMNIST(str(small_root), split=split, train=False)
    np.testing.assert_array_equal(lying.images[lying.test][:, 0], other.data.numpy())
    np.testing.assert_array_equal(lying.labels[lying.test], other.targets.numpy())
    np.testing.assert_array_equal(upright.images, lying.images.transpose(0, 1, 3, 2))
    assert upright.num_classes == {"balanced": 47, "byclass": 62}[split]


def test_upright_emnist_is_flts_rotation_and_flip():
    """FLT: rotated by -90 degrees, then flipped horizontally."""
    x = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(np.fliplr(np.rot90(x, -1)), x.T)


@pytest.mark.in_turn
def test_real_cifar10_is_what_torchvision_reads(open_real):
    import os

    pool = open_real("cifar10", "iid").pool
    other = torchvision().datasets.CIFAR10(os.environ["MPIFL_DATA"], train=False)
    np.testing.assert_array_equal(pool.images[pool.test], other.data.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(pool.labels[pool.test], other.targets)
    assert pool.num_train == 50_000


def test_cifar100_takes_the_fine_labels(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    for name, n in (("train", 30), ("test", 10)):
        batch = {"data": np.zeros((n, 3072), np.uint8), "fine_labels": [99] * n, "coarse_labels": [3] * n}
        (tmp_path / "cifar-100-python" / name).write_bytes(pickle.dumps(batch))
    pool = load("cifar100", tmp_path)
    assert (pool.num_train, len(pool.labels), pool.num_classes) == (30, 40, 100)
    assert (pool.labels == 99).all()


def test_a_batch_file_cannot_run_code(tmp_path, small_root):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    shutil.copytree(small_root / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps({"data": Evil()}))
    with pytest.raises(UserError, match="test_batch"):
        load("cifar10", tmp_path)


def test_digits_have_a_fixed_stratified_test_part():
    pool = load("digits", Path())
    assert pool.images.shape == (1797, 1, 8, 8)
    assert (pool.images.max(), pool.images.min()) == (255, 0)
    assert len(pool.test) == 359
    share = np.bincount(pool.labels[pool.test]) / np.bincount(pool.labels)
    np.testing.assert_allclose(share, 0.2, atol=0.003)


@pytest.mark.parametrize(
    ("source", "options"),
    [("digits", {}), ("sklearn", {"table": "wine"}), ("sklearn", {"table": "diabetes"})],
)
def test_what_is_set_aside_of_scikit_learns_data_stands_behind_the_rest(source, options):
    """Both parts together are all samples, each with its target; both keep the order of the file."""
    from sklearn import datasets

    pool = load(source, Path(), **options)
    data = getattr(datasets, f"load_{options.get('table', source)}")()
    held = data.data * (255 / 16) if source == "digits" else data.data
    rows = {
        row.tobytes(): i for i, row in enumerate(np.rint(held) if source == "digits" else held.astype("f"))
    }
    flat = pool.inputs.reshape(len(pool.labels), -1).astype(np.float64 if source == "digits" else np.float32)
    place = np.array([rows[row.tobytes()] for row in flat])
    assert np.array_equal(np.sort(place), np.arange(len(place)))
    for part in (pool.train, pool.test):
        assert (np.diff(place[part]) > 0).all()
    target, train = data.target[place].astype(float), pool.train
    if pool.label_kind == "numbers":
        target = ((target - target[train].mean()) / target[train].std())[:, None]
    np.testing.assert_allclose(pool.labels, target, atol=1e-6)


def test_real_qmnist_knows_the_writers(open_real):
    pool = open_real("qmnist", "iid").pool
    train, test = (np.unique(pool.origin[part]) for part in (pool.train, pool.test))
    assert (len(train), len(test)) == (539, 297)
    assert not np.intersect1d(train, test).size
    counts = np.unique(pool.origin[pool.train], return_counts=True)[1]
    assert (counts.min(), int(np.median(counts)), counts.max()) == (19, 116, 131)


def test_qmnist_labels_must_belong_to_the_images(small_root, tmp_path, formats):
    shutil.copytree(small_root / "MNIST", tmp_path / "MNIST")
    pool = load("mnist", tmp_path)
    for part, name in ((pool.train, "train"), (pool.test, "test")):
        table = np.zeros((len(part) + 5, 8), np.int32)  # QMNIST lists more than MNIST has
        table[: len(part), 0], table[: len(part), 2] = pool.labels[part], np.arange(len(part)) // 7
        formats(tmp_path / "qmnist" / f"qmnist-{name}-labels-idx2-int", table)
    origin = load("qmnist", tmp_path).origin
    np.testing.assert_array_equal(origin[pool.train], np.arange(pool.num_train) // 7)
    formats(tmp_path / "qmnist" / "qmnist-test-labels-idx2-int", np.ones((len(pool.test), 8), np.int32))
    with pytest.raises(UserError, match="belong together"):
        load("qmnist", tmp_path)


def write_shards(root: Path, archive: Path) -> None:
    """Write the writers' archive as LEAF does: train/*.json and test/*.json, two writers a file."""
    with np.load(archive) as z:
        x, y, writer, held, users = (z[k] for k in ("x", "y", "writer", "is_test", "users"))
    for flag, part in ((0, "train"), (1, "test")):
        (root / "femnist" / part).mkdir(parents=True)
        for k in range(0, len(users), 2):
            rows = {str(users[i]): np.flatnonzero((writer == i) & (held == flag)) for i in range(k, k + 2)}
            data = {
                u: {"x": (x[r].reshape(-1, 784) / 255).round(10).tolist(), "y": y[r].tolist()}
                for u, r in rows.items()
            }
            document = {
                "users": list(rows),
                "num_samples": [len(r) for r in rows.values()],
                "user_data": data,
            }
            (root / "femnist" / part / f"all_data_{k // 2}_niid.json").write_text(json.dumps(document))


def test_leaf_shards_and_the_archive_give_the_same_pool(small_root, tmp_path):
    archive = small_root / "femnist" / "femnist_leaf_writers.npz"
    write_shards(tmp_path, archive)
    a, b = load("femnist", small_root), load("femnist", tmp_path)
    assert len(SOURCES["femnist"]().files(tmp_path)) == 6
    for name in ("images", "labels", "origin"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.origin_names == b.origin_names == tuple(f"f{i}" for i in range(4, 10))
    assert a.num_train == b.num_train == 75
    np.testing.assert_array_equal(np.bincount(a.origin[a.train]), [15, 14, 13, 12, 11, 10])


def test_writers_of_femnist_keep_their_number_though_they_have_one_part_alone(tmp_path):
    """Writer a trains, b tests, c does both; each image shows the number of its writer."""
    writer = np.array([0, 0, 1, 2, 2], np.uint16)
    x = np.broadcast_to(writer[:, None, None], (5, 28, 28)).astype(np.uint8)
    held = np.array([0, 0, 1, 0, 1], np.uint8)
    (tmp_path / "femnist").mkdir()
    made = {"x": x, "y": np.zeros(5, np.uint8), "writer": writer, "is_test": held}
    np.savez(tmp_path / "femnist" / "femnist_leaf_writers.npz", users=np.array(["a", "b", "c"]), **made)
    pool = load("femnist", tmp_path)
    assert pool.origin.tolist() == [0, 0, 2, 1, 2] == pool.images[:, 0, 0, 0].tolist()
    assert (pool.num_train, pool.origin_names) == (3, ("a", "b", "c"))


def test_femnist_can_be_white_on_black(small_root):
    plain, inverted = (load("femnist", small_root, inverted=flag) for flag in (False, True))
    np.testing.assert_array_equal(inverted.images.astype(int), 255 - plain.images.astype(int))
    np.testing.assert_array_equal(inverted.labels, plain.labels)


def test_real_femnist_has_the_writers_it_says(open_real):
    pool = open_real("femnist", "natural").pool
    assert (pool.num_train, len(pool.test), len(pool.origin_names)) == (41_434, 4_756, 300)


def test_svhn_is_read_from_matlab_files(tmp_path):
    from scipy.io import savemat

    rng = np.random.default_rng(0)
    for part, n in (("train", 30), ("test", 12)):
        x = rng.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        savemat(tmp_path / f"{part}_32x32.mat", {"X": x, "y": (np.arange(n) % 10 + 1)[:, None]})
    pool = load("svhn", tmp_path)
    np.testing.assert_array_equal(pool.images[pool.test], x.transpose(3, 2, 0, 1))
    assert pool.labels[:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1], "the files call zero ten"


def test_usps_is_read_from_libsvm_text(tmp_path):
    lines = [
        f"{label + 1} " + " ".join(f"{i + 1}:{v}" for i in range(256))
        for label, v in ((3, -1.0), (0, 1.0), (9, 0.0))
    ]
    for name, part in (("usps.bz2", lines), ("usps.t.bz2", lines[:0:-1])):
        (tmp_path / name).write_bytes(bz2.compress("\n".join(part).encode()))
    pool = load("usps", tmp_path)
    assert pool.images.shape == (5, 1, 16, 16)
    assert (pool.num_train, pool.labels.tolist()) == (3, [3, 0, 9, 9, 0])
    assert pool.images[:, 0, 0, 0].tolist() == [0, 255, 127, 127, 255]
    other = torchvision().datasets.USPS
    assert other.split_list["train"][1] == "usps.bz2"


@pytest.mark.parametrize("domains", [False, True])
def test_pictures_are_read_from_folders(tmp_path, domains):
    from PIL import Image

    for domain in ("art", "photo") if domains else ("",):
        for label, grey in (("cat", 50), ("dog", 200)):
            folder = tmp_path / "pictures" / domain / label
            folder.mkdir(parents=True)
            for i in range(5):
                shade = grey + 10 * (domain == "photo")
                Image.new("RGB", (40, 20 + i), (shade, shade, shade)).save(folder / f"{i}.png")
            (folder / "readme.txt").write_text("no picture")
    pool = load("folder", tmp_path, tmp_path, path="pictures", domains=domains, side=16, test_share=0.2)
    n = 20 if domains else 10
    assert pool.images.shape == (n, 3, 16, 16)
    assert (pool.num_train, pool.num_classes) == (n * 4 // 5, 2)
    shades = np.where(pool.labels == 0, 50, 200) + (10 * pool.origin if domains else 0)
    np.testing.assert_array_equal(pool.images[:, 0, 3, 3], shades)
    assert pool.origin_names == (("art", "photo") if domains else ())


def test_an_npz_may_hold_a_test_part_or_have_one_set_aside(tmp_path):
    x, y = np.zeros((20, 6, 6, 3), np.uint8), np.arange(20) % 4
    np.savez(
        tmp_path / "a.npz",
        x_train=x,
        y_train=y,
        x_test=x[:8],
        y_test=y[:8],
        origin_train=y,
        origin_test=y[:8],
    )
    pool = load("npz", tmp_path, path="a.npz")
    assert (pool.shape, pool.num_train, len(pool.test), pool.num_classes) == ((3, 6, 6), 20, 8, 4)
    assert pool.origin.tolist() == [*y, *y[:8]]
    np.savez(tmp_path / "b.npz", x_train=np.full((20, 6, 6), 0.2, np.float32), y_train=y)
    pool = load("npz", tmp_path, path="b.npz", test_share=0.4)
    assert (pool.shape, pool.num_train, len(pool.test)) == ((1, 6, 6), 12, 8)
    assert (pool.images == 51).all()


DATASET = """
import numpy as np
from torch.utils.data import Dataset

class Own(Dataset):
    def __init__(self, root, train):
        self.n = 12 if train else 4
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        return np.full((5, 5), i, np.uint8), i % 3

def whole():
    return Own("", True)

class Ragged(Own):
    def __getitem__(self, i):
        return np.zeros((5, 5 + i), np.uint8), 0


class Doubtful(Own):
    def __getitem__(self, i):
        return np.zeros((5, 5), np.uint8), 0.7


class Gone(Own):
    def __getitem__(self, i):
        raise KeyError(i)


class Painted(Own):
    def __getitem__(self, i):
        from PIL import Image
        picture = Image.new("RGB", (5, 5), (i, 200, 0))
        return picture.convert("P", palette=Image.Palette.ADAPTIVE), i % 3


def Closed():
    raise OSError("the archive is closed")
"""


def test_a_users_dataset_is_read_by_file_or_by_module(tmp_path, monkeypatch):
    (tmp_path / "owndata_module.py").write_text(DATASET)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for path in (f"{tmp_path}/owndata_module.py:Own", "owndata_module:Own"):
        pool = load("dataset", tmp_path, path=path)
        assert (pool.num_train, len(pool.test), pool.num_classes, pool.shape) == (12, 4, 3, (1, 5, 5))
        assert pool.images[11, 0, 0, 0] == 11
    pool = load("dataset", tmp_path, path="owndata_module:whole", test_share=0.25)
    assert (pool.num_train, len(pool.test)) == (9, 3)
    config = DataConfig(
        cache=str(tmp_path / "c"),
        source=SOURCES["dataset"](path="owndata_module:Own"),
        scenario=SCENARIOS["iid"](clients=3),
    )
    assert open_federation(config, 0).sizes.sum() == 16


def test_a_picture_with_a_palette_is_read_in_its_colours(tmp_path):
    (tmp_path / "painted.py").write_text(DATASET)
    pool = load("dataset", tmp_path, path=f"{tmp_path}/painted.py:Painted")
    assert pool.images[7, :, 2, 2].tolist() == [7, 200, 0]


def test_a_users_dataset_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "owndata_broken.py").write_text(DATASET)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UserError, match="of one shape"):
        load("dataset", tmp_path, path="owndata_broken:Ragged")
    with pytest.raises(UserError, match="KeyError"):
        load("dataset", tmp_path, path="owndata_broken:Gone")
    assert load("dataset", tmp_path, path="owndata_broken:Doubtful").label_kind == "numbers"
    with pytest.raises(UserError, match="has no 'Missing'"):
        load("dataset", tmp_path, path="owndata_broken:Missing")
    with pytest.raises(UserError, match="cannot be made from nothing"):
        load("dataset", tmp_path, path="owndata_broken:Closed")
    with pytest.raises(UserError, match="no module nowhere"):
        SOURCES["dataset"](path="nowhere:Own").files(tmp_path)
    with pytest.raises(UserError, match="path"):
        SOURCES["dataset"](path="no colon")


def test_idx_files_may_be_zipped(tmp_path, formats):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    formats(tmp_path / "plain", array)
    (tmp_path / "zipped.gz").write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    np.testing.assert_array_equal(read_idx(tmp_path / "plain"), array)
    np.testing.assert_array_equal(read_idx(tmp_path / "zipped.gz"), array)


def truncate(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte"),
        ("cifar10", "cifar-10-batches-py/data_batch_3"),
        ("femnist", "femnist/femnist_leaf_writers.npz"),
    ],
)
def test_a_truncated_file_is_named_in_one_message(small_root, tmp_path, source, file):
    top = Path(file).parts[0]
    shutil.copytree(small_root / top, tmp_path / top)
    truncate(tmp_path / file)
    with pytest.raises(UserError) as error:
        open_federation(
            DataConfig(str(tmp_path), str(tmp_path / "c"), SOURCES[source](), SCENARIOS["iid"]()), 0
        )
    assert str(tmp_path / file) in str(error.value)
    assert "truncated" in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_json_npz_mat_and_pictures_are_named(small_root, tmp_path):
    from PIL import Image
    from scipy.io import savemat

    write_shards(tmp_path, small_root / "femnist" / "femnist_leaf_writers.npz")
    shard = tmp_path / "femnist" / "test" / "all_data_1_niid.json"
    truncate(shard)
    np.savez(tmp_path / "a.npz", x_train=np.zeros((9, 4, 4), np.uint8), y_train=np.arange(9) % 3)
    truncate(tmp_path / "a.npz")
    for part in ("train", "test"):
        savemat(
            tmp_path / f"{part}_32x32.mat", {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones((4, 1))}
        )
    truncate(tmp_path / "train_32x32.mat")
    for i in range(3):
        (tmp_path / "images" / "cat").mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 256, (30, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / "cat" / f"{i}.png")
    truncate(tmp_path / "images" / "cat" / "1.png")
    for source, options, named in (
        ("femnist", {}, str(shard)),
        ("npz", {"path": "a.npz"}, "a.npz"),
        ("svhn", {}, "train_32x32.mat"),
        ("folder", {}, "1.png"),
    ):
        with pytest.raises(UserError, match="truncated") as error:
            load(source, tmp_path, tmp_path, **options)
        assert named in str(error.value)


def test_images_of_unexpected_shape_or_range_are_refused(tmp_path):
    y = np.arange(4)
    for name, x, what in (
        ("flat", np.zeros((4, 784), np.uint8), "shape"),
        ("five", np.zeros((4, 6, 6, 5), np.uint8), "shape"),
        ("wide", np.full((4, 6, 6), 7.0), "between 0 and 1"),
        ("ints", np.zeros((4, 6, 6), np.int64), "uint8"),
    ):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y)
        with pytest.raises(UserError, match=what) as error:
            load("npz", tmp_path, path=f"{name}.npz")
        assert "x_train" in str(error.value)


def test_labels_that_do_not_fit_are_refused(tmp_path):
    x = np.zeros((4, 6, 6), np.uint8)
    for arrays, what in (
        ({"x_train": x}, "y_train"),
        ({"x_train": x, "y_train": np.array(["a"] * 4)}, "integers"),
        ({"x_train": x, "y_train": np.array([0, 1, -1, 2])}, "integers from zero"),
        ({"x_train": x, "y_train": np.arange(3), "x_test": x, "y_test": np.arange(4)}, "differ in number"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(UserError, match=what):
            load("npz", tmp_path, path="a.npz")


@pytest.mark.nightly
def test_a_digits_run_imports_neither_torchvision_nor_once_cached_scikit_learn(tmp_path):
    import subprocess

    program = (
        "import sys; from mpifl.data import *; "
        f"open_federation(DataConfig(cache={str(tmp_path)!r}), 0).client(0).train; "
        "print([m for m in ('torchvision', 'sklearn', 'scipy', 'PIL') if m in sys.modules])"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert "torchvision" not in outputs[0].stdout
    assert outputs[1].stdout.strip() == "[]"


def test_classes_of_cifar100_and_flts_cifar20(tmp_path, small_root):
    """One training and one test image of each of 100 labels; the first byte of an image is its label."""
    import pickle

    shutil.copytree(small_root / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-100-python").mkdir()
    labels = np.random.default_rng(0).permutation(100)
    data = np.zeros((100, 3072), np.uint8)
    data[:, 0] = labels
    for part in ("train", "test"):
        data[:, 1] = part == "test"
        batch = {"data": data, "fine_labels": labels.tolist()}
        (tmp_path / "cifar-100-python" / part).write_bytes(pickle.dumps(batch))
    pool = load("cifar100", tmp_path, classes=(92, 3, 8))
    assert (pool.num_train, len(pool.test), pool.num_classes) == (3, 3, 3)
    np.testing.assert_array_equal(np.array([92, 3, 8])[pool.labels], pool.images[:, 0, 0, 0])
    both = load("cifar20", tmp_path)
    assert (both.num_train, len(both.test), both.num_classes) == (1010, 210, 20)
    assert np.bincount(both.labels[both.train]).tolist() == [100] * 10 + [1] * 10
    further = both.images[both.labels >= 10].reshape(-1, 3072)[:, 1]
    assert further.tolist() == [0] * 10 + [1] * 10, "their test images test"
    of_hundred, ours = both.labels >= 10, load("cifar10", tmp_path)
    chosen = np.array(SOURCES["cifar20"].further.classes)
    np.testing.assert_array_equal(chosen[both.labels[of_hundred] - 10], both.images[of_hundred, 0, 0, 0])
    np.testing.assert_array_equal(both.labels[~of_hundred], ours.labels)
    np.testing.assert_array_equal(both.images[~of_hundred], ours.images)
    with refusal_of("classes", "below 100"):
        SOURCES["cifar100"](classes=(3, 3))


def test_labels_of_the_letters_split_count_from_one_in_the_files_only(tmp_path, formats):
    for part in ("train", "test"):
        stem = tmp_path / "EMNIST" / "raw" / f"emnist-letters-{part}"
        formats(stem.with_name(f"{stem.name}-images-idx3-ubyte"), np.zeros((26, 28, 28), np.uint8))
        formats(stem.with_name(f"{stem.name}-labels-idx1-ubyte"), np.arange(1, 27, dtype=np.uint8))
    pool = load("emnist", tmp_path, split="letters")
    assert pool.labels.tolist() == [*range(26)] * 2
    formats(stem.with_name(f"{stem.name}-labels-idx1-ubyte"), np.arange(26, dtype=np.uint8))
    with pytest.raises(UserError, match="emnist-letters-test-labels"):
        load("emnist", tmp_path, split="letters")


def test_each_part_of_medmnist_holds_its_own_images(tmp_path):
    """Each image is filled with a number of its part: training 1, validation 2, test 3."""
    made = {}
    for number, (part, n) in enumerate((("train", 4), ("val", 2), ("test", 2)), 1):
        made[f"{part}_images"] = np.full((n, 8, 8), number, np.uint8)
        made[f"{part}_labels"] = (np.arange(n)[:, None] % 2).astype(np.uint8)
    np.savez(tmp_path / "a.npz", **made)
    for validation, expected in (("train", [1, 1, 1, 1, 2, 2, 3, 3]), ("drop", [1, 1, 1, 1, 3, 3])):
        pool = load("medmnist", tmp_path, path=str(tmp_path / "a.npz"), validation=validation)
        assert pool.images[:, 0, 0, 0].tolist() == expected
        assert pool.num_train == expected.index(3)
        assert pool.labels.tolist() == [i % 2 for i in range(4)] + [0, 1] * (len(expected) // 2 - 2)


def test_volumes_of_medmnist_lie_between_0_and_1(tmp_path):
    made = {}
    for number, part in enumerate(("train", "val", "test")):
        made[f"{part}_images"] = np.full((2, 4, 4, 4), (0, 51, 255)[number], np.uint8)
        made[f"{part}_labels"] = np.array([[0], [1]], np.uint8)
    np.savez(tmp_path / "organmnist3d.npz", **made)
    pool = load("medmnist", tmp_path, path=str(tmp_path / "organmnist3d.npz"))
    assert pool.inputs.shape == (6, 1, 4, 4, 4)
    np.testing.assert_allclose(pool.inputs[:, 0, 0, 0, 0], [0, 0, 0.2, 0.2, 1, 1])


def test_each_part_of_an_npz_keeps_its_order_and_origins(tmp_path):
    x = np.arange(6, dtype=np.float32)[:, None].repeat(2, 1)
    parts = {"x_train": x[:4], "y_train": np.array([0, 1, 0, 1]), "origin_train": np.array([3, 2, 1, 0])}
    rest = {"x_test": x[4:], "y_test": np.array([1, 0]), "origin_test": np.array([0, 3])}
    np.savez(tmp_path / "a.npz", **parts, **rest)
    pool = load("npz", tmp_path, path=str(tmp_path / "a.npz"))
    assert pool.inputs[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (pool.num_train, pool.labels.tolist()) == (4, [0, 1, 0, 1, 1, 0])
    assert pool.origin.tolist() == [3, 2, 1, 0, 0, 3]


def test_what_is_set_aside_of_an_npz_stands_behind_the_rest_with_its_labels_and_origins(tmp_path):
    number, labels = np.arange(20), np.arange(20) // 3 % 2
    made = {"x_train": number[:, None].astype(np.float32), "y_train": labels, "origin_train": number // 2}
    np.savez(tmp_path / "a.npz", **made)
    pool = load("npz", tmp_path, path=str(tmp_path / "a.npz"), test_share=0.3)
    place = pool.inputs[:, 0].astype(int)
    assert sorted(place) == [*range(20)]
    assert pool.num_train == 14
    for part in (pool.train, pool.test):
        assert (np.diff(place[part]) > 0).all(), "in the order of the file"
    np.testing.assert_array_equal(pool.labels, labels[place])
    np.testing.assert_array_equal(pool.origin, place // 2)


def test_drawn_samples_have_the_noise_and_the_patterns_that_they_say(tmp_path):
    """Numbers are a linear map plus noise; images differ by class, and blocks of 4096 images do too."""
    pool = load("generated", tmp_path, kind="numbers", train=2000, test=10, noise=0.3)
    x, y = pool.inputs.astype(float), pool.labels.astype(float)
    rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(rest.std(0), 0.3, atol=0.02)
    images = load("synthetic", tmp_path, train=5000, test=10, shape=(1, 2, 2), classes=2, noise=9.0).images
    assert (np.asarray(images[:900]) != images[4096:4996]).mean() > 0.9
    one, other = (np.asarray(images[c::2], float).mean(0) for c in (0, 1))
    assert np.abs(one - other).max() > 5
