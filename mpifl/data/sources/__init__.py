"""Sources of samples. `SOURCES` maps the values of `source.name`."""

from mpifl.core.errors import catalogue
from mpifl.data.sources.base import MEASURED, NORMALISATIONS, Source, in_one_line, normalisation
from mpifl.data.sources.cifar import Cifar10, Cifar20, Cifar100
from mpifl.data.sources.dataset import Dataset
from mpifl.data.sources.digits import Digits
from mpifl.data.sources.femnist import Femnist
from mpifl.data.sources.folder import Folder
from mpifl.data.sources.generated import Generated
from mpifl.data.sources.huggingface import HuggingFace
from mpifl.data.sources.idx import Emnist, FashionMnist, KMnist, Mnist, QMnist
from mpifl.data.sources.leaf import Leaf
from mpifl.data.sources.npz import MedMnist, Npz
from mpifl.data.sources.photos import Photos
from mpifl.data.sources.scikit import ScikitLearn
from mpifl.data.sources.street import Svhn, Usps
from mpifl.data.sources.synthetic import Synthetic
from mpifl.data.sources.table import Table
from mpifl.data.sources.text import Text
from mpifl.data.sources.tff import TensorFlowFederated

SOURCES: dict[str, type[Source]] = catalogue(
    {
        "digits": Digits,
        "mnist": Mnist,
        "kmnist": KMnist,
        "fashionmnist": FashionMnist,
        "emnist": Emnist,
        "qmnist": QMnist,
        "cifar10": Cifar10,
        "cifar100": Cifar100,
        "cifar20": Cifar20,
        "svhn": Svhn,
        "usps": Usps,
        "femnist": Femnist,
        "folder": Folder,
        "npz": Npz,
        "table": Table,
        "huggingface": HuggingFace,
        "leaf": Leaf,
        "tff": TensorFlowFederated,
        "medmnist": MedMnist,
        "dataset": Dataset,
        "photos": Photos,
        "sklearn": ScikitLearn,
        "generated": Generated,
        "synthetic": Synthetic,
        "text": Text,
    }
)

__all__ = [
    "MEASURED",
    "NORMALISATIONS",
    "SOURCES",
    "Digits",
    "Photos",
    "Source",
    "in_one_line",
    "normalisation",
]
