"""Commands in one process, and what the program says of itself."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from support.each import check_each
from support.nightly import mostly_nightly

import mpifl
from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.cli import COMMANDS, main
from mpifl.comm.single import Single
from mpifl.core import version
from mpifl.core.errors import UserError
from mpifl.core.textfiles import yaml_file
from mpifl.data import SCENARIOS, SOURCES
from mpifl.driver.resumption import MAY_CHANGE
from mpifl.experiment import citations, reference
from mpifl.experiment.loader import find, load, to_tree
from mpifl.experiment.schema import CHOICES
from mpifl.models import MODELS
from mpifl.simulation.delays import DELAYS
from mpifl.simulation.network import NETWORKS
from mpifl.simulation.policies import POLICIES
from mpifl.training.trainers import TRAINERS

TINY = str(Path(__file__).parent / "configs" / "tiny.yaml")


@pytest.fixture
def said(capsys, monkeypatch):
    """Return a function argv -> what a command that succeeds fingerprints."""
    monkeypatch.setattr(Single, "abort", lambda self, code: None)

    def say(*argv: str) -> str:
        code = main(argv)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return say


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("algorithms", CATALOGUE),
        ("models", MODELS),
        ("data", {**SOURCES, **SCENARIOS}),
        ("policies", POLICIES),
        ("delays", DELAYS),
        ("trainers", TRAINERS),
        ("networks", NETWORKS),
    ],
)
def test_everything_is_listed_with_a_line_of_its_own(what, names, said):
    lines = said("list", what).splitlines()
    for name in names:
        (line,) = (x for x in lines if x.split()[:1] == [name] and x.startswith(" "))
        assert len(line.split()) > 2, line


def test_list_says_what_can_be_listed_and_each_of_them_can(said):
    first, *kinds = said("list").splitlines()
    assert first == "mpifl list WHAT, which is one of"
    assert {"policies", "delays", "networks", "compressions", "configurations", "papers"} < set(
        map(str.strip, kinds)
    )
    for kind in kinds:
        assert len(said("list", kind.strip()).splitlines()) > 1, kind


def test_every_configuration_is_listed_by_the_name_that_runs_it(said):
    *lines, papers = said("list", "configurations").splitlines()
    names = [line.split()[0] for line in lines]
    assert papers.startswith("papers/...")
    assert {"quickstart", "sweeps/methods", "algorithms/fedavg"} < set(names)
    for line in lines:
        assert find(line.split()[0]).is_file()
        assert len(line.split()) > 2, line


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_everything_can_be_shown(everything, said):
    def check(name: str) -> None:
        shown = said("show", name)
        assert shown.startswith(f"{name}\n{'=' * len(name)}\n")
        assert "Fields and defaults:" in shown
        if name in CATALOGUE:
            assert re.search(r"@(article|inproceedings|misc){", shown)

    for registry in (
        CATALOGUE,
        MODELS,
        SOURCES,
        SCENARIOS,
    ):  # the first page of each kind takes most of the time
        check_each(check, ((name, (name,)) for name in [*registry][:: 1 if everything else 5]))


def test_a_class_of_ones_own_can_be_shown(said, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Mine."""\nfrom dataclasses import dataclass\nfrom mpifl.algorithms.fedavg import FedAvg\n\n'
        '@dataclass(frozen=True)\nclass Mine(FedAvg):\n    """What it does."""\n\n    power: float = 0.5\n'
    )
    page = said("show", f"{file}:Mine")
    assert page.startswith(f"{file}:Mine\n====")
    for words in ("\nMine.\n", "What it does.", "\n  power: float = 0.5\n"):
        assert words in page
    with pytest.raises(UserError, match=r"mine\.py:dataclass': is not a component: those are"):
        reference.shown(f"{file}:dataclass")


