"""`mpifl watch`: what a run folder tells while it is written, in words, in a browser, and of several runs."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
import yaml
from support import chrome

import mpifl
from mpifl import cli
from mpifl.analysis import watch
from mpifl.analysis.watch import Seen, SeenCases, Watched, holds_runs, look, one_line, plain_titles, sparkline
from mpifl.analysis.watch_page import HOST, server
from mpifl.core.errors import Stopped, UserError
from mpifl.core.progress import ROUND, doing
from mpifl.experiment.loader import read
from mpifl.supervision.progress import FILE, ProgressFile
from mpifl.sweeps.results import titles

NOW = 1_800_000_000.0
TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
HEADER = "round,seconds,accuracy_mean,accuracy_worst,num_clusters,ari,churn,"
HEADER += "federation_bytes_up,federation_bytes_down"


class Job:
    """A run folder that a test writes step by step, at times that it sets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.held = folder, NOW, True

    def write(self, name: str, text: str) -> None:
        """Write a file, now."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (self.now, self.now))

    def begin(self) -> None:
        """Write what a run writes first."""
        self.write("config.yaml", "name: tiny\nrounds: 10\nalgorithm: {name: ifca}\nmodel: {name: mlp}\n")
        self.write("run.json", json.dumps({"id": "x", "format": 1, "started": "2027-01-15T08:00:00+00:00"}))

    def beat(self, step: int, **more: object) -> None:
        """Write the progress file."""
        self.write(FILE, json.dumps({"time": self.now, "host": "h", "step": step, "rounds": 10, **more}))

    def evaluate(self, *accuracies: float, tail: str = "") -> None:
        """Write evaluations of rounds 1, 2, ..., ten seconds each."""
        rows = [f"{t},{10 * t},{a},{a / 2},2,0.5,,{1000 * t},{2000 * t}" for t, a in enumerate(accuracies, 1)]
        self.write("metrics.csv", "\r\n".join([HEADER, *rows, tail]))

    def look(self) -> Seen:
        """Return what the folder tells."""
        return look(self.folder, self.now, lambda path: self.held)


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path / "runs" / "tiny-a")


def test_a_run_that_has_not_begun_is_waited_for_and_the_newest_beside_it_is_named(job):
    assert (job.look().state, job.look().over) == ("waiting", False)
    assert job.look().text == "there is no such folder yet"
    other = Job(job.folder.with_name("tiny-b"))
    other.begin()
    assert job.look().text.endswith(f"the newest beside it is {other.folder}")
    job.write("config.yaml", "name: ti")
    assert job.look().text.startswith("the run has not begun to write")


def test_a_run_is_followed_from_its_progress_file_between_evaluations(job):
    job.begin()
    ranks = [
        {"host": "h", "device": "cpu", "visits": 0},
        {"host": "h", "visits": 7, "seconds": {"train": 2.5, "load": 0.01, "recover": 0.0}},
    ]
    job.beat(3, doing="round 4/10, training, 7 of 20 visits", left_s=60.0, ranks=ranks)
    job.evaluate(0.25, 0.5)
    job.now += 5
    seen = job.look()
    assert (seen.state, seen.step, seen.rounds, seen.left_s) == ("running", 3, 10, 55.0)
    assert seen.curves["accuracy"] == [0.25, 0.5]
    assert (seen.last("worst"), seen.last("bytes_down"), seen.ranks) == (0.25, 4000, ranks)
    assert "churn" not in seen.curves, "all of it is empty"
    shown = drawn(seen)
    for word in (
        "round 3/10",
        "about 55 s left",
        "training, 7 of 20 visits",
        "0.5000",
        "4 kB",
        "train, s",
        "2.5",
    ):
        assert word in shown, shown
    assert "load, s" not in shown, "it would show 0.0"
    assert one_line(seen) == "round 2/10  accuracy 0.5000  worst 0.2500  ARI 0.50  clusters 2  6 kB"


def test_only_the_longest_phases_have_columns(job):
    job.begin()
    job.beat(1, ranks=[{"host": "h", "seconds": {f"phase{i}": 1.0 + i for i in range(9)}}])
    shown = drawn(job.look())
    assert [i for i in range(9) if f"phase{i}, s" in shown] == [3, 4, 5, 6, 7, 8]


def drawn(seen: Seen | SeenCases) -> str:
    """Return what a terminal of 120 columns shows."""
    from rich.console import Console

    console = Console(file=StringIO(), width=120)
    console.print(watch.picture(seen))
    return console.file.getvalue()


def test_a_half_written_row_is_left_for_the_next_look(job):
    job.begin()
    job.evaluate(0.25, tail="2,20,0.9")
    assert job.look().curves["accuracy"] == [0.25]
    job.write("metrics.csv", HEADER[:30])
    assert job.look().curves == {}


def test_a_run_that_is_not_measured_by_accuracy_is_followed_by_its_own_metric(job):
    job.begin()
    job.write("metrics.csv", "round,mse_mean,mse_worst,num_clusters\n1,4.5,9,1\n2,3.5,8,1\n")
    seen = job.look()
    assert (seen.metric, seen.last("accuracy"), seen.last("worst")) == ("mse", 3.5, 8)
    assert "mean mse" in drawn(seen)
    assert one_line(seen).startswith("round 2/10  mse 3.5000  worst 8.0000")


def test_clusters_are_those_after_the_last_change(job):
    job.begin()
    job.write("assignments.csv", "round,client,cluster\n1,0,0\n1,1,0\n1,2,1\n4,1,1\n")
    assert job.look().clusters == [(1, 2), (0, 1)]


def test_clusters_of_a_sample_say_of_how_many_clients_they_are(job):
    """`output.clients: sample` writes the rows of 1000 clients, here of 3."""
    job.begin()
    job.write("assignments.csv", "round,client,cluster\n1,0,0\n1,1,0\n1,2,1\n")
    assert "clients by cluster: 0: 2, 1: 1" in drawn(job.look())
    tree = {"name": "tiny", "rounds": 10, "output": {"clients": "sample"}}
    for scenario, text in (({"clients": 3000}, "3 of 3000"), ({"clients": 3}, ""), ({}, "a sample of 3")):
        job.write("config.yaml", yaml.safe_dump(tree | {"data": {"scenario": scenario}}))
        seen = job.look()
        assert seen.sample == text
        assert f"clients by cluster{text and f', of {text} clients'}: 0: 2, 1: 1" in drawn(seen)
        assert json.loads(watch.as_json(seen))["sample"] == text


@pytest.mark.parametrize(
    "beat",
    [
        {"ranks": 3},
        {"ranks": [{"seconds": [1, 2]}]},
        {"ranks": [{"seconds": {"train": "long"}}]},
        {"ranks": [{"host": [1], "visits": {}}], "host": 3, "start": 1e308, "left_s": True, "doing": 3},
        {"start": 1e20},
    ],
)
def test_a_progress_file_of_another_form_is_no_error(job, beat):
    job.begin()
    job.write("run.json", '{"id": "x"}')
    job.beat(3, **beat)
    seen = job.look()
    assert seen.state == "running"
    assert "round 3/10" in drawn(seen)
    watch.as_json(seen)


def test_a_killed_run_says_since_when_nothing_was_written_and_how_to_go_on(job):
    job.begin()
    job.beat(3)
    job.now += 29
    assert job.look().state == "running"
    job.now += 2
    assert job.look().state == "silent", "a process holds it"
    job.held = False
    seen = job.look()
    assert (seen.state, seen.over) == ("ended", True)
    assert re.search(
        r"nothing was written since [\d: -]+, 31 s ago: it was killed, unless it goes on on h", seen.text
    )
    assert seen.text.endswith(f"mpifl resume {job.folder} --from-start goes on")
    job.write("checkpoints/step-000000002/values.json", "{}")
    job.now += 31
    assert job.look().text.endswith(f"mpifl resume {job.folder} goes on after step 2")


def test_a_run_that_was_stopped_or_failed_says_so_at_once(job):
    job.begin()
    job.held = False
    job.beat(3, end="failed", reason="RankLost: rank 2")
    seen = job.look()
    assert (seen.state, seen.over) == ("failed", True)
    assert seen.text.startswith("failed after step 3: RankLost: rank 2; mpifl resume")


def test_a_stopped_run_that_somebody_resumes_is_no_longer_stopped(job):
    """Data and model are opened before it writes again; until then the old file says how it ended."""
    job.begin()
    job.beat(3, end="stopped", reason="by a signal or a request")
    job.held = False
    assert job.look().state == "stopped"
    job.held = True
    job.now += 100
    seen = job.look()
    assert (seen.state, seen.over, seen.text) == ("running", False, "running: it is being resumed")


def test_the_terminal_follows_until_the_end_and_a_log_gets_a_line_for_each_change(job):
    """Nothing, the beginning, two evaluations, nothing new, the end."""
    acts = iter(
        (
            job.begin,
            lambda: job.evaluate(0.25),
            lambda: None,
            lambda: job.evaluate(0.25, 0.5),
            lambda: job.write("summary.json", "{}"),
        )
    )
    out = StringIO()
    code = watch.watch(job.look, out=out, pause=lambda seconds: next(acts)())
    lines = [line.partition("  worst")[0] for line in out.getvalue().splitlines()]
    assert lines == [
        "there is no such folder yet",
        "running",
        "round 1/10  accuracy 0.2500",
        "round 2/10  accuracy 0.5000",
        f"complete: mpifl report {job.folder}",
    ]
    assert code == 0


def test_a_terminal_is_left_with_the_last_picture(job):
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    job.begin()
    out = Terminal()
    assert watch.watch(job.look, out=out, pause=lambda s: job.write("summary.json", "{}")) == 0
    assert "round 10/10" in out.getvalue()
    job.folder.joinpath("summary.json").unlink()

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    assert watch.watch(job.look, out=Terminal(), pause=interrupted) == 0


def test_watching_a_killed_run_ends_with_an_error(job):
    job.begin()
    job.now += 1000
    job.held = False
    assert watch.watch(job.look, out=StringIO()) == 1
    assert watch.watch(job.look, once=True, out=StringIO()) == 0


def test_curves_become_bars():
    assert sparkline([0.0, 0.5, None, 1.0], 10) == "▁▅ █"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], 48)) == 48
    assert sparkline([None], 10) == ""


# -- several runs --------------------------------------------------------------------------------------------


def test_a_sweep_shows_the_cases_that_have_not_begun_and_reads_complete_ones_once(tmp_path):
    folder = tmp_path / "runs" / "s"
    first, second = Job(folder / "tiny-0"), Job(folder / "tiny-1")
    first.begin()
    (folder / "sweep.yaml").write_text("vary: {}\n")
    first.evaluate(0.5)
    first.write("summary.json", "{}")
    titles = {f"tiny-{i}": f"seed {i}" for i in range(3)}
    read = []
    watched = Watched(str(folder), lambda path: read.append(path) or titles)
    second.now = time.time()
    second.begin()
    second.beat(4)
    seen = watched.see()
    assert isinstance(seen, SeenCases)
    assert {title: case.state for title, case in seen.cases.items()} == {
        "seed 0": "complete",
        "seed 1": "running",
        "seed 2": "waiting",
    }
    assert (seen.text, seen.over) == ("1 complete, 1 running, 1 waiting", False)
    (first.folder / "metrics.csv").unlink()
    assert watched.see().cases["seed 0"].last("accuracy") == 0.5
    assert len(read) == 1
    assert re.search(r"^seed 1 +running +4/10", drawn(seen), re.MULTILINE)
    assert watched.see("seed 1").step == 4
    assert watched.see("seed 9") is None


def test_into_a_pipe_every_case_is_one_line_however_long_its_labels_are(tmp_path):
    title = ", ".join(f"key{i} value{i}" for i in range(40))
    out = StringIO()
    seen = SeenCases(str(tmp_path), True, {title: Seen(str(tmp_path))})
    assert watch.watch(lambda: seen, once=True, out=out) == 0
    assert re.search(rf"^{title} +waiting *$", out.getvalue(), re.MULTILINE)


@pytest.mark.parametrize("end", ["stopped", "failed", ""])
def test_a_sweep_that_was_stopped_or_killed_is_over_and_its_own_resume_is_named(tmp_path, end):
    """Cases that wait are none that come, once nothing was written for a while and no process holds one."""
    folder = tmp_path / "runs" / "s"
    job, held = Job(folder / "tiny-0"), set()
    job.begin()
    (folder / ".locks").mkdir()
    (folder / ".locks" / "tiny-1").touch()
    (folder / "sweep.yaml").write_text("vary: {}\n")
    titles = {f"tiny-{i}": f"seed {i}" for i in range(3)}

    def see() -> SeenCases:
        return watch.look_at_cases(folder, titles, {}, job.now, lambda path: path.name in held)

    job.beat(4, end=end)
    assert not see().over, "written a moment ago"
    job.now += 31
    held.add("tiny-1")
    assert not see().over, "a process opens the data of another case"
    held.clear()
    seen = see()
    assert seen.over
    assert seen.text == f"1 {end or 'ended'}, 2 waiting; mpifl resume {folder} goes on"
    assert "--from-start" not in drawn(seen)
    assert watch.watch(see, out=StringIO()) == 1


def test_a_sweep_whose_cases_are_complete_or_wait_is_not_over(tmp_path):
    """Another process may share it."""
    folder = tmp_path / "runs" / "s"
    job = Job(folder / "tiny-0")
    job.begin()
    job.write("summary.json", "{}")
    seen = watch.look_at_cases(folder, {"tiny-0": "a", "tiny-1": "b"}, {}, job.now + 1000, lambda path: False)
    assert (seen.text, seen.over) == ("1 complete, 1 waiting", False)


def test_a_sweep_names_what_its_cases_are_measured_by(tmp_path):
    folder = tmp_path / "runs" / "s"
    for i, metric in enumerate(("mse", "mse", "token_accuracy")):
        job = Job(folder / f"tiny-{i}")
        job.begin()
        job.write("metrics.csv", f"round,{metric}_mean\n1,0.5\n")
    alike = {f"tiny-{i}": watch.look(folder / f"tiny-{i}", job.now, lambda path: True) for i in range(3)}
    first = drawn(SeenCases(str(folder), True, dict([*alike.items()][:2]), False))
    assert " mse " in first
    assert "accuracy" not in first
    both = drawn(SeenCases(str(folder), True, alike, False))
    assert " metric " in both
    assert "0.5000 mse" in both
    assert "0.5000 token accuracy" in both


def test_labels_are_shown_as_they_are_and_not_as_markup(tmp_path):
    folder = tmp_path / "runs" / "s"
    job = Job(folder / "tiny-0")
    job.begin()
    job.beat(1)
    titles = {"tiny-0": "FedAvg [ours]", "tiny-1": "IFCA [/b]"}
    shown = drawn(watch.look_at_cases(folder, titles, {}, job.now, lambda path: True))
    assert "FedAvg [ours]" in shown
    assert "IFCA [/b]" in shown


def test_sweeps_in_a_folder_are_named_and_not_taken_for_a_run_that_has_not_begun(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.yaml").write_text("name: a\nvary: {seed: [0, 1]}\n")
    with pytest.raises(UserError, match=f"holds sweeps.* one at a time: name one of {tmp_path / 'a'}, "):
        Watched(str(tmp_path), plain_titles)
    assert Watched(str(tmp_path / "a"), plain_titles).see().text == "2 waiting"
    Job(tmp_path / "c").begin()
    seen = Watched(str(tmp_path), plain_titles).see()
    assert [*seen.cases] == ["c"]
    assert f"; sweeps are not shown here, name one of them: {tmp_path / 'a'}, {tmp_path / 'b'}" in seen.text


def test_without_a_name_the_newest_run_is_watched(tmp_path):
    for i, name in enumerate(("tiny-a", "tiny-b")):
        job = Job(tmp_path / name)
        job.now += i
        job.begin()
    assert Watched("", lambda path: {}, tmp_path).folder == tmp_path / "tiny-b"
    assert holds_runs(tmp_path)
    assert not holds_runs(tmp_path / "tiny-b")
    with pytest.raises(UserError, match="holds no run"):
        Watched("", lambda path: {}, tmp_path / "tiny-b")


# -- what a run writes for it --------------------------------------------------------------------------------


def test_a_real_run_writes_its_progress_and_removes_it_at_the_end(tmp_path):
    seen = []

    class Looks:
        def on_round(self, told) -> None:
            told.run.folder.joinpath(FILE).stat()  # it is there before the first round
            seen.append(look(told.run.folder))

    import mpifl

    run = mpifl.run(
        mpifl.load_config(str(TINY)),
        callbacks=[Looks()],
        quiet=True,
        output={"folder": str(tmp_path), "id": "w"},
    )
    assert {s.state for s in seen} == {"running"}
    assert watch.is_held(run.folder / "run.json") is False, "only as long as it goes on"
    assert not (run.folder / FILE).exists()
    after = look(run.folder)
    assert (after.state, after.step) == ("complete", run.summary["rounds"])
    assert after.started is not None
    assert abs(after.started - after.written) < 600
    assert after.last("accuracy") == pytest.approx(run.summary["accuracy_mean"])


def test_the_progress_file_tells_how_a_run_ended(tmp_path):
    told = {"started": 0}
    for error, end in ((Stopped(2, "x"), "stopped"), (RuntimeError("a\nb"), "failed"), (None, None)):
        try:
            with ProgressFile(tmp_path, 9, 2, [{"host": "h", "device": "cpu"}], lambda: [5]) as file:
                file.step, file.timing = 4, [{"train": 1.23456}]
                with doing(ROUND, 9, first=2):
                    file.write()
                    told = json.loads((tmp_path / FILE).read_text())
                if error is not None:
                    raise error
        except (Stopped, RuntimeError):
            pass
        assert (told["step"], told["first"], told["rounds"], told["doing"]) == (4, 2, 9, "round 3/9")
        assert told["ranks"] == [{"host": "h", "device": "cpu", "visits": 5, "seconds": {"train": 1.235}}]
        if end is not None:
            assert json.loads((tmp_path / FILE).read_text())["end"] == end
    assert not (tmp_path / FILE).exists()


def test_the_progress_file_is_there_before_its_thread_gets_a_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(ProgressFile, "_beat", lambda self: None)
    with ProgressFile(tmp_path, 9):
        assert json.loads((tmp_path / FILE).read_text())["rounds"] == 9


def test_two_threads_never_write_the_progress_file_at_once(tmp_path, monkeypatch):
    inside, most, second = [], [], threading.Event()

    def write_json(path, tree):
        inside.append(path)
        most.append(len(inside))
        second.wait(0.2)
        second.set()
        inside.pop()

    monkeypatch.setattr("mpifl.core.files.write_json", write_json)
    file = ProgressFile(tmp_path, 9)
    threads = [threading.Thread(target=file.write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]


def test_a_folder_that_somebody_removed_is_not_brought_back(tmp_path):
    ProgressFile(tmp_path / "gone", 1).write()
    assert not (tmp_path / "gone").exists()


def test_a_lock_of_this_machine_is_seen(tmp_path):
    import fcntl

    path = tmp_path / "run.json"
    path.write_text("{}")
    assert not watch.is_held(path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert watch.is_held(path)
    assert not watch.is_held(path)


# -- commands ------------------------------------------------------------------------------------------------


def test_the_command_shows_a_run_once_and_refuses_what_has_no_effect(job, capsys):
    job.begin()
    job.write("summary.json", "{}")
    assert cli.main(["watch", str(job.folder), "--once"]) == 0
    assert "round 10/10" in capsys.readouterr().out
    for options, named in (
        (["--port", "80"], "--port"),
        (["--once", "--web"], "--once"),
        (["--x"], "option"),
    ):
        assert cli.main(["watch", str(job.folder), *options]) == 2
        assert named in capsys.readouterr().err


# -- in a browser --------------------------------------------------------------------------------------------


@pytest.fixture
def ask(job):
    """Return a function path, host -> status, type, text of an answer; the server ends with the test."""
    with server(lambda case: None if case else job.look()) as found:
        threading.Thread(target=found.serve_forever, args=[0.02], daemon=True).start()
        address, port = found.server_address
        assert address == HOST

        def ask(path: str, host: str = "localhost") -> tuple[int, str, bytes]:
            connection = http.client.HTTPConnection(HOST, port, timeout=10)
            connection.request("GET", path, headers={"Host": f"{host}:{port}"})
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read()

        ask.port = port
        yield ask
        found.shutdown()


def test_the_server_answers_this_machine_alone_and_gives_no_other_files(job, ask):
    job.begin()
    job.evaluate(0.25, float("nan"))
    status, kind, text = ask("/data.json")
    told = json.loads(text)
    assert (status, kind, told["state"], told["curves"]["accuracy"]) == (
        200,
        "application/json",
        "running",
        [0.25, None],
    )
    assert ask("/")[0] == 200
    for path in ("/../cli.py", "/run.json", "/page.html", "/data.json?case=../x"):
        assert ask(path)[0] == 404, path
    assert ask("/data.json", "evil.example")[0] == 403


def test_a_port_that_is_taken_is_named(ask):
    with pytest.raises(UserError, match=f"--port = {ask.port}"):
        server(lambda case: None, ask.port)


@pytest.mark.skipif(chrome.PROGRAM is None, reason="no Chromium on the PATH")
def test_the_page_draws_what_comes_and_needs_no_network(job, ask, tmp_path):
    job.begin()
    job.beat(2, doing="round 3/10", ranks=[{"host": "h", "visits": 3, "seconds": {"train": 1.0}}])
    job.evaluate(0.25, 0.5)
    job.write("assignments.csv", "round,client,cluster\n1,0,0\n1,1,1\n")
    with chrome.Page(f"http://localhost:{ask.port}/", tmp_path / "profile") as page:
        assert "2/10" in page("document.getElementById('tiles').textContent")
        plot = "document.querySelector('#accuracy-figure .plot').data[0].y"
        assert page(plot) == [25, 50]
        job.evaluate(0.25, 0.5, 0.75)
        page("poll()")
        assert page(plot) == [25, 50, 75]
        assert page("document.querySelectorAll('#ranks tbody tr').length") == 1
        job.write("summary.json", "{}")
        page("poll()")
        assert page("document.getElementById('text').textContent").startswith("complete")
        assert page.errors == []


SWEEPS = sorted((Path(mpifl.__file__).parent / "configs" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_plain_titles_are_those_of_the_cases_or_none(path, tmp_path):
    """What is read without PyTorch is what the sweep itself says; none where that depends on files."""
    tree = read(str(path))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    plain = plain_titles(tmp_path)
    whole = {"configuration", "rows", "columns", "name"} & {*tree["vary"]}
    assert (plain is None) == bool(whole)
    assert plain is None or plain == titles(tmp_path)
