"""How long a run will take: measured, dealt and played through, against numbers worked out by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from support.cases import OPTIONS
from support.nightly import mostly_nightly

from mpifl.aggregation.collective_costs import Given, between
from mpifl.aggregation.exchange_choice import Local, OverMpi
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.client import Trained
from mpifl.core.errors import UserError
from mpifl.core.federation import Split
from mpifl.core.plan import Plan
from mpifl.core.rng import key
from mpifl.experiment.schema import CheckpointConfig, EvaluationConfig, OutputConfig, SystemConfig
from mpifl.forecast import measured_times
from mpifl.forecast.measured_times import CutBackend, MeasuredTimes, Meter, PerSample, measure
from mpifl.forecast.plan import Asked, first_plan
from mpifl.forecast.time import (
    END,
    EVALUATE,
    EXIT_CPU_S,
    MPI_CPU_S,
    OWN_CORES,
    POLLING,
    RANK_S,
    SHORT_POLLING,
    START,
    STEP,
    Allocation,
    Cores,
    Event,
    Ranks,
    Surroundings,
    TimeForecast,
    _HeldBack,
    arrivals,
    efficiencies,
    forecast_time,
    ranks_seconds,
)
from mpifl.forecast.traffic import check_uploads, forecast, without_training
from mpifl.simulation.availability import Availability
from mpifl.simulation.clock import WallClock, WallTime
from mpifl.simulation.delays import DELAYS, Constant
from mpifl.simulation.durations import visit_duration
from mpifl.simulation.network import Links
from mpifl.simulation.policies import POLICIES
from mpifl.simulation.visits import Visit
from mpifl.training.backend import Backend, Request

NOTHING = Surroundings(0.0, 0.0, 0.0, 0.0)
NO_CHECKPOINT = CheckpointConfig(every=0, minutes=0)


def context(name: str = "fedavg", clients: int = 4, **changes):
    """Return a run of clients with 12 samples each, evaluated at the end by one client."""
    usual = {"rounds": 3, "evaluation": EvaluationConfig(every=0, clients=1), "checkpoint": NO_CHECKPOINT}
    config = toy.config_of(CATALOGUE[name](**OPTIONS.get(name, {})), **(usual | changes))
    return toy.context_of(config, toy.Tiny(clients, equal=True))


def foretold(run, measured: MeasuredTimes, ranks: int, cores: Cores = OWN_CORES) -> TimeForecast:
    """Return the forecast of a run from given seconds."""
    dry = without_training(run)
    traffic = forecast(dry)
    return forecast_time(run, measured, traffic, Plan([]), NOTHING, ranks, cores)


# -- a line through measured seconds -------------------------------------------------------------------------


def test_seconds_are_a_line_through_medians_of_samples():
    """10 samples: 3, 4, 50 s, median 4; 20 samples: 6 s. So 2 s, and 0.2 s a sample."""
    line = PerSample.of([10, 10, 10, 20], [3.0, 50.0, 4.0, 6.0])
    assert (line.once_s, line.sample_s) == pytest.approx((2.0, 0.2))
    np.testing.assert_allclose(line(np.array([0, 30])), [2.0, 8.0])


@pytest.mark.parametrize(
    ("samples", "seconds", "rate"),
    [([10, 10], [1.0, 3.0], 0.2), ([10, 20], [4.0, 2.0], 0.2), ([10, 100], [0.0, 11.0], 0.1)],
)
def test_equal_samples_and_lines_that_fall_go_through_the_origin(samples, seconds, rate):
    line = PerSample.of(samples, seconds)
    assert (line.once_s, line.sample_s) == pytest.approx((0.0, rate))


# -- trainings that are cut off ------------------------------------------------------------------------------


class Slow(Backend):
    """Takes a second a step, on a clock of its own."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, list[int]()

    def accepts(self, request):
        """Accept everything."""
        return True

    def train(self, request):
        """Take the steps that are asked for."""
        config, n = request.config, len(request.split)
        steps = config.epochs * -(-n // config.batch_size) if config.steps is None else config.steps
        self.now += steps
        self.steps.append(steps)
        return Trained(request.start, steps, 0.0, config.lr, 0.0)


def test_a_long_training_is_cut_off_and_reckoned(monkeypatch):
    """Forty steps of a second where five are allowed: two to warm up and two timed, which do not count, and
    two whole epochs of two; the meter reads forty seconds.
    """
    slow, meter = Slow(), Meter(by_clock=False)
    monkeypatch.setattr(meter, "_read", lambda: slow.now)
    monkeypatch.setattr(measured_times, "LONGEST_S", 5.0)
    local = replace(toy.LOCAL, epochs=20, batch_size=5)
    split = Split(torch.zeros(10, 1, 4, 4), torch.zeros(10, dtype=torch.long))
    backend = CutBackend([slow], meter)
    backend.train(Request(torch.zeros(3), split, local, key(0)))
    assert slow.steps == [2, 2, 4]
    assert meter() == pytest.approx(40.0)
    assert backend.cut
    backend.train(Request(torch.zeros(3), split, replace(local, epochs=2), key(0)))
    assert slow.steps[-1] == 4, "short enough to be done"
    assert meter() == pytest.approx(44.0)


# -- cores ---------------------------------------------------------------------------------------------------


def test_ranks_share_the_cores_of_their_node():
    """Workers of 1, 2 and 3 s on two cores, beside rank 0 that waits: three until the first is done, then two
    and two that wait, then one.
    """
    owners, seconds = np.array([1, 2, 3, 3]), np.array([1.0, 2.0, 1.0, 2.0])
    last = (3 + POLLING) / 2 + (2 + 2 * POLLING) / 2 + 1
    assert Cores(2, nodes=1).busiest(owners, seconds, 4) == pytest.approx(last)
    assert Cores(2).busiest(owners, seconds, 4) == 3.0, "two nodes, and a core for each rank"
    assert Cores(4, nodes=1).busiest(owners, seconds, 4) == 3.0


def test_nodes_are_added_until_each_rank_has_a_core():
    cores, one = Cores(16), Cores(16, nodes=1)
    assert [cores.num_nodes(p) for p in (1, 16, 17, 33)] == [1, 1, 2, 3]
    assert cores.slowdown(33) == 1.0
    assert (one.num_nodes(33), one.slowdown(33)) == (1, 33 / 16)
    assert Cores(8, nodes=2).node_of(6).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("cores", "round_s"), [(8, 1.0), (2, 2 + POLLING / 2), (1, 4 + POLLING)])