def test_methods_are_listed_with_year_and_policies_and_chosen_by_words(said):
    def rows(*words: str) -> dict[str, list[str]]:
        lines = [line for line in said("list", "algorithms", *words).splitlines() if line.startswith("  ")]
        return {name: rest for name, *rest in (re.split(r",? +", line.strip()) for line in lines)}

    every = rows()
    assert [*every] == [*CATALOGUE]
    assert every["ifca"][:4] == ["2020", "rounds", "buffer", "every_arrival"]
    assert every["cflgp"][:2] == ["2024", "rounds"]
    assert "buffer" not in every["cflgp"]
    assert every["ccfl"][:2] == ["2024", "every_arrival"]
    assert [*rows("soft")] == ["fedem", "fedsoft", "fedrc", "fedce"]
    assert [*rows("soft", "every_arrival")] == ["fedem", "fedrc"]
    trained = {name for name in every if name not in rows("--trainer", "lightning")}
    assert {"moon", "scaffold", "fednova", "pfedme", "apfl", "fedem"} <= trained  # losses, rates of their own
    assert not {"fedavg", "ifca", "ucfl", "emdcfl", "ccfl", "ditto", "fedrep", "fedasync"} & trained
    adamw = rows("--trainer", "{name: torch, optimizer: AdamW}")
    assert {*rows("--trainer", "torch")} - {*adamw} == {"scaffold", "fednova"}  # they compute with SGD's rate
    for words in (
        ["algorithms", "sft"],
        ["models", "soft"],
        ["papers", "soft"],
        ["models", "--trainer", "torch"],
    ):
        assert main(["list", *words]) == 2


def test_a_configuration_is_cited(said):
    """With all that it uses; what is cited twice stands once, after both."""
    lines = said("cite", TINY, "--model", "lenet5", "--data.source", "mnist").splitlines()
    assert [line for line in lines if line[:1] in ("%", "@")] == [
        "% algorithm fedavg",
        "@inproceedings{mcmahan2017communication,",
        "% model lenet5, data.source mnist",
        "@article{lecun1998gradient,",
    ]
    both = ["--payload.compression", "top_k", "--payload.error_feedback", "true"]
    text = said("cite", TINY, "--algorithm", "fedprox", *both)
    for key in ("li2020federated", "aji2017sparse", "karimireddy2019error"):
        assert f"{{{key}," in text


def test_folders_of_runs_and_sweeps_are_cited(said, tmp_path):
    place = ["--output.folder", str(tmp_path), "--output.id", "x"]
    said("run", TINY, "--algorithm", "ditto", *place)
    assert "@inproceedings{li2021ditto," in said("cite", str(tmp_path / "tiny-x"))
    place[-1] = "y"
    said("sweep", TINY, "--vary.algorithm", "[scaffold, fednova]", *place)
    text = said("cite", str(tmp_path / "tiny-y"))
    assert "% algorithm scaffold\n@inproceedings{karimireddy2020scaffold," in text
    assert "% algorithm fednova\n@inproceedings{wang2020tackling," in text


def test_every_class_cites_an_entry_and_every_entry_is_cited():
    classes = [cls for catalogue in CHOICES.values() for cls in catalogue.values()]
    keys = {cls.paper for cls in classes} - {""}
    optional = {
        "hu2022lora",
        "bai2024federated",
        "cho2024heterogeneous",
        "karimireddy2019error",
        "andrew2021differentially",
        "chai2021fedat",
        "li2017deeper",
    }
    known = re.findall(r"^@\w+{(.+),$", citations.ENTRIES.read_text(), re.MULTILINE)
    assert len(known) == len(set(known))
    assert {*known} == keys | optional
    assert all(citations.entry(key).startswith("@") for key in known)


