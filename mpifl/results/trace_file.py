"""`trace.json`: what each rank did and when, in the Trace Event Format that Perfetto and Chrome open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. The file holds one
object; its events are one to a line. Each rank adds its events by itself, at the end of a run or when it
fails, and the file is valid before and after: what is there can be opened, whichever ranks are missing.
"""

from __future__ import annotations

import csv
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpifl.core.timeline import Event, Recording
from mpifl.core.timing import NOBODY, ClockReading

FILE = "trace.json"
RANKS, VIRTUAL = 1, 2  # the two groups of rows; viewers keep 0 for the idle process
END = b"\n]}\n"  # of the file
LOCK_SECONDS = 10.0  # after which a lock is taken for one that a killed rank has left
MOST_ARRIVALS = 500_000  # rows of events.csv that are drawn, the last ones
NAMES = {"step": "round"}  # commands that are shown under another name


@dataclass(frozen=True)
class Alignment:
    """Times of a rank in seconds since the trace began, on the clock of rank 0.

    Attributes:
        first: comparison of the clocks when the recording began.
        last: comparison at its end; None if there was none. Between the two the offset is linear.
    """

    first: ClockReading
    last: ClockReading | None = None

    def nanoseconds(self, time: float) -> int:
        """Return a time of this rank's `perf_counter` in nanoseconds since the trace began."""
        first, last = self.first, self.last or self.first
        lasted = last.at - first.at
        share = min(1.0, max(0.0, (time - first.at) / lasted)) if lasted > 0 else 0.0
        offset = first.offset + share * (last.offset - first.offset)
        return round((time + offset - first.began) * 1e9)

    @property
    def error(self) -> float:
        """The largest error in seconds."""
        return max(self.first.error, (self.last or self.first).error)


def create(folder: Path, about: Mapping[str, Any]) -> None:
    """Create the file without events; an earlier one, of a run that is resumed, is kept as `trace-1.json`.

    Args:
        folder: the run folder.
        about: facts about the run, shown as its metadata.
    """
    path, number = folder / FILE, 1
    if path.exists():
        while (kept := folder / f"trace-{number}.json").exists():
            number += 1
        path.rename(kept)
    names = [
        _metadata("process_name", RANKS, 0, name="ranks"),
        _metadata("process_sort_index", RANKS, 0, sort_index=0),
    ]
    path.write_bytes(_beginning(about) + ",\n".join(names).encode() + END)


def _beginning(about: Mapping[str, Any]) -> bytes:
    text = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
    return f'{text[:-1]}, "traceEvents": [\n'.encode()


def append(folder: Path, lines: Sequence[str]) -> None:
    """Add events to the file; several ranks may call at a time.

    Args:
        folder: the run folder.
        lines: the events as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    path, text = folder / FILE, ",\n".join(lines).encode()
    if not lines:
        return
    with _locked(folder / f"{FILE}.lock"):
        if not path.exists():  # on a node that does not see the run folder of rank 0
            create(folder, {})
        with path.open("r+b") as file:
            file.seek(-len(END), os.SEEK_END)
            file.write(b",\n" + text + END)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which works on file systems without locks, too."""
    began = time.monotonic()
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() - began > LOCK_SECONDS:
                break
            time.sleep(0.005)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


# -- the events of a rank ------------------------------------------------------------------------------------


def lines_of_rank(recording: Recording, number: int, size: int, alignment: Alignment, lost: str) -> list[str]:
    """Return the events of a rank as JSON.

    Args:
        recording: what it did.
        number: its number when the run began.
        size: number of ranks when the run began.
        alignment: places its times.
        lost: names of the ranks that were lost.
    """
    role = "server" if number == 0 else "worker"
    name = f"rank {number}: {role if size > 1 else 'server and worker'}, {socket.gethostname()}"
    if alignment.error:
        name += f", clock ± {alignment.error * 1e6:.0f} us"
    if recording.dropped:
        name += f", {recording.dropped:,} earlier events dropped"
    rows = [
        _metadata("thread_name", RANKS, number, name=name),
        _metadata("thread_sort_index", RANKS, number, sort_index=number),
    ]
    out, tid = list[str](), number + 1
    for event in recording.events():
        kind = event.kind
        start = max(0, alignment.nanoseconds(event.start))  # Perfetto drops what is earlier
        place = f'"pid":{RANKS},"tid":{tid},"ts":{_us(start)}'
        if kind.what in ("sent", "received"):
            way = '"ph":"s"' if kind.what == "sent" else '"ph":"f","bp":"e"'
            out.append(f'{{{way},"cat":"message","name":"message","id":{event.first},{place}}}')
        elif kind.what == "lost":
            rows.append(_metadata("thread_name", RANKS, event.first, name=f"rank {event.first}: lost"))
            text = json.dumps(lost)
            here = f'"pid":{RANKS},"tid":{event.first + 1},"ts":{_us(start)}'
            out.append(f'{{"ph":"i","s":"t","cat":"lost","name":"lost","args":{{"ranks":{text}}},{here}}}')
        elif event.end == event.end:
            lasted = max(0, alignment.nanoseconds(event.end)) - start
            about = f'"cat":"{kind.what}","name":"{_name(event)}","args":{{{_arguments(event)}}}'
            out.append(f'{{"ph":"X",{about},{place},"dur":{_us(lasted)}}}')
        else:  # it was under way when the rank failed
            out.append(
                f'{{"ph":"B","cat":"phase","name":"{kind.name}","args":{{{_arguments(event)}}},{place}}}'
            )
    return rows + out


