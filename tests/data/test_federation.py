"""A federation is a pure function of configuration, seed, client and visit."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import multiprocessing
import random
import sys

import numpy as np
import pytest
import torch
from support.own_scenarios import FurtherScenario, TurningScenario
from support.refusal import refusal_of
from torch.testing import assert_close

from mpifl.core.errors import CodeFailed, UserError
from mpifl.core.rng import Key, key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, histogram, label_distance, open_federation
from mpifl.data.build import open_public
from mpifl.data.partition.csr import Csr, everyone, from_lists
from mpifl.data.pool import Pool
from mpifl.data.scenario import FixedPartition, Partition, SampleIndex, Scenario, ScenarioSpec
from mpifl.data.transforms import Op, PermuteLabels, Rotate, ToTensor
from mpifl.models import MODELS
from mpifl.training.client import LocalClient
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner

SCENARIO_OPTIONS = [
    ("rotated", {}),
    ("dirichlet", {"alpha": 0.1}),
    ("dirichlet", {"alpha": 0.1, "by": "client"}),
    ("shards", {}),
    ("lognormal", {}),
    ("powerlaw", {}),
    ("composed", {"angles": (0.0, 90.0), "permutations": 2, "alpha": 0.5}),
    ("ccfl", {"smallest": 20, "largest": 40, "public": 100, "test_images": 50, "validation": 0.1}),
    ("population", {"clients": 50, "samples": 30, "alpha": 0.3, "validation": 0.1}),
]


def digest_of(federation, k: int, visit: int) -> str:
    """Return a digest of everything client `k` holds at `visit`."""
    data = federation.client(k, visit)
    parts = [data.train, data.val, data.test, *data.extra.values()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for p in parts for t in (p.x, p.y))).hexdigest()


def digests_elsewhere(arguments) -> list[str]:
    """Open the federation in another process and read clients in the order given."""
    config, order = arguments
    federation = open_federation(config, 3, build=False)
    return [digest_of(federation, k, visit) for k, visit in order]


@dataclasses.dataclass(frozen=True)
class ServersOwn(SCENARIOS["rotated"]):
    """Rotated images, of which the server has five of the test part."""

    def compose(self, pool, key):
        own = (pool.test[:5],) * len(self.angles)
        return dataclasses.replace(super().compose(pool, key), public=own, group_test_sets=own)


def test_the_servers_sets_are_those_that_a_scenario_names_also_if_it_stores_images(cache):
    """Addresses are those of the source, not of the images that are stored for clients."""
    federation = open_federation(DataConfig(cache=str(cache), scenario=ServersOwn(clients=8)), 3)
    plain = open_federation(DataConfig(cache=str(cache), scenario=SCENARIOS["iid"](clients=1)), 3).pool
    images, labels = plain.images[plain.test[:5]], plain.labels[plain.test[:5]]
    for sets in (federation.public(), federation.group_test_sets()):
        assert len(sets) == 4
        for turns, found in enumerate(sets):
            np.testing.assert_array_equal(found.y, labels)
            assert_close(found.x, federation.to_tensor(np.rot90(images, turns, (2, 3))))


def test_attackers_flip_labels_of_training_and_validation_wherever_these_are_read(cache):
    """Nobody else's, and none of the test part; plain visits, which read stored labels, are not offered."""
    config = DataConfig(cache=str(cache), scenario=SCENARIOS["iid"](clients=4, validation=0.2))
    honest, flipped = open_federation(config, 3), open_federation(config, 3)
    wrong = np.arange(10)[::-1]
    flipped.attack([1], wrong)
    for k, split in itertools.product((0, 1), ("train", "val", "test")):
        true = honest.client(k).split(split).y.numpy()
        expected = wrong[true] if k == 1 and split != "test" else true
        ways = (
            flipped.client(k).split(split).y,
            flipped.pixels(k, split).y,
            flipped.samples(k, split)[1],
            flipped.labels(k, split),
        )
        assert len({*true.tolist()}) > 1
        for found in ways:
            np.testing.assert_array_equal(found, expected)
    everyone, first = np.arange(4), np.zeros(4, np.int64)
    assert honest.stored(everyone, first) is not None
    assert flipped.stored(everyone, first) is None


@pytest.mark.parametrize(("scenario", "options"), SCENARIO_OPTIONS)
def test_bytes_do_not_depend_on_process_or_order_of_access(cache, scenario, options):
    config = DataConfig(cache=str(cache), source=SOURCES["digits"](), scenario=SCENARIOS[scenario](**options))
    federation = open_federation(config, 3)
    order = [(k, visit) for k in (0, 3, 11, 19) for visit in (0, 1)]
    here = [digest_of(federation, k, visit) for k, visit in order]
    with multiprocessing.get_context("fork").Pool(1) as worker:
        there = worker.map_async(digests_elsewhere, [(config, order[::-1])]).get(timeout=60)[0]
    assert here == there[::-1]


