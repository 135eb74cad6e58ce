"""What an asynchronous run says of itself at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts arrivals.

    Attributes:
        lags: staleness in server steps -> arrivals.
        refused: arrivals that changed nothing. busy_seconds: visits under way, times the seconds they were.
    """

    lags: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    busy_seconds: float = 0.0
    _then: float = 0.0

    def passed(self, now: float, under_way: int) -> None:
        """Time went on to `now` with so many visits under way."""
        self.busy_seconds += (now - self._then) * under_way
        self._then = now

    def add(self, lag: int, accepted: bool) -> None:
        """Count an arrival."""
        self.lags[lag] += 1
        self.refused += not accepted

    def so_far(self) -> dict[str, Any]:
        """Return the figures that are written at each evaluation."""
        arrivals = self.lags.total()
        return {
            "arrivals": arrivals,
            "refusal_rate": self.refused / max(arrivals, 1),
            "staleness_mean": sum(lag * n for lag, n in self.lags.items()) / max(arrivals, 1),
        }

    def summary(
        self, steps: int, virtual: float, real: float, idle: Sequence[float], server: float
    ) -> dict[str, Any]:
        """Return the figures of the run.

        Args:
            steps: of the server. virtual, real: seconds on the run's clock, and real ones without evaluation.
            idle: share of its time for which each worker had no visit; empty for one process.
            server: share of the real seconds for which rank 0 used a processor.
        """
        return {
            **self.so_far(),
            "refused": self.refused,
            "staleness_max": max(self.lags, default=0),
            "staleness_histogram": {str(lag): self.lags[lag] for lag in sorted(self.lags)},
            "concurrency": self.busy_seconds / virtual if virtual else 0.0,
            "clock_seconds": virtual,
            "updates_per_clock_second": steps / virtual if virtual else None,
            "updates_per_second": steps / real if real else None,
            "arrivals_per_second": self.lags.total() / real if real else None,
            "worker_idle_share": [round(share, 4) for share in idle],
            "server_cpu_share": round(server, 4),
        }
