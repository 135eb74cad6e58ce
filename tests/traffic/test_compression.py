"""What messages look like: rounded numbers, headers, compressed uploads, errors fed back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import byhand, toy
from support.nightly import mostly_nightly
from torch.testing import assert_close

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.update_filter import FilteredVisit, UpdateFilters
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import MethodError, NotFinite, UserError
from mpifl.core.parameters import Layout, VectorParts
from mpifl.core.rng import Key, key
from mpifl.core.types import Message, Report
from mpifl.traffic.compression import QSGD, Codec, Coder, Int8, Payload, RandomK, TopK, Uncompressed

D = 163
HALF = TopK(0.5)  # one of two numbers: 4 bytes, and 4 for its place


def test_top_k_keeps_the_largest_by_hand():
    x = torch.tensor([0.5, -3.0, 1.0, 2.0])
    assert TopK(0.5).code(x, key(0), True).tolist() == [0.0, -3.0, 0.0, 2.0]
    assert TopK(0.5).size(4, 4) == 2 * (4 + 4)
    assert TopK(0.01).size(4, 2) == 2 + 4, "at least one number"


@pytest.mark.parametrize("how", [RandomK(0.25), QSGD(4, 16)], ids=["random_k", "qsgd"])
def test_what_is_sent_is_the_vector_in_the_mean(how):
    """2000 draws; the standard error of each mean is estimated from the draws themselves."""
    x = torch.randn(24, generator=key(0, "x").torch())
    draws = torch.stack([how.code(x, key(0, i), True) for i in range(2000)]).double().numpy()
    error = draws.std(0) / np.sqrt(len(draws))
    assert_allclose(draws.mean(0), x.numpy(), atol=5 * error.max())


def test_random_k_is_not_scaled_where_errors_are_fed_back():
    x = torch.arange(1.0, 9.0)
    sent = RandomK(0.25).code(x, key(0), False)
    assert int((sent != 0).sum()) == 2
    assert bool(((sent == 0) | (sent == x)).all())


def test_int8_errs_by_half_a_level_at_most():
    x = torch.randn(1000, generator=key(1).torch())
    out = Int8(100).code(x, key(0), True)
    level = x.reshape(10, 100).abs().amax(1) / 127
    assert bool(((out - x).reshape(10, 100).abs().amax(1) <= level / 2 * 1.001).all())
    assert not torch.equal(out, x)


@pytest.mark.parametrize(
    ("how", "size"),
    [
        (Uncompressed(), 4 * 1000),
        (TopK(0.1), 100 * 8),
        (RandomK(0.1), 100 * 4 + 8),
        (QSGD(8, 512), 1000 + 2 * 4),
        (QSGD(4, 512), 500 + 2 * 4),
        (Int8(512), 1000 + 2 * 4),
    ],
)
def test_bytes_of_a_thousand_numbers(how, size):
    assert how.size(1000, 4) == size


@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (3, 3), (4, 7)])
def test_qsgd_has_as_many_levels_as_its_bits_allow(bits, levels):
    """The sign is one of the bits: 2^(bits - 1) - 1 multiples of the norm over as many, on either side."""
    x = torch.tensor([3.0, -4.0, 1.0, 0.5])
    norm, seen = float(x.norm()), set()
    for i in range(300):
        multiples = QSGD(bits, 4).code(x, key(0, i), True) / norm * levels
        assert_close(multiples, multiples.round(), rtol=0, atol=1e-5)
        seen |= set(multiples.round().int().tolist())
    assert max(seen) <= levels
    assert min(seen) >= -levels
    assert len(seen) > min(levels, 4)


@pytest.mark.parametrize("how", [TopK(0.1), RandomK(0.1), QSGD(), Int8()])
def test_a_vector_of_zeros_stays_one(how):
    assert_close(how.code(torch.zeros(20), key(0), True), torch.zeros(20))


def fedavg(folder, **payload):
    """Return three rounds of FedAvg under a payload."""
    return toy.run(CATALOGUE["fedavg"](), toy.Tiny(), folder, 3, payload=Payload(**payload))


def test_the_ledger_shows_what_compression_saves(tmp_path):
    """Six clients, three rounds: 16 of 163 numbers with their places, instead of all."""
    ledger = fedavg(tmp_path, compression=TopK(0.1), header_bytes=10).server_step.ledger
    assert ledger.total("up") == 18 * (10 + 16 * 8)
    assert ledger.total("down") == 18 * (10 + D * 4)
    assert {row["numbers"] for row in ledger.rows() if row["direction"] == "up"} == {6 * D}


def test_half_precision_halves_the_bytes_and_rounds_the_numbers(tmp_path):
    plain, half = fedavg(tmp_path / "a"), fedavg(tmp_path / "b", dtype="bfloat16")
    assert 2 * half.server_step.ledger.total("up") == plain.server_step.ledger.total("up")
    assert 2 * half.server_step.ledger.total("down") == plain.server_step.ledger.total("down")
    assert not torch.equal(half.server.tables["model"], plain.server.tables["model"])
    assert_close(half.server.tables["model"], plain.server.tables["model"], rtol=0.1, atol=0.03)


def test_errors_fed_back_make_up_for_what_was_left_out(tmp_path):
    """The stated example: FedAvg, six clients of one group, two numbers of 163 sent, forty rounds.

    Plain FedAvg reaches an accuracy of 1 and a loss of 0.016; without error feedback 0.96 and 0.70.
    """

    def scores(name: str, **payload) -> tuple[float, float]:
        world, how = toy.Tiny(num_groups=1), Payload(**payload)
        done = toy.run(CATALOGUE["fedavg"](), world, tmp_path / name, 40, payload=how)
        return float(done.scores["accuracy"].mean()), float(done.scores["loss"].mean())

    accuracy, loss = scores("without", compression=TopK(0.01))
    assert accuracy < 1
    assert loss > 0.3
    accuracy, loss = scores("back", compression=TopK(0.01), error_feedback=True)
    assert accuracy == 1
    assert loss < 0.05


SENT = ("ifca", "fedem", "scaffold", "fedper", "ucfl", "emdcfl", "cfl")


@pytest.mark.parametrize("name", mostly_nightly(SENT, ["fedem", "fedper", "emdcfl", "cfl"]))
def test_methods_run_under_compression(name, tmp_path):
    """Several rows downloaded, several vectors uploaded, parts, statistics, remembered uploads."""
    payload = Payload("float16", 4, TopK(0.2), error_feedback=True)
    done = toy.run(CATALOGUE[name](), toy.Tiny(), tmp_path, 3, payload=payload)
    assert all(bool(torch.isfinite(t).all()) for t in done.server.tables.values())
    plain = toy.run(CATALOGUE[name](), toy.Tiny(), tmp_path / "plain", 3)
    trained = [
        sum(r["bytes"] for r in d.server_step.ledger.rows() if r["step"] == 3 and r["direction"] == "up")
        for d in (done, plain)
    ]
    assert trained[0] < 0.5 * trained[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Payload("int4"), "dtype = 'int4': use one of float32"),
        (lambda: Payload(header_bytes=-1), "header_bytes = -1"),
        (lambda: Payload(error_feedback=True), "nothing is left out without compression"),
        (lambda: RandomK(1.5), "share = 1.5"),
        (lambda: Int8(0), "bucket = 0"),
    ],
)
def test_impossible_payloads_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_shares_whose_product_is_not_whole_take_the_nearest_number():
    """0.1 of 37 numbers are 4 (not 3) of 4 + 4 bytes; 3 bits of 10 numbers are 4 bytes, in 3 buckets of 4."""
    x = torch.arange(1.0, 38.0)
    assert TopK(0.1).code(x, key(0), True).count_nonzero() == 4
    assert TopK(0.1).size(37, 4) == 32
    assert RandomK(0.1).size(37, 4) == 24
    sent = RandomK(0.1).code(x, key(0), True)
    torch.testing.assert_close(sent[sent > 0], 37 / 4 * x[sent > 0])
    assert QSGD(bits=3, bucket=4).size(10, 4) == 4 + 3 * 4
    assert Int8(bucket=4).size(10, 4) == 10 + 3 * 4


# -- a coder -------------------------------------------------------------------------------------------------


class Link:
    """A coder between a client and the server, with the client's store."""

    def __init__(self, payload: Payload, folder: Path, parts: VectorParts) -> None:
        self.coder, self.store = Coder(payload, parts, key(0)), ClientStore("test", str(folder))
        self.down = self.coder.download

    def up(self, sent: Report, message: Message, visit: int, where: Key) -> tuple[Report, Mapping[str, int]]:
        """Return a report as it arrives, and the bytes of its vectors."""
        size = UpdateFilters([self.coder]).sizes(self.coder.payload.vector_bytes(sent), sent, message)
        return self.coder.client(sent, FilteredVisit(message, visit, where, store=self.store)), size


