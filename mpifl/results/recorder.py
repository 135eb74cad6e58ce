"""Turns what rank 0 knows after each round into the files of the run folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mpifl.core.federation import Federation

from .metrics import accuracy_summary, ari, churn, load, model_distances, nmi, purity
from .run_folder import GrowingCsv, write_csv, write_json


def digest(
    tables: Mapping[str, torch.Tensor], assign: np.ndarray, algorithm_state: Mapping[str, np.ndarray]
) -> str:
    """Return the SHA-256 over the tables in float32, the assignment and the algorithm_state's arrays,
    each with name and
    shape.
    """
    sha = hashlib.sha256()
    parts: dict[str, np.ndarray] = {f"table {k}": t.float().contiguous().numpy() for k, t in tables.items()}
    parts |= {"assign": np.ascontiguousarray(assign, np.int64)}
    parts |= {f"memo {k}": np.ascontiguousarray(v) for k, v in algorithm_state.items()}
    for name in sorted(parts):
        assert parts[name].dtype != object, f"{name} holds no numbers"
        sha.update(f"{name} {parts[name].dtype} {parts[name].shape}\n".encode())
        sha.update(parts[name].reshape(-1).view(np.uint8).data)  # no copy
    return sha.hexdigest()


def metrics_row(
    scores: Mapping[str, np.ndarray],
    labels: np.ndarray,
    groups: np.ndarray | None,
    pool: int | None = None,
    aimed: np.ndarray | None = None,
    before: np.ndarray | None = None,
    placed: np.ndarray | None = None,
) -> dict[str, float | int]:
    """Return the figures of one evaluated round; accuracies are fractions, `accuracy_variance` is in percent
    squared.

    Args:
        scores: name -> value of each evaluated client.
        labels, groups: estimated and true cluster of every client.
        pool: number of different test samples, for the binomial standard error.
        aimed: bool, which of the evaluated clients a backdoor is aimed at.
        before: the labels at the last evaluation.
        placed: bool, whose cluster is known [N]. The others do not count as members of the cluster that they
            stand in, except in `ari_everyone`; `num_unplaced` says how many they are. Default: all are known.
    """
    summary = accuracy_summary(scores["accuracy"], pool)
    row: dict[str, float | int] = {
        "accuracy_mean": summary.mean,
        "accuracy_worst": summary.worst,
        "accuracy_std": summary.std,
        "accuracy_variance": summary.variance_pct2,
        "accuracy_worst_tenth": summary.worst_tenth,
        "accuracy_standard_error": float("nan") if summary.standard_error is None else summary.standard_error,
        "loss": float(np.nanmean(scores["loss"])),
    }
    for name, values in scores.items():
        if name.startswith("accuracy"):
            if name != "accuracy":
                spreads = (("mean", np.nanmean), ("worst", np.nanmin), ("std", np.nanstd))
                row |= {f"{name}_{what}": float(of(values)) for what, of in spreads}
            if aimed is not None and aimed.any():
                row[f"{name}_targets_mean"] = float(np.nanmean(values[aimed]))
    known = np.ones(len(labels), bool) if placed is None else placed
    row["num_clusters"] = len(np.unique(labels[known]))
    row["num_unplaced"] = int((~known).sum())
    for name, agreement in (("ari", ari), ("nmi", nmi), ("purity", purity)):
        row[name] = float("nan")
        if groups is not None and known.any():
            row[name] = agreement(labels[known], groups[known])
    row["ari_everyone"] = ari(labels, groups) if groups is not None else float("nan")
    row["churn"] = churn(before, labels) if before is not None else float("nan")
    return row


ROWS_AT_A_TIME = 500  # of events.csv: opening a file costs more than an arrival


class Recorder:
    """Writes a run folder.

    Args:
        folder: an existing, empty folder.
        federation: who is evaluated: hidden groups, targets, number of test samples.
    """

    def __init__(self, folder: Path, federation: Federation) -> None:
        self.folder, self.federation, self.groups = folder, federation, federation.groups
        self.metrics, self.events = GrowingCsv(folder / "metrics.csv"), GrowingCsv(folder / "events.csv")
        load(truth=self.groups is not None)
        self.timing: list[dict[str, Any]] = []
        self.last: dict[str, float | int] = {}
        self.clients: list[dict[str, Any]] = []
        self._labels: list[np.ndarray] = []
        self._placed = np.zeros(0, bool)
        self._arrivals: list[Mapping[str, Any]] = []

    def record_evaluation(
        self,
        step: int,
        seconds: float,
        scores: Mapping[str, np.ndarray],
        clients: np.ndarray,
        labels: np.ndarray,
        train: Mapping[str, float],
        traffic: Mapping[str, int],
        timing: Sequence[Mapping[str, float]],
        virtual_seconds: float | None = None,
        placed: np.ndarray | None = None,
    ) -> dict[str, float | int]:
        """Add an evaluated round and return its figures.

        Args:
            labels: estimated cluster of each client [N].
            traffic: federation bytes so far.
            placed: whose cluster is known, bool [N]; default: everyone's.
        """
        targets, sizes = self.federation.targets, self.federation.sizes
        pool = min(self.federation.test_pool, int(sizes[clients, 2].sum()))
        aimed = None if targets is None else np.isin(clients, targets)
        before = self._labels[-1] if self._labels else None
        self.last = metrics_row(scores, labels, self.groups, pool, aimed, before, placed)
        self._placed = np.ones(len(labels), bool) if placed is None else placed
        virtual = {} if virtual_seconds is None else {"virtual_seconds": virtual_seconds}
        self.metrics.append(
            {"round": step, "seconds": round(seconds, 3), **virtual, **self.last, **train, **traffic}
        )
        self.timing += [{"round": step, "rank": r, **phases} for r, phases in enumerate(timing)]
        self.clients = [
            {"client": int(k), "cluster": int(labels[k]), **{n: float(v[i]) for n, v in scores.items()}}
            for i, k in enumerate(clients)
        ]
        self._labels.append(labels)
        return self.last

    def arrived(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add arrivals to `events.csv`; written a few hundred at a time."""
        self._arrivals += rows
        if len(self._arrivals) >= ROWS_AT_A_TIME:
            self._write_arrivals()

    def state_dict(self) -> dict[str, Any]:
        """Return what was remembered and is in no file yet; what JSON can hold."""
        self._write_arrivals()
        before = self._labels[-1].tolist() if self._labels else None
        placed = self._placed.tolist()
        return {"timing": self.timing, "last": self.last, "labels": before, "placed": placed}

    def load_state_dict(self, state: Mapping[str, Any], metrics: bytes, events: int) -> None:
        """Go on from a state; put the tables back to what they were then.

        Args:
            metrics: content of metrics.csv. events: bytes of events.csv.
        """
        self.timing, self.last = state["timing"], state["last"]
        self._labels = [] if state["labels"] is None else [np.array(state["labels"])]
        self._placed = np.array(state["placed"], bool)
        self.metrics.restore(metrics)
        self.events.truncate(events)

    def _write_arrivals(self) -> None:
        self.events.append(*self._arrivals)
        self._arrivals = []

    def close(
        self,
        server_files: Mapping[str, torch.Tensor] | None,
        ledger: Sequence[Mapping[str, Any]],
        wire: Sequence[Mapping[str, Any]],
        sizes: np.ndarray,
        algorithm_state: Mapping[str, np.ndarray],
        summary: Mapping[str, Any],
    ) -> None:
        """Write everything that is known at the end; `summary.json` last: its presence says the folder is
        complete.
        """
        self._write_arrivals()
        for row in self.clients:
            k = row["client"]
            row |= dict(zip(("train", "val", "test"), map(int, sizes[k]), strict=True))
            if self.groups is not None:
                row["group"] = int(self.groups[k])
        write_csv(self.folder / "clients.csv", self.clients)
        write_csv(self.folder / "clusters.csv", self._clusters())
        write_csv(self.folder / "ledger.csv", ledger)
        write_csv(self.folder / "mpi_traffic.csv", wire)
        write_csv(self.folder / "timing.csv", self.timing)
        arrays: dict[str, Any] = {name: np.asarray(v) for name, v in algorithm_state.items()}
        np.savez(self.folder / "algorithm_state.npz", **arrays)
        if server_files is not None:
            save_file(dict(server_files), self.folder / "model.safetensors")
        write_json(self.folder / "summary.json", {**summary, **self._distances(server_files or {})})

    def _distances(self, files: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the mean distance of the models of two clients of one true group, and of any two."""
        if self.groups is None or "model" not in files:
            return {}
        within, overall = model_distances(files["model"], files["assign"].numpy(), self.groups)
        found = {"parameter_distance_within_groups": within, "parameter_distance": overall}
        return {name: value for name, value in found.items() if not np.isnan(value)}

    def _clusters(self) -> list[dict[str, Any]]:
        """Return one row per client: its group, its final cluster, and whether that is known."""
        final = self._labels[-1] if self._labels else np.zeros(0, int)
        truth = self.groups if self.groups is not None else np.full(len(final), -1)
        return [
            {"client": k, "cluster": int(c), "group": int(g), "placed": int(p)}
            for k, (c, g, p) in enumerate(zip(final, truth, self._placed, strict=True))
        ]
