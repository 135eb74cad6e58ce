"""Progress of a run: a bar on a terminal, lines in a log file, and never ten seconds of silence.

`Progress.step` reports a completed round. In between, a thread shows the stages of the process
(`core.progress`). The remaining time is estimated from the outermost stage that is partly done.
`ProgressFile` writes the same information into the run folder, where `mpifl watch` reads it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mpifl.core.errors import Stopped, StoppedEarly, UserError, shortened
from mpifl.core.process import launched
from mpifl.core.progress import ROUND, Stage, stages

LINE_SECONDS = 2.0  # between two lines about rounds in a log file
SILENCE_SECONDS = 7.0  # without a line until one reports the stages; about ten on a busy machine
BAR_SECONDS = 0.5  # between two updates of the bar on a terminal
BAR_WIDTH, NARROW = 24, 100  # columns of a bar, half of it on terminals with fewer columns than NARROW
TITLE_WIDTH = 20  # columns of a title before a bar
FILE, FILE_SECONDS = "progress.json", 2.0  # in the run folder; seconds between two writes
SILENCE_VARIABLE = "MPIFL_PROGRESS_S"  # another number of seconds, for tests of whole jobs


def in_words(seconds: float) -> str:
    """Return a duration in words: 35 s, 2 min 5 s, 3 h 10 min."""
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _cut(text: str, width: int) -> str:
    """Return a text of at most `width` columns of a terminal; an ellipsis stands for what is left out."""
    from rich.text import Text

    whole = Text(text)
    whole.truncate(width, overflow="ellipsis")
    return whole.plain


class Estimate:
    """Forecasts how long the stages of this process will take, from the parts of them that are done."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, float]] = {}  # id of a stage -> number, part of the next one

    def left(self, now: float, found: Sequence[Stage]) -> tuple[float, Stage] | None:
        """Return the estimated seconds left, and the stage they refer to; None if there is no estimate.

        Args:
            now: the value of `time.monotonic`.
            found: the stages, outermost first.
        """
        part, rest, answer = 0.0, None, None
        for stage in reversed(found):
            number, before = self._parts.get(id(stage), (stage.number, 0.0))
            if number == stage.number:  # evaluation, after training, must not lower the part that is done
                part = max(part, before)
            self._parts[id(stage)] = stage.number, part
            share, spent, seconds = stage.share(part), now - stage.start, None
            if not stage.alike and rest is not None:  # the present unit by its own pace, the next by the mean
                mean = (spent + rest) / (stage.number - stage.first + 1)
                seconds = rest + max(0, stage.total - stage.number - 1) * mean
            elif share > 0:
                seconds = spent * (1 / share - 1)
            answer = answer if seconds is None else (seconds, stage)
            part, rest = (share, seconds) if stage.main else (0.0, None)
        self._parts = {id(stage): self._parts[id(stage)] for stage in found}
        return answer


_shown: list[Progress] = []  # outermost first; only the last one shows anything


class Progress:
    """Shows the progress of a run, as a context manager. A nested one, as in a sweep, silences the outer one.

    Args:
        total: number of rounds; 0 if there are none.
        title: text before the bar, and of lines that are written outside of any stage.
        quiet: show nothing.
        bar: show a bar if the output is a terminal. Processes of an MPI launcher always write lines, because
            launchers give each rank a terminal of its own, whatever the launcher's own output is.
        to_stderr: write to stderr, because stdout holds the output of a command.
        silence: seconds without a line until one is written; None takes `SILENCE_SECONDS`.
        clock: returns seconds.
    """

    def __init__(
        self,
        total: int = 0,
        title: str = "",
        quiet: bool = False,
        bar: bool = True,
        to_stderr: bool = False,
        silence: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.title, self.quiet, self.to_stderr = total, title, quiet, to_stderr
        self.silence = (
            float(os.environ.get(SILENCE_VARIABLE, SILENCE_SECONDS)) if silence is None else silence
        )
        self.clock = clock
        self.bar = bar and not quiet and self._out.isatty() and not launched()
        self._bar: Any = None
        self._task: Any = None
        self._note = ""
        self._used = 0  # columns of the title, the bar and the number of rounds, and blanks
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._begin = self._last = clock()  # time of the start; time of the last line
        self._last_round = -LINE_SECONDS  # time of the last line about a round
        self._estimate = Estimate()

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self.to_stderr else sys.stdout  # notebooks and tests replace these streams

    def __enter__(self) -> Progress:
        if self.bar:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            console = Console(stderr=self.to_stderr)
            width = BAR_WIDTH if console.width >= NARROW else BAR_WIDTH // 2
            counted = (BarColumn(width), MofNCompleteColumn()) if self.total else ()
            name = _cut(self.title, TITLE_WIDTH)
            self._used = len(name) + 2 + (width + 2 * len(str(self.total)) + 3 if self.total else 0)
            texts = ("{task.description}", "{task.fields[left]}", "{task.fields[note]}")
            title, left, note = (TextColumn(text, markup=False) for text in texts)
            self._bar = Progress(title, *counted, left, note, console=console)
            self._bar.start()
            self._task = self._bar.add_task(name, total=self.total or None, note="", left="")
        _shown.append(self)
        if not self.quiet:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="progress")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()
        _shown.remove(self)
        for outer in _shown:
            outer._last = self.clock()
        if self._thread is not None:
            self._thread.join(1.0)
        if self._bar is not None:
            self._draw(self._note)
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self.quiet:
            self._write(text)

    def _write(self, text: str) -> None:
        with self._lock:
            self._last = self.clock()
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                self._out.write(f"{text}\n")  # a single call, because a thread writes too
                self._out.flush()

    def step(self, number: int, note: str = "") -> None:
        """Show that a round is complete.

        Args:
            number: number of the round.
            note: text to show after it.
        """
        self._note = note
        if self.quiet:
            return
        if self._bar is not None:
            self._draw(note, completed=number)
        elif number == self.total or self.clock() - self._last_round > LINE_SECONDS:
            self._last_round = self.clock()
            self._write(f"round {number}/{self.total}  {note}".rstrip())

    # -- what is going on, by a thread -----------------------------------------------------------------------

    def _watch(self) -> None:
        pause = BAR_SECONDS if self._bar is not None else 0.0
        with suppress(OSError, ValueError):  # the output is closed; the main thread will notice
            while not self._over.wait(pause or max(0.02, self._last + self.silence - self.clock())):
                self.look()

    def look(self) -> None:
        """Show the current stages: on the bar at once, as a line after `silence` seconds."""
        if self.quiet or (_shown and _shown[-1] is not self):
            return
        if self._bar is not None:
            found = stages()
            note = f"{found[-1]}  {self._note}" if found and found[-1].what != ROUND else self._note
            self._draw(note, refresh=True)
        elif self.clock() - self._last >= self.silence:
            self._write(self.line())

    def line(self) -> str:
        """Return a line with the current stages, the time so far and an estimate of the time left."""
        now, found = self.clock(), stages()
        text = ", ".join(map(str, found)) or self.title
        left = self._left(now, found)
        return f"{text}: {in_words(now - self._begin)} so far{left and f', {left}'}"

    def _draw(self, note: str, **more: Any) -> None:
        """Update the bar; the note is cut so that all fits into one line of the terminal."""
        with self._lock:
            told = self._estimate.left(self.clock(), stages())
        left = "" if told is None else f"{in_words(told[0])} left"
        room = max(0, self._bar.console.width - self._used - len(left))
        self._bar.update(self._task, note=_cut(note, room), left=left, **more)

    def _left(self, now: float, found: list[Stage]) -> str:
        """Return an estimate of the time left, in words; empty if there is none."""
        told = self._estimate.left(now, found)
        if told is None:
            return ""
        seconds, stage = told
        whole = "" if stage is found[0] or stage.what == ROUND else f" of {stage.what}"
        return f"about {in_words(seconds)} left{whole}"


