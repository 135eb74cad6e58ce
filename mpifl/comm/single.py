"""The transport of one process, the reference for that of MPI."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .transport import MpiTraffic, Transport, bytes_of, check_block, check_parts


class Single(Transport):
    """One process: collectives return their argument."""

    def __init__(self) -> None:
        self.rank, self.size, self.nodes, self.traffic = 0, 1, (0,), MpiTraffic()
        self.names, self.numbers, self.lost = (f"pid {os.getpid()}",), (0,), []
        self.last_call = time.monotonic()

    def scatter(self, values: Sequence[Any] | None, purpose: str) -> Any:
        """Return the only value."""
        self.last_call = time.monotonic()
        assert values is not None
        return values[0]

    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Return the only value."""
        self.last_call = time.monotonic()
        return [value]

    def scatter_rows(
        self, values: Sequence[Any] | None, rows: np.ndarray | None, counts: Sequence[int], purpose: str
    ) -> tuple[Any, memoryview]:
        """Return the only value, and all rows."""
        assert rows is not None
        return self.scatter(values, purpose), bytes_of(rows)

    def gather_rows(self, value: Any, rows: bytes, purpose: str) -> tuple[list[Any], list[memoryview]] | None:
        """Return the only value, and its rows."""
        self.last_call = time.monotonic()
        return [value], [memoryview(rows)]

    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Return the rows of this process."""
        return self.traffic.rows(self.rank)

    def barrier(self) -> None:
        """Return at once."""

    def final_barrier(self) -> bool:
        """Return True."""
        return True

    def Bcast(self, block: torch.Tensor, purpose: str, dtype: torch.dtype = torch.float32) -> None:
        """Leave the block as it is."""
        check_block(block, purpose, dtype)

    def Reduce(self, block: torch.Tensor, purpose: str, dtype: torch.dtype = torch.float32) -> None:
        """Leave the block as it is."""
        check_block(block, purpose, dtype)

    def Gatherv(
        self, block: torch.Tensor, counts: Sequence[int], purpose: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor | None:
        """Return the block."""
        check_block(block, purpose, dtype, (counts[0], None))
        return block

    def Reduce_scatter(
        self, block: torch.Tensor, counts: Sequence[int], purpose: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the block."""
        check_block(block, purpose, dtype, (sum(counts), None))
        return block

    def Alltoallv(
        self,
        block: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        purpose: str,
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the part of the block that is sent."""
        check_block(block, purpose, torch.float32, (sum(sent) if starts is None else None,))
        if starts is None:
            return block
        check_parts(len(block), sent, starts, purpose)
        return block[starts[0] : starts[0] + sent[0]]

    def Allgatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Return the block."""
        check_block(block, purpose, torch.float32, (counts[0],))
        return block

    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Raise: one process has no other rank."""
        raise NotImplementedError

    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Return None."""
        return None

    def regroup(self) -> tuple[int, ...]:
        """Raise: one process has no other rank."""
        raise NotImplementedError

    def abort(self, code: int) -> None:
        """End the process."""
        os._exit(code)
