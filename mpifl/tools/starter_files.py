"""`mpifl init`: writes a file to start from, ready to run; `mpifl launch`: job scripts for schedulers."""

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
JOB_SCRIPTS = ("slurm", "pbs", "lsf", "gridengine")  # files of launch/
SHARED = "job.sh"  # what these scripts read when they run
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def init(kind: str, name: str, folder: Path) -> str:
    """Write a file of a kind and return a message with its path and the commands that run it.

    Args:
        kind: a key of `TEMPLATES`.
        name: name of the class, `MyMethod` or `my_method`; the file is `my_method.py`. Empty for `MyMethod`,
            `MyModel`, ...
        folder: where the file is written.

    Raises:
        UserError: there is no such kind, the name cannot be that of a class, it means something else in the
            file or to Python, or the file exists.
    """
    if kind not in TEMPLATES:
        raise UserError("init", kind, nearest(kind, [*TEMPLATES]))
    template = TEMPLATES[kind]
    name = name or f"my_{kind}"
    require(bool(WORD.fullmatch(name)), "NAME", name, "use letters, digits and underscores: MyMethod")
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # MyMethod -> my_method
    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))  # my_method -> MyMethod
    path = folder / f"{word}{Path(template.file).suffix}"
    require(not path.exists(), "NAME", name, f"{path} exists; use another name, or remove it")
    text = files("mpifl.tools").joinpath("templates", template.file).read_text(encoding="utf-8")
    if path.suffix == ".py":
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        remedy = f"{cls} has another meaning in that file; use another name"
        require(not iskeyword(cls) and cls not in names, "NAME", name, remedy)
        remedy = f"a file {path.name} would hide the module {word} from scripts beside it; use another name"
        require(find_spec(word) is None, "NAME", name, remedy)
    text = text.replace(f"my_{kind}", word).replace(f"My{kind.capitalize()}", cls)
    write_atomically(path, text)
    commands = [c.format(file=path.name, name=cls) for c in (template.command, template.further) if c]
    return "\n".join([f"written: {path}", *(f"  {command}" for command in commands)])


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
