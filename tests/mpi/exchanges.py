"""Second looks over ranks: `mpirun -n P python exchanges.py FILE`; rank 0 writes what came of each case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from support.asking import Asking, AskingOnce, Remembering, steps

from mpifl.aggregation import exchange_choice
from mpifl.aggregation.exchange_choice import BLOCK, Local, OverMpi
from mpifl.comm.connect import connect
from mpifl.comm.transport import Transport, on_server
from mpifl.core.algorithm import Algorithm
from mpifl.experiment.schema import SystemConfig
from mpifl.runtime import exchange
from mpifl.runtime.protocol import LookPlan

EVERYONE = [*range(6)]
METHODS: dict[str, tuple[Algorithm, list[list[int]]]] = {  # name -> method, cohorts of its rounds
    "all": (Asking(), [EVERYONE, EVERYONE]),
    "some": (AskingOnce(), [[0, 1, 2, 5], EVERYONE]),
    "ask fails": (Asking("ask", (1,)), [EVERYONE]),
    "answer fails": (Asking("answer", (1, 4)), [EVERYONE]),
    "compare fails": (Asking("compare", (4, 2)), [EVERYONE]),
    "remembered": (Remembering("answer", (1, 2)), [[1, 4], [1, 2]]),
}
WAYS = {  # name -> exchange, numbers of a block
    "local": (Local(), BLOCK),
    "workers": (OverMpi(), BLOCK),
    "server": (OverMpi("server"), BLOCK),
    "workers, small blocks": (OverMpi(), 4),
    "server, small blocks": (OverMpi("server"), 4),
}


def found(method: Algorithm, cohorts: list[list[int]], transport: Transport, system: SystemConfig) -> Any:
    """Return what came of the steps of a method, on rank 0."""
    Asking.failed.clear()
    transport.traffic.clear()
    looks = list[LookPlan]()
    steps_of = on_server(transport, lambda: mkdtemp())
    done = steps(
        method, Path(steps_of), cohorts, transport, looks.append, on_client_error="drop", system=system
    )
    rows = transport.gather_traffic()
    if rows is None:
        return None
    columns = [{name: np.asarray(x, float).tolist() for name, x in n.columns.items()} for n in done.notes]
    return {
        "columns": columns,
        "clients": [n.client.tolist() for n in done.notes],
        "fresh": [n.fresh.tolist() for n in done.notes],
        "model": done.server.tables["model"].tolist(),
        "visits": done.server_step.visits.tolist(),
        "dropped": [[d.step, d.client, d.reason] for d in done.server_step.dropped],
        "ledger": done.server_step.ledger.rows(),
        "computed": done.server_step.computation.rows(),
        "by client": {n: c.tolist() for n, c in done.server_step.computation.per_client().items()},
        "owners": [look.owners.tolist() for look in looks],
        "pairs": [look.matrix().tolist() for look in looks],
        "mpi": [row for row in rows if row["purpose"] in ("extractor", "embedding")],
    }


def all_found(transport: Transport) -> dict[str, Any]:
    """Return what came of each method in each way, on rank 0."""
    out = {}
    for name, (method, cohorts) in METHODS.items():
        for way, (system, block) in WAYS.items():
            exchange_choice.BLOCK = exchange.BLOCK = block
            made = found(method, cohorts, transport, SystemConfig(exchange=system))
            exchange_choice.BLOCK = exchange.BLOCK = BLOCK
            out[f"{name}: {way}"] = made
    return out


if __name__ == "__main__":
    job = connect()
    everything = all_found(job)
    if job.is_server:
        Path(sys.argv[1]).write_text(json.dumps(everything))
    job.finalize(0)
