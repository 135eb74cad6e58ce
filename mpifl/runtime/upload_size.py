"""The size of an upload before it is made, for clocks and rules that must know when it will arrive."""

from __future__ import annotations

import torch

from mpifl.aggregation.tables import read_rows
from mpifl.core.devices import message_on
from mpifl.core.types import Message, Server
from mpifl.traffic.encoding import time_stamp_bytes, upload_bytes

from .server_step import ServerStep


def upload_size(server_step: ServerStep, server: Server) -> int:
    """Return the bytes of an upload, time stamp included: those of client 0 after training for no epoch.

    Args:
        server_step: of rank 0.
        server: now; rows that workers hold count as zeros.
    """
    c, sharded = server_step.config, server_step.tables.sharded

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        if name in sharded:
            return torch.zeros(len(numbers), server_step.tables.width(name))
        return server.tables[name][numbers]

    reads = c.algorithm.reads(server, 0)
    vectors = {name: read_rows(rows, name, which) for name, which in reads.items()}
    client = c.clients.client(0, epochs=0, steps=None)
    message = message_on(Message(vectors, reads), c.clients.device)
    report, _ = c.algorithm.local_update(message, {}, client, c.seed.of("size"))
    stamps = time_stamp_bytes(c.payload, c.algorithm.needs.time_stamps)
    return upload_bytes(c.payload, report, message) + stamps
