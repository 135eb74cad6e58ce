"""Drift: what clients hold at each step, and how it is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, DataConfig, Drift, open_federation
from mpifl.data.drift import KINDS

ROTATED = {"angles": (0.0, 90.0), "clients": 6, "validation": 0.2}


def opened(drift=None, scenario="rotated", seed=0, **options):
    """Return a federation of digits, under drift where one is given."""
    made = SCENARIOS[scenario](**(options or ROTATED))
    found = open_federation(DataConfig(scenario=made), seed)
    if drift is not None:
        found.drift(drift, key(seed, "drift"))
    return found


def moved(federation) -> list[int]:
    """Return the clients that hold more than one data set."""
    return [k for k, sets in enumerate(federation.data_sets) if len(sets) > 1]


def rows(split) -> set[bytes]:
    """Return the samples of a split, as bytes."""
    return {x.numpy().tobytes() for x in split.x}


def test_swapped_clients_hold_samples_of_the_other_group():
    """Two of six clients, one of each group, change places at step 3: their images are those of the others."""
    plain, found = opened(), opened(Drift("swap", at=(3,), share=0.34))
    a, b = moved(found)
    assert {int(plain.groups[a]), int(plain.groups[b])} == {0, 1}
    expected = plain.groups.copy()
    expected[[a, b]] = expected[[b, a]]
    assert_array_equal(found.groups_at(2), plain.groups)
    assert_array_equal(found.groups_at(3), expected)
    for k in (a, b):
        assert [found.data_set(k, visit=7, step=s) for s in (1, 2, 3, 9)] == [0, 0, 1, 1]
        peers = np.flatnonzero(plain.groups == expected[k])
        for split in ("train", "val", "test"):
            new = getattr(found.client(k, 1), split)
            stock = set().union(*(rows(getattr(plain.client(int(j)), split)) for j in peers))
            assert rows(new) <= stock
            assert len(new) == len(getattr(plain.client(k), split))
        assert_close(found.client(k, 0).train.x, plain.client(k).train.x)


def test_concepts_permute_labels_alone_and_inputs_leave_them():
    """Of a client whose concept changes, each class gets one new name; mirrored images keep their labels."""
    plain = opened()
    found = opened(Drift("concept", at=(2,), share=0.5))
    for k in moved(found):
        old, new = plain.client(k).train, found.client(k, 1).train
        assert_close(new.x, old.x)
        names = {(int(a), int(b)) for a, b in zip(old.y, new.y, strict=True)}
        assert len(names) == len({a for a, _ in names}) == len({b for _, b in names})
        assert any(a != b for a, b in names)
    found = opened(Drift("input", at=(2,), share=0.5))
    assert len(moved(found)) == 3
    for k in moved(found):
        old, new = plain.client(k).test, found.client(k, 1).test
        assert_close(new.x, old.x.flip(-1))
        assert_close(new.y, old.y)


def test_classes_are_mixed_anew_within_a_group():
    """With alpha = 0.01 nearly all samples of a client are of one class; numbers of samples stay."""
    plain, found = opened(), opened(Drift("label", at=(2,), share=0.5, alpha=0.01))
    assert_array_equal(found.groups_at(9), plain.groups)
    assert not found.regroups
    for k in moved(found):
        counts = np.bincount(found.client(k, 1).train.y)
        assert counts.sum() == len(plain.client(k).train)
        assert counts.max() > 2 * np.bincount(plain.client(k).train.y).max()


@pytest.mark.parametrize(("kind", "groups"), [("arrival", 3), ("split", 3), ("merge", 1)])
def test_groups_appear_and_vanish(kind, groups):
    """Of two groups, a third appears (of one group alone under `split`), or one is left."""
    plain, found = opened(), opened(Drift(kind, at=(2,)))
    now = found.groups_at(2)
    assert len(np.unique(now)) == groups
    assert found.regroups == [2]
    new = np.flatnonzero(now == 2)
    if kind == "arrival":
        same = {found.client(int(k), 1).test.y.numpy().tobytes() for k in new}
        assert len(new) == 1
        assert same
    if kind == "split":
        assert len(np.unique(plain.groups[new])) == 1


def test_changes_come_back_and_come_again():
    """Recurring: data sets 0, 1, 0, 1 at steps 1, 2, 4, 6; without it, two changes concern other clients."""
    found = opened(Drift("concept", at=(2, 4, 6), share=0.34, recurring=True))
    plain = opened()
    for k in moved(found):
        new = [found.client(k, found.data_set(k, 0, step)).train.y for step in (1, 2, 4, 6)]
        assert_close(new[0], plain.client(k).train.y)
        assert_close(new[2], new[0])
        assert_close(new[3], new[1])
        assert not torch.equal(new[0], new[1])
    assert_array_equal(found.groups_at(4), plain.groups)
    found = opened(Drift("concept", at=(2, 4), share=0.34))
    first = [k for k in moved(found) if found.data_set(k, 0, 2)]
    second = [k for k in moved(found) if found.data_set(k, 0, 4) and k not in first]
    assert len(first) == len(second) == 2


def test_gradual_drift_spreads_over_steps():
    """Of 20 clients ten change, at steps 5 to 9, not all at one."""
    found = opened(Drift("input", at=(5,), share=0.5, gradual=4), clients=20, angles=(0.0, 90.0))
    since = sorted(sets[1].since for sets in found.data_sets if len(sets) > 1)
    assert len(since) == 10
    assert 5 <= since[0] < since[-1] <= 9
    assert len({*since}) > 2


@pytest.mark.parametrize(
    ("options", "key_", "scenario"),
    [
        ({"kind": "swap"}, "at", None),
        ({"kind": "swap", "at": (1,)}, "at", None),
        ({"kind": "swap", "at": (5, 5)}, "at", None),
        ({"kind": "input", "at": (5, 7), "gradual": 2}, "at", None),
        ({"at": (5,)}, "at", None),
        ({"kind": "split", "at": (5,), "share": 0.5}, "share", None),
        ({"kind": "swap", "at": (5,), "alpha": 0.5}, "alpha", None),
        ({"kind": "swap", "at": (5,), "recurring": True}, "recurring", None),
        ({"kind": "swap", "at": (5,)}, "kind", ("dirichlet", {"alpha": 0.5})),
        ({"kind": "merge", "at": (5, 6)}, "kind", None),
        ({"kind": "input", "at": (5,)}, "kind", ("population", {"clients": 5})),
    ],
)
def test_what_cannot_be_done_is_refused(options, key_, scenario):
    """One message names the key."""
    with pytest.raises(UserError) as caught:
        opened(Drift(**options), *(scenario or ()) and (scenario[0],), **(scenario[1] if scenario else {}))
    assert caught.value.key.split(".")[-1] == key_


def test_every_kind_is_offered():
    """The kinds of the section are those that can be drawn."""
    from typing import get_args, get_type_hints

    kinds = [part for part in get_args(get_type_hints(Drift)["kind"]) if part is not type(None)]
    assert {*get_args(kinds[0])} == {*KINDS}


def test_ifca_follows_a_swap_and_the_oracle_reads_the_new_groups_row(tmp_path):
    """Under full participation both have the true groups again in the round of the swap."""
    drift = Drift("swap", at=(3,), share=0.34)
    for name, options in (("oracle", {}),):
        federation = opened(drift)
        context = toy.context_of(toy.config_of(CATALOGUE[name](**options), rounds=4, drift=drift), federation)
        assert context.problem.regrouped.keys() == {3}
