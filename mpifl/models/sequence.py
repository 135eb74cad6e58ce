"""Networks for sequences of tokens: an LSTM and a causal transformer.

If every position has a label (`tokens`, `masked_tokens`, `tags`), every position has an output, [n, T, L],
computed from the tokens up to it. Otherwise the last position gives the output of the sample, [n, L].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval
from torch import nn

from mpifl.core.errors import require
from mpifl.core.federation import SEQUENCES, TOKENS, DataInfo
from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.models import modules

from .base import ModelOptions, chain

Layers = Annotated[int, Interval(ge=1, le=1000)]


def _ending(info: DataInfo) -> dict[str, nn.Module]:
    """Return the last module of a body: none where every position has an output."""
    return {} if info.labels in SEQUENCES else {"last": modules.Last()}


@dataclass(frozen=True)
class LSTM(ModelOptions):
    """Embeddings of tokens and an LSTM; embedding = the state of its last layer. LEAF, Shakespeare.

    Caldas et al., 2018, after McMahan et al., AISTATS 2017: 819,920 parameters with 80 characters (PyTorch's
    LSTM has two biases for each gate, TensorFlow's one).

    Attributes:
        embedding: width of the token embeddings.
        hidden: units of each LSTM layer.
        layers: number of stacked LSTM layers.
    """

    paper = "caldas2018leaf"

    takes: ClassVar[tuple[str, ...]] = (TOKENS,)

    embedding: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: Layers = 2

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the network for tokens as in `info`."""
        body = chain(
            tokens=nn.Embedding(info.vocabulary, self.embedding),
            recurrent=modules.Recurrent(self.embedding, self.hidden, self.layers),
            **_ending(info),
        )
        return modules.Net(body, nn.Linear(self.hidden, info.num_classes), ["recurrent"])


@dataclass(frozen=True)
class Transformer(ModelOptions):
    """A small causal transformer (GPT-2's blocks); embedding = the output of the last layer norm.

    Vaswani et al., NeurIPS 2017; Radford et al., 2019. With 64 characters, 32 positions, and the defaults:
    110,400 parameters.

    Attributes:
        width: width of embeddings and layers, a multiple of the number of heads.
        heads: number of attention heads in each layer.
        layers: number of layers.
        dropout: share of the outputs of the attention, and of the two linear layers after it, that are
            dropped in training.
    """

    paper = "radford2019language"

    takes: ClassVar[tuple[str, ...]] = (TOKENS,)

    width: PositiveInt = 64
    heads: PositiveInt = 4
    layers: Layers = 2
    dropout: ShareBelowOne = 0.0

    def make_for(self, info: DataInfo) -> modules.Net:
        """Return the network for tokens as in `info`; it also takes shorter sequences."""
        remedy = f"must be a multiple of the {self.heads} heads; give such a width, or other heads"
        require(self.width % self.heads == 0, "model.width", self.width, remedy)
        names = [f"layer{i}" for i in range(1, self.layers + 1)]
        body = chain(
            embed=modules.Positions(info.vocabulary, info.shape[0], self.width),
            **{name: modules.TransformerLayer(self.width, self.heads, self.dropout) for name in names},
            norm=nn.LayerNorm(self.width),
            **_ending(info),
        )
        return modules.Net(body, nn.Linear(self.width, info.num_classes), [names[-1], "norm"])
