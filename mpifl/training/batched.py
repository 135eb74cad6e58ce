"""Training of many clients' models at once: stacked parameters, one vectorised step for all clients.

Each visit runs in its own greenlet, one at a time and in a fixed order. A method is therefore written, and
behaves, as if its client were alone. A visit pauses when it asks for a training; once every running visit has
asked, one stacked training answers all of them.

In a stack each tensor of the model is stored once for all clients, [C, *shape]. A step computes the gradients
of all clients with `torch.func.vmap` and makes one fused update. Clients are sorted by their number of steps,
so that the active ones are the first rows. A smaller last batch is padded; the padding has weight 0. The loss
of a batch must be a known weighted mean of its samples' losses (`sample_weights`). The result agrees with
training one client after the other up to rounding (1e-4 of the largest change, see
tests/training/test_batched.py), not bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from greenlet import getcurrent, greenlet
from torch import nn

from mpifl.core.client import Trained
from mpifl.core.federation import IGNORED, Split
from mpifl.core.module_checks import untouched
from mpifl.core.parameters import Part, frozen_names
from mpifl.core.rng import key
from mpifl.core.task import Task
from mpifl.core.torch_state import kept, restore, state

from .augmentation import AUGMENTATIONS
from .backend import Backend, BatchShares, Request
from .config import LocalConfig
from .model_context import ModelContext, is_random
from .optimizer import adam, fused_sgd, gradients
from .precision import FLOAT32, forward_pass, training_in, under_autocast
from .tasks import Classification, NextToken

STATEFUL = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.RNNBase)


def stackable(module: nn.Module) -> bool:
    """Return whether clients with this model can be stacked.

    The model must have no random layers, no running statistics or other buffers that change, no recurrent
    layers (PyTorch computes them one client after the other) and no hooks.
    """
    kept = any(is_random(m) or isinstance(m, STATEFUL) for m in module.modules())
    buffers = {name for name, _ in module.named_buffers()} - frozen_names(module)
    return not kept and not buffers and untouched(module)


@torch.no_grad()
def draws(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a `stackable` module draws in training although no layer says so (`F.dropout`).

    Args:
        module: the module; it is in training mode afterwards.
        x: a few samples, on its device.
    """
    outputs = []
    for seed in range(2):
        with key(seed, "draws").seeded():
            outputs.append(module.train()(x))
    one, other = outputs
    return not torch.allclose(one, other, equal_nan=True)


def evenly(labels: torch.Tensor) -> torch.Tensor:
    """Return equal weights [n] that sum to 1."""
    return torch.full((len(labels),), 1.0 / len(labels), device=labels.device)


def _by_tokens(labels: torch.Tensor) -> torch.Tensor:
    counts = (labels != IGNORED).sum(1)
    return counts / counts.sum().clamp_min(1)


Weights = Callable[[torch.Tensor], torch.Tensor]
MEANS: dict[tuple[Callable[..., Any], Callable[..., Any]], Weights] = {
    (Classification.losses, Classification.loss): evenly,
    (NextToken.losses, NextToken.loss): _by_tokens,
}
"""(losses of samples, loss of a batch) of tasks with a loss of their own -> as `sample_weights`."""


def sample_weights(task: Task) -> Weights | None:
    """Return a function that maps labels [n] to the weight [n] of each sample in the batch loss.

    None where the loss of a batch is not known to be a weighted mean of its samples' losses: such clients
    cannot be stacked.
    """
    kind = type(task)
    if task.redraws:
        return None
    return evenly if kind.loss is Task.loss else MEANS.get((kind.losses, kind.loss))


TrainStack = Callable[[ModelContext, Sequence[Request]], list[Trained]]


def train_stack(context: ModelContext, requests: Sequence[Request]) -> list[Trained]:
    """Train requests of one `kind` in one stack; return their outcomes in the same order."""
    with training_in(requests[0].config.precision, context.device):
        return _Stack(context, requests).run()


def train_all(
    context: ModelContext, requests: Sequence[Request], train: TrainStack = train_stack
) -> list[Trained]:
    """Train requests together; return their outcomes in the same order.

    Args:
        context: a model that is `stackable`, and a task that has `sample_weights`.
        requests: requests with the task's loss; those of the same `kind` are trained in one stack.
        train: trains the requests of one kind.
    """
    out: dict[int, Trained] = {}
    for kind in dict.fromkeys(r.kind for r in requests):
        numbers = [i for i, r in enumerate(requests) if r.kind == kind]
        trained = train(context, [requests[i] for i in numbers])
        out |= dict(zip(numbers, trained, strict=True))
    return [out[i] for i in range(len(requests))]


