"""What the figures of a comparison draw, point by point."""

from __future__ import annotations

import numpy as np
import pytest
from support.comparisons import group_of, run_of

from mpifl.analysis import figures, statistics
from mpifl.analysis.comparison import Choices, Comparison
from mpifl.analysis.seed_groups import Group

GOOD, BAD = [0.80, 0.84, 0.82, 0.90], [0.50, 0.55, 0.53, 0.59]


def drawn(axis) -> list[tuple[list[float], list[float]]]:
    """Return the x and y of every line of an axis."""
    return [
        (list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axis.get_lines()
    ]


def late(method: str, *rounds: int | None) -> Group:
    """Return runs of five rounds that have 0.9 from these rounds on."""
    curves = [[0.9 if r and i >= r else 0.5 for i in range(1, 6)] for r in rounds]
    return Group(method, tuple(run_of(method, c, seed) for seed, c in enumerate(curves)))


def test_intervals_show_every_run_the_mean_and_its_interval():
    figure = figures.intervals(Comparison((group_of("a", BAD), group_of("b", GOOD))))
    axis = figure.axes[0]
    lines = drawn(axis)
    said = statistics.estimate(100 * np.array(GOOD))
    np.testing.assert_allclose(sorted(lines[3][0]), sorted(100 * x for x in GOOD))
    np.testing.assert_allclose(lines[4][0], [said.low, said.high])
    assert lines[5] == ([pytest.approx(said.mean)], [1.0])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert figures.intervals(Comparison((group_of("a", [0.5]),))) is None
    narrow = Comparison((group_of("a", BAD), group_of("b", GOOD)), Choices(confidence=0.5))
    said = statistics.estimate(100 * np.array(GOOD), confidence=0.5)
    ends = drawn(figures.intervals(narrow).axes[0])[4][0]
    np.testing.assert_allclose(ends, [said.low, said.high])


def test_runs_that_end_without_the_target_have_a_triangle_and_an_open_interval_an_arrow():
    figure = figures.intervals(Comparison((late("a", 2, 3, None),), Choices(target=0.9)))
    rounds = figure.axes[1]
    marks = {line.get_marker(): list(line.get_xdata()) for line in rounds.get_lines()}
    assert (marks["|"], marks[">"], marks[5]) == ([2, 3], [5], [5.0])
    assert drawn(rounds)[2] == ([2.0, 5.0], [0.0, 0.0])  # from 2 on, open


def test_shares_of_runs_at_the_target_are_steps_with_ticks_where_runs_end():
    figure = figures.target(Comparison((late("a", 2, 3, None),), Choices(target=0.9)))
    steps, ticks = drawn(figure.axes[0])
    np.testing.assert_allclose(steps, ([0, 2, 3, 5], [0, 1 / 3, 2 / 3, 2 / 3]))
    np.testing.assert_allclose(ticks, ([5], [2 / 3]))
    assert [axis.get_xlabel() for axis in figure.axes] == ["rounds", "MB", "virtual s"]
    assert figures.target(Comparison((late("a", None, None),), Choices(target=0.9))) is None


def test_differences_are_those_of_equal_seeds():
    figure = figures.differences(Comparison((group_of("a", BAD), group_of("b", GOOD))))
    zero, runs, bar, mean = drawn(figure.axes[0])
    np.testing.assert_allclose(runs[0], [-30, -29, -29, -31])
    assert (zero[0], mean[0]) == ([0.0, 0.0], [pytest.approx(-29.75)])
    assert bar[0][0] < -29.75 < bar[0][1]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "a - b"
    assert figures.differences(Comparison((group_of("a", BAD),))) is None


def test_the_critical_difference_diagram_has_ranks_names_and_bars():
    """Four problems, a, b, c, d always in this order: ranks 1 to 4; 2.569 sqrt(20 / 24) joins three."""
    groups = [
        group_of(m, [x, x], w) for w in "wxyz" for m, x in zip("abcd", (0.9, 0.8, 0.7, 0.6), strict=True)
    ]
    figure = figures.ranks(Comparison(tuple(groups), Choices(ranks=True)))
    axis = figure.axes[0]
    texts = [text.get_text() for text in axis.texts]
    assert texts[:4] == ["1", "2", "3", "4"]
    assert texts[4:8] == ["a (1.00)", "b (2.00)", "c (3.00)", "d (4.00)"]
    assert texts[8] == "CD = 2.35"
    bars = [x for (x, y), line in zip(drawn(axis), axis.get_lines(), strict=True) if line.get_lw() == 3]
    np.testing.assert_allclose(bars, [[0.97, 3.03], [1.97, 4.03]])
    assert figures.ranks(Comparison(tuple(groups))) is None
