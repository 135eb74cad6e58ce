"""Clients whose code raises, runs out of memory, or returns numbers that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mpifl.core.errors import CodeFailed, NotFinite, UserError

from .hooks import trace_of

DROP, ABORT = "drop", "abort"
LOG = logging.getLogger("mpifl.clients")
Made = TypeVar("Made")


class ClientError(CodeFailed):
    """An exception in a client's code, with its place."""


@dataclass(frozen=True)
class Dropped:
    """A visit that failed twice. `step`: of the server that it was for."""

    step: int
    client: int
    visit: int
    reason: str


def attempt(work: Callable[[], Made], rank: int, visit: Dropped, drops: bool) -> Made | Dropped:
    """Return what `work` makes, at the second try if the first fails; or who is dropped, and why.

    Args:
        visit: whose work it is. drops: False raises at the first failure.

    Raises:
        ClientError: the work failed, and nobody is dropped.
        MethodError, CodeFailed: the method is wrong, or ends the process: whoever the client is.
    """
    for number in (1, 2):
        try:
            return work()
        except Exception as error:
            if isinstance(error, (UserError, CodeFailed)) and not (drops and isinstance(error, NotFinite)):
                raise
            where = getattr(error, "order", visit)
            place = f"rank {rank}, client {where.client}, round {visit.step}, visit {where.visit}"
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, NotFinite):
                reason = error.value.partition(": ")[2]
            if not drops:
                hook = f"{error.hook}: " if hasattr(error, "hook") else ""
                raise ClientError(f"{hook}{place}: {reason}", trace_of(error)) from error
            how = "failed, is tried again" if number == 1 else "failed again, is left out"
            LOG.warning("%s %s", place, how, exc_info=error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return Dropped(visit.step, visit.client, visit.visit, reason)
