"""Bad input is answered in one line that names key, value and remedy."""

from __future__ import annotations

import numpy as np
import pytest
from support.each import for_each
from support.refusal import refusal_of

from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation, prepare
from mpifl.experiment.loader import from_tree


@for_each(
    ("scenario", "options", "key"),
    [
        ("iid", {"clients": 0}, "clients"),
        ("iid", {"test": "some"}, "test"),
        ("iid", {"validation": 1.0}, "validation"),
        ("iid", {"test_share": -0.1}, "test_share"),
        ("iid", {"test_share": 0.3}, "test_share"),
        ("dirichlet", {"test": "all", "test_share": 0.3}, "test_share"),
        ("mixed", {"test_share": 0.3}, "test_share"),
        ("natural", {"test_share": 0.3}, "test_share"),
        ("partition", {"test_share": 0.3}, "test_share"),
        ("rotated", {"test_parts": "population", "test_share": 0.2}, "test_parts"),
        ("dirichlet", {"alpha": 0.0}, "alpha"),
        ("dirichlet", {"alpha": -1.0}, "alpha"),
        ("dirichlet", {"by": "user"}, "by"),
        ("shards", {"shards": 0}, "shards"),
        ("lognormal", {"sigma": -1.0}, "sigma"),
        ("powerlaw", {"exponent": -1.0}, "exponent"),
        ("rotated", {"angles": ()}, "angles"),
        ("rotated", {"clients": 10}, "clients"),
        ("rotated", {"validation": 1.5}, "validation"),
        ("rotated", {"resize": 0}, "resize"),
        ("rotated", {"test_parts": "half"}, "test_parts"),
        ("composed", {"clients": 10, "permutations": 4}, "clients"),
        ("composed", {"alpha": 0.0}, "alpha"),
        ("emdcfl_mnist", {"version": "maximum"}, "version"),
        ("emdcfl_mnist", {"clients": 30}, "clients"),
        ("emdcfl_backdoor_mnist", {"clients": 20}, "clients"),
        ("emdcfl_backdoor_mnist", {"kept": 0.0}, "kept"),
        ("flt1", {"short": "wrap"}, "short"),
        ("flt1", {"short": "shards", "drawn": True}, "short"),
        ("flt4", {"classes": 0}, "classes"),
        ("ucfl_a", {"alpha": 0.0}, "alpha"),
        ("ucfl_a", {"points": 3}, "points"),
        ("ucfl_c", {"permutations": 3}, "clients"),
        ("ccfl", {"main_low": 0.95}, "main_low"),
        ("ccfl", {"smallest": 3000}, "smallest"),
        ("ccfl", {"clients": 3}, "clients"),
        ("ccfl", {"others": "two"}, "others"),
        ("ccfl", {"test_on": "others"}, "test_on"),
        ("fedcuau", {"alphas": (1.0, 0.0)}, "alphas"),
        ("fedcuau", {"alphas": (1.0, 1.0, 1.0)}, "clients"),
        ("population", {"samples": 0}, "samples"),
        ("natural", {"min_samples": 0}, "min_samples"),
    ],
)
def test_an_option_out_of_range_is_named(scenario, options, key):
    with refusal_of(key):
        SCENARIOS[scenario](**options)


