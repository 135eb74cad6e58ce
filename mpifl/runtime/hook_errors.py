"""Errors in a method's own code: how the engine reports them, and which clients it leaves out.

A method's hooks are called inside a `HookCall`, which adds class, hook, client and visit to the errors they
raise.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch

from mpifl.core.algorithm import Algorithm
from mpifl.core.computation import Computation, ComputationCounter
from mpifl.core.errors import (
    INTERRUPTED,
    CodeFailed,
    MethodError,
    Missing,
    NotFinite,
    UserError,
    no_memory,
    trace_beyond,
)
from mpifl.core.types import ASKED_FOR

DROP = "drop"  # value of on_client_error that leaves out clients that fail twice
MOST_TRIED = 5  # most clients tried until one visit can be measured in place of all others
ENGINE = str(Path(__file__).parent)
LOG = logging.getLogger("mpifl.clients")
Made = TypeVar("Made")
Kept = Callable[[], AbstractContextManager[object]]  # makes contexts that put back what code inside changes


class ClientError(CodeFailed):
    """An exception in the method's code at a client, with the place where it was raised."""


class HookCall(ABC):
    """A context manager in which one hook of a method runs; messages are built only if there is an error.

    Args:
        algorithm: the method.
        hook: name of the hook.
        place: where it runs, such as `client=3, visit=0`.
    """

    def __init__(self, algorithm: Algorithm, hook: str, **place: int) -> None:
        self.algorithm, self.hook, self.place = algorithm, hook, place

    @property
    def where(self) -> str:
        """The place as a prefix of a message; empty if there is no place."""
        return ", ".join(f"{what} {number}" for what, number in self.place.items()) + ": " * bool(self.place)

    def error(self, what: str, remedy: str, kind: type[MethodError] = MethodError) -> MethodError:
        """Return the error for something wrong with the hook.

        Args:
            what: what is wrong.
            remedy: what to do about it.
            kind: class of the error.
        """
        return kind(hook_name(self.algorithm, self.hook), f"{self.where}{what}", remedy)

    @abstractmethod
    def failure(self, error: Exception) -> Exception:
        """Return the exception that replaces one raised by the method's own code."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Replace an exception raised inside the context.

        Raises:
            MethodError: the hook asked for something that does not exist, or tried to end the process.
            CodeFailed: the hook was interrupted.
            Exception: the result of `failure`, for any other exception of the method's own code.
        """
        if error is None or isinstance(error, (MethodError, CodeFailed)):
            return
        if isinstance(error, UserError):
            raise self.error(f"{error.key} = {error.value!r}", error.remedy) from error
        if isinstance(error, Missing):
            raise self.error(error.what, error.remedy) from error
        if isinstance(error, KeyError) and error.args and error.args[0] in ASKED_FOR:
            raise self.error(f"no {error.args[0]!r}", ASKED_FOR[error.args[0]]) from error
        if isinstance(error, SystemExit):
            raise self.error(f"sys.exit({error.code!r}) was called", "raise an exception") from error
        if isinstance(error, KeyboardInterrupt):
            text = f"{hook_name(self.algorithm, self.hook)}: {self.where}interrupted (KeyboardInterrupt)"
            raise CodeFailed(text, code=INTERRUPTED) from error
        if isinstance(error, Exception):
            raise self.failure(error) from error


class ServerCall(HookCall):
    """The call of a hook on rank 0; an exception of the method's own code ends the run.

    Args:
        algorithm: the method.
        hook: name of the hook.
        kept: makes a context in which the hook runs.
        place: where it runs.
    """

    def __init__(self, algorithm: Algorithm, hook: str, kept: Kept = nullcontext, **place: int) -> None:
        super().__init__(algorithm, hook, **place)
        self._kept = kept()

    def __enter__(self) -> Self:
        self._kept.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def failure(self, error: Exception) -> Exception:
        """Return the error that ends the run, with the traceback unless the machine ran out of memory."""
        if what := no_memory(error):
            return self.error(what, "use fewer clients, or a machine with more of it")
        name = hook_name(self.algorithm, self.hook)
        return CodeFailed(f"{name}: {self.where}{type(error).__name__}: {error}", trace_of(error))


class ClientCall(HookCall):
    """The call of a hook at a client; `attempt` decides what happens after an exception of its own code."""

    def failure(self, error: Exception) -> HookFailed:
        """Return the exception together with the call in which it was raised."""
        return HookFailed(self, error)