@pytest.fixture
def coder(tmp_path):
    """Return a function that makes a link with a payload."""
    return lambda **payload: Link(Payload(**payload), tmp_path, VectorParts(byhand.FLAT))


def report(**vectors: list) -> Report:
    """Return a report of client 3."""
    return Report(3, 10, {name: torch.tensor(v) for name, v in vectors.items()})


def test_an_upload_is_coded_as_its_difference_from_the_row_it_started_from(coder):
    """(1, 2) + (0.5, -3): the larger change arrives, the other number stays that of the row."""
    message = byhand.message(model=[[1.0, 2.0]])
    sent, size = coder(compression=HALF).up(report(model=[1.5, -1.0]), message, 0, key(0))
    assert_close(sent.vectors["model"], torch.tensor([1.0, -1.0]))
    assert size == {"model": 8}


def test_where_several_rows_were_read_it_is_coded_from_the_nearest_which_is_named(coder):
    """Rows (0, 0), (10, 10), (20, 0); of (11, 9.5) the second is nearest: (11, 10), 4 bytes more."""
    message = byhand.message(model=[[0.0, 0.0], [10.0, 10.0], [20.0, 0.0]])
    sent, size = coder(compression=HALF, header_bytes=5).up(report(model=[11.0, 9.5]), message, 0, key(0))
    assert_close(sent.vectors["model"], torch.tensor([11.0, 10.0]))
    assert size == {"model": 5 + 8 + 4}