def test_a_round_on_shared_cores_takes_longer(cores, round_s):
    """Four visits of a second on four workers; those that wait take 3 % of a core."""
    one = MeasuredTimes(PerSample(1.0), PerSample(1.0))
    found = foretold(context(), one, 5, Cores(cores, nodes=1))
    assert found.round_s == pytest.approx(round_s, abs=0.01)


# -- rounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "round_s"), [(1, 4.0), (2, 4.0), (3, 2.0), (4, 2.0), (5, 1.0), (9, 1.0)])
def test_a_round_lasts_as_long_as_its_busiest_worker(ranks, round_s):
    """Four equal visits of a second on 1, 1, 2, 3, 4 and 8 workers; the network is a few milliseconds."""
    one = MeasuredTimes(PerSample(1.0), PerSample(1.0))
    found = foretold(context(), one, ranks)
    assert found.round_s == pytest.approx(round_s, abs=0.02)
    assert found.parts["rounds"] == pytest.approx(3 * round_s, abs=0.05)
    begin_and_end = (MPI_CPU_S * (ranks > 1) + EXIT_CPU_S) * ranks
    messages = 3 * RANK_S * (ranks - 1)
    assert found.processor == pytest.approx(12.0 + begin_and_end + messages), (
        "three rounds of four visits, wherever they are"
    )
    assert found.limits == "training"


