"""Supervision of a running process: signals from a scheduler or user, and a watchdog."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, MethodType, TracebackType
from typing import Any

from mpifl.core.errors import StoppedEarly
from mpifl.core.progress import stages

SAVE_SIGNALS = (signal.SIGUSR1,)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
REPEAT_SECONDS = (
    1.0  # a scheduler may signal both the job and its launcher, which forwards it: this is one request
)

ANSWER = b"mpifl: asked to stop: ends after this step; Ctrl-C or SIGTERM once more ends it at once\n"


class Signals:
    """Records signals that request to save or to stop, as a context manager.

    The run calls `take` between steps. A second request to stop ends the process at once, unless it is
    SIGUSR2 or follows the first within `REPEAT_SECONDS`. A request to stop that comes after the last step is
    passed on to the enclosing `Signals` of a sweep, if any, and the sweep ends between two runs.

    Args:
        asked: returns whether to stop without a signal of this process; called between steps.
        answers: whether to confirm a request to stop at once on standard error, because a step can be long;
            within a sweep, the setting of the sweep applies.
        tell: called by the handler of the first request to stop. Rank 0 decides when a run stops, but a
            scheduler may signal the ranks of some nodes only.

    Attributes:
        folder: the run folder, for the message if the run ends before its first step.
        save: whether a request to save is pending.
        stop: whether a stop was requested.

    Raises:
        StoppedEarly: at the first request to stop, during a stage that ends at once.
    """

    def __init__(
        self,
        asked: Callable[[], bool] = lambda: False,
        answers: bool = False,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self.asked, self.answers, self.tell = asked, answers, tell
        self.folder = "RUN"
        self.save = False
        self.stop = False
        self._stopped_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # nohup
            for number in sorted({*SAVE_SIGNALS, *STOP_SIGNALS} - kept):
                self._previous[number] = signal.signal(number, self._handle)
        if self._around is not None:
            self.answers = self._around.answers
        return self

    @property
    def _around(self) -> Signals | None:
        """The enclosing `Signals` of the sweep that the run belongs to; None outside a sweep."""
        handler = self._previous.get(STOP_SIGNALS[0])
        outer = handler.__self__ if isinstance(handler, MethodType) else None
        return outer if isinstance(outer, Signals) else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        outer = self._around
        if self.stop and error is None and outer is not None:
            outer.stop, outer._stopped_at = True, self._stopped_at

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in SAVE_SIGNALS:
            self.save = True
        elif not self.stop:
            self.stop, self._stopped_at = True, time.monotonic()
            self.tell()
            if any(stage.ends_at_once for stage in stages()):
                raise StoppedEarly(f"mpifl resume {self.folder} --from-start")
            if self.answers:
                with suppress(OSError):
                    # directly to the file descriptor: the signal may have interrupted a print or a bar
                    os.write(2, b"\n" * os.isatty(2) + ANSWER)
        elif number != signal.SIGUSR2 and time.monotonic() > self._stopped_at + REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def take(self) -> tuple[bool, bool]:
        """Return whether to save and whether to stop, and clear the request to save."""
        self.stop = self.stop or self.asked()
        asked, self.save = (self.save, self.stop), False
        return asked


@contextmanager
def watchdog(
    seconds: float,
    alive: Callable[[], float],
    log: Path,
    grace: float = 5.0,
    before_end: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """End a process that makes no progress within the block, from a thread.

    It first writes the stacks of all threads to the log of the rank, then ends the process with exit code 1.

    Args:
        seconds: seconds without progress after which the process ends; 0 for never.
        alive: returns the time of the last progress, by `time.monotonic`.
        log: log file of this rank.
        grace: seconds between writing the stacks and ending the process, so that all ranks can write theirs.
        before_end: called after writing the stacks; what it raises is added to the log.
    """
    over = threading.Event()
    if seconds > 0:
        given = (seconds, alive, log, grace, over, before_end)
        threading.Thread(target=_watch, args=given, daemon=True, name="watchdog").start()
    try:
        yield
    finally:
        over.set()


def _watch(
    seconds: float,
    alive: Callable[[], float],
    log: Path,
    grace: float,
    over: threading.Event,
    before_end: Callable[[], None],
) -> None:
    last = time.monotonic()
    while not over.wait(min(1.0, seconds / 4)):
        now = time.monotonic()
        if now - last > seconds / 2:  # this process was stopped, or the machine slept
            seconds += now - last
        last = now
        if now - alive() > seconds:
            _end_process(f"no progress for {seconds:.0f} s", log, grace, over, before_end)


def _end_process(
    why: str, log: Path, grace: float, over: threading.Event, before_end: Callable[[], None]
) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        print(f"{time.strftime('%F %T')} {why}", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        try:
            before_end()
        except Exception:  # whatever it is, the process has to end
            traceback.print_exc(file=file)
    if over.wait(grace):
        return
    text = f"{why}; the stacks of all ranks are in {log.parent}"
    print(f"mpifl: {text}", file=sys.stderr, flush=True)
    os._exit(1)
