"""What is recorded of the sweeps of papers' tables, and the pages in docs/reproductions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from campaigns import record_papers
from support.undrawn import undrawn  # noqa: F401

from mpifl.cli import main
from mpifl.core.errors import UserError
from mpifl.sweeps import papers

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """Return the folder of a paper with one sweep of two rows, in a checkout with a page folder."""
    folder, pages = tmp_path / "papers", tmp_path / "pages"
    (folder / "ucfl").mkdir(parents=True)
    pages.mkdir()
    monkeypatch.setattr(papers, "FOLDER", folder)
    monkeypatch.setattr(record_papers, "PAGES", pages)
    monkeypatch.setattr(papers, "PAPERS", {"ucfl": "A paper"})
    (folder / "ucfl" / "table1.yaml").write_text(
        f"""base: {TINY}
name: ucfl-table1
vary:
  rows:
    FedAvg: {{algorithm: fedavg}}
    Local: {{algorithm: local}}
  seed: [0, 1]
table:
  title: Table 1
  figures: {{avg: {{of: accuracy_mean, percent: true}}, ARI: {{of: ari}}}}
  published: {{FedAvg: [50.5]}}
  findings: [It came out so., And so.]
"""
    )
    return folder / "ucfl"


def sweep_with(paper, tmp_path, name, *options):
    place = ["--output.folder", str(tmp_path / "runs"), "--output.id", name]
    assert main(["sweep", str(paper / "table1.yaml"), "-q", *place, *options]) == 0
    return tmp_path / "runs" / f"ucfl-table1-{name}"


def test_record_keeps_the_figures_and_what_was_changed(paper, tmp_path, capsys):
    folder = sweep_with(paper, tmp_path, "a", "--rounds", "3", "--only", "seed=1")
    assert record_papers.main([str(folder)]) == 0
    assert str(paper / "measured" / "table1.json") in capsys.readouterr().out
    kept = json.loads((paper / "measured" / "table1.json").read_text())
    assert kept["sweep"] == "papers/ucfl/table1"
    assert [one["labels"] for one in kept["cases"]] == [
        {"rows": "FedAvg", "seed": "1"},
        {"rows": "Local", "seed": "1"},
    ]
    summary = json.loads((folder / "ucfl-table1-FedAvg-1" / "summary.json").read_text())
    assert kept["cases"][0]["values"]["accuracy_mean"] == pytest.approx(summary["accuracy_mean"], abs=1e-5)
    assert kept["cases"][0]["digest"] == summary["digest"][:16]
    assert kept["cases"][0]["instructions"] == summary["identity"]["instructions"]
    assert {one["changed"]["rounds"] for one in kept["cases"]} == {3}
    assert all([*one["changed"]] == ["rounds"] for one in kept["cases"])


@pytest.mark.parametrize("text", ["[1, 2]\n", "3\n", ""])
def test_record_refuses_a_sweep_file_that_holds_no_mapping(tmp_path, capsys, text):
    (tmp_path / "sweep.yaml").write_text(text)
    assert record_papers.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.partition(": ")[2] == f"RUN = {str(tmp_path)!r}: has a sweep.yaml that holds no mapping\n"


def test_another_sweep_adds_its_cases_and_replaces_the_same_ones(paper, tmp_path, capsys):
    folders = [
        sweep_with(paper, tmp_path, "a", "--rounds", "3", "--only", "seed=1"),
        sweep_with(paper, tmp_path, "b", "--only", "rows=FedAvg"),
    ]
    assert record_papers.main([*map(str, folders)]) == 0
    capsys.readouterr()
    (sweep,) = papers.sweeps()
    assert [(one["labels"]["rows"], one["labels"]["seed"], one["changed"]) for one in sweep.measured] == [
        ("FedAvg", "0", {}),
        ("FedAvg", "1", {}),
        ("Local", "1", {"rounds": 3}),
    ]
    assert main(["list", "papers"]) == 0
    said = capsys.readouterr().out
    mean = sum(result.values["accuracy_mean"] for result in sweep.results[:2]) / 2
    assert f"largest difference {100 * mean - 50.5:+.2f} (FedAvg avg)" in said
    assert "3 of 4 cases, rounds 3 (1 of 3 cases: Local); " in said
    page = (record_papers.PAGES / "ucfl.md").read_text()
    assert "mpifl sweep papers/ucfl/table1 --data.root DIR\n" in page, "not all cases have three rounds"
    assert "| FedAvg | 50.5 | " in page
    assert "\nIt came out so.\n\nAnd so.\n" in page
    assert "(ucfl.md)" in (record_papers.PAGES / "README.md").read_text()


def test_cases_with_other_data_or_of_another_case_are_not_recorded(paper, tmp_path):
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=FedAvg")
    one, other = (folder / f"ucfl-table1-FedAvg-{seed}" for seed in (0, 1))
    summary = json.loads((other / "summary.json").read_text())
    data = {**summary["data"], "samples": "other"}
    (other / "summary.json").write_text(json.dumps({**summary, "data": data}))
    with pytest.raises(UserError, match="cases differ in samples of the data"):
        record_papers.record([str(folder)])
    shutil.rmtree(other)
    shutil.copytree(one, other)
    with pytest.raises(UserError, match=r"seed.data = 1: the run in .*FedAvg-1 has 0"):
        record_papers.record([str(folder)])
    assert not (paper / "measured" / "table1.json").exists()


def test_a_page_says_what_did_not_run_and_counts_a_training_once(paper, tmp_path):
    """Local has no case; of FedAvg two cases rest on one training, as those of a sweep over networks."""
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=FedAvg")
    record_papers.record([str(folder)])
    (sweep,) = papers.sweeps()
    kept = json.loads(sweep.measured_file.read_text())
    for one in kept["cases"]:
        one.update(digest="0123456789abcdef", seconds=7200, commit="0123456789+")
    sweep.measured_file.write_text(json.dumps(kept))
    page = record_papers.pages()[record_papers.PAGES / "ucfl.md"]
    assert "\nNot run: Local.\n" in page
    assert "; 2.0 hours of wall time in all; " in page
    assert "; commit 0123456789+ (+: with changes that were not committed).\n" in page


def test_a_page_names_instructions_and_rows_whose_seeds_mix_them(paper, tmp_path):
    """By rounding alone two kinds of processors lie as far apart as seeds (CCFL, K = 3: 0.028)."""
    record_papers.record([str(sweep_with(paper, tmp_path, "a"))])
    record, page = paper / "measured" / "table1.json", record_papers.PAGES / "ucfl.md"
    kept = json.loads(record.read_text())
    assert [one["labels"]["rows"] for one in kept["cases"]] == ["FedAvg", "FedAvg", "Local", "Local"]

    def text_with(*kinds: str | None) -> str:
        for one, kind in zip(kept["cases"], kinds, strict=True):
            one.pop("instructions", None)
            one.update({} if kind is None else {"instructions": kind})
        record.write_text(json.dumps(kept))
        return record_papers.pages()[page]

    mixed = "Seeds of these rows were computed with different instructions of the processor"
    text = text_with("AVX2", "AVX512", "AVX512", "AVX512")
    assert "; computed with AVX2 (1 case), AVX512 (3 cases); commit" in text
    assert f"\n{mixed}: FedAvg.\n" in text
    text = text_with("AVX2", None, "AVX512", "AVX512")
    assert "; computed with AVX2 (1 case), AVX512 (2 cases), not recorded (1 case); commit" in text
    assert mixed not in text, "it is not known"
    text = text_with(None, None, None, None)
    assert "computed with" not in text
    text = text_with("AVX2", "AVX2", "AVX2 (MPIFL_INSTRUCTIONS)", "AVX512")
    assert f"\n{mixed}: Local.\n" in text, "a limit is the kind that it names"


def test_a_record_and_a_page_name_the_gpu_that_cases_were_computed_with(paper, tmp_path):
    """Its processor's instructions decide few last bits then. Two GPUs of one maker are two kinds."""
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=FedAvg")
    for seed, gpu in enumerate(("NVIDIA H200", "NVIDIA H100")):
        file = folder / f"ucfl-table1-FedAvg-{seed}" / "summary.json"
        summary = json.loads(file.read_text())
        file.write_text(json.dumps({**summary, "identity": {**summary["identity"], "device": gpu}}))
    record_papers.record([str(folder)])
    kept = json.loads((paper / "measured" / "table1.json").read_text())["cases"]
    assert [one["device"] for one in kept] == ["NVIDIA H200", "NVIDIA H100"]
    text = record_papers.pages()[record_papers.PAGES / "ucfl.md"]
    assert "; computed with NVIDIA H100 (1 case), NVIDIA H200 (1 case); commit" in text
    assert "\nSeeds of these rows were computed on different GPUs or processors: FedAvg.\n" in text


