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
    from .server_step import Stepper

Uploads = Mapping[str, list[torch.Tensor]]


class FingerprintRound:
    """Takes the one-shot statistics of clients for a stepper.

    Args:
        absent: clients that are not there before training.
    """

    def __init__(self, stepper: Stepper, absent: np.ndarray) -> None:
        self.stepper, self.absent = stepper, absent
        self._shown: Mapping[str, torch.Tensor] = {}  # what all download; on rank 0

    def initial_clients(self) -> np.ndarray:
        """Return who gives statistics before training: all, where nobody can be taken in later; on rank 0."""
        stepper = self.stepper
        if not stepper.transport.is_server:
            return np.zeros(0, np.int64)
        if not (stepper.admits_new_clients and stepper.algorithm.needs.newcomers):
            return np.arange(len(stepper.sizes))
        present = np.setdiff1d(np.arange(len(stepper.sizes)), self.absent)
        with deciding(stepper.algorithm, "initial_clients") as where:
            chosen = stepper.algorithm.initial_clients(stepper.problem, present, stepper.seed.of("founders"))
            check_clients(where, chosen, present)
        return chosen

    def assign_new_clients(self, server: Server | None, cohort: np.ndarray) -> Server | None:
        """Return the server after it took in the new_clients of a cohort."""
        stepper, new_clients = self.stepper, None
        if server is not None:
            with deciding(stepper.algorithm, "new_clients", f"step {server.version + 1}") as where:
                new_clients = stepper.algorithm.new_clients(server, cohort)
                check_clients(where, new_clients, cohort)
        new_clients = stepper.transport.bcast(new_clients, "orders")
        if not len(new_clients):
            return server
        fingerprints, uploads = self.take(new_clients, server)
        plan = None
        if server is not None and fingerprints is not None:
            with stepper.watch("cluster"):
                plan = stepper.planned(
                    "assign_new_clients", server, fingerprints, stepper.algorithm.assign_new_clients
                )
        return self.mixed(server, plan, uploads)

    def take(self, clients: np.ndarray, server: Server | None) -> tuple[Notes | None, Uploads]:
        """Return the statistics of `clients` on rank 0, and what this rank's clients sent with them."""
        stepper, task_batches = self.stepper, None
        step = 0 if server is None else server.version + 1
        if stepper.transport.is_server:
            shown, version = self._show(), max(step - 1, 0)
            widths = {name: rows.shape[1] for name, rows in shown.items()}
            all_rows = {name: tuple(range(len(rows))) for name, rows in shown.items()}
            reads, costs = dict.fromkeys(clients.tolist(), all_rows), stepper.sizes[clients, 0]
            stepper.ledger.add_reads(step, reads, widths)
            compared = self._compared(server)
            task_batches = stepper.task_batches(step, clients, reads, costs, version, compared=compared)
        tasks = stepper.scatter_tasks(task_batches)
        headers, uploads = stepper.worker.run(tasks, fingerprint=True)
        notes = stepper.gather_reports(tasks.step, headers)
        if name := stepper.algorithm.needs.fingerprint_gram or "":
            notes = stepper.with_gram(notes, uploads, name)
        return notes, uploads

    def _compared(self, server: Server | None) -> tuple[str, int] | None:
        """Return the table whose rows a new client's statistics are measured against, and their number."""
        name = self.stepper.algorithm.needs.fingerprint_distance
        return self.stepper.compared(server, name) if server is not None else None

    def _show(self) -> Mapping[str, torch.Tensor]:
        """Publish what all download for their statistics, made once."""
        stepper = self.stepper
        if not self._shown:
            with stepper.watch("cluster"):
                with deciding(stepper.algorithm, "shows") as where:
                    shown = stepper.algorithm.shows(stepper.problem, stepper.seed.of("shows"))
                    check_tables(where, shown)
                self._shown = shown
            stepper.tables.publish(self._shown)
        return self._shown

    def mixed(self, server: Server | None, plan: Plan | None, uploads: Uploads) -> Server | None:
        """Return the server after a plan outside the steps: its version stays."""
        stepper = self.stepper
        with stepper.watch("reduce"):
            changed = stepper.mixer.mix(
                plan.mixings if plan else None, stepper.upload_info if plan else None, uploads
            )
        if server is None or plan is None:
            return None
        new = replace(apply_plan(server, plan, {**server.tables, **changed}), version=server.version)
        stepper.tables.publish(new.tables)
        return new
