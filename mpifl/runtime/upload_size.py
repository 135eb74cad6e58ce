"""The size of an upload before it is made, for clocks and rules that must know when it will arrive."""

from __future__ import annotations

import numpy as np
import torch

from mpifl.aggregation.tables import read_rows
from mpifl.core.devices import message_on
from mpifl.core.types import Message, Report, Server
from mpifl.traffic.encoding import sizes, time_stamp_bytes, upload_bytes

from .hook_errors import ClientCall, first_that_works
from .server_step import ServerStep


def upload_size(server_step: ServerStep, server: Server) -> int:
    """Return the bytes of an upload, time stamp included: those of client 0 after training for no epoch.

    Where clients that fail are left out, the next one that works stands in for client 0.

    Args:
        server_step: of rank 0.
        server: now; rows that workers hold count as zeros.
    """
    return _clear_size(server_step, *_upload(server_step, server))


def masked_sizes(server_step: ServerStep, server: Server, num_clients: int) -> tuple[int, int]:
    """Return the bytes of a masked upload, and of what a client downloads beside the rows that it reads.

    All clients of the round count as one group: where they choose among rows, groups are smaller and send
    less.

    Args:
        server_step: of rank 0.
        server: now.
        num_clients: of the round.
    """
    secure, payload = server_step.config.secure, server_step.config.payload
    assert secure is not None
    report, message = _upload(server_step, server)
    up, down = _clear_size(server_step, report, message) - _clear_vectors(server_step, report, message), 0
    for name, x in report.vectors.items():
        if name not in report.unsent:
            of_all = secure.bytes_of_round(num_clients, x.numel(), payload.header_bytes)
            down, up = down + of_all[0] // num_clients, up + of_all[1] // num_clients
    return up, down


def _clear_size(server_step: ServerStep, report: Report, message: Message) -> int:
    """Return the bytes of an upload that nobody hides, time stamp included."""
    c = server_step.config
    stamp = time_stamp_bytes(c.payload, c.algorithm.needs.time_stamps)
    return upload_bytes(c.payload, report, message, c.algorithm.statistics) + stamp


def _clear_vectors(server_step: ServerStep, report: Report, message: Message) -> int:
    """Return the bytes of the vectors of an upload that nobody hides."""
    c = server_step.config
    return sum(sizes(c.payload, report, message, c.algorithm.statistics).values())


def _upload(server_step: ServerStep, server: Server) -> tuple[Report, Message]:
    """Return what a client reports after training for no epoch, and what it had downloaded.

    Raises:
        ClientError: client 0 failed, or, where such clients are left out, some of them.
    """
    c, sharded = server_step.config, server_step.tables.sharded

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        if name in sharded:
            return torch.zeros(len(numbers), server_step.tables.width(name))
        return server.tables[name][numbers]

    def visit(k: int) -> tuple[Report, Message]:
        reads = server_step.hooks.reads("reads", server, np.array([k]))[k]
        vectors = {name: read_rows(rows, name, which) for name, which in reads.items()}
        client = c.clients.client(k, epochs=0, steps=None)
        message = message_on(Message(vectors, reads), c.clients.device)
        with ClientCall(c.algorithm, "local_update", client=k, visit=0):
            report, _ = c.algorithm.local_update(message, {}, client, c.seed.of("size"))
        return report, message

    return first_that_works(visit, range(c.problem.num_clients), server.version + 1, c.drops)
