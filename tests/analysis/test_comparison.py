"""What is compared: pairs of seeds, problems, marks, ranks; what is said where nothing can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats
from support.comparisons import group_of, run_of

from mpifl.analysis.comparison import (
    COLUMNS,
    Choices,
    Column,
    Comparison,
    check_target,
    column_of,
    independent,
    limits_of,
)
from mpifl.analysis.comparison_tables import final_table, numbers, rank_table, test_tables
from mpifl.analysis.seed_groups import Group
from mpifl.analysis.statistics import TEST_NAMES
from mpifl.analysis.statistics_drawn import intervals
from mpifl.analysis.survival import median
from mpifl.analysis.tables import BEST, TIED
from mpifl.core.errors import UserError
from mpifl.core.metric import METRICS, Metric

GOOD, NEAR, BAD = (
    [0.80, 0.84, 0.82, 0.90, 0.86],
    [0.79, 0.85, 0.81, 0.90, 0.84],
    [0.50, 0.55, 0.53, 0.59, 0.57],
)
tables_of_tests = test_tables  # pytest would take the function for a test
del test_tables


def compared(*groups: Group, **choices) -> Comparison:
    return Comparison(groups, Choices(**choices))


def marks(comparison: Comparison, key: str = "accuracy") -> dict[int, str]:
    (problem,) = comparison.problems
    return comparison.marks(problem, comparison.column(key))


def test_the_best_is_marked_where_every_other_is_worse_and_who_is_not_worse_with_it():
    """Paired differences of GOOD and BAD are 0.3 with a spread of 0.01; those of GOOD and NEAR are noise."""
    assert marks(compared(group_of("a", BAD), group_of("b", GOOD))) == {1: BEST}
    both = compared(group_of("a", BAD), group_of("b", GOOD), group_of("c", NEAR))
    assert marks(both) == {1: TIED, 2: TIED}
    assert marks(compared(group_of("a", BAD), group_of("b", GOOD), test="none")) == {}
    assert marks(compared(group_of("a", GOOD), group_of("b", GOOD))) == {}


def test_p_values_are_scipys_with_holms_factors():
    three = compared(group_of("a", BAD), group_of("b", GOOD), group_of("c", NEAR))
    (problem,) = three.problems
    found = {c.group: c for c in three.contrasts(problem, three.column("accuracy"))}
    p = {i: stats.ttest_rel(x, GOOD).pvalue for i, x in ((0, BAD), (2, NEAR))}
    for i, factor in ((0, 2), (2, 1)):
        assert found[i].best == 1
        np.testing.assert_allclose([found[i].p, found[i].adjusted], [p[i], factor * p[i]])


def test_seeds_are_paired_by_name_not_by_place():
    """The runs of one group in another order: the same differences."""
    good = group_of("b", [x + 0.02 for x in NEAR])
    mixed = Group("a", tuple(reversed(group_of("a", NEAR).runs)))
    assert marks(compared(good, mixed)) == marks(compared(good, group_of("a", NEAR)))
    c = compared(good, mixed)
    np.testing.assert_allclose(c.paired(1, 0, c.column("accuracy")), -2.0)


@settings(max_examples=6, deadline=None)
@given(some.permutations(range(5)), some.permutations(range(3)))
def test_neither_the_order_of_seeds_nor_of_methods_changes_what_is_found(seeds, order):
    groups = [group_of("a", BAD), group_of("b", GOOD), group_of("c", NEAR)]
    mixed = [Group(g.name, tuple(g.runs[i] for i in seeds)) for g in (groups[j] for j in order)]
    was, now = ({row["run"]: row for row in numbers(compared(*g))} for g in (groups, mixed))
    assert was == now


def test_seeds_that_do_not_pair_are_said_and_refused_where_a_test_was_asked_for():
    other = Group("b", tuple(run_of("b", [x], seed) for seed, x in enumerate(GOOD, 5)))
    plain = compared(group_of("a", BAD), other)
    assert marks(plain) == {}
    (said,) = [note for note in final_table(plain).notes if "do not pair" in note]
    assert "a: 0, 1, 2, 3, 4; b: 5, 6, 7, 8, 9" in said
    with pytest.raises(UserError, match="needs two or more seeds that both methods ran on equal data"):
        compared(group_of("a", BAD), other, test="t")
    with pytest.raises(UserError, match="there is nothing to compare"):
        compared(group_of("a", BAD), test="wilcoxon")


def test_runs_on_other_data_are_no_pair_even_where_a_world_is_something_else():
    """Where data lie on a disk is no part of them."""
    a, b = group_of("a", BAD, "digits", rounds=3), group_of("b", GOOD, "mnist", rounds=3)
    pairs = compared(a, b, problem=("rounds",))
    assert pairs.paired(0, 1, pairs.column("accuracy")).shape == (0,)
    same = compared(a, group_of("b", GOOD, rounds=3), problem=("rounds",))
    assert same.paired(0, 1, same.column("accuracy")).shape == (5,)


def test_partly_shared_seeds_are_tested_over_those():
    few = Group("b", tuple(run_of("b", [x], seed) for seed, x in enumerate(GOOD, 2)))
    c = compared(group_of("a", BAD), few)
    (contrast,) = c.contrasts(c.problems[0], c.column("accuracy"))
    assert contrast.pairs == 3


def test_who_is_better_under_every_common_seed_is_not_called_worse():
    """Seeds 5 to 9, which b did not run, make a's mean the best; under 0 to 4 b is better by five points."""
    a = group_of("a", [0.70, 0.71, 0.70, 0.72, 0.71, *[0.95] * 5])
    b = group_of("b", [0.75, 0.76, 0.75, 0.771, 0.76])
    for test in ("t", "wilcoxon"):
        both = compared(a, b, test=test, confidence=0.9)
        (contrast,) = both.contrasts(both.problems[0], both.column("accuracy"))
        assert (contrast.best, contrast.side) == (0, 1)
        assert contrast.adjusted < 0.1
        assert marks(both) == {0: TIED, 1: TIED}
        (table,) = tables_of_tests(both)
        assert [cell.text for cell in table.column("worse?")] == ["not shown"]
        said = "accuracy: b is better than a, the best mean, by the {}: their seeds differ"
        assert said.format(TEST_NAMES[test]) in final_table(both).notes
    assert not any("seeds differ" in note for note in final_table(compared(a, group_of("b", BAD))).notes)


