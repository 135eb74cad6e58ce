"""The documentation site: every page is in its navigation, and it is built without a warning."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import mpifl
from mpifl.experiment.reference import keys
from mpifl.tools.documentation import APART

ROOT = Path(mpifl.__file__).parents[1]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The hooks of the site."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_nav(part: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(part, str):
        yield part
    for below in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from in_nav(below)


def test_every_page_is_in_the_navigation_once_but_for_notes_and_records(site):
    named = [*in_nav(SETTINGS["nav"])]
    assert SETTINGS["not_in_nav"].split() == [f"/{folder}/" for folder in APART]
    paths = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    written = {path.as_posix() for path in paths if path.parts[0] not in APART}
    records = {f"{folder}/README.md" for folder in APART}
    assert sorted(named) == sorted(written | records | set(site.generated())), "mkdocs.yml: nav"
    assert SETTINGS["strict"] is True
    assert SETTINGS["validation"]["nav"]["omitted_files"] == "warn", "with `strict` it fails"


def test_the_reference_has_every_command_and_every_key(site):
    pages = site.generated()
    text = pages["reference/commands.md"]
    from mpifl.cli import COMMANDS

    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [*COMMANDS]
    assert "| `--once` |" in text
    rows = re.findall(
        r"^\| `([\w.]+)`\{ #[\w.-]+ \} \|(.*\|.*\|.*\|.*)\|$",
        pages["reference/configuration.md"],
        re.MULTILINE,
    )
    sections = {key.path for key in keys() if key.is_section and "." not in key.path}
    assert {name for name, _ in rows} == {key.path for key in keys()} - sections
    (rate,) = (row for name, row in rows if name == "local.lr")
    assert "float" in rate
    assert any("in bytes" in row or "bytes per second" in row for _, row in rows)


def test_every_module_of_the_api_is_there(site):
    for _, modules in site.API.values():
        for name in modules:
            assert importlib.util.find_spec(f"mpifl.{name}"), name


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("how-to.md", "[a](../README.md#install)", "[a](index.md#install)"),
        ("tutorial/cluster.md", "[a](../cluster.md)", "[a](../cluster.md)"),
        ("index.md", "![r](docs/explanation/round.svg)", "![r](explanation/round.svg)"),
        ("index.md", "[c](CITATION.cff)", "c"),
        ("sweeps.md", "[e](../configs/papers/x.yaml)", "e"),
        ("contributing.md", "[t](https://x.org/README.md)", "[t](https://x.org/README.md)"),
        ("how-to.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_out_of_the_folder_lead_to_pages_or_are_text(site, page, link, becomes):
    assert site.relinked(link, page) == becomes


def test_the_first_use_of_a_word_leads_to_its_meaning(site):
    words = {"visit": "one local training", "server step": "a change of rows"}
    text = "# A visit\n`visit` [a visit](x.md) revisit\nVisits; a visit\n```\nserver step\n```\na server step"
    assert site.explained(text, "tutorial/a.md", words) == (
        "# A visit\n`visit` [a visit](x.md) revisit\n"
        '[Visits](../glossary.md#visit "one local training"); a visit\n```\nserver step\n```\n'
        'a [server step](../glossary.md#server-step "a change of rows")'
    )


def test_every_word_that_leads_to_the_glossary_has_its_place_there(site):
    page = (ROOT / "docs" / "glossary.md").read_text()
    assert set(site.words_of("glossary.md")) == set(site.EXPLAINED)
    places = re.findall(r'<span id="([\w-]+)">', site.with_places(page))
    assert {word.lower().replace(" ", "-") for word in site.EXPLAINED} <= set(places)
    assert len(places) == len(set(places))


def test_what_markdown_would_take_as_its_own_is_written_as_it_is(site):
    program = argparse.ArgumentParser()
    below = program.add_subparsers()
    below.add_parser("go", description="Go.").add_argument("--far", metavar="KM", help="a|b <c> *d* [e] 5 %%")
    assert "| `--far KM` | a\\|b &lt;c> \\*d\\* \\[e] 5 % |" in site.commands(program)


def test_keys_that_are_alike_are_one_entry_of_the_search_and_all_lead_to_their_rows(site):
    page = site.generated()["reference/configuration.md"]
    rows = set(re.findall(r"\{ #([\w.-]+) \}", page)) | set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    there = [
        {"location": place, "title": "", "text": ""} for place in site.SEARCH["words"] if ".html" in place
    ]
    found = site.searched({"docs": there}, keys())["docs"][len(there) :]
    places = [doc["location"].partition("#")[2] for doc in found]
    assert set(places) <= rows
    assert len(places) == len(set(places))
    (entry,) = (doc for doc in found if doc["location"].endswith("#policy.max_staleness-barrier"))
    assert "waves" in entry["text"]


def test_words_for_a_page_that_is_not_there_are_refused(site):
    with pytest.raises(ValueError, match="nothing is at"):
        site.searched({"docs": []}, keys())


CONFIGURATION, WHERE = (
    "reference/configuration.html",
    {  # query -> what it must find first
        "learning rate": "local.lr",
        "lr": "local.lr",
        "learning rate decay": "local.lr_decay",
        "batch size": "local.batch_size",
        "local epochs": "local.epochs",
        "momentum": "local.momentum",
        "weight decay": "local.weight_decay",
        "optimizer": "local.optimizer",
        "precision": "local.precision",
        "number of rounds": "rounds",
        "number of clients": "data.scenario.clients",
        "number of clusters": "algorithm.num_clusters",
        "clients per round": "cohort_size",
        "participation": "participation",
        "seed": "seed",
        "non-iid": "data.scenario",
        "Dirichlet": "data.scenario.name-dirichlet",
        "dataset": "data.source",
        "FedProx": "algorithm.name-fedprox",
        "early stopping": "stop",
        "checkpoint interval": "checkpoint.every",
        "GPU": "system.device",
        "bandwidth": "network",
        "compression": "payload.compression",
        "buffer size": "policy.size-buffer",
        "kernels": "system.kernels",
        "staleness": "policy.max_staleness",
        "stragglers": "asynchrony.html#delays-how-long-visits-take",
        "resume": "cluster.html#checkpoints",
        "own data from CSV": "how-to.html#train-on-a-csv-file-on-arrays-on-a-dataset",
        "which client is in which cluster": "how-to.html#see-who-is-in-which-cluster",
        "compare two methods with intervals": "how-to.html#compare",
        "compress uploads": "how-to.html#compress-uploads",
        "run on Slurm with 4 nodes": "cluster.html#the-first-day-on-slurm",
        "method that clusters": "tutorial/first-method.html",
        "how many bytes did MPI send": "how-to.html#see-what-mpi-sent",
        "resume a killed job": "cluster.html#checkpoints",
        "RMA": "mpi.html",
        "affinity": "mpi.html#placement-and-binding",
        "Flower": "from-other-simulators.html",
        "Slurm": "cluster.html#the-first-day-on-slurm",
        "custom model": "how-to.html#use-my-model",
        "write a method": "writing-a-method.html",
        "confidence interval": "statistics.html",
        "sweep": "sweeps.html",
        "ledger": "costs.html#the-ledger",
        "differential privacy": "privacy",
    },
)


def searches(folder: Path) -> None:
    """Each query finds its key, or its page, first; asked of the site's own search."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node, which runs the search, is not installed")
    command = [program, str(Path(__file__).parent / "search.mjs"), str(folder), *WHERE]
    answers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    wrong = {}
    for query, place in WHERE.items():
        first = answers[query][0][0] if answers[query] else "nothing"
        wanted = place if ".html" in place else f"{CONFIGURATION}#{place}"
        if first != wanted and not first.startswith(f"{wanted}-"):  # of a component
            wrong[query] = first
    assert wrong == {}


@pytest.mark.nightly(seconds=30)
def test_the_site_is_built_without_a_warning_and_every_link_leads_somewhere(tmp_path):
    """Strict: a page that is not in the navigation, a dead link or anchor, an unreadable docstring fail."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(module, reason="pip install -e '.[docs]'")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    named = {page.replace(".md", ".html").replace("README", "index") for page in in_nav(SETTINGS["nav"])}
    assert named <= pages
    for page in pages:
        text = (tmp_path / "site" / page).read_text()
        for target in re.findall(r'(?:href|src)="([^"#:]+)(?:#[^"]*)?"', text):
            place = (tmp_path / "site" / page).parent / target
            assert place.exists() or page == "404.html", f"{page}: {target}"
    api = (tmp_path / "site" / "reference" / "api" / "methods.html").read_text()
    assert 'id="mpifl.core.algorithm.Algorithm.aggregate"' in api
    searches(tmp_path / "site")
