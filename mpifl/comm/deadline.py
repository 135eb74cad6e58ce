"""A limit for what all ranks do together, where nobody can say what comes of a link that is broken."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .transport import Transport

OTHERS_S = 5.0  # rank 0 knows more, and speaks first


@contextmanager
def within(transport: Transport, seconds: float, what: str) -> Iterator[None]:
    """End the job with a message unless the body ends in time: in a thread, for the body may be inside MPI.

    Args:
        what: the body, in words; rank 0 adds whom it waits for.
    """

    def end() -> None:
        names = "; ".join(transport.awaited())
        text = f"{what} did not end within {seconds:g} s" + (f": no word from {names}" if names else "")
        print(f"mpifl: {text}", file=sys.stderr, flush=True)
        transport.give_up(1)

    timer = threading.Timer(seconds + (0.0 if transport.is_server else OTHERS_S), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
