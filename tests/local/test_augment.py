"""Random crops and mirrored images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import worlds
from torch.testing import assert_close

from mpifl.core.errors import UserError
from mpifl.core.params import flatten
from mpifl.core.rng import key
from mpifl.local import Learner, LocalConfig
from mpifl.local.augment import MARGIN, crop_flip
from mpifl.models import MODELS


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


def test_the_key_alone_decides():
    x = torch.rand(8, 3, 6, 6)
    assert_close(crop_flip(x, key(1)), crop_flip(x, key(1)), rtol=0, atol=0)
    assert not torch.equal(crop_flip(x, key(1)), crop_flip(x, key(2)))


def test_training_is_repeatable_and_differs_from_training_without():
    torch.manual_seed(11)
    learner = Learner(MODELS["mlp"]().build((1, 4, 4), 3))
    start, split = flatten(MODELS["mlp"]().build((1, 4, 4), 3)), worlds.draw("train", 0, 23, 0)
    plain, first, again = (
        learner.sgd(start, split, LocalConfig(batch_size=8, augment=name), key(0, "visit")).vector
        for name in ("none", "crop_flip", "crop_flip")
    )
    assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(plain, first)


def test_an_unknown_augmentation_is_named():
    with pytest.raises(UserError, match="crop_flip") as error:
        LocalConfig(augment="cutout")
    assert error.value.key == "augment"
