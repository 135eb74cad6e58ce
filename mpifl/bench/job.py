"""mpifl as it is measured: a run of its own engine whose rounds wait for their turn.

Started by `mpifl bench` below mpirun: python -m mpifl.bench.job SOCKET CONFIG [--key.path value ...].
"""

from __future__ import annotations

import secrets
import sys
import traceback
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import numpy as np

from mpifl.comm import ClientStore, Transport, connect
from mpifl.core.memory import keep_freed
from mpifl.driver import engine
from mpifl.engine.rounds import Record, Rounds
from mpifl.engine.sampler import Sampler
from mpifl.engine.step import Stepper
from mpifl.experiment import load_everywhere, prepare, stepper

from .line import Line
from .usage import usage


class Over(Exception):
    """The last turn is done; raised on every rank."""


class Turns:
    """A sampler that lets a round begin only when it is this job's turn."""

    def __init__(self, sampler: Sampler, taker: Stepper, path: str) -> None:
        self.sampler, self.taker, self.transport = sampler, taker, taker.transport
        self.line = Line.to(path) if self.transport.is_server else None
        self.last, self.begun = 0, 0.0

    def __call__(self, step: int) -> np.ndarray:
        """Return the cohort of `step`, once it may be drawn."""
        if step > self.last:
            self.last += self._next(step)
            self.begun = perf_counter()
        return self.sampler(step)

    def _next(self, step: int) -> int:
        """Report the turn that ended, and return how many rounds the next one has."""
        seconds, transport = perf_counter() - self.begun, self.transport
        used = transport.collect((usage(), self.taker.watch.take(), transport.wire.bytes), "control")
        rounds = None
        if used is not None and self.line is not None:
            report: dict[str, Any] = {
                "seconds": seconds,
                "used": [u for u, _, _ in used],
                "phases": [phases for _, phases, _ in used],
                "mpi_bytes": sum(count for _, _, count in used),
                "federation_bytes": [self.taker.ledger.total(way) for way in ("down", "up")],
            }
            if step == 1:
                report = {"ready": True, "pids": [u["pid"] for u, _, _ in used], **report}
            self.line.say(report)
            rounds = self.line.hear() or 0
        rounds = transport.tell(rounds, "control")
        if not rounds:
            raise Over
        return int(rounds)


def main(path: str, name: str, options: list[str]) -> int:
    """Run turns until there are no more."""
    keep_freed()
    transport = connect()
    try:
        _run(transport, path, name, options)
    except Exception:
        trace = traceback.format_exc()
        print(f"mpifl bench: rank {transport.rank} failed\n{trace}", file=sys.stderr, flush=True)
        transport.abort(1)
        return 1
    return 0


def _run(transport: Transport, path: str, name: str, options: list[str]) -> None:
    config = replace(load_everywhere(transport, name, options), rounds=1 << 40)
    bench = prepare(config, transport, lambda text: None)
    store = ClientStore(transport.tell(secrets.token_hex(6), "start"), config.system.scratch)
    try:
        taker = stepper(bench, store)
        rounds = engine(bench, taker, None, None)
        assert isinstance(rounds, Rounds), "only synchronous rounds are measured"
        sampler = cast(Sampler, Turns(rounds.sampler, taker, path))
        replace(rounds, sampler=sampler, judge_every=0).run(_nothing)
    except Over:
        pass
    finally:
        store.close()


def _nothing(record: Record) -> None:
    """A measured run keeps no record."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
