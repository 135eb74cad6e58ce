"""Nobody is tested on an image that anybody trains on or chooses by: every scenario, read image by image.

The images of the source are of one colour each, a number of 24 bits that says which image it is, so that
an image is known again however it was turned, framed, enlarged or marked in a corner. Painted images, which
are not turned, carry their number in black and white pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from mpifl.core.errors import UserError
from mpifl.core.federation import SPLITS, Split
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, PoolFederation, open_federation

TRAIN, TEST, CLASSES, ORIGINS, BITS = 1200, 600, 10, 6, 16
CCFL = {"clients": 8, "smallest": 40, "largest": 80, "public": 100, "test_images": 50, "exam": 300}
SPREAD = ("iid", "dirichlet", "shards", "lognormal", "powerlaw", "label_quantity")
MIXED = ({"name": "dirichlet", "clients": 3}, {"name": "shards", "clients": 2, "angle": 90})
READ_ELSEWHERE = {
    "partition",
    "feature_noise",
    "relations",
    "alphabets",
}  # pixels there do not tell the sample
OWN = {"own", "ucfl_a", "ucfl_b", "ucfl_batch", "emdcfl_pacs"}  # take test images from the training part

CASES: list[tuple[str, dict[str, object]]] = [
    *(
        (name, {"clients": 6, "test": test, "validation": 0.2})
        for name in SPREAD
        for test in ("like", "own", "all")
    ),
    *(
        ("quantile", {"clients": 6, "by": "brightness", "test": t, "validation": 0.2})
        for t in ("like", "own")
    ),
    ("mixed", {"groups": MIXED, "validation": 0.2}),
    ("mixed", {"groups": MIXED, "validation": 0.2, "test": "own"}),
    ("mixed", {"groups": MIXED, "validation": 0.2, "test": "own", "copies": True}),
    ("mixed", {"groups": ({"clients": 3}, {"clients": 3, "angle": 90}), "copies": True}),
    ("dirichlet", {"clients": 6, "by": "client", "alpha": 0.3, "validation": 0.2}),
    *(("natural", {"test": test, "validation": 0.2}) for test in ("origin", "own", "all")),
    ("population", {"clients": 30, "samples": 50, "validation": 0.2}),
    ("population", {"clients": 30, "samples": 50, "alpha": 0.3, "validation": 0.2}),
    ("rotated", {"clients": 8}),
    ("rotated", {"clients": 8, "copies": False, "balance": False, "angles": (0.0, 30.0)}),
    ("rotated", {"clients": 8, "test_parts": "population", "expand": True, "border": 2, "resize": 9}),
    *(("rotated", {"clients": 8, "balance": balance, "test_share": 0.2}) for balance in (True, False)),
    ("rotated", {"clients": 8, "copies": False, "test_share": 0.2}),
    ("composed", {"clients": 8, "angles": (0.0, 90.0), "permutations": 2, "validation": 0.2}),
    ("composed", {"clients": 8, "angles": (0.0, 90.0), "subsets": 2, "copies": True, "test_share": 0.2}),
    ("composed", {"clients": 8, "subsets": 2, "copies": True, "alpha": 0.5, "validation": 0.2}),
    *(("emdcfl_mnist", {"version": version}) for version in ("max", "min", "two", "base")),
    *(("emdcfl_cifar", {"version": version, "resize": 32}) for version in ("max", "min")),
    ("emdcfl_backdoor_mnist", {"clients": 6}),
    ("emdcfl_backdoor_cifar", {"clients": 6, "resize": None}),
    ("emdcfl_pacs", {"per_client": 100}),
    *(("flt1", {"clients": 10, "short": short}) for short in ("truncate", "shards", "minus_one")),
    *(("flt1", {"clients": 10, "validation": 0.2, "drawn": drawn}) for drawn in (False, True)),
    *(("flt2", {"clients": 10, "images": 60, "validation": 0.2, "drawn": drawn}) for drawn in (False, True)),
    ("flt3", {"clients": 5, "validation": 0.2}),
    ("flt4", {"clients": 10, "validation": 0.2}),
    ("flt4", {"clients": 8, "classes": 3, "padded": True}),
    ("ucfl_a", {"clients": 5, "points": 800, "validation": 0.2}),
    ("ucfl_a", {"clients": 5, "points": 800, "drawn": True}),
    ("ucfl_b", {"clients": 8, "points": 800, "validation": 0.2}),
    ("ucfl_c", {"clients": 8, "test_images": 200, "validation": 0.2}),
    ("ucfl_batch", {"clients": 8, "points": 800, "validation": 0.2}),
    ("ccfl", {**CCFL, "validation": 0.2}),
    ("ccfl", {**CCFL, "static": True}),
    ("ccfl", {**CCFL, "clusters": 1, "smallest": 60, "largest": 60}),
    ("fedcuau", {"clients": 8, "samples": 100, "test_images": 40, "validation": 0.2}),
]


def coloured(number: np.ndarray) -> np.ndarray:
    """Return images uint8 [n, 3, 12, 12] of one colour each."""
    colour = np.stack([number >> 16 & 255, number >> 8 & 255, number & 255], 1).astype(np.uint8)
    return np.broadcast_to(colour[:, :, None, None], (len(number), 3, 12, 12))


def painted(number: np.ndarray) -> np.ndarray:
    """Return images uint8 [n, 1, 4, 4] whose pixels are the bits of a number."""
    bits = number[:, None] >> np.arange(BITS) & 1
    return (255 * bits).astype(np.uint8).reshape(-1, 1, 4, 4)


def number_of_colour(x: np.ndarray) -> np.ndarray:
    """Return the numbers of images by the colour of their middle."""
    middle = x[:, :, x.shape[2] // 2, x.shape[3] // 2].astype(np.int64)
    return (middle[:, 0] << 16) + (middle[:, 1] << 8) + middle[:, 2]


def number_of_bits(x: np.ndarray) -> np.ndarray:
    """Return the numbers of images that were painted in any colour."""
    lit = (x.max(1).reshape(len(x), -1) > 0).astype(np.int64)
    return (lit << np.arange(BITS)).sum(1)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two archives of numbered images."""
    folder = tmp_path_factory.mktemp("numbered")
    rng = np.random.default_rng(0)
    number = 1 + 9 * np.arange(TRAIN + TEST)  # no black image
    labels = np.concatenate([rng.permutation(np.arange(n) % CLASSES) for n in (TRAIN, TEST)])
    parts = {"train": slice(0, TRAIN), "test": slice(TRAIN, None)}
    origin = np.concatenate([np.arange(n) % ORIGINS for n in (TRAIN, TEST)])
    for name, draw in (("coloured", coloured), ("painted", painted)):
        arrays = {"x": draw(number), "y": labels, "origin": origin}
        np.savez(
            folder / name,
            **{f"{kind}_{part}": a[rows] for kind, a in arrays.items() for part, rows in parts.items()},
        )
    return folder