def test_means_and_signed_ranks_that_disagree_show_nobody_worse():
    """Of ten differences nine are one point, and the tenth is ten to the other side."""
    both = compared(
        group_of("a", [0.7] * 9 + [0.8]), group_of("b", [0.71] * 9 + [0.7]), test="wilcoxon", confidence=0.8
    )
    (contrast,) = both.contrasts(both.problems[0], both.column("accuracy"))
    assert (contrast.best, contrast.side) == (0, 0)
    assert contrast.adjusted < 0.2
    assert marks(both) == {0: TIED, 1: TIED}
    said = "accuracy: of b and a, means and signed ranks prefer different ones"
    assert said in final_table(both).notes


def test_the_last_bit_of_a_mean_decides_neither_tests_nor_wins_nor_ranks():
    """Means over clients of equal sums differ in their last bit, as 0.45 and 0.44999999999999996 do."""
    low, high = np.nextafter(0.45, 0), 0.45
    rest = ([0.60, 0.61, 0.62, 0.63, 0.64], [0.61, 0.63, 0.65, 0.67, 0.69])
    noisy, exact = (
        compared(group_of("a", [x, *rest[0]]), group_of("b", [high, *rest[1]]), test="wilcoxon")
        for x in (low, high)
    )
    assert marks(noisy) == marks(exact)
    found = [c for both in (noisy, exact) for c in both.contrasts(both.problems[0], both.column("accuracy"))]
    assert found[0].p == found[1].p
    shown = [tables_of_tests(both)[0].column("better in")[0].text for both in (noisy, exact)]
    assert shown == ["0 of 6", "0 of 6"]
    above = compared(group_of("a", [np.nextafter(0.45, 1), *rest[0]]), group_of("b", [high, *rest[1]]))
    assert tables_of_tests(above)[0].column("better in")[0].text == "0 of 6"
    three = ranked([low, high, 0.3], [0.9, 0.8, 0.7])
    np.testing.assert_array_equal(three.ranking.ranks, [[1.5, 1.5, 3], [1, 2, 3]])


def test_a_target_is_met_by_a_mean_that_only_rounding_tells_from_it():
    """The mean of five clients with 0.4, 0.3, 0.6, 0.8 and 0.7 is 0.5599999999999999."""
    group = Group("a", (run_of("a", [0.1, 0.5599999999999999]),))
    assert group.reached(0.56, "round").met.tolist() == [True]
    assert group.reached(0.5601, "round").met.tolist() == [False]


def test_a_run_that_repeats_another_one_is_no_further_evidence():
    group = group_of("a", BAD)
    (kept,), repeated, rerun = independent([Group("a", (*group.runs, *group.runs[:2]))])
    assert kept == group
    assert (repeated, rerun) == (("a-digits-0", "a-digits-1"), ())


def test_runs_of_one_seed_whose_last_bits_differ_are_one_seed():
    """A group twice, the second time with other last bits: no interval gets narrower."""
    group, others = group_of("a", BAD), [run_of("a", [x + 1e-9], seed) for seed, x in enumerate(BAD)]
    for run in others:
        run.summary["digest"] += " elsewhere"
    (kept,), repeated, rerun = independent([Group("a", (*group.runs, *others))])
    assert (kept, repeated) == (group, ())
    assert [str(run.folder) for run in rerun] == [f"a-digits-{seed}" for seed in range(5)]
    twice = Comparison((kept, group_of("b", GOOD)), Choices(interval="t"), repeated, rerun)
    once = compared(group, group_of("b", GOOD), interval="t")
    assert twice.estimate(0, twice.column("accuracy")) == once.estimate(0, once.column("accuracy"))
    table = final_table(twice)
    assert table.rows == final_table(once).rows
    names = ", ".join(str(run.folder) for run in rerun)
    said = (
        f"left out, another run of their configuration has their seeds and data, and another digest: {names}"
    )
    assert said in table.notes


