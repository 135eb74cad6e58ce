"""The study of groups that move: figures count visits, and the page says what the recorded figures give."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from campaigns import record_moving
from campaigns.record_moving import CHANGE, PAIRS, SHOWN, WAYS, WORLDS, difference, found, methods, values

from mpifl.analysis.statistics import estimate
from mpifl.core.conversion import untyped
from mpifl.core.errors import UserError
from mpifl.core.metric import ACCURACY
from mpifl.core.textfiles import json_file
from mpifl.experiment import loader
from mpifl.sweeps.table import CONFIDENCE

TREE = loader.read(f"sweeps/{record_moving.NAME}")
FIGURES = json_file(record_moving.RECORDED.measured, "RUN")
ROWS = found()
FINDINGS = [
    re.sub(r"\s+", " ", text)
    for text in re.split(
        r"^\d+\. ",
        re.search(
            r"^## What it found$(.*?)^## ", record_moving.RECORDED.page.read_text(), re.MULTILINE | re.DOTALL
        )[1],
        flags=re.MULTILINE,
    )
]


# -- the program ---------------------------------------------------------------------------------------------


def run_of(policy, steps, accuracy, drift=(), **more):
    """Return what `figures_of` reads of a run."""
    summary = {"drift": drift, "federation_bytes_up": 10, "federation_bytes_down": 20}
    series = {"round": np.array(steps), "accuracy_mean": np.array(accuracy), "ari": np.array([0.0, 0.0, 0.5])}
    config = {"policy": policy, "cohort_size": 12}
    return SimpleNamespace(metric=ACCURACY, config=config, summary=summary | more, series=series)


@pytest.mark.parametrize(
    ("policy", "uploads"),
    [({"name": "rounds"}, 12), ({"name": "buffer", "size": 6}, 6), ({"name": "every_arrival"}, 1)],
)
def test_figures_are_counted_in_visits(policy, uploads):
    """The change is at visit 240: evaluations at visits 120, 240 and 480 with 0.6, 0.8 and 0.9.

    Two steps until it is recovered are two times the uploads of a step; so is the area of 0.25.
    """
    steps = np.array([120, 240, 480]) // uploads
    event = {"step": 240 // uploads + 1, "recovered_after": 2, "lost": 0.25}
    figures = record_moving.figures_of(run_of(policy, steps, [0.6, 0.8, 0.9], [event]))
    assert figures["after"] == figures["final"] == 0.9
    assert figures["recovered_after"] == 2 * uploads
    assert figures["lost"] == 0.25 * uploads
    assert (figures["ari"], figures["up"], figures["down"]) == (0.5, 10, 20)


def test_accuracy_after_the_change_is_the_mean_of_the_evaluations_after_it():
    """Of visits 240, 264 and 288 with 0.4, 0.6 and 0.9 the last two count: 0.75."""
    figures = record_moving.figures_of(run_of({"name": "every_arrival"}, [240, 264, 288], [0.4, 0.6, 0.9]))
    assert figures["after"] == 0.75
    assert "recovered_after" not in figures


def test_a_score_that_does_not_come_back_is_not_recovered_after_any_visits():
    event = {"step": 241, "recovered_after": None, "lost": 1.0}
    run = run_of({"name": "every_arrival"}, [240, 264, 288], [0.4, 0.6, 0.9], [event])
    assert record_moving.figures_of(run)["recovered_after"] is None


def test_the_folder_of_another_sweep_is_refused(tmp_path):
    (tmp_path / "sweep.yaml").write_text("name: other\nvary: {seed: [0]}\n")
    with pytest.raises(UserError, match="is not a run of sweeps/moving-groups"):
        record_moving.record(tmp_path)


# -- what is recorded ----------------------------------------------------------------------------------------


def test_the_page_is_what_the_recorded_figures_give():
    text = record_moving.RECORDED.page.read_text()
    assert record_moving.page(text) == text, "run tests/campaigns/record_moving.py with the sweep"


def test_every_method_has_three_seeds_in_every_group_of_columns_or_is_named_as_missing():
    every = {(f"{world}, {way}", row) for world, way, row in product(WORLDS, WAYS, methods())}
    missing = {(one["columns"], one["rows"]) for one in FIGURES["missing"]}
    assert {*TREE["vary"]["columns"]} == {columns for columns, _ in every}
    assert {*ROWS} == every - missing
    assert {tuple(one["seed"]) for one in ROWS.values()} == {("0", "1", "2")}


def test_every_group_of_columns_has_480_visits_and_changes_after_240():
    for columns, tree in untyped(TREE["vary"]["columns"]).items():
        uploads = record_moving.uploads_of_a_step(tree)
        assert tree["rounds"] * uploads == 480
        assert tree["evaluation"]["every"] * uploads == 24
        if "drift" in tree:
            assert (tree["drift"]["at"][0] - 1) * uploads == CHANGE
        assert columns.endswith("rounds") or columns.endswith(f" {tree['cohort_size']}")


# -- the findings --------------------------------------------------------------------------------------------


def of(world, way, row, figure="after"):
    """Return a figure of each seed, accuracies in percent and bytes in MB."""
    return values(ROWS, world, way, row, figure)


def gain(world, way, row, than, figure="after"):
    """Return by how much a method's figure is above that of another, for each seed."""
    return difference(of(world, way, than, figure), of(world, way, row, figure))