def address(number: np.ndarray) -> set[int]:
    """Return which images of the source some numbers belong to; all must be images of it."""
    place, rest = np.divmod(number - 1, 9)
    assert not rest.any()
    assert place.size == 0 or (place.min() >= 0 and place.max() < TRAIN + TEST)
    return set(place.tolist())


def pixels(federation: PoolFederation, split: Split) -> np.ndarray:
    """Return the pixels of a finished split."""
    mean, std = (
        np.array(v).reshape(1, -1, 1, 1) for v in (federation.to_tensor.mean, federation.to_tensor.std)
    )
    return np.rint((split.x.numpy() * std + mean) * 255).astype(np.uint8)


def once(federation: PoolFederation, k: int, visit: int, own: dict[str, set[int]]) -> set[object]:
    """Return what a client trains on and is validated on. Under drift an image may come twice, turned in two
    ways: these are two.
    """
    if not federation.changes:
        return {*own["train"] & own["val"]}
    train, val = (federation.partition.of(k, split, visit) for split in ("train", "val"))
    turned = ({*zip(np.r_[d.index].tolist(), np.r_[d.group].tolist(), strict=True)} for d in (train, val))
    return set.intersection(*turned)


@pytest.mark.parametrize(
    ("scenario", "options"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_nobody_is_tested_on_what_anybody_learns_from(numbered, scenario, options):
    name, number_of = ("coloured", number_of_colour)
    if scenario == "emdcfl_backdoor_mnist":
        name, number_of = ("painted", number_of_bits)
    federation = open_federation(
        DataConfig(
            cache=str(numbered / "cache"),
            source=SOURCES["npz"](path=str(numbered / f"{name}.npz")),
            scenario=SCENARIOS[scenario](**options),
        ),
        0,
    )
    drawn: dict[str, set[int]] = {"train": set(), "val": set(), "test": set()}
    held = []
    for k in range(federation.num_clients):
        for visit in range(3):
            own = {
                name: address(number_of(federation.samples(k, name, visit)[0]))
                for name in (*drawn, *federation.extra)
            }
            assert not once(federation, k, visit, own), f"client {k} chooses by images that it trains on"
            assert own["train"], f"client {k}"
            held += [frozenset(own["train"])] if federation.changes or not visit else []
            for split, found in own.items():
                drawn["test" if split in federation.extra else split] |= found
    assert len({*held}) == len(held), "copies are divided otherwise, as are visits under drift"
    learnt = drawn["train"] | drawn["val"]
    assert drawn["test"]
    assert bool(drawn["val"]) == bool(federation.sizes[:, 1].any())
    assert not learnt & drawn["test"]
    if not OWN & {scenario, options.get("test")} and "test_share" not in options:
        assert max(learnt) < TRAIN <= min(drawn["test"]), "the source's test part is for tests"
    server, group_test_sets = (
        {i for split in sets for i in address(number_of(pixels(federation, split)))}
        for sets in (federation.public(), federation.group_test_sets())
    )
    assert bool(server) == bool(group_test_sets) == (scenario == "ccfl")
    assert not server & (drawn["test"] | group_test_sets | learnt), (
        "the server's own images are nobody else's"
    )
    assert not group_test_sets & learnt


@pytest.mark.parametrize("copies", [True, False])
def test_no_alphabet_is_tested_on_sequences_that_another_learns_from(copies):
    pool = SOURCES["generated"](kind="tokens", train=200).load(Path(), Path())
    spec = SCENARIOS["alphabets"](clients=6, groups=3, copies=copies, test_share=0.3).compose(pool, key(0))
    splits = spec.splits()
    learnt, tested = (
        {i for name in names for k in range(6) for i in splits[name].of(k).tolist()}
        for names in (("train", "val"), ("test",))
    )
    assert not learnt & tested
    assert learnt | tested == set(pool.train.tolist())
    assert len({frozenset(splits["train"].of(k).tolist()) for k in range(6)}) == 6, "copies differ"
    share = splits["test"].sizes / np.sum([splits[name].sizes for name in SPLITS], axis=0)
    np.testing.assert_allclose(share, 0.3, atol=0.03)


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("rotated", {"clients": 400}),
        ("composed", {"clients": 400, "angles": (0.0, 90.0), "copies": True}),
        ("mixed", {"groups": ({"clients": 200},) * 2, "copies": True, "test": "own"}),
    ],
)
def test_copies_whose_tests_are_fewer_than_their_clients_are_refused(numbered, scenario, options):
    """One of a hundred: 10 or 12 of the 1200 training images, for 100 or 200 clients of a copy."""
    source = SOURCES["npz"](path=str(numbered / "coloured.npz"))
    chosen = SCENARIOS[scenario](**options, test_share=0.01)
    with pytest.raises(UserError, match=r"test_share = 0.01: leaves 1[02] samples for the tests of .*larger"):
        open_federation(DataConfig(cache=str(numbered / "cache"), source=source, scenario=chosen), 0)


