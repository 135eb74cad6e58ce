"""The run folder's files."""

from __future__ import annotations

import csv
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
from support.runs import CONFIG

import mpifl
from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.core.files import write_json
from mpifl.results import run_folder
from mpifl.results.reader import read_rows
from mpifl.results.run_folder import GrowingCsv, create, write_columns, write_csv


def read(path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_a_growing_file_is_complete_after_each_row(tmp_path):
    file = GrowingCsv(tmp_path / "a.csv")
    file.append({"round": 1, "loss": 0.5})
    assert read(file.path) == [{"round": "1", "loss": "0.5"}]
    file.append({"round": 2, "loss": 0.25}, {"round": 3, "loss": 0.125})
    assert [row["loss"] for row in read(file.path)] == ["0.5", "0.25", "0.125"]
    before = file.path.read_text()
    file.append()
    assert file.path.read_text() == before


def test_a_row_may_bring_or_lack_columns(tmp_path):
    """Before the first round nothing was trained: the first row lacks what the later ones have."""
    file = GrowingCsv(tmp_path / "a.csv")
    file.append({"round": 0, "loss": 2.0})
    file.append({"round": 1, "loss": 1.0, "train_loss": 3.0})
    file.append({"round": 2})
    assert read(file.path) == [
        {"round": "0", "loss": "2.0", "train_loss": ""},
        {"round": "1", "loss": "1.0", "train_loss": "3.0"},
        {"round": "2", "loss": "", "train_loss": ""},
    ]


def test_lines_end_with_a_newline_alone_and_fields_keep_any_character(tmp_path):
    """`cut` and `awk` take a carriage return for a part of the last field."""
    odd = {"name": "x\r", "text": "y\r\nz", "last": 'a,"b"'}
    for path, write in (
        (tmp_path / "rows.csv", lambda path: write_csv(path, [odd, odd])),
        (tmp_path / "grown.csv", lambda path: [GrowingCsv(path).append(odd, odd)]),
        (tmp_path / "columns.csv", lambda path: write_columns(path, {k: [v, v] for k, v in odd.items()})),
    ):
        write(path)
        assert path.read_bytes().startswith(b"name,text,last\n")
        with path.open(newline="") as lines:
            assert [*csv.DictReader(lines)] == [odd, odd]
    write_csv(tmp_path / "none.csv", [])
    assert (tmp_path / "none.csv").read_bytes() == b"\n"


def test_a_table_that_was_begun_with_carriage_returns_goes_on_so(tmp_path):
    """A checkpoint holds its size in bytes: rows that are added, and new columns, leave the others."""
    old = b"round,loss\r\n1,0.5\r\n"
    (tmp_path / "a.csv").write_bytes(old + b"2,0.4\r\n")
    file = GrowingCsv(tmp_path / "a.csv")
    file.truncate(len(old))
    file.append({"round": 2, "loss": 0.25})
    assert file.path.read_bytes() == old + b"2,0.25\r\n"
    file.restore(old)
    file.append({"round": 2, "more": 1})
    assert file.path.read_bytes() == b"round,loss,more\r\n1,0.5,\r\n2,,1\r\n"
    assert read_rows(file.path) == [
        {"round": "1", "loss": "0.5", "more": ""},
        {"round": "2", "loss": "", "more": "1"},
    ]


def test_a_table_has_the_columns_of_all_rows(tmp_path):
    write_csv(tmp_path / "a.csv", [{"a": 1}, {"b": 2}])
    assert read(tmp_path / "a.csv") == [{"a": "1", "b": ""}, {"a": "", "b": "2"}]


def test_runs_that_start_at_one_moment_have_folders_of_their_own(tmp_path):
    """Between the look for a folder and its making another run may make it: they all start at a barrier."""
    ready = Barrier(16)

    def start(_: int) -> Path:
        ready.wait()
        return create(str(tmp_path / "runs"), "run", None)

    with ThreadPoolExecutor(16) as pool:
        folders = set(pool.map(start, range(16)))
    assert len(folders) == 16
    assert all(folder.is_dir() and not list(folder.iterdir()) for folder in folders)


def test_a_row_that_finds_no_room_is_not_there_by_half(tmp_path):
    """Neither where it is appended, nor where the file is written anew for a new column."""
    file = GrowingCsv(tmp_path / "a.csv")
    file.append({"round": 1, "text": "x"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for row in ({"round": 2, "text": "y" * 10000}, {"round": 2, "more": "y" * 10000}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                file.append(row)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert read(file.path) == [{"round": "1", "text": "x"}]
    file.append({"round": 2, "more": "z"})
    assert [row["more"] for row in read(file.path)] == ["", "z"]


def test_a_folder_that_is_there_is_never_used_again(tmp_path):
    create(str(tmp_path), "run", "one")
    with pytest.raises(UserError, match="never overwritten"):
        create(str(tmp_path), "run", "one")


def test_a_folder_in_which_nothing_has_begun_says_how_to_begin_it(tmp_path, capsys):
    """A start that was killed between the folder and `run.json` leaves it so."""
    folder = create(str(tmp_path), "tiny", "one")
    (folder / "config.yaml").write_text(CONFIG.read_text())
    again = r"has not reached its first step; .* --resume begins it again"
    with pytest.raises(UserError, match=again):
        create(str(tmp_path), "tiny", "one")
    with pytest.raises(UserError, match=again):
        run_folder.check(str(tmp_path), "tiny", "one")
    with pytest.raises(UserError, match=f"holds no run yet: .*{again}"):
        run_folder.is_complete(folder)
    place = ["--output.folder", str(tmp_path), "--output.id", "one"]
    assert cli.main(["run", str(CONFIG), "-q", *place, "--resume"]) == 0
    (folder / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"is not a run folder: it has no config.yaml$"):
        run_folder.is_complete(folder)


def test_json_keeps_what_it_cannot_write_as_text(tmp_path):
    write_json(tmp_path / "a.json", {"path": tmp_path, "n": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"path": str(tmp_path), "n": 1}


def test_the_environment_can_be_written_in_utf_8(monkeypatch):
    """Bytes of arguments and variables that are no UTF-8 come into Python as surrogates."""
    monkeypatch.setattr("sys.argv", ["mpifl", "runs/\udcff"])
    monkeypatch.setenv("SLURM_JOB_NAME", "caf\udce9")
    found = run_folder.environment({})
    assert (found["command"][1], found["variables"]["SLURM_JOB_NAME"]) == ("runs/\\udcff", "caf\\udce9")
    json.dumps(found, ensure_ascii=False).encode()


def test_the_commit_is_that_of_the_code_that_the_run_began_with(tmp_path, monkeypatch):
    """A commit that is made while it runs is not what it ran."""
    heads = ["first"]

    class Later:
        def on_round(self, info):
            heads.append("second")

    def git(command, **options):
        return SimpleNamespace(stdout=heads[-1] if "rev-parse" in command else "")

    monkeypatch.setattr(run_folder.subprocess, "run", git)
    run_folder.commit.cache_clear()
    run = mpifl.run(str(CONFIG), output={"folder": str(tmp_path)}, callbacks=[Later()])
    run_folder.commit.cache_clear()
    assert heads[-1] == "second"
    assert json.loads((run.folder / "environment.json").read_text())["git_commit"] == "first"


@pytest.mark.parametrize("rows", [0, 1, 7, 10])
def test_a_table_is_written_some_rows_at_a_time(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "ROWS_AT_A_TIME", 3)
    numbers, names = np.arange(rows) - 2, [f'of "{i}"' for i in range(rows)]
    run_folder.write_columns(tmp_path / "x.csv", {"n": numbers, "even": numbers % 2 == 0, "name": names})
    with (tmp_path / "x.csv").open(newline="") as file:
        header, *found = csv.reader(file)
    assert header == ["n", "even", "name"]
    assert found == [[str(i - 2), str(i % 2 == 0), f'of "{i}"'] for i in range(rows)]
