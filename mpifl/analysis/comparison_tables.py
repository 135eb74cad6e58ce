"""The tables of a comparison: final figures with marks and notes, tests against the best, ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpifl.core.errors import first_of

from . import drift, statistics
from .comparison import COLUMNS, NAMES, NO_TEST, STD, Column, Comparison, Contrast, Problem, seed_of
from .seed_groups import metric_of
from .tables import BEST, TIED, Cell, Table

FORMS = {"g4": "{:.4g}", "g3": "{:.3g}", "f0": "{:.0f}", "f2": "{:.2f}"}
USUAL = ("run", "seeds", "rounds", *(k for k in COLUMNS if not k.endswith("_mean")), "unreached")


def final_table(comparison: Comparison) -> Table:
    """Return the final figures of each group, with the marks of the tests and notes."""
    chosen = comparison.choices.columns
    keys = [k for k in chosen or USUAL]
    cells = {key: _cells(comparison, key) for key in keys}
    if not chosen:
        cells = {key: found for key, found in cells.items() if any(cell.text for cell in found)}
    shown = tuple(title_of(comparison, key) for key in cells)
    rows = tuple(zip(*cells.values(), strict=True))
    return Table(shown, rows, (*_notes(comparison, [*cells]), *_gaps(comparison, keys)))


def _gaps(comparison: Comparison, keys: Sequence[str]) -> Iterator[str]:
    """Yield a note for each column with empty cells because runs lack the figure or diverged."""
    for key in keys:
        if key in NAMES or (column := comparison.column(key)).target:
            continue
        infinite = [g.name for g in comparison.groups if np.isinf(g.final(column.of)).any()]
        if infinite:
            yield f"{key}: left empty, and not tested, where runs diverged: {first_of(infinite)}"
        have = [int((~np.isnan(group.final(column.of))).sum()) for group in comparison.groups]
        some = [
            f"{group.name} ({count} of {len(group.runs)} have it)"
            for group, count in zip(comparison.groups, have, strict=True)
            if 0 < count < len(group.runs)
        ]
        if some:
            yield f"{key}: left empty where runs lack it: {first_of(some)}"
        if comparison.choices.columns and not any(have):
            yield f"{key}: no run has it"


def title_of(comparison: Comparison, key: str) -> str:
    """Return the title of a column of the table of final figures."""
    return {"unreached": "not reached"}.get(key, key) if key in NAMES else comparison.column(key).title


def _cells(comparison: Comparison, key: str) -> list[Cell]:
    """Return the cells of a column of the table of final figures; a missing figure gives empty text."""
    groups = comparison.groups
    if key == "run":
        return [Cell(group.name) for group in groups]
    if key == "seeds":
        return [Cell(str(len(group.runs))) for group in groups]
    if key == "rounds":
        return [Cell("-".join(map(str, dict.fromkeys(group.lengths)))) for group in groups]
    if key == "unreached":
        found = [group.reached(comparison.target, "round") for group in groups]
        texts = [f"{r.unmet} of {len(r.met)}" if r.unmet else "" for r in found]
        return [Cell(text) for text in texts]
    column = comparison.column(key)
    marks = {i: m for problem in comparison.problems for i, m in comparison.marks(problem, column).items()}
    out = [Cell(_text(comparison, i, column), marks.get(i, "")) for i in range(len(groups))]
    rare = key == "unplaced" and not any(comparison.groups[i].final(column.of).any() for i in range(len(out)))
    return [Cell("") for _ in out] if rare else out


def _text(comparison: Comparison, group: int, column: Column) -> str:
    """Return a figure of a group as text."""
    if not comparison.has(group, column):
        return ""
    form = FORMS[column.form]
    if column.target and not column.restricted:
        found = comparison.median(group, column)
        text = form.format(found.value) if np.isfinite(found.value) else f"> {form.format(found.beyond)}"
        if comparison.choices.interval == STD or found.runs < 2 or np.isinf(found.low):
            return text
        return f"{text} [{form.format(found.low)}, {form.format(found.high)}]"
    if column.restricted and not np.isfinite(comparison.values(group, column)).all():
        return ""
    said = comparison.estimate(group, column)
    text = form.format(said.mean)
    if said.seeds < 2:
        return text
    if comparison.choices.interval == STD:
        return f"{text} +- {form.format(said.std)}" if column.spread else text
    if column.better == 0 and not column.spread:
        return text
    return f"{text} [{form.format(said.low)}, {form.format(said.high)}]"


def _notes(comparison: Comparison, keys: Sequence[str]) -> Iterator[str]:
    """Yield the notes below the table of final figures."""
    choices, groups = comparison.choices, comparison.groups
    columns = {key: comparison.column(key) for key in keys if key not in NAMES}
    percent = f"{100 * choices.confidence:g} %"
    several = any(len(group.runs) > 1 for group in groups)
    if any(c.target for c in columns.values()):
        metric, target = metric_of(groups), comparison.target
        value = f"{100 * target:.2f} %" if metric.percent else f"{target:.4g}"
        yield f"target: mean {metric.title} {value}"
    steps = [groups[i].name for i in comparison.stepped]
    if 0 < len(steps) < len(groups) and ("rounds" in keys or any(c.of == "round" for c in columns.values())):
        yield f"rounds: steps of the server, which are not tested against rounds: {first_of(steps)}"
    counts = sorted({len(group.runs) for group in groups})
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    if choices.interval == STD and several and any(c.spread for c in columns.values()):
        yield f"+-: sample standard deviation over {seeds}"
    elif choices.interval != STD and several:
        kinds = {c.target and not c.restricted for c in columns.values() if c.better or c.spread}
        yield f"[low, high]: {percent} interval over {seeds}, {_interval_name(choices.interval, kinds)}"
    single = [group.name for group in groups if len(group.runs) == 1]
    if single and (choices.interval != STD or choices.test):
        yield f"one seed, no interval and no test: {first_of(single)}"
    early = [(group.name, [bool(run.ended) for run in group.runs]) for group in groups]
    ended = [f"{name} ({sum(ends)} of {len(ends)})" for name, ends in early if any(ends)]
    if ended:
        yield f"ended before the last round, by a rule of `stop` or a callback: {first_of(ended)}"
    if any(c.target for c in columns.values()):
        found = [(group, group.reached(comparison.target, "round")) for group in groups]
        never = [f"{group.name} ({r.unmet} of {len(r.met)})" for group, r in found if r.unmet]
        medians = any(c.target and not c.restricted for c in columns.values())
        if never:
            what = "Kaplan-Meier medians, runs that end before it are censored; " if medians else ""
            yield f"to target: {what}not reached by {first_of(never)}"
        elif several and medians:
            yield "to target: medians over seeds"
    for key, column in columns.items():
        for problem in comparison.problems:
            until = comparison.horizon(problem, column) if column.restricted else np.inf
            if np.isfinite(until):
                place = f" in {problem.name}" if problem.name else ""
                yield f"{key}: means of min(needed, {until:.4g}){place}, where the first run without it ends"
    moving = dict.fromkeys(text for group in groups if (text := drift.described(group.runs[0])))
    if moving:
        some = "" if all(group.runs[0].changes for group in groups) else "some runs: "
        yield f"drift: {some}{first_of([*moving])}"
    if comparison.repeated:
        yield f"left out, they repeat another run to the digest: {first_of([*comparison.repeated])}"
    if comparison.rerun:
        what = "another run of their configuration has their seeds and data, and another digest"
        yield f"left out, {what}: {first_of([str(run.folder) for run in comparison.rerun])}"
    if choices.test != NO_TEST and len(groups) > 1:
        yield from _test_notes(comparison, columns)


def _test_notes(comparison: Comparison, columns: Mapping[str, Column]) -> Iterator[str]:
    """Yield notes on what was tested, and on what could not be tested."""
    kind = comparison.choices.test or "t"
    logrank = {
        column.target and not column.restricted
        for column in columns.values()
        if any(comparison.marks(problem, column) for problem in comparison.problems)
    }
    if logrank:
        tests = [f"{statistics.TEST_NAMES[kind]} over equal seeds"] if False in logrank else []
        tests += ["log-rank test to the target"] if True in logrank else []
        most = max(len(problem.members) for problem in comparison.problems)
        tests += ["Holm's correction over the others"] if most > 2 else []
        yield (
            f"* best: every other is worse at the level {comparison.alpha:.2g}; ~ not distinguishable from "
            f"the best ({', '.join(tests)})"
        )
    metric = comparison.column(comparison.choices.metric)
    yield from _contradictions(comparison, {**columns, comparison.choices.metric: metric})
    for problem in comparison.problems:
        found = comparison.contrasts(problem, metric)
        odd = [c for c in found if c.difference is not None and c.pairs < 2]
        several = [c for c in odd if len(comparison.groups[c.group].runs) > 1]
        if several and not metric.target:
            c = several[0]
            pair = [comparison.groups[i] for i in (c.group, c.best)]
            seeds = "; ".join(f"{g.name}: {first_of([seed_of(r) for r in g.runs])}" for g in pair)
            yield (
                f"no test of {len(several)} of {len(found)} groups, whose seeds do not pair with the best's: "
                f"{seeds}"
            )
        if kind == "wilcoxon" and not (metric.target and not metric.restricted):
            yield from _few_pairs(comparison, [c for c in found if c.pairs > 1])
        for column in columns.values():
            if column.target and not column.restricted:
                yield from _few_runs(comparison, comparison.contrasts(problem, column), column)
                break  # the number of runs is the same for all costs


def _few_pairs(comparison: Comparison, tested: Sequence[Contrast]) -> Iterator[str]:
    """Yield a note on the groups whose pairs are too few for signed ranks to find any difference."""
    few, lowest = comparison.undecided(tested, comparison.column(comparison.choices.metric))
    if few:
        pairs = max(c.pairs for c in few)
        names = first_of([comparison.groups[c.group].name for c in few])
        whom = f" of {names}" if len(few) < len(tested) else ""
        yield (
            f"{pairs} pairs and {len(tested)} comparisons: signed ranks cannot go below p = {lowest:.3g}, "
            f"so nothing can be found{whom}; use more seeds, or --test t"
        )


def _few_runs(comparison: Comparison, found: Sequence[Contrast], column: Column) -> Iterator[str]:
    """Yield a note on the groups whose runs are too few for the log-rank test to find any difference."""
    tested = [c for c in found if not np.isnan(c.p)]
    few, lowest = comparison.undecided(tested, column)
    if few:
        names = first_of([comparison.groups[c.group].name for c in few])
        whom = f" of {names}" if len(few) < len(tested) else ""
        least = f"to target: the log-rank test cannot go below p = {lowest:.3g} with so few seeds"
        yield f"{least}, so nothing can be found{whom}; use more seeds"


def _contradictions(comparison: Comparison, columns: Mapping[str, Column]) -> Iterator[str]:
    """Yield a note for each difference found by a test in which the group is not worse than the best."""
    paired = statistics.TEST_NAMES[comparison.choices.test or "t"]
    keys = dict[Column, str]()
    for key, column in columns.items():
        keys.setdefault(column, key)
    for column, key in keys.items():
        problems = comparison.problems if column.better else ()
        found = [c for problem in problems for c in comparison.contrasts(problem, column)]
        for c in (c for c in found if c.contradicts(comparison.alpha)):
            group, best = (comparison.groups[i].name for i in (c.group, c.best))
            what, test = ("median", "log-rank test") if c.difference is None else ("mean", paired)
            why = "" if comparison.same_seeds(c.group, c.best) else ": their seeds differ"
            if c.side:
                yield f"{key}: {group} is better than {best}, the best {what}, by the {test}{why}"
            else:
                yield f"{key}: of {group} and {best}, means and signed ranks prefer different ones{why}"


def _interval_name(kind: str, medians: Container[bool]) -> str:
    """Return how intervals are computed; `medians` holds True for those of medians, False for the others."""
    generator = f"{statistics.GENERATOR} seeded {statistics.BOOTSTRAP_SEED}"
    resamples = f", {statistics.RESAMPLES} resamples by {generator}"
    of_means = {"t": "Student's t", "bootstrap": "BCa bootstrap", "percentile": "percentile bootstrap"}[kind]
    of_medians = "log-log band of the Kaplan-Meier curve" if kind == "t" else "percentiles of medians"
    said = [of_means] if False in medians else []
    said += [f"to target {of_medians}"] if True in medians else []
    return f"{'; '.join(said)}{'' if kind == 't' else resamples}"


def test_tables(comparison: Comparison) -> list[Table]:
    """Return a table for each problem in which a test was made: each group against the best, in `metric`."""
    metric = comparison.column(comparison.choices.metric)
    found = {problem: comparison.contrasts(problem, metric) for problem in comparison.problems}
    tested = [problem for problem, contrasts in found.items() if not all(np.isnan(c.p) for c in contrasts)]
    return [_tests(comparison, problem) for problem in tested]


def _tests(comparison: Comparison, problem: Problem) -> Table:
    column = comparison.column(comparison.choices.metric)
    found = sorted(comparison.contrasts(problem, column), key=lambda c: np.nan_to_num(c.p, nan=2.0))
    percent = f"{100 * comparison.choices.confidence:g} %"
    logrank = column.target and not column.restricted
    head = [f"{column.title.partition(',')[0]}: against the best", *([] if logrank else ["seeds"])]
    head += [] if logrank else [f"difference{_unit(column)}", f"{percent} interval", "better in"]
    rows = []
    for c in found:
        row = [comparison.groups[c.group].name]
        if c.difference is not None:
            row += [str(c.pairs), *_difference(c.difference, comparison), _wins(c.difference, column)]
        rows.append([*row, _p(c.p), _p(c.adjusted), _said(c, comparison.alpha)])
    names = (*head, "p", "p, Holm", "worse?")
    best = comparison.groups[found[0].best].name
    name = "log-rank test" if logrank else statistics.TEST_NAMES[comparison.choices.test or "t"]
    place = f" in {problem.name}" if problem.name else ""
    note = f"{column.title}: best{place} is {best}; {name}, two-sided, level {comparison.alpha:.2g}"
    return Table.of(names, rows, [note])


def _difference(values: np.ndarray, comparison: Comparison) -> tuple[str, str]:
    """Return the mean of paired differences and its interval, as text."""
    if not len(values):
        return "", ""
    kind = "t" if comparison.choices.interval == STD else comparison.choices.interval
    said = statistics.estimate(values, kind, comparison.choices.confidence)
    return f"{said.mean:+.3g}", f"[{said.low:+.3g}, {said.high:+.3g}]" if said.seeds > 1 else ""


def _wins(values: np.ndarray, column: Column) -> str:
    """Return, as text, in how many pairs a group is better than the best."""
    return f"{int((column.better * values > 0).sum())} of {len(values)}"


def _unit(column: Column) -> str:
    return f", {column.title.rpartition(', ')[2]}" if ", " in column.title and not column.target else ""


def _p(value: float) -> str:
    return "" if np.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.2g}"


def _is(p: float) -> str:
    return _p(p) if p < 1e-4 else f"= {_p(p)}"


def _said(contrast: Contrast, alpha: float) -> str:
    if np.isnan(contrast.adjusted):
        return "not tested"
    return "yes" if contrast.shown(alpha) else "not shown"


def rank_table(comparison: Comparison) -> Table:
    """Return the average rank of each method over the problems, and its rank in each, best first."""
    ranking, names = comparison.ranking, [name for name, _ in comparison.methods]
    order = np.argsort(ranking.average, kind="stable")
    first = order[0]
    problems = [problem.name for problem in comparison.problems]
    rows = []
    for i in order:
        gap = ranking.average[i] - ranking.average[first]
        together = gap <= ranking.critical_difference
        alone = not (ranking.average - ranking.average[first] <= ranking.critical_difference)[order[1:]].any()
        mark = (BEST if alone else TIED) if together and ranking.p <= comparison.alpha else ""
        cells = [Cell(names[i]), Cell(f"{ranking.average[i]:.3g}", mark)]
        rows.append((*cells, *(Cell(f"{r:g}") for r in ranking.ranks[:, i])))
    k, n = len(names), len(problems)
    title = comparison.column(comparison.choices.metric).title
    notes = [
        f"ranks in {title.partition(',')[0]} over {n} problems; 1 is best, ties share their mean",
        f"Friedman: chi-square {ranking.friedman:.3g} with {k - 1} degrees of freedom, p {_is(ranking.p)}; "
        f"Iman and Davenport: F = {ranking.f:.3g}, p {_is(ranking.f_p)}",
        f"Nemenyi: average ranks that differ by less than {ranking.critical_difference:.3g} are not "
        f"distinguishable at the level {comparison.alpha:.2g}",
    ]
    if ranking.p > comparison.alpha:
        notes.append("Friedman's test finds no difference between these methods")
    if n < 10:
        notes.append(f"{n} problems are few: p of chi-square is rough below about ten")
    return Table(("method", "average rank", *problems), tuple(rows), tuple(notes))


def numbers(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the table of final figures as numbers: one row per group; a figure that is not finite is None.

    Costs of a target are medians, with the ends of their intervals; infinite costs are None, and `unreached`
    counts the runs that never met the target.
    """
    chosen = comparison.choices.columns
    keys = [k for k in (chosen or USUAL) if k not in NAMES]
    marks = {
        key: {
            i: m for w in comparison.problems for i, m in comparison.marks(w, comparison.column(key)).items()
        }
        for key in keys
    }
    out = []
    for i, group in enumerate(comparison.groups):
        met = group.reached(comparison.target, "round")
        row: dict[str, Any] = {
            "run": group.name,
            "problem": comparison.problem_of(i).name,
            "seeds": len(group.runs),
            "rounds": group.lengths[1],
            "target": comparison.target,
            "unreached": met.unmet,
        }
        for key in keys:
            row |= _numbers(comparison, i, key)
            row |= {f"{key}_mark": marks[key].get(i, "")} if marks[key] else {}
        out.append(row)
    return out


def _numbers(comparison: Comparison, group: int, key: str) -> dict[str, Any]:
    column = comparison.column(key)
    if not comparison.has(group, column):
        return {}
    if column.target and not column.restricted:
        found = comparison.median(group, column)
        given = {"median": found.value, "low": found.low, "high": found.high}
    else:
        said = comparison.estimate(group, column)
        given = {"mean": said.mean, "std": said.std, "low": said.low, "high": said.high}
    return {f"{key}_{name}": float(v) if np.isfinite(v) else None for name, v in given.items()}
