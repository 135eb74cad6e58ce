"""What this program's own communication moved: bytes, messages, seconds per call and purpose."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass
class Count:
    """A running count."""

    calls: int = 0
    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class _Call:
    """A block whose time is that of a call."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.count.seconds += perf_counter() - self.start


class Wire:
    """Counts of one rank, by (call, purpose). Each byte is counted once, at the rank that sends it."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)

    def __call__(self, call: str, purpose: str, sent: int = 0, messages: int = 0) -> _Call:
        """Count one call that sends `sent` bytes in `messages` messages, and the time of the block."""
        count = self.counts[call, purpose]
        count.calls += 1
        count.messages += messages
        count.bytes += sent
        return _Call(count)

    def clear(self) -> None:
        """Count from nothing."""
        self.counts.clear()

    @property
    def bytes(self) -> int:
        """All bytes sent by this rank."""
        return sum(c.bytes for c in self.counts.values())

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """Return one row per (call, purpose), ready for `wire.csv`."""
        return [
            {"rank": rank, "call": call, "purpose": why, **vars(c)} for (call, why), c in self.counts.items()
        ]
