"""The end of a run before its last round: the rules of `stop` and the answers of callbacks, as one chain."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError
from mpifl.experiment.context import RunContext
from mpifl.experiment.schema import Config
from mpifl.experiment.section_checks import stop_metric
from mpifl.results.identity import ended
from mpifl.runtime.engine import Record
from mpifl.simulation.stop_rules import SECTION, Ending, Figures, StopRule, StopRules

from .run_callbacks import RunCallbacks


class Answered(StopRule):
    """Ends a run after the step at which a callback returned `STOP`.

    Args:
        observed: calls the callbacks.
    """

    def __init__(self, observed: RunCallbacks) -> None:
        self.name, self.repeats = "callback", False
        self.observed = observed

    def after(self, figures: Figures, evaluated: bool) -> str:
        """Return which callback asked for it."""
        asked = self.observed.callbacks.asked
        return f"callback {asked} returned STOP" if asked else ""


def rules_of(config: Config, observed: RunCallbacks) -> StopRules:
    """Return the rules that can end a run, of which callbacks are asked first; on rank 0."""
    metric, direction = stop_metric(config)
    return StopRules([Answered(observed), *config.stop.rules(metric, direction)])


def restore(rules: StopRules, config: Config, metrics: Path) -> None:
    """Apply rules to the evaluations before a checkpoint, which may be of other rules; on rank 0.

    Args:
        rules: the rules.
        config: the configuration of the resumed run.
        metrics: `metrics.csv`, restored to the checkpoint.

    Raises:
        UserError: a rule would have ended the run before the checkpoint.
    """
    for row in _rows(metrics):
        if ending := rules.after(row, evaluated=True):
            remedy = f"would have ended the run after step {ending.step} ({ending.reason}), beyond which it "
            remedy += "has gone; leave it as it was, or begin a new run"
            raise UserError(f"{SECTION}.{ending.rule}", getattr(config.stop, ending.rule), remedy)


def _rows(metrics: Path) -> Iterator[dict[str, float]]:
    """Yield the rows of `metrics.csv`; empty cells are left out."""
    if metrics.exists():
        with metrics.open(newline="") as file:
            for row in csv.DictReader(file):
                yield {name: float(text) for name, text in row.items() if text}


def in_words(ending: Ending, context: RunContext) -> str:
    """Return a line for the terminal."""
    word = "round" if context.config.policy.synchronous else "step"
    return f"ended after {word} {ending.step} of {context.config.rounds}: {ending.reason}"


def origin_of(ending: Ending, rounds: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries `ended` and `identity` of `summary.json`.

    Args:
        ending: why the run ended.
        rounds: the number of rounds that the configuration allows.
        identity: the identity of the run. If the settings do not decide where the run ended, it says so.
    """
    about = {"rule": ending.rule, "reason": ending.reason, "rounds": rounds}
    if ending.repeats:
        return {"ended": about}
    return {"ended": about, "identity": ended(identity, f"after step {ending.step} by {ending.rule}")}


def spent(record: Record, moved: Mapping[str, int]) -> dict[str, float]:
    """Return the figures of a step that was not evaluated, under the names of `metrics.csv`.

    Args:
        record: the step.
        moved: bytes so far, up and down; empty if no rule limits them.
    """
    virtual = {} if record.virtual_seconds is None else {"virtual_seconds": record.virtual_seconds}
    bytes_so_far = {f"federation_bytes_{way}": total for way, total in moved.items()}
    return {"round": record.step, "seconds": record.seconds, **virtual, **bytes_so_far}
