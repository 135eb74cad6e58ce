"""Every row of every table of the papers would begin: a configuration, its data, its first step.

All rows are read in every suite; those of `SOON` are planned in every suite, all others in the nightly part.
Planning opens the clients, builds the model, runs the method's checks and works out the first step; it trains
nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from mpifl.cli import main
from mpifl.comm.transport import Single
from mpifl.core.errors import UserError
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.experiment.table_layout import COLUMNS, ROWS
from mpifl.forecast.plan import describe
from mpifl.sweeps import papers
from mpifl.sweeps.cases import Case

SWEEPS = {sweep.name.removeprefix("papers/"): sweep for sweep in papers.sweeps()}
SOON = ("ccfl/table1-fashionmnist", "fedcuau/table3-small")  # small data
TABLES = {  # number of a published table or figure -> file names that begin with one of these
    "emdcfl": (
        *(f"table{number}" for number in (1, 2, 3, 4, 6, 9, 10, 11)),
        *(f"fig{number}" for number in (8, 12, 14)),
    ),
    "flt": ("table1", "table2", "table3", "table4", "table5"),
    "ucfl": ("table1-a", "table1-b", "table1-c", "fig5", "fig6", "fig7"),
    "ccfl": ("table1-fashionmnist", "table1-cifar100", "table1-miniimagenet", "ablation"),
    "fedcuau": ("table1", "table3", "table4", "fig1", "fig3"),
}
LARGE = ("resnet18", "resnet50", "efficientnet_b3", "vit_b_16", "convnext_base", "resnet18_cifar")
CHANNELS = 32
SIDE = 32  # pixels: a whole client at 224 x 224 is 2.7 GB
STARTS = {"flt/pretrain.yaml"}  # single runs from whose model a row of a table starts
PLANNED: set[str] = set()  # rows of several tables that are the same run are planned once
PUBLIC = 100  # images of each of CCFL's sets, on which every model is judged
STANDIN_POINTS, STANDIN_CLIENTS = 20_000, 200  # of fewer images than EMNIST has


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """Return a folder for prepared data that all plans share, emptied in the end."""
    folder = tmp_path_factory.mktemp("prepared")
    yield folder
    shutil.rmtree(folder)


def rows_of(sweep: papers.Sweep) -> list[Case]:
    """Return the cases of the rows and groups of columns, at the first value of all other keys."""
    first = {key: label for key, label in sweep.cases[0].labels.items() if key not in (ROWS, COLUMNS)}
    return [case for case in sweep.cases if first.items() <= case.labels.items()]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_row_is_a_configuration_of_its_own(name):
    sweep = SWEEPS[name]
    assert sweep.tree["name"] == name.replace("/", "-")
    for case in sweep.cases:
        again = loader.from_tree(Config, loader.to_tree(case.config))
        assert again == case.config, case.slug


def test_every_file_of_a_paper_is_a_sweep_with_a_table():
    files = {p.relative_to(papers.FOLDER).as_posix() for p in papers.FOLDER.glob("*/[!_]*.yaml")}
    assert files - STARTS == {f"{name}.yaml" for name in SWEEPS}
    assert {Path(name).parts[0] for name in SWEEPS} == set(papers.PAPERS)


def test_every_table_of_the_papers_has_a_sweep():
    for paper, stems in TABLES.items():
        found = [sweep.stem for sweep in papers.sweeps(paper)]
        for stem in stems:
            assert any(one == stem or one.startswith(f"{stem}-") for one in found), f"{paper}: {stem}"


def test_a_published_row_is_run_once():
    """No two rows of a table are the same run, and each published row is one of the rows."""
    for name, sweep in SWEEPS.items():
        groups = sweep.tree["vary"].get("columns")
        printed = [sweep.table.published] if groups is None else [*sweep.table.published.values()]
        labels = {case.labels.get("rows") for case in sweep.cases}
        if "rows" in sweep.tree["vary"]:
            assert all(str(row) in labels for rows in printed for row in rows), name
        trees = {
            json.dumps({k: v for k, v in loader.to_tree(case.config).items() if k != "name"}, default=str)
            for case in sweep.cases
        }
        assert len(trees) == len(sweep.cases), name


@pytest.mark.parametrize(
    "name", [n if n in SOON else pytest.param(n, marks=pytest.mark.nightly) for n in SWEEPS]
)
def test_every_row_is_planned(name, cache):
    sweep = SWEEPS[name]
    found = [case for i, case in enumerate(rows_of(sweep)) if i == 0 or not is_large(case.config)]
    configs = [small(sweep, case, cache) for case in found]
    absent = {case.config.data.source.name for case, c in zip(found, configs, strict=True) if not c}
    for config in configs:
        if config is not None and what_is_planned(config) not in PLANNED:
            PLANNED.add(what_is_planned(config))
            page = describe(config, Single())
            assert f"{config.rounds} rounds" in page
            assert "federation in all" in page or "bytes" in page
    if not any(configs):
        pytest.skip(f"no data root holds {', '.join(sorted(absent))}: set MPIFL_DATA")


def is_large(config: Config) -> bool:
    """Return whether a row's network is large: of those, only the first row of a table is planned.

    The papers' tables for MNIST stand there with fewer channels, too (`-small`), and are planned entirely.
    FLT fits a plane to all clients, and counts as large.
    """
    tree = loader.to_tree(config)
    model, slow = tree["model"], tree["algorithm"]["name"] == "flt"
    return slow or model["name"] in LARGE or max(model.get("channels", [0])) > CHANNELS


def what_is_planned(config: Config) -> str:
    """Return what a plan depends on; rates and epochs are not among it."""
    tree = loader.to_tree(config)
    keys = ("algorithm", "model", "data", "policy", "participation", "cohort_size", "rounds", "newcomers")
    return json.dumps([tree[key] for key in keys], default=str)


def small(sweep: papers.Sweep, case: Case, cache: Path) -> Config | None:
    """Return a case whose images are small, on the data root that holds them; None where none does."""
    source, scenario = case.config.data.source, case.config.data.scenario
    root = root_with(source)
    if root is None:
        return None
    parts = {"resize": SIDE} if getattr(scenario, "resize", None) == 224 else {}
    parts |= {"public": PUBLIC} if sweep.paper == "ccfl" and hasattr(scenario, "public") else {}
    if root == Path(os.environ.get("MPIFL_STANDIN") or "/nowhere/at/all"):
        parts |= {"points": STANDIN_POINTS} if hasattr(scenario, "points") else {}
        parts |= {"clients": STANDIN_CLIENTS} if getattr(scenario, "name", "") == "flt4" else {}
    changes = {"root": str(root), "cache": str(cache), "scenario": parts}
    config: Config = loader.from_tree(Config, loader.merged(loader.to_tree(case.config), {"data": changes}))
    return config


def root_with(source) -> Path | None:
    """Return the data root that holds a source's files (MPIFL_DATA, or MPIFL_STANDIN for EMNIST), or None."""
    for variable in ("MPIFL_DATA", "MPIFL_STANDIN"):
        root = Path(os.environ.get(variable) or "/nowhere")
        if all(path.exists() for path in source.files(root)):
            return root
    return None


