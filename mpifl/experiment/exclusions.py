"""Which filters of updates exclude each other, and which change what a method may need as it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpifl.core.algorithm import Needs
from mpifl.core.errors import UserError, name_of
from mpifl.models import LoRA, ModelOptions
from mpifl.models.lora import PRODUCT
from mpifl.protection.attacks import UploadAttack
from mpifl.protection.privacy import CentralPrivacy
from mpifl.protection.robust_rules import Rule
from mpifl.protection.secure_sum import MaskedSums


class Feature(NamedTuple):
    """A choice of a section of the configuration that makes a filter.

    Attributes:
        section: the section.
        key: the option that asks for the filter.
        asked: returns the value of the option, from the section; None if it does not ask for the filter.
        instead: what to use without it, for errors.
    """

    section: str
    key: str
    asked: Callable[[Any], str | None]
    instead: str = "leave it out"


def _lora(model: Any) -> LoRA:
    return model.lora if isinstance(model, ModelOptions) else LoRA()


def _named(kind: type) -> Callable[[Any], str | None]:
    return lambda section: name_of(section) if isinstance(section, kind) else None


ATTACK = Feature("attack", "attack.name", _named(UploadAttack), "use label_flip, or leave it out")
CENTRAL = Feature("privacy", "privacy.name", _named(CentralPrivacy))
MASKS = Feature("secure_aggregation", "secure_aggregation.name", _named(MaskedSums))
ROUNDING = Feature(
    "payload", "payload.dtype", lambda p: None if p.dtype == "float32" else p.dtype, "use float32"
)
COMPRESSION = Feature(
    "payload", "payload.compression", lambda p: name_of(p.compression) if p.compresses else None
)
DOWNLOADS = Feature(
    "payload", "payload.downloads", lambda p: name_of(p.downloads) if p.compresses_downloads else None
)
RULE = Feature("robust", "robust.name", _named(Rule))
RANKS = Feature("model", "model.lora.ranks", lambda m: str(_lora(m).ranks) if _lora(m).ranks else None)
PRODUCTS = Feature(
    "model", "model.lora.average", lambda m: PRODUCT if _lora(m).average == PRODUCT else None, "use factors"
)

LONGER = "rounding and compression after clipping make updates longer; leave it out"
OF_SUMS = "the noise of privacy central is that of a sum of clipped updates; use none, or privacy local"
OF_ROWS = "the noise is that of changes of the server's rows, which no client has exactly; leave it out"
INTEGERS = "masked uploads are integers of secure_aggregation.bits; leave it out"
LACKING = "it takes numbers that clients of a smaller rank (model.lora.ranks) lack for 0; use one of the two"
HIDDEN = "a rule needs single uploads, and masks show the server their sums only; use one of the two"
EXCLUSIONS = (  # two filters, and why the second cannot stand beside the first
    (CENTRAL, ROUNDING, LONGER),
    (CENTRAL, COMPRESSION, LONGER),
    (CENTRAL, DOWNLOADS, OF_ROWS),
    (CENTRAL, RULE, OF_SUMS),
    (MASKS, ROUNDING, INTEGERS),
    (MASKS, COMPRESSION, INTEGERS),
    (MASKS, RULE, HIDDEN),
    (RANKS, COMPRESSION, LACKING),
    (RANKS, DOWNLOADS, LACKING),
    (RANKS, MASKS, LACKING),
    (RANKS, RULE, LACKING),
    (
        PRODUCTS,
        CENTRAL,
        "its noise is that of a sum of factors, and not of products; use lora.average factors",
    ),
    (
        PRODUCTS,
        MASKS,
        "products need single uploads, and masks show their sums only; use lora.average factors",
    ),
    (PRODUCTS, RULE, "a rule compares factors, which do not tell products; use lora.average factors"),
)


def check_exclusions(sections: Mapping[str, Any], needs: Needs, method: str) -> None:
    """Raise `UserError` for two filters that exclude each other, or one that a method excludes.

    Args:
        sections: the configuration's sections by name.
        needs: needs of the method.
        method: name of the method's class.
    """
    for first, second, remedy in EXCLUSIONS:
        value = second.asked(sections[second.section])
        if value is not None and first.asked(sections[first.section]) is not None:
            raise UserError(second.key, value, remedy)
    why = f"{method} follows clients from their uploads as they were made" if needs.exact_uploads else ""
    why = f"has no effect: clients of {method} send nothing" if needs.alone else why
    for feature in (ATTACK, COMPRESSION, DOWNLOADS, ROUNDING) if why else ():
        value = feature.asked(sections[feature.section])
        if value is not None:
            raise UserError(feature.key, value, f"{why}; {feature.instead}")
