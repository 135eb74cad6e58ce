"""What a scheduler or a user may ask of a run while it goes on."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

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
