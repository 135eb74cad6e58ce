"""Errors for the user: a message shows a value as the configuration has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.each import for_each

from mpifl.core.errors import UserError, name_of
from mpifl.experiment.loader import load
from mpifl.experiment.schema import CHOICES
from mpifl.experiment.section_checks import check_sections
from mpifl.models import MODELS
from mpifl.simulation.availability import Availability
from mpifl.simulation.delays import DELAYS
from mpifl.simulation.network import NETWORKS

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


@dataclass(frozen=True)
class Own:
    """An object of a user's class that no configuration names."""

    width: int = 3


@for_each(
    ("value", "shown"),
    [
        ("fedavg", "'fedavg'"),
        (DELAYS["constant"](), "'constant'"),
        (NETWORKS["wireless-slow"](), "'wireless-slow'"),
        (DELAYS["uniform"](low_s=1.0, high_s=7.0), r"{'name': 'uniform', 'low_s': 1.0, 'high_s': 7.0}"),
        (MODELS["mlp"](hidden=(7, 5)), "{'name': 'mlp', 'hidden': [7, 5]}"),
        (MODELS["mlp"], "'mlp'"),
        (Availability(off_s=5.0), "{'off_s': 5.0}"),
        (Own(4), "{'name': 'Own', 'width': 4}"),
        (Own(), "'Own'"),
        (np.float64(0.5), "0.5"),
        ((np.int64(3), 0.25), "[3, 0.25]"),
        (np.arange(3), "[0, 1, 2]"),
        (Path("a/b.csv"), "'a/b.csv'"),
        ({"hidden": (2,), "path": Path("a")}, "{'hidden': [2], 'path': 'a'}"),
        (frozenset({"b", "a"}), "['a', 'b']"),
    ],
)
def test_a_value_is_shown_as_the_configuration_has_it(value, shown):
    assert str(UserError("key", value, "mend it")) == f"key = {shown}: mend it"


def test_every_choice_of_a_configuration_is_known_by_its_name():
    for (_, key), classes in CHOICES.items():
        for name, cls in classes.items():
            assert name_of(object.__new__(cls)) == name, key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--algorithm local --payload.compression top_k", "payload.compression = 'top_k'"),
        ("--algorithm local --attack sign_flip --attack.share 0.3", "attack.name = 'sign_flip'"),
        ("--algorithm fedsoft_async", "policy.name = 'rounds'"),
        ("--clock wall", "clock = 'wall'"),
    ],
)
def test_a_refusal_shows_the_name_that_was_written(options, message):
    with pytest.raises(UserError, match=message) as error:
        check_sections(load(TINY, options.split()))
    shown = str(error.value).partition(": ")[0]
    assert not [cls for of in CHOICES.values() for cls in of.values() if f"{cls.__name__}(" in shown]