def test_every_scenario_is_read():
    assert {name for name, _ in CASES} == set(SCENARIOS) - READ_ELSEWHERE


# -- the source's own parts ----------------------------------------------------------------------------------


def rows(images: np.ndarray) -> list[bytes]:
    """Return the bytes of each image."""
    return [image.tobytes() for image in np.ascontiguousarray(images)]


def read_again(source: str, root: Path) -> tuple[Iterable[bytes], Iterable[bytes]]:
    """Return the images of the training and the test files as another reader finds them."""
    import pickle

    def idx(pattern: str, upright: bool = False) -> list[bytes]:
        (path,) = root.glob(pattern)
        x = np.frombuffer(path.read_bytes(), np.uint8, offset=16).reshape(-1, 28, 28)
        return rows(x.transpose(0, 2, 1) if upright else x)

    def batches(pattern: str) -> list[bytes]:
        paths = sorted(root.glob(pattern))
        return [row for path in paths for row in rows(pickle.loads(path.read_bytes())["data"])]

    def writers(held: int) -> list[bytes]:
        with np.load(root / "femnist" / "femnist_leaf_writers.npz") as archive:
            return rows(archive["x"][archive["is_test"] == held])

    readers: dict[str, Callable[[], tuple[Iterable[bytes], Iterable[bytes]]]] = {
        "mnist": lambda: (idx("MNIST/raw/train-im*"), idx("MNIST/raw/t10k-im*")),
        "fashionmnist": lambda: (idx("FashionMNIST/raw/train-im*"), idx("FashionMNIST/raw/t10k-im*")),
        "kmnist": lambda: (idx("KMNIST/raw/train-im*"), idx("KMNIST/raw/t10k-im*")),
        "emnist": lambda: (
            idx("EMNIST/raw/emnist-balanced-train-im*", True),
            idx("EMNIST/raw/emnist-balanced-test-im*", True),
        ),
        "cifar10": lambda: (batches("cifar-10-batches-py/data*"), batches("cifar-10-batches-py/test*")),
        "femnist": lambda: (writers(0), writers(1)),
    }
    return readers[source]()


