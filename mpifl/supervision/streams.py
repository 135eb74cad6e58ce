"""Standard output and error that may be closed, full or without a reader."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

NAMES = {1: "standard output", 2: "standard error"}


class _Output(io.FileIO):
    """An output that drops what cannot be written, from the first failure on.

    Args:
        descriptor: 1 or 2.
        needs_no_reader: whether it also goes on if its reader has left; else `BrokenPipeError` is raised.

    Attributes:
        failed: whether something was dropped.
    """

    def __init__(self, descriptor: int, needs_no_reader: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.needs_no_reader, self.failed = needs_no_reader, False

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not self.needs_no_reader:
                raise
            self.failed = True
            drop(self.fileno(), error.strerror or str(error))
            return size


def drop(descriptor: int, why: str) -> None:
    """Send an output to the null device from now on, and say so on the other one.

    Args:
        descriptor: 1 or 2.
        why: reason, for the line.
    """
    to_null(descriptor)
    line = f"mpifl: {NAMES[descriptor]} cannot be written ({why}): what is printed there is dropped\n"
    with suppress(OSError):
        os.write(3 - descriptor, line.encode())


def to_null(descriptor: int) -> None:
    """Open the null device in the place of a standard descriptor, which may be closed."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def open_closed() -> None:
    """Open the null device for each standard descriptor that is closed.

    Otherwise the next file that is opened, such as a table of a run, would take its number and what is
    printed.
    """
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            to_null(descriptor)
        name = ("stdin", "stdout", "stderr")[descriptor]
        if getattr(sys, name) is None:  # Python leaves it out
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def watch_outputs(needed: bool) -> Callable[[], bool]:
    """Replace `sys.stdout` and `sys.stderr`, so that their failures are not taken for those of files.

    What cannot be written is dropped, and one line says so.

    Args:
        needed: whether what the command prints is its result. A run prints progress, and goes on even if
            the reader of its output leaves.

    Returns:
        A function that returns whether a result could not be printed.
    """
    outputs = []
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
            continue  # replaced, as in a notebook
        outputs.append(_Output(descriptor, not needed))
        tolerant = io.TextIOWrapper(
            io.BufferedWriter(outputs[-1]),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering or descriptor == 2,
            write_through=stream.write_through,
        )
        setattr(sys, name, tolerant)
    return lambda: needed and any(output.failed for output in outputs)
