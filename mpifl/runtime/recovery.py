"""Words that rank 0 says and every rank obeys, said again after the loss of a rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from time import perf_counter

from mpifl.comm import RankLost

from .server_step import Stepper

Act = Callable[[str], None]
LOG = logging.getLogger("mpifl.failures")
LAST = ("end",)


def say(stepper: Stepper, word: str, act: Act) -> None:
    """Have every rank do something, again if a rank is lost meanwhile; on rank 0."""
    known = len(stepper.dropped)
    while True:
        try:
            stepper.transport.bcast(word, "control")
            act(word)
            stepper.ledger.commit()
            return
        except RankLost:
            stepper.ledger.roll_back()
            del stepper.dropped[known:]
            regroup(stepper)


def obey(stepper: Stepper, act: Act) -> None:
    """Do what rank 0 says until it says the last word; on the other ranks."""
    word = ""
    while word not in LAST:
        try:
            word = stepper.transport.bcast(None, "control")
            act(word)
        except RankLost:
            word = ""
            regroup(stepper)


def regroup(stepper: Stepper) -> None:
    """Go on with the ranks that are left, and say so; every one of them calls."""
    transport, start = stepper.transport, perf_counter()
    known = len(transport.lost)
    while True:
        try:
            stepper.regroup()
            break
        except RankLost:
            continue
    gone = "; ".join(transport.lost[known:])
    text = f"lost {gone}. {transport.size} ranks go on, after {perf_counter() - start:.2f} s"
    LOG.warning(text)
    if transport.is_server:
        print(f"mpifl: {text}; what it held is done again", file=sys.stderr, flush=True)
