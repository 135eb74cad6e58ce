"""`mpifl docs`: shows the pages of docs/ and the examples installed with mpifl, in a terminal or a pipe."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from mpifl.core.errors import UserError, nearest

FOLDER = (Path(__file__).parents[1] / "docs").resolve()  # a link in a checkout
APART = ("notes", "reproductions")  # folders of records, which are neither listed nor installed
EXAMPLES = (".py", ".yaml", ".ipynb")  # files in docs/examples that are installed with the pages
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
REMARK = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


# -- pages and examples --------------------------------------------------------------------------------------


def pages() -> dict[str, Path]:
    """Return name -> file of every page; a README has the name of its folder."""
    every = (path for path in FOLDER.rglob("*.md") if path.relative_to(FOLDER).parts[0] not in APART)
    names = {_name(path): path for path in every}
    return {name: names[name] for name in sorted(names, key=lambda name: (name.count("/"), name))}


def examples() -> dict[str, Path]:
    """Return name -> file of every example: `examples/echo.py`."""
    found = sorted(path for path in FOLDER.joinpath("examples").rglob("*") if path.suffix in EXAMPLES)
    return {path.relative_to(FOLDER).as_posix(): path for path in found}


def _name(path: Path) -> str:
    place = path.relative_to(FOLDER).with_suffix("")
    return (place.parent if place.name == "README" else place).as_posix()


def listed() -> str:
    """Return a line with name and title for each page, and one for the examples."""
    titles = {name: _title(path.read_text(encoding="utf-8")) for name, path in pages().items()}
    width = max(map(len, titles))
    lines = [f"  {name:{width}}  {title}" for name, title in titles.items()]
    files = ", ".join(name.removeprefix("examples/") for name in examples())
    return "\n".join(
        ["mpifl docs PAGE, which is one of", *lines, f"examples, as mpifl docs examples/FILE: {files}"]
    )


def _title(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def find(name: str) -> Path:
    """Return the file of a page or an example.

    Args:
        name: as `mpifl docs` lists it, a path (`docs/how-to.md`), or its last part if that is unique.

    Raises:
        UserError: there is no such page, or several fit.
    """
    every = pages() | examples()
    word = name.removeprefix("./").removeprefix("docs/").removesuffix(".md").removesuffix("/README")
    if word in every:
        return every[word]
    meant = [known for known in every if known.rpartition("/")[2] == word]
    if len(meant) == 1:
        return every[meant[0]]
    remedy = f"use one of {', '.join(meant)}" if meant else f"{nearest(word, [*every])}; see mpifl docs"
    raise UserError("docs", name, remedy)


def containing(word: str, most: int = 10) -> list[str]:
    """Return `mpifl docs PAGE   heading` for the sections of pages that contain a word, in capitals or not.

    Pages with the word in their name come first, then headings with it, then the sections with it most often.

    Args:
        word: the word, or several.
        most: number of lines.
    """
    wanted = word.lower()
    found: list[tuple[bool, bool, int, int, str, str]] = []
    for name, path in pages().items():
        sections = _sections(path.read_text(encoding="utf-8")) if wanted.strip() else ()
        for i, (heading, text) in enumerate(sections):
            named, headed = i == 0 and wanted in name, wanted in heading.lower()
            count = text.lower().count(wanted)
            if named or headed or count:
                found.append((not named, not headed, -count, len(found), name, heading))
    best = [(name, heading) for *_, name, heading in sorted(found)[:most]]
    width = max((len(name) for name, _ in best), default=0)
    return [f"mpifl docs {name:{width}}   {heading}" for name, heading in best]


def _sections(text: str) -> list[tuple[str, str]]:
    """Return heading and text of each section of a page; a `#` in a block of code is no heading."""
    out = [("", "")]
    code = False
    for line in REMARK.sub("", text).splitlines():
        code ^= line.lstrip().startswith("```")
        if not code and re.match(r"#+ ", line):
            out.append((line.lstrip("# "), ""))
        else:
            out[-1] = (out[-1][0], f"{out[-1][1]}{line}\n")
    return out if out[0][1].strip() else out[1:]


# -- printing ------------------------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    """Return a page with links replaced by the command that shows their target; an example unchanged.

    Links to files that are not installed become plain text, pictures become their description.

    Args:
        path: file of the page or example.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return text
    names = {file.relative_to(FOLDER).as_posix(): name for name, file in (pages() | examples()).items()}
    here = path.parent.relative_to(FOLDER).as_posix()

    def command(found: re.Match[str]) -> str:
        image, words, target = found[1], found[2], found[3]
        name = names.get(posixpath.normpath(posixpath.join(here, target)))
        if image:
            return f"(picture: {words})"
        return f"{words} (`mpifl docs {name}`)" if name else words

    return relinked(REMARK.sub("", text), command)


def relinked(text: str, replace: Callable[[re.Match[str]], str]) -> str:
    """Return Markdown whose relative links are replaced, outside of code blocks.

    Args:
        text: Markdown.
        replace: match of `LINK` -> text. Its groups: `!` of a picture, words, target, anchor or None.
    """
    blocks: Iterable[str] = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(b if b.startswith("```") else LINK.sub(replace, b) for b in blocks)


def show(path: Path) -> None:
    """Print a page, in a pager on a terminal and as Markdown elsewhere; an example unchanged.

    Args:
        path: file of the page or example.
    """
    text = text_of(path)
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-FRX")  # colours; no pager for a short page
    console = Console()
    with console.pager(styles=True):
        page = path.suffix == ".md"
        console.print(
            Markdown(text) if page else text, markup=False, highlight=False, width=min(console.width, 110)
        )
