"""Test bodies that every rank walks: `mpirun -n P python bodies.py FOLDER NAMES`, NAMES a list in JSON.

With P = 1 the same bodies run over MPI.COMM_SELF. All ranks draw the same random numbers; each keeps what is
its own. What came of them stands in FOLDER, see `main`.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.testing import assert_allclose, assert_array_equal
from support.fake_device import FakeDevice, FakeTensor, on_device

from mpifl.aggregation import mixer as mix
from mpifl.aggregation.collective_choice import GATHER, REDUCE
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm import link_test as pairs
from mpifl.comm.mpi import Mpi
from mpifl.comm.single import Single
from mpifl.comm.transport import Mismatch, Transport, divided
from mpifl.core.parameters import take
from mpifl.core.plan import Mixing
from mpifl.core.rng import key
from mpifl.protection.robust_mixer import RobustMixer
from mpifl.protection.robust_rules import GeometricMedian, Median, MultiKrum, NormBound, Rule, TrimmedMean

BODIES: dict[str, Callable[[Mpi, Path], None]] = {}
PATIENCE_S = 120.0  # for one body, on a loaded machine


def body(function: Callable[[Mpi, Path], None]) -> Callable[[Mpi, Path], None]:
    """Register a test body."""
    BODIES[function.__name__] = function
    return function


class Case:
    """Random rows, uploads and weights of one mixing, the same on every rank.

    Args:
        rows: K.
        reports: m.
        components: C, uploads of each report.
        width: of the table.
        keep: `none`, `diagonal`, `dense` (K0 = K + 1 old rows) or `grow` (K0 = 1).
        part: whether the uploads are wider than the table.
        away: so many-th uploads are on a device, the first of them; 0 for none.
    """

    def __init__(
        self,
        transport: Mpi,
        rows: int = 3,
        reports: int = 7,
        components: int = 1,
        width: int = 50,
        keep: str = "none",
        part: bool = False,
        away: int = 0,
    ) -> None:
        self.away = away
        rng = key(0, "case", rows, reports, components, width, keep, int(part)).numpy()
        old = {"none": rows, "diagonal": rows, "dense": rows + 1, "grow": 1}[keep]
        self.old = torch.from_numpy(rng.normal(size=(old, width)).astype(np.float32))
        scale = 10.0 ** rng.integers(-5, 5, (reports * components, 1))
        sparse = rng.random((reports * components, width + 9)) < 0.9
        self.uploads = torch.from_numpy((scale * rng.normal(size=sparse.shape) * sparse).astype(np.float32))
        self.part = (slice(2, 2 + width // 2), slice(8 + width // 2, 8 + width)) if part else None
        if not part:
            self.uploads = self.uploads[:, :width].contiguous()
        weights = rng.random((rows, reports * components)) * (rng.random((rows, reports * components)) < 0.7)
        weights[rows // 2] = 0 if keep == "diagonal" else weights[rows // 2]
        kept = {
            "none": None,
            "diagonal": rng.random(rows),
            "dense": rng.random((rows, old)),
            "grow": np.ones((rows, 1)),
        }
        self.mixing = Mixing(weights, keep=kept[keep], part=self.part)
        owners = rng.choice(transport.workers, reports)
        owners[owners == transport.size - 1] = transport.workers[0]  # the last of several workers has nothing
        self.owners = np.repeat(owners, components)
        self.max_abs = self.uploads.abs().amax(1).numpy().astype(np.float64)

    def upload_info(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the max_abs and owners of all uploads."""
        return self.max_abs, self.owners

    def mine(self, rank: int) -> dict[str, list[torch.Tensor]]:
        """Return a rank's uploads in ascending order."""
        mine = np.flatnonzero(self.owners == rank).tolist()
        far = {j for j in mine if self.away and j % self.away == 0}
        return {"model": [on_device(self.uploads[j]) if j in far else self.uploads[j] for j in mine]}

    def alone(self, exact: bool = True) -> torch.Tensor:
        """Return what one process would make of it."""
        tables = Tables(Single())
        tables.publish({"model": self.old})
        upload_info = (self.max_abs, np.zeros(len(self.owners), np.int64))
        uploads = {"model": list(self.uploads)}
        return Mixer(Single(), tables, exact).mix([self.mixing], lambda _: upload_info, uploads)["model"]

    def together(
        self, transport: Mpi, exact: bool = True, collective: str | None = None, direct: bool = False
    ) -> tuple[torch.Tensor | None, Mixer]:
        """Return, on rank 0, what all ranks make of it."""
        tables = Tables(transport)
        if transport.is_server:
            tables.publish({"model": self.old})
        mixer = Mixer(transport, tables, exact, collective, direct=direct)
        told = ([self.mixing], self.upload_info) if transport.is_server else (None, None)
        return mixer.mix(*told, self.mine(transport.rank)).get("model"), mixer

    def spread(self, transport: Mpi, folder: Path) -> Tables:
        """Return tables whose rows are dealt to the workers."""
        tables = Tables(transport)
        if transport.is_server:
            tables.publish({"model": self.old})
        owner = np.resize(transport.workers[::-1], len(self.old)).astype(np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        tables.shard("model", owner, tuple(self.old.shape), folder)
        return tables


@body
def reduce_and_gather_agree_with_one_process_bit_for_bit(t: Mpi, folder: Path) -> None:
    shapes = itertools.product(("none", "diagonal", "dense", "grow"), (1, 3), (False, True), (1, 4))
    for (keep, components, part, rows), collective in itertools.product(shapes, (REDUCE, GATHER)):
        case = Case(t, rows=rows, components=components, keep=keep, part=part)
        found, mixer = case.together(t, collective=collective)
        if found is not None:
            assert mixer.last_collectives == [collective]
            assert torch.equal(found, case.alone()), (collective, keep, components, part, rows)


def robust_mixing(t: Transport, case: Case, rule: Rule, mine: dict[str, list[torch.Tensor]]) -> Any:
    """Return the new table of a mixing by a rule on rank 0, None elsewhere."""
    tables = Tables(t)
    if t.is_server:
        tables.publish({"model": case.old})
    mixer = RobustMixer(t, Mixer(t, tables), rule)
    owners = case.owners if t.size > 1 else np.zeros(len(case.owners), np.int64)
    told = ([case.mixing], lambda _: (case.max_abs, owners)) if t.is_server else (None, None)
    return mixer.mix(*told, mine).get("model")


@body
def robust_mixings_agree_with_one_process_bit_for_bit(t: Mpi, folder: Path) -> None:
    rules = (Median(), TrimmedMean(0.2), MultiKrum(f=1), NormBound(0.5), GeometricMedian())
    for (keep, part, away), rule in itertools.product(
        (("none", False, 0), ("diagonal", True, 2), ("dense", False, 0)), rules
    ):
        case = Case(t, rows=3, reports=9, width=700, keep=keep, part=part, away=away)
        if keep == "none":  # a mean around old rows
            weights = case.mixing.weights / case.mixing.weights.sum(1, keepdims=True)
            case.mixing = Mixing(weights, part=case.part)
        with FakeDevice():
            found = robust_mixing(t, case, rule, case.mine(t.rank))
        if found is not None:
            alone = robust_mixing(Single(), case, rule, {"model": list(case.uploads)})
            assert torch.equal(found, alone), (rule, keep)


@body
def parts_change_places_and_only_those_of_others_are_counted(t: Mpi, folder: Path) -> None:
    """Rank r sends r + s + 1 numbers 10 r + s to rank s."""
    sent = [t.rank + s + 1 for s in range(t.size)]
    block = torch.cat([torch.full((n,), 10.0 * t.rank + s) for s, n in enumerate(sent)])
    found = t.Alltoallv(block, sent, [q + t.rank + 1 for q in range(t.size)], "swap")
    expected = [10.0 * q + t.rank for q in range(t.size) for _ in range(q + t.rank + 1)]
    assert_array_equal(found.numpy(), expected)
    count = t.traffic.counts["alltoallv", "swap"]
    assert (count.calls, count.messages) == (1, t.size - 1)
    assert count.bytes == 4 * (sum(sent) - sent[t.rank])


@body
def parts_may_overlap_where_they_are_sent(t: Mpi, folder: Path) -> None:
    """Rank r sends each rank s its first s + 1 of the numbers 100 r, 100 r + 1, ..."""
    block = 100.0 * t.rank + torch.arange(t.size + 0.0)
    sent = [s + 1 for s in range(t.size)]
    found = t.Alltoallv(block, sent, [t.rank + 1] * t.size, "overlap", [0] * t.size)
    assert_array_equal(found.numpy(), [100.0 * q + n for q in range(t.size) for n in range(t.rank + 1)])
    assert t.traffic.counts["alltoallv", "overlap"].bytes == 4 * (sum(sent) - sent[t.rank])
    with pytest.raises(Mismatch, match="end behind"):
        t.Alltoallv(block, sent, [t.rank + 1] * t.size, "overlap", [t.size] * t.size)


@body
def workers_gather_each_others_blocks(t: Mpi, folder: Path) -> None:
    """Rank r gives r + 1 numbers r."""
    counts = [r + 1 for r in range(t.size)]
    if t.is_worker:
        found = t.Allgatherv(torch.full((counts[t.rank],), float(t.rank)), counts, "everyone")
        assert_array_equal(found.numpy(), [float(r) for r in t.workers for _ in range(counts[r])])
        count, others = t.traffic.counts["allgatherv", "everyone"], len(t.workers) - 1
        assert (count.calls, count.messages, count.bytes) == (1, others, 4 * counts[t.rank] * others)


@body
def the_sums_are_those_of_numpy(t: Mpi, folder: Path) -> None:
    for keep in ("none", "diagonal", "dense"):
        case = Case(t, keep=keep, part=True, components=2)
        found, _ = case.together(t)
        if found is not None:
            x = take(case.uploads, case.part).double().numpy()
            old, kept = case.old.double().numpy(), case.mixing.keep
            kept = 0 if kept is None else kept[:, None] * old if kept.ndim == 1 else kept @ old
            assert_allclose(found, case.mixing.weights @ x + kept, rtol=1e-6, atol=1e-6)


@body
def rows_spread_over_their_readers_agree_with_one_process_bit_for_bit(t: Mpi, folder: Path) -> None:
    for keep, components, part, rows in itertools.product(
        ("none", "diagonal"), (1, 3), (False, True), (1, 9)
    ):
        case = Case(t, rows=rows, components=components, keep=keep, part=part)
        tables = case.spread(t, folder / f"{keep}-{components}-{part}-{rows}")
        mixer = Mixer(t, tables)
        told = ([case.mixing], case.upload_info) if t.is_server else (None, None)
        for _ in range(2):  # the second mixing starts from the rows of the first
            changed = mixer.mix(*told, case.mine(t.rank))
            found = tables.whole("model")
            assert changed == {}, "no row goes to rank 0"
            if found is not None:
                assert mixer.last_collectives == ["scatter"]
                assert torch.equal(found, case.alone()), (keep, components, part, rows)
                case.old = found
            case.old = torch.from_numpy(t.bcast(case.old.numpy(), "test"))


@body
def rows_that_nothing_enters_stay_where_they_are_and_cost_nothing(t: Mpi, folder: Path) -> None:
    """Two of nine rows receive uploads, other two the next time: a third of them has changed in the end."""
    case = Case(t, rows=9, width=40, keep="diagonal")
    tables = case.spread(t, folder / "few")
    mixer, weights = Mixer(t, tables), case.mixing.weights
    for active in ([0, 7], [7, 2]):
        mask = np.isin(np.arange(9), active)
        case.mixing = Mixing(weights * mask[:, None], keep=np.where(mask, case.mixing.keep, 1.0))
        before = t.traffic.counts["reduce_scatter", "mix:model"].bytes
        mixer.mix(*(([case.mixing], case.upload_info) if t.is_server else (None, None)), case.mine(t.rank))
        spent = sum(t.gather(t.traffic.counts["reduce_scatter", "mix:model"].bytes - before, "test") or [])
        found = tables.whole("model")
        if found is not None:
            assert torch.equal(found, case.alone())
            assert not torch.equal(found[7], case.old[7])
            assert torch.equal(found[3:7], case.old[3:7])
            assert spent == 2 * 40 * 8 * (len(t.workers) - 1)
        case.old = torch.from_numpy(t.bcast(found.numpy() if found is not None else None, "test"))


@body
def equal_rows_are_sent_once_where_they_are_spread(t: Mpi, folder: Path) -> None:
    tables, row = Tables(t), torch.arange(30.0)[None]
    if t.is_server:
        tables.publish({"model": row.expand(7, -1)})
    before = t.traffic.counts["bcast", "rows:model"].bytes
    folder.mkdir(parents=True, exist_ok=True)
    owner = np.resize(t.workers, 7).astype(np.int64)
    tables.shard("model", owner, (7, 30), folder, identical=True)
    found = tables.whole("model")
    if found is not None:
        assert t.traffic.counts["bcast", "rows:model"].bytes - before == 30 * 4 * (t.size - 1)
        assert torch.equal(found, row.expand(7, -1))


@body
def column_blocks_do_not_change_the_bits(t: Mpi, folder: Path) -> None:
    """Width 5000 in blocks of 1024 columns: five messages instead of one."""
    case = Case(t, rows=4, width=5000, keep="diagonal")
    whole = {c: case.together(t, collective=c)[0] for c in (REDUCE, GATHER)}
    spread = Mixer(t, case.spread(t, folder / "whole"))
    told = ([case.mixing], case.upload_info) if t.is_server else (None, None)
    spread.mix(*told, case.mine(t.rank))
    whole["scatter"] = spread.tables.whole("model")
    usual, mix.BLOCK = mix.BLOCK, 1
    try:
        before = t.traffic.counts["reduce", "mix:model"].calls
        blocks = {c: case.together(t, collective=c)[0] for c in (REDUCE, GATHER)}
        after = t.traffic.counts["reduce", "mix:model"].calls
        spread = Mixer(t, case.spread(t, folder / "blocks"))
        spread.mix(*told, case.mine(t.rank))
        blocks["scatter"] = spread.tables.whole("model")
    finally:
        mix.BLOCK = usual
    assert after - before == 5
    if t.is_server:
        for name, found in blocks.items():
            assert torch.equal(found, whole[name]), name
            assert torch.equal(found, case.alone()), name


@body
def fast_sums_agree_up_to_float32(t: Mpi, folder: Path) -> None:
    for keep, collective in itertools.product(("none", "diagonal", "dense"), (REDUCE, GATHER)):
        case = Case(t, keep=keep)
        found, _ = case.together(t, exact=False, collective=collective)
        if found is not None:
            assert_allclose(found, case.alone(), rtol=1e-4, atol=1e-6 * float(case.max_abs.max()))


@body
def several_mixings_travel_in_one_plan(t: Mpi, folder: Path) -> None:
    """Two tables, and one of them twice: the second step starts from the first one's rows."""
    model, control = Case(t, keep="diagonal"), Case(t, rows=2, width=20)
    second = Mixing(np.full((3, 7), 0.1), keep=np.full(3, 0.5))
    mixings = [model.mixing, Mixing(control.mixing.weights, into="control", of="control"), second]
    uploads = {
        **model.mine(t.rank),
        "control": [control.uploads[j] for j in np.flatnonzero(model.owners == t.rank)],
    }
    everything = {"model": list(model.uploads), "control": list(control.uploads)}
    max_abs = {"model": model.max_abs, "control": control.max_abs}
    old = {"model": model.old, "control": control.old}

    def made_by(transport, mine, owners):
        tables = Tables(transport)
        if transport.is_server:
            tables.publish(old)
        told = (mixings, lambda name: (max_abs[name], owners)) if transport.is_server else (None, None)
        return Mixer(transport, tables).mix(*told, mine)

    found = made_by(t, uploads, model.owners)
    if t.is_server:
        expected = made_by(Single(), everything, np.zeros(7, np.int64))
        assert set(found) == {"model", "control"}
        for name, rows in found.items():
            assert torch.equal(rows, expected[name]), name


@body
def uploads_on_a_device_are_mixed_to_the_same_bits(t: Mpi, folder: Path) -> None:
    """All of them or every second one; MPI is given copies in main memory, or a device's memory."""
    options = itertools.product((False, True), (1, 2), ("diagonal", "dense"), (REDUCE, GATHER))
    for direct, every, keep, collective in options:
        case = Case(t, rows=4, components=2, keep=keep, part=True, away=every)
        FakeTensor.lent = 0
        with FakeDevice():
            found, _ = case.together(t, True, collective, direct)
        if found is not None:
            assert torch.equal(found, case.alone()), (direct, every, keep, collective)
        kinds = {type(u) for u in case.mine(t.rank)["model"]}
        lends = direct and not t.is_server and kinds == {FakeTensor}
        assert bool(FakeTensor.lent) == lends, (direct, every, kinds)


@body
def uploads_on_a_device_reach_spread_rows_and_products(t: Mpi, folder: Path) -> None:
    for direct, every in itertools.product((False, True), (1, 2)):
        case = Case(t, rows=9, reports=6, width=9000, keep="diagonal", away=every)
        tables = case.spread(t, folder / f"{direct}-{every}")
        mixer = Mixer(t, tables, direct=direct)
        counts = [int((case.owners == r).sum()) for r in range(t.size)]
        with FakeDevice():
            mine = case.mine(t.rank)
            gram = mixer.gram(mine["model"], counts, case.owners if t.is_server else None, 9000)
            mixer.mix(*(([case.mixing], case.upload_info) if t.is_server else (None, None)), mine)
        found = tables.whole("model")
        if found is not None:
            case.away = 0
            alone = Mixer(Single(), Tables(Single())).gram([*case.uploads], [6], np.zeros(6, np.int64), 9000)
            assert_array_equal(gram, alone)
            assert torch.equal(found, case.alone())


@body
def pairwise_products_agree_with_one_process_bit_for_bit(t: Mpi, folder: Path) -> None:
    """Blocks of 8192 columns: the second is narrower."""
    case = Case(t, reports=6, width=9000)
    counts = [int((case.owners == r).sum()) for r in range(t.size)]
    mixer = Mixer(t, Tables(t))
    found = mixer.gram(case.mine(t.rank)["model"], counts, case.owners if t.is_server else None, 9000)
    if found is not None:
        alone = Mixer(Single(), Tables(Single())).gram(list(case.uploads), [6], np.zeros(6, np.int64), 9000)
        assert_array_equal(found, alone)
        x = case.uploads.double().numpy()
        assert_allclose(found, x @ x.T, rtol=1e-9)
    else:
        assert not t.is_server


@body
def products_come_in_the_order_of_the_reports(t: Mpi, folder: Path) -> None:
    """Reports dealt to the workers in turn: with three of them, sorting and its inverse differ."""
    case = Case(t, reports=7, width=300)
    case.owners = np.resize(t.workers, 7)
    counts = [int((case.owners == r).sum()) for r in range(t.size)]
    usual, mix.GRAM_ROWS = mix.GRAM_ROWS, 3
    try:
        found = Mixer(t, Tables(t)).gram(
            case.mine(t.rank)["model"], counts, case.owners if t.is_server else None, 300
        )
    finally:
        mix.GRAM_ROWS = usual
    if t.is_server:
        x = case.uploads.double().numpy()
        assert_allclose(found, x @ x.T, rtol=1e-9)
        order = np.argsort(case.owners, kind="stable")
        assert t.size < 4 or (order[order] != np.arange(7)).any()


@body
def rows_come_with_values(t: Mpi, folder: Path) -> None:
    """Rank r has r rows [r, 2]; rank 1 alone is told something else."""
    rows = np.array([[float(r), i] for r in range(t.size) for i in range(r)]).reshape(-1, 2)
    told = [{"all": r == 1} for r in range(t.size)]
    given = (told, rows, [*range(t.size)]) if t.is_server else (None, None, ())
    value, mine = t.scatter_rows(*given, "test")
    assert value == told[t.rank]
    mine = np.frombuffer(mine, float).reshape(-1, 2)
    assert mine.tolist() == [[t.rank, i] for i in range(t.rank)]
    answer = t.gather_rows(value, bytes(mine), "test")
    assert (answer is None) == (not t.is_server)
    if answer is not None:
        values, found = answer
        assert values == told
        assert b"".join(found) == rows.tobytes()
        assert t.size < 4 or values[2] is values[3], "equal values are unpickled once"


@body
def verbs_do_what_they_say(t: Mpi, folder: Path) -> None:
    task_batches = [{"for": r, "all": list(range(r))} for r in range(t.size)]
    assert t.scatter(task_batches if t.is_server else None, "test") == task_batches[t.rank]
    assert t.bcast("word" if t.is_server else None, "test") == "word"
    answers = t.gather((t.rank, np.full(3, t.rank)), "test")
    block = torch.full((2, 3), float(t.rank == 0))
    t.Bcast(block, "test")
    total = torch.full((2, 3), t.rank + 1, dtype=torch.int64)
    t.Reduce(total, "test", torch.int64)
    counts = [r % 3 for r in range(t.size)]
    mine = torch.full((counts[t.rank], 4), float(t.rank))
    gathered = t.Gatherv(mine, counts, "test")
    numbers = torch.arange(sum(counts) * 2, dtype=torch.int64).view(-1, 2) * (t.rank + 1)
    workers = [w + 1 for w in t.workers]
    if t.is_worker:
        own = t.Reduce_scatter(numbers, counts, "test", torch.int64)
        start = sum(counts[: t.rank])
        expected = sum(workers) * torch.arange(sum(counts) * 2).view(-1, 2)[start : start + counts[t.rank]]
        assert_array_equal(own, expected)
    t.barrier()
    everyone = t.size * (t.size + 1) // 2
    assert_array_equal(block, 1.0)
    if t.is_server:
        assert [a[0] for a in answers] == list(range(t.size))
        assert_array_equal(np.stack([a[1] for a in answers])[:, 0], np.arange(t.size))
        assert_array_equal(total, everyone)
        assert_array_equal(gathered[:, 0], np.repeat(np.arange(t.size), counts))
    else:
        assert answers is None
        assert gathered is None


@body
def ranks_know_their_place(t: Mpi, folder: Path) -> None:
    assert t.nodes == (0,) * t.size
    assert t.local_rank == t.rank
    assert t.workers == ((0,) if t.size == 1 else tuple(range(1, t.size)))
    assert t.is_worker == (t.rank > 0 or t.size == 1)
    assert t.comm.Get_name() == "mpifl"


@body
def groups_of_ranks_talk_among_themselves(t: Mpi, folder: Path) -> None:
    """Two groups, that of rank 0 the larger one; the whole goes on beside them."""
    count = min(2, t.size)
    group = t.split(count)
    mine = next(ranks for ranks in divided(t.nodes, count) if t.rank in ranks)
    assert (group.size, group.rank) == (len(mine), mine.index(t.rank))
    assert group.gather(t.rank, "test") == (None if group.rank else mine)
    assert group.bcast(t.rank if group.is_server else None, "test") == mine[0]
    total = torch.tensor([float(t.rank)])
    group.Reduce(total, "test")
    assert group.rank or total.item() == sum(mine)
    assert group.local_rank == t.local_rank == t.rank
    assert t.bcast("all" if t.is_server else None, "test") == "all"
    assert t.gather(group.rank, "test") == (
        None
        if t.rank
        else [ranks.index(r) for r in range(t.size) for ranks in divided(t.nodes, count) if r in ranks]
    )


@body
def links_between_nodes_add_rightly(t: Mpi, folder: Path) -> None:
    """Every rank counts as a node of its own, then all as one."""
    real = t.nodes
    t.nodes = tuple(range(t.size))
    links = pairs.measure(t, 60.0)
    t.nodes = (0,) * t.size
    alone = pairs.measure(t, 60.0)
    t.nodes = real
    if links is not None:
        assert [link.ranks for link in links] == [*itertools.combinations(range(t.size), 2)]
        assert all(link.right and link.latency_s > 0 < link.bytes_s for link in links)
        assert alone == []


@body
def clocks_of_nodes_are_compared_within_the_error_that_is_said(t: Mpi, folder: Path) -> None:
    """Every rank counts as a node of its own; all read one clock, so the true offset is 0."""
    real, before = t.nodes, t.traffic.bytes
    same = t.compare_clocks()
    t.nodes = tuple(range(t.size))
    far = t.compare_clocks()
    t.nodes = real
    assert (same.offset, same.error) == (0, 0) if len(set(real)) == 1 else same.error >= 0
    assert abs(far.offset) <= far.error
    assert (far.error > 0) == (t.rank > 0)
    assert far.error < 1
    assert far.began <= far.at
    begins = t.allgather((same.began, far.began), "test")
    assert len({*begins}) == 1, "that of rank 0"
    assert t.traffic.bytes - before < 1000 * t.size, "of that allgather"


@body
def only_rows_that_changed_travel(t: Mpi, folder: Path) -> None:
    tables = Tables(t)
    rows = torch.arange(12.0).view(4, 3)
    sent = []
    for turn in range(3):
        if t.is_server:
            new = rows.clone()
            new[1] += turn
            tables.publish({"model": new})
        missing = t.bcast(tables.missing({"model": {0, 1, 3}}) if t.is_server else None, "test")
        before = t.traffic.counts["bcast", "rows:model"].bytes
        tables.bcast_rows(missing)
        sent.append(t.traffic.counts["bcast", "rows:model"].bytes - before)
        if t.is_worker:
            expected = torch.tensor([[9.0, 10.0, 11.0], [3.0 + turn, 4.0 + turn, 5.0 + turn]])
            assert_array_equal(tables.rows("model", (3, 1)), expected)
            assert_array_equal(tables.rows("model", (0,)), rows[:1])
    row = 3 * 4 * (t.size - 1) * t.is_server
    assert sent == [3 * row, row, row], sent


@body
def an_upload_that_does_not_fit_the_plan_ends_all_ranks_with_one_error(t: Mpi, folder: Path) -> None:
    """A worker holds an upload too many, one that is too long or of another type; nobody waits for it."""
    last, heard = t.size - 1, []
    for damage in (
        lambda mine: [*mine, torch.zeros(50)],
        lambda mine: [torch.zeros(51), *mine[1:]],
        lambda mine: [torch.zeros(50, dtype=torch.float64), *mine[1:]],
    ):
        own, case = Mpi(MPI.COMM_SELF if t.size == 1 else None), Case(t)
        case.owners[:] = np.where(np.arange(len(case.owners)) % 2, last, case.owners)
        mine = case.mine(t.rank)
        if t.rank == last:
            mine["model"] = damage(mine["model"])
        tables = Tables(own)
        tables.publish({"model": case.old} if t.is_server else {})
        told = ([case.mixing], case.upload_info) if t.is_server else (None, None)
        try:
            Mixer(own, tables).mix(*told, mine)
        except Mismatch as error:
            own.raise_on_others(error)
            heard.append(str(error))
    assert len(heard) == 3
    everyone = t.gather(heard, "test")
    if everyone is not None:
        assert all(one == heard for one in everyone)
        for text, said in zip(heard, ("weights", "float32 [51]", "float64 [50]"), strict=True):
            assert f"rank {last}" in text
            assert said in text


@body
def bytes_on_the_wire_follow_from_sizes(t: Mpi, folder: Path) -> None:
    """d = 1000. Reduce: K d 8 bytes from each worker. Gatherv: m d 4 in all. Reduce_scatter: what leaves each
    rank.
    """
    before = {what: count.bytes for what, count in t.traffic.counts.items()}

    def moved(call: str) -> int:
        spent = t.traffic.counts[call, "mix:model"].bytes - before.get((call, "mix:model"), 0)
        return sum(t.gather(spent, "test") or [])

    case = Case(t, rows=5, width=1000)
    case.together(t, collective=REDUCE)
    case.together(t, collective=GATHER)
    tables = case.spread(t, folder / "bytes")
    Mixer(t, tables).mix(
        *(([case.mixing], case.upload_info) if t.is_server else (None, None)), case.mine(t.rank)
    )
    reduced, gathered, scattered = (moved(c) for c in ("reduce", "gatherv", "reduce_scatter"))
    if t.is_server:
        assert reduced == 5 * 1000 * 8 * (t.size - 1)
        assert gathered == (7 * 1000 * 4 if t.size > 1 else 0)
        assert scattered == 5 * 1000 * 8 * (len(t.workers) - 1)


@body
def vectors_are_never_pickled(t: Mpi, folder: Path) -> None:
    """What travels as small objects does not grow with the vectors."""
    sent = []
    for width in (100, 100_000):
        before = sum(c.bytes for (call, _), c in t.traffic.counts.items() if call == "send")
        case = Case(t, width=width, keep="diagonal")
        for collective in (REDUCE, GATHER):
            case.together(t, collective=collective)
        sent.append(sum(c.bytes for (call, _), c in t.traffic.counts.items() if call == "send") - before)
    assert abs(sent[1] - sent[0]) < 100, sent
    assert (sent[0] > 0) == (t.is_server and t.size > 1)


def main(folder: Path, names: Sequence[str]) -> None:
    """Run the bodies; each rank notes in FOLDER/RANK.jsonl which are done, and what went wrong in one.

    A rank that fails ends the job: the others may wait for it in a collective. So does one that waits for two
    minutes.
    """
    alone = MPI.COMM_WORLD.size == 1
    transport = Mpi(MPI.COMM_SELF if alone else None)
    with (folder / f"{transport.rank}.jsonl").open("w", buffering=1) as notes:
        for name in names:
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
            try:
                BODIES[name](transport, folder / name)
            except BaseException:
                print(json.dumps([name, traceback.format_exc()]), file=notes, flush=True)
                transport.abort(1)
                raise
            print(json.dumps([name, ""]), file=notes)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
