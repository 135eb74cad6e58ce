"""How long a sweep takes on this machine, from the forecasts of some of its cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from mpifl.core.beginning import STEPS, num_steps
from mpifl.core.errors import CodeFailed, UserError
from mpifl.core.process import available_cores
from mpifl.core.progress import doing
from mpifl.core.rng import key
from mpifl.experiment.loader import to_tree
from mpifl.forecast.plan import seconds_alone
from mpifl.supervision.progress import in_words

from .cases import Case, beginnings, is_seed, table_if_any, trainings, unchecked_cases, with_configurations

HINT = "mpifl plan with --jobs J says how long the sweep takes with J cases at a time"
MEASURED = 24  # cases that are measured, at most
OFF = 1.3  # factor by which the forecast of one run may be too high or too low
SURE = 2.0  # standard errors of a sample around its mean


@dataclass(frozen=True)
class Stratum:
    """Cases with the same value of the first varied key, some of which were measured.

    Attributes:
        count: number of cases.
        seconds: forecast seconds of those that were measured; steps that several cases share count once.
    """

    count: int
    seconds: Sequence[float]


@dataclass(frozen=True)
class SweepTime:
    """Forecast seconds of the cases of a sweep together, in one process after the other.

    Attributes:
        total: seconds.
        error: standard error of the total, as only some cases were measured.
        longest: seconds of the longest case that was measured.
    """

    total: float
    error: float
    longest: float

    def wall(self, jobs: int) -> tuple[float, float, float]:
        """Return the least, the expected and the most seconds with so many cases at a time on a core each."""
        low, high = max(self.total - SURE * self.error, 0.0) / OFF, (self.total + SURE * self.error) * OFF
        return low / jobs, self.total / jobs, high / jobs + (self.longest if jobs > 1 else 0.0)


def total_of(strata: Sequence[Stratum], longest: float) -> SweepTime:
    """Return the seconds of all cases: in each stratum, the mean of those that were measured times its count.

    The error is that of a stratified sample without replacement. A stratum of which one case was measured
    has the mean relative deviation of the others.
    """
    known = [s for s in strata if len(s.seconds)]
    means = [float(np.mean(s.seconds)) for s in known]
    shares = [
        float(np.std(s.seconds, ddof=1)) / mean
        for s, mean in zip(known, means, strict=True)
        if len(s.seconds) > 1 and mean > 0
    ]
    usual = float(np.mean(shares)) if shares else 1.0
    total = sum(s.count * mean for s, mean in zip(known, means, strict=True))
    variance = 0.0
    for s, mean in zip(known, means, strict=True):
        drawn = len(s.seconds)
        spread = float(np.std(s.seconds, ddof=1)) if drawn > 1 else usual * mean
        variance += s.count**2 * spread**2 / drawn * (1 - drawn / s.count)
    return SweepTime(total, sqrt(variance), longest)


def chosen(some: Sequence[Case], most: int = MEASURED) -> list[tuple[int, list[Case]]]:
    """Return the strata of cases: the number of cases of each, and those that are measured.

    A stratum has the cases with one value of the first varied key that is no seed. Cases are drawn by a fixed
    key, as many from each stratum as from any other, where it has so many.
    """
    strata: dict[str, list[Case]] = {}
    for case in some:
        name = next((label for of, label in case.labels.items() if not is_seed(of)), "")
        strata.setdefault(name, []).append(case)
    each = max(1, most // max(len(strata), 1))
    out = []
    for i, members in enumerate(strata.values()):
        order = key(0).of("plan", i).numpy().permutation(len(members))
        out.append((len(members), [members[j] for j in order[:each].tolist()]))
    return out


def steps_taken(shared: Mapping[str, Mapping[str, str]], rounds: Mapping[str, int]) -> dict[str, float]:
    """Return the share of its steps that a case takes itself, on average over those that share steps.

    Args:
        shared: what each case shares, see `cases.beginnings`.
        rounds: number of steps of each case.
    """
    of = {slug: phases[STEPS] for slug, phases in shared.items() if STEPS in phases}
    sharing = Counter(of.values())
    once = {about: 1 - 1 / count for about, count in sharing.items()}
    return {slug: 1 - once[about] * num_steps(about) / rounds[slug] for slug, about in of.items()}


def first_case(tree: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the title and the configuration of the first case that can run, as nested mappings.

    Raises:
        UserError: no case can run; that of the first.
    """
    every = unchecked_cases(with_configurations(tree))
    case = next((case for case in every if case.can_run), every[0])
    return case.title, to_tree(case.config)


def lines(
    tree: dict[str, Any], jobs: int, seconds: Callable[[Any], float] = seconds_alone, most: int = MEASURED
) -> list[str]:
    """Return lines on how long a sweep takes with so many cases at a time; on rank 0.

    Args:
        tree: the configuration of the sweep.
        jobs: number of cases at a time, each in one process.
        seconds: returns the forecast seconds of a case.
        most: number of cases that are measured.
    """
    own = with_configurations(tree)
    every = unchecked_cases(own)
    valid = [case for case in every if case.can_run]
    rounds = {case.slug: case.config.rounds for case in valid}
    share = steps_taken(beginnings(every, table_if_any(own)), rounds)
    firsts = [unit[0] for unit in trainings(valid)]
    strata, left_out, longest = list[Stratum](), len(every) - len(valid), 0.0
    for count, members in chosen(firsts, most):
        found = list[float]()
        for case in members:
            try:
                with doing(f"measuring {case.title}"):
                    alone = seconds(case.config)
            except (UserError, CodeFailed):
                continue
            found.append(alone * share.get(case.slug, 1.0))
            longest = max(longest, alone)
        left_out += 0 if found else count
        strata.append(Stratum(count, found))
    measured = sum(len(s.seconds) for s in strata)
    if not measured:
        return ["sweep                   no times: no case could be measured"]
    time, cores = total_of(strata, longest), available_cores()
    together = min(jobs, cores)
    low, mean, high = time.wall(together)
    trained = f"{len(firsts)} trained" if len(firsts) < len(every) else "all trained"
    few = f"; --jobs {jobs} is more than the {cores} cores" if jobs > cores else ""
    about = f"{len(every)} cases, {trained}: about {in_words(mean)} with --jobs {jobs}"
    how = f"by forecasts of {measured} cases, drawn from the values of the first key"
    out = [
        f"sweep                   {about} on this machine ({in_words(low)} to {in_words(high)}){few}",
        f"                        {how}: {in_words(time.total)} of a free core in all",
    ]
    if left_out:
        out.append(f"                        not counted: {left_out} cases that cannot run or be measured")
    return out
