"""The trainer `sklearn`: linear models of scikit-learn by `partial_fit`."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from mpifl.core.errors import UserError, require
from mpifl.core.federation import CLASSES, NUMBERS
from mpifl.core.task import Task
from mpifl.core.trainer import Fit, FitContext, Gift, Samples, Trainer

KEY = "local.trainer"
OURS = (
    "random_state",
    "average",
    "warm_start",
    "early_stopping",
)  # of estimators; set here, or without effect


@dataclass(frozen=True)
class Sklearn(Trainer):
    """One linear layer, trained by `partial_fit` of a linear model of scikit-learn, batch by batch.

    The model has one weight [L, F] and one bias [L]: `logistic`, or `linear` for a regression of one number.
    Classes are trained one against the rest, as scikit-learn does. A new estimator begins every visit.

    Attributes:
        estimator: `SGDClassifier` (with `options: {loss: log_loss}` logistic regression, by default a linear
            support vector machine), `Perceptron`, or `SGDRegressor`.
        options: arguments of the estimator, such as `{loss: log_loss, alpha: 0.001, eta0: 0.1}`.
    """

    called: ClassVar[str] = "sklearn"
    gives: ClassVar[tuple[Gift, ...]] = ("gradient", "outputs")

    estimator: Literal["SGDClassifier", "Perceptron", "SGDRegressor"] = "SGDClassifier"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments = inspect.signature(self._class()).parameters
        for name, value in self.options.items():
            known = name in arguments and name not in OURS
            remedy = f"{self.estimator} takes {', '.join(n for n in arguments if n not in OURS)}"
            require(known, f"options.{name}", value, remedy)

    def check(self, task: Task, asked: tuple[Gift, ...]) -> None:
        """Raise `UserError` for labels that the estimator does not take."""
        kind = NUMBERS if self.estimator == "SGDRegressor" else CLASSES
        remedy = f"learns {'one number' if kind == NUMBERS else 'classes'}, and task {task.name} has others"
        require(kind in task.labels, "estimator", self.estimator, remedy)

    def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
        """Train the layer batch by batch; the loss of a batch is the task's, before it is learned from.

        Raises:
            UserError: the module is not one linear layer, or scikit-learn refuses an option.
        """
        weight, bias = self._layer(module)
        made = self._class()(random_state=context.key.seed % 2**32, **self.options)
        first = _numbers(weight), _numbers(bias)
        made.coef_, made.intercept_ = (self._read(value) for value in first)
        made.t_, made.n_features_in_ = 1.0, weight.shape[1]
        if self.estimator != "SGDRegressor":
            made.classes_ = np.arange(len(weight))
        total, samples = 0.0, 0
        for number, (x, y, _) in enumerate(data.batches()):
            assert isinstance(x, torch.Tensor), "linear models take one input"
            with torch.no_grad():
                total += float(data.task.loss(self.outputs(module, x), y)) * len(x)
            labels = _numbers(y)
            try:
                made.partial_fit(_numbers(x.flatten(1)), labels.ravel())
            except ValueError as error:
                raise UserError(f"{KEY}.options", self.options, f"{self.estimator}: {error}") from error
            with torch.no_grad():
                for param, start, value in zip(
                    (weight, bias), first, (made.coef_, made.intercept_), strict=True
                ):
                    param.copy_(torch.from_numpy(self._written(start, value)))
            samples += len(x)
            context.done(number + 1)
        return Fit(total / samples if samples else math.nan, context.num_steps, samples)

    def check_module(self, module: nn.Module) -> None:
        """Raise `UserError` if the module is not one linear layer."""
        self._layer(module)

    def _class(self) -> Any:
        import sklearn.linear_model

        return getattr(sklearn.linear_model, self.estimator)

    def _layer(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
        """Return weight [L, F] and bias [L] of a module that is one linear layer."""
        params = list(module.parameters())
        fits = len(params) == 2 and params[0].ndim == 2 and params[1].shape == params[0].shape[:1]
        fits = fits and all(p.requires_grad for p in params)
        remedy = "trains one linear layer; use model logistic, or linear for numbers"
        require(fits, KEY, self.called, remedy)
        wide = self.estimator == "SGDRegressor" and len(params[1]) != 1
        require(
            not wide, KEY, self.estimator, f"learns one number, and the model has {len(params[1])} outputs"
        )
        return params[0], params[1]

    def _read(self, value: np.ndarray) -> np.ndarray:
        """Return rows [L, F] or shifts [L] as the estimator has them: one row for two classes."""
        if self.estimator == "SGDRegressor":
            return value[0] if value.ndim == 2 else value
        return value[1:] - value[:1] if len(value) == 2 else value.copy()

    def _written(self, first: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Return the rows or shifts of the layer from those of the estimator; two classes keep their mean."""
        if len(first) == 2 and self.estimator != "SGDRegressor":
            both: np.ndarray = first.mean(0) + np.concatenate([-value / 2, value / 2])
            return both
        return value.reshape(first.shape)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array, floats as float64."""
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array.astype(np.float64) if array.dtype.kind == "f" else array
