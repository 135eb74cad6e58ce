"""Any mixture of settings is refused in one line or gives one digest: on one rank, three, and interrupted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from mpi.combinations import draw
from support import toy
from support.runs import assert_same_run

PROGRAM = Path(__file__).parent / "combinations.py"
COUNT = int(os.environ.get("MPIFL_COMBINATIONS", "60"))
SEED = int(os.environ.get("MPIFL_SEED", "0"))
WHO = re.compile(r"client \d+, visit \d+")  # of clients that are refused, whose comes first depends on ranks
PLACES = {"one": (1, "run"), "three": (3, "run"), "stopped": (3, "stop"), "resumed": (1, "resume")}


@pytest.mark.nightly
def test_what_is_drawn_is_refused_in_one_line_or_has_one_digest(mpirun, tmp_path):
    """Runs that end are compared number by number. `MPIFL_SEED` and `MPIFL_COMBINATIONS` draw others."""
    drawn, found = draw(SEED, COUNT), {}
    for place, (ranks, what) in PLACES.items():
        folder = tmp_path / ("stopped" if what == "resume" else place)
        folder.mkdir(exist_ok=True)
        (folder / "drawn.json").write_text(json.dumps(drawn))
        end = mpirun(ranks, PROGRAM, folder, what, timeout=1800, env=toy.PYTHONPATH)
        assert end.returncode == 0, f"{place}: {end.stdout}\n{end.stderr}"
        found[place] = json.loads((folder / f"{what}.json").read_text())
    wrong, ran = [], [number for number, end in found["one"].items() if end == "ok"]
    for number, end in found["one"].items():
        tree = json.dumps(drawn[int(number)])
        stopped = found["stopped"][number]
        again = found["resumed"][number] if stopped == "stopped" else stopped
        if len({WHO.sub("", said) for said in (end, found["three"][number], again)}) > 1 or "\n" in end:
            wrong.append(f"{tree}: {end!r}, on three ranks {found['three'][number]!r}, resumed {again!r}")
        elif end == "ok":
            for place in ("three", "stopped"):
                try:
                    assert_same_run(tmp_path / "one" / f"tiny-{number}", tmp_path / place / f"tiny-{number}")
                except AssertionError as error:
                    wrong.append(f"{tree}, {place}: {error}")
    assert not wrong, "\n\n".join(wrong)
    assert len(ran) >= COUNT // 4, f"only {len(ran)} were not refused"
    assert any(end == "stopped" for end in found["stopped"].values())
