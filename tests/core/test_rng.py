"""Randomness by address."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support import toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.single import Single
from mpifl.core.rng import Key, key
from mpifl.experiment import loader
from mpifl.experiment.build import build
from mpifl.experiment.schema import EvaluationConfig, Seeds, SystemConfig
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy
from mpifl.simulation.availability import Availability
from mpifl.simulation.delays import Exponential, LogNormal, ShiftedExponential, Tiers, Uniform
from mpifl.simulation.network import Links, NetworkTiers
from mpifl.simulation.policies import Buffer, ClientDecides, DrawnStaleness, PartialWork
from mpifl.simulation.upload_triggers import PoissonRates
from mpifl.traffic.compression import Payload, RandomK

parts = st.lists(st.one_of(st.integers(0, 10**9), st.text("abcxyz", max_size=6)), max_size=4)


@given(st.integers(0, 2**31), parts)
def test_the_same_address_gives_the_same_draws(seed, address):
    a, b = key(seed, *address), key(seed).of(*address)
    assert a == b
    assert_array_equal(a.numpy().random(5), b.numpy().random(5))
    torch.testing.assert_close(
        torch.rand(5, generator=a.torch()), torch.rand(5, generator=b.torch()), rtol=0, atol=0
    )


@given(parts, parts)
def test_different_addresses_give_different_draws(one, other):
    a, b = key(0, *one), key(0, *other)
    assert (a.entropy == b.entropy) == (a.path == b.path)
    if a.path != b.path:
        assert (a.numpy().random(4) != b.numpy().random(4)).all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key(0, 1), key(0, "1")),  # a number is not its name
        (key(0, 1, 2), key(0, 12)),
        (key(0, "a", "b"), key(0, "ab")),
        (key(0, "visit", 1, 2), key(0, "visit", 2, 1)),
        (key(0), key(1)),
    ],
)
def test_addresses_that_look_alike_are_different(one, other):
    assert one.numpy().integers(2**63) != other.numpy().integers(2**63)
    assert one.torch().initial_seed() != other.torch().initial_seed()


def test_the_seed_is_that_of_the_torch_generator():
    assert key(0, "visit", 1).seed == key(0, "visit", 1).torch().initial_seed() < 2**63


def test_a_key_below_a_key_remembers_the_whole_way():
    assert key(1, "a").of("b").of(2).of("c") == key(1, "a", "b", 2, "c")
    assert key(0, "visit", 1).of(5).of(7).entropy != key(0, "visit", 2).of(5).of(7).entropy


def test_numpy_integers_are_addresses_too():
    assert key(np.int64(3), np.int32(4)) == key(3, 4)


def test_a_generator_starts_afresh_every_time():
    k = key(5, "order")
    first = k.numpy()
    first.random(100)
    assert k.numpy().random() == k.numpy().random() != first.random()


@pytest.mark.parametrize("gpus", [False, True], ids=["no GPU", "GPUs"])
def test_a_block_draws_from_its_key_and_leaves_the_global_generator_as_it_was(gpus, monkeypatch):
    """What PyTorch draws after `torch.manual_seed` of the same seed, also behind an exception."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    torch.manual_seed(3)
    before, k = torch.random.get_rng_state(), key(7, "init", 2)
    others = np.random.get_state()[1].copy(), random.getstate()
    with k.seeded():
        drawn, more = torch.rand(4), (np.random.rand(), random.random())
    with pytest.raises(ZeroDivisionError), k.seeded():
        raise ZeroDivisionError
    assert_array_equal(torch.random.get_rng_state(), before)
    assert_array_equal(np.random.get_state()[1], others[0])
    assert random.getstate() == others[1]
    with k.seeded():
        assert (np.random.rand(), random.random()) == more
    torch.manual_seed(k.seed)
    assert_array_equal(drawn, torch.rand(4))


