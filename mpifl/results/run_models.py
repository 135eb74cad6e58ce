"""The final models of a run folder, as modules with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mpifl.core.errors import UserError, is_whole, nearest, require
from mpifl.core.federation import DataInfo
from mpifl.core.flat_model import FlatModel
from mpifl.core.imports import load_object
from mpifl.core.parameters import put_
from mpifl.models import MODELS, LoRA, ModelOptions, checksum, seeded_model

if TYPE_CHECKING:
    from pandas import DataFrame

SERVER_FILE, CLIENTS_FILE = "model.safetensors", "client_models.safetensors"
TABLE = "model"
ROWS = "rows"  # value of `client_models` in summary.json: clients use their rows as they are
SERVED = "served"  # clients use rows that the tensors `served.TABLE` name, in parts of the model
SEVERAL = "several"  # another value: each client is evaluated with several models


def model_of(
    folder: Path,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    clusters: DataFrame | None,
    client: int | None,
    cluster: int | None,
) -> nn.Module:
    """Return the final model of a client or of a cluster, in evaluation mode.

    Args:
        folder: the run folder.
        config: its configuration.
        summary: its figures.
        clusters: `clusters.csv`, which may have rows of some clients only; None if a client is given.
        client: number of a client; None if a cluster is given.
        cluster: number of a cluster; None if a client is given.

    Raises:
        UserError: the run kept no models, has no model of that client or cluster, or was made with other
            frozen weights; or both or neither of client and cluster are given.
    """
    one = (client is None) != (cluster is None)
    require(one, "Run.model", {"client": client, "cluster": cluster}, "give client=, or cluster=")
    if client is not None:
        most = int(summary["clients"]) - 1
        require(is_whole(client) and 0 <= client <= most, "client", client, f"use one of 0 to {most}")
        vector = None if _is_served(folder, summary) else _of_client(folder, summary, client)
    else:
        assert cluster is not None
        assert clusters is not None
        vector = _of_cluster(folder, clusters, cluster)
    info = _info(summary)
    model = _described(config["model"])
    module = seeded_model(model, info, int(config["seed"]["model"]))
    frozen = summary.get("identity", {}).get("frozen", "")
    remedy = (
        "its frozen weights are no longer those of the run: use the file and the PyTorch release of that run"
    )
    require(checksum(module) == frozen, "RUN", str(folder), remedy)
    flat = FlatModel(module)
    if vector is None:
        assert client is not None
        vector = _of_rows(folder, summary[SERVED], client, flat)
    fits = vector.shape == flat.vector.shape
    remedy = f"a row of this method holds {len(vector)} numbers of a model's {len(flat.vector)}: parts of one"
    require(fits, "cluster", cluster, f"{remedy}; use client=")
    module = flat.load(vector, train=False)
    if isinstance(model, ModelOptions):
        module = model.own(model.merged(module, info))
    return _own(module, config["model"])


def _info(summary: Mapping[str, Any]) -> DataInfo:
    """Return the description of a run's samples and labels."""
    if "data_info" in summary:
        return DataInfo(**_options(summary["data_info"]))
    return DataInfo(tuple(summary["input_shape"]), int(summary["num_classes"]))


def _of_client(folder: Path, summary: Mapping[str, Any], client: int) -> torch.Tensor:
    if (folder / CLIENTS_FILE).exists():
        tensors = _read(folder / CLIENTS_FILE)
        place = np.flatnonzero(tensors["clients"].numpy() == client)
        remedy = "was not evaluated, and no model of its own is kept; set evaluation.clients: null"
        require(len(place) == 1, "client", client, remedy)
        return tensors["models"][int(place[0])]
    remedy = "this method evaluates clients by mixtures of several models; use cluster= for one of them"
    require(summary.get("client_models") != SEVERAL, "client", client, remedy)
    own = "this method gives clients models of their own, which the run did not keep; run it with "
    own += "output.client_models: true"
    kept = summary.get("client_models") == ROWS
    there = not kept and (folder / SERVER_FILE).exists() and TABLE in _read(folder / SERVER_FILE)
    own += ", or use cluster= for a model of the server" if there else ""
    require(kept, "output.client_models", False, own)
    tensors = _server(folder)
    return tensors[TABLE][int(tensors["assign"][client])]


