"""The catalogue: name -> method, for `algorithm.name` in configurations."""

from collections.abc import Mapping

from mpifl.core.algorithm import Algorithm
from mpifl.core.registry import Registry

METHODS: Mapping[str, Mapping[str, str]] = {  # heading of docs/methods.md -> name -> module and class
    "One model, no communication or one for all": {
        "local": "local:Local",
        "fedavg": "fedavg:FedAvg",
        "fedavg_ft": "fedavg_ft:FedAvgFT",
        "fedavg_memory": "fedavg_memory:FedAvgMemory",
        "fedprox": "fedprox:FedProx",
        "scaffold": "scaffold:SCAFFOLD",
        "fednova": "fednova:FedNova",
        "fedavgm": "fedavgm:FedAvgM",
        "fedadam": "fedopt:FedAdam",
        "fedyogi": "fedopt:FedYogi",
        "moon": "moon:MOON",
    },
    "Hard clustering": {
        "emdcfl": "emdcfl:EMDCFL",
        "flt": "flt:FLT",
        "fedcuau": "fedcuau:FedCUAU",
        "cfl": "cfl:CFL",
        "ifca": "ifca:IFCA",
        "pacfl": "pacfl:PACFL",
        "fedclust": "fedclust:FedClust",
        "flexcfl": "flexcfl:FlexCFL",
        "pca_km_hc": "pca_km_hc:PCAKMHC",
        "hypcluster": "hypcluster:HypCluster",
        "fesem": "fesem:FeSEM",
        "cflgp": "cflgp:CFLGP",
        "flhc": "flhc:FLHC",
        "feddrift": "feddrift:FedDrift",
        "fielding": "fielding:Fielding",
        "oracle": "oracle:Oracle",
    },
    "Soft clustering": {
        "fedem": "fedem:FedEM",
        "fedsoft": "fedsoft:FedSoft",
        "fedrc": "fedrc:FedRC",
        "fedce": "fedce:FedCE",
    },
    "User-centric and graphs": {
        "ucfl": "ucfl:UCFL",
        "pfedgraph": "pfedgraph:PFedGraph",
        "fedsac": "fedsac:FedSaC",
        "fedfomo": "fedfomo:FedFomo",
        "fedamp": "fedamp:FedAMP",
    },
    "Personal parts and personal models": {
        "ditto": "ditto:Ditto",
        "pfedme": "pfedme:PFedMe",
        "apfl": "apfl:APFL",
        "perfedavg": "perfedavg:PerFedAvg",
        "fedper": "fedper:FedPer",
        "fedrep": "fedrep:FedRep",
        "fedbabu": "fedbabu:FedBABU",
        "lgfedavg": "lgfedavg:LGFedAvg",
        "fedbn": "fedbn:FedBN",
        "fedccfa": "fedccfa:FedCCFA",
    },
    "Asynchronous": {
        "fedasync": "fedasync:FedAsync",
        "fedbuff": "fedbuff:FedBuff",
        "ccfl": "ccfl:CCFL",
        "fedsoft_async": "fedsoft_async:FedSoftAsync",
        "clustered_async": "clustered_async:ClusteredAsync",
        "csafl": "csafl:CSAFL",
    },
}
CATALOGUE: Registry[type[Algorithm]] = Registry(
    "algorithms",
    Algorithm,
    {name: where for some in METHODS.values() for name, where in some.items()},
    "mpifl.algorithms",
)
