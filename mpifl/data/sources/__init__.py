"""Sources of samples. `SOURCES` maps the values of `source.name`."""

from mpifl.core.registry import Registry
from mpifl.data.sources.base import Source

SOURCES: Registry[type[Source]] = Registry(
    "sources",
    Source,
    {
        "digits": "scikit:Digits",
        "mnist": "idx:Mnist",
        "kmnist": "idx:KMnist",
        "fashionmnist": "idx:FashionMnist",
        "emnist": "idx:Emnist",
        "qmnist": "idx:QMnist",
        "cifar10": "cifar:Cifar10",
        "cifar100": "cifar:Cifar100",
        "cifar20": "cifar:Cifar20",
        "svhn": "street:Svhn",
        "usps": "street:Usps",
        "femnist": "leaf:Femnist",
        "folder": "folder:Folder",
        "npz": "npz:Npz",
        "table": "table:Table",
        "huggingface": "huggingface:HuggingFace",
        "leaf": "leaf:Leaf",
        "tff": "tff:TensorFlowFederated",
        "medmnist": "npz:MedMnist",
        "dataset": "dataset:Dataset",
        "photos": "scikit:Photos",
        "sklearn": "scikit:ScikitLearn",
        "generated": "generated:Generated",
        "synthetic": "generated:Synthetic",
        "shapes": "shapes:Shapes",
        "text": "text:Text",
    },
    "mpifl.data.sources",
)

__all__ = ["SOURCES", "Source"]
