"""The modules of PyTorch of which networks are made: body and head, blocks, adapters.

The other files here describe networks, and do not need PyTorch until one is built (`core.lazy_imports`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from mpifl.core.module_calls import SeveralInputs, TakenOutput


class Net(nn.Module):
    """A body that ends in the embedding, and the last linear layer; the body comes first in `parameters()`.

    Attributes:
        body: samples [n, ...] -> [n, e]; [n, T, e] or [n, H, W, e] where every token or pixel has an output.
        head: the last layer, [n, ..., e] -> [n, ..., num_classes].
        blocks: module-name prefixes of FedCUAU's cluster block: the last stage of the body, and the head.
        frozen: names of the buffers that are the same for all clients and never change.
    """

    blocks: tuple[str, ...]
    frozen: frozenset[str] = frozenset()

    def __init__(self, body: nn.Module, head: nn.Linear, stage: Iterable[str] = ()) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.blocks = (*(f"body.{name}" for name in stage), "head")

    @property
    def sequence(self) -> tuple[nn.Module, ...]:
        """The modules that `forward` applies one after the other."""
        return self.body, self.head

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [n, e] of samples [n, ...]: the input of the last layer."""
        embedding: torch.Tensor = self.body(x)
        return embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [n, num_classes] for samples [n, ...]."""
        logits: torch.Tensor = self.head(self.embed(x))
        return logits


class OneHot(nn.Module):
    """The columns of a table [n, F], with each column of categories one-hot encoded.

    Args:
        categories: number of categories of each column, 0 for numbers.

    Attributes:
        width: width of the output.
    """

    def __init__(self, categories: tuple[int, ...]) -> None:
        super().__init__()
        self.categories = categories
        self.width = sum(max(c, 1) for c in categories)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, width], columns in their order."""
        columns = [
            F.one_hot(x[:, i].long(), c).to(x.dtype) if c else x[:, i : i + 1]
            for i, c in enumerate(self.categories)
        ]
        return torch.cat(columns, 1)


