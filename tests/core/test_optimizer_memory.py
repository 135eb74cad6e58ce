"""The optimisers that a client keeps: the j-th training of a visit goes on with the j-th one."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from mpifl.core.optimizer_memory import OptimizerMemory


def test_what_is_saved_is_found_again_in_the_order_of_trainings():
    memory = OptimizerMemory({})
    first, second = memory.next(), memory.next()
    first.steps, first.momentum = 3, torch.tensor([1.0, 2.0])
    second.steps, second.momentum, second.square = 5, torch.tensor([3.0]), torch.tensor([4.0])
    again = OptimizerMemory(memory.tensors())
    one, two, new = again.next(), again.next(), again.next()
    assert (one.steps, two.steps, new.steps) == (3, 5, 0)
    assert_close(one.momentum, torch.tensor([1.0, 2.0]))
    assert_close(two.square, torch.tensor([4.0]))
    assert one.square is None
    assert new.momentum is None


def test_trainings_that_a_visit_leaves_out_stay_as_they_were():
    memory = OptimizerMemory({})
    for steps in (1, 2):
        kept = memory.next()
        kept.steps, kept.momentum = steps, torch.full((1,), float(steps))
    later = OptimizerMemory(memory.tensors())
    later.next().steps = 7
    tensors = OptimizerMemory(later.tensors()).tensors()
    assert {name: int(t) for name, t in tensors.items() if name.endswith("steps")} == {
        "0.steps": 7,
        "1.steps": 2,
    }
