"""The Python interface to runs: in a script, in a notebook, or on every rank of a script under mpirun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpifl.analysis import comparison, export
from mpifl.analysis.comparison_tables import numbers
from mpifl.analysis.seed_groups import gather, say_other_inputs
from mpifl.comm.transport import Transport, on_server
from mpifl.core.case_names import label_of
from mpifl.core.conversion import untyped
from mpifl.core.errors import is_whole, require
from mpifl.core.federation import DataInfo
from mpifl.data import PoolFederation
from mpifl.driver.existing import reused
from mpifl.driver.resumption import refuse_changes, refuse_place
from mpifl.driver.run import run as run_experiment
from mpifl.driver.run_callbacks import end_late
from mpifl.experiment import loader
from mpifl.experiment.build import open_data
from mpifl.experiment.schema import Config
from mpifl.experiment.section_checks import check_sections
from mpifl.results import reader
from mpifl.results.callbacks import raising_causes
from mpifl.results.reader import Run
from mpifl.results.run_folder import is_complete, refuse_more_rounds
from mpifl.runtime.script import on_all_ranks
from mpifl.sweeps.cases import Part, changed
from mpifl.sweeps.results import Sweep, load_sweep, say_missing
from mpifl.sweeps.tuning import sweep as run_sweep

if TYPE_CHECKING:
    import pandas as pd

Given = Config | str | Path | Mapping[str, Any]
Compared = str | Path | Run | Sweep


def run(config: Given, *, callbacks: Sequence[Any] = (), quiet: bool = True, **changes: Any) -> Run | None:
    """Run a configuration, write its run folder, and return the finished run.

    Under `mpirun` every rank of the script must call; the ranks then compute the run together. With an
    `output.id`, `output.existing` says what becomes of a run that has this id already, so that a script can
    run twice: `output={"id": "a", "existing": "reuse"}`.

    Args:
        config: a configuration: the file or name of one, `load_config(...)`, or a mapping of keys to values.
        callbacks: objects that are called during the run, see `results.callbacks`. Only those of rank 0 are
            called.
        quiet: whether to print no progress.
        changes: key -> value of the configuration, sections as mappings: `rounds=3, local={"lr": 0.1}`.

    Returns:
        The run on rank 0, also without `mpirun`; None on the other ranks.

    Raises:
        UserError: the configuration, the data or an option is wrong; on every rank. Its `key`, `value` and
            `remedy` say what is wrong.
        CodeFailed: the user's own code failed; on every rank. The exception of a callback is raised itself,
            with a note on what happened to the run.
        Stopped: a signal ended the run after a step, after its state was written; on every rank.
    """

    def work(transport: Transport) -> Run | None:
        given = _objects(callbacks)
        tree = on_server(transport, lambda: tree_of(config, changes))
        whole = loader.everywhere(transport, tree)
        folder, complete = on_server(transport, lambda: reused(whole))
        if complete:
            on_server(transport, lambda: _say_reused(folder, given, quiet), everywhere=False)
            return reader.load(folder) if transport.is_server and folder is not None else None
        folder = run_experiment(whole, transport, quiet, folder, callbacks=given)
        return None if folder is None else reader.load(folder)

    return raising_causes(lambda: on_all_ranks(_call("mpifl.run", callbacks), work))


def _say_reused(folder: Path | None, callbacks: Sequence[Any], quiet: bool) -> None:
    """Tell callbacks of the end of a reused run, if they were not told, and print where it is."""
    assert folder is not None
    end_late(folder, callbacks)
    if not quiet:
        print(f"{folder} is complete and reused", flush=True)


def resume(
    folder: str | Path, *, callbacks: Sequence[Any] = (), quiet: bool = True, **changes: Any
) -> Run | None:
    """Resume a run from its last checkpoint, on any number of ranks, and return the finished run.

    Args:
        folder: the run folder.
        callbacks: objects that are called during the run, see `results.callbacks`. Only those of rank 0 are
            called.
        quiet: whether to print no progress.
        changes: as in `run`, but only keys that leave the steps taken so far unchanged, such as `rounds`.

    Returns:
        The run on rank 0, also without `mpirun`; None on the other ranks.

    Raises:
        UserError: there is nothing to resume from, or other keys are changed; on every rank.
        CodeFailed: the user's own code failed; on every rank. The exception of a callback is raised itself,
            with a note on what happened to the run.
        Stopped: a signal ended the run after a step, after its state was written; on every rank.
    """

    def work(transport: Transport) -> Run | None:
        given, path = _objects(callbacks), Path(folder)
        complete = on_server(transport, lambda: is_complete(path))
        on_server(transport, lambda: refuse_place(path, changes))
        if not complete:
            tree = on_server(transport, lambda: tree_of(path / "config.yaml", changes))
            run_experiment(loader.everywhere(transport, tree), transport, quiet, path, callbacks=given)
        else:
            on_server(transport, lambda: refuse_more_rounds(path, untyped(changes.get("rounds"))))
            if changes:
                on_server(transport, lambda: refuse_changes(path, tree_of(path / "config.yaml", changes)))
            on_server(transport, lambda: end_late(path, given), everywhere=False)
        return reader.load(path) if transport.is_server else None

    return raising_causes(lambda: on_all_ranks(_call("mpifl.resume", callbacks), work))


def _call(name: str, callbacks: Sequence[Any]) -> str:
    """Return a description of a call that must be the same on all ranks."""
    count = len(callbacks) if _is_list(callbacks) else 0  # others are refused
    return f"{name} with {count} callbacks" if count else name


def _objects(callbacks: Sequence[Any] | None) -> Sequence[Any]:
    """Return callbacks given as arguments; raise `UserError` if they are no list of objects."""
    if callbacks is None:
        return ()
    require(_is_list(callbacks), "callbacks", callbacks, "give a list of objects, as in [Watch()]")
    names = [callback for callback in callbacks if isinstance(callback, str)]
    remedy = "names belong into the configuration: output={'callbacks': [...]}; give objects here"
    require(not names, "callbacks", names, remedy)
    return callbacks


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def sweep(
    config: Given,
    *,
    jobs: int = 1,
    only: Mapping[str, Sequence[Any]] | None = None,
    case: str | None = None,
    keep_going: bool = False,
    quiet: bool = True,
    **changes: Any,
) -> Sweep | None:
    """Run a configuration for every combination of the values in its `vary`, and return the runs.

    Under `mpirun` every rank of the script must call. If a sweep with the same `output.id` exists, the cases
    are added to it: its complete cases stay as they are, and missing ones are run.

    Args:
        config: a configuration, as in `run`.
        jobs: number of cases that run at the same time, each on a group of the ranks.
        only: varied key -> labels of the values to run; other values are left out.
        case: `i/N`: run only the i-th of N parts, so that several processes can share a sweep.
        keep_going: whether the other cases run although one has failed.
        quiet: whether to print no progress.
        changes: as in `run`; `vary={"algorithm": {"mine": "ucfl", "theirs": "ifca"}, "seed": [0, 1]}`. With
            `output={"model": True}`, cases keep their final models.

    Returns:
        The complete runs on rank 0, also without `mpirun`; None on the other ranks.

    Raises:
        UserError: a case is invalid, the existing sweep has other settings, or there are too few ranks; or a
            case cannot run because of the data.
        CodeFailed: the user's own code failed in a case. With `keep_going`: some cases failed, each of which
            has a line in the message; `load_sweep` returns the others.
    """

    def work(transport: Transport) -> Sweep | None:
        chosen = {}
        keyed = only is None or isinstance(only, Mapping)
        require(keyed, "only", only, "use a mapping of varied keys to lists of values")
        for key, values in (only or {}).items():
            listed = isinstance(values, Iterable) and not isinstance(values, str)
            require(listed, f"only.{key}", values, f"use a list of values: [{values!r}]")
            chosen[key] = [label_of(value) for value in values]
        require(is_whole(jobs), "jobs", jobs, "use the number of cases that run at a time")
        require(isinstance(keep_going, bool), "keep_going", keep_going, "use True or False")
        require(case is None or isinstance(case, str), "case", case, "use a text i/N, as in '2/8'")
        part = Part(chosen, Part.of(share=case).share)
        folder = run_sweep(lambda: laid(_asked(config), changes), transport, quiet, part, jobs, keep_going)
        return None if folder is None else load_sweep(folder)

    return raising_causes(lambda: on_all_ranks("mpifl.sweep", work))


def _asked(config: Given) -> Given:
    """Return a configuration without `output.model` if it is true, the default that `load_config` adds."""
    if not isinstance(config, Config) or not config.output.model:
        return config
    tree = loader.to_tree(config)
    return {**tree, "output": {name: value for name, value in tree["output"].items() if name != "model"}}


def compare(
    *runs: Compared | Sequence[Compared],
    columns: Sequence[str] = (),
    metric: str = "accuracy",
    test: str | None = None,
    interval: str = "std",
    confidence: float = 0.95,
    target: float | None = None,
    problem: Sequence[str] = ("data",),
    finished_only: bool = False,
) -> pd.DataFrame:
    """Return the final figures of runs, one row per configuration, as `mpifl compare --csv` writes them.

    Figures have the units of the printed table: accuracies in percent, bytes in MB. `target`, and columns of
    `metrics.csv` that `columns` names, have the units of the run folders: accuracies are in [0, 1].

    Args:
        runs: folders of runs or sweeps, patterns of them, or return values of `run`, `load` and `load_sweep`;
            or lists of these.
        columns: figures to show, named as for `--columns`; empty for the usual ones.
        metric: the figure to test.
        test: test over seeds, `t`, `wilcoxon` or `none`; None: `t` if the runs can be paired by seed. The
            outcome is in the column `..._mark`.
        interval: kind of the intervals in the columns `..._low` and `..._high`: `t`, `bootstrap` or
            `percentile`; `std` gives those of `t`.
        confidence: confidence level of intervals; tests have the significance level 1 - confidence.
        target: mean accuracy in [0, 1], or mean of the runs' other metric, for which to show the cost; None
            for 95 % of the best.
        problem: sections or keys of the configuration that define a problem; methods are compared on equal
            problems.
        finished_only: whether to leave out runs that are not finished; a printed line says so.

    Raises:
        UserError: a folder is no finished run, or an argument does not fit these runs.
    """
    share = _is_number(confidence) and 0.5 < confidence < 1
    require(share, "confidence", confidence, "use a share in (0.5, 1), as in 0.95")
    _check_target(target)
    columns, problem = _texts("columns", columns), _texts("problem", problem)
    require(isinstance(metric, str), "metric", metric, "name a figure, as in 'accuracy'")
    remedy = f"use one of {', '.join(comparison.KNOWN_TESTS)}; or None"
    require(test is None or test in comparison.KNOWN_TESTS, "test", test, remedy)
    remedy = f"use one of {', '.join(comparison.KNOWN_INTERVALS)}"
    require(interval in comparison.KNOWN_INTERVALS, "interval", interval, remedy)
    choices = comparison.Choices(target, test, interval, confidence, metric, problem=problem, columns=columns)
    import pandas as pd

    found = comparison.compare(_names(runs), choices, finished_only)
    say_other_inputs(found.groups)
    say_missing(_names(runs))
    return pd.DataFrame(numbers(found))


def table(
    *runs: Compared | Sequence[Compared],
    of: str = "metrics",
    target: float | None = None,
    finished_only: bool = False,
) -> pd.DataFrame:
    """Return all figures of runs as one tidy table, as `mpifl export` does; each varied key has a column.

    Args:
        runs: as in `compare`.
        of: `metrics`, one row per run and evaluation; `clients`, one row per run and client; or `final`, one
            row per run.
        target: for `final`, the mean accuracy in [0, 1] for which to show the cost; None for 95 % of the
            best.
        finished_only: as in `compare`.

    Raises:
        UserError: a folder is no finished run, or there is no such table.
    """
    require(of in export.TABLES, "of", of, f"use one of {', '.join(export.TABLES)}")
    require(target is None or of == "final", "target", target, "has no effect: use of='final'")
    _check_target(target)
    groups = gather(_names(runs), finished_only)
    say_other_inputs(groups)
    say_missing(_names(runs))
    return export.final_frame(groups, target) if of == "final" else export.frame(groups, of)


def _check_target(target: float | None) -> None:
    known = target is None or (_is_number(target) and isfinite(target))
    require(known, "target", target, "use a value of the runs' metric")


def _texts(key: str, given: Iterable[str]) -> tuple[str, ...]:
    """Return an argument that is a list of texts; raise `UserError` for others."""
    listed = isinstance(given, Iterable) and not isinstance(given, str)
    names = tuple(given) if listed else ()
    texts = listed and all(isinstance(name, str) for name in names)
    require(texts, key, given, "give a list of names")
    return names


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _names(runs: Sequence[Compared | Sequence[Compared]]) -> list[str]:
    """Return the folders of runs and sweeps, and of those in lists."""
    lists: list[Sequence[Any]] = [run if isinstance(run, (list, tuple)) else [run] for run in runs]
    return [str(run.folder if isinstance(run, (Run, Sweep)) else run) for some in lists for run in some]


def client_data(
    config: Given | Run, client: int, *, visit: int = 0, stored: bool = False, **changes: Any
) -> dict[str, tuple[Any, Any]]:
    """Return the data of one client in a run as NumPy arrays: part -> (x, y).

    An attacker has the labels that it gives, and a visit the data set that the policy lets it have. Parts are
    `train`, `val`, `test` and the names of further test sets. Of samples with several inputs, x is a mapping
    from their names.

    Args:
        config: a configuration, as in `run`, or a finished run.
        client: number of the client, from 0.
        visit: number of the visit, if the client's data change from visit to visit.
        stored: whether to return x as stored (images uint8 [n, C, H, W]) instead of as the model gets it
            (float32).
        changes: as in `run`.

    Raises:
        UserError: there is no such client, or the data cannot be opened.
    """
    given = config.folder / "config.yaml" if isinstance(config, Run) else config
    whole = loader.from_tree(Config, tree_of(given, changes))
    found = open_data(whole, prepares=True)
    known = f"clients are numbered from 0 to {found.num_clients - 1}"
    require(is_whole(client) and 0 <= client < found.num_clients, "client", client, known)
    require(is_whole(visit) and visit >= 0, "visit", visit, "visits are numbered from 0")
    data = found.client(client, visit)
    splits = {"train": data.train, "val": data.val, "test": data.test, **data.extra}
    if stored:
        assert isinstance(found, PoolFederation)
        kept = {name: found.samples(client, name, visit) for name in splits}
        return {name: (_inputs(torch.from_numpy(x), found.info), y) for name, (x, y) in kept.items()}
    return {name: (_inputs(split.x, found.info), split.y.numpy().copy()) for name, split in splits.items()}


def _inputs(x: torch.Tensor, info: DataInfo) -> Any:
    """Return samples as an array, or as a mapping of names to arrays if they have several inputs."""
    if not info.parts:
        return x.numpy().copy()
    return {name: part.numpy().copy() for name, part in info.unpack(x).items()}


def tree_of(config: Given, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with changes, and check it.

    Args:
        config: a configuration, as in `run`.
        changes: keys that override those of the configuration.

    Raises:
        UserError: the configuration is invalid, or has `vary`.
    """
    tree = laid(config, changes)
    whole = loader.from_tree(Config, tree)
    check_sections(whole)
    varied = ", ".join(map(str, whole.vary or ()))
    remedy = "mpifl.sweep runs all cases; vary=None runs the rest once"
    require(not varied, "vary", varied, remedy)
    return tree


def laid(config: Given, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with changes.

    Args:
        config: a configuration, as in `run`.
        changes: keys that override those of the configuration.
    """
    if isinstance(config, (str, Path)):
        return loader.resolved(str(config), changes, changed)
    if isinstance(config, Config):
        return changed(loader.to_tree(config), changes)
    require(isinstance(config, Mapping), "CONFIG", config, "name a file, or give a mapping of keys to values")
    tree = changed(config, changes)
    return loader.with_scenario(tree, tree)
