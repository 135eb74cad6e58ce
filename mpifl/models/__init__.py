"""Models: each is a body, which ends in the embedding, and a last linear layer, the head.

`MODELS[name]` is a frozen dataclass; its fields are the options of `--model.*`. `build(shape, num_classes)`
makes the module, or `build_for(info)` if it needs more properties of the data; callers use `build_model`.
Initial weights are drawn from torch's global generator: the caller seeds it, or uses `seeded_model`. The flat
vector of a model with adapters (`lora.py`) holds only the adapters and what is trained besides them.
"""

from __future__ import annotations

from mpifl.core.errors import catalogue

from .autoencoders import FltAE, FltAECifar
from .base import ModelOptions, Net, ShapeModel, build_model, described, seeded_model
from .cnn import CcflCNN, CflCNN, EmdCNN, FltCNNCifar, FltCNNMnist, LeafCNN, LeNet5
from .lora import LoRA, check_adapted, checksum, count_whole, start_apart, starts_alike
from .mlp import MLP, FltMLP, IfcaMLP
from .resnet import ResNet18Cifar, ResNet20
from .sequence import LSTM, Transformer
from .tables import LinearRegression, LogisticRegression, TableMLP
from .torchvision_models import ConvNeXtBase, EfficientNetB3, ResNet18, ResNet50, ViTB16
from .user_module import Custom

MODELS: dict[str, type] = catalogue(
    {
        "mlp": MLP,
        "emdcnn": EmdCNN,
        "flt_mlp": FltMLP,
        "flt_cnn_mnist": FltCNNMnist,
        "flt_cnn_cifar": FltCNNCifar,
        "leaf_cnn": LeafCNN,
        "lenet5": LeNet5,
        "ifca_mlp": IfcaMLP,
        "ccfl_cnn": CcflCNN,
        "cfl_cnn": CflCNN,
        "resnet18_cifar": ResNet18Cifar,
        "resnet20": ResNet20,
        "resnet18": ResNet18,
        "resnet50": ResNet50,
        "efficientnet_b3": EfficientNetB3,
        "vit_b_16": ViTB16,
        "convnext_base": ConvNeXtBase,
        "logistic": LogisticRegression,
        "linear": LinearRegression,
        "table_mlp": TableMLP,
        "lstm": LSTM,
        "transformer": Transformer,
        "custom": Custom,
    }
)

REPLAYED = (MLP, IfcaMLP, LeNet5)
"""Models whose replayed steps are known to have the bits of ordinary ones on a GPU (`test_cuda_graph.py`)."""

AUTOENCODERS: dict[str, type] = {"flt_ae": FltAE, "flt_ae_cifar": FltAECifar}

__all__ = [
    "AUTOENCODERS",
    "MODELS",
    "REPLAYED",
    "LoRA",
    "ModelOptions",
    "Net",
    "ShapeModel",
    "build_model",
    "check_adapted",
    "checksum",
    "count_whole",
    "described",
    "seeded_model",
    "start_apart",
    "starts_alike",
]
