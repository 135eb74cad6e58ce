"""The finished samples that were asked for last, within a limit of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from mpifl.core.federation import Split


class Recent:
    """Keeps what `read` returned, until more recent splits need the room.

    Args:
        limit: bytes, 0 to keep nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._splits: OrderedDict[Hashable, Split] = OrderedDict()

    def get(self, address: Hashable, read: Callable[[], Split]) -> Split:
        """Return the split at `address`, read anew if it is not at hand."""
        if address in self._splits:
            self._splits.move_to_end(address)
            return self._splits[address]
        split = read()
        if (size := _bytes(split)) <= self.limit:
            self._splits[address] = split
            self.held += size
            while self.held > self.limit:
                _, oldest = self._splits.popitem(last=False)
                self.held -= _bytes(oldest)
        return split


def _bytes(split: Split) -> int:
    return split.x.nbytes + split.y.nbytes
