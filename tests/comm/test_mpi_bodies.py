"""The bodies of `bodies.py` over 3 ranks and, nightly, over MPI.COMM_SELF and over 2 and 4 ranks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support import toy

SCRIPT = Path(__file__).with_name("bodies.py")
ENV = {"PYTHONPATH": f"{toy.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"}
NAMES = [  # read, not imported: importing it would start MPI in this process
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "body" for d in node.decorator_list)
]


LATER = [pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 2, 4)]


@pytest.fixture(scope="module", params=[3, *LATER], ids="{} ranks".format)
def results(request, mpirun, tmp_path_factory) -> dict[str, str]:
    """What went wrong in each body; after one that failed, a new start takes up those behind it."""
    found: dict[str, str] = {}
    while left := [name for name in NAMES if name not in found]:
        folder = tmp_path_factory.mktemp("bodies")
        end = mpirun(request.param, SCRIPT, folder, json.dumps(left), timeout=600, env=ENV)
        notes = [read(folder / f"{rank}.jsonl") for rank in range(request.param)]
        for name in left:
            said = [note.get(name) for note in notes]
            if any(said):
                found[name] = "\n".join(f"rank {r}: {text}" for r, text in enumerate(said) if text)
            elif None not in said:
                found[name] = ""
        if not any(found.get(name) for name in left):  # killed, or ended while waiting
            assert end.returncode == 0, end.stderr
            assert found.keys() >= set(left), end.stderr
    return found


def read(notes: Path) -> dict[str, str]:
    """Return what a rank noted: {body: "" or its traceback}."""
    return dict(json.loads(line) for line in notes.read_text().splitlines()) if notes.exists() else {}


@pytest.mark.parametrize("name", NAMES)
def test_over_mpi(name, results):
    assert not results[name], results[name]


def test_a_body_that_fails_on_one_rank_is_reported_and_the_others_do_not_wait(mpirun, tmp_path):
    """Rank 1 stumbles before a reduction in which rank 0 already waits."""
    program = f"""
import sys; sys.path[:0] = [{str(SCRIPT.parent)!r}]
import bodies
def stumbles(t, folder):
    assert t.rank != 1, "the seventh wave"
    t.Reduce(bodies.torch.zeros(3), "test")
bodies.BODIES["stumbles"] = stumbles
bodies.main(bodies.Path({str(tmp_path)!r}), ["ranks_know_their_place", "stumbles"])
"""
    end = mpirun(2, "-c", program, env=ENV)
    assert end.returncode != 0
    noted = [read(tmp_path / f"{rank}.jsonl") for rank in range(2)]
    assert [note["ranks_know_their_place"] for note in noted] == ["", ""]
    assert "the seventh wave" in noted[1]["stumbles"]
