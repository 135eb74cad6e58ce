"""Callbacks: user objects whose methods are called on rank 0 as a run proceeds.

A callback is any object that has at least one of the methods in `HOOKS`:

    on_start(info: RunInfo)            before the first step, or the first step after a resume
    on_round(done: Round)              after each server step
    on_evaluation(found: Evaluation)   after each evaluation
    on_end(run: Run)                   once the run folder is complete
    on_stop(reason: str)               instead of on_end, if the run ends early or the callback failed

The arguments are the read-only values of `run_events`. If `on_round` or `on_evaluation` returns `mpifl.STOP`,
the run ends after that step, and is complete. Callbacks do not otherwise affect the digest, the identity or
the label of a run. If a callback raises an exception, the run saves its state and ends after that step.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from mpifl.core import torch_state
from mpifl.core.conversion import untyped
from mpifl.core.errors import CodeFailed, UserError, require, trace_beyond
from mpifl.core.imports import load_object
from mpifl.supervision.logging import warn

from .run_events import STOP
from .trackers import CALLBACKS, Tracker

KEY = "output.callbacks"
HOOKS = ("on_start", "on_round", "on_evaluation", "on_end", "on_stop")
Result = TypeVar("Result")
ENDING = ("on_round", "on_evaluation")  # those that may return `STOP`


class CallbackFailed(CodeFailed):
    """A callback raised an exception; functions of Python raise that exception itself, see `raising_causes`.

    Args:
        text: place and description of the exception.
        trace: the traceback; empty for none.
        cause: the exception; None for one that ends the process, and on ranks to which it could not be sent.
    """

    def __init__(self, text: str, trace: str = "", cause: Exception | None = None) -> None:
        self.cause = cause
        super().__init__(text, trace)

    def __reduce__(self) -> tuple[Any, ...]:
        try:  # an exception whose arguments are not those of its class does not survive the way
            cause = pickle.loads(pickle.dumps(self.cause))
        except Exception:
            cause = None
        return type(self), (self.text, self.trace, cause)


def raising_causes(work: Callable[[], Result]) -> Result:
    """Return what `work` returns; raise the exception of a callback itself instead of `CallbackFailed`.

    It keeps its type, cause and traceback, and gets a note on the callback and on what happened to the run,
    and the `CallbackFailed` as an attribute `failed`.
    """
    try:
        return work()
    except CallbackFailed as error:
        if (cause := error.cause) is None:
            raise
        cause.add_note(error.text)
        with suppress(AttributeError, TypeError):
            cause.failed = error  # type: ignore[attr-defined]
    raise cause  # outside of the handler, which would replace its context


class Callbacks:
    """Calls the callbacks of a run; on rank 0.

    After a callback has raised an exception, only its `on_stop` is still called. The other callbacks are
    called until the run ends.

    Args:
        named: pairs of the name used in messages and the callback object.
        originals: PyTorch as it was before they were made.

    Attributes:
        failure: the first exception that a callback raised, and where; None while there is none.
        asked: name of the first callback that returned `STOP`; empty while there is none.
    """

    def __init__(
        self, named: Sequence[tuple[str, Any]], originals: torch_state.Originals | None = None
    ) -> None:
        self.named, self._originals = tuple(named), originals or torch_state.Originals()
        self.failure: UserError | CallbackFailed | None = None
        self.asked = ""
        self._broken: set[int] = set()  # indices in `named`
        self._ended: set[int] = set()

    def call(self, hook: str, value: Any, when: str) -> None:
        """Call a hook of every callback that has not failed.

        Args:
            hook: one of `HOOKS`.
            value: its argument.
            when: time of the call for error messages, such as `after step 3`.
        """
        for place, (name, callback) in enumerate(self.named):
            method = getattr(callback, hook, None)
            if place in self._broken:
                continue
            try:
                if method is not None:
                    with torch_state.kept():
                        answer = method(value)
                    if answer is STOP and hook in ENDING:
                        self.asked = self.asked or name
                    elif answer is STOP:
                        remedy = f"returns STOP, which only {' and '.join(ENDING)} may, after a step"
                        raise UserError(KEY, f"{name}.{hook}", remedy)
                    if self.failure is None and hook != "on_end":
                        self._originals.check(f"callback {name}.{hook}")
                if hook == "on_end":
                    self._ended.add(place)
            except (Exception, SystemExit) as error:
                failure: UserError | CallbackFailed
                if isinstance(error, UserError):
                    failure = error
                else:
                    text = f"callback {name}.{hook}, {when}: {type(error).__name__}: {error}"
                    cause = error if isinstance(error, Exception) else None
                    failure = CallbackFailed(text, trace_beyond(error, __file__), cause)
                self.failure = self.failure or failure
                self._broken.add(place)

    def check(self, state: str) -> None:
        """Raise the first exception of a callback, if any.

        Args:
            state: text on what happened to the run, appended to the message.

        Raises:
            UserError: the callback raised a `UserError`.
            CallbackFailed: the callback raised any other exception.
        """
        if isinstance(self.failure, CallbackFailed):
            raise CallbackFailed(f"{self.failure.text}; {state}", self.failure.trace, self.failure.cause)
        if self.failure is not None:
            raise UserError(self.failure.key, self.failure.value, f"{self.failure.remedy}; {state}")

    def stop(self, reason: str) -> None:
        """Call `on_stop` of all callbacks that have not completed `on_end`; exceptions become warnings."""
        for place, (name, callback) in enumerate(self.named):
            if place in self._ended:
                continue
            try:
                getattr(callback, "on_stop", lambda reason: None)(reason)
            except (Exception, SystemExit) as error:
                warn(f"callback {name}.on_stop: {type(error).__name__}: {error}")


# -- by name -------------------------------------------------------------------------------------------------


def check_entries(entries: Sequence[Any]) -> None:
    """Check the entries of `output.callbacks` without constructing callbacks of the user's classes.

    Raises:
        UserError: an entry is neither a name nor a mapping with a name, the name is unknown, the callback has
            none of the hooks, its options do not fit, or a package is missing.
    """
    for entry in entries:
        name, found, options = _found(entry)
        if _is_tracker(found):
            _make(name, found, options)
        elif isinstance(found, type) or not options:  # what a function returns is known only after the call
            _check_hooks(name, found)


def made(entries: Sequence[Any], given: Sequence[Any] = ()) -> Callbacks:
    """Return the callbacks of a run.

    Args:
        entries: the entries of `output.callbacks`.
        given: further callback objects.

    Raises:
        UserError: as in `check_entries`; or a callback is a class instead of an object, or has none of the
            hooks; or making one has replaced functions of PyTorch.
        CodeFailed: the constructor of a callback raised an exception.
    """
    named, originals = [], torch_state.Originals()
    for entry in entries:
        name, found, options = _found(entry)
        named.append((name, _make(name, found, options) if isinstance(found, type) or options else found))
    named += [(_title(callback), callback) for callback in given]
    for name, callback in named:
        require(not isinstance(callback, type), KEY, name, "is a class; give an object of it")
        _check_hooks(name, callback)
    originals.check("callbacks: making them")
    return Callbacks(named, originals)


def _make(name: str, found: Any, options: Mapping[str, Any]) -> Any:
    try:
        return found(**_as_asked(found, options))
    except UserError as error:
        raise error.under(f"{KEY}.{name}") from error
    except Exception as error:
        raise CodeFailed(
            f"callback {name}: {type(error).__name__}: {error}", trace_beyond(error, __file__)
        ) from error


def _check_hooks(name: str, callback: Any) -> None:
    there = any(callable(getattr(callback, hook, None)) for hook in HOOKS)
    require(there, KEY, name, f"has none of the methods {', '.join(HOOKS)}")


def _title(callback: Any) -> str:
    kind = callback if isinstance(callback, type) else type(callback)
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(entry: Any) -> tuple[str, Any, dict[str, Any]]:
    """Return the name of an entry, its class or object, and its options."""
    known = "name one of {}, or package.module:Name, or a mapping with name and options"
    tree = {"name": entry} if isinstance(entry, str) else entry
    if not (isinstance(tree, Mapping) and isinstance(tree.get("name"), str)):
        raise UserError(KEY, entry, known.format(", ".join(CALLBACKS.known())))
    name, options = tree["name"], {str(k): v for k, v in tree.items() if k != "name"}
    if ":" not in name and name not in CALLBACKS:
        raise UserError(KEY, name, known.format(", ".join(CALLBACKS.known())))
    found = load_object(name, KEY) if ":" in name else CALLBACKS.load(name, KEY)
    if _is_tracker(found):
        found.require_package()
    if options or isinstance(found, type):
        require(callable(found), KEY, name, "takes no options; name a class or a function")
        try:
            inspect.signature(found).bind(**options)
        except TypeError as error:
            asked = ", ".join(inspect.signature(found).parameters) or "none"
            raise UserError(KEY, entry, f"{error}; its options: {asked}") from error
        except ValueError:  # a class without a signature
            pass
    return name, found, options


def _is_tracker(found: Any) -> bool:
    """Return whether a class logs to an experiment tracker, whose library may be missing."""
    return isinstance(found, type) and issubclass(found, Tracker)


def _as_asked(found: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as what they look like, or as texts where a class or function asks for a text."""
    try:
        asked = {p.name: str(p.annotation) for p in inspect.signature(found).parameters.values()}
    except ValueError:  # a class without a signature
        asked = {}
    return {k: v if re.search(r"\bstr\b", asked.get(k, "")) else untyped(v) for k, v in options.items()}