@pytest.fixture
def ran(said, tmp_path):
    """Return a function options -> the folder of a run."""

    def run(*options: str, config: str = TINY) -> Path:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        out = said("run", config, "--output.folder", str(place), *options)
        (folder,) = place.iterdir()
        assert out.splitlines()[-1].endswith(str(folder)), "the last line names the folder"
        return folder

    return run


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a file of a run."""
    with (folder / name).open() as lines:
        return list(csv.DictReader(lines))


def test_the_resolved_configuration_gives_the_run_again(ran):
    options = [
        "--algorithm",
        "{name: fedprox, mu: 0.3}",
        "--seed",
        "4",
        "--cohort_size",
        "3",
        "--local.lr",
        "0.2",
    ]
    first = ran(*options)
    again = ran(config=str(first / "config.yaml"))
    one, two = (json.loads((f / "summary.json").read_text()) for f in (first, again))
    assert one["digest"] == two["digest"]
    assert one["seed"] == {"data": 4, "model": 4, "training": 4, "system": 4}
    assert (one["algorithm"], one["ranks"], one["rounds"]) == ("fedprox", 1, 2)


@pytest.mark.parametrize("seed", ["data", "model", "training", "system"])
def test_every_seed_matters(seed, ran):
    digests = {
        json.loads((ran("--cohort_size", "4", f"--seed.{seed}", s) / "summary.json").read_text())["digest"]
        for s in ("0", "1")
    }
    assert len(digests) == 2


def test_evaluation_before_the_first_round_and_every_round(ran):
    folder = ran("--evaluation.at_start", "true", "--evaluation.every", "1")
    rows = read(folder, "metrics.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert float(rows[2]["loss"]) < float(rows[0]["loss"])
    assert rows[0]["train_loss"] == ""
    assert float(rows[2]["train_loss"]) > 0
    assert rows[0]["federation_bytes_up"] == "0"


def test_only_some_clients_are_judged(ran):
    clients = read(ran("--evaluation.clients", "3"), "clients.csv")
    assert [row["client"] for row in clients] == ["0", "3", "7"]
    assert {row["group"] for row in clients} == {"0", "1"}


def test_the_final_rows_are_kept_unless_unwanted(ran):
    from safetensors.torch import load_file

    tensors = load_file(ran("--algorithm", "{name: ifca, num_clusters: 2}") / "model.safetensors")
    assert tensors["model"].shape == (2, 910)
    assert tensors["assign"].shape == (8,)
    assert not (ran("--output.model", "false") / "model.safetensors").exists()


@pytest.mark.parametrize(
    "options", [[], ["--algorithm", "ucfl"], ["--algorithm", "{name: ifca, num_clusters: 3}"]]
)
def test_a_plan_forecasts_the_bytes_of_the_run(options, ran, said):
    plan = said("plan", TINY, *options, "--time", "no")
    summary = json.loads((ran(*options) / "summary.json").read_text())
    (line,) = re.findall(r"federation in all +([\d.]+) kB down, ([\d.]+) kB up", plan)
    for told, way in zip(line, ("down", "up"), strict=True):
        assert float(told) == pytest.approx(summary[f"federation_bytes_{way}"] / 1000, rel=1e-3)
    assert "N = 8" in plan
    assert "d = 910" in plan


@pytest.mark.nightly
def test_a_reader_that_leaves_early_is_no_error():
    shell = f"{sys.executable} -m mpifl show fedavg | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("starting:")
    ]  # on a slow machine
    assert (done.stdout, said) == ("0\n", [])


# -- what there is to configure ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said_then"),
    [
        (("runn", "quickstart"), "command = 'runn': did you mean 'run'?"),
        (("run", "quickstart", "--bind-reprot"), "did you mean --bind-report?"),
        (("run", "quickstart", "--resum"), "needs a value; did you mean --resume?"),
        (("report", "x", "--widht", "3"), "did you mean --width?"),
        (("list", "senarios"), "did you mean 'scenarios'?"),
        (("show", "learning_rate"), "local.lr"),
        (("show", "epochs"), "local.epochs"),
        (("show", "zzz"), "`mpifl list keys` has all keys"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_what_is_there(words, said_then, capsys):
    assert main([*words]) == 2
    assert said_then in capsys.readouterr().err


def test_no_command_at_all_is_answered_with_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "cite" in capsys.readouterr().out


def test_the_help_of_a_run_names_every_section_and_how_to_list_all_keys(said):
    keys = reference.keys()
    sections = {key.path for key in keys if key.is_section and "." not in key.path}
    assert set(cli.SECTIONS) == sections
    assert "mpifl list keys" in cli.KEYS
    lines = said("list", "keys").splitlines()
    assert {line.partition(":")[0] for line in lines} == {key.path for key in keys}
    assert len({*lines}) == len(lines) < len(keys), "what is alike in several components is one line"
    (mean,) = (line for line in lines if line.startswith("data.public.mean:"))
    assert "(of all sources)" in mean
    assert any(line.startswith("local.lr: float > 0, default 0.01: learning rate") for line in lines)
    assert said("list", "methods") == said("list", "algorithms")


def test_every_key_is_explained():
    """Type, meaning, and either a default or the word of its section."""
    found = reference.keys()
    assert len({key.path for key in found}) > 150
    assert not [key.path for key in found if not key.meaning]
    assert not [key.path for key in found if not key.type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("local.lr", ["local.lr: float > 0, default 0.01", "learning rate"]),
        ("system.device", ["default auto", "Choices: cpu, cuda, auto"]),
        ("delay", ["lognormal", "delay.median_s: float > 0 finite, in seconds, default 1.0"]),
        ("network.server_bytes_s", ["(of links, tiers, trace)", "in bytes per second"]),
        ("run", ["rounds: int >= 1", "cohort_size: int >= 1 or null, in clients", "policy: section"]),
        ("local", ["Every client trains alone.", "local.epochs"]),
        ("buffer", ["Fields and defaults:", "size"]),
    ],
)
def test_keys_and_sections_are_shown(name, words, said):
    page = said("show", name)
    assert all(word in page for word in words), page


CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def fits() -> Callable[[object], bool]:
    """Return whether a configuration fits the printed schema."""
    text = reference.json_schema()
    assert len(text) < 120_000
    schema = json.loads(text)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema).is_valid


def test_every_shipped_configuration_fits_the_schema(fits):
    assert len(CONFIGS) > 100
    for path in CONFIGS:
        assert fits(yaml_file(path, "CONFIG", typed=True)), path


def test_a_resolved_configuration_fits_the_schema(fits):
    assert fits(to_tree(load(TINY)))


@pytest.mark.parametrize(
    "tree",
    [
        {"round": 3},
        {"rounds": "many"},
        {"rounds": True},
        {"local": {"epoch": 1}},
        {"system": {"device": "tpu"}},
        {"rounds": 0},
        {"local": {"lr": 0}},
        {"local": {"momentum": 1.0}},
        {"evaluation": {"by": ["colour"]}},
        {"algorithm": {"name": "fedprox", "mu": -0.1}},
        {"algorithm": "fedavgg"},
        {"algorithm": {"name": "fedprox", "nu": 1}},
        {"policy": {"name": "buffer", "size": "many"}},
        {"data": {"scenario": {"name": "rotated", "angle": [0]}}},
    ],
)
def test_what_the_loader_refuses_does_not_fit_the_schema(tree, fits):
    assert not fits(tree)


def test_a_class_of_ones_own_fits_the_schema(fits):
    assert fits({"algorithm": {"name": "mine.py:Mine", "strength": 2}, "seed": 3, "base": "x"})


def completed(said, *words: str) -> set[str]:
    """Return what bash offers at the end of a command line."""
    script = f"""{said("completion", "bash")}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
