"""Stacked training against one client after the other, and visits in lockstep."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from support import toy
from support.each import for_each
from support.runs import CONFIG
from torch import nn
from torch.testing import assert_close

from mpifl import cli
from mpifl.core.federation import DataInfo, Split
from mpifl.core.rng import key
from mpifl.core.torchvision_compat import torchvision
from mpifl.models import MODELS
from mpifl.training.backend import Request
from mpifl.training.batched import LockstepRunner, stackable, train_all
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner, pick_stack
from mpifl.training.tasks import Classification, NextToken

SIZES = (23, 5, 12, 1, 23)  # batches of 5: 5, 1, 3, 1 and 5 steps, the last ones of 3, 5, 2, 1 and 3 samples
SPLITS = [toy.draw("train", k, n, 0) for k, n in enumerate(SIZES)]
CONFIGS = {
    "plain": LocalConfig(epochs=2, batch_size=5, lr=0.1),
    "momentum and decay": LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": LocalConfig(epochs=2, batch_size=5, lr=0.01, optimizer="adam", weight_decay=0.1),
    "steps": LocalConfig(steps=4, batch_size=5, lr=0.1, momentum=0.5),
    "no epoch": LocalConfig(epochs=0),
}


def learner(name: str = "mlp", kernels: bool = True, **options) -> Learner:
    """Return a learner of a small network with weights of its own seed."""
    torch.manual_seed(11)
    return Learner(MODELS[name](**options).build((1, 4, 4), 3), kernels=kernels)


def requests(one: Learner, config: LocalConfig, **more) -> list[Request]:
    """Return a request of every client, each from a start of its own."""
    starts = [one.init + 0.01 * k for k in range(len(SIZES))]
    return [
        Request(w, split, config, key(3, "visit", k), 1, **more)
        for k, (w, split) in enumerate(zip(starts, SPLITS, strict=True))
    ]


def alone(one: Learner, request: Request):
    """Return what the serial loop makes of a request."""
    r = request
    return one.sgd(r.start, r.split, r.config, r.key, step=r.step, direction=r.direction, part=r.part)


def compare(one: Learner, asked: list[Request]) -> None:
    """Assert that a stack finds what the serial loop finds, within 1e-4 of the largest change."""
    for request, found in zip(asked, train_all(one.context, asked), strict=True):
        expected = alone(one, request)
        scale = max(float((expected.vector - request.start).abs().max()), 1e-3)
        assert_close(found.vector, expected.vector, rtol=0, atol=1e-4 * scale)
        assert (found.steps, found.lr, found.momentum) == (expected.steps, expected.lr, expected.momentum)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_stack_of_unequal_clients_is_each_of_them_alone(config):
    compare(learner(hidden=(7,)), requests(learner(hidden=(7,)), config))


def test_convolutions_too():
    one = learner("emdcfl_cnn", channels=(3, 4), embedding=5)
    compare(one, requests(one, CONFIGS["momentum and decay"]))


def test_only_the_part_moves_in_a_stack():
    one = learner(hidden=(7,))
    asked = requests(one, CONFIGS["momentum and decay"], part=one.layout.part("head"))
    compare(one, asked)
    (body,) = one.layout.part("body")
    for request, found in zip(asked, train_all(one.context, asked), strict=True):
        assert_close(found.vector[body], request.start[body], rtol=0, atol=0)


def test_every_client_keeps_its_own_direction():
    one = learner(hidden=(7,))
    asked = [
        Request(
            r.start, r.split, r.config, r.key, 1, direction=lambda g, w, r=r: g + 0.7 * (w - r.start + 0.1)
        )
        for r in requests(one, CONFIGS["momentum and decay"])
    ]
    compare(one, asked)
    plain = train_all(one.context, requests(one, CONFIGS["momentum and decay"]))
    assert (train_all(one.context, asked)[0].vector - plain[0].vector).abs().max() > 1e-3


class Unused(nn.Module):
    """A network with a layer that nobody calls and, in training, one that joins in with the third batch."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.never, self.head = nn.Linear(16, 3), nn.Linear(16, 3)
        self.late = nn.Linear(16, 3) if late else None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        out = self.head(x.flatten(1))
        return out if self.late is None or self.calls < 3 else out + self.late(x.flatten(1))


