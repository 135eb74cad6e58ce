"""What a real federation would have sent, against closed forms (algorithms.md, sections 1 to 5)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.testing import assert_array_equal, assert_equal
from support import toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.traffic.compression import Payload
from mpifl.traffic.encoding import download_bytes
from mpifl.traffic.ledger import Ledger, Moved, count_numbers

N = 6
BODY, HEAD = 16 * 8 + 8, 8 * 3 + 3  # the network of `toy`: 16 pixels, 8 units, 3 classes
D = BODY + HEAD
TRAIN = toy.Tiny().sizes[:, 0]


def test_entries_by_hand():
    """Client 0 sends 10 numbers; rows of 5 numbers go to clients 0 and 1: row 2 to both, row 3 to client 1.

    Unicast: (1 + 2) * 5 * 4 = 60 bytes in three messages. To groups: row 2 once, row 3 once: 40 bytes in two.
    """
    ledger = Ledger(3)
    ledger.add_up(1, "model", 0, 10)
    ledger.add_reads(1, {0: {"model": (2,)}, 1: {"model": (2, 3)}}, {"model": 5})
    everyone, one, up = ledger.rows()
    heads = ("direction", "cast", "stream", "messages", "bytes", "group_messages", "group_bytes", "numbers")
    assert [tuple(row[name] for name in heads) for row in (everyone, one, up)] == [
        ("down", "broadcast", 2, 2, 40, 1, 20, 10),
        ("down", "unicast", 3, 1, 20, 1, 20, 5),
        ("up", "unicast", "", 1, 40, 1, 40, 10),
    ]
    assert {(row["step"], row["kind"], row["name"]) for row in (everyone, one, up)} == {(1, "model", "model")}
    assert ledger.cast_bytes(1) == 40
    assert {name: values.tolist() for name, values in ledger.per_client().items()} == {
        "client": [0, 1, 2],
        "bytes_up": [40, 0, 0],
        "bytes_down": [20, 40, 0],
    }
    assert_array_equal(ledger.up, [40, 0, 0])
    assert_array_equal(ledger.down, [20, 40, 0])
    assert (ledger.total("up"), ledger.total("down", 1), ledger.total("down", 2)) == (40, 60, 0)


def test_a_seed_takes_four_bytes_in_every_payload():
    """Two clients download a seed, 16 + 4 bytes each, and three numbers in float16, 16 + 6 bytes each."""
    payload, reads, widths = (
        Payload("float16", header_bytes=16),
        {"seed": (0,), "model": (0,)},
        {"seed": 1, "model": 3},
    )
    ledger = Ledger(2, payload)
    ledger.add_reads(0, {0: reads, 1: reads}, widths)
    assert {row["name"]: (row["bytes"], row["group_bytes"]) for row in ledger.rows()} == {
        "seed": (40, 20),
        "model": (44, 22),
    }
    assert_array_equal(ledger.down, [42, 42])
    assert download_bytes(reads, widths, payload) == 42


def counted(ledger: Ledger) -> dict:
    """Return all that a ledger holds, as plain values."""
    return {name: value.tolist() for name, value in ledger.state_dict().items()}


def enter(ledger: Ledger, step: int) -> None:
    """Count something of every kind: rows for one and for several, a mixture, vectors, notes, a probe."""
    mixture = np.array([0.5, 0.5])
    reads = {0: {"model": (1,)}, 1: {"model": (0, 1)}, 2: {"model": mixture, "body": (0,)}}
    ledger.add_reads(step, reads, {"model": 5, "body": 3})
    ledger.add_up(step, "model", 0, 5)
    ledger.add_up(step, "model", 2, 5, size=7)
    ledger.add_up(step, "tau", 1, 2, note=True)
    ledger.add_down(step, "extractor", 1, 3, 2)


def test_what_is_rolled_back_was_never_counted():
    """A step that a lost rank broke off is made again; nothing of it may count twice, in any figure."""
    once, again = (Ledger(3, Payload(header_bytes=1)) for _ in range(2))
    for ledger in (once, again):
        enter(ledger, 1)
        ledger.close(1, np.array([0, 1]), np.zeros(3, int).take)
        ledger.commit()
    before = counted(again)
    enter(again, 2)
    assert counted(again) != before
    again.roll_back()
    for name in ("up_of", "down_of", "moved"):
        assert counted(again)[name] == before[name], name
    assert again.rows() == once.rows()
    assert (again.total("up", 2), again.total("down", 2), again.cast_bytes(2)) == (0, 0, 0)
    for ledger in (once, again):
        enter(ledger, 2)
        ledger.commit()
    assert again.rows() == once.rows()
    assert_equal(again.per_client(), once.per_client())
    assert again.cast_bytes(2) == once.cast_bytes(2) > 0
    assert again.close(2, np.array([2]), np.ones(3, int).take) == once.close(
        2, np.array([2]), np.ones(3, int).take
    )


def test_what_serves_clustering_is_counted_apart_and_taken_back_with_its_step():
    """Client 1 sends 10 numbers of 4 bytes and gets 3, for clustering; then the same for training."""
    once, again = (Ledger(3, Payload(header_bytes=0)) for _ in range(2))
    for ledger in (once, again):
        with ledger.for_clustering():
            ledger.add_up(1, "embedding", 1, 10)
            ledger.add_down(1, "extractor", np.array([1, 2]), 3)
        ledger.add_up(1, "model", 1, 10)
        assert ledger.clustering == {("up", 1): 40, ("down", 1): 24}
        if ledger is again:
            ledger.roll_back()
            assert not ledger.clustering.total()
    once.commit()
    once.roll_back()
    restored = Ledger(3, Payload(header_bytes=0))
    restored.load_state_dict(once.state_dict())
    assert restored.clustering == once.clustering == {("up", 1): 40, ("down", 1): 24}


def test_what_was_counted_of_a_step_before_stays_when_the_rest_is_rolled_back():
    """Asynchronous visits of one step are committed one by one: the same entries grow and shrink again."""
    once, again = (Ledger(3, Payload(header_bytes=1)) for _ in range(2))
    for ledger in (once, again):
        enter(ledger, 1)
        ledger.commit()
    for _ in range(2):
        enter(again, 1)
        again.roll_back()
    assert again.rows() == once.rows()
    assert again.totals() == once.totals()
    assert_equal(again.per_client(), once.per_client())
    assert (again.total("up", 1), again.cast_bytes(1)) == (once.total("up", 1), once.cast_bytes(1))


def test_a_ledger_goes_on_from_its_state_as_if_nothing_had_happened():
    """Also in the middle of a step: what is open, which row each client read, broadcasts, visits."""
    whole, broken = (Ledger(3, Payload(header_bytes=1)) for _ in range(2))
    for ledger in (whole, broken):
        enter(ledger, 1)
        ledger.close(1, np.array([0, 1]), np.zeros(3, int).take)
        ledger.add_reads(2, {0: {"model": (1,)}, 1: {"model": (1,)}}, {"model": 5})
    resumed = Ledger(3, Payload(header_bytes=1))
    resumed.load_state_dict(broken.state_dict())
    for ledger in (whole, resumed):
        ledger.add_up(2, "model", 0, 5)
        ledger.add_up(2, "model", 1, 5)
    visits = np.ones(3, int)
    assert resumed.close(2, np.array([0, 1]), visits.take) == whole.close(2, np.array([0, 1]), visits.take)
    assert resumed.rows() == whole.rows()
    assert resumed.moved == whole.moved
    assert [resumed.cast_bytes(t) for t in (1, 2)] == [whole.cast_bytes(t) for t in (1, 2)]
    assert [resumed.total(way, t) for way in ("up", "down") for t in (1, 2)] == [
        whole.total(way, t) for way in ("up", "down") for t in (1, 2)
    ]
    assert counted(resumed) == counted(whole)


def test_several_clients_at_once_are_entered_as_one_by_one():
    """Streams differ; sizes are the same for all, or given for each."""
    together, singly = Ledger(4, Payload(header_bytes=1)), Ledger(4, Payload(header_bytes=1))
    reads = {0: {"model": (1,)}, 1: {"model": (0,)}, 3: {"model": (1,)}}
    for ledger in (together, singly):
        ledger.add_reads(1, reads, {"model": 5})
    clients, numbers = np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])
    together.add_up(1, "model", clients, 5, size=9)
    together.add_up(1, "tau", clients, numbers, note=True)
    together.add_down(1, "time_stamp", clients, 1, note=True)
    for k, n in zip(clients.tolist(), numbers.tolist(), strict=True):
        singly.add_up(1, "model", k, 5, size=9)
        singly.add_up(1, "tau", k, n, note=True)
        singly.add_down(1, "time_stamp", k, 1, note=True)
    assert together.rows() == singly.rows()
    assert {row["stream"] for row in together.rows() if row["name"] == "tau"} == {0, 1, ""}
    assert together.close(1, clients, np.zeros(4, int).take) == singly.close(
        1, clients, np.zeros(4, int).take
    )
    assert (together.total("up"), together.cast_bytes(1)) == (singly.total("up"), singly.cast_bytes(1))


def test_a_step_that_is_closed_is_over():
    """Client 2 gives statistics; client 1 takes part and moves nothing. The next step starts from zero."""
    ledger = Ledger(3)
    ledger.add_up(1, "model", 0, 10)
    ledger.add_up(1, "tau", 2, 1, note=True)
    assert ledger.close(1, np.array([0, 1]), np.array([4, 5, 6]).take) == [
        Moved(1, 0, 4, True, 0, 40),
        Moved(1, 1, 5, True, 0, 0),
        Moved(1, 2, 6, False, 0, 4),
    ]
    assert ledger.close(2, np.array([0]), np.array([5, 6, 6]).take) == [Moved(2, 0, 5, True, 0, 0)]


def test_sizes_of_messages_by_hand():
    """Notes stay in single precision; every row, vector and note has a header; padding is not sent."""
    half = Payload("bfloat16", header_bytes=10)
    assert half.size(100) == 210
    assert half.size(100, messages=3) == 230
    assert half.size(100, note=True) == 410
    assert download_bytes({"model": (0, 2), "body": (1,)}, {"model": 100, "body": 7}, half) == 420 + 24
    assert download_bytes({"model": np.array([0.5, 0.5, 0.0])}, {"model": 100}, half) == 210, (
        "a mixture is one vector"
    )
    assert count_numbers(np.array([1.0, np.nan, 3.0])) == 2
    assert count_numbers(7) == 1
    assert count_numbers(np.zeros((2, 3))) == 6


def traffic(name: str, folder, steps: int = 2, participation: float = 1.0, **options) -> dict[tuple, int]:
    """Return {(step, direction, kind): numbers} of a run."""
    done = toy.run(CATALOGUE[name](**options), toy.Tiny(), folder, steps, False, participation=participation)
    ledger = done.server_step.ledger
    rows = ledger.rows()
    assert all(row["bytes"] == 4 * row["numbers"] for row in rows)
    for way, of_clients in (("up", ledger.up), ("down", ledger.down)):
        assert sum(row["bytes"] for row in rows if row["direction"] == way) == of_clients.sum()
    found: Counter = Counter()
    for r in rows:
        found[r["step"], r["direction"], r["name"]] += r["bytes"] // 4
    return {at: numbers for at, numbers in found.items() if numbers}


@pytest.mark.parametrize("m", [6, 3])
def test_fedavg_sends_a_model_each_way(m, tmp_path):
    assert traffic("fedavg", tmp_path, participation=m / N) == {
        (t, way, "model"): m * D for t in (1, 2) for way in ("up", "down")
    }


@pytest.mark.parametrize("k", [1, 4])
def test_ifca_sends_k_models_down_one_and_its_number_up(k, tmp_path):
    expected = {(t, "down", "model"): N * k * D for t in (1, 2)}
    expected |= {(t, "up", "model"): N * D for t in (1, 2)} | {(t, "up", "cluster"): N for t in (1, 2)}
    assert traffic("ifca", tmp_path, num_clusters=k) == expected


def test_emdcfl_exchanges_extractors_and_embeddings_of_every_pair_once(tmp_path):
    """p = floor(0.9 * 8) = 7. Pair (c, c'): |omega| up and down, n_c p up by c, n'_val p up by c'; and tau by
    each.
    """
    pairs = N * (N - 1)
    embeddings = sum(int(n) * 7 * (N - 1) for n in TRAIN) + pairs * 6 * 7
    expected = {(t, way, "model"): N * D for t in (1, 2) for way in ("up", "down")}
    expected |= {(1, way, "extractor"): pairs * BODY for way in ("up", "down")}
    expected |= {(1, "up", "embedding"): embeddings, (1, "up", "tau"): N}
    assert traffic("emdcfl", tmp_path) == expected


def test_emdcfl_takes_at_most_so_many_images(tmp_path):
    found = traffic("emdcfl", tmp_path, steps=1, sample_cap=5, projection=0.5)
    assert found[1, "up", "embedding"] == 2 * N * (N - 1) * 5 * 4


@pytest.mark.parametrize(
    ("options", "models"), [({}, 1), ({"streams": 2}, 1), ({"streams": 2, "parallel": True}, 2)]
)
def test_ucfl_sends_a_gradient_and_a_variance_first_then_models(options, models, tmp_path):
    """Round 0: the initial model down, P + 1 numbers up. Then one model each way; all streams in parallel."""
    expected = {(0, "down", "init"): N * D, (0, "up", "gradient"): N * D, (0, "up", "variance"): N}
    expected |= {(t, way, "model"): N * models * D for t in (1, 2) for way in ("up", "down")}
    assert traffic("ucfl", tmp_path, noise_batch=4.0, **options) == expected


@pytest.mark.parametrize(
    ("options", "casts"), [({}, N), ({"streams": 2}, 2), ({"streams": 2, "parallel": True}, 2)]
)
def test_ucfl_casts_each_stream_once_to_its_group(options, casts, tmp_path):
    done = toy.run(CATALOGUE["ucfl"](noise_batch=4.0, **options), toy.Tiny(), tmp_path, 1, False)
    rows = [r for r in done.server_step.ledger.rows() if (r["step"], r["direction"]) == (1, "down")]
    assert sorted(r["stream"] for r in rows) == list(range(casts))
    assert (sum(r["group_messages"] for r in rows), sum(r["group_bytes"] for r in rows)) == (
        casts,
        casts * D * 4,
    )


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("local", {}, {}),
        ("fedprox", {"model": D}, {"model": D}),
        ("scaffold", {"model": D, "control": D}, {"model": D, "control": D}),
        ("fedper", {"body": BODY}, {"body": BODY}),
        ("cfl", {"model": D}, {"delta": D}),
        ("oracle", {"model": D}, {"model": D}),
    ],
)
def test_numbers_each_client_sends_in_every_step(name, down, up, tmp_path):
    expected = {(t, "down", kind): N * n for t in (1, 2) for kind, n in down.items()}
    expected |= {(t, "up", kind): N * n for t in (1, 2) for kind, n in up.items()}
    assert traffic(name, tmp_path) == expected


def test_absent_members_send_nothing(tmp_path):
    """Oracle averages the last models of absent members, but they are at the server already."""
    found = traffic("oracle", tmp_path, steps=3, participation=0.5)
    assert found == {(t, way, "model"): 3 * D for t in (1, 2, 3) for way in ("up", "down")}


@pytest.mark.parametrize("looks", ["together", "once", "seen"])
def test_pairs_look_under_partial_participation(looks, tmp_path):
    """3 of 6 take part: step 1 compares 3 * 2 pairs. Later those that take part and have not met look; or all
    seen that have not; or all seen.
    """
    method = CATALOGUE["emdcfl"](looks=looks)
    done = toy.run(method, toy.Tiny(), tmp_path, 4, False, participation=0.5)
    sent: Counter = Counter()
    for r in done.server_step.ledger.rows():
        sent[r["step"], r["direction"], r["name"]] += r["bytes"] if r["name"] == "tau" else r["messages"]
    met, seen = set(), set()
    for step, notes in enumerate(done.notes, 1):
        cohort = set(notes.client[notes.fresh].tolist())
        assert len(cohort) == 3
        seen |= cohort
        assert set(notes.client.tolist()) == seen
        among = cohort if looks == "together" else seen
        pairs = {(a, b) for a in among for b in among if a != b}
        now = pairs if looks == "seen" else pairs - met
        met |= pairs
        assert sent[step, "down", "extractor"] == len(now)
        assert sent[step, "up", "embedding"] == 2 * len(now)
        assert sent[step, "up", "tau"] == 4 * len({a for a, _ in now} & cohort)
    W = done.server.algorithm_state["distance"]
    assert {(a, b) for a, b in np.argwhere(~np.isnan(W)).tolist() if a != b} == met
    assert not np.isnan(np.diag(W)[sorted(seen)]).any()


def test_a_ledger_that_remembers_some_clients_counts_all():
    ledger = Ledger(3, Payload(header_bytes=1))
    ledger.remember(np.array([1]))
    ledger.add_up(1, "model", np.arange(3), 5)
    moved = ledger.close(1, np.arange(3), np.array([4, 5, 6]).take)
    assert len(moved) == 3
    assert list(ledger.moved) == [moved[1]]
    assert (moved[1].client, moved[1].visit) == (1, 5)
    assert {name: values.tolist() for name, values in ledger.per_client().items()} == {
        "client": [1],
        "bytes_up": [21],
        "bytes_down": [0],
    }
    assert ledger.total("up") == 3 * 21
