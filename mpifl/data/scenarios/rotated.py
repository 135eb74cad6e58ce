"""Groups with the same images rotated by different angles: a known ground truth for clustering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, hold_out, train_val_test
from mpifl.data.pool import Pool
from mpifl.data.scenario import ImageSide, Scenario, ScenarioSpec, check_groups, grouped
from mpifl.data.scenarios.usual import cut_copies, parts_of_copies
from mpifl.data.transforms import Border, Op, Rotate, rotated


@dataclass(frozen=True)
class Rotated(Scenario):
    """Rotated images, one block of clients for each angle; clients are ordered by block.

    The defaults are EMD-CFL's recipe for any source: class-balanced, replicated across groups, disjoint
    within one.

    Attributes:
        clients: number of clients N, a multiple of the number of angles.
        angles: rotation in degrees counter-clockwise, one for each block of clients.
        tolerance: largest difference, in degrees, of angles that are one group in the ground truth; so are
            angles that move all pixels to the same places.
        copies: true: every block holds the whole data set; false: the blocks partition it.
        balance: whether to keep the first n_min images of each class, n_min being the size of the rarest, and
            give every client the same class histogram.
        validation: share of each client's training samples set aside for validation.
        test_parts: `group` divides the test images among the clients of a block; `population` divides them in
            N parts, of which each block uses the first ones (as in EMD-CFL's notebooks: only a quarter of
            MNIST's test part is used).
        test_share: share of each client's own samples set aside for testing, in place of the source's test
            part; null: the source's test part is used. Copies set the same samples aside.
        spread: true: the last clients get one sample each of a remainder; false: the very last client gets
            all of it (EMD-CFL's notebooks).
        expand: whether to grow the canvas so that no corner is cut (EMD-CFL's CIFAR-10).
        border: number of black pixels added on every side before rotating.
        resize: side in pixels of the images that clients get; null: unchanged.
    """

    clients: PositiveInt = 20
    angles: Annotated[tuple[float, ...], MinLen(1)] = (0.0, 90.0, 180.0, 270.0)
    tolerance: NonNegativeFloat = 0.0
    copies: bool = True
    balance: bool = True
    validation: ShareBelowOne = 0.2
    test_parts: Literal["group", "population"] = "group"
    test_share: ShareBelowOne | None = None
    spread: bool = True
    expand: bool = False
    border: NonNegativeInt = 0
    resize: ImageSide | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "has no effect on a test_share, which each client sets aside; leave one of them out"
        unused = self.test_parts != "group" and self.test_share is not None
        require(not unused, "test_parts", self.test_parts, remedy)
        check_groups(self.clients, len(self.angles))

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and rotation."""
        side = max(pool.shape[-2:], default=0)
        remedy = f"use at most the {side} pixels of an image's side"
        require(self.border <= side, "border", self.border, remedy)
        blocks = grouped(self.clients, len(self.angles))
        border: tuple[Op, ...] = (Border(self.border),) if self.border else ()
        shape = tuple(length + 2 * self.border for length in pool.shape[-2:])
        group_of = same_angle(self.angles, self.tolerance, shape, self.expand)
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=group_of[blocks],
            blocks=blocks,
            ops=(*border, Rotate(self.angles, self.expand)),
            materialize=not self.expand,
            resize=self.resize,
            names=angle_names(self.angles, group_of),
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        blocks, options = len(self.angles), {"balance": self.balance, "spread": self.spread}
        copies = blocks if self.copies else 1
        per_block = self.clients // blocks
        (learnt, tested), own = parts_of_copies(pool, self.test_share, copies, per_block, key)
        train = cut_copies(pool, learnt, self.clients, copies, key.of("train"), **options)
        if own is not None:
            train, test = hold_out(train, own)
        elif self.test_parts == "population":
            address = key.of("test")
            test = cut_copies(pool, tested, self.clients, blocks, address, self.clients, **options)
        else:
            test = cut_copies(pool, tested, self.clients, copies, key.of("test"), **options)
        return train_val_test(train, test, self.validation)


def angle_names(angles: tuple[float, ...], group_of: np.ndarray) -> tuple[str, ...]:
    """Return the angles of each group in words: ("-3, 3 degrees", "177, 183 degrees")."""
    turns = [
        dict.fromkeys(f"{a:g}" for a, g in zip(angles, group_of, strict=True) if g == group)
        for group in range(int(group_of.max(initial=-1)) + 1)
    ]
    return tuple(f"{', '.join(turn)} degrees" for turn in turns)


def same_angle(
    angles: tuple[float, ...], tolerance: float, shape: tuple[int, ...] = (), expand: bool = False
) -> np.ndarray:
    """Return the true group of each angle, int64: a chain of angles within `tolerance` is one group.

    EMD-CFL's "two" (-3, 3, 177, 183 with tolerance 6) has the groups 0, 0, 1, 1. A chain of angles that move
    all pixels to the same places is one group, too: 0 and 5 degrees for images of 8 x 8 pixels.

    Args:
        angles: in degrees.
        tolerance: in degrees.
        shape: shape of the images, [..., H, W]; empty: pixels are not compared.
        expand: as in `Rotate`.
    """
    turns = np.asarray(angles, np.float64)
    apart = np.abs((turns[:, None] - turns[None, :] + 180.0) % 360.0 - 180.0)
    alike = apart <= tolerance + 1e-9
    if len(shape) > 1:
        height, width = shape[-2:]
        near = np.degrees(3.0 / min(height, width))  # beyond it, pixels at the edge differ
        for i, j in np.argwhere(~alike & (apart <= near)):
            places = np.arange(1, height * width + 1).reshape(1, 1, height, width)  # 0: black
            one, other = (rotated(places, angles[k], expand) for k in (i, j))
            alike[i, j] = np.array_equal(one, other)
    label = np.arange(len(turns))
    for _ in turns:  # labels propagate along chains
        label = np.where(alike, label[None, :], len(turns)).min(axis=1)
    return np.unique(label, return_inverse=True)[1]