def test_one_seed_has_no_interval_and_that_is_said():
    one = compared(group_of("a", [0.5]), group_of("b", GOOD), interval="t")
    table = final_table(one)
    assert table.column("accuracy, %")[0].text == "50.00"
    assert [cell.text for cell in table.column("seeds")] == ["1", "5"]
    assert "one seed, no interval and no test: a" in table.notes
    half = stats.t.ppf(0.975, 4) * np.std(GOOD, ddof=1) / np.sqrt(5)
    mean = np.mean(GOOD)
    said = f"{100 * mean:.2f} [{100 * (mean - half):.2f}, {100 * (mean + half):.2f}]"
    assert table.column("accuracy, %")[1].text == said


def test_signed_ranks_over_few_seeds_cannot_find_anything_and_that_is_said():
    """Five pairs: p is at least 2 / 32 = 0.0625. Seven: 0.0156."""
    few = compared(group_of("a", BAD), group_of("b", GOOD), test="wilcoxon")
    assert marks(few) == {}, "who cannot be told apart by any numbers is no tie"
    assert any("signed ranks cannot go below p = 0.0625" in note for note in final_table(few).notes)
    more = compared(group_of("a", [*BAD, 0.5, 0.51]), group_of("b", [*GOOD, 0.8, 0.9]), test="wilcoxon")
    assert marks(more) == {1: BEST}
    assert not any("cannot go below" in note for note in final_table(more).notes)


def test_few_pairs_of_one_method_do_not_keep_signed_ranks_from_finding_another():
    """a: 2 / 2^10 x 2 = 0.0039 is found. d: five pairs, 2 / 2^5 = 0.0625. e has one pair: no test."""
    a, b = (
        group_of("a", [0.5 + x / 900 for x in range(10)]),
        group_of("b", [0.8 + x / 500 for x in range(10)]),
    )
    d, e = group_of("d", [0.6 + x / 300 for x in range(5)]), group_of("e", [0.6])
    found = compared(a, b, d, e, test="wilcoxon")
    assert [cell.text for cell in tables_of_tests(found)[0].column("worse?")] == [
        "yes",
        "not shown",
        "not tested",
    ]
    notes = [note for note in final_table(found).notes if "cannot go below" in note]
    said = (
        "5 pairs and 2 comparisons: signed ranks cannot go below p = 0.0625, so nothing can be found of d; "
    )
    assert notes == [said + "use more seeds, or --test t"]
    seven = group_of(
        "c", [0.5 + x / 900 for x in range(7)]
    )  # 2 / 2^7 = 0.016, not three times it: e and f do not count
    alone = compared(b, seven, e, group_of("f", [0.61]), test="wilcoxon", confidence=0.97)
    assert not any("cannot go below" in note for note in final_table(alone).notes)


def curve(to_target: int | None, rounds: int = 10) -> list[float]:
    """Return accuracies that meet 0.9 in a round; None for never."""
    return [0.9 if to_target and i >= to_target else 0.5 for i in range(1, rounds + 1)]


def timed(method: str, *rounds: int | None, mb: float = 1.0) -> Group:
    """Return a group whose runs meet 0.9 in these rounds."""
    return Group(method, tuple(run_of(method, curve(r), seed, mb=mb) for seed, r in enumerate(rounds)))


def test_methods_that_often_fail_do_not_win_by_their_lucky_runs():
    """Lucky: rounds 2 and 3 in two of eight runs. Steady: 6 to 8 in all; by means over arrivals it loses."""
    lucky, steady = timed("lucky", 2, 3, *[None] * 6), timed("steady", 6, 7, 7, 8, 6, 7, 8, 7)
    both = compared(lucky, steady, target=0.9)
    table = final_table(both)
    assert [cell.text for cell in table.column("rounds to target")] == ["> 10", "7"]
    assert [cell.text for cell in table.column("MB to target")] == ["> 20", "14"]
    assert [cell.text for cell in table.column("not reached")] == ["6 of 8", ""]
    assert marks(both, "rounds_to_target") == {1: BEST}
    p = both.contrasts(both.problems[0], both.column("rounds_to_target"))[0].p
    data = [stats.CensoredData.right_censored(x, c) for x, c in (([2, 3, *[10] * 6], [0, 0, *[1] * 6]),)]
    assert p == stats.logrank(data[0], stats.CensoredData([6, 7, 7, 8, 6, 7, 8, 7])).pvalue
    (note,) = [note for note in table.notes if "censored" in note]
    assert note.endswith("not reached by lucky (6 of 8)")


