"""What becomes of a run folder that is there already: `output.existing`."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from mpifl.core.errors import CodeFailed, UserError, require
from mpifl.core.imports import code_of
from mpifl.core.progress import doing
from mpifl.core.textfiles import flat, json_mapping
from mpifl.data import DataConfig, open_federation
from mpifl.experiment import loader
from mpifl.experiment.schema import REPLACE, REUSE, Config
from mpifl.results import run_folder as folders
from mpifl.results.identity import OF_A_MACHINE, OWN, PLUGINS

from .checkpoints import locked

KEY = "output.existing"
# sections that change neither numbers nor files
NO_RESULT = ("system", "checkpoint", "vary", "table", "tune")
OF_PLACE = ("output.folder", "output.id", "output.existing", "output.label", "output.callbacks")
WAYS = f"change it back, give another output.id, or use {KEY} {REPLACE}"


class Found(NamedTuple):
    """The run folder that a configuration with `reuse` finds.

    Attributes:
        folder: the folder of the run to return or to go on with; None for none.
        complete: whether the run is complete.
    """

    folder: Path | None = None
    complete: bool = False


def place(config: Config) -> Path:
    """Return the run folder of a configuration with an `output.id`."""
    return Path(config.output.folder) / f"{config.name}-{config.output.id}"


def reused(config: Config) -> Found:
    """Return the run that is to be reused; nothing unless `output.existing` is `reuse`; on rank 0.

    Raises:
        UserError: the complete run has another configuration, or was computed by other code of the user, with
            other files or data; or the folder is that of a sweep, or of a run of another version.
    """
    if config.output.existing != REUSE:
        return Found()
    folder = place(config)
    if not (folder / "run.json").exists():
        _remove_unbegun(folder)
        return Found()
    if not folders.is_complete(folder):
        return Found(folder)
    _check_options(config, folder)
    check_origin(config, folder, WAYS)
    _check_data(config, folder)
    return Found(folder, True)


def remove_replaced(config: Config) -> None:
    """Delete the run folder that a configuration with `replace` takes the place of; on rank 0.

    It is called when everything else is known to be right, just before the new folder is created.

    Raises:
        UserError: what is there is no run folder, a process is running it, or the run reads files in it.
    """
    if config.output.existing != REPLACE:
        return
    folder = place(config)
    _remove_unbegun(folder)
    if not folder.exists():
        return
    check_is_run(folder)
    inside = [text for text in loader.texts(config) if _is_inside(text, folder)]
    remedy = f"would delete {folder}, which this run reads; give another output.id"
    require(not inside, KEY, REPLACE, f"{remedy} ({', '.join(inside[:1])})")
    with closing(locked(folder)):
        delete(folder)


def check_is_run(folder: Path) -> None:
    """Raise `UserError` unless a folder is certainly a run folder, so that it may be deleted."""
    about, of_sweep = json_mapping(folder / "run.json"), (folder / "sweep.yaml").is_file()
    known = {"id", "format"} <= about.keys() and (folder / "config.yaml").is_file()
    what = "is the folder of a sweep" if of_sweep else "is not a run folder of mpifl"
    good = known and folder.is_dir() and not folder.is_symlink() and not of_sweep
    remedy = f"{folder} {what}, and is not deleted; move it away, or give another output.id"
    require(good, KEY, REPLACE, remedy)


def delete(folder: Path) -> None:
    """Delete a folder; it disappears at once under its name."""
    gone = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def check_origin(config: Config, folder: Path, remedy: str) -> None:
    """Check that a run was computed by the user's code, plug-ins and files as they are now.

    Args:
        config: the configuration that is asked for.
        folder: the folder of the run.
        remedy: what to do.

    Raises:
        UserError: they have changed since.
    """
    summary = json_mapping(folder / "summary.json")
    identity = summary.get("identity")
    known = identity if isinstance(identity, dict) else {}
    then, now = known.get(OWN), code_of(loader.texts(config))
    changed = f"the run in {folder} was computed by {then}, before a file of your own changed; {remedy}"
    # empty: the files are not where this process looks for them
    require(not then or not now or then == now, OWN, now, changed)
    then, now = known.get(PLUGINS), loader.plugins_of(config)
    changed = f"the run in {folder} was computed by {then}; install that, or {remedy}"
    require(not then or then == now, PLUGINS, now, changed)
    before = summary.get("files")
    before, sums = before if isinstance(before, dict) else {}, loader.sums_of(config)
    for key, file in loader.files_of(config).items():
        changed = (
            f"holds other content than when the run in {folder} was computed; bring it back, or {remedy}"
        )
        require(before.get(key, sums[key]) == sums[key], key, str(file), changed)


def content_of(data: DataConfig, seed: int) -> Mapping[str, str]:
    """Return the digests of data, see `Federation.content`; empty if they cannot be opened."""
    try:
        with doing("comparing the data with those of complete runs"):
            return open_federation(data, seed, verify=False).content
    except (UserError, CodeFailed):  # a run that is to begin says it
        return {}


def check_content(
    then: Mapping[str, str], now: Mapping[str, str], data: DataConfig, folder: Path, remedy: str
) -> None:
    """Raise `UserError` if data have changed since a run, in a part whose digest is known then and now.

    Args:
        then: the digests in the run's summary.
        now: see `content_of`.
        data: the section `data`.
        folder: the folder of the run.
        remedy: what to do.
    """
    for part in sorted(then.keys() & now.keys()):
        changed = f"{part} of its data: {then[part]} in the run in {folder}, {now[part]} now; {remedy}"
        require(then[part] == now[part], "data.source", data.source.name, changed)


def _check_options(config: Config, folder: Path) -> None:
    """Raise `UserError` unless a complete run has the options of a configuration."""
    stored = loader.read(str(folder / "config.yaml"))
    trees = (loader.to_tree(loader.from_tree(Config, stored)), loader.to_tree(config))
    was, asked = (dict(flat({k: v for k, v in tree.items() if k not in NO_RESULT})) for tree in trees)
    keys = [key for key in dict.fromkeys((*asked, *was)) if was.get(key) != asked.get(key)]
    keys = [key for key in keys if key not in OF_PLACE and key not in OF_A_MACHINE]
    if keys:
        others = f" (other keys that differ: {', '.join(keys[1:])})" if keys[1:] else ""
        remedy = f"the complete run in {folder} has {was.get(keys[0])!r}{others}; {WAYS}"
        raise UserError(keys[0], asked.get(keys[0]), remedy)


def _check_data(config: Config, folder: Path) -> None:
    """Raise `UserError` if a complete run was computed from other data than there are now."""
    then = json_mapping(folder / "summary.json").get("data")
    if isinstance(then, dict):
        now = content_of(config.data, config.seed.data)
        check_content(then, now, config.data, folder, WAYS)


def _remove_unbegun(folder: Path) -> None:
    """Remove a folder in which a process ended before its run had begun; leave any other."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if names <= {"config.yaml", ".writable"} and not folder.is_symlink():
        folders.is_begun(folder)


def _is_inside(text: str, folder: Path) -> bool:
    """Return whether a text of a configuration is the path of something in a folder, or of the folder."""
    try:
        path = Path(text.partition(":")[0]).expanduser()
        return path.exists() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # no path
        return False
