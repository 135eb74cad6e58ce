"""Captured steps give what ordinary steps give; on a GPU they are CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support import toy
from torch import nn
from torch.testing import assert_close

from mpifl.core.devices import use_deterministic_algorithms
from mpifl.core.federation import Split
from mpifl.core.flat_model import FlatModel
from mpifl.core.rng import key
from mpifl.models import MODELS
from mpifl.training import cuda_graph
from mpifl.training.backend import Request
from mpifl.training.config import LocalConfig
from mpifl.training.cuda_graph import CapturedStack, CudaGraphBackend, Replayed
from mpifl.training.learner import Learner, pick_stack

EVERY = Replayed()
SPLITS = [toy.draw("train", k, n, 0) for k, n in enumerate((23, 10, 4))]  # of 5: with, without, only a rest
CONFIGS = {
    "plain": LocalConfig(epochs=2, batch_size=5, lr=0.1),
    "momentum and decay": LocalConfig(
        epochs=2, batch_size=5, lr=0.05, momentum=0.9, weight_decay=0.01, lr_decay=0.9
    ),
    "steps": LocalConfig(steps=3, batch_size=5, lr=0.1, momentum=0.5),
    "adam": LocalConfig(batch_size=5, optimizer="adam"),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def captured(learner: Learner) -> dict:
    """Return the steps that a learner has captured."""
    (backend,) = (b for b in learner.backends if isinstance(b, CudaGraphBackend))
    return backend.captured


def trained(
    graphs: Replayed | None,
    config: LocalConfig,
    name: str,
    device: str = "cpu",
    part: str | None = None,
    **more,
):
    """Return what clients make in two rounds with one learner, and the learner."""
    torch.manual_seed(3)
    learner = Learner(MODELS[name]().build((1, 4, 4), 3), device, kernels=False, graphs=graphs)
    if part:
        more["part"] = learner.layout.part(part)
    found = [
        learner.sgd(
            learner.init, type(s)(s.x.to(device), s.y.to(device)), config, key(1, t, k), step=t, **more
        )
        for t in (1, 2)
        for k, s in enumerate(SPLITS)
    ]
    return found, learner


@pytest.mark.parametrize("part", [None, "head"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_replayed_steps_give_the_bits_of_ordinary_ones(config, part):
    plain, _ = trained(None, config, "mlp", part=part)
    replayed, learner = trained(EVERY, config, "mlp", part=part)
    for a, b in zip(plain, replayed, strict=True):
        assert torch.equal(a.vector, b.vector)
        assert (a.steps, a.lr, a.loss) == (b.steps, b.lr, b.loss)
    assert bool(captured(learner)) == (config.optimizer == "sgd")


def test_a_step_is_captured_once_for_all_clients_and_rounds():
    _, learner = trained(EVERY, CONFIGS["momentum and decay"], "mlp")
    assert len(captured(learner)) == 1


def test_a_method_that_changes_gradients_trains_step_by_step():
    _, learner = trained(EVERY, CONFIGS["plain"], "mlp", direction=lambda g, w: g)
    assert not captured(learner)


LIKE = CONFIGS["momentum and decay"]


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, True),
        ({"epochs": 3, "lr": 0.2}, True),
        ({"batch_size": 4}, False),
        ({"momentum": 0.5}, False),
        ({"weight_decay": 0.0}, False),
    ],
)
def test_with_a_configuration_steps_like_its_own_are_captured(changed, kept):
    learner = Learner(MODELS["mlp"]().build((1, 4, 4), 3), graphs=Replayed(LIKE))
    learner.sgd(learner.init, SPLITS[0], replace(LIKE, **changed), key(1))
    assert bool(captured(learner)) == kept


def test_a_step_is_captured_for_labels_of_one_kind():
    """A method may train on classes, and then on what another model says of them."""
    learner = Learner(MODELS["mlp"]().build((1, 4, 4), 3), graphs=EVERY)
    plain = Learner(MODELS["mlp"]().build((1, 4, 4), 3), kernels=False)
    soft = Split(SPLITS[0].x, nn.functional.one_hot(SPLITS[0].y, 3).float())
    for split in (SPLITS[0], soft, SPLITS[0]):
        found, expected = (one.sgd(plain.init, split, LIKE, key(1)) for one in (learner, plain))
        assert torch.equal(found.vector, expected.vector)
    assert len(captured(learner)) == 2


def test_under_an_autocast_of_the_visits_own_steps_are_not_captured():
    learner = Learner(MODELS["mlp"]().build((1, 4, 4), 3), graphs=EVERY)
    with torch.autocast("cpu", torch.bfloat16):
        learner.sgd(learner.init, SPLITS[0], LIKE, key(1))
    assert not captured(learner)


def test_a_model_that_draws_numbers_trains_step_by_step():
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)), graphs=EVERY)
    learner.sgd(learner.init, SPLITS[0], CONFIGS["plain"], key(1))
    assert not captured(learner)
    assert isinstance(learner.flat, FlatModel)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_model_with_hooks_trains_step_by_step(register):
    """A captured step would call the hook once and never again."""
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)), graphs=EVERY)
    calls = []
    handle = getattr(learner.flat.module[2], register)(lambda *given: calls.append(1))
    trained = learner.sgd(learner.init, SPLITS[0], CONFIGS["plain"], key(1))
    assert len(calls) == trained.steps
    assert not captured(learner)
    handle.remove()
    learner.sgd(learner.init, SPLITS[0], CONFIGS["plain"], key(1))
    assert captured(learner)


STACKED = {
    **{name: config for name, config in CONFIGS.items() if name != "adam"},
    "no epoch": LocalConfig(epochs=0),
}
SIZES = (23, 5, 0, 1, 23)  # batches of 5: 5, 1, 0, 1 and 5 steps


def stack(device: str, config: LocalConfig, graphs: Replayed | None, name: str = "mlp", **more):
    """Return requests of five clients, what a stack makes of them, and the learner."""
    torch.manual_seed(11)
    shape = (1, 4, 4) if name == "mlp" else (1, 28, 28)
    learner = Learner(MODELS[name]().build(shape, 3), device, kernels=False, graphs=graphs)
    asked = []
    for k, n in enumerate(SIZES):
        x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(k)).to(device)
        split = Split(x, (torch.arange(n, device=device) + k) % 3)
        asked.append(Request(learner.init + 0.01 * k, split, config, key(3, k), 1, **more))
    return asked, learner.lockstep.train_requests(asked), learner


def compare(config: LocalConfig, device: str, name: str = "mlp", part: str | None = None) -> None:
    """Assert that a captured stack finds what each client does alone, but for rounding: within 1e-4 of the
    largest change on a CPU, and 1e-3 on a GPU, whose libraries compute a stack by other algorithms.
    """
    rounding = 1e-4 if device == "cpu" else 1e-3
    _, _, learner = stack(device, config, EVERY, name)
    more = {"part": learner.layout.part(part)} if part else {}
    asked, found, learner = stack(device, config, EVERY, name, **more)
    kept = learner.stacks.captured
    assert len(kept) == 1, "it was a captured stack"
    again = learner.lockstep.train_requests(asked)
    assert len(kept) == 1, "and captured once"
    for request, trained, second in zip(asked, found, again, strict=True):
        r, scale = request, 1e-3
        alone = learner.sgd(r.start, r.split, r.config, r.key, part=r.part)
        scale = max(float((alone.vector - r.start).abs().max()), scale)
        assert_close(trained.vector, alone.vector, rtol=0, atol=rounding * scale)
        assert (trained.steps, trained.lr, trained.momentum) == (alone.steps, alone.lr, alone.momentum)
        assert trained.loss == pytest.approx(alone.loss, rel=rounding, abs=rounding, nan_ok=True)
        assert torch.equal(second.vector, trained.vector), "nothing is left of the last stack"
        assert second.loss == pytest.approx(trained.loss, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("part", [None, "head"])
@pytest.mark.parametrize("config", STACKED.values(), ids=STACKED)
def test_a_captured_stack_of_unequal_clients_is_each_of_them_alone(config, part):
    compare(config, "cpu", part=part)


def test_batches_are_padded_to_what_the_largest_client_has():
    """A batch of everybody's samples, however few these are, costs no more than they do."""
    config = LocalConfig(batch_size=20000, lr=0.1)
    compare(config, "cpu")
    *_, learner = stack("cpu", config, EVERY)
    (kept,) = learner.stacks.captured.values()
    assert kept.x.shape[:2] == (5, 32)


