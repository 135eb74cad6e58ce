"""A run that is halted after any step, written, read and gone on with is the run that never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import halted
from support import toy
from support.cases import CASES, named
from support.nightly import covering, mostly_nightly

from mpifl.algorithms.cfl import CFL
from mpifl.algorithms.emdcfl import EMDCFL
from mpifl.algorithms.fesem import FeSEM
from mpifl.algorithms.registry import CATALOGUE
from mpifl.simulation.availability import Availability
from mpifl.simulation.client_devices import Alike
from mpifl.simulation.clock import Replay, WallTime
from mpifl.simulation.delays import Exponential
from mpifl.simulation.network import Links
from mpifl.simulation.policies import (
    Barrier,
    Buffer,
    ClientDecides,
    DrawnStaleness,
    EveryArrival,
    OverSelection,
    PartialWork,
    Waves,
)

SLOW = Exponential(mean_s=2.0)


ONE_EACH = [*{case[0]: case for case in reversed(CASES)}.values()]
KEEPING = (  # of the usual run: each kind of what a server or a client keeps
    *("fedavg", "fedavg_memory", "scaffold", "fedavgm", "fedadam", "moon", "emdcfl", "flt", "fedcuau", "cfl"),
    *("ifca", "pacfl", "flexcfl", "fesem", "cflgp", "feddrift", "fielding", "fedem", "fedsoft", "ucfl"),
    *("pfedgraph", "fedfomo", "ditto", "apfl", "fedrep", "fedbn", "fedccfa", "ccfl", "csafl"),
)
FEW = [case for case in ONE_EACH if case[0] in KEEPING]


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("case", mostly_nightly(ONE_EACH, FEW, named))
def test_every_method_goes_on_from_a_saved_state(case, tmp_path):
    name, options = case
    common = {"participation": 0.5, "federation": toy.Tiny(), "algorithm": CATALOGUE[name](**options)}
    one = halted.run(folder=tmp_path / "one", at=-1, **common)
    first = halted.run(folder=tmp_path / "two", at=2, **common)
    then = halted.run(folder=tmp_path / "two", saved=halted.read(tmp_path / "two", 2), at=-1, **common)
    halted.compare(one, first, then)


RULES = {  # method, policy, bytes a second
    "over-selection": ("scaffold", OverSelection(extra=0.67, deadline_s=2.0, late="sent"), 2000.0),
    "partial work": ("scaffold", PartialWork(deadline_s=1.5, stragglers=0.3), 2000.0),
    "uploads that grow": ("fedfomo", PartialWork(deadline_s=70.0), 10.0),  # by the gains
}


@pytest.mark.parametrize("rule", RULES)
def test_rounds_under_a_rule_go_on_from_a_saved_state(rule, tmp_path):
    """Who was left out before meets another delay, also after going on; uploads last as long as before."""
    method, policy, rate = RULES[rule]
    common = {
        "algorithm": CATALOGUE[method](),
        "federation": toy.Tiny(),
        "participation": 0.5,
        "steps": 6,
        "policy": policy,
        "delay": SLOW,
        "network": Links(uplink_bytes_s=rate),
    }
    one = halted.run(folder=tmp_path / "one", at=-1, **common)
    first = halted.run(folder=tmp_path / "two", at=3, **common)
    then = halted.run(folder=tmp_path / "two", saved=halted.read(tmp_path / "two", 3), at=-1, **common)
    halted.compare(one, first, then)


class Numbered(CATALOGUE["fedasync"]):
    """FedAsync that names rows by NumPy's integers."""

    def reads(self, server, k):
        """Download the row of the client."""
        return {"model": (server.assign[k],)}


class Growing(toy.Drifting):
    """At its visit v, a client has other samples than before, and 5 v more."""

    def num_samples(self, k, visit=0):
        """Count without reading."""
        return int(self.sizes[k, 0]) + 5 * visit

    def client(self, k, visit=0):
        """Return the data of one visit."""
        train = toy.draw(f"train{visit}", k, self.num_samples(k, visit), int(self.groups[k]))
        return replace(super().client(k, visit), train=train)


EVENTS = {
    "every arrival": ("fedasync", {"policy": EveryArrival(), "delay": SLOW}),
    "buffer": ("fedbuff", {"policy": Buffer(size=2, max_staleness=1), "delay": SLOW}),
    "ties": ("fedbuff", {"policy": Buffer(size=2)}),
    "state": ("scaffold", {"policy": Buffer(size=2), "delay": SLOW}),
    "barrier": ("scaffold", {"policy": Barrier(), "delay": SLOW}),
    "mixtures": ("fedem", {"policy": Buffer(size=2), "delay": SLOW}),
    "waves": ("fedbuff", {"policy": Waves(size=3), "delay": SLOW}),
    "waves in time": ("fedbuff", {"policy": Waves(every_s=0.7), "delay": SLOW, "participation": 0.67}),
    "client decides": ("local", {"policy": ClientDecides()}),
    "uploads that grow": ("fedfomo", {"policy": Barrier(), "network": Links(uplink_bytes_s=900.0)}),
    "rows as numbers of NumPy": (Numbered(), {"policy": EveryArrival(), "delay": SLOW}),
    "drawn staleness": ("fedasync", {"policy": DrawnStaleness(most=4)}),
    "uploads that are compared": (CFL(1e9, 0.0, 2, max_age=None), {"policy": EveryArrival(), "delay": SLOW}),
    "uploads that are mixed": (FeSEM(2), {"policy": Buffer(size=2), "delay": SLOW}),
    "looks": (EMDCFL(epsilon=0.5), {"policy": EveryArrival(), "delay": SLOW}),
    "looks that last": (
        EMDCFL(epsilon=0.5, looks="seen"),
        {
            "policy": EveryArrival(),
            "delay": SLOW,
            "cohort_size": 4,
            "network": Links(uplink_bytes_s=2000.0),
            "costs": "all",
            "devices": Alike(watts=3.0),
        },
    ),
    "link": (
        "ifca",
        {
            "policy": EveryArrival(),
            "delay": SLOW,
            "network": Links(uplink_bytes_s=2000.0, latency_s=0.05),
            "availability": Availability(on_s=3.0, off_s=2.0),
        },
    ),
}


