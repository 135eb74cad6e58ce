"""Drift: what clients hold at each step, and how it is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support.each import for_each
from support.runs import CONFIG
from torch.testing import assert_close

from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.core.types import Server
from mpifl.data import SCENARIOS, DataConfig, Drift, PoolFederation, open_federation
from mpifl.data.drift import KINDS
from mpifl.results.reader import load, read_rows

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
    """Two of six clients, one of each group, change places at step 3: each holds images of the others."""
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
    found = opened(Drift("label", at=(2, 4, 6), share=0.34, recurring=True))
    for k in moved(found):
        new = [found.client(k, found.data_set(k, 0, step)).train for step in (2, 6)]
        assert_close(new[0].x, new[1].x)
    found = opened(Drift("concept", at=(2, 4), share=0.34))
    first = [k for k in moved(found) if found.data_set(k, 0, 2)]
    second = [k for k in moved(found) if found.data_set(k, 0, 4) and k not in first]
    assert len(first) == len(second) == 2


def test_gradual_drift_spreads_over_steps():
    """Of 20 clients ten change, at steps 5 to 9, not all at one."""
    found = opened(Drift("input", at=(5,), share=0.5, gradual=4), clients=20, angles=(0.0, 90.0))
    steps = range(1, 12)
    since = sorted(next(s for s in steps if found.data_set(k, 0, s)) for k in moved(found))
    assert len(since) == 10
    assert 5 <= since[0] < since[-1] <= 9
    assert len({*since}) > 2


def test_gradual_drift_by_time_takes_each_client_at_a_time_of_its_own():
    """Ten of 20 clients change within 4 s from 5 s on. Step s begins at s seconds: a client whose time is
    6.3 s changes with step 7. Before a step has begun, nobody knows who changes with it.
    """
    drift = Drift("input", at_s=(5.0,), share=0.5, gradual_s=4.0)
    found = opened(drift, clients=20, angles=(0.0, 90.0))
    own = {k: 5.0 + found.data_sets[k][1].wait for k in moved(found)}
    assert len({*own.values()}) == len(own) == 10
    assert 5 <= min(own.values()) < max(own.values()) < 9
    for step in range(1, 12):
        while found.change_is_due(float(step)):
            found.settle_changes([*found.settled, step])
        changed = {k for k in own if found.data_set(k, 0, step)}
        assert changed == {k for k, seconds in own.items() if seconds <= step}
    assert [*found.change_steps] == [5]
    assert {k: next(s for s in range(12) if found.data_set(k, 0, s)) for k in own} == {
        k: int(np.ceil(seconds)) for k, seconds in own.items()
    }


@for_each(
    ("options", "key_", "scenario"),
    [
        ({"kind": "swap"}, "at", None),
        ({"kind": "swap", "at": (1,)}, "at", None),
        ({"kind": "swap", "at": (5, 5)}, "at", None),
        ({"kind": "input", "at": (5, 7), "gradual": 2}, "at", None),
        ({"gradual_s": 2.0}, "gradual_s", None),
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


def run(folder, *options: str):
    """Run the small configuration and return its folder."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(folder / "cache")]
    assert cli.main(["run", str(CONFIG), "--quiet", "--evaluation.every", "1", *place, *options]) == 0
    return folder / "tiny-x"


def test_the_oracle_has_the_true_groups_of_every_step(tmp_path):
    """Eight clients in two groups, of which four change places at steps 2 and 3, and back."""
    drift = "{kind: swap, at: [2, 3], share: 0.5, recurring: true}"
    done = run(tmp_path, "--algorithm", "oracle", "--rounds", "4", "--drift", drift)
    rows = [(row["ari"], row["num_clusters"]) for row in read_rows(done / "metrics.csv")]
    assert rows == [("1.0", "2")] * 4
    scores = [float(row["accuracy_mean"]) for row in read_rows(done / "metrics.csv")]
    lost = [float(row["score_lost"]) for row in read_rows(done / "metrics.csv")]
    at_first = max(0.0, scores[0] - scores[1])
    last = sum(max(0.0, scores[1] - score) for score in scores[2:])
    assert lost == pytest.approx([0.0, at_first, at_first + max(0.0, scores[1] - scores[2]), at_first + last])
    groups = read_rows(done / "groups.csv")
    assert [row["since"] for row in groups] == ["0"] * 8 + ["2"] * 4 + ["3"] * 4
    first = {row["client"]: row["group"] for row in groups[:8]}
    assert all(first[row["client"]] == row["group"] for row in groups[12:])
    assert all(first[row["client"]] != row["group"] for row in groups[8:12])


