"""Workers that are killed, and runs that are killed whole: all files are those of the undisturbed run.

A few are in every suite. MPIFL_DEATHS=50 makes so many with victims, and 20 of whole jobs, drawn by a seed.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from faults import deaths
from safetensors.torch import load_file
from support.runs import Runs, assert_same_run
from support.traces import bars, events_of

from mpifl import cli
from mpifl.results.trace_file import RANKS

MANY = int(os.environ.get("MPIFL_DEATHS", "0"))
STOP = {"signal": signal.SIGSTOP}
FEW: dict[
    str, deaths.Plan
] = {  # of one job of six ranks: each run goes on with those that the one before left
    "emdcfl": [{"rank": 5, "call": "Alltoallv", "nth": 2}],  # in the second look
    "scaffold": [{"rank": 1, "call": "train", "nth": 3}, {"rank": 4, "call": "Reduce", "nth": 4}],
    "ucfl": [{"rank": 2, "call": "train", "nth": 3, **STOP}],  # rows that live with their readers
    "scaffold-events": [{"rank": 3, "call": "train", "nth": 5}],  # rank 0 is left alone
}


class Whole:
    """Runs that nobody disturbs, in one process; each once.

    Attributes:
        cache: of prepared data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"

    def __call__(self, name: str) -> Path:
        """Return the folder of a run."""
        if not (self.folder / f"tiny-{name}").exists():
            assert cli.main(deaths.arguments(self.folder, name, name, self.cache)) == 0
        return self.folder / f"tiny-{name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    """Return the undisturbed runs."""
    return Whole(tmp_path_factory.mktemp("whole"))


def has_ulfm(stderr: str) -> bool:
    """Return whether this mpirun knows fault tolerance."""
    return "with-ft" not in stderr


@pytest.mark.in_turn
def test_runs_outlive_their_workers(whole, mpirun, tmp_path):
    """In a look, training, a reduction, a visit; two at once; killed or stopped; till the server is alone."""
    traced = ["--output.trace", "true"]
    jobs = [
        (plan, [*deaths.arguments(tmp_path, name, name, whole.cache), *traced]) for name, plan in FEW.items()
    ]
    for name in FEW:
        whole(name)
    end = deaths.launch_all(mpirun, 6, jobs, launcher=deaths.ULFM, fresh=False)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    for name, plan in FEW.items():
        gone = [f"rank {death['rank']}" for death in plan]  # in this run, not in those before
        assert sorted(who.split(" on ")[0] for who in deaths.lost(tmp_path, name)) == sorted(gone)
        assert_same_run(tmp_path / f"tiny-{name}", whole(name))
        events = events_of(tmp_path / f"tiny-{name}")
        gone = {e["tid"] for e in events if e["ph"] == "i"}  # rows, numbered anew in each run
        assert len(gone) == len(plan)
        left = {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == RANKS}
        assert 1 in left
        assert not left & gone
        assert "recover" in {e["name"] for e in bars(events, 0, "phase")}
    there = Runs(tmp_path)
    for file in ("timing.csv", "mpi_traffic.csv"):
        assert {row["rank"] for row in there.table("scaffold", file)} == {"0", "2", "3"}
    assert there.summary("scaffold")["mpi_bytes_complete"] is False
    assert end.stderr.count("ranks go on") >= len(FEW)
    assert "rank 2 on " in end.stderr
    assert "was stopped for 2 s" in end.stderr


@pytest.mark.nightly
def test_the_clients_of_a_dead_worker_are_hosted_by_those_that_are_left(whole, mpirun, tmp_path):
    """One after the other, with state, with rows of their own, with arrivals; till one hosts everybody."""
    plans = {"hosted": 2, "hosted-rows": 1, "hosted-events": 3}
    jobs = [
        ([{"rank": rank, "call": "train", "nth": 3}], deaths.arguments(tmp_path, name, name, whole.cache))
        for name, rank in plans.items()
    ]
    end = deaths.launch_all(mpirun, 5, jobs, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    for name, rank in plans.items():
        assert [who.split(" on ")[0] for who in deaths.lost(tmp_path, name)] == [f"rank {rank}"]
        assert_same_run(tmp_path / f"tiny-{name}", whole(name))
        free = name.replace("hosted", "scaffold") if name != "hosted-rows" else "ucfl"
        assert deaths.digest(tmp_path, name) == deaths.digest(whole(free).parent, free)


@pytest.mark.nightly
def test_clusters_form_under_arrivals_while_workers_die(whole, mpirun, tmp_path):
    """In the look of a client, in statistics that are taken again, and between splits."""
    plans: dict[str, deaths.Plan] = {
        "look-events": [{"rank": 3, "call": "look", "nth": 3}],
        "again-events": [{"rank": 2, "call": "statistics", "nth": 2}],
        "split-events": [{"rank": 1, "call": "train", "nth": 5}],
    }
    jobs = [(plan, deaths.arguments(tmp_path, name, name, whole.cache)) for name, plan in plans.items()]
    end = deaths.launch_all(mpirun, 4, jobs, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    for name, (death,) in plans.items():
        assert [who.split(" on ")[0] for who in deaths.lost(tmp_path, name)] == [f"rank {death['rank']}"]
        assert_same_run(tmp_path / f"tiny-{name}", whole(name))


@pytest.mark.nightly
def test_a_round_in_which_clients_join_is_repeated_from_its_beginning(whole, mpirun, tmp_path):
    """Rank 1 dies in training, after the tables were regrouped: they are regrouped again, not twice."""
    plan = [{"rank": 1, "call": "train", "nth": 3}]
    end = deaths.launch(
        mpirun, 4, plan, *deaths.arguments(tmp_path, "x", "newcomers", whole.cache), launcher=deaths.ULFM
    )
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert [who.split(" on ")[0] for who in deaths.lost(tmp_path, "x")] == ["rank 1"]
    assert_same_run(tmp_path / "tiny-x", whole("newcomers"))


@pytest.mark.nightly
def test_a_worker_that_dies_while_the_last_state_is_collected_makes_all_repeat_it(whole, mpirun, tmp_path):
    """Rank 3 dies at its own rows, with which the other workers are done: the run is stopped and goes on."""
    plan = [
        {"rank": 0, "call": "scatter", "nth": 16, "signal": signal.SIGTERM},
        {"rank": 3, "call": "Gatherv", "nth": 2},  # after that of the gradients
    ]
    asked = [*deaths.arguments(tmp_path, "x", "ucfl", whole.cache), "--checkpoint.minutes", "0"]
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 75, end.stderr
    assert "ranks go on" in end.stderr
    assert cli.main(["resume", str(tmp_path / "tiny-x"), "--quiet"]) == 0
    assert_same_run(tmp_path / "tiny-x", whole("ucfl"))


@pytest.mark.nightly
def test_a_worker_that_dies_at_the_end_leaves_nobody_waiting(whole, mpirun, tmp_path):
    """Rank 1 has handed in its share of a matrix when rank 2 dies at its own."""
    plan, angles = (
        [{"rank": 2, "call": "matrices", "nth": 1, "after": 1.0}],
        ("--evaluation.matrices", "[angles]"),
    )
    alone, words = (
        [*deaths.arguments(tmp_path / place, "x", "fedavg", whole.cache), *angles]
        for place in ("alone", "three")
    )
    assert cli.main(alone) == 0
    end = deaths.launch_all(mpirun, 3, [(plan, words)], launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert [who.split(" on ")[0] for who in deaths.lost(tmp_path / "three", "x")] == ["rank 2"]
    assert_same_run(tmp_path / "three" / "tiny-x", tmp_path / "alone" / "tiny-x")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_a_worker_that_dies_after_the_last_evaluation_does_not_keep_the_end(name, whole, mpirun, tmp_path):
    """The others notice it while rank 0 writes the scores: its last command finds them in a new group."""
    plan = [{"rank": 0, "call": "record", "nth": 1, "targets": [3], "after": 1.5}]
    asked = deaths.arguments(tmp_path, "x", name, whole.cache)
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert [who.split(" on ")[0] for who in deaths.lost(tmp_path, "x")] == ["rank 3"]
    assert_same_run(tmp_path / "tiny-x", whole(name))


@pytest.mark.nightly
def test_a_worker_that_dies_while_client_models_are_collected_makes_all_repeat_it(whole, mpirun, tmp_path):
    """Rank 3 dies at its own Gatherv, with which the other workers are done."""
    plan = [{"rank": 3, "call": "Gatherv", "nth": 1, "after": 1.0}]
    alone, words = (
        [*deaths.arguments(tmp_path / place, "x", "fedavg", whole.cache), "--output.client_models", "true"]
        for place in ("alone", "four")
    )
    assert cli.main(alone) == 0
    end = deaths.launch(mpirun, 4, plan, *words, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert [who.split(" on ")[0] for who in deaths.lost(tmp_path / "four", "x")] == ["rank 3"]
    assert_same_run(tmp_path / "four" / "tiny-x", tmp_path / "alone" / "tiny-x")
    made = [
        load_file(tmp_path / place / "tiny-x" / "client_models.safetensors") for place in ("alone", "four")
    ]
    torch.testing.assert_close(*made, rtol=0, atol=0)


@pytest.mark.nightly
def test_a_worker_that_dies_while_callbacks_look_at_a_complete_run_leaves_it_complete(
    whole, mpirun, tmp_path
):
    (tmp_path / "silent.py").write_text("class Silent:\n    def on_end(self, run):\n        pass\n")
    plan = [{"rank": 0, "call": "on_end", "nth": 1, "targets": [3], "after": 1.5}]
    callbacks = ("--output.callbacks", f"['{tmp_path / 'silent.py'}:Silent']")
    asked = [*deaths.arguments(tmp_path, "x", "fedavg", whole.cache), *callbacks]
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert "before the first step" not in end.stderr
    assert_same_run(tmp_path / "tiny-x", whole("fedavg"))


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "launcher"), [(2, ()), (0, deaths.ULFM)], ids=["2", "0"])
def test_a_stopped_rank_without_which_the_job_cannot_go_on_ends_it(rank, launcher, whole, mpirun, tmp_path):
    plan = [{"rank": rank, "call": "Reduce", "nth": 4, "signal": signal.SIGSTOP}]
    asked = deaths.arguments(tmp_path, "x", "scaffold", whole.cache)
    end = deaths.launch(mpirun, 3, plan, *asked, launcher=launcher)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode not in (0, 2, 75)
    (said,) = [line for line in end.stderr.splitlines() if "was stopped for 2 s" in line]
    assert f"rank {rank} on " in said
    assert "Traceback" not in end.stderr


@pytest.mark.nightly
def test_a_tolerant_run_in_which_nobody_dies_ends(whole, mpirun, tmp_path):
    asked = deaths.arguments(tmp_path, "x", "fedavg", whole.cache)
    end = deaths.launch(mpirun, 3, [], *asked, launcher=deaths.ULFM)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    assert end.returncode == 0, end.stderr
    assert_same_run(tmp_path / "tiny-x", whole("fedavg"))


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["start", "scatter", "open_federation"])
def test_the_loss_of_a_rank_during_start_up_is_overcome_or_told(call, whole, mpirun, tmp_path):
    asked = deaths.arguments(tmp_path, "x", "fedavg", whole.cache)
    plan, limit = [{"rank": 1, "call": call, "nth": 1}], {"MPIFL_START_S": "5"}
    end = deaths.launch(mpirun, 3, plan, *asked, launcher=deaths.ULFM, env=limit)
    if not has_ulfm(end.stderr):
        pytest.skip("this MPI has no fault tolerance (Open MPI has)")
    if end.returncode == 0:  # it was missed after the first step began
        assert_same_run(tmp_path / "tiny-x", whole("fedavg"))
    else:
        assert "start the job again" in end.stderr
        assert "Traceback" not in end.stderr
        assert not (tmp_path / "tiny-x" / "summary.json").exists()


@pytest.mark.nightly
def test_a_job_that_is_killed_goes_on_at_another_number_of_ranks(whole, mpirun, tmp_path, capsys):
    asked = [*deaths.arguments(tmp_path, "x", "scaffold", whole.cache), "--checkpoint.every", "2"]
    end = deaths.launch(mpirun, 2, [{"rank": 0, "call": "Reduce", "nth": 6}], *asked)
    assert end.returncode not in (0, 2, 75)
    folder = tmp_path / "tiny-x"
    assert not (folder / "summary.json").exists()
    assert cli.main(["resume", str(folder)]) == 0
    assert "going on after step 2" in capsys.readouterr().err
    assert_same_run(folder, whole("scaffold"))


@pytest.mark.nightly
@pytest.mark.parametrize("case", range(MANY))
def test_campaign_with_victims(case, whole, mpirun, tmp_path):
    rng = random.Random(case)
    name = [*deaths.RUNS][case % len(deaths.RUNS)]
    plan = deaths.plan_of(rng, name, 4, rng.choice((1, 2)))
    asked = deaths.arguments(tmp_path, "x", name, whole.cache)
    end = deaths.launch(mpirun, 4, plan, *asked, launcher=deaths.ULFM)
    assert end.returncode == 0, f"{plan}\n{end.stdout}\n{end.stderr}"
    assert_same_run(tmp_path / "tiny-x", whole(name))
    print(f"CAMPAIGN {name} {plan} lost {len(deaths.lost(tmp_path, 'x'))}: {end.stderr}")


@pytest.mark.nightly
@pytest.mark.parametrize("case", range(min(MANY, 20)))
def test_campaign_of_whole_jobs(case, whole, mpirun, tmp_path):
    rng = random.Random(1000 + case)
    name = [*deaths.RUNS][case % len(deaths.RUNS)]
    (plan,) = deaths.plan_of(rng, name, 2, 1)
    asked = [*deaths.arguments(tmp_path, "x", name, whole.cache), "--checkpoint.every", "1"]
    deaths.launch(mpirun, 2, [plan], *asked)  # without fault tolerance all ranks die
    if not (tmp_path / "tiny-x" / "summary.json").exists():
        written = any((tmp_path / "tiny-x" / "checkpoints").glob("step-*"))
        words = ["resume", str(tmp_path / "tiny-x"), *([] if written else ["--from-start"])]
        end = deaths.launch(mpirun, rng.choice((None, 2)), [], *words)
        assert end.returncode == 0, f"{plan}\n{end.stdout}\n{end.stderr}"
        print(f"CAMPAIGN {name} {plan}: {end.stderr}")
    assert_same_run(tmp_path / "tiny-x", whole(name))
