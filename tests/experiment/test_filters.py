"""The chain of filters that a configuration makes, and which filters exclude each other."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support import toy
from support.each import for_each

from mpifl.algorithms.fedavg import FedAvg
from mpifl.core.errors import UserError
from mpifl.experiment.exclusions import EXCLUSIONS, check_exclusions
from mpifl.experiment.filters import build_filters
from mpifl.models import MODELS, LoRA
from mpifl.protection.attacks import AttackedUploads, SignFlip
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy
from mpifl.protection.private_step import PrivateStep
from mpifl.protection.robust import RobustMeans
from mpifl.protection.robust_rules import Median
from mpifl.protection.secure_sum import MaskedSums, SecureRounds
from mpifl.traffic.compression import Coder, Int8, Payload, TopK

ASKED = {
    "attack.name": {"attack": SignFlip(clients=(2,))},
    "privacy.name": {"privacy": CentralPrivacy(clip=1.0)},
    "secure_aggregation.name": {"secure_aggregation": MaskedSums()},
    "payload.dtype": {"payload": Payload("float16")},
    "payload.compression": {"payload": Payload(compression=TopK())},
    "payload.downloads": {"payload": Payload(downloads=Int8())},
    "robust.name": {"robust": Median()},
    "model.lora.ranks": {"model": MODELS["mlp"](hidden=(8,), lora=LoRA(rank=2, ranks={"0": 1}))},
    "model.lora.average": {"model": MODELS["mlp"](hidden=(8,), lora=LoRA(rank=2, average="product"))},
}


def chain_of(federation: toy.Tiny, **changes) -> list[type]:
    """Return the types of the filters of a run, in their order."""
    context = toy.context_of(toy.config_of(FedAvg(), **changes), federation)
    return [type(f) for f in build_filters(context).filters]


def test_the_order_of_the_chain():
    federation = toy.Tiny()
    assert chain_of(federation) == []
    federation.attackers = np.array([2])
    lossy = {"attack": SignFlip(clients=(2,)), "privacy": LocalPrivacy(clip=1.0)}
    found = chain_of(federation, **lossy, payload=Payload("float16"), robust=Median())
    assert found == [AttackedUploads, PrivateStep, Coder, RobustMeans]
    found = chain_of(federation, **lossy, secure_aggregation=MaskedSums())
    assert found == [AttackedUploads, PrivateStep, SecureRounds]


@for_each("pair", EXCLUSIONS, ids=lambda pair: f"{pair[0].key} {pair[1].key}")
def test_filters_that_exclude_each_other_are_refused_together_only(pair):
    first, second, remedy = pair
    sections, needs = vars(toy.config_of(FedAvg())), FedAvg().needs
    for one in (first, second):
        check_exclusions(sections | ASKED[one.key], needs, "FedAvg")
    with pytest.raises(UserError, match=rf"{re.escape(second.key)} = .*{re.escape(remedy)}"):
        check_exclusions(sections | ASKED[first.key] | ASKED[second.key], needs, "FedAvg")
