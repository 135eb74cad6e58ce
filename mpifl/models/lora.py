"""Low-rank adapters (LoRA), which clients train and send instead of whole layers.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A layer with weights W [out, in]
computes W x + (alpha / r) B A x, with A [r, in] drawn and B [out, r] zero at first; W is frozen. A
convolution is adapted as the matrix [out, in * height * width] of its kernels. Frozen tensors become buffers,
which `Net.frozen` names. They are not part of the flat vector, so they are never sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from torch import nn

from mpifl.core.errors import UserError, require
from mpifl.core.options import NonNegativeInt, Options, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.parameters import Layout, frozen_names
from mpifl.models import modules

PREFIXES = ("", "body.", "body.net.")  # prefixes of a name that a pattern may leave out
ADAPTERS = ("lora_A", "lora_B")
FACTORS: Literal["factors"] = "factors"  # what the server averages
PRODUCT: Literal["product"] = "product"
APART = 0.3  # standard deviation of what adapters first add, relative to the weights; see `start_apart`


@dataclass(frozen=True)
class LoRA(Options):
    """Low-rank adapters: clients train and send them, and the frozen model is never sent.

    Attributes:
        rank: rank r of the adapters; 0 trains and sends the whole model.
        alpha: the output of the adapters is multiplied by alpha / rank; null takes the rank, a factor of 1.
        layers: names of the layers that get adapters, with `*` and `?` as in file names. They must be linear
            layers or ungrouped convolutions; `body.` may be left out. A name that no layer has means those
            that end in it: `query`. A layer that `train` names gets none.
        dropout: share of the inputs of adapters that are dropped in training.
        train: names of the modules that are trained and sent whole, written as in `layers`; with an empty
            list, only the adapters are trained.
        average: what the server averages of adapters: their `factors` A and B, each on its own, or the
            `product` B A, of which it then takes the best approximation of rank `rank`.
        ranks: smaller ranks of some clients: a client (`3`), a range (`4-7`) or the name of a device -> its
            rank. The factor alpha / rank is the same for all clients.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat | None = None
    layers: Annotated[tuple[str, ...], MinLen(1)] = ("*",)
    train: tuple[str, ...] = ("head",)
    dropout: ShareBelowOne = 0.0
    average: Literal["factors", "product"] = FACTORS
    ranks: dict[str, PositiveInt] = field(default_factory=dict)

    paper = "hu2022lora"

    def papers(self) -> tuple[str, ...]:
        """Return the papers of what is used."""
        used = {self.paper: self.rank > 0, "cho2024heterogeneous": self.ranks}
        used["bai2024federated"] = self.average == PRODUCT
        return tuple(paper for paper, is_used in used.items() if is_used)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rank:
            unused: dict[str, Any] = {"alpha": None, "layers": ("*",), "train": ("head",), "dropout": 0.0}
            for name, plain in {**unused, "average": FACTORS, "ranks": {}}.items():
                value = getattr(self, name)
                remedy = "has no effect without adapters; give model.lora.rank, or leave it out"
                require(value == plain, f"lora.{name}", value, remedy)
        for name, rank in self.ranks.items():
            remedy = f"rank is the largest, and it is {self.rank}; use at most that"
            require(rank <= self.rank, f"lora.ranks.{name}", rank, remedy)


