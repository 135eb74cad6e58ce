"""Digests of runs limited to AVX2: they are these on every AMD processor with it, and after every commit.

`pytest tests/golden --regolden` writes them anew, after a change that is meant to change numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import toy
from support.runs import CONFIG, RUNS, SCRIPT

from mpifl.results.identity import machine, processor

KNOWN = Path(__file__).parent / "digests_avx2.json"
DECIDE = ("compiler", "torch", "numpy", "scipy", "scikit-learn")  # beside the maker of the processor
# trained by the kernels, by stacks and by PyTorch; with AVX-512 half of them have other digests
FEW = ("fedavg", "scaffold-stacked", "emdcfl-half", "lora", "multi_label-ucfl")
NAMES = (
    *FEW,
    *("ifca", "ucfl", "compressed", "private", "next_token-fedavg"),
    *("fedavg-stacked", "cfl", "pfedgraph", "ucfl-4", "classes", "partial-work", "evaluated"),
    *("regression-ucfl", "classification-ucfl"),
)
HAS_AVX2 = torch.backends.cpu.get_cpu_capability().startswith("AVX")


def here() -> dict[str, str]:
    """Return what decides the last bits of a run that is limited to AVX2."""
    found = machine()
    return {"maker": processor("vendor_id"), **{name: found[name] for name in DECIDE}}


@pytest.mark.in_turn
@pytest.mark.skipif(not HAS_AVX2, reason="the processor has no AVX2")
@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_runs_limited_to_avx2_have_the_known_digests(names, tmp_path, pytestconfig):
    found, new = here(), pytestconfig.getoption("--regolden", default=False)
    known: dict[str, Any] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {"of": found}
    unlike = [name for name in found if found[name] != known["of"].get(name)]
    if unlike and not new:
        pytest.skip(f"known digests are of another machine: {', '.join(unlike)}")
    names = NAMES if new else names
    runs = json.dumps({name: RUNS[name] for name in names})
    environment = {**os.environ, **toy.PYTHONPATH, "MPIFL_INSTRUCTIONS": "avx2"}
    command = [sys.executable, str(SCRIPT), str(CONFIG), str(tmp_path), runs]
    subprocess.run(command, env=environment, check=True, timeout=300)
    digests = {}
    for name in names:
        summary = json.loads((tmp_path / f"tiny-{name}" / "summary.json").read_text())
        assert summary["identity"]["instructions"] == "AVX2 (MPIFL_INSTRUCTIONS)"
        digests[name] = summary["digest"][:16]
    if new:
        KNOWN.write_text(json.dumps({"of": found, "digests": digests}, indent=1) + "\n")
    else:
        assert digests == {name: known["digests"][name] for name in names}
