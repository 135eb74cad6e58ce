"""Randomness addressed by key: the same address gives the same draws on any rank, in any order.

No generator lives across clients and none is global. A key is a path such as `key(seed, "visit", client,
visit)`; `of` appends to the path, `numpy` and `torch` open a fresh generator at it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Key:
    """An address of randomness."""

    path: tuple[int | str, ...]

    def of(self, *more: int | str) -> Key:
        """Return the key below this one."""
        return Key((*self.path, *(int(p) if not isinstance(p, str) else p for p in more)))

    @property
    def entropy(self) -> int:
        """128 bits that are derived from this address."""
        return int.from_bytes(hashlib.blake2b(repr(self.path).encode(), digest_size=16).digest(), "little")

    @property
    def seed(self) -> int:
        """63 bits of `entropy`, for `torch.manual_seed`."""
        return self.entropy >> 65

    def entropies(self, addresses: Iterable[tuple[int | str, ...]]) -> bytes:
        """Return `entropy` of the keys at some addresses below this one, 16 bytes each, little-endian."""
        path = self.path
        return b"".join(
            hashlib.blake2b(repr((*path, *address)).encode(), digest_size=16).digest()
            for address in addresses
        )

    def numpy(self) -> np.random.Generator:
        """Return a NumPy generator (Philox) that starts at this address."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.entropy)))

    def below(self, n: int) -> int:
        """Return one draw, uniform over 0..n-1, without opening a generator."""
        return self.entropy * n >> 128

    def torch(self, device: str | torch.device = "cpu") -> torch.Generator:
        """Return a torch generator on `device` that starts at this address."""
        return torch.Generator(device).manual_seed(self.seed)

    def seed_others(self) -> None:
        """Seed the global generators of NumPy and of Python, from which users' code may draw."""
        np.random.seed(self.entropy >> 96)
        random.seed(self.seed)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Seed the global generators for a block that draws from them, and restore their states afterwards.

        Weights are drawn from PyTorch's; users' code may also draw from those of NumPy and of Python. Without
        a GPU only the CPU generator is seeded: `torch.manual_seed` formats a stack trace for each kind of
        accelerator, which takes longer than drawing a small network's weights.
        """
        others = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices=[]):
            seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
            seed(self.seed)
            self.seed_others()
            try:
                yield
            finally:
                np.random.set_state(others[0])
                random.setstate(others[1])


def key(seed: int, *address: int | str) -> Key:
    """Return the key at `address` below `seed`."""
    return Key((int(seed),)).of(*address)