def adapt(net: nn.Module, lora: LoRA, spared: tuple[str, ...] = ()) -> frozenset[str]:
    """Give layers adapters and freeze the rest, in place.

    Adapters are drawn from torch's global generator: the caller seeds it.

    Args:
        net: the model.
        lora: options that select the layers.
        spared: names of layers that get no adapters, whatever the options say.

    Returns:
        The names of the frozen buffers.

    Raises:
        UserError: a pattern matches no suitable layer or module, or all matched layers are trained whole.
    """
    layers = [name for name, layer in net.named_modules() if _can_adapt(layer) and name not in spared]
    none = "no linear layer and no ungrouped convolution"
    matched = _selected("lora.layers", lora.layers, layers, none)
    whole = tuple(f"{name}." for name in trained_whole(net, lora))
    trained = {id(p) for name, p in net.named_parameters(remove_duplicate=False) if name.startswith(whole)}
    adapted = [name for name in matched if id(net.get_submodule(name).weight) not in trained]
    remedy = "all layers that it names are trained whole; name others, or fewer in model.lora.train"
    require(bool(adapted), "model.lora.layers", list(lora.layers), remedy)
    frozen = _freeze(net, whole, trained)
    alpha = float(lora.rank) if lora.alpha is None else lora.alpha
    for name in adapted:
        layer = net.get_submodule(name)
        kind: Any = modules.LoRALinear if isinstance(layer, nn.Linear) else modules.LoRAConv2d
        kind = modules.LoRAConv1D if _is_transposed(layer) else kind
        net.set_submodule(name, kind(layer, lora.rank, alpha, lora.dropout))
    return frozen


def freeze(net: nn.Module, patterns: tuple[str, ...], key: str = "train") -> frozenset[str]:
    """Freeze a model in place but for some modules and parameters; return the names of the frozen buffers.

    Args:
        net: the model.
        patterns: names of modules or parameters that are trained, with `*` and `?`, or ends of such names.
        key: key of the section `model` that has the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing.
    """
    params = dict(net.named_parameters(remove_duplicate=False))
    parents = [name for name, m in net.named_modules() if name and [*m.parameters()]]
    chosen = _selected(key, patterns, [*parents, *params], "no module with parameters and no parameter")
    whole = tuple(f"{name}." for name in chosen if name not in params)
    return _freeze(net, whole, {id(p) for n, p in params.items() if n in chosen or n.startswith(whole)})


def trained_whole(net: nn.Module, lora: LoRA) -> list[str]:
    """Return the names of the modules that are trained and sent whole.

    Raises:
        UserError: a pattern matches no module with parameters.
    """
    named = [name for name, _ in net.named_modules() if name]
    parents = [name for name in named if [*net.get_submodule(name).parameters()]]
    return _selected("lora.train", lora.train, parents, "no module with parameters")


def adapters_of(net: nn.Module) -> dict[str, modules.LoRALinear | modules.LoRAConv2d | modules.LoRAConv1D]:
    """Return the layers with adapters, by name."""
    kinds = modules.LoRALinear | modules.LoRAConv2d | modules.LoRAConv1D
    return {name: m for name, m in net.named_modules() if isinstance(m, kinds)}


def start_apart(net: nn.Module) -> None:
    """Draw B of every adapter in place, so that models that are otherwise alike give different outputs.

    The matrix that an adapter adds to its layer's weights then has `APART` times their standard deviation.
    Numbers are drawn from torch's global generator: the caller seeds it.
    """
    for layer in adapters_of(net).values():
        with torch.no_grad():
            layer.lora_B.normal_()
            wanted, has = APART * layer.weight.std(correction=0), layer.delta().std(correction=0)
            layer.lora_B.mul_(wanted / has.clamp_min(1e-30))


def starts_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two draws of a model with adapters compute the same: only A differs, while B is 0."""
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    return all(name.endswith("lora_A") or torch.equal(p, q) for (name, p), q in pairs)


def merged_state(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of the model without adapters that computes what `net` does, up to rounding."""
    state = {k: v for k, v in net.state_dict().items() if k.rpartition(".")[2] not in ADAPTERS}
    for name, layer in adapters_of(net).items():
        state[f"{name}.weight"] = (layer.weight + layer.delta()).detach()
    return state