def test_the_parts_of_a_run_add_up():
    """Three rounds of four visits of 0.1 s a sample, 12 samples; the first visits 1 s longer; rank 0 takes
    0.5 s for each visit and 0.75 s beside, and 2 s to decide, sums 0.25 s an upload and 1.5 s beside, two
    evaluations of 3 s and 1 s.
    """
    seconds = MeasuredTimes(
        PerSample(0.0, 0.1),
        PerSample(1.0, 0.1),
        book=0.5,
        book_once=0.75,
        decide=2.0,
        mix=0.25,
        mix_once=1.5,
        evaluation=PerSample(3.0),
        record=1.0,
        setup=7.0,
        checkpoint=0.5,
    )
    run = context(
        evaluation=EvaluationConfig(every=0, clients=1, at_start=True),
        checkpoint=CheckpointConfig(every=1, minutes=0),
    )
    around = Surroundings(start=2.0, open=1.0, figures=0.5, end=0.25)
    dry = without_training(run)
    found = forecast_time(run, seconds, forecast(dry), Plan([]), around, 1)
    assert found.parts == pytest.approx(
        {
            "start-up": 2.5,
            "data and model": 1.0,
            "set-up statistics": 7.0,
            "rounds": 3 * (4 * 1.2 + 4 * 0.5 + 0.75 + 2.0 + 4 * 0.25 + 1.5) + 4 * 1.0,
            "evaluation": 2 * (3.0 + 1.0),
            "checkpoints": 3 * 0.5,
            "end": 0.75 + EXIT_CPU_S,
        }
    )
    assert found.total == pytest.approx(sum(found.parts.values()))


def test_statistics_are_dealt_too():
    """Four clients of 2 s after 5 s of the server, on two workers; products of all pairs take 1 s."""
    seconds = MeasuredTimes(
        PerSample(0.0), PerSample(0.0), fingerprint=PerSample(2.0), shown=5.0, gram_setup=1.0
    )
    found = foretold(context("ucfl"), seconds, 3)
    assert found.parts["set-up statistics"] == pytest.approx(5 + 1 + 2 * 2)


def test_a_slow_network_limits_many_ranks():
    """Ten milliseconds a message, and a visit of one: P = 5 waits for tasks and reports."""
    system = SystemConfig(cost=Given(latency_s=0.01, bytes_s=1e9))
    found = foretold(context(system=system), MeasuredTimes(PerSample(0.001), PerSample(0.001)), 5)
    assert found.limits == "ranks"
    assert found.round_s > 3 * 0.01
    assert sum(found.terms.values()) == pytest.approx(found.round_s)


def test_each_worker_costs_rank_0_its_messages():
    """Three exchanges of 1 ms; four visits of 90 bytes, 1500 bytes a worker over 1 MB/s, 25 us a worker."""
    costs = between(1e-3, 1e6, 9)
    assert ranks_seconds(costs, 4, 8) == pytest.approx(3 * 1e-3 + 8 * (25e-6 + 1500e-6) + 4 * 90e-6)


@pytest.mark.parametrize(("ranks", "messages"), [(2, 6), (3, 9), (4, 9), (8, 12)])
def test_latencies_of_a_round_add_up(ranks, messages):
    """Three exchanges, and ceil(log2 P) messages each for rows out, the barrier and the sum.

    W3 on virtual hosts, links delayed by 20 ms: 5.2, 7.7, 9.4 and 14.3 delays a round
    (docs/notes/performance-measurements.md).
    """
    run = context(system=SystemConfig(cost=Given(latency_s=1.0, bytes_s=1e30)))
    dry = without_training(run)
    traffic = forecast(dry)
    plan, _ = first_plan(dry, traffic.server)
    times = MeasuredTimes(PerSample(), PerSample())
    found = forecast_time(run, times, traffic, plan, NOTHING, ranks)
    assert round(found.round_s) == messages


