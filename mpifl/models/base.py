"""The base class of models, their construction for given data, and the checks they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from mpifl.core.errors import UserError, is_ours, name_of, no_memory, require, within_memory
from mpifl.core.federation import (
    CLASSES,
    FEATURES,
    IMAGES,
    MASKS,
    MULTI_HOT,
    NUMBERS,
    SEQUENCES,
    SEVERAL,
    TOKENS,
    DataInfo,
)
from mpifl.core.files import same_folder
from mpifl.core.options import Options
from mpifl.core.rng import key
from mpifl.models import modules

from .lora import LoRA, adapt, merged_state
from .pretrained import load_weights

Shape = tuple[int, int, int]  # (C, H, W) of one image


@dataclass(frozen=True)
class ModelOptions(Options, ABC):
    """A network that a configuration describes: a frozen dataclass whose fields are the keys of `model`.

    A user's own class need not inherit from it: for images and features, a dataclass with
    `build(shape, num_classes)` is enough, which then has neither `weights` nor `lora`. If a subclass
    overrides `build`, that method builds the network.

    Attributes:
        takes: the kinds of samples that it takes (`DataInfo.inputs`).
        labels: the kinds of labels that it has outputs for (`DataInfo.labels`).
        weights: local file with the initial weights (safetensors, or a state dict of PyTorch), under the
            names of the network's tensors. Its last layer is used if the number of classes fits. The
            `model.safetensors` of a run whose clients use one model is such a file.
        lora: low-rank adapters, which are trained and sent instead of the network.
    """

    takes: ClassVar[tuple[str, ...]] = (IMAGES, FEATURES)
    labels: ClassVar[tuple[str, ...]] = (CLASSES, MULTI_HOT, NUMBERS, *SEQUENCES)
    weights: str | None = field(default=None, kw_only=True)
    lora: LoRA = field(default=LoRA(), kw_only=True)

    def build_for(self, info: DataInfo) -> modules.Net:
        """Return the network for data as in `info`, with the weights of its file and its adapters.

        Weights are drawn from torch's global generator, those of adapters last: the caller seeds it.

        Args:
            info: format of samples and labels.

        Raises:
            UserError: the network cannot take such samples, or an option does not fit it.
        """
        with same_folder():  # the constructor of a user's module may change it
            net = self.make_for(info)
        if self.weights is not None:
            load_weights(net, self.weights, **self.published())
        if self.lora.rank:
            net.frozen = adapt(net, self.lora)
        return net

    def build(self, shape: tuple[int, ...], num_classes: int) -> modules.Net:
        """Return the network for images of `shape` (C, H, W) and `num_classes` classes; see `build_for`."""
        return self.build_for(DataInfo(shape, num_classes))

    @abstractmethod
    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the network with random weights: from [n, *info.shape] to [n, ..., info.num_classes]."""

    def published(self) -> dict[str, str]:
        """Return the names of body and head in a file of `weights`; see `load_weights`."""
        return {"body": "body.", "head": "head"}

    def weight_files(self) -> tuple[str, ...]:
        """Return the files from which weights are read. Default: that of `weights`."""
        return () if self.weights is None else (self.weights,)

    @property
    def starts_from_adapters(self) -> bool:
        """Whether the adapters begin as in a file, rather than drawn. Default: never."""
        return False

    def export(
        self,
        folder: Path,
        models: Mapping[str, torch.Tensor],
        info: DataInfo,
        seed: int,
        ranks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Write models in the format in which they are published, beside the files of a run.

        Default: nothing is written.

        Args:
            folder: the run folder.
            models: name -> vector [d] of each model that is served.
            info: format of samples and labels.
            seed: seed of the model.
            ranks: name -> rank of its adapters, for those of a smaller rank.
        """
        return

    def own(self, net: Any) -> nn.Module:
        """Return a network, which this section has built, as its users know it. Default: as it is."""
        module: nn.Module = net
        return module

    def merged(self, net: Any, info: DataInfo) -> Any:
        """Return the network without adapters that computes what `net` does, up to rounding.

        Args:
            net: the result of `build_for`, with any weights.
            info: format of samples and labels.
        """
        if not self.lora.rank:
            return net
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and overwritten
            whole = replace(self, lora=LoRA(), weights=None).build_for(info)
        counters = {k: v for k, v in whole.state_dict().items() if k.endswith("num_batches_tracked")}
        whole.load_state_dict({**counters, **merged_state(net)})
        return whole.train(net.training)


class ShapeModel(ModelOptions):
    """A model that depends only on the shape of a sample and the number of classes."""

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the network with random weights; it takes each column of categories as zeros and ones."""
        if not any(info.categories):
            return self.make(info.shape, info.num_classes)  # type: ignore[arg-type]  # not only for images
        inputs = modules.OneHot(info.categories)
        try:
            net = self.make((inputs.width,), info.num_classes)  # type: ignore[arg-type]
        except UserError as error:
            given = f"categories are zeros and ones: {info.shape[0]} columns are {inputs.width} numbers"
            raise UserError(error.key, error.value, f"{error.remedy}; {given}") from error
        net.body = self.encoded(inputs, net.body)
        return net

    def encoded(self, inputs: modules.OneHot, body: nn.Module) -> nn.Module:
        """Return the body applied to encoded columns; the layers of a sequence keep their names."""
        if type(body) is nn.Sequential:
            return chain(inputs=inputs, **dict(body.named_children()))
        return chain(inputs=inputs, body=body)

    @abstractmethod
    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network with random weights, for samples of `shape`."""


def build_model(options: Any, info: DataInfo) -> nn.Module:
    """Return the network that a section `model` describes, for data as in `info`; draws its weights.

    Args:
        options: the section.
        info: format of samples and labels.

    Raises:
        UserError: the model takes other samples, or this machine has no memory for its weights.
    """
    with within_memory("model", options):
        if is_ours(options):
            return _built(options, info)
        return _built_by_user(options, info)


def _built_by_user(options: Any, info: DataInfo) -> nn.Module:
    """Return the network that a user's own class builds, after checking what it returns."""
    name = name_of(options)
    try:
        module: Any = _built(options, info)
    except Exception as error:
        if isinstance(error, UserError) or no_memory(error):
            raise
        for_what = f"samples of shape {list(info.shape)} and {info.num_classes} outputs"
        remedy = f"cannot be built for {for_what} ({type(error).__name__}: {error})"
        raise UserError("model.name", name, remedy) from error
    remedy = f"builds a {type(module).__name__}; return a torch.nn.Module"
    require(isinstance(module, nn.Module), "model.name", name, remedy)
    need_float32(module, "model.name", name)
    need_initialised(module, "model.name", name)
    need_apart(module, "model.name", name)
    checked: nn.Module = module
    return checked


def need_float32(module: nn.Module, key: str, value: str) -> None:
    """Raise `UserError` unless all parameters of a network are float32, as the flat vector is."""
    for name, p in module.named_parameters():
        given = str(p.dtype).removeprefix("torch.")
        remedy = f"{name} is {given}, and models are trained in float32: call .float() on the network"
        require(p.dtype == torch.float32, key, value, f"{remedy}, and leave out .double() of its inputs")


def need_apart(module: nn.Module, key: str, value: str) -> None:
    """Raise `UserError` if two parameters of a network are views of the same memory.

    Each of them gets a place of its own in the flat vector; only one and the same parameter can be shared.
    """
    found: dict[int, str] = {}
    for name, p in module.named_parameters():
        if p.numel():
            other = found.setdefault(p.untyped_storage().data_ptr(), name)
            remedy = f"{name} and {other} are two parameters in the same memory; assign the parameter itself"
            require(other == name, key, value, f"{remedy}: a.weight = b.weight")


def need_initialised(module: nn.Module, key: str, value: str) -> None:
    """Raise `UserError` if parameters or buffers of a network wait for its first samples."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        remedy = f"{name} belongs to a lazy layer that no samples have reached; use one with all sizes given"
        require(not nn.parameter.is_lazy(tensor), key, value, remedy)


def _built(options: Any, info: DataInfo) -> nn.Module:
    name = name_of(options)
    takes = options.takes if isinstance(options, ModelOptions) else (IMAGES, FEATURES)
    remedy = f"takes {' or '.join(takes)}, but the samples of this source are {info.inputs}"
    example = {TOKENS: "an embedding first: lstm or transformer", FEATURES: "mlp", IMAGES: "mlp or lenet5"}
    example[SEVERAL] = "a module of your own: custom"
    require(info.inputs in takes, "model.name", name, f"{remedy}; use {example[info.inputs]}")
    known: ModelOptions | None = options if described(options) else None
    if known is not None and is_ours(known):
        has = "one output for each pixel" if known.labels == (MASKS,) else "one output for each sample"
        use = "unet or fcn" if info.labels == MASKS else example[info.inputs]
        remedy = f"has {has}, but the labels of this source are {info.labels}; use {use}"
        require(info.labels in known.labels, "model.name", name, remedy)
    if known is not None and not isinstance(known, ShapeModel):
        return known.build_for(info)
    try:
        if known is not None:
            return known.build_for(info)
        module: nn.Module = options.build(info.shape, info.num_classes)
    except (ValueError, IndexError, TypeError) as error:
        if isinstance(error, UserError) or len(info.shape) == 3:
            raise
        remedy = f"does not take samples of shape {list(info.shape)} ({error}); use mlp"
        raise UserError("model.name", name, remedy) from error
    return module


def described(options: Any) -> bool:
    """Return whether a model is built from a `DataInfo`; otherwise its `build` is told the shape alone."""
    return isinstance(options, ModelOptions) and type(options).build is ModelOptions.build


def seeded_model(options: Any, info: DataInfo, seed: int, j: int = 0) -> nn.Module:
    """Return the network that a section `model` describes, with its j-th independent initial weights.

    Wherever a network has frozen weights, those of j = 0 are used.

    Args:
        options: the section.
        info: format of samples and labels.
        seed: seed of the model.
        j: number of the draw.
    """
    with key(seed, "init", j).seeded():
        return build_model(options, info)


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return the layers in sequence, under their names."""
    return nn.Sequential(OrderedDict(layers))


def need_side(name: str, shape: Shape, least: int) -> None:
    """Raise `UserError` unless both sides of the images are at least `least` pixels."""
    _, h, w = shape
    remedy = f"needs images of at least {least}x{least} pixels, but the data has {h}x{w}: enlarge the images"
    require(min(h, w) >= least, "model.name", name, f"{remedy} or use another model (mlp takes any size)")


def need_channels(name: str, shape: Shape, allowed: tuple[int, ...]) -> None:
    """Raise `UserError` unless the images have an allowed number of channels."""
    known = " or ".join(map(str, allowed))
    remedy = f"takes images of {known} channels, but the data has {shape[0]}: use another model"
    require(shape[0] in allowed, "model.name", name, remedy)


def positions(name: str, shape: Shape, lost: int) -> int:
    """Return the pixels after two convolutions, each shortening a side by `lost`, and pooled by 2."""
    need_side(name, shape, 4 + 3 * lost)
    h, w = (((side - lost) // 2 - lost) // 2 for side in shape[1:])
    return h * w
