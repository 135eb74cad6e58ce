"""What becomes of an upload on its way, by hand: what it is the difference from, and what is left out."""

from __future__ import annotations

import pytest
import torch
from support import byhand
from torch.testing import assert_close

from mpifl.aggregation.client_store import ClientStore
from mpifl.core.rng import key
from mpifl.core.types import Report
from mpifl.traffic.compression import TopK
from mpifl.traffic.encoding import Coder, sizes
from mpifl.traffic.payload import Payload

HALF = TopK(0.5)  # one of two numbers: 4 bytes, and 4 for its place


@pytest.fixture
def coder(tmp_path):
    """Return a function that makes a coder of a payload."""
    return lambda **payload: Coder(Payload(**payload), ClientStore("test", str(tmp_path)))


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
    assert sizes(Payload(), whole, message) == {"model": 8}


def test_statistics_are_rounded_and_never_compressed(coder):
    sent, size = coder(dtype="bfloat16", compression=HALF).up(report(gradient=[1.001, 2.0]), None, 0, key(0))
    assert_close(sent.vectors["gradient"], torch.tensor([1.0, 2.0]), rtol=0, atol=0)
    assert size == {"gradient": 4}


def test_downloads_arrive_rounded(coder):
    message = coder(dtype="bfloat16").down(byhand.message(model=[[1.001, 2.0]]))
    assert_close(message["model"], torch.tensor([[1.0, 2.0]]), rtol=0, atol=0)
