"""Cases of a sweep side by side on groups of ranks: the tables of one after the other, and an end for all."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import children, mpi_environment
from support import toy
from support.runs import CONFIG

from mpifl.cli import main
from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.experiment import loader
from mpifl.sweeps.cases import cases, trainings
from mpifl.sweeps.sweep import Claims, Prefixed, check_jobs, first_apart

IFCA = "{name: ifca, num_clusters: 2}"
VARY = f"{{network: [wired, wireless-slow], algorithm: {{mine: fedavg, theirs: {IFCA}}}, seed: [0, 1]}}"
FEW = f"{{network: [wired, wireless-slow], algorithm: {{mine: fedavg, theirs: {IFCA}}}}}"
COMMAND = ["-m", "mpifl", "sweep", str(CONFIG)]


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of sweep.csv without seconds of a clock on the wall."""
    with (folder / "sweep.csv").open() as lines:
        return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in csv.DictReader(lines)]


def summaries(folder: Path) -> dict[str, dict[str, object]]:
    """Return what each case of a sweep says of itself."""
    return {p.parent.name: json.loads(p.read_text()) for p in sorted(folder.glob("*/summary.json"))}


@pytest.mark.in_turn
def test_cases_side_by_side_are_those_of_one_after_the_other(mpirun, tmp_path):
    """Three ranks, two groups, one of them of one rank. Half of the cases are copies with other times."""
    place = ["--output.folder", str(tmp_path), "--vary", FEW, "-q"]
    assert main([*COMMAND[2:], *place, "--output.id", "alone"]) == 0
    options = [*COMMAND, *place[:-1], "--output.id", "jobs", "--jobs", "2"]
    end = mpirun(3, *options, env=toy.PYTHONPATH)
    assert end.returncode == 0, end.stderr
    alone, jobs = tmp_path / "tiny-alone", tmp_path / "tiny-jobs"
    assert len(rows(alone)) == 4
    assert rows(alone) == rows(jobs)
    mine, theirs = summaries(alone), summaries(jobs)
    assert [s["digest"] for s in mine.values()] == [s["digest"] for s in theirs.values()]
    assert {s["ranks"] for s in theirs.values()} == {1, 2}, "groups of two ranks and of one"
    copies = [name for name, summary in theirs.items() if "retimed_from" in summary]
    assert len(copies) == 2
    assert {name.split("-")[1] for name in copies} == {"wireless_slow"}, "no training is done twice"
    assert not [p for p in jobs.iterdir() if p.name.startswith(".")], "what groups told each other is gone"
    lines = end.stdout.splitlines()
    assert sum(line.startswith("case 1: round 2/2  accuracy") for line in lines) == 1
    assert lines[-1] == f"results: {jobs}: sweep.md, sweep.csv, sweep.png"


@pytest.mark.nightly
def test_a_case_that_fails_stops_the_others_which_write_their_state(mpirun, tmp_path):
    """400 of 8 clients: known when the data are open, while the other group trains for many rounds."""
    vary = "{cohort_size: {few: 4, many: 400, all: 8}}"
    options = [*COMMAND, "--vary", vary, "--rounds", "20000", "--checkpoint.every", "0", "--output.id", "x"]
    end = mpirun(2, *options, "--output.folder", tmp_path, "--jobs", "2", env=toy.PYTHONPATH)
    assert end.returncode == 2
    said = [line for line in end.stderr.splitlines() if line.startswith("mpifl:")]
    assert len(said) == 1, end.stderr
    assert said[0].startswith("mpifl: cohort_size = 400: there are 8 clients")
    assert said[0].endswith("(in the case cohort_size many)")
    assert "case 2: failed" in end.stdout
    left = {p.name for p in (tmp_path / "tiny-x").iterdir()}
    assert left == {"sweep.yaml", "tiny-few", ".locks"}, "the third case never began"
    assert list((tmp_path / "tiny-x" / "tiny-few" / "checkpoints").glob("step-*"))


