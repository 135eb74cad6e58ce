"""Tables of run folders as DataFrames: the types of their columns, and the values that were written."""

from __future__ import annotations

import csv
import math

import pytest
from support.runs import CONFIG

import mpifl
from mpifl.results.frames import frame_of
from mpifl.results.reader import COLUMNS, read_rows

TEXT = """round,seconds,accuracy,bytes,late,placed,trains,name,group,nothing
1,0.5,0.125,9007199254740993,,1,True,,-1,
2,1.0,nan,4,7,0,False,head,0,
"""
TYPES = {
    "round": "int64",
    "seconds": "float64",
    "accuracy": "float64",
    "bytes": "int64",
    "late": "Int64",
    "placed": "bool",
    "trains": "bool",
    "group": "Int64",
    "nothing": "float64",
}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TEXT)
    return path


def test_numbers_are_numbers_and_empty_fields_are_missing(table):
    frame = frame_of(table, ["round"])
    assert {name: str(kind) for name, kind in frame.dtypes.items() if name != "name"} == TYPES
    first, second = frame.to_dict("records")
    assert (first["round"], first["seconds"], first["accuracy"], first["bytes"]) == (1, 0.5, 0.125, 2**53 + 1)
    assert math.isnan(second["accuracy"])
    assert frame.isna().sum().to_dict() == {
        **dict.fromkeys(frame, 0),
        **{"accuracy": 1, "late": 1, "name": 1, "group": 1, "nothing": 2},
    }
    assert second["late"] == 7
    assert (first["placed"], second["placed"], second["trains"]) == (True, False, False)


def test_whole_numbers_written_as_floats_stay_floats(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("loss\n1.0\n\n2.0\n")
    assert str(frame_of(path, ()).dtypes["loss"]) == "float64"


@pytest.mark.parametrize("text", [b"\n", b"\r\n"])
def test_a_table_without_rows_has_the_columns_that_it_must_have(text, tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(text)
    assert read_rows(path) == []
    assert list(frame_of(path, ["a", "b"])) == list(frame_of(tmp_path / "none.csv", ["a", "b"])) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("a,b\n1\n2,3,4\n", "cannot be read"), ("a\n1\n", "no column b"), (b"\xff\xfe,b", "read")],
)
def test_a_damaged_table_names_its_file(tmp_path, text, said):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(mpifl.UserError, match=rf"table\.csv.*{said}"):
        frame_of(path, ["a", "b"])


def test_the_tables_of_runs_hold_what_their_files_say(tmp_path):
    common = {"folder": str(tmp_path)}
    rounds = mpifl.run(str(CONFIG), evaluation={"every": 1}, output={**common, "id": "rounds"})
    buffer = {"name": "buffer", "size": 2}
    events = mpifl.run(str(CONFIG), algorithm="fedbuff", policy=buffer, output={**common, "id": "events"})
    for run in (rounds, events):
        for path in run.folder.glob("*.csv"):
            with path.open(newline="") as lines:
                rows = list(csv.DictReader(lines))
            frame = getattr(run, path.stem)
            assert len(frame) == len(rows), path
            for name in frame if rows else ():
                for written, value in zip((row[name] for row in rows), frame[name], strict=True):
                    if written in ("", "nan"):
                        assert value != value
                    elif isinstance(value, bool):
                        assert written in (str(value), str(int(value)))
                    else:
                        assert value == type(value)(written)
    assert len(rounds.events) == 0
    assert set(COLUMNS["events.csv"]) <= set(rounds.events)
    assert events.events["accepted"].dtype == bool
    assert len(rounds.metrics) == 2
    with pytest.raises(mpifl.UserError, match=r"output\.updates = False: .* output\.updates: true"):
        _ = rounds.updates
    assert "fedavg, 2 rounds" in repr(rounds)