_mpifl; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


def test_bash_completes_commands_options_keys_and_choices(said):
    assert completed(said, "mpifl", "re") == {"resume", "retime", "report"}
    assert completed(said, "mpifl", "run", "x.yaml", "--local.m") == {
        "--local.momentum",
        "--local.milestones",
    }
    assert completed(said, "mpifl", "run", "--bi") == {"--bind-report"}
    assert completed(said, "mpifl", "run", "x.yaml", "--system.sums", "") == {"exact", "fast"}
    assert completed(said, "mpifl", "show", "fedav") == {"fedavg", "fedavg_ft", "fedavg_memory", "fedavgm"}
    assert completed(said, "mpifl", "docs", "ho") == {"how-to"}
    assert completed(said, "mpifl", "list", "po") == {"policies"}
    assert completed(said, "mpifl", "init", "m") == {"method", "model"}
    assert completed(said, "mpifl", "launch", "") == {"slurm", "pbs", "lsf", "gridengine"}
    assert completed(said, "mpifl", "run", "papers/flt/table2-s") == {"papers/flt/table2-standin"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on the PATH")
def test_zsh_completes_too(said, tmp_path):
    """Types a word and a tab at a prompt, and reads what the line becomes."""
    (tmp_path / "completion").write_text(said("completion", "zsh"))
    script = f"""zmodload zsh/zpty
    zpty shell zsh -f
    zpty -w shell 'source {tmp_path}/completion; bindkey "^I" complete-word; PS1="READY "'
    zpty -r shell text '*READY *READY '
    for line in 'mpifl wat' 'mpifl list poli' 'mpifl run x.yaml --local.mom' 'mpifl launch slu'; do
        zpty -w -n shell "echo $line"$'\t'" end"$'\n'
        zpty -r shell text '*end*end*READY '
        echo $text
        zpty -w -n shell "$line"$'\t'$'\x01echo '$'\n'
        zpty -r shell text '*READY '
        echo $text
    done"""
    done = subprocess.run(["zsh", "-fc", script], capture_output=True, text=True, check=True, timeout=60)
    for line in ("mpifl watch", "mpifl list policies", "--local.momentum", "mpifl launch slurm"):
        assert line in done.stdout


# -- the program itself --------------------------------------------------------------------------------------

LIGHT = """
import contextlib, io, sys
from mpifl.cli import main
for words in {!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        assert not main(words)
    print(words, [name for name in {!r} if name in sys.modules])
"""


def heavy(lines: list[list[str]], names: list[str]) -> set[str]:
    """Return which modules are loaded after some commands, each in words, in one new process."""
    code = LIGHT.format(lines, names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == len(lines)
    return {line for line in said if not line.endswith(" []")}


def test_version_and_every_help_import_nothing_heavy():
    helps = [[name, "--help"] for name in COMMANDS]
    loaded = ["torch", "numpy", "mpi4py", "pandas", "scipy", "rich", "yaml"]
    assert heavy([["--version"], ["--help"], *helps], loaded) == set()


def without(packages: list[str], program: str, *words: str) -> str:
    """Return what a program prints where some packages cannot be imported; fails at the line that tries."""
    code = f"import sys; sys.modules |= dict.fromkeys({packages!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


SLOW = [
    "torch",
    "numpy",
    "torchvision",
    "scipy",
    "sklearn",
    "pandas",
    "matplotlib",
    "mpi4py",
    "ot",
    "PIL",
    "umap",
]
PAGES = [
    "list",
    "list keys",
    "list columns",
    "show local",
    "show accuracy_worst",
    "schema",
    "cite quickstart",
    "completion bash",
]


@pytest.mark.parametrize("words", mostly_nightly(PAGES, ["list keys", "show local", "cite quickstart"]))
def test_pages_are_printed_without_pytorch_and_numpy(words):
    """A module that needs them when it is imported is in `cli.DEFERRED`, or imports them in a function."""
    assert without(SLOW, "from mpifl.__main__ import main; main()", *words.split())


def test_every_component_is_described_without_pytorch_and_numpy():
    program = """
from mpifl import cli
from mpifl.core.lazy_imports import defer
defer(*cli.DEFERRED)
from mpifl.experiment import reference
for kind in reference.kinds():
    print(kind == "papers" or reference.listed(kind))
for name in {name for catalogue in reference._catalogues() for name in catalogue}:
    print(reference.shown(name))
"""
    said = without(SLOW, program)
    assert all(name in said for name in [*CATALOGUE, *MODELS, *SOURCES, *SCENARIOS])


def test_watch_launch_and_docs_import_neither_torch_nor_mpi(tmp_path):
    """A sweep of which one run has begun, a run, a job script, and pages."""
    tree = {"name": "s", "vary": {"algorithm": ["fedavg", {"name": "ifca"}], "seed": [0, 1]}}
    (tmp_path / "sweep.yaml").write_text(json.dumps(tree))
    (tmp_path / "s-fedavg-0").mkdir()
    (tmp_path / "s-fedavg-0" / "run.json").write_text("{}")
    words = [["launch", "slurm"], ["docs"], ["docs", "how-to"]]
    words += [["watch", "--once", str(folder)] for folder in (tmp_path, tmp_path / "s-fedavg-0")]
    assert heavy(words, ["torch", "mpi4py", "pandas", "scipy"]) == set()


@pytest.mark.parametrize("command", ["calibrate", "doctor", "schema"])
def test_an_unknown_option_is_refused_before_anything_is_loaded(command, monkeypatch, capsys):
    monkeypatch.setattr("mpifl.comm.connect.connect", None)
    assert main([command, "--no-such-option", *(["."] if command != "doctor" else [])]) == 2
    assert f"{command} does not know it" in capsys.readouterr().err


def test_every_command_has_a_help_that_names_its_options(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = capsys.readouterr().out
        assert f"usage: mpifl {name}" in text
        assert ("CONFIG" not in text) or "mpifl show" in text


def test_the_help_of_resume_names_the_keys_that_may_change(capsys):
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    text = capsys.readouterr().out
    named = {*re.findall(r"(?<!-)\b[\w.]+\b", text.split("-q, --quiet")[1])} & {*MAY_CHANGE}
    assert named >= {"rounds", "stop", "system", "checkpoint", "output", "data.root", "data.cache"}
    assert "local" not in text


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    said = capsys.readouterr().out
    assert said == f"mpifl {version.in_use()}\n"
    assert said.startswith(f"mpifl {mpifl.__version__}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["study", TINY], "command = 'study': known: "),
        (["sweep"], "the following arguments are required: CONFIG"),
        (["doctor", "--witness"], "option = '--witness': doctor does not know it"),
        (["run", "studies/methods"], "no such file; do you mean sweeps/methods.yaml"),
        (["run", TINY, "--system.compiled", "true"], "system.compiled = true: unknown key; known: "),
        (["run", TINY, "--evaluation.first", "true"], "evaluation.first = true: unknown key; known: "),
        (["run", TINY, "--participation", "4"], "use a fraction in (0, 1], or give cohort_size"),
    ],
)
def test_names_of_release_0_1_are_refused_in_a_line(words, said, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
