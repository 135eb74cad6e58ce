"""Models of tables: logistic and linear regression, and dense layers with embeddings of categories."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

from annotated_types import MinLen
from torch import nn

from mpifl.core.errors import require
from mpifl.core.federation import CLASSES, FEATURES, IMAGES, MULTI_HOT, NUMBERS, DataInfo
from mpifl.core.options import PositiveInt, Remedy, ShareBelowOne
from mpifl.models import modules

from .base import ModelOptions, chain


def _regression(info: DataInfo) -> modules.Net:
    """Return one linear layer on the sample, categories as 0 and 1; the embedding is its input."""
    if not any(info.categories):
        return modules.Net(chain(flatten=nn.Flatten()), nn.Linear(prod(info.shape), info.num_classes))
    inputs = modules.OneHot(info.categories)
    return modules.Net(chain(inputs=inputs), nn.Linear(inputs.width, info.num_classes))


@dataclass(frozen=True)
class LogisticRegression(ModelOptions):
    """One linear layer whose outputs are the logits of classes or labels; embedding = the sample itself.

    F L + L parameters for F features; a column of c categories counts as c features.
    """

    takes: ClassVar[tuple[str, ...]] = (FEATURES, IMAGES)

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the layer for samples and labels as in `info`."""
        remedy = "predicts classes or labels, but those of this source are numbers; use linear"
        require(info.labels in (CLASSES, MULTI_HOT), "model.name", "logistic", remedy)
        return _regression(info)


@dataclass(frozen=True)
class LinearRegression(ModelOptions):
    """One linear layer whose outputs are the numbers to predict; embedding = the sample itself.

    F L + L parameters for F features; a column of c categories counts as c features.
    """

    takes: ClassVar[tuple[str, ...]] = (FEATURES, IMAGES)

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the layer for samples and labels as in `info`."""
        remedy = "predicts numbers, but the labels of this source are classes or labels; use logistic"
        require(info.labels == NUMBERS, "model.name", "linear", remedy)
        return _regression(info)


LINEAR = Remedy("give one width or more, or use logistic or linear")


@dataclass(frozen=True)
class TableMLP(ModelOptions):
    """Fully connected layers with ReLU on numbers and embeddings of categories; embedding = the last layer.

    Guo and Berkhahn, "Entity Embeddings of Categorical Variables", 2016.

    Attributes:
        hidden: units of each hidden layer.
        embedding: largest width of a column's embedding; for c categories it is ceil(c / 2), at most this.
        dropout: share of the units of each hidden layer that are dropped in training.
    """

    takes: ClassVar[tuple[str, ...]] = (FEATURES,)

    hidden: Annotated[tuple[PositiveInt, ...], MinLen(1), LINEAR] = (128, 64)
    embedding: PositiveInt = 16
    dropout: ShareBelowOne = 0.0

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the network for tables as in `info`."""
        remedy = f"takes tables [F], but samples are of shape {list(info.shape)}; use mlp"
        require(len(info.shape) == 1, "model.name", "table_mlp", remedy)
        inputs = modules.Columns(info.categories, self.embedding) if any(info.categories) else None
        before = info.shape[0] if inputs is None else inputs.width
        layers: dict[str, nn.Module] = {"inputs": nn.Flatten() if inputs is None else inputs}
        for i, after in enumerate(self.hidden, 1):
            layers |= {f"fc{i}": nn.Linear(before, after), f"relu{i}": nn.ReLU()}
            layers |= {f"dropout{i}": nn.Dropout(self.dropout)} if self.dropout else {}
            before = after
        return modules.Net(chain(**layers), nn.Linear(before, info.num_classes), [f"fc{len(self.hidden)}"])
