"""Sources of samples, scenarios that divide them among clients, and the federation that other code reads."""

from mpifl.data.federation import PoolFederation
from mpifl.data.scenarios import SCENARIOS
from mpifl.data.sources import SOURCES

from .build import DataConfig, export_partition, open_federation, open_public, prepare
from .drift import Drift
from .prepared_cache import CacheMissing
from .statistics import histogram, label_distance

__all__ = [
    "SCENARIOS",
    "SOURCES",
    "CacheMissing",
    "DataConfig",
    "Drift",
    "PoolFederation",
    "export_partition",
    "histogram",
    "label_distance",
    "open_federation",
    "open_public",
    "prepare",
]