@pytest.mark.parametrize(("exchange", "delays"), [("local", 0), ("workers", 28), ("server", 28)])
def test_a_second_look_waits_for_its_messages_once(exchange, delays):
    """Two workers with two of four clients: two waves, sizes twice in each, and once who asks.

    All ranks hear of it over a tree of two levels, up and down: 5 x 4. Questions and answers of each wave
    take two delays: 2 x 2 x 2. Rounds 2 and 3 look at nobody.
    """
    way = Local() if exchange == "local" else OverMpi(exchange)
    rounds = [
        foretold(
            context("emdcfl", system=SystemConfig(exchange=one, cost=Given(latency_s=1.0, bytes_s=1e30))),
            MeasuredTimes(PerSample(), PerSample()),
            3,
        ).parts["rounds"]
        for one in (way, Local())
    ]
    assert round(rounds[0] - rounds[1]) == delays


def test_comparisons_take_place_where_the_exchange_says():
    """16 looks of 2 s, 1.5 s of them comparisons: on two workers 16 s each, or 4 s and 24 s at rank 0."""
    times = MeasuredTimes(PerSample(), PerSample(), look=2.0, compare=1.5)
    at = {
        way: foretold(context("emdcfl", rounds=1, system=SystemConfig(exchange=OverMpi(way))), times, 3).terms
        for way in ("workers", "server")
    }
    assert at["workers"]["training"] == pytest.approx(16, abs=0.1)
    assert at["workers"]["rank 0"] == pytest.approx(0, abs=0.1)
    assert at["server"]["training"] == pytest.approx(4, abs=0.1)
    assert at["server"]["rank 0"] == pytest.approx(24, abs=0.1)


def test_efficiency_is_that_of_one_worker_by_workers_and_seconds():
    ten, three = (TimeForecast(p, {}, s, 0.0, {"training": s}) for p, s in ((2, 10.0), (5, 4.0)))
    assert efficiencies([ten, three], ten) == pytest.approx([1.0, 10 / (4 * 4.0)])


# -- arrivals ------------------------------------------------------------------------------------------------

ASYNCHRONOUS = {
    "every_arrival": ("fedasync", {}),
    "buffer": ("fedbuff", {"size": 2}),
    "barrier": ("fedavg", {}),
    "waves": ("fedavg", {"size": 3, "every_s": 1.5}),
    "client_decides": ("fedasync", {}),
    "drawn_staleness": ("fedasync", {"most": 2}),
}


def played_through(method: str, folder: Path, steps: int, **changes) -> list[Event]:
    """Return the arrivals that are forecast, after comparing them with those of a real run."""
    asked = {"rounds": steps, **changes}
    done = toy.events(CATALOGUE[method](), toy.Tiny(), folder, steps, **asked)
    run = toy.context_of(toy.config_of(CATALOGUE[method](), **asked), toy.Tiny())
    found = arrivals(run, forecast(without_training(run)), steps)
    ends = [(client, due) for kind, _, client, due in found if kind == END]
    assert ends == [(row["client"], pytest.approx(row["time"])) for row in done.arrivals]
    count = np.cumsum([kind == STEP for kind, *_ in found])
    versions = [int(n) for n, (kind, *_) in zip(count, found, strict=True) if kind == END]
    assert versions == [row["arrival_version"] for row in done.arrivals]
    if done.engine.clock.in_seconds:
        assert [due for kind, *_, due in found if kind == STEP] == pytest.approx(done.times[1:])
    return found


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_what_is_played_through_is_what_the_engine_does(name, tmp_path):
    """The same clients upload in the same order, with the same steps between them, as in a real run."""
    method, options = ASYNCHRONOUS[name]
    changes = {"policy": POLICIES[name](**options), "cohort_size": 3}
    if name not in ("client_decides", "drawn_staleness"):
        changes["delay"] = DELAYS["tiers"]()
    found = played_through(method, tmp_path, 6, **changes)
    assert {number for kind, number, *_ in found if kind == END} <= {n for k, n, *_ in found if k == START}
    assert [kind for kind, *_ in found].count(EVALUATE) == 6, "after every step, by default"


