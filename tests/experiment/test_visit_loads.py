"""Virtual time for all that clients compute, and energy, by hand.

A training of the MLP 16 -> 8 -> 3 takes 656 FLOPs a sample, a loss 304 (`tests/traffic/test_computation.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support import toy
from support.each import for_each

from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.capabilities import SecondLook
from mpifl.core.errors import UserError
from mpifl.experiment import build
from mpifl.experiment.visit_loads import visit_loads
from mpifl.simulation.client_devices import Alike, Classes, DeviceClass
from mpifl.simulation.clock import Replay
from mpifl.simulation.delays import Constant
from mpifl.simulation.network import Links
from mpifl.simulation.policies import ClientDecides, EveryArrival
from mpifl.simulation.upload_triggers import Drift, OneEachStep, WhenDone
from mpifl.traffic.ledger import Moved


def refused(key: str, text: str):
    """Expect a refusal of a key."""
    return pytest.raises(UserError, match=f"{key}.*{text}")


def duration_of(name, clients=4, **options):
    """Return the durations of a method's visits under `costs: all`, a training taking 2 seconds."""
    changes = {"delay": Constant(2.0), "costs": "all", **options.pop("changes", {})}
    config = toy.config_of(CATALOGUE[name](**options), **changes)
    return toy.context_of(config, toy.Tiny(clients)).duration


@for_each(
    ("name", "options", "work"),
    [
        ("fedavg", {}, 1),
        ("ifca", {"num_clusters": 4}, 1 + 4 * 304 / 656),
        ("hypcluster", {"num_clusters": 2}, 1 + 2 * 304 / 656),
        ("ucfl", {"streams": 3, "parallel": True}, 3),
        ("ucfl", {"parallel": True}, 4),
        ("ucfl", {"streams": 3}, 1),
        ("ditto", {}, 2),
        ("fedem", {"num_components": 3}, 3 + 3 * 304 / 656),
        ("fedrep", {"head_epochs": 2}, (2 * (304 + 48) + 656 - 48) / 656),
        ("ccfl", {"changes": {"policy": EveryArrival()}}, 1),
        ("emdcfl", {}, 1),
    ],
)
def test_a_visit_takes_the_time_of_all_that_it_computes(name, options, work):
    """Under the usual rule it takes 2 seconds, whatever it does."""
    duration = duration_of(name, **dict(options))
    assert_allclose([duration.end(k, 0, 10.0) for k in range(4)], 10 + 2 * work, rtol=1e-12)
    changes = {**options.get("changes", {}), "costs": "training"}
    usual = duration_of(name, **{**options, "changes": changes})
    assert usual.end(3, 5, 10.0) == 12.0