def _us(nanoseconds: int) -> str:
    """Return a time in microseconds; whole nanoseconds keep bars inside those around them."""
    return f"{nanoseconds / 1000:.3f}"


def _name(event: Event) -> str:
    if event.kind.what == "command":
        return f"{NAMES.get(event.kind.name, event.kind.name)} {event.step}"
    return "before the trace" if event.kind.what == "before" else event.kind.name


def _arguments(event: Event) -> str:
    """Return the arguments of a bar, as the inside of a JSON object."""
    kind, step = event.kind, f'"step":{event.step}'
    if kind.what in ("mpi", "before"):
        call = f'"call":{json.dumps(kind.name)},' if kind.what == "before" else ""
        return f'{call}"purpose":{json.dumps(kind.purpose)},"bytes":{event.first},"messages":{event.second}'
    if event.more:
        clients = [event.first, *(client for client, _ in event.more)]
        visits = [event.second, *(visit for _, visit in event.more)]
        return f'{step},"clients":{clients},"visits":{visits}'.replace(" ", "")
    if event.first == NOBODY:
        return step
    visit = "" if event.second == NOBODY else f',"visit":{event.second}'
    return f'{step},"client":{event.first}{visit}'


def _metadata(what: str, process: int, row: int, **values: Any) -> str:
    """Return an event that names or places a row, or a group of rows."""
    event = {"ph": "M", "name": what, "pid": process, "tid": row + 1, "args": values}
    return json.dumps(event, ensure_ascii=False)


# -- clients in virtual time ---------------------------------------------------------------------------------


def lines_of_arrivals(path: Path, unit: str) -> list[str]:
    """Return a row for each client of an asynchronous run, with a bar for each visit that arrived, as JSON.

    Args:
        path: `events.csv`; without it there are no events.
        unit: unit of its times, as text; one of them is drawn as a second.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        rows, count = deque[list[str]](maxlen=MOST_ARRIVALS), 0
        for row in reader:
            rows.append(row)
            count += 1
    if not rows:
        return []
    name = f"virtual time of clients, in {unit}"
    if count > len(rows):
        name += f", {count - len(rows):,} earlier arrivals dropped"
    lines = [
        _metadata("process_name", VIRTUAL, 0, name=name),
        _metadata("process_sort_index", VIRTUAL, 0, sort_index=1),
    ]
    arrivals = [dict(zip(columns, row, strict=True)) for row in rows]
    devices = {int(row["client"]): row.get("device") for row in arrivals}
    for client, device in sorted(devices.items()):
        text = f"client {client}" + (f" ({device})" if device else "")
        lines.append(_metadata("thread_name", VIRTUAL, client, name=text))
        lines.append(_metadata("thread_sort_index", VIRTUAL, client, sort_index=client))
    return [*lines, *map(_arrival, arrivals)]


def _arrival(row: Mapping[str, str]) -> str:
    """Return the bar of an arrival; its arguments are its row of `events.csv`."""
    start, end = (round(float(row[name]) * 1e9) for name in ("start", "time"))
    accepted = row["accepted"] == "1"
    event = {
        "ph": "X",
        "cat": "visit",
        "name": "visit" if accepted else "visit, not accepted",
        "pid": VIRTUAL,
        "tid": int(row["client"]) + 1,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {name: _number(value) for name, value in row.items()},
    }
    return json.dumps(event)


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
