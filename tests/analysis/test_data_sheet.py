"""`mpifl data`: the table says what the world holds, the sheet is a picture of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.nightly import mostly_nightly

from mpifl import cli
from mpifl.analysis.data_sheet import MAX_TICKS, Sheet, Strip, _rgb, _thinned, draw


def sheet_of(rng: np.random.Generator, **changes) -> Sheet:
    """Return a sheet of two groups of three clients."""
    images = [rng.integers(0, 256, (1, 6, 6), dtype=np.uint8) for _ in range(3)]
    given = {
        "title": "two groups",
        "when": "",
        "strips": [Strip("group 0", images), Strip("group 1", [*images[:2], None])],
        "columns": ["label 0", "label 1", "label 2"],
        "clients": np.arange(6),
        "groups": np.repeat([0, 1], 3),
        "counts": rng.integers(0, 9, (6, 3)),
        "sizes": rng.integers(1, 40, (6, 3)),
    }
    return Sheet(**(given | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shares": np.array([[0.7, 0.3], [0.4, 0.6]]), "share_title": "shares", "when": ", visit 0"},
        {"groups": None, "sizes": np.array([[1, 0, 0]] * 5 + [[900, 0, 0]])},
        {"columns": [], "strips": [Strip("group 0", [np.zeros((3, 9, 9), np.uint8)], ["label 8"])]},
    ],
)
def test_a_sheet_is_a_png_that_is_not_blank(tmp_path, changes):
    draw(sheet_of(np.random.default_rng(0), **changes), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.format == "PNG"
        assert picture.width >= 1200
        pixels = np.asarray(picture.convert("L"))
    assert pixels.std() > 10


def test_grey_images_are_shown_in_grey_and_colours_stay_in_order():
    grey, colour = (
        np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
        np.arange(18, dtype=np.uint8).reshape(3, 2, 3),
    )
    assert _rgb(grey)[1, 2].tolist() == [5, 5, 5]
    assert _rgb(colour)[1, 2].tolist() == [5, 11, 17]


@pytest.mark.parametrize(
    ("count", "step"), [(1, 1), (20, 1), (21, 2), (40, 2), (41, 5), (101, 10), (2001, 200)]
)
def test_few_round_numbers_stand_below_many_clients(count, step):
    ticks = _thinned(count)
    assert ticks.tolist() == list(range(0, count, step))
    assert len(ticks) <= MAX_TICKS


def test_the_table_counts_groups_and_names_them(tmp_path, capsys):
    path = tmp_path / "world.png"
    scenario = "{name: rotated, angles: [0, 90], clients: 6, validation: 0.2}"
    assert cli.main(["data", "quickstart", "--data.scenario", scenario, "--sheet", str(path), "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits, scenario rotated: 6 clients, 10 classes, images 1 x 8 x 8, data seed 0"
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["group 1: 90 degrees"][4] == "3"
    assert rows["all"][1] == "6"
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("kind", mostly_nightly(["multi_hot", "numbers", "tokens"], ["numbers"]))
def test_samples_without_classes_have_no_count_of_classes(tmp_path, capsys, kind):
    """A client has neither one class nor the label distance zero."""
    options = ["--data.source", f"{{name: generated, kind: {kind}}}", "--data.scenario", "iid"]
    assert cli.main(["data", "quickstart", *options, "--sheet", str(tmp_path / "a.png"), "-q"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("all "))
    assert row.split()[-2:] == ["-", "-"]
    with Image.open(tmp_path / "a.png") as alone:
        draw(sheet_of(np.random.default_rng(0), strips=[]), tmp_path / "b.png")
        with Image.open(tmp_path / "b.png") as both:
            assert alone.height < both.height - 200, "there is no panel of classes"


def test_masks_are_drawn_beside_their_images(tmp_path, capsys, monkeypatch):
    """The mask of a group that is turned is turned, too; ignored pixels are white, ground is black."""
    drawn = []
    monkeypatch.setattr("mpifl.forecast.data_preview.draw", lambda sheet, path: drawn.append(sheet))
    scenario = ["--data.scenario", "{name: rotated, angles: [0, 30], clients: 4}"]
    options = [*scenario, "--data.source", "{name: shapes, train: 40, test: 20, side: 24}"]
    assert cli.main(["data", "segmentation", *options, "--sheet", str(tmp_path / "a.png"), "-q"]) == 0
    assert "5 classes of pixels" in capsys.readouterr().out
    (upright, turned) = drawn[0].strips
    assert drawn[0].columns == []
    for strip, ignored in ((upright, False), (turned, True)):
        image, mask = strip.images[:2]
        assert image.shape == (1, 24, 24)
        assert mask.shape == (3, 24, 24)
        assert (mask == 255).all(0).any() == ignored
        assert (mask == 0).all(0).any()
        assert strip.captions[:2] == ["", "classes"]


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("{name: dirichlet, alpha: 0.3}", "test images"),
        pytest.param(
            "{name: ccfl, clients: 6, clusters: 3, smallest: 40, largest: 80, test_images: 50, public: 90}",
            "drawn anew",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "{name: population, clients: 5000, samples: 9}",
            "2,000 clients, evenly spaced",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["without groups", "that change", "of a population"],
)
def test_worlds_without_groups_and_worlds_that_change_are_drawn(scenario, said, tmp_path, capsys):
    options = ["--data.scenario", scenario, "--sheet", str(tmp_path / "a.png")]
    assert cli.main(["data", "quickstart", *options]) == 0
    assert said in capsys.readouterr().out


def test_a_sheet_that_cannot_be_written_is_one_message(tmp_path, capsys):
    assert cli.main(["data", "quickstart", "--sheet", str(tmp_path / "no" / "a.png"), "-q"]) == 2
    assert capsys.readouterr().err.startswith("mpifl: --sheet = ")


@pytest.mark.nightly
def test_only_rank_0_looks(tmp_path, mpirun):
    sheet = tmp_path / "a.png"
    done = mpirun(
        2, "-m", "mpifl", "data", "quickstart", "--sheet", sheet, "-q", cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("label distance") == 1
    assert sheet.exists()
