"""What a rank has to complain of, in a file of its own: warnings, log records, tracebacks."""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mpifl.core.errors import Stopped, UserError

OWN = "mpifl"  # logger of what the terminal hears in other words, or at the end
FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Lazy(logging.FileHandler):
    """A file that is there once there is something to write, and goes without where the disk is full."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


class RankLog:
    """Writes to the file of this rank, within its context, what goes wrong there: Python's warnings, log
    records from WARNING on, and the traceback of what ends it. The terminal is rank 0's.

    Args:
        path: of the file; made when there is something to write. terminal: whether this is rank 0.
    """

    def __init__(self, path: Path, terminal: bool) -> None:
        self.terminal, self._root = terminal, logging.getLogger()
        file = _Lazy(path, delay=True, encoding="utf-8")
        file.setFormatter(logging.Formatter(FORM))
        self._handlers: list[logging.Handler] = [file]
        if terminal and not self._root.handlers:  # else whoever uses this as a library has set them up
            speaker = logging.StreamHandler(sys.stderr)
            speaker.addFilter(lambda record: record.name.partition(".")[0] != OWN)
            self._handlers.append(speaker)
        for handler in self._handlers:
            handler.setLevel(logging.WARNING)

    def __enter__(self) -> RankLog:
        for handler in self._handlers:
            self._root.addHandler(handler)
        self._shown, warnings.showwarning = warnings.showwarning, self._warned
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (UserError, Stopped)):
            logging.getLogger(OWN).error("this rank ends", exc_info=error)
        warnings.showwarning = self._shown
        for handler in self._handlers:
            self._root.removeHandler(handler)
            handler.close()

    def _warned(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        logging.getLogger(OWN).warning("%s", text.strip())
        if self.terminal:
            self._shown(message, category, filename, lineno, file, line)
