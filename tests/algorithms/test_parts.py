"""Methods that share a part of the model, and those that average plainly: by hand, on a body and a head."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_allclose
from support import byhand
from support.each import for_each
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.parameters import Layout

LAYOUT = Layout(("body.w", "head.weight"), ((1,), (1,)), 2, ("head",))


def client_of() -> byhand.Quadratic:
    """Return a client with targets (4, 8), 0 on validation data, initial vector (7, 5) and rate 0.5."""
    client = byhand.Quadratic([4.0, 8.0], init=[7.0, 5.0], val=[0.0, 0.0])
    client.layout = LAYOUT
    return client


BY_SAMPLES = {
    "fedavg": ["model"],
    "fedavg_ft": ["model"],
    "fedprox": ["model"],
    "moon": ["model"],
    "ditto": ["model"],
    "apfl": ["model"],
    "perfedavg": ["model"],
    "fedper": ["body"],
    "fedrep": ["body"],
    "fedbabu": ["body"],
    "fedbn": ["shared"],
    "lgfedavg": ["shared"],
    "fedavgm": ["model"],
    "fedadam": ["model"],
    "fedyogi": ["model"],
}


@for_each("name", BY_SAMPLES)
def test_models_are_averaged_by_samples(name):
    """n = 1, 3: (1, 3) / 4, and nothing of the old row."""
    server = byhand.server(2, **{table: [[0.0]] for table in BY_SAMPLES[name]})
    mixings = CATALOGUE[name]().aggregate(server, byhand.notes([1, 3])).mixings
    assert [(m.into, m.of) for m in mixings] == [(table, table) for table in BY_SAMPLES[name]]
    for mixing in mixings:
        assert_allclose(mixing.weights, [[1 / 4, 3 / 4]])
        assert mixing.keep is None or not mixing.keep.any()


def test_fedbabu_may_count_each_client_the_same():
    (mixing,) = CATALOGUE["fedbabu"](weighted=False).aggregate(None, byhand.notes([1, 3])).mixings
    assert_allclose(mixing.weights, [[1 / 2, 1 / 2]])


# a visit: served 2 for the body or 3 for the head, the other from the state or the initial vector

VISITS = {  # name: options, served, state -> sent, kept, parts that were trained in turn
    "fedper": ({}, {"body": 2.0}, {"head": 3.0}, {"body": 3.0}, {"head": 5.5}, ["all"]),
    "fedper, first": ({}, {"body": 2.0}, {}, {"body": 3.0}, {"head": 6.5}, ["all"]),
    "fedrep": (
        {"head_epochs": 2},
        {"body": 2.0},
        {"head": 3.0},
        {"body": 3.0},
        {"head": 6.75},
        ["head", "body"],
    ),
    "fedbabu": ({}, {"body": 2.0}, {}, {"body": 3.0}, {}, ["body"]),
    "lgfedavg": ({}, {"shared": 3.0}, {"private": 2.0}, {"shared": 5.5}, {"private": 3.0}, ["all"]),
    "lgfedavg, first": ({}, {"shared": 3.0}, {}, {"shared": 5.5}, {"private": 5.5}, ["all"]),
}


@pytest.mark.parametrize("case", VISITS)
def test_a_visit_sends_what_is_shared_and_keeps_the_rest(case):
    """Targets (4, 8), rate 0.5, one step: a body of 2 becomes 3 and of 7 5.5; a head of 3 becomes 5.5 or, in
    two steps, 6.75, and of 5 6.5.
    """
    options, served, state, sent, kept, parts = VISITS[case]
    method, client = CATALOGUE[case.split(",")[0]](**options), client_of()
    message = byhand.message(**{name: [[value]] for name, value in served.items()})
    before = {name: torch.tensor([value]) for name, value in state.items()}
    report, after = method.local_update(message, before, client, byhand.KEY)
    assert_close(dict(report.vectors), {name: torch.tensor([value]) for name, value in sent.items()})
    assert_close(dict(after), {name: torch.tensor([value]) for name, value in kept.items()})
    trained = [None if part == "all" else LAYOUT.part(part) for part in parts]
    assert [call.part for call in client.calls] == trained


@pytest.mark.parametrize(("part", "loss"), [("all", 25.625), ("body", 17.0), ("head", 23.125)])
def test_fedbabu_tunes_a_part_before_it_is_judged(part, loss):
    """Body 2 under the common head 5: (4 + 25) / 2 = 14.5 on validation data. One epoch makes 3 and 6.5."""
    client, message = client_of(), byhand.message(body=[[2.0]])
    method = CATALOGUE["fedbabu"](tune_epochs=1, tune_part=part)
    scores = method.evaluate(message, {}, client, client.data.val)
    assert_allclose([scores["loss_initial"], scores["loss"]], [14.5, loss])


def test_fedavg_is_tuned_on_training_data_before_it_is_judged():
    """(2, 5) scores 14.5; two epochs make (3.5, 7.25): (12.25 + 52.5625) / 2."""
    client, message = client_of(), byhand.message(model=[[2.0, 5.0]])
    scores = CATALOGUE["fedavg_ft"](tune_epochs=2).evaluate(message, {}, client, client.data.val)
    assert_allclose([scores["loss_initial"], scores["loss"]], [14.5, 32.40625])