NORMED_LAYOUT = Layout(("body.w", "head.w", "body.var"), ((1,), (1,), (2,)), 2, ("head",))


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("compression", [TopK(0.5), RandomK(0.5), QSGD(bits=2), Int8()])
def test_running_statistics_are_sent_whole_and_leave_no_residual(tmp_path, compression, feedback):
    """Two weights and two variances; the variances arrive exactly, for 4 bytes each."""
    layout = Layout(("w", "var"), ((2,), (2,)), 2)
    payload = Payload(compression=compression, error_feedback=feedback, header_bytes=3)
    coder = Link(payload, tmp_path, VectorParts(layout))
    message, upload = byhand.message(model=[[0.0, 0.0, 9.0, 4.0]]), report(model=[0.3, -0.2, 0.125, 7.0])
    arrived, size = coder.up(upload, message, 0, key(0))
    assert arrived.vectors["model"].tolist()[2:] == [0.125, 7.0]
    assert arrived.vectors["model"].tolist()[:2] != upload.vectors["model"].tolist()[:2]
    assert size == {"model": 3 + compression.size(2, 4) + 8}
    if feedback:
        left = coder.store.load("error", 3, 1)["model"][0]
        assert_close(left[:2], upload.vectors["model"][:2] - arrived.vectors["model"][:2])
        assert left.tolist()[2:] == [0.0, 0.0]


def test_statistics_are_found_in_a_part_of_a_model_that_a_method_names(tmp_path):
    """The body is a weight and two variances, of which the payload's type rounds 1 + 2^-12 alone."""
    parts = VectorParts(NORMED_LAYOUT, {"shared": "body"})
    assert parts.statistics("shared", 3) == (slice(1, 3),)
    assert parts.weights("shared", 3) == (slice(0, 1),)
    assert parts.statistics("shared", 5) == parts.statistics("model", 2) == ()
    assert parts.statistics("model", 4) == (slice(2, 4),)
    assert parts.tensor_at("shared", 3, 2) == "body.var"
    coder = Link(Payload("float16", compression=TopK(1.0)), tmp_path, parts)
    message, upload = byhand.message(shared=[[0.0, 0.0, 0.0]]), report(shared=[2.0, 1 + 2**-12, 0.25])
    arrived, size = coder.up(upload, message, 0, key(0))
    assert arrived.vectors["shared"].tolist() == [2.0, 1.0, 0.25]
    assert size == {"shared": (2 + 4) + 2 * 2}