def test_a_client_that_changes_group_reads_the_oracles_model_of_its_new_group():
    """Groups (0, 0, 1, 1) until step 3, from which on clients 1 and 2 have changed places; rows 0 and 1."""
    before, after = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    state = {"groups": before, "since": np.array([3]), "later": after[None]}
    server = Server({"model": torch.zeros(2, 1)}, before, state, version=1)
    method = CATALOGUE["oracle"]()
    assert [method.reads(server, k)["model"] for k in range(4)] == [(0,), (0,), (1,), (1,)]
    server = Server({"model": torch.zeros(2, 1)}, before, state, version=2)
    assert [method.reads(server, k)["model"] for k in range(4)] == [(0,), (1,), (0,), (1,)]
    assert [method.serves(server, k)["model"] for k in range(4)] == [(0,), (0,), (1,), (1,)]


def test_a_change_at_a_time_holds_from_the_step_that_begins_then(tmp_path):
    """Rounds of 1 s: the change at 1.5 s holds from round 3 on, which begins at 2 s; as does one at 2 s."""
    options = ("--algorithm", "{name: ifca, num_clusters: 2}", "--rounds", "5", "--evaluation.every", "1")
    found = [
        run(tmp_path / name, *options, "--drift", f"{{kind: swap, share: 0.5, {when}}}")
        for name, when in (("step", "at: [3]"), ("between", "at_s: [1.5]"), ("sharp", "at_s: [2]"))
    ]
    for name in ("model.safetensors", "groups.csv"):
        of = [(folder / name).read_bytes() for folder in found]
        assert of[1] == of[0]
        assert of[2] == of[0]
    told = [load(folder).summary["drift"] for folder in found]
    assert told[0] == told[1] == told[2]
    (change,) = told[0]
    assert change["begins_s"] == 2.0
    assert change["recovered_after_s"] == change["recovered_after"]
    last = read_rows(found[1] / "metrics.csv")[-1]
    assert last["recovery_seconds"] == last["recovery_steps"]


def test_in_an_asynchronous_run_a_change_at_a_time_is_one_at_the_step_that_begins_next(tmp_path):
    """The third of six steps has begun, and its first upload has not arrived: visits of the fourth change."""
    options = (
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", "--delay.name", "exponential"),
        *("--rounds", "6", "--evaluation.every", "1"),
    )
    plain = read_rows(run(tmp_path / "plain", *options) / "events.csv")
    times = [[float(r["time"]) for r in plain if int(r["arrival_version"]) == v] for v in range(6)]
    middle = (max(times[1]) + min(times[2])) / 2
    assert max(times[1]) < middle < min(times[2]) < max(times[2])
    folders = [
        run(tmp_path / name, *options, "--drift", f"{{kind: concept, share: 1, {when}}}")
        for name, when in (("step", "at: [4]"), ("time", f"at_s: [{middle}]"))
    ]
    for folder in folders:
        (change,) = load(folder).summary["drift"]
        assert (change["step"], change["begins_s"]) == (4, max(times[2]))
        row = next(r for r in read_rows(folder / "metrics.csv") if int(r["round"]) == 4)
        back = change["recovered_after"]
        at = next((r for r in read_rows(folder / "metrics.csv") if back and int(r["round"]) == 4 + back), row)
        since = float(at["virtual_seconds"]) - max(times[2]) if back else back
        assert change["recovered_after_s"] == (None if since is None else pytest.approx(since))
    models = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert models[0] == models[1] != (tmp_path / "plain" / "tiny-x" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["swap", "merge"])
