"""Progress is shown on terminals and in log files, and nothing that takes long is silent."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import toy

from mpifl.core.progress import ROUND, VisitCounter, doing, each, stages
from mpifl.supervision import progress
from mpifl.supervision.progress import Progress, in_words

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)  # stages note their beginning by it
    return found


@pytest.fixture
def shown(clock) -> Progress:
    """Return a display without a thread: the test looks."""
    return Progress(10, "w1", silence=9.0, clock=clock)


def wait_for(lines: int, written: Callable[[], str]) -> str:
    """Return what a thread wrote, once it has so many lines; a busy machine may take long."""
    end, text = time.monotonic() + 60, ""
    while text.count("\n") < lines:
        assert time.monotonic() < end, f"nothing but {text!r} was written"
        time.sleep(0.01)
        text += written()
    return text


def test_durations_are_told_in_words():
    told = [in_words(s) for s in (0.2, 119, 125, 599.7, 3600 * 3 + 600)]
    assert told == ["0 s", "119 s", "2 min 5 s", "10 min", "3 h 10 min"]


def test_silence_ends_with_what_is_going_on(shown, clock, capsys):
    with doing("opening data"), doing("decoding pictures", 400, "pictures") as pictures:
        clock.now += 8.9
        shown.look()
        assert capsys.readouterr().out == ""
        clock.now += 0.2
        pictures.done = 100
        shown.look()
        said = "opening data, decoding pictures, 100 of 400 pictures: 9 s so far, about 27 s left of"
        assert capsys.readouterr().out == f"{said} decoding pictures\n"
        clock.now += 5
        shown.look()
        assert capsys.readouterr().out == "", "the last line is five seconds old"
    assert stages() == []


def test_the_end_is_estimated_from_rounds_and_visits(shown, clock):
    """Three of ten rounds in 60 s and half of the next: 3.5 of 10, so 65 / 3.5 * 6.5 s are left."""
    with doing(ROUND, 10, main=True) as rounds:
        clock.now += 60
        rounds.done = 3
        with doing("training", 40, "visits", main=True) as visits:
            clock.now += 5
            visits.done = 20
            text = "round 4/10, training, 20 of 40 visits: 65 s so far, about 2 min 1 s left"
            assert shown.line() == text
        clock.now += 5
        with doing("evaluating", 8, "clients"):  # does not take back that half of the round is done
            assert shown.line().endswith("evaluating, 0 of 8 clients: 70 s so far, about 2 min 10 s left")


def test_a_run_that_goes_on_counts_what_it_did_itself(shown, clock):
    """From round 6 to 8 of 10 in 10 s: two rounds are left, 10 s."""
    with doing(ROUND, 10, first=6, main=True) as rounds:
        clock.now += 10
        rounds.done = 8
        assert shown.line() == "round 9/10: 10 s so far, about 10 s left"


def test_a_sweep_estimates_all_of_its_cases(clock):
    """Case 2 of 4 is half done after 30 s: 1.5 of 4."""
    with Progress(0, "sweep", clock=clock, quiet=True), doing("case", 4) as cases:
        clock.now += 20
        cases.done = 1
        with Progress(10, "w1", clock=clock, quiet=True) as inner, doing(ROUND, 10, main=True) as rounds:
            clock.now += 10
            rounds.done = 5
            assert inner.line() == "case 2/4, round 6/10: 10 s so far, about 50 s left"


def test_a_case_that_takes_longer_than_those_before_counts_by_its_own_pace(clock):
    """One case took 20 s and one was skipped; a tenth of the third took 40 s."""
    with Progress(0, "sweep", clock=clock, quiet=True), doing("case", 4, alike=False) as cases:
        clock.now += 20
        cases.done, cases.first = 2, 1
        with Progress(10, "w1", clock=clock, quiet=True) as inner, doing(ROUND, 10, main=True) as rounds:
            clock.now += 10
            assert inner.line() == "case 3/4, round 1/10: 10 s so far, about 60 s left"
            clock.now += 30
            rounds.done = 1
            left = "9 min 30 s"  # 360 s of this case, and (20 + 400) / 2 s of the next
            assert inner.line() == f"case 3/4, round 2/10: 40 s so far, about {left} left"


def test_a_display_within_another_silences_it(clock, capsys):
    with Progress(0, "sweep", clock=clock, silence=9.0) as outer:
        with Progress(0, "w1", clock=clock, silence=1000.0):
            clock.now += 20
            outer.look()
        outer.look()
        assert capsys.readouterr().out == ""
        clock.now += 9
        outer.look()
        assert capsys.readouterr().out == "sweep: 29 s so far\n"


def test_rounds_are_lines_two_seconds_apart_and_the_last_one(shown, clock, capsys):
    for number in range(1, 11):
        clock.now += 1
        shown.step(number, f"accuracy 0.{number}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[0] == "round 1/10  accuracy 0.1"


def test_a_thread_speaks_while_the_process_works(capsys):
    with Progress(0, "slow", silence=0.05), doing("thinking"):
        said = wait_for(2, lambda: capsys.readouterr().out)
    assert re.fullmatch(r"(thinking: \d+ s so far\n)+", said)


def test_quiet_is_quiet(capsys):
    with Progress(3, "slow", quiet=True, silence=0.01) as quiet:
        quiet.say("something")
        quiet.step(3)
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_whoever_answers_on_stdout_is_watched_on_stderr(capsys):
    with Progress(title="plan", to_stderr=True, silence=0.03):
        said = wait_for(1, lambda: "".join(capsys.readouterr()[::-1]))
    assert re.match(r"plan: \d+ s so far\n", said)
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    """An output that a person looks at."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch, columns: int) -> Terminal:
    """Return the terminal that takes the place of stdout, with a bar that only `Progress.look` draws."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(progress, "BAR_SECONDS", 1000.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return screen


def test_a_terminal_gets_a_bar_and_what_is_going_on(monkeypatch):
    """Where stdout is no terminal (a log, a notebook), no control character is written; here one is."""
    screen = terminal(monkeypatch, 120)
    with Progress(3, "w1 [/b] [ours]") as shown:
        for number in each([1, 2, 3], "working", "rounds"):
            shown.look()
            shown.step(number, "accuracy 0.5")
    text = screen.getvalue()
    assert "\x1b[" in text
    assert "3/3" in text
    assert "w1 [/b] [ours]" in text, "a name is no markup"
    assert "working, 1 of 3 rounds" in text


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_bar_is_one_line_with_the_time_left_whatever_the_terminal(monkeypatch, clock, columns):
    """A long name and a long note are cut; the number of rounds and the time left are not."""
    screen = terminal(monkeypatch, columns)
    note = "accuracy 0.9123  worst 0.8123  ARI 1.00  clusters 4  loss 0.2311"
    name = "a-run-with-a-rather-long-name-of-its-own"
    with (
        Progress(1000, name, clock=clock) as shown,
        doing(ROUND, 1000, unit="") as rounds,
        doing("training", 3000, "visits", main=True),
    ):
        clock.now += 60
        rounds.done = 200
        shown.step(200, note)
        shown.look()
        drawn = screen.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert max(map(len, lines)) <= columns
    last = lines[-1]
    assert "200/1000" in last
    assert "4 min 0 s left" in last
    assert name[:8] in last
    assert ("training" in last) == (columns > 60)


def test_lines_have_no_control_characters(shown, clock, capsys):
    with doing(ROUND, 10, main=True), doing("training", 4, "visits", main=True):
        clock.now += 10
        shown.look()
    shown.step(10, "done")
    assert not re.search(r"[^\n -~]", capsys.readouterr().out)


def test_stages_end_with_an_error():
    with pytest.raises(ZeroDivisionError), doing("dividing"):
        _ = 1 / 0
    assert stages() == []


def test_items_are_counted_as_they_are_done():
    seen = [str(stages()[-1]) for _ in each("abc", "reading", "files")]
    assert seen == [f"reading, {j} of 3 files" for j in range(3)]


def test_a_stage_for_which_others_are_not_ready_is_not_shown():
    with doing("training", 2, "visits") as training, doing("clients look at each other", after=training):
        assert [str(stage) for stage in stages()] == ["training, 0 of 2 visits"]
        training.done = 2
        assert [str(stage) for stage in stages()] == ["training, 2 of 2 visits", "clients look at each other"]
    with doing("training") as unknown, doing("clients look at each other", after=unknown):
        assert len(stages()) == 2


def test_the_ranks_of_a_node_count_together(tmp_path):
    """Two counters of one folder stand for two processes; a third one starts a folder of its own."""
    mine, other = (VisitCounter(tmp_path, rank, 3) for rank in (1, 2))
    for _ in range(3):
        mine.advance()
    other.advance()
    assert mine.total() == other.total() == VisitCounter(tmp_path, 0, 3).total() == 4
    gone = VisitCounter(tmp_path / "gone", 1, 3)  # a rank that failed took the folder away
    gone.advance()
    assert gone.total() == 1
    alone = VisitCounter()
    alone.advance()
    assert alone.total() == 1


def test_counting_a_visit_costs_less_than_two_microseconds(tmp_path):
    """Of the processor, the best of five."""
    counter, best = VisitCounter(tmp_path, 1, 4), float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(1000):
            counter.begin()
            counter.advance()
        best = min(best, (time.thread_time() - start) / 1000)
    assert best < 2e-6


def lines_of(ranks: int | None, folder: Path, *options: str) -> list[str]:
    """Return the lines of a run with one long round, told of every 0.05 s."""
    slow = ["--local.epochs", "6", "--rounds", "1", "--system.kernels", "false", "--local.batch_size", "8"]
    place = ["--output.folder", str(folder), "--data.cache", str(folder / "cache")]
    command = [sys.executable, "-m", "mpifl", "run", str(CONFIG), *slow, *place, *options]
    if ranks is not None:
        command = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), *command]
    env = {**os.environ, **toy.PYTHONPATH, progress.SILENCE_VARIABLE: "0.05", "PYTHONUNBUFFERED": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        assert job.stdout is not None
        found = [line.rstrip("\n") for line in job.stdout]
        assert job.wait(60) == 0
        return found
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(None, [], marks=pytest.mark.nightly),
        pytest.param(2, [], marks=pytest.mark.nightly),
        (2, ["--algorithm.name", "emdcfl"]),
    ],
)
def test_a_long_first_round_is_never_silent(ranks, options, tmp_path):
    """A visit takes as long as an interval, or longer; with two ranks the server waits for the other."""
    lines = lines_of(ranks, tmp_path, *options)
    (begin,) = (i for i, text in enumerate(lines) if text.startswith("numbers "))
    end = next(i for i, text in enumerate(lines) if text.startswith("round 1/1  accuracy"))
    counted = [re.search(r"round 1/1, training, (\d+) of 8 visits", text) for text in lines[begin:end]]
    numbers = [int(found[1]) for found in counted if found]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) >= 3, "visits within the round are counted"
    assert any("left" in text for text in lines)
    looks = [i for i, text in enumerate(lines) if "clients look at each other" in text]
    assert bool(looks) == bool(options)
    assert all("training, 8 of 8 visits, clients look" in lines[i] for i in looks)
