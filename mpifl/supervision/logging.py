"""Warnings: lines on the terminal, and the log file of each rank."""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mpifl.core.errors import Stopped, StoppedEarly, UserError

LOGGER = "mpifl"  # its records are not shown on the terminal, which has their content already
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def warn(text: str) -> None:
    """Print a line to stderr."""
    print(f"mpifl: {text}", file=sys.stderr, flush=True)


@cache
def warn_once(text: str) -> None:
    """Print a line to stderr, only the first time in this process."""
    warn(text)


class _LazyFileHandler(logging.FileHandler):
    """Creates its file and folder with the first record; records are lost if the disk is full."""

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
    """The log file of a rank, as a context manager.

    The file receives Python's warnings, log records of level WARNING or above, and the traceback of an
    exception that leaves the context. The terminal shows warnings and records of rank 0 only.

    Args:
        path: the log file; created with its first record.
        terminal: whether to show them on the terminal; true on rank 0 only.
    """

    def __init__(self, path: Path, terminal: bool) -> None:
        self.terminal, self._root = terminal, logging.getLogger()
        file = _LazyFileHandler(path, delay=True, encoding="utf-8")
        file.setFormatter(logging.Formatter(FORMAT))
        self._handlers: list[logging.Handler] = [file]
        if terminal and not self._root.handlers:  # otherwise the application configures them
            stderr = logging.StreamHandler(sys.stderr)
            stderr.addFilter(lambda record: record.name.partition(".")[0] != LOGGER)
            self._handlers.append(stderr)
        for handler in self._handlers:
            handler.setLevel(logging.WARNING)

    def __enter__(self) -> RankLog:
        for handler in self._handlers:
            self._root.addHandler(handler)
        self._showwarning, warnings.showwarning = warnings.showwarning, self._log_warning
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (UserError, Stopped, StoppedEarly)):
            logging.getLogger(LOGGER).error("this rank ends", exc_info=error)
        warnings.showwarning = self._showwarning
        for handler in self._handlers:
            self._root.removeHandler(handler)
            handler.close()

    def _log_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        logging.getLogger(LOGGER).warning("%s", text.strip())
        if self.terminal:
            self._showwarning(message, category, filename, lineno, file, line)
