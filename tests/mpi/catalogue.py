"""A few steps of methods on the tiny federation: `mpirun -n P python catalogue.py FOLDER JOBS`.

JOBS is a JSON list of [CASES] or [CASES, MEMORY], CASES being a list of their names. Each job prints a line:
{case: digest} as JSON, and how often MPI was lent a device's memory. Alone, a method that raises gives its
traceback instead of a digest. With MEMORY, `main` or `device`, all ranks train on a fake GPU, and MPI is
given that memory.
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import fake_device, toy
from support.cases import CASES, named

from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms import flt
from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.connect import connect
from mpifl.comm.transport import Transport
from mpifl.experiment.build import build_engine, build_server_step
from mpifl.experiment.schema import EvaluationConfig
from mpifl.results.recorder import digest
from mpifl.runtime.synchronous import Record
from mpifl.simulation.policies import EveryArrival


def digest_of(
    case: tuple[str, dict[str, object]], transport: Transport, folder: Path, memory: str = "main"
) -> str:
    """Return, on rank 0, what a method's rows, assignment, algorithm_state and scores come to."""
    algorithm = CATALOGUE[case[0]](**case[1])
    asynchronous = {"policy": EveryArrival(), "rounds": 4} if algorithm.needs.single_upload else {"rounds": 2}
    config = toy.config_of(algorithm, participation=0.5, evaluation=EvaluationConfig(every=0), **asynchronous)
    context = toy.context_of(config, toy.Tiny(), transport)
    context = replace(context, decisions=replace(context.decisions, mpi_memory=memory))
    server_step = build_server_step(context, ClientStore("test", str(folder)))
    records: list[Record] = []
    server = build_engine(context, server_step).run(records.append)
    names = transport.bcast(sorted(server.tables) if server is not None else None, "test")
    tables = {table: server_step.tables.whole(table) for table in names}
    if server is None:
        return ""
    central = {name: server.tables[name] if table is None else table for name, table in tables.items()}
    return digest(central, server.assign, {**server.algorithm_state, **(records[-1].scores or {})})


def digests(transport: Transport, folder: Path, names: list[str], memory: str = "main") -> dict[str, Any]:
    """Return, on rank 0, the digests of the named cases, and under `lent` how often memory was lent."""
    found, before = {}, fake_device.FakeTensor.lent
    for case in (c for c in CASES if named(c) in names):
        try:
            found[named(case)] = digest_of(case, transport, folder / named(case).replace(" ", "_"), memory)
        except Exception:
            found[named(case)] = traceback.format_exc()
            if transport.size > 1:
                print(found[named(case)], file=sys.stderr, flush=True)
                transport.abort(1)
    lent = transport.gather(fake_device.FakeTensor.lent - before, "test")
    return found if lent is None else {**found, "lent": sum(lent)}


def main(folder: Path, jobs: list[list[Any]]) -> None:
    """Print a line for each job."""
    transport, flt.umap_plane = connect(), toy.plane
    for number, (names, *memory) in enumerate(jobs):
        with fake_device.gpu() if memory else nullcontext():
            found = digests(transport, folder / str(number), names, *memory)
        if transport.is_server:
            print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
