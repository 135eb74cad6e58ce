"""Runs whose workers host groups of clients: numbers and files are those of one process.

Three of them on three ranks stand in `test_digests.py` (`HOSTED`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import toy
from support.runs import CONFIG, HOSTED, RUNS, SCRIPT, Alone, Runs, columns_of

FEW = ("scaffold", "ucfl", "fedbuff")
ALL = tuple(name for name, options in RUNS.items() if not {"--system.stack", *HOSTED} & {*options})
FILES = ("metrics.csv", "clients.csv", "clusters.csv", "ledger.csv", "visits.csv", "client_traffic.csv")


@pytest.mark.parametrize(("ranks", "names"), [(4, FEW), (6, ALL)], ids=["few-4", "all-6"])
@pytest.mark.nightly
def test_numbers_do_not_depend_on_hosting(ranks: int, names: Sequence[str], mpirun, tmp_path: Path):
    """As alone, where any worker trains anybody; on three ranks, too, groups are not all the same size."""
    cache = ["--data.cache", str(tmp_path / "cache")]
    runs = {name: RUNS[name] for name in names}
    (tmp_path / "alone").mkdir()
    alone, hosted = Alone(tmp_path / "alone", runs, *cache), Runs(tmp_path / "hosted")
    hosted.folder.mkdir()
    program = SCRIPT, CONFIG, hosted.folder, json.dumps(runs)
    options = [*cache, *HOSTED]
    end = mpirun(ranks, *program, *options, timeout=600, env={**toy.PYTHONPATH})
    assert end.returncode == 0, end.stderr
    for name in names:
        assert hosted.summary(name)["ranks"] == ranks
        assert hosted.summary(name)["digest"] == alone.summary(name)["digest"], name
        for file in FILES:
            mine, theirs = (columns_of(found.of(name) / file) for found in (alone, hosted))
            assert mine == theirs, f"{name}: {file}"


@pytest.mark.nightly
def test_the_doctor_shows_the_groups_of_a_job(mpirun):
    """Of 8 clients two workers host 4 each; a run that cannot begin ends all ranks with a message."""
    words = ("-m", "mpifl", "doctor", CONFIG, "--system.hosting", "groups")
    end = mpirun(3, *words, env=toy.PYTHONPATH)
    rows = [line.split()[:2] for line in end.stdout.splitlines()]
    assert rows[-3:-1] == [["1", "4"], ["2", "4"]], end.stderr
    end = mpirun(3, *words, "--cohort_size", "9", env=toy.PYTHONPATH)
    assert (end.returncode, "cohort_size = 9" in end.stderr) == (2, True)
