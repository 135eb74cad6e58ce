"""Messages, notes, errors, timing, objects by path: the small words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support.refusal import refusal_of

from mpifl.core import timing
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.imports import load_object
from mpifl.core.timing import PHASES, Stopwatch
from mpifl.core.types import Message, Notes, Server


def test_notes_are_columns_and_having_more_leaves_the_old_ones():
    notes = Notes(
        np.array([3, 5]), np.array([10, 20]), np.zeros(2), np.ones(2, bool), {"loss": np.array([1.0, 2.0])}
    )
    more = notes.having(gram=np.eye(2))
    assert len(notes) == 2
    assert_array_equal(more["loss"], [1.0, 2.0])
    assert_array_equal(more["gram"], np.eye(2))
    assert "gram" not in notes.columns
    with pytest.raises(KeyError):
        notes["gram"]


def test_what_travels_cannot_be_changed():
    message = Message({"model": torch.ones(1, 2)}, {"model": (4,)})
    assert_array_equal(message["model"], [[1, 1]])
    with pytest.raises(FrozenInstanceError):
        message.version = 3
    server = Server({}, np.zeros(2))
    with pytest.raises(FrozenInstanceError):
        server.assign = np.ones(2)


def test_an_error_names_key_value_and_remedy():
    error = UserError("lr", -1, "use a positive rate")
    assert str(error) == "lr = -1: use a positive rate"
    assert str(error.under("local")) == "local.lr = -1: use a positive rate"
    assert str(error.under("")) == str(error)
    require(True, "a", 1, "b")
    with pytest.raises(UserError, match=r"^a = 1: b$"):
        require(False, "a", 1, "b")


@pytest.mark.parametrize(
    ("word", "answer"), [("epoch", "did you mean 'epochs'?"), ("zzz", "known: batch_size, epochs, lr")]
)
def test_the_nearest_name_is_offered(word, answer):
    assert nearest(word, ["lr", "epochs", "batch_size"]) == answer


def test_time_of_an_inner_phase_is_taken_off_the_outer(monkeypatch):
    now = 10.0
    monkeypatch.setattr(timing, "perf_counter", lambda: now)
    watch = Stopwatch()
    with watch("train"):
        now += 2
        with watch("load"):
            now += 5
    seconds = watch.take()
    assert set(PHASES) <= set(seconds)
    assert (seconds["load"], seconds["train"]) == (5, 2)
    again = watch.take()
    assert sum(again[phase] for phase in PHASES) == 0


def test_objects_are_found_by_file_and_by_module(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Thing:\n    pass\n")
    thing = load_object(f"{file}:Thing", "algorithm.name")
    assert thing.__name__ == "Thing"
    assert thing.imported_as == f"{file}:Thing"
    assert load_object("fractions:Fraction", "model.path").__name__ == "Fraction"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.py:Thing", "there is no file"),
        ("{file}:Think", "did you mean 'Thing'"),
        ("no.such.module:Thing", "No module named"),
        ("{broken}:Thing", "SyntaxError"),
    ],
)
def test_objects_that_cannot_be_found_are_explained(path, says, tmp_path):
    (tmp_path / "mine.py").write_text("class Thing:\n    pass\n")
    (tmp_path / "broken.py").write_text("class Thing\n")
    path = path.format(file=tmp_path / "mine.py", broken=tmp_path / "broken.py")
    with refusal_of("algorithm.name", says):
        load_object(path, "algorithm.name")


class Plain(Algorithm):
    """Declares nothing."""

    def aggregate(self, server, notes):
        """Move nothing."""


class Fixed(Plain):
    """Declares in the class."""

    needs = Needs(validation=True)


@dataclass(frozen=True)
class Chosen(Plain):
    """Declares by a field."""

    validates: bool = False

    @cached_property
    def needs(self):
        """Validation data where asked for."""
        return Needs(validation=self.validates)


class Assigned(Plain):
    """Declares for the object."""

    def __init__(self):
        object.__setattr__(self, "needs", Needs(validation=True))


@pytest.mark.parametrize(
    ("method", "validation"),
    [(Plain(), False), (Fixed(), True), (Chosen(), False), (Chosen(True), True), (Assigned(), True)],
)
def test_needs_are_declared_by_class_field_or_object(method, validation):
    assert method.needs == Needs(validation=validation)
