"""Seconds of a rank by named phase."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter, process_time

import numpy as np

PHASES = ("wait", "broadcast", "load", "train", "reduce", "cluster", "evaluate")


class _Phase:
    """A block timed as one phase; a plain class, because event-driven runs open several per arrival."""

    def __init__(self, seconds: dict[str, float], inner: list[float], name: str) -> None:
        self.seconds, self.inner, self.name = seconds, inner, name

    def __enter__(self) -> None:
        self.inner.append(0.0)
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        spent = perf_counter() - self.start
        self.seconds[self.name] += spent - self.inner.pop()
        self.inner[-1] += spent


class Stopwatch:
    """Seconds spent per phase. Phases may nest: the inner one's time is subtracted from the outer's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._cpu = process_time()

    def __call__(self, phase: str) -> _Phase:
        """Count the time of the block as `phase`."""
        return _Phase(self.seconds, self._inner, phase)

    def take(self) -> dict[str, float]:
        """Return the seconds so far, and `cpu`, the processor time of this process; start again from zero."""
        out = {phase: self.seconds.get(phase, 0.0) for phase in PHASES}
        now = process_time()
        out["cpu"], self._cpu = now - self._cpu, now
        self.seconds.clear()
        return out


def now() -> np.ndarray:
    """Return the wall-clock time and the CPU time of this process, in seconds."""
    return np.array([perf_counter(), process_time()])
