"""Clusters as neighbourhoods: clients with the same set of linked clients share the average over that set."""

from __future__ import annotations

import numpy as np

from mpifl.core.mixing import Mixing, Plan
from mpifl.core.types import Notes, Server

from .grouping import neighbourhoods


def neighbourhood_plan(server: Server, notes: Notes, linked: np.ndarray) -> Plan:
    """Return the plan that gives each distinct neighbourhood its average, weighted by samples.

    Clients that never took part keep the initial row. The memo gets `linked` [N, N] and `labels` [N].

    Args:
        linked: bool [m, m] over the reports, reflexive.
    """
    num_clients = len(server.assign)
    ids = neighbourhoods(linked)  # [m], by first appearance
    num_rows = int(ids.max()) + 1
    first = np.array([np.flatnonzero(ids == k)[0] for k in range(num_rows)])
    weights = linked[first] * notes.num_samples.astype(np.float64)  # [K, m]
    weights = weights / weights.sum(1, keepdims=True)
    unseen = np.setdiff1d(np.arange(num_clients), notes.client)
    keep, assign = None, server.assign.copy()
    if len(unseen):
        weights = np.vstack([weights, np.zeros(len(notes))])
        keep = np.zeros((num_rows + 1, len(server.tables["model"])))
        keep[-1, server.assign[unseen[0]]] = 1.0
    assign[notes.client], assign[unseen] = ids, num_rows
    everyone = np.eye(num_clients, dtype=np.uint8)
    everyone[np.ix_(notes.client, notes.client)] = linked
    labels = num_rows + np.arange(num_clients)
    labels[notes.client] = ids
    memo = {**server.memo, "linked": everyone, "labels": labels}
    return Plan([Mixing(weights, keep=keep)], assign=assign, memo=memo)


def neighbourhood_labels(server: Server) -> np.ndarray:
    """Return the cluster of each client [N]; a client never seen is alone."""
    return server.memo.get("labels", np.arange(len(server.assign)))