@pytest.mark.parametrize(("scenario", "options"), SCENARIO_OPTIONS)
def test_two_caches_and_two_builds_hold_the_same_bytes(cache, tmp_path, scenario, options):
    built = [
        open_federation(DataConfig(cache=str(c), scenario=SCENARIOS[scenario](**options)), 3)
        for c in (cache, tmp_path)
    ]
    assert digest_of(built[0], 5, 0) == digest_of(built[1], 5, 0)
    np.testing.assert_array_equal(built[0].sizes, built[1].sizes)


@pytest.mark.parametrize("static", [False, True])
def test_what_is_kept_at_hand_are_the_data_of_each_visit(cache, static):
    """Read twice and out of order, with and without memory; addresses are drawn for (client, visit)."""
    options = dict(SCENARIO_OPTIONS)["ccfl"] | {"static": static}
    config = DataConfig(cache=str(cache), scenario=SCENARIOS["ccfl"](**options))
    fresh, kept = open_federation(config, 3), open_federation(config, 3, cache_bytes=10**8)
    assert kept.caches(10**8)
    assert (fresh.changes, kept.changes) == (not static, not static)
    for k in (0, 5):
        found = {visit: digest_of(kept, k, visit) for visit in (1, 0, 2, 1, 0)}
        assert found == {visit: digest_of(fresh, k, visit) for visit in (1, 0, 2)}
        assert len({*found.values()}) == (1 if static else 3)
        for visit in found:
            draw = fresh.partition.of(k, "train", visit)
            labels = fresh.pool.labels[draw.index]
            np.testing.assert_array_equal(kept.client(k, visit).train.y, labels)


@pytest.mark.parametrize(
    ("scenario", "options"),
    [*SCENARIO_OPTIONS, ("turning", {}), ("further", {}), ("emdcfl_backdoor_mnist", {})],
)
def test_sizes_of_sets_are_known_without_their_samples(cache, scenario, options):
    own = {"turning": TurningScenario, "further": FurtherScenario}
    config = DataConfig(cache=str(cache), scenario={**SCENARIOS, **own}[scenario](**options))
    federation = open_federation(config, 0)
    clients = np.array([3, 0, 2, 3])
    for visit in (0, 1, 3):
        visits = visit * np.array([1, 1, 0, 1])
        data = [federation.client(k, v) for k, v in zip(clients, visits, strict=True)]
        for name in ("train", "val", "test", *data[0].further):
            found = federation.sizes_of(name, clients, visits)
            assert found.dtype == np.int64
            assert found.tolist() == [len(one.split(name)) for one in data]


