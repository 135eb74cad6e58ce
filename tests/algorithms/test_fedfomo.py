"""FedFomo: weights and choice by hand, and its first round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedfomo import FedFomo, by_tensors, choose, gains
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.parameters import Layout
from mpifl.core.rng import key
from mpifl.core.types import Message
from mpifl.forecast.traffic import forecast
from mpifl.protection.attacks import Scale
from mpifl.traffic.compression import Payload, TopK


def test_weights_by_hand():
    """L = 5 for the own model, 3, 1 and 6 for others at distances 1, 4 and 1: gains 2, 1 and 0."""
    assert_allclose(gains(np.array([5.0, 3.0, 1.0, 6.0]), np.array([1.0, 4.0, 1.0])), [2, 1, 0])
    assert_allclose(gains(np.array([5.0, 3.0]), np.array([0.0])), [0])


def test_a_model_that_diverged_gains_nothing_and_loses_to_all_others():
    nan = float("nan")
    assert_allclose(gains(np.array([5.0, nan, 1.0]), np.array([1.0, 4.0])), [0, 1])
    assert_allclose(gains(np.array([nan, nan, 3.0, 9.0]), np.array([1.0, 4.0, 2.0])), [0, 0.25, 0.5])


def test_a_visit_by_hand():
    """On validation data L(w) = (w - 4)^2 / 2, own w = 0: 8. Others: 2 (L = 2), 4 (0), -1 (12.5); distances
    2, 4, 1.

    Gains 6 / 2 = 3, 8 / 4 = 2, 0; omega = (0.6, 0.4, 0); w = 0.6 * 2 + 0.4 * 4 = 2.8; one step of rate 0.5
    on the training data, whose target is 6: 4.4.
    """
    state = {"model": torch.tensor([0.0])}
    message = byhand.message(model=[[2.0], [4.0], [-1.0]])
    client = byhand.Quadratic([6.0], val=[4.0])
    report, new = FedFomo().local_update(message, state, client, byhand.KEY)
    assert_allclose(report.notes["gain"], [3, 2, 0])
    assert_close(new["model"], torch.tensor([4.4]))
    assert_close(report.vectors["model"], torch.tensor([4.4]))


def test_a_client_whom_no_model_helps_keeps_its_own():
    """Own w = 3 (L = 0.5), others 0 and 8 (L = 8): no gain; one step: 3 - 0.5 (3 - 6) = 4.5."""
    state, client = {"model": torch.tensor([3.0])}, byhand.Quadratic([6.0], val=[4.0])
    report, new = FedFomo().local_update(byhand.message(model=[[0.0], [8.0]]), state, client, byhand.KEY)
    assert_allclose(report.notes["gain"], [0, 0])
    assert_close(new["model"], torch.tensor([4.5]))


def test_the_first_upload_is_a_change_of_the_initial_model(tmp_path):
    """Nothing is downloaded in round 1, and the server has the initial model: 3 times the change is sent."""
    federation = toy.Tiny()
    federation.attackers = np.array([2])
    changes = {"steps": 1, "evaluate": False}
    honest = toy.run(CATALOGUE["fedfomo"](), toy.Tiny(), tmp_path / "a", **changes)
    attack = Scale(clients=(2,), factor=3)
    lying = toy.run(CATALOGUE["fedfomo"](), federation, tmp_path / "b", attack=attack, **changes)
    start, trained = (run.tables["model"][2] for run in honest.servers)
    assert_close(lying.server.tables["model"][2], start + 3 * (trained - start))
    payload = Payload(compression=TopK(share=0.05))
    coded = toy.run(CATALOGUE["fedfomo"](), toy.Tiny(), tmp_path / "c", payload=payload, **changes)
    changed = (coded.server.tables["model"] != start).sum(1)
    assert_array_equal(changed, np.full(6, round(0.05 * len(start))))


def test_affinity_grows_by_raw_gains():
    """Client 1 was sent the models of 2 and 0 and gained 3 and 1 from them."""
    algorithm_state = {"affinity": np.full((3, 3), 0.5), "chosen": [[1, 2], [2, 0], [0, 1]], "seed": 0}
    server = byhand.server(3, algorithm_state, version=1, model=[[0.0]] * 3)
    plan = FedFomo(num_models=2).aggregate(server, byhand.notes([4], client=[1], gain=[[3.0, 1.0]]))
    assert_allclose(plan.algorithm_state["affinity"], [[0.5, 0.5, 0.5], [1.5, 0.5, 3.5], [0.5, 0.5, 0.5]])
    assert_array_equal(plan.mixings[0].keep, [1, 0, 1])


def test_the_most_helpful_are_chosen():
    """P_0 = (9, 1, 3, 2): itself is never sent; of the others 2 and 3 helped most."""
    P = np.tile([9.0, 1.0, 3.0, 2.0], (4, 1))
    assert_array_equal(choose(P, 2, 0.0, byhand.KEY)[0], [2, 3])
    assert_array_equal(choose(P, 2, 0.0, byhand.KEY)[2], [0, 3])


def test_with_chance_epsilon_models_are_drawn():
    """epsilon = 1/2 and one model of three others: 2 is sent with chance 1/2 + 1/6."""
    P = np.tile([9.0, 1.0, 3.0, 2.0], (4, 1))
    sent = np.array([choose(P, 1, 0.5, byhand.KEY.of(i))[0, 0] for i in range(3000)])
    assert_allclose(np.bincount(sent, minlength=4) / 3000, [0, 1 / 6, 2 / 3, 1 / 6], atol=0.04)


@pytest.mark.parametrize(("version", "epsilon"), [(0, 0.3), (2, 0.2), (6, 0.0), (9, 0.0)])
def test_chance_falls_by_epsilon_decay_in_every_round(version, epsilon, monkeypatch):
    """epsilon = 0.3 - 0.05 version, at least 0. Draws are addressed by the seed and the version."""
    asked = []

    def spy(P, size, chance, address):
        asked.append((size, chance, address))
        return np.zeros((3, size), int)

    monkeypatch.setattr("mpifl.algorithms.fedfomo.choose", spy)
    algorithm_state = {"affinity": np.zeros((3, 3)), "chosen": np.zeros((3, 2), int), "seed": 7}
    server = byhand.server(3, algorithm_state, version=version, model=[[0.0]] * 3)
    FedFomo(num_models=2).aggregate(server, byhand.notes([4], client=[1]))
    ((size, chance, address),) = asked
    assert (size, address) == (2, key(7, version))
    assert_allclose(chance, epsilon, atol=1e-12)


def test_each_client_downloads_what_was_chosen_and_is_judged_by_its_own():
    algorithm_state = {"affinity": np.zeros((3, 3)), "chosen": [[1, 2], [2, 0], [0, 1]], "seed": 0}
    server = byhand.server(3, algorithm_state, version=1, model=[[0.0]] * 3)
    assert FedFomo(num_models=2).reads(server, 1) == {"model": (2, 0)}
    assert FedFomo(num_models=2).serves(server, 1) == {}
    client = byhand.Quadratic([4.0], init=[7.0])
    assert_close(FedFomo().model_of(byhand.message(), {}, client), torch.tensor([7.0]))
    assert_close(FedFomo().model_of(byhand.message(), {"model": torch.ones(1)}, client), torch.ones(1))


def test_nothing_is_sent_before_the_first_round(tmp_path):
    """Down: M models of the second round. The first round is local training."""
    done = toy.run(FedFomo(num_models=2), toy.Tiny(), tmp_path / "two", steps=2, evaluate=False)
    assert done.server_step.ledger.total("down") == 4 * 6 * 2 * done.server_step.problem.layout.size
    agree(Limit("first step", "fedfomo", steps=1), "local", 0.5, tmp_path)


# ---- variant ucfl


def test_the_ucfl_variant_by_hand():
    """Test loss (w - 4)^2 / 2. Own models: 0 before the last (L = 8), 1 the last (L = 4.5). Others 2 (2), -1.

    Against 0: gains (8 - 4.5) / 1 = 3.5, (8 - 2) / 2 = 3, 0; omega = (7, 6, 0) / 13, its own last model among
    them: w = 19 / 13. One step of rate 0.5 towards 6 on the training data: (19 / 13 + 6) / 2.
    """
    state = {"model": torch.tensor([1.0]), "before": torch.tensor([0.0])}
    client, method = byhand.Quadratic([6.0], test=[4.0]), FedFomo(variant="ucfl")
    message = byhand.message(model=[[2.0], [-1.0]])
    report, new = method.local_update(message, state, client, byhand.KEY)
    assert_allclose(report.notes["gain"], [3, 0])
    assert_close(new, {"model": torch.tensor([(19 / 13 + 6) / 2]), "before": torch.tensor([1.0])})
    assert_close(method.model_of(message, state, client), torch.tensor([19 / 13]))


def test_in_the_ucfl_variant_a_client_whom_nothing_helps_goes_on_from_its_last_model():
    """Test target 0 = the model before the last: nothing gains."""
    state = {"model": torch.tensor([1.0]), "before": torch.tensor([0.0])}
    client = byhand.Quadratic([6.0], test=[0.0])
    assert_close(
        FedFomo(variant="ucfl").model_of(byhand.message(model=[[2.0]]), state, client), state["model"]
    )


def test_the_ucfl_variant_measures_tensor_by_tensor():
    """Tensors of 2 and 1 numbers: ||(3, 4)|| + ||12|| = 17, where the whole vector has norm 13."""
    layout = Layout(("w", "b"), ((2,), (1,)), 3)
    assert_allclose(by_tensors(torch.tensor([[3.0, 4.0, 12.0], [0.0, 0.0, 0.0]]), layout), [17, 0])


def test_the_ucfl_variant_averages_by_samples_after_the_first_round():
    """n = 1 and 3 of the clients that took part, 0 and 2: all start from 1/4 w_0 + 3/4 w_2."""
    method = FedFomo(num_models=2, variant="ucfl")
    algorithm_state = {"affinity": np.zeros((3, 3)), "seed": 0}
    server = byhand.server(3, algorithm_state, model=[[0.0]] * 3)
    plan = method.aggregate(server, byhand.notes([1, 3], client=[0, 2]))
    after = byhand.server(3, dict(plan.algorithm_state), version=1, model=[[0.0]] * 3)
    for hook in (method.reads, method.serves):
        assert_allclose(hook(after, 1)["model"], [0.25, 0, 0.75])
    average = Message({"model": torch.tensor([[5.0]])}, {"model": np.array([0.25, 0, 0.75])})
    client = byhand.Quadratic([6.0], test=[4.0])
    assert_close(method.model_of(average, {"model": torch.tensor([1.0])}, client), torch.tensor([5.0]))


def test_two_rounds_of_the_ucfl_variant_start_from_fedavgs_model(tmp_path):
    """All clients of round 2 train from FedAvg's model of round 1: its second model is their average."""
    fomo, fedavg = (
        toy.run(method, toy.Tiny(), tmp_path / name, steps=2, evaluate=False)
        for name, method in (("fomo", FedFomo(num_models=5, variant="ucfl")), ("avg", CATALOGUE["fedavg"]()))
    )
    n = np.asarray(fomo.server_step.problem.num_samples)
    average = torch.from_numpy(n / n.sum()) @ fomo.server.tables["model"].double()
    assert_close(average.float(), fedavg.server.tables["model"][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_traffic_of_the_ucfl_variant_is_forecast(tmp_path, steps):
    """Six clients: nothing, one average each, then M models each and M gains."""
    method = FedFomo(num_models=2, variant="ucfl")
    done = toy.run(method, toy.Tiny(), tmp_path / "run", steps=steps, evaluate=True)
    d = done.server_step.problem.layout.size
    late = max(steps - 2, 0)
    expected = 4 * 6 * ((steps > 1) * d + late * 2 * d), 4 * 6 * (steps * d + late * 2)
    assert (done.server_step.ledger.total("down"), done.server_step.ledger.total("up")) == expected
    context = toy.context_of(toy.config_of(method, rounds=steps), toy.Tiny())
    assert forecast(context).total == expected


def test_only_the_paper_needs_validation_data():
    assert FedFomo().needs.validation
    assert not FedFomo(variant="ucfl").needs.validation