@pytest.mark.parametrize(
    ("policy", "options"),
    [("waves", {"every_s": 10.0}), ("waves", {"size": 2, "every_s": 7.0}), ("buffer", {"size": 2})],
)
def test_clients_that_come_and_go_do_so_in_the_forecast(policy, options, tmp_path):
    away = Availability(on_s=2.0, off_s=100.0)
    changes = {"policy": POLICIES[policy](**options), "delay": DELAYS["exponential"](0.7)}
    played_through("fedavg", tmp_path, 6, availability=away, **changes)


def test_no_wave_is_reckoned_with_while_all_clients_are_away(monkeypatch):
    """Waves of a second, and absences of two weeks: the time of the next wave goes on with the clock."""
    away, policy = Availability(on_s=2.0, off_s=1e6), POLICIES["waves"](every_s=1.0)
    asked, find = [], type(policy).next_tick

    def next_tick(self, after: float) -> float:
        asked.append(after)
        assert len(asked) < 200
        return find(self, after)

    monkeypatch.setattr(type(policy), "next_tick", next_tick)
    run = context("fedavg", 6, rounds=6, policy=policy, delay=DELAYS["constant"](1e-3), availability=away)
    found = arrivals(run, forecast(without_training(run)), 6)
    assert [kind for kind, *_ in found].count(STEP) == 6
    assert asked == sorted(asked)


@pytest.mark.parametrize("method", ["flexcfl", "fedclust"])
def test_visits_start_when_one_shot_statistics_have_arrived(method, tmp_path):
    changes = {"policy": POLICIES["buffer"](2), "cohort_size": 3, "network": Links(1e4, 1e4)}
    found = played_through(method, tmp_path, 4, delay=DELAYS["exponential"](2.0), **changes)
    assert found


def test_visits_are_dealt_as_the_task_pool_does_it():
    """Two workers with two tasks each; visits 0 to 3 of 4, 1, 2 and 9 s are sent at once. The last, of 1 s,
    goes to worker 2 when rank 0, which waits for visit 0, receives visit 1: it is done after visit 3, at 11.
    """
    ranks = Ranks(3)
    for number, due, seconds in ((0, 1.0, 4.0), (1, 9.0, 1.0), (2, 2.0, 2.0), (3, 3.0, 9.0), (4, 4.0, 1.0)):
        ranks.submit(number, due, seconds)
    ends = []
    for number in (0, 2, 4, 3, 1):
        ranks.result(number)
        ends.append(ranks.now)
    assert ends == [4.0, 6.0, 11.0, 11.0, 11.0], "worker 1: 0 and 2; worker 2: 1, 3 and 4"


def test_workers_without_reports_received_run_dry():
    """Rank 0 works for 10 s while a worker does its two visits of 1 s; the third starts only afterwards."""
    ranks = Ranks(2)
    for number in range(3):
        ranks.submit(number, number, 1.0)
    ranks.result(0)
    ranks.work(10.0)
    ranks.result(1)
    assert ranks.now == 11.0
    ranks.result(2)
    assert ranks.now == 11.0, "sent at 1, when rank 0 received the first report"
    ranks.submit(3, 0.0, 2.0)
    ranks.evaluate(np.array([1, 1]), np.array([1.0, 2.0]))
    assert ranks.now == 16.0, "after the visit that it holds, 3 s"


