"""How far a step goes: methods that replace rows by what has just arrived, made gentle.

Under a policy that steps at every arrival, FedAvg's average is an average of one: the last upload would be
the model. Damped by a, a step M becomes (1 - a) old + a M: FedAvg becomes FedAsync, clustered averaging its
asynchronous form. What is added up beside the models (SCAFFOLD's control variates) stays whole.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpifl.core.mixing import Mixing, Plan


def damped(plan: Plan, rates: np.ndarray) -> Plan:
    """Return a plan whose mixings go only part of the way.

    Args:
        rates: a_j [m], how far the step goes for upload j. In each row, uploads share its weight in
            proportion to a_j, and the row goes a = sum_j w_j a_j / sum_j w_j of the way.
    """
    if (rates == 1).all():
        return plan
    return replace(plan, mixings=[_damped(m, rates) for m in plan.mixings])


def _damped(mixing: Mixing, rates: np.ndarray) -> Mixing:
    if mixing.into != "model" and mixing.keep is not None and (mixing.keep == 1).all():
        return mixing
    each = np.repeat(rates, mixing.weights.shape[1] // len(rates))  # of all components of an upload
    size = np.abs(mixing.weights)
    total = size.sum(1)
    # [K]; what a row takes from other rows only is no upload's doing: all the way
    a = np.where(total > 0, size @ each / np.where(total > 0, total, 1.0), 1.0)
    if mixing.keep is not None and mixing.keep.ndim == 2:
        if mixing.keep.shape[0] != mixing.keep.shape[1]:
            return mixing  # the number of rows changes: there is no old row to stay near
        keep = a[:, None] * mixing.keep + np.diag(1 - a)
    else:
        keep = 1 - a + a * (0.0 if mixing.keep is None else mixing.keep)
    return replace(mixing, weights=mixing.weights * each, keep=keep)
