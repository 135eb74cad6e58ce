"""How a user's module is called: with several inputs, and with several outputs of which a task takes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import UserError, first_of, require
from .federation import InputPart, unpacked


@dataclass(frozen=True)
class SeveralInputs:
    """Calls a module with several inputs; a hook before its forward pass.

    Attributes:
        parts: the inputs, packed in samples [n, F].
        by_name: whether the module gets them by keyword; otherwise in order.
    """

    parts: tuple[InputPart, ...]
    by_name: bool

    @classmethod
    def of(
        cls, parts: tuple[InputPart, ...], call: Callable[..., Any], key: str, value: str
    ) -> SeveralInputs:
        """Return how a function takes several inputs: by name, if its signature has all of their names.

        Args:
            parts: the inputs.
            call: the module's method.
            key: configuration key that names the module, for messages.
            value: value of that key.

        Raises:
            UserError: the signature has some of the names and not the others.
        """
        known = inspect.signature(call).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
        names = [part.name for part in parts]
        there = [name for name in names if name in known]
        lacks = first_of([name for name in names if name not in known], len(names))
        remedy = (
            f"its {call.__name__} names {', '.join(there)} and not {lacks}; name all inputs, or none of them"
        )
        require(anything or len(there) in (0, len(names)), key, value, remedy)
        return cls(parts, anything or bool(there))

    def arguments(self, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for samples: packed, float32 [n, F], or a mapping of names to inputs."""
        given = dict(x) if isinstance(x, Mapping) else unpacked(x, self.parts)
        return ((), given) if self.by_name else (tuple(given[part.name] for part in self.parts), {})

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call with samples as one argument; None leaves other calls alone."""
        samples = len(args) == 1 and not kwargs and isinstance(args[0], (torch.Tensor, Mapping))
        return self.arguments(args[0]) if samples else None


@dataclass
class TakenOutput:
    """Takes one of several outputs of a module; a hook after its forward pass.

    Attributes:
        which: its name in a mapping or an object, or its number in a tuple, from 0.
        on: whether it takes one; otherwise the module returns all, for code of a user that trains it.
    """

    which: str
    on: bool = True

    def take(self, found: Any) -> Any:
        """Return the output; a tensor is the output itself.

        Raises:
            UserError: there is none of that name or number.
        """
        if isinstance(found, torch.Tensor):
            return found
        if isinstance(found, Mapping) and self.which in found:
            return found[self.which]
        if isinstance(found, (tuple, list)) and self.which.isdecimal() and int(self.which) < len(found):
            return found[int(self.which)]
        if hasattr(found, self.which):
            return getattr(found, self.which)
        raise UserError("model.output", self.which, f"its forward {described(found)}")

    def __call__(self, module: nn.Module, args: Any, found: Any) -> Any:
        """Return the output, if one is to be taken."""
        return self.take(found) if self.on else None


def described(found: object) -> str:
    """Return what a module returns in place of a tensor, and how one of several outputs is named."""
    kind = type(found).__name__
    if isinstance(found, Mapping):
        return f"returns a {kind}; name one of {', '.join(map(str, found))}"
    if isinstance(found, (tuple, list)):
        return f"returns a {kind} of {len(found)}; name one by its number, from 0"
    return f"returns a {kind}; name one of its attributes"


def embedding_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of samples by a module's method `embed`; several inputs are packed in `x`.

    Raises:
        UserError: the module has no such method.
    """
    remedy = "its embedding is needed; name its last layer (model.head), or build a mpifl.models.Net"
    require(hasattr(module, "embed"), "model.name", "a network without `embed`", remedy)
    hooks = module._forward_pre_hooks.values()
    hook = next((hook for hook in hooks if isinstance(hook, SeveralInputs)), None)
    if hook is None:
        found: torch.Tensor = module.embed(x)
        return found
    args, named = SeveralInputs.of(hook.parts, module.embed, "model", "embed").arguments(x)
    several: torch.Tensor = module.embed(*args, **named)
    return several


def _hook(module: nn.Module) -> TakenOutput | None:
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, TakenOutput)), None)


def task_output(module: nn.Module, found: Any) -> Any:
    """Return what the task takes of the outputs of a module."""
    hook = _hook(module)
    return found if hook is None else hook.take(found)


@contextmanager
def all_outputs(module: nn.Module, everything: bool = True) -> Iterator[None]:
    """Let a module return all its outputs in a block; if not `everything`, the one that the task takes."""
    hook = _hook(module)
    if hook is None:
        yield
        return
    before, hook.on = hook.on, not everything
    try:
        yield
    finally:
        hook.on = before