def test_a_stack_that_fails_is_not_kept(monkeypatch):
    asked, _, learner = stack("cpu", CONFIGS["plain"], EVERY)
    learner.stacks.captured.clear()

    def too_large(self, requests):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CapturedStack, "train", too_large)
    with pytest.raises(torch.OutOfMemoryError):
        learner.lockstep.train_requests(asked)
    assert not learner.stacks.captured


def test_sizes_of_stacks_that_were_measured_are_not_kept():
    _, _, learner = stack("cpu", CONFIGS["plain"], EVERY)
    pick_stack(learner, Split(torch.randn(9, 1, 4, 4), torch.arange(9) % 3), CONFIGS["plain"], 4)
    assert not learner.stacks.captured


@gpu
@pytest.mark.parametrize("config", STACKED.values(), ids=STACKED)
@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_on_a_gpu_too(config, name):
    compare(config, "cuda", name)


@pytest.mark.parametrize("change", ["adam", "direction"])
def test_a_stack_of_what_is_no_plain_sgd_is_not_captured(change):
    config = CONFIGS["adam" if change == "adam" else "plain"]
    more = {} if change == "adam" else {"direction": lambda g, w: 2 * g}
    plain, captured = (stack("cpu", config, graphs, **more)[1] for graphs in (None, EVERY))
    for one, other in zip(plain, captured, strict=True):
        assert torch.equal(one.vector, other.vector)


