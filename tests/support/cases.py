"""Every method of the catalogue with options that have an effect on six clients, and variants of some.

A method that is added to the catalogue becomes a case automatically, with its defaults.
"""

from __future__ import annotations

import pytest

from mpifl.algorithms.registry import CATALOGUE

# options of methods whose defaults would have no effect, not fit, or take long on six clients
OPTIONS: dict[str, dict[str, object]] = {
    "cfl": {"warmup": 1, "eps1": 100.0, "eps2": 0.0},
    "cflgp": {"num_clusters": 2, "protocol": "gap", "period": 1},
    "fedclust": {"threshold": 0.05},
    "feddrift": {"period": 1, "delta": 0.0, "max_models": 4},
    "flexcfl": {"num_groups": 2, "alpha": 2, "iterations": 5},
    "flhc": {"rounds_before": 1, "num_clusters": 2},
    "flt": {"pretrain_epochs": 2, "finetune_epochs": 1, "centroids": 2, "code": 8},
    "ifca": {"num_clusters": 2},
    "pfedme": {"inner_steps": 2, "local_rounds": 6, "lr": 0.02, "personal_lr": 0.05},
    "ucfl": {"noise_batch": 4.0},
}
VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("cfl", {"warmup": 1, "eps1": 100.0, "eps2": 0.0, "linkage": "single", "gamma_max": 0.1}),
    ("cfl", {"weighted": True, "eps1": 0.0}),
    ("emdcfl", {"against": "train", "tau": "full", "train_mode": True}),
    ("emdcfl", {"solver": "sinkhorn", "epsilon": 0.3}),
    ("emdcfl", {"metric": "euclidean", "epsilon": 2.0}),
    ("apfl", {"adaptive": False, "alpha": 0.25}),
    ("ditto", {"weighted": False, "lam": 0.1}),
    ("fedamp", {"variant": "heur", "sigma": 25.0}),
    ("fedavgm", {"beta": 0.5, "server_lr": 0.5}),
    ("fedbabu", {"tune_part": "head", "weighted": False}),
    ("fedce", {"variant": "emdcfl", "num_clusters": 2}),
    ("fedem", {"variant": "emdcfl", "num_components": 2}),
    ("fedfomo", {"num_models": 1, "epsilon": 1.0}),
    ("feddrift", {"period": 1, "delta": 0.4, "start": "own", "measure": "loss"}),
    ("feddrift", {"period": 1, "delta": 0.0, "variant": "eager", "select_on": "val"}),
    ("fielding", {"num_clusters": 3, "theta": 0.0}),
    ("fedrc", {"variant": "emdcfl", "num_clusters": 2}),
    ("fedsac", {"variant": "emdcfl", "lam": 1.0}),
    ("fedsac", {"variant": "repo", "num_directions": 2}),
    ("fedsoft", {"variant": "emdcfl"}),
    ("fedsoft", {"num_clusters": 3, "selected": 2, "tau": 1}),
    ("lgfedavg", {"shared": "block"}),
    ("perfedavg", {"variant": "hf", "beta": 0.05}),
    ("pfedgraph", {"variant": "emdcfl"}),
    ("pfedgraph", {"variant": "repo", "lam": 0.1}),
    ("pfedme", {"beta": 0.5, "inner_steps": 2, "personal_lr": 0.02}),
    ("pfedme", {"variant": "ucfl", "inner_steps": 2, "local_rounds": 3, "personal_lr": 0.01}),
    ("fedprox", {"variant": "unsquared"}),
    ("cfl", {"warmup": 1, "eps1": 100.0, "eps2": 0.0, "variant": "emdcfl", "gamma_max": -1.0}),
    ("cflgp", {"variant": "emdcfl", "num_clusters": 3}),
    ("cflgp", {"num_clusters": 0, "max_clusters": 3}),
    ("fedclust", {"variant": "emdcfl", "num_clusters": 2}),
    ("fedcuau", {"over": "fedprox", "mu": 0.5, "num_clusters": 3}),
    ("fedcuau", {"over": "fedbabu", "tune_epochs": 1}),
    ("fedcuau", {"over": "fedper", "tune_epochs": 1}),
    ("fesem", {"variant": "flexcfl", "num_clusters": 2}),
    ("fesem", {"initial_models": True, "num_clusters": 2}),
    ("fesem", {"variant": "emdcfl", "num_clusters": 2}),
    ("flexcfl", {"num_groups": 2, "measure": "madc", "eta_g": 0.1, "migration": 0.0, "iterations": 5}),
    ("flexcfl", {"num_groups": 2, "variant": "emdcfl", "eta_g": 0.01}),
    ("flhc", {"rounds_before": 0, "metric": "cosine", "threshold": 0.5}),
    ("flt", {"case": "ward", "distance": "closest", "centroids": 0, "all_clients": False}),
    ("flt", {"finetune_epochs": 0}),
    ("ifca", {"num_clusters": 2, "variant": "gradient", "share": "body", "restarts": 2}),
    ("pacfl", {"variant": "emdcfl", "angle": "smallest", "linkage": "maximum"}),
    ("pacfl", {"angle": "sum", "budget": 4, "threshold": 60.0}),
    ("pca_km_hc", {"case": "ward", "num_clusters": 2, "components": 4, "all_clients": False}),
    ("ifca", {"num_clusters": 6, "select_on": "val", "weighted": True}),
    ("ifca", {"num_clusters": 2, "variant": "emdcfl"}),
    ("scaffold", {"server_lr": 0.5}),
    ("ucfl", {"noise_batch": 0.5, "kernel": "geo"}),
    ("ucfl", {"noise_batch": 4.0, "streams": 2}),
    ("ucfl", {"noise_batch": 4.0, "streams": -1}),
    ("ucfl", {"noise_batch": 4.0, "streams": 2, "parallel": True}),
    ("ucfl", {"noise_batch": 4.0, "parallel": True}),
    ("ucfl", {"noise_batch": 4.0, "streams": 2, "max_age": None, "keep_gradients": True}),
    ("cfl", {"warmup": 1, "eps1": 100.0, "eps2": 0.0, "max_age": None}),
    ("flhc", {"rounds_before": 1, "num_clusters": 2, "max_age": 3}),
]
CASES = [(name, OPTIONS.get(name, {})) for name in CATALOGUE] + VARIANTS


def named(case: tuple[str, dict[str, object]]) -> str:
    """Return the name of a case, on one line."""
    return " ".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


PARAMS = [  # one test each; variants are nightly
    pytest.param(case, id=named(case), marks=[pytest.mark.nightly] * (case in VARIANTS)) for case in CASES
]
