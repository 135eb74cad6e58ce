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
        id: of the run, from `run.json`; a resumed run keeps it.
        name: of the configuration.
        folder: the run folder.
        config: the resolved configuration, as nested mappings.
        method: name of the algorithm.
        rounds: server steps to take in all.
        num_clients: N.
        num_parameters: d, the numbers in a model.
        ranks: of the job.
        step: server steps taken before.
        resumed: whether the run was begun before.
        restored: whether it goes on from a checkpoint; resumed without, it takes its first step again.
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
        run: the run.
        step: server steps so far.
        seconds: real seconds since the run began.
        virtual_seconds: on the federation's clock; None where it has none.
        bytes_up: what clients have sent so far, in bytes.
        bytes_down: what clients have received so far, in bytes.
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
        clients: whose uploads were mixed.
    """

    clients: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation(Moment):
    """An evaluation; see `Moment`.

    Attributes:
        metrics: column -> value of the new row of `metrics.csv`.
        clients: client -> name -> its own scores, of each evaluated client.
    """

    metrics: Mapping[str, float | int]
    clients: Mapping[int, Mapping[str, float]]


def frozen(tree: Any) -> Any:
    """Return a tree of mappings and lists that cannot be written to."""
    if isinstance(tree, Mapping):
        return MappingProxyType({name: frozen(value) for name, value in tree.items()})
    return tuple(map(frozen, tree)) if isinstance(tree, (list, tuple)) else tree
