"""Drift in reports and comparisons: its words, where lines are, and the table of changes, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose
from support.comparisons import run_of

from mpifl.analysis import drift, figures, report_data
from mpifl.analysis.comparison import Choices, Comparison
from mpifl.analysis.comparison_tables import final_table
from mpifl.analysis.seed_groups import Group
from mpifl.core.errors import UserError
from mpifl.results.reader import Run

SWAP = {"kind": "swap", "at": [2, 4], "share": 0.5}


def change(step: int, after: int | None, **more: Any) -> dict[str, Any]:
    """Return a row of `drift` in summary.json; rounds take 2 s."""
    seconds = {"begins_s": 2.0 * (step - 1), "recovered_after_s": None if after is None else 2.0 * after}
    costs = {"clustering_bytes_up": 1_000_000, "clustering_bytes_down": 3_000_000}
    return {
        "step": step,
        "before": 0.5,
        "worst": 0.25,
        "recovered_after": after,
        "lost": 0.75,
        **seconds,
        **costs,
        **more,
    }


def moving(*changes: dict[str, Any], seed: int = 0, section: dict[str, Any] = SWAP) -> Run:
    """Return a run of six rounds in which data change."""
    run = run_of("ifca", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], seed, drift=section)
    run.summary["drift"] = list(changes)
    return run


def test_drift_is_told_by_its_kind_and_what_is_no_default():
    assert drift.described(moving()) == "swap (at [2, 4], share 0.5)"
    assert drift.described(run_of("ifca", [0.5])) == ""
    facts = report_data.facts(full(moving()))
    assert facts["drift"] == "swap (at [2, 4], share 0.5)"
    assert "drift" not in report_data.facts(full(run_of("ifca", [0.5])))


def test_who_joins_and_leaves_and_what_looks_again_are_facts():
    config = {"leavers": {"share": 0.2, "leaves": 5}, "recluster": {"every": 3}}
    facts = report_data.facts(full(run_of("ifca", [0.5], **config)))
    assert (facts["leavers"], facts["recluster"]) == ("share 0.2, leaves 5", "every 3")
    assert "newcomers" not in facts


def full(run: Run) -> Run:
    """Return a run whose summary has what a description needs."""
    run.summary.update({"clients": 4, "rounds": 6, "model_parameters": 10, "ranks": 1})
    return run


def test_a_line_stands_between_the_evaluations_before_and_after_a_change():
    """Steps 2 and 4, rounds of 2 MB and 2 s: at 1.5 and 3.5 rounds. An evaluation is after its round."""
    group = Group("ifca", (moving(change(2, 1), change(4, 0)),))
    assert_allclose(drift.places(group, "round"), [1.5, 3.5])
    assert_allclose(drift.places(group, "bytes"), [3e6, 7e6])
    (curve,) = report_data.curves([group])["groups"]
    assert curve["drift"]["kind"] == "swap"
    assert curve["drift"]["x"]["round"] == [1.5, 3.5]
    assert curve["drift"]["x"]["bytes"] == [3, 7]
    (still,) = report_data.curves([Group("still", (run_of("ifca", [0.1, 0.2]),))])["groups"]
    assert "drift" not in still


def test_lines_are_drawn_in_figures_for_papers():
    figure = figures.curves(
        [Group("ifca", (moving(change(2, 1), change(4, 0)),))], "accuracy_mean", "accuracy"
    )
    assert figure is not None
    places = [
        [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 2] for axis in figure.axes
    ]
    assert_allclose(places, [[1.5, 3.5], [3.0, 7.0], [3.0, 7.0]])


def test_the_table_has_means_over_the_seeds_that_have_a_figure():
    """Seeds 0 and 1 recover from the first change after 1 and 3 steps of 2 s, one from the second."""
    runs = (moving(change(2, 1), change(4, 2)), moving(change(2, 3), change(4, None), seed=1))
    found = drift.table([Group("IFCA", runs)])
    assert found is not None
    rows = [dict(zip(found.columns, (cell.text for cell in row), strict=True)) for row in found.rows]
    assert rows[0] == {
        **{"run": "IFCA", "drift": "swap", "step": "2", "at, s": "2", "accuracy before, %": "50"},
        **{"worst after, %": "25", "recovery, steps": "2", "recovery, s": "4", "recovered": "2 of 2"},
        **{"score lost": "0.75", "MB to cluster": "4"},
    }
    assert (rows[1]["recovery, steps"], rows[1]["recovered"]) == ("2", "1 of 2")
    assert drift.table([Group("still", (run_of("ifca", [0.5]),))]) is None


def test_changes_at_times_may_be_at_other_steps_of_other_seeds():
    """At steps 2 and 3: the line stands between; a change that only one seed has seen is of one run."""
    section = {"kind": "concept", "at_s": [2.0, 9.0]}
    runs = (
        moving(change(2, 1), section=section),
        moving(change(3, 1), change(6, 0), seed=1, section=section),
    )
    group = Group("IFCA", runs)
    assert_allclose(drift.steps_of(group), [2.5, 6])
    found = drift.table([group])
    assert [cell.text for cell in found.column("recovered")] == ["2 of 2", "1 of 1"]


def test_a_comparison_names_the_drift():
    one, other = moving(change(2, 1)), run_of("fedavg", [0.5])
    both = Comparison((Group("ifca", (one,)), Group("fedavg", (other,))), Choices())
    assert "drift: some runs: swap (at [2, 4], share 0.5)" in final_table(both).notes
    alone = Comparison((Group("ifca", (one,)),), Choices())
    assert "drift: swap (at [2, 4], share 0.5)" in final_table(alone).notes
    assert not [
        note for note in final_table(Comparison((Group("fedavg", (other,)),))).notes if "drift" in note
    ]


@pytest.mark.parametrize("told", [5, [5], [{"before": 1}], [{"step": "x"}]])
def test_a_damaged_summary_is_refused(told):
    run = moving()
    run.summary["drift"] = told
    with pytest.raises(UserError, match=r"drift in summary\.json without steps"):
        drift.table([Group("ifca", (run,))])
