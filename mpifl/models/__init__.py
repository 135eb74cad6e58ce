"""Models: each is a body, which ends in the embedding, and a last linear layer, the head.

`MODELS[name]` is a frozen dataclass; its fields are the options of `--model.*`. `build(shape, num_classes)`
makes the module, or `build_for(info)` if it needs more properties of the data; callers use `build_model`.
Initial weights are drawn from torch's global generator: the caller seeds it, or uses `seeded_model`. The flat
vector of a model with adapters (`lora.py`) holds only the adapters and what is trained besides them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpifl.core.registry import Registry

from .base import ModelOptions, ShapeModel, build_model, described, seeded_model
from .lora import LoRA, adapters_of, check_adapted, checksum, count_whole, start_apart, starts_alike

if TYPE_CHECKING:
    from .modules import Net

MODELS: Registry[type[ModelOptions]] = Registry(
    "models",
    ModelOptions,
    {
        "mlp": "mlp:MLP",
        "emdcfl_cnn": "cnn:EmdcflCNN",
        "flt_mlp": "mlp:FltMLP",
        "flt_cnn_mnist": "cnn:FltCNNMnist",
        "flt_cnn_cifar": "cnn:FltCNNCifar",
        "leaf_cnn": "cnn:LeafCNN",
        "lenet5": "cnn:LeNet5",
        "ifca_mlp": "mlp:IfcaMLP",
        "ccfl_cnn": "cnn:CcflCNN",
        "cfl_cnn": "cnn:CflCNN",
        "resnet18_cifar": "resnet:ResNet18Cifar",
        "resnet20": "resnet:ResNet20",
        "resnet18": "torchvision_models:ResNet18",
        "resnet50": "torchvision_models:ResNet50",
        "efficientnet_b3": "torchvision_models:EfficientNetB3",
        "vit_b_16": "torchvision_models:ViTB16",
        "convnext_base": "torchvision_models:ConvNeXtBase",
        "logistic": "tables:LogisticRegression",
        "linear": "tables:LinearRegression",
        "table_mlp": "tables:TableMLP",
        "lstm": "sequence:LSTM",
        "transformer": "sequence:Transformer",
        "fcn": "pixels:FCN",
        "unet": "pixels:UNet",
        "huggingface": "huggingface:HuggingFace",
        "custom": "user_module:Custom",
    },
    "mpifl.models",
)

REPLAYED = ("mlp", "ifca_mlp", "lenet5")
"""Models whose replayed steps are known to have the bits of ordinary ones on a GPU (`test_cuda_graph.py`)."""

AUTOENCODERS: Registry[type] = Registry(
    "", object, {"flt_ae": "autoencoders:FltAE", "flt_ae_cifar": "autoencoders:FltAECifar"}, "mpifl.models"
)

__all__ = [
    "AUTOENCODERS",
    "MODELS",
    "REPLAYED",
    "LoRA",
    "ModelOptions",
    "Net",
    "ShapeModel",
    "adapters_of",
    "build_model",
    "check_adapted",
    "checksum",
    "count_whole",
    "described",
    "seeded_model",
    "start_apart",
    "starts_alike",
]


def __getattr__(name: str) -> Any:
    """Import `Net` when it is asked for: it needs PyTorch, which the descriptions of networks do not."""
    if name != "Net":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .modules import Net

    return Net