class Columns(nn.Module):
    """The numbers of a table [n, F], then an embedding for each column of categories.

    Args:
        categories: number of categories of each column, 0 for numbers.
        most: largest width of an embedding; for c categories the width is ceil(c / 2), at most this.

    Attributes:
        width: width of the output.
    """

    def __init__(self, categories: tuple[int, ...], most: int) -> None:
        super().__init__()
        self.numbers = [i for i, c in enumerate(categories) if not c]
        self.coded = [i for i, c in enumerate(categories) if c]
        widths = [min(most, -(-categories[i] // 2)) for i in self.coded]
        self.tables = nn.ModuleList(
            nn.Embedding(categories[i], width) for i, width in zip(self.coded, widths, strict=True)
        )
        self.width = len(self.numbers) + sum(widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, width]."""
        embedded = [table(x[:, i].long()) for i, table in zip(self.coded, self.tables, strict=True)]
        return torch.cat([x[:, self.numbers], *embedded], 1)


class PixelsLast(nn.Module):
    """Features of pixels with the channels last, for a linear layer: [n, e, H, W] -> [n, H, W, e]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, H, W, e]."""
        return x.movedim(1, -1)


class Up(nn.Module):
    """Twice the size by a transposed convolution, beside the features of that size, through a block. U-Net.

    Args:
        before: channels of the smaller features.
        after: channels of the larger features, and of the result of the transposed convolution.
        block: takes both together, 2 `after` channels.
    """

    def __init__(self, before: int, after: int, block: nn.Module) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(before, after, 2, 2)
        self.block = block

    def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        """Return [n, e, H, W] for [n, before, H // 2, W // 2] and [n, after, H, W]."""
        grown = self.grow(small)
        missing = large.shape[-1] - grown.shape[-1], large.shape[-2] - grown.shape[-2]  # of odd sides
        out: torch.Tensor = self.block(torch.cat([F.pad(grown, (0, missing[0], 0, missing[1])), large], 1))
        return out


class UNet(nn.Module):
    """Blocks at halved sizes, then at doubled sizes, which also see the former.

    Args:
        down: blocks, the largest size first; each but the last is pooled by 2 for the next.
        up: one for each size but the smallest, the smaller ones first.
    """

    def __init__(self, down: Iterable[nn.Module], up: Iterable[Up]) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, C, H, W] to the features of each pixel, [n, e, H, W]."""
        seen: list[torch.Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if seen else x)
            seen.append(x)
        for large, grow in zip(seen[-2::-1], self.up, strict=True):
            x = grow(x, large)
        return x


class ToRGB(nn.Module):
    """Three channels from one or three."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 1 or 3, H, W] to [n, 3, H, W]."""
        return x.expand(-1, 3, -1, -1)


class Embedder(nn.Module):
    """A user's module without its last layer; `method` turns samples into embeddings.

    Args:
        net: the module.
        method: name of its method.
        inputs: encodes samples for it; None: it gets them as they are.
        flat: whether a sample has one embedding; otherwise each of its tokens or pixels has one.
        call: calls the method with several inputs; None for one.
        output: which of several outputs of the method is the embedding; None if it returns one.
    """

    def __init__(
        self,
        net: nn.Module,
        method: str,
        inputs: nn.Module | None = None,
        flat: bool = True,
        call: SeveralInputs | None = None,
        output: TakenOutput | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.method = method
        self.inputs = inputs
        self.flat = flat
        self.call, self.output = call, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, ...] to [n, e], or to [n, ..., e]."""
        x = x if self.inputs is None else self.inputs(x)
        args, named = ((x,), {}) if self.call is None else self.call.arguments(x)
        found = getattr(self.net, self.method)(*args, **named)
        embedding: torch.Tensor = found if self.output is None else self.output.take(found)
        return embedding.flatten(1) if self.flat else embedding


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to a shortcut. He et al., CVPR 2016."""

    def __init__(self, before: int, after: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, before, H, W] to [n, after, H / stride, W / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Subsample(nn.Module):
    """Shortcut without parameters: every second pixel, new channels zero. He et al., option A."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.margin = (after - before) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, before, H, W] to [n, after, ceil(H / 2), ceil(W / 2)]."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.margin, self.margin))


class Last(nn.Module):
    """The last position of a sequence: [n, T, e] -> [n, e]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, e]."""
        return x[:, -1]


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


class LoRALinear(nn.Linear):
    """A linear layer [out, in] whose weights are frozen, with an adapter.

    Args:
        layer: the layer; its tensors are shared, not copied.
        rank: r.
        alpha: the output of the adapter is multiplied by alpha / r.
        dropout: share of the inputs of the adapter that are dropped in training.

    Attributes:
        lora_A: [r, in], drawn He-uniform from the global generator, like weights of linear layers.
        lora_B: [out, r], zero.
    """

    transposed = False

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        _copy_options(layer, self)
        self.scale = alpha / rank
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        like = layer.weight.detach()
        self.lora_A = _drawn(like.new_empty(rank, self.in_features))
        self.lora_B = nn.Parameter(like.new_zeros(self.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        added = F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)
        return F.linear(x, self.weight, self.bias) + self.scale * added

    def delta(self) -> torch.Tensor:
        """Return what the adapter adds to the weights, [out, in]."""
        return self.scale * self.lora_B @ self.lora_A


class LoRAConv2d(nn.Conv2d):
    """An ungrouped convolution whose kernels are frozen, with an adapter.

    Args:
        layer: the layer; its tensors are shared, not copied.
        rank: r.
        alpha: the output of the adapter is multiplied by alpha / r.
        dropout: share of the inputs of the adapter that are dropped in training.

    Attributes:
        lora_A: [r, in, height, width], drawn like kernels of convolutions.
        lora_B: [out, r, 1, 1], zero.
    """

    transposed = False

    def __init__(self, layer: nn.Conv2d, rank: int, alpha: float, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        _copy_options(layer, self)
        self.scale = alpha / rank
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        like = layer.weight.detach()
        self.lora_A = _drawn(like.new_empty(rank, *like.shape[1:]))
        self.lora_B = nn.Parameter(like.new_zeros(self.out_channels, rank, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, in, H, W] to [n, out, H', W']."""
        added = F.conv2d(self._conv_forward(self.drop(x), self.lora_A, None), self.lora_B)
        out: torch.Tensor = self._conv_forward(x, self.weight, self.bias) + self.scale * added
        return out

    def delta(self) -> torch.Tensor:
        """Return what the adapter adds to the kernels, [out, in, height, width]."""
        added: torch.Tensor = self.scale * torch.einsum("or,rihw->oihw", self.lora_B[:, :, 0, 0], self.lora_A)
        return added


class LoRAConv1D(nn.Module):
    """A linear layer of transformers with weights [in, out] (`Conv1D`) that are frozen, with an adapter.

    Args:
        layer: the layer; its tensors are shared, not copied.
        rank: r.
        alpha: the output of the adapter is multiplied by alpha / r.
        dropout: share of the inputs of the adapter that are dropped in training.

    Attributes:
        lora_A: [r, in], drawn He-uniform from the global generator, like weights of linear layers.
        lora_B: [out, r], zero.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    transposed = True

    def __init__(self, layer: nn.Module, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        _copy_options(layer, self)
        self.scale = alpha / rank
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        like = self.weight
        self.lora_A = _drawn(like.new_empty(rank, like.shape[0]))
        self.lora_B = nn.Parameter(like.new_zeros(like.shape[1], rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        added = F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)
        plain = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return plain.view(*x.shape[:-1], self.weight.shape[1]) + self.scale * added

    def delta(self) -> torch.Tensor:
        """Return what the adapter adds to the weights, [in, out]."""
        return (self.scale * self.lora_B @ self.lora_A).T


class FrozenBatchNorm(nn.Module):
    """A batch norm that always uses its running statistics, which do not change.

    Args:
        norm: the layer; its tensors are shared.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, C, ...] to the same shape."""
        mean, variance = self.get_buffer("running_mean"), self.get_buffer("running_var")
        weight, bias = self._buffers["weight"], self._buffers["bias"]
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)


def _copy_options(layer: nn.Module, into: nn.Module) -> None:
    """Copy plain attributes of a layer, and its tensors as buffers."""
    vars(into).update({k: v for k, v in vars(layer).items() if k not in vars(into)})
    for name in ("weight", "bias"):
        into.register_buffer(name, getattr(layer, name))


def _drawn(empty: torch.Tensor) -> nn.Parameter:
    nn.init.kaiming_uniform_(empty, a=math.sqrt(5))
    return nn.Parameter(empty)