@pytest.mark.parametrize("source", ["mnist", "fashionmnist", "kmnist", "emnist", "cifar10", "femnist"])
def test_the_parts_of_a_source_are_those_of_its_files(small_root, source):
    pool = SOURCES[source]().load(small_root, small_root)
    for part, files in zip((pool.train, pool.test), read_again(source, small_root), strict=True):
        assert sorted(rows(pool.images[part])) == sorted(files)


@pytest.mark.parametrize("source", ["digits", "npz", "folder", "dataset"])
def test_a_test_part_that_is_set_aside_is_no_part_of_training(tmp_path, source):
    number = 1 + 9 * np.arange(40)
    options: dict[str, object] = {}
    if source == "npz":
        options = {"path": str(tmp_path / "a.npz")}
        np.savez(tmp_path / "a", x_train=coloured(number), y_train=np.arange(40) % 4)
    if source == "folder":
        from PIL import Image

        for i, image in enumerate(coloured(number)):
            (tmp_path / "images" / f"{i % 4}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / "images" / f"{i % 4}" / f"{i}.png")
        options = {"side": 12}
    if source == "dataset":
        (tmp_path / "own.py").write_text(
            "import numpy as np\n\n\ndef numbers():\n"
            "    return [(np.full((4, 4), i, np.uint8), i % 4) for i in range(40)]\n"
        )
        options = {"path": f"{tmp_path}/own.py:numbers"}
    pool = SOURCES[source](**options).load(tmp_path, tmp_path)
    train, test = (rows(pool.images[part]) for part in (pool.train, pool.test))
    assert len(test) == round(0.2 * len(pool.labels))
    assert len({*train, *test}) == len(pool.labels)
    assert not {*train} & {*test}
