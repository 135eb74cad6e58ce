"""The chain of filters of a run: what changes updates between training and the rows, and in which order."""

from __future__ import annotations

from mpifl.aggregation.update_filter import UpdateFilter, UpdateFilters
from mpifl.core.algorithm import vector_parts
from mpifl.core.plan import statistics_of
from mpifl.core.rng import key
from mpifl.protection.attacks import AttackedUploads, UploadAttack
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy
from mpifl.protection.private_step import PrivateStep
from mpifl.protection.robust import RobustMeans
from mpifl.protection.robust_rules import Rule
from mpifl.protection.secure_sum import MaskedSums, SecureRounds
from mpifl.traffic.compression import Coder

from .context import RunContext


def build_filters(context: RunContext) -> UpdateFilters:
    """Return the filters of a run, in the order in which a client's report passes them."""
    config, method, chain = context.config, context.config.algorithm, list[UpdateFilter]()
    parts, attackers = vector_parts(method, context.problem.layout), context.federation.attackers
    if isinstance(config.attack, UploadAttack) and attackers is not None:
        chain.append(AttackedUploads(config.attack, frozenset(attackers.tolist()), parts))
    where = key(config.seed.training, "privacy")
    if isinstance(config.privacy, (CentralPrivacy, LocalPrivacy)):
        chain.append(PrivateStep(config.privacy, method, context.decisions.num_sampled, where))
    elif (own := config.privacy.filter(parts, where)) is not None:
        chain.append(own)
    if isinstance(config.secure_aggregation, MaskedSums):
        where, fixed = key(config.seed.system, "secure"), isinstance(config.privacy, CentralPrivacy)
        chain.append(SecureRounds(config.secure_aggregation, where, fixed))
    if config.payload.compresses or config.payload.dtype != "float32":
        chain.append(Coder(config.payload, parts))
    if isinstance(config.robust, Rule):
        statistics = (*method.statistics, *map(statistics_of, method.changes))
        chain.append(RobustMeans(config.robust, statistics, parts))
    return UpdateFilters(chain)
