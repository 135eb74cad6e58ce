"""Trainers over ranks: `mpirun -n P python trainers.py FILE CASE...`; rank 0 writes what came of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from support.runs import CONFIG
from torch import nn

from mpifl.comm.connect import connect
from mpifl.comm.transport import Transport, on_server
from mpifl.core.optional_packages import optional
from mpifl.driver.run import run
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.results.reader import load

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "ifca": {"algorithm": {"name": "ifca", "num_clusters": 2}},
    "hypcluster": {"algorithm": {"name": "hypcluster", "num_clusters": 2}},
    "ucfl": {"algorithm": {"name": "ucfl", "streams": 2}},
    "emdcfl": {"algorithm": "emdcfl"},
    "cfl": {"algorithm": {"name": "cfl", "warmup": 1, "eps1": 100.0, "eps2": 0.0}},
    "pacfl": {"algorithm": "pacfl"},
    "fedper": {"algorithm": "fedper"},
    "ditto": {"algorithm": "ditto"},
    "fedasync": {"algorithm": "fedasync", "policy": "every_arrival", "rounds": 16},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "torch": {
        "model": {"name": "mlp", "hidden": [12]},
        "local": {"trainer": {"name": "torch", "optimizer": "AdamW", "lr": 0.01, "scheduler": "cosine"}},
    },
    "lightning": {"model": f"{__file__}:Lit", "local": {"trainer": "lightning"}},
    "own": {"model": f"{__file__}:Plain", "local": {"trainer": f"{__file__}:Signs"}},
}


class Body(nn.Module):
    """An MLP with dropout, in two parts."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(features, 12), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(12, classes)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what enters the last layer [n, 12]."""
        found: torch.Tensor = self.body(x)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, L]."""
        found: torch.Tensor = self.head(self.body(x))
        return found


@dataclass(frozen=True)
class Plain:
    """A network that is not mpifl's."""

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return it."""
        return Body(prod(shape), num_classes)


@dataclass(frozen=True)
class Lit:
    """The same network as a LightningModule."""

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return it."""
        lightning = optional("lightning", "lightning", "local.trainer", "lightning")

        class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                whole = Body(prod(shape), num_classes)
                self.body, self.head = whole.body, whole.head

            embed, forward = Body.embed, Body.forward

            def training_step(self, batch: Any, number: int) -> torch.Tensor:
                return nn.functional.cross_entropy(self(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.01)

        return Net()


def _signs() -> type:
    """Return a trainer that moves weights by the sign of noisy gradients, drawn from global generators."""
    import mpifl

    @dataclass(frozen=True)
    class Signs(mpifl.Trainer):
        gives = ("direction", "loss", "part", "gradient", "outputs")

        def fit(self, module: nn.Module, data: Any, context: Any) -> Any:
            params = [p for p in module.parameters() if p.requires_grad]
            samples = 0
            for x, y, index in data.batches():
                context.loss(module, x, y, index).backward()
                context.direct()
                for p in params:
                    if p.grad is not None:
                        p.data = p.data - 0.003 * (p.grad + 1e-3 * torch.randn(p.shape)).sign()
                        p.grad = None
                samples += len(x)
            return mpifl.Fit(0.0, context.num_steps, samples)

    Signs.__qualname__ = "Signs"
    return Signs


Signs = _signs()


def found(method: str, trainer: str, transport: Transport) -> dict[str, Any] | None:
    """Return digest and bytes of a run, on rank 0."""
    folder = on_server(transport, lambda: mkdtemp())
    tree = loader.merged(loader.read(str(CONFIG)), {"output": {"folder": folder}, "evaluation": {"every": 1}})
    tree = loader.merged(loader.merged(tree, METHODS[method]), TRAINERS[trainer])
    local = {key: value for key, value in tree["local"].items() if key != "lr"}
    config: Config = loader.from_tree(Config, {**tree, "model": TRAINERS[trainer]["model"], "local": local})
    made = run(config, transport, quiet=True)
    if made is None:
        return None
    summary = load(made).summary
    names = ("digest", "federation_bytes_up", "federation_bytes_down", "flops", "accuracy_mean")
    return {name: summary[name] for name in names}


def all_found(cases: Sequence[str], transport: Transport) -> dict[str, Any]:
    """Return what came of each case, `method-trainer`, on rank 0."""
    return {case: found(*case.split("-"), transport) for case in cases}


if __name__ == "__main__":
    job = connect()
    everything = all_found(sys.argv[2:], job)
    if job.is_server:
        Path(sys.argv[1]).write_text(json.dumps(everything))
    job.finalize(0)
