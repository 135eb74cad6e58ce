"""Data: sources of images, worlds of clients made of them, and the federation everybody else reads."""

from mpifl.data.cache import CacheMissing
from mpifl.data.federation import PoolFederation
from mpifl.data.look import histogram, label_distance
from mpifl.data.open import DataConfig, open_federation, open_public, prepare
from mpifl.data.scenarios import SCENARIOS
from mpifl.data.sources import SOURCES

__all__ = [
    "SCENARIOS",
    "SOURCES",
    "CacheMissing",
    "DataConfig",
    "PoolFederation",
    "histogram",
    "label_distance",
    "open_federation",
    "open_public",
    "prepare",
]
