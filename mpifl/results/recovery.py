"""How a run takes drift: how far its score falls at each change of data, and how soon it is back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import numpy as np


def recoveries(
    steps: Sequence[int], scores: Sequence[float], events: Sequence[int], share: float, better: int
) -> list[dict[str, Any]]:
    """Return what became of a score after each change of the data.

    Args:
        steps: server steps of the evaluations, ascending.
        scores: the score at each; NaN where it is undefined.
        events: steps from which on data changed, ascending; an event ends where the next begins.
        share: the score is recovered once it has this share of the score before the event (an error: once it
            is at most the error before, divided by the share).
        better: 1 if more is better, -1 if less is.

    Returns:
        For each event: `step`; `before`, the last score before it; `worst`, the worst after it;
        `recovered_after`, steps from the event to the first evaluation after the worst at which the score is
        recovered (None: never), 0 if it never fell so far; `lost`, the sum over evaluations of what the score
        lacks of `before`, times the steps since the evaluation or event before: score times steps.
        Events before or after which nothing is evaluated have NaN, and None.
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
            row["recovered_after"] = int(at[later[good[0]]] - event) if good[0] > lowest else 0
    return out


def recovery_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return figures over all events of a run so far.

    Returns:
        `recovery_steps`: mean of `recovered_after`, NaN if an event was not recovered from; `recovered`:
        share of the events that were; `score_lost`: sum of `lost`.
    """
    after = [row["recovered_after"] for row in found]
    back = [steps for steps in after if steps is not None]
    return {
        "recovery_steps": float(np.mean(back)) if back and len(back) == len(after) else nan,
        "recovered": len(back) / len(after) if after else nan,
        "score_lost": float(np.sum([row["lost"] for row in found])),
    }
