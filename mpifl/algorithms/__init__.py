"""One paper, one room. `CATALOGUE` names every method."""

from mpifl.core.algorithm import Algorithm

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

CATALOGUE: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "fedper": FedPer,
    "hypcluster": HypCluster,
    "ifca": IFCA,
    "cfl": CFL,
    "emdcfl": EMDCFL,
    "ucfl": UCFL,
    "oracle": Oracle,
    "fedce": FedCE,
    "fedem": FedEM,
    "fedrc": FedRC,
    "fedsoft": FedSoft,
    "apfl": APFL,
    "cflgp": CFLGP,
    "ditto": Ditto,
    "fedamp": FedAMP,
    "fedavg_ft": FedAvgFT,
    "fedavgm": FedAvgM,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedfomo": FedFomo,
    "fednova": FedNova,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedrep": FedRep,
    "fedsac": FedSaC,
    "lgfedavg": LGFedAvg,
    "moon": MOON,
    "perfedavg": PerFedAvg,
    "pfedgraph": PFedGraph,
    "pfedme": PFedMe,
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
    "ccfl": CCFL,
    "fedsoft_async": FedSoftAsync,
    "clustered_async": ClusteredAsync,
    "fedclust": FedClust,
    "fedcuau": FedCUAU,
    "fesem": FeSEM,
    "flexcfl": FlexCFL,
    "flhc": FLHC,
    "flt": FLT,
    "pacfl": PACFL,
    "pca_km_hc": PCAKMHC,
}
