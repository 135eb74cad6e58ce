"""`mpifl bench`: ratios turn by turn, and one small workload from beginning to end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import mpi_environment

from mpifl import cli
from mpifl.benchmarks import command, compare, server, turns
from mpifl.benchmarks import job as one
from mpifl.benchmarks.workloads import WORKLOADS, Workload
from mpifl.comm.single import Single
from mpifl.core import progress
from mpifl.core.errors import UserError
from mpifl.data import prepare
from mpifl.experiment.loader import load

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


def test_ratios_are_taken_turn_by_turn():
    """2/1, 9/3 and 4/4: the machine was three times slower in the second turn, for both."""
    ours, theirs = ([{"s": s} for s in seconds] for seconds in ((2.0, 9.0, 4.0), (1.0, 3.0, 4.0)))
    assert compare.ratios(ours, theirs, lambda t: t["s"]) == {"median": 2.0, "low": 1.0, "high": 3.0}


class Steady:
    """A job of which each round takes the same time."""

    def __init__(self, round_s):
        self.round_s, self.taken, self.stages = round_s, [], []

    def turn(self, rounds):
        self.taken.append(rounds)
        self.stages.append(", ".join(map(str, progress.stages())))
        return {"seconds": rounds * self.round_s, "rounds": rounds}


def test_a_turn_is_as_long_for_a_fast_program_as_for_a_slow_one():
    """Rounds of 0.5 and 2 s in turns of 3 s: six of them and two."""
    fast, slow = Steady(0.5), Steady(2.0)
    taken = compare.take_turns({"fast": fast, "slow": slow}, 3.0, 2)
    assert [[t["seconds"] for t in taken[name]] for name in taken] == [[3.0, 3.0], [4.0, 4.0]]
    assert compare.take_turns({"fast": fast}, 0.0, 1)["fast"][0]["rounds"] == 1
    assert compare.ratios(*taken.values(), lambda t: t["seconds"] / t["rounds"])["median"] == 0.25


def test_a_turn_has_its_length_by_the_rounds_of_long_turns():
    """The first two rounds after a stop take 1 s, the others 0.25 s: three rounds would be 2.25 s of 3."""

    class Awakened(Steady):
        def turn(self, rounds):
            return {**super().turn(rounds), "seconds": 0.25 * rounds + 0.75 * min(rounds, 2)}

    turns = compare.take_turns({"one": Awakened(1.0)}, 3.0, 2)["one"]
    assert all(3.0 <= turn["seconds"] < 5.0 for turn in turns)


def test_a_measurement_says_how_far_it_is():
    """Turns of W5 take half a minute each; `LONG` are the commands whose stages are shown."""
    job = Steady(2.0)
    compare.take_turns({"plain": job, "mpifl": Steady(2.0)}, 3.0, 2)
    assert job.stages == ["warming up"] * 2 + ["measuring, 1 of 4 turns", "measuring, 2 of 4 turns"]
    assert "bench" in cli.LONG


@pytest.mark.parametrize(
    ("names", "seconds", "message"),
    [(["W1"], "-1", "--seconds = -1"), (["W1"], "x", "--seconds = 'x'"), (["server"], "2", "has no effect")],
)
def test_the_length_of_a_turn_is_checked(names, seconds, message):
    with pytest.raises(UserError, match=message):
        command.bench(names, [], None, None, None, seconds)


@pytest.mark.parametrize(("name", "clients", "m"), [("W1", 100, 10), ("W3", 1000, 100), ("W5", 4, 4)])
def test_the_workloads_are_what_they_say(name, clients, m):
    config = load(WORKLOADS[name].config)
    assert config.data.scenario.clients == clients
    assert config.cohort_size in (m, None)
    assert config.data.source.train == clients * int(WORKLOADS[name].what.split(" x ")[1].split()[0])


@pytest.mark.parametrize("options", [[], ["--local.epochs", "2", "--system.stack", "1"]])
@pytest.mark.parametrize("gpus", [0, 2])
def test_the_loops_do_the_work_that_mpifl_does_where_it_does_it(monkeypatch, options, gpus):
    """What is laid over the configuration is laid over that of both loops, too."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    started = {}

    class Taken(Steady):
        def __init__(self, name, command, variables, folder):
            started[name] = command

        def stop(self):
            pass

        def end(self):
            pass

    monkeypatch.setattr(compare, "Job", Taken)
    monkeypatch.setattr(compare, "take_turns", lambda *_: {})
    monkeypatch.setattr(compare, "_figures", lambda jobs, taken: {})
    compare.compare(Workload(TINY, "tiny"), 3, 1, options, 0.0)
    device = "cuda" if gpus else "cpu"
    loop = [sys.executable, "-m", "mpifl.benchmarks.plain_loop", "SOCKET", "2", TINY, device, *options]
    assert started["plain"] == started["tuned"] == loop
    assert started["mpifl"][-len(options) :] == options or not options


