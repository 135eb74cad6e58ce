"""What becomes of an upload on its way, by hand: what it is the difference from, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import byhand, toy
from support.cases import OPTIONS
from torch.testing import assert_close

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.update_filter import FilteredVisit, UpdateFilters
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import MethodError, NotFinite
from mpifl.core.parameters import Layout, VectorParts
from mpifl.core.rng import Key, key
from mpifl.core.types import Message, Report
from mpifl.traffic.compression import QSGD, Coder, Int8, Payload, RandomK, TopK, Uncompressed
from mpifl.traffic.encoding import base_of, number_bytes, rows_under, vector_bytes

HALF = TopK(0.5)  # one of two numbers: 4 bytes, and 4 for its place


class Link:
    """A coder between a client and the server, with the client's store."""

    def __init__(self, payload: Payload, folder: Path, parts: VectorParts) -> None:
        self.coder, self.store = Coder(payload, parts), ClientStore("test", str(folder))
        self.down = self.coder.download

    def up(self, sent: Report, message: Message, visit: int, where: Key) -> tuple[Report, Mapping[str, int]]:
        """Return a report as it arrives, and the bytes of its vectors."""
        size = vector_bytes(self.coder.payload, UpdateFilters([self.coder]), sent, message)
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
        lambda: coder.down(byhand.message(model=[upload.vectors["model"].tolist()])),
    ):
        with pytest.raises(NotFinite, match=r"payload.dtype float16: .*body\.var: 7e\+04.*65504"):
            send()
    coder.up(report(model=[1.0, 2.0, float("nan"), 65_504.0]), message, 0, key(0))


def test_statistics_are_not_compressed(tmp_path):
    """With half of the changes, (3, 1) + 2 (0, -1) would be (3, -1): no sum of anything."""
    payload = Payload(compression=RandomK(0.5), header_bytes=5)
    parts = VectorParts(byhand.FLAT, no_weights=("labels",))
    coder = Link(payload, tmp_path, parts)
    message = byhand.message(model=[[0.0, 0.0]], labels=[[3.0, 1.0]])
    upload = report(model=[1.0, 2.0], labels=[[2.5, 0.25]])
    sent, size = coder.up(upload, message, 0, key(0))
    assert_close(sent.vectors["labels"], upload.vectors["labels"])
    assert (sent.vectors["model"] == 0).sum() == 1
    assert size == {"model": 5 + 4 + 8, "labels": 5 + 8}


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
    assert vector_bytes(Payload(), UpdateFilters(), whole, message) == {"model": 8}


def test_statistics_are_rounded_and_never_compressed(coder):
    payload = Payload("bfloat16", compression=HALF)
    sent = Coder(payload, VectorParts(byhand.FLAT)).statistics(report(gradient=[1.001, 2.0]))
    assert_close(sent.vectors["gradient"], torch.tensor([1.0, 2.0]), rtol=0, atol=0)
    assert number_bytes(payload, sent) == {"gradient": 4}


def test_downloads_arrive_rounded(coder):
    message = coder(dtype="bfloat16").down(byhand.message(model=[[1.001, 2.0]]))
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
    message = coder(dtype="float16").down(byhand.message(seed=[[2049.0]], model=[[2049.0]]))
    assert (message["seed"].item(), message["model"].item()) == (2049.0, 2048.0)


def test_a_report_may_say_what_an_upload_is_based_on(coder):
    """A change of (0.5, -3) is coded as it is, whatever was downloaded; another upload from its own base."""
    message, one = byhand.message(model=[[1.0, 2.0]], trunk=[[9.0]]), coder(compression=HALF)
    change = replace(report(model=[0.5, -3.0]), based_on={"model": None})
    assert_close(one.up(change, message, 0, key(0))[0].vectors["model"], torch.tensor([0.0, -3.0]))
    whole = replace(report(whole=[9.5, 4.0]), based_on={"whole": torch.tensor([9.0, 1.0])})
    assert_close(one.up(whole, message, 0, key(0))[0].vectors["whole"], torch.tensor([9.0, 4.0]))


# -- every method --------------------------------------------------------------------------------------------

