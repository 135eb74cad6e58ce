"""Models of transformers as networks of tokens: body and head, or one piece where these are not apart."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from mpifl.models import modules

CANDIDATES = 4  # linear layers of the right width, from the last, that are tried as the head


class Transformers(nn.Module):
    """A model of transformers that takes tokens.

    Args:
        net: the model; what it returns has `logits`.
        padding: the token after the end of a sample; None: every sample fills its length.
        second: the token after which a second text begins; None: samples are single texts.
        own: the token that the model itself takes for padding; None: as `padding`.
    """

    def __init__(
        self, net: nn.Module, padding: int | None, second: int | None, own: int | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.padding = padding
        self.second = second
        self.own = own

    def inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for tokens int64 [n, T]."""
        given, there = {"input_ids": x}, torch.ones_like(x)
        if self.padding is not None:
            later = (x != self.padding).flip(1).cumsum(1).flip(1) > 0  # padding inside of a text is text
            first = torch.arange(x.shape[1], device=x.device) == 0  # a text may be empty
            there = (later | first).long()
            given["attention_mask"] = there
            if self.own not in (None, self.padding):
                given["input_ids"] = torch.where(there > 0, x, self.own)
        if self.second is not None:
            ends = (x == self.second).long()
            given["token_type_ids"] = ((ends.cumsum(1) - ends) > 0).long() * there
        return given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the model for tokens int64 [n, T]: [n, ...] or [n, T, ...]."""
        logits: torch.Tensor = self.net(**self.inputs(x)).logits
        return logits

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the last hidden states over the tokens of each sample, [n, e]."""
        given = self.inputs(x)
        states: torch.Tensor = self.net(**given, output_hidden_states=True).hidden_states[-1]
        counts = given.get("attention_mask", torch.ones_like(x)).unsqueeze(2).to(states.dtype)
        return (states * counts).sum(1) / counts.sum(1)


class SplitTransformers(modules.Net):
    """A model of transformers and its last layer, which was taken out of it.

    Attributes:
        body: the model without its last layer.
        head: that layer.
        head_name: its name in the model.
        drawn: names in the model of the tensors whose weights were drawn, not read.
        trained: names of the modules that are trained whole beside adapters if nothing else is said.
        remarks: lines for the user about its weights.
    """

    body: Transformers

    def __init__(self, body: Transformers, head: nn.Linear, head_name: str) -> None:
        super().__init__(body, head)
        self.head_name = head_name
        self.drawn: frozenset[str] = frozenset()
        self.trained: tuple[str, ...] = ()
        self.remarks: tuple[str, ...] = ()

    def whole(self) -> nn.Module:
        """Return the model of transformers with its last layer put back."""
        self.body.net.set_submodule(self.head_name, self.head)
        return self.body.net


class WholeTransformers(nn.Module):
    """A model of transformers whose output is not that of a linear layer: methods for whole models take it.

    Attributes:
        body: the model.
        head_name: empty.
        frozen: names of the buffers that are the same for all clients and never change.
        drawn: names in the model of the tensors whose weights were drawn, not read.
        trained: names of the modules that are trained whole beside adapters if nothing else is said.
        remarks: lines for the user about its weights.
    """

    frozen: frozenset[str] = frozenset()
    head_name = ""

    def __init__(self, body: Transformers) -> None:
        super().__init__()
        self.body = body
        self.drawn: frozenset[str] = frozenset()
        self.trained: tuple[str, ...] = ()
        self.remarks: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for tokens int64 [n, T]."""
        logits: torch.Tensor = self.body(x)
        return logits

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the last hidden states, [n, e]."""
        return self.body.pooled(x)

    def whole(self) -> nn.Module:
        """Return the model of transformers."""
        return self.body.net


@torch.no_grad()
def head_of(body: Transformers, width: int, probe: torch.Tensor) -> str:
    """Return the name of the linear layer that gives the output of a model; empty if none does.

    Args:
        body: the model.
        width: width of its output.
        probe: tokens int64 [n, T], on which this is tried.
    """
    net = body.net.eval()
    expected = body(probe)
    names: list[str] = [n for n, m in net.named_modules() if type(m) is nn.Linear and m.out_features == width]
    for name in reversed(names[-CANDIDATES:]):
        head, same = net.get_submodule(name), False
        net.set_submodule(name, nn.Identity())
        with suppress(Exception):  # code that reads the weights of that layer
            same = _same(head(body(probe)), expected)
        net.set_submodule(name, head)
        if same:
            return name
    return ""


def split(body: Transformers, name: str) -> SplitTransformers | WholeTransformers:
    """Return a model in training mode: body and head, which is taken out, or in one piece without a name."""
    body.train()
    if not name:
        return WholeTransformers(body)
    head = body.net.get_submodule(name)
    assert isinstance(head, nn.Linear)
    body.net.set_submodule(name, nn.Identity())
    return SplitTransformers(body, head, name)


def _same(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def looks_ahead(body: Transformers, probe: torch.Tensor) -> bool:
    """Return whether the output at a position depends on later tokens."""
    body.net.eval()
    one, other, row = body(probe), probe.clone(), probe[-1]
    other[0, -1] = row.max() if probe[0, -1] != row.max() else row.min()
    two = body(other)
    return not torch.allclose(one[:, :-1], two[:, :-1], atol=1e-5, rtol=1e-4)
