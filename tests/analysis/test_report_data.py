"""The data of the report's page: curves, targets, clusters over rounds, pairs, staleness, by hand."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.runs import columns_of

from mpifl import cli
from mpifl.analysis import figures, report_data, report_page
from mpifl.analysis.comparison import column_of
from mpifl.analysis.seed_groups import Group, gather
from mpifl.analysis.tables import Table
from mpifl.core.errors import UserError
from mpifl.core.timing import PHASES
from mpifl.results import recorder
from mpifl.results.reader import Run, load

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
HOSTILE = "</script><b onclick=alert(1)>\"'&"


def run_of(folder: Path = Path(), **metrics: list[float]) -> Run:
    """Return a run of three evaluated rounds with such columns in metrics.csv."""
    usual = {
        "round": [1, 2, 3],
        "seconds": [1.0, 2.0, 9.0],
        "accuracy_mean": [0.25, 0.625, 0.5],
        "num_unplaced": [0, 0, 0],
        "ari": [0.0, 0.5, 1.0],
        "federation_bytes_up": [1e6, 2e6, 3e6],
        "federation_bytes_down": [4e6, 8e6, 12e6],
        "virtual_seconds": [1.5, 3.0, 4.5],
    }
    summary = {
        **{"clients": 4, "rounds": 3, "model_parameters": 10, "ranks": 1, "wall_seconds": 9.0},
        **{"algorithm": "fedavg", "mpi_bytes": 0, "digest": "0" * 64, "settings": {}},
    }
    run = Run(folder, {"seed": {"training": 0}, "algorithm": {"name": "fedavg"}}, summary)
    run.__dict__["series"] = {name: np.array(v, float) for name, v in (usual | metrics).items()}
    return run


# -- curves


def test_an_axis_is_offered_only_where_it_is_no_straight_line_of_rounds():
    """Bytes and virtual time are 5 MB and 1.5 s a round; wall time is 1, 2, 9 s."""
    alone = report_data.curves([Group("a", (run_of(),))])
    assert [a["id"] for a in alone["axes"]] == ["round", "seconds"]
    assert alone["same"] == ["bytes of the federation, up and down", "virtual time"]
    dear = run_of(federation_bytes_up=[2e6, 4e6, 6e6])  # proportional to rounds, too, but at another price
    two = report_data.curves([Group("a", (run_of(),)), Group("b", (dear,))])
    assert [a["id"] for a in two["axes"]] == ["round", "bytes", "seconds"]


@pytest.mark.parametrize(
    ("modes", "title"),
    [("ss", "rounds"), ("aa", "server steps"), ("sa", "rounds (asynchronous runs: server steps)")],
    ids=["rounds", "steps", "both"],
)
def test_the_axis_of_rounds_says_where_they_are_steps_of_an_asynchronous_server(modes, title):
    """On the page and on the figures beside it."""
    groups = []
    for mode in modes:
        run = run_of()
        run.summary.update({"asynchronous": {}} if mode == "a" else {})
        groups.append(Group(f"{mode}{len(groups)}", (run,)))
    found = report_data.curves(groups)
    assert found["axes"][0] == {"id": "round", "title": title, "unit": ""}
    assert [group["word"] for group in found["groups"]] == [{"s": "round", "a": "step"}[m] for m in modes]
    drawn = figures.curves(groups, "accuracy_mean", "accuracy")
    assert drawn is not None
    assert drawn.axes[0].get_xlabel() == title


def test_virtual_time_comes_first_where_policies_differ():
    """A round of one policy is no round of another: time compares them, in the report and in figures."""

    def group(name, policy, pace):
        run = run_of(virtual_seconds=[pace, 2 * pace, 3 * pace])
        return Group(name, (Run(run.folder, {**run.config, "policy": policy}, run.summary),)), run

    def first(made):
        return report_data.curves(made)["axes"][0]["id"]

    def drawn(made):
        return figures.curves(made, "accuracy_mean", "accuracy").axes[0].get_xlabel()

    def groups(*policies):
        made = [group(str(i), p, 1.0 + i) for i, p in enumerate(policies)]
        for one, run in made:
            one.runs[0].__dict__["series"] = run.series
        return [one for one, _ in made]

    differing = groups({"name": "rounds"}, {"name": "over_selection", "extra": 0.5})
    assert (first(differing), drawn(differing)) == ("virtual_seconds", "virtual time, s")
    alike = groups({"name": "rounds"}, {"name": "rounds"})
    assert (first(alike), drawn(alike)) == ("round", "rounds")
    untimed = groups({"name": "rounds"}, {"name": "over_selection"})
    for one in untimed:
        one.runs[0].series["virtual_seconds"][:] = 0.0
    assert (first(untimed), drawn(untimed)) == ("round", "rounds")


def test_curves_are_in_percent_and_megabytes_and_columns_of_zeros_are_left_out():
    seeds = (run_of(), run_of(accuracy_mean=[0.75, 0.625, 1.0]))
    found = report_data.curves([Group("a", seeds)])
    assert [m["id"] for m in found["metrics"]] == ["accuracy_mean", "ari"]
    (curve,) = found["groups"]
    assert curve["x"]["bytes"] == [5, 10, 15]
    assert curve["y"]["accuracy_mean"] == [[50, 62.5, 75], [25, 62.5, 50], [75, 62.5, 100]]
    assert curve["y"]["ari"][0] == [0, 0.5, 1]


def test_records_say_what_an_accuracy_took():
    """The accuracies 25, 62.5, 50 %: the best so far come in rounds 1 and 2."""
    (curve,) = report_data.curves([Group("a", (run_of(),))])["groups"]
    assert curve["records"] == [[[25, 1, 5, 1.5, 1], [62.5, 2, 10, 3, 2]]]
    (curve,) = report_data.curves([Group("a", (run_of(accuracy_mean=[0.25, 0.25, 0.5]),))])["groups"]
    assert [record[:2] for record in curve["records"][0]] == [[25, 1], [50, 3]], "no record where it is equal"


def test_records_are_no_better_than_the_runs():
    """79.99996 % is no 80 %: the page tells from the records whether a target was met, as tables do."""
    (curve,) = report_data.curves([Group("a", (run_of(accuracy_mean=[0.25, 0.7999996, 0.5]),))])["groups"]
    assert curve["records"][0][1][0] == 79.99996


def test_rounds_are_not_rounded():
    run = run_of(round=[123_456, 123_457, 123_458])
    (curve,) = report_data.curves([Group("a", (run,))])["groups"]
    assert curve["x"]["round"] == [123_456, 123_457, 123_458]
    assert [record[1] for record in curve["records"][0]] == [123_456, 123_457]


def test_curves_of_a_users_own_metric_are_in_its_unit_and_direction():
    """An error rate: a share, less is better, titled as accuracies are."""
    run = run_of(wer_mean=[0.5, 0.25, 0.125], wer_variance=[0.25, 0.25, 0.25])
    run.summary["metric"] = {"name": "wer", "title": "word errors", "better": -1, "percent": True}
    found = report_data.curves([Group("a", (run,))])
    metrics = {metric["id"]: metric for metric in found["metrics"]}
    mean = {"title": "mean word errors over clients", "unit": "%", "kind": "word errors", "better": -1}
    assert metrics["wer_mean"] == {"id": "wer_mean", **mean}
    assert metrics["wer_variance"]["unit"] == ""
    assert found["groups"][0]["y"]["wer_mean"] == [[50, 25, 12.5]]
    assert found["groups"][0]["y"]["wer_variance"] == [[0.25, 0.25, 0.25]]


def test_curves_have_the_direction_of_the_column_in_tables():
    """An error rate of the user's is no better where it is larger, unless its function says so."""
    run = run_of(error_rate_mean=[0.5, 0.25, 0.125], loss=[3, 2, 1], nmi=[0.1, 0.2, 0.3], work=[1, 2, 3])
    run.config["evaluation"] = {"metrics": ["mine.py:error_rate"]}
    known = {"accuracy_mean": 1, "ari": 1, "nmi": 1, "loss": -1, "work": 0}
    for declared in (0, -1):
        run.summary["directions"] = {"error_rate": declared}
        found = {m["id"]: m["better"] for m in report_data.curves([Group("a", (run,))])["metrics"]}
        assert found == {**known, "error_rate_mean": declared}
        assert all(column_of(name, [run]).better == better for name, better in found.items())