def excludes_0(seeds):
    found = estimate(seeds, "t", CONFIDENCE)
    return found.low > 0 or found.high < 0


def span(numbers, digits=1):
    """Return the smallest and the largest number as the page writes them."""
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def said(number, *texts):
    """Check that a finding has some texts."""
    for text in texts:
        assert re.search(rf"(?<![\d.]){re.escape(text)}(?![\d]|\.\d)", FINDINGS[number]), (
            text,
            FINDINGS[number],
        )


def test_groups_that_no_longer_hold_are_worse_than_one_model():
    moved = {(row, way): gain("swap", way, row, "FedAvg") for row in ("PACFL", "FlexCFL") for way in SHOWN}
    still = {place: gain("no drift", place[1], place[0], "FedAvg") for place in moved}
    said(1, span([-one.mean() for one in moved.values()]), span([one.mean() for one in still.values()]))
    assert all(excludes_0(one) and one.mean() > 0 for one in still.values())
    assert max(one.mean() for one in moved.values()) < 0
    assert [place for place, one in moved.items() if excludes_0(one)] == [("PACFL", "rounds")]


def test_looking_again_finds_the_groups_that_moved():
    for row, least in (("FlexCFL", 1.0), ("PACFL", 0.7)):
        again = [of("swap", way, PAIRS[row], "ari").mean() for way in WAYS]
        once = [of("swap", way, row, "ari").mean() for way in WAYS]
        assert min(again) >= least
        gains = {way: gain("swap", way, PAIRS[row], row) for way in WAYS}
        said(2, span(again, 2), span(once, 2), span([one.mean() for one in gains.values()]))
        assert [way for way, one in gains.items() if excludes_0(one)] == ["arrivals 24"]


def test_looking_again_costs_bytes_whether_groups_move_or_not():
    for row in ("PACFL", "FlexCFL"):
        shares = [
            100 * (of(world, way, PAIRS[row], "bytes").mean() / of(world, way, row, "bytes").mean() - 1)
            for world in ("swap", "no drift")
            for way in WAYS
        ]
        said(3, f"{span(shares)} %")
        for way in WAYS:
            np.testing.assert_allclose(gain("no drift", way, PAIRS[row], row), 0.0, atol=1e-9)


def test_looking_again_finds_what_statistics_see():
    for way in WAYS:
        np.testing.assert_allclose(gain("split", way, "PACFL again", "PACFL"), 0.0, atol=1e-9)
    gains = [gain("split", way, "FlexCFL again", "FlexCFL") for way in WAYS]
    said(4, span([one.mean() for one in gains]))
    assert not any(map(excludes_0, gains))


def lost_by_swap(way, row):
    return difference(of("swap", way, row), of("no drift", way, row))


def test_groups_that_no_longer_hold_cost_more_with_stale_uploads():
    for row in ("PACFL", "FlexCFL"):
        lost = {way: lost_by_swap(way, row) for way in WAYS}
        said(5, *(f"{lost[way].mean():.1f}" for way in ("rounds", "buffer 24", "arrivals 24")))
        more = [way for way in WAYS if excludes_0(lost[way] - lost["rounds"])]
        assert more == ["buffer 24", "arrivals 24"]
        assert min(lost[way].mean() for way in more) > lost["rounds"].mean()
    again = [lost_by_swap(way, "FlexCFL again").mean() for way in WAYS]
    assert max(again) < 0.55 * min(lost_by_swap(way, "FlexCFL").mean() for way in WAYS)
    said(5, span(again))


