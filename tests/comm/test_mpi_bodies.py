"""The bodies of `bodies.py` over MPI.COMM_SELF and over 2, 3 and 4 ranks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import worlds

SCRIPT = Path(__file__).with_name("bodies.py")
ENV = {"PYTHONPATH": f"{worlds.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"}
NAMES = [  # read, not imported: importing it would start MPI in this process
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "body" for d in node.decorator_list)
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def results(request, mpirun, tmp_path_factory) -> dict[str, str]:
    """What went wrong in each body."""
    folder = tmp_path_factory.mktemp("bodies")
    done = mpirun(request.param, SCRIPT, folder, timeout=600, env=ENV)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_over_mpi(name, results):
    assert not results[name], results[name]
