"""Scenarios: how samples are spread over clients. `SCENARIOS` maps the values of `scenario.name`."""

from mpifl.core.registry import Registry
from mpifl.data.scenario import Scenario

SCENARIOS: Registry[type[Scenario]] = Registry(
    "scenarios",
    Scenario,
    {
        "iid": "usual:Iid",
        "dirichlet": "usual:Dirichlet",
        "shards": "usual:Shards",
        "lognormal": "usual:LogNormal",
        "powerlaw": "usual:PowerLaw",
        "label_quantity": "usual:LabelQuantity",
        "quantile": "usual:Quantile",
        "feature_noise": "usual:FeatureNoise",
        "mixed": "mixed:Mixed",
        "natural": "natural:Natural",
        "population": "drift:Population",
        "partition": "partition_file:PartitionFile",
        "rotated": "rotated:Rotated",
        "relations": "relations:Relations",
        "composed": "rotated:Composed",
        "alphabets": "relations:Alphabets",
        "emdcfl_mnist": "emdcfl:EmdCflMnist",
        "emdcfl_cifar": "emdcfl:EmdCflCifar",
        "emdcfl_backdoor_mnist": "emdcfl:BackdoorMnist",
        "emdcfl_backdoor_cifar": "emdcfl:BackdoorCifar",
        "emdcfl_pacs": "natural:Pacs",
        "flt1": "flt:Flt1",
        "flt2": "flt:Flt2",
        "flt3": "natural:Flt3",
        "flt4": "flt:Flt4",
        "ucfl_a": "ucfl:UcflA",
        "ucfl_b": "ucfl:UcflB",
        "ucfl_c": "ucfl:UcflC",
        "ucfl_batch": "ucfl:UcflBatch",
        "ccfl": "drift:Ccfl",
        "fedcuau": "fedcuau:FedCuau",
    },
    "mpifl.data.scenarios",
)

__all__ = ["SCENARIOS", "Scenario"]
