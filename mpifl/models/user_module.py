"""A user's own network, named by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import nn

from mpifl.core.errors import UserError, require
from mpifl.core.federation import FEATURES, IMAGES, MASKS, SEVERAL, TOKENS, DataInfo, packed
from mpifl.core.imports import load_object
from mpifl.core.module_calls import SeveralInputs, TakenOutput, described
from mpifl.models import modules

from .base import Shape, ShapeModel, need_apart, need_float32, need_initialised
from .lora import freeze

WRITES = "its forward writes into the samples that it is given; write x = 2 * x instead of x.mul_(2)"


@dataclass(frozen=True)
class Custom(ShapeModel):
    """Your own `torch.nn.Module`.

    `Name` may be a class or a function. It is called with `shape` ((C, H, W), (F,) of a table, or (T,) of
    tokens), `num_classes` and `vocabulary` (number of different tokens), or those of them that its signature
    names. A column of c categories counts as c features of 0 and 1 in F. Tokens are int64 [n, T]. If labels
    are tokens or masks, the module returns [n, T, num_classes] or [n, H, W, num_classes].

    Of samples with several inputs, `shape` and `vocabulary` are mappings from their names. A `forward` (or
    `embed`) whose signature has these names gets the inputs by keyword, any other in their order.

    Methods that use embeddings, or parts of the model, need a module that ends in an `nn.Linear` which gives
    the logits: name it in `head`.

    Attributes:
        path: `pkg.module:Name` or `file.py:Name`.
        head: name of the last layer inside the module, such as `fc` or `classifier.2`; empty takes the module
            as one whole, which may be anything that the task and the trainer take.
        embed: name of a method that returns the input of the last layer; not needed if the module returns it
            when its last layer is left out.
        block: names of the modules that form FedCUAU's cluster block together with the head.
        train: names of the modules and parameters that are trained and sent, with `*` and `?` as in file
            names, or ends of names: `[lora_A, lora_B, classifier]`. The others stay as they are built and are
            never sent. Empty: all are trained.
        output: of a module with several outputs, the one that the task takes: its name in a mapping or an
            object, or its number in a tuple, from 0. Empty: the module returns one tensor.
    """

    takes: ClassVar[tuple[str, ...]] = (IMAGES, FEATURES, TOKENS, SEVERAL)
    labels: ClassVar[tuple[str, ...]] = (*ShapeModel.labels, MASKS)

    path: str = ""
    head: str = ""
    embed: str = ""
    block: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    output: str = ""

    def build_for(self, info: DataInfo) -> modules.Net:
        """Return the network for data as in `info`; all but what `train` names is frozen."""
        remedy = "has no effect beside adapters; name what is trained in model.lora.train"
        require(not (self.train and self.lora.rank), "model.train", list(self.train), remedy)
        net = super().build_for(info)
        if self.train:
            net.frozen = freeze(net, self.train)
        return net

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the user's network for data as in `info`; columns of categories are zeros and ones."""
        coded = any(info.categories)
        remedy = "columns of categories are encoded before the module; name its last layer, an nn.Linear"
        require(bool(self.head) or not coded, "model.head", self.head, remedy)
        return super().make_for(info) if coded else self._checked(info)

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the user's network for images of `shape`."""
        return self._checked(DataInfo(shape, num_classes))

    def _checked(self, info: DataInfo) -> modules.Net:
        """Return the user's network, after checking head, blocks and embedding."""
        shape, flat = info.shape, info.labels not in (TOKENS, MASKS)
        module = self._construct(info)
        if not self.head:
            return self._whole(module, info)
        head = self._find_head(module, info)
        for name in self.block:
            require(_has(module, name), "model.block", name, "the network has no such module")
        method = self.embed or "forward"
        require(hasattr(module, method), "model.embed", method, "the network has no such method")
        need_float32(module, "model.path", self.path)
        numbers = torch.linspace(-1, 1, 2 * prod(shape)).reshape(2, *shape)
        tokens = torch.arange(2 * prod(shape)).reshape(2, *shape) % max(info.vocabulary, 1)
        probe = tokens if info.inputs == TOKENS else numbers
        if info.parts:
            named = info.unpack(numbers)
            for part in (part for part in info.parts if part.inputs == TOKENS):
                whole = torch.arange(2 * part.width).reshape(2, *part.shape) % part.vocabulary
                named[part.name] = whole
            probe = packed(named, info.parts)
        taken = TakenOutput(self.output) if self.output else None
        forward: nn.Module = module
        if info.parts or taken:
            call = self._call(module, "forward", info)
            forward = modules.Embedder(module, "forward", None, False, call, taken)
        known = ((k, v) for k, v in module.named_buffers() if not nn.parameter.is_lazy(v))
        buffers = {name: buffer.clone() for name, buffer in known}
        module.eval()
        fails, given = f"does not take samples of shape {list(shape)}", probe.clone()
        expected = _tried(forward, given, "model.path", self.path, fails)
        require(torch.equal(given, probe), "model.path", self.path, WRITES)
        need_initialised(module, "model.path", self.path)
        need_apart(module, "model.path", self.path)
        require(isinstance(expected, torch.Tensor), "model.path", self.path, returned(expected))
        embedder = modules.Embedder(
            module, method, None, flat, self._call(module, method, info), None if self.embed else taken
        )
        module.set_submodule(self.head, nn.Identity())
        fails = f"its `{method}` fails where `{self.head}` is left out"
        one = modules.Embedder(module, method, None, False, embedder.call, embedder.output)
        embedding = _tried(one, probe, "model.embed", self.embed, fails)
        remedy = f"its `{method}` returns a {type(embedding).__name__}; return one tensor, [n, width]"
        require(isinstance(embedding, torch.Tensor), "model.embed", self.embed, remedy)
        net = modules.Net(embedder, head, [f"net.{name}" for name in self.block])
        remedy = "the network is not its last layer applied to its embedding; name the method that embeds"
        inputs = embedding.flatten(1) if flat else embedding
        logits = _tried(head, inputs, "model.embed", self.embed, remedy)
        if not _same(expected, logits):
            drawn = "its forward draws in evaluation, too; write F.dropout(x, training=self.training)"
            again = _tried(one, probe, "model.embed", self.embed, fails)
            require(_same(again, embedding), "model.path", self.path, drawn)
            raise UserError("model.embed", self.embed, remedy)
        for name, buffer in module.named_buffers():  # some count samples, in evaluation too
            if name in buffers:
                buffer.copy_(buffers[name])
        return net.train()

    def _call(self, module: nn.Module, method: str, info: DataInfo) -> SeveralInputs | None:
        """Return how a method of the user's module takes several inputs; None for one input."""
        if not info.parts:
            return None
        return SeveralInputs.of(info.parts, getattr(module, method), "model.path", self.path)

    def _whole(self, module: nn.Module, info: DataInfo) -> modules.Net:
        """Return the user's network as one whole, which is tried with the data, the task and the trainer."""
        for key, value in (("embed", self.embed), ("block", list(self.block))):
            require(not value, f"model.{key}", value, "has no effect without model.head; give that, too")
        need_float32(module, "model.path", self.path)
        need_initialised(module, "model.path", self.path)
        need_apart(module, "model.path", self.path)
        if (call := self._call(module, "forward", info)) is not None:
            module.register_forward_pre_hook(call, with_kwargs=True)
        if self.output:
            module.register_forward_hook(TakenOutput(self.output))
        return cast(modules.Net, module.train())  # without embedding and head, unless it has its own

    def encoded(self, inputs: modules.OneHot, body: nn.Module) -> nn.Module:
        """Return the user's module applied to encoded columns; its layers keep their names."""
        assert isinstance(body, modules.Embedder)
        return modules.Embedder(body.net, body.method, inputs)

    def published(self) -> dict[str, str]:
        """Return the names of the user's own module."""
        return {"body": "body.net.", "head": self.head}

    def _construct(self, info: DataInfo) -> nn.Module:
        """Return the module that the object at `path` makes when it is called."""
        place, _, name = self.path.partition(":")
        require(bool(place and name), "model.path", self.path, "give pkg.module:Name or file.py:Name")
        make = load_object(self.path, "model.path")
        known: dict[str, Any] = {"shape": info.shape, "num_classes": info.num_classes}
        known |= {"vocabulary": info.vocabulary} if info.inputs == TOKENS else {}
        if info.parts:
            known["shape"] = {part.name: part.shape for part in info.parts}
            known["vocabulary"] = {part.name: part.vocabulary for part in info.parts if part.vocabulary}
        try:
            asked = inspect.signature(make).parameters
            module = make(**{name: value for name, value in known.items() if name in asked})
        except Exception as error:
            given = f"{', '.join([*known][:-1])} and {[*known][-1]}"
            remedy = f"cannot be made from {given} ({type(error).__name__}: {error})"
            raise UserError("model.path", self.path, remedy) from error
        require(isinstance(module, nn.Module), "model.path", self.path, "does not return a torch.nn.Module")
        checked: nn.Module = module
        return checked

    def _find_head(self, module: nn.Module, info: DataInfo) -> nn.Linear:
        """Return the last layer that the user named."""
        num_classes = info.num_classes
        linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
        remedy = f"name the last layer, an nn.Linear; the network has: {', '.join(linear) or 'none'}"
        remedy += " (in place of a 1x1 convolution, on x.movedim(1, -1))" if info.labels == MASKS else ""
        require(self.head in linear, "model.head", self.head, remedy)
        head = module.get_submodule(self.head)
        assert isinstance(head, nn.Linear)
        remedy = f"returns {head.out_features} logits, but the data has {num_classes} classes"
        require(head.out_features == num_classes, "model.head", self.head, remedy)
        return head


