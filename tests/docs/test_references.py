"""Every file, module, class, command and configuration key that a page names is there."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from support.each import check_each

import mpifl
from mpifl import cli
from mpifl.experiment.schema import CHOICES, Config

ROOT = Path(mpifl.__file__).parents[1]
NAMED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)")
FILE = re.compile(r"(?<![\w./-])(?:mpifl|tests|configs|docs|launch|\.ci)/[\w./*{}-]*[\w*]")
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"(?<![\w./])mpifl(?:\.\w+)+")
KEY = re.compile(r"(?<![\w./`-])--?([a-z_]+(?:\.[a-z_]+)+)|^([a-z_]+\.[a-z_]+)(?=$|:)")
COMMAND = re.compile(r"(?:^|[`( ])mpifl ([a-z]\w*)\b", re.MULTILINE)
PROSE_AFTER_MPIFL = {"gives", "runs", "does", "tells", "takes", "is", "at", "has", "moves", "samples"}


def for_every_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """Make one test of a check of a page, which names the pages that fail."""

    def test() -> None:
        check_each(check, ((page.relative_to(ROOT).as_posix(), (page,)) for page in PAGES))

    test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
    return test


def text_of(page: Path) -> str:
    """Return the text of a page, without its table of old names."""
    return re.sub(r"^## Names of release .*?(?=^## )", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@for_every_page
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@for_every_page
def test_files_are_there(page):
    for name in FILE.findall(text_of(page)):
        if "NAME" not in name and "{" not in name:
            assert any(ROOT.glob(name.rstrip("/."))), name


@for_every_page
def test_dotted_names_resolve(page):
    for name in DOTTED.findall(text_of(page)):
        assert resolved(name), name


def resolved(name: str) -> bool:
    """Return whether `mpifl.a.b` is a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def commands() -> set[str]:
    """Return the commands of the program."""
    parser = cli.parser()
    (sub,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return set(sub.choices)


@for_every_page
def test_commands_are_there(page):
    text = text_of(page)
    blocks = "\n".join([*CODE.findall(text), *re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)])
    named = set(COMMAND.findall(blocks)) - PROSE_AFTER_MPIFL
    assert named <= commands(), named - commands()


def keys(text: str) -> Iterator[str]:
    """Yield the dotted configuration keys in code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for code in [*CODE.findall(text), *blocks]:
        for option, key in KEY.findall(code):
            yield option or key


def is_key(key: str, section: type = Config) -> bool:
    """Return whether a configuration, or a section of it, may have this key."""
    first, _, rest = key.partition(".")
    if section is Config and first == "vary":
        return True
    if first not in {field.name for field in dataclasses.fields(section)}:
        return False
    chosen = CHOICES.get((section, first), {})
    if not rest or (chosen and rest == "name"):
        return True
    hint = get_type_hints(section)[first]
    inner = [*chosen.values()] if chosen else [hint, *get_args(hint)]
    return any(is_key(rest, cls) for cls in inner if dataclasses.is_dataclass(cls))


@for_every_page
def test_keys_are_those_of_a_configuration(page):
    sections, text = {f.name for f in dataclasses.fields(Config)}, text_of(page)
    named = {k for k in keys(text) if k.split(".")[0] in sections and not k.endswith(".safetensors")}
    own = {
        k for k in named if f"\n    {k.split('.')[-1]}: " in text
    }  # a field of a class that the page builds
    wrong = {k for k in named - own if not is_key(k)}
    assert not wrong, wrong


def test_keys_are_looked_up_in_sections_and_choices():
    for key in ("system.sums", "policy.max_staleness", "data.scenario.validation", "local.lr", "delay.sigma"):
        assert is_key(key), key
    for key in ("system.sum", "policy.lateness", "local.lr.x", "data.scenario.nothing"):
        assert not is_key(key), key


def test_the_index_names_every_page():
    folders = ("explanation/decisions", "reproductions", "notes")
    indices = [ROOT / "README.md", *(ROOT / "docs" / folder / "README.md" for folder in folders)]
    linked = {(page.parent / t).resolve() for page in indices for t in LINK.findall(page.read_text())}
    linked |= {ROOT / "docs" / "examples" / "async_study" / "README.md", *indices}
    assert {page for page in PAGES if ROOT / "docs" in page.parents} <= linked
