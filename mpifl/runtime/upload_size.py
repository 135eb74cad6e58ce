"""The size of an upload before it is made, for clocks and rules that need to know when it will arrive."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.tables import read_rows
from mpifl.aggregation.update_filter import FilteredVisit
from mpifl.core.capabilities import NewClients, hooks_of, uses
from mpifl.core.devices import message_on, tensors_on
from mpifl.core.types import Message, Reads, Report, Server
from mpifl.traffic.encoding import hidden_bytes, statistics_size, time_stamp_bytes, upload_bytes
from mpifl.traffic.ledger import StatisticsSize

from .hook_errors import MOST_TRIED, ClientCall, first_that_works
from .protocol import Kind, ReportHeader, ReportTable, kind_of_visit
from .server_step import ServerStep

ANYBODY = -1  # stands for any client, if all send equally many bytes


class UploadSizes:
    """The sizes of uploads, measured once for each kind of visit, on the first client of that kind.

    Visits of one kind read equally many rows of each table. The measured client trains for 0 epochs. If
    failing clients are left out of the run, the next client of the kind replaces one that fails.

    Args:
        server_step: server step of rank 0.

    Attributes:
        expected: client -> bytes of the upload by which its visit is timed.
    """

    def __init__(self, server_step: ServerStep) -> None:
        self.server_step = server_step
        self._clear: dict[Kind, int] = {}
        self._hidden: dict[tuple[int, Kind], tuple[int, int]] = {}
        self._statistics: dict[int, StatisticsSize] = {}  # by client, or under `ANYBODY`
        self.expected: dict[int, int] = {}
        self._warned = False

    def clear(self, server: Server, reads: Reads, client: int) -> int:
        """Return the bytes of an upload, including a time stamp.

        Args:
            server: server whose rows are read; zeros replace rows that workers hold.
            reads: rows that the client downloads.
            client: the client.

        Raises:
            ClientError: the measured client failed, or, if failing clients are left out, all clients tried.
        """
        kind = kind_of_visit(reads, self.server_step.config.filters, client)
        if kind not in self._clear:
            self._clear[kind] = _clear_size(self.server_step, *_upload(self.server_step, server, kind))
        return self._clear[kind]

    def in_round(self, server: Server, reads: Reads, num_clients: int, client: int) -> tuple[int, int]:
        """Return the bytes of an upload, and those that a client downloads besides its rows.

        If uploads are hidden, all clients of the round count as one group. If clients choose among rows, the
        real groups are smaller and send less.

        Args:
            server: the current server.
            reads: rows that the client downloads.
            num_clients: number of clients in the round.
            client: the client.
        """
        filters = self.server_step.config.filters
        if not filters.hides_uploads:
            return self.clear(server, reads, client), 0
        kind = num_clients, kind_of_visit(reads, filters, client)
        if kind not in self._hidden:
            self._hidden[kind] = _hidden_size(self.server_step, server, *kind)
        return self._hidden[kind]

    def statistics(self, server: Server, cohort: np.ndarray) -> dict[int, StatisticsSize]:
        """Return client -> what it moves for one-shot statistics, for the clients that send them.

        Args:
            server: the server before the round.
            cohort: clients drawn for the round, or some of them.

        Raises:
            ClientError: as for `clear`.
        """
        algorithm = self.server_step.algorithm
        if not uses(algorithm, NewClients) or not len(cohort):
            return {}
        clients = self.server_step.sending_statistics(server, cohort).tolist()
        vary = hooks_of(algorithm, NewClients).fingerprints_vary
        for k in clients if vary else clients[:1]:
            if (whose := k if vary else ANYBODY) not in self._statistics:
                stand_ins = [other for other in clients[:MOST_TRIED] if other != k]
                self._statistics[whose] = _statistics_size(self.server_step, server, [k, *stand_ins])
        return {k: self._statistics[k if vary else ANYBODY] for k in clients}

    def compare(self, reports: ReportHeader | ReportTable) -> None:
        """Warn, once per run, if the size of an upload differs from the one by which its visit was timed."""
        if not self.expected or not reports.fresh or self._warned:
            return
        payload, needs = self.server_step.ledger.payload, self.server_step.algorithm.needs
        notes = {name: n for name, n in reports.note_sizes.items() if name not in reports.unsent}
        size: Any = sum(n for name, n in reports.bytes.items() if name not in reports.unsent)
        size += sum(payload.size(n, note=True) for n in notes.values())
        size += time_stamp_bytes(payload, needs.time_stamps)
        clients = np.atleast_1d(reports.client)
        for k, sent in zip(clients.tolist(), np.broadcast_to(size, clients.shape).tolist(), strict=True):
            if sent != self.expected.get(k, sent):
                timed = f"its visit is timed with {self.expected[k]}, as all are that read as many rows"
                self.warn(
                    f"network: client {k} uploads {sent} bytes, and {timed}; times of return are approximate"
                )
                return

    def warn(self, text: str) -> None:
        """Warn of sizes that are not exact, once per run."""
        if not self._warned:
            warnings.warn(text, stacklevel=3)
        self._warned = True

    def state_dict(self) -> list[Any]:
        """Return the measured sizes of uploads, in a form that JSON can hold."""
        return [[*item] for item in self._clear.items()]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restore the sizes."""
        self._clear = {tuple((name, count) for name, count in kind): size for kind, size in state}


