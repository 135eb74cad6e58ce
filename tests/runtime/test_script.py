"""Scripts under mpirun that call `mpifl.run`: equal results, errors on every rank, one message at the end."""

from __future__ import annotations

import json

import pytest
from support import toy
from support.runs import CONFIG

import mpifl

TEN_LINES = """
import sys
import mpifl

config, folder = sys.argv[1:]
run = mpifl.run(config, rounds=1, output={"folder": folder})
if run is not None:
    print(run.metrics["round"].tolist())
mpifl.run(config, local={"lr": -1.0})
print("never")
"""
PROGRAM = """
import json, os, sys
from pathlib import Path
import mpifl

config, folder = sys.argv[1:]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0)))
said = []

def refused(call, *arguments, **changes):
    try:
        call(*arguments, **changes)
    except mpifl.UserError as error:
        said.append([error.key, str(error.value), error.remedy])

refused(mpifl.run, config, local={"lr": -1.0})
run = mpifl.run(config, output={"folder": folder, "id": "first"})
assert (run is None) == bool(rank)
refused(mpifl.resume if rank == 2 else mpifl.run, config)  # one rank calls another thing
kept = {"folder": folder, "id": "second", "client_models": True}
run = mpifl.run(config, seed=1, algorithm="fedper", output=kept)
Path(folder, f"{rank}.json").write_text(json.dumps(said))
if run is not None:
    raise mpifl.UserError("model", 7, "on rank 0 alone")
"""


@pytest.mark.nightly
def test_ten_lines_that_raise_end_with_one_message(mpirun, tmp_path):
    done = mpirun(2, "-c", TEN_LINES, CONFIG, tmp_path, env=toy.PYTHONPATH, timeout=120)
    assert done.returncode == 2
    assert done.stdout.strip() == "[1]"
    assert done.stderr.count("mpifl: ") == 1
    assert "mpifl: local.lr = -1.0: must be above 0\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_script_goes_on_after_errors_and_ends_with_that_of_one_rank(mpirun, tmp_path):
    done = mpirun(3, "-c", PROGRAM, CONFIG, tmp_path, env=toy.PYTHONPATH, timeout=120)
    assert (done.returncode, done.stderr.count("mpifl: ")) == (2, 1), done.stderr
    assert "mpifl: model = 7: on rank 0 alone\n" in done.stderr
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert said[0] == said[1] == said[2]
    (key, value, remedy), (_, calls, _) = said[0]
    assert (key, value, remedy) == ("local.lr", "-1.0", "must be above 0")
    assert calls == "mpifl.run on rank 0, mpifl.resume on another"
    alone = mpifl.run(str(CONFIG), output={"folder": str(tmp_path), "id": "alone"})
    assert mpifl.load(tmp_path / "tiny-first").summary["digest"] == alone.summary["digest"]
    kept = {"folder": str(tmp_path), "id": "kept", "client_models": True}
    alone = mpifl.run(str(CONFIG), seed=1, algorithm="fedper", output=kept)
    assert mpifl.load(tmp_path / "tiny-second").summary["digest"] == alone.summary["digest"]
    models = [
        (tmp_path / f"tiny-{name}" / "client_models.safetensors").read_bytes() for name in ("second", "kept")
    ]
    assert models[0] == models[1]