def check_adapted(
    net: nn.Module, x: torch.Tensor, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Check on samples that a model's forward pass in training uses every adapter and moves nothing frozen.

    Returns the output of this pass.

    Args:
        net: a model with adapters; if the check fails, its frozen buffers may have changed.
        x: samples.
        forward: (model, samples) -> outputs; None: the model's own.

    Raises:
        UserError: the weights of a layer are used without calling it, or a frozen buffer changes.
    """
    called: set[nn.Module] = set()
    adapters = adapters_of(net)
    hooks = [m.register_forward_hook(lambda m, given, made: called.add(m)) for m in adapters.values()]
    frozen = frozen_names(net)
    before = {name: buffer.clone() for name, buffer in net.named_buffers() if name in frozen}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        output: torch.Tensor = net.train()(x) if forward is None else forward(net.train(), x)
    for hook in hooks:
        hook.remove()
    for name, module in adapters.items():
        remedy = f"the network uses the weights of {name} without calling it; leave the layer out"
        require(module in called, "model.lora.layers", name, remedy)
    for name, buffer in before.items():
        same = torch.equal(net.get_buffer(name), buffer)
        remedy = "changes in training, which a frozen buffer must not; name its module in model.lora.train"
        require(same, "model.lora", name, remedy)
    return output


def count_whole(net: nn.Module) -> int:
    """Return how many numbers the model has without adapters: in its vector, and in its frozen buffers.

    Args:
        net: the model, with or without adapters, as it was built: tensors that share memory count once.
    """
    added = sum(m.lora_A.numel() + m.lora_B.numel() for m in adapters_of(net).values())
    names = frozen_names(net)
    frozen = [b for name, b in net.named_buffers() if name in names and b.is_floating_point()]
    return Layout.of(net).size - added + sum({b.data_ptr(): b.numel() for b in frozen}.values())


def checksum(net: nn.Module) -> str:
    """Return a short hash of the frozen buffers of a model; empty if there are none."""
    frozen = frozen_names(net)
    sha = hashlib.sha256()
    for name, buffer in net.named_buffers():
        if name in frozen:
            sha.update(f"{name} {list(buffer.shape)} {buffer.dtype}".encode())
            sha.update(buffer.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16] if frozen else ""


def _can_adapt(layer: nn.Module) -> bool:
    """Return whether a layer can get an adapter: subclasses may compute something else."""
    plain = type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)
    return plain or _is_transposed(layer)


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is a `Conv1D` of transformers, a linear layer with weights [in, out]."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    names = [name.removeprefix(prefix) for prefix in PREFIXES]
    return any(fnmatchcase(n, pattern) for n in names for pattern in patterns)


def _selected(key: str, patterns: tuple[str, ...], names: list[str], none: str) -> list[str]:
    """Return the names that patterns match; a pattern that matches none matches the ends of names.

    Raises:
        UserError: a pattern matches none of the names.
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if _matches(name, [pattern])}
        own = own or {name for name in names if name.endswith(f".{pattern}")}
        found |= own
        if not own:
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise UserError(f"model.{key}", pattern, f"matches {none} of the model; it has: {some or 'none'}")
    return [name for name in names if name in found]


def _freeze(net: nn.Module, whole: tuple[str, ...], trained: set[int]) -> frozenset[str]:
    """Turn parameters into buffers, and batch norms into `FrozenBatchNorm`, outside of the trained modules.

    Args:
        net: the model.
        whole: name prefixes of the trained modules.
        trained: `id` of their parameters, which modules outside may share.

    Returns:
        The names of all buffers outside of `whole`.
    """
    frozen: set[str] = set()
    for prefix, module in list(net.named_modules()):
        path = f"{prefix}." if prefix else ""
        if path.startswith(whole):
            continue
        for name, p in list(module.named_parameters(recurse=False)):
            if id(p) not in trained:
                p.requires_grad_(False)
                del module._parameters[name]
                module.register_buffer(name, p.detach())
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module = modules.FrozenBatchNorm(module)
            net.set_submodule(prefix, module)
        frozen |= {f"{path}{name}" for name, _ in module.named_buffers(recurse=False)}
    return frozenset(frozen)
