"""Runs that are called from Python: in a script, in a notebook, on every rank of a script under mpirun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpifl.comm.transport import Transport, on_server
from mpifl.core.case_names import label_of
from mpifl.core.errors import require
from mpifl.core.old_keys import renamed
from mpifl.data import open_federation
from mpifl.results import comparison, export, reader
from mpifl.results.comparison_tables import numbers
from mpifl.results.reader import Run
from mpifl.results.run_folder import is_complete, refuse_more_rounds
from mpifl.results.seed_groups import gather
from mpifl.runtime.script import on_all_ranks

from . import loader
from .checkpoints import refuse_changes
from .observed import end_late
from .run import run as run_experiment
from .schema import Config, check_sections
from .sweep import sweep as run_sweep
from .sweep_cases import Part, changed
from .sweep_results import Sweep, load_sweep, say_missing

if TYPE_CHECKING:
    import pandas as pd

Given = Config | str | Path | Mapping[str, Any]


def run(config: Given, *, callbacks: Sequence[Any] = (), quiet: bool = True, **changes: Any) -> Run | None:
    """Run a configuration; write its run folder and return it, read.

    Under `mpirun` every rank of the script calls, and they run it together.

    Args:
        config: a configuration: the file or name of one, `load_config(...)`, or a mapping of keys to values.
        callbacks: objects that are told of the run, see `results.callbacks`; those of rank 0 are called.
        quiet: print no progress.
        changes: key -> value of the configuration, sections as mappings: `rounds=3, local={"lr": 0.1}`.

    Returns:
        The run on rank 0, and where there is one process; None on the other ranks.

    Raises:
        UserError: on every rank; its `key`, `value` and `remedy` name what is wrong.
        CodeFailed: code of the user's failed; on every rank.
        Stopped: a signal ended the run after a step, its state written; on every rank.
    """

    def work(transport: Transport) -> Run | None:
        tree = on_server(transport, lambda: tree_of(config, changes))
        folder = run_experiment(loader.from_tree(Config, tree), transport, quiet, callbacks=callbacks)
        return None if folder is None else reader.load(folder)

    return on_all_ranks(_call("mpifl.run", callbacks), work)


def resume(
    folder: str | Path, *, callbacks: Sequence[Any] = (), quiet: bool = True, **changes: Any
) -> Run | None:
    """Go on with a run from its last checkpoint, at any number of ranks; return it, read.

    Args:
        folder: the run folder.
        callbacks: objects that are told of the run, see `results.callbacks`; those of rank 0 are called.
        quiet: print no progress.
        changes: as in `run`, of keys that decide no numbers, such as `rounds`.

    Returns:
        The run on rank 0, and where there is one process; None on the other ranks.

    Raises:
        UserError: there is nothing to go on from, or the changes are others; on every rank.
    """

    def work(transport: Transport) -> Run | None:
        path = Path(folder)
        if not on_server(transport, lambda: is_complete(path)):
            tree = on_server(transport, lambda: tree_of(path / "config.yaml", changes))
            run_experiment(loader.from_tree(Config, tree), transport, quiet, path, callbacks=callbacks)
        else:
            on_server(transport, lambda: refuse_more_rounds(path, changes.get("rounds")))
            if changes:
                on_server(transport, lambda: refuse_changes(path, tree_of(path / "config.yaml", changes)))
            on_server(transport, lambda: end_late(path, callbacks), everywhere=False)
        return reader.load(path) if transport.is_server else None

    return on_all_ranks(_call("mpifl.resume", callbacks), work)


def _call(name: str, callbacks: Sequence[Any]) -> str:
    """Return a call in words, as far as all ranks must make the same."""
    return f"{name} with {len(callbacks)} callbacks" if callbacks else name


def sweep(
    config: Given,
    *,
    jobs: int = 1,
    only: Mapping[str, Sequence[Any]] | None = None,
    case: str | None = None,
    quiet: bool = True,
    **changes: Any,
) -> Sweep | None:
    """Run a configuration for every combination of the values in its `vary`; return the runs, read.

    Under `mpirun` every rank of the script calls. A sweep with an `output.id` that was begun before is
    joined: complete cases stay as they are, and those that it did not have are added.

    Args:
        config: as `run` takes it.
        jobs: cases that run at a time, each on a group of the ranks.
        only: varied key -> labels of the values to take; the others are left out.
        case: `i/N`: only the i-th of N parts, where several processes share a sweep.
        quiet: print no progress.
        changes: as in `run`; `vary={"algorithm": {"mine": "ucfl", "theirs": "ifca"}, "seed": [0, 1]}`. Cases
            keep their final models under `output={"model": True}`.

    Returns:
        The complete runs on rank 0, and where there is one process; None on the other ranks.

    Raises:
        UserError: a case is invalid, the sweep to join has other settings, or there are too few ranks.
    """

    def work(transport: Transport) -> Sweep | None:
        chosen = {key: [label_of(value) for value in values] for key, values in (only or {}).items()}
        part = Part(chosen, Part.of(share=case).share)
        folder = run_sweep(lambda: laid(_asked(config), changes), transport, quiet, part, jobs)
        return None if folder is None else load_sweep(folder)

    return on_all_ranks("mpifl.sweep", work)


def _asked(config: Given) -> Given:
    """Return a configuration without the `output.model` of `load_config`, which is true by default."""
    if not isinstance(config, Config) or not config.output.model:
        return config
    tree = loader.to_tree(config)
    return {**tree, "output": {name: value for name, value in tree["output"].items() if name != "model"}}


def compare(
    *runs: str | Path | Run | Sweep,
    columns: Sequence[str] = (),
    metric: str = "accuracy",
    test: str | None = None,
    interval: str = "std",
    confidence: float = 0.95,
    target: float | None = None,
    problem: Sequence[str] = ("data",),
    finished_only: bool = False,
) -> pd.DataFrame:
    """Return the final figures of runs, a row a configuration: what `mpifl compare --csv` writes.

    Figures are in the units of its table, accuracies in percent and bytes in MB. `target`, and columns of
    `metrics.csv` that `columns` names, are as runs have them: accuracies are shares.

    Args:
        runs: folders of runs or sweeps, patterns of them, or what `run`, `load` and `load_sweep` return.
        columns: figures to show, as `--columns` names them; empty for the usual ones.
        metric: the figure that `test` looks at.
        test: over seeds, `t`, `wilcoxon` or `none`; None: `t` where seeds pair. `..._mark` has the outcome.
        interval: `std` for none, or `t`, `bootstrap`, `percentile`: the columns `..._low` and `..._high`.
        confidence: of intervals; tests have the level 1 - confidence.
        target: mean accuracy whose cost is wanted, in [0, 1], or mean of the runs' other metric; None for
            95 % of the best.
        problem: sections or keys of the configuration that make a problem, on which methods are compared.
        finished_only: whether runs that are not finished are left out, which a line says.

    Raises:
        UserError: a folder is no finished run, or a choice does not fit these runs.
    """
    require(0.5 < confidence < 1, "confidence", confidence, "take a share in (0.5, 1), as in 0.95")
    require(target is None or isfinite(target), "target", target, "take a value of the runs' metric")
    remedy = f"take one of {', '.join(comparison.KNOWN_TESTS)}; or None"
    require(test is None or test in comparison.KNOWN_TESTS, "test", test, remedy)
    remedy = f"take one of {', '.join(comparison.KNOWN_INTERVALS)}"
    require(interval in comparison.KNOWN_INTERVALS, "interval", interval, remedy)
    choices = comparison.Choices(
        target, test, interval, confidence, metric, problem=tuple(problem), columns=tuple(columns)
    )
    import pandas as pd

    found = comparison.compare(_names(runs), choices, finished_only)
    say_missing(_names(runs))
    return pd.DataFrame(numbers(found))


def table(
    *runs: str | Path | Run | Sweep,
    of: str = "metrics",
    target: float | None = None,
    finished_only: bool = False,
) -> pd.DataFrame:
    """Return all figures of runs as one tidy table with a column for each key that varies, as `mpifl export`.

    Args:
        runs: as in `compare`.
        of: `metrics`: a row a run and evaluation; `clients`: a row a run and client; `final`: a row a run.
        target: of `final`, the mean accuracy in [0, 1] whose cost is wanted; None for 95 % of the best.
        finished_only: as in `compare`.

    Raises:
        UserError: a folder is no finished run, or there is no such table.
    """
    require(of in export.TABLES, "of", of, f"take one of {', '.join(export.TABLES)}")
    require(target is None or of == "final", "target", target, "has no effect: take of='final'")
    groups = gather(_names(runs), finished_only)
    say_missing(_names(runs))
    return export.final_frame(groups, target) if of == "final" else export.frame(groups, of)


def _names(runs: Sequence[str | Path | Run | Sweep]) -> list[str]:
    """Return the folders of runs and sweeps."""
    return [str(run.folder if isinstance(run, (Run, Sweep)) else run) for run in runs]


def client_data(
    config: Given | Run, client: int, *, visit: int = 0, stored: bool = False, **changes: Any
) -> dict[str, tuple[Any, Any]]:
    """Return the data of one client as NumPy arrays: part -> (x, y).

    Parts are `train`, `val`, `test` and the names of further test sets.

    Args:
        config: as `run` takes it, or a finished run.
        client: its number, from 0.
        visit: the number of its visit, where clients change from visit to visit.
        stored: x as it is stored, images uint8 [n, C, H, W], instead of as the model sees it, float32.
        changes: as in `run`.

    Raises:
        UserError: there is no such client, or the data cannot be opened.
    """
    given = config.folder / "config.yaml" if isinstance(config, Run) else config
    whole = loader.from_tree(Config, tree_of(given, changes))
    found = open_federation(whole.data, whole.seed.data)
    known = f"clients are numbered from 0 to {found.num_clients - 1}"
    require(0 <= client < found.num_clients, "client", client, known)
    require(visit >= 0, "visit", visit, "visits are numbered from 0")
    data = found.client(client, visit)
    parts = {"train": data.train, "val": data.val, "test": data.test, **data.extra}
    if stored:
        return {name: found.samples(client, name, visit) for name in parts}
    return {name: (split.x.numpy().copy(), split.y.numpy().copy()) for name, split in parts.items()}


def tree_of(config: Given, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with changes, checked.

    Args:
        config: as `run` takes it.
        changes: laid over it.
    """
    tree = laid(config, changes)
    whole = loader.from_tree(Config, tree)
    check_sections(whole)
    varied = ", ".join(map(str, whole.vary or ()))
    remedy = "mpifl.sweep runs all cases; vary=None runs what stands beside it, alone"
    require(not varied, "vary", varied, remedy)
    return tree


def laid(config: Given, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with changes.

    Args:
        config: as `run` takes it.
        changes: laid over it.
    """
    if isinstance(config, (str, Path)):
        tree = loader.read(str(config))
    elif isinstance(config, Config):
        tree = loader.to_tree(config)
    else:
        require(
            isinstance(config, Mapping), "CONFIG", config, "name a file, or give a mapping of keys to values"
        )
        tree = renamed(config)
    return changed(tree, renamed(changes))
