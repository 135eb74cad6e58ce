"""The chain of filters of a run: what changes updates between training and the rows, and in which order."""

from __future__ import annotations

from mpifl.aggregation.adapters import ClientRanks, ProductMeans
from mpifl.aggregation.low_rank import AdapterColumns
from mpifl.aggregation.update_filter import UpdateFilter, UpdateFilters
from mpifl.core.algorithm import vector_parts
from mpifl.core.plan import statistics_of
from mpifl.core.rng import key
from mpifl.models import adapters_of
from mpifl.models.lora import PRODUCT
from mpifl.protection.attacks import AttackedUploads, UploadAttack
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy
from mpifl.protection.private_step import PrivateStep
from mpifl.protection.robust import RobustMeans
from mpifl.protection.robust_rules import Rule
from mpifl.protection.secure_sum import MaskedSums, SecureRounds
from mpifl.traffic.compression import Coder

from .context import RunContext


def adapter_columns(context: RunContext) -> AdapterColumns:
    """Return where the vectors of a run hold adapters."""
    layout, module = context.problem.layout, context.learner.flat.module
    return AdapterColumns(layout, [*adapters_of(module)], vector_parts(context.config.algorithm, layout))


def adapter_ranks(context: RunContext) -> ClientRanks | None:
    """Return the filter by which clients have adapters of their own ranks; None if all are alike."""
    if not context.ranks:
        return None
    return ClientRanks(adapter_columns(context), context.ranks, context.config.payload.number_bytes)


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
    if (ranks := adapter_ranks(context)) is not None:
        chain.append(ranks)
    if isinstance(config.secure_aggregation, MaskedSums):
        where, fixed = key(config.seed.system, "secure"), isinstance(config.privacy, CentralPrivacy)
        chain.append(SecureRounds(config.secure_aggregation, where, fixed))
    payload = config.payload
    if payload.compresses or payload.compresses_downloads or payload.dtype != "float32":
        chain.append(Coder(payload, parts, key(config.seed.training, "downloads")))
    if isinstance(config.robust, Rule):
        statistics = (*method.statistics, *map(statistics_of, method.changes))
        chain.append(RobustMeans(config.robust, statistics, parts))
    if config.lora.average == PRODUCT:
        chain.append(ProductMeans(adapter_columns(context), [*method.changes]))
    return UpdateFilters(chain)
