"""What clustering again costs the server when a few of many clients bring new evidence.

python tests/campaigns/reclustering.py [--clients 1000] [--new 10] [--turns 5] [--json FILE]

The table in docs/asynchrony.md. Each method decides `turns` times, on the calling thread alone; the processor
time of this thread is counted. Products of vectors, which all ranks compute, are given.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import apply_plan
from mpifl.core.errors import require
from mpifl.core.types import Server

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support import byhand
from support.measurements import command

GROUPS, PIXELS, CLASSES = 4, 784, 10


@dataclass
class Federation:
    """Some clients in four groups, of which the first bring new evidence.

    Attributes:
        N: number of clients.
        m: number of clients with new evidence.
        points: features of the clients [N, 50], whose products and distances stand for those of vectors.
        group: group of each client [N].
        random: draws the evidence.
    """

    N: int
    m: int

    def __post_init__(self) -> None:
        self.random, self.group = np.random.default_rng(0), np.arange(self.N) % GROUPS
        means = self.random.normal(size=(GROUPS, 50))
        self.points = means[self.group] + 0.3 * self.random.normal(size=(self.N, 50))

    def gram(self) -> np.ndarray:
        """Return the products of all features [N, N]."""
        return np.asarray(self.points @ self.points.T)

    def all(self, **columns: Any) -> Any:
        """Return notes of all clients."""
        return byhand.notes([1] * self.N, **columns)

    def new(self, **columns: Any) -> Any:
        """Return notes of the clients with new evidence."""
        return byhand.notes([1] * self.m, [*range(self.m)], **columns)

    def server(self, rows: int, state: Mapping[str, np.ndarray] | None = None, **tables: Any) -> Server:
        """Return a server with rows of one number, after three steps."""
        tables = {"model": torch.zeros(rows, 1), **tables}
        return Server(tables, self.group % rows, {"known": np.ones(self.N, bool), **(state or {})}, 3)


Decide = Callable[[], Any]  # one decision of the server


def joins(name: str, **options: Any) -> Callable[[Federation], Decide]:
    """Return a case of FedClust or FlexCFL: new clients are compared with the clusters."""

    def case(f: Federation) -> Decide:
        method = CATALOGUE[name](**options)
        server = f.server(5, signature=torch.zeros(GROUPS, 3), direction=torch.ones(GROUPS, 3))
        notes = f.new(row_distance=1 + f.random.random((f.m, GROUPS)), gram=np.eye(f.m))
        return lambda: method.assign_new_clients(server, notes)

    return case


def ifca(f: Federation) -> Decide:
    """Clients choose; the server averages."""
    method, notes = CATALOGUE["ifca"](num_clusters=GROUPS), f.new(cluster=f.group[: f.m])
    return lambda: method.aggregate(f.server(GROUPS), notes)


def feddrift(f: Federation) -> Decide:
    """Clients compare ten models."""
    method = CATALOGUE["feddrift"](max_models=10)
    state = dict(method.setup(byhand.problem([1] * f.N), None, byhand.KEY).algorithm_state)
    state |= {"losses": f.random.random((f.N, 10)), "compared": np.zeros(f.N, int), "used": np.zeros(10, int)}
    told = {"drift": np.zeros(f.m), "losses": f.random.random((f.m, 10)), "cluster": np.arange(f.m) % 10}
    return lambda: method.aggregate(f.server(10, state), f.new(**told))


def cfl(f: Federation) -> Decide:
    """A split of all clients in two."""
    method = CATALOGUE["cfl"](warmup=0, eps1=100, eps2=0, max_age=None)
    none = np.full((1, 2), -1)
    state = {"children": none, "cached": none, "cached_norm": np.zeros(1)}
    server = Server({"model": torch.zeros(1, 1), "update": torch.zeros(1, 1)}, 0 * f.group, state, 3)
    notes = f.all(gram=f.gram(), row_distance=np.ones((f.N, 1)))
    return lambda: method.aggregate(server, notes)


def flhc(f: Federation) -> Decide:
    """Linkage of all clients."""
    method = CATALOGUE["flhc"](rounds_before=3, threshold=3.0, max_age=None)
    notes = f.all(gram=f.gram())
    return lambda: method.aggregate(f.server(1), notes)


def emdcfl(f: Federation) -> Decide:
    """The server after a look of the new clients at all others."""
    apart = np.where(f.group[:, None] == f.group, 0.0, 1.0)
    looked = np.full((f.N, f.N), np.nan)
    looked[: f.m], looked[:, : f.m] = apart[: f.m], apart[:, : f.m]
    notes = f.all(distance=looked, peer=np.broadcast_to(1.0 * np.arange(f.N), (f.N, f.N)))
    return lambda: CATALOGUE["emdcfl"]().aggregate(f.server(GROUPS, {"distance": apart}), notes)


def fielding(f: Federation) -> Decide:
    """K-means of the labels' shares of all clients, K given."""
    method = CATALOGUE["fielding"](num_clusters=GROUPS, theta=0.0)
    kinds = f.random.dirichlet(np.ones(CLASSES), GROUPS)[f.group]
    shares = 0.9 * kinds + 0.1 * f.random.dirichlet(np.ones(CLASSES), f.N)
    problem = replace(byhand.problem([1] * f.N), num_classes=CLASSES)
    server = method.setup(problem, f.all(shares=shares), byhand.KEY)
    notes = f.new(shares=f.random.dirichlet(np.ones(CLASSES), f.m))
    return lambda: method.assign_new_clients(server, notes)


