"""mpifl as it is measured: a run of its own engine whose rounds wait for their turn.

Started by `mpifl bench` below mpirun: python -m mpifl.benchmarks.job SOCKET CONFIG [--key.path value ...].

What a process used, as the kernel counts it: processor time and memory. Linux.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import traceback
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

from mpifl.aggregation.client_store import ClientStore
from mpifl.comm import Transport, connect
from mpifl.core.process import keep_freed, kilobytes, peak_bytes
from mpifl.experiment.build import build, build_engine, build_server_step
from mpifl.experiment.loader import load_everywhere
from mpifl.runtime.recovery import run_command, serve_commands
from mpifl.runtime.synchronous import SynchronousEngine

from .turns import Line


class Turns:
    """Rounds of an engine that begin when it is this job's turn; every rank has one."""

    def __init__(self, rounds: SynchronousEngine) -> None:
        self.rounds, self.server_step, self.transport = (
            rounds,
            rounds.server_step,
            rounds.server_step.transport,
        )
        self.used: list[Any] | None = None

    def act(self, word: str) -> None:
        """Do what rank 0 says: the engine's own words, or tell what was used so far."""
        if word == "usage":
            phases = self.server_step.watch.take()
            self.used = self.transport.gather((usage(), phases, self.transport.traffic.bytes), "control")
        else:
            self.rounds.execute(word)  # what a run of this engine does at that word

    def say(self, word: str) -> None:
        """Say a word to every rank; on rank 0."""
        run_command(self.server_step, word, self.act)

    def lead(self, line: Line) -> None:
        """Take turns until there are no more; on rank 0."""
        self.say("begin")
        report: dict[str, Any] = {"ready": True}
        while rounds := self._next(line, report):
            begin = perf_counter()
            for _ in range(rounds):
                self.say("step")
            report = {"seconds": perf_counter() - begin}
        self.say("end")

    def _next(self, line: Line, report: dict[str, Any]) -> int:
        """Report the turn that ended; return how many rounds the next one has."""
        self.say("usage")
        assert self.used is not None
        line.say(
            {
                **report,
                "pids": [u["pid"] for u, _, _ in self.used],
                "used": [u for u, _, _ in self.used],
                "phases": [phases for _, phases, _ in self.used],
                "mpi_bytes": sum(count for _, _, count in self.used),
                "federation_bytes": [self.server_step.ledger.total(way) for way in ("down", "up")],
            }
        )
        return int(line.hear() or 0)


def main(path: str, name: str, options: list[str]) -> int:
    """Run turns until there are no more."""
    keep_freed()
    transport = connect()
    transport.watch(0.0)  # between its turns it is stopped
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
    context = build(config, transport)
    store = ClientStore(transport.bcast(secrets.token_hex(6), "start"), config.system.scratch)
    try:
        server_step = build_server_step(context, store)
        rounds = build_engine(context, server_step)
        assert isinstance(rounds, SynchronousEngine), "only synchronous rounds are measured"
        turns = Turns(rounds)
        if transport.is_server:
            turns.lead(Line.to(path))
        else:
            serve_commands(server_step, turns.act)
    finally:
        store.close()


def usage() -> dict[str, Any]:
    """Return what this process used so far.

    `cpu`: processor seconds of all its threads. `peak`: VmHWM in bytes, the most that was resident at once;
    unlike ru_maxrss it does not survive exec. `pss`: proportional set size now in bytes, in which a page that
    several processes share counts in parts; 0 where the kernel does not tell.
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "cpu": process_time(),
        "peak": peak_bytes(),
        "pss": kilobytes("smaps_rollup", "Pss:") * 1024,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
