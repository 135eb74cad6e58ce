"""Visits that only train, many in one call: no client, message or report object for each, but columns.

Results equal those of visits run one by one (`Worker.visit`). If a visit fails here, the caller runs the
visits one by one, which gives the error message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mpifl.aggregation.exact_sum import max_abs
from mpifl.aggregation.tables import Tables, read_rows, row_distances
from mpifl.core.algorithm import plain_visit
from mpifl.core.capabilities import PlainVisit
from mpifl.core.client import TrainedVisits
from mpifl.core.timing import Stopwatch
from mpifl.core.types import Message

from .protocol import ClientTask, ReportHeader, ReportTable, TaskBatch
from .step_config import StepConfig

RUN = 64, 1 << 13  # most visits, and most samples, that are trained in one call


def in_one_call(config: StepConfig, tables: Tables, watch: Stopwatch) -> PlainVisitRunner | None:
    """Return what makes visits that only train; None if visits do more, or train in stacks.

    Args:
        config: objects and settings of server steps.
        tables: this rank's part of the server's tables.
        watch: counts the seconds of each phase.
    """
    visit = plain_visit(config.algorithm)
    if visit is None or config.stack > 1:
        return None
    return PlainVisitRunner(config, tables, watch, visit)


class _Trained(NamedTuple):
    """The result of trained visits: their outcome, and which of its downloaded models each one chose."""

    outcome: TrainedVisits
    chosen: np.ndarray  # int64 [m]


class PlainVisitRunner:
    """Runs this rank's visits in steps where visits only train.

    Args:
        config: objects and settings of server steps.
        tables: this rank's part of the server's tables.
        watch: counts the seconds of each phase.
        visit: what each visit does.
    """

    def __init__(self, config: StepConfig, tables: Tables, watch: Stopwatch, visit: PlainVisit) -> None:
        self.config, self.tables, self.watch, self.visit = config, tables, watch, visit
        self.remembered = config.remembered
        self.names = (visit.upload, *visit.unsent)

        c = config
        changed = c.filters.at_clients
        stays = (self.remembered or visit.upload) in self.names and not c.clients.keeps_optimizer
        # a change of a model with running statistics is reported with them (`Algorithm.changes`)
        changed |= visit.change and c.problem.layout.num_parameters < c.problem.layout.size
        self.possible = stays and not changed  # nothing else happens to uploads

    def _fit(self, batch: TaskBatch) -> bool:
        """Return whether the visits of a step only train, with no further processing of their uploads."""
        whole = all(not t.fresh or (t.work is None and "model" in t.reads) for t in batch.visits)
        compared = batch.compared is None or batch.compared[0] in self.names
        return self.possible and bool(batch.visits) and whole and compared and batch.looks is None

    def run_visit(
        self, task: ClientTask, message: Message
    ) -> tuple[ReportHeader, dict[str, torch.Tensor]] | None:
        """Return the report and uploads [1, d] of a single visit; None if it does more, or fails."""
        models, clients = message.vectors.get("model"), self.config.clients
        if not self.possible or task.work is not None or models is None:
            return None
        out = torch.empty(clients.layout.size, dtype=torch.float32)
        if models.shape[1] != len(out):
            return None
        visit = np.array([task.client], np.int64), np.array([task.visit], np.int64)
        with self.watch("train", task.client, task.visit), self.config.kept():
            made = self._in_one_call(visit, [models], [out], message.step)
        table = None if made is None else self._report([task], [out], None, [made])
        if table is None:
            return None
        if self.remembered:
            self._keep(task, out)
        return table.header(), dict.fromkeys(self.names, out[None])

    def run(
        self, batch: TaskBatch, rows: Callable[[int, int], list[torch.Tensor]]
    ) -> tuple[list[ReportTable], dict[str, list[torch.Tensor]]] | None:
        """Return the reports and uploads of a step; None if they cannot be trained in one call, or one fails.

        Args:
            batch: this rank's tasks.
            rows: function (width, count) -> vectors that receive the uploads.
        """
        if not self._fit(batch):
            return None
        tasks, tables = batch.visits, list[ReportTable]()
        out = rows(self.config.clients.layout.size, len(tasks))
        self.config.counter.begin()
        for fresh in (True, False):
            some = [i for i, task in enumerate(tasks) if task.fresh == fresh]
            if not some:
                continue
            make = self._trained if fresh else self._kept
            table = make([tasks[i] for i in some], [out[i] for i in some], batch)
            if table is None:
                return None
            tables.append(table)
        if self.remembered:
            with self.watch("load"):
                for task, row in zip(tasks, out, strict=True):
                    if task.fresh:
                        self._keep(task, row)
        return tables, {name: list(out) for name in self.names}

    # -- visits that train -----------------------------------------------------------------------------------

    def _trained(
        self, tasks: Sequence[ClientTask], out: Sequence[torch.Tensor], batch: TaskBatch
    ) -> ReportTable | None:
        """Return the reports of visits that train, whose uploads are written to `out`."""
        c = self.config
        clients = np.array([task.client for task in tasks], np.int64)
        visits = np.array([task.visit for task in tasks], np.int64)
        with self.watch("load"):
            reads = {id(task.reads): task.reads["model"] for task in tasks}
            rows = {i: read_rows(self.tables.rows, "model", which) for i, which in reads.items()}
            models = [rows[id(task.reads)] for task in tasks]
        if any(some.shape[1] != len(row) for some, row in zip(models, out, strict=True)):
            return None
        made = []
        for some in _runs(c.federation.sizes[clients, 0]):
            which = clients[some], visits[some]
            with self.watch("train", *which), self.config.kept():
                trained = self._in_one_call(which, models[some], out[some], batch.step)
            if trained is None:
                return None
            made.append(trained)
            c.counter.advance(len(trained.chosen))
        return self._report(tasks, out, batch.compared, made)

    def _in_one_call(
        self,
        visits: tuple[np.ndarray, np.ndarray],
        models: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        step: int,
    ) -> _Trained | None:
        """Train visits, each from one of its models [r, d]; return None if one call cannot train them."""
        clients, visit, key = self.config.clients, self.visit, self.config.seed.of("visit")
        chosen: np.ndarray | None = np.zeros(len(out), np.int64)
        if visit.choice is not None:
            chosen = clients.best_models(visits, models, step)
        if chosen is None:
            return None
        distinct = {id(some): some for some in models}
        rows = {number: some.unbind() for number, some in distinct.items()}  # equal starts are one object
        starts = [rows[id(some)][k] for some, k in zip(models, chosen.tolist(), strict=True)]
        with self.config.kept():  # a user's module
            outcome = clients.train_visits(visits, starts, out, key, step, visit.mu, visit.change)
        return None if outcome is None else _Trained(outcome, chosen)

    # -- remembered uploads ----------------------------------------------------------------------------------

    def _keep(self, task: ClientTask, row: torch.Tensor) -> None:
        """Store an upload as the client's remembered one."""
        assert self.remembered is not None
        self.config.store.save("upload", task.client, task.visit + 1, {self.remembered: row})

    def _kept(
        self, tasks: Sequence[ClientTask], out: Sequence[torch.Tensor], batch: TaskBatch
    ) -> ReportTable | None:
        """Return the reports of remembered uploads, which are written to `out`."""
        c = self.config
        assert self.remembered is not None
        with self.watch("load"):
            for task, row in zip(tasks, out, strict=True):
                before = c.store.load("upload", task.client, task.visit)[self.remembered]
                if before.numel() != len(row):
                    return None
                row.copy_(before.reshape(-1))
        c.counter.advance(len(tasks))
        samples = [c.federation.num_samples(task.client, task.visit - 1) for task in tasks]
        largest = np.array([max_abs(row) for row in out])
        return self._table(tasks, out, batch.compared, np.array(samples, np.int64), largest, fresh=False)

    # -- reports ---------------------------------------------------------------------------------------------

    def _report(
        self,
        tasks: Sequence[ClientTask],
        out: Sequence[torch.Tensor],
        compared: tuple[str, int] | None,
        made: Sequence[_Trained],
    ) -> ReportTable | None:
        """Return the reports of visits that trained, from the results of several calls."""
        outcomes, choice = [trained.outcome for trained in made], self.visit.choice
        return self._table(
            tasks,
            out,
            compared,
            num_samples=np.concatenate([t.num_samples for t in outcomes]),
            largest=np.concatenate([t.max_abs for t in outcomes]),
            notes={} if choice is None else {choice: np.concatenate([t.chosen for t in made])},
            metrics={"train_loss": np.concatenate([t.loss for t in outcomes])},
        )

    def _table(
        self,
        tasks: Sequence[ClientTask],
        out: Sequence[torch.Tensor],
        compared: tuple[str, int] | None,
        num_samples: np.ndarray,
        largest: np.ndarray,
        notes: Mapping[str, np.ndarray] | None = None,
        metrics: Mapping[str, np.ndarray] | None = None,
        fresh: bool = True,
    ) -> ReportTable | None:
        """Return a table of reports that share one form; None if an upload is not finite."""
        if not np.isfinite(largest).all():
            return None
        c, visit, notes = self.config, self.visit, notes or {}
        width = len(out[0])
        return ReportTable(
            number=np.array([task.number for task in tasks], np.int64),
            client=np.array([task.client for task in tasks], np.int64),
            num_samples=num_samples,
            fresh=fresh,
            notes=notes,
            findings=self._row_distances(out, compared),
            metrics=metrics or {},
            max_abs=dict.fromkeys(self.names, largest[:, None]),
            sizes=dict.fromkeys(self.names, width),
            widths=dict.fromkeys(self.names, width),
            bytes={visit.upload: c.payload.size(width)} if fresh else {},
            note_sizes={name: np.ones(len(tasks), np.int64) for name in notes},
            exchanges={},
            unsent=visit.unsent if fresh else (),
        )

    def _row_distances(
        self, out: Sequence[torch.Tensor], compared: tuple[str, int] | None
    ) -> dict[str, np.ndarray]:
        """Return the distances [m, K] of uploads to all rows of the table with their name."""
        if compared is None:
            return {}
        name, num_rows = compared
        with self.watch("cluster"):
            rows, layout = self.tables.rows(name, list(range(num_rows))), self.config.clients.layout
            return {"row_distance": np.stack([row_distances(u, rows, layout) for u in out])}


def _runs(sizes: np.ndarray) -> Iterator[slice]:
    """Yield slices of visits for one call each, short enough to react to a stop and to show progress.

    Args:
        sizes: number of samples of each visit [m].
    """
    first, samples = 0, 0
    for i, size in enumerate(sizes.tolist()):
        if i > first and (i - first == RUN[0] or samples + size > RUN[1]):
            yield slice(first, i)
            first, samples = i, 0
        samples += size
    yield slice(first, len(sizes))
