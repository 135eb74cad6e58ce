"""Fine-tuning before evaluation: what a shared model is worth to a client that trains it a little further."""

from __future__ import annotations

from mpifl.core.client import Client
from mpifl.core.federation import Split
from mpifl.core.rng import key
from mpifl.core.types import Vector


def judge_tuned(
    client: Client, vector: Vector, split: Split, epochs: int, part: str = "all"
) -> dict[str, float]:
    """Return `accuracy` and `loss` on `split` after `epochs` of training, and both before: `_initial`.

    The order of the batches is addressed by client and visit alone, not by the training seed.

    Args:
        part: the part of the vector that is tuned.
    """
    moving = None if part == "all" else client.layout.part(part)
    address = key(0, "tune", client.id, client.visit)
    tuned = client.sgd(vector, address, part=moving, epochs=epochs).vector
    before = {f"{name}_initial": value for name, value in client.judge(vector, split).items()}
    return {**client.judge(tuned, split), **before}