def lost_by_staleness(world, row):
    return float(difference(of(world, "arrivals 24", row), of(world, "arrivals 6", row)).mean())


def test_staleness_costs_one_model_most():
    told = (
        ("FedAvg", "swap"),
        ("FedAvg", "no drift"),
        ("FlexCFL", "no drift"),
        ("Oracle", "swap"),
        ("Oracle", "no drift"),
    )
    lost = {(row, world): lost_by_staleness(world, row) for row, world in told}
    said(6, *(f"{one:.1f}" for one in lost.values()))
    recorded = [row for row in methods() if ("no drift, arrivals 24", row) in ROWS]
    assert max(recorded, key=lambda row: lost_by_staleness("no drift", row)) == "FedAvg"
    assert max(recorded, key=lambda row: lost_by_staleness("swap", row)) == "FedAvg"


def test_ifca_follows_at_once_at_many_bytes():
    behind = {way: gain("swap", way, "Oracle", "IFCA").mean() for way in WAYS}
    assert max(behind[way] for way in SHOWN) < 0.8
    said(7, span([behind["buffer 24"], behind["arrivals 24"]]), "0.8")
    for way in SHOWN:
        ratio = of("swap", way, "IFCA", "bytes").mean() / of("swap", way, "FedAvg", "bytes").mean()
        said(7, f"{ratio:.1f} times")


def test_fesem_finds_few_groups():
    for way in SHOWN:
        assert np.array_equal(of("swap", way, "FeSEM", "bytes"), of("swap", way, "FedAvg", "bytes"))
    said(8, span([of("no drift", way, "FeSEM", "ari").mean() for way in SHOWN], 2))
    said(8, span([gain("swap", way, "FedAvg", "FeSEM").mean() for way in SHOWN]))


def test_emdcfl_finds_the_groups_that_moved_at_the_most_bytes():
    once, again = (
        [of("swap", way, row, "ari").mean() for way in WAYS] for row in ("EMD-CFL", "EMD-CFL again")
    )
    gains = [gain("swap", way, "EMD-CFL again", "EMD-CFL").mean() for way in WAYS]
    times = [
        of("swap", way, "EMD-CFL again", "bytes").mean() / of("swap", way, "EMD-CFL", "bytes").mean()
        for way in WAYS
    ]
    said(10, span(once, 2), span(again, 2), span(gains), span(times))
    for way in WAYS:
        dear = of("swap", way, "EMD-CFL again", "bytes").mean()
        assert dear == max(of("swap", way, row, "bytes").mean() for row in methods())


def test_feddrift_keeps_near_the_oracle_in_all_worlds_at_the_bytes_of_its_models():
    behind = {(w, way): gain(w, way, "Oracle", "FedDrift").mean() for w in WORLDS for way in SHOWN}
    assert max(behind.values()) <= 1.0
    said(9, "1.0")
    said(9, span([gain("split", way, "FedDrift", "IFCA").mean() for way in SHOWN]))
    ratios = [
        of("swap", way, "FedDrift", "bytes").mean() / of("swap", way, "FedAvg", "bytes").mean()
        for way in SHOWN
    ]
    said(9, ", ".join(f"{ratio:.1f}" for ratio in ratios[:2]) + f" and {ratios[2]:.1f} times")


# -- the part on MNIST ---------------------------------------------------------------------------------------

MNIST = found(record_moving.MNIST)
ON_MNIST = re.sub(r"\s+", " ", record_moving.RECORDED.page.read_text().partition("## The same on a tenth")[2])


def there(world, way, row, figure="after"):
    """Return a figure of each seed on MNIST."""
    return values(MNIST, world, way, row, figure)


def test_the_page_is_what_the_figures_on_mnist_give():
    text = record_moving.MNIST.page.read_text()
    assert record_moving.page(text, record_moving.MNIST) == text


def test_groups_that_no_longer_hold_are_worse_than_one_model_on_mnist():
    for world, sign, text in (("swap", -1, "behind"), ("no drift", 1, "ahead")):
        gaps = [
            sign * (there(world, way, row) - there(world, way, "FedAvg")).mean()
            for way in SHOWN
            for row in ("PACFL", "FlexCFL")
        ]
        assert min(gaps) > 0
        assert f"{span(gaps)} points {text}" in ON_MNIST


