"""Warnings: lines on the terminal, and the log file of each rank."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
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


@contextmanager
def rank_log(path: Path, terminal: bool) -> Iterator[None]:
    """Write the log file of a rank within the block.

    The file receives Python's warnings, log records of level WARNING or above, and the traceback of an
    exception that leaves the block. The terminal shows warnings and records of rank 0 only.

    Args:
        path: the log file; created with its first record.
        terminal: whether to show them on the terminal; true on rank 0 only.
    """
    root, show = logging.getLogger(), warnings.showwarning
    own = _LazyFileHandler(path, delay=True, encoding="utf-8")
    own.setFormatter(logging.Formatter(FORMAT))
    handlers: list[logging.Handler] = [own]
    if terminal and not root.handlers:  # otherwise the application configures them
        stderr = logging.StreamHandler(sys.stderr)
        stderr.addFilter(lambda record: record.name.partition(".")[0] != LOGGER)
        handlers.append(stderr)

    def log_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        logging.getLogger(LOGGER).warning("%s", text.strip())
        if terminal:
            show(message, category, filename, lineno, file, line)

    for handler in handlers:
        handler.setLevel(logging.WARNING)
        root.addHandler(handler)
    warnings.showwarning = log_warning
    try:
        yield
    except (UserError, Stopped, StoppedEarly):
        raise
    except BaseException as error:
        logging.getLogger(LOGGER).error("this rank ends", exc_info=error)
        raise
    finally:
        warnings.showwarning = show
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