@pytest.mark.nightly
def test_groups_begin_no_case_where_one_is_ruled_out_by_its_configuration(mpirun, tmp_path):
    vary = "{algorithm: [fedavg, fedprox, emdcfl]}"
    options = [*COMMAND, "--vary", vary, "--output.updates", "true", "--output.folder", tmp_path / "runs"]
    end = mpirun(2, *options, "--jobs", "2", env=toy.PYTHONPATH)
    assert end.returncode == 2
    said = [line for line in end.stderr.splitlines() if line.startswith("mpifl:")]
    assert len(said) == 1, end.stderr
    assert said[0].startswith("mpifl: output.updates = True: ")
    assert said[0].endswith("(in the case algorithm emdcfl)")
    assert not (tmp_path / "runs").exists()


def steps(sweep: Path) -> int:
    """Return how many cases of a sweep have taken a step."""
    return len(list(sweep.glob("tiny-*/checkpoints/step-*1")))


def started(
    folder: Path,
    vary: str = "{seed: [0, 1]}",
    begun: Callable[[Path], bool] = lambda sweep: steps(sweep) == 2,
) -> subprocess.Popen[str]:
    """Start a sweep of two endless cases on four ranks, and return when it has begun."""
    often = ["--checkpoint.every", "1", "--rounds", "100000", "--output.id", "x"]
    command = [str(Path(sys.executable).parent / "mpirun"), "-n", "4", sys.executable]
    command += [*COMMAND, "--vary", vary, *often, "--output.folder", str(folder), "--jobs", "2", "-q"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, env=mpi_environment(toy.PYTHONPATH), **pipes)
    while not begun(folder / "tiny-x"):
        assert job.poll() is None, job.communicate()
        time.sleep(0.1)
    return job


@pytest.mark.nightly
def test_a_signal_stops_all_groups_with_their_state_written(tmp_path):
    with started(tmp_path) as job:
        job.send_signal(signal.SIGUSR2)
        _, err = job.communicate(timeout=120)
    assert job.returncode == 75
    said = [line for line in err.splitlines() if line.startswith("mpifl:")]
    folder = tmp_path / "tiny-x"
    assert said == [f"mpifl: stopped; the state of 2 cases is written; go on with: mpifl resume {folder}"]
    assert not list(folder.glob(".jobs-*"))


@pytest.mark.nightly
def test_a_signal_stops_a_group_that_trains_before_its_first_step(tmp_path):
    flt = "{name: flt, pretrain_epochs: 1000000, centroids: 2, code: 4}"

    def begun(sweep: Path) -> bool:
        file = sweep / "tiny-theirs" / "progress.json"
        return steps(sweep) == 1 and file.exists() and "training on the server's data" in file.read_text()

    with started(tmp_path, f"{{algorithm: {{mine: fedavg, theirs: {flt}}}}}", begun) as job:
        job.send_signal(signal.SIGUSR2)
        _, err = job.communicate(timeout=120)
    assert job.returncode == 75
    said = [line for line in err.splitlines() if line.startswith("mpifl:")]
    state = "the state of 2 cases is written, but for the last steps of 1"
    assert said == [f"mpifl: stopped; {state}; go on with: mpifl resume {tmp_path / 'tiny-x'}"]


@pytest.mark.nightly
def test_a_killed_rank_ends_the_job(tmp_path):
    with started(tmp_path) as job:
        os.kill(children(job.pid)[-1], signal.SIGKILL)
        job.communicate(timeout=120)
    assert job.returncode != 0


