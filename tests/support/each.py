"""One test of a rule for many cases: all are tried, and those that fail are named together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
