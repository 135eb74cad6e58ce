"""Words that rank 0 says and every rank obeys, said again after the loss of a rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from time import perf_counter

from mpifl.comm import RankLost

from .server_step import ServerStep

Act = Callable[[str], None]
LOG = logging.getLogger("mpifl.failures")
LAST = ("end",)


def say(server_step: ServerStep, word: str, act: Act) -> None:
    """Have every rank do something, again if a rank is lost meanwhile; on rank 0."""
    known = len(server_step.dropped)
    while True:
        try:
            server_step.transport.bcast(word, "control")
            act(word)
            server_step.ledger.commit()
            return
        except RankLost:
            server_step.ledger.roll_back()
            del server_step.dropped[known:]
            regroup(server_step)


def obey(server_step: ServerStep, act: Act) -> None:
    """Do what rank 0 says until it says the last word; on the other ranks."""
    word = ""
    while word not in LAST:
        try:
            word = server_step.transport.bcast(None, "control")
            act(word)
        except RankLost:
            word = ""
            regroup(server_step)


def regroup(server_step: ServerStep) -> None:
    """Go on with the ranks that are left, and say so; every one of them calls."""
    transport, start = server_step.transport, perf_counter()
    known = len(transport.lost)
    while True:
        try:
            server_step.regroup()
            break
        except RankLost:
            continue
    gone = "; ".join(transport.lost[known:])
    text = f"lost {gone}. {transport.size} ranks go on, after {perf_counter() - start:.2f} s"
    LOG.warning(text)
    if transport.is_server:
        print(f"mpifl: {text}; what it held is done again", file=sys.stderr, flush=True)
