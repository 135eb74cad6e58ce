"""Reading and checking `trace.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpifl.results.trace_file import FILE, RANKS

Event = Mapping[str, Any]
NEEDS = {  # kind of event -> the keys that the format asks for
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "B": {"name", "cat", "ts", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s", "args"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
    "M": {"name", "pid", "tid", "args"},
}


def events_of(folder: Path) -> list[Event]:
    """Return the events of a trace, each checked against the format."""
    trace = json.loads((folder / FILE).read_text())
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert set(event) == {"ph", *NEEDS[event["ph"]]}, event
        assert event["pid"] > 0, "viewers take process 0 for the idle one"
        assert isinstance(event["tid"], int), event
        assert event.get("dur", 0) >= 0, event
    return events


def bars(events: Iterable[Event], rank: int, *categories: str) -> list[Event]:
    """Return the complete bars of a rank, those that contain others first."""
    mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (RANKS, rank + 1)]
    some = [e for e in mine if not categories or e["cat"] in categories]
    return sorted(some, key=lambda e: (e["ts"], -e["dur"]))


def end_of(bar: Event) -> float:
    return bar["ts"] + bar["dur"]


def assert_nested(some: Sequence[Event]) -> None:
    """Check that each bar lies inside of the one before it that has not ended, or after it."""
    around: list[Event] = []
    for bar in some:
        while around and end_of(around[-1]) <= bar["ts"] + 1e-6:
            around.pop()
        assert not around or end_of(bar) <= end_of(around[-1]) + 1e-6, (around[-1], bar)
        around.append(bar)


def shares(events: Iterable[Event], rank: int) -> dict[str, float]:
    """Return the share of each phase in the time of a rank between start and end of the rounds.

    The time of an inner phase does not count for the outer.
    """
    phases = bars(events, rank, "phase")
    (rounds,) = [bar for bar in phases if bar["name"] == "engine"]
    own: Counter[str] = Counter()
    around: list[Event] = []
    for bar in phases:
        if not rounds["ts"] <= bar["ts"] < end_of(rounds):
            continue
        while around and end_of(around[-1]) <= bar["ts"] + 1e-6:
            around.pop()
        if around:
            own[around[-1]["name"]] -= bar["dur"]
        own[bar["name"]] += bar["dur"]
        around.append(bar)
    return {name: spent / rounds["dur"] for name, spent in own.items()}


def bytes_sent(events: Iterable[Event]) -> Counter[tuple[int, str, str]]:
    """Return the bytes by (rank, call, purpose) that the arguments of the MPI calls say."""
    sent: Counter[tuple[int, str, str]] = Counter()
    for e in events:
        if e["ph"] == "X" and e["cat"] in ("mpi", "before"):
            call = e["args"].get("call", e["name"])
            sent[e["tid"] - 1, call, e["args"]["purpose"]] += e["args"]["bytes"]
    return sent


def visits_of(events: Iterable[Event], phase: str) -> list[tuple[int, int]]:
    """Return the (client, visit) of all bars of a phase, sorted."""
    found = []
    for e in events:
        if e["ph"] == "X" and e["cat"] == "phase" and e["name"] == phase:
            args = e["args"]
            if "clients" in args:
                found += zip(args["clients"], args["visits"], strict=True)
            elif "client" in args:
                found.append((args["client"], args["visit"]))
    return sorted(found)
