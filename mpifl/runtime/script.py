"""User scripts that run on every rank: common calls of all ranks, and the end of all ranks after an error.

A single process needs none of this. Under `mpirun`, every rank executes the script, and all ranks make each
call of `mpifl.run` and similar functions. An error in such a call is raised on every rank. If the script does
not catch it, or if the script fails on a single rank, all ranks end with one message, and none waits for
another.
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
from mpifl.supervision.exit_codes import FAILED, outcome

Made = TypeVar("Made")
END = "the end of the script"
_ranks: list[Transport] = []  # the current transport of this process: at most one, kept between calls
_spent: list[Transport] = []  # transports of failed calls, which may still hold messages


def on_all_ranks(call: str, work: Callable[[Transport], Made]) -> Made:
    """Return the result of `work`, which all ranks run; an exception on any rank is raised on every rank.

    Args:
        call: the call in words, with the arguments in which ranks may differ.
        work: function of the transport.

    Raises:
        UserError: `work` raised one on some rank, or the ranks made different calls.
    """
    transport = connected()
    try:
        meet(transport, call)
        transport.traffic.clear()  # the messages of `meet` are not part of a run
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
    """Check that all ranks make the same call; every rank calls.

    Raises:
        UserError: on every rank, if the calls differ.
    """
    calls = transport.gather(call, "start")
    other = next((f"{call} on rank 0, {c} on another" for c in calls or () if c != call), "")
    if other := transport.bcast(other, "start"):
        remedy = "every rank of mpirun makes the same calls; let rank 0 alone look at results only"
        raise UserError("mpifl", other, remedy)


def _raised_everywhere(transport: Transport, error: Exception) -> None:
    """Raise an error of this rank on the others too; end the job if they do not hear of it."""
    if transport.size == 1:
        return
    if not isinstance(error, (UserError, CodeFailed)):  # an error of mpifl, or a lost rank: the job ends

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
    """End all ranks after an exception that the script does not catch (`sys.excepthook`)."""
    failed = getattr(error, "failed", None)  # of a callback's exception, of which every rank has heard

    def again() -> None:
        raise failed if isinstance(failed, CodeFailed) else error.with_traceback(trace)

    transport = (_ranks or _spent)[-1]
    code = outcome(transport, again)
    transport.finalize(code)
    atexit.unregister(_leave)
    raise SystemExit(code)  # the exit code of the process


def _leave() -> None:
    """Wait for the other ranks at the end of the script, with a free core."""
    transport = connected()
    transport.finalize(outcome(transport, lambda: meet(transport, END)))