@pytest.mark.parametrize(
    ("source", "scenario", "options", "key"),
    [
        ("digits", "iid", {"clients": 2000}, "data.scenario.clients"),
        ("digits", "rotated", {"border": 1 << 31}, "data.scenario.border"),
        ("digits", "dirichlet", {"clients": 200, "min_samples": 10}, "data.scenario.clients"),
        ("digits", "rotated", {"clients": 2000}, "data.scenario.clients"),
        ("digits", "shards", {"clients": 100, "shards": 20}, "data.scenario.shards"),
        ("digits", "composed", {"subsets": 3, "clients": 21}, "data.scenario.subsets"),
        ("digits", "natural", {}, "data.scenario.name"),
        ("digits", "ucfl_a", {}, "data.scenario.points"),
        ("digits", "ucfl_c", {}, "data.scenario.test_images"),
        ("digits", "ccfl", {}, "data.scenario.largest"),
        ("digits", "fedcuau", {}, "data.scenario.samples"),
        ("digits", "population", {"samples": 2000}, "data.scenario.samples"),
        ("digits", "emdcfl_backdoor_cifar", {}, "data.scenario.name"),
        ("digits", "flt2", {"images": 600}, "data.scenario.images"),
        ("digits", "flt4", {"clients": 1000}, "data.scenario.clients"),
        ("digits", "flt1", {"clients": 10, "order": [0, 1, 2]}, "data.scenario.order"),
        ("digits", "flt2", {"clients": 10, "order": [*range(1, 11)]}, "data.scenario.order"),
        ("digits", "flt2", {"clients": 10, "order": [*range(9), 8]}, "data.scenario.order"),
    ],
)
def test_options_that_do_not_fit_the_source_are_named(cache, source, scenario, options, key):
    config = DataConfig(cache=str(cache), source=SOURCES[source](), scenario=SCENARIOS[scenario](**options))
    with pytest.raises(UserError) as error:
        open_federation(config, 0)
    assert error.value.key == key
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("scenario", "options"),
    [("rotated", {}), ("rotated", {"balance": False}), ("emdcfl_mnist", {}), ("emdcfl_cifar", {})],
)
def test_a_source_without_a_test_part_is_refused_where_it_is_cut(cache, scenario, options):
    config = DataConfig(cache=str(cache), source=SOURCES["photos"](), scenario=SCENARIOS[scenario](**options))
    with pytest.raises(UserError, match=r"data.source = 'no test part': .*test_share"):
        open_federation(config, 0)


@pytest.mark.parametrize(("scenario", "classes"), [("flt1", 1), ("flt2", 1), ("flt2", 2), ("flt2", 3)])
def test_clusters_of_flt_need_classes_enough(tmp_path, scenario, classes):
    """Scenario 2 with the classes p0, p1 would give each client the same images of p0 twice."""
    y = np.arange(120) % classes
    np.savez(tmp_path / "a.npz", x_train=np.zeros((120, 4, 4), np.uint8), y_train=y)
    source = SOURCES["npz"](path=str(tmp_path / "a.npz"))
    config = DataConfig(None, str(tmp_path / "cache"), source, SCENARIOS[scenario](clients=4, images=12))
    with pytest.raises(UserError, match=rf"data.source.name = '{classes} classes': .*needs at least"):
        open_federation(config, 0)


