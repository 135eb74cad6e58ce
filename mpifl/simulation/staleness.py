"""The step size of stale uploads: how far a server step moves from the old rows to the method's result.

Methods such as FedAvg replace rows with an average of the uploads that have just arrived. If the server steps
at every arrival, this is an average of one, and the last upload would become the model. Damping by a turns a
step M into (1 - a) old + a M: FedAvg becomes FedAsync (Xie, Koyejo and Gupta, OPT 2020), and clustered
averaging its asynchronous form. Tables other than the models that accumulate updates (SCAFFOLD's control
variates) are not damped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mpifl.core.plan import Mixing, Plan


def step_sizes(lag: np.ndarray, rate: float, staleness_a: float) -> np.ndarray:
    """Return `rate * (1 + lag)^-staleness_a` [m], FedAsync's polynomial weight.

    Args:
        lag: server steps between download and arrival of each upload [m].
        rate: step size of an upload without lag, in (0, 1].
        staleness_a: exponent a; 0 ignores the lag.
    """
    return np.asarray(rate * (1.0 + lag) ** -staleness_a)


def damp(plan: Plan, sizes: np.ndarray, num_rows: Mapping[str, int]) -> Plan:
    """Return a plan whose mixings go only part of the way from the old rows.

    A mixing that changes the number of rows is left as it is: there is no old row to stay near.

    Args:
        plan: the method's plan.
        sizes: step size a_j of each upload j [m]. It scales the upload's weight, and each row takes a step of
            size a = sum_j w_j a_j / sum_j w_j.
        num_rows: rows of each table before the step.
    """
    if (sizes == 1).all():
        return plan
    mixings, rows = [], dict(num_rows)
    for mixing in plan.mixings:
        same = rows.get(mixing.into) == mixing.num_rows
        mixings.append(_damped(mixing, sizes) if same else mixing)
        rows[mixing.into] = mixing.num_rows
    return replace(plan, mixings=mixings)


def _damped(mixing: Mixing, sizes: np.ndarray) -> Mixing:
    if mixing.into != "model" and mixing.keep is not None and (mixing.keep == 1).all():
        return mixing
    each = np.repeat(sizes, mixing.weights.shape[1] // len(sizes))  # of all components of an upload
    size = np.abs(mixing.weights)
    total = size.sum(1)
    # [K]; a row that takes nothing from uploads, only from other rows, is not damped
    a = np.where(total > 0, size @ each / np.where(total > 0, total, 1.0), 1.0)
    if mixing.keep is not None and mixing.keep.ndim == 2:
        keep = a[:, None] * mixing.keep + np.diag(1 - a)
    else:
        keep = 1 - a + a * (0.0 if mixing.keep is None else mixing.keep)
    return replace(mixing, weights=mixing.weights * each, keep=keep)