def test_ranks_of_an_asynchronous_run_share_cores():
    """Rank 0 and two workers on two cores, 2 s each: all are done at 3; one works, two look for work."""
    ranks = Ranks(3, Cores(2, nodes=1), handover=0.0)
    for number in range(2):
        ranks.submit(number, number, 2.0)
    ranks.work(2.0)
    assert ranks.now == pytest.approx(3.0)
    one = Ranks(3, Cores(1, nodes=1))
    one.work(1.0)
    assert one.now == pytest.approx(1 + 2 * SHORT_POLLING)


def test_reports_that_come_while_another_is_received_are_received_too():
    """The second worker ends while rank 0 takes a second to receive the first one's report."""
    ranks = Ranks(3, handover=1.0)
    ranks.submit(0, 0.0, 1.0)
    ranks.submit(1, 1.0, 1.5)
    ranks.result(1)
    assert ranks.now == 4.0
    ranks.result(0)
    assert ranks.now == 4.0


def test_messages_take_rank_0_and_workers_time():
    """Four visits of 1 s, 0.5 s of handover at each side: the last report is received at 4 x 1.5 + 0.5."""
    ranks = Ranks(2, handover=0.5)
    for number in range(4):
        ranks.submit(number, number, 1.0)
    for number in range(4):
        ranks.result(number)
    assert ranks.now == 6.5


def test_an_asynchronous_run_is_as_fast_as_its_workers():
    """Six steps of one upload each, a second a visit, all three visits under way at once: alone 6 s; on three
    workers two waves of a second each.
    """
    policy = POLICIES["every_arrival"]()
    run = context("fedasync", 6, rounds=6, policy=policy, cohort_size=3)
    one = MeasuredTimes(PerSample(1.0), PerSample(1.0))
    assert foretold(run, one, 1).parts["rounds"] == pytest.approx(6.0)
    assert foretold(run, one, 4).parts["rounds"] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("ranks", "scale", "visit_s", "rounds_s"),
    [(1, 0.5, 0.01, 1.0), (4, 0.5, 0.01, 1.0), (1, 0.0, 0.01, 0.06), (1, 0.5, 1.0, 6.0), (4, 0.5, 1.0, 2.0)],
)
def test_a_wall_clock_with_a_scale_holds_visits_back(ranks, scale, visit_s, rounds_s):
    """Six steps of one upload each, three visits at a time, each due after a virtual second: two waves of
    half a second of the wall, where training does not take longer.
    """
    policy, clock, delay = POLICIES["every_arrival"](), WallTime(scale), DELAYS["constant"](1.0)
    run = context("fedasync", 6, rounds=6, policy=policy, cohort_size=3, clock=clock, delay=delay)
    found = foretold(run, MeasuredTimes(PerSample(visit_s), PerSample(visit_s)), ranks)
    assert found.parts["rounds"] == pytest.approx(rounds_s, abs=0.1 * rounds_s)
    assert (found.limits == "waiting") == (rounds_s == 1.0)


def test_rank_0_receives_reports_while_visits_are_held_back():
    """One of 1 s is due at 10; the third of 1 s begins at 1, when rank 0 receives the first report."""
    ranks = Ranks(2)
    for number in range(3):
        ranks.submit(number, number, 1.0)
    ranks.result(0)
    ranks.hold(10.0)
    assert ranks.now == 10.0
    ranks.result(2)
    assert ranks.now == 10.0
    ranks.submit(3, 0.0, 4.0)
    ranks.hold(12.0)
    ranks.result(3)
    assert ranks.now == 14.0, "its worker goes on meanwhile"


@pytest.mark.parametrize(
    ("policy", "options"), [("every_arrival", {}), ("buffer", {"size": 2}), ("barrier", {})]
)
def test_a_visit_moves_one_model_whatever_a_step_takes(policy, options):
    """A second of computing, and a model of d float32 down and up at d bytes a second: 9 s."""
    d = context().problem.layout.size
    changes = {"policy": POLICIES[policy](**options), "network": Links(d, d), "cohort_size": 3}
    run = context("fedavg", 6, rounds=2, **changes)
    found = arrivals(run, forecast(without_training(run)), 2)
    assert [due for kind, _, _, due in found if kind == START][:3] == [9.0] * 3


