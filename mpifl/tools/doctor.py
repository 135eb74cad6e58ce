"""`mpirun -n P mpifl doctor`: checks of a job's environment before an expensive run, on all ranks.

With a configuration it also opens the data and builds the model on every rank, as a run does, and shows which
clients each worker would host.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.comm.link_test import Link, deadline
from mpifl.comm.link_test import measure as measure_pairs
from mpifl.comm.mpi_startup import cuda_aware
from mpifl.comm.transport import Transport
from mpifl.data import DataConfig
from mpifl.experiment.build import build
from mpifl.experiment.placement import crowded, place, processors_of, unlike, workers_of
from mpifl.experiment.placement import table as table_of_bindings
from mpifl.experiment.schema import GROUPS, Config
from mpifl.forecast.hosting import groups_of
from mpifl.kernels import bindings
from mpifl.results.identity import PACKAGES as COMPUTING
from mpifl.results.identity import version_of

from .scheduler import given

PACKAGES = (*COMPUTING, "mpi4py", "safetensors")
BLOCK = 1 << 20  # float32 numbers of the bandwidth check: 4 MiB
SKEW_SECONDS, START_SECONDS, FREE_BYTES = 1.0, 60.0, 1 << 30
SLOW, LATE_SECONDS, PAIRS_SHOWN = (
    4.0,
    1e-3,
    6,
)  # times slower than the median pair; extra latency accepted; pairs named
LIMIT_S = 60.0  # for each exchange
START_ADVICE = "many ranks read one environment at once: keep it in an image or on each node's own disk"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked.
        good: Whether it is as it should be.
        found: What was found.
        advice: What to do if it is not good.
    """

    name: str
    good: bool
    found: str
    advice: str = ""