def _tried(call: Callable[[torch.Tensor], Any], x: torch.Tensor, key: str, value: str, fails: str) -> Any:
    """Return the output of a network, or a part of it, for a few images.

    Args:
        call: the network or the part.
        x: its input.
        key: configuration key that names it, for messages.
        value: value of that key.
        fails: message if it fails.
    """
    try:
        with torch.no_grad():
            return call(x)
    except UserError:
        raise
    except Exception as error:
        remedy = f"{fails} ({type(error).__name__}: {error})"
        rows = rows_for_dense(error, x.shape[1:]) if key == "model.path" else ""
        raise UserError(key, value, f"{remedy}; {rows}" if rows else remedy) from error


def rows_for_dense(error: Exception, shape: Sequence[int]) -> str:
    """Return how samples get the shape that dense layers take; empty if the error is about something else.

    Args:
        error: what a network raised.
        shape: of one sample.
    """
    if "mat1 and mat2 shapes" not in str(error) or len(shape) < 2:
        return ""
    batch = ", ".join(map(str, ("n", *shape)))
    return f"a batch is [{batch}], and x.flatten(1) makes it [n, {prod(shape)}], as an nn.Linear takes it"


def returned(output: object) -> str:
    """Return what is wrong with an output of a network that is not a tensor."""
    several = f", or {described(output).partition('; ')[2]} in model.output"
    known = several if isinstance(output, (tuple, list, Mapping)) else ""
    return f"its forward returns a {type(output).__name__}; return one tensor of outputs, [n, classes]{known}"


def _has(module: nn.Module, name: str) -> bool:
    return name in dict(module.named_modules())


def _same(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