@pytest.mark.parametrize(
    "options",
    [["--local.optimizer", "adam"], ["--local", "{epochs: 1, steps: 3}"], ["--algorithm", "fedprox"]],
)
def test_what_the_loops_do_not_know_is_refused(monkeypatch, options):
    monkeypatch.setattr(compare, "Job", None)
    with pytest.raises(UserError, match="the plain loops beside mpifl"):
        compare.compare(Workload(TINY, "tiny"), 3, 1, options, 0.0)


@pytest.mark.parametrize("place", ["missing/figures.json", "."])
def test_a_file_of_figures_that_cannot_be_written_is_refused_before_it_is_measured(
    monkeypatch, tmp_path, place
):
    monkeypatch.setattr(command, "measure_server", None)
    with pytest.raises(UserError, match=r"--json = .*: cannot be written"):
        command.bench(["server"], [], None, None, str(tmp_path / place))

    def measure(*_):
        assert not (tmp_path / "figures.json").exists(), "nothing is written before"
        (tmp_path / "figures.json").mkdir()
        return {}

    monkeypatch.setattr(command, "measure_server", measure)
    with pytest.raises(UserError, match=r"--json = .*: cannot be written"):
        command.bench(["server"], [], None, None, str(tmp_path / "figures.json"))


@pytest.mark.parametrize("names", [["server", "W1"], ["W1", "server"]])
def test_the_measurement_of_the_server_is_made_alone(names):
    with pytest.raises(UserError, match=r"bench = \[.*\]: server runs alone: leave the others out"):
        command.bench(names, [], None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy every_arrival", "only synchronous rounds"),
        ("--rounds 3", "rounds = 3: the measurement"),
        ("--cohort_size 7", "cohort_size = 7: the measurement"),
        ("--algorithm fedprox", "algorithm = 'fedprox': the measurement"),
        ("--algorithm.name fedprox", r"algorithm\.name = 'fedprox': the measurement"),
    ],
)
def test_what_a_measurement_chooses_or_cannot_measure_is_refused(monkeypatch, options, message):
    monkeypatch.setattr(server, "Job", None)
    with pytest.raises(UserError, match=message):
        command.bench(["server"], options.split(), None, None, None)


def test_what_rank_0_computes_is_divided_into_rounds_and_clients():
    """2 ms beside: a round of 2 clients takes 2 ms, one of 1002 takes 5: 3 us a client."""
    found = server.figures({2: [0.002, 0.009, 0.001], 1002: [0.005]}, [0.0003, 0.0005, 0.0004])
    assert found["round_s"] == 0.002
    assert found["client_s"]["1002"] == pytest.approx(3e-6)
    page = server.lines({"ranks": 3, "sizes": [1002], "methods": {"fedavg": found}})
    assert page[-1].split() == ["fedavg", "2.00", "0.40", "3.0"]


def test_an_unknown_workload_is_refused_by_name():
    with pytest.raises(UserError, match="W3"):
        compare.compare_all(["W33"], 3, None, [])


def test_ranks_that_take_turns_may_stand_still(monkeypatch):
    """Nobody ends them for being stopped."""
    limits, seen = [30.0], []

    class Watched(Single):
        def watch_stopped(self, limit: float) -> None:
            limits.append(limit)

    monkeypatch.setattr(one, "connect", Watched)
    monkeypatch.setattr(one, "_run", lambda *_: seen.append(limits[-1]))
    assert one.main("socket", "W1", []) == 0
    assert seen == [0.0]


def test_a_job_that_cannot_start_says_why(tmp_path):
    with pytest.raises(UserError, match="no-such-module"):
        turns.Job("x", [sys.executable, "-m", "no-such-module"], {}, tmp_path)


