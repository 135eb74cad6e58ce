"""What an upload goes through at the client: clipping by hand, noise by its moments, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support.each import for_each
from torch.testing import assert_close

from mpifl.core.errors import MethodError, UserError
from mpifl.core.rng import key
from mpifl.core.types import Message, Report
from mpifl.protection.privacy import (
    CLIPPED,
    CentralPrivacy,
    LocalPrivacy,
    Privacy,
    clipped,
    protect,
    with_noise,
)

BASE = torch.tensor([[1.0, 2.0, 0.0], [10.0, 10.0, 10.0]])


def report(**vectors: list[float]) -> Report:
    """Return a report of client 5 that chose row 0."""
    return Report(5, 7, {name: torch.tensor(v) for name, v in vectors.items()}, {"cluster": 0})


def message(rows: torch.Tensor = BASE) -> Message:
    """Return the download of all rows."""
    return Message({"model": rows, "head": rows[:, :2]}, {"model": (0, 1), "head": (0, 1)})


def test_an_update_of_length_5_is_clipped_to_2_by_hand():
    """(4, 6, 0) is (3, 4, 0) from row 0, of length 5: 2/5 of that is (1.2, 1.6, 0)."""
    made = protect(report(model=[4.0, 6.0, 0.0]), message(), CentralPrivacy(2.0), "cluster", None, key(0))
    assert_close(made.vectors["model"], torch.tensor([2.2, 3.6, 0.0]), rtol=1e-6, atol=0)
    assert (made.client, made.num_samples, dict(made.notes)) == (5, 7, {"cluster": 0})
    longer = protect(report(model=[4.0, 6.0, 0.0]), message(), CentralPrivacy(2.0), "cluster", 2.5, key(0))
    assert_close(longer.vectors["model"], torch.tensor([2.5, 4.0, 0.0]), rtol=1e-6, atol=0)


def test_the_length_is_that_of_all_uploads_together():
    """(3, 0, 0) in one and (0, 4) in the other: 5, clipped to 1: 0.6 and 0.8."""
    sent = report(model=[4.0, 2.0, 0.0], head=[1.0, 6.0])
    made = protect(sent, message(), CentralPrivacy(1.0), "cluster", None, key(0))
    assert_close(made.vectors["model"], torch.tensor([1.6, 2.0, 0.0]), rtol=1e-6, atol=0)
    assert_close(made.vectors["head"], torch.tensor([1.0, 2.8]), rtol=1e-6, atol=0)


def test_an_upload_that_is_a_change_is_clipped_from_the_origin():
    """(3, 4, 0) has the length 5 whatever was downloaded."""
    changes = replace(report(model=[3.0, 4.0, 0.0]), based_on={"model": None})
    made = protect(changes, message(), LocalPrivacy(2.0, 0.0), "cluster", None, key(0))
    assert_close(made.vectors["model"], torch.tensor([1.2, 1.6, 0.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("privacy", [LocalPrivacy(2.0, 0.0), CentralPrivacy(2.0)])
def test_an_upload_is_based_on_the_row_that_was_downloaded_or_refused(privacy):
    """Based on itself an upload would have no length, and nothing of it would be clipped."""
    sent = report(model=[4.0, 6.0, 0.0])
    made = protect(replace(sent, based_on={"model": BASE[0]}), message(), privacy, "cluster", None, key(0))
    assert_close(made.vectors["model"], torch.tensor([2.2, 3.6, 0.0]), rtol=1e-6, atol=0)
    own = replace(sent, based_on={"model": sent.vectors["model"]})
    with pytest.raises(MethodError, match="'model' is based on what the client did not download"):
        protect(own, message(), privacy, "cluster", None, key(0))


def test_a_short_update_and_a_run_without_privacy_are_left_alone_bit_for_bit():
    sent = report(model=[1.1, 2.1, 0.3])
    for privacy in (CentralPrivacy(1.0), CentralPrivacy(noise_multiplier=0.0), Privacy()):
        made = protect(sent, message(), privacy, "cluster", None, key(0))
        assert_close(made.vectors["model"], sent.vectors["model"], rtol=0, atol=0)


def test_after_rounding_to_float32_no_update_is_longer_than_the_clip():
    """Also far from 0, where float32 is coarse and rounding could lengthen what was cut to size."""
    draw = np.random.default_rng(0)
    for scale in (0.0, 1.0, 1e4):
        base = torch.from_numpy(scale * draw.standard_normal(1000)).float()
        far = base + torch.from_numpy(draw.standard_normal(1000)).float()
        for most in (1e-3, 0.1, 3.0):
            out = clipped({"w": far}, {"w": base}, most)["w"]
            assert float((out.double() - base.double()).norm()) <= most


def test_adaptive_clipping_sends_whether_the_update_was_within_the_clip():
    """One of length 5 beside clips of 5.5 and 4.5."""
    privacy = CentralPrivacy(5.5, quantile=0.5)
    for most, within in ((5.5, 1.0), (4.5, 0.0)):
        made = protect(report(model=[4.0, 6.0, 0.0]), message(), privacy, "cluster", most, key(0))
        assert made.notes[CLIPPED] == within


def test_local_noise_has_the_stated_variance_and_is_addressed():
    """200,000 draws of standard deviation z C = 0.6: mean within 5 sigma of 0, variance within 1 %."""
    base = torch.zeros(1, 200_000)
    sent = Report(1, 1, {"model": torch.zeros(200_000)})
    privacy, there = LocalPrivacy(2.0, 0.3), Message({"model": base}, {"model": (0,)})
    made = [protect(sent, there, privacy, None, None, key(0, "visit", k)).vectors["model"] for k in (1, 1, 2)]
    assert_close(made[0], made[1], rtol=0, atol=0)
    x, y = made[0].double(), made[2].double()
    assert_allclose(float(x.mean()), 0, atol=5 * 0.6 / 200_000**0.5)
    assert_allclose(float(x.var()), 0.36, rtol=0.01)
    assert_allclose(float((x * y).mean()), 0, atol=5 * 0.36 / 200_000**0.5)


def test_noise_is_added_to_the_vector():
    x = torch.full((1000,), 100.0)
    assert_allclose(float((with_noise(x, 1e-3, key(3)) - x).std()), 1e-3, rtol=0.15)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (Report(1, 1, {"model": torch.zeros(3)}, {"cluster": 0, "loss": 1.0}), "also send loss"),
        (Report(1, 1, {"other": torch.zeros(3)}, {"cluster": 0}), "'other' is not an update of a row"),
        (Report(1, 1, {"model": torch.zeros(2, 3)}, {"cluster": 0}), "'model' is not an update of a row"),
    ],
)
def test_what_no_noise_covers_is_refused(sent, words):
    with pytest.raises(MethodError, match=words):
        protect(sent, message(), CentralPrivacy(1.0), "cluster", None, key(0))


@for_each(
    ("make", "words"),
    [
        (lambda: CentralPrivacy(-1.0), "clip = -1"),
        (lambda: CentralPrivacy(None, 1.0), "clip = None"),
        (lambda: CentralPrivacy(1.0, -1.0), "noise_multiplier = -1"),
        (lambda: LocalPrivacy(1.0, 1.0, 0.0), "delta = 0"),
        (lambda: CentralPrivacy(1.0, count_noise=0.0), "count_noise = 0"),
        (lambda: CentralPrivacy(1.0, quantile=1.5), "quantile = 1.5"),
        (lambda: CentralPrivacy(1.0, clip_lr=0.1), "no effect without quantile"),
        (lambda: CentralPrivacy(1.0, sampling="all"), "sampling = 'all'"),
    ],
)
def test_bad_values_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_what_else_is_released_is_paid_for_by_more_noise_on_the_updates():
    """1 / z^2 = 1 / z_u^2 + 1 / s_c^2 + 1 / (2 s_b)^2: with z = 1, s_c = 2, s_b = 1: z_u^2 = 2."""
    privacy = CentralPrivacy(1.0, 1.0, count_noise=2.0, quantile=0.5, quantile_noise=1.0)
    assert_allclose(privacy.noise_of_updates(10, counts=True), 2**0.5)
    assert_allclose(privacy.noise_of_updates(10, counts=False), (4 / 3) ** 0.5)
    assert CentralPrivacy(1.0, 1.3).noise_of_updates(10, counts=False) == 1.3
    with pytest.raises(UserError, match="leaves nothing for the updates"):
        CentralPrivacy(1.0, 1.0, count_noise=1.0).noise_of_updates(10, counts=True)


def test_the_noise_on_the_quantile_by_hand():
    """40 clients: 40 / 20 = 2. z = 1 leaves 1 - 1 / (2 x 2)^2 = 15 / 16 for the updates."""
    privacy = CentralPrivacy(clip=1.0, noise_multiplier=1.0, quantile=0.5)
    assert privacy.noise_of_quantile(40) == 2.0
    assert privacy.noise_of_updates(40, counts=False) == pytest.approx((15 / 16) ** -0.5)


def test_an_update_exactly_as_long_as_the_clip_is_within_it():
    """(3, 4) has the length 5."""
    for clip, within in ((5.0, 1.0), (4.999, 0.0)):
        privacy = CentralPrivacy(clip=clip, noise_multiplier=0.0, quantile=0.5)
        report = Report(1, 1, {"model": torch.tensor([3.0, 4.0])})
        message = Message({"model": torch.zeros(1, 2)}, {"model": (0,)}, 0, 1)
        assert protect(report, message, privacy, None, None, key(0)).notes["within_clip"] == within


def test_two_uploads_of_a_visit_have_noise_of_their_own():
    report = Report(1, 1, {"model": torch.zeros(50), "control": torch.zeros(50)})
    message = Message({name: torch.zeros(1, 50) for name in report.vectors}, {}, 0, 1)
    sent = protect(report, message, LocalPrivacy(clip=1.0), None, None, key(0)).vectors
    assert not torch.equal(sent["model"], sent["control"])
