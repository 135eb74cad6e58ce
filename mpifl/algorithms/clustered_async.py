"""Asynchronous clustered averaging: the clusters of an earlier run, then FedAsync inside each cluster.

Our own combination, from no paper. A short synchronous run of a clustering method (EMD-CFL, FLT or any other)
finds the labels and writes them to `clusters.csv` in its run folder. Here every upload is blended into its
cluster's model as in FedAsync (Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020): w_c
<- (1 - alpha_t) w_c + alpha_t w_k, alpha_t = alpha s(t - tau), with s(x) = (x + 1)^-a or another of
FedAsync's staleness functions. With one cluster this is FedAsync.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.method import Key, Notes, Plan, ProblemInfo, Server
from mpifl.core.mixing import in_turn

from .fedasync import BlendedUploads


@dataclass(frozen=True)
class ClusteredAsync(BlendedUploads):
    """One row per cluster of an earlier run.

    Attributes:
        clusters: a run folder, or a CSV file with the columns client and cluster; empty: one cluster.
    """

    clusters: str = ""

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` unless there is one label for each client."""
        read_labels(self.clusters, problem.num_clients)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all clusters from the common model."""
        labels = read_labels(self.clusters, problem.num_clients)
        return problem.server(problem.alike(int(labels.max()) + 1), labels)

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return true for all clients: the earlier run clustered them."""
        return np.ones_like(visited)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Blend each upload into its cluster, one after the other."""
        own = np.arange(len(server.tables["model"]))[:, None] == server.assign[notes.client]  # [K, m]
        return Plan([in_turn(self.rates(notes.staleness) * own, order=notes.arrival)])


def read_labels(place: str, num_clients: int) -> np.ndarray:
    """Return the cluster [N] of each client, numbered from 0 in order of appearance.

    Raises:
        UserError: the file is missing, lacks a column, or does not hold exactly the clients 0 to N - 1.
    """
    if not place:
        return np.zeros(num_clients, np.int64)
    path, why = Path(place), "there is no such file or run folder"
    if path.is_dir():
        path /= "clusters.csv"
        why = "has no clusters.csv: use the folder of a finished run with output.clients: all"
    require(path.is_file(), "clusters", place, why)
    with path.open() as lines:
        try:
            found = {int(row["client"]): row["cluster"] for row in csv.DictReader(lines)}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("clusters", place, "needs the columns client and cluster") from error
    why = "it belongs to another population, or its run had output.clients: sample"
    remedy = f"its clients are not 0 to {num_clients - 1}: {why}"
    require(sorted(found) == list(range(num_clients)), "clusters", place, remedy)
    names = {name: number for number, name in enumerate(dict.fromkeys(found[k] for k in range(num_clients)))}
    return np.array([names[found[k]] for k in range(num_clients)], np.int64)