def test_the_oracle_knows_groups_that_change_at_a_time_as_those_that_change_at_a_step(kind, tmp_path):
    """Rounds of 1 s: 1.5 s is before round 3 and 3.2 s before round 5. Nothing of the run differs."""
    share = ", share: 0.5" if kind == "swap" else ""
    options = ("--algorithm", "oracle", "--participation", "0.5", "--rounds", "6")
    times = ("at: [3, 5]", "at_s: [1.5, 3.2]") if kind == "swap" else ("at: [3]", "at_s: [1.5]")
    found = [
        run(tmp_path / str(i), *options, "--drift", f"{{kind: {kind}, {when}{share}}}")
        for i, when in enumerate(times)
    ]
    for name in ("model.safetensors", "groups.csv", "clients.csv", "clusters.csv"):
        assert (found[0] / name).read_bytes() == (found[1] / name).read_bytes()
    assert load(found[0]).summary["digest"] == load(found[1]).summary["digest"]


def test_the_oracle_follows_clients_that_change_one_by_one(tmp_path):
    """Four of eight clients change places at times of their own; clusters are the groups all the time."""
    options = ("--algorithm", "oracle", "--rounds", "8", "--evaluation.every", "1")
    done = run(tmp_path, *options, "--drift", "{kind: swap, at_s: [1.5], gradual_s: 4, share: 0.5}")
    assert [row["ari"] for row in read_rows(done / "metrics.csv")] == ["1.0"] * 8
    since = [int(row["since"]) for row in read_rows(done / "groups.csv")]
    assert since[:8] == [0] * 8
    assert len(since) == 12
    assert 3 <= min(since[8:]) < max(since[8:]) <= 7


def test_under_arrivals_the_oracle_knows_the_groups_of_the_step_that_begins_next(tmp_path):
    """At the same step as with `at`, where the oracle knows all groups before the run."""
    options = (
        *("--algorithm", "oracle", "--policy", "{name: buffer, size: 2}", "--delay.name", "exponential"),
        *("--rounds", "8", "--evaluation.every", "1"),
    )
    plain = read_rows(run(tmp_path / "plain", *options) / "events.csv")
    times = [max(float(r["time"]) for r in plain if int(r["arrival_version"]) == v) for v in (1, 2)]
    middle = sum(times) / 2
    found = [
        run(tmp_path / str(i), *options, "--drift", f"{{kind: swap, share: 0.5, {when}}}")
        for i, when in enumerate(("at: [4]", f"at_s: [{middle}]"))
    ]
    assert load(found[0]).summary["digest"] == load(found[1]).summary["digest"]


@pytest.mark.parametrize(("times", "reached"), [("1, 50", 1), ("60, 70", 0)])
def test_changes_for_which_the_run_is_too_short_are_said(times, reached, tmp_path, capsys):
    done = run(tmp_path, "--rounds", "2", "--drift", f"{{kind: swap, at_s: [{times}]}}")
    assert len(load(done).summary["drift"]) == reached
    said = [line for line in capsys.readouterr().err.splitlines() if "drift.at_s" in line]
    assert len(said) == 1
    assert all((f"{time}.0" in said[0]) == (time != "1") for time in times.split(", "))


def test_a_visit_under_way_keeps_the_data_of_the_step_in_which_it_began(tmp_path, monkeypatch):
    """In an asynchronous run the data of a visit are those of the step after the version that it read."""
    asked = {}
    one, several = PoolFederation.data_set, PoolFederation.data_sets_of

    def data_set(self, k, visit, step):
        asked.setdefault((k, visit), step)
        return one(self, k, visit, step)

    def data_sets_of(self, clients, visits, step):
        for pair in zip(clients.tolist(), visits.tolist(), strict=True):
            asked.setdefault(pair, step)
        return several(self, clients, visits, step)

    monkeypatch.setattr(PoolFederation, "data_set", data_set)
    monkeypatch.setattr(PoolFederation, "data_sets_of", data_sets_of)
    done = run(
        tmp_path,
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", "--delay.name", "exponential"),
        *("--rounds", "6", "--drift", "{kind: concept, at: [3], share: 0.5}", "--evaluation.every", "0"),
    )
    arrivals = read_rows(done / "events.csv")
    began = {(int(row["client"]), int(row["visit"])): int(row["read_version"]) + 1 for row in arrivals}
    assert {key: asked[key] for key in began} == began
    assert any(int(row["staleness"]) for row in arrivals)