def test_long_curves_are_thinned_between_their_ends(monkeypatch):
    monkeypatch.setattr(report_data, "MAX_CURVE_NUMBERS", 100)
    count = 1000
    long = run_of(**{name: list(range(1, count + 1)) for name in run_of().series})
    found = report_data.curves([Group("a", (long,))])
    x = found["groups"][0]["x"]["round"]
    assert found["thinned"]
    assert len(x) == 33, "three metrics"
    assert (x[0], x[-1]) == (1, count)
    assert len(found["groups"][0]["records"][0]) == count, "targets are computed on all evaluations"


def test_numbers_are_rounded_and_no_nan_is_left():
    assert [report_data.rounded(v) for v in (0.123456, 2.0, float("nan"), float("inf"))] == [
        0.1235,
        2,
        None,
        None,
    ]


# -- clusters


def test_the_flow_of_clients_by_hand():
    """Four clients, groups 0 0 1 1: all in cluster 0, then clients 2 and 3 in cluster 5, then no change."""
    truth = np.array([0, 0, 1, 1])
    labels = [np.array([0, 0, 0, 0]), np.array([0, 0, 5, 5]), np.array([0, 0, 5, 5])]
    flow = report_data.flow([*zip((1, 2, 3), labels, strict=True)], truth, labels[-1])
    assert [c["title"] for c in flow["columns"]] == ["round 1", "round 2", "round 3", "true groups"]
    assert [c["nodes"] for c in flow["columns"]] == [
        [[0, 4]],
        [[0, 2], [5, 2]],
        [[0, 2], [5, 2]],
        [[0, 2], [1, 2]],
    ]
    assert flow["links"] == [
        [[0, 0, 0, 2], [0, 5, 1, 2]],
        [[0, 0, 0, 2], [5, 5, 1, 2]],
        [[0, 0, 0, 2], [5, 1, 1, 2]],
    ]
    assert report_data.flow([], None, labels[0]) is None, "nothing to go from and to"


