"""Masks: what travels is uniform, what is revealed is the sum, and shares reveal what they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from mpifl.aggregation.exact_sum import exact_sum, spacings
from mpifl.core.errors import UserError
from mpifl.core.plan import Mixing
from mpifl.core.rng import key
from mpifl.protection import secure_sum
from mpifl.protection.secure_sum import (
    GENERATOR,
    GROUP,
    KEY,
    PRIME,
    SEED,
    MaskedSums,
    SecureGroup,
    SecureRounds,
    agreed_seed,
    bytes_of_round,
    masked_upload,
    messages,
    polynomial,
    public_key,
    reconstructed,
    secret,
    stream,
    unmasked_sum,
)

CLIENTS = (2, 3, 5, 7, 11, 13, 17)


def group(degree: int | None = None, threshold: float = 0.5, members=CLIENTS) -> SecureGroup:
    """Return a group with its own secrets."""
    return SecureGroup.of(key(9), members, threshold, degree)


def test_shares_by_hand():
    """7 + 3 x + 2 x^2 is 12, 21, 34 at 1, 2, 3; any three of them give 7, two of them do not."""
    assert [polynomial([7, 3, 2], x) for x in (1, 2, 3, 4)] == [12, 21, 34, 51]
    assert reconstructed({1: 12, 2: 21, 3: 34}) == reconstructed({2: 21, 3: 34, 4: 51}) == 7
    assert reconstructed({1: 12, 2: 21}) != 7


def test_secrets_of_256_bits_come_back_from_shares():
    big, more = PRIME - 5, [secret(key(1, c)) for c in range(4)]
    shares = {x: polynomial([big, *more], x) for x in (9, 4, 100, 2, 31)}
    assert reconstructed(shares) == big


def test_two_clients_agree_on_a_seed_that_others_do_not_find():
    a, b, c = (secret(key(2, k)) for k in range(3))
    assert agreed_seed(a, public_key(b)) == agreed_seed(b, public_key(a)) != agreed_seed(c, public_key(b))
    assert public_key(5) == GENERATOR**5 % GROUP


@pytest.mark.parametrize("degree", [None, 2, 4])
def test_neighbours_are_mutual_and_as_many_as_asked(degree):
    made = group(degree)
    for k in CLIENTS:
        near = made.neighbours(k)
        assert len(near) == (6 if degree is None else degree)
        assert k not in near
        assert all(k in made.neighbours(j) for j in near)
    assert set(CLIENTS) == set(made.ring)


def test_neighbours_give_back_a_clients_secrets_only_when_enough_are_left():
    made = group(threshold=0.5)  # three of six
    for which in (KEY, SEED):
        assert made.revealed(which, 5, (2, 3, 17)) == secret(key(9, which, 5))
    two = made.shares(SEED, 5, (2, 3))
    assert reconstructed(two) != secret(key(9, SEED, 5))
    assert made.holds((2, 3, 5, 7))
    assert not made.holds((2, 3, 5)), "two neighbours of each are left, three are needed"
    assert not group(members=(4,)).holds((4,)), "the sum of one upload is the upload"


@pytest.mark.parametrize(
    ("threshold", "degree", "needed"),
    [(0.55, 100, 55), (0.5, 5, 3), (0.3, 6, 2), (2 / 3, 6, 4), (0.1, 4, 1), (1, 6, 6)],
)
def test_a_share_of_the_neighbours_is_rounded_up_to_whole_ones(threshold, degree, needed):
    assert SecureGroup(key(9), CLIENTS, threshold, degree, {}).needed == needed


def sums(made: SecureGroup, left, uploads, weights, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the plain sum of those who are left, the unmasked one, and what travelled [left, d]."""
    d = len(uploads[0])
    chosen = [CLIENTS.index(k) for k in left]
    bound = np.array([float(u.abs().max()) for u in uploads])
    spacing = spacings(weights[None], bound) * 2.0 ** max(52 - bits, 0)
    plain = exact_sum([uploads[j] for j in chosen], weights[None, chosen], spacing, d)[0].numpy()
    sent = np.stack(
        [
            masked_upload(uploads[j], weights[j], float(spacing[0]), made.seeds(CLIENTS[j]), 0, bits)
            for j in chosen
        ]
    )
    with np.errstate(over="ignore"):
        total = sent.sum(0, dtype=np.uint64)
    return plain, unmasked_sum(total, made.left_over(left), 0, bits), sent


@pytest.mark.parametrize("bits", [64, 52, 32, 20])
@pytest.mark.parametrize("degree", [None, 4])
@pytest.mark.parametrize("left", [CLIENTS, (2, 3, 5, 11, 17)])
def test_masked_sums_are_the_plain_ones_bit_for_bit_also_with_two_dropouts(left, degree, bits):
    """7 and 13 drop out after masking: the others' masks with them are found from their keys."""
    draw = np.random.default_rng(3)
    uploads = [torch.from_numpy(draw.standard_normal(500)).float() for _ in CLIENTS]
    weights = draw.random(len(CLIENTS))
    plain, unmasked, _ = sums(group(degree, 0.4), left, uploads, weights, bits)
    assert_array_equal(unmasked, plain)
    assert np.any(plain < 0), "signs survive the modulus"


def test_what_travels_is_uniform_whatever_is_sent():
    """Uploads of zeros and of ones: each of 16 values of the highest and lowest 4 bits as often as others.

    Chi squared with 15 degrees of freedom exceeds 50 with probability 1e-5; 8 values are looked at.
    """
    d = 20000
    for value in (0.0, 1.0):
        uploads = [torch.full((d,), value) for _ in CLIENTS]
        *_, sent = sums(group(2), CLIENTS, uploads, np.ones(len(CLIENTS)), 64)
        for row in (sent[0], sent[3]):
            for shift in (60, 0):
                seen = np.bincount((row >> np.uint64(shift) & np.uint64(15)).astype(int), minlength=16)
                assert float(((seen - d / 16) ** 2 / (d / 16)).sum()) < 50