class ProgressFile:
    """Writes `progress.json` into the run folder during a run, as a context manager on rank 0.

    The file is written at the start, then by a thread every `FILE_SECONDS`. It is removed when the run is
    complete. Otherwise it stays, and says how the run ended or when it was last alive.

    Args:
        folder: the run folder; None, on workers, writes nothing.
        rounds: total number of server steps.
        first: server steps taken before, if the run is resumed.
        places: host and device of each rank.
        visits: returns the number of client visits of each rank, as far as rank 0 sees them.
        clock: returns seconds since 1970.

    Attributes:
        step: server steps so far.
        timing: for each rank, phase -> seconds between the last two evaluations.
    """

    def __init__(
        self,
        folder: Path | None,
        rounds: int = 0,
        first: int = 0,
        places: Sequence[Mapping[str, Any]] = (),
        visits: Callable[[], Sequence[int]] = lambda: (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.rounds, self.step, self.first = folder, rounds, first, first
        self.places, self.visits, self.clock = places, visits, clock
        self.timing: Sequence[Mapping[str, float]] = ()
        self._start, self._estimate = clock(), Estimate()
        self._over, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="progress file")

    def __enter__(self) -> ProgressFile:
        if self.folder is not None:
            self._try()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.folder is None:
            return
        self._over.set()
        self._thread.join(5.0)
        with suppress(OSError):
            if error is None:
                (self.folder / FILE).unlink(missing_ok=True)
            elif isinstance(error, (Stopped, StoppedEarly)):
                self.write("stopped", "by a signal or a request")
            else:
                text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                self.write("failed", shortened(" ".join(text.split())))

    def _beat(self) -> None:
        while not self._over.wait(FILE_SECONDS):
            self._try()

    def _try(self) -> None:
        with suppress(OSError):  # a full disk does not end the run
            self.write()

    def write(self, end: str = "", reason: str = "") -> None:
        """Write the file; safe to call from several threads.

        Args:
            end: `stopped` or `failed`; empty while the run goes on.
            reason: why the run ended.
        """
        from mpifl.core.files import write_json

        assert self.folder is not None
        if not self.folder.is_dir():  # it was removed; do not create it again
            return
        with self._writing:
            write_json(self.folder / FILE, self._told(end, reason))

    def _told(self, end: str, reason: str) -> dict[str, Any]:
        """Return the present content of the file."""
        found = stages()
        left = self._estimate.left(time.monotonic(), found)
        visits = [*self.visits()]
        ranks = []
        for i, place in enumerate(self.places):
            spent = self.timing[i] if i < len(self.timing) else {}
            about = {name: place.get(name) for name in ("host", "device")}
            about["visits"] = visits[i] if i < len(visits) else None
            ranks.append({**about, "seconds": {name: round(s, 3) for name, s in spent.items()}})
        return {
            "time": round(self.clock(), 3),
            "start": round(self._start, 3),
            "host": socket.gethostname(),
            "step": self.step,
            "first": self.first,
            "rounds": self.rounds,
            "doing": ", ".join(map(str, found)),
            "left_s": None if left is None or end else round(left[0], 1),
            "end": end,
            "reason": reason,
            "ranks": ranks,
        }
