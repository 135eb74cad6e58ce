"""Pages of the documentation site that are made from the source, as hooks of MkDocs (`mkdocs.yml`).

Commands come from the argument parser, configuration keys from the dataclasses (as in `mpifl show`), columns
of run folders from `mpifl/experiment/contents.py`, the API from docstrings. README.md, CONTRIBUTING.md and
CHANGELOG.md become pages, too. Links out of `docs/` lead to these pages, or become plain text. The search
finds every key by its name and meaning, and reference pages before studies and records. Where a page uses a
word of the glossary first, the word leads there.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mpifl.cli import parser
from mpifl.experiment import contents
from mpifl.experiment.reference import Key, keys, shared, summary
from mpifl.experiment.schema import CHOICES
from mpifl.tools.documentation import relinked as replace_links

ROOT = Path(__file__).parents[1]
PAGES = {  # file at the root of the repository -> its page
    "README.md": "index.md",  # the home
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
API: dict[str, tuple[str, tuple[str, ...]]] = {  # page -> title, modules
    "mpifl": (
        "The package",
        ("api", "results.reader", "results.callbacks", "results.run_events", "core.errors"),
    ),
    "methods": (
        "Methods",
        ("core.algorithm", "core.capabilities", "core.client", "core.mixing", "core.types", "core.rng"),
    ),
    "data-and-models": ("Data and models", ("core.federation", "data.scenario", "models.base")),
    "simulation": (
        "Simulation and traffic",
        ("simulation.policies", "simulation.delays", "simulation.network", "traffic.compression"),
    ),
    "results": (
        "Results",
        (
            "results.metrics",
            "analysis.comparison",
            "analysis.statistics",
            "analysis.survival",
            "analysis.export",
        ),
    ),
}


# -- generated pages -----------------------------------------------------------------------------------------


def commands(program: argparse.ArgumentParser) -> str:
    """Return the page of all commands.

    Args:
        program: its parser.
    """
    (below,) = (action for action in program._actions if isinstance(action, argparse._SubParsersAction))
    lines = ["# Commands", "", "`mpifl COMMAND --help` says the same. Made from the argument parser.", ""]
    for name, command in below.choices.items():
        arguments = [a for a in command._actions if not isinstance(a, argparse._HelpAction)]
        words = [_typed(a) for a in arguments if not a.option_strings]
        takes_keys = " [--key value ...]" if command.epilog else ""
        lines += [f"## {name}", "", " ".join((command.description or "").split()), ""]
        lines += ["```", f"{' '.join(['mpifl', name, *words])} [options]{takes_keys}", "```", ""]
        lines += ["| argument | meaning |", "|---|---|"]
        for a in arguments:
            lines.append(f"| `{_typed(a).strip('[]')}` | {_cell((a.help or '').replace('%%', '%'))} |")
        lines += ["", *([command.epilog.replace("\n", " "), ""] if command.epilog else [])]
    return "\n".join(lines)


def _typed(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    if not action.option_strings:
        name = str(action.metavar or action.dest)
        return f"[{name}]" if action.nargs in ("?", "*") else name
    value = "" if action.nargs == 0 else f" {action.metavar or '{' + ','.join(action.choices or ()) + '}'}"
    return f"{', '.join(action.option_strings)}{value}"


def configuration(found: Sequence[Key]) -> str:
    """Return the page of all keys of the configuration, a table a section.

    Args:
        found: the keys, sections before what is in them.
    """
    lines = [
        *("# Configuration", ""),
        "Every key, with its type, unit, default and meaning, as `mpifl show KEY` explains it; made from",
        "the source. Every key is also an option: `--local.lr 0.1`. Keys under the name of a component exist",
        "where its section has that name: `policy: {name: buffer, size: 10}`.",
        "",
    ]
    tops = dict.fromkeys(key.path.partition(".")[0] for key in found)
    plain = [key for key in found if "." not in key.path and not key.is_section]
    lines += ["## Keys in no section", "", *_table(plain), ""]
    for top in tops:
        mine = [key for key in found if key.path == top or key.path.startswith(f"{top}.")]
        if mine[0].is_section:
            head, *rest = mine
            lines += [f"## {top}", "", _cell(head.meaning), "", *_chosen(head)]
            for of, own in _by_component(rest).items():
                lines += [f"### {top}: {of}" if of else "", "", *_table(own), ""]
                for key in own:
                    if key.is_section and key.choices:
                        lines += [f"### {key.path}", "", *_chosen(key)]
    return "\n".join(lines)


def _chosen(section: Key) -> list[str]:
    """Return the table of what a section may be."""
    if not section.choices:
        return []
    default = f" The default is `{section.default}`." if section.default else ""
    rows = (
        f"| `{name}`{{ #{section.path}.name-{name} }} | {_cell(meaning)} |"
        for name, meaning in _summaries(section).items()
    )
    return [f"One of these.{default}", "", f"| {section.path}.name | what |", "|---|---|", *rows, ""]


def _summaries(section: Key) -> dict[str, str]:
    """Return choice of a section -> the first sentence about it."""
    catalogue = next((c for c in CHOICES.values() if section.is_section and tuple(c) == section.choices), {})
    return {name: summary(cls) for name, cls in catalogue.items()}


def _by_component(found: Sequence[Key]) -> Mapping[str, list[Key]]:
    """Return component -> its keys, those of every configuration first; nested sections are keys, too."""
    out: dict[str, list[Key]] = {"": []}
    for key in found:
        out.setdefault(key.of, []).append(key)
    return {of: own for of, own in out.items() if own}


def _table(found: Sequence[Key]) -> Iterator[str]:
    yield "| key | type | unit | default | meaning |"
    yield "|---|---|---|---|---|"
    for key in found:
        listed = key.choices and not key.is_section
        choices = f" Choices: {', '.join(f'`{c}`' for c in key.choices)}." if listed else ""
        name = f"`{key.path}`{{ #{_anchor(key)} }}"
        examples = f" With a unit: {key.examples}." if key.examples else ""
        default = f"`{_cell(key.default)}`" if key.default else ""
        meaning = f"{_cell(key.meaning)}{choices}{_cell(examples)}"
        yield f"| {name} | {_cell(key.type)} | {_cell(key.unit)} | {default} | {meaning} |"


def _anchor(key: Key) -> str:
    """Return where a key is on the page: its path, and the component that has it."""
    return re.sub(r"[^\w.]+", "-", f"{key.path} {key.of}").strip("-")


def _cell(text: str) -> str:
    """Return a text for a cell of a table: one line, without what Markdown or HTML take as their own."""
    text = " ".join(text.split()).replace("|", "\\|")
    parts = re.split(r"(`[^`]*`)", text)
    special = str.maketrans({"<": "&lt;", "[": "\\[", "*": "\\*"})
    return "".join(p if p.startswith("`") else p.translate(special) for p in parts)


def columns() -> str:
    """Return the page of the files of a run folder: the columns of tables, the entries of `summary.json`."""
    lines = [
        *("# Files and columns of a run", ""),
        "Every table of a run folder with its columns, and the entries of `summary.json`, as",
        "`mpifl list columns` and `mpifl show COLUMN` explain them; made from the source. Words in capitals",
        "stand for others:",
        *("", "| word | stands for |", "|---|---|"),
        *(f"| `{word}` | {_cell(text)} |" for word, (text, _) in contents.WORDS.items()),
    ]
    for file, (about, _) in contents.TABLES.items():
        lines += [
            "",
            f"## {file}",
            "",
            f"{_cell(about)}.",
            "",
            "| column | unit | meaning |",
            "|---|---|---|",
        ]
        found = (column for column in contents.columns() if column.file == file)
        lines += [f"| `{c.name}` | {c.unit} | {_cell(c.meaning)} |" for c in found]
    return "\n".join(lines) + "\n"


def api(title: str, modules: Sequence[str]) -> str:
    """Return a page of the API reference, for mkdocstrings to fill.

    Args:
        title: of the page.
        modules: without `mpifl.` in front.
    """
    return "\n\n".join([f"# {title}", *(f"::: mpifl.{name}" for name in modules)]) + "\n"


def generated() -> dict[str, str]:
    """Return page -> Markdown of all pages that are made."""
    return {
        "reference/commands.md": commands(parser()),
        "reference/configuration.md": configuration(keys()),
        "reference/columns.md": columns(),
        **{f"reference/api/{page}.md": api(*what) for page, what in API.items()},
        **{page: (ROOT / file).read_text(encoding="utf-8") for file, page in PAGES.items()},
    }


# -- links ---------------------------------------------------------------------------------------------------


def relinked(text: str, page: str) -> str:
    """Return a page whose links out of `docs/` lead to a page of the site, or are plain text.

    Args:
        text: Markdown.
        page: its place in the site.
    """
    sources = {made: file for file, made in PAGES.items()}
    source = sources.get(page, f"docs/{page}")  # where links of the page start, in the repository

    def replaced(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if place in PAGES:
            place = PAGES[place]
        elif place.startswith("docs/"):
            place = place.removeprefix("docs/")
        else:
            return words
        return f"{image}[{words}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"

    return replace_links(text, replaced)


# -- glossary ------------------------------------------------------------------------------------------------

GLOSSARY = "glossary.md"
EXPLAINED = (  # words of the glossary that have no other meaning elsewhere on the pages
    *(
        "algorithm state",
        "arrival",
        "assignment",
        "censored run",
        "client state",
        "client store",
        "client task",
    ),
    *(
        "cohort",
        "critical difference",
        "digest",
        "exact sum",
        "federation bytes",
        "fingerprint",
        "Gram matrix",
    ),
    *("identity", "ledger", "mixing", "MPI bytes", "one-shot statistics", "policy", "rank", "run folder"),
    *("scenario", "second look", "server step", "sharded table", "staleness", "sweep", "upload trigger"),
    *("virtual time", "visit"),
)
UNEXPLAINED = (
    "changelog",
    "upgrading",
    "notes/",
    "reproductions/",
    "reference/api/",
    "explanation/decisions/",
)
PROTECTED = re.compile(  # words in these stay as they are
    r"""(^```.*?^```$ | ^[ ]{4,}[^\n]*$ | `[^`\n]*`  # code
    | ^\#[^\n]*$ | ^:::[^\n]*$ | <!--.*?-->  # headings, places of the API, comments
    | !?\[[^\]]*\]\([^)]*\) | https?:\S+  # links
    )""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
ROW = re.compile(r"^\| ([^|`]+?) \| (.+) \|$", re.MULTILINE)


