"""Randomness by address."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from mpifl.core.rng import Key, key

parts = st.lists(st.one_of(st.integers(0, 10**9), st.text("abcxyz", max_size=6)), max_size=4)


@given(st.integers(0, 2**31), parts)
def test_the_same_address_gives_the_same_draws(seed, address):
    a, b = key(seed, *address), key(seed).of(*address)
    assert a == b
    assert_array_equal(a.numpy().random(5), b.numpy().random(5))
    torch.testing.assert_close(
        torch.rand(5, generator=a.torch()), torch.rand(5, generator=b.torch()), rtol=0, atol=0
    )


@given(parts, parts)
def test_different_addresses_give_different_draws(one, other):
    a, b = key(0, *one), key(0, *other)
    assert (a.entropy == b.entropy) == (a.path == b.path)
    if a.path != b.path:
        assert (a.numpy().random(4) != b.numpy().random(4)).all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key(0, 1), key(0, "1")),  # a number is not its name
        (key(0, 1, 2), key(0, 12)),
        (key(0, "a", "b"), key(0, "ab")),
        (key(0, "visit", 1, 2), key(0, "visit", 2, 1)),
        (key(0), key(1)),
    ],
)
def test_addresses_that_look_alike_are_different(one, other):
    assert one.numpy().integers(2**63) != other.numpy().integers(2**63)
    assert one.torch().initial_seed() != other.torch().initial_seed()


def test_the_seed_is_that_of_the_torch_generator():
    assert key(0, "visit", 1).seed == key(0, "visit", 1).torch().initial_seed() < 2**63


def test_a_key_below_a_key_remembers_the_whole_way():
    assert key(1, "a").of("b").of(2).of("c") == key(1, "a", "b", 2, "c")
    assert key(0, "visit", 1).of(5).of(7).entropy != key(0, "visit", 2).of(5).of(7).entropy


def test_numpy_integers_are_addresses_too():
    assert key(np.int64(3), np.int32(4)) == key(3, 4)


def test_a_generator_starts_afresh_every_time():
    k = key(5, "order")
    first = k.numpy()
    first.random(100)
    assert k.numpy().random() == k.numpy().random() != first.random()


@pytest.mark.parametrize("gpus", [False, True], ids=["no GPU", "GPUs"])
def test_a_block_draws_from_its_key_and_leaves_the_global_generator_as_it_was(gpus, monkeypatch):
    """What PyTorch draws after `torch.manual_seed` of the same seed, also behind an exception."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    torch.manual_seed(3)
    before, k = torch.random.get_rng_state(), key(7, "init", 2)
    others = np.random.get_state()[1].copy(), random.getstate()
    with k.seeded():
        drawn, more = torch.rand(4), (np.random.rand(), random.random())
    with pytest.raises(ZeroDivisionError), k.seeded():
        raise ZeroDivisionError
    assert_array_equal(torch.random.get_rng_state(), before)
    assert_array_equal(np.random.get_state()[1], others[0])
    assert random.getstate() == others[1]
    with k.seeded():
        assert (np.random.rand(), random.random()) == more
    torch.manual_seed(k.seed)
    assert_array_equal(drawn, torch.rand(4))


def test_draws_are_the_same_in_every_process_and_do_not_touch_the_global_generators():
    """Hashes of strings differ between processes; addresses do not."""
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    here = (
        key(7, "visit", 3, 0).numpy().integers(10**6),
        torch.rand(1, generator=key(7, "init").torch()).item(),
    )
    assert_array_equal(torch.random.get_rng_state(), before[0])
    assert_array_equal(np.random.get_state()[1], before[1])
    code = (
        "import torch; from mpifl.core.rng import key;"
        "print(key(7, 'visit', 3, 0).numpy().integers(10**6),"
        "torch.rand(1, generator=key(7, 'init').torch()).item())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert there == [str(h) for h in here]


def test_a_key_says_its_address():
    assert Key((1, "a")).of(2).path == (1, "a", 2)
