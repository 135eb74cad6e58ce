"""Scripts of users that run on every rank: how their calls meet, and how an error on any rank ends all.

One process needs none of this. Under `mpirun` every rank executes the script; each call of `mpifl.run` and
the like is made by all of them. An error of such a call is raised on every rank. Where nobody catches it, or
where a script fails on one rank alone, all ranks end with one message, and none waits for another.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from mpifl.comm.connect import connect
from mpifl.comm.transport import Transport
from mpifl.core.errors import CodeFailed, Stopped, UserError
from mpifl.core.process import keep_freed

from .exit_codes import FAILED, outcome

Made = TypeVar("Made")
END = "the end of the script"
_ranks: list[Transport] = []  # that this process belongs to: at most one, kept between calls
_spent: list[Transport] = []  # those of calls that failed: messages may be left in them


def on_all_ranks(call: str, work: Callable[[Transport], Made]) -> Made:
    """Do something that every rank does; an exception is raised on every rank.

    Args:
        call: what is called, with its arguments as far as ranks may differ in them; in words.
        work: is given the transport.

    Raises:
        UserError: of `work`, on any rank; or ranks called different things.
    """
    transport = connected()
    try:
        meet(transport, call)
        transport.traffic.clear()  # of the meeting: it is no part of a run
        return work(transport)
    except Stopped:  # raised on every rank, after the last message
        raise
    except Exception as error:
        _raised_everywhere(transport, error)
        raise


def connected() -> Transport:
    """Return the transport of this process; the first call connects the ranks."""
    if not _ranks:
        transport = connect()
        _ranks.append(transport)
        if transport.size > 1 and not _spent:
            keep_freed()
            sys.excepthook = _uncaught
            atexit.register(_leave)
    return _ranks[0]


def meet(transport: Transport, call: str) -> None:
    """Check that all ranks call the same; every rank calls.

    Raises:
        UserError: on every rank, where they do not.
    """
    calls = transport.gather(call, "start")
    other = next((f"{call} on rank 0, {c} on another" for c in calls or () if c != call), "")
    if other := transport.bcast(other, "start"):
        remedy = "every rank of mpirun makes the same calls; let rank 0 alone look at results only"
        raise UserError("mpifl", other, remedy)


def _raised_everywhere(transport: Transport, error: Exception) -> None:
    """Raise an error of this rank on the others, too; end the job where they do not hear of it."""
    if transport.size == 1:
        return
    if not isinstance(error, (UserError, CodeFailed)):  # our own fault, or a lost rank: the job ends

        def again() -> None:
            raise error

        os._exit(outcome(transport, again))
    transport.raise_on_others(error)
    transport.watch_stopped(0)
    if not transport.final_barrier():
        print(f"mpifl: {error} (on rank {transport.rank})", file=sys.stderr, flush=True)
        transport.abort(getattr(error, "code", FAILED))
    _spent[:] = [*_spent, transport]
    _ranks.clear()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End all ranks for an exception that the script does not catch (`sys.excepthook`)."""

    def again() -> None:
        raise error.with_traceback(trace)

    transport = (_ranks or _spent)[-1]
    code = outcome(transport, again)
    transport.finalize(code)
    atexit.unregister(_leave)
    raise SystemExit(code)  # the exit code of the process


def _leave() -> None:
    """Wait for the other ranks at the end of the script, with a free core."""
    transport = connected()
    transport.finalize(outcome(transport, lambda: meet(transport, END)))