def ucfl(streams: int) -> Callable[[Federation], Decide]:
    """Return a case of UCFL: weights of all clients, and k-means of their rows unless `streams` is 0."""

    def case(f: Federation) -> Decide:
        method, G, n = CATALOGUE["ucfl"](streams=streams, keep_gradients=True), f.gram(), f.m
        d2 = ((f.points[:, None, :10] - f.points[None, :, :10]) ** 2).sum(2)
        state = {"apart": d2, "variance": np.full(f.N, 5.0), "num_samples": np.full(f.N, 9)}
        server = f.server(streams or f.N, {**state, "collaboration": np.eye(f.N)})
        notes = f.new(row_distance=np.sqrt(d2[:n]), gram=G[:n, :n], variance=np.full(n, 5.0))
        return lambda: method.assign_new_clients(server, notes)

    return case


def fesem(variant: str) -> Callable[[Federation], Decide]:
    """Return a case of FeSEM: one step of k-means (`flt`: a complete one) from centres at four clients."""

    def case(f: Federation) -> Decide:
        method = CATALOGUE["fesem"](num_clusters=GROUPS, variant=variant)
        rows = 2 * GROUPS if variant == "flt" else GROUPS
        apart = [np.linalg.norm(f.points - f.points[j % GROUPS], axis=1) for j in range(rows)]
        notes = f.all(gram=f.gram(), row_distance=np.stack(apart, 1))
        return lambda: method.aggregate(f.server(rows), notes)

    return case


def pacfl(noise: tuple[float, float], threshold: float) -> Callable[[Federation], Decide]:
    """Return a case of PACFL: two classes of images per client, three vectors of each.

    Args:
        noise: how far clients are from the vectors of their group, from least to most.
        threshold: angle up to which clusters merge.
    """

    def case(f: Federation) -> Decide:
        means = f.random.normal(size=(GROUPS, 2, PIXELS, 3))
        basis = np.full((f.N + f.m, PIXELS, 3 * CLASSES), np.nan, np.float32)
        for k, strength in enumerate(f.random.uniform(*noise, size=f.N + f.m)):
            drawn = means[k % GROUPS] + strength * f.random.normal(size=means[0].shape)
            basis[k, :, :6] = np.concatenate([np.linalg.qr(each)[0] for each in drawn], 1)
        method = CATALOGUE["pacfl"](threshold=threshold)
        server = method.setup(byhand.problem([1] * f.N), f.all(basis=basis[: f.N]), byhand.KEY)
        notes = f.new(basis=basis[f.N :])

        def decide() -> None:
            nonlocal server
            plan = method.assign_new_clients(server, notes)
            rows = len(plan.mixings[0].keep) if plan.mixings else len(server.tables["model"])
            server = apply_plan(server, plan, {"model": torch.zeros(rows, 1)})

        return decide

    return case


CASES: dict[str, Callable[[Federation], Decide]] = {
    "FedClust": joins("fedclust", num_clusters=GROUPS),
    "FlexCFL": joins("flexcfl", num_groups=GROUPS),
    "IFCA": ifca,
    "FedDrift": feddrift,
    "FeSEM emdcfl": fesem("emdcfl"),
    "FeSEM flt": fesem("flt"),
    "CFL": cfl,
    "FL+HC": flhc,
    "EMD-CFL": emdcfl,
    "Fielding": fielding,
    "UCFL, a mixture per user": ucfl(0),
    "UCFL, 4 streams": ucfl(4),
    "PACFL, groups apart": pacfl((0.3, 0.3), 40.0),
    "PACFL, groups that blur": pacfl((0.1, 1.2), 50.0),
}


def measure(clients: int, new: int, turns: int, options: Sequence[str]) -> dict[str, Any]:
    """Measure all methods, print the figures and return milliseconds by method.

    Args:
        clients: Number of clients.
        new: How many of them bring new evidence.
        turns: Number of decisions of each method.
        options: Keys of a configuration; there is none.
    """
    require(not options, "options", " ".join(options), "there is no configuration; leave them out")
    require(2 <= new <= clients // 2, "--new", new, f"use 2 to {clients // 2}, half of the clients")
    out: dict[str, Any] = {"clients": clients, "new": new, "ms": {}}
    for name, case in CASES.items():
        decide, taken = case(Federation(clients, new)), list[float]()
        decide()  # imports
        for _ in range(turns):
            begin = time.thread_time()
            decide()
            taken.append(1e3 * (time.thread_time() - begin))
        out["ms"][name] = {"median": statistics.median(taken), "low": min(taken), "high": max(taken)}
        print("{:26s} {median:8.1f} ms ({low:.1f} to {high:.1f})".format(name, **out["ms"][name]), flush=True)
    return out


if __name__ == "__main__":
    sys.exit(command(str(__doc__).splitlines()[0], measure, {"clients": 1000, "new": 10, "turns": 5}))
