"""The reference of `mpifl bench`: a plain PyTorch loop over the sampled clients, one process per worker.

Data are in memory as float tensors. Each process has one model object and makes one `torch.optim.SGD` per
visit; it copies nothing but the round's model. The loop only trains: no server, no averaging, no evaluation.
`mpifl bench` starts it as
`python -m mpifl.benchmarks.plain_loop SOCKET WORKERS CONFIG [DEVICE [--key value ...]]`. Its processes take
GPUs in turn; with GPUs, all samples are in the GPU's memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any

from mpifl.benchmarks.turns import asked, usage


def work(
    index: int,
    workers: int,
    name: str,
    shared: dict[str, Any],
    connection: Connection | None,
    device: str = "cpu",
    options: Sequence[str] = (),
) -> None:
    """Train every `workers`-th client of each cohort; process 0 takes commands and reports the seconds.

    Args:
        index: number of this process, from 0.
        workers: number of processes.
        name: the configuration.
        shared: barrier, number of rounds, resource use and process ids, shared by all processes.
        connection: to `mpifl bench`; None in all processes but the first.
        device: `cpu` or `cuda`.
        options: command-line options that override the configuration.
    """
    import torch

    from mpifl.core.rng import key
    from mpifl.data import open_federation
    from mpifl.experiment import loader
    from mpifl.models import build_model
    from mpifl.simulation.sampling import Sampler, cohort_size

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(index % torch.cuda.device_count())
    config = loader.load(name, list(options))
    federation = open_federation(config.data, config.seed.data, build=False)
    model = build_model(config.model, federation.info).train().to(device)
    start = {n: t.clone() for n, t in model.state_dict().items()}
    splits = [federation.client(k).train for k in range(federation.num_clients)]
    data = [(split.x.to(device), split.y.to(device)) for split in splits]
    m = cohort_size(config.participation, config.cohort_size, federation.num_clients)
    sampler = Sampler(federation.num_clients, m, key(config.seed.system))
    step, report = 0, {"ready": True, "pids": list(shared["pids"])}
    while rounds := _next(index, workers, shared, connection, report):
        begin = perf_counter()
        for _ in range(rounds):
            step += 1
            for k in sampler(step)[index::workers].tolist():
                x, y = data[k]
                train(model, start, x, y, config.local)
            if device == "cuda":
                torch.cuda.synchronize()
            shared["barrier"].wait()
        report = {"seconds": perf_counter() - begin}


def train(model: Any, start: dict[str, Any], x: Any, y: Any, local: Any) -> None:
    """Train one client from the round's model."""
    import torch
    import torch.nn.functional as F
    from torch.autograd import backward

    model.load_state_dict(start)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
    )
    for _ in range(local.epochs):
        for index in torch.randperm(len(y)).split(local.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            backward(loss)
            optimizer.step()


def _next(
    index: int, workers: int, shared: dict[str, Any], connection: Connection | None, report: Any
) -> int:
    """Report the turn that ended and return the number of rounds of the next one; 0 ends the program."""
    fields, now = ("cpu", "peak", "pss"), usage()
    shared["used"][3 * index : 3 * index + 3] = [now[f] for f in fields]
    shared["barrier"].wait()
    if connection is not None:
        values = list(shared["used"])
        used = [dict(zip(fields, values[3 * i : 3 * i + 3], strict=True)) for i in range(workers)]
        connection.send({**report, "used": used})
        shared["rounds"].value = asked(connection)
    shared["barrier"].wait()
    return int(shared["rounds"].value)


def main(path: str, workers: int, name: str, device: str = "cpu", *options: str) -> None:
    """Fork the other processes before PyTorch is imported, then run process 0."""
    context = multiprocessing.get_context("fork")
    shared = {
        "barrier": context.Barrier(workers),
        "rounds": context.Value("i", 0),
        "used": context.Array("d", 3 * workers),
        "pids": context.Array("i", workers),
    }
    others = [
        context.Process(target=work, args=(i, workers, name, shared, None, device, options), daemon=True)
        for i in range(1, workers)
    ]
    for other in others:
        other.start()
    signal.signal(signal.SIGTERM, lambda which, _: sys.exit(128 + which))  # an exit terminates the others
    shared["pids"][:] = [os.getpid(), *(other.pid or 0 for other in others)]  # type: ignore[index]
    over = threading.Event()
    threading.Thread(target=_watch, args=(others, over), daemon=True).start()
    try:
        work(0, workers, name, shared, Client(path), device, options)
    finally:
        over.set()
    for other in others:
        other.join()


def _watch(others: Sequence[BaseProcess], over: threading.Event) -> None:
    """End the program once one of its other processes dies: the rest would wait at the barrier for ever.

    Args:
        others: Processes 1 and on.
        over: Set once process 0 has done its work, or failed.
    """
    running = dict(enumerate(others, 1))
    while running:
        wait([other.sentinel for other in running.values()])
        for index, code in [(i, other.exitcode) for i, other in running.items() if not other.is_alive()]:
            if code and not over.is_set():
                line = f"process {index} of {len(others) + 1} ended with code {code}"
                print(line, file=sys.stderr, flush=True)
                for other in others:
                    other.kill()
                os._exit(1)  # not by the barrier: a process that was killed inside it still holds its locks
            del running[index]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
