"""What README.md and docs/ say: their commands run, and what they show is what comes out.

Blocks of docs/ that are marked with `<!-- test -->` run in a folder of their own, in order; above a block,
`<!-- test: NAME -->` saves it as NAME there. Every `mpifl` command of README.md runs, and the figures it
shows are those of its runs. Links and names are those of `test_references.py`.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import toy
from support.each import for_each

import mpifl
from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.experiment.loader import from_tree, load, read
from mpifl.experiment.schema import Config
from mpifl.supervision import progress

ROOT = Path(mpifl.__file__).parents[1]
PAGES_ROWS = ["client,part,sample,group,label", "0,train,1247,0,4"]  # of docs/data.md
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
README = (ROOT / "README.md").read_text()
MARKED = re.compile(
    r"^<!-- test(?:: *(?P<file>\S+))? -->\n+```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """Return (file, text) of the marked blocks of a page."""
    return [(m["file"], m["text"]) for m in MARKED.finditer(page.read_text())]


def test_marked_blocks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- test -->\n```bash\nls\n```\n```bash\nrm\n```\n<!-- test: x.py -->\n\n```python\n1\n2\n```\n"
    )
    assert blocks(page) == [(None, "ls\n"), ("x.py", "1\n2\n")]


def summary_of(run: Path) -> dict:
    """Return what a run says of itself."""
    return json.loads((run / "summary.json").read_text())


def a_replay_is_its_run(folder: Path, said: str) -> None:
    """The arrivals of the wall-clock run came once more, and gave the same numbers."""
    real, again = (folder / "runs" / f"async-{name}" for name in ("real", "again"))
    assert len(summary_of(real)["digest"]) == 64
    assert summary_of(real)["digest"] == summary_of(again)["digest"]
    first, second = (list(csv.DictReader((run / "events.csv").open())) for run in (real, again))
    assert [row["client"] for row in first] == [row["client"] for row in second]
    assert len(first) >= 20
    assert load(str(again / "config.yaml")).clock.trace == "runs/async-real/events.csv"


def a_table_a_sheet_and_a_run(folder: Path, said: str) -> None:
    """The table counts what the page says, the sheet is there, and the data set of the page was run on."""
    for word in ("clients", "training", "validation", "test", "classes", "label distance"):
        assert word in said
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "split.csv").read_text().splitlines()[1:3] == PAGES_ROWS
    data = {}
    for run in (folder / "runs").iterdir():
        tree = yaml.safe_load((run / "config.yaml").read_text())["data"]
        data[tree["source"]["name"], tree["scenario"]["name"]] = tree
        clients = 8 if tree["source"]["name"] == "table" else 20
        assert (summary_of(run)["clients"], summary_of(run)["rounds"]) == (clients, 1)
    runs = [("dataset", "rotated"), ("digits", "partition"), ("npz", "relations"), ("table", "natural")]
    assert [*sorted(data)] == runs
    assert data["dataset", "rotated"]["source"]["path"] == "stripes.py:Stripes"


def a_run_on_phones(folder: Path, said: str) -> None:
    """The measured devices drive the clients."""
    with (folder / "runs" / "async-phones" / "clients.csv").open() as lines:
        devices = {row["device"] for row in csv.DictReader(lines)}
    assert len(devices) > 1
    assert "" not in devices


def the_method_of_the_page(folder: Path, said: str) -> None:
    """The run was made with the method that the page builds."""
    (run,) = (folder / "runs").iterdir()
    assert summary_of(run)["algorithm"] == "my_method.py:FedMedianLoss"
    assert yaml.safe_load((run / "config.yaml").read_text())["algorithm"]["quantile"] == 0.3
    assert "round 2/2" in said
    page = (ROOT / "docs" / "writing-a-method.md").read_text()
    (shown,) = re.findall(r"^```\n(my_method.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    number = re.compile(r"0\.\d+")  # other processors, other accuracies
    assert number.sub("", shown) in number.sub("", said)


def a_run_from_python(folder: Path, said: str) -> None:
    """What Python printed is what the run folder says."""
    (run,) = (folder / "runs").iterdir()
    assert said.split()[0] == str(summary_of(run)["accuracy_mean"])
    assert summary_of(run)["rounds"] == 1


def two_scripts_and_a_metric(folder: Path, said: str) -> None:
    """One script printed its table, the other's callback ended its run; both metrics have their columns."""
    runs = {run.folder.name: run for run in map(mpifl.load, (folder / "runs").iterdir())}
    script = runs.pop("quickstart-python")
    assert str(script.metrics["federation_bytes_up"].iloc[-1]) in said
    ended, measured = sorted(runs.values(), key=lambda run: "ended" not in run.summary)
    assert ended.summary["rounds"] < 20
    assert f"{ended.summary['rounds']} {ended.ended}" in said
    assert {"top2_mean", "balanced_mean"} <= set(measured.metrics)


