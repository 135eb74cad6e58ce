"""User-defined metrics of a client, given by import path (`evaluation.metrics`).

A metric is a function of the logits, float32 [n, L], and the labels, int64 [n], of one client's samples,
both in main memory. It returns a number, which need not be a mean over samples (balanced accuracy is not).
It is called wherever a client is evaluated, so its values are the same for any number of ranks. Its attribute
`better`, 1 or -1, says whether higher or lower values are better; without it, neither counts as better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

import torch

from mpifl.core import torch_state
from mpifl.core.errors import MethodError, code_failed, require
from mpifl.core.imports import load_object
from mpifl.core.rng import key
from mpifl.core.trainer import LocalTrainer, Trainer

KEY = "evaluation.metrics"
TAKEN = {  # names, and beginnings of names, of columns of metrics.csv and clients.csv
    *("round", "seconds", "virtual_seconds", "client", "cluster", "group", "train", "val", "test", "device"),
    "attacker",
    *("num_clusters", "num_unplaced", "ari", "ari_everyone", "nmi", "purity", "churn", "mixture_kl"),
    *("arrivals", "refusal_rate", "staleness", "client_distance", "head_distance", "federation_bytes"),
    *("epsilon", "clip", "work", "late_clients", "secure_dropped", "secure_skipped", "robust_too_small"),
    "lora_lost",
    *("mixture_kl_uploads", "tuned"),
    *("flops", "forward_passes", "forward_samples", "backward_passes", "backward_samples"),
    "joules",
}
PREFIXES = ("accuracy", "loss", "tuned_size")
SUFFIXES = ("_train", "_initial", "_finetuned", "_mean", "_std", "_min", "_max")


@dataclass(frozen=True)
class OwnMetric:
    """A user-defined metric.

    Attributes:
        name: name of the function and of its columns.
        path: import path.
        function: (logits [n, L], labels [n]) -> a number.
        better: 1 where higher is better, -1 where lower is, 0 where the function does not say.
    """

    name: str
    path: str
    function: Callable[[torch.Tensor, torch.Tensor], float]
    better: int = 0

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, client: int) -> float:
        """Return the value for one client; NaN if it has no sample.

        Args:
            logits: [n, L].
            labels: [n].
            client: number of the client, for messages.

        Raises:
            CodeFailed: the function raised an exception.
            MethodError: the function did not return a number.
        """
        if not len(labels):
            return float("nan")
        try:  # with copies: the labels are those that later evaluations read, too
            drawn = key(0, "metric", client)  # for a metric that draws, such as a bootstrap
            with torch_state.kept(), drawn.seeded():
                value = self.function(logits.detach().to("cpu", copy=True), labels.to("cpu", copy=True))
        except Exception as error:
            raise code_failed(f"metric {self.path}, client {client}", error) from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"client {client}: returned {type(value).__name__}"
            raise MethodError(self.path, what, "return one number for the client") from error


def load_metrics(paths: Sequence[str], of_task: Sequence[str] = ()) -> tuple[OwnMetric, ...]:
    """Return the metrics at some import paths.

    Args:
        paths: `package.module:function` or `file.py:function`.
        of_task: names of the task's metrics.

    Raises:
        UserError: there is no such function, its name is that of a column, two of them would have columns of
            the same name, or `better` is not 1 or -1.
    """
    found: list[OwnMetric] = []
    for path in paths:
        require(":" in path, KEY, path, "give package.module:function or file.py:function")
        function, name = load_object(path, KEY), path.rpartition(":")[2]
        require(callable(function) and not isinstance(function, type), KEY, path, "is not a function")
        taken = name in TAKEN or name.startswith(PREFIXES) or name.endswith(SUFFIXES)
        taken |= any(_share_columns(name, other) for other in of_task)
        require(
            not taken, KEY, path, f"the name {name} is that of a column already; call the function otherwise"
        )
        for other in found:
            same = _share_columns(name, other.name)
            require(not same, KEY, path, f"its columns would be those of {other.path}; call one otherwise")
        better = getattr(function, "better", 0)
        remedy = f"{name}.better = {better!r}: set it to 1 where higher is better, to -1 where lower is"
        require(better in (-1, 0, 1), KEY, path, remedy)
        found.append(OwnMetric(name, path, function, int(better)))
    return tuple(found)


def metrics_of(paths: Sequence[str], trainer: LocalTrainer) -> tuple[OwnMetric, ...]:
    """Return the metrics at some import paths, and those that a trainer evaluates itself.

    Where something other than one model is evaluated, a trainer's metrics are NaN.
    """
    own = trainer.metrics if isinstance(trainer, Trainer) else ()
    of_trainer = [OwnMetric(m.name, "local.trainer", lambda logits, labels: nan, m.better) for m in own]
    return *load_metrics(paths, [metric.name for metric in own]), *of_trainer


def _share_columns(one: str, other: str) -> bool:
    """Return whether two metrics could have columns of the same name: `NAME`, or `NAME_` and a suffix."""
    return one == other or one.startswith(f"{other}_") or other.startswith(f"{one}_")