class HookFailed(Exception):
    """An exception raised by a method's own code, in a hook at a client.

    Args:
        call: the hook and its client.
        error: the exception.
    """

    def __init__(self, call: ClientCall, error: Exception) -> None:
        self.call, self.error = call, error
        super().__init__(str(error))


def hook_name(algorithm: Algorithm, hook: str) -> str:
    """Return class and hook, as messages name them."""
    return f"{type(algorithm).__name__}.{hook}"


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception, starting at the method's own code."""
    return trace_beyond(error, ENGINE)


# -- clients that fail ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VisitPlace:
    """Where a visit takes place.

    Attributes:
        rank: rank that runs the visit.
        step: server step that the visit is for.
        client: number of the client.
        visit: number of earlier visits of the client.
    """

    rank: int
    step: int
    client: int
    visit: int

    def __str__(self) -> str:
        return f"rank {self.rank}, client {self.client}, round {self.step}, visit {self.visit}"


@dataclass(frozen=True)
class Dropped:
    """A visit that failed twice and is left out.

    Attributes:
        step: server step that the visit was for.
        client: number of the client.
        visit: number of earlier visits of the client.
        reason: the exception, in words.
    """

    step: int
    client: int
    visit: int
    reason: str


def attempt(work: Callable[[], Made], place: VisitPlace, drops: bool, kept: Kept) -> Made | Dropped:
    """Return the result of a visit, with a second attempt if the first fails and `drops` is set.

    Args:
        work: carries out the visit.
        place: where it takes place.
        drops: True leaves out a client that fails twice; False raises at the first failure.
        kept: makes a context around each attempt.

    Returns:
        The result of `work`, or the client that is left out, with the reason.

    Raises:
        ClientError: the visit failed, and `drops` is False.
        MethodError: the method is wrong for any client.
        CodeFailed: the method was interrupted.
    """
    for number in (1, 2):
        try:
            with kept():
                return work()
        except Exception as raised:
            error, hook, where = raised, "", place
            if isinstance(raised, HookFailed):
                error, call = raised.error, raised.call
                hook, where = f"{hook_name(call.algorithm, call.hook)}: ", replace(place, **call.place)
            if isinstance(error, (UserError, CodeFailed)) and not (drops and isinstance(error, NotFinite)):
                raise error from error.__cause__
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, NotFinite):
                reason = error.value.partition(": ")[2]
            if not drops:
                raise ClientError(f"{hook}{where}: {reason}", trace_of(error)) from error
            outcome = "failed, is tried again" if number == 1 else "failed again, is left out"
            LOG.warning("%s %s", where, outcome, exc_info=error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return Dropped(place.step, place.client, place.visit, reason)


def counted_attempt(
    work: Callable[[], Made], place: VisitPlace, drops: bool, kept: Kept, counter: ComputationCounter
) -> Made | Dropped:
    """Return the result of `attempt`; of what it computes only the last attempt counts, also if it fails."""
    last = Computation()

    def counted() -> Made:
        nonlocal last
        with counter.apart() as last:
            return work()

    made = attempt(counted, place, drops, kept)
    counter.add_all(last)
    return made


def first_that_works(
    work: Callable[[int], Made], clients: Sequence[int], step: int, drops: bool, kept: Kept = nullcontext
) -> Made:
    """Return the result of the first client's visit, which is measured in place of other clients' visits.

    Args:
        work: carries out the first visit of a client, given by its number.
        clients: numbers of the clients.
        step: server step that the visit would be for.
        drops: True tries the next client after a failure, up to the fifth; False raises.
        kept: makes a context around each visit.

    Raises:
        ClientError: all visits that were tried failed; the error is that of the last one.
        MethodError: the method is wrong for any client.
        CodeFailed: the method was interrupted.
    """
    tried = clients[: MOST_TRIED if drops else 1]
    for k in tried:
        try:
            made = attempt(partial(work, k), VisitPlace(0, step, k, 0), drops=False, kept=kept)
        except ClientError as error:
            last = error
        else:
            assert not isinstance(made, Dropped), "nobody is left out"
            return made
    what = f"clients {tried[0]} to {tried[-1]} failed, by which an upload is measured; " * (len(tried) > 1)
    raise ClientError(f"{what}{last.text}", last.trace) from last
