"""Decides when a run writes a checkpoint, writes it, and finds the one to resume from.

A checkpoint holds the state of the engine (`runtime.run_state`), of the recorder and of the run folder.
`results.checkpoint_files` reads and writes the files.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

from mpifl.core.errors import Stopped, UserError, require
from mpifl.core.files import try_lock, write_json
from mpifl.core.textfiles import flat
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.results import checkpoint_files, run_folder
from mpifl.results.identity import CODES, EARLIER, OF_A_MACHINE, SAME, differences, resumed
from mpifl.results.recorder import Recorder
from mpifl.runtime.run_state import SAVE, STOP, Checkpointer, FileSums, Saved
from mpifl.supervision.logging import warn
from mpifl.supervision.signals import Signals

MAY_CHANGE = (*SAME, *OF_A_MACHINE, "rounds")  # when a run is resumed
PLACE = ("output.folder", "output.id")  # where a run is: that of a resumed run is given
EACH_ROUND = ("output.clients", "output.updates")  # decide which rows each round writes: may not change


class Checkpoints(Checkpointer):
    """The checkpoints of one run.

    Args:
        folder: the run folder; known on every rank.
        config: the configuration of the run.
        identity: everything that decides the last bits of the run's numbers, see `results.identity`; empty on
            workers.
        signals: requests to save or stop.
        recorder: writes the tables of the run folder; None on workers.
        say: called with lines for the terminal.
        content: description of the data, see `Federation.content`.
        start: checksum of the initial weights that were read from a file; empty if all are drawn.
        lock: lock of the run folder, see `locked`, if the run was resumed; only on rank 0.

    Attributes:
        identity: as given; of a resumed run, also what was different before the checkpoint.
        files: checksums of the user's own files, see `loader.sums_of`; empty on workers.
        written: step of the last checkpoint; 0 for none.
        tried: step of the last attempt to write one.
        since: `time.monotonic` of that attempt.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        identity: Mapping[str, Any],
        signals: Signals,
        recorder: Recorder | None,
        say: Callable[[str], None],
        content: Mapping[str, str] = MappingProxyType({}),
        start: str = "",
        lock: IO[str] | None = None,
    ) -> None:
        self.run_folder, self.config, self.signals, self.say = folder, config, signals, say
        self.recorder = recorder
        self.identity = dict(identity)
        self.about: dict[str, Any] = {"config": _digest(config), "surroundings": self.identity}
        self.about["data"] = dict(content)
        self.about["start"] = start
        self.about["output"] = _written_each_round(config)
        self.files = {} if recorder is None else loader.sums_of(config)
        self.about["times"] = {key: self.files[key] for key in loader.FILES_OF_TIMES if key in self.files}
        self.written, self.tried, self.since = 0, 0, time.monotonic()
        self._lock = lock
        self._held: FileSums = {}
        tables = () if recorder is None else (recorder.events, recorder.updates, recorder.assignments)
        self._tables = [checkpoint_files.TableSum(table) for table in tables]

    @property
    def run_id(self) -> str:
        """The identifier of the run, from `run.json`."""
        try:
            name: str = json.loads((self.run_folder / "run.json").read_text())["id"]
            return name
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "is not a run folder: it has no readable run.json"
            raise UserError("RUN", str(self.run_folder), remedy) from error

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self.run_folder / "checkpoints"

    @property
    def clients(self) -> Path:
        """The folder of the client state in checkpoints."""
        return self.folder / "clients"

    @property
    def held(self) -> FileSums:
        """The files of client state in the last checkpoint."""
        return self._held

    # -- the start of a run ------------------------------------------------------------------------------

    def create(self) -> None:
        """Give a new run its identifier, and lock its folder; on rank 0."""
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        about = {"id": secrets.token_hex(8), "format": run_folder.FORMAT, "started": started}
        write_json(self.run_folder / "run.json", about)
        self._lock = locked(self.run_folder)

    def find(self, from_start: bool) -> Saved | None:
        """Return the state to resume from, None to start again; on rank 0.

        The tables of the run folder are restored to that step.

        Args:
            from_start: whether to start again if there is no checkpoint.

        Raises:
            UserError: there is no checkpoint, or all are damaged; configuration, data, initial weights or the
                rows written in each round differ from the checkpoint; the run has no steps left; another
                process holds the run.
        """
        self._lock = self._lock or locked(self.run_folder)
        checkpoint_files.remove_partial(self.folder)
        try:
            content = checkpoint_files.latest(self.folder, self.run_id, warn)
        except checkpoint_files.Damaged as error:
            remedy = f"{error}: remove {self.folder} to begin again"
            raise UserError("RUN", str(self.run_folder), remedy) from error
        if content is None:
            remedy = "it has written no checkpoint; --from-start begins it again and drops what is there"
            require(from_start, "RUN", str(self.run_folder), remedy)
            warn("no checkpoint was written: beginning again")
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.run_folder / "metrics.csv").unlink(missing_ok=True)
            for each in self._tables:
                each.table.path.unlink(missing_ok=True)
            return None
        if content.about["config"] != self.about["config"]:
            self._refuse_configuration()
        self._check_data(content.about["data"])
        self._check_output(content.about["output"])
        self._check_times(content.about["times"])
        key, value = "start.run", self.config.start.run
        if value is None:
            key, value = "model.weights", self.config.weights
        remedy = "holds other weights than at the checkpoint; bring the old ones back, or begin a new run"
        require(content.about["start"] == self.about["start"], key, value, remedy)
        remedy = f"step {content.step} is the last that the run has taken; use more rounds"
        require(self.config.rounds > content.step, "rounds", self.config.rounds, remedy)
        then, now = content.about["surroundings"], self.identity
        self.about["surroundings"] = self.identity = resumed(then, now, content.step)
        for name in differences(then, now):
            if name == EARLIER:
                continue
            which = "numbers, not only their last bits," if name in CODES else "the last bits of numbers"
            warn(f"{name} was {then.get(name, 'not recorded')} and is {now.get(name)}: {which} may differ")
        self._held = dict(content.clients)
        self.written = self.tried = content.step
        assert self.recorder is not None
        self.recorder.load_state_dict(content.values["recorder"], content.metrics, content.events[0])
        warn(f"going on after step {content.step}")
        values = dict(content.values["engine"])
        return Saved(content.step, dict(content.tensors), dict(content.arrays), values)

    def _refuse_configuration(self) -> NoReturn:
        """Raise `UserError` with the first option that decides numbers and differs from the checkpoint."""
        tree, remedy = loader.to_tree(self.config), "leave it so, or begin a new run"
        for key, was, now in _differing(self.run_folder, tree, {*MAY_CHANGE}):
            raise UserError(key, now, f"the run began with {was!r}; {remedy}")
        what = "config.yaml was edited, or a default has changed since the checkpoint; begin a new run"
        raise UserError("RUN", str(self.run_folder), what)

    def _check_data(self, before: Mapping[str, str]) -> None:
        """Raise `UserError` unless the data equal those of the checkpoint."""
        now, run = self.about["data"], str(self.run_folder)
        for name in sorted({*before, *now}):
            then, here = before.get(name), now.get(name)
            what = f"{name} of the data: {then} at the checkpoint, {here} now"
            require(then == here, "RUN", run, f"{what}; bring the old data back, or begin a new run")

    def _check_output(self, before: Mapping[str, Any]) -> None:
        """Raise `UserError` unless each round writes the same rows as before the checkpoint."""
        for key, now in self.about["output"].items():
            remedy = f"the rounds before were written with {before[key]!r}; leave it so, or begin a new run"
            require(now == before[key], key, now, remedy)

    def _check_times(self, before: Mapping[str, str]) -> None:
        """Raise `UserError` unless the files that say how long clients take equal those of the checkpoint."""
        files = loader.files_of(self.config)
        for key, now in self.about["times"].items():
            remedy = "holds other content than at the checkpoint; bring the old one back, or begin a new run"
            require(before.get(key, now) == now, key, str(files[key]), remedy)

    # -- during the run ----------------------------------------------------------------------------------

    def due(self, step: int) -> str:
        """Return whether to write a checkpoint now, `SAVE`, `STOP` or empty.

        One is due after a number of steps or minutes, after the first step, or at a signal.
        """
        asked, stop = self.signals.take()
        every, minutes = self.config.checkpoint.every, self.config.checkpoint.minutes
        by_step = bool(every) and step > self.written and step % every == 0
        by_time = minutes > 0 and time.monotonic() - self.since > 60 * minutes
        first = self.tried == 0 < step and (every > 0 or minutes > 0)
        return STOP if stop else SAVE if asked or by_step or by_time or first else ""

    def write(self, saved: Saved, files: FileSums) -> None:
        """Write a checkpoint, and remove old ones."""
        assert self.recorder is not None
        start = time.monotonic()
        self.tried, self.since = saved.step, start
        recorder_state = self.recorder.state_dict()  # also writes the rows of events.csv still in memory
        metrics = self.recorder.metrics.path
        tables = {each.table.path.name: each.up_to_now() for each in self._tables}
        content = checkpoint_files.Content(
            step=saved.step,
            run=self.run_id,
            tensors=saved.tensors,
            arrays=saved.arrays,
            values={"engine": saved.values, "recorder": recorder_state},
            metrics=metrics.read_bytes() if metrics.exists() else b"",
            events=tables.pop("events.csv"),
            clients=files,
            about=self.about,
            tables=tables,
        )
        path = checkpoint_files.write(self.folder, content)
        self._held, self.written = dict(files), saved.step
        checkpoint_files.prune(self.folder, self.config.checkpoint.keep, content.run)
        self.say(f"checkpoint: {path.name}, {time.monotonic() - start:.2f} s")

    def write_failed(self, step: int, error: OSError) -> None:
        """Warn that a checkpoint could not be written; the run goes on, and earlier checkpoints stay."""
        self.tried, self.since = step, time.monotonic()
        with suppress(OSError):
            checkpoint_files.prune(self.folder, self.config.checkpoint.keep, self.run_id)
        last = f"the last checkpoint is of step {self.written}" if self.written else "there is no checkpoint"
        reason = f"{error.strerror or error}: {self.folder}"
        warn(f"the state after step {step} could not be written ({reason}); the run goes on, {last}")

    def stop(self, step: int) -> None:
        """Raise `Stopped`; on rank 0 with the step of the last checkpoint, if that is an earlier step."""
        late = self.recorder is not None and self.written < step
        raise Stopped(step, str(self.run_folder), self.written if late else None)

    # -- the end of a run --------------------------------------------------------------------------------

    def close(self) -> None:
        """Unlock the run folder."""
        if self._lock is not None:
            self._lock.close()

    def remove(self) -> None:
        """Remove all checkpoints: the run is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


def refuse_changes(folder: Path, tree: Mapping[str, Any]) -> None:
    """Refuse to resume a complete run with changed options that decide numbers or rows of tables.

    Args:
        folder: the run folder.
        tree: its configuration with the changes, as nested mappings.

    Raises:
        UserError: such an option differs, or an option is invalid.
    """
    for key, was, now in _differing(folder, tree, {*MAY_CHANGE}, EACH_ROUND):
        remedy = f"{folder} is complete, and was run with {was!r}; run it anew"
        remedy += f": mpifl run {folder / 'config.yaml'} --{key} {now} --output.id NAME"
        raise UserError(key, now, remedy)


def refuse_place(folder: Path, changes: Mapping[str, Any]) -> None:
    """Refuse to resume a run under another name or in another folder than its own.

    Args:
        folder: the run folder.
        changes: the changed options, as nested mappings.

    Raises:
        UserError: `output.folder` or `output.id` is changed.
    """
    stored, asked = dict(flat(loader.read(str(folder / "config.yaml")))), dict(flat(changes))
    for key in PLACE:
        remedy = f"has no effect: the run goes on in {folder}; leave it out"
        require(asked.get(key, stored.get(key)) == stored.get(key), key, asked.get(key), remedy)


def _differing(
    folder: Path, tree: Mapping[str, Any], free: Set[str], bound: Collection[str] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value of each option that differs from the configuration in a run folder.

    Args:
        folder: the run folder.
        tree: the other configuration, as nested mappings.
        free: keys and sections that do not count.
        bound: keys in these sections that count all the same.
    """
    stored = loader.read(str(folder / "config.yaml"))
    was, now = (dict(flat(loader.to_tree(loader.from_tree(Config, t)))) for t in (stored, tree))
    for key in {**now, **was}:
        if (key in bound or not free & {key, key.partition(".")[0]}) and now.get(key) != was.get(key):
            yield key, was.get(key), now.get(key)


def _written_each_round(config: Config) -> dict[str, Any]:
    """Return the options that decide which rows each round adds to the tables."""
    return {key: getattr(config.output, key.partition(".")[2]) for key in EACH_ROUND}


def _digest(config: Config) -> str:
    """Return a digest of the options that may not change when a run is resumed; see `loader.settings`."""
    tree = {name: part for name, part in loader.settings(config).items() if name not in MAY_CHANGE}
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


def locked(folder: Path) -> IO[str]:
    """Return a lock on a run folder, so that no second process writes to it.

    Raises:
        UserError: another process holds it.
    """
    lock = (folder / "run.json").open()
    require(try_lock(lock), "RUN", str(folder), "another process is running it; wait, or end that one")
    return lock
