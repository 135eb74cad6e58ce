"""The end of a command: one error message for all ranks, and the exit code of the process."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpifl.comm.transport import CannotRecover, RankLost, Transport
from mpifl.core.errors import INTERRUPTED, STOPPED, CodeFailed, Stopped, UserError
from mpifl.core.files import is_full

from .streams import to_null

OK, FAILED, BAD_INPUT = 0, 1, 2
EXIT_FILE = "MPIFL_EXIT_FILE"  # environment variable with a file; the launch scripts set it


def outcome(transport: Transport, command: Callable[[], int | None]) -> int:
    """Run a command and return the exit code of this process; every rank calls.

    Args:
        transport: connects all ranks.
        command: returns its exit code, or None for 0.

    Returns:
        0 for success; 1 for a failure; 2 for bad input; 75 for a run that was stopped and can be resumed; 130
        for an interrupt. Rank 0 also writes it to the file that `MPIFL_EXIT_FILE` names, which holds `began`
        until then and if a lost rank ends the run: a launcher can exit with 0 although a node has died.
    """
    if transport.is_server:
        leave("began")
    code = _outcome(transport, command)
    if transport.is_server:
        leave(str(code))
    return code


def leave(word: str) -> None:
    """Write `began` or an exit code to the file that `MPIFL_EXIT_FILE` names, if it names one."""
    if file := os.environ.get(EXIT_FILE):
        with suppress(OSError):  # the exit code of the process is the same
            Path(file).write_text(f"{word}\n")


def _outcome(transport: Transport, command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; see `outcome`."""
    try:
        code = command() or OK
        sys.stdout.flush()
    except UserError as error:
        return _failed(transport, error, f"mpifl: {error}", BAD_INPUT)
    except CodeFailed as error:
        return _failed(transport, error, f"{error.trace}mpifl: {error}", error.code)
    except BrokenPipeError:  # the reader left: mpifl list methods | head
        to_null(sys.stdout.fileno())
        return OK
    except Stopped as end:
        if transport.is_server:
            print(f"mpifl: {end}", file=sys.stderr, flush=True)
        transport.final_barrier()
        return STOPPED
    except (RankLost, CannotRecover) as error:
        return _lost(transport, error)
    except (SystemExit, KeyboardInterrupt) as end:  # of the user's own code: mpifl itself raises neither
        code = INTERRUPTED if isinstance(end, KeyboardInterrupt) else FAILED
        what = f"rank {transport.rank}: {type(end).__name__}({end}) outside of a method's hooks"
        return _failed(transport, CodeFailed(what, code=code), f"mpifl: {what}", code)
    except BaseException as error:
        if is_full(error):
            text = f"{error}; make room, then go on from the last checkpoint: mpifl resume RUN"
            print(f"mpifl: rank {transport.rank}: {text}", file=sys.stderr, flush=True)
            leave(str(FAILED))
            transport.abort(FAILED)
            return FAILED
        if transport.size == 1 and not isinstance(error, Exception):
            raise
        trace = traceback.format_exc()
        print(f"mpifl: rank {transport.rank} failed\n{trace}", file=sys.stderr, flush=True)
        leave(str(FAILED))
        transport.abort(FAILED)
        return FAILED
    return code


def _failed(transport: Transport, error: Exception, text: str, code: int) -> int:
    """End all ranks with one message and an exit code; abort only if other ranks do not hear of the error."""
    transport.raise_on_others(error)
    if transport.is_server:
        print(text, file=sys.stderr, flush=True)
    if not transport.final_barrier():
        if not transport.is_server:
            print(f"{text} (on rank {transport.rank})", file=sys.stderr, flush=True)
        leave(str(code))
        transport.abort(code)
    return code


def _lost(transport: Transport, error: RankLost | CannotRecover) -> int:
    """End a job that has lost a rank and cannot continue without it."""
    if not transport.is_server:
        time.sleep(2.0)  # rank 0 prints first, if it is still alive
    gone = [name for name in (*transport.lost, *transport.failed_ranks()) if name not in str(error)]
    names = "; ".join(gone) or f"a rank ({error})"
    text = f"lost {names} before the first step; start the job again"
    if isinstance(error, CannotRecover):
        text = f"lost {names}; {error}" if gone else str(error)
    print(f"mpifl: {text}", file=sys.stderr, flush=True)
    transport.abort(FAILED)
    return FAILED
