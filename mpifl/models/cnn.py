"""Small convolutional networks of the papers. The cluster block runs from the last convolution to the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.models import modules

from .base import Shape, ShapeModel, chain, need_side, positions


@dataclass(frozen=True)
class EmdcflCNN(ShapeModel):
    """Two 3x3 convolutions, one pooling, a linear layer = the embedding. EMD-CFL, MNIST experiments.

    conv3x3 -> 64, ReLU; conv3x3 -> 128, ReLU, maxpool 2; fc -> 128, ReLU; fc -> L. No batch norm, no dropout.
    3,287,178 parameters on 1x28x28 and 3,288,330 on 3x28x28, with 10 classes.

    Attributes:
        channels: output channels of the two convolutions.
        embedding: width of the embedding.
    """

    paper = "zhang2025clustered"

    channels: tuple[PositiveInt, PositiveInt] = (64, 128)
    embedding: PositiveInt = 128

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        need_side("emdcfl_cnn", shape, 2)
        first, second = self.channels
        body = chain(
            conv1=nn.Conv2d(shape[0], first, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(first, second, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(second * (shape[1] // 2) * (shape[2] // 2), self.embedding),
            relu3=nn.ReLU(),
        )
        return modules.Net(body, nn.Linear(self.embedding, num_classes), ["conv2", "fc"])


@dataclass(frozen=True)
class FltCNNMnist(ShapeModel):
    """Two 5x5 convolutions pooled before the ReLU, and dropout. FLT (Jamali-Rad et al., 2022), CNNMnist.

    conv5 -> 10, pool, ReLU; conv5 -> 20, dropout of whole channels, pool, ReLU; fc 320 -> 50, ReLU, dropout;
    fc -> L. 21,840 parameters on MNIST. Embedding = the 50 units.

    Attributes:
        dropout: share of channels and of units that are dropped in training.
    """

    paper = "jamalirad2022federated"

    dropout: ShareBelowOne = 0.5

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        body = chain(
            conv1=nn.Conv2d(shape[0], 10, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            dropout2=nn.Dropout2d(self.dropout),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(20 * positions("flt_cnn_mnist", shape, lost=4), 50),
            relu3=nn.ReLU(),
            dropout3=nn.Dropout(self.dropout),
        )
        return modules.Net(body, nn.Linear(50, num_classes), ["conv2", "fc1"])


def _lenet(name: str, pool: type[nn.Module], shape: Shape, num_classes: int) -> modules.Net:
    """Return conv5 -> 6, pool; conv5 -> 16, pool; fc 120, 84, L; ReLU throughout."""
    body = chain(
        conv1=nn.Conv2d(shape[0], 6, 5),
        relu1=nn.ReLU(),
        pool1=pool(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=pool(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * positions(name, shape, lost=4), 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
    )
    return modules.Net(body, nn.Linear(84, num_classes), ["conv2", "fc1", "fc2"])


@dataclass(frozen=True)
class FltCNNCifar(ShapeModel):
    """LeNet-5 with ReLU and max pooling. FLT (Jamali-Rad et al., 2022), CNNCifar.

    conv5 -> 6, pool; conv5 -> 16, pool; fc 400-120-84-L. 62,006 parameters on CIFAR-10.
    Embedding = the 84 units.
    """

    paper = "jamalirad2022federated"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        return _lenet("flt_cnn_cifar", nn.MaxPool2d, shape, num_classes)


@dataclass(frozen=True)
class LeNet5(ShapeModel):
    """LeNet-5 with ReLU and average pooling, convolutions drawn He-uniform. UCFL (Mestoukirdi et al., 2023).

    62,006 parameters on CIFAR-10, 48,846 on EMNIST (62 classes). Embedding = the 84 units. The paper's
    softmax is part of the loss here.

    Attributes:
        he_uniform: layers whose weights are drawn He-uniform: `convolutions`, or `all`, which includes the
            dense layers; their range is then 2.4 times PyTorch's default. With `all`, UCFL's first gradients
            distinguish rotations better.
    """

    paper = "lecun1998gradient"

    he_uniform: Literal["convolutions", "all"] = "convolutions"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        net = _lenet("lenet5", nn.AvgPool2d, shape, num_classes)
        drawn = nn.Conv2d if self.he_uniform == "convolutions" else (nn.Conv2d, nn.Linear)
        for layer in (*net.body.children(), net.head):
            if isinstance(layer, drawn):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        return net


def _conv5_twice(
    first: int, second: int, units: int, shape: Shape, pixels: int, padding: int
) -> nn.Sequential:
    """Return two blocks of conv5, ReLU, max pool, then a linear layer with ReLU."""
    return chain(
        conv1=nn.Conv2d(shape[0], first, 5, padding=padding),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(first, second, 5, padding=padding),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(second * pixels, units),
        relu3=nn.ReLU(),
    )


@dataclass(frozen=True)
class LeafCNN(ShapeModel):
    """Two 5x5 convolutions that keep the size, each pooled, and 2048 units = the embedding. LEAF, FEMNIST.

    Caldas et al., 2018; used by FLT and FedCUAU. 6,572,975 parameters with 47 classes, 6,603,710 with 62.

    Attributes:
        channels: output channels of the two convolutions.
        embedding: width of the embedding.
    """

    paper = "caldas2018leaf"

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    embedding: PositiveInt = 2048

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        pixels = positions("leaf_cnn", shape, lost=0)
        body = _conv5_twice(*self.channels, self.embedding, shape, pixels, padding=2)
        return modules.Net(body, nn.Linear(self.embedding, num_classes), ["conv2", "fc1"])


@dataclass(frozen=True)
class CcflCNN(ShapeModel):
    """Two 5x5 convolutions with ReLU and max pool, fc 512 = the embedding. CCFL, FashionMNIST experiments.

    The paper (appendix A.1) gives no channels: 32 and 64 are taken. On 1x28x28 with 10 classes: 582,026
    parameters (valid) or 1,663,370 (same).

    Attributes:
        padding: `valid` (none) or `same` (the convolutions keep the size).
        channels: output channels of the two convolutions.
        embedding: width of the embedding.
    """

    paper = "li2024towards"

    padding: Literal["valid", "same"] = "valid"
    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    embedding: PositiveInt = 512

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        margin = 2 if self.padding == "same" else 0
        pixels = positions("ccfl_cnn", shape, lost=4 - 2 * margin)
        body = _conv5_twice(*self.channels, self.embedding, shape, pixels, padding=margin)
        return modules.Net(body, nn.Linear(self.embedding, num_classes), ["conv2", "fc1"])


@dataclass(frozen=True)
class CflCNN(ShapeModel):
    """Two 5x5 convolutions with ReLU and max pool, no hidden linear layer. CFL (Sattler et al., 2020).

    conv5 -> 6, ReLU, pool; conv5 -> 16, ReLU, pool; fc -> L. 18,506 parameters on 1x28x28 with
    62 classes. Embedding = the 256 pooled activations.
    """

    paper = "sattler2020clustered"

    def make(self, shape: Shape, num_classes: int) -> modules.Net:
        """Return the network for images of `shape`."""
        body = chain(
            conv1=nn.Conv2d(shape[0], 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
        )
        return modules.Net(body, nn.Linear(16 * positions("cfl_cnn", shape, lost=4), num_classes), ["conv2"])