def a_protection_an_option_and_a_plug_in(folder: Path, said: str) -> None:
    """Each class of the page changed its run, and is the one that the run names."""
    trees = {n: folder / "runs" / f"quickstart-{n}" / "config.yaml" for n in ("rounded", "slow", "signs")}
    rounded, slow, signs = (yaml.safe_load(tree.read_text()) for tree in trees.values())
    assert rounded["privacy"] == {"name": "rounded.py:Rounded", "step": 0.5}
    assert slow["algorithm"] == {"name": "fedavg.py:FedAvg", "server_lr": 0.5}
    assert signs["payload"]["compression"] == {"name": "signs.py:Signs"}
    assert signs["payload"]["downloads"]["name"] == "int8"
    assert said.count("as many as `encode` has made") == 2
    assert len({summary_of(tree.parent)["digest"] for tree in trees.values()}) == 3
    with pytest.raises(UserError, match=r"server_lr = 2.0: must be in \(0, 1\]"):
        load(str(trees["slow"]), ["--algorithm.server_lr", "2"])


def adapters_of_runs(folder: Path, said: str) -> None:
    """Runs with adapters have folders of PEFT, and only adapters travel."""
    for name in ("texts", "fedavg", "ditto"):
        assert [
            *(folder / "runs" / f"quickstart-{name}" / "adapters").glob("model-*/adapter_model.safetensors")
        ]
    assert summary_of(folder / "runs" / "quickstart-masked")["metric"]["name"] == "perplexity"
    ranks = folder / "runs" / "quickstart-ranks" / "adapters"
    told = [json.loads((ranks / f"client-{k}" / "adapter_config.json").read_text()) for k in (0, 5)]
    assert [(config["r"], config["lora_alpha"]) for config in told] == [(2, 2), (8, 8)]
    numbers = 2 * 2 * 4 * (32 + 32) + 2 * 32 + 2  # query and value of two layers, and the classifier
    assert summary_of(folder / "runs" / "quickstart-fedavg")["federation_bytes_up"] == 6 * 4 * numbers
    numbers *= 2  # of rank 8: twice that of the adapters
    assert summary_of(folder / "runs" / "quickstart-lit")["federation_bytes_up"] == 6 * 4 * (numbers - 66)


def a_first_run(folder: Path, said: str) -> None:
    """Clusters are better than one model, and both runs are in the report."""
    clustered, single = (summary_of(folder / "runs" / f"quickstart-{name}") for name in ("first", "fedavg"))
    assert clustered["accuracy_mean"] > single["accuracy_mean"]
    assert (folder / "report" / "report.html").stat().st_size > 1e6


def a_first_method(folder: Path, said: str) -> None:
    """The method that was written is the one that ran, that found the groups, and that was checked."""
    (run,) = (folder / "runs").iterdir()
    summary = summary_of(run)
    assert (summary["algorithm"], summary["ari"]) == ("similar_models.py:SimilarModels", 1)
    assert "ok   the same run again" in said


def own_data_and_model(folder: Path, said: str) -> None:
    """Options and file make the same run."""
    runs = [summary_of(run) for run in (folder / "runs").iterdir()]
    assert len(runs) == 2
    assert len({run["digest"] for run in runs}) == 1
    assert (folder / "stripes.png").stat().st_size > 1000