@pytest.mark.parametrize("compression", [Uncompressed(), TopK(1.0)])
def test_a_number_beyond_the_payloads_type_is_named_with_its_tensor(tmp_path, compression):
    payload = Payload("float16", compression=compression)
    parts = VectorParts(NORMED_LAYOUT)
    coder = Link(payload, tmp_path, parts)
    message, upload = byhand.message(model=[[0.0] * 4]), report(model=[1.0, 2.0, 3.0, 70_000.0])
    for send in (
        lambda: coder.up(upload, message, 0, key(0)),
        lambda: coder.down(byhand.message(model=[upload.vectors["model"].tolist()]), 0),
    ):
        with pytest.raises(NotFinite, match=r"payload.dtype float16: .*body\.var: 7e\+04.*65504"):
            send()
    coder.up(report(model=[1.0, 2.0, float("nan"), 65_504.0]), message, 0, key(0))


def test_statistics_are_not_compressed(tmp_path):
    """With half of the changes, (3, 1) + 2 (0, -1) would be (3, -1): no sum of anything."""
    payload = Payload(compression=RandomK(0.5), header_bytes=5, error_feedback=True)
    parts = VectorParts(byhand.FLAT, no_weights=("labels",))
    coder = Link(payload, tmp_path, parts)
    message = byhand.message(model=[[0.0, 0.0]], labels=[[3.0, 1.0]])
    upload = report(model=[1.0, 2.0], labels=[[2.5, 0.25]])
    sent, size = coder.up(upload, message, 0, key(0))
    assert_close(sent.vectors["labels"], upload.vectors["labels"])
    assert (sent.vectors["model"] == 0).sum() == 1
    assert size == {"model": 5 + 4 + 8, "labels": 5 + 8}
    assert [*coder.store.load("error", 3, 1)] == ["model"], "nothing is left out of the others"


def test_components_are_coded_row_for_row(coder):
    message = byhand.message(model=[[0.0, 0.0], [10.0, 10.0]])
    sent, size = coder(compression=HALF).up(report(model=[[9.0, 8.0], [1.0, 3.0]]), message, 0, key(0))
    assert_close(sent.vectors["model"], torch.tensor([[9.0, 0.0], [1.0, 10.0]]))
    assert size == {"model": 16}


def test_what_is_left_out_is_added_to_the_clients_next_upload(coder):
    """Of (2, 3) the 3 is sent and 2 kept; of (2, 3) + (2, 0) the 4; then 3 + 3 of the second number."""
    message, one = byhand.message(model=[[0.0, 0.0]]), coder(compression=HALF, error_feedback=True)
    arrived = [one.up(report(model=[2.0, 3.0]), message, visit, key(0))[0] for visit in range(3)]
    assert [a.vectors["model"].tolist() for a in arrived] == [[0.0, 3.0], [4.0, 0.0], [0.0, 6.0]]


def test_a_visit_that_is_made_again_starts_from_the_same_residual(coder):
    message, one = byhand.message(model=[[0.0, 0.0]]), coder(compression=HALF, error_feedback=True)
    one.up(report(model=[2.0, 3.0]), message, 0, key(0))
    again = [one.up(report(model=[2.0, 3.0]), message, 1, key(0))[0].vectors["model"] for _ in range(2)]
    assert_close(again[0], again[1])


def test_what_no_federation_sends_costs_nothing_and_arrives_whole(coder):
    """A vector that the server can work out for itself."""
    message = byhand.message(model=[[0.0, 0.0]])
    whole = Report(
        3, 10, {"model": torch.tensor([2.0, 3.0]), "delta": torch.tensor([4.0, 5.0])}, unsent=("delta",)
    )
    sent, size = coder(compression=HALF).up(whole, message, 0, key(0))
    assert size == {"model": 8}
    assert_close(sent.vectors["delta"], torch.tensor([4.0, 5.0]))
    assert UpdateFilters().sizes(Payload().vector_bytes(whole), whole, message) == {"model": 8}


