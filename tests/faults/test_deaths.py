"""Workers that are killed, and runs that are killed whole: the digest is that of the undisturbed run.

A few are in every suite. MPIFL_DEATHS=50 makes so many with victims, and 20 of whole jobs, drawn by a seed.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from faults import deaths

MANY = int(os.environ.get("MPIFL_DEATHS", "0"))
FEW = [  # (run, who dies when): in training, at a reduction, in a visit, two at once
    ("scaffold", [{"rank": 1, "call": "train", "nth": 3}, {"rank": 3, "call": "reduce", "nth": 4}]),
    ("fedbuff", [{"rank": 2, "call": "train", "nth": 3}]),
]


@pytest.fixture(scope="module")
def whole(mpirun, tmp_path_factory):
    """Return a function name -> the digest of the undisturbed run in one process; each once."""
    folder, cache, done = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cache"), {}

    def of(name: str) -> tuple[str, Path]:
        if name not in done:
            end = deaths.launch(mpirun, None, [], *deaths.arguments(folder, name, name, cache))
            assert end.returncode == 0, end.stderr
            done[name] = deaths.digest(folder, name)
        return done[name], cache

    return of


def has_ulfm(stderr: str) -> bool:
    """Return whether this mpirun knows fault tolerance."""
    return "with-ft" not in stderr


@pytest.mark.parametrize(("name", "plan"), FEW, ids=[name for name, _ in FEW])
def test_a_run_outlives_its_workers(name, plan, whole, mpirun, tmp_path):
    expected, cache = whole(name)
    asked = deaths.arguments(tmp_path, "x", name, cache)
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert len(deaths.lost(tmp_path, "x")) == len(plan)
    assert deaths.digest(tmp_path, "x") == expected
    assert "ranks go on" in end.stderr


def test_a_stopped_worker_is_ended_and_the_others_go_on(whole, mpirun, tmp_path):
    expected, cache = whole("scaffold")
    plan = [{"rank": 2, "call": "train", "nth": 4, "signal": signal.SIGSTOP}]
    asked = deaths.arguments(tmp_path, "x", "scaffold", cache)
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)  # its time limit is the limit
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    (lost,) = deaths.lost(tmp_path, "x")
    assert lost.startswith("rank 2 ")
    assert f"{lost}, was stopped for 2 s" in end.stderr
    assert deaths.digest(tmp_path, "x") == expected


@pytest.mark.parametrize(("rank", "launcher"), [(2, ()), (0, deaths.ULFM)], ids=["2", "0"])
def test_a_stopped_rank_without_which_the_job_cannot_go_on_ends_it(rank, launcher, whole, mpirun, tmp_path):
    _, cache = whole("scaffold")
    plan = [{"rank": rank, "call": "reduce", "nth": 4, "signal": signal.SIGSTOP}]
    asked = deaths.arguments(tmp_path, "x", "scaffold", cache)
    end = deaths.launch(mpirun, 3, plan, *asked, launcher=launcher)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode not in (0, 2, 75)
    (said,) = [line for line in end.stderr.splitlines() if "was stopped for 2 s" in line]
    assert f"rank {rank} on " in said
    assert "Traceback" not in end.stderr


def test_a_tolerant_run_in_which_nobody_dies_ends(whole, mpirun, tmp_path):
    expected, cache = whole("fedavg")
    end = deaths.launch(
        mpirun, 3, [], *deaths.arguments(tmp_path, "x", "fedavg", cache), launcher=deaths.ULFM
    )
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert deaths.digest(tmp_path, "x") == expected


@pytest.mark.parametrize("call", ["start", "deal", "open_federation"])
def test_the_loss_of_a_rank_during_start_up_is_overcome_or_told(call, whole, mpirun, tmp_path):
    expected, cache = whole("fedavg")
    asked = deaths.arguments(tmp_path, "x", "fedavg", cache)
    plan, limit = [{"rank": 1, "call": call, "nth": 1}], {"MPIFL_START_S": "5"}
    end = deaths.launch(mpirun, 3, plan, *asked, launcher=deaths.ULFM, env=limit)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    if end.returncode == 0:  # it was missed after the first step began
        assert deaths.digest(tmp_path, "x") == expected
    else:
        assert "start the job again" in end.stderr
        assert "Traceback" not in end.stderr
        assert not (tmp_path / "tiny-x" / "summary.json").exists()


def test_a_job_that_is_killed_goes_on_at_another_number_of_ranks(whole, mpirun, tmp_path):
    expected, cache = whole("scaffold")
    asked = [*deaths.arguments(tmp_path, "x", "scaffold", cache), "--checkpoint.every", "2"]
    end = deaths.launch(mpirun, 2, [{"rank": 0, "call": "reduce", "nth": 6}], *asked)
    assert end.returncode not in (0, 2, 75)
    folder = tmp_path / "tiny-x"
    assert not (folder / "summary.json").exists()
    end = deaths.launch(mpirun, None, [], "resume", str(folder))
    assert end.returncode == 0, end.stderr
    assert "going on after step 2" in end.stderr
    assert deaths.digest(tmp_path, "x") == expected
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("case", range(MANY))
def test_campaign_with_victims(case, whole, mpirun, tmp_path):
    rng = random.Random(case)
    name = [*deaths.RUNS][case % len(deaths.RUNS)]
    expected, cache = whole(name)
    plan = deaths.plan_of(rng, name, 4, rng.choice((1, 2)))
    asked = deaths.arguments(tmp_path, "x", name, cache)
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)
    assert end.returncode == 0, f"{plan}\n{end.stdout}\n{end.stderr}"
    assert deaths.digest(tmp_path, "x") == expected, plan
    print(f"CAMPAIGN {name} {plan} lost {len(deaths.lost(tmp_path, 'x'))}: {end.stderr}")


@pytest.mark.parametrize("case", range(min(MANY, 20)))
def test_campaign_of_whole_jobs(case, whole, mpirun, tmp_path):
    rng = random.Random(1000 + case)
    name = [*deaths.RUNS][case % len(deaths.RUNS)]
    expected, cache = whole(name)
    (plan,) = deaths.plan_of(rng, name, 2, 1)
    asked = [*deaths.arguments(tmp_path, "x", name, cache), "--checkpoint.every", "1"]
    deaths.launch(mpirun, 2, [plan], *asked)  # without fault tolerance all ranks die
    if not (tmp_path / "tiny-x" / "summary.json").exists():
        end = deaths.launch(mpirun, rng.choice((None, 2)), [], "resume", str(tmp_path / "tiny-x"))
        assert end.returncode == 0, f"{plan}\n{end.stdout}\n{end.stderr}"
        print(f"CAMPAIGN {name} {plan}: {end.stderr}")
    assert deaths.digest(tmp_path, "x") == expected, plan
