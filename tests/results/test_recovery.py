"""How a score falls and comes back after changes of data, by hand."""

from __future__ import annotations

import math

from mpifl.results.recovery import recoveries, recovery_figures

ACCURACIES = [0.5, 0.8, 0.4, 0.7, 0.78, 0.8, 0.9, 0.85]  # at steps 1, 2, ..., 8


def test_a_fall_and_a_fall_that_is_too_small():
    """Step 3 falls from 0.8 to 0.4; 0.76 = 0.95 of 0.8 is reached at step 5, two steps later.

    Lost until step 6: 0.4 + 0.1 + 0.02. At step 7 the score is above 0.8 and stays there.
    """
    first, second = recoveries([*range(1, 9)], ACCURACIES, [3, 7], 0.95, 1)
    assert (first["before"], first["worst"], first["recovered_after"]) == (0.8, 0.4, 2)
    assert math.isclose(first["lost"], 0.4 + 0.1 + 0.02)
    assert (second["before"], second["worst"], second["recovered_after"]) == (0.8, 0.85, 0)
    assert second["lost"] == 0
    figures = recovery_figures([first, second])
    assert math.isclose(figures.pop("score_lost"), 0.52)
    assert figures == {"recovery_steps": 1.0, "recovered": 1.0}


def test_recovery_in_seconds_counts_from_the_beginning_of_the_step_to_the_evaluation():
    """Evaluations at 10, 20, 40, 45 and 60 s: step 3 begins at 20 s, and 0.78 at 60 s is 0.95 of 0.8.

    The score of the change at step 6 is at 1.0 at once. A run without a clock has no times.
    """
    scores, seconds = [0.7, 0.8, 0.4, 0.6, 0.78, 1.0], [10.0, 20.0, 40.0, 45.0, 60.0, 75.0]
    first, second = recoveries([*range(1, 7)], scores, [3, 6], 0.95, 1, seconds, [20.0, 60.0])
    assert (first["begins_s"], first["recovered_after"], first["recovered_after_s"]) == (20.0, 2, 40.0)
    assert (second["begins_s"], second["recovered_after"], second["recovered_after_s"]) == (60.0, 0, 0.0)
    assert recovery_figures([first, second], timed=True)["recovery_seconds"] == 20.0
    (never,) = recoveries([2, 3], [0.8, 0.1], [3], 0.95, 1, [1.0, 2.0], [1.0])
    assert never["recovered_after_s"] is None
    assert math.isnan(recovery_figures([never], timed=True)["recovery_seconds"])
    (untimed,) = recoveries([*range(1, 7)], scores, [3], 0.95, 1)
    assert "recovered_after_s" not in untimed
    assert "recovery_seconds" not in recovery_figures([untimed], timed=False)


def test_a_score_that_falls_late_is_not_recovered_before_it_falls():
    """Clients change one by one: still 0.8 at step 3, 0.5 at step 5, 0.78 at step 6."""
    (found,) = recoveries([2, 3, 4, 5, 6], [0.8, 0.8, 0.7, 0.5, 0.78], [3], 0.95, 1)
    assert (found["worst"], found["recovered_after"]) == (0.5, 3)


def test_evaluations_that_are_apart_count_for_the_steps_since_the_one_before():
    """Evaluated at 2, 4 and 8; at step 3 two steps are lost of which the evaluation at 4 is the first."""
    (found,) = recoveries([2, 4, 8], [0.8, 0.6, 0.7], [3], 0.95, 1)
    assert math.isclose(found["lost"], 0.2 * 2 + 0.1 * 4)
    assert found["recovered_after"] is None
    assert math.isnan(recovery_figures([found])["recovery_steps"])
    assert recovery_figures([found])["recovered"] == 0


def test_errors_rise_and_come_down():
    """An error of 1 rises to 3 and is back at 1.0 / 0.5 = 2 at once after."""
    (found,) = recoveries([1, 2, 3], [1.0, 3.0, 2.0], [2], 0.5, -1)
    assert (found["worst"], found["recovered_after"]) == (3.0, 1)
    assert math.isclose(found["lost"], 2.0 + 1.0)


def test_nothing_is_known_of_a_change_without_evaluations_around_it():
    found, _ = recoveries([4, 8], [0.5, 0.6], [3, 6], 0.95, 1)
    assert math.isnan(found["before"])
    assert found["recovered_after"] is None
