"""Own data without friction: statistics, names of classes, what archivers leave, broken pictures, hints."""

from __future__ import annotations

import dataclasses
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from mpifl.core.errors import CodeFailed, UserError
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.data.pool import Pool, standardised
from mpifl.data.sources.base import Source
from mpifl.data.sources.pictures import decoded
from mpifl.experiment.loader import from_tree
from mpifl.experiment.schema import Config
from mpifl.forecast.data_preview import look

RNG = np.random.default_rng(0)
SHADES = {"cat": (200, 30, 10), "dog": (20, 90, 160)}


def picture(path: Path, colour: tuple[int, int, int]) -> None:
    """Write a picture of 8 x 8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), colour, np.uint8)).save(path)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Return a data root with a folder of ten pictures of two classes."""
    for name, colour in SHADES.items():
        for i in range(5):
            picture(tmp_path / "pets" / name / f"{i}.png", colour)
    return tmp_path


def opened(root: Path, source: str, scenario: str = "iid", say=None, **options):
    """Return a federation of two clients that share a source."""
    chosen = SCENARIOS[scenario](clients=2, test="all") if scenario == "iid" else SCENARIOS[scenario]()
    config = DataConfig(str(root), str(root / "cache"), SOURCES[source](**options), chosen)
    return open_federation(config, 0, say)


def pets_of(root: Path, **options):
    return opened(root, "folder", path="pets", side=8, test_share=0.2, **options)


def test_own_pictures_are_standardised_by_their_training_part(pets):
    """Eight training pictures of one colour each: mean and deviation of two values, by hand."""
    federation = pets_of(pets)
    x = torch.cat([federation.client(k).train.x for k in range(2)])
    assert len(x) == 8
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-6, rtol=0)
    colours = np.array([*SHADES.values()]) / 255
    np.testing.assert_allclose(federation.to_tensor.mean, colours.mean(0), rtol=1e-12)
    np.testing.assert_allclose(federation.to_tensor.std, colours.std(0), rtol=1e-12)


def test_statistics_of_pixels_are_those_of_numpy_and_of_the_training_part_alone():
    images = RNG.integers(0, 256, (50, 3, 5, 4), dtype=np.uint8)
    pool = standardised(Pool(images, np.arange(50) % 2, 40, 2))
    np.testing.assert_allclose(pool.mean, (images[:40] / 255).mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(pool.std, (images[:40] / 255).std((0, 2, 3)), rtol=1e-12)
    shuffled = np.concatenate([images[:40][::-1], images[40:]])
    again = standardised(Pool(shuffled, np.arange(50) % 2, 40, 2))
    np.testing.assert_array_equal(pool.mean, again.mean)
    np.testing.assert_array_equal(pool.std, again.std)
    black = standardised(Pool(np.zeros((4, 1, 2, 2), np.uint8), np.zeros(4, np.int64), 4, 1))
    assert (black.mean.tolist(), black.std.tolist()) == ([0.0], [1.0])


def test_features_of_any_size_are_standardised():
    """Columns near 1e-13 and 1e30, and one that is constant."""
    x = np.random.default_rng(1).normal(size=(60, 3)) * [1e-13, 1e30, 0] + [0, 0, 1e-13]
    pool = standardised(Pool(x.astype(np.float32), np.zeros(60, np.int64), 50, 1))
    stored = x[:50].astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(pool.mean, stored.mean(0), rtol=1e-5)
    np.testing.assert_allclose(pool.std, [*stored[:, :2].std(0), 1], rtol=1e-5)


def test_published_statistics_stay_and_own_numbers_win(pets):
    assert opened(pets, "digits").to_tensor.mean == (0.3053,)
    given = pets_of(pets, mean=(0.5,), std=(0.25,))
    assert (given.to_tensor.mean, given.to_tensor.std) == ((0.5,) * 3, (0.25,) * 3)
    assert pets_of(pets, normalise="unit").to_tensor.std == (1.0,) * 3
    assert opened(pets, "digits", mean=(0.1,), std=(0.2,)).to_tensor.mean == (0.1,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mean": (0.5,)}, r"std = None: mean is given"),
        ({"std": (0.5,)}, r"mean = None: std is given"),
        ({"mean": (0.5, 0.5), "std": (1.0,)}, r"mean = \[0.5, 0.5\]: 1 numbers in std"),
        ({"mean": (0.5,), "std": (1.0,), "normalise": "unit"}, r"normalise = 'unit': mean and std are given"),
    ],
)
def test_half_a_normalisation_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        SOURCES["digits"](**options)


