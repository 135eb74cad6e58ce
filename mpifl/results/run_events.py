"""What callbacks are told of a run: its start, its rounds, its evaluations. Read-only values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """A run, before its first step.

    Attributes:
        id: Of the run, from `run.json`; a resumed run keeps it.
        name: Of the configuration.
        folder: The run folder.
        config: The resolved configuration, as nested mappings.
        method: Name of the algorithm.
        rounds: Server steps to take in all.
        num_clients: N.
        num_parameters: d, the numbers in a model.
        ranks: Of the job.
        step: Server steps taken before.
        resumed: Whether the run was begun before.
        restored: Whether it goes on from a checkpoint; resumed without, it takes its first step again.
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
        """The last step whose evaluation is not made again; -1 where all are made."""
        return self.step if self.restored else -1


@dataclass(frozen=True)
class Moment:
    """A moment of a run, after a server step.

    Attributes:
        run: The run.
        step: Server steps so far.
        seconds: Real seconds since the run began.
        virtual_seconds: On the federation's clock; None where it has none.
        bytes_up: What clients have sent so far, in bytes.
        bytes_down: What clients have received so far, in bytes.
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
        clients: Whose uploads were mixed.
    """

    clients: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation(Moment):
    """An evaluation; see `Moment`.

    Attributes:
        metrics: Column -> value of the new row of `metrics.csv`.
        clients: Client -> name -> its own scores, of each evaluated client.
    """

    metrics: Mapping[str, float | int]
    clients: Mapping[int, Mapping[str, float]]


def frozen(tree: Any) -> Any:
    """Return a tree of mappings and lists that cannot be written to."""
    if isinstance(tree, Mapping):
        return MappingProxyType({name: frozen(value) for name, value in tree.items()})
    return tuple(map(frozen, tree)) if isinstance(tree, (list, tuple)) else tree