def test_without_its_own_mask_an_upload_would_be_bare_once_its_pair_masks_are_known():
    """Why masks are double: the server that wrongly revealed a key still faces the client's own mask."""
    made, d = group(), 100
    upload = torch.ones(d)
    seeds = made.seeds(5)
    sent = masked_upload(upload, 1.0, 2.0**-40, seeds, 0, 64)
    known = unmasked_sum(sent, seeds[1:], 0, 64)
    assert not np.any(known == 2**40)
    assert_array_equal(unmasked_sum(sent, seeds, 0, 64), np.full(d, 2**40))


def test_streams_of_other_seeds_and_blocks_are_others():
    assert_array_equal(stream(5, 64, 10), stream(5, 64, 10))
    assert len({stream(seed, first, 1)[0] for seed in (5, 6) for first in (0, 1, 64)}) == 6


# -- bytes and rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "degree"), [(7, None), (7, 4), (2, None), (3, 10)])
def test_bytes_without_dropouts_are_the_closed_form(m, degree):
    """Up: two keys, a bound, g pairs of shares, b d / 8, g shares. Down: keys, grid, shares, bits."""
    config, d = MaskedSums(neighbours=degree, bits=33), 1001
    g = min(m - 1, degree or m)
    up = 64 + 4 + 92 * g + -(-33 * d // 8) + 32 * g
    down = 64 * g + 16 + 92 * g + -(-g // 8)
    made = SecureGroup.of(key(1), range(m), 0.5, degree)
    sent = messages(made, range(m), "model", d, config, True)
    ways = {way: sum(b.size for b in sent if b.direction == way) for way in ("up", "down")}
    assert ways == {"up": m * up, "down": m * down}
    assert bytes_of_round(m, d, config) == (m * down, m * up)
    assert bytes_of_round(m, d, config, header=10) == (m * (down + 40), m * (up + 50))
    per_client = [b for b in sent if b.client == 0]
    assert (len([b for b in per_client if b.direction == "up"]), len(per_client)) == (5, 9)


def test_those_who_drop_out_send_no_upload_and_reveal_nothing():
    """Of 4 clients one drops out: it sent keys, bound and shares; the others reveal shares of neighbours."""
    made, config = SecureGroup.of(key(1), range(4), 0.5, None), MaskedSums()
    sent = messages(made, (0, 1, 3), "model", 10, config, True)
    by_name = {(b.client, b.direction, b.name): b.size for b in sent}
    assert (2, "up", "model") not in by_name
    assert (2, "up", "secure_unmasking") not in by_name
    assert by_name[2, "up", "secure_shares"] == 3 * 92
    assert by_name[0, "up", "secure_unmasking"] == 3 * 32
    assert by_name[0, "up", "model"] == 80
    given_up = messages(made, (0,), "model", 10, config, False)
    assert not [b for b in given_up if b.name == "secure_unmasking"]


def dropping(rate: float, count: int, clients: np.ndarray, **options) -> SecureRounds:
    """Return rounds in whose first so many clients drop out."""
    for seed in range(1000):
        rounds = SecureRounds(MaskedSums(dropout=rate, **options), key(seed))
        rounds.begin([], clients, 1, {})
        if rounds._now[0] == count:
            return rounds
    raise AssertionError("no such seed")


def test_a_row_with_too_few_left_stays_or_ends_the_run():
    clients = np.arange(4)
    mixing = Mixing(np.array([[0.25, 0.25, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]))
    rounds = dropping(0.3, 1, clients, threshold=1.0)
    ((made,), _) = rounds.begin([mixing], clients, 1, {"model": 10})
    rounds.commit()
    assert rounds.figures() == {"secure_dropped": 1, "secure_skipped": 1}
    assert made.keep is not None
    assert sorted(made.keep.tolist()) == [0.0, 1.0]
    assert sorted(made.weights.sum(1).tolist()) in ([0.0, 0.5], [0.0, 1.0])
    ends = SecureRounds(MaskedSums(dropout=0.3, threshold=1.0, on_failure="abort"), rounds.key)
    with pytest.raises(UserError, match=r"on_failure = 'abort': round 1, row \d of 'model': 1 of 2 clients"):
        ends.begin([mixing], clients, 1, {"model": 10})


def test_a_mean_is_of_those_who_are_left_and_a_private_sum_keeps_its_denominator():
    clients, weights = np.arange(4), np.array([[0.1, 0.2, 0.3, 0.4]])
    rounds = dropping(0.3, 1, clients)
    ((mean,), _) = rounds.begin([Mixing(weights)], clients, 1, {"model": 10})
    left = mean.weights.sum()
    assert mean.masks is not None
    assert mean.masks.scale[0] == 1 / left
    assert mean.keep is None
    fixed = SecureRounds(rounds.config, rounds.key, fixed=True)
    ((private,), _) = fixed.begin([Mixing(weights / 2, np.array([0.5]))], clients, 1, {"model": 10})
    assert private.masks is not None
    assert private.masks.scale[0] == 1.0
    assert private.row_sums().tolist() == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0.0}, "threshold = 0"),
        ({"neighbours": 3}, "neighbours = 3"),
        ({"bits": 65}, "bits = 65"),
        ({"dropout": 1.0}, "dropout = 1"),
        ({"on_failure": "wait"}, "on_failure = 'wait'"),
    ],
)
def test_bad_values_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        secure_sum.MaskedSums(**options)
