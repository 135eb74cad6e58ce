"""What a run would do, without training: sizes, collectives, memory, bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from . import config as configuration
from .comm import Transport
from .comm.choose import REDUCE, SCATTER, busiest_bytes, choose, is_spread
from .config import Config
from .core.mixing import Mixing
from .core.rng import key
from .core.types import Message, Notes, Report, Server
from .engine.ledger import NUMBER_BYTES, count_numbers
from .engine.pace import bytes_down
from .engine.visits import read_rows
from .experiment import Bench, prepare
from .local import LocalClient


def describe(config: Config, transport: Transport) -> str:
    """Return a page about a run; every rank calls, rank 0's page counts."""
    asked = config.system.ranks
    here = replace(config, system=replace(config.system, ranks=None))
    bench = replace(prepare(here, transport, lambda text: None), config=config)
    for learner in (bench.learner, bench.learner.auxiliary):
        if learner is not None:
            learner.idle = True
    if not transport.is_server:
        return ""
    server, print_bytes = first_server(bench)
    report = empty_report(bench, server, 0)
    plan = bench.config.algorithm.aggregate(server, notes_of(bench, server, report))
    tree = configuration.to_tree(config)
    n, m, d = bench.world.num_clients, bench.num_sampled, bench.world.layout.size
    lines = [
        f"{config.name}: {tree['algorithm']['name']} on {tree['data']['source']['name']}, "
        f"{tree['data']['scenario']['name']}, model {tree['model']['name']}",
        "",
        f"clients                 N = {n}, m = {m} per round, {config.rounds} rounds",
        f"samples                 {_spread(bench.federation.sizes[:, 0])} training per client",
        f"model                   d = {d:,} numbers ({bench.world.layout.num_parameters:,} trainable)",
        f"ranks                   P = {asked or transport.size} ({max(1, ranks_of(bench) - 1)} with clients)",
        "",
    ]
    for mixing in plan.mixings:
        lines.append(_mixing_line(mixing, server, report, bench))
    down, up = round_bytes(bench, server, report)
    once = f"; once before training {_size(print_bytes[0])} down, {_size(print_bytes[1])} up"
    lines += [
        "",
        f"federation per round    {_size(down)} down, {_size(up)} up" + (once if any(print_bytes) else ""),
        f"federation in all       {_size(down * config.rounds + print_bytes[0])} down, "
        f"{_size(up * config.rounds + print_bytes[1])} up"
        + (" and what the pairwise look exchanges" if config.algorithm.needs.probe else ""),
        *_memory_lines(bench, server, report),
    ]
    return "\n".join(lines)


def ranks_of(bench: Bench) -> int:
    """Return the number of ranks the plan is for: `system.ranks`, or those that are here."""
    return bench.config.system.ranks or bench.transport.size


def first_server(bench: Bench) -> tuple[Server, tuple[int, int]]:
    """Return the server before the first round and the bytes (down, up) that set it up.

    One-shot statistics are taken from client 0 alone and repeated for everyone, so rows chosen by data (the
    number of streams by silhouette, say) are what a population of equals would give.
    """
    algorithm, world = bench.config.algorithm, bench.world
    if not algorithm.needs.fingerprint:
        server = algorithm.setup(world, None, key(0))
        return algorithm.appraise(None, server, world.public) if algorithm.needs.inspect else server, (0, 0)
    shown = algorithm.shows(world, key(0))
    report = algorithm.fingerprint(client_of(bench, 0), shown, key(0))
    assert report is not None
    n = world.num_clients
    columns = {name: np.stack([np.asarray(v)] * n) for name, v in report.notes.items()}
    if algorithm.needs.fingerprint_gram:
        columns["gram"] = np.ones((n, n)) + np.eye(n)
    everyone = np.arange(n)
    prints = Notes(everyone, world.num_samples, np.zeros(n, np.int64), np.ones(n, bool), columns)
    up = sum(map(count_numbers, [*report.vectors.values(), *report.notes.values()]))
    return algorithm.setup(world, prints, key(0)), (
        n * sum(map(count_numbers, shown.values())) * NUMBER_BYTES,
        n * up * NUMBER_BYTES,
    )


def client_of(bench: Bench, k: int) -> LocalClient:
    """Return a client; it does not train, because the learner is idle."""
    return LocalClient(k, bench.federation, bench.learner, bench.config.local)


