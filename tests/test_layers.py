"""The shape of the code: which way imports flow, where MPI and backward() may occur.

Walks the syntax trees; runs nothing.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import mpifl
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core import algorithm, client, federation
from mpifl.data.scenarios import SCENARIOS
from mpifl.models import MODELS

PACKAGE = Path(mpifl.__file__).parent
ALLOWED: dict[
    str, set[str]
] = {  # package -> packages of ours that it may import; each may import those above it
    "core": set(),
    "kernels": {"core"},
    "clustering": {"core"},
    "data": {"core"},
    "models": {"core"},
    "comm": {"core"},
    "training": {"core", "kernels"},
    "aggregation": {"core", "kernels", "comm"},
    "algorithms": {"core", "training", "clustering"},
    "traffic": {"core", "comm", "aggregation"},
    "supervision": {"core", "comm"},
    "results": {"core", "kernels", "models", "supervision"},
    "analysis": {"core", "results", "supervision"},
    "simulation": {"core", "comm", "traffic"},
    "runtime": {"core", "comm", "aggregation", "traffic", "simulation", "supervision"},
    "protection": {"core", "comm", "aggregation", "traffic", "runtime"},
}
for upper in ("experiment", "forecast", "driver"):
    ALLOWED[upper] = {*ALLOWED}  # all above it
ALLOWED |= {last: {*ALLOWED} for last in ("sweeps", "benchmarks", "tools")}  # all above, not each other
DATA = ("configs", "docs")  # links in a checkout, folders in a source archive
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in DATA)
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in FILES}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file; parsed when it is needed: every test process imports this."""
    return {name: ast.parse(source) for name, source in SOURCES.items()}


@cache
def nodes(name: str) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a file; several tests walk them."""
    return [*ast.walk(trees()[name])]


def room_of(name: str) -> str:
    """Return the package a file lies in; empty for the modules at the top."""
    return name.split("/")[0] if "/" in name else ""


@cache
def imported(name: str) -> set[str]:
    """Return the dotted names a file imports, relative ones resolved, those inside functions included."""
    module = ("mpifl", *Path(name).with_suffix("").parts)
    found = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = module[: len(module) - node.level] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def test_imports_flow_one_way():
    rooms = {room_of(name) for name in SOURCES} - {""}
    assert rooms == set(ALLOWED), "a new package needs its row in the table of allowed imports"
    order = [*ALLOWED]
    for room, below in ALLOWED.items():
        assert below <= {*order[: order.index(room)]}, f"{room} may import what stands above it in the table"
    for name, room in ((n, room_of(n)) for n in SOURCES if room_of(n)):
        targets = {
            parts[1] for target in imported(name) if (parts := target.split("."))[0] == "mpifl" and parts[1:]
        }
        ours = {t for t in targets if (PACKAGE / t).exists() or (PACKAGE / f"{t}.py").exists()}
        assert ours - {room} <= ALLOWED[room], f"{name} imports {sorted(ours - {room} - ALLOWED[room])}"


def modules_imported(name: str) -> set[str]:
    """Return the files of ours that a file imports; a package counts as its `__init__`."""
    found = set()
    for target in imported(name):
        path = Path(*target.split(".")[1:]) if target.startswith("mpifl.") else None
        if path is not None:
            found |= {f for f in (f"{path}.py", f"{path}/__init__.py") if f in SOURCES}
    return found - {name}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    out = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(arrows[node]):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                out.append(sorted(part))

    for node in arrows:
        if node not in order:
            visit(node)
    return out


def test_no_two_modules_import_each_other():
    """Neither directly nor through others; imports for type checking only count."""
    arrows = {name: {t for t in modules_imported(name) if not t.endswith("__init__.py")} for name in SOURCES}
    assert not circles(arrows)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


FILES_OF_A_ROUND, LINES_OF_A_ROUND = (
    43,
    7700,
)  # these may only fall; last raised for what clustering costs, and checkpoints of other versions
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(name: str) -> int:
    """Return the lines of a file that hold code: no blank lines, comments or docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(SOURCES[name]).readline)
    lines = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in nodes(name):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def closure(name: str) -> set[str]:
    """Return the files that a file imports, directly or through others, and itself."""
    closed, left = set(), [name]
    while left:
        name = left.pop()
        closed.add(name)
        left += modules_imported(name) - closed
    return {name for name in closed if not name.endswith("__init__.py")}