@pytest.mark.parametrize("pull", [None, 0.7])
@pytest.mark.parametrize("name", ["momentum and decay", "adam"])
def test_a_layer_without_gradient_is_left_alone_by_weight_decay_and_momentum(name, pull):
    """As `torch.optim` leaves it; a direction of the method moves it, without decay. Alone and in a stack."""
    config = CONFIGS[name]
    one = Learner(Unused(late=False))
    start = one.init + 0.05
    direction = None if pull is None else lambda g, w: g + pull
    asked = Request(start, SPLITS[0], config, key(3), 1, direction=direction)
    compare(one, [asked])
    never = torch.cat([start[s] for n, s in one.layout.slices.items() if n.startswith("never")])
    assert never.any()
    found = alone(one, asked).vector
    moved = torch.cat([found[s] for n, s in one.layout.slices.items() if n.startswith("never")])
    if pull is None:
        assert_close(moved, never, rtol=0, atol=0)
    else:
        one.sgd(start, SPLITS[0], config, key(3))
        assert (never - moved > 0.01).all()

    if pull is None and name == "momentum and decay":
        late = Learner(Unused(late=True), kernels=False)
        late.context.momentum.fill_(7.0)  # what another client left
        net = copy.deepcopy(late.flat.load(late.init, train=True))
        optimizer = torch.optim.SGD(net.parameters(), config.lr, momentum=0.9, weight_decay=0.01)
        for index in late.context.batches(SPLITS[0], config, key(3)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(SPLITS[0].x[index]), SPLITS[0].y[index]).backward()
            optimizer.step()
        expected = torch.cat([p.detach().flatten() for p in net.parameters()])
        assert_close(late.sgd(late.init, SPLITS[0], config, key(3)).vector, expected, rtol=1e-5, atol=1e-6)


def test_requests_of_several_kinds_are_answered_in_their_order():
    one = learner()
    asked = requests(one, CONFIGS["plain"])
    asked[1], asked[3] = (requests(one, CONFIGS["steps"])[i] for i in (1, 3))
    compare(one, asked)


def texts(seed: int, n: int) -> Split:
    """Return n texts of 8 tokens, of whose labels 1 to 8 count."""
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, 12, (2, n, 8), generator=draws)
    counts = torch.arange(8) < torch.randint(1, 9, (n, 1), generator=draws)
    return Split(x, torch.where(counts, y, -100))


def test_texts_weigh_by_the_tokens_that_count():
    """The loss of a batch is the mean over its tokens, of which texts have 1 to 8; the rest is -100."""
    torch.manual_seed(11)
    model = MODELS["transformer"](width=8, heads=2, layers=1)
    one = Learner(model.build_for(DataInfo((8,), 12, "tokens", "tokens", 12)), task=NextToken())
    config = LocalConfig(epochs=2, batch_size=5, lr=0.5)
    compare(one, [Request(one.init, texts(k, n), config, key(3, k)) for k, n in enumerate(SIZES)])


class Summed(Classification):
    """A task whose loss of a batch is the sum over its samples."""

    def loss(self, output, labels):
        return self.total_loss(output, labels)


class Doubled(Classification):
    """A task whose losses of samples are not those that its loss of a batch is the mean of."""

    def losses(self, output, labels):
        return 2 * super().losses(output, labels)