def test_draws_are_the_same_in_every_process_and_do_not_touch_the_global_generators(mpirun):
    """Hashes of strings differ between processes; addresses do not."""
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    here = (
        key(7, "visit", 3, 0).numpy().integers(10**6),
        torch.rand(1, generator=key(7, "init").torch()).item(),
    )
    assert_array_equal(torch.random.get_rng_state(), before[0])
    assert_array_equal(np.random.get_state()[1], before[1])
    code = (
        "import torch; from mpifl.core.rng import key;"
        "print(key(7, 'visit', 3, 0).numpy().integers(10**6),"
        "torch.rand(1, generator=key(7, 'init').torch()).item())"
    )
    there = mpirun(None, "-c", code, env=toy.PYTHONPATH).stdout.split()
    assert there == [str(h) for h in here]


def test_a_key_says_its_address():
    assert Key((1, "a")).of(2).path == (1, "a", 2)


# -- the addresses of a run ----------------------------------------------------------------------------------

SEEDS = Seeds(data=1, model=2, training=3, system=4)
Address = tuple[int | str, ...]
ALL, STEPS = range(6), (1, 2)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """Return a list to which the address of each draw is added, but for those of the samples of `toy`."""
    found: list[Address] = []
    entropy, entropies = Key.entropy.fget, Key.entropies  # type: ignore[attr-defined]

    def note(path: Address) -> None:
        if path[0] != 0 or path[1] not in ("means", "pattern", "train", "val", "test", "public"):
            found.append(path)

    def of_one(self: Key) -> int:
        note(self.path)
        return entropy(self)

    def of_several(self: Key, addresses: Any) -> bytes:
        below = [*addresses]
        for address in below:
            note((*self.path, *address))
        return entropies(self, below)

    monkeypatch.setattr(Key, "entropy", property(of_one))
    monkeypatch.setattr(Key, "entropies", of_several)
    return found


def grid(*parts: Any) -> set[Address]:
    """Return all addresses of these parts: single ones, or any of several."""
    return {*product(*([p] if isinstance(p, (int, str)) else p for p in parts))}


def in_visits(done: toy.Run, *parts: Any) -> set[Address]:
    """Return addresses below each visit of a run of rounds, client and number."""
    each = [(k, v) for k, n in enumerate(done.server_step.visits.tolist()) for v in range(n)]
    return {(3, "visit", k, v, *rest) for k, v in each for rest in grid(*parts)}


def in_last_visits(done: toy.Run, *parts: Any) -> set[Address]:
    """Return addresses of the training of each client at its last visit, or its first one."""
    visits = done.server_step.visits.tolist()
    return {(*parts, k, max(n - 1, 0), "epoch", 0) for k, n in enumerate(visits)}


def rounds(method: str, expected: Callable[[toy.Run], set[Address]], **changes: Any) -> Any:
    """Return how to take two rounds of half the clients, and the addresses that these draw from."""

    def run(folder: Any) -> toy.Run:
        return toy.run(CATALOGUE[method](), toy.Tiny(), folder, 2, seed=SEEDS, participation=0.5, **changes)

    def usual(done: toy.Run) -> set[Address]:
        own = grid(3, "arrival", STEPS) | grid(4, "cohort", STEPS) | in_visits(done, "epoch", 0)
        return own | grid(2, "init", 0) | expected(done)

    return run, usual