def test_steps_of_the_server_and_rounds_are_not_tested_against_each_other():
    """A step of an asynchronous server may be one upload: what it took is compared in bytes and time."""
    rounds, steps = timed("rounds", 2, 3, 2, 3), timed("steps", 6, 7, 7, 8, mb=0.1)
    for run in steps.runs:
        run.summary["asynchronous"] = {}
    both = compared(rounds, steps, target=0.9)
    assert marks(both, "rounds_to_target") == marks(both, "rounds_to_target_mean") == {}
    assert marks(both, "mb_to_target") == {1: BEST}
    note = "rounds: steps of the server, which are not tested against rounds: steps"
    assert note in final_table(both).notes
    assert note not in final_table(compared(steps, target=0.9)).notes
    with pytest.raises(UserError, match="counts steps of the server in steps; use mb_to_target"):
        compared(rounds, steps, target=0.9, test="t", metric="rounds_to_target")
    slower = timed("slower", 8, 9, 8, 9)
    assert marks(compared(rounds, slower, target=0.9), "rounds_to_target") == {0: BEST}


def test_two_seeds_cannot_tell_who_meets_the_target_earlier_and_that_is_said():
    """Two against two: the log-rank test gives at least p = 0.09. Four against four: 0.007."""
    few = compared(timed("a", 2, 3), timed("b", 4, 5), target=0.9)
    assert marks(few, "rounds_to_target") == {}
    said = (
        "to target: the log-rank test cannot go below p = 0.0896 with so few seeds, so nothing can be found"
    )
    assert any(note.startswith(said) for note in final_table(few).notes)
    more = compared(timed("a", 2, 3, 2, 3), timed("b", 3, 2, 4, 3), target=0.9)
    assert marks(more, "rounds_to_target") == {0: TIED, 1: TIED}
    assert not any("with so few seeds" in note for note in final_table(more).notes)


def test_who_never_meets_the_target_is_no_tie_with_the_best():
    """Nobody of never meets it, two of five of some do: not shown to differ, and no tie."""
    some, never = timed("some", 8, 9, None, None, None), timed("never", *[None] * 5)
    found = compared(some, never, target=0.9)
    (contrast,) = found.contrasts(found.problems[0], found.column("rounds_to_target"))
    assert contrast.p > 0.05
    assert marks(found, "rounds_to_target") == {}


@pytest.mark.parametrize("interval", ["t", "bootstrap"])
def test_intervals_stay_within_the_range_of_the_metric(interval):
    """Mean 0.99, standard error 0.006: Student's interval would end above 1, mirrored begin below 0."""
    values = [1.0, 0.98, 1.0, 0.97, 1.0]
    for group, ends in ((group_of("a", values), "high"), (group_of("a", [1 - v for v in values]), "low")):
        found = compared(group, interval=interval)
        said = found.estimate(0, found.column("accuracy"))
        assert 0.0 <= said.low < said.mean < said.high <= 100.0
        if interval == "t":
            assert getattr(said, ends) == {"high": 100.0, "low": 0.0}[ends]
        (panel, *_) = intervals(found)
        assert (panel.bars[0].low, panel.bars[0].high) == (said.low, said.high)


def test_ranges_of_figures():
    percent, error, r2 = METRICS["accuracy"], METRICS["mse"], METRICS["r2"]
    told = {
        ("accuracy_mean", percent): (0.0, 1.0),
        ("accuracy_std", percent): (0.0, np.inf),
        ("mse_worst", error): (0.0, np.inf),
        ("r2_mean", r2): (-np.inf, 1.0),
        ("ari", percent): (-1.0, 1.0),
        ("arity_mean", percent): (-np.inf, np.inf),
        ("num_clusters", percent): (0.0, np.inf),
        ("federation_bytes_up", percent): (0.0, np.inf),
        ("gain_mean", Metric("gain", "gain", percent=False)): (-np.inf, np.inf),
        ("loss", percent): (-np.inf, np.inf),
    }
    assert {key: limits_of(Column("t", key[0]), key[1]) for key in told} == told


def test_restricted_means_go_as_far_as_the_first_run_that_ends_without_the_target():
    """A round is 2 MB for one and 6 MB for the other: after 20 MB the first method's runs are unknown."""
    cheap, dear = timed("cheap", 4, None), timed("dear", 2, 5, mb=3.0)
    both = compared(cheap, dear, target=0.9, columns=("run", "mb_to_target_mean"))
    table = final_table(both)
    assert table.rows[0][1].text == "14"  # 8 and 20
    assert table.rows[1][1].text == "16"  # 12 and, of 30, 20
    assert any("means of min(needed, 20)" in note for note in table.notes)


