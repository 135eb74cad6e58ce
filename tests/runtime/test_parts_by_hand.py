"""Small parts of the engines by hand: what is read, counted and started, one number at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import worlds
from torch.testing import assert_close

from mpifl.aggregation.tables import read_rows, row_distances, rows_of
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.capabilities import ComparedUploads
from mpifl.core.errors import MethodError
from mpifl.core.mixing import Mixing, Plan, average
from mpifl.core.rng import key
from mpifl.core.types import Notes
from mpifl.runtime.asynchronous import AsyncStats, largest_weight, rows_read
from mpifl.runtime.protocol import GatheredReports
from mpifl.simulation.clock import DrawnClock, VirtualClock
from mpifl.simulation.delays import Constant, Uniform
from mpifl.simulation.durations import Availability, visit_duration
from mpifl.simulation.network import Links
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival
from mpifl.simulation.trace import Trace
from mpifl.simulation.visits import Visit

TABLE = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])


# -- rows ----------------------------------------------------------------------------------------------------


def test_a_mixture_of_rows_is_one_vector():
    """0.25 of row 0 and 0.75 of row 2: (75.25, 150.5); row 1 is not asked for."""
    asked = []

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        asked.append((name, numbers))
        return TABLE[numbers]

    which = np.array([0.25, 0.0, 0.75])
    assert_close(read_rows(rows, "model", which), torch.tensor([[75.25, 150.5]]))
    assert_close(read_rows(rows, "model", (2, 0)), TABLE[[2, 0]])
    assert asked == [("model", [0, 2]), ("model", [2, 0])]
    assert rows_of(which) == [0, 2]
    assert rows_of((2, 0)) == [2, 0]


def test_what_a_visit_reads_of_a_server():
    server = worlds.Server({"model": TABLE}, np.zeros(1, int))
    assert_close(rows_read(server, "model", (1,)), TABLE[1:2])
    assert rows_read(server, "model", (1,)).data_ptr() == TABLE[1].data_ptr(), "a single row is no copy"
    assert_close(rows_read(server, "model", (2, 1)), TABLE[[2, 1]])
    assert_close(rows_read(server, "model", np.array([0.0, 0.5, 0.5])), torch.tensor([[55.0, 110.0]]))


def test_distances_to_rows_are_over_parameters_only():
    """The last number is a running mean: from (4, 6, 99) to (1, 2, 0) it is 5."""
    rows = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 7.0]])
    assert_allclose(row_distances(torch.tensor([4.0, 6.0, 99.0]), rows, 2), [5, 0])


def test_the_largest_weight_of_an_upload_of_two_components():
    plan = Plan([Mixing(np.array([[0.1, 0.0, 0.5, 0.0], [0.0, -0.7, 0.0, 0.2]]))])
    assert [largest_weight(plan, j, 2) for j in (0, 1)] == [0.7, 0.5]
    assert largest_weight(Plan([]), 0, 1) == 0.0


def test_largest_values_and_ranks_of_components_go_together():
    """Upload 0, on rank 1, has components with max_abs 1 and 2; upload 1, on rank 2, with 3 and 4."""
    two, ones = np.zeros(2, np.int64), np.ones(2, bool)
    notes = Notes(np.arange(2), two, two, ones)
    reports = GatheredReports((), np.array([1, 2]), notes, {"model": np.array([[1.0, 2.0], [3.0, 4.0]])})
    max_abs, owners = reports.upload_info("model")
    assert_array_equal(max_abs, [1, 2, 3, 4])
    assert_array_equal(owners, [1, 1, 2, 2])


# -- who is evaluated by what ---------------------------------------


@dataclass(frozen=True)
class Keeps(Algorithm):
    """A client keeps how often it was visited, and is evaluated by that."""

    needs: ClassVar[Needs] = Needs(client_state=True)

    def local_update(self, message, state, client, key):
        """Count."""
        visits = state.get("visits", torch.zeros(1)) + 1
        return client.report(model=message["model"][0]), {"visits": visits}

    def aggregate(self, server, notes):
        """Average."""
        return Plan([average(notes)])

    def evaluate(self, message, state, client, split):
        """Score the visits, the visit whose data are there, and the version of the rows."""
        kept = float(state["visits"]) if state else 0.0
        return {"accuracy": kept, "loss": float(client.visit), "version": float(message.version)}


def test_clients_are_judged_with_their_latest_state_on_the_data_of_their_last_visit(tmp_path):
    """Visited v times: state v, data of visit v - 1; never visited: no state, data of visit 0."""
    done = worlds.run(Keeps(), worlds.Tiny(), tmp_path, steps=3, cohort_size=2)
    visits = done.server_step.visits
    assert set(visits.tolist()) >= {0, 2}
    assert_array_equal(done.scores["accuracy"], visits)
    assert_array_equal(done.scores["loss"], np.maximum(visits - 1, 0))
    assert_array_equal(done.scores["version"], 3)


def test_asynchronous_clients_are_judged_likewise(tmp_path):
    done = worlds.events(Keeps(), worlds.Tiny(), tmp_path, 7, cohort_size=2, delay=Uniform(0.5, 1.5))
    visits = done.server_step.visits
    assert visits.sum() == 7
    assert_array_equal(done.scores["accuracy"], visits)
    assert_array_equal(done.scores["loss"], np.maximum(visits - 1, 0))


def test_only_those_who_take_part_are_counted_as_visited(tmp_path):
    """Oracle remembers the uploads of absent members: these are reports, and no visits."""
    done = worlds.run(
        CATALOGUE["oracle"](), worlds.Tiny(), tmp_path, steps=3, participation=0.5, evaluate=False
    )
    assert len(done.notes[-1]) > 3
    assert done.server_step.visits.sum() == 9


@dataclass(frozen=True)
class ComparesNow(ComparedUploads, Algorithm):
    """Products of `delta` are read in the second step; it is uploaded in steps from `sends` on."""

    sends: int = 2

    gram = "delta"

    def compares(self, server):
        """In the second step only."""
        return server.version == 1

    def local_update(self, message, state, client, key):
        """Upload what is compared when it is time."""
        w = message["model"][0]
        return client.report(model=w, **({"delta": w} if message.step >= self.sends else {})), {}

    def aggregate(self, server, notes):
        """Remember whether there were products."""
        return Plan([average(notes)], algorithm_state={"gram": np.array("gram" in notes.columns)})


def test_products_are_taken_of_what_is_uploaded_in_the_steps_that_compare(tmp_path):
    done = worlds.run(ComparesNow(), worlds.Tiny(), tmp_path, steps=3, evaluate=False)
    assert [bool(s.algorithm_state["gram"]) for s in done.servers[1:]] == [False, True, False]
    with pytest.raises(MethodError, match="no upload 'delta'"):
        worlds.run(ComparesNow(sends=3), worlds.Tiny(), tmp_path / "late", steps=3, evaluate=False)


def test_cflgp_looks_at_profiles_every_other_round(tmp_path):
    method = CATALOGUE["cflgp"](num_clusters=2, period=2)
    done = worlds.run(method, worlds.Tiny(), tmp_path, steps=3, evaluate=False)
    assert ["gram" in notes.columns for notes in done.notes] == [True, False, True]


# -- policies and clocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "waiting", "in_flight", "ready"),
    [
        (Buffer(3), 2, 5, False),
        (Buffer(3), 3, 5, True),
        (Buffer(3), 4, 0, True),
        (EveryArrival(), 1, 5, True),
        (Barrier(), 4, 1, False),
        (Barrier(), 5, 0, True),
    ],
)
def test_when_the_server_steps(policy, waiting, in_flight, ready):
    assert policy.ready(waiting, in_flight) is ready


def test_an_upload_of_the_largest_staleness_is_taken(tmp_path):
    """Three visits are under way, and FedAsync steps at each arrival: lags of 0, 1 and 2."""
    for limit in (0, 1, 2):
        asked = {"cohort_size": 3, "policy": EveryArrival(max_staleness=limit)}
        done = worlds.events(CATALOGUE["fedasync"](), worlds.Tiny(), tmp_path / str(limit), 8, **asked)
        taken = {row["staleness"] for row in done.arrivals if row["accepted"]}
        refused = {row["staleness"] for row in done.arrivals if not row["accepted"]}
        assert limit in taken
        assert max(taken) == limit
        assert min(refused, default=limit + 1) == limit + 1


def test_uploads_of_a_step_are_in_the_order_of_their_clients_whenever_they_came(tmp_path):
    done = worlds.events(
        CATALOGUE["fedbuff"](),
        worlds.Tiny(),
        tmp_path,
        5,
        cohort_size=4,
        policy=Buffer(3),
        delay=Uniform(0.5, 1.5),
    )
    arrived = [row["client"] for row in done.arrivals][:15]
    assert arrived != [k for i in range(0, 15, 3) for k in sorted(arrived[i : i + 3])], (
        "they did come otherwise"
    )
    for notes in done.notes:
        assert_array_equal(notes.client, np.sort(notes.client))


def visit(due: float, number: int) -> Visit:
    """Return a visit of client `number`."""
    return Visit(due, number, number, 0, 0, 0.0)


def duration(**link) -> VirtualClock:
    """Return a virtual clock over links."""
    return VirtualClock(visit_duration(Constant(1.0), Links(**link), Availability(), key(0), 3))


def test_places_are_filled_after_the_last_arrival_of_an_instant():
    clock = duration()
    for number, due in enumerate((2.0, 1.0, 2.0)):
        clock.add(visit(due, number))
    seen = []
    for _ in range(3):
        arrived = clock.pop(None)
        seen.append((arrived.client, clock.now, clock.is_tied()))
    assert seen == [(1, 1.0, False), (0, 2.0, True), (2, 2.0, False)]


def test_a_drawn_clock_has_one_upload_a_second_from_the_first_on():
    """Without a key visits arrive in the order of their starts; with one each second belongs to a client."""
    clock = DrawnClock()
    assert [clock.due(k, 0, 0, 0) for k in (4, 2, 4)] == [1.0, 2.0, 3.0]
    clock = DrawnClock(3, key(5))
    dues = [[clock.due(k, v, 0, 0) for v in range(400)] for k in range(3)]
    seconds = np.sort(np.concatenate(dues))
    assert seconds[0] == 1
    assert_array_equal(seconds[:900], np.arange(1, 901), "nobody's second is lost, none is shared")
    half = DrawnClock(3, key(5))
    first = [half.due(0, v, 0, 0) for v in range(10)]
    again = DrawnClock(3, key(5))
    again.load_state_dict(half.state_dict())
    assert first + [again.due(0, v, 0, 0) for v in range(10, 400)] == dues[0]


def test_a_tally_by_hand():
    """Two visits for 2 s, then three for 1 s: 7 visit-seconds in 3 s. Lags 0, 2, 2, one of them refused."""
    stats = AsyncStats()
    stats.advance(2.0, 2)
    stats.advance(3.0, 3)
    for lag, accepted in ((0, True), (2, False), (2, True)):
        stats.add(lag, accepted)
    said = stats.summary(steps=2, virtual=3.0, real=6.0, idle=[0.25], server=0.5)
    assert said == {
        "arrivals": 3,
        "refusal_rate": 1 / 3,
        "staleness_mean": 4 / 3,
        "refused": 1,
        "staleness_max": 2,
        "staleness_histogram": {"0": 1, "2": 2},
        "concurrency": pytest.approx(7 / 3),
        "clock_seconds": 3.0,
        "updates_per_clock_second": pytest.approx(2 / 3),
        "updates_per_second": pytest.approx(1 / 3),
        "arrivals_per_second": 0.5,
        "worker_idle_share": [0.25],
        "server_cpu_share": 0.5,
    }


def test_a_trace_tells_each_start_once_and_goes_on_from_its_place(tmp_path):
    """Clients 0 and 1 start at 0, client 0 again at 1.5."""
    file = tmp_path / "events.csv"
    file.write_text("time,client,visit,start,read_version\n1.5,0,0,0,0\n2.0,1,0,0,0\n3.0,0,1,1.5,1\n")
    trace = Trace(str(file), 2)
    assert trace.starting(0.0) == [(0, 0), (1, 0)]
    assert trace.starting(0.0) == []
    assert (trace.next_time(), trace.pop().client, trace.next_start()) == (1.5, 0, 1.5)
    again = Trace(str(file), 2)
    again.load_state_dict(trace.state_dict())
    assert again.starting(0.0) == []
    assert (again.next_time(), again.starting(1.5)) == (2.0, [(0, 1)])
    assert again.arrival(0, 1) == 3.0
