"""The second look: who asks whom, what arrives, what is counted, and whose failure leaves whom out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from support.asking import Asking, AskingOnce, Remembering, steps

from mpifl.aggregation import exchange_choice as choice
from mpifl.core.capabilities import Question
from mpifl.runtime.hook_errors import ClientError
from mpifl.simulation.delays import Constant
from mpifl.simulation.policies import Barrier, Buffer, Synchronous
from mpifl.traffic.compression import Payload


@pytest.fixture(autouse=True)
def none_failed():
    Asking.failed.clear()


def test_each_client_of_a_step_asks_each_other(tmp_path):
    """Client 2 asks 4: 10 * 2 + 4; its shown numbers are 2 + 2, told 2."""
    (notes,) = steps(Asking(), tmp_path, [[1, 2, 4]]).notes
    nobody = np.nan
    assert_array_equal(notes["answer"], [[nobody, 12, 14], [21, nobody, 24], [41, 42, nobody]])
    assert_array_equal(notes["shown"], [[nobody, 102, 102], [204, nobody, 204], [408, 408, nobody]])
    assert_array_equal(notes["peer"], [[1, 2, 4]] * 3)
    assert_array_equal(notes["told"], [1, 2, 4])


def test_what_is_exchanged_is_counted_for_each_pair_that_looks(tmp_path):
    """Clients 0, 1, 2 ask 3 larger ones in all: five numbers up and down, two shown and three answered."""
    done = steps(AskingOnce(), tmp_path, [[0, 1, 2], [0, 1, 2]])
    rows = {(r["direction"], r["name"]): r for r in done.server_step.ledger.rows() if r["step"] == 1}
    assert (rows["up", "embedding"]["messages"], rows["up", "embedding"]["bytes"]) == (6, 3 * 4 * (2 + 3))
    d = done.server.tables["model"].shape[1]
    assert (rows["up", "model"]["messages"], rows["up", "model"]["bytes"]) == (3, 4 * 3 * d)
    assert (rows["up", "extractor"]["messages"], rows["up", "extractor"]["bytes"]) == (3, 4 * 3 * 5)
    assert (rows["down", "extractor"]["messages"], rows["down", "extractor"]["bytes"]) == (3, 4 * 3 * 5)
    assert "answer" in done.notes[0].columns
    assert "answer" not in done.notes[1].columns
    assert_array_equal(np.isnan(done.notes[0]["told"]), [False, False, True])


@pytest.mark.parametrize(("hook", "at"), [("ask", (1,)), ("answer", (1, 2)), ("compare", (1, 4))])
def test_the_client_that_asks_is_left_out_if_a_hook_fails_twice(hook, at, tmp_path):
    """Client 1 asks 2 and 4; the others still ask it, who has nothing to hide."""
    done = steps(Asking(hook, at), tmp_path, [[1, 2, 4]], on_client_error="drop")
    (notes,) = done.notes
    assert notes.client.tolist() == [2, 4]
    assert_array_equal(notes["answer"], [[21, np.nan, 24], [41, 42, np.nan]])
    assert [(d.step, d.client, d.reason) for d in done.server_step.dropped] == [(1, 1, "RuntimeError: no")]
    assert_array_equal(done.server_step.visits, [0, 0, 1, 0, 1, 0])
    rows = done.server_step.ledger.rows()
    assert sum(r["messages"] for r in rows if r["name"] == "embedding") == 2 * 2 * 2
    model, n = done.server.tables["model"][0], toy.Tiny().sizes[[2, 4], 0]
    assert float(model[0]) == pytest.approx((2 * n[0] + 4 * n[1]) / n.sum(), rel=1e-5)


@pytest.mark.parametrize(("hook", "at"), [("ask", (1,)), ("answer", (1, 4)), ("compare", (1, 2))])
def test_what_a_failed_look_has_computed_is_not_counted(hook, at, tmp_path):
    """Clients 2 and 4 see their 14 and 8 samples to ask; client k embeds 1 + k to answer each of them."""
    done = steps(Asking(hook, at), tmp_path, [[1, 2, 4]], on_client_error="drop")
    found = {k: done.server_step.computation.of_client(k, "statistics").forward_samples for k in (1, 2, 4)}
    assert found == {1: 2 + 2, 2: 14 + 3, 4: 8 + 5}


def test_a_hook_that_fails_once_is_called_again(tmp_path):
    done = steps(Asking("answer", (1, 2), times=1), tmp_path, [[1, 2, 4]], on_client_error="drop")
    assert done.notes[0].client.tolist() == [1, 2, 4]
    assert done.server_step.dropped == []


@pytest.mark.parametrize(("hook", "at"), [("ask", (1,)), ("answer", (1, 2)), ("compare", (1, 4))])
def test_a_failing_hook_ends_a_run_that_leaves_nobody_out(hook, at, tmp_path):
    with pytest.raises(ClientError, match=rf"Asking.{hook}: .*no"):
        steps(Asking(hook, at), tmp_path, [[1, 2, 4]])


def test_a_client_whose_look_fails_counts_with_its_remembered_upload(tmp_path):
    """In round 2 the clients 1 and 2 come, 1 fails; it brings the upload of round 1 and is still asked."""
    method = Remembering("answer", (1, 2))
    done = steps(method, tmp_path, [[1, 4], [1, 2]], on_client_error="drop")
    last = done.notes[1]
    assert last.client.tolist() == [1, 2, 4]
    assert last.fresh.tolist() == [False, True, False]
    nobody = [np.nan] * 3
    assert_array_equal(last["answer"], [nobody, [21, np.nan, 24], [41, 42, np.nan]])
    assert_array_equal(done.server_step.visits, [0, 1, 1, 0, 1, 0])


@pytest.mark.parametrize("policy", [Synchronous(), Barrier(), Buffer(size=6)], ids=lambda p: type(p).__name__)
def test_a_client_whose_look_fails_counts_no_longer_once_its_upload_is_too_old(policy, tmp_path):
    """Client 1 asks in steps 1 and 2, twice in vain in 3 and in 4, where its upload is from version 1."""
    calls = []

    @dataclass(frozen=True)
    class Young(Remembering):
        max_age = 1

        def ask(self, client, own, key):
            if client.id == 1:
                calls.append(len(calls))
                if calls[-1] in (2, 3, 4, 5):
                    raise RuntimeError("no")
            return super().ask(client, own, key)

    options = {"policy": policy, "on_client_error": "drop", "delay": Constant(1.0)}
    done = toy.events(Young(), toy.Tiny(), tmp_path, 5, **options)
    assert [1 in notes.client for notes in done.notes] == [True, True, True, False, True]
    assert [bool(notes.fresh[1]) for notes in done.notes] == [True, True, False, True, True]


def test_messages_are_rounded_as_they_arrive(tmp_path):
    """In bfloat16, 1 + 2^-9 arrives as 1: payload, shown and answered."""

    class Fine(Asking):
        def ask(self, client, own, key):
            return Question(torch.tensor([1 + 2**-9]), torch.tensor([1 + 2**-9]), {})

        def answer(self, client, payload, key):
            return torch.stack([payload[0] - 1, torch.tensor(1 + 2**-9)])

        def compare(self, shown, answered, notes):
            return {"arrived": float((shown - 1).abs().sum() + answered[0].abs() + (answered[1] - 1).abs())}

    (notes,) = steps(Fine(), tmp_path, [[1, 2]], payload=Payload("bfloat16")).notes
    assert_array_equal(notes["arrived"], [[np.nan, 0], [0, np.nan]])


# -- blocks and collectives ----------------------------------------------------------------------------------

OWNERS = np.array([1, 2, 1, 3, 3, 1])


def test_one_client_of_each_rank_asks_at_a_time():
    """Rank 1 has 0, 2 and 5, rank 2 has 1, rank 3 has 3 and 4; 4 does not ask."""
    waves = choice.asking_waves(OWNERS, np.array([0, 1, 2, 3, 5]), 10)
    assert [w.tolist() for w in waves] == [[0, 1, 3], [2], [5]]
    waves = choice.asking_waves(OWNERS, np.array([0, 1, 2, 3, 5]), choice.BLOCK // 2)
    assert [w.tolist() for w in waves] == [[0, 1], [3], [2], [5]], "two questions fill a block"
    assert [*choice.asking_waves(OWNERS, np.zeros(0, np.int64), 10)] == []


@pytest.mark.parametrize("at_server", [False, True])
@pytest.mark.parametrize("shown", [1, 3000, 1 << 20, 1 << 23])
@pytest.mark.parametrize("num_workers", [1, 3, 40])
def test_blocks_have_each_pair_once_and_fit(shown, at_server, num_workers):
    """What a rank answers in a block, and what it receives of answers, fits, or is of one pair."""
    owners = 1 + np.arange(100) % num_workers
    wave = np.arange(num_workers)
    seen = np.zeros((num_workers, 100), int)
    room = max(choice.BLOCK, shown)
    for some, those in choice.pair_blocks(wave, owners, shown, at_server, num_workers):
        seen[np.ix_(some, those)] += 1
        answers = np.bincount(owners[those]).max() * len(some) * shown
        assert answers <= room
        received = len(some) * len(those) if at_server else len(those)
        assert received * shown <= room
    assert (seen == 1).all()


def test_questions_go_to_each_rank_once_and_by_the_cheaper_collective():
    """0 (rank 1) looks at 2 (its own rank), 3 and 4 (rank 3): one copy; 1 (rank 2) at nobody far but 0."""
    pairs = np.zeros((6, 6), bool)
    pairs[0, [2, 3, 4]] = pairs[1, 0] = True
    needed = choice.needed_copies([0, 1], pairs, OWNERS, 4)
    assert needed.astype(int).tolist() == [[0, 0], [0, 1], [0, 0], [1, 0]]
    assert choice.choose_question(OWNERS[:2], needed) == choice.ALLTOALL
    everyone = choice.needed_copies([0, 1], ~np.eye(6, dtype=bool), OWNERS, 4)
    assert choice.choose_question(OWNERS[:2], everyone) == choice.ALLGATHER


def test_bytes_of_ranks_and_of_the_federation_differ_by_copies_and_neighbours():
    """As above. In the federation four pairs ask 7 numbers each; two ranks get a copy.

    Shown 2 and answered 3 numbers by each: 4 * 5 in the federation; of the answers, those of 3 and 4 to rank
    1 and that of 0 to rank 2 move: 9. At rank 0 all of them arrive.
    """
    pairs = np.zeros((6, 6), bool)
    pairs[0, [2, 3, 4]] = pairs[1, 0] = True
    sizes = (7, np.full(6, 2), np.full(6, 3), 100, 4)
    found = choice.exchange_bytes(pairs, OWNERS, *sizes)
    assert (found.pairs, found.asked, found.copies) == (4, 4 * 7, 2 * 7)
    assert (found.compared, found.moved) == (4 * 5, 9)
    assert found.calls == (choice.ALLTOALL,)
    server = choice.exchange_bytes(pairs, OWNERS, *sizes, at_server=True)
    assert server.moved == 4 * 5
    assert found.busiest == 7 + 3 * 2, "rank 1 receives the question of 1, and the answers of 3 and 4"
    assert server.busiest == 4 * 5, "at rank 0"
    assert (found.told, found.vectors) == (server.told, server.vectors) == (1 + 2, 2), "one wave, one block"
    everyone = choice.exchange_bytes(~np.eye(6, dtype=bool), OWNERS, *sizes)
    assert (everyone.pairs, everyone.copies) == (30, 6 * 2 * 7), "each worker gets each question of others"
    assert (everyone.told, everyone.vectors) == (1 + 3 * 2, 3 * 2), "rank 1 has three clients"
    assert (found + everyone).calls == (choice.ALLGATHER, choice.ALLTOALL)
    alone = choice.exchange_bytes(pairs, np.zeros(6, np.int64), *sizes[:-1], 1)
    assert (alone.copies, alone.moved, alone.asked, alone.told, alone.vectors) == (0, 0, 28, 0, 0)


def test_what_ranks_hold_of_a_look_is_bounded_by_blocks():
    """Three workers, six clients: three questions of 7; two clients a worker answer 3 others with 5 each."""
    assert choice.most_held(7, 5, 6, 4, False) == (0, 3 * 7 + 3 * 2 * 3 * 5)
    assert choice.most_held(7, 5, 6, 4, True) == (2 * 2 * 3 * 5, 3 * 7 + 3 * 2 * 3 * 5)
    many = choice.most_held(10**5, 10**5, 1000, 101, True)
    assert many == (2 * choice.BLOCK, 4 * choice.BLOCK)
    assert choice.most_held(10**8, 1, 2, 3, False)[1] == 10**8 + 3 * 2, (
        "a question may be larger than a block"
    )
