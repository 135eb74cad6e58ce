"""The page of `mpifl plan`: its lines add up, its refusals are those of a run.

How well its times hold is measured by `tests/campaigns/forecast.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.experiment import loader
from mpifl.forecast import measured_times
from mpifl.forecast.plan import Asked, describe, seconds_alone

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
HALF = ["--participation", "0.5", "--rounds", "3"]


def page(*options: str, asked: Asked | None = None) -> str:
    """Return the page of the tiny configuration with some options."""
    return describe(loader.load(str(CONFIG), [*options]), Single(), asked)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("{name: emdcfl, sample_cap: 32}", ["3 such rounds", "in pairs, and rounds that differ"]),
        ("ucfl", ["3 such rounds", "once before training"]),
        ("{name: flexcfl, num_groups: 2}", ["3 such rounds"]),
        ("fedavg", []),
    ],
)
def test_the_lines_of_the_traffic_add_up(method, words):
    lines = page("--algorithm", method, *HALF).splitlines()
    sizes = re.compile(r"\((-?\d+) and (-?\d+) bytes\)")
    (total,) = (sizes.search(line).groups() for line in lines if line.startswith("federation in all"))
    parts = [sizes.search(line).groups() for line in lines if re.match(r"  \w.*: .* bytes\)$", line)]
    for word in words:
        assert any(line.startswith(f"  {word}: ") for line in lines), lines
    if words:
        assert [sum(int(part[way]) for part in parts) for way in (0, 1)] == [int(size) for size in total]
    else:
        assert parts == [], "equal rounds are all there is"


def test_a_page_about_arrivals_says_who_mixes_what():
    """Rank 0 mixes two uploads of 910 float32: no collective is chosen, and none is faster than another."""
    buffer = ["--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", "--system.ranks", "3"]
    lines = page(*buffer).splitlines()
    (table,) = (line for line in lines if line.startswith("table "))
    assert table.endswith("mixed from 2 uploads: rank 0 mixes, 7.28 kB come to it")
    assert "federation per step     7.28 kB down, 7.28 kB up" in lines
    assert not any("Reduce" in line for line in lines)
    assert "nothing moves" in page(*buffer, "--system.ranks", "1")
    assert "federation per round" in page(*HALF)


def test_what_clients_keep_has_a_line():
    """SCAFFOLD: 910 float32 a client, of its last two visits; 12 visits in three rounds of four."""
    assert f"client state            {12 * 3640 / 1000:.4g} kB" in page("--algorithm", "scaffold", *HALF)
    assert "client state" not in page(*HALF)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--output.updates", "true", "--algorithm", "fedper"], "output.updates"),
        (["--evaluation.distances", "true", "--algorithm", "fedper"], "evaluation.distances"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(options, word):
    with pytest.raises(UserError, match=word):
        page(*options)


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_a_method_that_divides_by_the_norms_of_mixed_rows_is_planned(measure):
    """A forecast mixes nothing: rows of zeros have norms of zero."""
    method = f"{{name: flexcfl, num_groups: 2, alpha: 4, iterations: 2, eta_g: 0.1, measure: {measure}}}"
    assert "2 rounds" in page("--algorithm", method)


def test_a_plan_refuses_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output\.folder"):
        page("--output.folder", str(tmp_path / "file" / "runs"))


def test_a_plan_refuses_a_name_that_is_taken(tmp_path):
    place = ["--output.folder", str(tmp_path), "--output.id", "a"]
    assert "N = 8" in page(*place)
    assert list(tmp_path.iterdir()) == [], "a plan makes no folder"
    (tmp_path / "tiny-a").mkdir()
    with pytest.raises(UserError, match=r"output\.id"):
        page(*place)


@pytest.mark.parametrize("policy", ["rounds", "every_arrival"])
def test_times_have_a_line_for_each_part_and_a_table(policy, tmp_path):
    options = ["--policy", policy, "--rounds", "4", "--output.folder", str(tmp_path)]
    text = page(*options, asked=Asked(True, (2, 3, 33), 16))
    assert re.search(r"^measured +\d+ visits in ", text, re.M)
    assert re.search(r"^time +\S.* in all: start-up .*, rounds ", text, re.M)
    assert re.search(
        r"^to ask for +--nodes 1 --ntasks 1 --ntasks-per-node 1 --mem \d+M --time \d\d:\d\d:00 ", text, re.M
    )
    assert "nodes of 16 cores" in text
    assert re.search(r"^cores +nodes of 16 cores, as fast as these: one for each rank$", text, re.M)
    rows = re.findall(r"^ +(\d+) +(\d+) +([\d.e-]+) +.*?(\d+)%", text, re.M)
    assert [row[:2] for row in rows] == [("2", "2"), ("3", "3"), ("33", "33")]
    assert rows[0][3] == "100"
    assert re.search("registered clients: 56 bytes .* 448 bytes of these 8 .*, 5.6 GB of 100,000,000", text)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_keeps_the_tables_of_as_few_clients_as_the_run(monkeypatch, tmp_path):
    """All of ten million clients took minutes and gigabytes."""
    seen = []

    class Noted(measured_times.Recorder):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            seen.append(self.written)

    monkeypatch.setattr(measured_times, "Recorder", Noted)
    page("--output.clients", "none", "--output.folder", str(tmp_path), asked=Asked(True))
    assert [list(written) for written in seen] == [[]]


def test_a_page_tells_which_cores_are_shared():
    text = page("--rounds", "2", asked=Asked(True, (2, 5), 2, 1))
    assert re.search(r"^cores +1 node of 2 cores, as fast as these: up to 5 ranks share them$", text, re.M)
    assert [row for row in re.findall(r"^ +(\d+) +(\d+) +[\d.]", text, re.M)] == [("2", "2"), ("5", "2")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--secure_aggregation", "masks"], "masks and key shares of secure_aggregation between 8 clients"),
        (["--robust", "krum"], "distances of krum between 8 clients"),
        (["--robust", "median"], None),
        (["--participation", "0.625", "--robust", "krum"], None),
    ],
)
def test_what_times_leave_out_is_said(options, said, tmp_path):
    text = page(*options, "--rounds", "2", "--output.folder", str(tmp_path), asked=Asked(True))
    line = re.search(r"^not counted +(.*): 6 were measured$", text, re.M)
    assert (line and line[1]) == said


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        # 8 extractors of 780 numbers go to the other worker; 32 of 56 pairs are apart
        (
            "mpi",
            ["56 pairs: extractor by Allgatherv, 24.96 kB to ranks (349.4 kB up", "40.96 kB to the ranks"],
        ),
        # and both embeddings of 32 images and 10 numbers of each pair go to rank 0
        ("{name: mpi, distances: server}", ["24.96 kB to ranks (349.4 kB up", "143.4 kB to the ranks"]),
        ("local", ["nothing moves (system.exchange: local)"]),
    ],
)
def test_a_plan_says_what_second_looks_move_between_ranks(exchange, said):
    method = ("--algorithm", "{name: emdcfl, sample_cap: 32}", "--system.ranks", "3")
    text = page(*method, "--system.exchange", exchange)
    for words in said:
        assert words in text
    assert "second look" not in page("--system.ranks", "3")


def test_a_plan_says_that_second_looks_under_arrivals_are_not_known_before():
    method = ("--algorithm", "{name: emdcfl, sample_cap: 32}", "--policy", "every_arrival")
    for ranks in ("1", "3"):
        text = page(*method, "--system.ranks", ranks)
        (line,) = re.findall("^second look +(.*)$", text, re.M)
        assert line.startswith("who looks at whom follows from the arrivals")
        assert "pairs" not in text


def test_an_asynchronous_run_that_remembers_uploads_has_times():
    """The state from which its first steps are measured has no uploads that are remembered."""
    method, policy = "{name: cfl, warmup: 1, eps1: 100, eps2: 0}", "{name: buffer, size: 2}"
    options = ["--algorithm", method, "--policy", policy, "--delay.name", "exponential", "--rounds", "4"]
    assert 0 < seconds_alone(loader.load(str(CONFIG), options)) < 60
