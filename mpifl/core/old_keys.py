"""Configuration keys of earlier releases; they are read for one release after they were renamed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

OLD_KEYS: dict[str, str] = {
    "system.compiled": "system.kernels",
    "system.graphs": "system.cuda_graphs",
    "system.shuffle": "system.placement_seed",
    "system.keep_mb": "system.sample_cache_mb",
    "system.stopped_s": "system.stopped_timeout_s",
    "evaluation.first": "evaluation.at_start",
}  # dotted key of an earlier release -> its present name; the values are the same
WITHOUT_WEIGHTS = (  # models that took no `weights` in release 0.1
    *("mlp", "emdcnn", "flt_mlp", "flt_cnn_mnist", "flt_cnn_cifar", "leaf_cnn", "lenet5", "ifca_mlp"),
    *("ccfl_cnn", "cfl_cnn", "resnet18_cifar", "custom"),
)
NEW_KEYS: dict[str, Any] = {
    "table": None,
    "start": {"run": None, "part": "all"},
    "output.clients": "all",
    "evaluation.by": [],
    "evaluation.train": False,
    "evaluation.distances": False,
    "evaluation.matrices": [],
    "evaluation.metrics": [],
    "algorithm.sample_share": 1.0,
    "algorithm.looks": "seen",
    "algorithm.pixels": "normalised",
    "system.statistics_cache": None,
    "algorithm.loss_batch": None,
    "algorithm.starts": None,
    "algorithm.stream_cost": 0.0,
    "algorithm.tradeoff": None,
    "algorithm:fedfomo.variant": "paper",
    "algorithm:pfedme.variant": "paper",
    "algorithm:fedavg_ft.mu": 0.0,
    "algorithm:fedcuau.evaluate_copies": False,
    "algorithm:fedper.tune_epochs": 0,
    "algorithm:fedsoft_async.sigma": 0.0,
    "algorithm:fesem.initial_models": False,
    "model:lenet5.he_uniform": "convolutions",
    "data.source:femnist.inverted": False,
    "data.public:femnist.inverted": False,
    "data.source.mean": None,
    "data.source.std": None,
    "data.public.mean": None,
    "data.public.std": None,
    "data.source:folder.broken": "refuse",
    "data.source:folder.validation": "drop",
    "data.source:huggingface.validation": "drop",
    "data.source:dataset.inputs": None,
    "data.source:dataset.vocabulary": 0,
    "data.public:dataset.inputs": None,
    "data.public:dataset.vocabulary": 0,
    "data.source:npz.inputs": None,
    "data.source:npz.vocabulary": 0,
    "data.source:npz.labels": None,
    "data.public:folder.broken": "refuse",
    "data.public:folder.validation": "drop",
    "data.public:huggingface.validation": "drop",
    "data.public:npz.inputs": None,
    "data.public:npz.vocabulary": 0,
    "data.public:npz.labels": None,
    "data.scenario:rotated.test_share": None,
    "data.scenario:composed.test_share": None,
    "data.scenario:alphabets.test_share": None,
    "data.scenario:ucfl_a.test_share": 0.2,
    "data.scenario:ucfl_b.test_share": 0.2,
    "data.scenario:ucfl_batch.test_share": 0.2,
    "data.scenario:ccfl.others": "all",
    "data.scenario:flt1.order": None,
    "data.scenario:flt2.order": None,
    "data.scenario:flt1.drawn": False,
    "data.scenario:flt2.drawn": False,
    "data.scenario:emdcfl_mnist.validation": 0.1,
    "data.scenario:emdcfl_cifar.validation": 0.1,
    "local.keep_optimizer": False,
    "local.precision": "float32",
    "model.lora": {"rank": 0, "alpha": None, "layers": ["*"], "train": ["head"]},
    **{f"model:{name}.weights": None for name in WITHOUT_WEIGHTS},
    "output.updates": False,
    "output.client_models": False,
    "devices": {"name": "alike"},
    "per_client": {},
    "availability.profile": [],
    "availability.day_s": 86400.0,
    "availability.shift_s": 0.0,
    "availability.spread_s": 0.0,
    "robust": {"name": "none"},
    "attack": {"name": "none"},
    "output.label": None,
    "privacy": {"name": "none"},
    "output.callbacks": [],
    "secure_aggregation": {"name": "none"},
    "task": {"name": "classification", "metrics": ["accuracy"]},
}  # key that release 0.1 lacked (SECTION:NAME: a section with that name) -> the value that acts as 0.1 did
MAX_COUNT = 2**63 - 1


def without_new(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration without the keys of `NEW_KEYS` whose values act as release 0.1 did."""
    out = copy.deepcopy(dict(tree))
    for key, plain in NEW_KEYS.items():
        *sections, name = key.split(".")
        part: Any = out
        for section, _, of in (text.partition(":") for text in sections):
            part = part.get(section) if isinstance(part, dict) else None
            part = part if isinstance(part, dict) and of in ("", part.get("name")) else None
        if isinstance(part, dict) and name in part and part[name] == plain:
            del part[name]
    return out


def renamed(tree: Mapping[str, Any], say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Return a tree in which keys of earlier releases have their present names; values are unchanged.

    Args:
        tree: The configuration, or a part of it, as nested mappings.
        say: Called with one line for each old key.
    """
    out, told = dict(tree), say or (lambda line: None)
    for old, new in OLD_KEYS.items():
        section, _, name = old.rpartition(".")
        part = out.get(section)
        if isinstance(part, dict) and name in part:
            now = new.rpartition(".")[2]
            out[section] = {(now if key == name else key): value for key, value in part.items()}
            told(f"{old} is now {new}")
    count = out.get("participation")
    if isinstance(count, (int, float)) and 1 < count < MAX_COUNT and count == int(count):
        out = {("cohort_size" if key == "participation" else key): value for key, value in out.items()}
        out["cohort_size"] = int(count)
        told(f"participation: {count} is now cohort_size: {int(count)}")
    return out