def test_statistics_before_training_take_the_time_of_what_they_compute(tmp_path):
    """Clients 0 to 3 hold 8, 11, 14 and 17 samples: the gradient of all, and of 2, 2, 3, 4 batches of 4."""
    method = CATALOGUE["ucfl"](noise_batch=4)
    times = {}
    for costs in ("training", "all"):
        run = toy.Run()
        config = toy.config_of(method, delay=Constant(2.0), costs=costs, rounds=1)
        context = toy.context_of(config, toy.Tiny(4))
        step = build.build_server_step(context, ClientStore("test", str(tmp_path / costs)))
        build.build_engine(context, step).run(run.observe)
        times[costs] = run.times
    longest = max((n + 4 * (n // 4)) / n for n in (8, 11, 14, 17))
    assert_allclose(times["all"][-1], 2 * longest + 2, rtol=1e-12)
    assert times["training"][-1] == 2.0


def test_a_share_of_a_visit_takes_a_share_of_its_time():
    duration = duration_of("ditto")
    assert duration.end(0, 0, 0.0, share=0.5) == 2.0


def test_what_is_not_known_before_a_visit_is_refused():
    with refused("costs", "moon does not declare what a visit computes"):
        duration_of("moon")
    with refused("costs", "ucfl does not declare"):
        duration_of("ucfl", streams=-1, parallel=True)
    with refused("costs", "fedclust does not declare what its statistics compute"):
        duration_of("fedclust")
    config = toy.config_of(CATALOGUE["ccfl"](), policy=ClientDecides(uploads=WhenDone()), costs="all")
    context = toy.context_of(config, toy.Tiny(4))
    drifting = replace(config, policy=ClientDecides(uploads=Drift()))
    with refused("costs", "cycle of data"):
        visit_loads(drifting, context.federation, context.problem, context.learner, {})


EMBEDDING = 2 * 16 * 8 / 656  # work of the embedding of a sample, in units of a training on one


def looked(folder, **changes):
    """Return the times of the rounds of EMD-CFL, a training taking 2 seconds, the run, and the step."""
    run, algorithm = toy.Run(), CATALOGUE["emdcfl"](**changes.pop("options", {}))
    told = {"delay": Constant(2.0), "costs": "all", "devices": Alike(watts=3.0), **changes}
    context = toy.context_of(toy.config_of(algorithm, **told), toy.Tiny(4))
    step = build.build_server_step(context, ClientStore("test", str(folder)))
    build.build_engine(context, step).run(run.observe)
    return np.diff(run.times, prepend=0.0), run, step


def test_second_looks_take_the_time_of_what_they_compute(tmp_path):
    """Clients 0 to 3 hold 8, 11, 14, 17 samples and 6 for validation, and embed all for their questions.

    In round 1 each also embeds its 6 for each of three others; in round 2 nobody looks.
    """
    times, _, step = looked(tmp_path, rounds=2)
    n = np.array([8, 11, 14, 17])
    work = (n + 6 + 3 * 6) * EMBEDDING / n
    assert_allclose(times[-2:], [2 + 2 * work.max(), 2.0], rtol=1e-12)
    assert_allclose(step.computation.joules, 3 * (2 * 2 + 2 * work), rtol=1e-12)


def test_absent_clients_that_answer_and_ask_take_time_too(tmp_path):
    """Two clients a round; those seen for the first time and all seen before ask each other."""
    times, run, step = looked(tmp_path, rounds=2, participation=0.5)
    one, two = (set(record.cohort.tolist()) for record in run.records[-2:])
    n, new = np.array([8, 11, 14, 17]), two - one
    assert new
    work = np.zeros((2, 4))  # of each round
    for k in one:
        work[0, k] = 1 + (n[k] + 6 + 6) * EMBEDDING / n[k]
    for k in one | new:
        answers = len(one | new) - 1 if k in new else len(new)
        work[1, k] = (k in two) + (n[k] + 6 + 6 * answers) * EMBEDDING / n[k]
    assert_allclose(times[-2:], 2 * work.max(1), rtol=1e-12)
    assert_allclose(step.computation.joules, 3 * 2 * work.sum(0), rtol=1e-12)


@pytest.mark.parametrize("network", [Links(), Links(server_bytes_s=1e12)])
def test_a_round_ends_when_an_absent_client_has_answered(network):
    """Client 0 trains for 2 seconds; client 1 answers for three times as long, over both kinds of links."""
    duration = duration_of("emdcfl", changes={"network": network})
    moved = [Moved(1, 0, 0, True, 0, 0), Moved(1, 1, 1, False, 0, 0)]
    assert duration.round_end(10.0, moved, 0, looks={1: 3.0}) == pytest.approx(16)
    assert duration.round_end(10.0, moved, 0, looks={0: 3.0}) == pytest.approx(18)


def test_under_arrivals_looks_lengthen_the_visits_that_follow_them(tmp_path):
    """Clients 0 and 1 hold 8 and 11 samples. Both arrive after 2 seconds, and embed all and 6 of the other's.

    The visits that follow last longer by it, and count its energy when they begin; the next ones do not. Of
    those that begin last, one is under way at the end.
    """
    method, changes = CATALOGUE["emdcfl"](), {"delay": Constant(2.0), "devices": Alike(watts=3.0)}
    n = np.array([8, 11])
    work = (n + 6 + 6) * EMBEDDING / n
    done = toy.events(method, toy.Tiny(2), tmp_path / "a", 5, costs="all", **changes)
    lasted = {(row["client"], row["visit"]): row["time"] - row["start"] for row in done.arrivals}
    assert lasted == {
        **{(k, v): pytest.approx(2 + 2 * work[k] * (v == 1)) for k in (0, 1) for v in (0, 1)},
        (1, 2): pytest.approx(2.0),
    }
    assert_allclose(done.server_step.computation.joules, 3 * 2 * (np.array([2, 3]) + work), rtol=1e-12)
    usual = toy.events(method, toy.Tiny(2), tmp_path / "b", 5, costs="training", **changes)
    assert {row["time"] - row["start"] for row in usual.arrivals} == {2.0}


def test_looks_during_a_visit_add_up_until_the_next(tmp_path):
    """Both look in each step from the second on: client 0 also in step 3, in which only client 1 arrives.

    In step 1 client 0 has embedded its 14 samples for a question, with nobody there to ask.
    """
    method = CATALOGUE["emdcfl"](looks="seen")
    done = toy.events(method, toy.Tiny(2), tmp_path, 6, costs="all", delay=Constant(2.0))
    lasted = [(row["client"], row["visit"], row["time"] - row["start"]) for row in done.arrivals[2:]]
    look = 2 * (np.array([8, 11]) + 6 + 6) * EMBEDDING / np.array([8, 11])
    first = look[0] + 2 * 14 * EMBEDDING / 8
    expected = [(1, 1, 2 + look[1]), (0, 1, 2 + first), (1, 2, 2 + look[1]), (0, 2, 2 + 2 * look[0])]
    assert_allclose(lasted, expected, rtol=1e-12)


def test_looks_at_the_server_and_under_the_usual_rule_take_no_time(tmp_path):
    for name, changes in (("a", {"options": {"samples": "server"}}), ("b", {"costs": "training"})):
        times, _, step = looked(tmp_path / name, rounds=1, **changes)
        assert times[-1] == 2.0
        assert_allclose(step.computation.joules, 6.0)


def test_looks_that_are_not_declared_are_refused(monkeypatch):
    monkeypatch.setattr(CATALOGUE["emdcfl"], "look_passes", SecondLook.look_passes)
    with refused("costs", "emdcfl does not declare what a second look computes"):
        duration_of("emdcfl")


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("key", ["costs", "devices"])
def test_without_seconds_neither_costs_nor_energy(replayed, key, tmp_path):
    (tmp_path / "events.csv").write_text("client,visit,start,time,read_version\n0,0,0,1,0\n")
    trace = Replay(str(tmp_path / "events.csv"))
    steps = {"policy": ClientDecides(uploads=OneEachStep())}
    changes = {"policy": EveryArrival(), "clock": trace, "rounds": 1} if replayed else steps
    asked = {"costs": "all"} if key == "costs" else {"devices": Alike(watts=3.0)}
    with refused(key, "has no effect"):
        toy.context_of(toy.config_of(CATALOGUE["ccfl"](), **changes, **asked), toy.Tiny(4))


def test_a_bound_is_said(capsys):
    duration = duration_of("fedsoft", num_clusters=3)
    assert duration.end(0, 0, 0.0) == pytest.approx(2 * (1 + 3 * 304 / 656))
    assert "fedsoft compute less than they are charged for" in capsys.readouterr().err


# -- energy --------------------------------------------------------------------------------------------------

TWO = Classes({"slow": DeviceClass(0.5, watts=3.0), "fast": DeviceClass(0.5, speed=4.0, watts=10.0)})


def energy_of(folder, method="fedavg", **changes):
    """Return the server step and the names of the clients' devices after a run."""
    algorithm = CATALOGUE[method]()
    config = toy.config_of(algorithm, **{"delay": Constant(2.0), "rounds": 3, "devices": TWO, **changes})
    context = toy.context_of(config, toy.Tiny(4))
    step = build.build_server_step(context, ClientStore("test", str(folder)))
    run = toy.Run()
    build.build_engine(context, step, run.arrivals.extend).run(run.observe)
    return step, np.array(context.duration.devices), run


def test_energy_is_power_times_computing_time(tmp_path):
    """Three rounds: 3 W for 2 s each, and 10 W for half a second."""
    step, names, _ = energy_of(tmp_path)
    assert_allclose(step.computation.joules, np.where(names == "slow", 3 * 3 * 2.0, 3 * 10 * 0.5))
    assert step.computation.columns()["joules"] == 2 * 18 + 2 * 15


def test_energy_of_all_that_is_computed(tmp_path):
    step, names, _ = energy_of(tmp_path, "ditto", costs="all")
    assert_allclose(step.computation.joules, 2 * np.where(names == "slow", 18.0, 15.0))


def test_energy_of_visits_that_arrived(tmp_path):
    step, names, run = energy_of(tmp_path, policy=EveryArrival(), rounds=9)
    made = np.bincount([a["client"] for a in run.arrivals], minlength=4)
    assert made.sum() == 9
    assert_allclose(step.computation.joules, made * np.where(names == "slow", 6.0, 5.0))


def test_one_power_for_all_and_none_without_it(tmp_path):
    step, _, _ = energy_of(tmp_path / "one", devices=Alike(watts=1.5))
    assert_allclose(step.computation.joules, 3 * 1.5 * 2)
    step, _, _ = energy_of(tmp_path / "none", devices=Alike())
    assert step.computation.joules is None
    assert "joules" not in step.computation.columns()


def test_classes_without_power_beside_some_with_it_are_refused():
    with refused("classes.watts", "the other classes have watts; give b some"):
        Classes({"a": DeviceClass(0.5, watts=3.0), "b": DeviceClass(0.5)})