def test_means_of_other_channels_are_refused(pets):
    with pytest.raises(
        UserError, match=r"data.source.mean = '\[0.5, 0.5\]': has 2 channels but the images have 3"
    ):
        pets_of(pets, mean=(0.5, 0.5), std=(1.0, 1.0))


def test_classes_keep_their_names(pets, tmp_path):
    assert pets_of(pets).class_names == ("cat", "dog")
    x, y = RNG.integers(0, 256, (20, 6, 6), dtype=np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "named.npz", x_train=x, y_train=y, class_names=np.array(["owl", "fox"]))
    assert opened(tmp_path, "npz", path="named.npz").class_names == ("owl", "fox")
    np.savez(tmp_path / "named.npz", x_train=x, y_train=y, class_names=np.array(["owl"]))
    with pytest.raises(UserError, match="names for classes 0 to 1: give one to each"):
        opened(tmp_path, "npz", path="named.npz")
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\n\nclass Named:\n    classes = ['a', 'b', 'c']\n\n"
        "    def __len__(self):\n        return 9\n\n"
        "    def __getitem__(self, i):\n        return np.full((4, 4), i, np.uint8), i % 2\n"
    )
    federation = opened(tmp_path, "dataset", path=f"{tmp_path / 'mine.py'}:Named")
    assert (federation.class_names, federation.num_classes) == (("a", "b", "c"), 3)


def test_the_data_sheet_names_classes(pets):
    data = {"root": str(pets), "cache": str(pets / "cache")}
    data["source"] = {"name": "folder", "path": "pets", "side": 8}
    data["scenario"] = {"name": "iid", "clients": 2, "test": "all"}
    config = from_tree(
        Config, {"name": "pets", "algorithm": "fedavg", "model": "mlp", "rounds": 1, "data": data}
    )
    assert "classes                0 cat, 1 dog\n" in look(config, pets / "sheet.png", lambda line: None)
    assert (pets / "sheet.png").exists()


def test_what_macos_leaves_in_archives_is_no_picture(pets):
    before = pets_of(pets).sizes
    (pets / "pets" / "cat" / "._0.png").write_bytes(b"resource fork")
    (pets / "pets" / "__MACOSX" / "cat").mkdir(parents=True)
    (pets / "pets" / "__MACOSX" / "._cat").write_bytes(b"resource fork")
    (pets / "pets" / "._dog").mkdir()
    federation = pets_of(pets)
    np.testing.assert_array_equal(federation.sizes, before)
    assert federation.class_names == ("cat", "dog")


def test_a_broken_picture_is_named_or_skipped(pets):
    (pets / "pets" / "cat" / "3.png").write_bytes(b"no picture")
    (pets / "pets" / "dog" / "4.png").write_bytes((pets / "pets" / "dog" / "3.png").read_bytes()[:40])
    with pytest.raises(UserError, match=r"cat/3.png"):
        pets_of(pets)
    said: list[str] = []
    for _ in range(2):  # also when the cache is used
        federation = pets_of(pets, broken="skip", say=said.append)
    assert len(federation.pool.labels) == 8
    assert sum("cat/3.png and 1 more" in line for line in said) == 2


def test_a_picture_of_sixteen_bits_is_refused_and_not_turned_white(pets):
    """Pillow would clip all values above 255."""
    Image.fromarray(np.full((8, 8), 300, np.uint16)).save(pets / "pets" / "cat" / "3.png")
    with pytest.raises(UserError, match=r"cat/3.png = 'I;16': .*convert it to 8 bits"):
        pets_of(pets)
    with pytest.raises(UserError, match=r"row 0 = 'I;16': .*convert it to 8 bits"):
        decoded(BytesIO((pets / "pets" / "cat" / "3.png").read_bytes()), "row 0", None)
    assert len(pets_of(pets, broken="skip").pool.labels) == 9


