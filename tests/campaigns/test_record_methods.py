"""The table of clustered methods: the page is what the recorded figures give, and says what they say."""

from __future__ import annotations

import re

import numpy as np
import pytest
from campaigns import record_methods

from mpifl.analysis.statistics import rank
from mpifl.core.case_names import labels_of, rows_left_out
from mpifl.core.errors import UserError
from mpifl.experiment import loader
from mpifl.sweeps.cases import configurations_of
from mpifl.sweeps.tuning import candidates, tune_of

TREE = loader.read(f"sweeps/{record_methods.NAME}")
ROWS = {(one["columns"], one["rows"]): one for one in record_methods.measured()}
WORLDS = labels_of(TREE["vary"]["columns"])
METHODS = labels_of(TREE["vary"]["rows"])
REFERENCES = ("Local", "FedAvg", "FedAvg, step size", "Oracle")
TEXT = re.sub(r"\s+", " ", record_methods.PAGE.read_text())


def mean(figure, world, row):
    return float(np.mean(ROWS[world, row][figure]))


def means(figure, row):
    """Return the figure of a method in each world that has it."""
    return {world: mean(figure, world, row) for world in WORLDS if figure in ROWS.get((world, row), {})}


def test_the_page_is_what_the_recorded_figures_give():
    text = record_methods.PAGE.read_text()
    assert record_methods.page(text) == text, "run tests/campaigns/record_methods.py with the sweep"


def test_every_method_of_the_sweep_has_figures_of_the_same_seeds_in_every_world_that_does_not_leave_it_out():
    without = rows_left_out(TREE["vary"])
    assert {*ROWS} == {(w, r) for w in WORLDS for r in METHODS} - {*without}
    assert {tuple(one["seed"]) for one in ROWS.values()} == {("0", "1", "2", "3", "4")}


def test_what_was_chosen_is_one_of_four_candidates_of_every_method_but_the_references():
    tune = tune_of(TREE)
    known = {}
    for one in candidates(tune):
        known.setdefault(one.row, []).append(one.label.removeprefix(f"{one.row}, "))
    assert {*known} == {*METHODS} - {"Local", "FedAvg", "Oracle"}
    assert {len(labels) for labels in known.values()} == {4}
    for (_, row), one in ROWS.items():
        assert one.get("chosen") in known.get(row, [None])


@pytest.mark.nightly
def test_all_cases_of_the_sweep_are_valid():
    assert len(configurations_of(f"sweeps/{record_methods.NAME}")) == 5 * len(ROWS)


def test_a_page_without_a_place_for_the_tables_is_refused():
    with pytest.raises(UserError, match="has no lines"):
        record_methods.page("# A page\n")


# -- the five findings ---------------------------------------------------------------------------------------

WIDE = ("rotation", "permuted labels")
CLUSTERED = [row for row in METHODS if row not in REFERENCES]


def test_methods_that_find_far_groups_reach_the_accuracy_of_the_true_ones():
    for world in WIDE:
        true = mean("accuracy_mean", world, "Oracle")
        for row in ("FeSEM", "CFL-GP", "FlexCFL", "FedDrift"):
            assert min(ROWS[world, row]["ari"]) > 0.995
            assert mean("accuracy_mean", world, row) > true - 0.0105
        assert mean("accuracy_mean", world, "FlexCFL") > true
        assert f"{100 * true:.1f}" in TEXT
        assert f"{100 * mean('accuracy_mean', world, 'FlexCFL'):.1f}" in TEXT
    for row in ("IFCA", "HypCluster"):
        assert sum(ari < 0.995 for ari in ROWS["permuted labels", row]["ari"]) == 1
        assert f"{100 * mean('accuracy_mean', 'permuted labels', row):.1f}" in TEXT


def ranking(figure):
    rows = [row for row in METHODS if all((world, row) in ROWS for world in WORLDS)]
    return rows, rank(np.array([[mean(figure, world, row) for row in rows] for world in WORLDS]))


def test_few_methods_are_told_apart_by_their_ranks():
    rows, found = ranking("accuracy_mean")
    ranks = dict(zip(rows, found.average, strict=True))
    apart = {(a, b) for a in rows for b in rows if ranks[b] - ranks[a] > found.critical_difference}
    far = ("Local", "FedSoft", "FedCUAU", "Fielding", "FedCCFA")
    assert apart == {*(("FlexCFL", b) for b in far), ("pFedGraph", "Local")}
    assert len(rows) == 27
    assert min(ranks, key=ranks.get) == "FlexCFL"
    assert f"({ranks['FlexCFL']:.1f})" in TEXT
    assert f"critical difference {found.critical_difference:.1f}" in TEXT
    rows, worst = ranking("accuracy_worst")
    assert max(found.p, worst.p) < 0.05
    assert f"(p = {worst.p:.3f})" in TEXT
    assert np.ptp(worst.average) < worst.critical_difference


def test_groups_are_not_always_worth_separating():
    accuracy = means("accuracy_mean", "FedAvg")["feature noise"]
    assert mean("accuracy_mean", "feature noise", "Oracle") < accuracy - 0.05
    best = max(CLUSTERED, key=lambda row: mean("accuracy_mean", "Dirichlet", row))
    step = mean("accuracy_mean", "Dirichlet", "FedAvg, step size")
    assert best == "FedCE"
    assert mean("accuracy_mean", "Dirichlet", best) < step
    for value in (accuracy, step, mean("accuracy_mean", "Dirichlet", best)):
        assert f"{100 * value:.1f}" in TEXT


def test_statistics_of_inputs_do_not_see_permuted_labels():
    accuracy = {row: mean("accuracy_mean", "permuted labels", row) for row in METHODS}
    assert abs(accuracy["EMD-CFL"] - accuracy["FedAvg"]) < 0.01
    assert accuracy["FLT"] < 0.5
    for row in ("EMD-CFL", "FLT", "PACFL", "PCA-KM-HC"):
        assert mean("ari", "permuted labels", row) < 0.05
        assert accuracy[row] <= accuracy["Local"] + 1e-9


def test_shares_of_classes_see_neither_rotations_nor_permuted_labels():
    found = {world: mean("ari", world, "Fielding") for world in (*WIDE, "text")}
    assert f"({found['rotation']:.2f} and {found['permuted labels']:.2f})" in TEXT.replace("ARI ", "")
    assert found["text"] == 1.0


def ratios(figure, row):
    """Return the smallest and the largest ratio of a method's figure to FedAvg's over the worlds."""
    found = [value / mean(figure, world, "FedAvg") for world, value in means(figure, row).items()]
    return round(min(found), 1), round(max(found), 1)


def test_costs_are_multiples_of_those_of_one_model():
    for row in ("CFL", "FeSEM", "FL+HC"):
        for figure in ("federation_bytes_up", "federation_bytes_down", "flops"):
            assert ratios(figure, row) == (1.0, 1.0)
    assert ratios("federation_bytes_down", "IFCA") == (4.0, 12.0)
    assert ratios("federation_bytes_up", "EMD-CFL") == (2.4, 5.0)
    assert ratios("flops", "FedEM") == (2.3, 4.5)
