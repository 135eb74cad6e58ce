"""A program that kills processes of this host that stay stopped.

Called with SECONDS, and PID and START of a launcher or nothing. It keeps running while its parent is
stopped. To stay small, it imports the standard library only. It reads a line of JSON, [[pid, start in clock
ticks, name], ...], and watches these processes until it reads another line. If its input ends without
another line, its parent has ended. It then keeps watching for one more limit, or until all processes have
ended, because a rank that is stopped at the end keeps the launcher waiting. Time is counted in polls: while
a scheduler suspends the whole job, this program is suspended too.

The launcher is named if rank 0 is among the processes. If all of them have ended, the job is over; a
launcher that stays (Open MPI's does under load, if rank 0 is killed during the start) is ended too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

LOOKS = 10  # polls within the limit
GONE_S = 0.1  # between two checks whether any process is left
DISK_LIMITS = 10  # multiples of the limit for which a process may wait for a disk before a message
STAYS_S = 20.0  # for which a launcher may outlive the ranks of its host
HEARD_S = 0.5  # pause before a kill: when a rank ends, a launcher drops output that it has not read yet
STOPPED, DISK, DEAD = "T", "D", "Z"  # states of proc(5); t, stopped by a debugger, is left alone

Row = tuple[int, int, str]  # pid, start in clock ticks, name
Seen = tuple[str, int, int]  # state, processor time, number of polls in a row


def status(pid: int) -> tuple[str, int, int]:
    """Return the state of a process of this host, its processor time and its start, both in clock ticks.

    Return "", 0, -1 if there is no such process, or if the system does not say. Source: proc(5).

    Args:
        pid: process id.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0, -1


def poll(rows: Iterable[Row], seen: dict[int, Seen]) -> Iterator[tuple[str, Row]]:
    """Yield the processes that did not run for too many polls in a row, each once, with their state.

    Args:
        rows: the processes.
        seen: findings of earlier polls by pid; updated in place.
    """
    for row in rows:
        pid, born, _ = row
        state, ticks, begun = status(pid)
        same = begun == born and seen.get(pid, ("", 0, 0))[:2] == (state, ticks)
        seen[pid] = state, ticks, (seen[pid][2] if same else 0) + 1
        if begun == born and (state, seen[pid][2]) in ((STOPPED, LOOKS), (DISK, DISK_LIMITS * LOOKS)):
            yield state, row


def wait(rows: Iterable[Row], seconds: float) -> bool:
    """Block while any of the processes is alive, at most `seconds`; return whether one still is."""
    end = time.monotonic() + seconds
    while any(status(pid)[2] == born and status(pid)[0] != DEAD for pid, born, _ in rows):
        if time.monotonic() > end:
            return True
        time.sleep(GONE_S)
    return False


def end_launcher(launcher: Row, stays: float) -> None:
    """End a launcher that outlives its ranks.

    Args:
        launcher: its process.
        stays: seconds for which it may do so.
    """
    with suppress(OSError):
        os.setsid()  # it ends all that is in the sessions of its ranks
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # a launcher waits until nobody holds the outputs of its ranks
        os.dup2(null, descriptor)
    if not wait([launcher], stays):
        return
    text = f"rank 0 and all ranks of its host have been gone for {stays:g} s: {launcher[2]} is ended"
    with suppress(OSError), open(f"/proc/{launcher[0]}/fd/2", "w") as its_errors:
        its_errors.write(f"mpifl: {text}\n")
    force_to_end(launcher)


def force_to_end(launcher: Row) -> None:
    """Signal a launcher until it has ended, a second apart: Open MPI's ends at once at the third SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if not wait([launcher], 0.0):
            return
        with suppress(ProcessLookupError):
            os.kill(launcher[0], number)
        wait([launcher], 1.0)


def main(limit: float, launcher: Row | None = None, stays: float = STAYS_S) -> None:
    """Watch until another line is read, or all processes have ended.

    Args:
        limit: seconds for which a process may be stopped.
        launcher: the launcher of the processes, if rank 0 is one of them.
        stays: seconds for which the launcher may outlive them.
    """
    told = open(0, "rb", buffering=0)  # noqa: SIM115  # unbuffered, so that `select` sees all input
    rows: list[Row] = [(pid, born, name) for pid, born, name in json.loads(told.readline() or "[]")]
    seen: dict[int, Seen] = {}
    heard = min(HEARD_S, limit / 2)
    pause, more = (limit - heard) / LOOKS, LOOKS + 1
    while more:
        if more > LOOKS and select.select([told], [], [], pause)[0]:
            if told.readline():
                return
            more = LOOKS
        if more <= LOOKS:
            more -= 1
            if not wait(rows, pause):
                if launcher is not None:
                    end_launcher(launcher, stays)
                return
        found = [*poll(rows, seen)]
        for state, (_, _, name) in found:
            text = f"{name}, has waited for a disk for {DISK_LIMITS * limit:g} s; the run waits for it"
            if state == STOPPED:
                text = f"{name}, was stopped for {limit:g} s (system.stopped_timeout_s) and is ended"
            print(f"mpifl: {text}", file=sys.stderr, flush=True)
        ended = [pid for state, (pid, _, _) in found if state == STOPPED]
        time.sleep(heard if ended else 0)
        for pid in ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    seconds, *process = sys.argv[1:]
    main(float(seconds), (int(process[0]), int(process[1]), "the launcher") if process else None)