def empty_report(bench: Bench, server: Server, k: int) -> Report:
    """Return the report of a visit without training: its sizes are those of a real one."""
    reads = bench.config.algorithm.reads(server, k)
    vectors = {
        name: read_rows(lambda t, rows: server.tables[t][rows], name, which) for name, which in reads.items()
    }
    report, _ = bench.config.algorithm.local_update(Message(vectors, reads), {}, client_of(bench, k), key(0))
    return report


def notes_of(bench: Bench, server: Server, report: Report) -> Notes:
    """Return notes as if the whole cohort had sent `report`."""
    algorithm, public = bench.config.algorithm, bench.world.public
    m, needs = 1 if algorithm.needs.one_by_one else bench.num_sampled, algorithm.needs
    clients = np.arange(m)
    columns: dict[str, np.ndarray] = {name: np.stack([np.asarray(v)] * m) for name, v in report.notes.items()}
    if needs.inspect:
        columns |= {
            name: np.asarray(v)[None] for name, v in algorithm.inspect(report.vectors, public).items()
        }
    if needs.row_distance:
        columns["row_distance"] = np.ones((m, len(server.tables[needs.row_distance])))
    if needs.gram:
        columns["gram"] = np.eye(m)
    if needs.probe:
        columns |= {"distance": np.zeros((m, m)), "tau": np.zeros(m)}
    return Notes(clients, bench.world.num_samples[clients], np.zeros(m, np.int64), np.ones(m, bool), columns)


def round_bytes(bench: Bench, server: Server, report: Report) -> tuple[int, int]:
    """Return the federation's bytes (down, up) of one round, unicast."""
    reads = [bench.config.algorithm.reads(server, k) for k in range(bench.num_sampled)]
    widths = {name: table.shape[1] for name, table in server.tables.items()}
    down = sum(bytes_down(r, widths) for r in reads)
    up = sum(map(count_numbers, [*report.vectors.values(), *report.notes.values()]))
    return down, up * NUMBER_BYTES * bench.num_sampled


def _mixing_line(mixing: Mixing, server: Server, report: Report, bench: Bench) -> str:
    table = server.tables[mixing.into]
    rows, uploads = mixing.num_rows, mixing.weights.shape[1]
    exact, size = bench.config.system.sums == "exact", ranks_of(bench)
    spread = _spreads(table, server, bench)
    collective = choose(rows, uploads, exact, spread)
    if bench.config.system.collective != "auto" and not spread:
        collective = bench.config.system.collective
    rest = busiest_bytes(collective, rows, uploads, table.shape[1], exact)
    name = {REDUCE: "Reduce", SCATTER: "Reduce_scatter"}.get(collective, "Gatherv")
    moved = "nothing moves (P = 1)" if size == 1 else f"{name}, {_size(rest)} at the busiest rank"
    return f"table {mixing.into:18}K = {rows} of {len(table)} rows mixed from {uploads} uploads: {moved}"


def _spreads(table: torch.Tensor, server: Server, bench: Bench) -> bool:
    k, n = len(table), bench.world.num_clients
    alone = k == n and len(np.unique(server.assign)) == n and not bench.config.algorithm.needs.polish
    return alone and is_spread(k, 1, ranks_of(bench))


def _memory_lines(bench: Bench, server: Server, report: Report) -> list[str]:
    """Return what the arrays of a run take, beside Python, PyTorch and the mapped data."""
    d, workers = bench.world.layout.size, max(1, ranks_of(bench) - 1)
    tables = 2 * sum(_held(t) for t in server.tables.values())
    uploads = sum(map(count_numbers, report.vectors.values())) * NUMBER_BYTES
    rows = sum(_held(t) for t in server.tables.values())
    sample = int(np.prod(bench.federation.shape)) * 4
    data = int(bench.federation.sizes.max(0).sum()) * sample
    worker = rows + uploads * -(-bench.num_sampled // workers) + 5 * d * NUMBER_BYTES + data
    scratch = 64 << 20
    memo = sum(np.asarray(v).nbytes for v in server.memo.values())
    return [
        f"memory, server          {_size(tables + memo + scratch)} of arrays",
        f"memory, each worker     {_size(worker + scratch)} of arrays",
    ]


def _held(table: torch.Tensor) -> int:
    """Return the bytes a table takes (an expanded one takes one row)."""
    return table.shape[1] * NUMBER_BYTES * (1 if table.stride(0) == 0 else len(table))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _spread(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high} (median {int(np.median(values))})"