def meanings(glossary: str) -> dict[str, str]:
    """Return word -> meaning, as plain text, of the words in `EXPLAINED`.

    Args:
        glossary: Markdown of the page.
    """
    found = {word: text for words, text in ROW.findall(glossary) for word in words.split(", ")}
    plain = {word: re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found[word]) for word in EXPLAINED}
    return {word: _plain(text).replace('"', "'") for word, text in plain.items()}


@cache
def words_of(page: str) -> dict[str, str]:
    """Return the words that a page of `docs/` explains."""
    return meanings((ROOT / "docs" / page).read_text(encoding="utf-8"))


def with_places(glossary: str) -> str:
    """Return the glossary with a place for each row that words lead to."""

    def place(found: re.Match[str]) -> str:
        spans = (f'<span id="{_slug(word)}">{word}</span>' for word in found[1].split(", "))
        return f"| {', '.join(spans)} | {found[2]} |"

    head, mark, rest = glossary.partition("## Words of other programs")
    return ROW.sub(lambda m: m[0] if m[1] in ("word", "---") else place(m), head) + mark + rest


def explained(text: str, page: str, words: Mapping[str, str]) -> str:
    """Return a page in which the first use of each word leads to the glossary, with its meaning at hand.

    Args:
        text: Markdown.
        page: its place in the site.
        words: word -> meaning.
    """
    glossary = posixpath.relpath(GLOSSARY, posixpath.dirname(page) or ".")
    left = dict(words)
    longest = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    use = re.compile(rf"(?<![\w/.`-])({longest})(s?)(?![\w`-])", re.IGNORECASE)

    def link(found: re.Match[str]) -> str:
        word = next(word for word in words if word.lower() == found[1].lower())
        meaning = left.pop(word, None)
        return found[0] if meaning is None else f'[{found[0]}]({glossary}#{_slug(word)} "{meaning}")'

    parts = PROTECTED.split(text)
    return "".join(part if i % 2 else use.sub(link, part) for i, part in enumerate(parts))


