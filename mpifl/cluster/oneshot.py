"""Clusters found once: FedAvg inside each, and newcomers who join later. PACFL, FedClust, FlexCFL.

The last row of table `model` is the initial model: unknown clients use it, and clusters founded by newcomers
start from it. Memo: `known` [N].
"""

from __future__ import annotations

import numpy as np
import torch

from mpifl.core.mixing import Plan, by_cluster, carry
from mpifl.core.types import Notes, Server, World


def clustered_server(world: World, clients: np.ndarray, labels: np.ndarray) -> Server:
    """Return the first server: `clients` [n] are known and in clusters `labels` [n]; all rows are alike."""
    num_rows = int(labels.max()) + 1
    assign = np.full(world.num_clients, num_rows)
    assign[clients] = labels
    memo = {"known": np.isin(np.arange(world.num_clients), clients)}
    return Server({"model": world.init(0)[None].expand(num_rows + 1, -1)}, assign, memo)


def clustered_plan(server: Server, notes: Notes) -> Plan:
    """Return the plan that averages each cluster by samples."""
    rows = server.assign[notes.client]
    return Plan([by_cluster(rows, len(server.tables["model"]), notes.num_samples)])


def joined(server: Server, clients: np.ndarray, labels: np.ndarray, **memo: np.ndarray) -> Plan:
    """Return the plan after `clients` [n] joined the clusters `labels` [n]; numbers beyond the old ones are
    new.
    """
    num_old = len(server.tables["model"]) - 1
    num_rows = max(num_old, int(labels.max()) + 1)
    keep = np.eye(num_rows + 1, num_old + 1)
    keep[num_old:, num_old] = 1.0
    assign = np.where(server.assign == num_old, num_rows, server.assign)
    assign[clients] = labels
    known = server.memo["known"].copy()
    known[clients] = True
    mixings = [carry(keep)] if num_rows > num_old else []
    return Plan(mixings, assign=assign, memo={**server.memo, "known": known, **memo})


def pulled(w: torch.Tensor, rate: float, *, normalised: bool = True) -> torch.Tensor:
    """Return the models `w` [k, d], each pulled towards all others: FlexCFL's inter-group step.

    w_j + sum_l (rate / ||w_l||) w_l, l != j; `normalised` divides by 1 + sum_l rate / ||w_l||.
    """
    w = w.double()
    scale = rate / w.norm(dim=1, keepdim=True)  # [k, 1]
    sums = w + (scale * w).sum(0) - scale * w
    return (sums / (1.0 + scale.sum() - scale) if normalised else sums).float()


def inherited(labels: np.ndarray, old: np.ndarray, num_old: int) -> np.ndarray:
    """Return `labels` [n] under the names of the clusters that their members had before.

    Args:
        old: cluster [n] of each before, -1 for newcomers. A group takes the name most of its old members
            have, the smallest of equals; a group of newcomers takes the next free number from `num_old` on.
    """
    out, free = np.empty(len(labels), np.int64), num_old
    for group in np.unique(labels):
        members = labels == group
        names = old[members & (old >= 0)]
        out[members] = np.bincount(names).argmax() if len(names) else free
        free += int(not len(names))
    return out