def test_a_synchronous_round_closes_over_few_modules_and_trains_through_an_interface():
    files = closure("runtime/synchronous.py")
    assert len(files) <= FILES_OF_A_ROUND
    assert sum(map(code_lines, files)) <= LINES_OF_A_ROUND
    assert not {room_of(name) for name in files} & {"training", "algorithms", "data", "models", "experiment"}


def test_what_writes_a_checkpoint_does_not_know_the_configuration():
    files = closure("driver/checkpoints.py")
    assert len(files) <= 72
    assert not {room_of(name) for name in files} & {"algorithms", "data", "experiment", "forecast"}


def test_only_the_doors_lie_at_the_root():
    assert {name for name in SOURCES if not room_of(name)} == {
        "__init__.py",
        "__main__.py",
        "api.py",
        "cli.py",
    }


def test_the_walk_sees_relative_imports():
    assert "mpifl.aggregation.collective_choice.choose" in imported("aggregation/mixer.py")
    assert "mpifl.core.plan.Mixing" in imported("aggregation/mixer.py")


def test_mpi_is_imported_under_comm_only():
    importers = {n for n in SOURCES if any(t.split(".")[0] == "mpi4py" for t in imported(n))}
    assert importers == {"comm/mpi.py", "comm/mpi_startup.py"}


def callers(*names: str) -> set[str]:
    """Return the files that call a method of one of these names."""
    calls = {name: (c.func for c in nodes(name) if isinstance(c, ast.Call)) for name in SOURCES}
    return {
        n
        for n, funcs in calls.items()
        if any(isinstance(f, ast.Attribute) and f.attr in names for f in funcs)
    }


def words_of(name: str) -> set[str]:
    """Return the names in the code of a file and the words in its texts; docstrings are left out."""
    found: set[str] = set()
    owners = (n for n in nodes(name) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef) and n.body)
    docs = {id(owner.body[0].value) for owner in owners if isinstance(owner.body[0], ast.Expr)}
    for node in nodes(name):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.update(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_core_names_no_method_scenario_or_model():
    """A method, scenario or model is one file: what core must know of it is declared in its base class."""
    words = {"local", "mixed", "partition"}  # names of a method and of scenarios that are also plain words
    known = {*CATALOGUE, *SCENARIOS, *MODELS} - words
    known |= {catalogue[name].__name__ for catalogue in (CATALOGUE, SCENARIOS, MODELS) for name in catalogue}
    found = {name: words_of(name) & known for name in SOURCES if room_of(name) == "core"}
    assert not {name: words for name, words in found.items() if words}
    assert "fedprox" in words_of("algorithms/registry.py") & known


def test_backward_is_called_in_the_loop_and_a_trainer_and_gradients_are_taken_in_one_room():
    assert callers("backward") == {"training/pytorch_backend.py", "training/trainers/pytorch.py"}
    assert {room_of(name) for name in callers("backward", "grad")} == {"training"}


def test_no_bare_except_no_star_import_no_loud_global():
    loud, found = ("warnings.", "random.", "np.random.", "torch.manual_seed"), []
    for name, tree in trees().items():
        for node in nodes(name):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{name}, line {node.lineno}: bare except")
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                found.append(f"{name}, line {node.lineno}: star import")
        for statement in tree.body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith(loud):
                found.append(f"{name}, line {call.lineno}: {ast.unparse(call.func)} at import")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("cls", [algorithm.Algorithm, client.Client, federation.Federation])
def test_abstract_classes_cannot_be_instantiated(cls):
    assert inspect.isabstract(cls)
    with pytest.raises(TypeError, match="abstract"):
        cls()


def test_no_collective_stands_under_a_rank():
    """Rule 14: a verb that all ranks must walk is never inside `if ... is_server` or `if ... rank`."""
    verbs = {
        "bcast",
        "scatter",
        "scatter_rows",
        "gather",
        "gather_rows",
        "barrier",
        "Bcast",
        "Reduce",
        "Gatherv",
        "Reduce_scatter",
        "Alltoallv",
        "bcast_rows",
        "shard",
        "whole",
        "mix",
        "evaluate",
        "gram",
    }
    for name in (
        n for n in SOURCES if room_of(n) in ("runtime", "experiment", "driver", "aggregation", "tools")
    ):
        for branch in (n for n in nodes(name) if isinstance(n, ast.If)):
            if "is_server" in ast.unparse(branch.test) or ".rank" in ast.unparse(branch.test):
                calls = [c.func for stmt in branch.body for c in ast.walk(stmt) if isinstance(c, ast.Call)]
                names = {f.attr for f in calls if isinstance(f, ast.Attribute)}
                assert not names & verbs, f"{name}, line {branch.lineno}: {sorted(names & verbs)}"