@pytest.mark.nightly
def test_a_job_that_is_refused_says_why_not_how_its_launcher_ended(tmp_path):
    words = ["mpifl.benchmarks.job", "SOCKET", TINY, "--cohort_size", "99"]
    ended = "; echo; echo prterun has exited"
    command_line = ["sh", "-c", shlex.join([sys.executable, "-m", *words]) + ended]
    with pytest.raises(UserError, match="the job ended: cohort_size = 99: there are 8 clients") as error:
        turns.Job("x", command_line, {}, tmp_path)
    assert "prterun" not in str(error.value)


@pytest.mark.nightly
def test_a_small_workload_is_measured_from_beginning_to_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(WORKLOADS, "W9", Workload(TINY, "tiny", turns=2))
    beside = Path(sys.executable).parent
    environment = mpi_environment({"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"})
    monkeypatch.setattr(os, "environ", environment)
    if shutil.which("mpirun", path=environment["PATH"]) is None:
        pytest.skip("no mpirun beside the interpreter or on the PATH")
    command.bench(["W9"], [], ranks="2", turns=None, path=str(tmp_path / "figures.json"), seconds="0")
    found = json.loads((tmp_path / "figures.json").read_text())["W9"]
    assert "ratio to the plain loop" in capsys.readouterr().out
    assert found["turns"] == 2
    assert found["ratio_plain"]["low"] <= found["ratio_plain"]["median"] <= found["ratio_plain"]["high"]
    for job in ("mpifl", "plain", "tuned"):
        assert found[job]["peak_bytes"] > 50e6, "an interpreter with PyTorch"
        assert found[job]["cpu_per_round"] > 0
    vector = 4 * (64 * 12 + 12 + 12 * 10 + 10)
    assert found["federation_bytes_per_round"] == 2 * 8 * vector, "8 clients download and upload the model"
    assert vector < found["mpi_bytes_per_round"] < 20 * vector


def test_a_job_that_dies_between_its_turns_is_told_of_and_ends(tmp_path):
    script = (
        "import os, sys; from multiprocessing.connection import Client; line = Client(sys.argv[1]); "
        "line.send({'pids': [os.getpid()], 'used': [{'cpu': 0}]}); line.recv(); "
        "line.send({'used': [{'cpu': 1}]}); print('out of luck'); sys.exit(3)"
    )
    dying = turns.Job("x", [sys.executable, "-c", script, "SOCKET"], {}, tmp_path)
    assert dying.turn(1)["cpu"] == [1]
    dying._signal(signal.SIGCONT)
    dying.process.wait(20)
    with pytest.raises(UserError, match="out of luck"):
        dying.turn(1)
    dying.end()


LOOP = """
import multiprocessing, os, sys
from mpifl.benchmarks import plain_loop

def train(model, start, x, y, local):
    if local.epochs != 7:
        os.write(1, f"{os.getpid()} {x.device.type} {local.epochs}\\n".encode())
    elif multiprocessing.parent_process():
        raise RuntimeError("out of luck")

plain_loop.train = train
plain_loop.main(sys.argv[1], 2, *sys.argv[2:])
"""


def loop_of_two(tmp_path, *words):
    """Return a plain loop of two processes that says what each trains with."""
    config = load(TINY)
    prepare(config.data, config.seed.data, download=False)
    return turns.Job("plain", [sys.executable, "-c", LOOP, "SOCKET", TINY, *words], {}, tmp_path, 60.0)


@pytest.mark.nightly
def test_each_process_of_a_plain_loop_has_the_options_and_the_device(tmp_path):
    loop = loop_of_two(tmp_path, "meta", "--local.epochs", "3")
    try:
        loop.turn(1)
    finally:
        loop.end()
    trained = {tuple(line.split()) for line in loop.log.read_text().splitlines()}
    assert trained == {(str(pid), "meta", "3") for pid in loop.first["pids"]}
    assert len(trained) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("dies", ["process 1", "the whole"])
def test_a_plain_loop_ends_with_all_its_processes(dies, tmp_path):
    loop = loop_of_two(tmp_path, "cpu", "--local.epochs", "7")
    try:
        if dies == "the whole":
            loop.process.terminate()
        else:
            with pytest.raises(UserError, match="out of luck / process 1 of 2 ended with code 1"):
                loop.turn(1)
        assert loop.process.wait(20) == (1 if dies == "process 1" else 128 + signal.SIGTERM)
    finally:
        loop.end()
    for pid in loop.first["pids"]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