@pytest.mark.parametrize("task", [Summed(), Doubled()], ids=lambda task: type(task).__name__)
def test_a_loss_that_is_no_known_mean_of_samples_is_not_stacked(task, tmp_path, capsys):
    torch.manual_seed(11)
    one = Learner(MODELS["mlp"](hidden=(7,)).build((1, 4, 4), 3), kernels=False, task=task)
    visit = lambda: one.sgd(one.init, SPLITS[0], CONFIGS["plain"], key(1)).vector  # noqa: E731
    for found in one.lockstep.run([visit, visit]):
        assert torch.equal(found, visit())
    assert pick_stack(one, SPLITS[0], CONFIGS["plain"], 8) == 1
    where = ["--output.folder", str(tmp_path / "runs"), "--data.cache", str(tmp_path), "--system.stack", "2"]
    name = f"{__file__}:{type(task).__name__}"
    assert cli.main(["run", str(CONFIG), "--quiet", *where, "--task.name", name]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "system.stack = 2: " in said
    assert "is not the mean of its samples' losses" in said


def with_hook(register: str, on: str = "") -> nn.Module:
    """Return a network with a hook on itself or on its weights."""
    module = nn.Linear(2, 2)
    getattr(getattr(module, on) if on else module, register)(lambda *given: None)
    return module


def with_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    return module


@for_each(
    "module",
    [
        nn.Dropout(),
        nn.Dropout2d(),
        nn.AlphaDropout(),
        nn.RReLU(),
        "StochasticDepth",
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2),
        nn.BatchNorm2d(2, affine=False, track_running_stats=False),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm2d(2, track_running_stats=True),
        with_buffer(),
        with_hook("register_forward_hook"),
        with_hook("register_full_backward_hook"),
        with_hook("register_hook", on="weight"),
    ],
    ids=lambda module: module if isinstance(module, str) else type(module).__name__,
)
def test_what_is_random_or_keeps_something_is_not_stacked(module):
    """A stack has one module for all clients: one random draw, one running mean, one call of a hook."""
    if module == "StochasticDepth":
        module = torchvision().ops.StochasticDepth(0.5, "row")  # imported here only: it takes two seconds
    assert stackable(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2)))
    assert not stackable(nn.Sequential(nn.Linear(2, 2), nn.Sequential(module)))


