"""`local.keep_optimizer`: momentum and moments go on from visit to visit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.rng import key
from mpifl.experiment.schema import SystemConfig
from mpifl.models import MODELS
from mpifl.training.config import LocalConfig
from mpifl.training.cuda_graph import Replayed
from mpifl.training.kernel_backend import KernelBackend
from mpifl.training.learner import Learner

FULL = LocalConfig(batch_size=100, lr=0.1, momentum=0.9, weight_decay=0.01)  # a step an epoch
ADAM = replace(FULL, optimizer="adam", lr=0.01)
BACKENDS = {"kernels": {"kernels": True}, "pytorch": {"kernels": False}, "graphs": {"graphs": Replayed()}}


def learner_of(name: str) -> Learner:
    """Return a learner of an MLP with a backend."""
    torch.manual_seed(3)
    return Learner(MODELS["mlp"](hidden=(8,)).build((1, 4, 4), 3), **BACKENDS[name])


def visits(learner: Learner, config: LocalConfig, kept: KeptOptimizer | None, **more: Any) -> torch.Tensor:
    """Return the model after three visits."""
    split, w = toy.draw("train", 0, 12, 0), learner.init
    for visit in range(3):
        w = learner.sgd(w, split, config, key(0, visit), kept=kept, **more).vector
    return w


@pytest.mark.parametrize("config", [FULL, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_of_another_client_is_kept_where_the_part_differs_between_visits(name, config):
    """A client trains the head, then the body; another one has trained on the same rank before."""

    def trained(learner: Learner, client: int) -> torch.Tensor:
        kept, w, split = KeptOptimizer(), learner.init, toy.draw("train", client, 12, client)
        for visit, part in enumerate(("head", "body", "head")):
            moving = learner.layout.part(part)
            w = learner.sgd(w, split, config, key(client, visit), kept=kept, part=moving).vector
        return w

    alone, busy = learner_of(name), learner_of(name)
    trained(busy, 0)
    assert torch.equal(trained(alone, 1), trained(busy, 1))


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("config", [FULL, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", BACKENDS)
def test_visits_that_keep_their_optimiser_are_one_longer_visit(name, config, directed):
    """Three visits of a full-batch step are a visit of three epochs, up to the order of sums; new optimisers
    end elsewhere. Steps are counted.
    """
    learner, split = learner_of(name), toy.draw("train", 0, 12, 0)
    more = {"direction": (lambda g, w: g + 0.1 * w)} if directed else {}
    if name == "kernels" and config is FULL:
        assert isinstance(learner.backends[1], KernelBackend)
    kept = KeptOptimizer()
    w = visits(learner, config, kept, **more)
    long = learner.sgd(learner.init, split, replace(config, epochs=3), key(0), **more).vector
    assert_close(w, long, rtol=1e-5, atol=1e-6)
    assert kept.steps == 3
    assert (kept.square is None) == (config is FULL)
    assert float((visits(learner, config, None, **more) - long).norm()) > 1e-3


def test_all_backends_agree_on_what_is_kept():
    found = {}
    for name in BACKENDS:
        learner, kept, config = learner_of(name), KeptOptimizer(), replace(FULL, batch_size=5)
        found[name] = visits(learner, config, kept), kept.momentum
    for name in ("pytorch", "graphs"):
        assert_close(found[name], found["kernels"], rtol=1e-4, atol=1e-5)


def test_a_part_that_moves_keeps_its_own_momentum():
    learner, kept = learner_of("kernels"), KeptOptimizer()
    head = learner.layout.part("head")
    w = visits(learner, FULL, kept, part=head)
    long = learner.sgd(learner.init, toy.draw("train", 0, 12, 0), replace(FULL, epochs=3), key(0), part=head)
    assert_close(w, long.vector, rtol=1e-5, atol=1e-6)


def rounds(method: str, folder: Any, steps: int, world: toy.Tiny | None = None, **local: Any) -> Any:
    """Return what some rounds leave behind; one client, unless a world is given."""
    one = world or toy.Tiny(1, 1, equal=True)
    options = {"fedem": {"num_components": 2}}.get(method, {})
    config = replace(FULL, **local)
    return toy.run(CATALOGUE[method](**options), one, folder, steps=steps, local=config)


@pytest.mark.parametrize("method", ["fedavg", "cfl", "local", "fedper"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rounds_of_one_client_that_keeps_its_optimiser_are_one_round(method, optimizer, tmp_path):
    """A round of two epochs, and two rounds of one: the same model, but not with new optimisers."""
    local = {"optimizer": optimizer, "lr": 0.01 if optimizer == "adam" else 0.1}
    once = rounds(method, tmp_path / "a", 1, epochs=2, **local).model(0)
    twice = rounds(method, tmp_path / "b", 2, keep_optimizer=True, **local).model(0)
    new = rounds(method, tmp_path / "c", 2, **local).model(0)
    assert_close(twice, once, rtol=1e-5, atol=1e-6)
    assert float((new - once).norm()) > 1e-3


def test_each_component_of_fedem_keeps_an_optimiser_of_its_own(tmp_path):
    """The files of a client hold two optimisers of two steps after two rounds."""
    done = rounds("fedem", tmp_path, 2, toy.Tiny(2), keep_optimizer=True)
    memory = done.server_step.store.load("optimizer", 0, 2)
    assert sorted(memory) == ["0.momentum", "0.steps", "1.momentum", "1.steps"]
    assert [int(memory[f"{j}.steps"]) for j in range(2)] == [2, 2]
    assert float((memory["0.momentum"] - memory["1.momentum"]).norm()) > 1e-3


def test_who_was_away_goes_on_where_it_was(tmp_path):
    """Steps kept are those of a client's own visits; evaluation and fine-tuning leave them alone."""
    done = rounds("fedavg", tmp_path, 4, toy.Tiny(6), keep_optimizer=True)
    again = toy.run(
        CATALOGUE["fedavg"](),
        toy.Tiny(6),
        tmp_path / "half",
        steps=4,
        participation=0.5,
        local=replace(FULL, keep_optimizer=True),
    )
    assert (done.server_step.visits == 4).all()
    for k, visits_of_k in enumerate(again.server_step.visits.tolist()):
        memory = again.server_step.store.load("optimizer", k, visits_of_k)
        assert int(memory["0.steps"]) == visits_of_k if visits_of_k else not memory


