"""The trace of an earlier run: when its visits started and arrived, from `events.csv`."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, require
from mpifl.core.textfiles import csv_file, is_file

from .visits import Start

COLUMNS = ("time", "client", "visit", "start", "read_version")


@dataclass(frozen=True)
class Row:
    """One arrival.

    Attributes:
        time: time of the arrival.
        client: number of the client.
        visit: number of its visits before this one.
        start: time at which the visit started.
        read_version: version of the rows that it read.
        place: name of its line, for messages.
    """

    time: float
    client: int
    visit: int
    start: float
    read_version: int
    place: str


class Trace:
    """The arrivals of a run, in order.

    Args:
        path: path of an `events.csv`.
        num_clients: N, to check the trace.

    Raises:
        UserError: the file is missing, or is not a trace of such a run.
    """

    def __init__(self, path: str, num_clients: int) -> None:
        self.path = path
        require(
            is_file(path, "clock.trace"), "clock.trace", path, "there is no such file; give an events.csv"
        )
        self.rows = [_row(row, place) for place, row in csv_file(Path(path), "clock.trace", COLUMNS)]
        self.at = 0
        self._times: dict[tuple[int, int], float] = {}
        self._starts: dict[float, list[Start]] = defaultdict(list)
        visits: dict[int, int] = defaultdict(int)
        last = 0.0
        for row in self.rows:
            known = 0 <= row.client < num_clients
            require(known, row.place, row.client, f"unknown client; there are {num_clients}")
            require(
                last <= row.time < inf, row.place, row.time, "time goes back; rows come in order of arrival"
            )
            require(row.start >= 0, row.place, row.start, "a visit starts before the run")
            require(row.start <= row.time, row.place, row.start, "a visit starts before it arrives")
            remedy = f"client {row.client} made {visits[row.client]} visits before this one"
            require(row.visit == visits[row.client], row.place, row.visit, remedy)
            visits[row.client] += 1
            last = row.time
            self._times[row.client, row.visit] = row.time
            self._starts[row.start].append((row.client, row.read_version))
        self._order = deque(sorted(self._starts))
        self._open: list[Start] = []  # starts of past instants that wait for their version or client
        self._arrived = Counter[int]()  # client -> number of its visits that have arrived

    def arrival(self, client: int, visit: int) -> float:
        """Return the time at which a visit of a client arrives."""
        return self._times[client, visit]

    def next_time(self) -> float | None:
        """Return the time of the next arrival; None after the last."""
        return self.rows[self.at].time if self.at < len(self.rows) else None

    def pop(self) -> Row:
        """Return the next arrival and advance to the one after it.

        Raises:
            UserError: the trace has ended.
        """
        if self.at == len(self.rows):
            raise self.ended()
        row = self.rows[self.at]
        self.at += 1
        self._arrived[row.client] += 1
        return row

    def ended(self) -> UserError:
        """Return the error of a run that continues beyond the end of the trace."""
        remedy = f"the trace ends before the run, after {len(self.rows)} arrivals; use fewer rounds"
        return UserError("clock.trace", self.path, remedy)

    def starting(
        self, now: float, version: int, busy: Collection[int], in_seconds: bool = True
    ) -> list[Start]:
        """Return the clients that start at an instant and the version that each reads; each start once.

        If visits take no time, one instant can contain several starts of a client and several versions. If
        time is made of steps, a visit that arrives at the instant at which it starts replaces one that was
        dropped, and the others start after the step.

        Args:
            now: the instant; not earlier than in the last call.
            version: current server version; starts that read a later version wait for it.
            busy: clients whose visits are under way; their next starts wait for their return.
            in_seconds: whether time is in seconds.
        """
        self._open += self._starts.pop(now, [])
        before_step = not in_seconds and self.next_time() == now
        taken, out, left = set(busy), list[Start](), list[Start]()
        for start in self._open:
            client, reads = start
            waits = client in taken or reads > version
            waits = waits or (before_step and self._times[client, self._arrived[client]] > now)
            (left if waits else out).append(start)
            taken.add(client)
        self._open = left
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return the position: number of rows read, future instants, and waiting starts."""
        return {"at": self.at, "left": sorted(self._starts), "open": self._open}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position."""
        self.at = state["at"]
        self._arrived = Counter(row.client for row in self.rows[: self.at])
        self._starts = defaultdict(list, {t: self._starts[t] for t in state["left"]})
        self._order = deque(sorted(self._starts))
        self._open = [(client, version) for client, version in state["open"]]

    def next_start(self) -> float:
        """Return the first future instant with starts; infinity if there is none."""
        while self._order and self._order[0] not in self._starts:
            self._order.popleft()
        return self._order[0] if self._order else inf


def _row(row: dict[str, str], place: str) -> Row:
    try:
        client, visit, version = (int(row[name]) for name in ("client", "visit", "read_version"))
        return Row(float(row["time"]), client, visit, float(row["start"]), version, place)
    except (TypeError, ValueError) as error:
        raise UserError(place, row, "is not a row of an events.csv") from error
