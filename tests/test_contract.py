"""What every method of the catalogue must keep, on a federation of six clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import worlds
from cases import CASES, named
from numpy.testing import assert_allclose

from mpifl import config
from mpifl.algorithms import CATALOGUE, citation


def three_steps(name: str, options: dict[str, object], folder: Path, participation: float) -> worlds.Run:
    """Take three steps; every call of a hook is checked to leave its arguments alone."""
    return worlds.run(CATALOGUE[name](**options), worlds.Tiny(), folder, participation=participation)


@pytest.fixture(scope="module", params=[1.0, 0.5], ids=["everyone", "half"])
def participation(request) -> float:
    """Everyone takes part, or half of the clients."""
    return request.param


@pytest.fixture(scope="module", params=CASES, ids=named)
def case(request) -> tuple[str, dict[str, object]]:
    """A method and its options."""
    return request.param


@pytest.fixture(scope="module")
def done(case, participation, tmp_path_factory) -> worlds.Run:
    """Three steps of a method."""
    return three_steps(*case, tmp_path_factory.mktemp("done"), participation)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> np.ndarray:
    """Return the losses [N] of the common initial model."""
    run = worlds.run(CATALOGUE["fedavg"](), worlds.Tiny(), tmp_path_factory.mktemp("start"), steps=0)
    return run.scores["loss"]


def test_three_steps_are_finite_and_learn_something(done, untrained):
    for scores in done.scores.values():
        assert scores.shape == (6,)
        assert np.isfinite(scores).all()
    for table in done.server.tables.values():
        assert table.dtype == torch.float32
        assert torch.isfinite(table).all()
    for name, value in done.server.memo.items():
        assert isinstance(value, np.ndarray), f"memo {name}"
        assert value.dtype.kind in "biuf", f"memo {name}: a digest needs numbers"
    assert done.server.version == 3
    assert done.scores["loss"].mean() < untrained.mean()


def test_the_same_seed_gives_the_same_bits(done, case, participation, tmp_path):
    again = three_steps(*case, tmp_path, participation)
    worlds.same(worlds.state_of(done.server), worlds.state_of(again.server), "two runs of one seed differ")
    worlds.same(dict(done.scores), dict(again.scores), "two runs of one seed differ")


def test_rows_are_convex_mixtures_or_old_rows_with_updates_added(done):
    assert len(done.plans) == 3
    for mixing in (m for plan in done.plans for m in plan.mixings):
        kept = mixing.row_sums() - mixing.weights.sum(1)
        sums = np.where(np.isclose(kept, 1.0), 1.0, mixing.row_sums())
        assert_allclose(sums, 1.0, rtol=0, atol=1e-12, err_msg=f"{mixing.of} into {mixing.into}")


def test_every_client_has_a_row_and_a_cluster(done):
    labels = done.stepper.algorithm.labels(done.server)
    for numbers in (labels, done.server.assign):
        assert numbers.shape == (6,)
        assert np.issubdtype(numbers.dtype, np.integer)


def test_what_is_sent_is_booked_for_those_who_take_part(done):
    ledger, needs = done.stepper.ledger, done.stepper.algorithm.needs
    assert ledger.up.sum() == ledger.total("up")
    assert ledger.down.sum() == ledger.total("down")
    never = np.setdiff1d(np.arange(6), np.concatenate([notes.client for notes in done.notes]))
    if not needs.fingerprint:
        assert_allclose(ledger.up[never], 0)
    if done.server.tables and any(plan.mixings for plan in done.plans):
        assert (np.delete(ledger.up, never) > 0).all()


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_says_where_it_comes_from(name):
    cls = CATALOGUE[name]
    entry = citation(cls)
    assert entry.split("{")[1].startswith(f"{cls.paper},\n")
    assert all(f"  {name} = {{" in entry for name in ("author", "title", "year"))
    assert entry.endswith("\n}")
    assert (cls.__doc__ or "").strip()
    parents = [name for name, other in CATALOGUE.items() if other is not cls and issubclass(cls, other)]
    assert not parents, "abstract or final: methods share functions, not parents"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_is_configured_by_its_name(name):
    tree = {"algorithm": {"name": name}, "model": {"name": "mlp"}}
    built = config.build(config.Config, tree)
    assert built.algorithm == CATALOGUE[name]()
    again = config.build(config.Config, config.to_tree(built))
    assert again == built
