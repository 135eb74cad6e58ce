"""Errors with a message for the user: the key, the value and the remedy."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

# phrases in errors of PyTorch and NumPy about tensors and arrays that are too large
NO_MEMORY = ("allocate memory", "size calculation overflowed", "overflow when unpacking", "array is too big")
INTERRUPTED = 130  # exit code after Ctrl-C, the same as in a shell
STOPPED = 75  # exit code of a run that was asked to stop and can go on; EX_TEMPFAIL of sysexits.h

# numbers and truths as they were written, which messages show without quotes
QUOTED = re.compile(r"(?:^|(?<=[\[{ ]))'([-+]?\.?\d[\w.+-]*|true|false|yes|no|on|off)'(?=$|[],:}])", re.I)

_names: dict[str, str] = {}  # `module:Class` -> its name in the first registry that has it


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
        """Return the same error with the case of a sweep named; itself if it names the case already."""
        place = f"(in the case {title})"
        named = self.remedy.endswith(place)
        return self if named else type(self)(self.key, self.value, f"{self.remedy} {place}")


def no_memory(error: BaseException) -> str:
    """Return a message if an exception says that an array or tensor is too large for memory, else ''."""
    words = one_line(str(error))
    known = isinstance(error, MemoryError) or any(text in words.lower() for text in NO_MEMORY)
    return f"this machine has no memory for that ({words[:120]})" if known else ""


@contextmanager
def within_memory(key: str, value: Any) -> Iterator[None]:
    """Raise `UserError` instead of the original exception if the block needs more memory than there is.

    Args:
        key: the configuration key, or section, that asks for so much.
        value: its value.
    """
    try:
        yield
    except (MemoryError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, UserError) or not (what := no_memory(error)):
            raise
        raise UserError(key, value, f"{what}; use smaller numbers") from error


class MethodError(UserError):
    """A method's hook returned, or asked for, something invalid. The user's method is at fault.

    Args:
        key: class and hook, such as `FedAvg.aggregate`.
        value: what is wrong, in words.
        remedy: what to do about it.
    """

    def __init__(self, key: str, value: str, remedy: str) -> None:
        super().__init__(key, value, remedy)
        self.args = (one_line(f"{key}: {value}; {remedy}"),)


class NotFinite(MethodError):
    """An upload holds NaN or infinity: the only `MethodError` that need not be the method's fault."""


class Missing(KeyError):
    """A method asked for something by a name that does not exist.

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
    """User code raised an exception. Rank 0 shows its traceback once, starting at that code, then one line.

    Args:
        text: place and description of the exception.
        trace: the traceback; empty for none.
        code: the exit code.
    """

    def __init__(self, text: str, trace: str = "", code: int = 1) -> None:
        self.text, self.trace, self.code = text, trace, code
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.trace, self.code)  # so that it can travel between ranks


class StoppedEarly(CodeFailed):
    """A run was asked to stop before its first step, in a phase whose work is not saved.

    Rank 0 raises it; the other ranks are told of it as of any error.

    Args:
        command: the command that continues the run.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        super().__init__(f"stopped before the first step; go on with: {command}", code=STOPPED)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.command,)


def trace_beyond(error: BaseException, place: str) -> str:
    """Return the traceback of an exception, starting at the first frame outside of a file or folder."""
    shown = traceback.TracebackException.from_exception(error)
    frames = list(shown.stack)
    while frames and frames[0].filename.startswith(place):
        frames.pop(0)
    shown.stack = traceback.StackSummary.from_list(frames or list(shown.stack))
    return "".join(shown.format(chain=False))


def code_failed(what: str, error: Exception) -> CodeFailed:
    """Return the error for an exception of a user's code, whose traceback starts outside of mpifl."""
    text = f"{what}: {type(error).__name__}: {error}"
    return CodeFailed(text, trace_beyond(error, str(Path(__file__).parents[1])))


def _written(value: Any) -> str:
    try:
        return QUOTED.sub(r"\1", repr(_as_given(value)))
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list in itself
        return f"a {type(value).__name__}"


def _as_given(value: Any) -> Any:
    """Return a value as configurations have it: lists, plain numbers, and sections as `_section` does."""
    if isinstance(value, type):
        return _names.get(address(value), value.__name__)
    if is_dataclass(value):
        return _section(value)
    numpy = sys.modules.get("numpy")  # this module is loaded before it, when a command starts
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {_as_given(name): _as_given(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_as_given, value)]
    return sorted(map(_as_given, value), key=str) if isinstance(value, (set, frozenset)) else value


def _section(value: Any) -> Any:
    """Return the name of an object of a catalogue, with the options that are not the usual ones, if any."""
    given = {}
    for f in fields(value):
        usual = f.default if f.default_factory is MISSING else f.default_factory()
        if repr(usual) != repr(one := getattr(value, f.name)):
            given[f.name] = _as_given(one)
    named = address(type(value)) in _names or not is_ours(value)
    return ({"name": name_of(value), **given} if given else name_of(value)) if named else given


def shortened(text: str, most: int = 200) -> str:
    """Return a text shortened to at most `most` characters by leaving out its middle."""
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


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, of Python or NumPy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_ours(value: object) -> bool:
    """Return whether the class of an object comes with mpifl, rather than from a user."""
    return type(value).__module__.startswith("mpifl.")


def address(cls: type) -> str:
    """Return `module:Class`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def note_name(where: str, name: str) -> None:
    """Note the name of `module:Class` in a registry for `name_of`; the first one counts."""
    _names.setdefault(where, name)


def name_of(value: object) -> str:
    """Return what a configuration calls an object: the name or the import path of its class.

    The name of the class if it stands in no registry and was not imported by its path or as a plug-in.
    """
    kind = type(value)
    return _names.get(address(kind)) or str(getattr(kind, "imported_as", kind.__name__))


def nearest(word: str, known: list[str]) -> str:
    """Return a hint at the name that was meant: the nearest of `known`, or all of them if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(set(known)))}"


class Stopped(Exception):
    """A run was asked to stop, and ended before its last step, after writing its state.

    Args:
        step: server steps taken.
        folder: the run folder.
        written: the last step whose state could be written; 0 if there is none. None: it is `step`.
        command: the command that continues the run; `mpifl resume` by default.
    """

    def __init__(
        self, step: int, folder: str, written: int | None = None, command: str | None = None
    ) -> None:
        self.step, self.folder, self.written = step, folder, written
        state = (
            "state written" if written is None else f"the last state that was written is of step {written}"
        )
        command = command or f"mpifl resume {folder}{' --from-start' if written == 0 else ''}"
        super().__init__(f"stopped after step {step}, {state}; go on with: {command}")


def first_of(names: Sequence[str], most: int = 6) -> str:
    """Return the first `most` of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
