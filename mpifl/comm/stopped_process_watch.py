"""Ends processes of this host that are stopped: `python stopped.py SECONDS`, a program of its own, which goes
on where its parent stands still, and which takes nothing but the standard library, so that it is light.

It reads a line of JSON, [[pid, born, name], ...], and watches those processes until another line comes. Where
its input ends without one, its parent is gone: then it watches for one limit more, or until all are gone,
because a rank that is stopped at the end keeps the launcher waiting. Looks are counted, not seconds: while a
scheduler suspends the whole job, this program stands still too.
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

LOOKS = 10  # within the limit
GONE_S = 0.1  # between looks whether any process is left
DISK_LIMITS = 10  # so many limits a process may wait for a disk before that is said
HEARD_S = 0.5  # a launcher drops what it has not heard yet when a rank ends
STOPPED, DISK, DEAD = "T", "D", "Z"  # states of proc(5); t, stopped by a debugger, is none of our business

Row = tuple[int, int, str]  # pid, born, name
Looked = tuple[str, int, int]  # state, processor time then, how often in a row


def status(pid: int) -> tuple[str, int, int]:
    """Return of a process of this host its state, its processor time and when it began, both in clock ticks;
    "", 0, -1 where there is none, or no way to know. Source: proc(5).
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0, -1


def look(rows: Iterable[Row], seen: dict[int, Looked]) -> Iterator[tuple[str, Row]]:
    """Yield those that have stood still at enough looks in a row, each once, with the state they are in.

    Args:
        seen: what the looks before saw, by pid; brought up to date.
    """
    for row in rows:
        pid, born, _ = row
        state, ticks, begun = status(pid)
        same = begun == born and seen.get(pid, ("", 0, 0))[:2] == (state, ticks)
        seen[pid] = state, ticks, (seen[pid][2] if same else 0) + 1
        if begun == born and (state, seen[pid][2]) in ((STOPPED, LOOKS), (DISK, DISK_LIMITS * LOOKS)):
            yield state, row


def wait(rows: Iterable[Row], seconds: float) -> bool:
    """Wait as long as any of the processes is there, at most so many seconds; return whether one still is."""
    end = time.monotonic() + seconds
    while any(status(pid)[2] == born and status(pid)[0] != DEAD for pid, born, _ in rows):
        if time.monotonic() > end:
            return True
        time.sleep(GONE_S)
    return False


def main(limit: float) -> None:
    """Watch until there is nothing to watch."""
    told = open(0, "rb", buffering=0)  # noqa: SIM115  # so that `select` sees all that was not read
    rows: list[Row] = [(pid, born, name) for pid, born, name in json.loads(told.readline() or "[]")]
    seen: dict[int, Looked] = {}
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
                return
        found = [*look(rows, seen)]
        for state, (_, _, name) in found:
            text = f"{name}, has waited for a disk for {DISK_LIMITS * limit:g} s; it is waited for"
            if state == STOPPED:
                text = f"{name}, was stopped for {limit:g} s (system.stopped_timeout_s) and is ended"
            print(f"mpifl: {text}", file=sys.stderr, flush=True)
        ended = [pid for state, (pid, _, _) in found if state == STOPPED]
        time.sleep(heard if ended else 0)
        for pid in ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