def test_the_best_by_restricted_means_has_the_lowest_of_them():
    """Means (11 x 3 + 9 x 10) / 20 = 6.15 and 4, medians 3 and 4: each has another best."""
    a, b = timed("a", *[3] * 11, *[10] * 9), timed("b", *[4] * 20)
    key = "rounds_to_target_mean"
    both = compared(a, b, target=0.9, columns=("run", key), metric=key, test="t")
    (contrast,) = both.contrasts(both.problems[0], both.column(key))
    assert (contrast.group, contrast.best, contrast.side) == (0, 1, -1)
    assert contrast.p == pytest.approx(stats.ttest_1samp([-1.0] * 11 + [6.0] * 9, 0).pvalue)
    assert marks(both, key) == {1: BEST}
    notes = final_table(both).notes
    assert not any("is better than" in note for note in notes)


def test_a_table_of_restricted_means_alone_does_not_speak_of_medians():
    """The median over seeds is another column, and what the means leave out is said by their own note."""
    both = timed("a", 4, 6), timed("b", 2, None)
    means = final_table(compared(*both, target=0.9, columns=("run", "rounds_to_target_mean"))).notes
    assert not any("median" in note for note in means)
    assert "to target: not reached by b (1 of 2)" in means
    all_met = final_table(compared(both[0], target=0.9, columns=("run", "rounds_to_target_mean"))).notes
    assert not any("median" in note for note in all_met)
    medians = final_table(compared(*both, target=0.9, columns=("run", "rounds_to_target"))).notes
    said = "to target: Kaplan-Meier medians, runs that end before it are censored; not reached by b (1 of 2)"
    assert said in medians


def test_who_meets_the_target_earlier_by_the_log_rank_test_is_not_called_worse():
    """Medians 3 and 4; but nine of b's runs are there first, and nine of a's never get there."""
    both = compared(timed("a", *[3] * 11, *[None] * 9), timed("b", *[1] * 9, *[4] * 11), target=0.9)
    (contrast,) = both.contrasts(both.problems[0], both.column("rounds_to_target"))
    assert (contrast.group, contrast.best, contrast.side) == (1, 0, 1)
    assert contrast.adjusted < 0.05
    assert marks(both, "rounds_to_target") == {0: TIED, 1: TIED}
    said = "rounds_to_target: b is better than a, the best median, by the log-rank test"
    assert said in final_table(both).notes


def test_where_no_median_is_reached_the_best_is_not_who_is_named_first():
    """A method that sends nothing ends at 0 MB: up to there all restricted means are 0, and say nothing.

    By log-rank over never and some: at 8 MB, 4 of 20 runs meet the target, all of them some's, 10 of 20 at
    risk. Variance 4 x 1/2 x 1/2 x 16/19, so z = 2 / sqrt(16/19).
    """
    never, some = timed("never", *[None] * 10), timed("some", *[4] * 4, *[None] * 6)
    free = timed("free", *[None] * 10, mb=0.0)
    found = []
    for groups in ((never, some, free), (some, free, never), (free, never, some)):
        both = compared(*groups, target=0.9)
        contrasts = both.contrasts(both.problems[0], both.column("mb_to_target"))
        names = {groups[c.group].name: (groups[c.best].name, c.side, c.p) for c in contrasts}
        found.append((names, {groups[i].name: mark for i, mark in marks(both, "mb_to_target").items()}))
        assert not any("is better than" in note for note in final_table(both).notes)
    assert found[0] == found[1] == found[2]
    best, side, p = found[0][0]["never"]
    assert (best, side) == ("some", -1)
    assert p == pytest.approx(2 * stats.norm.sf(2 / np.sqrt(16 / 19)))


def test_restricted_means_leave_out_groups_without_the_column():
    """Runs on a wall clock have no virtual seconds."""
    without = timed("b", 4, None)
    for run in without.runs:
        del run.series["virtual_seconds"]
    both = compared(without, timed("a", 4, None), target=0.9, columns=("run", "virtual_s_to_target_mean"))
    table = final_table(both)
    assert [row[1].text for row in table.rows] == ["", "14"]
    assert any("means of min(needed, 20)" in note for note in table.notes)


def test_worlds_are_compared_apart():
    """The best of each problem, and each p value over that problem's others only."""
    groups = [
        group_of(m, x, w)
        for w, x_a, x_b in (("p", BAD, GOOD), ("q", GOOD, BAD))
        for m, x in (("a", x_a), ("b", x_b))
    ]
    both = compared(*groups)
    assert [problem.name for problem in both.problems] == ["p", "q"]
    found = [both.marks(problem, both.column("accuracy")) for problem in both.problems]
    assert found == [{1: BEST}, {2: BEST}]
    assert [table.notes[0].split(";")[0] for table in tables_of_tests(both)] == [
        "accuracy, %: best in p is b",
        "accuracy, %: best in q is a",
    ]


def ranked(*scores: list[float], **choices) -> Comparison:
    """Return a comparison of methods m0, m1, ... with such accuracies in problems w0, w1, ..."""
    groups = [group_of(f"m{j}", [x, x], f"w{w}") for w, row in enumerate(scores) for j, x in enumerate(row)]
    return compared(*groups, ranks=True, **choices)