@pytest.mark.parametrize("model", ["{name: flt_mlp}", "{name: resnet20}"], ids=["dropout", "batch norm"])
def test_a_run_that_would_stack_dropout_or_batch_norm_is_refused(model, tmp_path, capsys):
    where = ["--output.folder", str(tmp_path / "runs"), "--data.cache", str(tmp_path), "--model", model]
    assert cli.main(["run", str(CONFIG), "--quiet", *where, "--system.stack", "2"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    for word in ("system.stack", "2", "dropout", "batch norm", "use 1"):
        assert word in said
    assert not (tmp_path / "runs").exists(), "nothing was begun"


def test_a_frozen_layer_stays_frozen_in_a_stack():
    one = learner(hidden=(7,))
    one.flat.module.body.requires_grad_(False)
    (body,) = one.layout.part("body")
    compare(one, requests(one, CONFIGS["momentum and decay"]))
    for request, found in zip(
        requests(one, CONFIGS["plain"]), train_all(one.context, requests(one, CONFIGS["plain"])), strict=True
    ):
        assert_close(found.vector[body], request.start[body], rtol=0, atol=0)


def test_a_hook_added_later_takes_its_client_out_of_the_stack():
    one, asked = learner(kernels=False), []
    one.lockstep.train_requests = lambda requests: asked.extend(requests) or train_all(one.context, requests)
    visit = lambda: one.sgd(one.init, SPLITS[0], CONFIGS["plain"], key(1)).vector  # noqa: E731
    plain = one.lockstep.run([visit])[0]
    assert len(asked) == 1
    handle = one.flat.module.head.weight.register_hook(lambda g: 0 * g)
    hooked = one.lockstep.run([visit])[0]
    handle.remove()
    assert len(asked) == 1
    assert (hooked - plain).abs().max() > 1e-3


def test_the_size_of_a_stack_is_one_where_nothing_can_be_stacked():
    assert pick_stack(learner("flt_mlp"), SPLITS[0], CONFIGS["plain"], 8) == 1
    assert pick_stack(learner(), SPLITS[0], CONFIGS["plain"], 3) in (1, 3)


def test_visits_wait_for_each_other_and_run_one_at_a_time():
    """Three visits that ask twice, once and never: first two requests are answered, then one."""
    seen, heard = [], []

    def train_requests(requests):
        heard.append(list(requests))
        return [10 * q for q in requests]

    runner = LockstepRunner(train_requests)

    def visit(name: int, times: int) -> list[int]:
        answers = []
        for i in range(times):
            seen.append((name, i))
            answers.append(runner.ask(name + i))
        return answers

    assert not runner.listening
    assert runner.run([lambda: visit(1, 2), lambda: visit(5, 1), lambda: visit(7, 0)]) == [[10, 20], [50], []]
    assert heard == [[1, 5], [2]]
    assert seen == [(1, 0), (5, 0), (1, 1)]


def test_a_visit_that_records_no_gradients_leaves_the_others_theirs():
    recorded = []
    runner = LockstepRunner(lambda requests: recorded.append(torch.is_grad_enabled()) or requests)

    def without() -> bool:
        with torch.no_grad():
            runner.ask(1)
            return torch.is_grad_enabled()

    def usual() -> bool:
        before = torch.is_grad_enabled()
        runner.ask(2)
        return before and torch.is_grad_enabled()

    assert runner.run([without, usual]) == [False, True]
    assert recorded == [True]
    assert torch.is_grad_enabled()


def test_settings_that_a_visit_changes_are_its_own():
    seen = []

    def answers(requests: list) -> list:
        seen.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        return requests

    runner = LockstepRunner(answers)

    def visit(dtype: torch.dtype) -> list[torch.dtype]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        runner.ask(1)
        return [before, torch.get_default_dtype()]

    types = torch.float64, torch.float16
    assert runner.run([partial(visit, dtype) for dtype in types]) == [[torch.float32, t] for t in types]
    assert seen == [torch.float32]
    assert torch.get_default_dtype() == torch.float32


def test_an_error_of_the_training_ends_all_visits():
    ended = []

    def fails(requests: list) -> list:
        raise MemoryError("too large a stack")

    runner = LockstepRunner(fails)

    def waits() -> None:
        try:
            runner.ask(1)
        finally:
            ended.append(True)

    with pytest.raises(MemoryError):
        runner.run([waits, waits])
    assert ended == [True, True]


def test_a_training_under_an_autocast_of_its_own_is_no_part_of_a_stack():
    one, config = learner(kernels=False), CONFIGS["plain"]

    def visit():
        with torch.autocast("cpu", torch.bfloat16):
            own = one.sgd(one.init, SPLITS[0], config, key(1)).vector
            assert torch.is_autocast_enabled("cpu")
        return own, one.sgd(one.init, SPLITS[0], config, key(1)).vector

    (alone, usual), (second, _) = one.lockstep.run([visit, visit])
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(alone, second)
    assert_close(usual, one.sgd(one.init, SPLITS[0], config, key(1)).vector, rtol=0, atol=1e-5)
    assert (alone - usual).abs().max() > 1e-4


def test_an_error_of_one_visit_ends_the_others():
    runner = LockstepRunner(lambda requests: requests)
    ended = []

    def waits() -> None:
        try:
            runner.ask(1)
        finally:
            ended.append(True)

    def fails() -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        runner.run([waits, fails, waits])
    assert ended == [True, True]
    assert runner.run([lambda: runner.ask(3)]) == [3], "and it can be used again"


def test_a_learner_in_a_stack_trains_alone_what_brings_its_own_loss():
    one = learner(kernels=False)
    config = CONFIGS["plain"]

    def own_loss(module, x, y, index):
        return nn.functional.cross_entropy(module(x), y)

    def visit():
        split: Split = SPLITS[0]
        stacked = one.sgd(one.init, split, config, key(1))
        return stacked, one.sgd(one.init, split, config, key(1), loss=own_loss)

    for stacked, serial in one.lockstep.run([visit, visit]):
        assert_close(stacked.vector, serial.vector, rtol=0, atol=1e-5)
        assert torch.equal(serial.vector, one.sgd(one.init, SPLITS[0], config, key(1)).vector)