# -- measured ------------------------------------------------------------------------------------------------


MEASURED = ["fedavg", "scaffold", "emdcfl", "ucfl", "ifca", "fedasync", "fedsoft_async"]


def test_evaluations_are_measured_of_clients_that_have_trained():
    """IFCA chooses anew, at each evaluation, for those that have not: 20 clients, of which 6 train."""
    run = context(clients=20, evaluation=EvaluationConfig(every=0))
    trained = np.arange(0, 12, 2)
    assert_array_equal(measured_times._evaluated_clients(run, trained), trained)
    assert len(measured_times._evaluated_clients(run, trained[:1])) == measured_times.EVALUATIONS


def test_what_rank_0_does_once_a_round_is_not_counted_for_each_client(tmp_path, flat_plane):
    """A round takes a millisecond or so whatever its cohort is, a client some microseconds."""
    run = context(clients=20, output=OutputConfig(folder=str(tmp_path)))
    dry = without_training(run)
    found = measure(run, forecast(dry).server, 0.0)
    assert found.book_once > 5 * found.book


def test_visits_are_measured_without_holding_clients_back(tmp_path, flat_plane):
    """Visits are due five seconds of the wall after their start, three at a time: 20 s for a dozen."""
    policy, delay = POLICIES["every_arrival"](), DELAYS["constant"](5.0)
    given = {"policy": policy, "cohort_size": 3, "clock": WallTime(1.0), "delay": delay}
    run = context("fedasync", 6, output=OutputConfig(folder=str(tmp_path)), **given)
    dry, start = without_training(run), perf_counter()
    found = measure(run, forecast(dry).server, 0.0)
    assert found.num_visits >= 6
    assert perf_counter() - start < 10.0


@pytest.mark.parametrize("name", mostly_nightly(MEASURED, ["emdcfl", "ucfl", "fedasync"]))
def test_every_kind_of_method_is_measured(name, tmp_path, flat_plane):
    """Visits take time, of the order of what a whole run takes; nothing is negative, and nothing is left."""
    policy = {"policy": POLICIES["every_arrival"]()} if "async" in name else {}
    run = context(name, 6, output=OutputConfig(folder=str(tmp_path)), **policy)
    dry = without_training(run)
    traffic = forecast(dry)
    _, decide = first_plan(dry, traffic.server)
    found = measure(run, traffic.server, decide)
    assert found.num_visits >= 6
    assert float(found.visit(np.array([12]))[0]) > 1e-5
    assert not found.cut
    numbers = [value for value in vars(found).values() if isinstance(value, float)]
    assert min(numbers) >= 0
    assert list(tmp_path.iterdir()) == []
    if name == "emdcfl":
        assert found.look > 0
        assert found.looks_once
        assert 0 < found.compare < found.look
    if name == "ucfl":
        assert float(found.fingerprint(np.array([12]))[0]) > 0
    total = forecast_time(run, found, traffic, Plan([]), NOTHING, 1).total
    assert 0 < total < 30


# -- what to ask for -----------------------------------------------------------------------------------------


def test_an_allocation_has_margins():
    """33 ranks on nodes of 16: three nodes of 11; on the first the server, 10 workers, a third of the state:
    1 GB + 10 x 0.2 GB + 1 GB = 4 GB, a quarter more is 5 GB; 3000 s, half as much more, is 1:15 h, and
    the run is stopped three minutes before the end. All on one node: 1 GB + 32 x 0.2 GB = 7.4 GB.
    """
    found = TimeForecast(33, {"rounds": 3000.0}, 30.0, 0.0, {"training": 30.0})
    asked = Allocation.of(found, server=10**9, worker=2 * 10**8, kept=3 * 10**9, cores=Cores(16))
    assert str(asked) == "--nodes 3 --ntasks 33 --ntasks-per-node 11 --mem 5000M --time 01:18:00"
    one = Allocation.of(found, server=10**9, worker=2 * 10**8, kept=0, cores=Cores(16, nodes=1))
    assert str(one) == "--nodes 1 --ntasks 33 --overcommit --exclusive --mem 9300M --time 01:18:00"
    two = Allocation.of(found, server=10**9, worker=2 * 10**8, kept=0, cores=Cores(16, nodes=3), threads=2)
    assert "--ntasks-per-node 11 --cpus-per-task 2 --mem" in str(two)