@pytest.mark.parametrize(("name", "at"), covering([*EVENTS], [1, 5]))
def test_events_go_on_from_a_saved_state(name, at, tmp_path):
    """Visits under way at that moment are made again, from what they had read."""
    method, changes = EVENTS[name]
    algorithm = CATALOGUE[method]() if isinstance(method, str) else method
    common = {"algorithm": algorithm, "federation": Growing(), "steps": 8, **changes}
    one = halted.run(folder=tmp_path / "one", at=-1, **common)
    first = halted.run(folder=tmp_path / "two", at=at, **common)
    saved = halted.read(tmp_path / "two", at)
    nobody_under_way = ("barrier", "uploads that grow", "ties", "drawn staleness")
    assert len(saved.values["visits"]) > 0 or name in nobody_under_way
    owing = [(down > 0, up > 0, work > 0) for _, down, up, work in saved.values["owed"]]
    assert ((True, True, True) in owing) == (name == "looks that last" and at == 5)
    then = halted.run(folder=tmp_path / "two", saved=saved, at=-1, **common)
    halted.compare(one, first, then)


def as_trace(rows: list[dict], path: Path) -> Replay:
    """Write arrivals as a run folder has them; return the clock that follows them."""
    lines = [",".join(map(str, row.values())) for row in rows]
    path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return Replay(str(path))


@pytest.mark.parametrize(
    ("method", "policy"), [("fedasync", EveryArrival()), ("scaffold", Buffer(size=2))], ids=["each", "two"]
)
def test_a_run_on_the_wall_clock_goes_on_and_loses_nothing(method, policy, tmp_path):
    """The order of arrivals is never the same twice; but what came before and after the halt is one run: its
    times go up, each client's visits are counted through, and the replay of all has the same rows.
    """
    common = {"algorithm": CATALOGUE[method](), "federation": toy.Tiny(), "policy": policy, "steps": 8}
    real = {"delay": SLOW, "clock": WallTime(scale=0.005)}
    first = halted.run(folder=tmp_path / "two", at=3, **common, **real)
    saved = halted.read(tmp_path / "two", 3)
    assert saved.values["visits"]
    then = halted.run(folder=tmp_path / "two", saved=saved, at=-1, **common, **real)
    rows = first.arrivals + then.arrivals
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    for k in {row["client"] for row in rows}:
        own = [row["visit"] for row in rows if row["client"] == k]
        assert own == [*range(len(own))]
    clock = as_trace(rows, tmp_path / "events.csv")
    again = halted.run(folder=tmp_path / "again", at=-1, **common, clock=clock)
    assert again.arrivals == rows
    toy.same(toy.state_of(again.server), toy.state_of(then.server))


def test_a_replay_goes_on_from_a_saved_state(tmp_path):
    common = {"algorithm": CATALOGUE["fedasync"](), "federation": toy.Tiny(), "steps": 8}
    done = halted.run(folder=tmp_path / "one", at=-1, policy=EveryArrival(), delay=SLOW, **common)
    clock = as_trace(done.arrivals, tmp_path / "events.csv")
    common |= {"clock": clock, "policy": EveryArrival(), "steps": 6}
    one = halted.run(folder=tmp_path / "r", at=-1, **common)
    first = halted.run(folder=tmp_path / "two", at=3, **common)
    then = halted.run(folder=tmp_path / "two", saved=halted.read(tmp_path / "two", 3), at=-1, **common)
    halted.compare(one, first, then)


def test_going_on_twice_is_going_on_once(tmp_path):
    """State of clients that was never visited since the first halt is found after the second."""
    method = CATALOGUE["scaffold"]()
    common = {"participation": 0.34, "federation": toy.Tiny(), "algorithm": method, "steps": 8}
    one = halted.run(folder=tmp_path / "one", at=-1, **common)
    halted.run(folder=tmp_path / "two", at=4, **common)
    halted.run(folder=tmp_path / "two", at=5, saved=halted.read(tmp_path / "two", 4), **common)
    then = halted.run(folder=tmp_path / "two", at=-1, saved=halted.read(tmp_path / "two", 5), **common)
    toy.same(toy.state_of(one.server), toy.state_of(then.server))
    assert np.flatnonzero(then.server_step.visits).size > 2
