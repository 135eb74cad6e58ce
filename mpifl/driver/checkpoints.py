"""Decides when a run writes a checkpoint, writes it, and finds the one to resume from.

A checkpoint holds the state of the engine (`runtime.run_state`), of the recorder and of the run folder.
`results.checkpoint_files` reads and writes the files.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from mpifl.core.beginning import STEPS
from mpifl.core.errors import Stopped, UserError, require
from mpifl.core.files import try_lock, write_json
from mpifl.results import checkpoint_files, run_folder
from mpifl.results.identity import CODES, EARLIER, differences, resumed
from mpifl.results.recorder import Recorder
from mpifl.runtime.run_state import SAVE, STOP, Checkpointer, FileSums, Saved
from mpifl.runtime.server_step import ServerStep
from mpifl.supervision.logging import warn
from mpifl.supervision.signals import Signals

from .shared_steps import SharedSteps


class Checkpoints(Checkpointer):
    """The checkpoints of one run.

    Args:
        folder: the run folder; known on every rank.
        about: what the numbers of the run depend on, see `resumption.about`.
        signals: requests to save or stop.
        recorder: writes the tables of the run folder; None on workers.
        say: called with lines for the terminal.
        lock: lock of the run folder, see `locked`, if the run was resumed; only on rank 0.
        every: server steps between checkpoints; 0 for none by steps.
        minutes: real minutes between checkpoints; 0 for none by time.
        keep: number of checkpoints to keep.
        shared: of a case of a sweep, the steps that it shares with others.

    Attributes:
        about: as given; of a resumed run, its `surroundings` also hold what was different before.
        written: step of the last checkpoint; 0 for none.
        tried: step of the last attempt to write one.
        since: `time.monotonic` of that attempt.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        signals: Signals,
        recorder: Recorder | None,
        say: Callable[[str], None],
        lock: IO[str] | None = None,
        *,
        every: int,
        minutes: float,
        keep: int,
        shared: SharedSteps | None = None,
    ) -> None:
        self.run_folder, self.signals, self.say, self.shared = folder, signals, say, shared
        self.every, self.minutes, self.keep = every, minutes, keep
        self.recorder, self.about = recorder, dict(about)
        self._now: Mapping[str, Any] = self.about.get("surroundings", {})  # of this process
        self.written, self.tried, self.since = 0, 0, time.monotonic()
        self._lock = lock
        self._held: FileSums = {}
        self._layout = {} if recorder is None else layout_of(recorder.state_dict(), "recorder")
        self._then: Mapping[str, Any] = {}  # `about` of the checkpoint that the run goes on from
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

    def create(self) -> Saved | None:
        """Give a new run its identifier, and lock its folder; on rank 0.

        Returns the state after the steps that it shares with other cases, if one of them has taken them.
        """
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        about = {"id": secrets.token_hex(8), "format": run_folder.FORMAT, "started": started}
        write_json(self.run_folder / "run.json", about)
        self._lock = locked(self.run_folder)
        return self._shared_state()

    def _shared_state(self) -> Saved | None:
        """Return the state after the shared steps, as if this run had taken them; None if it is not there."""
        content = None if self.shared is None else self.shared.find(self.about)
        if self.shared is None or content is None:
            return None
        content = replace(content, run=self.run_id)
        try:
            self.shared.copy_files(self.run_folder, self.clients)
            checkpoint_files.write(self.folder, content)
        except OSError as error:
            self._remove_tables()
            warn(
                f"{self.run_folder} cannot take shared steps ({error.strerror}): this case takes them itself"
            )
            return None
        self.say(f"steps 1 to {content.step}: those of an earlier case, whose data are the same until then")
        return self._restored(content)

    def find(self, from_start: bool, check: Callable[[int, Mapping[str, Any]], None]) -> Saved | None:
        """Return the state to resume from, None to start again; on rank 0.

        The tables of the run folder are restored to that step.

        Args:
            from_start: whether to start again if there is no checkpoint.
            check: called with the step and `about` of the checkpoint; refuses to go on from it.

        Raises:
            UserError: there is no checkpoint, all are damaged, another version wrote it, or another process
                holds the run; or from `check`.
        """
        self._lock = self._lock or locked(self.run_folder)
        checkpoint_files.remove_partial(self.folder)
        try:
            content = checkpoint_files.latest(self.folder, self.run_id, warn)
        except checkpoint_files.Damaged as error:
            remedy = f"{error}: remove {self.folder} to begin again"
            raise UserError("RUN", str(self.run_folder), remedy) from error
        except checkpoint_files.OtherForm as error:
            raise self._refusal(str(error)) from error
        if content is None:
            remedy = "it has written no checkpoint; --from-start begins it again and drops what is there"
            require(from_start, "RUN", str(self.run_folder), remedy)
            warn("no checkpoint was written: beginning again")
            self._remove_tables()
            return self._shared_state()
        self._then = content.about
        with self.restoring():
            check(content.step, content.about)
            self._check_layout()
            saved = self._restored(content)
        warn(f"going on after step {content.step}")
        return saved

    def _remove_tables(self) -> None:
        """Remove all checkpoints, and the tables that grow."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.run_folder / "metrics.csv").unlink(missing_ok=True)
        for each in self._tables:
            each.table.path.unlink(missing_ok=True)

    def _restored(self, content: checkpoint_files.Content) -> Saved:
        """Return the state of a checkpoint; the tables of the run folder are restored to it."""
        self._take(content)
        kept = partial(OfOtherCode, self._refusal) if self._other_code else dict
        values = dict(content.values["engine"])
        return Saved(content.step, dict(content.tensors), dict(content.arrays), values, kept)

    def _take(self, content: checkpoint_files.Content) -> None:
        """Restore the tables of the run folder, and say what was different."""
        then, now = content.about["surroundings"], self.about["surroundings"]
        self.about["surroundings"] = resumed(then, now, content.step)
        for name in differences(then, now):
            if name == EARLIER:
                continue
            which = "numbers, not only their last bits," if name in CODES else "the last bits of numbers"
            warn(f"{name} was {then.get(name, 'not recorded')} and is {now.get(name)}: {which} may differ")
        self._held = dict(content.clients)
        self.written = self.tried = content.step
        assert self.recorder is not None
        self.recorder.load_state_dict(content.values["recorder"], content.metrics, content.events[0])

    # -- checkpoints of other versions -------------------------------------------------------------------

    def begins(self, server_step: ServerStep, values: Mapping[str, Any]) -> None:
        """Take note of the layout of the state, and compare it with that of the checkpoint."""
        state = Saved(0, values=dict(values))
        state.put_step_state(server_step)
        self._layout |= layout_of(state, "engine")
        self._check_layout()
        if self.shared is not None:
            server_step.beginning[STEPS] = self.shared.own

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Raise `UserError` for what goes wrong in restoring a checkpoint that other code has written."""
        try:
            yield
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if not self._other_code:
                raise
            raise self._refusal(f"{type(error).__name__}: {error}") from error

    @property
    def _other_code(self) -> bool:
        """Whether other code wrote the checkpoint: mpifl's, the user's, or that of plug-ins."""
        then, now = self._then.get("surroundings", {}), self._now
        return any(then.get(name) != now.get(name) for name in CODES)

    def _check_layout(self) -> None:
        """Raise `UserError` if other code wrote the checkpoint, with a layout that differs from that of now.

        Only parts that are known by now are compared, first those of the recorder. A checkpoint without a
        layout is tried.
        """
        then = self._then.get("layout")
        if not isinstance(then, Mapping) or not self._other_code:
            return
        whole = {name.partition("/")[0] for name in self._layout}
        was = {name: kind for name, kind in then.items() if name.partition("/")[0] in whole}
        names = [n for n in dict.fromkeys((*self._layout, *was)) if self._layout.get(n) != was.get(n)]
        if names:
            name, more = names[0], f", and {len(names) - 1} more" if names[1:] else ""
            kinds = was.get(name, "not there"), self._layout.get(name, "not there")
            raise self._refusal(f"{name} was {kinds[0]} and is {kinds[1]}{more}")

    def _refusal(self, what: str) -> UserError:
        """Return the error for a checkpoint of another version.

        Args:
            what: the first difference that was found.
        """
        then = self._then.get("surroundings", {})
        was = self._then.get("version") or then.get("mpifl") or "unknown"
        codes = [f" (code {found['code']})" if "code" in found else "" for found in (then, self._now)]
        now = f"mpifl {self.about.get('version')}{codes[1]}"
        remedy = (
            f"its checkpoint was written by mpifl {was}{codes[0]}, which keeps other state than this one, "
        )
        remedy += f"{now}: {what}; resume with that version, "
        return UserError("RUN", str(self.run_folder), remedy + "or start anew with another output.id")

    # -- during the run ----------------------------------------------------------------------------------

    def due(self, step: int) -> str:
        """Return whether to write a checkpoint now, `SAVE`, `STOP` or empty.

        One is due after a number of steps or minutes, after the first step, at a signal, or after the last
        step that other cases share.
        """
        asked, stop = self.signals.take()
        every, minutes = self.every, self.minutes
        by_step = bool(every) and step > self.written and step % every == 0
        by_time = minutes > 0 and time.monotonic() - self.since > 60 * minutes
        first = self.tried == 0 < step and (every > 0 or minutes > 0)
        shared = self.shared is not None and self.shared.wants(step)
        return STOP if stop else SAVE if asked or by_step or by_time or first or shared else ""

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
            about={**self.about, "layout": self._layout},
            tables=tables,
        )
        path = checkpoint_files.write(self.folder, content)
        self._held, self.written = dict(files), saved.step
        checkpoint_files.prune(self.folder, self.keep, content.run)
        self.say(f"checkpoint: {path.name}, {time.monotonic() - start:.2f} s")
        if self.shared is not None and self.shared.wants(saved.step):
            self.shared.leave(self.run_folder, path)

    def write_failed(self, step: int, error: OSError) -> None:
        """Warn that a checkpoint could not be written; the run goes on, and earlier checkpoints stay."""
        self.tried, self.since = step, time.monotonic()
        with suppress(OSError):
            checkpoint_files.prune(self.folder, self.keep, self.run_id)
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