class Pretended(Single):
    """So many ranks on one node."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.nodes = size, (0,) * size


@pytest.mark.parametrize(
    ("ranks", "jobs", "options", "message"),
    [
        (
            1,
            2,
            [],
            "--jobs = 2: one process runs one case at a time; mpirun -n 4 mpifl sweep CONFIG --jobs 2",
        ),
        (3, 4, [], "--jobs = 4: 3 ranks run 3 cases at a time at most; mpirun -n 8"),
        (4, 0, [], "--jobs = 0: use the number of cases that run at a time"),
        (
            4,
            2,
            ["--system.ranks", "4"],
            "system.ranks = 4: each group has 2 of this job's 4 ranks; use mpirun -n 8",
        ),
        (5, 2, ["--system.ranks", "2"], "system.ranks = 2: each group has 2 or 3 of this job's 5 ranks"),
    ],
)
def test_groups_that_cannot_be_are_refused(ranks, jobs, options, message):
    tree = loader.merged(loader.read(str(CONFIG)), loader.overrides([*options, "--vary", "{seed: [0, 1]}"]))
    with pytest.raises(UserError) as raised:
        check_jobs(jobs, Pretended(ranks), cases(tree))
    assert str(raised.value).startswith(message)


def test_ranks_that_outlive_their_job_have_one_case_at_a_time(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    check_jobs(1, Pretended(4), [])
    with pytest.raises(UserError, match="under mpirun --with-ft ulfm one run outlives its workers"):
        check_jobs(2, Pretended(4), [])


@pytest.mark.parametrize("jobs", ["0", "two", "-1"])
def test_jobs_are_a_number(jobs, capsys):
    assert main([*COMMAND[2:], "--vary", "{seed: [0, 1]}", f"--jobs={jobs}"]) == 2
    assert "--jobs = " in capsys.readouterr().err


def test_a_list_has_no_jobs(capsys):
    assert main([*COMMAND[2:], "--vary", VARY, "--list", "--jobs", "2"]) == 2
    assert "has no effect with --list" in capsys.readouterr().err
    assert main([*COMMAND[2:], "--vary", VARY, "--list"]) == 0
    assert "8 of 8 cases, 4 trainings: the others differ in times only\n" in capsys.readouterr().out


def test_cases_that_one_training_gives_are_one_unit_of_work():
    tree = loader.merged(loader.read(str(CONFIG)), loader.overrides(["--vary", VARY]))
    units = [[case.slug for case in unit] for unit in trainings(cases(tree))]
    assert units == [
        [f"{network}-{method}-{seed}" for network in ("wired", "wireless_slow")]
        for method in ("mine", "theirs")
        for seed in (0, 1)
    ]
    asynchronous = loader.merged(tree, {"policy": "every_arrival", "vary": {"algorithm": ["fedasync"]}})
    assert len(trainings(cases(asynchronous))) == 4, "which upload comes first depends on the network"


def test_units_that_begin_apart_from_those_under_way_go_first():
    """0 and 1 share a training, 2 and 3 another; 0 is under way, then 2 too."""
    starts = [{"a"}, {"a"}, {"b"}, {"b"}, set()]
    assert first_apart([1, 2, 3, 4], starts, [0]) == 2
    assert first_apart([1, 3, 4], starts, [0, 2]) == 4
    assert first_apart([1, 3], starts, [0, 2]) == 1
    assert first_apart([3], starts, []) == 3


def test_a_unit_of_work_is_taken_once_and_all_hear_of_a_stop(tmp_path):
    one, other = Claims(tmp_path / "c"), Claims(tmp_path / "c")
    one.create()
    assert [one.take(0), other.take(0), other.take(1), one.take(1)] == [True, False, True, False]
    assert not one.stop_asked()
    other.ask_to_stop()
    assert other.stop_asked(), "it has not looked before"
    one._looked = 0.0
    assert one.stop_asked()
    one.remove()
    assert one.stop_asked(), "what was heard stays so"
    assert not (tmp_path / "c").exists()


def test_lines_of_a_group_have_its_case_before_them():
    out = io.StringIO()
    stream = Prefixed(out, "case 3: ")
    print("round 1/2", "accuracy 0.5", file=stream, flush=True)
    print("a", end="", file=stream)
    print("b\nc", file=stream)
    assert out.getvalue() == "case 3: round 1/2 accuracy 0.5\ncase 3: ab\ncase 3: c\n"
    assert not stream.isatty()
