"""`mpifl docs`: pages and examples in a pipe and on a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.each import for_each

from mpifl.cli import main
from mpifl.core.errors import UserError
from mpifl.tools import documentation

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_listed_with_its_title(capsys):
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    titles = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert len(titles) == len(documentation.pages())
    assert "reproductions" not in titles
    assert titles["how-to"] == "Tasks, one by one"
    assert titles["explanation/decisions"] == "Decisions"
    assert all(titles.values())


@for_each(
    ("name", "file"),
    [
        ("how-to", "how-to.md"),
        ("docs/how-to.md", "how-to.md"),
        ("tutorial/first-run", "tutorial/first-run.md"),
        ("first-run", "tutorial/first-run.md"),
        ("examples", "examples/README.md"),
        ("cluster", "cluster.md"),
        ("examples/echo.py", "examples/echo.py"),
        ("echo.py", "examples/echo.py"),
    ],
)
def test_a_page_is_found_by_its_name_its_path_and_its_last_part(name, file):
    assert documentation.find(name) == documentation.FOLDER / file


def test_a_wrong_name_is_answered_with_the_nearest_in_one_line(capsys):
    assert main(["docs", "howto"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean 'how-to'?" in line


def test_a_word_that_is_no_page_lists_the_sections_that_contain_it(tmp_path, monkeypatch, capsys):
    """First the page with it in its name, then headings, then sections by number; code has no headings."""
    monkeypatch.setattr(documentation, "FOLDER", tmp_path)
    (tmp_path / "a.md").write_text("# A\n\nOne lag.\n\n## Other\n\n```bash\n# lag\nx lag\n```\n")
    (tmp_path / "b.md").write_text("# B\n\nNothing.\n\n## Lag of clients\n\nText.\n")
    (tmp_path / "lags.md").write_text("# Late clients\n\nText.\n")
    assert main(["docs", "LAG"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("mpifl docs ").split(maxsplit=1) for line in lines] == [
        ["lags", "Late clients"],
        ["b", "Lag of clients"],
        ["a", "Other"],
        ["a", "A"],
    ]
    assert main(["docs", "LAG", "--path"]) == 2, "a word has no path"
    assert main(["docs", "nowhere"]) == 2


@pytest.mark.parametrize("word", ["staleness", "csv", "install"])
def test_at_most_ten_places_are_listed_and_each_can_be_read(word, capsys):
    assert main(["docs", word]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 0 < len(lines) <= 10
    assert all(documentation.find(line.split()[2]).is_file() for line in lines)


def test_the_path_of_a_page_and_of_all(capsys):
    assert main(["docs", "how-to", "--path"]) == 0
    assert main(["docs", "--path"]) == 0
    file, folder = map(Path, capsys.readouterr().out.splitlines())
    assert file.read_text() == (ROOT / "docs" / "how-to.md").read_text()
    assert file.parent == folder


@for_each("name", [*documentation.pages()])
def test_links_of_a_printed_page_are_commands_that_show_what_they_name(name):
    """Links to other sites stay; code is as in the file."""
    path = documentation.find(name)
    text = documentation.text_of(path)
    assert "<!--" not in text
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(text) == blocks.findall(path.read_text())
    assert not documentation.LINK.search(blocks.sub("", text))
    for page in re.findall(r"\(`mpifl docs ([^`\s]+)`\)", text):
        assert documentation.find(page).is_file()


def test_a_link_a_picture_and_what_is_not_carried(tmp_path, monkeypatch):
    text = "[costs](../costs.md#a), [code](../../mpifl/cli.py), ![two curves](../x.png), [b](https://b.c)\n"
    monkeypatch.setattr(documentation, "FOLDER", tmp_path)
    (tmp_path / "tutorial").mkdir()
    (tmp_path / "costs.md").write_text("# Costs\n")
    (tmp_path / "tutorial" / "a.md").write_text(text)
    printed = documentation.text_of(tmp_path / "tutorial" / "a.md")
    assert printed == "costs (`mpifl docs costs`), code, (picture: two curves), [b](https://b.c)\n"


def test_two_pages_of_one_last_part_are_both_named(tmp_path, monkeypatch):
    monkeypatch.setattr(documentation, "FOLDER", tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "page.md").write_text("# Page\n")
    with pytest.raises(UserError, match="use one of one/page, two/page"):
        documentation.find("page")


def test_an_example_is_printed_as_it_is(capsys):
    assert main(["docs", "examples/plain_fedavg.py"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "examples" / "plain_fedavg.py").read_text()


@pytest.mark.parametrize("name", ["how-to", "examples/fedavg.yaml"])
def test_a_terminal_has_a_pager(name, tmp_path):
    """`script` gives a terminal; the pager writes what it got to a file."""
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {tmp_path}/page\n")
    pager.chmod(0o755)
    environment = {**os.environ, "PAGER": str(pager), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    program = f"import os, pty; pty.spawn([{sys.executable!r}, '-m', 'mpifl', 'docs', {name!r}])"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
    page = (tmp_path / "page").read_text()
    plain = re.sub(r"\x1b\[[\d;]*m", "", page)
    if name == "how-to":
        assert "Train on my images" in plain
        assert "## Train" not in plain, "Markdown is rendered"
        assert "\x1b[" in page
    else:
        assert plain.split() == (ROOT / "docs" / name).read_text().split()