def test_of_many_evaluations_those_with_changes_are_drawn():
    history = [(step, np.array([0, int(step >= 30)])) for step in range(50)]
    flow = report_data.flow(history, None, history[-1][1])
    assert [c["title"] for c in flow["columns"]] == ["round 0", "round 30", "round 49"]
    flow = report_data.flow(history, None, history[-1][1], "step")
    assert [c["title"] for c in flow["columns"]] == ["step 0", "step 30", "step 49"]


def test_clusters_of_every_evaluation_are_kept(tmp_path):
    """IFCA with four models on two groups: clients move; only what changes is written."""
    options = [str(TINY), "--output.folder", str(tmp_path), "--evaluation.every", "1", "--quiet"]
    options += ["--algorithm", "{name: ifca, num_clusters: 4}", "--rounds", "3"]
    assert cli.main(["run", *options, "--output.id", "whole"]) == 0
    run = load(tmp_path / "tiny-whole")
    history = report_data.assignments(run)
    assert [step for step, _ in history] == [1, 2, 3]
    assert_array_equal(history[-1][1], run.clusters["cluster"])
    assert [len(set(labels.tolist())) for _, labels in history] == run.metrics["num_clusters"].tolist()
    moved = [float((a != b).mean()) for (_, a), (_, b) in pairwise(history)]
    assert moved == run.metrics["churn"].tolist()[1:]
    assert len(columns_of(run.folder / "assignments.csv")["round"]) == 8 + round(8 * sum(moved))


