"""Pages of the documentation site that are made from the source, as hooks of MkDocs (`mkdocs.yml`).

Commands come from the argument parser, configuration keys from the dataclasses (as in `mpifl show`), columns
of `metrics.csv` from the figures that make them, the API from docstrings. README.md, CONTRIBUTING.md and
CHANGELOG.md become pages, too. Links out of `docs/` lead to these pages, or become plain text.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpifl.cli import parser
from mpifl.experiment.reference import Key, keys
from mpifl.results.columns import MAIN, OF_CLUSTERS, OF_SCORES
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
    return "\n".join(lines)


def _chosen(section: Key) -> list[str]:
    if not section.choices:
        return []
    default = f" Default: `{section.default}`." if section.default else ""
    return [f"`{section.path}.name` is one of {', '.join(f'`{c}`' for c in section.choices)}.{default}", ""]


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
        choices = f" Choices: {', '.join(f'`{c}`' for c in key.choices)}." if key.choices else ""
        examples = f" With a unit: {key.examples}." if key.examples else ""
        default = f"`{_cell(key.default)}`" if key.default else ""
        meaning = f"{_cell(key.meaning)}{choices}{_cell(examples)}"
        yield f"| `{key.path}` | {_cell(key.type)} | {_cell(key.unit)} | {default} | {meaning} |"


def _cell(text: str) -> str:
    """Return a text for a cell of a table: one line, without what Markdown or HTML take as their own."""
    text = " ".join(text.split()).replace("|", "\\|")
    parts = re.split(r"(`[^`]*`)", text)
    special = str.maketrans({"<": "&lt;", "[": "\\[", "*": "\\*"})
    return "".join(p if p.startswith("`") else p.translate(special) for p in parts)


def columns() -> str:
    """Return the page of the columns of `metrics.csv` that an evaluation gives."""
    lines = [
        *("# Columns of metrics.csv", ""),
        "What an evaluation gives, made from the source. `METRIC` is the task's first metric (`accuracy`),",
        "`SCORE` a metric or one on a further set (`accuracy_train`, `accuracy_backdoor`), `OWN` one of your",
        "own. Further columns: `round`, `seconds`, `virtual_seconds`, bytes of the federation, and what",
        "clients and methods report from training, such as `train_loss`.",
        *("", "| columns | meaning |", "|---|---|"),
    ]
    found = {figure.names: figure.meaning for figure in (MAIN, *OF_SCORES, *OF_CLUSTERS)}
    return (
        "\n".join([*lines, *(f"| {_code(names)} | {_cell(text)} |" for names, text in found.items())]) + "\n"
    )


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


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

    def replace(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if place in PAGES:
            place = PAGES[place]
        elif place.startswith("docs/"):
            place = place.removeprefix("docs/")
        else:
            return words
        return f"{image}[{words}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"

    return replace_links(text, replace)


# -- hooks of MkDocs -----------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for page, text in generated().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page."""
    return relinked(markdown, page.file.src_uri)
