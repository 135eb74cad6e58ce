"""Checks that modules compute what their classes define: no hooks, and no methods set on an instance.

mpifl's own loops, stacks of models and captured CUDA graphs do not call a module, or not every time. They may
replace it only while nothing has been added to it. Users can add something at any time, so the check precedes
every use.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as everywhere

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
GLOBAL_HOOKS = tuple(getattr(everywhere, f"_global{name}") for name in HOOKS)
METHODS = frozenset(
    (
        "forward",
        "embed",
        "sequence",
        "_conv_forward",
        "_call_impl",
        "_wrapped_call_impl",
        "_compiled_call_impl",
    )
)
CALL = nn.Module.__call__


class Untouched:
    """Checks a module and its submodules for additions; fast enough to run at every visit.

    Args:
        module: the module; its set of submodules must not change afterwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.types = [type(m) for m in self.modules]
        self.hooks = [*GLOBAL_HOOKS, *(getattr(m, name) for m in self.modules for name in HOOKS)]
        self.own = [vars(m) for m in self.modules]
        self.parameters = list(module.parameters())

    def __call__(self) -> bool:
        """Return whether no hook was added, no method set on an instance, and no class changed."""
        return not (
            any(self.hooks)
            or any(map(_has_hooks, self.parameters))
            or not all(map(METHODS.isdisjoint, self.own))
            or [type(m) for m in self.modules] != self.types
            or nn.Module.__call__ is not CALL
        )


def _has_hooks(p: torch.Tensor) -> bool:
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def untouched(module: nn.Module) -> bool:
    """Return whether nothing was added to a module or anything inside it."""
    return Untouched(module)()