def test_ranks_over_worlds_by_hand():
    """Ranks 1 2 3, 1 3 2, 1 2.5 2.5: averages 1, 2.5, 2.5; the critical difference is 2.343 sqrt(12 / 18)."""
    three = ranked([0.9, 0.8, 0.7], [0.9, 0.7, 0.8], [0.9, 0.5, 0.5])
    np.testing.assert_allclose(three.ranking.average, [1, 2.5, 2.5])
    assert three.ranking.critical_difference == pytest.approx(2.343 * np.sqrt(12 / 18), abs=1e-3)
    table = rank_table(three)
    assert table.columns == ("method", "average rank", "w0", "w1", "w2")
    assert [cell.text for cell in table.rows[0]] == ["m0", "1", "1", "1", "1"]
    assert three.ranking.p == pytest.approx(stats.friedmanchisquare([9, 9, 9], [8, 7, 5], [7, 8, 5]).pvalue)


def test_methods_and_problems_of_a_sweep_are_ranked_under_the_labels_of_their_values():
    """Each case has one label, of its method and its problem; where one case has none, settings are names."""
    label = {"m0": "ours, two", "m1": "theirs", "m2": "FedAvg", "w0": "digits", "w1": "letters, 26"}
    groups = [
        group_of(m, [x, x], w, output={"label": f"{label[m]}, {label[w]}"})
        for w in ("w0", "w1")
        for m, x in (("m0", 0.9), ("m1", 0.8), ("m2", 0.7))
    ]
    found = compared(*groups, ranks=True)
    assert [name for name, _ in found.methods] == ["ours, two", "theirs", "FedAvg"]
    assert [groups for _, groups in found.methods] == [(0, 3), (1, 4), (2, 5)]
    assert rank_table(found).columns == ("method", "average rank", "digits", "letters, 26")
    groups[0] = group_of("m0", [0.9, 0.9], "w0")
    found = compared(*groups, ranks=True)
    assert [name for name, _ in found.methods] == ["m0", "m1", "m2"]
    assert [problem.name for problem in found.problems] == ["w0", "w1"]


@pytest.mark.parametrize(("thirds", "mark"), [(8, ""), (0, BEST)])
def test_no_method_is_marked_where_friedmans_test_finds_no_difference(thirds, mark):
    """15 methods, 14 problems; m0 ranks third or second, the others are level: 8.36 to 8.43.

    With a third rank in 8 of 14 problems, m0's average of 2.57 is more than the critical difference of 5.73
    before the others, yet chi-square is 22.1: p = 0.076. With second ranks alone, p is 0.019.
    """
    ranks = []
    for w in range(14):
        first = 3 if w < thirds else 2
        rest = [x for x in range(1, 16) if x != first]
        ranks.append([first, *(rest[(j + w) % 14] for j in range(14))])
    found = ranked(*([1 - x / 20 for x in row] for row in ranks))
    p = stats.friedmanchisquare(*np.array(ranks).T).pvalue
    assert found.ranking.p == pytest.approx(p)
    assert (p > 0.05) == (mark == "")
    average = np.sort(found.ranking.average)
    assert average[1] - average[0] > found.ranking.critical_difference
    table = rank_table(found)
    assert [cell.mark for cell in table.column("average rank")] == [mark] + [""] * 14
    said = "Friedman's test finds no difference between these methods"
    assert (said in table.notes) == (mark == "")


def test_methods_that_differ_in_their_names_only_are_ranked_apart():
    """Two names ran the same seeds: each is a method of its own, in ranks as in the other tables."""
    scores = {"x": 0.6, "y": 0.9}
    groups = [
        Group(name, group_of("a", [value, value], w, name=name).runs)
        for w in ("p", "q")
        for name, value in scores.items()
    ]
    groups += [group_of("b", [0.7, 0.7], w, name="x") for w in ("p", "q")]
    found = compared(*groups, ranks=True)
    assert [name for name, _ in found.methods] == ["a, x", "a, y", "b"]
    np.testing.assert_allclose(found.ranking.average, [3, 1, 2])
    with pytest.raises(UserError, match="has no runs in q"):
        _ = compared(*groups[:3], *groups[4:], ranks=True).methods


def test_ranks_by_a_figure_of_which_less_is_better():
    """The loss is one minus the accuracy: the same ranks, marks, sides and wins; differences change sign."""
    scores = [0.9, 0.8, 0.7], [0.9, 0.7, 0.8], [0.6, 0.5, 0.7]
    np.testing.assert_array_equal(ranked(*scores).ranking.ranks, ranked(*scores, metric="loss").ranking.ranks)
    groups = group_of("a", BAD), group_of("b", GOOD), group_of("c", NEAR)
    found = []
    for metric in ("accuracy", "loss"):
        both = compared(*groups, metric=metric, test="t")
        (problem,) = both.problems
        contrasts = both.contrasts(problem, both.column(metric))
        (table,) = tables_of_tests(both)
        wins = {row[0].text: row[4].text for row in table.rows}
        found.append((marks(both, metric), {c.group: (c.best, c.side) for c in contrasts}, wins))
    assert found[0] == found[1]
    assert found[1][1:] == ({0: (1, -1), 2: (1, -1)}, {"a": "0 of 5", "c": "1 of 5"})


