"""One test of a rule for many cases: all are tried, and those that fail are named together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def check_each(check: Callable[..., None], cases: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
    """Make a check of each case.

    Args:
        check: raises if a case is wrong.
        cases: (name, arguments of the check).

    Raises:
        ExceptionGroup: what failed, each with the name of its case.
    """
    failed, every = [], [*cases]
    for name, arguments in every:
        try:
            check(*arguments)
        except pytest.fail.Exception as error:  # no `Exception`: `pytest.raises` that saw none
            failed.append(AssertionError(f"{name}: {error}"))
        except Exception as error:
            error.add_note(f"in the case {name}")
            failed.append(error)
    assert every, "there is no case"
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(every)} cases fail", failed)


def for_each(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], str] | Iterable[str] | None = None
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Make one test of a check of many cases that take no time; the arguments are those of `parametrize`.

    A check takes no fixture, and does not skip.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    listed = [(case,) if len(wanted) == 1 else tuple(case) for case in cases]
    if ids is None or callable(ids):
        ids = ["-".join(map(ids or repr, case)) for case in listed]
    labels = [*ids]

    def make(check: Callable[..., None]) -> Callable[[], None]:
        def one(*values: Any) -> None:
            check(**dict(zip(wanted, values, strict=True)))

        def test() -> None:
            check_each(one, zip(labels, listed, strict=True))

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(check, name))
        return test

    return make
