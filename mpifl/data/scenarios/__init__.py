"""Scenarios: how samples are spread over clients. `SCENARIOS` maps the values of `scenario.name`."""

from mpifl.core.errors import catalogue
from mpifl.data.scenario import Scenario
from mpifl.data.scenarios.alphabets import Alphabets
from mpifl.data.scenarios.composed import Composed
from mpifl.data.scenarios.drift import Ccfl, Population
from mpifl.data.scenarios.emdcfl import BackdoorCifar, BackdoorMnist, EmdCflCifar, EmdCflMnist
from mpifl.data.scenarios.fedcuau import FedCuau
from mpifl.data.scenarios.flt import Flt1, Flt2, Flt4
from mpifl.data.scenarios.mixed import KINDS, Mixed
from mpifl.data.scenarios.natural import Flt3, Natural, Pacs
from mpifl.data.scenarios.partition_file import PartitionFile
from mpifl.data.scenarios.relations import Relations
from mpifl.data.scenarios.rotated import Rotated
from mpifl.data.scenarios.skewed import FeatureNoise
from mpifl.data.scenarios.ucfl import UcflA, UcflB, UcflBatch, UcflC

SCENARIOS: dict[str, type[Scenario]] = catalogue(
    {
        **KINDS,
        "feature_noise": FeatureNoise,
        "mixed": Mixed,
        "natural": Natural,
        "population": Population,
        "partition": PartitionFile,
        "rotated": Rotated,
        "relations": Relations,
        "composed": Composed,
        "alphabets": Alphabets,
        "emdcfl_mnist": EmdCflMnist,
        "emdcfl_cifar": EmdCflCifar,
        "emdcfl_backdoor_mnist": BackdoorMnist,
        "emdcfl_backdoor_cifar": BackdoorCifar,
        "emdcfl_pacs": Pacs,
        "flt1": Flt1,
        "flt2": Flt2,
        "flt3": Flt3,
        "flt4": Flt4,
        "ucfl_a": UcflA,
        "ucfl_b": UcflB,
        "ucfl_c": UcflC,
        "ucfl_batch": UcflBatch,
        "ccfl": Ccfl,
        "fedcuau": FedCuau,
    }
)

__all__ = ["SCENARIOS", "Rotated", "Scenario"]