def test_a_level_that_is_not_95_percent():
    """Intervals of means, differences, medians, answers and Nemenyi's difference follow the level."""
    groups = group_of("a", [0.80, 0.84, 0.82, 0.90, 0.86]), group_of("b", [0.79, 0.82, 0.84, 0.87, 0.83])
    d = compared(*groups).paired(1, 0, COLUMNS["accuracy"])
    p = stats.ttest_1samp(d, 0.0).pvalue
    assert 0.05 < p < 0.5
    for level, worse in ((0.95, "not shown"), (0.6, "yes")):
        both = compared(*groups, confidence=level, interval="t", columns=("run", "accuracy"), test="t")
        low, high = stats.t.interval(level, 4, 100 * np.mean(GOOD), 100 * stats.sem(GOOD))
        assert final_table(both).rows[0][1].text.endswith(f"[{low:.2f}, {high:.2f}]")
        (table,) = tables_of_tests(both)
        low, high = stats.t.interval(level, 4, np.mean(d), stats.sem(d))
        texts = {name: cell.text for name, cell in zip(table.columns, table.rows[0], strict=True)}
        assert texts[f"{100 * level:g} % interval"] == f"[{low:+.3g}, {high:+.3g}]"
        assert texts["worse?"] == worse
    scores = [0.9, 0.8, 0.7], [0.9, 0.7, 0.8], [0.6, 0.5, 0.7]
    q = stats.studentized_range.ppf(0.7, 3, np.inf) / 2**0.5
    cd = ranked(*scores, confidence=0.7).ranking.critical_difference
    np.testing.assert_allclose(cd, q * (3 * 4 / (6 * 3)) ** 0.5)
    for level in (0.95, 0.5):
        runs = compared(timed("a", 2, 3, 4, 5, 9), target=0.9, confidence=level, interval="t")
        column = runs.column("rounds_to_target")
        said, wanted = runs.median(0, column), median(runs.reached(0, column), "t", level)
        assert (said.low, said.high) == (wanted.low, wanted.high)
    assert said.low > 2


@pytest.mark.parametrize(
    ("groups", "choices", "message"),
    [
        ([group_of("a", BAD), group_of("b", GOOD)], {}, "one problem has no ranks"),
        ([group_of("a", BAD, w) for w in "pq"], {}, "use three methods; --test compares two"),
        (
            [group_of(m, BAD, w, rounds=len(w)) for m in "abc" for w in ("p", "qq")],
            {},
            "has no runs in qq; where these differ between problems, too, use --problem data,rounds",
        ),
        ([group_of("a", BAD)], {"problem": ("dta",)}, "--problem = 'dta': no key of these runs"),
        ([group_of("a", BAD)], {"metric": "round"}, "has no better and worse"),
        ([group_of("a", BAD)], {"metric": "seeds"}, "--metric = 'seeds': has no better and worse"),
        ([group_of("a", BAD)], {"columns": ("run", "acuracy")}, "column = 'acuracy': no such column; "),
    ],
)
def test_what_does_not_fit_these_runs_is_refused(groups, choices, message):
    with pytest.raises(UserError, match=message):
        _ = Comparison(tuple(groups), Choices(ranks=True, **choices)).methods


def test_each_known_column_is_named_once():
    with pytest.raises(UserError, match="no such column; known: accuracy, ") as error:
        Comparison((group_of("a", BAD),), Choices(columns=("xyz",)))
    known = str(error.value.remedy).partition("known: ")[2].split(", ")
    assert sorted(set(known)) == known


