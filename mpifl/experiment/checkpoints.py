"""Writes and finds the checkpoints of a run: joins the engine's state, the recorder's and the run folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mpifl.core.errors import Stopped, UserError, require
from mpifl.results import checkpoint_files as disk
from mpifl.results.identity import differences
from mpifl.results.reader import renamed
from mpifl.results.recorder import Recorder
from mpifl.results.run_folder import write_json
from mpifl.results.supervision import Signals
from mpifl.runtime.run_state import SAVE, STOP, Checkpointer, FileSums, Saved

from . import loader
from .schema import Config

FREE = ("name", "rounds", "system", "output", "checkpoint", "vary")  # may differ when a run goes on


def identity_of(folder: Path) -> str:
    """Return which run a folder holds."""
    try:
        name: str = json.loads((folder / "run.json").read_text())["id"]
        return name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("RUN", str(folder), "is no run folder: it has no readable run.json") from error


def same_numbers(config: Config) -> str:
    """Return a digest of all options that decide numbers, under the keys of release 0.1."""
    whole = loader.as_of_0_1(loader.to_tree(config))
    tree = {name: part for name, part in whole.items() if name not in FREE}
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


def aloud(text: str) -> None:
    """Say what must not be missed."""
    print(f"mpifl: {text}", file=sys.stderr, flush=True)


def locked(folder: Path) -> IO[str]:
    """Return a hold on a run folder, so that no second process writes to it."""
    hold = (folder / "run.json").open()
    try:
        fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError("RUN", str(folder), "another process is running it; wait, or end that one") from error
    except OSError:
        pass  # a file system without locks
    return hold


class Checkpoints(Checkpointer):
    """The checkpoints of one run.

    Args:
        folder: of the run; every rank.
        config: what is running. surroundings: the identity of its numbers; on rank 0.
        signals, recorder, say: on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        surroundings: Mapping[str, Any],
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.config, self.signals, self.say = folder, config, signals, say
        self.about: dict[str, Any] = {
            "config": same_numbers(config),
            "surroundings": dict(surroundings),
        }
        self.recorder: Recorder | None = None
        self.hold: IO[str] | None = None
        self.written, self.tried, self.since = 0, 0, time.monotonic()  # last steps of a checkpoint, of a try
        self._held: dict[str, tuple[int, str]] = {}
        self._events, self._events_size = hashlib.sha256(), 0
        self._columns: list[str] = []

    @property
    def identity(self) -> str:
        """Which run this is; where its folder can be read."""
        return identity_of(self.run)

    @property
    def folder(self) -> Path:
        """Where checkpoints are."""
        return self.run / "checkpoints"

    @property
    def clients(self) -> Path:
        """The folder of what clients keep between visits."""
        return self.folder / "clients"

    @property
    def held(self) -> Mapping[str, tuple[int, str]]:
        """The files of clients that the last checkpoint holds."""
        return self._held

    def create(self) -> None:
        """Begin a run, on rank 0."""
        write_json(self.run / "run.json", {"id": secrets.token_hex(8), "format": disk.FORMAT})
        self.hold = locked(self.run)

    def find(self, from_start: bool) -> Saved | None:
        """Return the newest sound state of the run, None to begin again; on rank 0.

        Args:
            from_start: begin again where it has written none.
        """
        self.hold = locked(self.run)
        disk.remove_halves(self.folder)
        try:
            content = disk.latest(self.folder, identity_of(self.run), aloud)
        except disk.Damaged as error:
            remedy = f"{error}: remove {self.folder} to begin again"
            raise UserError("RUN", str(self.run), remedy) from error
        if content is None:
            remedy = "it has written no checkpoint; --from-start begins it again and drops what is there"
            require(from_start, "RUN", str(self.run), remedy)
            aloud("no checkpoint was written: beginning again")
            shutil.rmtree(self.folder, ignore_errors=True)
            for name in ("metrics.csv", "events.csv"):
                (self.run / name).unlink(missing_ok=True)
            return None
        remedy = "the configuration is not the one of the checkpoint; only system and checkpoint may change"
        require(content.about["config"] == self.about["config"], "RUN", str(self.run), remedy)
        remedy = f"step {content.step} is the last that the run has taken; take more rounds"
        require(self.config.rounds > content.step, "rounds", self.config.rounds, remedy)
        self._compare(content.about["surroundings"])
        self._content, self._held = content, dict(content.clients)
        self.written = self.tried = content.step
        aloud(f"going on after step {content.step}")
        return Saved(
            content.step, dict(content.tensors), dict(content.arrays), dict(content.values["engine"])
        )

    def _compare(self, then: Mapping[str, Any]) -> None:
        then, now = renamed(then), self.about["surroundings"]
        for name in differences(then, now):
            aloud(f"{name} was {then.get(name)} and is {now.get(name)}: the last bits of numbers may differ")

    def restore(self, recorder: Recorder) -> None:
        """Put the tables of the run folder back to what they were then; on rank 0, after `find`."""
        content = self._content
        recorder.restore(content.values["recorder"], content.metrics, content.events[0])

    def due(self, step: int) -> str:
        """By steps, by time, after the first step, or because somebody asked."""
        asked, stop = self.signals.take()
        often, minutes = self.config.checkpoint.every, self.config.checkpoint.minutes
        by_step = bool(often) and step > self.written and step % often == 0
        by_time = minutes > 0 and time.monotonic() - self.since > 60 * minutes
        first = self.tried == 0 < step and (often > 0 or minutes > 0)
        return STOP if stop else SAVE if asked or by_step or by_time or first else ""

    def write(self, saved: Saved, files: FileSums) -> None:
        """Write a checkpoint; drop what is older than the last ones."""
        start, recorder = time.monotonic(), self.recorder
        assert recorder is not None
        self.tried, self.since = saved.step, start
        values = {"engine": saved.values, "recorder": recorder.state()}
        metrics = recorder.metrics.path
        run = identity_of(self.run)
        content = disk.Content(
            step=saved.step,
            run=run,
            tensors=saved.tensors,
            arrays=saved.arrays,
            values=values,
            metrics=metrics.read_bytes() if metrics.exists() else b"",
            events=self._events_so_far(recorder),
            clients=files,
            about=self.about,
        )
        path = disk.write(self.folder, content)
        self._held, self.written = dict(files), saved.step
        disk.prune(self.folder, self.config.checkpoint.keep, run)
        self.say(f"checkpoint: {path.name}, {time.monotonic() - start:.2f} s")

    def _events_so_far(self, recorder: Recorder) -> disk.Sums:
        """Return the bytes and the SHA-256 of events.csv; only what is new is read."""
        events = recorder.events
        if events.columns != self._columns:
            self._events, self._events_size, self._columns = hashlib.sha256(), 0, list(events.columns)
        if events.path.exists():
            with events.path.open("rb") as file:
                file.seek(self._events_size)
                while block := file.read(disk.CHUNK):
                    self._events.update(block)
                    self._events_size += len(block)
            disk.settled(events.path)
        return self._events_size, self._events.hexdigest()

    def fail(self, step: int, error: OSError) -> None:
        """Say that the state could not be written; the run goes on, and the checkpoints before stay."""
        self.tried, self.since = step, time.monotonic()
        with suppress(OSError):
            disk.prune(self.folder, self.config.checkpoint.keep, identity_of(self.run))
        last = f"the last checkpoint is of step {self.written}" if self.written else "there is no checkpoint"
        reason = f"{error.strerror or error}: {self.folder}"
        aloud(f"the state after step {step} could not be written ({reason}); the run goes on, {last}")

    def stop(self, step: int) -> None:
        """End the run; on rank 0, say which state was written last."""
        late = self.recorder is not None and self.written < step
        raise Stopped(step, str(self.run), self.written if late else None)

    def close(self) -> None:
        """Let others write to the run folder."""
        if self.hold is not None:
            self.hold.close()

    def done(self) -> None:
        """Remove what a complete run does not need."""
        shutil.rmtree(self.folder, ignore_errors=True)