def test_test_samples_of_classes_that_nobody_trains_on_are_not_enough(tmp_path):
    """Class 1 has one training sample, so three of four groups lack it, and half of their test samples."""
    train, test = np.arange(400) == 7, np.arange(100) % 2
    images = np.zeros((400, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=train, x_test=images[:100], y_test=test)
    scenario = SCENARIOS["fedcuau"](clients=4, samples=50, test_images=20)
    config = DataConfig(None, str(tmp_path / "cache"), SOURCES["npz"](path=str(tmp_path / "a.npz")), scenario)
    with pytest.raises(UserError, match=r"data.scenario.test_images = 20: .* whose classes it trains on"):
        open_federation(config, 0)


def test_a_missing_class_is_named(tmp_path):
    x, y = np.zeros((40, 4, 4), np.uint8), np.array([0, 1, 3, 4] * 10)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    source = SOURCES["npz"](path=str(tmp_path / "a.npz"))
    config = DataConfig(cache=str(tmp_path), source=source, scenario=SCENARIOS["flt1"](clients=10))
    with pytest.raises(UserError, match=r"\[2\] missing"):
        open_federation(config, 0)


def test_a_missing_root_says_how_to_prepare_it(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIFL_DATA", raising=False)
    with refusal_of("data.root", "mpifl prepare"):
        open_federation(DataConfig(source=SOURCES["mnist"]()), 0)
    with pytest.raises(UserError, match="train-images-idx3-ubyte is not there") as error:
        open_federation(DataConfig(root=str(tmp_path), source=SOURCES["mnist"]()), 0)
    assert error.value.key == "data.root"
    assert "mpifl prepare" in str(error.value)
    with pytest.raises(UserError, match="where to put") as error:
        prepare(DataConfig(source=SOURCES["mnist"]()), 0)


def test_the_environment_names_the_root(monkeypatch, small_root, cache):
    monkeypatch.setenv("MPIFL_DATA", str(small_root))
    config = DataConfig(cache=str(cache), source=SOURCES["mnist"](), scenario=SCENARIOS["iid"]())
    assert open_federation(config, 0).shape == (1, 28, 28)


def test_a_source_nobody_offers_says_so(tmp_path):
    with pytest.raises(UserError, match="by hand"):
        prepare(DataConfig(root=str(tmp_path), source=SOURCES["femnist"]()), 0)


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    from mpifl.core.torchvision_compat import torchvision

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision().datasets, "MNIST", offline)
    with refusal_of("data.root", "could not be downloaded"):
        prepare(DataConfig(root=str(tmp_path), source=SOURCES["mnist"]()), 0)


def test_prepare_fills_the_cache_that_workers_then_open(tmp_path, small_root):
    config = DataConfig(str(small_root), str(tmp_path), SOURCES["mnist"](), SCENARIOS["iid"]())
    said: list[str] = []
    prepare(config, 0, progress=said.append)
    assert any("mnist" in line for line in said)
    assert open_federation(config, 0, build=False).num_clients == 20


def test_prepare_fetches_public_images_too(tmp_path, small_root, monkeypatch):
    fetched: list[str] = []
    monkeypatch.setattr(SOURCES["cifar100"], "download", lambda source, root: fetched.append(source.name))
    public = SOURCES["cifar100"](classes=(1, 2))
    config = DataConfig(str(small_root), str(tmp_path), SOURCES["mnist"](), SCENARIOS["iid"](), public)
    prepare(config, 0)
    assert fetched == ["cifar100"]


def test_a_missing_file_of_the_users_own_is_named(tmp_path):
    with refusal_of("data.source.path", r"nothing\.npz"):
        open_federation(DataConfig(cache=str(tmp_path), source=SOURCES["npz"](path="nothing.npz")), 0)


def test_a_normalisation_must_be_known_and_fit():
    with pytest.raises(UserError, match="imagenet"):
        SOURCES["mnist"](normalise="images")


def test_colour_normalisation_does_not_fit_grey_images(cache):
    config = DataConfig(cache=str(cache), source=SOURCES["digits"](normalise="imagenet"))
    with refusal_of("data.source.normalise", "3 channels"):
        open_federation(config, 0)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refusal_of("data.cache"):
        open_federation(DataConfig(cache=str(tmp_path / "file")), 0)


def test_every_scenario_has_the_share_keys_or_says_what_decides_instead():
    for name, scenario in SCENARIOS.items():
        keys = scenario.__dataclass_fields__
        assert "validation" in keys, name
        assert ("test_share" in keys) != bool(scenario.tested_on), name


def test_a_test_share_that_the_paper_decides_is_answered_with_what_it_is():
    with pytest.raises(UserError, match=r"test_share = 0.1: the paper tests a client on all test images of"):
        from_tree(SCENARIOS["flt1"], {"test_share": 0.1})
    with pytest.raises(UserError, match=r"shares = 0.1: unknown key; did you mean"):
        from_tree(SCENARIOS["flt1"], {"shares": 0.1})


def test_an_archive_without_an_array_is_answered_with_those_that_are_there(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.zeros((4, 8, 8), np.uint8), y=np.arange(4))
    for name, array in (("npz", "x_train"), ("medmnist", "train_images")):
        config = DataConfig(str(tmp_path), str(tmp_path / "cache"), SOURCES[name](path="a.npz"))
        with pytest.raises(
            UserError, match=f"'a.npz': lacks the array {array}; .*a.npz holds X, y$"
        ) as error:
            open_federation(config, 0)
        assert error.value.key == "data.source.path"


def test_floats_that_are_no_images_are_told_of_features(tmp_path):
    x, y = np.linspace(0, 3, 40 * 64, dtype=np.float32).reshape(40, 8, 8), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    for options in ({}, {"inputs": "features"}):
        source = SOURCES["npz"](path="a.npz", **options)
        config = DataConfig(str(tmp_path), str(tmp_path / "cache"), source, SCENARIOS["iid"](clients=2))
        if options:
            assert open_federation(config, 0).shape == (8, 8)
            continue
        with pytest.raises(UserError, match=r"floats between 0 and 1; .*: data\.source\.inputs features"):
            open_federation(config, 0)


@pytest.mark.parametrize("name", ["folder", "leaf", "tff"])
def test_own_files_that_are_not_there_are_not_said_to_be_offered(name, tmp_path):
    config = DataConfig(str(tmp_path), str(tmp_path / "cache"), SOURCES[name](path="nope"))
    for ask in (open_federation, prepare):
        with pytest.raises(UserError, match="is not there; give a path that holds such files") as error:
            ask(config, 0)
        assert (error.value.key, error.value.value) == ("data.source.path", "nope")
