"""Hosts, cores, GPUs and threads of the ranks of a job. Each rank reports its place; rank 0 checks them."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mpifl.comm.mpi_startup import AUTO, DEVICE, MAIN, cuda_aware
from mpifl.comm.transport import Transport
from mpifl.core.errors import UserError, require
from mpifl.core.instructions import VARIABLE, tells_limit
from mpifl.core.process import available_cores, peak_bytes
from mpifl.results.identity import CODE, LIBRARY_VARIABLES, OWN, PLUGINS, machine

Place = Mapping[str, Any]  # what `place` returns
CPU = "cpu"
MAX_THREADS = 256  # on a machine with fewer cores; a hundred thousand threads cause a segmentation fault
MPS = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # the variable, and the default folder of the pipes


def place(transport: Transport, device: str = CPU, own_code: str = "", plugins: str = "") -> dict[str, Any]:
    """Return where this rank runs and its resource use so far, as an entry of `environment.json`.

    Args:
        transport: connects the ranks.
        device: device that the rank computes on, `cpu` or `cuda:i`.
        own_code: hash of the modules that the configuration names.
        plugins: packages of the plug-ins that it names, with versions and hashes.
    """
    cuda = device != CPU
    gpus = [_gpu_id(i) for i in range(torch.cuda.device_count())] if cuda else []
    mask = sorted(os.sched_getaffinity(0))
    return {
        "host": socket.gethostname(),
        "node": transport.nodes[transport.rank],
        "local_rank": transport.local_rank,
        "pid": os.getpid(),
        "device": device,
        "gpu": gpus[int(device.split(":")[1])] if cuda else None,
        "gpus": gpus,
        "peak_bytes": peak_bytes(),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "mpi_cuda_aware": cuda and transport.size > 1 and cuda_aware(),
        "mps": cuda and (MPS[0] in os.environ or os.path.exists(MPS[1])),
        "cpus": ranges(mask),
        "threads": torch.get_num_threads(),
        "machine": machine(torch.cuda.get_device_name(device) if cuda else None),
        OWN: own_code,
        PLUGINS: plugins,
        "start_s": transport.started,
    }


def _gpu_id(index: int) -> str:
    """Return a name of a GPU that is unique on its host, however the ranks number the GPUs."""
    properties = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES')}:{index}"))


def ranges(numbers: Sequence[int]) -> str:
    """Return `0-3,7` for [0, 1, 2, 3, 7]."""
    out: list[list[int]] = []
    for n in numbers:
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def cores(text: str) -> set[int]:
    """Return the numbers in a text that `ranges` wrote."""
    parts = [part.split("-") for part in text.split(",")]
    return {n for p in parts for n in range(int(p[0]), int(p[-1]) + 1)}


def threads_of(transport: Transport, asked: int) -> int:
    """Return the number of threads of each rank; every rank calls.

    Args:
        transport: connects the ranks.
        asked: `system.threads`; 0 takes what the CPU masks allow.

    Raises:
        UserError: more threads are asked for than a machine can run.
    """
    if asked:
        most = max(MAX_THREADS, os.cpu_count() or 1)
        remedy = f"this machine has {os.cpu_count()} cores; use at most {most}, or 0 for the CPU mask"
        require(asked <= most, "system.threads", asked, remedy)
        return asked
    return threads_by_mask(transport, (0,))


def threads_by_mask(transport: Transport, servers: Collection[int]) -> int:
    """Return the number of threads that the CPU masks allow each worker; every rank calls.

    Args:
        transport: connects the ranks.
        servers: the ranks that wait while the others work.
    """
    here = (transport.nodes[transport.rank], ranges(sorted(os.sched_getaffinity(0))), available_cores())
    masks = transport.gather(here, "start")
    told: int = transport.bcast(None if masks is None else threads_for(masks, servers), "start")
    return told


def threads_for(masks: Sequence[tuple[int, str, int]], servers: Collection[int] = (0,)) -> int:
    """Return the largest number of threads that every worker can run on its own cores.

    The number is the same for all workers, because sums depend on the number of threads.

    Args:
        masks: node, cores and number of cores that may be used at once (a container's quota) of each rank.
        servers: the ranks that wait while the others work.
    """
    workers = [mask for rank, mask in enumerate(masks) if rank not in servers] or masks
    least = []
    for node, mask, most in workers:
        mine = cores(mask)
        sharing = sum(1 for other, its, _ in workers if other == node and cores(its) & mine)
        least.append(min(len(mine), most) // sharing)
    return max(1, min(least))


def workers_of(places: Sequence[Place]) -> list[Place]:
    """Return the places of the ranks that train."""
    return [*(places[1:] or places)]


def crowded(places: Sequence[Place]) -> list[str]:
    """Return a line for each host whose workers have more threads than cores."""
    out = []
    for node in sorted({p["node"] for p in places}):
        mine = [p for p in workers_of(places) if p["node"] == node]
        own = len({c for p in mine for c in cores(p["cpus"])})
        if mine and len(mine) * max(p["threads"] for p in mine) > own:
            out.append(f"{mine[0]['host']}: {len(mine)} workers on {own} cores")
    return out


def check_places(places: Sequence[Place], compiled: bool = True) -> None:
    """Check for idle GPUs, and that ranks have the same code, instruction limits and kernels.

    Raises:
        UserError: a rank has several GPUs that no other rank of its node can use, the ranks do not all run
            the same code, `MPIFL_INSTRUCTIONS` is set for only some of them, or the workers do not all have
            the same kernels.
    """
    _check_code(places)
    _check_limits(places)
    loops = {f"{p['host']} (process {p['pid']})": p["machine"]["kernels"] for p in workers_of(places)}
    remedy = (
        f"{', '.join(f'{place} has {build}' for place, build in loops.items())}: other builds of the loops in"
        " C, and PyTorch in their place, give other last bits; install mpifl with a compiler on every node, "
        "or set it to false"
    )
    require(len(set(loops.values())) < 2 or not compiled, "system.kernels", compiled, remedy)
    for rank, one in enumerate(places):
        others = [set(p["gpus"]) for p in places if p["node"] == one["node"] and p is not one]
        alone = others and set(one["gpus"]).isdisjoint(set().union(*others))
        remedy = (
            f"rank {rank} on {one['host']} was given {len(one['gpus'])} GPUs of its own, and a rank drives "
            "one: small models are trained faster by more ranks; ask for one GPU a rank (--gpus-per-task=1)"
        )
        require(not (alone and len(one["gpus"]) > 1), "system.device", one["visible_gpus"], remedy)


def _check_code(places: Sequence[Place]) -> None:
    """Raise `UserError` if a rank runs other files of mpifl, of the user or of plug-ins than rank 0."""
    first = places[0]
    for one in places:
        remedy = f"{one['host']} (process {one['pid']}) has other files; give all nodes the same"
        here, there = one["machine"][CODE], first["machine"][CODE]
        require(here == there, "mpifl", f"{there} on {first['host']}", f"{remedy} release of mpifl")
        here, there = one[OWN], first[OWN]
        require(here == there, "CONFIG", f"{there} on {first['host']}", f"{remedy} classes of your own")
        here, there = one[PLUGINS], first[PLUGINS]
        remedy = f"{one['host']} (process {one['pid']}) has {here}; install the same packages on all nodes"
        require(here == there, PLUGINS, f"{there} on {first['host']}", remedy)


def _check_limits(places: Sequence[Place]) -> None:
    """Raise `UserError` if only some ranks were given a limit of their instruction set."""
    kept = [tells_limit(p["machine"]["instructions"]) for p in places]
    if any(kept) and not all(kept):
        has, lacks = places[kept.index(True)], places[kept.index(False)]
        remedy = f"{lacks['host']} (process {lacks['pid']}) has no such variable, {has['host']} (process "
        remedy += f"{has['pid']}) has: give it to all ranks (mpirun -x {VARIABLE}), or to none"
        raise UserError(VARIABLE, has["machine"]["instructions"], remedy)


def processors_of(places: Sequence[Place]) -> list[str]:
    """Return the kinds of processors of the ranks, the instruction sets that they use, and the reason."""
    names = ("instructions", LIBRARY_VARIABLES)
    used = [", ".join(p["machine"][name] for name in names if name in p["machine"]) for p in places]
    return sorted({f"{p['machine']['processor']} ({one})" for p, one in zip(places, used, strict=True)})


def unlike(places: Sequence[Place]) -> str:
    """Return a warning if the ranks have processors of several kinds; empty if all are alike."""
    kinds = processors_of(places)
    if len(kinds) == 1:
        return ""
    found = f"ranks have different processors, and last bits depend on which computed ({', '.join(kinds)})"
    remedy = f"use nodes of one kind, or set {VARIABLE}=avx2 for all ranks"
    return f"{found}: {'use nodes of one kind' if all(map(tells_limit, kinds)) else remedy}"


def mpi_memory(asked: str, places: Sequence[Place]) -> str:
    """Return the kind of memory that MPI sends from: `main` or `device`.

    Args:
        asked: `system.mpi_memory`.
        places: places of all ranks.

    Raises:
        UserError: device memory is asked for, and there is only one process, a worker trains on the CPU, or
            its MPI is not CUDA-aware.
    """
    blind = next((r for r, p in enumerate(places) if r and not p["mpi_cuda_aware"]), None)
    if asked != DEVICE:
        return DEVICE if asked == AUTO and len(places) > 1 and blind is None else MAIN
    require(len(places) > 1, "system.mpi_memory", asked, "one process sends nothing; use main or auto")
    if blind is not None:
        one, alone = places[blind], places[blind]["device"] == CPU
        lacks = "trains on the CPU" if alone else "has an MPI that is not CUDA-aware (mpirun mpifl doctor)"
        remedy = f"rank {blind} on {one['host']} {lacks}; use main, or auto, which takes what there is"
        raise UserError("system.mpi_memory", asked, remedy)
    return DEVICE


def hints(places: Sequence[Place]) -> list[str]:
    """Return advice on placements that work but could be faster."""
    out = [f"{text}: fewer ranks or threads, or wider CPU masks" for text in crowded(places)]
    for node in sorted({p["node"] for p in places}):
        here = [p for p in places if p["node"] == node]
        users = [p["gpu"] for p in workers_of(places) if p["node"] == node and p["gpu"]]
        host = here[0]["host"]
        most = max((users.count(gpu) for gpu in users), default=0)
        if most > 1 and not all(p["mps"] for p in here):
            out.append(
                f"{host}: {most} workers share a GPU, one at a time; with CUDA MPS their kernels overlap: "
                "nvidia-cuda-mps-control -d before the job"
            )
        idle = {gpu for p in here for gpu in p["gpus"]} - set(users)
        if users and idle:
            out.append(
                f"{host}: {len(idle)} GPU{'s' * (len(idle) > 1)} without a worker; start more ranks there"
            )
    return out


def table(places: Sequence[Place]) -> str:
    """Return the binding report: a line for each rank, then hints.

    The column `start s` has the seconds from the start of the process until it was ready to train.
    """
    form = "{:>4}  {:16} {:>4} {:>5}  {:7} {:16} {:>7}  {:>7}"
    head = form.format("rank", "host", "node", "local", "device", "cpus", "threads", "start s")
    lines = []
    for r, p in enumerate(places):
        where = (p["host"][:16], p["node"], p["local_rank"], p["device"], p["cpus"][:16], p["threads"])
        lines.append(form.format(r, *where, f"{max(p['start_s'].values(), default=0.0):.2f}"))
    return "\n".join([head, *lines, *(f"hint: {text}" for text in hints(places))])
