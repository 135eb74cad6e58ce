"""Waiting without burning a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def patiently(ready: Callable[[], Any]) -> Any:
    """Return the first true answer of `ready`, asking ever less often.

    Sleeps grow to 2 % of the wait, 2 ms at most.
    """
    start = time.perf_counter()
    while not (answer := ready()):
        waited = time.perf_counter() - start
        if waited > 1e-4:
            time.sleep(min(2e-3, 0.02 * waited))
    return answer
