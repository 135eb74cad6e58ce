"""The catalogue: name -> method, for `algorithm.name` in configurations; and the papers of the methods."""

import re
from pathlib import Path

from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import catalogue

from .apfl import APFL
from .ccfl import CCFL
from .cfl import CFL
from .cflgp import CFLGP
from .clustered_async import ClusteredAsync
from .ditto import Ditto
from .emdcfl import EMDCFL
from .fedamp import FedAMP
from .fedasync import FedAsync
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedavg_memory import FedAvgMemory
from .fedavgm import FedAvgM
from .fedbabu import FedBABU
from .fedbn import FedBN
from .fedbuff import FedBuff
from .fedce import FedCE
from .fedclust import FedClust
from .fedcuau import FedCUAU
from .fedem import FedEM
from .fedfomo import FedFomo
from .fednova import FedNova
from .fedopt import FedAdam, FedYogi
from .fedper import FedPer
from .fedprox import FedProx
from .fedrc import FedRC
from .fedrep import FedRep
from .fedsac import FedSaC
from .fedsoft import FedSoft
from .fedsoft_async import FedSoftAsync
from .fesem import FeSEM
from .flexcfl import FlexCFL
from .flhc import FLHC
from .flt import FLT
from .hypcluster import HypCluster
from .ifca import IFCA
from .lgfedavg import LGFedAvg
from .local import Local
from .moon import MOON
from .oracle import Oracle
from .pacfl import PACFL
from .pca_km_hc import PCAKMHC
from .perfedavg import PerFedAvg
from .pfedgraph import PFedGraph
from .pfedme import PFedMe
from .scaffold import SCAFFOLD
from .ucfl import UCFL

CATALOGUE: dict[str, type[Algorithm]] = catalogue(
    {  # in the order of docs/methods.md
        "local": Local,
        "fedavg": FedAvg,
        "fedavg_ft": FedAvgFT,
        "fedavg_memory": FedAvgMemory,
        "fedprox": FedProx,
        "scaffold": SCAFFOLD,
        "fednova": FedNova,
        "fedavgm": FedAvgM,
        "fedadam": FedAdam,
        "fedyogi": FedYogi,
        "moon": MOON,
        "emdcfl": EMDCFL,
        "flt": FLT,
        "fedcuau": FedCUAU,
        "cfl": CFL,
        "ifca": IFCA,
        "pacfl": PACFL,
        "fedclust": FedClust,
        "flexcfl": FlexCFL,
        "pca_km_hc": PCAKMHC,
        "hypcluster": HypCluster,
        "fesem": FeSEM,
        "cflgp": CFLGP,
        "flhc": FLHC,
        "oracle": Oracle,
        "fedem": FedEM,
        "fedsoft": FedSoft,
        "fedrc": FedRC,
        "fedce": FedCE,
        "ucfl": UCFL,
        "pfedgraph": PFedGraph,
        "fedsac": FedSaC,
        "fedfomo": FedFomo,
        "fedamp": FedAMP,
        "ditto": Ditto,
        "pfedme": PFedMe,
        "apfl": APFL,
        "perfedavg": PerFedAvg,
        "fedper": FedPer,
        "fedrep": FedRep,
        "fedbabu": FedBABU,
        "lgfedavg": LGFedAvg,
        "fedbn": FedBN,
        "fedasync": FedAsync,
        "fedbuff": FedBuff,
        "ccfl": CCFL,
        "fedsoft_async": FedSoftAsync,
        "clustered_async": ClusteredAsync,
    }
)


def citation(method: type[Algorithm]) -> str:
    """Return the BibTeX entry of a method's paper; empty if it names none."""
    if not method.paper or method.paper.startswith("@"):
        return method.paper
    entries = (Path(__file__).parent / "papers.bib").read_text(encoding="utf-8")
    found = re.search(rf"^@\w+{{{re.escape(method.paper)},$.*?^}}$", entries, re.MULTILINE | re.DOTALL)
    return found[0] if found else method.paper