def test_forgotten_domains_are_hinted_at(pets):
    for domain in ("photo", "sketch"):
        for name, colour in SHADES.items():
            picture(pets / "deep" / domain / name / "a.png", colour)
    with pytest.raises(UserError, match=r"domains = False: .*<domain>/<class>/\*.jpg: set domains: true"):
        opened(pets, "folder", path="deep")
    with pytest.raises(UserError, match=r"domains = True: .*<class>/\*.jpg: set domains: false"):
        opened(pets, "folder", path="pets", domains=True)


@dataclasses.dataclass(frozen=True)
class Loading(Source):
    """Twelve grey images of three classes, or what `wrong` says."""

    name: ClassVar[str] = "loading"
    needs_root: ClassVar[bool] = False

    wrong: str = ""

    def files(self, root):
        return []

    def load(self, root, scratch):
        images, labels, count, classes = np.zeros((12, 1, 4, 4), np.uint8), np.arange(12) % 3, 9, 3
        if self.wrong == "raises":
            raise RuntimeError("of mine")
        if self.wrong == "nothing":
            return None
        if self.wrong == "list":
            labels = labels.tolist()
        count = 9.0 if self.wrong == "count" else count
        return Pool(images, labels, count, 3.0 if self.wrong == "classes" else classes)


def load_of(tmp_path, wrong=""):
    scenario = SCENARIOS["iid"](clients=2)
    return open_federation(DataConfig(cache=str(tmp_path), source=Loading(wrong=wrong), scenario=scenario), 0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("nothing", "'NoneType': a source must load a Pool"),
        ("list", "'list': labels must be an array"),
        ("count", "9.0: num_train must be a whole number"),
        ("classes", "3.0: num_classes must be a whole number"),
    ],
)
def test_what_a_users_source_loads_is_checked_by_type(tmp_path, wrong, says):
    with pytest.raises(UserError, match=f"data.source = {says}"):
        load_of(tmp_path, wrong)
    assert load_of(tmp_path).num_classes == 3


def test_an_error_in_a_users_source_is_shown_from_its_own_code_on(tmp_path):
    with pytest.raises(CodeFailed, match=r"source Loading\.load: RuntimeError: of mine") as error:
        load_of(tmp_path, "raises")
    assert "data/build.py" not in error.value.trace


def test_a_dataset_that_draws_is_the_same_when_it_is_prepared_again(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nimport torch\n\ndef Mine(train):\n"
        "    return [(np.random.rand(4, 4), int(torch.randint(3, ()))) for _ in range(40)]\n"
    )
    source, held = SOURCES["dataset"](path=f"{tmp_path / 'mine.py'}:Mine"), []
    for folder in ("one", "other"):
        config = DataConfig(cache=str(tmp_path / folder), source=source, scenario=SCENARIOS["iid"](clients=2))
        pool = open_federation(config, 0).pool
        held.append((np.array(pool.inputs), np.array(pool.labels)))
        np.random.rand(), torch.rand(3)
    np.testing.assert_array_equal(held[0][0], held[1][0])
    np.testing.assert_array_equal(held[0][1], held[1][1])


@pytest.mark.parametrize(("train", "part"), [(0, "training"), (4, "test")])
def test_a_dataset_without_items_says_which_part_has_none(tmp_path, train, part):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\ndef Mine(train):\n"
        f"    return [(np.zeros((4, 4), np.uint8), 0)] * ({train} if train else 0)\n"
    )
    source = SOURCES["dataset"](path=f"{tmp_path / 'mine.py'}:Mine")
    with pytest.raises(UserError, match=f"data.source.path = .*: has no items in its {part} part"):
        open_federation(DataConfig(cache=str(tmp_path), source=source), 0)
