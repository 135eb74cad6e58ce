"""The read-only values passed to callbacks: the start of a run, its rounds and its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final


class Answer(Enum):
    """What a callback may return."""

    STOP = "stop"


STOP: Final = Answer.STOP
"""The answer of a callback's `on_round` or `on_evaluation` that ends the run after this step."""


@dataclass(frozen=True)
class RunInfo:
    """A run, before its first step.

    Attributes:
        id: identifier of the run, from `run.json`; a resumed run keeps it.
        name: name of the configuration.
        folder: the run folder.
        config: the resolved configuration, as nested mappings.
        method: name of the algorithm.
        rounds: total number of server steps.
        num_clients: number of clients N.
        num_parameters: number of parameters of a model, d.
        ranks: number of ranks of the job.
        step: server steps taken before this start.
        resumed: whether the run was started before.
        restored: whether the run continues from a checkpoint; a resumed run without one starts from scratch.
    """

    id: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    method: str
    rounds: int
    num_clients: int
    num_parameters: int
    ranks: int
    step: int = 0
    resumed: bool = False
    restored: bool = False

    @property
    def kept(self) -> int:
        """The last step whose evaluation is not repeated; -1 if all evaluations are made."""
        return self.step if self.restored else -1


@dataclass(frozen=True)
class Moment:
    """A moment of a run, after a server step.

    Attributes:
        run: the run.
        step: server steps so far.
        seconds: wall-clock seconds since the run began.
        virtual_seconds: seconds on the federation's clock; None if it has none.
        bytes_up: bytes that clients have sent so far.
        bytes_down: bytes that clients have received so far.
    """

    run: RunInfo
    step: int
    seconds: float
    virtual_seconds: float | None
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Round(Moment):
    """A server step; see `Moment`.

    Attributes:
        clients: the clients whose uploads were aggregated.
    """

    clients: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation(Moment):
    """An evaluation; see `Moment`.

    Attributes:
        metrics: the new row of `metrics.csv`, column -> value.
        clients: scores of each evaluated client, client -> name -> score.
    """

    metrics: Mapping[str, float | int]
    clients: Mapping[int, Mapping[str, float]]


def frozen(tree: Any) -> Any:
    """Return a read-only copy of a tree of mappings and lists."""
    if isinstance(tree, Mapping):
        return MappingProxyType({name: frozen(value) for name, value in tree.items()})
    return tuple(map(frozen, tree)) if isinstance(tree, (list, tuple)) else tree
