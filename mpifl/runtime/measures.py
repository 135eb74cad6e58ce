"""What is measured of the uploads of a round, beside what the method decides from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpifl.core.capabilities import NO_SINGLE_MODEL, RememberedUploads, uses
from mpifl.core.errors import UserError, require
from mpifl.core.mixing import sample_weights
from mpifl.core.parameters import take, width
from mpifl.core.types import Server

from .server_step import ClientProducts, CollectedUploads, ServerStep

NO_MODELS = "clients upload changes, no models whose distances could be measured; leave it out"


class ModelProducts:
    """Inner products of the models that clients upload, for the distances between them.

    Args:
        due: function of the step number: whether they are computed in that step.
    """

    def __init__(self, due: Callable[[int], bool]) -> None:
        self.due = due

    def __call__(self, step: ServerStep, server: Server | None, collected: CollectedUploads) -> None:
        """Compute the products, if that is due in this step.

        Raises:
            UserError: clients do not upload whole models, or upload changes of models.
        """
        layout, reports, uploads = step.problem.layout, collected.reports, collected.results.uploads
        step.client_products = None
        key, method = "evaluation.distances, evaluation.matrices", f"with {type(step.algorithm).__name__}"
        require(not step.worker.sends_changes, key, method, NO_MODELS)
        whole = reports is None or (
            reports.widths.get("model") == layout.size and reports.max_abs["model"].shape[1] == 1
        )
        if reports is not None and not whole:
            sent = ", ".join(reports.widths) or "nothing"
            remedy = f"clients upload {sent}, no whole model whose distances could be measured; leave it out"
            raise UserError(key, method, remedy)
        wanted = reports if reports is not None and self.due(collected.batch.step) else None
        parts = layout.part("parameters"), layout.part("head")
        with step.watch("evaluate"):
            parameters, head = (step.aggregator.gram(wanted, uploads, "model", part) for part in parts)
        if wanted is not None and parameters is not None and head is not None:
            step.client_products = ClientProducts(wanted.notes.client, parameters, head)


def compare_updates(step: ServerStep, server: Server | None, collected: CollectedUploads) -> None:
    """Compute how a step's updates agree with each other and with their mean; every rank calls.

    Raises:
        UserError: clients do not upload whole models, start from several, or have remembered uploads.
    """
    counts = owners = None
    reports = collected.reports
    step.updates = []
    if server is not None and reports is not None:
        d = step.problem.layout.size
        starts = step.hooks.reads("reads", server, reports.notes.client)
        whole = reports.widths.get("model") == d == server.tables["model"].shape[1]
        single = whole and all(len(rows.get("model", ())) == 1 for rows in starts.values())
        remembers = uses(step.algorithm, RememberedUploads)
        require(single and not remembers, "output.updates", True, NO_SINGLE_MODEL)
        owners = reports.owners
        counts = tuple(int(c) for c in np.bincount(owners, minlength=step.transport.size))
    counts = step.transport.bcast(counts, "plan")
    if counts is None:  # nobody was drawn
        return
    changes, rows = step.worker.updates(collected.batch, collected.results), list[dict[str, Any]]()
    for block, part in step.problem.layout.module_parts().items():
        with step.watch("reduce"):
            gram = step.mixer.gram([take(u, part) for u in changes], counts, owners, width(part))
        if gram is None or reports is None:
            continue
        clients, groups = reports.notes.client, step.config.federation.groups
        alike = None if groups is None else groups[clients]
        figures = update_statistics(gram, sample_weights(reports.notes), alike)
        for k, *values in zip(clients.tolist(), *(f.tolist() for f in figures.values()), strict=True):
            rows.append({"client": k, "block": block, **dict(zip(figures, values, strict=True))})
    step.updates = rows


def update_statistics(
    gram: np.ndarray, share: np.ndarray, groups: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return figures of the updates of a round, each an array [m].

    `size`, `distance` to the mean (in the last layer FedCUAU's CUAU_k = ||CU_k - AU||), `mean_cosine`, the
    cosine with the mean, and `pair_cosine`, the mean cosine with every other update of the same group. The
    updates are part of their mean: m independent updates of one size have a `mean_cosine` of 1 / sqrt(m), and
    a `pair_cosine` of 0. A cosine is nan where one of the two is 0, or nobody else is of the group.

    Args:
        gram: inner products of the updates, float64 [m, m].
        share: weight of each update in the mean [m]; sums to 1.
        groups: true group of each client [m]; None: all are of one.
    """
    squares, along = gram.diagonal(), gram @ share  # |u_k|^2, u_k'ubar
    mean = max(float(share @ along), 0.0)  # |ubar|^2
    size = np.sqrt(np.maximum(squares, 0.0))
    others = ~np.eye(len(size), dtype=bool) & (True if groups is None else groups[:, None] == groups)
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is nan
        pairs = np.where(others, gram / np.outer(size, size), np.nan)
        return {
            "size": size,
            "mean_cosine": np.where(size * mean > 0, along / (size * np.sqrt(mean)), np.nan),
            "pair_cosine": np.nansum(pairs, 1) / np.isfinite(pairs).sum(1),
            "distance": np.sqrt(np.maximum(squares - 2 * along + mean, 0.0)),
        }
