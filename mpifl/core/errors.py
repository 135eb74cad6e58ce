"""Errors with a message for the user: the key, the value and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# what PyTorch and NumPy say of tensors and arrays that are too large
NO_MEMORY = ("allocate memory", "size calculation overflowed", "overflow when unpacking", "array is too big")
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell
STOPPED = 75  # exit code of a run that was asked to stop and can go on; EX_TEMPFAIL of sysexits.h


class UserError(ValueError):
    """Bad input. Shown as one line on rank 0 with exit code 2, never as a traceback.

    Args:
        key: what is wrong, as the user wrote it: a dotted configuration key or a file.
        value: what was given.
        remedy: what to do about it.
    """

    def __init__(self, key: str, value: Any, remedy: str) -> None:
        self.key, self.value, self.remedy = key, value, remedy
        super().__init__(one_line(f"{shortened(key)} = {shortened(_written(value))}: {remedy}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, self.value, self.remedy)  # so that it can travel between ranks

    def under(self, prefix: str) -> UserError:
        """Return the same error, its key placed below `prefix`."""
        return UserError(f"{prefix}.{self.key}" if prefix else self.key, self.value, self.remedy)

    def in_case(self, title: str) -> UserError:
        """Return the same error with the case of a sweep named; itself where another rank has named it."""
        place = f"(in the case {title})"
        named = self.remedy.endswith(place)
        return self if named else type(self)(self.key, self.value, f"{self.remedy} {place}")


def no_memory(error: BaseException) -> str:
    """Return in words that there was no memory for an array or a tensor, if an exception says so."""
    words = one_line(str(error))
    known = isinstance(error, MemoryError) or any(text in words.lower() for text in NO_MEMORY)
    return f"this machine has no memory for that ({words[:120]})" if known else ""


@contextmanager
def within_memory(key: str, value: Any) -> Iterator[None]:
    """Raise `UserError` in place of the exception where what is made inside is too large for this machine.

    Args:
        key: the configuration key, or section, that asks for it.
        value: what it says.
    """
    try:
        yield
    except (MemoryError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, UserError) or not (what := no_memory(error)):
            raise
        raise UserError(key, value, f"{what}; take smaller numbers") from error


class MethodError(UserError):
    """A method's hook returned, or asked for, what cannot be. The user's method is at fault.

    Args:
        key: class and hook, as `FedAvg.aggregate`.
        value: what is wrong, in words.
        remedy: what to do about it.
    """

    def __init__(self, key: str, value: str, remedy: str) -> None:
        super().__init__(key, value, remedy)
        self.args = (one_line(f"{key}: {value}; {remedy}"),)


class NotFinite(MethodError):
    """An upload holds NaN or infinity: the one such error that need not be the method's fault."""


class Missing(KeyError):
    """A method asked for something by a name that is not there.

    Args:
        what: what is missing.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(what, remedy)

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class CodeFailed(RuntimeError):
    """User code raised an exception. Rank 0 shows its traceback once, from that code on, then one line.

    Args:
        text: where, and what was raised.
        trace: the traceback; empty for none.
        code: the exit code.
    """

    def __init__(self, text: str, trace: str = "", code: int = 1) -> None:
        self.text, self.trace, self.code = text, trace, code
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.trace, self.code)  # so that it can travel between ranks


class StoppedEarly(CodeFailed):
    """A run was asked to stop before its first step, in a part of which nothing is kept.

    Rank 0 raises it, and the others hear of it as of an error.

    Args:
        command: with which the run goes on.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        super().__init__(f"stopped before the first step; go on with: {command}", code=STOPPED)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.command,)


def trace_beyond(error: BaseException, place: str) -> str:
    """Return the traceback of an exception from the first frame on that lies outside of a file or folder."""
    shown = traceback.TracebackException.from_exception(error)
    frames = list(shown.stack)
    while frames and frames[0].filename.startswith(place):
        frames.pop(0)
    shown.stack = traceback.StackSummary.from_list(frames or list(shown.stack))
    return "".join(shown.format(chain=False))


def _written(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list in itself
        return f"a {type(value).__name__}"


def shortened(text: str, most: int = 200) -> str:
    """Return a text of at most so many characters, its middle left out."""
    half = most // 2 - 2
    return text if len(text) <= most else f"{text[:half]} .. {text[-half:]}"


def one_line(text: str) -> str:
    """Return a text on one line: line breaks as spaces, other characters that cannot be printed escaped."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise `UserError(key, value, remedy)` unless `condition` holds."""
    if not condition:
        raise UserError(key, value, remedy)


def nearest(word: str, known: list[str]) -> str:
    """Say which of `known` is meant: the nearest name if one is near, otherwise all of them."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(set(known)))}"


class Stopped(Exception):
    """A run ended before its last step because it was asked to, its state written.

    Args:
        step: server steps taken.
        folder: of the run.
        written: the last step whose state could be written, where that is not `step`; 0 for none.
    """

    def __init__(self, step: int, folder: str, written: int | None = None) -> None:
        self.step, self.folder, self.written = step, folder, written
        state = (
            "state written" if written is None else f"the last state that was written is of step {written}"
        )
        more = " --from-start" if written == 0 else ""
        super().__init__(f"stopped after step {step}, {state}; go on with: mpifl resume {folder}{more}")