class Sudden(Partition):
    """From the third visit on, client 1 has images upside down, or a sample less; nobody else changes."""

    def __init__(self, num_train: int, what: str) -> None:
        self.rows, self.what = np.array_split(np.arange(num_train), 3), what
        self.sizes = np.array([[len(row), 0, 0] for row in self.rows])

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the samples."""
        late = k == 1 and visit >= 2
        row = self.rows[k] if split == "train" else self.rows[k][:0]
        return SampleIndex(
            row[1:] if late and self.what == "samples" else row, int(late and self.what == "angle")
        )


@dataclasses.dataclass(frozen=True)
class SuddenScenario(Scenario):
    """A drift of one's own."""

    what: str = "angle"

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose rotation and drift."""
        return ScenarioSpec(drift=Sudden(pool.num_train, self.what), ops=(Rotate((0.0, 180.0)),))


@pytest.mark.parametrize("what", ["angle", "samples"])
def test_a_drift_of_ones_own_may_begin_late_and_with_one_client(cache, what):
    config = DataConfig(cache=str(cache), scenario=SuddenScenario(what))
    fresh, kept = open_federation(config, 0), open_federation(config, 0, cache_bytes=10**8)
    assert fresh.changes
    for visit in (0, 1, 2, 3):
        assert [digest_of(kept, k, visit) for k in range(3)] == [digest_of(fresh, k, visit) for k in range(3)]
        assert [kept.num_samples(k, visit) for k in range(3)] == [
            len(fresh.client(k, visit).train) for k in range(3)
        ]
    assert len({digest_of(kept, 1, visit) for visit in range(4)}) == 2


@pytest.mark.parametrize(("scenario", "options"), SCENARIO_OPTIONS)
def test_another_seed_gives_other_data(cache, scenario, options):
    config = DataConfig(cache=str(cache), scenario=SCENARIOS[scenario](**options))
    assert digest_of(open_federation(config, 0), 5, 0) != digest_of(open_federation(config, 1), 5, 0)


@pytest.mark.parametrize(("scenario", "options"), SCENARIO_OPTIONS)
def test_what_a_client_says_about_itself_is_what_it_holds(cache, scenario, options):
    federation = open_federation(DataConfig(cache=str(cache), scenario=SCENARIOS[scenario](**options)), 0)
    assert federation.sizes.shape == (federation.num_clients, 3)
    for k in (0, 7, 19):
        data = federation.client(k)
        assert [len(data.train), len(data.val), len(data.test)] == federation.sizes[k].tolist()
        for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
            assert split.x.shape == (len(split), *federation.shape)
            assert split.x.dtype == torch.float32
            assert split.y.dtype == torch.int64
            assert split.x.is_contiguous()
            np.testing.assert_array_equal(federation.labels(k, name), split.y.numpy())


@pytest.mark.parametrize(
    ("scenario", "options"), [w for w in SCENARIO_OPTIONS if w[0] not in ("ccfl", "population", "composed")]
)
def test_no_image_is_with_two_clients_of_a_group_or_in_training_and_test(cache, scenario, options):
    """Digits are all different: equal pixels are one image. Rotated copies are compared within a group."""
    federation = open_federation(DataConfig(cache=str(cache), scenario=SCENARIOS[scenario](**options)), 0)
    groups = np.zeros(federation.num_clients) if federation.groups is None else federation.groups
    seen = [
        image.tobytes()
        for k in np.flatnonzero(groups == 0)
        for split in ("train", "val", "test")
        for image in federation.samples(int(k), split)[0]
    ]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(("scenario", "options"), [*SCENARIO_OPTIONS, ("turning", {}), ("further", {})])
def test_hosted_clients_are_read_from_a_copy_of_their_own_samples(cache, scenario, options):
    """The pool is blanked afterwards: hosted clients are what they were, the others are read from it."""
    own = {"turning": TurningScenario, "further": FurtherScenario}
    catalogue = {**SCENARIOS, **own}
    config = DataConfig(cache=str(cache), scenario=catalogue[scenario](**options))
    federation = open_federation(config, 3)
    some = range(min(6, federation.num_clients))
    mine, before = np.array([0, some[-1]]), {k: digest_of(federation, k, 0) for k in some}
    blank = dataclasses.replace(federation.pool, inputs=np.zeros_like(federation.pool.inputs))
    federation.host(mine)
    assert {k: digest_of(federation, k, 0) for k in some} == before
    federation.pool = blank
    kept = [k for k in some if digest_of(federation, k, 0) == before[k]]
    if federation.partition.addresses(mine) is None:  # drawn at each visit
        assert not kept
        assert federation.hosted_bytes(mine, 2)[1] == 0
        return
    assert kept == mine.tolist()
    federation.host(np.arange(federation.num_clients))
    assert digest_of(federation, 0, 0) != before[0], "all clients: nothing is copied"


def test_the_copy_has_each_sample_once_and_kernels_read_it(tmp_path):
    """All clients share the test images, which are copied once; an image of the digits has 64 bytes."""
    config = DataConfig(cache=str(tmp_path), scenario=SCENARIOS["iid"](clients=5, test="all"))
    federation = open_federation(config, 0)
    mine, sizes = np.array([1, 4]), federation.sizes
    test = len(np.unique(federation.partition.of(1, "test", 0).index))
    rows = int(sizes[mine, :2].sum()) + test
    finished, stored = federation.hosted_bytes(mine, 2)
    assert stored == 64 * rows
    assert finished == 4 * 64 * int(sizes[mine, 0].sum())
    before = federation.stored(mine, np.zeros(2, np.int64))
    federation.host(mine)
    after = federation.stored(mine, np.zeros(2, np.int64))
    assert len(after.inputs) == rows < len(before.inputs)
    np.testing.assert_array_equal(after.inputs[after.index], before.inputs[before.index])
    np.testing.assert_array_equal(after.labels[after.index], before.labels[before.index])
    np.testing.assert_array_equal(after.sizes, before.sizes)
    elsewhere = federation.stored(np.array([1, 2]), np.zeros(2, np.int64))
    assert len(elsewhere.inputs) == len(before.inputs), "client 2 is not hosted"


def test_samples_of_hosted_clients_are_kept_where_those_of_all_would_not_be(tmp_path):
    """The limit is a twelfth of all training samples, more than an eighth of those of two of 20 clients."""
    config = DataConfig(cache=str(tmp_path), scenario=SCENARIOS["iid"](clients=20))
    whole = open_federation(config, 0).finished_bytes
    federation = open_federation(config, 0, cache_bytes=whole // 12)
    assert not federation.caches(whole // 12)

    held = federation.client(3).train.x, federation.client(3).train.x
    assert held[0].data_ptr() != held[1].data_ptr()
    federation.host(np.array([3, 7]))
    held = federation.client(3).train.x, federation.client(3).train.x
    assert held[0].data_ptr() == held[1].data_ptr()


def test_a_copy_larger_than_its_share_of_the_machine_is_not_made(tmp_path, monkeypatch):
    config = DataConfig(cache=str(tmp_path), scenario=SCENARIOS["iid"](clients=5))
    federation = open_federation(config, 0)
    _, stored = federation.hosted_bytes(np.array([1, 4]), 2)
    monkeypatch.setattr("mpifl.data.federation.machine_bytes", lambda: 8 * stored)
    assert federation.hosted_bytes(np.array([1, 4]), 2)[1] == stored, "a quarter for two of such a size"
    assert federation.hosted_bytes(np.array([1, 4]), 3)[1] == 0
    before = digest_of(federation, 1, 0)
    federation.host(np.array([1, 4]), 3)
    assert digest_of(federation, 1, 0) == before
    assert federation.stored(np.array([1]), np.zeros(1, np.int64)).inputs is federation.pool.inputs


def test_a_client_reads_only_what_is_looked_at(cache):
    federation = open_federation(DataConfig(cache=str(cache)), 0)
    client = federation.client(0)
    assert "train" not in client.__dict__
    assert client.train is client.train
    assert "test" not in client.__dict__


def test_a_client_can_be_copied_with_another_split(cache):
    client = open_federation(DataConfig(cache=str(cache)), 0).client(0)
    changed = dataclasses.replace(client, train=client.val)
    assert changed.train is client.val
    torch.testing.assert_close(changed.test.x, client.test.x)


def test_what_is_read_may_be_changed_without_harm(cache):
    federation = open_federation(DataConfig(cache=str(cache)), 0)
    before = federation.client(0).train.x.clone()
    federation.client(0).train.x.zero_()
    federation.client(0).train.y.zero_()
    torch.testing.assert_close(federation.client(0).train.x, before)
    assert federation.client(0).train.y.any()


@pytest.mark.parametrize(
    "ops", [(Rotate((0.0, 30.0)),), (Rotate((90.0, 180.0)), PermuteLabels(((1, 2, 0), (2, 1, 0))))]
)
def test_operations_give_the_same_whether_baked_or_run_at_the_visit(tiny_pool: Pool, tmp_path, ops):
    from mpifl.data.build import _materialize
    from mpifl.data.federation import PoolFederation

    splits = {
        "train": from_lists([np.array([3, 4, 50]), np.array([7])]),
        "val": from_lists([np.array([9]), np.zeros(0, np.int64)]),
        "test": from_lists([np.array([60, 61]), np.array([89])]),
    }
    spec = ScenarioSpec(groups=np.array([0, 1]), ops=ops)
    to_tensor = ToTensor((0.0,), (1.0,))
    visited = PoolFederation(tiny_pool, spec, FixedPartition(splits, spec.groups), to_tensor)
    materialized_splits = _materialize(visited, splits, tmp_path)
    images, labels = np.load(tmp_path / "images.npy"), np.load(tmp_path / "labels.npy")
    materialized = PoolFederation(
        Pool(images, labels, 7, 3), ScenarioSpec(), FixedPartition(materialized_splits, None), to_tensor
    )
    for k in range(2):
        for split in ("train", "val", "test"):
            for a, b in zip(visited.samples(k, split), materialized.samples(k, split), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("kind", "task"), [(np.uint8, "multi_hot"), (np.float32, "numbers")])
def test_labels_of_any_kind_are_stored_beside_images_that_are(tmp_path, kind, task):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (200, 4, 4)).astype(np.uint8), rng.integers(0, 2, (200, 3)).astype(kind)
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y)
    source, halves = SOURCES["npz"](path=str(tmp_path / "images.npz")), {"name": "iid", "clients": 2}
    scenario = SCENARIOS["mixed"](groups=(halves, {**halves, "angle": 90.0}))
    federation = open_federation(DataConfig(cache=str(tmp_path), source=source, scenario=scenario), 1)
    assert federation.info.labels == task
    for k in range(4):
        seen, labels = federation.samples(k)
        upright = np.rot90(seen, -(k // 2), axes=(-2, -1))
        place = [int(np.flatnonzero((x == image).all((1, 2)))[0]) for image in upright[:, 0]]
        np.testing.assert_array_equal(labels, y[place], strict=True)


def test_groups_of_different_size_need_a_resize(cache):
    from mpifl.core.errors import UserError

    options = {"angles": (0.0, 45.0), "expand": True}
    with pytest.raises(UserError, match=r"data\.scenario\.resize"):
        open_federation(DataConfig(cache=str(cache), scenario=SCENARIOS["rotated"](**options)), 0)
    one = open_federation(
        DataConfig(cache=str(cache), scenario=SCENARIOS["rotated"](**options, resize=12)), 0
    )
    assert one.shape == (1, 12, 12)
    assert one.client(19).train.x.shape[1:] == (1, 12, 12)


def test_a_histogram_counts_labels_and_its_distance_to_the_whole_is_by_hand(tiny_pool):
    """Clients with classes (2, 0, 0) and (0, 1, 1) of a whole (2, 1, 1) / 4: distances 1 and 1."""
    from mpifl.data.federation import PoolFederation

    splits = {"train": from_lists([np.array([0, 3]), np.array([1, 2])])}
    splits |= {name: everyone(np.zeros(0, np.int64), 2) for name in ("val", "test")}
    federation = PoolFederation(
        tiny_pool, ScenarioSpec(), FixedPartition(splits, None), ToTensor((0.0,), (1.0,))
    )
    counts = histogram(federation)
    np.testing.assert_array_equal(counts, [[2, 0, 0], [0, 1, 1]])
    np.testing.assert_allclose(label_distance(counts), [1.0, 1.0])


def test_a_client_of_600_mnist_images_is_read_at_once_and_not_image_by_image(open_real):
    federation = open_real("mnist", "iid", clients=100)
    assert len(federation.samples(3)[0]) == 600
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        federation.samples(3)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 600, calls


def test_pixels_are_those_of_the_source_and_not_what_the_model_sees(open_small):
    """CIFAR-10 at 32 x 32, shown to the model at 64 x 64 and normalised."""
    federation = open_small("cifar10", "emdcfl_cifar", clients=4, resize=64)
    learner = Learner(MODELS["mlp"](hidden=(2,)).build(federation.shape, 10), "cpu")
    for split in ("train", "val", "test"):
        stored, seen = federation.pixels(1, split), getattr(federation.client(1), split)
        assert (stored.x.dtype, stored.x.shape[1:], seen.x.shape[1:]) == (
            torch.uint8,
            (3, 32, 32),
            (3, 64, 64),
        )
        np.testing.assert_array_equal(stored.x.numpy(), federation.samples(1, split)[0])
        assert_close(stored.y, seen.y)
        again = LocalClient(1, federation, learner, LocalConfig()).pixels(split)
        assert_close(again.x, stored.x, rtol=0, atol=0)


def test_mixture_is_one_hot_where_nothing_drifts(cache):
    federation = open_federation(DataConfig(cache=str(cache)), 0)
    np.testing.assert_array_equal(federation.mixture(5), [0, 1, 0, 0])
    assert federation.public() == ()


def test_the_servers_own_images_are_the_training_part_of_their_source(tmp_path):
    """Digits in the shape and normalisation of the clients' images; the test part is nobody's."""
    config = DataConfig(
        None, str(tmp_path), SOURCES["digits"](), SCENARIOS["iid"](clients=4), SOURCES["digits"]()
    )
    federation = open_federation(config, 0)
    public, pool = open_public(config, federation), federation.pool
    assert len(public) == pool.num_train != len(pool.test)
    np.testing.assert_array_equal(public.y, pool.labels[pool.train])
    torch.testing.assert_close(public.x, federation.to_tensor(pool.images[pool.train]))


@pytest.mark.parametrize(
    ("options", "key"), [({"normalise": "half"}, "normalise"), ({"mean": (0.5,), "std": (0.5,)}, "mean")]
)
def test_the_servers_own_images_have_no_normalisation_of_their_own(tmp_path, options, key):
    public = SOURCES["digits"](**options)
    config = DataConfig(None, str(tmp_path), SOURCES["digits"](), SCENARIOS["iid"](clients=4), public)
    with pytest.raises(UserError, match=f"data.public.{key} = .*: has no effect: .*; leave it out"):
        open_public(config, open_federation(config, 0))


@dataclasses.dataclass(frozen=True)
class Mistaken(Scenario):
    """Three clients of two training, one validation and one test sample each, with one mistake."""

    mistake: str = ""

    def compose(self, pool, key):
        splits = {"train": [[0, 1], [2, 3], [4, 5]], "val": [[6], [7], [8]], "test": [[1500], [1501], [1502]]}
        if self.mistake == "further":
            splits["hard"] = splits["test"]
        if self.mistake == "lacks":
            del splits["val"]
        if self.mistake == "fewer":
            splits["test"].pop()
        if self.mistake in ("before", "beyond"):
            splits["train"][1] = [2, -1 if self.mistake == "before" else len(pool.labels)]
        rows = {name: from_lists([np.array(row) for row in held]) for name, held in splits.items()}
        groups = np.arange(4 if self.mistake == "groups" else 3)
        ops = {"hard": ()} if self.mistake == "missing" else {}
        return ScenarioSpec(lambda: rows, groups, split_ops=ops)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("further", "its splits are train, val, test, hard: .* train, val, test; .* in split_ops"),
        ("missing", "its splits are train, val, test: .* train, val, test, hard"),
        ("lacks", "its splits are train, test: .* train, val, test"),
        ("fewer", "its splits have rows for 3, 3, 2 clients"),
        ("before", "names sample -1 in train: .* 0 to 1796"),
        ("beyond", "names sample 1797 in train: .* 0 to 1796"),
        ("groups", "groups has 4 entries for 3 clients"),
    ],
)
def test_a_users_scenario_that_contradicts_itself_is_refused(cache, mistake, says):
    """A further set without operations was not evaluated, and sample -1 was the last one of the source."""
    config = DataConfig(cache=str(cache), scenario=Mistaken(mistake))
    with pytest.raises(UserError, match=f"data.scenario.name = 'Mistaken': {says}"):
        open_federation(config, 0)
    assert (
        open_federation(dataclasses.replace(config, scenario=Mistaken()), 0).sizes.tolist() == [[2, 1, 1]] * 3
    )


@dataclasses.dataclass(frozen=True)
class Typed(Scenario):
    """Two clients of one sample each, with one value of a type or range that nothing can use."""

    where: str = ""

    def compose(self, pool, key):
        wrong = {
            "none": None,
            "list": [0, 1],
            "negative": np.array([0, -1]),
            "floats": np.array([0.0, 1.0]),
            "rows": np.zeros((2, 2), int),
            "function": (lambda x, y, group: (x, y),),
            "far": (np.array([1797]),),
            "large": np.array([0, 1 << 31]),
        }
        field, _, value = self.where.partition(" ")
        if field == "compose":
            return wrong[value]
        held = {"offsets": np.arange(3), "index": np.arange(2), "row": None}
        other = {"small": held["offsets"].astype(np.int32), "falling": np.array([0, 2, 1])}
        other |= {"beyond": np.arange(1, 4), "empty": np.zeros(1, np.int64), "floats": np.arange(2.0)}
        if field in held:
            held[field] = other.get(value, wrong.get(value))
        rows = Csr(**held)
        splits = {"train": rows, "val": rows, "test": rows}
        if field == "splits":
            splits = {"list": [rows] * 3, "values": {name: [[0], [1]] for name in splits}}[value]
        if field in ("ops", "groups", "blocks", "public", "group_test_sets"):
            return ScenarioSpec(lambda: splits, **{field: wrong[value]})
        more = {"normalise": "by hand", "resize": 7.5 if value else 0, "targets": 3}
        return ScenarioSpec(lambda: splits, **{k: v for k, v in more.items() if k == field})


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("compose none", "compose returns a NoneType; return a ScenarioSpec"),
        ("splits list", "its splits are a list; return a mapping"),
        ("splits values", "a split is a list; make a Csr of it"),
        ("offsets small", "offsets of train must be an int64 array"),
        ("offsets falling", "offsets of train must be .* rises up to 2"),
        ("offsets beyond", "offsets of train must be .* rises up to 2"),
        ("offsets empty", "offsets of train must be"),
        ("offsets list", "offsets of train must be"),
        ("index floats", "index of train must be an array of whole numbers"),
        ("index list", "index of train must be an array of whole numbers"),
        ("row negative", "row of train must lie between 0 and 1"),
        ("groups list", "groups must be an array .* of whole numbers from 0"),
        ("groups negative", "groups must be an array .* of whole numbers from 0"),
        ("groups floats", "groups must be an array .* of whole numbers from 0"),
        ("blocks rows", "blocks must be an array .* of whole numbers from 0"),
        ("ops function", "ops must be a tuple of operations"),
        ("public far", "public must hold arrays of samples of the source, 0 to 1796"),
        ("group_test_sets far", "group_test_sets must hold arrays"),
        ("targets", "targets is 3, a group without clients"),
    ],
)
def test_what_a_users_scenario_returns_is_checked_by_type_and_range(cache, where, says):
    """Group -1 was turned as the last one; most of the others ended in a traceback."""
    with pytest.raises(UserError, match=f"data.scenario.name = 'Typed': {says}"):
        open_federation(DataConfig(cache=str(cache), scenario=Typed(where)), 0)


@pytest.mark.parametrize("good", ["", "groups large", "blocks large"])
def test_what_a_users_scenario_may_return_is_taken(cache, good):
    assert open_federation(DataConfig(cache=str(cache), scenario=Typed(good)), 0).num_clients == 2


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("normalise", "data.scenario.normalise = 'by hand': known: standard"),
        ("resize", "data.scenario.resize = 0: give a whole number of pixels, 1 to"),
        ("resize float", "data.scenario.resize = 7.5: give a whole number"),
    ],
)
def test_a_users_scenario_names_a_known_normalisation_and_a_size(cache, where, says):
    with pytest.raises(UserError, match=says):
        open_federation(DataConfig(cache=str(cache), scenario=Typed(where)), 0)


@dataclasses.dataclass(frozen=True)
class Changing(Op):
    """An operation that breaks a rule."""

    rule: str

    def __call__(self, x, y, group):
        made = {
            "floats": (x / 255.0, y),
            "labels": (x, y + 5),
            "fewer": (x[1:], y),
            "draws": (x + np.random.randint(0, 9, x.shape, np.uint8), y),
            "alone": x,
        }
        return made[self.rule]


@dataclasses.dataclass(frozen=True)
class Operated(Scenario):
    """Two clients of groups 0 and 1 with one operation."""

    op: Op

    def compose(self, pool, key):
        rows = Csr(np.arange(3))
        return ScenarioSpec(
            lambda: dict.fromkeys(("train", "val", "test"), rows), np.arange(2), ops=(self.op,)
        )


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (Changing("floats"), "Changing, for group 0, returns float64 samples for uint8 ones; keep the type"),
        (Changing("labels"), "Changing, .* returns labels from 5 to 14; classes are 0 to 9"),
        (Changing("fewer"), "Changing, .* returns 9 samples and 10 labels for 10"),
        (Changing("draws"), "Changing, .* returns other numbers when it is called again"),
        (Changing("alone"), "Changing, .* returns no pair of arrays"),
        (Rotate((90.0,)), "Rotate, for group 1, fails .*; does it have an entry for each group"),
    ],
)
def test_operations_of_a_users_scenario_are_tried_on_a_few_samples(cache, op, says):
    """Pixels divided by 255 were divided by 255 again, without a word."""
    with pytest.raises(UserError, match=f"data.scenario.name = 'Operated': its operation {says}"):
        open_federation(DataConfig(cache=str(cache), scenario=Operated(op)), 0)


def test_an_error_in_an_operation_of_a_user_is_shown_from_its_own_code_on(cache):
    with pytest.raises(CodeFailed, match=r"scenario Operated.ops: KeyError: 'raises'") as error:
        open_federation(DataConfig(cache=str(cache), scenario=Operated(Changing("raises"))), 0)
    assert "data/scenario.py" not in error.value.trace


@dataclasses.dataclass(frozen=True)
class Failing(Scenario):
    """Raises an error where it is told to."""

    where: str

    def compose(self, pool, key):
        return ScenarioSpec(lambda: {}[self.where]) if self.where == "splits" else {}[self.where]


@pytest.mark.parametrize("where", ["compose", "splits"])
def test_an_error_in_a_users_scenario_is_shown_from_its_own_code_on(cache, where):
    with pytest.raises(CodeFailed, match=f"scenario Failing.{where}: KeyError") as error:
        open_federation(DataConfig(cache=str(cache), scenario=Failing(where)), 0)
    assert "test_federation.py" in error.value.trace
    assert "data/build.py" not in error.value.trace


@dataclasses.dataclass(frozen=True)
class DrawnGlobally(Scenario):
    """Groups and samples from the generators that belong to nobody."""

    def compose(self, pool, key):
        groups = np.array([random.randint(0, 99) for _ in range(6)])
        return ScenarioSpec(self._splits, groups)

    def _splits(self):
        samples = np.random.permutation(1797)[:18].reshape(6, 3)
        return {name: from_lists([*samples[:, [i]]]) for i, name in enumerate(("train", "val", "test"))}


def test_a_users_scenario_that_draws_from_global_generators_is_the_same_on_every_rank(tmp_path):
    """Ranks had groups of their own, and with other files the clients other samples."""
    held = []
    for folder in ("one", "other"):
        federation = open_federation(DataConfig(cache=str(tmp_path / folder), scenario=DrawnGlobally()), 0)
        held.append((federation.groups.tolist(), [digest_of(federation, k, 0) for k in range(6)]))
        np.random.rand(), random.random()
    assert held[0] == held[1]
    other = open_federation(DataConfig(cache=str(tmp_path / "one"), scenario=DrawnGlobally()), 1)
    assert other.groups.tolist() != held[0][0]


class Miscounted(Partition):
    """Two clients of ten training samples and one test sample each, counted as `sizes` says."""

    def __init__(self, sizes):
        self.sizes = np.array(sizes)

    def of(self, k, split, visit):
        return SampleIndex(np.arange({"train": 10, "val": 0, "test": 1}[split]) + visit, 0)


@dataclasses.dataclass(frozen=True)
class MiscountedScenario(Scenario):
    sizes: tuple = ((10, 0, 1), (10, 0, 1))
    groups: int = 2

    def compose(self, pool, key):
        return ScenarioSpec(drift=Miscounted(self.sizes), groups=np.arange(self.groups))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"sizes": ((10, 0, 1), (7, 0, 1))},
            "sizes counts 7 samples of client 1 in train, and `of` returns 10",
        ),
        (
            {"sizes": ((10, 0, 2), (10, 0, 1))},
            "sizes counts 2 samples of client 0 in test, and `of` returns 1",
        ),
        ({"groups": 3}, "groups has 3 entries for 2 clients"),
    ],
)
def test_a_drift_that_miscounts_is_refused(cache, options, says):
    """Averages over clients are weighted by these numbers."""
    config = DataConfig(cache=str(cache), scenario=MiscountedScenario(**options))
    with pytest.raises(UserError, match=f"data.scenario.name = 'MiscountedScenario': {says}"):
        open_federation(config, 0)
    assert open_federation(dataclasses.replace(config, scenario=MiscountedScenario()), 0).num_clients == 2


class Wandering(Partition):
    """One client of three samples in each split, with one mistake."""

    def __init__(self, mistake):
        self.mistake = mistake
        self.sizes = {"few": np.full((1, 2), 3), "list": [[3, 3, 3]]}.get(mistake, np.full((1, 3), 3))

    def of(self, k, split, visit):
        found = {
            "bare": np.arange(3),
            "floats": SampleIndex(np.arange(3.0), 0),
            "before": SampleIndex(np.arange(3) - visit, 0),
            "beyond": SampleIndex(np.arange(3) + 1795 * visit, 0),
            "draws": SampleIndex(np.random.permutation(1797)[:3], 0),
        }
        return found.get(self.mistake, SampleIndex(np.arange(3) + visit, 0))


@dataclasses.dataclass(frozen=True)
class WanderingScenario(Scenario):
    mistake: str = ""

    def compose(self, pool, key):
        return ScenarioSpec(drift=Wandering if self.mistake == "class" else Wandering(self.mistake))


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("class", "drift is a .*; give an object of a class derived from Partition"),
        ("few", "its drift needs `sizes`"),
        ("list", "its drift needs `sizes`"),
        ("bare", "`of` of client 0 in train at visit 0 returns a ndarray; return a SampleIndex"),
        ("floats", "`of` of client 0 in train at visit 0 must give whole numbers from 0 to 1796"),
        ("before", "`of` of client 0 in train at visit 1 must give whole numbers from 0 to 1796"),
        ("beyond", "`of` of client 0 in train at visit 1 must give whole numbers from 0 to 1796"),
        ("draws", "`of` of client 0 in train at visit 0 returns other samples when it is called again"),
    ],
)
def test_a_drift_that_breaks_a_rule_is_refused(cache, mistake, says):
    """Sample -1 was the last one of the source; fresh draws gave every rank samples of its own."""
    with pytest.raises(UserError, match=f"data.scenario.name = 'WanderingScenario': {says}"):
        open_federation(DataConfig(cache=str(cache), scenario=WanderingScenario(mistake)), 0)
    assert open_federation(DataConfig(cache=str(cache), scenario=WanderingScenario()), 0).num_clients == 1


def test_writers_with_just_enough_samples_are_clients():
    """Three, two and five training samples: with at least three, two clients; with four, one."""
    origin = np.array([0] * 3 + [1] * 2 + [2] * 5 + [0, 1, 2])
    pool = Pool(np.zeros((13, 1, 2, 2), np.uint8), np.arange(13) % 2, 10, 2, origin)
    for least, clients in ((2, 3), (3, 2), (4, 1), (5, 1)):
        spec = SCENARIOS["natural"](min_samples=least).compose(pool, key(0))
        assert len(spec.facts["origins"]) == clients


def test_an_attacker_lies_about_what_it_trains_and_validates_on_and_about_no_test_label(cache):
    """Whichever way labels are read; kernels read none of their own while anybody lies."""
    source, scenario = SOURCES["digits"](), SCENARIOS["iid"](clients=4, validation=0.2)
    honest, lying = (
        open_federation(DataConfig(cache=str(cache), source=source, scenario=scenario), 0) for _ in range(2)
    )
    lying.attack((1,), np.arange(10)[::-1].copy())
    for k in range(4):
        for split in ("train", "val", "test"):
            y = honest.labels(k, split)
            y = 9 - y if k == 1 and split != "test" else y
            ways = (
                lying.client(k).split(split).y.numpy(),
                lying.samples(k, split)[1],
                lying.pixels(k, split).y.numpy(),
                lying.labels(k, split),
            )
            for found in ways:
                np.testing.assert_array_equal(found, y)
    every = np.arange(4), np.zeros(4, np.int64)
    assert honest.stored(*every) is not None
    assert lying.stored(*every) is None


@pytest.mark.parametrize("name", ["rotated", "shards", "emdcfl_backdoor_mnist"])
def test_clients_are_evaluated_on_validation_samples_if_asked(cache, name):
    """Everything but the test part stays: what is trained on, and further test sets."""
    plain = DataConfig(cache=str(cache), scenario=SCENARIOS[name](clients=12, validation=0.25))
    usual = open_federation(plain, 3)
    asked = open_federation(dataclasses.replace(plain, evaluate_on="validation"), 3)
    np.testing.assert_array_equal(asked.sizes[:, 2], usual.sizes[:, 1])
    in_all = usual.sizes[:, 1].sum()
    assert asked.test_pool == in_all if name == "shards" else asked.test_pool < in_all  # groups share some
    for k in range(12):
        mine, theirs = asked.client(k), usual.client(k)
        for one, other in ((mine.test, theirs.val), (mine.train, theirs.train), (mine.val, theirs.val)):
            assert_close(one.x, other.x, rtol=0, atol=0)
            assert_close(one.y, other.y, rtol=0, atol=0)
        for extra in theirs.further:
            assert_close(mine.split(extra).x, theirs.split(extra).x, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rotated", "shards", "emdcfl_backdoor_mnist"])
def test_clients_keep_a_share_of_their_samples(cache, name):
    """The same clients in the same groups: each has a tenth of what it had, as in the exported split."""
    whole = DataConfig(cache=str(cache), scenario=SCENARIOS[name](clients=12, validation=0.25))
    config = dataclasses.replace(whole, share=0.1)
    usual, found = open_federation(whole, 3), open_federation(config, 3)
    np.testing.assert_array_equal(found.sizes, np.ceil(usual.sizes / 10))
    np.testing.assert_array_equal(found.groups, usual.groups)
    for k in (0, 11):
        mine, theirs = found.client(k), usual.client(k)
        for split in ("train", "val", "test"):
            rows = theirs.split(split).x.flatten(1)
            distance = torch.cdist(
                mine.split(split).x.flatten(1), rows, compute_mode="donot_use_mm_for_euclid_dist"
            )
            assert_close(distance.min(1).values, torch.zeros(len(distance)), rtol=0, atol=0)
    again = open_federation(config, 3)
    assert_close(again.client(5).train.x, found.client(5).train.x, rtol=0, atol=0)
    assert open_federation(whole, 3).content == usual.content != found.content


def test_a_share_of_samples_that_are_drawn_at_every_visit_is_refused(cache):
    config = DataConfig(cache=str(cache), scenario=SCENARIOS["population"](clients=4, samples=30), share=0.5)
    with refusal_of("data.share", "clients draw their samples when they are visited"):
        open_federation(config, 3)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (SCENARIOS["iid"](clients=4), "hold no validation samples; set data.scenario.validation"),
        (
            SCENARIOS["population"](clients=4, samples=30, validation=0.1),
            "draw their samples when they are visited",
        ),
    ],
)
def test_evaluation_on_validation_samples_that_are_not_there_is_refused(cache, scenario, message):
    config = DataConfig(cache=str(cache), scenario=scenario, evaluate_on="validation")
    with refusal_of("data.evaluate_on", message):
        open_federation(config, 3)