def test_clusters_of_every_evaluation_are_kept_of_those_whose_rows_are_written(tmp_path, monkeypatch):
    """Three of eight clients have rows: their clusters are those of a run that writes everybody's."""
    monkeypatch.setattr(recorder, "SAMPLE", 3)
    options = [str(TINY), "--output.folder", str(tmp_path), "--evaluation.every", "1", "--quiet"]
    options += ["--algorithm", "{name: ifca, num_clusters: 4}", "--rounds", "3"]
    for who in ("all", "sample"):
        assert cli.main(["run", *options, "--output.id", who, "--output.clients", who]) == 0
    every, few = (load(tmp_path / f"tiny-{who}") for who in ("all", "sample"))
    clients = few.clusters["client"].to_numpy()
    assert len(clients) == 3
    pairs = list(zip(report_data.assignments(every), report_data.assignments(few), strict=True))
    assert len(pairs) == 3
    for (step, a), (same, b) in pairs:
        assert step == same
        assert_array_equal(a[clients], b)
    (detail,), _ = report_data.details(gather([str(few.folder)]))
    assert detail["kept"]
    assert {sum(n for _, n in column["nodes"]) for column in detail["flow"]["columns"]} == {3}


def test_assignments_that_cannot_be_are_refused(tmp_path):
    run = run_of(tmp_path)
    (tmp_path / "clusters.csv").write_text("client,cluster,group\n0,1,0\n1,0,0\n2,0,0\n3,0,0\n")
    (tmp_path / "assignments.csv").write_text("round,client,cluster\n1,9,0\n")
    with pytest.raises(UserError, match="names a client that there is not"):
        report_data.assignments(run)
    (tmp_path / "assignments.csv").write_text("round,client,cluster\n2,0,1\n")
    with pytest.raises(UserError, match="lacks clients of clusters"):
        report_data.assignments(run)


# -- single runs


def detail_of(folder: Path, **files: str) -> dict:
    """Return what the page shows of a run of four clients with these files."""
    (folder / "clusters.csv").write_text("client,cluster,group,placed\n0,1,0,1\n1,0,1,1\n2,1,0,1\n3,0,1,1\n")
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    (found,), left_out = report_data.details([Group("a", (run_of(folder),))])
    assert left_out == 0
    return found


def test_pairs_of_clients_are_ordered_by_cluster_and_group(tmp_path):
    np.savez(tmp_path / "matrices.npz", parameters=np.arange(16.0).reshape(4, 4))
    found = detail_of(tmp_path)["matrices"]
    assert found["clients"] == ["client 1", "client 3", "client 0", "client 2"]
    assert (found["cluster"], found["group"]) == ([0, 0, 1, 1], [1, 1, 0, 0])
    distance, together = found["drawn"]
    shades = np.frombuffer(base64.b64decode(distance["shades"]), np.uint8).reshape(4, 4)
    order = [1, 3, 0, 2]
    assert_array_equal(shades, (np.arange(16).reshape(4, 4)[np.ix_(order, order)] / 15 * 254).round())
    assert (distance["low"], distance["high"]) == (0, 15)
    assert_array_equal(
        np.frombuffer(base64.b64decode(together["shades"]), np.uint8).reshape(4, 4) > 0,
        np.kron(np.eye(2), np.ones((2, 2))),
    )


def test_a_large_matrix_is_averaged_over_neighbours(monkeypatch, tmp_path):
    """Rows 1, 3 and 0, 2 of arange(16): the means of 2 by 2 blocks, NaN left out."""
    monkeypatch.setattr(report_data, "MAX_MATRIX", 2)
    values = np.arange(16.0).reshape(4, 4)
    values[1, 1] = np.nan
    np.savez(tmp_path / "matrices.npz", parameters=values)
    found = detail_of(tmp_path)["matrices"]
    assert found["averaged"]
    assert found["clients"] == ["clients 1, 3", "clients 0, 2"]
    means = np.array(
        [[(7 + 13 + 15) / 3, (4 + 6 + 12 + 14) / 4], [(1 + 3 + 9 + 11) / 4, (0 + 2 + 8 + 10) / 4]]
    )
    shades = np.frombuffer(base64.b64decode(found["drawn"][0]["shades"]), np.uint8).reshape(2, 2)
    assert_array_equal(shades, ((means - 5) / (means.max() - 5) * 254).round())


