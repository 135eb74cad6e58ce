"""The program that `mpifl bench` measures: the synchronous engine, whose rounds wait for their turn.

Started under mpirun as `python -m mpifl.benchmarks.job SOCKET CONFIG [--key.path value ...]`.
"""

from __future__ import annotations

import secrets
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from time import perf_counter
from typing import Any

from mpifl.aggregation.client_store import ClientStore
from mpifl.comm.connect import connect
from mpifl.comm.transport import Transport
from mpifl.core.process import keep_freed
from mpifl.core.timeline import Recording
from mpifl.core.timing import NO_TIMELINE, Timeline
from mpifl.experiment.build import build, build_engine, build_server_step
from mpifl.experiment.loader import load_everywhere
from mpifl.runtime.engine import command_loop, run_command
from mpifl.runtime.synchronous import SynchronousEngine

from .turns import asked, usage


class TurnRunner:
    """Runs the rounds of an engine in turns; every rank has one.

    Args:
        rounds: The engine.
    """

    def __init__(self, rounds: SynchronousEngine) -> None:
        self.rounds, self.server_step = rounds, rounds.server_step
        self.transport = rounds.server_step.transport
        self.used: list[Any] | None = None

    def execute(self, command: str) -> None:
        """Execute a command of rank 0: one of the engine, or `usage`, which gathers resource use so far."""
        if command == "usage":
            phases = self.server_step.watch.take()
            self.used = self.transport.gather((usage(), phases, self.transport.traffic.bytes), "control")
        else:
            self.rounds.execute(command)

    def lead(self, connection: Connection) -> None:
        """Run turns until the measuring process asks for no more (on rank 0)."""
        self._command("begin")
        report: dict[str, Any] = {"ready": True}
        while number := self._next(connection, report):
            report = self.turn(number)
        self._command("end")

    def turn(self, asked: int) -> dict[str, Any]:
        """Run a turn; return its figures, `seconds` among them (on rank 0).

        Args:
            asked: Number of rounds.
        """
        begin = perf_counter()
        for _ in range(asked):
            self._command("step")
        return {"seconds": perf_counter() - begin}

    def _command(self, command: str) -> None:
        run_command(self.server_step, command, self.execute)

    def _next(self, connection: Connection, report: dict[str, Any]) -> int:
        """Report the turn that ended; return the number that the next turn is asked for, 0 for the end."""
        self._command("usage")
        assert self.used is not None
        connection.send(
            {
                **report,
                "pids": [used["pid"] for used, _, _ in self.used],
                "used": [used for used, _, _ in self.used],
                "phases": [phases for _, phases, _ in self.used],
                "mpi_bytes": sum(count for _, _, count in self.used),
                "federation_bytes": [self.server_step.ledger.total(way) for way in ("down", "up")],
            }
        )
        return asked(connection)


def main(
    path: str, name: str, options: list[str], make: Callable[[SynchronousEngine], TurnRunner] = TurnRunner
) -> int:
    """Run the job on this rank; return its exit code.

    Args:
        path: The socket of the measuring process.
        name: The configuration.
        options: Command-line options that override it.
        make: Returns the runner of an engine's turns.
    """
    keep_freed()
    transport = connect()
    transport.watch_stopped(0.0)  # its processes are stopped between turns
    try:
        _run(transport, path, name, options, make)
    except Exception:
        trace = traceback.format_exc()
        print(f"mpifl bench: rank {transport.rank} failed\n{trace}", file=sys.stderr, flush=True)
        transport.abort(1)
        return 1
    return 0


def _run(
    transport: Transport,
    path: str,
    name: str,
    options: list[str],
    make: Callable[[SynchronousEngine], TurnRunner],
) -> None:
    config = replace(load_everywhere(transport, name, options), rounds=1 << 40)
    context = build(config, transport)
    store = ClientStore(transport.bcast(secrets.token_hex(6), "start"), config.system.scratch)
    try:
        timeline: Timeline = NO_TIMELINE
        if config.output.trace:  # recorded as in a run, and not written
            timeline = Recording.of_rank(transport.size)
            transport.traffic.tell(timeline)
        server_step = build_server_step(context, store, timeline=timeline)
        rounds = build_engine(context, server_step)
        assert isinstance(rounds, SynchronousEngine), "only synchronous rounds are measured"
        runner = make(rounds)
        if transport.is_server:
            runner.lead(Client(path))
        else:
            command_loop(server_step, runner.execute)
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