def test_worlds_that_differ_in_more_than_data_are_worlds_where_that_is_said():
    groups = [
        group_of(m, x, w, rounds=len(w))
        for m, x in zip("abc", (BAD, GOOD, NEAR), strict=True)
        for w in ("p", "qq")
    ]
    found = compared(*groups, ranks=True, problem=("data", "rounds"))
    assert [name for name, _ in found.methods] == ["a", "b", "c"]
    np.testing.assert_allclose(found.ranking.average, [3, 1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "nan"}, "--target = 'nan': use an accuracy"),
        ({"confidence": "95"}, "--confidence = 95: use a share in"),
        ({"confidence": "x"}, "--confidence = 'x': use a share in"),
        ({"metric": "loss"}, "--metric = 'loss': has no effect"),
        ({"columns": "run,,loss"}, "name keys, with commas between them"),
        ({"columns": "run,run"}, "is named twice"),
        ({"problem": ""}, "name keys"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Choices.of(**options)


def test_a_run_that_diverged_sets_no_target():
    """The target is 95 % of the best that is finite; where none is, nobody meets it."""
    assert compared(group_of("a", [0.8]), group_of("b", [np.inf])).target == pytest.approx(0.95 * 0.8)
    lost = compared(group_of("a", [np.inf]), group_of("b", [np.inf]))
    assert np.isnan(lost.target)
    assert not lost.reached(0, lost.column("mb_to_target")).met.any()


def test_a_method_that_diverged_is_ranked_last_and_said_not_to_be_tested():
    """c is the best on the first problem, and diverges for one of two seeds of the second."""
    finals = {("a", "p"): [0.8, 0.8], ("b", "p"): [0.7, 0.7], ("c", "p"): [0.9, 0.9]}
    finals |= {("a", "q"): [0.8, 0.8], ("b", "q"): [0.7, 0.7], ("c", "q"): [0.9, -np.inf]}
    found = compared(*(group_of(name, values, where) for (name, where), values in finals.items()), ranks=True)
    assert found.ranking.ranks.tolist() == [[2, 3, 1], [1, 2, 3]]
    assert "accuracy: left empty, and not tested, where runs diverged: c" in final_table(found).notes


def test_a_target_is_a_value_that_the_metric_can_have():
    with pytest.raises(UserError, match=r"--target = 85.0: use an accuracy in \[0, 1\]"):
        compared(group_of("a", BAD), target=85.0)
    check_target(85.0, METRICS["mse"])


def test_chosen_columns_come_in_their_order_and_any_column_of_the_metrics_may_be_one():
    table = final_table(compared(group_of("a", BAD), columns=("run", "loss", "seeds", "accuracy")))
    assert table.columns == ("run", "loss", "seeds", "accuracy, %")
    assert table.rows[0][1].text == f"{1 - np.mean(BAD):.4g} +- {np.std(BAD, ddof=1):.4g}"


def test_columns_of_a_users_own_metric_have_its_direction():
    """Of an error rate less is better, whatever its column is called; of a standard error, too."""
    group = group_of("a", BAD)
    for run in group.runs:
        run.summary["metric"] = {"name": "wer", "title": "word errors", "better": -1, "percent": True}
        for what in ("mean", "worst", "worst_tenth", "std", "standard_error"):
            run.series[f"wer_{what}"] = run.series["accuracy_mean"]
        run.series["accuracy_standard_error"] = run.series["accuracy_mean"]
    for what in ("mean", "worst", "worst_tenth", "standard_error"):
        assert column_of(f"wer_{what}", group.runs).better == -1
    assert column_of("accuracy_standard_error", group.runs).better == -1
    assert column_of("accuracy_mean", group.runs).better == 1


def rated(method: str, errors: list[float], **summary) -> Group:
    """Return a group whose user scores clients by `error_rate`."""
    group = group_of(method, GOOD, evaluation={"metrics": ["mine.py:error_rate"]})
    for run, value in zip(group.runs, errors, strict=True):
        run.summary.update(summary)
        run.series["error_rate_mean"] = np.array([value])
    return group


def test_a_function_of_ones_own_has_the_direction_that_it_declares():
    """Its least value is the best where it says so; where it says nothing, nothing is marked or tested."""
    told = [rated(name, errors, directions={"error_rate": -1}) for name, errors in (("a", GOOD), ("b", BAD))]
    assert marks(compared(*told), "error_rate_mean") == {1: BEST}
    silent = [rated("a", GOOD), rated("b", BAD)]
    assert marks(compared(*silent), "error_rate_mean") == {}
    shown = final_table(compared(*silent, columns=("run", "error_rate_mean"), interval="t"))
    assert "[" in shown.rows[0][1].text
    message = "error_rate_mean'.*: declare error_rate.better = 1 or -1 beside the function and run again"
    with pytest.raises(UserError, match=message):
        compared(*silent, metric="error_rate_mean", test="t")
    assert column_of("error_rate_mean", [*told[0].runs, *silent[1].runs]).better == 0


def test_numbers_are_numbers():
    rows = numbers(compared(timed("a", 2, None), timed("b", 3, 4), target=0.9))
    assert rows[0]["unreached"] == 1
    assert rows[0]["mb_to_target_median"] == 4.0
    assert rows[0]["mb_to_target_high"] is None
    assert rows[1]["accuracy_mean"] == 90.0
    texts = {name for row in rows for name, value in row.items() if isinstance(value, str)}
    assert texts <= {"run", "problem", *(name for name in rows[0] if name.endswith("_mark"))}


def test_columns_that_runs_lack_are_named():
    """One run of b has no ARI, and nobody has the figure that was asked for."""
    a, b = group_of("a", GOOD), group_of("b", BAD)
    b.runs[0].series["ari"][:] = np.nan
    assert "ari: left empty where runs lack it: b (4 of 5 have it)" in final_table(compared(a, b)).notes
    for run in (*a.runs, *b.runs):
        run.series["ari"][:] = np.nan
    notes = final_table(compared(a, b, columns=("accuracy", "ari"))).notes
    assert "ari: no run has it" in notes
    assert not any(note.startswith("accuracy: ") for note in notes)