def test_a_page_writes_changes_as_words_of_a_command_line(paper, tmp_path):
    changes = ["--rounds", "3", "--local.momentum", "0.5"]
    changes += ["--local.precision", "float32", "--name", "ucfl-table1"]  # as they are
    record_papers.record([str(sweep_with(paper, tmp_path, "a", *changes))])
    page = record_papers.pages()[record_papers.PAGES / "ucfl.md"]
    assert "--data.root DIR --rounds 3 --local.momentum 0.5\n" in page
    assert record_papers._word("tf32") == "tf32"
    assert record_papers._word("12") == "'\"12\"'", "a text, to YAML"
    assert record_papers._word({"name": "iid"}) == '\'{"name": "iid"}\''


def test_a_case_with_other_figures_in_another_sweep_is_named(paper, tmp_path):
    """The same run in two sweeps, and one of the records changed as by another version of the code."""
    record_papers.record([str(sweep_with(paper, tmp_path, "a", "--only", "seed=0"))])
    other, record = paper / "table1-again.yaml", paper / "measured" / "table1.json"
    other.write_text((paper / "table1.yaml").read_text().replace("ucfl-table1", "ucfl-table1-again"))
    kept = json.loads(record.read_text())
    again = paper / "measured" / "table1-again.json"
    again.write_text(json.dumps({**kept, "sweep": "papers/ucfl/table1-again"}))
    page = record_papers.PAGES / "ucfl.md"
    assert "was run in" not in record_papers.pages()[page], "equal figures"
    kept["cases"][1]["values"]["accuracy_mean"] += 0.01
    kept["cases"][1].update(commit="fedcba9876", instructions="AVX9")
    again.write_text(json.dumps(kept))
    said = "Local, seed 0 was run in table1-again, too (Local), by commit fedcba9876 on AVX9 instead of "
    assert record_papers.pages()[page].count(said) == 1
    assert record_papers.pages()[page].count("FedAvg, seed 0 was run in") == 0
    for file in (other, paper / "table1.yaml"):  # what is said of deviations leaves it as it is
        file.write_text(file.read_text().replace("  title:", "  spread: over 3 runs\n  title:"))
        file.write_text(file.read_text().replace("of: ari}", "of: ari, deviation: population}"))
    text = record_papers.pages()[page]
    assert text.count("population standard deviation of ") == 2
    assert text.count(said) == 1
    assert not re.findall(r"^\w+$", text, re.MULTILINE), "a paragraph of one word"


