"""`mpifl init`: writes a file or package to start from; `mpifl launch`: job scripts for schedulers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from mpifl.core.errors import UserError, nearest, require
from mpifl.core.files import write_atomically


@dataclass(frozen=True)
class Template:
    """A file of `mpifl/tools/templates`.

    Attributes:
        file: its name there.
        command: command that runs the written file; `{file}` and `{name}` are the file and the class in it.
        further: a second command; empty for none.
    """

    file: str
    command: str
    further: str = ""


TEMPLATES = {
    "method": Template(
        "method.py",
        """mpifl run quickstart --algorithm '{{name: "{file}:{name}"}}'""",
        "mpifl check {file}:{name}",
    ),
    "model": Template(
        "model.py", """mpifl run quickstart --model '{{name: custom, path: "{file}:{name}", head: fc}}'"""
    ),
    "data": Template(
        "data.py",
        """mpifl data quickstart --data.source '{{name: dataset, path: "{file}:{name}"}}'""",
        """mpifl run quickstart --data.source '{{name: dataset, path: "{file}:{name}"}}'""",
    ),
    "scenario": Template(
        "scenario.py",
        """mpifl data quickstart --data.scenario '{{name: "{file}:{name}"}}'""",
        """mpifl run quickstart --data.scenario '{{name: "{file}:{name}"}}'""",
    ),
    "sweep": Template("sweep.yaml", "mpifl sweep {file} --list", "mpifl sweep {file}"),
}
PLUGIN = "plugin"
PACKAGE = {  # file of templates/plugin -> where it is written in the folder of the package
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "init.py": "my_plugin/__init__.py",
    "../method.py": "my_plugin/method.py",
    "codec.py": "my_plugin/codec.py",
    "papers.bib": "my_plugin/papers.bib",
    "test_plugin.txt": "tests/test_my_plugin.py",
}
INSTALL: tuple[str, ...] = (
    "pip install --no-build-isolation -e {word}",
    "mpifl check {word}",
    "pytest {word}",
)
KINDS = (*TEMPLATES, PLUGIN)
JOB_SCRIPTS = ("slurm", "pbs", "lsf", "gridengine")  # files of launch/
SHARED = "job.sh"  # what these scripts read when they run
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def init(kind: str, name: str, folder: Path) -> str:
    """Write a file of a kind, or a package, and return a message with its path and the commands that run it.

    Args:
        kind: one of `KINDS`.
        name: name of the class, `MyMethod` or `my_method`; the file is `my_method.py`, a package the folder
            `my_method`. Empty for `MyMethod`, `MyModel`, ...
        folder: where the file is written.

    Raises:
        UserError: there is no such kind, the name cannot be that of a class, it means something else in the
            file, to Python or to mpifl, or the file exists.
    """
    if kind not in KINDS:
        raise UserError("init", kind, nearest(kind, [*KINDS]))
    name = name or f"my_{kind}"
    require(bool(WORD.fullmatch(name)), "NAME", name, "use letters, digits and underscores: MyMethod")
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # MyMethod -> my_method
    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))  # my_method -> MyMethod
    if kind == PLUGIN:
        from mpifl.algorithms.registry import CATALOGUE  # needs PyTorch, which `mpifl launch` does not

        path, parts, commands = folder / word, {f"plugin/{one}": to for one, to in PACKAGE.items()}, INSTALL
        require(word not in CATALOGUE, "NAME", name, "mpifl has a method of that name; use another")
    else:
        template = TEMPLATES[kind]
        path, parts = folder / f"{word}{Path(template.file).suffix}", {template.file: ""}
        commands = tuple(filter(None, (template.command, template.further)))
    require(not path.exists(), "NAME", name, f"{path} exists; use another name, or remove it")
    texts = dict[Path, str]()
    for file, to in parts.items():
        text = files("mpifl.tools").joinpath("templates", file).read_text(encoding="utf-8")
        _check_names(text if file.endswith(".py") else "", cls, name)
        texts[path / _renamed(to, kind, word, cls)] = _renamed(text, kind, word, cls)
    what = f"a {'folder' if kind == PLUGIN else 'file'} {path.name}"
    remedy = f"{what} would hide the module {word} from scripts beside it; use another name"
    require(path.suffix == ".yaml" or find_spec(word) is None, "NAME", name, remedy)
    for place, text in texts.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, text)
    shown = [command.format(file=path.name, name=cls, word=word) for command in commands]
    return "\n".join([f"written: {path}", *(f"  {command}" for command in shown)])


def _renamed(text: str, kind: str, word: str, cls: str) -> str:
    """Return a text of a template with the names that the user gave; a package has its method by name."""
    if kind == PLUGIN:
        text = text.replace("my_method.py:MyMethod", word).replace("my_method", word).replace("MyMethod", cls)
    return text.replace(f"my_{kind}", word).replace(f"My{kind.capitalize()}", cls)


def _check_names(text: str, cls: str, name: str) -> None:
    """Raise `UserError` for the name of a class that has another meaning in a module.

    Args:
        text: the module.
        cls: the class.
        name: the name, as it was given.
    """
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    remedy = f"{cls} has another meaning in that file; use another name"
    require(not iskeyword(cls) and cls not in names, "NAME", name, remedy)


def job_script(name: str) -> str:
    """Return the job script for a scheduler.

    Args:
        name: one of `JOB_SCRIPTS`, or `SHARED`.

    Raises:
        UserError: there is no script with that name.
    """
    if name not in (*JOB_SCRIPTS, SHARED):
        raise UserError("launch", name, nearest(name, [*JOB_SCRIPTS]))
    return files("mpifl").joinpath("launch", name).read_text(encoding="utf-8")
