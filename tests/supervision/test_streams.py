"""Outputs that are closed, full or without a reader, of small processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from mpifl.supervision.streams import open_closed, watch_outputs
open_closed()
failed = watch_outputs(needed={needed})
table = open("table.csv", "w")  # would take the number of a closed output
for i in range(20000):
    print("a line of progress")
    if not i % 1000:
        print("a word", file=sys.stderr)
    table.write("a row\\n")
table.close()
sys.stdout.flush()
sys.exit(10 + failed())
"""


def run(tmp_path, needed: bool, how: str) -> tuple[int, str]:
    """Run the program in a shell; return its exit code and what it says on the other output."""
    (tmp_path / "program.py").write_text(PROGRAM.format(needed=needed))
    command = f"{sys.executable} program.py {how}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("how", "fails", "lines"),
    [
        ("> /dev/full", True, 1),
        ("2> /dev/full", True, 1),
        (">&-", False, 0),
        ("2>&-", False, 0),
        ("<&- >&- 2>&-", False, 0),
        ("> /dev/full 2>&1", True, 0),
    ],
)
@pytest.mark.parametrize("needed", [False, True])
def test_what_cannot_be_printed_is_dropped_and_said_once(needed, how, fails, lines, tmp_path):
    code, said = run(tmp_path, needed, how)
    assert code == 10 + (needed and fails), said
    assert said.count("mpifl: ") == lines, said
    assert "Traceback" not in said
    assert set((tmp_path / "table.csv").read_text().splitlines()) == {"a row"}


def test_a_run_goes_on_without_a_reader_and_other_commands_end(tmp_path):
    code, said = run(tmp_path, False, "| head -n 1")
    assert (code, said.count("mpifl: ")) == (10, 1), said
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 20000
    code, said = run(tmp_path, True, "| head -n 1")
    assert (code != 10, "BrokenPipeError" in said) == (True, True)
