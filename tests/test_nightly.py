"""The choice of tests: a day of four or of fourteen, and a change brings those that are about it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import nightly
from support.each import for_each

HERE = "tests/test_nightly.py"


@pytest.fixture(scope="module", params=["4 ranks"])
def there(request) -> str:
    """A set-up that costs much."""
    return request.param


def test_no_day_is_empty():
    days = [nightly.day_of(f"tests/mpi/test_{number}.py::test_it") for number in range(200)]
    assert set(days) == set(range(nightly.DAYS))


@pytest.mark.parametrize("n", [1])
def test_what_shares_a_set_up_runs_on_one_day(there, n, request):
    assert nightly.name_of(request.node) == f"{HERE}::['4 ranks']"


@pytest.mark.parametrize("n", [1])
def test_all_parameters_of_a_function_run_on_one_day_unless_they_are_spread(n, request):
    name = f"{HERE}::{request.node.originalname}"
    assert nightly.name_of(request.node) == name
    request.node.add_marker(pytest.mark.nightly(spread=True))
    assert nightly.name_of(request.node) == f"{name}[1]"


class Item:
    """A test of a day, or one near a change, in a session that began so many minutes ago."""

    def __init__(self, file: str, near: bool, minutes: float = 0.0, **mark: float) -> None:
        self.path, self.stash, self.config = Path(file), pytest.Stash(), self
        self.mark = pytest.mark.nightly(**mark).mark
        self.stash[nightly.NEAR] = near
        self.stash[nightly.BEGIN] = time.time() - 60 * minutes

    def getoption(self, name: str) -> float:
        """Return the limit."""
        return {"--minutes": 6.0}[name]

    def get_closest_marker(self, name: str) -> pytest.Mark:
        """Return the mark."""
        assert name == "nightly"
        return self.mark


@pytest.mark.parametrize(
    ("near", "minutes", "runs"), [(False, 5, True), (False, 7, False), (True, 3, True), (True, 5, False)]
)
def test_tests_near_a_change_are_left_out_before_those_of_the_day(near, minutes, runs):
    with nullcontext() if runs else pytest.raises(pytest.skip.Exception, match="no time left"):
        nightly.skip_when_late(Item("a.py", near, minutes))


@pytest.mark.parametrize(("minutes", "runs"), [(4.4, True), (4.6, False)])
def test_a_test_that_would_not_end_in_time_does_not_begin(minutes, runs):
    """It takes a minute and a half of six."""
    with nullcontext() if runs else pytest.raises(pytest.skip.Exception, match="no time left"):
        nightly.skip_when_late(Item("a.py", near=False, minutes=minutes, seconds=90))


def test_files_with_the_longest_tests_of_the_day_come_first():
    items = [Item("a.py", False), Item("b.py", False, seconds=90), Item("c.py", False, seconds=30)]
    order = nightly.order([*items, Item("d.py", True, seconds=200)])
    assert [*order] == [Path("b.py"), Path("c.py"), Path("a.py")]


def test_how_many_were_not_run_is_told():
    def report(why: str) -> SimpleNamespace:
        return SimpleNamespace(longrepr=("nightly.py", 1, f"Skipped: {why}"))

    late = [report(nightly.LATE), report("no GPU"), report(nightly.LATE)]
    assert nightly.told(late).startswith("2 nightly tests were not run")
    assert nightly.told([report("no GPU"), SimpleNamespace(longrepr=None)]) == ""


def test_files_of_the_day_come_in_another_order_in_another_cycle(monkeypatch):
    """A file that is left out for want of time has its turn later."""
    items = [Item(f"test_{name}.py", near=False) for name in "abcdef"] + [Item("near.py", near=True)]
    orders = []
    for cycle in range(4):
        monkeypatch.setattr(nightly, "today", lambda cycle=cycle: (cycle, 0))
        found = nightly.order(items)
        assert sorted(found.values()) == [*range(6)]
        orders.append([*found])
    assert len({order[-1] for order in orders}) > 1


@for_each(
    ("test", "changed", "near"),
    [
        ("tests/traffic/test_ledger.py", ["mpifl/traffic/compression.py"], True),
        ("tests/traffic/test_ledger.py", ["mpifl/simulation/clock.py"], False),
        ("tests/faults/test_deaths.py", ["mpifl/comm/mpi.py"], True),
        ("tests/faults/test_deaths.py", ["tests/faults/test_deaths.py"], True),
        ("tests/faults/test_deaths.py", ["tests/faults/test_cut.py", "docs/running.md"], False),
        ("tests/malformed/test_malformed.py", ["mpifl/cli.py"], True),
        ("tests/launchers/slurm/test_slurm.py", ["launch/job.sh"], True),
        ("tests/launchers/slurm/test_slurm.py", ["configs/async.yaml"], False),
    ],
)
def test_a_test_is_near_a_change_of_what_it_tests(test, changed, near):
    assert nightly.is_near(test, changed) is near


def usual_of(params: list) -> list[str]:
    """Return the names of the parameters that the usual run has."""
    return [param.id for param in params if not param.marks]


def test_few_cases_are_usual_and_each_other_has_a_night_of_its_own():
    params = nightly.mostly_nightly([1, 2, 3, 4], ["n2", 4], "n{}".format)
    assert [param.id for param in params] == ["n1", "n2", "n3", "n4"]
    assert usual_of(params) == ["n2", "n4"]
    assert all(param.marks[0].kwargs["spread"] for param in params if param.marks)
    with pytest.raises(ValueError, match="n5"):
        nightly.mostly_nightly([1, 2], ["n5"], "n{}".format)


def test_few_combinations_are_usual_and_have_every_value():
    params = nightly.covering("abcdef", [1, 2], [1.0, 0.5])
    assert len(params) == 24
    assert usual_of(params) == ["a-1-1.0", "b-2-1.0", "c-1-0.5", "d-2-0.5", "e-1-1.0", "f-2-1.0"]
    assert usual_of(nightly.covering([1, 2], "abc")) == ["1-a", "1-c", "2-b"]


class Case:
    """A test, for what chooses among the usual ones."""

    def __init__(self, nodeid, long=False):
        self.nodeid, self.long = nodeid, long

    def get_closest_marker(self, name):
        assert name == "in_turn"
        return self.long or None


def chosen(day, monkeypatch, changed=(), args_source=nightly.TESTPATHS, **options):
    """Return the names of the tests that run on a day, in their order."""
    few = [Case(f"tests/core/test_a.py::test_few[{number}]") for number in range(2)]
    many = [Case(f"tests/core/test_a.py::test_many[{number}]") for number in range(7)]
    alone, long = Case("tests/data/test_b.py::test_alone"), Case("tests/data/test_b.py::test_long", True)
    option = SimpleNamespace(**{"keyword": "", "markexpr": "not nightly", "in_turn": True, **options})
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    monkeypatch.setattr(nightly, "changed_files", lambda hours: list(changed))
    monkeypatch.setattr(nightly.time, "time", lambda: 86400.0 * day)
    items = [*few, *many, alone, long]
    config = SimpleNamespace(option=option, args_source=args_source, hook=hook, stash=pytest.Stash())
    before = len(items)
    nightly.take_turns(config, items)
    assert config.stash.get(nightly.OTHER_DAYS, 0) == before - len(items)
    return [item.nodeid.split("::test_")[1] for item in items]


def test_in_four_days_all_cases_run_and_on_each_one_of_every_function_but_long_ones(monkeypatch):
    days = [chosen(day, monkeypatch) for day in range(nightly.TURNS)]
    ran = [name for day in days for name in day]
    assert sorted(name for name in ran if name.startswith(("many", "long"))) == [
        *("long", "many[0]", "many[1]", "many[2]", "many[3]", "many[4]", "many[5]", "many[6]")
    ]
    for day in days:
        assert sum(name.startswith("few") for name in day) == 1
        assert sum(name.startswith("many") for name in day) in (1, 2)
        assert "alone" in day
    assert {"few[0]", "few[1]"} < {*ran}


def test_tests_near_a_change_and_those_that_are_asked_for_all_run(monkeypatch):
    everything = 11
    for options in ({"in_turn": False}, {"keyword": "few"}, {"markexpr": "nightly"}, {"args_source": None}):
        assert len(chosen(0, monkeypatch, **options)) == everything
    near = [chosen(day, monkeypatch, ["mpifl/core/rng.py"]) for day in range(nightly.TURNS)]
    assert all(sum("[" in name for name in day) == 9 for day in near)
    assert sum("long" in day for day in near) == 1