def test_graphs_of_a_few_sizes_of_stacks_are_kept():
    asked, _, learner = stack("cpu", CONFIGS["plain"], EVERY)
    learner.stacks.MOST = 2
    for count in (2, 3, 5, 4):
        learner.lockstep.train_requests(asked[:count])
    assert [address[0] for address in learner.stacks.captured] == [5, 4]


def test_all_captures_share_a_stream(monkeypatch):
    """Each stream costs 65 MiB of cuBLAS workspace, which is never given back."""
    made, taken = [], []

    class Stream:
        def __init__(self, device=None):
            made.append(device)

        def wait_stream(self, other):
            assert other is not self

    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(taken.append(stream)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream=None: nullcontext(taken.append(stream)))
    steps = []
    for _ in range(2):
        assert cuda_graph.captured(lambda: steps.append(1), torch.device("cuda", 7)) is not None
    assert made[1:] == [torch.device("cuda", 7)]
    assert len(steps) == 2 * (cuda_graph.WARM_UP + 1)
    assert len(taken) == 4
    assert len(set(taken)) == 1
    cuda_graph._stream.cache_clear()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Ask a GPU for the same bits each time, as a run does."""
    use_deterministic_algorithms(torch.device("cuda"))
    yield
    torch.use_deterministic_algorithms(False)


@gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["mlp", "ifca_mlp", "lenet5", "resnet18"])
def test_graphs_on_a_gpu_give_the_bits_of_ordinary_steps(name):
    config = LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.9, weight_decay=0.01)
    found = []
    for graphs in (None, EVERY):
        torch.manual_seed(3)
        learner = Learner(MODELS[name]().build((3, 32, 32), 3), "cuda", kernels=False, graphs=graphs)
        split = toy.draw("train", 0, 23, 0)
        x = torch.randn(23, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
        found.append(learner.sgd(learner.init, type(split)(x, split.y.cuda()), config, key(1)))
    one, other = found
    assert torch.equal(one.vector, other.vector), float((one.vector - other.vector).abs().max())
    assert one.loss == other.loss


@gpu
def test_what_a_model_draws_on_a_gpu_depends_on_the_visit_only():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    learner = Learner(model, "cuda")
    split = type(SPLITS[0])(SPLITS[0].x.cuda(), SPLITS[0].y.cuda())
    found = []
    for _ in range(2):
        found.append(learner.sgd(learner.init, split, CONFIGS["plain"], key(1)).vector)
        torch.rand(7, device="cuda")
    assert torch.equal(*found)