def test_the_blocks_of_a_large_matrix_are_the_means_over_pairs_of_clients():
    rng = np.random.default_rng(0)
    labels = [rng.integers(5, size=23) for _ in range(3)]
    edges = np.array([0, 4, 9, 10, 23])
    pairs = np.mean([row[:, None] == row for row in labels], axis=0)
    expected = [[pairs[a:b, c:d].mean() for c, d in pairwise(edges)] for a, b in pairwise(edges)]
    assert_allclose(report_data._together(labels, edges), expected)


def test_a_page_of_a_hundred_thousand_clients_holds_no_matrix_over_their_pairs(tmp_path):
    """Such a matrix takes 80 GB."""
    count = 100_000
    rows = "".join(f"{k},{k % 2},{k % 2},1\n" for k in range(count))
    (tmp_path / "clusters.csv").write_text(f"client,cluster,group,placed\n{rows}")
    ((found,), _) = report_data.details([Group("a", (run_of(tmp_path),))])
    (together,) = found["matrices"]["drawn"]
    shades = np.frombuffer(base64.b64decode(together["shades"]), np.uint8)
    half = report_data.MAX_MATRIX // 2
    assert_array_equal(shades.reshape(2 * half, -1), np.kron(np.eye(2), np.full((half, half), 254)))


def test_numbers_of_clients_are_not_rounded(tmp_path):
    rows = "123455,0,10001,0.123456789,65537"
    found = detail_of(tmp_path, clients=f"client,cluster,group,accuracy,train\n{rows}\n")["clients"]
    assert (found["client"], found["group"], found["train"]) == ([123_455], [10_001], [65_537])
    assert found["scores"] == {"accuracy": [12.3457]}


def test_the_device_of_a_client_is_no_figure(tmp_path):
    rows = "".join(f"{k},0,0.5,0.25,fast\n" for k in range(4))
    found = detail_of(tmp_path, clients=f"client,cluster,accuracy,loss,device\n{rows}")["clients"]
    assert found["client"] == [0, 1, 2, 3]
    assert found["scores"] == {"accuracy": [50] * 4}


def test_clients_and_phases_by_hand(tmp_path):
    found = detail_of(
        tmp_path,
        clients="client,cluster,accuracy,accuracy_finetuned,loss,train\n0,1,0.5,0.75,1.0,30\n1,0,nan,0.25,1.0,40\n",
        timing="round,rank,wait,train\n1,0,1.0,2.0\n1,1,0.5,4.0\n2,0,1.0,2.5\n2,1,0.25,\n",
    )
    assert found["clients"]["scores"] == {"accuracy": [50, None], "accuracy_finetuned": [75, 25]}
    assert found["clients"]["train"] == [30, 40]
    wait, train = PHASES.index("wait"), PHASES.index("train")
    assert [(row[wait], row[train], sum(row)) for row in found["phases"]] == [(2, 4.5, 6.5), (0.75, 4, 4.75)]
    with pytest.raises(UserError, match=r"clients\.csv: .* in column accuracy"):
        detail_of(tmp_path, clients="client,cluster,accuracy\n0,1,much\n")


def test_staleness_by_hand(tmp_path):
    """Ten uploads: six of staleness 0, three of 1, one of 130, in bars of three."""
    run = run_of(tmp_path)
    run.summary["asynchronous"] = {"staleness_histogram": {"130": 1, "0": 6, "1": 3}}
    (tmp_path / "events.csv").write_text("time,client,staleness\n1.0,3,0\n2.0,3,4\n2.5,3,9\n3.0,1,130\n")
    found = report_data._staleness(run)
    assert found["width"] == 3
    assert found["bars"] == [[0, 9], [129, 1]]
    assert found["quantiles"] == [0, 0, 1, 130]
    assert found["clients"] == [[1, 1, 130, 130, 130], [3, 3, 0, 4, 9]]
    assert report_data._staleness(run_of(tmp_path)) is None


# -- the page