ROUNDS = {
    "ifca under central privacy": rounds(
        "ifca",
        lambda done: (
            grid(3, "privacy", STEPS, ("count", "quantile"))
            | grid(3, "privacy", STEPS, "noise", "model", range(4))
            | grid(2, "init", range(4))
        ),
        privacy=CentralPrivacy(0.05, 0.5, count_noise=3.0, quantile=0.5, quantile_noise=3.0),
    ),
    "noise on tables": rounds(
        "fedavgm",
        lambda done: grid(3, "privacy", STEPS, "noise", "model", 0),
        privacy=CentralPrivacy(0.05, 0.5),
    ),
    "local privacy": rounds(
        "fedavg", lambda done: in_visits(done, "privacy", "model"), privacy=LocalPrivacy(0.05, 1.0)
    ),
    "scaffold, compressed and fine-tuned": rounds(
        "scaffold",
        lambda done: (
            in_visits(done, "compress", ("model", "control"), 0) | in_last_visits(done, 3, "finetune")
        ),
        payload=Payload(compression=RandomK(0.3)),
        evaluation=EvaluationConfig(finetune_epochs=1),
    ),
    "fedem, compressed": rounds(
        "fedem",
        lambda done: grid(2, "init", (0, 1, 2)) | in_visits(done, "compress", "model", (0, 1, 2)),
        payload=Payload(compression=RandomK(0.3)),
    ),
    "tuned by the method": rounds("fedavg_ft", lambda done: in_last_visits(done, 0, "tune")),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_what_is_drawn_in_rounds_has_an_address_by_purpose_client_and_round(case, drawn, tmp_path):
    """All addresses are known, and none is left out: the seed of their kind, the purpose, who and when."""
    run, expected = ROUNDS[case]
    done = run(tmp_path)
    assert {*drawn} == expected(done)


@pytest.mark.parametrize("system", [SystemConfig(), SystemConfig(kernels=False)], ids=["kernels", "loop"])
def test_every_batch_is_augmented_with_draws_of_its_own(system, drawn, tmp_path):
    """Kernels and loop draw from the same addresses: visit and mini-batch of five samples."""
    local, one = replace(toy.LOCAL, augment="crop_flip"), {"participation": 0.5, "evaluate": False}
    done = toy.run(
        CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, 1, seed=SEEDS, system=system, local=local, **one
    )
    batches = -(-done.server_step.sizes[:, 0] // 5)
    wanted = {(3, "visit", k, 0, "augment", t) for k in done.notes[0].client for t in range(batches[k])}
    assert {a for a in drawn if "augment" in a} == wanted


VISITS, MANY = range(9), range(60)
TIMED = {  # case -> its options, and addresses below the system's seed, of each client and visit that arrived
    "exponential": ({"delay": Exponential(), "network": Links(uplink_bytes_s=1e4, spread=0.5)}, "link"),
    "uniform": ({"delay": Uniform()}, ""),
    "shifted": ({"delay": ShiftedExponential()}, ""),
    "log-normal": ({"delay": LogNormal()}, ""),
    "tiers": ({"delay": Tiers(), "network": NetworkTiers()}, "tier"),
    "rates": ({"policy": ClientDecides(PoissonRates())}, "rate"),
}


@pytest.mark.parametrize("case", TIMED)
def test_what_is_drawn_of_times_has_an_address_by_client_and_visit(case, drawn, tmp_path):
    """A visit's computing has one, a client's link, tier or rate another; each start of a visit its own."""
    changes, of_client = TIMED[case]
    asked = {"policy": Buffer(2), "cohort_size": 4, **changes}
    done = toy.events(CATALOGUE["fedasync"](), toy.Tiny(), tmp_path, 6, seed=SEEDS, **asked)
    visit = ("delay", "gap") if of_client == "rate" else ("delay",)
    wanted = {(4, *visit, row["client"], row["visit"]) for row in done.arrivals}
    assert len(wanted) == len(done.arrivals) >= 6
    clients = {row["client"] for row in done.arrivals}
    for place in {"link": ("network",), "tier": ("network", "delay"), "rate": ("delay",)}.get(of_client, ()):
        wanted |= grid(4, place, of_client, clients)
    others = grid(4, "start", MANY) | grid(4, "cohort", 1) | grid(4, *visit, ALL, VISITS)
    others |= grid(4, ("network", "delay"), of_client, ALL)
    starts = {a for a in drawn if a[1] == "start"}
    assert len(starts) > len(done.arrivals) - 6
    found = {a for a in drawn if a[0] == 4}
    assert wanted <= found <= wanted | others


def test_what_is_drawn_of_presence_and_partial_work_has_an_address_by_client_and_round(drawn, tmp_path):
    policy, away = PartialWork(stragglers=0.5), Availability(on_s=3.0, off_s=2.0)
    asked = {"policy": policy, "cohort_size": 3, "delay": Exponential(), "availability": away}
    done = toy.events(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, 2, seed=SEEDS, **asked)
    found = {a[1:] for a in drawn if a[0] == 4}
    cohorts = {(record.step, k) for record in done.records for k in record.cohort.tolist()}
    clients = {k for _, k in cohorts}
    assert grid("rounds", "stragglers", STEPS) <= found
    parts = {a[2:] for a in found if a[:2] == ("rounds", "part")}
    assert parts < cohorts
    assert sorted(step for step, _ in parts) == [1, 1, 2, 2], "half of three are two"
    assert grid("presence", "first", clients) <= found
    assert (
        grid("presence", clients, 0)
        <= found
        <= (
            grid("presence", ("first", *ALL), MANY)
            | grid("rounds", "part", STEPS, ALL)
            | grid("rounds", "stragglers", STEPS)
            | grid("cohort", STEPS)
            | grid("delay", ALL, VISITS)
        )
    )


def test_who_uploads_and_how_stale_is_drawn_by_step(drawn, tmp_path):
    for case, policy in (("a", ClientDecides()), ("b", DrawnStaleness(most=2))):
        drawn.clear()
        toy.events(CATALOGUE["fedasync"](), toy.Tiny(), tmp_path / case, 5, seed=SEEDS, policy=policy)
        found = {a for a in drawn if a[0] == 4}
        if case == "a":  # 1024 steps at a time
            assert {a for a in found if a[1] == "uploads"} == {(4, "uploads", 0)}
        else:
            assert grid(4, "staleness", range(5)) <= found <= grid(4, ("staleness", "start"), range(9))


def test_a_world_is_drawn_with_the_seeds_of_data_model_and_system(drawn, tmp_path):
    """Samples, attackers; initial weights; newcomers, devices, days: nothing with the training seed."""
    asked = {
        "seed": "{data: 1, model: 2, training: 3, system: 4}",
        "data": f"{{cache: {tmp_path}, source: {{name: generated, kind: classes, train: 60, test: 20}}, "
        "scenario: {name: iid, clients: 6}}",
        **{"model": "{name: mlp, hidden: []}", "algorithm": "fedavg", "local.epochs": "1"},
        **{"attack": "{name: noise, share: 0.3}", "newcomers": "{share: 0.3, joins: 2}"},
        "leavers": "{share: 0.3, spread: 2}",
        "devices": "{name: measured, file: phones.csv}",
        "availability": "{profile: [0.5, 0.3]}",
    }
    overrides = [word for key, value in asked.items() for word in (f"--{key}", value)]
    build(loader.load("quickstart", overrides), Single())
    places = {a for a in drawn if a[0] != 0 and "presence" not in a}
    assert places == (
        grid(1, "data", ("composed", "splits", "train", "test"))
        | {(1, "attack", "attackers"), (2, "init", 0), (4, "newcomers"), (4, "leavers")}
        | {a for a in drawn if a[:2] == (4, "leaves")}
        | grid(4, "devices", "device", ALL)
        | grid(4, "devices", "row", ALL, 0)
    )
    left = {a for a in drawn if a[:2] == (4, "leaves")}
    assert len(left) == 2
    assert left <= grid(4, "leaves", ALL)
    slots = {a for a in drawn if a[1:3] == ("presence", "slot")}
    assert grid(4, "presence", "slot", ALL, 0) <= slots <= grid(4, "presence", "slot", ALL, MANY)
    assert grid(4, "presence", "shift", ALL) <= {*drawn}
