"""The client that a method works with during a visit: its data and the rank's learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mpifl.core.client import Client, ClientHost, Direction, Loss, T, Trained, TrainedVisits
from mpifl.core.computation import SERVER, Call, Purpose, Work
from mpifl.core.devices import CPU, memory_share, split_on
from mpifl.core.errors import MethodError, Missing, require
from mpifl.core.federation import ClientData, Federation, LazyClient, Split, StoredSamples
from mpifl.core.optimizer_memory import OptimizerMemory
from mpifl.core.parameters import Part
from mpifl.core.progress import Stage, doing
from mpifl.core.rng import Key
from mpifl.core.task import Task
from mpifl.core.torch_state import kept
from mpifl.core.types import State, Vector

from .backend import VisitRequests, sizes_of, train_visits
from .config import OF_SGD, LocalConfig
from .learner import Learner
from .own_metrics import OwnMetric
from .passes import figures, form_of
from .resident import RESIDENT_SHARE, ResidentClients

FIT = "fit_"  # beginning of the names of a trainer's metrics in metrics.csv


class Batch(Split):
    """A mini-batch from `batches`, which applies the visit's `work`; `sgd` does not apply it again."""


class LocalClient(Client):
    """One client at one visit.

    Args:
        k: its number, 0 .. N - 1.
        federation: holds its data.
        learner: trains and evaluates its model.
        config: options of local training.
        visit: number of its visits before this one.
        step: the server step, from 1.
        home: device of the vectors that it returns; None: the learner's. The server's own clients return
            their vectors in main memory.
        metrics: metrics to evaluate in addition to the task's metrics and loss.
        work: fraction of the mini-batches after which each of its trainings ends, at least one mini-batch;
            None: all of them.
        resident: what the rank keeps on its device of its clients; None: samples are copied for each visit.
    """

    def __init__(
        self,
        k: int,
        federation: Federation,
        learner: Learner,
        config: LocalConfig,
        visit: int = 0,
        step: int = 1,
        home: torch.device | None = None,
        metrics: Sequence[OwnMetric] = (),
        work: Fraction | None = None,
        resident: ResidentClients | None = None,
    ) -> None:
        self._resident = resident
        self._results_on = learner.device if home is None else home
        self.id, self.visit, self.step = k, visit, step
        self.layout, self.init = learner.layout, learner.init.to(self._results_on)
        self.task = learner.task
        self._federation, self._learner, self._config = federation, learner, config
        self._data_set = federation.data_set(k, visit, step)
        self._optimizers: OptimizerMemory | None = None
        self._metrics = metrics
        self._work = work
        self.told: dict[str, float] = {}

    @cached_property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute of Client
        """The number of training samples at this visit."""
        return self._federation.num_samples(self.id, self._data_set)

    @cached_property
    def data(self) -> ClientData:
        """The client's data at this visit, on the learner's device; each split is loaded at first use."""
        data, device = self._federation.client(self.id, self._data_set), self._learner.device
        if device.type == "cpu":
            return data
        resident = None if self._federation.changes else self._resident

        def read(name: str) -> Split:
            def copy() -> Split:
                return split_on(data.split(name), device)

            return copy() if resident is None else resident.split(self.id, name, copy)

        return LazyClient.reading(read, data.further)

    @property
    def augments(self) -> bool:
        """Whether training changes the images of each batch."""
        return self._config.augment != "none"

    def pixels(self, split: str = "train") -> Split:
        """Return a split at this visit with the images in their stored form, in main memory."""
        return self._federation.pixels(self.id, split, self._data_set)

    @property
    def auxiliary(self) -> LocalClient:
        """The same client with the auxiliary network (`Algorithm.auxiliary`)."""
        learner = self._learner.auxiliary
        if learner is None:
            raise Missing("no network beside the model", "name one: define auxiliary()")
        twin = copy(self)
        twin.data, twin._learner, twin.layout, twin.task = self.data, learner, learner.layout, learner.task
        twin.init, twin._optimizers, twin._metrics = learner.init.to(self._results_on), None, ()
        return twin

    def load_optimizer(self, memory: State) -> None:
        """Continue this visit's trainings with the optimisers of the last visit."""
        self._optimizers = OptimizerMemory(memory)

    def optimizer_memory(self) -> State:
        """Return the states of the optimisers of this visit's trainings."""
        return {} if self._optimizers is None else self._optimizers.tensors()

    def sgd(
        self,
        start: Vector,
        key: Key,
        *,
        direction: Direction | None = None,
        loss: Loss | None = None,
        part: Part | None = None,
        split: Split | None = None,
        **changes: Any,
    ) -> Trained:
        """Train on the client's training data.

        Raises:
            UserError: `part` cuts a tensor or contains no parameter.
        """
        if part is not None:
            self._learner.context.check(part)
        config = self._changed(changes)
        memory = self._optimizers if config.remembers else None
        train = self.data.train if split is None else split_on(split, self._learner.device)
        if not isinstance(split, Batch):
            config = self._shortened(config, len(train))
        steps = config.num_steps(len(train), self._learner.drop_single)
        if self._learner.trainer is None:
            self._learner.count(
                self._counted_as, "sgd", lambda: self._learner.passes.training(train, config, part)
            )
        with self._training(steps) as stage:
            trained = self._learner.sgd(
                start,
                train,
                config,
                key,
                step=self.step,
                direction=direction,
                loss=loss,
                part=part,
                kept=None if memory is None else memory.next(),
                stage=stage,
            )
        if self._learner.trainer is not None:
            self._note_fit(trained, train, config, part)
        away = trained.vector.device != self._results_on
        return replace(trained, vector=trained.vector.to(self._results_on)) if away else trained

    def _note_fit(self, trained: Trained, train: Split, config: LocalConfig, part: Part | None) -> None:
        """Count what a trainer has computed, and keep what it tells for the report."""
        passes, form = self._learner.passes, form_of(train.x.shape[1:], train.x.dtype)
        samples = trained.samples or 0
        self._learner.count(
            self._counted_as,
            "sgd",
            lambda: passes.trained(form, samples, trained.steps, config.batch_size, part),
        )
        self.told |= {f"{FIT}{name}": float(value) for name, value in trained.metrics.items()}

    def _changed(self, changes: Mapping[str, Any]) -> LocalConfig:
        """Return the options with the changes of a call; `epochs` of a call also replaces `local.steps`.

        Raises:
            MethodError: there is a trainer, which has its own options in place of those that change.
        """
        own = sorted(changes.keys() & OF_SGD) if self._learner.trainer is not None else []
        if own:
            remedy = "a trainer does not take it; say so in the method: asks = ('sgd',)"
            raise MethodError("client.sgd", f"the method sets {', '.join(own)}", remedy)
        if "epochs" in changes:
            changes = {"steps": None, **changes}
        return replace(self._config, **changes) if changes else self._config

    def _training(self, num_steps: int) -> AbstractContextManager[Stage | None]:
        """Return a context that counts the mini-batches of a training; here none: progress counts visits."""
        return nullcontext()

    def _shortened(self, config: LocalConfig, num_samples: int) -> LocalConfig:
        """Return options that limit a training on `num_samples` samples to this visit's `work`."""
        if self._work is None:
            return config
        steps = config.num_steps(num_samples, self._learner.drop_single)
        if not steps:
            return config
        return replace(config, steps=max(1, steps * self._work.numerator // self._work.denominator))

    def batches(self, key: Key, **changes: Any) -> Iterator[Split]:
        """Yield the batches of a visit, the same as those of `sgd` under the same key."""
        data = self.data.train
        config = self._shortened(self._changed(changes), len(data))
        for index in self._learner.batches(data, config, key):
            yield Batch(data.x[index], data.y[index])

    def gradient(self, vector: Vector, split: Split | None = None) -> Vector:
        """Return the gradient [p] of the mean loss at `vector`."""
        self._learner.check_gives("gradient")
        split = self.data.train if split is None else split_on(split, self._learner.device)
        self._learner.count(self._counted_as, "gradient", lambda: self._learner.passes.gradient(split))
        return self._learner.gradient(vector, split).to(self._results_on)

    def losses(self, vector: Vector, split: Split | None = None) -> torch.Tensor:
        """Return the loss of each sample [n].

        Raises:
            UserError: `split` is empty, although the client has training data.
        """
        split = self._filled(split)
        output = self._outputs("losses", vector, split.x)
        return self.task.losses(output, split.y.to(output.device))

    def loss(self, vector: Vector, split: Split | None = None) -> float:
        """Return the mean loss as training defines it: for texts, the mean over tokens.

        Raises:
            UserError: `split` is empty, although the client has training data.
        """
        split, task = self._filled(split), self.task
        if task.has_total and type(task).count is Task.count:
            return float(self.losses(vector, split).double().mean())
        output = self._outputs("loss", vector, split.x)
        y = split.y.to(output.device)
        if not task.has_total:
            return float(task.loss(output, y))
        return float(task.total_loss(output.double(), y)) / max(task.count(y), 1)

    def _filled(self, split: Split | None) -> Split:
        """Return a split (None: the training data); raise `UserError` if only the split is empty."""
        split = self.data.train if split is None else split
        remedy = "has no samples in a set (training, validation or test) by whose loss this method chooses"
        require(
            len(split) > 0 or not len(self.data.train),
            "data.scenario",
            f"client {self.id}",
            f"{remedy}; give it some",
        )
        return split

    def evaluate(self, vector: Vector, split: Split | None = None) -> dict[str, float]:
        """Return metrics, `loss` and the user's metrics on `split` (default: test data); NaN if empty."""
        split = self.data.test if split is None else split
        if not len(split):
            names = (*(m.name for m in self.task.scored), "loss", *(m.name for m in self._metrics))
            return dict.fromkeys(names, float("nan"))
        found = self._trainer_scores(vector, split)
        if found is not None:
            return found
        output = self._outputs("evaluate", vector, split.x)
        y = split.y.to(output.device)
        return {**self.task.evaluate(output, y), **self.measure(output, y)}

    def _trainer_scores(self, vector: Vector, split: Split) -> dict[str, float] | None:
        """Return what a trainer evaluates itself; None where the task does."""
        learner = self._learner
        if learner.trainer is None or not learner.trainer.evaluates:
            return None
        learner.count(self._counted_as, "evaluate", lambda: learner.passes.outputs(split.x))
        scores = learner.scores(vector, split)
        wanted = (*(m.name for m in self.task.scored), "loss", *(m.name for m in self._metrics))
        lacking = [name for name in wanted if name not in scores]
        remedy = f"its evaluate returns no {', '.join(lacking)}; return a mapping with {', '.join(wanted)}"
        require(not lacking, "local.trainer", learner.trainer.name, remedy)
        return {name: float(scores[name]) for name in wanted}

    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Return the metrics of `evaluation.metrics`."""
        return {metric.name: metric(logits, labels, self.id) for metric in self._metrics}

    def logits(self, vector: Vector, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, ...] of samples `x` under `vector`: logits [n, L] of classes."""
        return self._outputs("logits", vector, x)

    def embed(self, vector: Vector, x: torch.Tensor, *, train_mode: bool = False) -> torch.Tensor:
        """Return the embeddings [n, ...] of samples `x` under the extractor of `vector`."""
        return self._outputs("embed", vector, x, train_mode)

    def _outputs(self, call: Call, vector: Vector, x: torch.Tensor, train_mode: bool = False) -> torch.Tensor:
        """Return the outputs of samples for a call, or the embeddings for `embed`."""
        learner, embedding = self._learner, call == "embed"
        if not embedding:
            learner.check_gives("outputs")
        learner.count(self._counted_as, call, lambda: learner.passes.outputs(x, embedding, train_mode))
        return learner.outputs(vector, x, embedding, train_mode).to(self._results_on)

    @property
    def _counted_as(self) -> int:
        """The client whose computation this is."""
        return self.id


class ServerClient(LocalClient):
    """A labelled set of the server as a client; its trainings are shown as stages of rank 0's progress."""

    @property
    def _counted_as(self) -> int:
        return SERVER

    def _training(self, num_steps: int) -> AbstractContextManager[Stage | None]:
        return doing("training on the server's data", num_steps, "mini-batches")


class _ServerSets(Federation):
    """Labelled sets of the server, each as the data of a client."""

    def __init__(self, splits: Sequence[Split], like: Federation) -> None:
        self.splits, self.num_clients = splits, len(splits)
        self.num_classes, self.shape, self.groups = like.num_classes, like.shape, None
        self.sizes = np.array([[len(s), 0, 0] for s in splits], np.int64).reshape(-1, 3)

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return set `k` as training, validation and test data."""
        return ClientData(self.splits[k], self.splits[k], self.splits[k])


def public_clients(
    federation: Federation, learner: Learner, config: LocalConfig, splits: Sequence[Split] | None = None
) -> tuple[ServerClient, ...]:
    """Return the labelled sets that the server owns, each as a client in main memory.

    Args:
        federation: gives the sets, their shapes and classes.
        learner: trains and evaluates their models.
        config: options of local training.
        splits: sets to use instead; None for those of the federation.
    """
    sets = _ServerSets(federation.public() if splits is None else splits, federation)
    return tuple(ServerClient(g, sets, learner, config, home=CPU) for g in range(sets.num_clients))


class LocalClients(ClientHost):
    """The clients of a rank: the data of all clients, one learner, the options of local training.

    Args:
        federation: the clients' data.
        learner: trains and evaluates on this rank's device.
        local: options of local training.
        differing: client -> its own options, for clients whose options differ.
        metrics: metrics to evaluate in addition to the task's metrics and loss.
        begins: maps the initial vector [d] and a client to what the client has of it; None: all.
    """

    def __init__(
        self,
        federation: Federation,
        learner: Learner,
        local: LocalConfig,
        differing: Mapping[int, LocalConfig] | None = None,
        metrics: Sequence[OwnMetric] = (),
        begins: Callable[[Vector, int], Vector] | None = None,
    ) -> None:
        self.federation, self.learner, self.local = federation, learner, local
        self.begins = begins
        self.differing, self.metrics = differing or {}, metrics
        self.device, self.task, self.layout = learner.device, learner.task, learner.layout
        self.computation = learner.computation
        self._works: dict[tuple[int, int], Work] = {}  # (samples, compared models) -> work of a plain visit
        self.keeps_optimizer = local.keep_optimizer
        self.resident: ResidentClients | None = None
        self.metric_names = tuple(metric.name for metric in metrics)
        self.metric_directions = tuple(metric.better for metric in metrics)

    def host(self, clients: np.ndarray, ranks: int) -> None:
        """Keep the samples of the clients that this rank hosts, on its GPU where there is room."""
        self.federation.host(clients, ranks)
        if self.resident is None and self.device != CPU:
            self.resident = ResidentClients(self.device, memory_share(self.device, ranks, RESIDENT_SHARE))

    def state(self, client: int, visit: int, load: Callable[[], State]) -> State:
        """Return a client's state after `visit` visits, from the device if it is there."""
        if self.resident is None:
            return super().state(client, visit, load)
        return self.resident.state(client, visit, load)

    def keep_state(self, client: int, visit: int, state: State) -> None:
        """Keep the state of a client that this rank hosts on its GPU."""
        if self.resident is not None:
            self.resident.keep_state(client, visit, state)

    def num_steps(self, k: int, visit: int) -> tuple[int, int]:
        """Return the numbers of mini-batches in a client's visit and in one pass over its training data."""
        local, single = self.differing.get(k, self.local), self.learner.drop_single
        num_samples = self.federation.num_samples(k, visit)
        return local.num_steps(num_samples, single), local.pass_steps(num_samples, single)

    def client(
        self, k: int, visit: int = 0, step: int = 1, work: Fraction | None = None, **changes: Any
    ) -> LocalClient:
        """Return a client at a visit."""
        local = self.differing.get(k, self.local)
        local = replace(local, **changes) if changes else local
        client = LocalClient(
            k,
            self.federation,
            self.learner,
            local,
            visit,
            step,
            work=work,
            metrics=self.metrics,
            resident=self.resident,
        )
        client.init = client.init if self.begins is None else self.begins(client.init, k)
        return client

    def public_clients(self) -> Sequence[ServerClient]:
        """Return the labelled sets that the server owns, each as a client."""
        return public_clients(self.federation, self.learner, self.local)

    def train_visits(
        self,
        visits: tuple[np.ndarray, np.ndarray],
        starts: Sequence[Vector],
        out: Sequence[Vector],
        key: Key,
        step: int,
        mu: float | None = None,
        change: bool = False,
    ) -> TrainedVisits | None:
        """Train clients at visits that only train, with the kernels; return None where they cannot."""
        if not self.learner.trains_visits or self.differing or self.local.keep_optimizer:
            return None
        samples = self._samples(visits, step)
        asked = VisitRequests(*visits, starts, out, samples, self.local, key, step, mu, change)
        made = train_visits(self.learner.backends, asked)
        if made is not None:
            self._count("training", visits[0], made.num_samples, 0)
        return made

    def best_models(
        self, visits: tuple[np.ndarray, np.ndarray], models: Sequence[torch.Tensor], step: int
    ) -> np.ndarray | None:
        """Return the index of the best model of each visit, from the kernels; None where they cannot."""
        if self.learner.kernels is None:
            return None
        samples = self._samples(visits, step)
        made = self.learner.kernels.best_models(samples, models)
        if made is not None:
            self._count("choice", visits[0], sizes_of(samples), len(models[0]))
        return made

    def _count(self, purpose: Purpose, clients: np.ndarray, sizes: np.ndarray, num_models: int) -> None:
        """Count the trainings of visits, or the losses by which they compare models."""
        passes, form, known = self.learner.passes, form_of(self.federation.shape), self._works
        works = []
        for n in sizes.tolist():
            if (work := known.get((n, num_models))) is None:
                losses = passes.forward(form, n).times(num_models)
                known[n, num_models] = work = losses if num_models else passes.trainings(form, n, self.local)
            works.append(work)
        self.computation.add_clients(clients, purpose, figures(works))

    def _samples(self, visits: tuple[np.ndarray, np.ndarray], step: int) -> StoredSamples | list[Split]:
        """Return where the training samples of some visits in a step are stored, or the split of each."""
        held = visits[0], self.federation.data_sets_of(*visits, step)
        stored = self.federation.stored(*held)
        if stored is not None:
            return stored
        splits = list[Split]()
        for k, number in zip(*(numbers.tolist() for numbers in held), strict=True):
            with kept():  # a user's data set may change settings
                splits.append(self.federation.client(k, number).train)
        return splits

    def run_lockstep(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Run visits side by side, training them in one stack where possible; return their results."""
        return self.learner.lockstep.run(works)
