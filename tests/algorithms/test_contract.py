"""What every method of the catalogue must keep, on a federation of six clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import toy
from support.cases import PARAMS, named
from support.each import for_each
from support.nightly import mostly_nightly

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.capabilities import NewClients, OneShotStatistics, hooks_of, uses
from mpifl.core.computation import Held
from mpifl.experiment import citations
from mpifl.experiment.loader import from_tree, to_tree
from mpifl.experiment.schema import Config
from mpifl.training.client import LocalClient
from mpifl.training.passes import form_of


def three_steps(name: str, options: dict[str, object], folder: Path, participation: float) -> toy.Run:
    """Take three steps; every call of a hook is checked to leave its arguments alone."""
    return toy.run(CATALOGUE[name](**options), toy.Tiny(), folder, participation=participation)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> float:
    """Return the mean loss of the common initial model."""
    run = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path_factory.mktemp("start"), steps=0)
    return float(run.scores["loss"].mean())


def three_steps_are_finite(done: toy.Run) -> None:
    assert done.server.version == 3
    for scores in done.scores.values():
        assert scores.shape == (6,)
        assert np.isfinite(scores).all()
    for table in done.server.tables.values():
        assert table.dtype == torch.float32
        assert torch.isfinite(table).all()
    for name, value in done.server.algorithm_state.items():
        assert isinstance(value, np.ndarray), f"memo {name}"
        assert value.dtype.kind in "biuf", f"memo {name}: a digest needs numbers"


def rows_are_convex_mixtures_or_old_rows_with_updates_added(done: toy.Run) -> None:
    assert len(done.plans) == 3
    for mixing in (m for plan in done.plans for m in plan.mixings):
        kept = mixing.row_sums() - mixing.weights.sum(1)
        sums = np.where(np.isclose(kept, 1.0), 1.0, mixing.row_sums())
        assert_allclose(sums, 1.0, rtol=0, atol=1e-12, err_msg=f"{mixing.of} into {mixing.into}")


def every_client_has_a_row_and_a_cluster(done: toy.Run) -> None:
    labels = done.server_step.algorithm.labels(done.server)
    for numbers in (labels, done.server.assign):
        assert numbers.shape == (6,)
        assert np.issubdtype(numbers.dtype, np.integer)


def what_is_sent_is_booked_for_those_who_take_part(done: toy.Run) -> None:
    ledger = done.server_step.ledger
    never = np.setdiff1d(np.arange(6), np.concatenate([notes.client for notes in done.notes]))
    if not uses(done.server_step.algorithm, OneShotStatistics):
        assert_allclose(ledger.up[never], 0)
    if done.server.tables and any(plan.mixings for plan in done.plans):
        assert (np.delete(ledger.up, never) > 0).all()


def visits_compute_what_is_declared(done: toy.Run) -> None:
    """No more than is declared, and exactly so much unless it is declared as `at_most`."""
    step, federation, problem = done.server_step, toy.Tiny(), done.server_step.problem
    algorithm, learner = step.algorithm, step.config.clients.learner
    made = np.bincount(np.concatenate([n.client[n.fresh] for n in done.notes]).astype(int), minlength=6)
    form = form_of(toy.SHAPE)
    for k in range(6):
        held = Held(*federation.sizes[k].tolist())
        asked = algorithm.visit_passes(held, problem)
        found = step.computation.of_client(k, "training").plus(step.computation.of_client(k, "choice"))
        if asked is not None:
            most = learner.work(asked, form, toy.LOCAL).times(int(made[k]))
            if any(one.at_most for one in asked):
                assert all(a <= b for a, b in zip(found, most, strict=True))
            else:
                assert found == most, f"client {k}"
        if not uses(algorithm, OneShotStatistics) or (made[k] == 0 and uses(algorithm, NewClients)):
            continue
        asked = hooks_of(algorithm, OneShotStatistics).statistics_passes(held, problem)
        if asked is not None:
            once = learner.work(asked, form, toy.LOCAL)
            assert step.computation.of_client(k, "statistics") == once, f"statistics of client {k}"


PROPERTIES: tuple[Callable[[toy.Run], None], ...] = (
    three_steps_are_finite,
    rows_are_convex_mixtures_or_old_rows_with_updates_added,
    every_client_has_a_row_and_a_cluster,
    what_is_sent_is_booked_for_those_who_take_part,
    visits_compute_what_is_declared,
)


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("case", PARAMS)
def test_a_method_keeps_the_contract(case, untrained, tmp_path):
    """Everyone takes part, then half of the clients; a failure names each property that is broken.

    That two runs of one seed are one is part of `tests/mpi/test_catalogue.py`.
    """
    broken = []
    for participation in (1.0, 0.5):
        done = three_steps(*case, tmp_path / f"{participation}", participation)
        for keeps in PROPERTIES:
            try:
                keeps(done)
            except AssertionError as error:
                broken.append(f"participation {participation}, {keeps.__name__}: {error}")
        if not done.scores["loss"].mean() < untrained:
            broken.append(f"participation {participation}: nothing is learned")
    assert not broken, "\n".join(broken)


MEASURED = {"pi", "counts", "samples", "last"}  # what clients keep of measuring received models
KEEPING = [
    name
    for name, method in CATALOGUE.items()
    if (needs := method().needs).client_state and "epochs" not in needs.ignores and not needs.single_upload
]


@pytest.mark.parametrize("name", KEEPING)
def test_a_visit_without_a_step_leaves_what_training_left(name, tmp_path):
    """The second visit of client 0 once more, with a learner that takes no step."""
    options: dict[str, object] = {"fedfomo": {"num_models": 2}}.get(name, {})
    options |= {"flexcfl": {"num_groups": 2}, "cflgp": {"num_clusters": 2, "period": 1}}.get(name, {})
    method, visits = CATALOGUE[name](**options), []

    def told(hook, args, result):
        if hook == "local_update" and args[2].id == 0:
            visits.append(args)

    step, sampler = toy.start(method, toy.Tiny(), tmp_path, told=told)
    server = step.initialize()
    for number in (1, 2):
        server, _ = toy.step_of(step, server, sampler(number))
    (_, (message, state, client, address)) = visits
    learner = step.config.clients.learner.without_training()
    idle = LocalClient(0, toy.Tiny(), learner, toy.LOCAL, client.visit, client.step)
    report, kept = method.local_update(message, state, idle, address)
    trained = kept.keys() - MEASURED
    toy.same({name: kept[name] for name in trained}, {name: state[name] for name in trained})
    assert math.isnan(report.metrics["train_loss"])
    if name == "fedfomo":  # it mixes before it trains
        torch.testing.assert_close(report.vectors["model"], state["model"])
        assert not report.notes["gain"].any()


@for_each("name", CATALOGUE)
def test_a_method_says_where_it_comes_from_and_is_configured_by_its_name(name):
    cls = CATALOGUE[name]
    entry = citations.entry(cls.paper)
    assert entry.split("{")[1].startswith(f"{cls.paper},\n")
    assert all(f"  {field} = {{" in entry for field in ("author", "title", "year"))
    assert entry.endswith("\n}")
    assert (cls.__doc__ or "").strip()
    parents = [name for name, other in CATALOGUE.items() if other is not cls and issubclass(cls, other)]
    assert not parents, "abstract or final: methods share functions, not parents"
    built = from_tree(Config, {"algorithm": {"name": name}, "model": {"name": "mlp"}})
    assert built.algorithm == cls()
    assert from_tree(Config, to_tree(built)) == built


CHANGED: dict[str, dict[str, object]] = {  # key of `local` -> a section in which it is another than in LOCAL
    "epochs": {"epochs": 3},
    "steps": {"steps": 4},
    "batch_size": {"batch_size": 3},
    "lr": {"lr": 0.5},
    "momentum": {"momentum": 0.9},
    "weight_decay": {"weight_decay": 0.1},
    "optimizer": {"optimizer": "adam"},
    "lr_decay": {"lr_decay": 0.5},
    "milestones": {"milestones": (1,)},
    "augment": {"augment": "crop_flip"},
}
OWN_STEPS: list[tuple[str, dict[str, object]]] = [
    ("perfedavg", {}),
    ("pfedme", {"inner_steps": 2, "local_rounds": 3}),
    ("pfedme", {"variant": "ucfl", "inner_steps": 2, "local_rounds": 2}),
    ("ifca", {"num_clusters": 2, "variant": "gradient"}),
    ("cflgp", {"num_clusters": 2}),
]


@pytest.mark.parametrize("case", mostly_nightly(OWN_STEPS, [*OWN_STEPS[:2], OWN_STEPS[3]], named))
def test_a_method_names_the_keys_of_local_that_change_nothing(case, tmp_path):
    method = CATALOGUE[case[0]](**case[1])

    def trained(local: toy.LocalConfig) -> dict[str, object]:
        run = toy.run(method, toy.Tiny(), tmp_path, steps=2, evaluate=False, local=local)
        return toy.state_of(run.server)

    before = trained(toy.LOCAL)
    same = {key for key, change in CHANGED.items() if is_same(before, trained(replace(toy.LOCAL, **change)))}
    assert same == method.needs.ignores.keys() & CHANGED.keys()


def is_same(one: dict[str, object], other: dict[str, object]) -> bool:
    """Return whether two servers hold the same numbers."""
    try:
        toy.same(one, other)
    except AssertionError:
        return False
    return True
