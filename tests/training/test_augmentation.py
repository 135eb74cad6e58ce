"""Random crops and mirrored images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import toy
from support.refusal import refusal_of
from torch.testing import assert_close

from mpifl.core.parameters import flatten
from mpifl.core.rng import key
from mpifl.models import MODELS
from mpifl.training.augmentation import MARGIN, _cut_at_once, _cut_one_by_one, crop_flip
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner


def test_every_image_is_one_of_its_shifted_or_mirrored_copies():
    """Image i holds 100 i + 10 row + column + 1; each result is one of 81 shifts, mirrored or not."""
    row, column = np.mgrid[0:5, 0:6]
    x = torch.tensor(np.stack([100.0 * i + 10 * row + column + 1 for i in range(40)]), dtype=torch.float32)[
        :, None
    ]
    out, found = crop_flip(x, key(0, "a")), []
    for image, changed in zip(x, out, strict=True):
        padded = torch.nn.functional.pad(image, (MARGIN,) * 4)
        copies = {
            (top, left, mirrored): padded[:, top : top + 5, left : left + 6].flip(2 if mirrored else ())
            for top in range(2 * MARGIN + 1)
            for left in range(2 * MARGIN + 1)
            for mirrored in (False, True)
        }
        found.append(next(place for place, copy in copies.items() if torch.equal(copy, changed)))
    assert len(set(found)) > 20
    assert {mirrored for _, _, mirrored in found} == {False, True}


def test_all_shifts_are_equally_likely_and_half_of_the_images_are_mirrored():
    """One pixel is set, left of the middle of 16 x 19: where it comes out says by how much, and if mirrored.

    4050 images, 81 shifts: 50 each, give or take 4 times 7. A mirrored pixel is right of the middle, 9.
    """
    x = torch.zeros(4050, 1, 16, 19)
    x[:, 0, 8, 4] = 1
    place = crop_flip(x, key(7)).flatten(1).argmax(1).numpy()
    down, column = 8 - place // 19, place % 19
    mirrored = column > 9
    right = 4 - np.where(mirrored, 18 - column, column)
    for shift in (down, right):
        assert set(shift.tolist()) == set(range(-MARGIN, MARGIN + 1))
    counts = np.unique(np.stack([down, right]), axis=1, return_counts=True)[1]
    assert len(counts) == 81
    assert abs(counts - 50).max() < 4 * 7.1
    assert abs(mirrored.mean() - 0.5) < 4 * 0.5 / np.sqrt(4050)


@pytest.mark.parametrize("shape", [(9, 3, 8, 8), (5, 1, 6, 11), (0, 3, 8, 8)])
def test_on_a_gpu_the_same_pieces_are_cut(shape):
    """The loop that a CPU takes, against the one look-up that a GPU takes."""
    draws = np.random.default_rng(3)
    padded = torch.rand(shape[0], shape[1], *(side + 2 * MARGIN for side in shape[2:]))
    top, left = draws.integers(0, 2 * MARGIN + 1, (2, shape[0]))
    mirrored = draws.random(shape[0]) < 0.5
    pieces = [cut(padded, top, left, mirrored) for cut in (_cut_one_by_one, _cut_at_once)]
    assert pieces[0].shape == shape
    assert_close(*pieces, rtol=0, atol=0)


def test_the_key_alone_decides():
    x = torch.rand(8, 3, 6, 6)
    assert_close(crop_flip(x, key(1)), crop_flip(x, key(1)), rtol=0, atol=0)
    assert not torch.equal(crop_flip(x, key(1)), crop_flip(x, key(2)))


def test_training_is_repeatable_and_differs_from_training_without():
    torch.manual_seed(11)
    learner = Learner(MODELS["mlp"]().build((1, 4, 4), 3))
    start, split = flatten(MODELS["mlp"]().build((1, 4, 4), 3)), toy.draw("train", 0, 23, 0)
    plain, first, again = (
        learner.sgd(start, split, LocalConfig(batch_size=8, augment=name), key(0, "visit")).vector
        for name in ("none", "crop_flip", "crop_flip")
    )
    assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(plain, first)


def test_an_unknown_augmentation_is_named():
    with refusal_of("augment", "crop_flip"):
        LocalConfig(augment="cutout")