def facts(transport: Transport) -> dict[str, Any]:
    """Return the placement of this rank, its versions and its time."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"cuda:{transport.local_rank % gpus}" if gpus else "cpu"
    versions = {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()}
    return {**place(transport, device), "versions": versions, "time": time.time()}


def check_layout(places: Sequence[dict[str, Any]]) -> list[Check]:
    """Check versions, clocks, start, kernels, cores and GPUs; called on rank 0.

    Args:
        places: `facts` of each rank.
    """
    out = []
    odd = [r for r, p in enumerate(places) if p["versions"] != places[0]["versions"]]
    out.append(
        Check("versions", not odd, f"ranks unlike rank 0: {odd or 'none'}", "install the same environment")
    )
    skew = max(p["time"] for p in places) - min(p["time"] for p in places)
    out.append(Check("clocks", skew < SKEW_SECONDS, f"{skew:.3f} s apart", "let the nodes keep time (NTP)"))
    slow = max(range(len(places)), key=lambda r: places[r]["start_s"].get("mpi", 0.0))
    stages = places[slow]["start_s"]
    found = f"the slowest is rank {slow}: programs loaded after {stages.get('imports', 0):.1f} s, MPI after "
    found += f"{stages.get('mpi', 0):.1f} s"
    out.append(Check("start", stages.get("mpi", 0) < START_SECONDS, found, START_ADVICE))
    out += _check_kernels(places)
    full = crowded(places)
    advice = "fewer ranks or threads, or wider CPU masks (--bind-to, --cpus-per-task)"
    out.append(Check("cores", not full, "; ".join(full) or "enough for every worker's threads", advice))
    bare = [r for r, p in enumerate(places) if not p["gpus"]]
    mixed = 0 < len(bare) < len(places)
    seen = (
        f"ranks without one: {bare}"
        if mixed
        else "none"
        if bare
        else f"{len(places[0]['gpus'])} on the first node"
    )
    out.append(Check("GPUs", not mixed, seen, "ask for GPUs on every node, or use system.device: cpu"))
    return out


def _check_kernels(places: Sequence[dict[str, Any]]) -> list[Check]:
    """Check what the last bits of results depend on: builds of the kernels, and processors."""
    workers = [p["machine"] for p in workers_of(places)]
    builds = sorted({w["kernels"] for w in workers})
    found = f"{', '.join(builds)}; compiler: {', '.join(sorted({w['compiler'] for w in workers}))}"
    remedy = bindings.PROBLEM or "install the same build everywhere"
    advice = f"{remedy}; other builds, and PyTorch in their place, give other last bits"
    out = [Check("kernels", builds == builds[:1] != ["none"], found, advice)]
    differing = unlike(places)
    return [*out, Check("processors", not differing, ", ".join(processors_of(places)), differing)]


def _check_collectives(transport: Transport) -> list[Check]:
    """Check collectives on numbers whose results are known, and their speed; all ranks must call it."""
    size, out = transport.size, []
    total = torch.full((1000,), transport.rank + 1, dtype=torch.int64)
    transport.Reduce(total, "doctor", total.dtype)
    row = torch.arange(1000.0) if transport.is_server else torch.zeros(1000)
    transport.Bcast(row, "doctor")
    rows = transport.Gatherv(torch.full((1, 8), float(transport.rank)), [1] * size, "doctor")
    ok = transport.gather(bool((row == torch.arange(1000.0)).all()), "doctor")
    if ok is not None and rows is not None:
        right = all(ok) and bool((total == size * (size + 1) // 2).all())
        right = right and rows[:, 0].tolist() == [float(r) for r in range(size)]
        out.append(
            Check("collectives", right, "sums and rows are right", "this MPI loses numbers: use another")
        )
    times = []
    for _ in range(5):
        transport.barrier()
        start = time.perf_counter()
        transport.Bcast(torch.zeros(BLOCK), "doctor")
        transport.barrier()
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(20):
        transport.barrier()
    latency = (time.perf_counter() - start) / 20
    if transport.is_server:
        speed = 4 * BLOCK / float(np.median(times)) / 1e6
        found = f"4 MiB to all at {speed:.0f} MB/s, a barrier in {1e6 * latency:.0f} us"
        advice = "is the fast fabric in use? see OMPI_MCA_pml, UCX_TLS"
        out.append(Check("speed", size == 1 or speed > 20, found, advice))
    return out


def check_links(links: Sequence[Link], hosts: Sequence[str]) -> Check:
    """Check the links between nodes: sums are right, and no link is far slower than the others.

    Args:
        links: The measured links.
        hosts: Host of each rank.
    """
    if not links:
        return Check("pairs", True, "one node, no links between nodes")
    typical, late = (float(np.median([getattr(x, name) for x in links])) for name in ("bytes_s", "latency_s"))
    wrong = [x for x in links if not x.right]
    slow = [x for x in links if typical > SLOW * x.bytes_s or x.latency_s > SLOW * late + LATE_SECONDS]

    def named(some: Sequence[Link]) -> str:
        names = ", ".join(f"{hosts[x.ranks[0]]} - {hosts[x.ranks[1]]}" for x in some[:PAIRS_SHOWN])
        return names + (f" and {len(some) - PAIRS_SHOWN} more" if len(some) > PAIRS_SHOWN else "")

    rates, delays = sorted(x.bytes_s / 1e6 for x in links), sorted(1e6 * x.latency_s for x in links)
    found = f"{len(links)} pair{'s' * (len(links) > 1)} of nodes, {rates[0]:.0f} to {rates[-1]:.0f} MB/s, "
    found += f"{delays[0]:.0f} to {delays[-1]:.0f} us"
    if wrong:
        return Check("pairs", False, f"{found}; wrong sums: {named(wrong)}", "leave these nodes out")
    advice = "a link or adapter has fallen back; leave these nodes out"
    return Check("pairs", not slow, found + (f"; slow: {named(slow)}" if slow else ""), advice)


def _check_folder(path: Path, what: str) -> Check:
    """Check free space of a folder, and measure its write speed."""
    try:
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free
        with tempfile.NamedTemporaryFile(dir=path) as file:
            start = time.perf_counter()
            file.write(bytes(1 << 25))
            file.flush()
            os.fsync(file.fileno())
            speed = 32 / (time.perf_counter() - start)
    except OSError as error:
        return Check(what, False, f"{path}: {error.strerror}", "use another folder")
    found = f"{path}: {free / 2**30:.1f} GiB free, {speed:.0f} MiB/s"
    return Check(what, free > FREE_BYTES, found, "make room, or use another folder")


def examine(transport: Transport, data: str, runs: str) -> tuple[list[Check], str] | None:
    """Return the checks and the binding report on rank 0, None elsewhere; all ranks must call it.

    Args:
        transport: Connects the ranks.
        data: The data root; empty if there is none.
        runs: The folder of run folders.
    """
    with deadline(transport, LIMIT_S, "the first message to rank 0"):
        transport.gather(None, "doctor")
    links = measure_pairs(transport, LIMIT_S)  # before any collective: it names the broken link
    with deadline(transport, LIMIT_S, "what all ranks exchange"):
        transport.barrier()
        places = transport.gather(facts(transport), "doctor")
        reach = transport.gather(not data or os.access(data, os.R_OK), "doctor")
        speed = _check_collectives(transport)
    if places is None or reach is None or links is None:
        return None
    library = transport.library or "none: one process"
    hosts = {p["host"] for p in places}
    found = f"{library}; {transport.size} ranks on {len(hosts)} hosts"
    if transport.size > 1 and any(p["gpus"] for p in places):
        found += "; CUDA-aware (system.mpi_memory)" if cuda_aware() else "; not CUDA-aware"
    checks = [Check("MPI", True, found), *check_layout(places), *speed]
    if (job := given()) is not None:
        checks.insert(1, Check("job", not job.problem, job.found, job.problem))
    checks.append(check_links(links, [p["host"] for p in places]))
    blind = [r for r, seen in enumerate(reach) if not seen]
    where = f"{data or 'not set'}: " + (f"ranks {blind} cannot read it" if blind else "all ranks read it")
    checks.append(Check("data", not blind, where, "put it where every node sees it (MPIFL_DATA)"))
    return [*checks, _check_folder(Path(runs), "run folder")], table_of_bindings(places)


def table(checks: Sequence[Check]) -> str:
    """Return the checks as a table, with advice below those that are not good."""
    lines = []
    for check in checks:
        lines.append(f"{'ok ' if check.good else 'BAD'}  {check.name:12} {check.found}")
        if not check.good:
            lines.append(f"{'':17} -> {check.advice}")
    return "\n".join(lines)


def check_run(config: Config, transport: Transport) -> tuple[Check, str]:
    """Open the data and build the model of a run on every rank; all ranks must call it.

    Returns:
        A check that is good, and which clients each worker hosts.

    Raises:
        UserError: the run could not begin; on every rank.
    """
    start = time.perf_counter()
    context = build(config, transport)
    transport.barrier()
    seconds, size = time.perf_counter() - start, context.problem.layout.size
    found = f"{config.name}: {context.problem.num_clients} clients, model of {size} numbers; every rank has "
    check = Check("run", True, f"{found}opened them after {seconds:.1f} s")
    if config.system.hosting != GROUPS:
        return check, "clients: any worker may train any (system.hosting: any)"
    groups = groups_of(context, transport.size)
    return check, "\n".join(["clients of each worker (system.hosting: groups):", *groups.lines()])


def doctor(transport: Transport, runs: str, say: Callable[[str], None], config: Config | None = None) -> bool:
    """Check this job and show the result on rank 0.

    Args:
        transport: Connects the ranks; all of them must call this.
        runs: The folder of run folders.
        say: Called with the result.
        config: A run that is to follow; None checks the job alone.

    Returns:
        Whether all checks are good, on every rank.

    Raises:
        UserError: The run could not begin; on every rank, after the result was shown.
    """
    data = DataConfig() if config is None else config.data
    seen = examine(transport, str(data.folder or ""), runs)
    well = True
    if seen is not None:
        say(f"{table(seen[0])}\n\n{seen[1]}")
        well = all(check.good for check in seen[0])
    if config is not None:
        check, hosted = check_run(config, transport)
        if transport.is_server:
            say(f"\n{table([check])}\n\n{hosted}")
    return bool(transport.bcast(well, "doctor"))
