"""mpifl: a message-passing simulator for clustered and personalised federated learning.

The public names; each is imported when it is first used, so that `import mpifl` takes no time.

    config = mpifl.load_config("quickstart", ["--rounds", "3"])
    result = mpifl.run(config, seed=1)
    print(result.summary["accuracy_mean"], result.metrics["accuracy_mean"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpifl.core.algorithm import Algorithm
    from mpifl.core.client import Client
    from mpifl.core.errors import UserError
    from mpifl.core.mixing import (
        Mixing,
        Plan,
        add,
        average,
        blend,
        by_cluster,
        carry,
        componentwise,
        in_turn,
        own_rows,
        rows,
        shares,
    )
    from mpifl.experiment.loader import load as load_config
    from mpifl.experiment.schema import Config
    from mpifl.results.reader import Run
    from mpifl.results.reader import load as load_run

__version__ = "0.2.0"
__all__ = [
    "Algorithm",
    "Client",
    "Config",
    "Mixing",
    "Plan",
    "Run",
    "UserError",
    "__version__",
    "add",
    "average",
    "blend",
    "by_cluster",
    "carry",
    "componentwise",
    "in_turn",
    "load_config",
    "load_run",
    "own_rows",
    "rows",
    "run",
    "shares",
]
_HOMES = {
    "Algorithm": "core.algorithm",
    "Client": "core.client",
    "Config": "experiment.schema",
    "Run": "results.reader",
    "UserError": "core.errors",
    "load_config": "experiment.loader",
    "load_run": "results.reader",
}  # of all other public names: core.mixing
_THERE = {"load_config": "load", "load_run": "load"}  # names that differ in the module


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"mpifl.{_HOMES.get(name, 'core.mixing')}")
    globals()[name] = found = getattr(module, _THERE.get(name, name))
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def run(config: Config | str, **changes: Any) -> Run:
    """Run a configuration in this process; write its run folder and return it, read.

    Args:
        config: a configuration, or the file or name of one.
        changes: key -> value of the configuration, sections as mappings: `rounds=3, local={"lr": 0.1}`.

    Raises:
        UserError: names the key, its value and a remedy; also below `mpirun`: use `mpifl run` there.
    """
    from mpifl.comm.connect import connect
    from mpifl.core.errors import require
    from mpifl.core.old_keys import renamed
    from mpifl.experiment import loader
    from mpifl.experiment.run import run as run_experiment
    from mpifl.experiment.schema import Config, check_sections
    from mpifl.results.reader import load

    transport = connect()
    remedy = "runs in one process; over several: mpirun -n P mpifl run CONFIG"
    require(transport.size == 1, "mpifl.run", f"{transport.size} ranks", remedy)
    tree = loader.read(config) if isinstance(config, str) else loader.to_tree(config)
    whole = loader.from_tree(Config, loader.merged(tree, renamed(changes)))
    check_sections(whole)
    folder = run_experiment(whole, transport, quiet=True)
    assert folder is not None, "rank 0 has the run folder"
    return load(folder)
