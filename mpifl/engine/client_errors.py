"""Clients whose code raises, runs out of memory, or returns numbers that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from mpifl.core.errors import UserError

DROP, ABORT = "drop", "abort"
LOG = logging.getLogger("mpifl.clients")
Made = TypeVar("Made")


class ClientError(RuntimeError):
    """An exception in a client's code, with its place."""


@dataclass(frozen=True)
class Dropped:
    """A visit that failed twice. `step`: of the server that it was for."""

    step: int
    client: int
    visit: int
    reason: str


def checked(made: Made, peaks: Mapping[str, Any]) -> Made:
    """Return what was made; raise `FloatingPointError` where an upload's largest value is not finite."""
    for name, values in peaks.items():
        if not np.isfinite(values).all():
            raise FloatingPointError(f"upload {name!r} is not finite")
    return made


def attempt(work: Callable[[], Made], rank: int, visit: Dropped, drops: bool) -> Made | Dropped:
    """Return what `work` makes, at the second try if the first fails; or who is dropped, and why.

    Args:
        visit: whose work it is. drops: False raises at the first failure.

    Raises:
        ClientError: the work failed, and nobody is dropped.
    """
    try:
        return work()
    except UserError:  # such as a full disk: nothing that the client did
        raise
    except Exception as error:
        where = getattr(error, "order", visit)
        place = f"rank {rank}, client {where.client}, round {visit.step}, visit {where.visit}"
        if not drops:
            raise ClientError(f"{place}: {type(error).__name__}: {error}") from error
        LOG.warning("%s failed, is tried again", place, exc_info=error)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return work()
    except Exception as error:
        LOG.warning("%s failed again, is left out", place, exc_info=error)
        return Dropped(visit.step, visit.client, visit.visit, f"{type(error).__name__}: {error}")
