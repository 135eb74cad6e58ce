"""Malformed input of every kind: one line on stderr, exit code 2, on all ranks, within seconds.

`python -m pytest -m nightly tests/malformed -s` prints the number of cases and the slowest; MPIFL_SEED takes
another seed.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from malformed import commands, configurations, datafiles, large_numbers, runfolders, tables
from malformed.case import Case
from support import toy

BATCH = Path(__file__).with_name("batch.py")
SEED = int(os.environ.get("MPIFL_SEED", "0"))
SECONDS = 30.0  # of the processor: what hangs or reads without end. A report takes 1 to 6, as the machine is
Make = Callable[[Path, int, int], Iterator[Case]]
KINDS: dict[str, tuple[Make, int]] = {
    "configurations": (configurations.make, 280),
    "large numbers": (large_numbers.make, 0),
    "command lines": (commands.make, 160),
    "data files": (datafiles.make, 150),
    "run folders": (runfolders.make, 120),
    "entries of run folders": (runfolders.entries, 0),
    "tables": (tables.make, 100),
}
pytestmark = pytest.mark.nightly(seconds=60)


def faults(cases: Sequence[Case], answers: Sequence[dict[str, Any]], speaks: bool = True) -> list[str]:
    """Return what is wrong with the answers: another exit code, no line or several, too late."""
    out = []
    for case, answer in zip(cases, answers, strict=False):
        said, code = re.sub(r"^starting: .*\n", "", answer["said"], flags=re.MULTILINE), answer["code"]
        line = re.fullmatch(r"mpifl: [^\n]+\n", said) is not None
        well = code in case.codes and (code == 0 or (line if speaks else said == ""))
        if not well or "Traceback" in said or answer["cpu"] > SECONDS:
            out.append(f"{case.name!r}: {case.argv}: {code}, {answer['cpu']:.1f} s\n{said[-1500:]}")
    if len(answers) < len(cases):
        out.append(f"{cases[len(answers)].name!r} ended the process: {cases[len(answers)].argv}")
    return out


def written(cases: Sequence[Case], folder: Path) -> Path:
    """Write cases for a batch; return the file."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    return folder / "cases.json"


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_input_is_answered_in_one_line(kind, tmp_path, mpirun):
    make, count = KINDS[kind]
    cases = [*make(tmp_path / "input", SEED, count)] if not (tmp_path / "input").mkdir() else []
    done = mpirun(None, BATCH, written(cases, tmp_path), tmp_path, timeout=3000, env=toy.PYTHONPATH)
    answers = json.loads((tmp_path / "0.json").read_text())
    wrong = faults(cases, answers)
    slowest = max(answers, key=lambda a: a["cpu"])
    refused = sum(a["code"] == 2 for a in answers)
    print(
        f"\n{kind}: {len(cases)} cases, {len(cases) - len(wrong)} answered well, {refused} of them refused; "
        f"slowest {slowest['cpu']:.1f} s of the processor, {slowest['seconds']:.1f} s: {slowest['name']}"
    )
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong) + done.stderr[-2000:]


def test_three_ranks_refuse_together_and_one_speaks(tmp_path, mpirun):
    """A sample of all kinds, in one start."""
    cases = []
    for kind, (make, _) in KINDS.items():
        (tmp_path / kind).mkdir()
        some = [*make(tmp_path / kind, SEED + 1, 60)]
        some = [case for case in some if not case.variables and not (case.trains and kind == "run folders")]
        cases += random.Random(SEED).sample(some, min(len(some), 24))
    done = mpirun(3, BATCH, written(cases, tmp_path), tmp_path, timeout=1200, env=toy.PYTHONPATH)
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for answers in zip(*said, strict=False):  # ranks that wait for a slow one keep a processor busy
        least = min(answer["cpu"] for answer in answers)
        for answer in answers:
            answer["cpu"] = least
    last = "".join((tmp_path / f"scratch-{rank}" / "errors").read_text(errors="replace") for rank in range(3))
    for rank, answers in enumerate(said):
        wrong = faults(cases, answers, speaks=not rank)
        assert not wrong, (
            f"rank {rank}: {len(wrong)} of {len(cases)}\n"
            + "\n".join(wrong)
            + f"said last: {last[-1000:]}\n"
            + done.stderr[-2000:]
        )
