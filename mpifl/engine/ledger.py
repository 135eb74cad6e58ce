"""What a real federation would have sent. Derived from what methods read and report, never typed in by a
method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NUMBER_BYTES = 4  # float32 and int32


@dataclass
class Entry:
    """Traffic of one step, direction and kind.

    Attributes:
        messages: unicast messages. bytes: their payload. group_messages, group_bytes: the same where a row
            that several clients read is sent once, to the group of its readers.
    """

    step: int
    direction: str
    kind: str
    messages: int = 0
    bytes: int = 0
    group_messages: int = 0
    group_bytes: int = 0


def count_numbers(value: Any) -> int:
    """Return how many numbers a note holds; NaN stands for none, such as the padding of a short list."""
    if isinstance(value, torch.Tensor):
        return int(value.numel())
    return int(np.size(value) - np.count_nonzero(np.isnan(value)))


class Ledger:
    """Bytes of the federation, by step, direction and kind, and per client."""

    def __init__(self, num_clients: int) -> None:
        self.entries: dict[tuple[int, str, str], Entry] = {}
        self.up = np.zeros(num_clients, np.int64)
        self.down = np.zeros(num_clients, np.int64)

    def _entry(self, step: int, direction: str, kind: str) -> Entry:
        return self.entries.setdefault((step, direction, kind), Entry(step, direction, kind))

    def add_up(self, step: int, kind: str, client: int, numbers: int, messages: int = 1) -> None:
        """Count `numbers` sent by a client."""
        entry, size = self._entry(step, "up", kind), numbers * NUMBER_BYTES
        entry.messages += messages
        entry.bytes += size
        entry.group_messages += messages
        entry.group_bytes += size
        self.up[client] += size

    def add_down(
        self, step: int, kind: str, client: int, numbers: int, messages: int = 1, groups: int = 1
    ) -> None:
        """Count `numbers` sent to a client by unicast; `groups` of the messages are its share of group
        casts.
        """
        entry, size = self._entry(step, "down", kind), numbers * NUMBER_BYTES
        entry.messages += messages
        entry.bytes += size
        entry.group_messages += groups
        entry.group_bytes += size * groups // max(messages, 1)
        self.down[client] += size

    def add_reads(
        self,
        step: int,
        client: int,
        reads: Mapping[str, tuple[int, ...] | np.ndarray],
        widths: Mapping[str, int],
        seen: set[tuple[str, int]],
    ) -> None:
        """Count the rows a client downloads; `seen` collects the rows already cast in this step."""
        for table, numbers in reads.items():
            count = 1 if isinstance(numbers, np.ndarray) else len(numbers)  # a mixture is one vector, for one
            new = set() if isinstance(numbers, np.ndarray) else {(table, k) for k in numbers} - seen
            seen |= new
            groups = 1 if isinstance(numbers, np.ndarray) else len(new)
            self.add_down(step, table, client, widths[table] * count, messages=count, groups=groups)

    def total(self, direction: str, step: int | None = None) -> int:
        """Return the unicast bytes of one direction, of one step or of the whole run."""
        chosen = (e for e in self.entries.values() if e.direction == direction and step in (None, e.step))
        return sum(e.bytes for e in chosen)

    def rows(self) -> list[dict[str, object]]:
        """Return one row per entry, ready for `ledger.csv`."""
        return [vars(self.entries[k]) for k in sorted(self.entries)]