def layout_of(state: Any, name: str) -> dict[str, str]:
    """Return the kind of each part of a state, by its name: its type; of arrays also the number of axes.

    Of the state before the first step, the layout depends on mpifl and on the configuration only. So two
    versions that keep other state between steps have other layouts.

    Args:
        state: a `Saved`, or nested mappings of arrays, tensors and values that JSON can hold; a dataclass
            stands for its fields, where a list holds its objects.
        name: name of the whole, before that of each part.
    """
    if isinstance(state, Saved):
        state = {"tensors": state.tensors, "arrays": state.arrays, "values": state.values}
    if isinstance(state, Mapping):
        parts = (layout_of(part, f"{name}/{key}") for key, part in state.items())
        return {f"{name}/": "mapping"} | {key: kind for part in parts for key, kind in part.items()}
    if isinstance(state, type) and is_dataclass(state):
        return {f"{name}/{each.name}": str(each.type) for each in fields(state)}
    if isinstance(state, (np.ndarray, torch.Tensor)):
        return {name: f"{str(state.dtype).removeprefix('torch.')}[{state.ndim}]"}
    return {name: type(state).__name__}


class OfOtherCode(dict[str, Any]):
    """The state of a method as other code wrote it, until the first step: what is missing is refused."""

    def __init__(self, refusal: Callable[[str], UserError], entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._refusal = refusal

    def __missing__(self, name: str) -> Any:
        raise self._refusal(f"the method's {name!r} is not there")


def locked(folder: Path) -> IO[str]:
    """Return a lock on a run folder, so that no second process writes to it.

    Raises:
        UserError: another process holds it.
    """
    lock = (folder / "run.json").open()
    require(try_lock(lock), "RUN", str(folder), "another process is running it; wait, or end that one")
    return lock
