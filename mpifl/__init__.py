"""mpifl: a message-passing simulator for clustered and personalised federated learning.

This module exports the public names. Each is imported on first use, so that `import mpifl` takes no time.

    config = mpifl.load_config("quickstart", ["--rounds", "3"])
    result = mpifl.run(config, seed=1)
    print(result.summary["accuracy_mean"], result.metrics[["round", "accuracy_mean"]])
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpifl.api import client_data, compare, resume, run, sweep, table
    from mpifl.core.algorithm import Algorithm
    from mpifl.core.client import Client
    from mpifl.core.errors import CodeFailed, Stopped, UserError
    from mpifl.core.mixing import (
        add,
        average,
        blend,
        by_cluster,
        carry,
        componentwise,
        in_turn,
        own_rows,
        rows,
        sample_weights,
    )
    from mpifl.core.plan import Mixing, Plan
    from mpifl.core.trainer import Fit, FitContext, Samples, Trainer
    from mpifl.experiment.loader import load as load_config
    from mpifl.experiment.schema import Config
    from mpifl.results.reader import Run, load
    from mpifl.results.reader import load as load_run
    from mpifl.results.run_events import STOP
    from mpifl.sweeps.results import Sweep, load_sweep

if os.environ.get("MPIFL_INSTRUCTIONS"):
    importlib.import_module("mpifl.core.instructions").limit()  # before PyTorch and NumPy are imported

__version__ = "1.0.0"
__all__ = [
    "STOP",
    "Algorithm",
    "Client",
    "CodeFailed",
    "Config",
    "Fit",
    "FitContext",
    "Mixing",
    "Plan",
    "Run",
    "Samples",
    "Stopped",
    "Sweep",
    "Trainer",
    "UserError",
    "__version__",
    "add",
    "average",
    "blend",
    "by_cluster",
    "carry",
    "client_data",
    "compare",
    "componentwise",
    "in_turn",
    "load",
    "load_config",
    "load_run",
    "load_sweep",
    "own_rows",
    "resume",
    "rows",
    "run",
    "sample_weights",
    "sweep",
    "table",
]
_HOMES = {
    "Algorithm": "core.algorithm",
    "Client": "core.client",
    "CodeFailed": "core.errors",
    "Config": "experiment.schema",
    "Fit": "core.trainer",
    "FitContext": "core.trainer",
    "Samples": "core.trainer",
    "Trainer": "core.trainer",
    "Run": "results.reader",
    "STOP": "results.run_events",
    "Stopped": "core.errors",
    "Sweep": "sweeps.results",
    "UserError": "core.errors",
    "client_data": "api",
    "compare": "api",
    "load": "results.reader",
    "load_config": "experiment.loader",
    "load_run": "results.reader",
    "load_sweep": "sweeps.results",
    "resume": "api",
    "run": "api",
    "sweep": "api",
    "table": "api",
}  # all other public names: core.mixing
_THERE = {"load_config": "load", "load_run": "load"}  # name here -> name in its module


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"mpifl.{_HOMES.get(name, 'core.mixing')}")
    globals()[name] = found = getattr(module, _THERE.get(name, name))
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