def test_the_notes_of_a_base_stand_beside_what_differs_from_it(paper, tmp_path):
    file = paper / "table1.yaml"
    record_papers.record([str(sweep_with(paper, tmp_path, "a", "--only", "seed=0"))])
    file.write_text(
        file.read_text().replace("  title:", "  notes: So it is.\n  differences: Less.\n  title:")
    )
    assert (
        "\nLess.\n\nSo it is.\n\nIt came out so.\n" in record_papers.pages()[record_papers.PAGES / "ucfl.md"]
    )


def test_how_often_was_evaluated_counts_where_a_figure_is_a_mean_over_evaluations(paper, tmp_path):
    only = ["--evaluation.every", "1", "--only", "rows=Local", "--only", "seed=0"]
    folder, file = sweep_with(paper, tmp_path, "a", *only), paper / "table1.yaml"
    for figure, changed in (("ari", {}), ("accuracy_cluster_all_std", {"evaluation.every": 1})):
        file.write_text(file.read_text().replace("ari}", f"{figure}}}"))
        record_papers.record([str(folder)])
        assert [one["changed"] for one in papers.sweeps()[0].measured] == [changed]


def test_the_commit_of_a_changed_checkout_is_recorded_as_that(paper, tmp_path):
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=Local", "--only", "seed=0")
    file = folder / "ucfl-table1-Local-0" / "environment.json"
    environment = json.loads(file.read_text())
    for commit, kept in (
        ("0123456789abcdef+", "0123456789+"),
        ("0123456789abcdef", "0123456789"),
        (None, ""),
    ):
        file.write_text(json.dumps({**environment, "git_commit": commit}))
        record_papers.record([str(folder)])
        assert [one["commit"] for one in papers.sweeps()[0].measured] == [kept]


def test_cases_recorded_under_other_settings_than_those_of_the_file_are_named(paper, tmp_path):
    """A row that ran with two rounds for one keeps its own value; records of earlier releases say nothing."""
    file, page = paper / "table1.yaml", record_papers.PAGES / "ucfl.md"
    folder = sweep_with(paper, tmp_path, "a", "--rounds", "1", "--only", "seed=0")
    record_papers.record([str(folder)])
    for text, titles in (
        ("rounds: 4\nsystem: {threads: 1}\n", []),
        ("local: {epochs: 2}\n", ["rows FedAvg, seed 0", "rows Local, seed 0"]),
    ):
        file.write_text(f"{file.read_text()}{text}")
        (sweep,) = papers.sweeps()
        assert record_papers.outdated(sweep) == titles
        said = f"{len(titles)} under other settings than the file's now: {'; '.join(titles)}"
        assert (said in record_papers.pages()[page]) == bool(titles)
    again = sweep_with(paper, tmp_path, "b", "--only", "seed=0", "--only", "rows=Local")
    record_papers.record([str(again)])
    assert record_papers.outdated(papers.sweeps()[0]) == ["rows FedAvg, seed 0"]
    kept = json.loads(sweep.measured_file.read_text())
    del kept["cases"][0]["settings"]
    sweep.measured_file.write_text(json.dumps(kept))
    assert record_papers.outdated(papers.sweeps()[0]) == []


def test_a_folder_without_a_finished_case_or_of_no_paper_is_refused(paper, tmp_path):
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=Local", "--only", "seed=0")
    (folder / "ucfl-table1-Local-0" / "summary.json").unlink()
    with pytest.raises(UserError, match="has no finished case"):
        record_papers.record([str(folder)])
    text = (folder / "sweep.yaml").read_text().replace("ucfl-table1", "ucfl-table7")
    (folder / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match="is not a sweep of a paper"):
        record_papers.record([str(folder)])


@pytest.mark.nightly
def test_the_pages_are_what_the_kept_figures_give():
    """A page that was edited, or a figure that was kept without the campaign, differs."""
    for path, text in record_papers.pages().items():
        assert path.read_text() == text, (
            f"{path.name}: run tests/campaigns/record_papers.py with a sweep of the paper"
        )
