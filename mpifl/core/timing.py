"""Where the time of a rank goes: a stopwatch with named phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, process_time

PHASES = ("wait", "broadcast", "load", "train", "reduce", "cluster", "evaluate")


class Stopwatch:
    """Seconds spent per phase. Phases may nest: the inner one's time is taken off the outer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._cpu = process_time()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the block as `phase`."""
        start = perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = perf_counter() - start
            self.seconds[phase] += spent - self._inner.pop()
            self._inner[-1] += spent

    def take(self) -> dict[str, float]:
        """Return the seconds so far, and `cpu`, the processor time of this process; start again from zero."""
        out = {phase: self.seconds.get(phase, 0.0) for phase in PHASES}
        now = process_time()
        out["cpu"], self._cpu = now - self._cpu, now
        self.seconds.clear()
        return out
