"""Who attacks, and what attackers send, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from numpy.testing import assert_array_equal
from support.each import for_each
from torch.testing import assert_close

from mpifl.aggregation.update_filter import FilteredVisit
from mpifl.core.errors import UserError
from mpifl.core.parameters import Layout, VectorParts
from mpifl.core.rng import key
from mpifl.core.types import Message, Report
from mpifl.protection.attacks import ATTACKS, AttackedUploads, LabelFlip, NoAttack, Noise, Scale, SignFlip

LAYOUT = Layout.of(torch.nn.Linear(2, 1))  # d = 3


def sent(
    attack, rows: list[list[float]], statistics=(), layout: Layout = LAYOUT, unsent=(), **vectors: list
) -> dict[str, list]:
    """Return what is sent by an attacker that downloaded rows of table `model`."""
    message = Message({"model": torch.tensor(rows)}, {"model": tuple(range(len(rows)))})
    report = Report(1, 5, {name: torch.tensor(x) for name, x in vectors.items()}, {"loss": 1.0})
    report = replace(report, unsent=unsent)
    attacked = AttackedUploads(attack, frozenset({1}), VectorParts(layout, None, statistics))
    visit = FilteredVisit(message, 0, key(0, "visit", 1, 0))
    changed, honest = attacked.client(report, visit), replace(report, client=2)
    assert attacked.client(honest, visit) is honest
    assert changed.notes == {"loss": 1.0}
    return {name: x.tolist() for name, x in changed.vectors.items()}


def test_signs_of_updates_are_flipped_and_updates_are_scaled():
    """From (1, 1, 1) to (2, 0, 1) the update is (1, -1, 0)."""
    assert sent(SignFlip(share=0.5), [[1.0, 1, 1]], model=[2.0, 0, 1])["model"] == [0, 2, 1]
    assert sent(SignFlip(share=0.5, factor=3), [[1.0, 1, 1]], model=[2.0, 0, 1])["model"] == [-2, 4, 1]
    assert sent(Scale(share=0.5, factor=10), [[1.0, 1, 1]], model=[2.0, 0, 1])["model"] == [11, -9, 1]


def test_what_is_an_update_is_changed_as_it_is_and_what_is_no_parameter_stays():
    found = sent(SignFlip(share=0.5), [[1.0, 1, 1]], delta=[1.0, -1, 0], codes=[4.0, 5, 6, 7])
    assert found == {"delta": [-1, 1, 0], "codes": [4, 5, 6, 7]}
    assert sent(SignFlip(share=0.5), [[1.0, 1, 1]], ("model",), model=[2.0, 0, 1])["model"] == [2, 0, 1]
    found = sent(SignFlip(share=0.5), [[1.0, 1, 1]], unsent=("delta",), model=[2.0, 0, 1], delta=[1.0, -1, 0])
    assert found == {"model": [0, 2, 1], "delta": [1, -1, 0]}, "what the server works out is not sent"


def test_running_statistics_are_sent_as_they_are():
    """Two weights and a variance: boosted tenfold, the variance would be 4 + 10 (1 - 4) = -26."""
    layout = Layout(("w", "var"), ((2,), (1,)), 2)
    found = sent(
        Scale(share=0.5, factor=10), [[1.0, 1, 4]], layout=layout, model=[2.0, 0, 1], delta=[1.0, -1, -3]
    )
    assert found == {"model": [11, -9, 1], "delta": [10, -10, -3]}
    noisy = sent(Noise(share=0.5, sigma=2.0), [[1.0, 1, 4]], layout=layout, model=[2.0, 0, 1])["model"]
    assert noisy[2] == 1
    assert noisy[:2] != [2, 0]


def test_of_several_rows_the_nearest_is_where_the_update_begins():
    rows = [[0.0, 0, 0], [10.0, 0, 0]]
    assert sent(SignFlip(share=0.5), rows, model=[9.0, 1, 0])["model"] == [11, -1, 0]
    both = sent(SignFlip(share=0.5), rows, model=[[1.0, 0, 0], [9.0, 0, 0]])["model"]
    assert both == [[-1, 0, 0], [11, 0, 0]], "one upload for each row"


def test_noise_is_added_to_what_was_downloaded_and_drawn_by_visit():
    attack, rows = Noise(share=0.5, sigma=2.0), [[1.0] * 3]
    one, other = (sent(attack, rows, model=[5.0, y, 0])["model"] for y in (0, 7))
    assert one == other, "whatever was trained"
    message = Message({"model": torch.ones(1, 3)}, {"model": (0,)})
    report = Report(1, 5, {"model": torch.zeros(3)})
    attacked = AttackedUploads(attack, frozenset({1}), VectorParts(LAYOUT))
    again = attacked.client(report, FilteredVisit(message, 1, key(0, "visit", 1, 1))).vectors["model"]
    assert again.tolist() != one
    noise = attack.changed(torch.zeros(1, 40_000), key(3)) / 2
    assert_close(noise.mean(), torch.tensor(0.0), atol=0.02, rtol=0)
    assert_close(noise.std(), torch.tensor(1.0), atol=0.02, rtol=0)


def test_each_upload_of_a_visit_has_noise_of_its_own():
    """The model, and an upload that is alone, have the draws of the visit itself."""
    attack, rows, visit = Noise(share=0.5), [[0.0] * 3], key(0, "visit", 1, 0)
    both = sent(attack, rows, model=[0.0] * 3, control=[0.0] * 3, delta=[0.0] * 3)
    assert len({tuple(noise) for noise in both.values()}) == 3
    plain = attack.changed(torch.zeros(1, 3), visit)[0].tolist()
    assert both["model"] == plain
    assert sent(attack, rows, delta=[0.0] * 3)["delta"] == plain


def test_labels_by_hand():
    assert_array_equal(LabelFlip(share=0.5).labels(4), [3, 2, 1, 0])
    assert_array_equal(LabelFlip(share=0.5, source=1, target=3).labels(4), [0, 3, 2, 3])
    assert SignFlip(share=0.5).labels(4) is None


def test_a_share_is_drawn_by_the_key_and_clients_are_named():
    drawn = SignFlip(share=0.3).attackers(10, key(0))
    assert len(drawn) == 3
    assert list(drawn) == sorted(set(drawn))
    assert drawn == Scale(share=0.3).attackers(10, key(0)), "whatever the attack"
    assert {SignFlip(share=0.3).attackers(10, key(s)) for s in range(5)} != {drawn}
    assert SignFlip(clients=(4, 1)).attackers(10, key(0)) == (1, 4)


@for_each(
    ("make", "said"),
    [
        (lambda: SignFlip(), "by a share of the clients or by their numbers"),
        (lambda: SignFlip(share=0.1, clients=(1,)), "by a share of the clients or by their numbers"),
        (lambda: SignFlip(clients=(1, 1)), "name each client once"),
        (lambda: SignFlip(clients=(10,)).attackers(10, key(0)), "numbered from 0 to 9"),
        (lambda: SignFlip(clients=(0, 1)).attackers(2, key(0)), "somebody must be honest"),
        (lambda: SignFlip(share=0.01).attackers(10, key(0)), "makes 0 of 10 clients attackers"),
        (lambda: Scale(share=0.5, factor=1), "has no effect; use another"),
        (lambda: LabelFlip(share=0.5, source=1), "give source and target, or neither"),
        (lambda: LabelFlip(share=0.5, source=1, target=1), "has no effect: it is the source"),
        (lambda: LabelFlip(share=0.5, source=1, target=4).labels(4), "target = 4: labels are 0 to 3"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(UserError) as error:
        make()
    assert said in str(error.value)


def test_every_attack_has_a_name():
    assert set(ATTACKS.values()) == {NoAttack, LabelFlip, SignFlip, Scale, Noise}


def test_an_attack_of_another_size_than_one_by_hand():
    """factor 3: 5 becomes -15; sigma 3 is three times the draws of sigma 1."""
    update = torch.full((1, 4), 5.0)
    assert_close(SignFlip(share=0.5, factor=3.0).changed(update, key(0)), torch.full((1, 4), -15.0))
    one, three = (Noise(share=0.5, sigma=s).changed(update, key(0)) for s in (1.0, 3.0))
    assert_close(three, 3 * one)


def test_the_attackers_are_the_nearest_number_to_their_share_and_follow_the_seed():
    """0.29 of 10 clients are 3."""
    drawn = [SignFlip(share=0.29).attackers(10, key(seed)) for seed in range(5)]
    assert {len(some) for some in drawn} == {3}
    assert len(set(drawn)) > 1
