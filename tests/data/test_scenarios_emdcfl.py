"""EMD-CFL's scenarios: the counts, groups, histograms and colours of algorithms.md section 7.1."""

from __future__ import annotations

import numpy as np
import pytest

from mpifl.data import SCENARIOS, SOURCES, DataConfig, histogram, open_federation
from mpifl.data.scenarios.rotated import same_angle
from mpifl.data.transforms import rotated

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_rotated_mnist_has_the_papers_counts(open_real):
    federation = open_real("mnist", "emdcfl_mnist")
    expected = np.tile([[4878, 542, 220]] * 9 + [[4887, 543, 220]], (4, 1))
    np.testing.assert_array_equal(federation.sizes, expected)
    assert federation.shape == (1, 28, 28)


@pytest.mark.parametrize("version", ["max", "min", "two", "base"])
def test_the_versions_of_rotated_mnist_differ_in_groups_only(open_small, version):
    federation = open_small("mnist", "emdcfl_mnist", version=version)
    np.testing.assert_array_equal(federation.sizes, open_small("mnist", "emdcfl_mnist").sizes)
    groups = {"max": [0, 1, 2, 3], "min": [0] * 4, "two": [0, 0, 1, 1], "base": [0] * 4}[version]
    np.testing.assert_array_equal(federation.groups, np.repeat(groups, 10))


def test_rotated_mnist_clients_hold_542_of_each_digit(open_real):
    federation = open_real("mnist", "emdcfl_mnist")
    whole = histogram(federation, "train") + histogram(federation, "val")
    np.testing.assert_array_equal(whole[np.arange(40) % 10 < 9], 542)
    np.testing.assert_array_equal(whole[np.arange(40) % 10 == 9], 543)
    np.testing.assert_array_equal(histogram(federation, "test"), 22)
    assert histogram(federation, "val").std() > 0, "the validation split is not stratified"


def test_every_group_of_rotated_mnist_holds_the_same_images_turned(open_real):
    """The first 5421 of each digit, once in every group, turned by 0, 90, 180, 270 degrees."""
    federation = open_real("mnist", "emdcfl_mnist")
    plain = open_real("mnist", "iid").pool
    first = np.concatenate([np.flatnonzero(plain.labels[:60_000] == c)[:5421] for c in range(10)])
    expected = np.sort([hash(image.tobytes()) for image in plain.images[first]])
    for group, angle in enumerate((0, 90, 180, 270)):
        clients = np.flatnonzero(federation.groups == group)
        parts = [federation.samples(int(k), split)[0] for k in clients for split in ("train", "val")]
        upright = rotated(np.concatenate(parts), -angle)
        np.testing.assert_array_equal(np.sort([hash(image.tobytes()) for image in upright]), expected)


def test_the_rotated_recipe_holds_on_any_files(open_small):
    """Class size 121 over 10 clients: 12 of each class, the last client 13; test floor(48 / 40) = 1."""
    federation = open_small("mnist", "emdcfl_mnist")
    whole = histogram(federation, "train") + histogram(federation, "val")
    np.testing.assert_array_equal(whole, np.tile(np.repeat([12, 13], [9, 1])[:, None], (4, 10)))
    np.testing.assert_array_equal(histogram(federation, "test"), 1)
    np.testing.assert_array_equal(federation.sizes[:, 1], np.tile([12] * 9 + [13], 4))
    for k in (0, 10, 20, 30):  # the first pixel of an upright image is its label
        x, y = federation.samples(k)
        corner = {0: (0, 0), 10: (27, 0), 20: (27, 27), 30: (0, 27)}[k]
        np.testing.assert_array_equal(x[:, 0, corner[0], corner[1]], y)


@pytest.mark.parametrize(("version", "canvas"), [("max", 32), ("min", 38), ("two", 34), ("base", 32)])
def test_rotated_cifar_has_the_papers_counts(open_real, version, canvas):
    federation = open_real("cifar10", "emdcfl_cifar", version=version)
    np.testing.assert_array_equal(federation.sizes, [[4500, 500, 1000]] * 40)
    assert federation.shape == (3, 224, 224)
    assert federation.samples(0, "val")[0].shape == (500, 3, canvas, canvas)
    assert federation.to_tensor.mean == MEAN
    assert federation.to_tensor.std == STD


def test_rotated_cifar_shares_out_every_image_in_every_group(open_small):
    federation = open_small("cifar10", "emdcfl_cifar", resize=32)
    assert federation.shape == (3, 32, 32)
    seen = [federation.samples(k, split)[0] for k in range(10) for split in ("train", "val")]
    pool = federation.pool.images[:1000]
    assert sorted(x.tobytes() for x in np.concatenate(seen)) == sorted(x.tobytes() for x in pool)


def test_angles_within_the_tolerance_are_one_group():
    assert same_angle((0.0, 90.0, 180.0, 270.0), 6.0).tolist() == [0, 1, 2, 3]
    assert same_angle((-3.0, -1.0, 1.0, 3.0), 6.0).tolist() == [0, 0, 0, 0]
    assert same_angle((-3.0, 3.0, 177.0, 183.0), 6.0).tolist() == [0, 0, 1, 1]
    assert same_angle((0.0, 360.0, 90.0), 0.0).tolist() == [0, 0, 1]
    assert same_angle((0.0, 4.0, 8.0, 100.0), 5.0).tolist() == [0, 0, 0, 1]


