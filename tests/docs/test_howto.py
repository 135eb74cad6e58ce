"""Every command that a reader of docs/ would type is run, or says in the source of its page why it is not.

Blocks of pages stand below `<!-- test -->` (`test_documents.py` runs them), below `<!-- not run: REASON -->`,
or are run here, in a folder with small runs, pictures and files of the names that pages use. Runs are made
small: one round of a small network, in one process.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mpifl
from mpifl import cli

ROOT = Path(mpifl.__file__).parents[1]
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "reproductions" not in page.parts and "tutorial" not in page.parts
]  # the former are written by `tests/campaigns/record_papers.py`, the latter run as a whole
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n+)?```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LATER = {  # of commands that a page shows beside others -> who runs them
    "mpifl calibrate": "tests/tools, over ranks",
    "--web": "tests/analysis/test_watch.py",
}
SMALL = ["--rounds", "1", "--model", "{name: mlp, hidden: [8]}", "--local.epochs", "1"]


def commands(page: Path) -> list[str]:
    """Return the commands of a page's unmarked blocks, a line each, without comments."""
    texts = [found["text"] for found in BLOCK.finditer(page.read_text()) if not found["mark"]]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def made_small(line: str) -> list[str]:
    """Return the words after `mpifl` of a command, made small, with the names that the folder has."""
    words = shlex.split(re.sub(r"^mpirun -n \d+ ", "", line))
    assert words.pop(0) == "mpifl", line
    names = {"RUN": "runs/a", "SWEEP": "runs/sweep", "runs/quickstart-20261121-053204": "runs/a", "200": "1"}
    words = [names.get(word, word).replace("RUN/", "runs/a/") for word in words]
    words = [p for w in words for p in (map(str, sorted(Path().glob(w))) if w == "runs/*" else [w])]
    given = " ".join(words)
    if words[0] == "run":
        model = "--model" in given or "RUN/" in line
        words += SMALL[:2] + ([] if model else SMALL[2:4]) + SMALL[4:]
    if words[0] == "sweep":
        words += SMALL[:2]
    return words + {"plan": ["--time", "no"], "check": ["--ranks", "1"], "watch": ["--once"]}.get(
        words[0], []
    )


def test_unmarked_blocks_are_found_and_made_small(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "<!-- test -->\n```bash\nls\n```\n<!-- not run: big -->\n```bash\nrm\n```\n"
        "```bash\nmpirun -n 3 mpifl run quickstart \\\n   --seed 1   # why\n```\n"
    )
    assert commands(page) == ["mpirun -n 3 mpifl run quickstart --seed 1"]
    assert made_small(commands(page)[0]) == ["run", "quickstart", "--seed", "1", *SMALL]
    assert made_small("mpifl resume RUN --rounds 200") == ["resume", "runs/a", "--rounds", "1"]


def test_every_mark_of_a_block_is_known_and_every_other_block_is_of_mpifl_alone():
    for page in PAGES:
        marks = [found["mark"] for found in BLOCK.finditer(page.read_text()) if found["mark"]]
        assert all(re.fullmatch(r"test(: \S+)?|not run: .{8,}", mark) for mark in marks), (page, marks)
        for line in commands(page):
            assert re.match(r"(mpirun -n \d+ )?mpifl \w", line), (page, line)


PICTURE = re.compile(r"!\[[^]]*\]\((\S+)\)")
BY_HAND = {"round.svg"}  # a diagram, no figure of a run


def test_every_figure_stands_in_a_section_that_names_its_command():
    seen = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for part in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE):
            for name in PICTURE.findall(part):
                seen.add(Path(name).name)
                assert Path(name).name in BY_HAND or re.search(r"mpifl (sweep|compare|report|data) ", part), (
                    name
                )
    kept = {path.name for folder in ("figures", "images") for path in (ROOT / "docs" / folder).iterdir()}
    assert seen == kept | BY_HAND


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A folder with runs a, b and c, a sweep, pictures of three classes, and the files of the repository."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    rng = np.random.default_rng(0)
    for label in ("cat", "dog", "owl"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(80):
            picture = Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8))
            picture.save(tmp_path / "photos" / label / f"{number}.png")
    for name, algorithm in (("a", "emdcfl"), ("b", "fedavg"), ("c", "ifca")):
        named = ["--output.id", name, "--algorithm.name", algorithm]
        assert cli.main(["run", "quickstart", "-q", *named, *SMALL]) == 0
        Path(f"runs/quickstart-{name}").rename(f"runs/{name}")
    (tmp_path / "two.yaml").write_text("base: quickstart\nname: two\nvary: {seed: [0, 1]}\n")
    assert cli.main(["sweep", "two.yaml", "-q", "--output.id", "x", *SMALL]) == 0
    Path("runs/two-x").rename("runs/sweep")
    capsys.readouterr()
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_commands_of_a_page_do_what_they_say(page, folder, capsys):
    for line in commands(page):
        if any(words in line for words in LATER):
            continue
        code = cli.main(made_small(line))
        captured = capsys.readouterr()
        assert code == 0, f"{line}\n{captured.out}\n{captured.err}"
        assert captured.out, line
