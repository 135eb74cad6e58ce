"""Images with a class for each pixel: the made-up source, arrays of masks, and scenarios."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data.pool import Pool, check_pool
from mpifl.data.scenarios import SCENARIOS
from mpifl.data.scenarios.relations import Relations
from mpifl.data.scenarios.rotated import Composed, Rotated
from mpifl.data.sources.arrays import any_labels_of, pool_of
from mpifl.data.sources.shapes import Shapes


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Return 60 drawn images."""
    folder = tmp_path_factory.mktemp("shapes")
    return Shapes(train=40, test=20, side=24).load(folder, folder)


@pytest.fixture
def opened(open_small):
    """Return a function that opens the federation of a scenario on 60 drawn images."""
    return partial(open_small, "shapes", source_options={"train": 40, "test": 20, "side": 24})


def test_figures_are_drawn_as_their_classes(pool, tmp_path):
    """Every class occurs; the rows of a triangle get wider downwards, of an inverted one narrower."""
    check_pool(pool, "shapes")
    assert pool.info.labels == "masks"
    assert pool.classes.tolist() == [0, 1, 2, 3, 4]
    again = Shapes(train=40, test=20, side=24).load(tmp_path, tmp_path)
    assert_array_equal(again.labels, pool.labels)
    single = Shapes(train=40, test=1, side=24, figures=1).load(tmp_path, tmp_path).labels
    for what, sign in ((3, 1), (4, -1)):
        widths = [(mask == what).sum(1) for mask in single if (mask == what).any()]
        assert widths
        assert all((sign * np.diff(w[w > 0]) >= 0).all() for w in widths)


def test_an_outline_is_ignored_where_two_classes_meet(tmp_path):
    kept, without = (
        Shapes(train=8, test=2, outline=outline).load(tmp_path, tmp_path).labels for outline in (False, True)
    )
    ignored = without == 255
    assert ignored.any(axis=(1, 2)).all()
    assert_array_equal(without[~ignored], kept[~ignored])
    inside = without.astype(int)
    for a, b in ((inside[:, :, :-1], inside[:, :, 1:]), (inside[:, :-1], inside[:, 1:])):
        assert ((a == b) | (a == 255) | (b == 255)).all()


def test_half_a_turn_makes_each_triangle_one_of_the_other_class(pool):
    """The second group sees and labels what the first does, upside down."""
    spec = Rotated(clients=2, angles=(0.0, 180.0)).compose(pool, key(0))
    x, y = pool.inputs[:2], pool.labels[:2]
    (turn,) = spec.ops
    assert_array_equal(turn(x, y, np.ones(2, int))[1], y[:, ::-1, ::-1])
    assert_array_equal(turn(x, y, np.ones(2, int))[0], x[:, :, ::-1, ::-1])


def test_clients_get_masks_as_whole_numbers(opened):
    found = opened("rotated", angles=(0.0, 30.0), clients=4, validation=0.2)
    assert found.info.labels == "masks"
    data = found.client(3)
    assert data.train.y.dtype.is_signed
    assert data.train.y.shape[1:] == (24, 24)
    assert set(np.unique(data.train.y.numpy())) == {-100, 0, 1, 2, 3, 4}
    assert set(np.unique(found.client(0).train.y.numpy())) <= {0, 1, 2, 3, 4}
    sizes = found.sizes[:, 0]
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("scenario", [Relations(groups=2, permutes="labels"), Composed(permutations=2)])
def test_groups_may_call_pixels_by_other_names(pool, scenario):
    """Each class of the first group has one name in the second, and the names are a permutation."""
    (op,) = scenario.compose(pool, key(0)).ops
    here, there = (op(pool.inputs, pool.labels, np.full(len(pool.labels), g))[1] for g in (0, 1))
    pairs = set(zip(here.ravel().tolist(), there.ravel().tolist(), strict=True))
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == [0, 1, 2, 3, 4]
    assert any(a != b for a, b in pairs)


REFUSED = {
    "dirichlet": ("dirichlet", {}, "divides the samples by class, but labels of shapes are masks"),
    "subsets": ("composed", {"subsets": 5}, "subsets = 5"),
    "alpha": ("composed", {"alpha": 1.0}, "alpha = 1.0"),
    "pixels": ("relations", {}, "permutes = 'inputs': labels are masks"),
    "resize": ("rotated", {"resize": 32}, "masks of .24, 24. pixels, which are not resized"),
    "mixed": ("mixed", {}, "divides the samples by class, but labels of this source are masks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_know_masks_is_refused(opened, name):
    scenario, options, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        opened(scenario, **options)


def test_every_scenario_that_takes_masks_moves_them():
    """Only scenarios whose operations know masks say so."""
    assert {name for name in SCENARIOS if SCENARIOS[name].of_masks} == {"rotated", "composed"}


def test_arrays_of_masks():
    """Bytes with 255, or numbers with -100, where pixels are ignored; other values are refused."""
    x = np.zeros((4, 1, 2, 2), np.uint8)
    for kind, void in ((np.uint8, 255), (np.int64, -100)):
        y = np.array([[[0, 1], [void, 0]]] * 4, kind)
        made = pool_of((x, any_labels_of(y, "y")), None, "y")
        check_pool(made, "y")
        assert made.num_classes == 2
        assert made.classes.tolist() == [0, 1]
    assert any_labels_of(np.ones((4, 2, 2), bool), "y").dtype == np.uint8
    with pytest.raises(UserError, match="y = -3: classes of pixels must be whole numbers from 0"):
        any_labels_of(np.full((4, 2, 2), -3), "y")
    with pytest.raises(UserError, match=r"labels = \[4, 3, 2\]: masks for samples of shape \[1, 2, 2\]"):
        check_pool(Pool(x, np.zeros((4, 3, 2), np.uint8), 4, 2), "s")
    with pytest.raises(UserError, match="give both in one type"):
        pool_of((x, y), (x, y.astype(np.uint8)), "y")
