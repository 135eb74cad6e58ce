"""The notebook of docs/examples: kept small and with its outputs, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import toy

import mpifl

NOTEBOOK = Path(mpifl.__file__).parents[1] / "docs" / "examples" / "first_steps.ipynb"


def texts(cells):
    """Return what each code cell printed and showed."""
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
            found.append("".join("".join(part) for part in parts))
    return found


def look(cells):
    """Check the outputs of all cells."""
    kinds = [o["output_type"] for cell in cells if cell["cell_type"] == "code" for o in cell["outputs"]]
    assert "error" not in kinds
    shown = texts(cells)
    progress = shown[1]
    assert "round 15/15  accuracy 0." in progress
    assert not set(progress) & {"\r", "\x1b", "\b"}
    assert "accuracy_mean" in shown[2]
    assert any("image/png" in o.get("data", {}) for cell in cells for o in cell.get("outputs", ()))
    assert "(head): Linear(in_features=32, out_features=10" in shown[5]
    assert "IFCA" in shown[6]
    assert shown[7] == "algorithm.name | fedavgg | unknown name; did you mean 'fedavg'?\n"


def test_the_notebook_is_small_and_has_its_outputs():
    assert NOTEBOOK.stat().st_size < 200_000
    look(json.loads(NOTEBOOK.read_text())["cells"])


@pytest.mark.nightly(seconds=30)
def test_the_notebook_runs_and_runs_again_with_the_runs_that_are_there(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own shows figures in the page
    monkeypatch.setenv("PYTHONPATH", toy.PYTHONPATH["PYTHONPATH"])
    notebook = nbformat.read(NOTEBOOK, 4)

    def execute():
        for cell in notebook.cells:
            if cell["cell_type"] == "code":
                cell["outputs"] = []
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return texts(notebook.cells), sorted((tmp_path / "runs").glob("first-steps-*/summary.json"))

    first, files = execute()
    look(notebook.cells)
    assert len(files) == 2
    written = [file.stat().st_mtime_ns for file in files]
    second, again = execute()
    assert (again, [file.stat().st_mtime_ns for file in again]) == (files, written)
    assert "runs/first-steps-fedavg is complete and reused" in second[1]
    assert second[1].splitlines()[-1] == first[1].splitlines()[-1]
    assert [text for i, text in enumerate(second) if i != 1] == [t for i, t in enumerate(first) if i != 1]
