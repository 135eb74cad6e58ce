"""Commands in README.md and docs/ that are marked with `<!-- test -->` run, in a folder of their own, in
order.

`<!-- test: NAME -->` above a block saves it as NAME there. Links between documents and to files lead
somewhere.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import worlds

import mpifl
from mpifl.algorithms import CATALOGUE
from mpifl.config import Config, build, read

ROOT = Path(mpifl.__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
MARKED = re.compile(
    r"^<!-- test(?:: *(?P<file>\S+))? -->\n+```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)")


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """Return (file, text) of the marked blocks of a page."""
    return [(m["file"], m["text"]) for m in MARKED.finditer(page.read_text())]


def test_marked_blocks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- test -->\n```bash\nls\n```\n```bash\nrm\n```\n<!-- test: x.py -->\n\n```python\n1\n2\n```\n"
    )
    assert blocks(page) == [(None, "ls\n"), ("x.py", "1\n2\n")]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_commands_of_a_page_run(page, mpirun, tmp_path):
    for name in ("configs", "launch", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "bin" / "mpifl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mpifl "$@"\n')
    program.chmod(0o755)
    shell = (
        "import subprocess, sys; sys.exit(subprocess.call(['bash', '-euo', 'pipefail', '-c', sys.argv[1]]))"
    )
    env = {
        **worlds.PYTHONPATH,
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for file, text in blocks(page):
        if file:
            (tmp_path / file).write_text(text)
            continue
        done = mpirun(None, "-c", shell, text, timeout=600, env=env, cwd=tmp_path)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_catalogue_is_in_the_order_of_the_methods_page():
    described, _, measured = (ROOT / "docs" / "methods.md").read_text().partition("## Side by side")
    rows = re.findall(r"^\| `(\w+)` \|", described, re.MULTILINE)
    assert rows == list(CATALOGUE)
    rows = re.findall(r"^\| `(\w+)` \|", measured, re.MULTILINE)
    assert rows == [name for name in CATALOGUE if name != "clustered_async"], "its clusters come from a run"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_has_a_small_configuration(name):
    config = build(Config, read(f"algorithms/{name}"))
    assert (config.name, type(config.algorithm)) == (name, CATALOGUE[name])


def test_the_method_in_the_readme_is_the_one_that_runs():
    assert (ROOT / "mpifl" / "algorithms" / "fedprox.py").read_text() in (ROOT / "README.md").read_text()