def test_statistics_are_rounded_and_never_compressed(coder):
    payload = Payload("bfloat16", compression=HALF)
    sent = Coder(payload, VectorParts(byhand.FLAT), key(0)).statistics(report(gradient=[1.001, 2.0]))
    assert_close(sent.vectors["gradient"], torch.tensor([1.0, 2.0]), rtol=0, atol=0)
    assert payload.vector_bytes(sent) == {"gradient": 4}


@dataclass(frozen=True)
class Halves(Codec):
    """Two bytes for each number."""

    longer: int = 0

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size in bytes."""
        return 2 * d + self.longer

    def encode(self, x, key, unbiased):
        return x.numpy().astype("<f2").tobytes()

    def decode(self, data, d):
        return torch.from_numpy(np.frombuffer(data, "<f2").astype(np.float32))


def test_the_bytes_of_a_codec_are_as_many_as_its_size():
    assert_close(Halves().code(torch.tensor([1.0, 0.1]), key(0), True), torch.tensor([1.0, 0.0999756]))
    with pytest.raises(MethodError, match=r"Halves.size: 7 bytes for 2 numbers, and encode returns 4"):
        Halves(3).code(torch.zeros(2), key(0), True)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda x: x.double(), r"torch.float64 \[2\] for a float32 vector \[2\]"),
        (lambda x: x[:1], r"torch.float32 \[1\] for"),
        (lambda x: x.numpy(), "ndarray for"),
        (lambda x: x / 0, "numbers that are not finite"),
    ],
)
def test_what_a_codec_of_ones_own_decodes_is_checked(made, found, monkeypatch, coder):
    monkeypatch.setattr(Halves, "code", lambda self, x, key, unbiased: made(x))
    with pytest.raises(MethodError, match=f"Halves.code: {found}"):
        coder(downloads=Halves()).down(byhand.message(model=[[0.5, 1.0]]), 0)


def test_the_ledger_counts_the_bytes_that_a_codec_made(tmp_path, monkeypatch):
    """Six clients of FedAvg, three rounds; the witness is the length of what `encode` returned."""
    made = {"up": 0, "down": 0}
    encode = Halves.encode

    def witnessed(self, x, key, unbiased):
        data = encode(self, x, key, unbiased)
        made["up" if self.longer else "down"] += len(data) + self.longer
        return data + bytes(self.longer)

    monkeypatch.setattr(Halves, "encode", witnessed)
    decode = Halves.decode
    monkeypatch.setattr(Halves, "decode", lambda self, data, d: decode(self, data[: 2 * d], d))
    done = fedavg(tmp_path, compression=Halves(5), downloads=Halves())
    ledger = done.server_step.ledger
    assert ledger.total("up") == made["up"] == 18 * (2 * D + 5)
    assert ledger.total("down") == 18 * 2 * D
    assert made["down"] % (2 * D) == 0
    assert ledger.cast_bytes(1) == 2 * D, "one row, which all clients read"


def test_a_row_arrives_alike_at_all_clients_and_anew_at_each_version(coder):
    down = coder(downloads=QSGD(4)).down
    first = byhand.message(model=[[0.3, -0.7], [0.1, 0.9]])
    assert_close(down(first, 0)["model"], down(first, 5)["model"], rtol=0, atol=0)
    later = down(replace(first, version=1), 0)
    assert not torch.equal(later["model"], down(first, 0)["model"])
    second = replace(first, vectors={"model": first["model"][1:]}, rows={"model": (1,)})
    assert_close(down(second, 0)["model"][0], down(first, 0)["model"][1], rtol=0, atol=0)


def test_a_mixture_of_rows_is_coded_for_its_client(coder):
    down = coder(downloads=QSGD(2)).down
    mixed = replace(byhand.message(model=[[0.3, -0.7]]), rows={"model": np.array([0.5, 0.5])})
    drawn = {tuple(down(mixed, k)["model"][0].tolist()) for k in range(20)}
    assert len(drawn) > 1


def test_downloaded_statistics_are_sent_whole(tmp_path):
    """Two weights in one byte each with a scale, two variances in four bytes each."""
    parts, payload = VectorParts(Layout(("w", "var"), ((2,), (2,)), 2)), Payload(downloads=Int8())
    arrived = Link(payload, tmp_path, parts).down(byhand.message(model=[[0.3, -0.2, 9.0, 4.1]]), 0)
    assert arrived["model"][0].tolist()[2:] == [9.0, torch.tensor(4.1).item()]
    assert arrived["model"][0].tolist()[:2] != torch.tensor([0.3, -0.2]).tolist()
    assert payload.sent(parts).row_bytes("model", 4, 3, False) == 3 * ((2 + 4) + 2 * 4)
    assert payload.sent(parts).row_bytes("model", 4, 3, True) == 3 * 16


@pytest.mark.parametrize("name", mostly_nightly(SENT, ["ifca", "scaffold", "emdcfl"]))
def test_methods_run_with_compressed_downloads(name, tmp_path):
    payload = Payload(header_bytes=4, compression=QSGD(), downloads=Int8())
    done = toy.run(CATALOGUE[name](), toy.Tiny(), tmp_path, 3, payload=payload)
    assert all(bool(torch.isfinite(t).all()) for t in done.server.tables.values())
    plain = toy.run(CATALOGUE[name](), toy.Tiny(), tmp_path / "plain", 3)
    down = [d.server_step.ledger.total("down", 3) for d in (done, plain)]
    assert 0.2 * down[1] < down[0] < 0.5 * down[1]


def test_downloads_arrive_rounded(coder):
    message = coder(dtype="bfloat16").down(byhand.message(model=[[1.001, 2.0]]), 0)
    assert_close(message["model"], torch.tensor([[1.0, 2.0]]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("how", [Int8(), QSGD(), QSGD(bits=16)])
def test_levels_and_scales_arrive_alike_under_every_dtype(how, dtype, coder):
    """They are integers and scales in float32, of the same bytes; the change is of 1e-7."""
    x = 1e-7 * torch.randn(600, generator=torch.Generator().manual_seed(0))
    message, sent = byhand.message(model=[[0.0] * 600]), Report(3, 10, {"model": x})
    (plain, size), (other, also) = (
        coder(dtype=d, compression=how).up(sent, message, 0, key(0)) for d in ("float32", dtype)
    )
    assert_close(other.vectors["model"], plain.vectors["model"], rtol=0, atol=0)
    assert size == also


@pytest.mark.parametrize("how", [TopK(1.0), RandomK(1.0)])
def test_numbers_that_are_sent_as_they_are_arrive_rounded(how, coder):
    message = byhand.message(model=[[0.0, 0.0]])
    sent, size = coder(dtype="bfloat16", compression=how).up(report(model=[1.001, 2.0]), message, 0, key(0))
    assert_close(sent.vectors["model"], torch.tensor([1.0, 2.0]), rtol=0, atol=0)
    assert size == {"model": how.size(2, 2)}


def test_seeds_arrive_as_they_were_sent(coder):
    message = coder(dtype="float16").down(byhand.message(seed=[[2049.0]], model=[[2049.0]]), 0)
    assert (message["seed"].item(), message["model"].item()) == (2049.0, 2048.0)


def test_a_report_may_say_what_an_upload_is_based_on(coder):
    """A change of (0.5, -3) is coded as it is, whatever was downloaded; another upload from its own base."""
    message, one = byhand.message(model=[[1.0, 2.0]], trunk=[[9.0]]), coder(compression=HALF)
    change = replace(report(model=[0.5, -3.0]), based_on={"model": None})
    assert_close(one.up(change, message, 0, key(0))[0].vectors["model"], torch.tensor([0.0, -3.0]))
    whole = replace(report(whole=[9.5, 4.0]), based_on={"whole": torch.tensor([9.0, 1.0])})
    assert_close(one.up(whole, message, 0, key(0))[0].vectors["whole"], torch.tensor([9.0, 4.0]))
