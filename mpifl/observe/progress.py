"""Progress on rank 0: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


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
