"""The report and the comparison: figures by hand, files that are there, folders that are refused."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.comparisons import group_of, run_of
from support.runs import run_each

import mpifl
from mpifl import cli
from mpifl.analysis import figures, report_data, seed_groups
from mpifl.analysis.comparison import Choices, Comparison
from mpifl.analysis.comparison_tables import final_table
from mpifl.analysis.report import _runs, report, warnings, write_files
from mpifl.analysis.report_page import _own_parts, _shared_parts, _tiles
from mpifl.analysis.seed_groups import Group, default_target, gather
from mpifl.analysis.tables import Table, as_latex, as_text
from mpifl.core.errors import UserError
from mpifl.results import reader as finished
from mpifl.results.identity import deciding

pytestmark = pytest.mark.in_turn

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
UCFL = "{name: ucfl, streams: -1, noise_batch: 20}"
RUNS = {
    "fedavg-0": ["--network.name", "wired"],
    "fedavg-1": ["--network.name", "wired", "--seed", "1"],
    "ucfl": ["--algorithm", UCFL, "--network.name", "wired"],
    "fedbuff": ["--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", "--network.name", "links"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of three configurations, one of them with two seeds, one asynchronous."""
    return run_each(tmp_path_factory.mktemp("runs"), RUNS)


@pytest.fixture(scope="module")
def page(folder) -> str:
    """The report of all of them."""
    return report([str(folder)], str(folder / "out"), Choices(target=0.5)).read_text()