class Strict(HTMLParser):
    """Raises where elements are not closed in order; collects the texts of elements."""

    EMPTY = ("meta", "input", "img", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        """Open an element."""
        assert not any(name.startswith("on") for name, _ in attrs)
        self.tags.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Close an element."""
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Keep the content of scripts."""
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_a_hostile_label_stays_text(tmp_path):
    (tmp_path / "clusters.csv").write_text(
        "client,cluster,group,placed\n0,0,0,1\n1,0,0,1\n2,0,0,1\n3,0,0,1\n"
    )
    group = Group(HOSTILE, (run_of(tmp_path),))
    rows = Table.of(["run", "accuracy, %"], [[HOSTILE, "50 +- 1"]])
    text = report_page.page([group], 0.5, rows, rows, {"accuracy": "Accuracy"})
    found = Strict(text)
    assert "<b onclick" not in text
    data = json.loads(found.scripts[0])
    assert data["groups"] == [{"name": HOSTILE, "seeds": 1}]
    assert len(found.scripts) == 3
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_what_was_run_is_said_once_where_runs_share_it_and_in_the_table_where_they_differ(tmp_path):
    """Runs differ in learning rate: the model is said once, local training in each row."""
    groups = []
    for lr in ("0.125", "0.25"):
        place = ["--output.folder", str(tmp_path), "--output.id", lr, "--quiet", "--local.lr", lr]
        assert cli.main(["run", str(TINY), *place]) == 0
        groups.append(Group(f"lr {lr}", (load(tmp_path / f"tiny-{lr}"),)))
    rows = Table.of(["run"], [[g.name] for g in groups])
    text = report_page.page(groups, 0.5, rows, rows, {})
    head, table = text.split('<section id="curves">')[0], text.split('<section id="runs">')[1]
    assert "<dt>model</dt><dd>mlp (hidden [12]), 910 parameters</dd>" in head
    for word in ("rotated (", "angles [0", "numbers ", "torch 2.", "epochs"):
        assert word in head if word != "epochs" else word not in head, word
    assert f"mpifl run {tmp_path}/tiny-0.125/config.yaml --output.id again" in head
    assert ">lr 0.125<" in table, "what they share is left out"
    differs = re.search(r"<dt>differs</dt><dd>(.*?)</dd>", head)
    assert "local training" in differs[1]
    assert "machine" not in differs[1], "both ran on this machine, in times of their own"
    assert ">lr 0.25<" in table


def test_the_command_that_repeats_a_run_repeats_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(TINY), "--output.folder", "runs", "--output.id", "a b", "--quiet"]) == 0
    run = load("runs/tiny-a b")
    assert report_data.command(run) == "mpifl run 'runs/tiny-a b/config.yaml' --output.id again"
    assert cli.main(["run", "runs/tiny-a b/config.yaml", "--output.id", "again", "--quiet"]) == 0
    assert load("runs/tiny-again").summary["digest"] == run.summary["digest"]


def test_the_runs_of_a_sweep_are_repeated_by_one_command(tmp_path):
    cases = tuple(run_of(tmp_path / "grid" / name) for name in "ab")
    alone = run_of(tmp_path / "c")
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "sweep.yaml").write_text("vary: {}")
    said = report_page._commands([Group("g", (*cases, alone))])
    assert re.findall("<code>(.*?)</code>", said) == [
        f"mpifl sweep {tmp_path}/grid/sweep.yaml --output.id again-1",
        f"mpifl run {tmp_path}/c/config.yaml --output.id again-2",
    ]


def test_every_command_that_repeats_runs_of_one_name_writes_a_folder_of_its_own(tmp_path):
    runs = tuple(run_of(tmp_path / f"tiny-{name}") for name in "abcd")
    said = re.findall("<code>(.*?)</code>", report_page._commands([Group("g", runs)]))
    ids = [code.partition("--output.id ")[2] for code in said]
    assert len(ids) == len(set(ids)) == report_page.MAX_COMMANDS


@pytest.mark.in_turn
def test_a_method_that_sends_nothing_is_reported(tmp_path):
    options = [
        str(TINY),
        "--algorithm",
        "local",
        "--output.folder",
        str(tmp_path),
        "--output.id",
        "x",
        "--quiet",
    ]
    assert cli.main(["run", *options]) == 0
    assert cli.main(["report", str(tmp_path / "tiny-x"), "--quiet"]) == 0
    assert '<section id="traffic">' not in (tmp_path / "report" / "report.html").read_text()