def _slug(word: str) -> str:
    return word.lower().replace(" ", "-")


# -- search --------------------------------------------------------------------------------------------------

CONFIGURATION = "reference/configuration.html"
SEARCH = yaml.safe_load((Path(__file__).parent / "search.yaml").read_text(encoding="utf-8"))


def searched(index: Mapping[str, Any], found: Sequence[Key]) -> dict[str, Any]:
    """Return a search index with weights and further words, and an entry for each key and each choice.

    Args:
        index: as MkDocs makes it; the tables of the page on keys are left out, whose rows are entries.
        found: the keys.

    Raises:
        ValueError: words are given for a place that is not there.
    """
    pages = [doc for doc in index["docs"] if not doc["location"].startswith(f"{CONFIGURATION}#")]
    places = {doc["location"] for doc in pages} | {key.path for key in found}
    lost = {*SEARCH["words"]} - places
    if lost:
        raise ValueError(f"docs/search.yaml: words: nothing is at {sorted(lost)}")
    weighed = ({**doc, "boost": _weight(doc["location"]), **_tags(doc["location"])} for doc in pages)
    return {**index, "docs": [*weighed, *_keys(found), *_choices(found)]}


def _weight(place: str) -> float:
    return float(next((w for start, w in SEARCH["weights"].items() if place.startswith(start)), 1.0))


