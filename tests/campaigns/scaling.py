"""One workload on 1 to n workers, and an extrapolation to many more.

    python tests/campaigns/scaling.py [--workload W1] [--ranks P] [--turns 5] [--json FILE] [--key value ...]

Strong scaling keeps the cohort, weak scaling keeps the visits per worker. The extrapolation is a sum of four
terms; the largest one is the bottleneck:

    training   visit_s * ceil(m / w)         visits are whole: the busiest of w workers has ceil(m / w);
                                             loading data and summing uploads are included
    server     once_s + rank_s * w           fitted to the rest of the measured rounds, w = 1..n
    ranks      tasks out, reports back       for each worker: rank 0's time, messages over the server's link
    network    trees of ceil(log2 P) levels  a broadcast of the model, a barrier, a reduction of int64 sums

The last two, and the bytes of registered clients, are computed as in `mpifl plan`, which forecasts them for
any configuration.

If ranks are numbered node by node, the first levels of such a tree lie within the nodes. A separate reduction
on each node before the one across nodes would have as many levels and send as much over the network.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.aggregation.collective_choice import REDUCE
from mpifl.aggregation.collective_costs import between, tree_levels
from mpifl.benchmarks.compare import check_rounds
from mpifl.benchmarks.turns import Job, scratch_folder
from mpifl.benchmarks.workloads import WORKLOADS
from mpifl.comm.mpi_startup import mpirun
from mpifl.core.errors import nearest, require
from mpifl.core.parameters import Layout
from mpifl.core.process import available_cores
from mpifl.core.progress import each
from mpifl.data import open_federation, prepare
from mpifl.experiment import loader
from mpifl.forecast.memory import CLIENT_BYTES
from mpifl.forecast.time import RANK_S, ranks_seconds
from mpifl.models import build_model
from mpifl.simulation.sampling import cohort_size

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.measurements import command

MANY = (16, 64, 256, 1024)
BUSY = ("train", "load", "visits", "report", "reduce")  # phases of a worker that are part of its visits
LATENCY_S, BYTES_S = 5e-6, 10e9  # of the network assumed in the extrapolation
PROCESS_BYTES = 280e6  # of rank 0, without registered clients
REGISTERED = (10**6, 10**7, 10**8)
LOAD = 1.0  # load of other programs above which a warning is printed


@dataclass(frozen=True)
class Model:
    """The seconds of a round as a function of the number of workers; the module docstring lists the terms.

    Attributes:
        visit_s: Seconds of a visit.
        once_s: Seconds of the server in a round.
        rank_s: Seconds of the server in a round for each worker, without its messages.
        m: Visits in a round.
        d: Numbers in the model.
    """

    visit_s: float
    once_s: float
    rank_s: float
    m: int
    d: int

    def terms(self, workers: int) -> dict[str, float]:
        """Return the seconds of each term."""
        costs = between(LATENCY_S, BYTES_S, workers + 1)
        moved = costs.mixing(REDUCE, 1, self.m, self.d, workers + 1) + costs.sharing(1, self.d)
        moved += tree_levels(workers + 1) * costs.latency_s  # the barrier before the sum
        return {
            "training": self.visit_s * ceil(self.m / workers),
            "server": self.once_s + self.rank_s * workers,
            "ranks": ranks_seconds(costs, self.m, workers),
            "network": moved,
        }

    def server_bytes(self, registered: int) -> float:
        """Return the bytes of rank 0 with so many registered clients; it holds three rows at a time."""
        return PROCESS_BYTES + CLIENT_BYTES * registered + 3 * 4 * self.d

    def seconds(self, workers: int) -> float:
        """Return the seconds of a round."""
        return sum(self.terms(workers).values())

    def binds(self, workers: int) -> str:
        """Return the name of the largest term."""
        terms = self.terms(workers)
        return max(terms, key=lambda name: terms[name])


def fit(measured: dict[int, dict[str, float]], m: int, d: int) -> Model:
    """Return the model that fits measured rounds.

    Args:
        measured: Number of workers -> seconds of a round (`seconds`) and of each phase of a worker (by name).
        m: Visits in a round.
        d: Numbers in the model.
    """
    busy = {w: sum(f.get(phase, 0.0) for phase in BUSY) for w, f in measured.items()}
    workers = np.array(sorted(measured), float)
    rest = np.array([max(0.0, measured[int(w)]["seconds"] - busy[int(w)]) for w in workers])
    rank_s = 0.0
    if len(workers) > 2:  # two points on shared cores say nothing about the cost of a worker
        rank_s = max(0.0, float(np.polyfit(workers, rest, 1)[0]) - RANK_S)
    once_s = max(0.0, float(np.mean(rest - (rank_s + RANK_S) * workers)))
    least = int(workers[0])
    return Model(busy[least] * least / m, once_s, rank_s, m, d)


def measure_scaling(workload: str, ranks: int | None, turns: int, options: Sequence[str]) -> dict[str, Any]:
    """Measure a workload on 1 to `ranks` - 1 workers, extrapolate, and print both.

    Args:
        workload: Its name.
        ranks: Largest number of ranks, the server included; None for as many workers as cores.
        turns: Turns of each job.
        options: Command-line options that override the configuration.

    Returns:
        The figures.

    Raises:
        UserError: The workload is unknown, there is no worker, or an option is one that is chosen here.
    """
    require(workload in WORKLOADS, "--workload", workload, nearest(workload, [*WORKLOADS]))
    require(ranks is None or ranks > 1, "--ranks", ranks, "use 2 or more: one is the server")
    name, cores = workload, available_cores() if ranks is None else ranks - 1
    load = os.getloadavg()[0]  # before any job starts
    config = loader.load(WORKLOADS[name].config, list(options))
    check_rounds(config, options, ("rounds",))
    prepare(config.data, config.seed.data, download=False)
    federation = open_federation(config.data, config.seed.data, build=False)
    m = cohort_size(config.participation, config.cohort_size, federation.num_clients)
    d = Layout.of(build_model(config.model, federation.info)).size
    counts = sorted({w for w in (1, 2, 4, 8, 16, 32, 64, 128, cores) if w <= cores})
    strong = {w: _measure(name, w, m, turns, options) for w in counts}
    weak = {w: _measure(name, w, max(1, m * w // cores), turns, options) for w in counts}
    model = fit(strong, m, d)
    out = {"workload": name, "m": m, "strong": strong, "weak": weak, "model": vars(model), "load": load}
    print("\n".join(lines(out, model)), flush=True)
    return out


def _measure(name: str, workers: int, m: int, turns: int, options: Sequence[str]) -> dict[str, float]:
    """Return the median seconds of a round on some workers, and of each phase of a worker."""
    config = WORKLOADS[name].config
    with scratch_folder() as place:
        asked = [*options, "--cohort_size", str(m), "--system.scratch", place]
        job = Job(
            name, [*mpirun(workers + 1), "mpifl.benchmarks.job", "SOCKET", config, *asked], {}, Path(place)
        )
        try:
            job.turn(2)
            taken = [job.turn(2) for _ in each(range(turns), f"{m} visits on {workers} workers", "turns")]
        finally:
            job.end()
    out = {"seconds": statistics.median(t["seconds"] / 2 for t in taken)}
    for phase in taken[0]["phases"][-1]:
        out[phase] = statistics.median(statistics.mean(p[phase] for p in t["phases"][1:]) / 2 for t in taken)
    return out


def lines(out: dict[str, Any], model: Model) -> list[str]:
    """Return the figures as text lines."""
    strong, weak, first = out["strong"], out["weak"], min(out["strong"])
    page = [
        f"{out['workload']}: {out['m']} visits a round",
        "workers  s/round  strong   weak   of a worker's round: train   load  broadcast  reduce   wait",
    ]
    for w, f in strong.items():
        efficiency = strong[first]["seconds"] * first / (w * f["seconds"])
        kept = weak[first]["seconds"] / weak[w]["seconds"]
        shares = [f[p] / f["seconds"] for p in ("train", "load", "broadcast", "reduce", "wait")]
        page.append(
            f"{w:7d} {f['seconds']:8.4f} {efficiency:7.0%} {kept:6.0%} {shares[0]:27.0%} {shares[1]:6.1%} "
            f"{shares[2]:10.1%} {shares[3]:7.1%} {shares[4]:6.1%}"
        )
    if out["load"] > LOAD:
        page.append(
            f"busy: the load was {out['load']:.0f} before it began, and these are seconds of the clock: the "
            "model's server has what the ranks waited for a core"
        )
    page += [
        "",
        f"model: {model.visit_s * 1e3:.2f} ms a visit, server {model.once_s * 1e3:.2f} ms a round and "
        f"{model.rank_s * 1e3:.3f} ms a worker; network of {LATENCY_S * 1e6:g} us and {BYTES_S / 1e9:g} GB/s",
        "memory of rank 0: "
        + ", ".join(f"{model.server_bytes(n) / 1e9:.1f} GB of {n:,} registered clients" for n in REGISTERED),
        "  ranks  s/round  strong   ms of training   server    ranks  network  binds",
    ]
    for ranks in MANY:
        seconds = model.seconds(ranks - 1)
        efficiency = model.seconds(1) / ((ranks - 1) * seconds)
        terms = model.terms(ranks - 1)
        each = "".join(f"{1e3 * terms[name]:9.3f}" for name in ("server", "ranks", "network"))
        page.append(
            f"{ranks:7d} {seconds:8.4f} {efficiency:7.0%} {1e3 * terms['training']:16.3f}{each}  "
            f"{model.binds(ranks - 1)}"
        )
    return page


if __name__ == "__main__":
    options = {"workload": "W1", "ranks": None, "turns": 5}
    sys.exit(command(str(__doc__).splitlines()[0], measure_scaling, options))