def test_looking_again_finds_all_groups_on_mnist():
    gains = []
    for row in ("PACFL", "FlexCFL"):
        for way in SHOWN:
            assert there("swap", way, PAIRS[row], "ari").min() == 1.0
            assert f"once: {there('swap', way, row, 'ari').mean():.2f}" in ON_MNIST
            gains.append((there("swap", way, PAIRS[row]) - there("swap", way, row)).mean())
        shares = [
            100 * (there("swap", way, PAIRS[row], "bytes") / there("swap", way, row, "bytes") - 1).mean()
            for way in SHOWN
        ]
        assert f"{span(shares)} %" in ON_MNIST
    assert f"adds {span(gains)} points" in ON_MNIST


def test_ifca_misses_groups_of_two_seeds_and_feddrift_those_of_every_arrival_on_mnist():
    for world in ("swap", "no drift"):
        missed = {way: (there(world, way, "IFCA", "ari") < 1.0).sum() for way in SHOWN}
        assert missed == {"rounds": 2, "buffer 12": 0, "arrivals 12": 0}
        assert f"{there(world, 'rounds', 'IFCA', 'ari').mean():.2f}" in ON_MNIST
        assert all(there(world, way, "FedDrift", "ari").min() == 1.0 for way in SHOWN[:2])
    assert f"({there('swap', 'arrivals 12', 'FedDrift', 'ari').mean():.2f})" in ON_MNIST
    most = max(there("no drift", way, row, "ari").mean() for way in SHOWN for row in ("CFL", "FeSEM"))
    assert f"at most {most:.2f}" in ON_MNIST


def gains(world, *rows):
    """Return what looking again adds on MNIST, of each seed, for each method and way."""
    return [there(world, way, PAIRS[row]) - there(world, way, row) for row in rows for way in SHOWN]


def test_emd_cfl_finds_most_groups_that_moved_at_several_times_the_bytes_on_mnist():
    once, again = (
        [there("swap", way, row, "ari").mean() for way in SHOWN] for row in ("EMD-CFL", PAIRS["EMD-CFL"])
    )
    assert f"to {span(again, 2)} (once: {span(once, 2)})" in ON_MNIST
    assert f"adds {span([gain.mean() for gain in gains('swap', 'EMD-CFL')])} points, for" in ON_MNIST
    times = [
        (there("swap", way, PAIRS["EMD-CFL"], "bytes") / there("swap", way, "EMD-CFL", "bytes")).mean()
        for way in SHOWN
    ]
    assert f"for {span(times)} times the bytes" in ON_MNIST


def test_where_groups_split_a_number_of_models_that_is_not_fixed_pays_on_mnist():
    found = [gain.mean() for gain in gains("split", *PAIRS)]
    assert f"adds {span(found)} points to PACFL, FlexCFL and EMD-CFL" in ON_MNIST
    ahead, behind = (
        [sign * (there("split", way, "FedDrift") - there("split", way, row)).mean() for way in SHOWN]
        for sign, row in ((1, "IFCA"), (-1, "Oracle"))
    )
    assert f"{span(ahead)} points ahead of IFCA and its four models, and {span(behind)} behind" in ON_MNIST


def test_looking_again_finds_nothing_where_mixtures_of_classes_change_on_mnist():
    found = {row: gains("label", row) for row in PAIRS}
    assert not np.any([found["PACFL"], found["FlexCFL"]])
    assert f"and {span([gain.mean() for gain in found['EMD-CFL']])} to EMD-CFL" in ON_MNIST
    assert not any(map(excludes_0, found["EMD-CFL"]))


def test_looking_again_pays_at_any_staleness_and_one_model_and_feddrift_lose_most_on_mnist():
    stale = [way for way in WAYS if way != "rounds"]
    added = [there("swap", way, PAIRS[row]) - there("swap", way, row) for row in PAIRS for way in stale]
    assert f"adds under swap is {span([one.mean() for one in added])} points" in ON_MNIST
    assert all(map(excludes_0, added))
    lost = {
        (row, world): there(world, "arrivals 6", row) - there(world, "arrivals 24", row)
        for row in methods()
        for world in ("swap", "no drift")
    }
    told = {place: f"{lost[place].mean():.1f}" for place, one in lost.items() if excludes_0(one)}
    fedavg, feddrift = (
        [told.pop((row, world)) for world in ("swap", "no drift")] for row in ("FedAvg", "FedDrift")
    )
    assert f"FedAvg loses {fedavg[0]} points under swap and {fedavg[1]} without drift" in ON_MNIST
    assert f"FedDrift {feddrift[0]} and {feddrift[1]};" in ON_MNIST
    assert told == {("IFCA", "swap"): "2.0"}