def _tags(place: str) -> dict[str, Any]:
    return {"tags": words} if (words := SEARCH["words"].get(place)) else {}


def _keys(found: Sequence[Key]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each key; one for those of several components that are alike."""
    anchors = {replace(key, of=""): _anchor(key) for key in reversed(found)}
    for key in shared(found, found):
        owners = key.of.split(", ")
        of = key.of if len(owners) < 3 else f"{len(owners)} choices"
        yield {
            "location": f"{CONFIGURATION}#{anchors[replace(key, of='')]}",
            "title": f"{key.path}{f' ({of})' if of else ''}",
            "text": _plain(f"{key.meaning} {' '.join(key.choices)} {key.of}"),
            "boost": SEARCH["keys"]["component" if key.of and not _tags(key.path) else "everywhere"],
            **_tags(key.path),
        }


def _choices(found: Sequence[Key]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each method, model, scenario, ..."""
    for section in found:
        for name, meaning in _summaries(section).items():
            yield {
                "location": f"{CONFIGURATION}#{section.path}.name-{name}",
                "title": f"{section.path}: {name}",
                "text": _plain(meaning),
                "boost": SEARCH["keys"]["choice"],
            }


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


# -- hooks of MkDocs -----------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for page, text in generated().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page, and let words lead to the glossary."""
    place = page.file.src_uri
    text = relinked(markdown, place)
    if place == GLOSSARY:
        return with_places(text)
    return text if place.startswith(UNEXPLAINED) else explained(text, place, words_of(GLOSSARY))


def on_post_build(config: Any) -> None:
    """Let the search find every key; hooks run after plug-ins, which have written its index."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = searched(json.loads(path.read_text(encoding="utf-8")), keys())
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