def _is_served(folder: Path, summary: Mapping[str, Any]) -> bool:
    """Return whether the model of a client is put together from rows of the server."""
    return summary.get("client_models") == SERVED and not (folder / CLIENTS_FILE).exists()


def _of_rows(folder: Path, parts: Mapping[str, str], client: int, flat: FlatModel) -> torch.Tensor:
    """Return the model of a client from the rows of the server that it was evaluated with.

    Args:
        folder: the run folder.
        parts: table -> the part of the model that its rows hold.
        client: number of the client.
        flat: the network.
    """
    tensors, vector = _server(folder), flat.vector.clone()
    for table, name in parts.items():
        row, part = int(tensors[f"{SERVED}.{table}"][client]), flat.layout.part(name)
        require(row >= 0, "client", client, "was not evaluated; set evaluation.clients: null")
        width = sum(s.stop - s.start for s in part)
        put_(vector, part, tensors[table][row][:width])
    return vector


def _of_cluster(folder: Path, clusters: DataFrame, cluster: int) -> torch.Tensor:
    """Return the row that all members of a cluster use; only clients in `clusters.csv` are considered."""
    tensors = _server(folder)
    require(TABLE in tensors, "cluster", cluster, "this method keeps no models at the server; use client=")
    labels = clusters["cluster"].to_numpy()
    assign = tensors["assign"].numpy()[clusters["client"].to_numpy()]
    rows = np.unique(assign[labels == cluster])
    if not len(rows) and np.array_equal(assign, labels) and 0 <= cluster < len(tensors[TABLE]):
        rows = np.array([cluster])  # no client uses it
    known = ", ".join(map(str, np.unique(labels).tolist()))
    require(len(rows) > 0, "cluster", cluster, f"there is no such cluster; use one of {known}")
    remedy = f"its clients use {len(rows)} models; use client="
    require(len(rows) == 1, "cluster", cluster, remedy)
    return tensors[TABLE][int(rows[0])]


def _server(folder: Path) -> dict[str, torch.Tensor]:
    there = (folder / SERVER_FILE).exists()
    remedy = "the run kept no models; run it with output.model: true"
    require(there, "output.model", False, remedy)
    return _read(folder / SERVER_FILE)


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except Exception as error:  # a damaged file may raise anything
        raise UserError("RUN", str(path), f"cannot be read ({type(error).__name__}); run it again") from error


def _described(tree: Mapping[str, Any]) -> Any:
    """Return the model options that a section `model` describes."""
    name = str(tree["name"])
    if ":" not in name and name not in MODELS:
        raise UserError("model.name", name, f"unknown name; {nearest(name, MODELS.known())}")
    cls = load_object(name, "model.name") if ":" in name else MODELS.load(name, "model.name")
    options = {k: v for k, v in _options(tree).items() if k != "name"}
    if issubclass(cls, ModelOptions) and isinstance(lora := options.get("lora"), Mapping):
        options["lora"] = LoRA(**_options(lora))
    return cls(**options)


def _options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section as arguments of a dataclass."""
    return {k: _plain(v) for k, v in tree.items()}


def _plain(value: Any) -> Any:
    """Return a value with lists replaced by tuples."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _own(module: nn.Module, tree: Mapping[str, Any]) -> nn.Module:
    """Return the user's module with its last layer put back in place; other networks are unchanged."""
    if tree["name"] != "custom" or not tree["head"]:
        return module
    net = module.get_submodule("body.net")
    net.set_submodule(str(tree["head"]), module.get_submodule("head"))
    return net
