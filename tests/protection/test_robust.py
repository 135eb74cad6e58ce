"""Robust rules and attackers in whole steps: with every method, in both engines, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import cases, toy
from support.each import for_each
from support.nightly import mostly_nightly
from support.runs import CONFIG
from torch.testing import assert_close

from mpifl import cli
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.experiment.section_checks import check_robust
from mpifl.protection.attacks import SignFlip
from mpifl.protection.robust_rules import Krum, Median, NormBound, NoRule
from mpifl.simulation.policies import Barrier, Buffer

METHODS = {name: CATALOGUE[name](**cases.OPTIONS.get(name, {})) for name in CATALOGUE}
AVERAGING = [n for n, a in METHODS.items() if a.needs.averages and not a.needs.new_rows and n != "flt"]
FEW = ("fedavg", "scaffold", "ifca", "cfl", "fedem", "fedavgm", "fedper", "fedcuau", "fedbuff")  # usual
OTHERS = [name for name, a in METHODS.items() if not a.needs.averages]


@pytest.mark.parametrize("name", mostly_nightly(AVERAGING, FEW))
def test_a_bound_that_nothing_reaches_leaves_every_method_as_it_is(name, tmp_path):
    policy = {"policy": Buffer(size=3)} if name == "fedbuff" else {}
    walk = toy.events if policy else toy.run
    plain, robust = (
        walk(METHODS[name], toy.Tiny(), tmp_path / str(i), steps=2, robust=rule, **policy)
        for i, rule in enumerate((NoRule(), NormBound(1e9)))
    )
    for table, rows in plain.server.tables.items():
        assert_array_equal(robust.server.tables[table], rows)


@pytest.mark.parametrize("rule", [NormBound(1e9), NormBound(1e-6), Krum(f=0), Median()], ids=str)
def test_updates_that_cfl_keeps_for_absent_clients_are_no_means(rule, tmp_path):
    """A split among four of six clients: the rule moves the models, and each kept update stays as it came."""
    changes = {"cohort_size": 4, "steps": 2, "robust": rule}
    run = toy.run(METHODS["cfl"], toy.Tiny(), tmp_path, **changes)
    kept = run.server.algorithm_state["cached_norm"]
    assert len(kept) > 2, "nobody was absent at a split"
    assert_close(run.server.tables["update"].norm(dim=1).numpy(), kept.astype(np.float32))
    too_small = run.server_step.config.filters.figures()["robust_too_small"]
    assert too_small == sum(0 < n < 3 for n in (run.plans[-1].mixings[0].weights > 0).sum(1)) * (
        not isinstance(rule, NormBound)
    )


@for_each("name", OTHERS)
def test_methods_that_do_not_average_refuse_a_rule(name):
    check_robust(NoRule(), METHODS[name])
    with pytest.raises(UserError, match=r"robust.name = 'median': .* averages no uploads"):
        check_robust(Median(), METHODS[name])


def test_rows_that_change_places_have_no_norm_to_bound():
    check_robust(Median(), METHODS["emdcfl"])
    with pytest.raises(UserError, match="reassigns its rows"):
        check_robust(NormBound(), METHODS["emdcfl"])


def attacked(clients: tuple[int, ...]) -> toy.Tiny:
    """Return a federation of which some clients attack."""
    federation = toy.Tiny(equal=True)
    federation.attackers = np.array(clients)
    return federation


def test_a_flipped_sign_enters_the_mean_as_it_should(tmp_path):
    """Row w, upload x of client 2 of six equal ones: 2 w - x instead of x moves the mean by (w - x) / 3."""
    attack, one = SignFlip(clients=(2,)), {"steps": 1, "evaluate": False}
    honest = toy.run(FedAvg(), toy.Tiny(equal=True), tmp_path / "a", **one)
    lying = toy.run(FedAvg(), attacked((2,)), tmp_path / "b", attack=attack, **one)
    alone = Path(tmp_path / "c")
    start = honest.servers[0].tables["model"][0]
    step, _ = toy.start(FedAvg(), toy.Tiny(equal=True), alone, cohort_size=1)
    server, _ = toy.step_of(step, step.initialize(), np.array([2]))
    moved = (start - server.tables["model"][0]) / 3
    assert moved.abs().max() > 1e-3
    difference = lying.server.tables["model"][0] - honest.server.tables["model"][0]
    assert_close(difference, moved, rtol=1e-4, atol=1e-6)


def test_a_barrier_takes_the_steps_of_rounds(tmp_path):
    changes = {"robust": Median(), "attack": SignFlip(clients=(2,))}
    rounds = toy.run(FedAvg(), attacked((2,)), tmp_path / "a", **changes)
    events = toy.events(FedAvg(), attacked((2,)), tmp_path / "b", policy=Barrier(), **changes)
    assert_array_equal(events.server.tables["model"], rounds.server.tables["model"])
    assert events.server_step.config.filters.figures() == {"robust_too_small": 0}


@pytest.mark.parametrize("rule", [Median(), Krum(f=1)], ids=str)
def test_a_few_liars_do_not_move_a_model_far(rule, tmp_path):
    """One client of six sends -1000 times its update."""
    attack = SignFlip(clients=(2,), factor=1000)
    mean, robust, honest = (
        toy.run(FedAvg(), federation, tmp_path / str(i), robust=rule, attack=attack, evaluate=False)
        for i, (federation, rule) in enumerate(
            ((attacked((2,)), NoRule()), (attacked((2,)), rule), (toy.Tiny(equal=True), NoRule()))
        )
    )
    right = honest.server.tables["model"]
    assert torch.dist(robust.server.tables["model"], right) < 1.5 * right.norm()
    assert torch.dist(mean.server.tables["model"], right) > 10 * right.norm()


REFUSALS = {
    "one upload": (["--cohort_size", "1", "--robust", "median"], "robust.name = 'median': has no effect"),
    "arrivals": (
        ["--policy", "every_arrival", "--robust", "median"],
        "robust.name = 'median': has no effect on steps of one upload",
    ),
    "buffer": (
        ["--policy", "{name: buffer, size: 4}", "--robust", "{name: krum, f: 1}"],
        "robust.f = 1: Krum withstands f among 2 f + 3 uploads, and a step has 4; use at most 0",
    ),
    "no average": (
        ["--algorithm", "fedamp", "--robust", "median"],
        "robust.name = 'median': FedAMP averages",
    ),
    "beta": (["--robust", "{name: trimmed_mean, beta: 0.1}"], "robust.beta = 0.1: leaves none of 8 uploads"),
    "attackers": (["--attack", "{name: scale, clients: [8]}"], "attack.clients = [8]: clients are numbered"),
    "nobody": (["--attack", "sign_flip"], "attack.share = 0.0: say who attacks"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_cannot_be_is_refused_in_one_line(command, case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options, said = REFUSALS[case]
    assert cli.main([command, str(CONFIG), "--data.cache", str(tmp_path), *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1]


def test_a_plan_names_the_collective_and_its_bytes(tmp_path, capsys):
    """8 uploads of d = 910 numbers on 4 ranks: 256 columns each, and 654 results at rank 0."""
    options = ["--system.ranks", "4", "--data.cache", str(tmp_path)]
    assert cli.main(["plan", str(CONFIG), *options, "--robust", "median"]) == 0
    said = capsys.readouterr().out
    assert f"median, Alltoallv and Gatherv, {(8 * 256 + 654) * 4 / 1000:.4g} kB at the busiest rank" in said
    assert cli.main(["plan", str(CONFIG), *options, "--robust", "krum"]) == 0
    assert "krum, Alltoallv, Reduce of distances, then Reduce" in capsys.readouterr().out


def test_accuracy_of_honest_clients_is_written_beside_that_of_all(tmp_path):
    options = ["--output.folder", str(tmp_path), "--output.id", "x", "--data.cache", str(tmp_path)]
    attack = ["--attack", "{name: label_flip, clients: [1, 6]}"]
    assert cli.main(["run", str(CONFIG), "--quiet", *options, *attack]) == 0
    rows = [*csv.DictReader((tmp_path / "tiny-x" / "clients.csv").open())]
    assert [row["client"] for row in rows if row["attacker"] == "1"] == ["1", "6"]
    honest = [float(row["accuracy"]) for row in rows if row["attacker"] == "0"]
    (last,) = csv.DictReader((tmp_path / "tiny-x" / "metrics.csv").open())
    assert float(last["accuracy_honest_mean"]) == pytest.approx(np.mean(honest))
    assert float(last["accuracy_honest_worst"]) == min(honest)