class Links(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Take links, sources and names."""
        self.targets += [value for name, value in attrs if name in ("href", "src")]
        self.names |= {value for name, value in attrs if name == "id"}


def test_the_page_stands_alone_and_its_links_lead_somewhere(folder, page):
    links = Links(page)
    assert '<figure id="intervals-figure">' in page, "drawn by the page itself"
    for target in links.targets:
        assert not re.match(r"https?:|//", target)
        if target.startswith("#"):
            assert target[1:] in links.names
        elif not target.startswith("data:"):
            assert (folder / "out" / target).stat().st_size > 500
    assert "default-src 'none'" in page, "a browser refuses every connection"
    assert len(page) < 3e6


def test_every_figure_that_these_runs_have_is_there(folder, page):
    assert set(re.findall(r'<section id="(\w+)"', page)) == {
        *(
            "what",
            "curves",
            "final",
            "statistics",
            "traffic",
            "clusters",
            "staleness",
            "time",
            "runs",
            "files",
        )
    }
    drawn = {path.stem for path in (folder / "out" / "figures").glob("*.pdf")}
    assert drawn == {
        *(
            "intervals",
            "accuracy",
            "worst",
            "fairness",
            "bytes",
            "matrices",
            "silhouette",
            "staleness",
            "time",
        )
    }
    assert "fedbuff" in page
    assert "4 runs of 3 configurations" in page


def test_seeds_are_one_group_and_its_figures_are_their_means(folder):
    groups = gather([str(folder)])
    assert [len(g.runs) for g in groups] == [2, 1, 1]
    assert [g.name for g in groups] == ["fedavg, wired", "fedbuff, links", "ucfl, wired"]
    rows = [list(csv.DictReader((folder / f"tiny-fedavg-{i}" / "metrics.csv").open())) for i in (0, 1)]
    last = np.array([float(r[-1]["accuracy_mean"]) for r in rows])
    assert (
        rows_of(groups, 0.5)[0]["accuracy, %"] == f"{100 * last.mean():.2f} +- {100 * last.std(ddof=1):.2f}"
    )
    first = np.array([float(r[0]["accuracy_mean"]) for r in rows])
    np.testing.assert_allclose(groups[0].column("accuracy_mean").mean(0)[0], first.mean())


def labelled(label: str | None, **config: object) -> finished.Run:
    """Return a run of FedAvg, or of what `config` says, with a label of its user's."""
    usual = {"algorithm": {"name": "fedavg"}, "local": {"lr": 0.1}, "output": {"label": label}}
    tree = usual | config
    return finished.Run(Path(), tree, {"settings": deciding(tree)})


def test_runs_have_the_labels_that_their_user_gave(monkeypatch):
    """Two codes of one configuration stay apart, seeds of one label together; a label that two
    configurations share is followed by what tells them apart.
    """
    runs = {
        "a": labelled("before"),
        "b": labelled("after"),
        "c": labelled("after", seed={"training": 1}),
        "d": labelled("net, wide", local={"lr": 0.2}, network={"name": "wired"}),
        "e": labelled("net, wide", local={"lr": 0.3}, network={"name": "wired"}),
        "f": labelled(None, network={"name": "links"}),
        "g": labelled("before", algorithm={"name": "cfl"}),
    }
    monkeypatch.setattr(seed_groups, "load", lambda path: runs[str(path)])
    assert {g.name: len(g.runs) for g in gather([*runs])} == {
        **{"before, fedavg": 1, "after": 2, "net, wide, lr 0.2": 1, "net, wide, lr 0.3": 1},
        **{"fedavg, links": 1, "before, cfl": 1},
    }


def test_a_folder_whose_name_looks_like_a_pattern_is_that_folder(tmp_path, monkeypatch):
    """PBS calls the jobs of an array 17[1].srv."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-17[1].srv", "tiny-17[2].srv", "tiny-171.srv"):
        Path(name).mkdir()
    assert seed_groups.folders(["tiny-17[1].srv"]) == [Path("tiny-17[1].srv")]
    assert seed_groups.folders(["tiny-17[12].srv", "none"]) == [Path("tiny-171.srv"), Path("none")]
    assert len(seed_groups.folders(["tiny-17*"])) == 3


@pytest.mark.nightly
def test_folders_whose_names_are_no_utf_8_are_reported_and_exported(folder, tmp_path, capsys):
    """Their bytes come into Python as surrogates, which no file in UTF-8 can hold."""
    top = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    run = shutil.copytree(folder / "tiny-fedavg-0", Path(top) / os.fsdecode(b"run\xff"))
    assert cli.main(["report", str(run), "-q"]) == 0
    assert r"run\udcff" in (Path(top) / "report" / "report.html").read_text()
    assert cli.main(["export", str(run), "--out", str(tmp_path / "x.csv")]) == 0
    assert r"run\udcff" in (tmp_path / "x.csv").read_text()
    command = [sys.executable, "-m", "mpifl", "resume", str(run)]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as in a terminal whose locale is not C
    done = subprocess.run(command, env=strict, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(rf"{tmp_path}/caf\udce9/run\udcff is complete: ")


def test_a_folder_of_runs_and_sweeps_is_all_runs_in_it(tmp_path):
    """Those that lie in it come first; what lies in a run folder is none, nor are folders without runs."""
    runs = [tmp_path / name for name in ("b", "z", "a-sweep/x", "y-sweep/x")]
    for place in (*runs, tmp_path / "b/checkpoint"):
        place.mkdir(parents=True)
        (place / "config.yaml").touch()
    (tmp_path / "report" / "figures").mkdir(parents=True)
    assert seed_groups.folders([str(tmp_path)]) == runs
    assert seed_groups.folders([str(tmp_path / "b"), str(tmp_path / "a-sweep")]) == [runs[0], runs[2]]
    for place in (runs[0], runs[1]):
        shutil.rmtree(place)
    assert seed_groups.folders([str(tmp_path)]) == runs[2:]


@pytest.mark.usefixtures("no_figures")
def test_the_folder_of_a_report_is_no_run(folder, tmp_path, capfd):
    """A report lies beside the first run, and `runs/*` finds it the next time."""
    shutil.copytree(next(folder.glob("*fedavg*")), tmp_path / "one")
    assert cli.main(["report", str(tmp_path / "one")]) == 0
    assert (tmp_path / "report" / "report.html").is_file()
    shutil.copytree(tmp_path / "report", tmp_path / "reports" / "first")
    assert cli.main(["compare", *map(str, sorted(tmp_path.glob("*")))]) == 0, capfd.readouterr().err
    assert cli.main(["compare", str(tmp_path / "report")]) == 2
    assert "name at least one run folder" in capfd.readouterr().err
    shutil.copy(tmp_path / "report" / "report.html", tmp_path / "one")
    assert seed_groups.folders([str(tmp_path / "one")]) == [tmp_path / "one"], "a run with a report in it"


def test_what_changes_no_number_neither_parts_seeds_nor_names_them(monkeypatch):
    """Runs of two names are one group, unless both ran a seed: then the name tells them apart."""

    def run(name: str, seed: int, lr: float = 0.1, **machine: object) -> finished.Run:
        data = {"source": {"name": "digits"}, **machine}
        return labelled(None, name=name, seed={"data": seed}, data=data, local={"lr": lr}, checkpoint=machine)

    runs = {
        "a": run("first", 0, root="/here"),
        "b": run("first", 1, root="/there", cache="/cache"),
        "c": run("second", 2),
        "d": run("first", 0, lr=0.2),
        "e": run("second", 0, lr=0.2, root="/there"),
        "f": run("second", 1, lr=0.2),
    }
    monkeypatch.setattr(seed_groups, "load", lambda path: runs[str(path)])
    assert {g.name: len(g.runs) for g in gather(["a", "b", "c"])} == {"fedavg": 3}
    assert {g.name: len(g.runs) for g in gather([*runs])} == {
        **{"fedavg, lr 0.1": 3, "fedavg, first, lr 0.2": 1, "fedavg, second, lr 0.2": 2}
    }


def finished_run(**metrics: list[float]) -> finished.Run:
    """Return a run of three evaluated rounds with such columns in metrics.csv, the others constant."""
    usual = {
        "round": [1, 2, 3],
        "accuracy_mean": [0.2, 0.6, 0.8],
        "accuracy_worst": [0.1, 0.3, 0.5],
        "accuracy_std": [0.1, 0.1, 0.125],
        "ari": [0.0, 0.5, 1.0],
        "num_clusters": [1, 2, 3],
        "federation_bytes_up": [1e6, 2e6, 3.5e6],
        "federation_bytes_down": [4e6, 8e6, 12e6],
        "virtual_seconds": [1.5, 3.0, 4.5],
    }
    run = finished.Run(Path(), {}, {"settings": {}})
    run.__dict__["series"] = {name: np.array(v, float) for name, v in (usual | metrics).items()}
    return run


def rows_of(groups, target: float) -> list[dict[str, str]]:
    """Return the table of final figures as texts by title, without the empty ones."""
    table = final_table(Comparison(tuple(groups), Choices(target=target)))
    return [
        {t: cell.text for t, cell in zip(table.columns, row, strict=True) if cell.text} for row in table.rows
    ]


def test_what_it_takes_to_reach_a_target_by_hand():
    """Accuracy 0.2, 0.6, 0.8: 0.6 is met in round 2, after 2 + 8 million bytes and three seconds."""
    group = Group("one", (finished_run(),))
    for target in (0.5, 0.6):
        assert group.reached(target, "round").shown.tolist() == [2.0]
        assert group.reached(target, "bytes").shown.tolist() == [10e6]
        assert group.reached(target, "virtual_seconds").shown.tolist() == [3.0]
    never = group.reached(0.9, "bytes")
    assert (never.position.tolist(), never.met.tolist(), never.shown.tolist()) == (
        [15.5e6],
        [False],
        [np.inf],
    )


def test_the_table_is_in_percent_megabytes_and_seconds_by_hand():
    """Two seeds, of which one ends at 0.7 and needs a round more, and 5.5 + 16 million bytes, for 0.65.

    Medians of two are their middle: of rounds 3 and 3, of 15.5 and 21.5 MB. For 0.75 the first takes 15.5 MB,
    and the other one has not got there with 21.5: half of the runs have, from 15.5 MB on.
    """
    slow = finished_run(
        accuracy_mean=[0.1, 0.2, 0.7],
        federation_bytes_up=[1e6, 2e6, 5.5e6],
        federation_bytes_down=[4e6, 8e6, 16e6],
    )
    (row,) = rows_of([Group("one", (finished_run(), slow))], 0.65)
    assert row == {
        "run": "one",
        "seeds": "2",
        "rounds": "3",
        "accuracy, %": "75.00 +- 7.07",
        "worst client, %": "50.00 +- 0.00",
        "std over clients, %": "12.50",
        "ARI": "1.00",
        "clusters": "3",
        "MB up": "4.5",
        "MB down": "14",
        "virtual s": "4.5",
        "rounds to target": "3",
        "MB to target": "18.5",
        "virtual s to target": "4.5",
    }
    (row,) = rows_of([Group("one", (finished_run(), slow))], 0.75)
    assert (row["rounds to target"], row["MB to target"]) == ("3", "15.5")
    assert row["not reached"] == "1 of 2"
    (row,) = rows_of([Group("one", (finished_run(),))], 0.9)
    assert (row["accuracy, %"], row["MB to target"], row["not reached"]) == ("80.00", "> 15.5", "1 of 1")


def test_the_table_says_whose_cluster_is_not_known():
    """Two and one clients that nobody has seen: 1.5 on average; no column where all were seen."""
    runs = finished_run(num_unplaced=[6, 4, 2]), finished_run(num_unplaced=[5, 4, 1])
    assert rows_of([Group("one", runs)], 0.5)[0]["unplaced clients"] == "1.5"
    seen = Group("one", (finished_run(num_unplaced=[5, 4, 0]),))
    assert "unplaced clients" not in rows_of([seen], 0.5)[0]


def test_a_curve_is_the_mean_of_seeds_between_the_least_and_the_most():
    group = Group("one", (finished_run(), finished_run(accuracy_mean=[0.4, 0.4, 1.0])))
    (found,) = report_data.curves([group])["groups"]
    assert found["x"]["bytes"] == [5, 10, 15.5]
    assert found["y"]["accuracy_mean"] == [[30, 50, 90], [20, 40, 80], [40, 60, 100]]


def test_the_page_says_how_many_megabytes_went_by_mpi(folder, page):
    """None in one process; a run of another summary says 2,500,000 bytes."""
    run = finished.load(folder / "tiny-ucfl")
    summary = {**run.summary, "mpi_bytes": 2_500_000, "wall_seconds": 12.34567}
    table = _runs([Group("one", (finished.Run(run.folder, run.config, summary),))])
    assert [table.column(title)[0].text for title in ("MB by MPI", "wall s")] == ["2.5", "12.35"]
    (digest,) = table.column("digest")
    assert digest.text == run.summary["digest"][:12]
    assert digest.text in page


def test_the_wall_time_of_all_runs_counts_no_copy_with_other_times():
    """The copies of two runs of 10 and 20 seconds were not run."""

    def group(name, seconds, **copied):
        run = finished_run()
        run.summary.update(wall_seconds=seconds, **copied)
        return Group(name, (run,))

    runs = [group("a", 10.0), group("b", 20.0)]
    copies = [group("c", 10.0, retimed_from="a"), group("d", 20.0, retimed_from="b")]
    assert "<b>30 s</b><span>wall time of all runs</span>" in _tiles([*runs, *copies], 0.5)
    assert "wall time" not in _tiles(copies, 0.5)


def test_the_tile_of_the_target_says_what_the_table_says():
    """Medians of the runs, each at its own evaluations; where one never meets it, too. A round is 2 MB."""

    def group(name, *rounds):
        curves = [[0.9 if r and i >= r else 0.5 for i in range(1, 11)] for r in rounds]
        runs = [run_of(name, curve, seed) for seed, curve in enumerate(curves)]
        for run in runs:
            run.summary["wall_seconds"] = 1.0
        return Group(name, tuple(runs))

    groups = (group("a", 2, 3, 9), group("b", 1, 2, None))
    table = final_table(Comparison(groups, Choices(target=0.9)))
    assert [cell.text for cell in table.column("MB to target")] == ["6", "4"]
    assert "<b>4 MB</b><span>least to 90 % accuracy: b</span>" in _tiles(groups, 0.9)
    assert "<b>6 MB</b><span>to 90 % accuracy</span>" in _tiles(groups[:1], 0.9)
    assert "least to" not in _tiles([group("a", None, None), group("b", None, 2, None)], 0.9)


def test_of_errors_the_least_is_the_best():
    """Word errors 0.5, 0.2 and 0.4, 0.3: targets, tiles and records go down."""
    groups = []
    for name, curve, worst in (("a", [0.5, 0.2], 0.9), ("b", [0.4, 0.5, 0.3], 0.6)):
        run = run_of(name, curve)
        metric = {"name": "wer", "title": "word errors", "better": -1, "percent": True}
        run.summary.update(metric=metric, wall_seconds=1.0)
        run.series.update({"wer_mean": np.array(curve), "wer_worst": np.full(len(curve), worst)})
        groups.append(Group(name, (run,)))
    assert default_target(groups) == pytest.approx(1.05 * 0.2)
    tiles = _tiles(groups, 0.35)
    assert "<b>20.00 %</b><span>best mean word errors: a</span>" in tiles
    assert "<b>60.00 %</b><span>best worst client: b</span>" in tiles
    records = [[record[:2] for record in g["records"][0]] for g in report_data.curves(groups)["groups"]]
    assert records == [[[50, 1], [20, 2]], [[40, 1], [30, 3]]]
    assert groups[1].reached(0.4, "round").position.tolist() == [1]
    assert groups[0].reached(0.4, "round").position.tolist() == [2]


def test_the_table_in_terminal_csv_latex_and_markdown(folder, tmp_path, capsys):
    """A row a configuration; CSV has numbers, LaTeX the columns that fit a paper, Markdown all."""
    files = {name: tmp_path / f"t.{name}" for name in ("csv", "latex", "markdown")}
    out = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli.main(["compare", str(folder), *out, "--target", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = final_table(Comparison(tuple(gather([str(folder)])), Choices(target=0.5)))
    assert as_text(table).splitlines() == lines[:4]
    assert lines[4] == table.notes[0] == "target: mean accuracy 50.00 %"
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["fedavg, wired", "fedbuff, links", "ucfl, wired"]
    last = [100 * r.series["accuracy_mean"][-1] for r in gather([str(folder)])[0].runs]
    assert float(rows[0]["accuracy_mean"]) == np.mean(last)
    assert float(rows[0]["accuracy_std"]) == np.std(last, ddof=1)
    text = files["latex"].read_text()
    assert text.count(r"\\" + "\n") == 4
    assert "left out seeds, rounds, " in lines[-1]
    assert r"\shortstack{accuracy\\(\%)}" in text
    assert files["markdown"].read_text().count("\n| fed") == 2


def test_the_metric_stands_in_a_table_for_papers_whatever_it_is(tmp_path):
    run = run_of("fedavg", [0.5])
    run.summary["metric"] = {"name": "mse", "title": "mean squared error", "better": -1, "percent": False}
    run.series.update({f"mse_{what}": run.series[f"accuracy_{what}"] for what in ("mean", "worst", "std")})
    file = tmp_path / "t.tex"
    write_files(Comparison((Group("fedavg " * 5, (run,)),)), None, str(file), None, None)
    assert r"\shortstack{mean\\squared\\error}" in file.read_text()
    assert r"\shortstack{worst\\client}" in file.read_text()


def test_a_table_is_aligned_in_the_terminal_and_escaped_in_latex():
    table = Table.of(["run", "MB, %"], [["a_b", "1.5"], ["c", "12 +- 3"]])
    assert as_text(table).splitlines() == ["run    MB, %", "a_b      1.5", "c    12 +- 3"]
    assert as_latex(table).splitlines()[2:] == [
        r"\begin{tabular}{@{}lr@{}}",
        r"\toprule",
        r"run & \shortstack{MB\\(\%)} \\",
        r"\midrule",
        r"a\_b & 1.5 \\",
        r"c & 12 $\pm$ 3 \\",
        r"\bottomrule",
        r"\end{tabular}}",
    ]


def damaged(folder: Path, place: Path, how: str) -> Path:
    """Return a copy of a run folder that something happened to."""
    copy = Path(shutil.copytree(folder / "tiny-ucfl", place / "copy"))
    if how == "unfinished":
        (copy / "summary.json").unlink()
        for path in copy.iterdir():
            import os

            os.utime(path, (0, 0))
    elif how == "growing":
        (copy / "summary.json").unlink()
        (copy / "metrics.csv").touch()  # a moment ago, however slow the machine is
    elif how == "failed":
        (copy / "summary.json").unlink()
        (copy / "progress.json").write_text('{"end": "failed"}')  # a moment ago
    elif how == "old":
        summary = json.loads((copy / "summary.json").read_text())
        (copy / "summary.json").write_text(json.dumps({**summary, "format": 99}))
    elif how == "torn":
        (copy / "summary.json").write_text("{")
    elif how == "no metrics":
        (copy / "metrics.csv").unlink()
    elif how == "no run":
        (copy / "config.yaml").unlink()
    return copy


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unfinished", "was never finished: it has no summary.json"),
        ("growing", "is still being written: it has no summary.json; wait for its end, resume it, or name"),
        ("failed", "was never finished: it has no summary.json; resume it, or name other runs"),
        ("old", "has format 99 of another version of mpifl"),
        ("torn", "is not JSON"),
        ("no metrics", "is incomplete: it has no metrics.csv"),
        ("no run", "is not a run folder: it has no config.yaml"),
    ],
)
def test_a_folder_that_is_no_finished_run_is_refused(how, message, folder, tmp_path):
    with pytest.raises(UserError, match=message):
        gather([str(damaged(folder, tmp_path, how))])


@pytest.mark.usefixtures("no_figures")
def test_runs_that_are_not_finished_are_left_out_and_named_where_finished_ones_are_asked_for(
    folder, tmp_path, capfd
):
    """Of three runs one is not finished: two rows; a folder that is no run is refused as ever."""
    for name in ("one", "two", "three"):
        copy = shutil.copytree(next(folder.glob("*fedavg*")), tmp_path / "runs" / name)
    (copy / "summary.json").unlink()
    runs = str(tmp_path / "runs")
    assert cli.main(["compare", runs]) == 2
    assert "compare, report and export leave it out with --finished" in capfd.readouterr().err
    assert cli.main(["export", runs, "--finished", "--table", "final"]) == 0
    found = capfd.readouterr()
    assert f"1 of 3 runs are not finished and left out: {copy}" in found.err
    rows = list(csv.DictReader(found.out.splitlines()))
    assert len(rows) == 2
    for command in (["compare", runs], ["report", runs, "--out", str(tmp_path / "out")]):
        assert cli.main([*command, "--finished"]) == 0
    assert len(mpifl.table(runs, of="final", finished_only=True)) == 2
    assert len(mpifl.compare(runs, finished_only=True)) == 1
    (copy / "config.yaml").unlink()
    with pytest.raises(UserError, match="is not a run folder"):
        gather([str(tmp_path / "runs" / "one"), str(copy)], finished_only=True)
    (tmp_path / "runs" / "one" / "summary.json").unlink()
    with pytest.raises(UserError, match="none of 1 runs is finished"):
        gather([str(tmp_path / "runs" / "one")], finished_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{runs}/nowhere"], "there is no such folder"),
        (["{runs}", "--target", "85"], "--target = 85.0: use an accuracy in"),
        (["{runs}", "--size", "3"], "option = '--size'"),
    ],
)
def test_bad_commands_get_one_line(options, message, folder, capsys):
    assert cli.main(["compare", *(o.format(runs=folder) for o in options)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


# -- accuracy on training data


def test_the_report_draws_training_accuracy_in_dashes_of_the_same_colour():
    """One group with the column, one without: three lines, those on test data solid."""
    with_train = finished_run(accuracy_train_mean=[0.5, 0.75, 1.0])
    groups = [Group("both", (with_train,)), Group("one", (finished_run(),))]
    figure = figures.curves(groups, "accuracy_mean", "mean accuracy", "accuracy_train_mean")
    lines = figure.axes[0].get_lines()
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-"]
    np.testing.assert_allclose(lines[1].get_ydata(), [0.5, 0.75, 1.0])
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    plain = figures.curves([Group("a", (finished_run(),)), groups[1]], "accuracy_mean", "mean accuracy")
    assert [line.get_linestyle() for line in plain.axes[0].get_lines()] == ["-", "--"]


def test_a_sweep_draws_training_accuracy_in_dashes_of_the_same_colour(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    curves = [
        figures.Curve({"a": "1"}, "round", [1, 2], [0.5, 0.6], [], [0.7, 0.8]),
        figures.Curve({"a": "2"}, "round", [1, 2], [0.1, 0.2], []),
    ]
    figures.draw_sweep(curves, tmp_path / "sweep.png")
    figures.draw_sweep([curves[1]], tmp_path / "sweep.png")
    axis = drawn[0].axes[0]
    assert [line.get_linestyle() for line in axis.get_lines()] == ["-", "--", "-"]
    assert list(axis.get_lines()[1].get_ydata()) == [0.7, 0.8]
    assert axis.get_ylabel() == "mean accuracy (dashed: training data)"
    assert drawn[1].axes[0].get_ylabel() == "mean accuracy"


def test_a_case_with_one_evaluation_is_a_point_in_the_figure_of_its_sweep(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    curves = [
        figures.Curve({"a": "1"}, "round", [40], [0.5], []),
        figures.Curve({"a": "2"}, "round", [1, 2], [0.1, 0.2], []),
    ]
    figures.draw_sweep(curves, tmp_path / "sweep.png")
    assert [line.get_marker() for line in drawn[0].axes[0].get_lines()] == ["o", "None"]


def test_every_matrix_over_clients_is_drawn_ordered_by_cluster(tmp_path):
    """Clients 0, 2 and 1, 3 are clusters: one matrix of the algorithm, two of matrices.npz; no empty axes."""
    lines = [f"{k},{k % 2},{k // 2},1" for k in range(4)]
    (tmp_path / "clusters.csv").write_text("\n".join(["client,cluster,group,placed", *lines]))
    x = np.arange(16.0).reshape(4, 4)
    np.savez(tmp_path / "matrices.npz", parameters=x, angles=np.full((4, 4), np.nan), gradients=-x)
    np.savez(tmp_path / "algorithm_state.npz", distance=2 * x)
    figure = figures.matrices([Group("one", (finished.Run(tmp_path, {}, {"clients": 4}),))])
    drawn = [axis for axis in figure.axes if axis.get_title() and axis.get_visible()]
    titles = ["distance", "distance of parameters", "cosine of gradients"]
    assert [axis.get_title() for axis in drawn] == [f"one\n{title}" for title in titles]
    order = np.ix_([0, 2, 1, 3], [0, 2, 1, 3])
    for axis, values in zip(drawn, (2 * x, x, -x), strict=True):
        np.testing.assert_array_equal(axis.get_images()[0].get_array(), values[order])
    four = finished.Run(tmp_path, {}, {"clients": 4})
    four.__dict__["matrices"] = {"parameters": x, "gradients": -x, "angles": x}
    figure = figures.matrices([Group("one", (four,))])
    assert sum(not axis.get_visible() for axis in figure.axes) == 2, "four matrices in a frame of six"
    np.savez(tmp_path / "matrices.npz", parameters=x[:3])
    with pytest.raises(UserError, match=r"matrices\.npz: distance of parameters has shape"):
        figures.matrices([Group("one", (finished.Run(tmp_path, {}, {"clients": 4}),))])


def test_links_of_clients_are_drawn_as_a_tree(tmp_path):
    """Two pairs of linked clients: two joins of equal rows at 0, and one of the pairs, 2 sqrt(2) high."""
    linked = np.kron(np.eye(2), np.ones((2, 2)))
    np.savez(tmp_path / "algorithm_state.npz", linked=linked)
    one = Group("FLT", (finished.Run(tmp_path, {}, {"clients": 4}),))
    (axis,) = figures.dendrograms([one]).axes
    heights = [max(path[:, 1]) for lines in axis.collections for path in lines.get_segments()]
    assert sorted(heights) == pytest.approx([0.0, 0.0, 2 * 2**0.5])
    np.savez(tmp_path / "algorithm_state.npz", linked=linked, distance=linked)
    assert figures.dendrograms([Group("EMD-CFL", (finished.Run(tmp_path, {}, {"clients": 4}),))]) is None


@pytest.mark.parametrize(("clients", "drawn"), [(500, True), (1200, False)])
def test_a_tree_too_deep_to_draw_is_left_out_and_told(clients, drawn, tmp_path, capsys):
    """Clients that are linked alike make a chain of joins, along which SciPy recurses."""
    linked = np.ones((clients, clients))
    linked[0, 1:] = linked[1:, 0] = 0
    np.savez(tmp_path / "algorithm_state.npz", linked=linked)
    large = Group("FLT", (finished.Run(tmp_path, {}, {"clients": clients}),))
    small = Group("small", (finished.Run(tmp_path / "small", {}, {"clients": 4}),))
    small.runs[0].__dict__["algorithm_state"] = {"linked": np.eye(4)}
    names = [axis.get_title() for axis in figures.dendrograms([large, small]).axes]
    assert names == (["FLT", "small"] if drawn else ["small"])
    told = "" if drawn else "trees of more than 500 clients are not drawn: FLT (1200 clients)\n"
    assert capsys.readouterr().err.endswith(told)
    assert (figures.dendrograms([large]) is not None) == drawn


@pytest.mark.nightly
def test_figures_fit_a_column_with_chosen_names_and_letters_that_need_no_font(folder, tmp_path):
    """3.3 in are 237.6 points; fonts are in the PDF, letters of the SVG are outlines."""
    place = ["--out", str(tmp_path), "--width", "3.3", "--label", "fedavg=FedAvg, ours"]
    runs = [str(folder / f"tiny-{name}") for name in ("fedavg-0", "fedavg-1", "ucfl")]
    assert cli.main(["report", *runs, *place, "-q"]) == 0
    for file in (tmp_path / "figures").glob("*.svg"):
        if file.stem in figures.FIGURES:
            text = file.read_text()
            assert 'width="237.6pt"' in text, file.name
            assert "<text" not in text
    assert b"/FontFile2" in (tmp_path / "figures" / "accuracy.pdf").read_bytes()
    assert "FedAvg, ours" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--width", "0.2"], "--width = 0.2"),
        (["--label", "fedavg"], "use NAME=TEXT"),
        (["--label", "fedavgg=a"], "fedavg"),
        (["--label", "fedavg=ucfl"], "two configurations"),
    ],
)
def test_widths_and_names_that_cannot_be_are_refused(options, words, folder, tmp_path, capsys):
    runs = [str(folder / "tiny-fedavg-0"), str(folder / "tiny-ucfl")]
    assert cli.main(["report", *runs, "--out", str(tmp_path / "out"), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_says_when_a_run_began_and_its_table_shows_only_what_differs(page):
    assert "<dt>started</dt>" in page or "started, " in page
    assert _own_parts("epochs 1, lr 0.1", _shared_parts(["epochs 1, lr 0.1", "epochs 1, lr 0.2"])) == "lr 0.1"


def test_runs_of_one_name_in_two_folders_are_warned_of_when_their_machines_differ():
    groups = [group_of("a", [0.5]), group_of("b", [0.6])]
    for group, place, torch in zip(groups, ("one", "two"), ("2.12", "2.13"), strict=True):
        run = group.runs[0]
        run.__dict__.update(folder=Path(f"{place}/x"), summary={**run.summary, "identity": {"torch": torch}})
    (line,) = warnings(Comparison(tuple(groups)))
    assert line.endswith("torch: 2.12 (one/x); 2.13 (two/x)")
