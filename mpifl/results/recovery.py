"""How a run takes drift: how far its score falls at each change of data, and how soon it is back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan
from typing import Any

import numpy as np


def recoveries(
    steps: Sequence[int],
    scores: Sequence[float],
    events: Sequence[int],
    share: float,
    better: int,
    seconds: Sequence[float] = (),
    begins: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """Return what became of a score after each change of the data.

    Args:
        steps: server steps of the evaluations, ascending.
        scores: the score at each; NaN where it is undefined.
        events: steps from which on data changed, ascending; an event ends where the next begins.
        share: the score is recovered once it has this share of the score before the event (an error: once it
            is at most the error before, divided by the share).
        better: 1 if more is better, -1 if less is.
        seconds: time of each evaluation on the run's clock; empty if it has none.
        begins: time at which the step of each event began; empty if the run has no clock.

    Returns:
        For each event, the keys of `OF_CHANGES` but those of costs; the times only with a clock. Events
        before or after which nothing is evaluated have NaN, and None.
    """
    at, found = np.array(steps), np.array(scores, float)
    out: list[dict[str, Any]] = []
    for i, event in enumerate(events):
        end = events[i + 1] if i + 1 < len(events) else np.inf
        earlier, later = np.flatnonzero(at < event), np.flatnonzero((at >= event) & (at < end))
        row: dict[str, Any] = {
            "step": int(event),
            "before": nan,
            "worst": nan,
            "recovered_after": None,
            "lost": nan,
        }
        row |= {"begins_s": begins[i], "recovered_after_s": None} if len(begins) else {}
        out.append(row)
        if not len(earlier) or not len(later):
            continue
        before, after = float(found[earlier[-1]]), found[later]
        gaps = np.maximum((before - after) * better, 0.0)
        widths = np.diff(at[later], prepend=event - 1)
        goal = before * share if better > 0 else before / share
        lowest = int(np.argmin(after * better))
        good = lowest + np.flatnonzero((after[lowest:] - goal) * better >= 0)
        row |= {"before": before, "worst": float(after[lowest]), "lost": float(gaps @ widths)}
        if len(good):
            back = later[good[0]]
            fell = good[0] > lowest
            row["recovered_after"] = int(at[back] - event) if fell else 0
            if len(begins):
                row["recovered_after_s"] = float(seconds[back] - begins[i]) if fell else 0.0
    return out


def recoveries_so_far(
    scores: Sequence[tuple[int, float, float]],
    begins: Mapping[int, float],
    changes: Iterable[int],
    share: float,
    better: int,
) -> list[dict[str, Any]]:
    """Return what became of a score after each change of the data up to the last evaluation.

    Args:
        scores: step, score and seconds on the run's clock of each evaluation; no seconds: it has none.
        begins: step from which on data changed, and the seconds on the clock when it began.
        changes: steps from which on data change, ascending.
        share: see `recoveries`, also for the return value.
        better: see there.
    """
    steps, found, seconds = map(list, zip(*scores, strict=True)) if scores else ([], [], [])
    events = [at for at in changes if steps and at <= steps[-1]]
    times = [begins[at] for at in events] if any(seconds) else []
    return recoveries(steps, found, events, share, better, seconds, times)


def recovery_figures(found: Sequence[Mapping[str, Any]], timed: bool = False) -> dict[str, float]:
    """Return figures over all events of a run so far.

    Args:
        found: what `recoveries` returned.
        timed: whether the run has a clock.

    Returns:
        `recovery_steps`: mean of `recovered_after`, NaN if an event was not recovered from; with a clock
        `recovery_seconds`, the same of `recovered_after_s`; `recovered`: share of the events that were
        recovered from; `score_lost`: sum of `lost`.
    """

    def mean(name: str) -> float:
        after = [row[name] for row in found]
        return float(np.mean(after)) if after and None not in after else nan

    back = [row["recovered_after"] is not None for row in found]
    return {
        "recovery_steps": mean("recovered_after"),
        **({"recovery_seconds": mean("recovered_after_s")} if timed else {}),
        "recovered": float(np.mean(back)) if back else nan,
        "score_lost": float(np.sum([row["lost"] for row in found])),
    }
