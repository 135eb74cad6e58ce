"""One-shot statistics: the initial_clients' before training, a new client's before it first trains.

Shares the step's way of dealing tasks, gathering notes and mixing. Every rank calls; rank 0 decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpifl.core.algorithm import apply_plan
from mpifl.core.mixing import Plan
from mpifl.core.types import Notes, Server

from .hooks import check_clients, check_tables, deciding

if TYPE_CHECKING:
    from .server_step import ServerStep

Uploads = Mapping[str, list[torch.Tensor]]


class FingerprintRound:
    """Takes the one-shot statistics of clients for a server_step.

    Args:
        absent: clients that are not there before training.
    """

    def __init__(self, server_step: ServerStep, absent: np.ndarray) -> None:
        self.server_step, self.absent = server_step, absent
        self._shown: Mapping[str, torch.Tensor] = {}  # what all download; on rank 0

    def initial_clients(self) -> np.ndarray:
        """Return who gives statistics before training: all, where nobody can be taken in later; on rank 0."""
        server_step = self.server_step
        if not server_step.transport.is_server:
            return np.zeros(0, np.int64)
        if not (server_step.admits_new_clients and server_step.algorithm.needs.newcomers):
            return np.arange(len(server_step.sizes))
        present = np.setdiff1d(np.arange(len(server_step.sizes)), self.absent)
        with deciding(server_step.algorithm, "initial_clients") as where:
            chosen = server_step.algorithm.initial_clients(
                server_step.problem, present, server_step.seed.of("founders")
            )
            check_clients(where, chosen, present)
        return chosen

    def assign_new_clients(self, server: Server | None, cohort: np.ndarray) -> Server | None:
        """Return the server after it took in the new_clients of a cohort."""
        server_step, new_clients = self.server_step, None
        if server is not None:
            with deciding(server_step.algorithm, "new_clients", f"step {server.version + 1}") as where:
                new_clients = server_step.algorithm.new_clients(server, cohort)
                check_clients(where, new_clients, cohort)
        new_clients = server_step.transport.bcast(new_clients, "orders")
        if not len(new_clients):
            return server
        fingerprints, uploads = self.take(new_clients, server)
        plan = None
        if server is not None and fingerprints is not None:
            with server_step.watch("cluster"):
                plan = server_step.planned(
                    "assign_new_clients", server, fingerprints, server_step.algorithm.assign_new_clients
                )
        return self.mixed(server, plan, uploads)

    def take(self, clients: np.ndarray, server: Server | None) -> tuple[Notes | None, Uploads]:
        """Return the statistics of `clients` on rank 0, and what this rank's clients sent with them."""
        server_step, task_batches = self.server_step, None
        step = 0 if server is None else server.version + 1
        if server_step.transport.is_server:
            shown, version = self._show(), max(step - 1, 0)
            widths = {name: rows.shape[1] for name, rows in shown.items()}
            all_rows = {name: tuple(range(len(rows))) for name, rows in shown.items()}
            reads, costs = dict.fromkeys(clients.tolist(), all_rows), server_step.sizes[clients, 0]
            server_step.ledger.add_reads(step, reads, widths)
            compared = self._compared(server)
            task_batches = server_step.task_batches(step, clients, reads, costs, version, compared=compared)
        tasks = server_step.scatter_tasks(task_batches)
        headers, uploads = server_step.worker.run(tasks, fingerprint=True)
        notes = server_step.gather_reports(tasks.step, headers)
        if name := server_step.algorithm.needs.fingerprint_gram or "":
            notes = server_step.with_gram(notes, uploads, name)
        return notes, uploads

    def _compared(self, server: Server | None) -> tuple[str, int] | None:
        """Return the table whose rows a new client's statistics are measured against, and their number."""
        name = self.server_step.algorithm.needs.fingerprint_distance
        return self.server_step.compared(server, name) if server is not None else None

    def _show(self) -> Mapping[str, torch.Tensor]:
        """Publish what all download for their statistics, made once."""
        server_step = self.server_step
        if not self._shown:
            with server_step.watch("cluster"):
                with deciding(server_step.algorithm, "shows") as where:
                    shown = server_step.algorithm.shows(server_step.problem, server_step.seed.of("shows"))
                    check_tables(where, shown)
                self._shown = shown
            server_step.tables.publish(self._shown)
        return self._shown

    def mixed(self, server: Server | None, plan: Plan | None, uploads: Uploads) -> Server | None:
        """Return the server after a plan outside the steps: its version stays."""
        server_step = self.server_step
        with server_step.watch("reduce"):
            changed = server_step.mixer.mix(
                plan.mixings if plan else None, server_step.upload_info if plan else None, uploads
            )
        if server is None or plan is None:
            return None
        new = replace(apply_plan(server, plan, {**server.tables, **changed}), version=server.version)
        server_step.tables.publish(new.tables)
        return new
