"""Ends a job that has come to a standstill, after every rank has written where it stands."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO


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
