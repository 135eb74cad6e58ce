"""The rules that end a run, on a few figures worked out by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
from support.each import for_each
from support.refusal import refusal_of

from mpifl.core.errors import UserError
from mpifl.simulation.stop_rules import StopConfig, StopRules


def end(config: dict, values, metric="accuracy", direction=1, column="accuracy_mean"):
    """Return after which evaluation the rules end a run, and the rule; None if they do not."""
    rules = StopRules(StopConfig(**config).rules(metric, direction))
    for step, value in enumerate(values, 1):
        if ending := rules.after({"round": step, column: value}, evaluated=True):
            return step, ending.rule
    return None


def test_a_target_is_met_by_values_as_good_as_it_and_never_by_nan():
    assert end({"target": 0.9}, [0.5, nan, 0.9]) == (3, "target")
    assert end({"target": 0.9}, [0.9 - 1e-12]) == (1, "target")  # rounding
    assert end({"target": 0.9}, [0.9 - 1e-6]) is None
    assert end({"target": 0.3}, [inf, 0.5, 0.2], "loss", -1, "loss") == (3, "target")


@for_each(
    ("config", "values", "expected"),
    [
        ({"patience": 2}, [1, 2, 2, 2, 9], 4),  # an equal value is not better
        ({"patience": 2}, [1, 0, 2, 1, 1], 5),  # a better one begins the count anew
        ({"patience": 2, "min_delta": 1.0}, [1, 2, 3, 3.5], None),  # 2 is not more than 1 above 1; 3 is
        ({"patience": 2, "min_delta": 1.0}, [1, 1.5, 1.9], 3),  # small gains do not move the best
        ({"patience": 3}, [nan, nan, 1, nan, nan, nan], 6),  # NaN is never better
        ({"patience": 2}, [nan, nan, 1], 2),
        ({"patience": 2}, [-inf, -inf, 3], None),  # a run that diverges from the start
        ({"patience": 4}, [4, 3, 2, 1], None),
    ],
)
def test_patience_ends_a_run_after_evaluations_in_a_row_that_are_not_better(config, values, expected):
    found = end(config, values)
    assert found == (None if expected is None else (expected, "patience"))


def test_patience_takes_less_as_better_where_the_metric_does():
    assert end({"patience": 2}, [3, 2, 1, 1, 2], "loss", -1, "loss") == (5, "patience")
    assert end({"patience": 2}, [3, 2, 1, 1, 2], "loss", 1, "loss") == (3, "patience")


def test_budgets_count_after_each_step_and_evaluation_rules_only_after_evaluations():
    budget = StopRules(StopConfig(bytes=100, target=0.5).rules("accuracy", 1))
    figures = {"federation_bytes_up": 40, "federation_bytes_down": 59, "seconds": 9.0}
    assert budget.after({"round": 1, **figures}, evaluated=False) is None
    last = budget.after({"round": 2, **figures, "federation_bytes_up": 41}, evaluated=False)
    assert (last.rule, last.step, last.repeats) == ("bytes", 2, True)
    wall = StopRules(StopConfig(wall_seconds=2.0, seconds=7.0).rules("accuracy", 1))
    assert wall.after({"round": 1, "seconds": 1.9, "virtual_seconds": 6.9}, evaluated=False) is None
    last = wall.after({"round": 2, "seconds": 2.0, "virtual_seconds": 6.9}, evaluated=False)
    assert (last.rule, last.repeats) == ("wall_seconds", False)


def test_an_evaluation_before_the_first_step_ends_nothing_and_the_first_reason_stays():
    rules = StopRules(StopConfig(target=0.5, patience=1).rules("accuracy", 1))
    assert rules.after({"round": 0, "accuracy_mean": 0.9}, evaluated=True) is None
    assert rules.after({"round": 1, "accuracy_mean": 0.1}, evaluated=True) is None  # the first that counts
    assert rules.after({"round": 2, "accuracy_mean": 0.1}, evaluated=True).rule == "patience"
    assert rules.after({"round": 2, "accuracy_mean": 0.9}, evaluated=True).rule == "patience"


def test_a_metric_without_a_column_is_refused_by_the_first_evaluation():
    with pytest.raises(UserError, match=r"stop\.metric = 'accuracy_tuned': no such .*_mean"):
        end({"target": 0.5}, [0.1], metric="accuracy_tuned")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"metric": "loss"}, "metric"),
        ({"better": "less", "bytes": 3}, "better"),
        ({"min_delta": 0.1, "target": 0.5}, "min_delta"),
        ({"patience": 0}, "patience"),
        ({"seconds": 0}, "seconds"),
        ({"target": nan}, "target"),
    ],
)
def test_options_without_effect_and_beyond_their_bounds_are_refused(config, key):
    with refusal_of(key):
        StopConfig(**config)
