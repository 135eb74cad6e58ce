"""Commands that rank 0 gives and every rank executes; they are repeated after the loss of a rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from time import perf_counter

from mpifl.comm.transport import RankLost

from .server_step import ServerStep

Execute = Callable[[str], None]
LOG = logging.getLogger("mpifl.failures")
END = "end"  # the last command


def run_command(server_step: ServerStep, command: str, execute: Execute) -> None:
    """Have every rank execute a command, and repeat it if a rank is lost meanwhile; on rank 0.

    Args:
        server_step: server step of this rank.
        command: one word.
        execute: executes the command on this rank. Before a repetition, the ledger and the list of dropped
            visits are rolled back.
    """
    known = len(server_step.dropped)
    while True:
        try:
            server_step.transport.bcast(command, "control")
            execute(command)
            server_step.ledger.commit()
            return
        except RankLost:
            server_step.ledger.roll_back()
            del server_step.dropped[known:]
            regroup(server_step)


def command_loop(server_step: ServerStep, execute: Execute) -> None:
    """Execute the commands of rank 0, up to the last one; on the other ranks."""
    command = ""
    while command != END:
        try:
            command = server_step.transport.bcast(None, "control")
            execute(command)
        except RankLost:
            command = ""
            regroup(server_step)


def regroup(server_step: ServerStep) -> None:
    """Continue with the remaining ranks, and log the loss; all of them call."""
    transport, start = server_step.transport, perf_counter()
    known = len(transport.lost)
    server_step.regroup()
    lost = "; ".join(transport.lost[known:])
    text = f"lost {lost}. {transport.size} ranks go on, after {perf_counter() - start:.2f} s"
    LOG.warning(text)
    if transport.is_server:
        print(f"mpifl: {text}; what it held is done again", file=sys.stderr, flush=True)