def moving_names(context: ModelContext, part: Part | None) -> list[str]:
    """Return the names of the tensors that are trained if `part` is (None: all parameters)."""
    p = context.layout.num_parameters
    slices = part if part is not None else (slice(0, p),)
    frozen = {name for name, param in context.flat.module.named_parameters() if not param.requires_grad}
    return [
        name
        for name, s in context.layout.slices.items()
        if s.stop <= p and name not in frozen and any(q.start <= s.start < q.stop for q in slices)
    ]


def unused_names(context: ModelContext, split: Split, config: LocalConfig) -> frozenset[str]:
    """Return the parameters of a `stackable` model on which the loss does not depend.

    PyTorch leaves them alone; stacked gradients are 0 there. Only weight decay tells the difference: without
    it, none is looked for.
    """
    if not config.weight_decay or not len(split):
        return frozenset()
    module, few = context.flat.module, slice(0, 2)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad(), forward_pass(config.precision, context.device):
        loss = context.task.loss(module(split.x[few]), split.y[few])
    found = gradients(loss, [*named.values()]) if loss.requires_grad else ()
    return frozenset(name for name, g in zip(named, found, strict=False) if g is None)


def stacked_gradients(
    module: nn.Module, losses: Callable[..., torch.Tensor], precision: str = FLOAT32
) -> Callable[..., Any]:
    """Return a function that computes the gradients of all clients of a stack at once.

    Args:
        module: the clients' model.
        losses: (outputs, labels) -> loss of each sample.
        precision: number format of the forward and backward pass.

    Returns:
        (trained tensors, other tensors, samples, labels, weights of samples), all stacked over clients ->
        (gradients of the trained tensors, loss of each client).
    """

    def loss(
        own: dict[str, torch.Tensor],
        rest: dict[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with forward_pass(precision, x.device):
            value = (losses(torch.func.functional_call(module, {**own, **rest}, (x,)), y) * weight).sum()
        return value, value.detach()

    return torch.func.vmap(torch.func.grad(loss, has_aux=True))


def longest_first(batches: Sequence[Sequence[object]]) -> list[int]:
    """Return the indices of the clients, sorted by their number of batches, most first."""
    return sorted(range(len(batches)), key=lambda i: (-len(batches[i]), i))


def outcomes(
    requests: Sequence[Request],
    order: Sequence[int],
    vectors: Sequence[torch.Tensor],
    steps: Sequence[int],
    losses: Sequence[float],
    shares: Sequence[BatchShares],
) -> list[Trained]:
    """Return the outcomes in the order of the requests, given the rows of a stack.

    Args:
        requests: the requests.
        order: index of the request of each row.
        vectors: trained vector [d] of each row.
        steps: number of steps of each row.
        losses: sum of the losses of each row over its steps, each times the weight of its batch.
        shares: the weights of the batches of each row.
    """
    rows = {i: row for row, i in enumerate(order)}
    means = [of_row.mean(loss) for loss, of_row in zip(losses, shares, strict=True)]
    return [
        request.outcome(vectors[rows[i]], steps[rows[i]], means[rows[i]])
        for i, request in enumerate(requests)
    ]


def batch_shares(
    task: Task,
    requests: Sequence[Request],
    batches: Sequence[Sequence[torch.Tensor | np.ndarray]],
    columns: int,
    device: torch.device,
) -> tuple[list[BatchShares], torch.Tensor]:
    """Return the weights of the batches of each request, and as a table [steps, columns] on the device.

    Args:
        task: the task.
        requests: the trainings.
        batches: indices of the samples of each batch of each request, the longest list first.
        columns: columns of the table, one for each request and further ones of zeros.
        device: where the table is.
    """
    shares = [BatchShares(task, r) for r in requests]
    table = torch.zeros(len(batches[0]), columns, dtype=torch.float32)
    for row, of_row in enumerate(shares):
        for step, batch in enumerate(batches[row]):
            table[step, row] = of_row.next(batch)
    return shares, table.to(device)


class _Stack:
    """Clients of one kind, trained side by side."""

    def __init__(self, context: ModelContext, requests: Sequence[Request]) -> None:
        first = requests[0]
        self.module, self.config = context.flat.module, first.config
        self.lr = first.config.lr_at(first.step)
        batches = [list(context.batches(r.split, r.config, r.key)) for r in requests]
        self.order, self.asked = longest_first(batches), requests
        self.requests = [requests[i] for i in self.order]
        self.batches = [batches[i] for i in self.order]
        self.layout, self.device, self.task = context.layout, context.device, context.task
        weights = sample_weights(self.task)
        assert weights is not None
        self.weights = weights
        starts = torch.stack([r.start.to(self.device) for r in self.requests])  # [C, d]
        self.tensors = {name: t.contiguous() for name, t in self.layout.tensors(starts).items()}
        self.moving = moving_names(context, first.part)
        unused = unused_names(context, first.split, self.config)
        used = [i for i, name in enumerate(self.moving) if name not in unused]
        others = [i for i, name in enumerate(self.moving) if name in unused]
        decayed = (used, self.config), (others, replace(self.config, weight_decay=0.0))
        self.decayed = [(which, config) for which, config in decayed if which]  # positions, and their steps
        self.first = [torch.zeros_like(self.tensors[name]) for name in self.moving]  # momentum
        self.second = [torch.zeros_like(m) for m in self.first] if self.config.optimizer == "adam" else []
        self.losses = torch.zeros(len(starts), device=self.device)
        self.shares, self.share = batch_shares(
            self.task, self.requests, self.batches, len(self.requests), self.device
        )

    def run(self) -> list[Trained]:
        """Take all steps; return the outcomes in the order of the requests."""
        self.module.train()
        for step in range(len(self.batches[0])):
            active = sum(len(b) > step for b in self.batches)
            self._step(step, active)
        vectors = torch.cat([t.flatten(1) for t in self.tensors.values()], 1)  # [C, d]
        steps = [*map(len, self.batches)]
        rows = [v.clone() for v in vectors]
        return outcomes(self.asked, self.order, rows, steps, self.losses.tolist(), self.shares)

    def _step(self, step: int, active: int) -> None:
        """Take one step for each of the first `active` clients."""
        x, y, weight = self._batch(step, active)
        rows = {name: t[:active] for name, t in self.tensors.items()}
        moving = {name: rows[name] for name in self.moving}
        fixed = {name: t for name, t in rows.items() if name not in moving}

        take = stacked_gradients(self.module, self.task.losses, self.config.precision)
        grads, values = take(moving, fixed, x, y, weight)
        self.losses[:active] += values * self.share[step, :active]
        self._update(step, active, [grads[name] for name in self.moving])

    def _batch(self, step: int, active: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return samples [A, b, ...], labels [A, b, ...] and weights [A, b] of the batches at `step`."""
        size = max(len(b[step]) for b in self.batches[:active])
        xs, ys, weights = [], [], []
        for request, batches in zip(self.requests[:active], self.batches, strict=False):
            index = batches[step]
            x, y = request.split.x.index_select(0, index), request.split.y.index_select(0, index)
            if self.config.augment != "none":
                x = AUGMENTATIONS[self.config.augment](x, request.key.of("augment", step))
            missing = size - len(index)
            weight = self.weights(y)
            if missing:
                x = torch.cat([x, x[:1].expand(missing, *x.shape[1:])])
                y = torch.cat([y, y[:1].expand(missing, *y.shape[1:])])
                weight = F.pad(weight, (0, missing))
            xs.append(x)
            ys.append(y)
            weights.append(weight)
        return torch.stack(xs), torch.stack(ys), torch.stack(weights)

    @torch.no_grad()
    def _update(self, step: int, active: int, grads: list[torch.Tensor]) -> None:
        weights = [self.tensors[name][:active] for name in self.moving]
        if any(r.direction is not None for r in self.requests[:active]):
            grads = self._directed(active, grads)
        first, second = [m[:active] for m in self.first], [v[:active] for v in self.second]
        for which, config in self.decayed:
            w, g, m = ([some[i] for i in which] for some in (weights, grads, first))
            if config.optimizer == "adam":
                adam(w, g, m, [second[i] for i in which], config, self.lr, step + 1)
            else:
                fused_sgd(w, [x.contiguous() for x in g], m, config, self.lr, step == 0)

    def _directed(self, active: int, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients as changed by each client's `direction`, which gets them as a vector [p]."""
        p, slices = self.layout.num_parameters, self.layout.slices
        flat = torch.zeros(active, p, device=self.device)
        w = torch.cat([t[:active].flatten(1) for t in self.tensors.values()], 1)[:, :p]
        for name, g in zip(self.moving, grads, strict=True):
            flat[:, slices[name]] = g.flatten(1)
        for row, request in enumerate(self.requests[:active]):
            if request.direction is not None:
                flat[row] = request.direction(flat[row].clone(), w[row])
        return [flat[:, slices[name]].reshape(g.shape) for name, g in zip(self.moving, grads, strict=True)]


T = TypeVar("T")


class _Visit(Generic[T]):
    """One visit, which runs in its own greenlet from `advance` to its next request."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.result: T | None = None
        self.error: BaseException | None = None
        self.request: Request | None = None
        self.answer: Trained | Dismissed | None = None
        self.over = False
        self.greenlet = greenlet(self._run)  # when it ends, the greenlet that created it continues
        self._settings = state()

    def _run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.over = True

    def advance(self) -> None:
        """Run the visit until its next request or its end, with its own settings of PyTorch."""
        before = state()
        restore(self._settings, before)
        self.greenlet.switch()
        self._settings = state()
        restore(before, self._settings)

    def ask(self, request: Request) -> Trained:
        """Wait until a request is answered and return the answer; called by the visit itself."""
        self.request = request
        assert self.greenlet.parent is not None
        self.greenlet.parent.switch()
        if isinstance(self.answer, Dismissed):
            raise self.answer
        assert self.answer is not None
        return self.answer


class LockstepRunner:
    """Runs visits in lockstep: each runs until its next request, then all requests are answered at once.

    Args:
        train_requests: maps the requests of all running visits, in their order, to the outcomes.
    """

    def __init__(self, train_requests: Callable[[Sequence[Request]], Sequence[Trained]]) -> None:
        self.train_requests = train_requests
        self._current: _Visit[Any] | None = None

    @property
    def listening(self) -> bool:
        """Whether the caller is a visit of this runner."""
        return self._current is not None and getcurrent() is self._current.greenlet

    def ask(self, request: Request) -> Trained:
        """Wait until the current visit's request is answered and return the answer."""
        assert self._current is not None
        return self._current.ask(request)

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Run all visits and return their results, in order.

        If one visit raises an exception, the others are ended and the exception is raised.
        """
        visits = [_Visit(work) for work in works]
        left = visits
        while left:
            for visit in left:
                self._current = visit
                visit.advance()
                self._current = None
                if visit.error is not None:
                    self._dismiss(visits)
                    raise visit.error
            left = [visit for visit in left if not visit.over]
            requests = [visit.request for visit in left if visit.request is not None]
            try:
                with kept():
                    answers = self.train_requests(requests) if left else []
            except BaseException:
                self._dismiss(visits)
                raise
            for visit, answer in zip(left, answers, strict=True):
                visit.answer = answer
        return [visit.result for visit in visits]  # type: ignore[misc]  # all are over

    def _dismiss(self, visits: Sequence[_Visit[Any]]) -> None:
        """End the visits that still wait, so that each leaves its `with` and `try` blocks."""
        for visit in visits:
            self._current = visit
            while not visit.over:
                visit.answer = Dismissed()
                visit.advance()
        self._current = None


class Dismissed(RuntimeError):
    """Raised in a waiting visit when another visit of the same run has failed."""


class LockstepBackend(Backend):
    """Trains the requests of visits that run in lockstep in one stack.

    Args:
        context: a model that is `stackable`.
        train: trains the requests of one kind.

    Attributes:
        runner: runs the visits; outside its `run` no request is accepted.
    """

    def __init__(self, context: ModelContext, train: TrainStack = train_stack) -> None:
        self.context = context
        self._known_mean = sample_weights(context.task) is not None
        self.runner = LockstepRunner(partial(train_all, context, train=train))

    def accepts(self, request: Request) -> bool:
        """Return whether the request comes from a visit of `runner`, with the task's loss and no hooks.

        Nothing is accepted if the task has no `sample_weights`, or if the visit has turned on autocast.
        """
        fits = self._known_mean and request.loss is None and self.runner.listening
        return fits and not under_autocast() and self.context.untouched()

    def train(self, request: Request) -> Trained:
        """Wait until all other visits have made their requests; return the outcome of this one."""
        return self.runner.ask(request)