def _hidden_size(server_step: ServerStep, server: Server, num_clients: int, kind: Kind) -> tuple[int, int]:
    """Return the sizes of a kind of visit; see `UploadSizes.in_round`."""
    c = server_step.config
    report, message = _upload(server_step, server, kind)
    down, up = hidden_bytes(c.payload, c.filters, report, message, num_clients)
    return _clear_size(server_step, report, message) + up, down


def _clear_size(server_step: ServerStep, report: Report, message: Message) -> int:
    """Return the bytes of an upload, including a time stamp."""
    c = server_step.config
    stamp = time_stamp_bytes(c.payload, c.algorithm.needs.time_stamps)
    return upload_bytes(c.payload, c.filters, report, message) + stamp


def _statistics_size(server_step: ServerStep, server: Server, clients: Sequence[int]) -> StatisticsSize:
    """Return what the first of `clients` that does not fail moves for one-shot statistics."""
    c, shown = server_step.config, server_step.publish_shown()

    def visit(k: int) -> Report:
        client = c.clients.client(k, step=server.version + 1, epochs=0, steps=None)
        with ClientCall(c.algorithm, "fingerprint", client=k, visit=0):
            there = tensors_on(shown, c.clients.device)
            return hooks_of(c.algorithm, NewClients).fingerprint(client, there, c.seed.of("size"))

    report = first_that_works(visit, clients, server.version + 1, c.drops, c.kept)
    return statistics_size(c.payload, shown, report)


def _upload(server_step: ServerStep, server: Server, kind: Kind) -> tuple[Report, Message]:
    """Return the report of a client of a kind after training for 0 epochs, and what it downloaded."""
    c, sharded = server_step.config, server_step.tables.sharded

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        if name in sharded:
            return torch.zeros(len(numbers), server_step.tables.width(name), dtype=torch.float32)
        return server.tables[name][numbers]

    def reads_of(k: int) -> Reads:
        return server_step.hooks.reads("reads", server, np.array([k]))[k]

    def visit(k: int) -> tuple[Report, Message]:
        reads = reads_of(k)
        vectors = {name: read_rows(rows, name, which) for name, which in reads.items()}
        client = c.clients.client(k, epochs=0, steps=None)
        message = message_on(Message(vectors, reads), c.clients.device)
        with ClientCall(c.algorithm, "local_update", client=k, visit=0):
            report, _ = c.algorithm.local_update(message, {}, client, c.seed.of("size"))
        trial = FilteredVisit(message, 0, c.seed.of("size"), c.filters.told())
        return c.filters.client(report, trial), message

    alike = (k for k in range(c.problem.num_clients) if kind_of_visit(reads_of(k), c.filters, k) == kind)
    tried = [*islice(alike, MOST_TRIED if c.drops else 1)]
    return first_that_works(visit, tried, server.version + 1, c.drops, c.kept)