def test_backdoor_mnist_has_the_papers_counts(open_real):
    federation = open_real("mnist", "emdcfl_backdoor_mnist")
    half, full = [[2439, 542, 890]] * 9 + [[2443, 543, 910]], [[4878, 542, 890]] * 9 + [[4887, 543, 910]]
    np.testing.assert_array_equal(federation.sizes, half + full + half)
    np.testing.assert_array_equal(histogram(federation, "test")[:9], 89)
    np.testing.assert_array_equal(histogram(federation, "test")[9], 91)
    assert federation.shape == (3, 28, 28)
    assert len(federation.client(0).extra["backdoor"]) == 890


@pytest.mark.parametrize("root", ["real", "small"])
def test_backdoor_mnist_is_painted_as_the_paper_says(open_real, open_small, root):
    """White becomes green (66, 160, 102), 255 (d/39, 0.5 + d/78, 0.4) with label d, purple (149, 52, 235)."""
    federation = (open_real if root == "real" else open_small)("mnist", "emdcfl_backdoor_mnist")
    assert federation.to_tensor.mean == MEAN
    for client, split in ((3, "train"), (3, "test"), (25, "val")):
        x, _ = federation.samples(client, split)
        brightest = x.max(axis=(0, 2, 3))
        np.testing.assert_array_equal(brightest, [66, 160, 102] if client == 3 else [149, 52, 235])
    x, y = federation.samples(15, "train")
    backdoor, label = federation.samples(3, "backdoor")
    for digit in range(10):
        colour = [int(255 * digit / 39 + 1e-3), int(255 * (0.5 + digit / 78) + 1e-3), 102]
        np.testing.assert_array_equal(x[y == digit].max(axis=(0, 2, 3)), colour)
        np.testing.assert_array_equal(backdoor[label == 9 - digit].max(axis=(0, 2, 3)), colour)
    clean, clean_label = federation.samples(3, "test")
    np.testing.assert_array_equal(clean_label, label)
    np.testing.assert_array_equal(clean[:, 2], backdoor[:, 2])  # blue is 0.4 in both


def test_backdoor_cifar_has_the_papers_counts_and_classes(open_real):
    federation = open_real("cifar10", "emdcfl_backdoor_cifar")
    np.testing.assert_array_equal(federation.sizes, [[4500, 500, 1000]] * 15)
    assert federation.shape == (3, 224, 224)
    counts = histogram(federation)
    assert counts[:10, 5:].sum() == counts[10:, :5].sum() == 0


def test_backdoor_cifar_is_patched_as_the_paper_says(open_small):
    tab10 = np.array([(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189)])
    federation = open_small("cifar10", "emdcfl_backdoor_cifar", resize=None)
    for split in ("train", "val"):
        x, y = federation.samples(7, split)
        np.testing.assert_array_equal(
            x[:, :, :3, :3], np.broadcast_to(tab10[y][:, :, None, None], (len(y), 3, 3, 3))
        )
    originals = {image.tobytes() for image in federation.pool.images}
    for client, split in ((0, "train"), (7, "test"), (12, "train"), (12, "test")):
        assert all(image.tobytes() in originals for image in federation.samples(client, split)[0])
    for client in (0, 7, 12):
        x, y = federation.samples(client, "backdoor")
        expected = np.broadcast_to(tab10[(y + 1) % 5][:, :, None, None], (len(y), 3, 3, 3))
        np.testing.assert_array_equal(x[:, :, :3, :3], expected)
    inside = {image.tobytes() for k in range(5) for image in federation.samples(k)[0]}
    shared = {image.tobytes() for k in range(5) for image in federation.samples(k, "val")[0]} | inside
    assert len(shared) == 500, "group 0 holds every image of classes 0-4 once"


def test_pacs_clients_are_cut_by_domain(tmp_path):
    """Sizes of the real domains: 2048, 2344, 1670, 3929 make 4, 4, 3, 7 clients of 64 / 16 / 20 %."""
    x = np.zeros((9991, 2, 2), np.uint8)
    origin = np.repeat(np.arange(4), [2048, 2344, 1670, 3929])
    x[:, 0, 0] = origin
    np.savez(
        tmp_path / "pacs.npz",
        x_train=np.stack([x] * 3, axis=1),
        y_train=np.arange(9991) % 7,
        origin_train=origin,
    )
    source = SOURCES["npz"](path=str(tmp_path / "pacs.npz"))
    federation = open_federation(
        DataConfig(cache=str(tmp_path), source=source, scenario=SCENARIOS["emdcfl_pacs"]()), 0
    )
    np.testing.assert_array_equal(federation.groups, np.repeat([0, 1, 2, 3], [4, 4, 3, 7]))
    low, high = federation.sizes.min(axis=0), federation.sizes.max(axis=0)
    np.testing.assert_array_equal(low, [327, 82, 102])
    np.testing.assert_array_equal(high, [375, 94, 117])
    for k in (0, 5, 9, 17):
        assert (federation.samples(k)[0][:, 0, 0, 0] == federation.groups[k]).all()
