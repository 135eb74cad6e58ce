"""Pretrained weights from a local file, checked against the model."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpifl.core.errors import UserError, require
from mpifl.core.parameters import Layout
from mpifl.core.textfiles import is_file, json_mapping

KEY = "model.weights"
TABLE, ASSIGN = "model", "assign"  # tensors in the `model.safetensors` of a run folder
LAYOUT = "layout"  # in its metadata: names and shapes of the tensors of a model
MIXED = "is of a run whose clients mix, or choose among, {} models: use one with one model for all (fedavg)"
ALONE = "is of a run whose clients keep models of their own and upload none: use one with one model for all"


def read_state(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.safetensors` or torch file, without `module.` before their names."""
    file = Path(os.path.expanduser(path))
    require(is_file(file, KEY), KEY, path, "no such file: give a local file of weights, or leave it out")
    try:
        state = _read(file)
    except UserError:
        raise
    except Exception as error:  # a damaged file can make the readers raise anything
        text = " ".join(str(error).split())[:200]
        raise UserError(KEY, path, f"cannot be read as weights ({type(error).__name__}: {text})") from error
    inner = state.get("state_dict", state) if isinstance(state, Mapping) else {}
    named = inner.items() if isinstance(inner, Mapping) else ()
    found = {k: v for k, v in named if isinstance(k, str) and isinstance(v, torch.Tensor)}
    tensors = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    require(bool(tensors), KEY, path, "holds no named tensors: give a state dict")
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        kind = f"{name} {tensor.dtype}"
        require(plain and not tensor.is_complex(), KEY, path, f"{kind} is not a plain tensor of real numbers")
    return tensors


def _read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    if zipfile.is_zipfile(file):  # memory is allocated for the sizes that it declares
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        remedy = f"would unpack to {size} bytes, more than a file of weights holds: give another"
        require(size <= 2 * file.stat().st_size, KEY, str(file), remedy)
    return torch.load(file, map_location="cpu", weights_only=True)


def load_weights(net: nn.Module, path: str, *, body: str, head: str) -> None:
    """Copy the weights of a file into a model.

    Args:
        net: the model.
        path: the file; its names are those of the published model, or of `net`. The `model.safetensors` of a
            run folder works, too, if all clients use one model.
        body: prefix of a published name in `net`, such as `body.`.
        head: published name of the last layer. It keeps its initial weights if the number of classes
            differs.

    Raises:
        UserError: names, shapes or values do not fit; the message names the first.
    """
    last, own, given = f"{head}.", net.state_dict(), read_state(path)
    if ASSIGN in given:
        given = _of_run(net, path, given)
    elif not given.keys() <= own.keys():
        moved = (f"head.{k.removeprefix(last)}" if k.startswith(last) else f"{body}{k}" for k in given)
        given = dict(zip(moved, given.values(), strict=True))
    if any(k in given and given[k].shape[:1] != own[k].shape[:1] for k in ("head.weight", "head.bias")):
        given |= {k: v for k, v in own.items() if k.startswith("head.")}
    counters = {k for k in own if k.endswith("num_batches_tracked")}  # absent from old files, never read
    missing, unknown = sorted(own.keys() - given.keys() - counters), sorted(given.keys() - own.keys())
    also = f"; {unknown[0]} is there instead" if unknown else ""
    _refuse_misfit(path, "is missing", missing, also)
    _refuse_misfit(path, "does not belong to this model", unknown)
    unlike = [k for k, v in given.items() if v.shape != own[k].shape]
    shapes = [f"{k} {list(given[k].shape)} instead of {list(own[k].shape)}" for k in unlike]
    _refuse_misfit(path, "has another shape", shapes)
    infinite = [k for k, v in given.items() if not bool(torch.isfinite(v).all())]
    _refuse_misfit(path, "has numbers that are not finite", infinite)
    net.load_state_dict(given, strict=False)


def _of_run(net: nn.Module, path: str, tables: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the one model that all clients of a run use."""
    summary = json_mapping(Path(path).expanduser().parent / "summary.json")
    require(not uploads_none(summary), KEY, path, ALONE)
    remedy = f"is the file of a run, and holds no table {TABLE!r} of whole models: use one of another method"
    require(TABLE in tables, KEY, path, remedy)
    table, rows = tables[TABLE], tables[ASSIGN].unique().tolist()
    remedy = f"is the file of a run whose clients use {len(rows)} models: use one with one model for all"
    require(len(rows) == 1 and table.ndim == 2 and 0 <= rows[0] < len(table), KEY, path, remedy)
    require(uses_rows(summary, len(table)), KEY, path, MIXED.format(len(table)))
    layout, vector = Layout.of(net), table[int(rows[0])]
    remedy = f"is the file of a run whose model has {len(vector)} numbers, this one has {layout.size}: use "
    require(len(vector) == layout.size, KEY, path, remedy + "the same network, data and number of classes")
    shapes = zip(layout.slices.items(), layout.shapes, strict=True)
    return {name: vector[s].reshape(shape) for (name, s), shape in shapes}


def shapes_of(layout: Layout) -> list[tuple[str, list[int]]]:
    """Return names and shapes of the tensors of a model."""
    return [(name, list(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)]


def layout_metadata(layout: Layout) -> dict[str, str]:
    """Return the metadata of the `model.safetensors` of a run: names and shapes of a model's tensors."""
    return {LAYOUT: json.dumps(shapes_of(layout))}


def named_shapes(key: str, value: str, file: Path) -> list[tuple[str, list[int]]]:
    """Return the names and shapes of a model's tensors from the `model.safetensors` of a run.

    Args:
        key: key of the configuration that names the file, for messages.
        value: value of the key.
        file: the file.

    Raises:
        UserError: its metadata do not hold them.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(LAYOUT, "")
    try:
        return [(str(name), [int(size) for size in shape]) for name, shape in json.loads(text)]
    except (ValueError, TypeError) as error:
        remedy = "does not name its tensors, as the file that a run of this version wrote; run it again"
        raise UserError(key, value, remedy) from error


def uploads_none(summary: Mapping[str, Any]) -> bool:
    """Return whether the clients of a run trained models of their own and uploaded nothing, as in `local`.

    The row `model` of such a run is the initial one.

    Args:
        summary: its `summary.json`; empty where there is none.
    """
    return summary.get("client_models") == "own" and summary.get("federation_bytes_up") == 0


def uses_rows(summary: Mapping[str, Any], num_rows: int) -> bool:
    """Return whether each client of a run uses its row of the table as its model, not a mix of several.

    Args:
        summary: its `summary.json`; empty where there is none.
        num_rows: number of rows of the table.
    """
    return summary.get("client_models", "rows") == "rows" or num_rows == 1


def _refuse_misfit(path: str, what: str, names: list[str], also: str = "") -> None:
    """Raise `UserError` if there are names that do not fit; the message shows the first one."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    require(not names, KEY, path, f"does not fit the model: {names[0] if names else ''} {what}{more}{also}")
