"""Adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpifl.core.errors import require
from mpifl.core.files import write_json
from mpifl.core.parameters import Layout, frozen_names
from mpifl.core.textfiles import json_mapping

from .lora import ADAPTERS, LoRA, adapters_of, trained_whole

CONFIG, FILE, FOLDER = "adapter_config.json", "adapter_model.safetensors", "adapters"
PREFIX = "base_model.model."
KEY = "model.weights"
CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")  # tasks for which PEFT itself takes `classifier` and `score` as whole
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}  # what a configuration may say for adapters that compute what ours do


def published(name: str, head: str, body: str) -> str:
    """Return PEFT's name of a tensor of a network.

    Args:
        name: its name in the network.
        head: published name of the last layer.
        body: prefix of a published name in the network.
    """
    module, _, tensor = name.rpartition(".")
    module = head if module == "head" else f"{head}{module[4:]}" if module.startswith("head.") else module
    suffix = ".weight" if tensor in ADAPTERS else ""
    return f"{PREFIX}{module.removeprefix(body)}.{tensor}{suffix}"


def module_of(name: str, head: str, body: str) -> str:
    """Return the published name of the module that a tensor belongs to; see `published`."""
    return published(f"{name.rpartition('.')[0]}.", head, body)[len(PREFIX) : -1]


def save_adapters(
    net: nn.Module,
    lora: LoRA,
    vector: torch.Tensor,
    folder: Path,
    base: str,
    task: str | None,
    body: str,
    rank: int,
) -> None:
    """Write the adapters of a model, and the modules that are trained whole.

    Args:
        net: a network with adapters; its weights are not read, but for a last layer that is frozen.
        lora: its adapters.
        vector: the model [d].
        folder: where the files are written.
        base: folder of the model without adapters.
        task: kind of the task, in PEFT's words; None for none of these.
        body: prefix of a published name in the network.
        rank: rank of these adapters; numbers of the vector beyond it are 0, and left out.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    head, layout = str(net.head_name), Layout.of(net)
    named = {name: t[0] for name, t in layout.tensors(vector[None].cpu()).items()}
    named |= {name: named[names[0]] for names in layout.tied if names[0] in named for name in names}
    for layer in adapters_of(net):
        a, b = (f"{layer}.{factor}" for factor in ADAPTERS)
        named[a], named[b] = named[a][:rank], named[b][:, :rank]
    tensors = {published(name, head, body): t.contiguous().clone() for name, t in named.items()}
    frozen = {published(name, head, body) for name in frozen_names(net)}
    whole = {module_of(f"{name}.", head, body) for name in trained_whole(net, lora)}
    whole |= {module_of(n, head, body) for names in layout.tied if names[0] in named for n in names}
    top = head.partition(".")[0]
    if not any(name.startswith(f"{PREFIX}{top}.") for name in frozen):  # as PEFT takes classifiers
        whole = {top if name.startswith(f"{top}.") else name for name in whole}
    task = task if top in whole or task not in CLASSIFIERS else None
    layers = sorted(module_of(f"{name}.", head, body) for name in adapters_of(net))
    alpha = float(lora.rank if lora.alpha is None else lora.alpha) * rank / lora.rank  # PEFT divides by r
    config = LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # as PEFT takes it
        lora_dropout=lora.dropout,
        target_modules=layers,
        modules_to_save=sorted(whole) or None,
        task_type=task,
        base_model_name_or_path=base,
        inference_mode=True,
        fan_in_fan_out=any(layer.transposed for layer in adapters_of(net).values()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tree = json_mapping(folder / CONFIG)
    lists = {k: sorted(v) for k, v in tree.items() if k in ("target_modules", "modules_to_save") and v}
    write_json(folder / CONFIG, {**tree, **lists})  # PEFT keeps sets, whose order differs from run to run
    save_file(tensors, folder / FILE, {"format": "pt"})


def load_adapters(net: nn.Module, lora: LoRA, path: str, body: str) -> None:
    """Copy adapters, and modules that were trained whole, from a folder into a network.

    Args:
        net: a network with adapters.
        lora: its adapters.
        path: the folder.
        body: prefix of a published name in the network.

    Raises:
        UserError: the folder holds none, or others than those of the network.
    """
    from safetensors.torch import load_file

    folder = Path(path).expanduser()
    remedy = f"is a folder without {CONFIG} and {FILE}: give one that PEFT or a run wrote, or a file"
    require((folder / CONFIG).is_file() and (folder / FILE).is_file(), KEY, path, remedy)
    config = json_mapping(folder / CONFIG)
    for name, allowed in PLAIN.items():
        value = config.get(name)
        require(
            value in allowed, KEY, path, f"has {name} {value}, which is not supported here; use plain LoRA"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    own = float(lora.rank if lora.alpha is None else lora.alpha)
    remedy = f"holds adapters of rank {rank} and alpha {alpha}: set model.lora to these"
    require(rank == lora.rank and alpha == own, KEY, path, remedy)
    try:
        held = load_file(folder / FILE)
    except Exception as error:  # a damaged file can make the reader raise anything
        require(False, KEY, path, f"its {FILE} cannot be read ({type(error).__name__})")
        raise AssertionError from error
    head, params = str(net.head_name), dict(net.named_parameters(remove_duplicate=False))
    names = {published(name, head, body): name for name in params}
    known = config.get("target_modules")
    layers = f"; set model.lora.layers: {known}, train: {config.get('modules_to_save') or []}"
    _refuse(path, "is not there", sorted(names.keys() - held.keys()), layers)
    _refuse(path, "does not belong to this model", sorted(held.keys() - names.keys()), layers)
    for name, own_name in names.items():
        given, p = held[name], params[own_name]
        shapes = f"{name} has the shape {list(given.shape)} instead of {list(p.shape)}"
        require(given.shape == p.shape, KEY, path, f"does not fit the model: {shapes}")
        require(bool(torch.isfinite(given).all()), KEY, path, f"{name} has numbers that are not finite")
        with torch.no_grad():
            p.copy_(given)


def _refuse(path: str, what: str, names: list[str], also: str) -> None:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    first = names[0].removeprefix(PREFIX) if names else ""
    require(not names, KEY, path, f"does not fit the model: {first} {what}{more}{also}")
