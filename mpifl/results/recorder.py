"""Writes the tables, figures and arrays of a run folder, from what rank 0 has after each evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mpifl.core.errors import first_of, require
from mpifl.core.federation import SPLITS, Federation
from mpifl.core.files import safetensors_file, write_json
from mpifl.core.metric import ACCURACY, with_figures
from mpifl.core.parameters import Layout
from mpifl.core.rng import Key
from mpifl.core.task import SUMS, Task
from mpifl.models.pretrained import layout_metadata
from mpifl.supervision.logging import warn

from .columns import Evaluation, diverged, measured_on, metrics_row
from .metrics import import_scipy_optimize, model_distances
from .reader import read_rows
from .run_folder import GrowingCsv, without_infinity, write_columns, write_csv


def digest(
    tables: Mapping[str, torch.Tensor], assign: np.ndarray, algorithm_state: Mapping[str, np.ndarray]
) -> str:
    """Return the digest of a final state: SHA-256 over its arrays with their names, types and shapes.

    Args:
        tables: name -> rows of the server [K, d]; hashed as float32.
        assign: the row of each client [N].
        algorithm_state: name -> array that the server keeps for the algorithm.
    """
    sha = hashlib.sha256()
    parts: dict[str, np.ndarray] = {f"table {k}": t.float().contiguous().numpy() for k, t in tables.items()}
    parts |= {"assign": np.ascontiguousarray(assign, np.int64)}
    # parts of `algorithm_state` are called memo here: another word would give all runs another digest
    parts |= {f"memo {k}": np.ascontiguousarray(v) for k, v in algorithm_state.items()}
    for name in sorted(parts):
        assert parts[name].dtype != object, f"{name} holds no numbers"  # hooks have checked this
        sha.update(f"{name} {parts[name].dtype} {parts[name].shape}\n".encode())
        sha.update(parts[name].reshape(-1).view(np.uint8).data)  # no copy
    return sha.hexdigest()


SAMPLE = 1000  # clients whose rows are written with `output.clients: sample`
BUFFERED_ROWS = 500  # of events.csv, because opening a file costs more than an arrival


@dataclass
class RunningFigures:
    """Running figures over all uploads, or all evaluations, of a run.

    Attributes:
        estimates: client -> divergence of its last estimated mixture from the true mixture of that upload.
        divergence: sum of the divergences of all uploads.
        uploads: number of these uploads.
        clusters: for each evaluation that follows a step, the score of each cluster on its own test set.
        scores: step, mean score over clients and seconds on the run's clock of each evaluation, under drift.
        begins: step from which on data changed, and the seconds on the run's clock when it began.
        seconds: time on the run's clock after the last step, under drift; 0 without a clock.
    """

    estimates: dict[int, float] = field(default_factory=dict)
    divergence: float = 0.0
    uploads: int = 0
    clusters: list[list[float]] = field(default_factory=list)
    scores: list[tuple[int, float, float]] = field(default_factory=list)
    begins: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the run's clock has shown any time at an evaluation."""
        return any(seconds for _, _, seconds in self.scores)

    def stepped(self, step: int, seconds: float, changes: Collection[int]) -> None:
        """Take note of a step: a step of `changes` began when the step before it ended.

        Args:
            step: the step that has ended; it may be told twice.
            seconds: time on the run's clock; 0 without a clock.
            changes: steps from which on data change.
        """
        if step in changes:
            self.begins.setdefault(step, self.seconds)
        self.seconds = seconds

    def estimated(self, client: int, divergence: float) -> None:
        """Add an upload from which the mixture of a client was estimated."""
        self.estimates[client] = divergence
        self.divergence += divergence
        self.uploads += 1

    def mixture(self, clients: Iterable[int]) -> dict[str, float]:
        """Return `mixture_kl` of some clients, and `mixture_kl_uploads`, as far as there are estimates."""
        last = [self.estimates[k] for k in clients if k in self.estimates]
        out = {"mixture_kl": float(np.mean(last))} if last else {}
        return out | ({"mixture_kl_uploads": self.divergence / self.uploads} if self.uploads else {})

    def of_clusters(
        self, step: int, scores: Sequence[float], metric: str = ACCURACY.name
    ) -> dict[str, float]:
        """Add an evaluation; return mean and deviation over clusters, for it and over all evaluations.

        Args:
            step: server steps so far; an evaluation before the first step is left out of the running means.
            scores: score of each cluster.
            metric: name of the metric, the prefix of the names of the figures.
        """
        name = f"{metric}_cluster"
        out = {name: float(np.mean(scores)), f"{name}_std": float(np.std(scores))}
        if step:
            self.clusters.append([float(score) for score in scores])
        if self.clusters:
            out[f"{name}_all"] = float(np.mean([np.mean(one) for one in self.clusters]))
            known = [one for one in self.clusters if len(one) == len(scores)]
            out[f"{name}_all_std"] = float(np.mean(known, axis=0).std()) if known else float("nan")
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, serialisable as JSON."""
        pairs = {name: list(getattr(self, name).items()) for name in ("estimates", "begins")}
        return {**vars(self), **pairs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.estimates = {k: kl for k, kl in state["estimates"]}
        self.divergence, self.uploads = state["divergence"], state["uploads"]
        self.clusters = [list(scores) for scores in state["clusters"]]
        self.scores = [(step, score, seconds) for step, score, seconds in state["scores"]]
        self.begins = {step: seconds for step, seconds in state.get("begins", ())}
        self.seconds = state.get("seconds", 0.0)


def written_clients(choice: str, num_clients: int, key: Key) -> np.ndarray | None:
    """Return the clients whose rows are written, ascending; None for all clients.

    Args:
        choice: the value of `output.clients`.
        num_clients: number of clients N.
        key: random key of the sample.
    """
    if choice == "all":
        return None
    count = min(SAMPLE, num_clients) if choice == "sample" else 0
    return np.sort(key.of("output clients").numpy().choice(num_clients, count, replace=False))


class Recorder:
    """Writes the tables of a run folder; on rank 0.

    Args:
        folder: the run folder.
        federation: the clients, with true groups, targets of a backdoor and numbers of samples.
        by: kinds of labels over which metrics are also averaged: `group`, `cluster` and `device`.
        devices: name of the device of each client, for a column `device` in `clients.csv`, `visits.csv` and
            `events.csv`; empty if all are alike.
        own: names of the user's metrics.
        task: the task, which defines the metrics; None takes accuracy.
        written: clients whose rows are written, ascending; None for all. If it is empty, there are no tables
            of clients.

    Attributes:
        metrics: `metrics.csv`.
        events: `events.csv`.
        updates: `updates.csv`.
        assignments: `assignments.csv`: the clusters at the first evaluation, and all changes at later ones.
        last: figures of the last evaluation.
        virtual_seconds: time on the simulated clock at the last evaluation; 0 without one.
        clients: rows of `clients.csv` at the last evaluation.
        timing: rows of `timing.csv`.
        running: running figures over uploads and evaluations.
    """

    def __init__(
        self,
        folder: Path,
        federation: Federation,
        by: Sequence[str] = (),
        devices: Sequence[str] = (),
        own: Sequence[str] = (),
        task: Task | None = None,
        written: np.ndarray | None = None,
    ) -> None:
        self.task, self.written = task, written
        self.folder, self.federation, self.groups = folder, federation, federation.groups
        self.by, self.devices, self.own = by, devices, own
        self.metrics, self.events = GrowingCsv(folder / "metrics.csv"), GrowingCsv(folder / "events.csv")
        self.updates = GrowingCsv(folder / "updates.csv")
        self.assignments = GrowingCsv(folder / "assignments.csv")
        import_scipy_optimize()
        self.timing: list[dict[str, Any]] = []
        self.last: dict[str, float | int] = {}
        self.virtual_seconds = 0.0
        self.clients: list[dict[str, Any]] = []
        self._labels: np.ndarray | None = None  # of the last evaluation [N]
        self._step = 0  # of the last evaluation
        self._said_diverged = False
        self._placed = np.zeros(0, bool)
        self._visit = np.zeros(0, np.int64)  # the visit whose data each client was last evaluated on [N]
        self._further = federation.client(0).further
        self._arrivals: list[Mapping[str, Any]] = []
        self.running = RunningFigures()

    def record_evaluation(
        self,
        step: int,
        seconds: float,
        *,
        scores: Mapping[str, np.ndarray],
        clients: np.ndarray,
        labels: np.ndarray,
        train: Mapping[str, float],
        traffic: Mapping[str, int],
        timing: Sequence[Mapping[str, float]],
        computation: Mapping[str, float] | None = None,
        virtual_seconds: float | None = None,
        placed: np.ndarray | None = None,
        visits: np.ndarray | None = None,
    ) -> dict[str, float | int]:
        """Append the figures of an evaluation to `metrics.csv` and return the row.

        Args:
            step: server steps so far.
            seconds: seconds since the start of the run.
            scores: name -> value of each evaluated client [n], or sums [n, ...]; see `Evaluation`.
            clients: the evaluated clients [n].
            labels: estimated cluster of every client [N].
            train: means of the training figures that clients reported, and figures that only some methods
                have.
            traffic: bytes of the federation so far.
            timing: seconds of each phase since the previous evaluation, for each rank; empty for a lost rank.
            computation: passes, samples and FLOPs of clients and server so far; None if they are not counted.
            virtual_seconds: time on the simulated clock; None if there is none.
            placed: whose cluster is known, bool [N]; None for all.
            visits: number of visits that every client has made [N]; if samples change between visits, it
                determines the samples on which the client is evaluated. None for no visits.

        Raises:
            UserError: a user's metric has the name of a figure of the method, or that has the name of a
                column.
        """
        targets = self.federation.targets
        aimed = None if targets is None else np.isin(clients, targets)
        stayed = self._stayed(step)
        before = self._labels
        kinds = {"group": self.groups, "cluster": labels if placed is None else np.where(placed, labels, -1)}
        kinds["device"] = np.array(self.devices) if self.devices else None
        by = {kind: of[clients] for kind, of in kinds.items() if kind in self.by and of is not None}
        made = np.zeros(self.federation.num_clients, np.int64) if visits is None else visits
        self._visit = np.maximum(made - 1, 0)
        found = {measured_on(name, scores, self._further) for name in scores if not name.startswith(SUMS)}
        samples = {name: self._sizes(name, clients) for name in {"test"} | found}
        self._say_diverged(step, clients, diverged("", scores, samples))
        attackers = self.federation.attackers
        honest = None if attackers is None else ~np.isin(clients, attackers)
        self.last = metrics_row(
            Evaluation(
                scores,
                labels,
                self.groups,
                pool=self._different(int(samples["test"].sum())),
                aimed=aimed,
                before=before,
                stayed=stayed,
                placed=placed,
                samples=samples,
                by=by,
                own=self.own,
                honest=honest,
                task=self.task,
            )
        )
        self._placed = np.ones(len(labels), bool) if placed is None else placed
        self.virtual_seconds = virtual_seconds or 0.0
        virtual = {} if virtual_seconds is None else {"virtual_seconds": virtual_seconds}
        self._check_own(train)
        first = {"round": step, "seconds": round(seconds, 3), **virtual, **self.last}
        row = {**first, **with_figures(train, first, traffic, computation or {})}
        self.metrics.append(row)
        self.timing += [{"round": step, "rank": r, **phases} for r, phases in enumerate(timing) if phases]
        single = {name: v for name, v in scores.items() if not name.startswith(SUMS)}
        self.clients = [
            {"client": int(k), "cluster": int(labels[k]), **{n: float(v[i]) for n, v in single.items()}}
            for i, k in enumerate(clients)
        ]
        of, then = self._rows(labels), None if before is None else self._rows(before)
        changed = np.arange(len(of)) if then is None else np.flatnonzero(of != then)
        who = changed if self.written is None else self.written[changed]
        pairs = zip(who.tolist(), of[changed].tolist(), strict=True)
        self.assignments.append(*({"round": step, "client": k, "cluster": c} for k, c in pairs))
        self._labels = labels
        return row

    def _stayed(self, step: int) -> np.ndarray | None:
        """Take over the true groups of a step; return whose group is that of the last evaluation, bool [N].

        None where true groups never change.
        """
        last, self._step = self._step, step
        if not self.federation.regroups:
            return None
        before, self.groups = (self.federation.groups_at(at) for at in (last, step))
        return None if before is None else np.asarray(before == self.groups)

    def _say_diverged(self, step: int, clients: np.ndarray, diverged: np.ndarray | np.bool) -> None:
        """Print a line that names clients whose models diverged, the first time that there are any."""
        names = [str(k) for k in clients[np.broadcast_to(diverged, clients.shape)].tolist()]
        if names and not self._said_diverged:
            many = f"after step {step} the loss of {len(names)} of {len(clients)} clients is not finite"
            named = first_of(names)
            warn(f"{many}: their models diverged (clients {named}); a smaller local.lr may help")
            self._said_diverged = True

    def _sizes(self, split: str, clients: np.ndarray) -> np.ndarray:
        """Return the number of samples of a set on which clients were last evaluated, int64 [n]."""
        return self.federation.sizes_of(split, clients, self._visit[clients])

    def _different(self, tested: int) -> int:
        """Return how many of the test samples of evaluated clients are distinct, as far as is known."""
        different = self.federation.test_pool
        if self.federation.changes and different == self.federation.sizes[:, 2].sum():
            return tested  # no two clients share a sample; there may be more than at the first visits
        return min(different, tested)

    def _check_own(self, others: Mapping[str, Any]) -> None:
        """Raise `UserError` if a user's metric has the name of a figure of the method."""
        for name in self.own:
            columns = {f"{name}_{what}" for what in ("mean", "std", "min", "max")}
            taken = next((column for column in others if column in columns), None)
            remedy = f"this method reports {taken} already; call the function otherwise"
            require(taken is None, "evaluation.metrics", name, remedy)

    def record_updates(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the figures of the updates of a round to `updates.csv`.

        Args:
            step: the round.
            rows: rows with `client`, `block` and figures.
        """
        groups = {} if self.groups is None else {k: {"group": int(g)} for k, g in enumerate(self.groups)}
        self.updates.append(*({"round": step, **row, **groups.get(row["client"], {})} for row in rows))

    def arrived(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append uploads to `events.csv`; rows are buffered and written in batches."""
        self._arrivals += [self._with_device(row) for row in rows]
        if len(self._arrivals) >= BUFFERED_ROWS:
            self.write_arrivals()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, serialisable as JSON; this writes the buffered rows first."""
        self.write_arrivals()
        before = None if self._labels is None else self._labels.tolist()
        placed = self._placed.tolist()
        return {
            "timing": self.timing,
            "last": self.last,
            "labels": before,
            "step": self._step,
            "placed": placed,
            "updates": self.updates.path.stat().st_size if self.updates.columns else 0,
            "assignments": self.assignments.path.stat().st_size if self.assignments.columns else 0,
            "running": self.running.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], metrics: bytes, events: int) -> None:
        """Restore the state of a checkpoint.

        Args:
            state: the return value of `state_dict`.
            metrics: the content of `metrics.csv` at the checkpoint.
            events: the size of `events.csv` in bytes at the checkpoint; later rows are dropped.
        """
        self.timing, self.last = state["timing"], state["last"]
        self._labels = None if state["labels"] is None else np.array(state["labels"])
        self._step = state["step"]
        self.groups = self.federation.groups_at(self._step)
        self._placed = np.array(state["placed"], bool)
        self.running.load_state_dict(state["running"])
        self.metrics.restore(metrics)
        self.events.truncate(events)
        self.updates.truncate(state["updates"])
        self.assignments.truncate(state["assignments"])

    def _rows(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the clients whose rows are written, given those of all clients [N]."""
        return values if self.written is None else values[self.written]

    @property
    def _writes_clients(self) -> bool:
        """Whether there are tables of clients."""
        return self.written is None or len(self.written) > 0

    def _with_device(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with the device of its client, if clients have devices."""
        return {**row, "device": self.devices[int(row["client"])]} if self.devices else row

    def write_traffic(
        self,
        visits: Mapping[str, np.ndarray],
        clients: Mapping[str, np.ndarray],
        computation: Mapping[str, np.ndarray],
        energy: Mapping[str, np.ndarray],
    ) -> None:
        """Write `visits.csv`, `client_traffic.csv` and `client_computation.csv`.

        The first has a column `device` if clients have devices.

        Args:
            visits: columns with the traffic of each visit.
            clients: columns with the traffic of each client in the whole run.
            computation: columns with the computation of each client by purpose in the whole run.
            energy: columns with the energy of each client, for `client_energy.csv`; empty for no such file.
        """
        if not self._writes_clients:
            return
        devices = {"device": np.array(self.devices)[visits["client"]]} if self.devices else {}
        write_columns(self.folder / "visits.csv", {**visits, **devices})
        write_columns(self.folder / "client_traffic.csv", clients)
        write_columns(self.folder / "client_computation.csv", computation)
        if energy:
            write_columns(self.folder / "client_energy.csv", energy)

    def write_arrivals(self) -> None:
        """Write the buffered rows of `events.csv`."""
        if self._arrivals:
            self.events.append(*self._arrivals)
            self._arrivals = []

    def close(
        self,
        model: Mapping[str, torch.Tensor] | None,
        ledger: Sequence[Mapping[str, Any]],
        computation: Sequence[Mapping[str, Any]],
        mpi_traffic: Sequence[Mapping[str, Any]],
        algorithm_state: Mapping[str, np.ndarray],
        summary: Mapping[str, Any],
        layout: Layout | None = None,
        presence: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the files whose content is known at the end, `summary.json` last.

        Args:
            model: content of `model.safetensors`; None writes no such file.
            ledger: rows of `ledger.csv`.
            computation: rows of `computation.csv`.
            mpi_traffic: rows of `mpi_traffic.csv`.
            algorithm_state: content of `algorithm_state.npz`.
            summary: content of `summary.json`, to which figures of distances and updates are added.
            layout: layout of the model, written to the metadata of `model.safetensors`; None writes none.
            presence: rows of `presence.csv`; None for no such file.
        """
        self.write_arrivals()
        clients = np.array([row["client"] for row in self.clients], np.int64)
        held = np.stack([self._sizes(split, clients) for split in SPLITS], axis=1)
        for row, counts in zip(self.clients, held.tolist(), strict=True):
            k = row["client"]
            row |= dict(zip(SPLITS, counts, strict=True))
            if self.groups is not None:
                row["group"] = int(self.groups[k])
            if self.devices:
                row["device"] = self.devices[k]
            if self.federation.attackers is not None:
                row["attacker"] = int(k in self.federation.attackers)
            if self.federation.client_names:
                row["client_name"] = self.federation.client_names[k]
        if self._writes_clients:
            write_csv(self.folder / "clients.csv", self.clients)
            write_columns(self.folder / "clusters.csv", self._clusters())
            if self.federation.regroups:
                write_csv(self.folder / "groups.csv", self._true_groups())
            if presence is not None:
                write_csv(self.folder / "presence.csv", self._of_written(presence))
        write_csv(self.folder / "ledger.csv", ledger)
        write_csv(self.folder / "computation.csv", computation)
        write_csv(self.folder / "mpi_traffic.csv", mpi_traffic)
        write_csv(self.folder / "timing.csv", self.timing)
        arrays: dict[str, Any] = {name: np.asarray(v) for name, v in algorithm_state.items()}
        np.savez(self.folder / "algorithm_state.npz", **arrays)
        if model is not None:
            about = {} if layout is None else layout_metadata(layout)
            with safetensors_file(self.folder / "model.safetensors") as file:
                save_file(dict(model), file, about)
        figures = {**self._distances(model or {}), **self._update_figures()}
        write_json(self.folder / "summary.json", without_infinity({**summary, **figures}))

    def _true_groups(self) -> list[dict[str, int]]:
        """Return the rows of `groups.csv`: the group of each client at first, then every change of one."""
        out: list[dict[str, int]] = []
        before: np.ndarray | None = None
        for since in (0, *self.federation.regroups):
            now = self.federation.groups_at(since)
            assert now is not None
            now = self._rows(now)
            changed = np.arange(len(now)) if before is None else np.flatnonzero(now != before)
            who = changed if self.written is None else self.written[changed]
            pairs = zip(who.tolist(), now[changed].tolist(), strict=True)
            out += [{"since": since, "client": k, "group": group} for k, group in pairs]
            before = now
        return out

    def _distances(self, model: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the mean distance between the rows of two clients of one true group, and of any two clients.

        Clients that share a row have distance 0; `evaluation.distances` measures the models they train.
        """
        if self.groups is None or "model" not in model:
            return {}
        within, overall = model_distances(model["model"], model["assign"].numpy(), self.groups)
        found = {"parameter_distance_within_groups": within, "parameter_distance": overall}
        return {name: value for name, value in found.items() if not np.isnan(value)}

    def _update_figures(self) -> dict[str, Any]:
        """Return the means of `updates.csv` over clients and rounds by block, and by block and group.

        A cosine that does not exist is left out; NaN if there are no others.
        """
        if not self.updates.columns:
            return {}
        found: dict[str, dict[str, list[float]]] = {}
        for row in read_rows(self.updates.path):
            figures = found.setdefault(row["block"], {})
            for name in row.keys() - {"round", "client", "block", "group"}:
                figures.setdefault(name, []).append(float(row[name]))
                if "group" in row:
                    figures.setdefault(f"{name}_group{row['group']}", []).append(float(row[name]))
        return {"updates": {block: {k: _mean(v) for k, v in sorted(f.items())} for block, f in found.items()}}

    def _of_written(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the rows of the clients whose rows are written."""
        if self.written is None:
            return list(rows)
        written = {*self.written.tolist()}
        return [row for row in rows if row["client"] in written]

    def _clusters(self) -> dict[str, list[Any]]:
        """Return the columns of `clusters.csv`: final cluster, true group (-1: none), if placed, name."""
        final = np.zeros(0, int) if self._labels is None else self._labels
        truth = self.groups if self.groups is not None else np.full(len(final), -1)
        who = np.arange(len(final)) if self.written is None else self.written[: len(final)]
        columns = {"client": who, "cluster": final[who], "group": truth[who], "placed": self._placed[who]}
        found: dict[str, list[Any]] = {name: of.astype(int).tolist() for name, of in columns.items()}
        names = self.federation.client_names
        return found | ({"client_name": [names[k] for k in found["client"]]} if names else {})


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the numbers that are not NaN; NaN if there are none."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