def a_cluster(folder: Path, said: str) -> None:
    """The job script is one, and the run that Ctrl-C stops goes on."""
    assert (folder / "job.sh").read_text().startswith("#!/")
    page = (ROOT / "docs" / "tutorial" / "cluster.md").read_text()
    start, resume = re.findall(r"^mpifl ((?:run|resume) .*)$", page, re.MULTILINE)
    mpifl = [sys.executable, "-m", "mpifl"]
    env = {**os.environ, **toy.PYTHONPATH}
    with subprocess.Popen(
        [*mpifl, *shlex.split(start)], stdout=subprocess.PIPE, text=True, cwd=folder, env=env
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("round "):
                run.send_signal(signal.SIGINT)
                break
        run.stdout.read()
    assert run.returncode == 75
    subprocess.run([*mpifl, *shlex.split(resume)], cwd=folder, env=env, check=True)
    assert summary_of(folder / "runs" / "quickstart-stopped")["rounds"] == 300


def a_straggler(folder: Path, said: str) -> None:
    """The client that trains longest is the one that does."""
    rows = [line for line in said.splitlines() if "waits" in line]
    assert [row.split(":")[0] for row in rows] == ["rank 0", "rank 1", "rank 2"]
    longest = next(line for line in said.splitlines() if " ms  rank " in line)
    assert "'client': 4" in longest


def an_asynchronous_study(folder: Path, said: str) -> None:
    """Both runs step by arrivals, and the sweep has its table over seeds."""
    assert all(summary_of(folder / "runs" / f"async-{n}")["asynchronous"] for n in ("buffer", "each"))
    assert "buffer of 2" in (folder / "runs" / "late-study" / "sweep.md").read_text()


def trainers_of_three_kinds(folder: Path, said: str) -> None:
    """Each run was trained by its own trainer, and the check of the last passed."""
    runs = {name: folder / "runs" / f"quickstart-{name}" for name in ("adamw", "lightning", "sam")}
    named = {
        n: yaml.safe_load((run / "config.yaml").read_text())["local"]["trainer"] for n, run in runs.items()
    }
    assert named["adamw"]["optimizer"] == "AdamW"
    assert named["lightning"]["name"] == "lightning"
    assert named["sam"]["name"] == "sam.py:SAM"
    columns = {n: (run / "metrics.csv").read_text().splitlines()[0].split(",") for n, run in runs.items()}
    assert "fit_hits" in columns["lightning"]
    assert "fit_rho" in columns["sam"]
    assert "ok   gives `direction`" in said
    assert "FAIL" not in said


def a_swap_that_is_recovered_from(folder: Path, said: str) -> None:
    """Four of twenty clients change places, and the score is back."""
    run = folder / "runs" / "quickstart-moving"
    summary = json.loads((run / "summary.json").read_text())
    assert [(row["step"], row["recovered_after"] is None) for row in summary["drift"]] == [(4, False)]
    assert len((run / "groups.csv").read_text().splitlines()) == 1 + 20 + 4
    ledger = (folder / "runs" / "quickstart-again" / "ledger.csv").read_text().splitlines()
    assert sum(line.startswith("4,up,") and ",delta," in line for line in ledger) == 1


def changes_at_a_step_and_at_a_time(folder: Path, said: str) -> None:
    """Data changed at step 4 of the rounds and once by the clock, and clients joined and left."""
    runs = [
        (yaml.safe_load((run / "config.yaml").read_text()), summary_of(run))
        for run in (folder / "runs").iterdir()
    ]
    by_step = [summary for tree, summary in runs if tree.get("drift", {}).get("at")]
    by_time = [summary for tree, summary in runs if tree.get("drift", {}).get("at_s")]
    moving = [tree for tree, _ in runs if tree.get("leavers", {}).get("share")]
    assert [[row["step"] for row in summary["drift"]] for summary in by_step] == [[4]]
    assert [len(summary["drift"]) for summary in by_time] == [1]
    assert by_time[0]["asynchronous"]["staleness_mean"] > 0
    assert [tree["newcomers"]["share"] for tree in moving] == [0.2]


def traffic_of_the_page(folder: Path, said: str) -> None:
    """Calls, messages and bytes of the page are those of the run."""
    page = (ROOT / "docs" / "mpi.md").read_text()
    row = re.compile(r"^\| (\d) \| (\w+) \| ([\w:]+) \| (\d+) \| (\d+) \| (?:(\d+) )?\|", re.MULTILINE)
    shown = row.findall(page)
    with (folder / "runs" / "quickstart-mpi" / "mpi_traffic.csv").open() as lines:
        counts = {(row["rank"], row["call"], row["purpose"]): row for row in csv.DictReader(lines)}
    assert len(shown) == 6
    for *which, calls, messages, size in shown:
        row = counts[tuple(which)]
        assert (row["calls"], row["messages"]) == (calls, messages), which
        assert size in ("", row["bytes"]), which


def runs_of_somebody_who_comes_from_elsewhere(folder: Path, said: str) -> None:
    """One and three ranks give one digest, and equal weights another."""
    digests = [summary_of(folder / "runs" / f"first-{n}")["digest"] for n in ("one", "three", "equal")]
    assert digests[0] == digests[1] != digests[2]


LEAVES: dict[str, Callable[[Path, str], None]] = {  # page -> what must be so after its commands
    "asynchronous-study.md": an_asynchronous_study,
    "asynchrony.md": a_replay_is_its_run,
    "cluster.md": a_cluster,
    "data.md": a_table_a_sheet_and_a_run,
    "devices.md": a_run_on_phones,
    "drift.md": a_swap_that_is_recovered_from,
    "extending.md": a_protection_an_option_and_a_plug_in,
    "first-method.md": a_first_method,
    "first-run.md": a_first_run,
    "from-other-simulators.md": runs_of_somebody_who_comes_from_elsewhere,
    "how-to.md": changes_at_a_step_and_at_a_time,
    "huggingface.md": adapters_of_runs,
    "mpi.md": traffic_of_the_page,
    "own-data-and-model.md": own_data_and_model,
    "performance.md": a_straggler,
    "python.md": two_scripts_and_a_metric,
    "running.md": a_run_from_python,
    "trainers.md": trainers_of_three_kinds,
    "writing-a-method.md": the_method_of_the_page,
}


def test_whatever_a_marked_page_leaves_behind_is_looked_at():
    assert {page.name for page in [*PAGES, *TUTORIAL] if blocks(page)} == set(LEAVES)


LATER = (
    "asynchrony.md",
    "data.md",
    "drift.md",
    "from-other-simulators.md",
    "huggingface.md",
    "mpi.md",
    "performance.md",
    "python.md",
    "running.md",
    "trainers.md",
)  # with several starts of Python each
MARKED_PAGES = [
    pytest.param(page, marks=[pytest.mark.nightly] * (page in TUTORIAL or page.name in LATER))
    for page in [*PAGES, *TUTORIAL]
    if blocks(page)
]


MADE_SMALL = ("how-to.md",)  # pages whose figures nobody looks at: of a small network, in one pass
SMALL = ["--model", "{name: mlp, hidden: [8]}", "--local.epochs", "1"]


def mpifl_alone(text: str) -> list[list[str]]:
    """Return the words of each command of a block; nothing where one is not `mpifl`, or asks for a shell."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    found = [words for words in lines if words]
    plain = all(words[0] == "mpifl" and not re.search(r"[|<>;&$]", " ".join(words)) for words in found)
    return found if plain else []


def test_only_what_needs_no_shell_runs_without_one():
    assert mpifl_alone("mpifl run 'a b' \\\n  --x 1  # why\n\nmpifl list data\n") == [
        ["mpifl", "run", "a b", "--x", "1"],
        ["mpifl", "list", "data"],
    ]
    for text in ("mpifl run a\npython b.py\n", "mpifl list | head\n", "mpifl run $A\n"):
        assert mpifl_alone(text) == []


@pytest.mark.parametrize("page", MARKED_PAGES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_commands_of_a_page_run(page, mpirun, tmp_path, capsys, monkeypatch):
    """Blocks of `mpifl` alone run in this process, which has PyTorch already; others in bash."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "launch", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "bin" / "mpifl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mpifl "$@"\n')
    program.chmod(0o755)
    shell = (
        "import subprocess, sys; sys.exit(subprocess.call(['bash', '-euo', 'pipefail', '-c', sys.argv[1]]))"
    )
    env = {**toy.PYTHONPATH, "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = ""
    for file, text in blocks(page):
        if file:
            (tmp_path / file).write_text(text)
            continue
        if commands := mpifl_alone(text):
            for _, *words in commands:
                code = cli.main(words + (SMALL if page.name in MADE_SMALL else []))
                captured = capsys.readouterr()
                assert code == 0, captured.err
                said += captured.out
            continue
        done = mpirun(None, "-c", shell, text, timeout=600, env=env, cwd=tmp_path)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    LEAVES[page.name](tmp_path, said)


def test_the_catalogue_is_in_the_order_of_the_methods_page():
    described, _, measured = (ROOT / "docs" / "methods.md").read_text().partition("## Side by side")
    rows = re.findall(r"^\| `(\w+)` \|", described, re.MULTILINE)
    assert rows == list(CATALOGUE)
    rows = re.findall(r"^\| `(\w+)` \|", measured, re.MULTILINE)
    assert rows == [name for name in CATALOGUE if name != "clustered_async"], "its clusters come from a run"


@for_each("name", CATALOGUE)
def test_every_method_has_a_small_configuration(name):
    config = from_tree(Config, read(f"algorithms/{name}"))
    assert (config.name, type(config.algorithm)) == (name, CATALOGUE[name])


def test_the_methods_that_pages_show_are_those_that_run():
    page = (ROOT / "docs" / "writing-a-method.md").read_text()
    assert (ROOT / "mpifl" / "algorithms" / "fedprox.py").read_text() in page
    (shown,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert shown in (ROOT / "docs" / "examples" / "fedavg_method.py").read_text()
    _, whole, method = (ROOT / "docs" / "examples" / "feddyn_method.py").read_text().partition("@dataclass")
    assert f"```python\n{whole}{method}```" in page


def test_the_refusal_that_the_page_on_sweeps_shows_is_that_of_its_sweep(tmp_path, capsys, monkeypatch):
    page = (ROOT / "docs" / "sweeps.md").read_text()
    (tree,) = re.findall(r"^```yaml\n(base: .*?)^```$", page, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^    (mpifl: .*)$", page, re.MULTILINE)
    (tmp_path / "which.yaml").write_text(tree.replace("quickstart.yaml", "quickstart"))
    monkeypatch.chdir(tmp_path)
    key, value = re.match(r"mpifl: (\S+) = (\S+):", line).groups()
    command = [
        "sweep",
        "which.yaml",
        "-q",
        "--output.id",
        "x",
        "--rounds",
        "1",
        "--model",
        "{name: mlp, hidden: [4]}",
    ]
    assert cli.main([*command, "--case", "1/12"]) == 0
    capsys.readouterr()
    assert cli.main([*command, f"--{key}", value]) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_the_citation_is_of_this_version():
    assert f"\nversion: {mpifl.__version__}\n" in (ROOT / "CITATION.cff").read_text()


# -- README.md -----------------------------------------------------------------------------------------------

ELSEWHERE = {  # commands of README.md that tests/launchers or nobody can run here
    "git clone ADDRESS mpifl && cd mpifl",
    "./launch/quickstart",
    "TORCH=cpu ./launch/quickstart",
    "./launch/test",
    "source .venv/bin/activate",
    "sbatch --ntasks 9 launch/slurm configs/quickstart.yaml",
    "mpirun -n 3 mpifl doctor",
    "mpirun -n 33 mpifl run CONFIG",
}


def commands() -> list[str]:
    """Return the commands in README.md's shell blocks, without their comments."""
    texts = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def say(tmp_path_factory):
    """Return a function that runs a command of README.md in a folder that all share: what it prints."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")

    def run(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(progress, "LINE_SECONDS", -1.0)  # every round is told of
        program, *words = shlex.split(line)
        assert program == "mpifl"
        words = [
            w for word in words for w in (map(str, sorted(Path().glob(word))) if "*" in word else [word])
        ]
        code = cli.main(words)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_every_command_of_the_readme_is_run_here_or_known_to_be_run_elsewhere():
    assert {line for line in commands() if not line.startswith("mpifl ")} == ELSEWHERE
    kinds = [line.split()[1] for line in commands() if line.startswith("mpifl ")]
    assert kinds == ["run", "plan", "list", "show", "report", "cite", "data"]
    for script in ("launch/quickstart", "launch/test", "launch/slurm", "launch/pbs"):
        assert os.access(ROOT / script, os.X_OK), script


@pytest.fixture(scope="module")
def shown() -> list[str]:
    """Return what README.md says that the quickstart prints, but for the last line."""
    (text,) = re.findall(r"^```\n(round 1/.*?)^results: ", README, re.MULTILINE | re.DOTALL)
    return text.splitlines()


@pytest.mark.nightly
def test_the_quickstart_prints_what_the_readme_shows(say, shown, capsys, monkeypatch):
    said = say("mpifl run configs/quickstart.yaml --output.id shown", capsys, monkeypatch).splitlines()
    rounds = [line for line in said if re.match(r"round \d+/\d+  ", line)]  # of a slow one more is told
    assert len(rounds) == len(shown) == 6
    number = re.compile(r"[\d.]+")
    for line, expected in zip(rounds, shown, strict=True):
        assert number.sub("", line) == number.sub("", expected), "the same words"
        ours, theirs = ([float(x) for x in number.findall(text)] for text in (line, expected))
        np.testing.assert_allclose(ours, theirs, atol=0.004)  # other processors: a few of 1400 test images
    assert said[-1] == "results: runs/quickstart-shown"


@pytest.mark.nightly
def test_the_configuration_line_of_the_readme_makes_the_run_that_it_says(say, capsys, monkeypatch):
    (line,) = (line for line in commands() if line.startswith("mpifl run "))
    say(f"{line} --output.id options --rounds 2", capsys, monkeypatch)
    done = say.folder / "runs" / "quickstart-options"
    config = load(str(done / "config.yaml"))
    assert (config.algorithm.epsilon, config.participation) == (0.02, 0.5)
    assert {*vars(config.seed).values()} == {3}
    the_files_are_those_that_a_page_lists(done)


def the_files_are_those_that_a_page_lists(run: Path) -> None:
    """A run folder has the files of the table in docs/running.md, and no other."""
    page = (ROOT / "docs" / "running.md").read_text()
    (table,) = re.findall(r"The run folder holds:\n\n(.*?)\n\n", page, re.DOTALL)
    named, asked = set[str](), set[str]()  # all, and those that an option of this run would have to ask for
    for row in table.splitlines()[2:]:
        _, files, meaning, *_ = row.split("|")
        names = re.findall(r"`([\w.]+\.\w+)`", files)
        named.update(names)
        asked.update(names if meaning.startswith(" with `") else ())
    there = {path.name for path in run.iterdir()}
    assert len(named) > 10
    assert named - asked <= there
    assert there - named <= {"run.json", "logs"}
    assert not there & asked, "this run asked for none of them"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            *("plan", ["N = 20", "P = 9 (8 with clients)", "federation in all", "memory, server"]),
            marks=pytest.mark.nightly,
        ),
        ("list", [*CATALOGUE]),
        ("show", ["epsilon: float > 0 = 0.025", "@"]),
        pytest.param("report", ["report: runs/report/report.html"], marks=pytest.mark.nightly),
        ("cite", ["@", "Clustered Federated Learning via Embedding Distributions"]),
        pytest.param("data", ["20 clients", "sheet: quickstart-data.png"], marks=pytest.mark.nightly),
    ],
)
def test_other_commands_of_the_readme_say_what_they_are_for(kind, words, say, capsys, monkeypatch):
    (line,) = (line for line in commands() if line.startswith(f"mpifl {kind} "))
    if kind == "report" and not (say.folder / "runs").exists():  # no other test has made a run
        say("mpifl run configs/quickstart.yaml --rounds 1", capsys, monkeypatch)
    said = say(line, capsys, monkeypatch)
    for word in words:
        assert word in said, said
    for file in re.findall(r"(?:report|sheet): (\S+)", said):
        assert (say.folder / file).stat().st_size > 10_000, file


@pytest.mark.nightly(seconds=30)
def test_the_table_of_the_readme_is_that_of_its_runs(say, capsys, monkeypatch):
    """Accuracy in percent with seeds 0, 1, 2."""
    rows = re.findall(
        r"^\| (EMD-CFL|Oracle|FedAvg) \| ([\d., ]+) \| ([\d.]+) \+- ([\d.]+) \| ([\d.]+) \|", README, re.M
    )
    assert len(rows) == 3
    for method, each, mean, spread, worst in rows:
        name = {"EMD-CFL": "emdcfl", "Oracle": "oracle", "FedAvg": "fedavg"}[method]
        option = "" if name == "emdcfl" else f"--algorithm.name {name}"
        found = []
        for seed in (0, 1, 2):
            place = f"--seed {seed} --output.id {name}-{seed}"
            say(f"mpifl run configs/quickstart.yaml -q {option} {place}", capsys, monkeypatch)
            found.append(summary_of(say.folder / "runs" / f"quickstart-{name}-{seed}"))
        accuracy = 100 * np.array([s["accuracy_mean"] for s in found])
        np.testing.assert_allclose(accuracy, [float(x) for x in each.split(", ")], atol=0.4)
        figures = accuracy.mean(), accuracy.std(ddof=1), 100 * np.mean([s["accuracy_worst"] for s in found])
        np.testing.assert_allclose(figures, [float(x) for x in (mean, spread, worst)], atol=0.4)
