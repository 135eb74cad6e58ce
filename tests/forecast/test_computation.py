"""What clients compute is foretold to the last FLOP, or the forecast says on what it depends."""

from __future__ import annotations

import pytest
from support import toy

from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.computation import Work
from mpifl.experiment import build
from mpifl.forecast.computation import compared_computation, computation_lines, forecast_computation
from mpifl.simulation.policies import EveryArrival


def ran(folder, federation=None, name="fedavg", options=None, **changes):
    """Return the context of a small run of three rounds, and its ledger after it."""
    config = toy.config_of(CATALOGUE[name](**(options or {})), **{"rounds": 3, **changes})
    context = toy.context_of(config, federation or toy.Tiny())
    step = build.build_server_step(context, ClientStore("test", str(folder)))
    build.build_engine(context, step).run(lambda record: None)
    return context, step.computation


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("ifca", {"num_clusters": 3}),
        ("ifca", {"variant": "emdcfl", "restarts": 0}),
        ("ucfl", {"streams": 2, "parallel": True, "noise_batch": 4}),
        ("fedrep", {"head_epochs": 2}),
        ("fedem", {}),
        ("emdcfl", {}),
        ("emdcfl", {"looks": "together", "against": "train", "sample_share": 0.5}),
    ],
)
def test_what_a_run_computes_is_what_was_planned(name, options, participation, tmp_path):
    context, ledger = ran(tmp_path, None, name, options, participation=participation)
    found = forecast_computation(context)
    assert found.total is not None
    for purpose in ("training", "choice", "statistics"):
        assert found.total.get(purpose, Work()) == ledger.total(purpose), purpose
    assert compared_computation(context, ledger) == {"flops": ledger.columns()["flops"], "why": ""}


def test_samples_that_change_are_counted_visit_by_visit(tmp_path):
    context, ledger = ran(tmp_path, toy.Drifting(4))
    assert forecast_computation(context).flops == ledger.columns()["flops"]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("moon", {}, "moon computes in a visit"),
        ("fedclust", {}, "statistics of fedclust"),
        ("fedsoft", {}, "round"),
        ("ccfl", {"policy": EveryArrival()}, "visits"),
    ],
)
def test_what_is_not_known_before_is_named(name, changes, why, tmp_path):
    context, ledger = ran(tmp_path, None, name, **changes)
    found = compared_computation(context, ledger)
    assert found["flops"] is None
    assert why in found["why"]


def test_the_lines_of_the_plan(tmp_path):
    """Six clients hold 8, 11, 14, 17, 8 and 11 samples: 69 x 656 FLOPs a round."""
    context, _ = ran(tmp_path)
    visit, whole = computation_lines(forecast_computation(context), "abort")
    assert "5.248e-06 GFLOP training" in visit
    assert f"({3 * 69 * 656} FLOPs)" in whole
