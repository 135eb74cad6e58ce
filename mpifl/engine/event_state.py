"""The state of an asynchronous run: what the engine remembers, and the visits under way.

Of a visit under way, what it read is kept; it is made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.comm import Lasting, Task
from mpifl.core.timing import now
from mpifl.core.types import Reads, Server

from .flight import Visit
from .saved import Saved, take_stepper
from .visits import Order

if TYPE_CHECKING:
    from .events import Events


def events_state(events: Events, server: Server, pool: Lasting) -> Saved:
    """Return what the engine adds to a checkpoint; between two steps, no upload waiting."""
    assert not events.rows, "arrivals are told of at each step"
    saved = Saved(server.version)
    older = [s for version, s in sorted(events.servers.items()) if version != server.version]
    for i, s in enumerate(older):
        saved.put_server(f"older/{i}", s, s.tables)
    tally = {**vars(events.tally), "lags": sorted(events.tally.lags.items())}
    saved.values |= {
        "older": len(older),
        "number": events.number,
        "clock": events.clock.state(),
        "tally": tally,
        "metrics": [[k, dict(m)] for k, m in events.metrics.items()],
        "seconds": (now() - events.start).tolist(),
        "judging": events.judging.tolist(),
    }
    _put_visits(saved, events, pool)
    return saved


def take_events(saved: Saved, events: Events) -> Server:
    """Give the engine back what it remembered; visits are given out later, by `take_visits`."""
    take_stepper(saved, events.stepper)
    server, values = saved.take_server("server"), saved.values
    older = [saved.take_server(f"older/{i}") for i in range(values["older"])]
    events.servers = {s.version: s for s in (*older, server)}
    events.number = values["number"]
    events.tally.__dict__.update(values["tally"])
    events.tally.lags = Counter({lag: n for lag, n in values["tally"]["lags"]})
    events.metrics = {k: m for k, m in values["metrics"]}
    return server


def _put_visits(saved: Saved, events: Events, pool: Lasting) -> None:
    names: dict[tuple[Any, ...], str] = {}  # rows that several visits read are kept once
    visits = []
    for visit in sorted(events.clock.visits, key=lambda v: v.number):
        order, step, version = pool.tasks[visit.number].header
        rows = {}
        for name, tensor in pool.tasks[visit.number].vectors.items():
            which = (tensor.data_ptr(), *tensor.shape)
            rows[name] = names.setdefault(which, f"read/{len(names)}")
            saved.tensors[rows[name]] = tensor
        reads: dict[str, Any] = {}
        for name, numbers in order.reads.items():
            reads[name] = numbers
            if isinstance(numbers, np.ndarray):
                reads[name] = f"mixture/{visit.number}/{name}"
                saved.arrays[reads[name]] = numbers
        visits.append(
            {"visit": asdict(visit), "step": step, "version": version, "reads": reads, "rows": rows}
        )
    saved.values["visits"] = visits


def take_visits(saved: Saved, events: Events, pool: Lasting) -> None:
    """Give the visits under way out again, and set the clock."""
    visits = [Visit(**v["visit"]) for v in saved.values["visits"]]
    events.clock.restore(saved.values["clock"], visits)
    events.busy = {visit.client for visit in visits}
    for visit, about in zip(visits, saved.values["visits"], strict=True):
        order = Order(0, visit.client, visit.visit, _reads(saved, about["reads"]))
        vectors = {name: saved.tensors[which] for name, which in about["rows"].items()}
        header = (order, about["step"], about["version"])
        ranks = tuple(events.stepper.scheduler.candidates(visit.client))
        pool.submit(Task(visit.number, visit.due, header, vectors, ranks))
    events.start = now() - np.array(saved.values["seconds"])
    events.judging = np.array(saved.values["judging"])


def _reads(saved: Saved, about: Mapping[str, Any]) -> Reads:
    return {
        name: saved.arrays[which] if isinstance(which, str) else tuple(which) for name, which in about.items()
    }
