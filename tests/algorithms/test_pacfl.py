"""PACFL by hand: signatures, angles, thresholds, and newcomers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import apply_plan
from mpifl.core.federation import ClientData, Split


def bases(*angles: float) -> np.ndarray:
    """Return one unit vector of the plane for each angle, in degrees: bases [n, 2, 1]."""
    a = np.deg2rad(angles)
    return np.stack([np.cos(a), np.sin(a)], axis=1)[:, :, None].astype(np.float32)


def test_pacfl_merges_while_clusters_are_within_the_threshold():
    """Lines at 0, 10 and 40 degrees. {0, 10} are 10 apart, and 35 = (40 + 30) / 2 from 40."""
    for threshold, labels in ((5, [0, 1, 2]), (12, [0, 0, 1]), (36, [0, 0, 0])):
        fingerprints = byhand.notes([1, 3, 2], basis=bases(0, 10, 40))
        server = CATALOGUE["pacfl"](threshold=threshold).setup(
            byhand.problem([1, 3, 2]), fingerprints, byhand.KEY
        )
        assert_array_equal(server.assign, labels)
        assert len(server.tables["model"]) == max(labels) + 2


def test_newcomers_of_pacfl_join_or_found_a_cluster():
    """0 and 10 degrees know each other; a newcomer at 5 joins them, one at 80 founds cluster 1."""
    method, fingerprints = CATALOGUE["pacfl"](threshold=12), byhand.notes([1, 1], basis=bases(0, 10))
    server = method.setup(byhand.problem([1] * 4), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 1])  # new_clients use the initial model
    plan = method.assign_new_clients(server, byhand.notes([1, 1], [2, 3], basis=bases(5, 80)))
    assert_array_equal(plan.assign, [0, 0, 0, 1])
    assert_array_equal(
        plan.mixings[0].keep, [[1, 0], [0, 1], [0, 1]]
    )  # the new row starts from the initial one


@pytest.mark.parametrize("angle", ["columns", "smallest", "sum"])
def test_pacfl_finds_again_what_it_would_find_if_it_measured_all_angles_again(angle):
    """Three looks of four of twelve clients: a method that remembers angles, and one for each look."""
    random, N = np.random.default_rng(3), 12
    drawn = [np.linalg.qr(random.normal(size=(5, 2)))[0].astype(np.float32) for _ in range(24)]
    first, *looks = (np.stack(drawn[at : at + n]) for at, n in ((0, 12), (12, 4), (16, 4), (20, 4)))
    kept = CATALOGUE["pacfl"](threshold=25, angle=angle)
    server = kept.setup(byhand.problem([1] * N), byhand.notes([1] * N, basis=first), byhand.KEY)
    for i, look in enumerate(looks):
        sent = byhand.notes([1] * 4, [i, 3, 4 + i, 11], basis=look)
        plan = kept.assign_new_clients(server, sent)
        other = CATALOGUE["pacfl"](threshold=25, angle=angle).assign_new_clients(server, sent)
        assert_array_equal(plan.assign, other.assign)
        server = apply_plan(server, plan, {"model": torch.zeros(plan.assign.max() + 2, 1)})
        bases_ = server.algorithm_state["bases"]
        remembered = kept._known.among(np.arange(N), bases_, kept._item(bases_), bases_, np.zeros(0, int))
        assert_array_equal(remembered, kept.angles(bases_))


def signature(train: Split, val: Split, **options: object) -> np.ndarray:
    """Return the absolute entries of what a client of PACFL sends; columns without a number are left out."""

    class Client(byhand.Quadratic):
        data = ClientData(train, val, Split(99 * torch.ones(1, 1, 1, 2), torch.zeros(1).long()))

    client = Client([0.0])
    client.layout = byhand.FLAT
    U = CATALOGUE["pacfl"](**options).fingerprint(client, {}, byhand.KEY).notes["basis"]
    return np.abs(U[:, ~np.isnan(U[0])])


PLANES = Split(torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])[:, None, None], torch.tensor([0, 0, 1]))
ACROSS = Split(torch.tensor([[0.0, 5.0]])[:, None, None], torch.tensor([0]))


def test_the_signature_of_pacfl_spans_the_images_of_each_class():
    """Class 0 has images (2, 0) and (0, 1), class 1 only (3, 3): u = (1, 0) and (1, 1) / sqrt(2), up to
    sign. Validation images play no part; under `emdcfl` they are all.
    """
    assert_allclose(signature(PLANES, ACROSS, p=1), [[1, 0.5**0.5], [0, 0.5**0.5]], atol=1e-6)
    assert_allclose(signature(PLANES, ACROSS, p=1, variant="emdcfl"), [[0], [1]], atol=1e-6)


def test_pacfl_under_emdcfl_takes_each_channel_for_an_image():
    """An image of channels (1, 0) and (0, 2): the first direction is (0, 1); as one image it would have four
    numbers.
    """
    two = Split(torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]]]]), torch.tensor([0]))
    assert_allclose(signature(PLANES, two, p=1, variant="emdcfl"), [[0], [1]], atol=1e-6)
    assert_allclose(signature(two, PLANES, p=1).shape, (4, 1))


def line(*images: list[int], dtype: torch.dtype = torch.float32) -> Split:
    """Return images of two pixels, all of class 0."""
    return Split(torch.tensor(images, dtype=dtype)[:, None, None], torch.zeros(len(images)))


class Stored(byhand.Quadratic):
    """A client whose stored images point elsewhere than its tensors."""

    data = ClientData(line([1, 0], [1, 0]), line([3, 3]), line([0, 0]))

    def __init__(self) -> None:
        super().__init__([0.0])
        self.layout = byhand.FLAT

    def pixels(self, split: str = "train") -> Split:
        """Return the images as they are stored."""
        stored = {"train": ([255, 255], [200, 200]), "val": ([0, 200],)}
        return line(*stored[split], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("options", "direction"),
    [
        ({}, [0.5**0.5, 0.5**0.5]),
        ({"pixels": "normalised"}, [1.0, 0.0]),
        ({"variant": "emdcfl"}, [0.5**0.5, 0.5**0.5]),
        ({"variant": "emdcfl", "pixels": "raw"}, [0.0, 1.0]),
    ],
)
def test_pacfl_sees_stored_pixels_and_under_emdcfl_normalised_ones(options, direction):
    """Training images (255, 255), (200, 200), normalised (1, 0); validation (0, 200), normalised (3, 3)."""
    U = CATALOGUE["pacfl"](p=1, **options).fingerprint(Stored(), {}, byhand.KEY).notes["basis"]
    assert_allclose(np.abs(U[:, 0]), direction, atol=1e-6)


def test_pacfls_budget_is_shared_among_the_classes():
    """Four of six images are of class 0: of three vectors it has two, class 1 one. By p each has one."""
    x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 1.0], [3.0, 3.0], [3.0, 3.0]])
    both = signature(Split(x[:, None, None], torch.tensor([0, 0, 0, 0, 1, 1])), ACROSS, p=1, budget=3)
    assert_allclose(both, [[1, 0, 0.5**0.5], [0, 1, 0.5**0.5]], atol=1e-6)


@pytest.mark.parametrize(("angle", "labels"), [("columns", [0, 1]), ("smallest", [0, 0])])
def test_pacfl_measures_the_angle_that_is_asked_for(angle, labels):
    """Vectors at 0 and 175 degrees: 175 apart as columns, 5 as lines."""
    fingerprints = byhand.notes([1, 1], basis=bases(0, 175))
    server = CATALOGUE["pacfl"](threshold=12, angle=angle).setup(
        byhand.problem([1, 1]), fingerprints, byhand.KEY
    )
    assert_array_equal(server.assign, labels)