REFUSED = {
    "nothing to keep": ("fedavg", {"momentum": 0.0}, {}, "has nothing to keep"),
    "fednova": ("fednova", {}, {}, "begins every training with a new optimiser"),
    "pfedme": ("pfedme", {}, {}, "begins every training with a new optimiser"),
    "a stack": ("fedavg", {}, {"system": SystemConfig(stack=2)}, "clients that are stacked"),
}


@pytest.mark.parametrize(("method", "local", "more", "said"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_where_it_cannot_apply(method, local, more, said, tmp_path):
    config = replace(FULL, keep_optimizer=True, **local)
    with pytest.raises(UserError, match=said):
        toy.run(CATALOGUE[method](), toy.Tiny(), tmp_path, steps=1, local=config, **more)


def test_ifca_with_gradients_is_refused_and_with_averages_is_not(tmp_path):
    config = replace(FULL, keep_optimizer=True)
    for variant in ("averaging", "gradient"):
        method = CATALOGUE["ifca"](num_clusters=2, variant=variant)
        if variant == "averaging":
            assert toy.run(method, toy.Tiny(), tmp_path, steps=1, local=config).server.version == 1
            continue
        with pytest.raises(UserError, match=r"local\.keep_optimizer"):
            toy.run(method, toy.Tiny(), tmp_path, steps=1, local=config)


def test_automatic_stacks_are_left_out(tmp_path):
    config = toy.config_of(
        CATALOGUE["fedavg"](), local=replace(FULL, keep_optimizer=True), system=SystemConfig(stack=0)
    )
    assert toy.context_of(config, toy.Tiny()).decisions.stack == 1
