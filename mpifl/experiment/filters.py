"""The chain of filters of a run: what changes updates between training and the rows, and in which order."""

from __future__ import annotations

from mpifl.aggregation.update_filter import UpdateFilter, UpdateFilters
from mpifl.core.algorithm import vector_parts
from mpifl.core.rng import key
from mpifl.protection.attacks import AttackedUploads, UploadAttack
from mpifl.protection.private_step import PrivateStep
from mpifl.traffic.compression import Coder

from .context import RunContext


def private_step(context: RunContext) -> PrivateStep | None:
    """Return the filter that clips updates and adds noise; None without privacy."""
    config = context.config
    if not context.accountant.counts:
        return None
    where = key(config.seed.training, "privacy")
    return PrivateStep(config.privacy, config.algorithm, context.decisions.num_sampled, where)


def build_filters(context: RunContext, private: PrivateStep | None) -> UpdateFilters:
    """Return the filters of a run, in the order in which a client's report passes them."""
    config, chain = context.config, list[UpdateFilter]()
    parts = vector_parts(config.algorithm, context.problem.layout)
    attackers = context.federation.attackers
    if isinstance(config.attack, UploadAttack) and attackers is not None:
        chain.append(AttackedUploads(config.attack, frozenset(attackers.tolist()), parts))
    if private is not None:
        chain.append(private)
    if config.payload.compresses or config.payload.dtype != "float32":
        chain.append(Coder(config.payload, parts))
    return UpdateFilters(chain)
