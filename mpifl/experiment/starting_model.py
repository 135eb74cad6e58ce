"""The final model of an earlier run, from which another run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpifl.core.errors import UserError, require
from mpifl.core.parameters import Layout
from mpifl.core.textfiles import json_file, yaml_file
from mpifl.models import LoRA
from mpifl.models.pretrained import ALONE, MIXED, named_shapes, shapes_of, uploads_none, uses_rows
from mpifl.protection.accountant import Accountant, Spending

KEY, FILE, TABLE = "start.run", "model.safetensors", "model"


def read_model(folder: str) -> torch.Tensor:
    """Return the one model [d] that all clients use at the end of a run.

    Args:
        folder: the run folder.

    Raises:
        UserError: the folder or its model is missing or cannot be read; its clients use several models,
            mixtures of them or parts of one; or the model's numbers are not finite.
    """
    file = Path(folder).expanduser() / FILE
    remedy = f"has no {FILE}: use the folder of a finished run with output.model true"
    require(file.is_file(), KEY, folder, remedy)
    try:
        from safetensors.torch import load_file

        tables = load_file(file)
    except Exception as error:  # a damaged file can make the reader raise anything
        raise UserError(KEY, folder, f"its {FILE} cannot be read ({type(error).__name__})") from error
    summary = _tree(folder, "summary.json")
    require(not uploads_none(summary), KEY, folder, ALONE)
    found, assign = tables.get(TABLE), tables.get("assign")
    remedy = (
        f"holds {', '.join(sorted(tables))}, no table {TABLE!r} of whole models; use a run of another method"
    )
    if found is None or assign is None or found.ndim != 2:
        raise UserError(KEY, folder, remedy)
    used = np.unique(assign.numpy())
    remedy = f"its clients use {len(used)} models; use a run with one model for all (fedavg)"
    require(len(used) == 1 and 0 <= used[0] < len(found), KEY, folder, remedy)
    require(uses_rows(summary, len(found)), KEY, folder, MIXED.format(len(found)))
    vector = found[int(used[0])].float()
    remedy = "its model has numbers that are not finite; use a run that did not diverge"
    require(bool(torch.isfinite(vector).all()), KEY, folder, remedy)
    return vector.clone()


def check_network(key: str, value: str, file: Path, layout: Layout) -> None:
    """Refuse the model of an earlier run if it is another network than that of this run.

    Args:
        key: key of the configuration that names the file.
        value: value of the key.
        file: the `model.safetensors` of the earlier run.
        layout: layout of the model into which it is read.

    Raises:
        UserError: a tensor has another name or shape, or the file does not name its tensors.
    """
    for other, own in zip_longest(named_shapes(key, value, file), shapes_of(layout)):
        (a, b) = ("no more" if one is None else f"{one[0]} {one[1]}" for one in (other, own))
        remedy = f"is of another network: it has {a} where this run's has {b}; use the same model and data"
        require(other == own, key, value, remedy)


def check_base(folder: str, weights: str | None, lora: LoRA, seed: int, frozen: str) -> None:
    """Refuse an earlier model whose adapters were trained for other frozen weights than this run's.

    Args:
        folder: folder of the earlier run.
        weights: `model.weights` of this run.
        lora: `model.lora` of this run.
        seed: this run's model seed.
        frozen: checksum of the frozen weights of this run's model; empty if nothing is frozen.

    Raises:
        UserError: the frozen weights, or the settings of the adapters, differ.
    """
    config, summary = _tree(folder, "config.yaml"), _tree(folder, "summary.json")
    earlier = _part(config, "model")
    if summary:
        known = _part(summary, "identity").get("frozen", "")
        remedy = "its adapters stand on other frozen weights; use its seed.model, model.weights and model"
        require(known == frozen, KEY, folder, remedy)
    elif frozen and config:  # a copy of the folder without summary.json
        for name, mine, its in (
            ("seed.model", seed, _part(config, "seed").get("model")),
            ("model.weights", weights, earlier.get("weights")),
        ):
            remedy = f"its adapters stand on weights of {name} {its}, this run's is {mine}; use the same"
            require(mine == its, KEY, folder, remedy)
    if frozen and config:
        own, theirs = _adapters(asdict(lora)), _adapters(_part(earlier, "lora"))
        for name in own:
            remedy = f"its model.lora.{name} is {theirs[name]}, this run's {own[name]}; use the same"
            require(own[name] == theirs[name], KEY, folder, remedy)


class EarlierPrivacy(NamedTuple):
    """What an earlier run over the same clients means for the privacy of a run that starts from its model.

    Attributes:
        spent: what it and the runs before it spent, and this run's epsilon must contain.
        line: what a user must know; empty for nothing.
    """

    spent: tuple[Spending, ...] = ()
    line: str = ""


def earlier_privacy(
    key: str, folder: str, content: Mapping[str, str], accountant: Accountant
) -> EarlierPrivacy:
    """Return what an earlier run spent on the clients of this run.

    Two private runs over the same clients compose if their neighbouring federations differ alike. Runs have
    the same clients if their data and split have the same digests.

    Args:
        key: key of the configuration that names the earlier run.
        folder: its folder; nothing is known of one without `summary.json`.
        content: identity of this run's data (`Federation.content`).
        accountant: accountant of this run alone.
    """
    summary = _tree(folder, "summary.json")
    if not summary:
        return EarlierPrivacy()
    theirs, spent = _part(summary, "data"), _part(summary, "privacy")
    if not accountant.counts and not spent:
        return EarlierPrivacy()
    known = bool(theirs) and bool(content)
    if known and theirs.get("samples") != content.get("samples"):
        return EarlierPrivacy()
    same = known and all(theirs.get(name) == content.get(name) for name in ("split", "files"))
    whose = "the same clients" if same else "clients with the same samples" if known else "the same source"
    told = f"with epsilon {spent.get('epsilon') or 'infinite'}" if spent else "without noise"
    what = f"{key}: {folder} was trained {told} on {whose}"
    if not spent:
        return EarlierPrivacy(
            line=f"{what}; the epsilon of this run does not cover what its model tells of them"
        )
    if not accountant.counts:
        return EarlierPrivacy(line=f"{what}; this run adds no noise, so no epsilon holds for its models")
    lacks = f"{what}, which is not in the epsilon of this run:"
    if not same:
        return EarlierPrivacy(line=f"{lacks} they are divided otherwise, or it is not known how")
    try:
        used = tuple(Spending.of(one) for one in spent["spent"])
        fit = all(len(s.times) == accountant.num_clients for s in used)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
        return EarlierPrivacy(line=f"{lacks} its summary does not say how it was spent")
    if not fit or any(s.mechanism.relation != accountant.mechanism.relation for s in used):
        return EarlierPrivacy(
            line=f"{lacks} neighbouring federations differ otherwise in it (privacy.sampling)"
        )
    return EarlierPrivacy(used, f"{what}; it is contained in the epsilon of this run")


def _adapters(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `model.lora` with lists for tuples, and with alpha set to the rank if it is None."""
    found = {k: list(v) if isinstance(v, tuple) else v for k, v in {**asdict(LoRA()), **lora}.items()}
    found = {
        k: v for k, v in found.items() if k not in ("average", "ranks")
    }  # they do not change what it computes
    return {**found, "alpha": found["rank"] if found["alpha"] is None else found["alpha"]}


def _tree(folder: str, name: str) -> Mapping[str, Any]:
    """Return the content of a file of a run folder; empty if there is none.

    Raises:
        UserError: the file cannot be read.
    """
    file = Path(folder).expanduser() / name
    if not file.exists():
        return {}
    tree = json_file(file, KEY) if file.suffix == ".json" else yaml_file(file, KEY, typed=True)
    remedy = f"its {name} holds no mapping; use the folder of a finished run"
    require(isinstance(tree, dict), KEY, folder, remedy)
    return dict(tree)


def _part(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a file; empty if there is none."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}
