"""The cost model of many workers, by hand, and rank 0 of many ranks."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from campaigns import scaling
from campaigns.many_ranks import line
from campaigns.scaling import Model, fit, lines, measure_scaling
from support.measurements import command

from mpifl.forecast.time import RANK_BYTES, RANK_S, VISIT_BYTES
from mpifl.runtime.protocol import ReportHeader, TaskBatch, TaskTable
from mpifl.runtime.worker import VisitResults

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


def test_the_terms_are_found_again():
    """100 visits of 10 ms; the server takes 4 ms a round and 1 ms a worker."""
    measured = {
        w: {"seconds": 100 * 0.01 / w + 0.004 + 0.001 * w, "train": 100 * 0.01 / w} for w in (1, 2, 4)
    }
    model = fit(measured, m=100, d=1000)
    found = [model.visit_s, model.once_s, model.rank_s]
    assert found == pytest.approx([0.01, 0.004, 0.001 - RANK_S]), "messages are a term of their own"


def test_visits_are_whole_and_the_server_binds_in_the_end():
    model = Model(visit_s=0.01, once_s=0.0, rank_s=0.001, m=100, d=1000)
    assert model.terms(64)["training"] == pytest.approx(0.02), "two visits for the busiest of 64"
    assert model.terms(1000)["training"] == pytest.approx(0.01)
    assert model.binds(4) == "training"
    assert model.binds(255) == "server"


def test_the_network_is_a_tree_of_broadcast_and_reduction():
    """63 workers and a server: 6 levels; 12 MB at 10 GB/s take 1.2 ms each, 4 + 1 + 1 messages 5 us."""
    model = Model(visit_s=1.0, once_s=0.0, rank_s=0.0, m=63, d=1 << 20)
    sent = 12 * (1 << 20) / 10e9
    assert model.terms(63)["network"] == pytest.approx(6 * (sent + 6 * 5e-6))


def test_one_worker_gives_no_slope_and_the_page_says_what_binds():
    phases = {"train": 0.9, "load": 0.0, "broadcast": 0.0, "reduce": 0.05, "wait": 0.05}
    measured = {1: {"seconds": 1.0, **phases}}
    model = fit(measured, m=10, d=10)
    assert (model.rank_s, model.visit_s) == (0.0, pytest.approx(0.095))
    out = {"workload": "W1", "m": 10, "strong": measured, "weak": measured, "load": 0.5}
    page = lines(out, model)
    assert [line.split()[0] for line in page[-4:]] == ["16", "64", "256", "1024"]
    assert page[-1].endswith(("server", "training"))
    assert not any("busy" in line for line in page)
    assert any("busy: the load was 9 before" in line for line in lines({**out, "load": 9.2}, model))


def test_the_notes_of_a_round_are_as_large_as_the_model_says():
    """Tasks and reports of 1000 visits of FedAvg, on one worker and on two."""
    report = dict(num_samples=20, fresh=True, notes={}, findings={}, metrics={"train_loss": 0.5})
    one = {"max_abs": {"model": [1.0]}, "sizes": {"model": 9}, "widths": {"model": 9}, "bytes": {"model": 36}}
    headers = [ReportHeader(number=i, client=i, **report, **one) for i in range(1000)]
    numbers = np.arange(1000)
    columns = np.stack((numbers, numbers, numbers, np.zeros(1000, np.int64)), axis=1)
    tasks = TaskTable(columns, [{"model": (0,)}])
    for workers in (1, 2, 1000):
        size = 0
        for w in range(workers):
            value, rows = VisitResults(headers[w::workers], {}, [], 0.0).packed()
            size += len(pickle.dumps(value, protocol=5)) + len(rows)
        tables, sent, _ = tasks.split_by_rank(numbers % workers, workers)
        size += sent.nbytes + sum(len(pickle.dumps(TaskBatch(1, 0, t, {}), protocol=5)) for t in tables)
        assert size <= VISIT_BYTES * 1000 + RANK_BYTES * workers
        assert size >= 0.5 * (VISIT_BYTES * 1000 + RANK_BYTES * workers)


def test_memory_grows_with_registered_clients():
    """Ten million: 280 MB and 560 MB, and three rows of a million numbers."""
    model = Model(visit_s=1.0, once_s=0.0, rank_s=0.0, m=1, d=10**6)
    assert model.server_bytes(10**7) == pytest.approx(280e6 + 560e6 + 12e6)


def test_the_cost_of_a_rank_is_what_lies_beyond_that_of_the_fewest():
    """2 ms more for a hundred ranks more."""
    assert line({2: 0.004, 102: 0.006}).endswith(": 102: 20")


def test_rank_0_of_many_takes_the_steps_of_a_run(mpirun):
    """More ranks than clients: some workers report nothing."""
    options = ["--algorithm.name", "fedavg", "--cohort_size", "2"]
    work = "import sys; sys.path.append(sys.argv[1]); import campaigns.many_ranks as many; "
    work += "print(many.seconds_of_rank_0(sys.argv[2], sys.argv[3:], (2, 9), 2))"
    done = mpirun(1, "-c", work, str(Path(__file__).parents[1]), TINY, *options)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert [*found] == [2, 9]
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workload w3", "--workload = 'w3': "),
        ("--workload W33", "--workload = 'W33': .*W3"),
        ("--ranks 1", "--ranks = 1: use 2 or more: one is the server"),
        ("--policy every_arrival", "only synchronous rounds"),
        ("--rounds 3", "rounds = 3: the measurement"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, words, message):
    monkeypatch.setattr(scaling, "Job", None)
    options = {"workload": "W1", "ranks": None, "turns": 5}
    assert command("scaling", measure_scaling, options, words.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_as_many_workers_are_measured_as_ranks_but_one(monkeypatch):
    monkeypatch.setattr(scaling, "_measure", lambda name, workers, *_: pytest.fail(f"{name} on {workers}"))
    with pytest.raises(pytest.fail.Exception, match="W3 on 1"):
        measure_scaling("W3", 2, 1, [])
