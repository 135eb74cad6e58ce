"""The cost model of `mpifl bench scaling`, by hand."""

from __future__ import annotations

import pytest

from mpifl.benchmarks.scaling import Model, fit, lines


def test_the_terms_are_found_again():
    """100 visits of 10 ms; the server takes 4 ms a round and 1 ms a worker."""
    measured = {
        w: {"seconds": 100 * 0.01 / w + 0.004 + 0.001 * w, "train": 100 * 0.01 / w} for w in (1, 2, 4)
    }
    model = fit(measured, m=100, d=1000)
    found = [model.visit_s, model.once_s, model.rank_s]
    assert found == pytest.approx([0.01, 0.004, 0.001])


def test_visits_are_whole_and_the_server_binds_in_the_end():
    model = Model(visit_s=0.01, once_s=0.0, rank_s=0.001, m=100, d=1000)
    assert model.terms(64)["training"] == pytest.approx(0.02), "two visits for the busiest of 64"
    assert model.terms(1000)["training"] == pytest.approx(0.01)
    assert model.binds(4) == "training"
    assert model.binds(255) == "server"


def test_the_network_is_a_tree_of_broadcast_and_reduction():
    """63 workers and a server: 6 levels; 12 MB at 10 GB/s take 1.2 ms a level, 4 + 1 messages 5 us each."""
    model = Model(visit_s=1.0, once_s=0.0, rank_s=0.0, m=63, d=1 << 20)
    sent = 12 * (1 << 20) / 10e9
    assert model.terms(63)["network"] == pytest.approx(6 * (sent + 5 * 5e-6))


def test_one_worker_gives_no_slope_and_the_page_says_what_binds():
    phases = {"train": 0.9, "load": 0.0, "broadcast": 0.0, "reduce": 0.05, "wait": 0.05}
    measured = {1: {"seconds": 1.0, **phases}}
    model = fit(measured, m=10, d=10)
    assert (model.rank_s, model.visit_s) == (0.0, pytest.approx(0.095))
    page = lines({"workload": "W1", "m": 10, "strong": measured, "weak": measured}, model)
    assert [line.split()[0] for line in page[-4:]] == ["16", "64", "256", "1024"]
    assert page[-1].endswith(("server", "training"))