METHODS = {name: (name, OPTIONS.get(name, {})) for name in CATALOGUE}
METHODS |= {
    "ifca gradient": ("ifca", {"num_clusters": 2, "variant": "gradient"}),
    "cfl emdcfl": ("cfl", {**OPTIONS["cfl"], "variant": "emdcfl"}),
    "flexcfl emdcfl": ("flexcfl", {"num_groups": 2, "variant": "emdcfl"}),
    "pfedgraph emdcfl": ("pfedgraph", {"variant": "emdcfl"}),
}
SEVERAL = [m for m, (name, _) in METHODS.items() if not CATALOGUE[name]().needs.single_upload]
SEVERAL.remove("flt")  # whose clients train as FedAvg's, after statistics that take long


def visits(method: str, folder: Path, **changes) -> list[tuple[Message, Report]]:
    """Return what clients downloaded and reported in a round."""
    name, options = METHODS[method]
    seen = []

    def wrapped(hook, found):
        def called(*args, **named):
            made = found(*args, **named)
            if hook == "local_update":
                seen.append((args[0], made[0]))
            return made

        return called

    algorithm = toy.with_hooks(CATALOGUE[name](**options), wrapped)
    toy.run(algorithm, toy.Tiny(), folder, 1, evaluate=False, **changes)
    return seen


@pytest.mark.parametrize("method", SEVERAL)
def test_what_is_coded_of_an_upload_is_no_longer_than_the_upload(method, tmp_path):
    """A change that were taken for a model would be coded as its difference from that model."""
    for message, made in visits(method, tmp_path):
        for name in {*made.vectors} - {*made.unsent, *CATALOGUE[METHODS[method][0]].statistics}:
            upload = made.vectors[name].reshape(-1, made.vectors[name].shape[-1])
            left = upload - base_of(upload, rows_under(name, made, message))
            assert left.norm() <= 1.0001 * upload.norm() + 1e-6, name


def test_the_uploads_of_fedcuau_are_coded_from_the_model_that_its_client_put_together(tmp_path):
    for message, made in visits("fedcuau", tmp_path):
        for name in {*made.vectors} - {*made.unsent}:
            upload = made.vectors[name][None]
            left = upload - base_of(upload, rows_under(name, made, message))
            assert left.norm() < 0.5 * upload.norm()


UNSENT = ["cfl", "cfl emdcfl", "pfedgraph", "pfedgraph emdcfl", "fedsac", "flexcfl emdcfl"]


@pytest.mark.parametrize("method", UNSENT)
def test_what_is_not_sent_is_worked_out_of_what_arrives(method, tmp_path):
    """Of models and changes that arrive as they are sent, the same; of others, what they are then."""
    name, options = METHODS[method]
    algorithm = CATALOGUE[name](**options)
    for _, made in visits(method, tmp_path):
        sent = {name: x for name, x in made.vectors.items() if name not in made.unsent}
        found = algorithm.unsent_vectors(made, sent)
        assert {*found} == {*made.unsent} & {*made.vectors}
        for name, x in found.items():
            assert_close(x, made.vectors[name], rtol=1e-6, atol=1e-7)
        moved = dict(algorithm.unsent_vectors(made, {name: x + 1 for name, x in sent.items()}))
        if {"delta", "direction"} <= {*moved}:  # a direction has length 1
            direction = moved.pop("direction")
            assert_close(direction.norm(), torch.tensor(1.0))
            assert not torch.allclose(direction, made.vectors["direction"])
        for name, x in moved.items():
            assert_close(x, made.vectors[name] + 1)


@pytest.mark.parametrize(
    "lossy", [{"payload": Payload(compression=TopK(0.1))}, {"payload": Payload("bfloat16")}]
)
def test_a_method_whose_unsent_vectors_cannot_be_worked_out_is_refused(lossy, tmp_path, monkeypatch):
    """CFLGP as a method of one's own that does not declare that it needs exact uploads."""
    declared = CATALOGUE["cflgp"](**METHODS["cflgp"][1]).needs
    assert declared.exact_uploads
    undeclared = replace(declared, exact_uploads=False)
    monkeypatch.setattr(CATALOGUE["cflgp"], "needs", property(lambda self: undeclared))
    with pytest.raises(MethodError, match="profile, which is not sent, cannot be worked out of what arrives"):
        visits("cflgp", tmp_path, **lossy)