# -- what is kept of them ------------------------------------------------------------------------------------

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """Return the folder of a paper with one sweep of two rows, in a checkout with a page folder."""
    folder, pages = tmp_path / "papers", tmp_path / "pages"
    (folder / "ucfl").mkdir(parents=True)
    pages.mkdir()
    monkeypatch.setattr(papers, "FOLDER", folder)
    monkeypatch.setattr(papers, "PAGES", pages)
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
    assert main(["record", str(folder)]) == 0
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
    assert main(["record", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"mpifl: RUN = {str(tmp_path)!r}: has a sweep.yaml that holds no mapping\n"


def test_bytes_are_recorded_exactly():
    record = json.loads(SWEEPS["flt/table6"].measured_file.read_text())
    down = {one["labels"]["rows"]: one["values"]["federation_bytes_down"] for one in record["cases"]}
    assert down["FLT Enc1"] == 4 * (100 * 25_956 + 2_000 * 159_010), "N W_enc + rho N W T"


def test_another_sweep_adds_its_cases_and_replaces_the_same_ones(paper, tmp_path, capsys):
    folders = [
        sweep_with(paper, tmp_path, "a", "--rounds", "3", "--only", "seed=1"),
        sweep_with(paper, tmp_path, "b", "--only", "rows=FedAvg"),
    ]
    assert main(["record", *map(str, folders)]) == 0
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
    page = (papers.PAGES / "ucfl.md").read_text()
    assert "mpifl sweep papers/ucfl/table1 --data.root DIR\n" in page, "not all cases have three rounds"
    assert "| FedAvg | 50.5 | " in page
    assert "\nIt came out so.\n\nAnd so.\n" in page
    assert "(ucfl.md)" in (papers.PAGES / "README.md").read_text()


def test_cases_with_other_data_or_of_another_case_are_not_recorded(paper, tmp_path):
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=FedAvg")
    one, other = (folder / f"ucfl-table1-FedAvg-{seed}" for seed in (0, 1))
    summary = json.loads((other / "summary.json").read_text())
    data = {**summary["data"], "samples": "other"}
    (other / "summary.json").write_text(json.dumps({**summary, "data": data}))
    with pytest.raises(UserError, match="cases differ in samples of the data"):
        papers.record([str(folder)])
    shutil.rmtree(other)
    shutil.copytree(one, other)
    with pytest.raises(UserError, match=r"seed.data = 1: the run in .*FedAvg-1 has 0"):
        papers.record([str(folder)])
    assert not (paper / "measured" / "table1.json").exists()


def test_a_page_says_what_did_not_run_and_counts_a_training_once(paper, tmp_path):
    """Local has no case; of FedAvg two cases rest on one training, as those of a sweep over networks."""
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=FedAvg")
    papers.record([str(folder)])
    (sweep,) = papers.sweeps()
    kept = json.loads(sweep.measured_file.read_text())
    for one in kept["cases"]:
        one.update(digest="0123456789abcdef", seconds=7200, commit="0123456789+")
    sweep.measured_file.write_text(json.dumps(kept))
    page = papers.pages()[papers.PAGES / "ucfl.md"]
    assert "\nNot run: Local.\n" in page
    assert "; 2.0 hours of wall time in all; " in page
    assert "; commit 0123456789+ (+: with changes that were not committed).\n" in page


def test_a_page_names_instructions_and_rows_whose_seeds_mix_them(paper, tmp_path):
    """By rounding alone two kinds of processors lie as far apart as seeds (CCFL, K = 3: 0.028)."""
    papers.record([str(sweep_with(paper, tmp_path, "a"))])
    record, page = paper / "measured" / "table1.json", papers.PAGES / "ucfl.md"
    kept = json.loads(record.read_text())
    assert [one["labels"]["rows"] for one in kept["cases"]] == ["FedAvg", "FedAvg", "Local", "Local"]

    def text_with(*kinds: str | None) -> str:
        for one, kind in zip(kept["cases"], kinds, strict=True):
            one.pop("instructions", None)
            one.update({} if kind is None else {"instructions": kind})
        record.write_text(json.dumps(kept))
        return papers.pages()[page]

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
    papers.record([str(folder)])
    kept = json.loads((paper / "measured" / "table1.json").read_text())["cases"]
    assert [one["device"] for one in kept] == ["NVIDIA H200", "NVIDIA H100"]
    text = papers.pages()[papers.PAGES / "ucfl.md"]
    assert "; computed with NVIDIA H100 (1 case), NVIDIA H200 (1 case); commit" in text
    assert "\nSeeds of these rows were computed on different GPUs or processors: FedAvg.\n" in text


def test_a_page_writes_changes_as_words_of_a_command_line(paper, tmp_path):
    changes = ["--rounds", "3", "--local.momentum", "0.5"]
    changes += ["--local.precision", "float32", "--name", "ucfl-table1"]  # as they are
    papers.record([str(sweep_with(paper, tmp_path, "a", *changes))])
    page = papers.pages()[papers.PAGES / "ucfl.md"]
    assert "--data.root DIR --rounds 3 --local.momentum 0.5\n" in page
    assert papers._word("tf32") == "tf32"
    assert papers._word("12") == "'\"12\"'", "a text, to YAML"
    assert papers._word({"name": "iid"}) == '\'{"name": "iid"}\''


def test_a_case_with_other_figures_in_another_sweep_is_named(paper, tmp_path):
    """The same run in two sweeps, and one of the records changed as by another version of the code."""
    papers.record([str(sweep_with(paper, tmp_path, "a", "--only", "seed=0"))])
    other, record = paper / "table1-again.yaml", paper / "measured" / "table1.json"
    other.write_text((paper / "table1.yaml").read_text().replace("ucfl-table1", "ucfl-table1-again"))
    kept = json.loads(record.read_text())
    again = paper / "measured" / "table1-again.json"
    again.write_text(json.dumps({**kept, "sweep": "papers/ucfl/table1-again"}))
    page = papers.PAGES / "ucfl.md"
    assert "was run in" not in papers.pages()[page], "equal figures"
    kept["cases"][1]["values"]["accuracy_mean"] += 0.01
    kept["cases"][1].update(commit="fedcba9876", instructions="AVX9")
    again.write_text(json.dumps(kept))
    said = "Local, seed 0 was run in table1-again, too (Local), by commit fedcba9876 on AVX9 instead of "
    assert papers.pages()[page].count(said) == 1
    assert papers.pages()[page].count("FedAvg, seed 0 was run in") == 0
    for file in (other, paper / "table1.yaml"):  # what is said of deviations leaves it as it is
        file.write_text(file.read_text().replace("  title:", "  spread: over 3 runs\n  title:"))
        file.write_text(file.read_text().replace("of: ari}", "of: ari, deviation: population}"))
    text = papers.pages()[page]
    assert text.count("population standard deviation of ") == 2
    assert text.count(said) == 1
    assert not re.findall(r"^\w+$", text, re.MULTILINE), "a paragraph of one word"


def test_the_notes_of_a_base_stand_beside_what_differs_from_it(paper, tmp_path):
    file = paper / "table1.yaml"
    papers.record([str(sweep_with(paper, tmp_path, "a", "--only", "seed=0"))])
    file.write_text(
        file.read_text().replace("  title:", "  notes: So it is.\n  differences: Less.\n  title:")
    )
    assert "\nLess.\n\nSo it is.\n\nIt came out so.\n" in papers.pages()[papers.PAGES / "ucfl.md"]


def test_how_often_was_evaluated_counts_where_a_figure_is_a_mean_over_evaluations(paper, tmp_path):
    only = ["--evaluation.every", "1", "--only", "rows=Local", "--only", "seed=0"]
    folder, file = sweep_with(paper, tmp_path, "a", *only), paper / "table1.yaml"
    for figure, changed in (("ari", {}), ("accuracy_cluster_all_std", {"evaluation.every": 1})):
        file.write_text(file.read_text().replace("ari}", f"{figure}}}"))
        papers.record([str(folder)])
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
        papers.record([str(folder)])
        assert [one["commit"] for one in papers.sweeps()[0].measured] == [kept]


def test_cases_recorded_under_other_settings_than_those_of_the_file_are_named(paper, tmp_path):
    """A row that ran with two rounds for one keeps its own value; records of earlier releases say nothing."""
    file, page = paper / "table1.yaml", papers.PAGES / "ucfl.md"
    folder = sweep_with(paper, tmp_path, "a", "--rounds", "1", "--only", "seed=0")
    papers.record([str(folder)])
    for text, titles in (
        ("rounds: 4\nsystem: {threads: 1}\n", []),
        ("local: {epochs: 2}\n", ["rows FedAvg, seed 0", "rows Local, seed 0"]),
    ):
        file.write_text(f"{file.read_text()}{text}")
        (sweep,) = papers.sweeps()
        assert sweep.outdated == titles
        said = f"{len(titles)} under other settings than the file's now: {'; '.join(titles)}"
        assert all((said in page) == bool(titles) for page in (papers.listed(), papers.pages()[page]))
    again = sweep_with(paper, tmp_path, "b", "--only", "seed=0", "--only", "rows=Local")
    papers.record([str(again)])
    assert papers.sweeps()[0].outdated == ["rows FedAvg, seed 0"]
    kept = json.loads(sweep.measured_file.read_text())
    del kept["cases"][0]["settings"]
    sweep.measured_file.write_text(json.dumps(kept))
    assert papers.sweeps()[0].outdated == []


def test_a_folder_without_a_finished_case_or_of_no_paper_is_refused(paper, tmp_path):
    folder = sweep_with(paper, tmp_path, "a", "--only", "rows=Local", "--only", "seed=0")
    (folder / "ucfl-table1-Local-0" / "summary.json").unlink()
    with pytest.raises(UserError, match="has no finished case"):
        papers.record([str(folder)])
    text = (folder / "sweep.yaml").read_text().replace("ucfl-table1", "ucfl-table7")
    (folder / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match="is not a sweep of a paper"):
        papers.record([str(folder)])


def test_the_pages_are_what_the_kept_figures_give():
    """`mpifl record` wrote them; a page that was edited, or a figure that was kept without it, differs."""
    for path, text in papers.pages().items():
        assert path.read_text() == text, f"{path.name}: run `mpifl record` with a sweep of the paper"
