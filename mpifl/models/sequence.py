"""Networks for sequences of tokens: an LSTM and a causal transformer.

If labels are tokens, every position has an output, [n, T, L], computed from the tokens up to it. Otherwise
the last position gives the output of the sample, [n, L].
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import nn
from torch.nn import functional as F

from mpifl.core.errors import require
from mpifl.core.federation import TOKENS, DataInfo
from mpifl.core.options import PositiveInt, ShareBelowOne

from .base import ModelOptions, Net, chain

Layers = Annotated[int, Interval(ge=1, le=1000)]


class Last(nn.Module):
    """The last position of a sequence: [n, T, e] -> [n, e]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, e]."""
        return x[:, -1]


def _ending(info: DataInfo) -> dict[str, nn.Module]:
    """Return the last module of a body: none where every position has an output."""
    return {} if info.labels == TOKENS else {"last": Last()}


class Recurrent(nn.Module):
    """The states of an LSTM at all positions: [n, T, before] -> [n, T, after]."""

    def __init__(self, before: int, after: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(before, after, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states of the last layer."""
        with warnings.catch_warnings():  # cuDNN wants a layout of its own and copies the weights to it
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
            states: torch.Tensor = self.lstm(x)[0]
        return states


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

    takes: ClassVar[tuple[str, ...]] = (TOKENS,)

    embedding: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: Layers = 2

    def make_for(self, info: DataInfo) -> Net:
        """Return the network for tokens as in `info`."""
        body = chain(
            tokens=nn.Embedding(info.vocabulary, self.embedding),
            recurrent=Recurrent(self.embedding, self.hidden, self.layers),
            **_ending(info),
        )
        return Net(body, nn.Linear(self.hidden, info.num_classes), ["recurrent"])


class Positions(nn.Module):
    """Embeddings of tokens plus those of their positions: int64 [n, T] -> [n, T, e].

    Args:
        vocabulary: number of tokens.
        length: the largest T.
        width: e.
    """

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        for weights in (self.token.weight, self.position):
            nn.init.normal_(weights, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums."""
        embedded: torch.Tensor = self.token(x)
        return embedded + self.position[: x.shape[1]]


class TransformerLayer(nn.Module):
    """Causal attention, then two linear layers with GELU, each after a layer norm and added to its input.

    Args:
        width: e.
        heads: number of attention heads.
        dropout: share of the values added to the input that are dropped in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each position a mixture of the positions up to it, [n, T, e]."""
        n, length, width = x.shape
        size = n, length, self.heads, width // self.heads
        q, k, v = (layer(x).reshape(size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) / (width // self.heads) ** 0.5  # [n, heads, T, T]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return attended

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, T, e] to the same shape."""
        x = x + self.drop(self.attend(self.norm1(x)))
        out: torch.Tensor = x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return out


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

    takes: ClassVar[tuple[str, ...]] = (TOKENS,)

    width: PositiveInt = 64
    heads: PositiveInt = 4
    layers: Layers = 2
    dropout: ShareBelowOne = 0.0

    def make_for(self, info: DataInfo) -> Net:
        """Return the network for tokens as in `info`; it also takes shorter sequences."""
        remedy = f"must be a multiple of the {self.heads} heads; give such a width, or other heads"
        require(self.width % self.heads == 0, "model.width", self.width, remedy)
        names = [f"layer{i}" for i in range(1, self.layers + 1)]
        body = chain(
            embed=Positions(info.vocabulary, info.shape[0], self.width),
            **{name: TransformerLayer(self.width, self.heads, self.dropout) for name in names},
            norm=nn.LayerNorm(self.width),
            **_ending(info),
        )
        return Net(body, nn.Linear(self.width, info.num_classes), [names[-1], "norm"])