@pytest.mark.parametrize(
    ("times", "ranks", "cores", "word"),
    [
        ("yes", "2,x", None, "--ranks"),
        ("yes", "0", None, "--ranks"),
        ("no", "2", None, "--ranks"),
        ("no", None, "8", "--cores"),
        ("yes", None, "-1", "--cores"),
    ],
)
def test_other_forms_of_options_are_refused(times, ranks, cores, word):
    with pytest.raises(UserError, match=word):
        Asked.of(times, ranks, cores)


def test_nodes_are_for_times_too():
    with pytest.raises(UserError, match="--nodes"):
        Asked.of("no", None, None, "2")
    assert Asked.of("yes", None, "8", "2") == Asked(True, (), 8, 2)


def test_ranks_share_this_machine_unless_nodes_are_described():
    here = len(os.sched_getaffinity(0))
    assert Asked(True).machine(1) == Cores(here, 1)
    assert Asked(True, (), 16).machine(4) == Cores(4.0, None)
    assert Asked(True, (), 16, 3).machine(1) == Cores(16, 3)


def test_options_are_read():
    assert Asked.of("yes", "2, 9,33", "16") == Asked(True, (2, 9, 33), 16)
    assert Asked.of("no", None, None) == Asked()


# -- what the first step would refuse ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("fedper", {"output": "updates"}, "output.updates"),
        ("ifca", {"output": "updates"}, "output.updates"),
        ("flt", {"output": "updates"}, "output.updates"),
        ("fedper", {"evaluation": EvaluationConfig(distances=True)}, "evaluation.distances"),
        ("fedrep", {"evaluation": EvaluationConfig(matrices=("parameters",))}, "evaluation.distances"),
        ("fedem", {"evaluation": EvaluationConfig(distances=True)}, "upload model, .*no whole model"),
        ("fednova", {"evaluation": EvaluationConfig(distances=True)}, "upload changes, no models"),
        ("scaffold", {"evaluation": EvaluationConfig(matrices=("parameters",))}, "upload changes, no models"),
    ],
)
def test_uploads_that_cannot_be_compared_are_refused_before_a_run(name, changes, word, flat_plane):
    changes = {k: OutputConfig(updates=True) if v == "updates" else v for k, v in changes.items()}
    with pytest.raises(UserError, match=word):
        check_uploads(context(name, **changes))


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_whole_models_are_compared(name):
    check_uploads(
        context(name, output=OutputConfig(updates=True), evaluation=EvaluationConfig(distances=True))
    )


@pytest.mark.parametrize(("due", "is_back"), [(9.0, True), (4.0, False)])
def test_a_forecast_in_wall_time_goes_on_to_a_return(due, is_back):
    """Half a real second for a simulated one: client 1, away until 10 s, is back after 5 real seconds."""
    away = Availability(profile=(0.0, 1.0), day_s=20.0)
    duration = visit_duration(Constant(1.0), Links(), away, key(0), 2)
    clock = _HeldBack(WallClock(duration, scale=0.5))
    clock.add(Visit(due, 0, 0, 0, 0, 0.0))
    assert clock.goes_to_start(inf, [1], None) == is_back
    assert clock.now == (5.0 if is_back else 0.0)
    assert not clock.goes_to_start(inf, [1], None)
