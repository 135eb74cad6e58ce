"""Pixels and labels: what each operation does, by hand and against torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from mpifl.core.torchvision_compat import torchvision
from mpifl.data.transforms import (
    Border,
    Colour,
    Patch,
    PermuteLabels,
    Rotate,
    ToFeatures,
    ToTensor,
    canvas,
    labels_as_tensor,
    rotated,
)

SQUARE = np.array([[[[1, 2], [3, 4]]]], np.uint8)
ZERO = np.zeros(1, np.int64)


def test_a_quarter_turn_is_counter_clockwise():
    np.testing.assert_array_equal(rotated(SQUARE, 90.0)[0, 0], [[2, 4], [1, 3]])
    np.testing.assert_array_equal(rotated(SQUARE, -90.0)[0, 0], [[3, 1], [4, 2]])
    np.testing.assert_array_equal(rotated(SQUARE, 180.0)[0, 0], [[4, 3], [2, 1]])
    np.testing.assert_array_equal(rotated(SQUARE, 450.0), rotated(SQUARE, 90.0))


def test_masks_turn_with_their_images_and_pixels_from_nowhere_are_ignored():
    """A quarter turn moves masks as images; at 45 degrees the corners of a square come from outside of it."""
    masks = np.arange(16, dtype=np.uint8).reshape(1, 4, 4)
    turn = Rotate((90.0, 45.0))
    x, y = turn(masks[:, None], masks, ZERO)
    np.testing.assert_array_equal(x[:, 0], y)
    assert not np.array_equal(y, masks)
    for kind, void in ((np.uint8, 255), (np.int64, -100)):
        images, turned = turn(masks[:, None], masks.astype(kind), ZERO + 1)
        outside = rotated(np.ones((1, 1, 4, 4), np.uint8), 45.0)[0, 0] == 0
        assert outside.any()
        assert turned.dtype == kind
        assert (turned[0][outside] == void).all()
        np.testing.assert_array_equal(turned[0][~outside], images[0, 0][~outside])
    padded = Border(1)(masks[:, None], masks, ZERO)[1]
    assert padded.shape == (1, 6, 6)
    assert (padded == 255).sum() == 20


def test_classes_of_pixels_are_renamed_and_ignored_ones_stay():
    masks = np.array([[[0, 1, 255]], [[1, 0, 255]]], np.uint8)
    renamed = PermuteLabels(((0, 1), (1, 0)))(masks[:, None], masks, np.array([1, 0]))[1]
    np.testing.assert_array_equal(renamed, [[[1, 0, 255]], [[1, 0, 255]]])
    assert renamed.dtype == np.uint8
    assert labels_as_tensor(renamed).tolist() == [[[1, 0, -100]], [[1, 0, -100]]]


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize(
    "angle", [-3.0, -1.0, 1.0, 3.0, 60.0, 90.0, 120.0, 177.0, 180.0, 183.0, 240.0, 270.0]
)
def test_rotation_is_torchvisions(angle: float, expand: bool):
    torchvision()
    from torchvision.transforms.functional import rotate

    x = np.random.default_rng(0).integers(0, 256, (2, 3, 28, 28), dtype=np.uint8)
    expected = rotate(torch.from_numpy(x), angle, expand=expand).numpy()
    np.testing.assert_array_equal(rotated(x, angle, expand), expected)


def test_the_canvas_grows_as_the_paper_says():
    """32 -> 34 pixels at 3, 177 and 183 degrees; 36 (border 2) -> 38 at 1 and 3; same at right angles."""
    assert [canvas(32, 32, a) for a in (3, 177, 183)] == [(34, 34)] * 3
    assert [canvas(36, 36, a) for a in (1, 3, -1, -3)] == [(38, 38)] * 4
    assert [canvas(32, 32, a) for a in (0, 90, 180, 270)] == [(32, 32)] * 4
    assert rotated(np.zeros((1, 3, 32, 32), np.uint8), 3.0, expand=True).shape == (1, 3, 34, 34)


def test_each_sample_turns_by_the_angle_of_its_group():
    x = np.repeat(SQUARE, 3, axis=0)
    turned, _ = Rotate((0.0, 90.0, 180.0))(x, np.zeros(3, np.int64), np.array([2, 0, 1]))
    np.testing.assert_array_equal(turned[:, 0], [[[4, 3], [2, 1]], [[1, 2], [3, 4]], [[2, 4], [1, 3]]])


def test_labels_are_renamed_by_group():
    _, y = PermuteLabels(((0, 1, 2), (2, 0, 1)))(SQUARE, np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]))
    np.testing.assert_array_equal(y, [0, 2, 0, 1])


def test_a_border_is_black():
    x, _ = Border(2)(SQUARE, ZERO, ZERO)
    assert x.shape == (1, 1, 6, 6)
    np.testing.assert_array_equal(x[0, 0, 2:4, 2:4], [[1, 2], [3, 4]])
    assert x.sum() == 10


def test_colour_leaves_black_black_and_paints_white_in_full():
    paint = Colour((((149 / 255, 52 / 255, 235 / 255), (0.26, 0.63, 0.40)),))
    x = np.array([0, 255, 100], np.uint8).reshape(1, 1, 1, 3).repeat(2, axis=0)
    out, _ = paint(x, np.array([0, 1]), np.zeros(2, np.int64))
    np.testing.assert_array_equal(out[0, :, 0].T, [[0, 0, 0], [149, 52, 235], [58, 20, 92]])
    np.testing.assert_array_equal(out[1, :, 0].T, [[0, 0, 0], [66, 160, 102], [26, 63, 40]])
    assert paint.channels(1) == 3


def test_a_patch_colours_nine_pixels_of_those_that_have_one():
    x = np.full((2, 3, 5, 5), 7, np.uint8)
    out, _ = Patch(((None, (31, 119, 180)),))(x, np.array([0, 1]), np.zeros(2, np.int64))
    np.testing.assert_array_equal(out[0], x[0])
    np.testing.assert_array_equal(out[1, :, 2, 2], [31, 119, 180])
    assert (out[1] != 7).sum() == 27
    assert (x == 7).all(), "the argument must not change"


def test_finish_is_totensor_and_normalize_bit_for_bit():
    x = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(3, axis=1)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    shape = (1, 3, 1, 1)
    expected = torch.from_numpy(x).float() / 255
    expected = (expected - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    out = ToTensor(mean, std)(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert out.dtype == torch.float32
    assert out.is_contiguous()


def test_resizing_keeps_a_flat_image_flat():
    out = ToTensor((0.0,), (1.0,), resize=224)(np.full((1, 1, 34, 34), 51, np.uint8))
    assert out.shape == (1, 1, 224, 224)
    torch.testing.assert_close(out, torch.full_like(out, 0.2))


@pytest.mark.parametrize("side", [12, 224])
def test_resizing_is_torchvisions(side: int):
    torchvision()
    from torchvision.transforms.functional import resize

    x = np.random.default_rng(0).integers(0, 256, (2, 3, 34, 34), dtype=np.uint8)
    expected = resize(torch.from_numpy(x).float(), [side, side], antialias=True) / 255
    out = ToTensor((0.0,) * 3, (1.0,) * 3, resize=side)(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_white_is_painted_in_exactly_the_colour():
    """255 times v / 255 is v for each of the 256 levels, whatever the rounding."""
    levels = np.arange(256)
    white = np.full((256, 1, 1, 1), 255, np.uint8)
    table = tuple((v / 255, 0.0, 1.0) for v in levels.tolist())
    painted, _ = Colour((table,))(white, levels, np.zeros(256, int))
    np.testing.assert_array_equal(painted[:, :, 0, 0], np.stack([levels, 0 * levels, 0 * levels + 255], 1))


def test_a_table_holds_what_a_model_gets_for_each_pixel():
    x = np.random.default_rng(0).integers(0, 256, (7, 3, 9, 5), np.uint8)
    to_tensor = ToTensor((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))
    table = to_tensor.table((3, 9, 5))
    found = np.stack([table[c].numpy()[x[:, c]] for c in range(3)], 1)
    assert_array_equal(found, to_tensor(x))
    assert ToTensor((0.1,), (0.3,), resize=28).table((1, 28, 28)) is not None
    assert ToTensor((0.1,), (0.3,), resize=32).table((1, 28, 28)) is None
    assert ToFeatures().table((3,)) is None


def test_features_begin_where_pytorchs_own_tensors_do():
    """Elsewhere products of BLAS have other last bits, and NumPy's arrays begin anywhere."""
    x = np.random.default_rng(0).normal(size=(60, 7))
    for to in (ToFeatures(), ToFeatures(x.mean(0), x.std(0))):
        kept = [to(x[:n]) for n in range(60)]
        assert {found.data_ptr() % 64 for found in kept[1:]} == {0}
        expected = x[:9] if to.mean is None else (x[:9] - to.mean) / to.std
        assert_array_equal(kept[9], expected.astype(np.float32))
        assert kept[0].shape == (0, 7)
