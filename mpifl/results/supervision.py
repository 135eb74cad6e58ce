"""What a scheduler or a user may ask of a run while it goes on.

Ends a job that has come to a standstill, after every rank has written where it stands.

Progress on rank 0: a bar on a terminal, plain lines in a log file.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

SAVE_ON = (signal.SIGUSR1,)
STOP_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
ONE_SECONDS = 1.0  # in which several requests count as one


class Signals:
    """Remembers signals until somebody looks; within its context. A second request to stop ends the process
    at once, unless it follows the first so closely that both may be one, of a scheduler to all processes of
    the job and handed on by the launcher.
    """

    def __init__(self) -> None:
        self.save, self.stop, self._asked = False, False, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (*SAVE_ON, *STOP_ON):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in SAVE_ON:
            self.save = True
        elif not self.stop:
            self.stop, self._asked = True, time.monotonic()
        elif number != signal.SIGUSR2 and time.monotonic() > self._asked + ONE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def take(self) -> tuple[bool, bool]:
        """Return whether a checkpoint, and whether an end was asked for; forget the former."""
        asked, self.save = (self.save, self.stop), False
        return asked


class Watchdog:
    """Watches a clock of the last sign of life, in a thread; within its context.

    Args:
        seconds: of silence after which stacks are written and the process ends with code 1; 0 never.
        alive: returns when (`time.monotonic`) this rank last got on.
        log: file of this rank.
        grace: seconds between the stacks and the end, so that all ranks have written theirs.
    """

    def __init__(self, seconds: float, alive: Callable[[], float], log: Path, grace: float = 5.0) -> None:
        self.seconds, self.alive, self.log, self.grace = seconds, alive, log, grace
        self._over, self._file = threading.Event(), None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Watchdog:
        if self.seconds > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(min(1.0, self.seconds / 4)):
            now = time.monotonic()
            if now - last > self.seconds / 2:  # this process itself was stopped, or the machine slept
                self.seconds += now - last
            last = now
            if now - self.alive() > self.seconds:
                self._bark()

    def _bark(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            print(f"{time.strftime('%F %T')} no sign of life for {self.seconds:.0f} s", file=file, flush=True)
            _stacks(file)
        self._over.wait(self.grace)
        text = f"nothing has moved for {self.seconds:.0f} s; where each rank stands: {self.log.parent}"
        print(f"mpifl: {text}", file=sys.stderr, flush=True)
        os._exit(1)


def _stacks(file: IO[str]) -> None:
    faulthandler.dump_traceback(file, all_threads=True)


class Progress:
    """Shows how far a run is.

    Args:
        total: rounds.
        title: what is running.
        quiet: show nothing.
        bar: a bar where there is a terminal. MPI launchers show every rank one of their own: take lines
            there.
    """

    def __init__(self, total: int, title: str, quiet: bool = False, bar: bool = True) -> None:
        self.total, self.title, self.quiet = total, title, quiet
        self.bar = bar and sys.stdout.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0

    def __enter__(self) -> Progress:
        if self.bar and not self.quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
            self._bar = Progress(text[0], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text[1])
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def step(self, number: int, note: str = "") -> None:
        """Show that round `number` is done; in a log file at most one line every two seconds."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=number, note=note)
        elif number == self.total or time.monotonic() - self._last > 2:
            self._last = time.monotonic()
            print(f"round {number}/{self.total}  {note}".rstrip(), flush=True)
