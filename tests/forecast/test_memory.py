"""The peak memory that `mpifl plan` forecasts, against that of real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import toy

from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.types import Report, Server
from mpifl.experiment.schema import OutputConfig
from mpifl.forecast.memory import MeasuredMemory, StateMemory, peak_memory
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival, Synchronous, Waves

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
UNITS = {"MB": 1e6, "GB": 1e9}
MANY = ["--model.hidden", "[10000]", "--data.scenario", "{name: iid, clients: 60}"]  # 3 MB a model

KEEPING = ["--algorithm", "fedper", "--output.client_models", "true"]


def planned(text: str) -> list[float]:
    """Return the bytes of each line about memory."""
    found = re.findall(r"^memory, .*? ([\d.]+) (MB|GB) resident", text, re.MULTILINE)
    return [float(number) * UNITS[unit] for number, unit in found]


@pytest.mark.nightly(seconds=20)
@pytest.mark.parametrize(
    ("ranks", "least", "options"),
    [(None, 450e6, []), (3, 380e6, []), (None, 600e6, KEEPING), (3, 500e6, KEEPING)],
    ids=["alone", "three ranks", "alone, clients' models", "three ranks, clients' models"],
)
def test_the_plan_forecasts_the_peak_memory(ranks, least, options, mpirun, tmp_path):
    """Within 15 %, with 60 uploads of 3 MB: more than that beside what Python and PyTorch take."""
    common = [*MANY, *options, "--data.cache", str(tmp_path / "cache")]
    env = toy.PYTHONPATH
    assert cli.main(["prepare", str(CONFIG), *common]) == 0  # its memory is not a run's
    plan = mpirun(
        None,
        "-m",
        "mpifl",
        "plan",
        "--time",
        "no",
        CONFIG,
        *common,
        "--system.ranks",
        ranks or 1,
        timeout=300,
        env=env,
        fresh=True,
    )
    place = ["--output.folder", str(tmp_path), "--output.id", "run", "--quiet"]
    run = mpirun(ranks, "-m", "mpifl", "run", CONFIG, *common, *place, timeout=300, env=env, fresh=True)
    assert run.returncode == 0, run.stderr
    max_abs = json.loads((tmp_path / "tiny-run" / "summary.json").read_text())["peak_bytes"]
    assert len(max_abs) == (ranks or 1)
    assert max(max_abs) > least
    busiest = [max_abs[0], max(max_abs[1:])] if ranks else max_abs
    assert planned(plan.stdout) == pytest.approx(busiest, rel=0.15)


HEAVY = """
import numpy as np
from mpifl.core.capabilities import OneShotStatistics
from mpifl.algorithms.fedavg import FedAvg

class Heavy(OneShotStatistics, FedAvg):
    def fingerprint(self, client, shown, key):
        np.ones(10_000_000)
        return client.report({"n": 1.0})

    def setup(self, problem, fingerprints, key):
        np.ones(40_000_000)
        return super().setup(problem, None, key)
"""


@pytest.mark.nightly(seconds=20)
def test_the_plan_counts_what_comes_before_the_first_round(mpirun, tmp_path):
    """320 MB in the set-up at the server, where libraries may be loaded, and 80 MB in clients' statistics."""
    (tmp_path / "heavy.py").write_text(HEAVY)
    method = f"{tmp_path / 'heavy.py'}:Heavy"
    command = ["-m", "mpifl", "plan", "--time", "no", CONFIG, "--system.ranks", 3]
    plans = [
        planned(mpirun(None, *command, *options, env=toy.PYTHONPATH, fresh=True).stdout)
        for options in ([], ["--algorithm", method])
    ]
    server, worker = (heavy - plain for plain, heavy in zip(*plans, strict=True))
    assert server == pytest.approx(320e6, rel=0.15)
    assert worker == pytest.approx(80e6, rel=0.15)


@pytest.mark.nightly(seconds=20)
def test_the_plan_counts_the_library_of_a_tracker_at_the_server(mpirun, tmp_path):
    """MLflow takes 118 MB."""
    pytest.importorskip("mlflow")
    command = ["-m", "mpifl", "plan", "--time", "no", CONFIG, "--system.ranks", 3]
    plans = [
        planned(mpirun(None, *command, *options, env=toy.PYTHONPATH, fresh=True).stdout)
        for options in ([], ["--output.callbacks", "[mlflow]"])
    ]
    server, worker = (with_it - plain for plain, with_it in zip(*plans, strict=True))
    assert server > 60e6
    assert worker < 10e6


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_plan_counts_the_models_of_the_clients_that_are_kept(ranks):
    """A table of all models at rank 0, and what is gathered at a time."""
    nothing, state = MeasuredMemory(0, 0, 0), StateMemory(0, 0, 0, 0, 0, 0, 0)
    plain, keeping = (
        toy.context_of(
            toy.config_of(CATALOGUE["fedper"](), output=OutputConfig(client_models=kept)), toy.Tiny()
        )
        for kept in (False, True)
    )
    table = 4 * plain.problem.num_clients * plain.problem.layout.size
    peaks = [peak_memory(nothing, state, context, ranks) for context in (plain, keeping)]
    server, worker = (kept - left_out for left_out, kept in zip(*peaks, strict=True))
    assert (server, worker) == (2 * table, 2 * table if ranks == 1 else table // 2)


@pytest.mark.parametrize(
    ("policy", "alone", "several"),
    [
        (Synchronous(), 1000, 0),  # the cohort is trained by the only process
        (EveryArrival(), 100 + 9 * 7 + 10 * 3, 1000 + 9 * 7 + 10 * 3),
        (Buffer(size=4), 400 + 2 * 7 + 10 * 3, 1300 + 2 * 7 + 10 * 3),
        (Waves(size=4), 400 + 2 * 7 + 10 * 3, 1000 + 2 * 7 + 10 * 3),
        (Barrier(), 1000 + 10 * 3, 1000 + 10 * 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_plan_counts_uploads_and_older_rows_of_visits_under_way(policy, alone, several):
    """Ten visits under way: uploads of 100 bytes that wait, 7 for each older table, 3 that each visit keeps.

    Over ranks the uploads of all ten may wait, beside those of the next step if others start at once.
    """
    nothing = MeasuredMemory(0, 0, 0)
    states = [StateMemory(0, 0, 0, 100, 0, 0, 0, 7, 3), StateMemory(0, 0, 0, 0, 0, 0, 0)]
    config = toy.config_of(CATALOGUE["fedavg"](), policy=policy, rounds=50, cohort_size=10)
    context = toy.context_of(config, toy.Tiny(12))
    for ranks, expected in ((1, alone), (3, several)):
        counted, rest = (peak_memory(nothing, state, context, ranks)[0] for state in states)
        assert counted - rest == expected


def test_a_visit_keeps_the_table_of_a_single_row_and_copies_of_several():
    """Three rows of five numbers: FedAvg reads one, IFCA all."""
    server, report = Server({"model": torch.zeros(3, 5)}, np.zeros(4, np.int64)), Report({}, {})
    for name, viewed, copied in (("fedavg", 60, 0), ("ifca", 0, 60)):
        state = StateMemory.of(CATALOGUE[name](), server, report, 0, {"model"}, set())
        assert (state.viewed, state.copied) == (viewed, copied)
