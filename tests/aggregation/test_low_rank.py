"""The best adapters for a sum of products: by hand, against dense matrices, and in whole mixings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpifl.aggregation.adapters import ProductMixer
from mpifl.aggregation.low_rank import AdapterColumns, nearest
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.single import Single
from mpifl.core.parameters import Layout, VectorParts, flatten, take
from mpifl.core.plan import Mixing
from mpifl.core.rng import key
from mpifl.models import LoRA, adapters_of
from mpifl.models.lora import adapt

NOTHING = torch.zeros(0, 2)


def drawn(*shape: int, of: int = 0) -> torch.Tensor:
    return torch.from_numpy(key(0, "low rank", of).numpy().normal(size=shape)).float()


def dense_nearest(product: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the best approximation of a matrix by one of a rank, from its own decomposition."""
    u, s, vh = torch.linalg.svd(product.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def test_the_mean_of_two_products_of_rank_one_by_hand():
    """B A = diag(1, 0) with weight 3/4, diag(0, 1) with weight 1/4: the mean is diag(3/4, 1/4), of rank 2.

    Its best approximation of rank 1 is diag(3/4, 0); it lacks a square of 1/16 of 9/16 + 1/16. The mean
    factors are (3/4, 1/4) each, and their product [[9, 3], [3, 1]] / 16 is none of these.
    """
    left, right = torch.diag(torch.tensor([0.75, 0.25])), torch.eye(2)
    two, one = nearest(left, right, 2, NOTHING), nearest(left, right, 1, NOTHING)
    assert_close(two.b @ two.a, torch.diag(torch.tensor([0.75, 0.25])).double())
    assert_close(one.b @ one.a, torch.diag(torch.tensor([0.75, 0.0])).double())
    assert (one.lost, one.total) == pytest.approx((1 / 16, 10 / 16))
    assert two.lost == 0
    assert_close(two.a, torch.eye(2).double())
    factors = torch.tensor([[0.75], [0.25]]) @ torch.tensor([[0.75, 0.25]])
    assert_close(factors, torch.tensor([[9.0, 3.0], [3.0, 1.0]]) / 16)


@pytest.mark.parametrize(("out", "columns", "inner"), [(7, 5, 3), (4, 9, 20), (3, 30, 2)])
def test_every_truncation_is_the_best_one_of_the_dense_product(out, columns, inner):
    left, right = drawn(out, inner), drawn(inner, columns, of=1)
    product, rank = left.double() @ right.double(), min(out, columns, inner)
    found = nearest(left, right, rank, NOTHING)
    for s in range(1, rank + 1):
        assert_close(found.b[:, :s] @ found.a[:s], dense_nearest(product, s))
    assert_close(found.a @ found.a.T, torch.eye(rank).double())
    assert (found.b.square().sum(0).diff() <= 0).all()
    few = nearest(left, right, 1, NOTHING)
    lost = (product - dense_nearest(product, 1)).square().sum()
    assert (few.lost, few.total) == pytest.approx((float(lost), float(product.square().sum())))


def test_signs_do_not_depend_on_those_of_the_factors():
    left, right = drawn(6, 3), drawn(3, 5, of=1)
    flipped = torch.tensor([1.0, -1.0, -1.0])
    one, other = (nearest(left * f, right * f[:, None], 3, NOTHING) for f in (torch.ones(3), flipped))
    assert_close(one.a, other.a)
    assert (one.a.gather(1, one.a.abs().argmax(1, keepdim=True)) > 0).all()


def test_directions_without_a_singular_value_continue_the_old_ones():
    """A product of rank 1 in rank 3: the others of B are 0, those of A come from the old A."""
    left, right, before = drawn(6, 1), drawn(1, 5, of=1), drawn(3, 5, of=2)
    found = nearest(left, right, 3, before)
    assert_close(found.b @ found.a, left.double() @ right.double())
    assert not found.b[:, 1:].any()
    assert_close(found.a @ found.a.T, torch.eye(3).double())
    planes = [
        torch.linalg.matrix_rank(torch.cat([right, before[:2], a])) for a in (found.a[1:2], drawn(1, 5, of=3))
    ]
    assert planes == [3, 4]
    nothing = nearest(torch.zeros(6, 2), drawn(2, 5), 3, before)
    assert not nothing.b.any()
    assert_close(nothing.a @ nothing.a.T, torch.eye(3).double())


# -- mixings -------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """A linear layer, a convolution, a layer that is trained whole, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv, self.head = nn.Linear(5, 4), nn.Conv2d(2, 3, 2), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)


def adapted(rank: int) -> tuple[nn.Module, AdapterColumns]:
    net = Several()
    net.frozen = adapt(net, LoRA(rank=rank, train=("head", "norm")))
    layout = Layout.of(net)
    return net, AdapterColumns(layout, [*adapters_of(net)], VectorParts(layout))


def products(columns: AdapterColumns, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the products B A [n, out, in] of the adapters of some models [n, d]."""
    pairs = [f.take(rows.double()) for f in columns.factors("model", rows.shape[1])]
    return [b @ a for a, b in pairs]


def mixed(columns: AdapterColumns, old: torch.Tensor, uploads: torch.Tensor, mixing: Mixing):
    """Return the table after a mixing of products, and its mixer."""
    tables = Tables(Single())
    tables.publish({"model": old})
    product = ProductMixer(Mixer(Single(), tables), columns)
    largest = uploads.abs().amax(1).double().numpy()
    new = product.mix(
        [mixing], lambda name: (largest, np.zeros(len(uploads), np.int64)), {"model": list(uploads)}
    )
    return new["model"], product


@pytest.mark.parametrize("rank", [1, 3])
def test_rows_get_the_best_adapters_for_the_mean_products_and_the_means_of_all_else(rank):
    """Row 0 keeps a third of itself and of row 1, row 1 is of two uploads, row 2 is a copy of row 1."""
    net, columns = adapted(rank)
    d = len(flatten(net))
    old, uploads = drawn(2, d), drawn(3, d, of=1)
    weights = np.array([[0.1, 0.0, 7 / 30], [0.0, 0.6, 0.4], [0.0, 0.0, 0.0]])
    keep = np.array([[1 / 3, 1 / 3], [0.0, 0.0], [0.0, 1.0]])
    new, mixer = mixed(columns, old, uploads, Mixing(weights, keep))
    everyone, all_weights = torch.cat([uploads, old]), torch.from_numpy(np.hstack([weights, keep]))
    lost = total = 0.0
    for each, found in zip(products(columns, everyone), products(columns, new), strict=True):
        wanted = torch.einsum("km,moi->koi", all_weights, each)
        for k in (0, 1):
            best = dense_nearest(wanted[k], rank)
            assert_close(found[k], best, atol=1e-5, rtol=1e-5)
            lost += float((wanted[k] - best).square().sum())
            total += float(wanted[k].square().sum())
    assert (mixer.lost, mixer.total) == pytest.approx((lost, total), rel=1e-5)
    assert torch.equal(new[2], old[1])
    whole = columns.beyond("model", d, 0)
    assert whole is not None
    assert int(whole.sum()) == rank * (5 + 4 + 2 * 4 + 3 + 4 + 2) - rank * (4 + 2)  # no adapter of the head
    means = all_weights @ everyone.double()
    assert_close(new[:, ~whole], means[:, ~whole].float(), atol=1e-5, rtol=1e-5)


def test_one_model_is_itself_up_to_the_choice_of_its_factors():
    net, columns = adapted(3)
    upload = drawn(1, len(flatten(net)))
    new, mixer = mixed(columns, torch.zeros_like(upload), upload, Mixing(np.ones((1, 1))))
    for before, after in zip(products(columns, upload), products(columns, new), strict=True):
        assert_close(after, before, atol=1e-6, rtol=1e-5)
    assert mixer.lost < 1e-12 * mixer.total
    factors = take(upload, tuple(f.a for f in columns.factors("model", upload.shape[1])))
    assert not torch.allclose(factors, take(new, tuple(f.a for f in columns.factors("model", new.shape[1]))))


def test_vectors_that_hold_a_part_of_the_model_hold_its_adapters():
    net = Several()
    net.frozen = adapt(net, LoRA(rank=2, train=()))
    layout = Layout.of(net)
    columns = AdapterColumns(
        layout, [*adapters_of(net)], VectorParts(layout, {"body": "body", "head": "head"})
    )
    sizes = {name: sum(s.stop - s.start for s in layout.part(name)) for name in ("body", "head")}
    assert sizes == {"body": 2 * (5 + 4 + 8 + 3), "head": 2 * (4 + 2)}
    model = drawn(1, layout.size)
    parts = [take(model, layout.part(name)) for name in ("body", "head")]
    for name, part in zip(sizes, parts, strict=True):
        found = columns.factors(name, sizes[name])
        inside = [
            f
            for f, layer in zip(columns.factors("model", layout.size), columns.layers, strict=True)
            if (layer == "head") == (name == "head")
        ]
        assert len(found) == len(inside)
        for f, whole in zip(found, inside, strict=True):
            for own, theirs in zip(f.take(part), whole.take(model), strict=True):
                assert torch.equal(own, theirs)
