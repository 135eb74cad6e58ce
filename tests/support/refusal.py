"""What a user's error must say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpifl.core.errors import UserError


@contextmanager
def refusal_of(key: str, says: str | None = None) -> Iterator[None]:
    """Expect a block to be refused by a `UserError` about a key, with a remedy.

    Args:
        key: of the configuration, or the name of an argument.
        says: a pattern that its line contains.
    """
    with pytest.raises(UserError, match=says) as caught:
        yield
    assert caught.value.key == key
    assert caught.value.remedy, "a refusal says what to use instead"
