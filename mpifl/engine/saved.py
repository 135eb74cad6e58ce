"""What a run must remember to go on as if nothing had happened, and how the parts of an engine become it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from mpifl.core.types import Server

from .client_errors import Dropped
from .step import Stepper


@dataclass
class Saved:
    """The state of a run between two steps; nothing in it depends on the number of ranks.

    Attributes:
        step: server steps taken.
        tensors: rows of tables, and rows that visits under way have read.
        arrays: small arrays, of numbers or short strings.
        values: what JSON can hold.
        states: (kind, client, visit) of what clients keep between visits; lives in files of its own.
    """

    step: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    states: tuple[tuple[str, int, int], ...] = ()

    def put_arrays(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays under a prefix."""
        self.arrays |= {f"{prefix}/{name}": np.asarray(value) for name, value in arrays.items()}

    def take_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays under a prefix."""
        start = f"{prefix}/"
        return {n.removeprefix(start): a for n, a in self.arrays.items() if n.startswith(start)}

    def put_server(self, prefix: str, server: Server, tables: Mapping[str, torch.Tensor]) -> None:
        """Add a server, its rows being `tables`."""
        self.tensors |= {f"{prefix}/{name}": rows for name, rows in tables.items()}
        self.put_arrays(f"{prefix}/memo", server.memo)
        self.arrays[f"{prefix}/assign"] = np.asarray(server.assign)
        self.values[prefix] = {"version": server.version, "tables": list(tables), "memo": list(server.memo)}

    def take_server(self, prefix: str) -> Server:
        """Return the server under a prefix."""
        about = self.values[prefix]
        return Server(
            tables={name: self.tensors[f"{prefix}/{name}"] for name in about["tables"]},
            assign=self.arrays[f"{prefix}/assign"],
            memo={name: self.arrays[f"{prefix}/memo/{name}"] for name in about["memo"]},
            version=about["version"],
        )


def states_of(stepper: Stepper) -> tuple[tuple[str, int, int], ...]:
    """Return (kind, client, visit) of what clients keep now; on rank 0."""
    needs = stepper.algorithm.needs
    kinds = ["state"] * needs.state + ["upload"] * (needs.memory is not None)
    kinds += ["error"] * stepper.ledger.payload.error_feedback
    met = np.flatnonzero(stepper.visits).tolist() if kinds else []
    return tuple((kind, k, int(stepper.visits[k])) for kind in kinds for k in met)


def put_stepper(saved: Saved, stepper: Stepper) -> None:
    """Add what the stepper remembers between steps."""
    saved.put_arrays("ledger", stepper.ledger.state())
    saved.arrays["visits"] = stepper.visits
    saved.values["train_metrics"] = dict(stepper.train_metrics)
    saved.values["dropped"] = [asdict(d) for d in stepper.dropped]
    saved.states = states_of(stepper)


def take_stepper(saved: Saved, stepper: Stepper) -> None:
    """Give the stepper back what it remembered."""
    stepper.ledger.restore(saved.take_arrays("ledger"))
    stepper.visits = saved.arrays["visits"].copy()
    stepper.train_metrics = dict(saved.values["train_metrics"])
    stepper.dropped = [Dropped(**d) for d in saved.values["dropped"]]
