"""The catalogue: name -> method, for `algorithm.name` in configurations; and the papers of the methods."""

import re
from pathlib import Path

from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import Registry

CATALOGUE: Registry[type[Algorithm]] = Registry(
    "mpifl.algorithms",
    {  # in the order of docs/methods.md
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
        "oracle": "oracle:Oracle",
        "fedem": "fedem:FedEM",
        "fedsoft": "fedsoft:FedSoft",
        "fedrc": "fedrc:FedRC",
        "fedce": "fedce:FedCE",
        "ucfl": "ucfl:UCFL",
        "pfedgraph": "pfedgraph:PFedGraph",
        "fedsac": "fedsac:FedSaC",
        "fedfomo": "fedfomo:FedFomo",
        "fedamp": "fedamp:FedAMP",
        "ditto": "ditto:Ditto",
        "pfedme": "pfedme:PFedMe",
        "apfl": "apfl:APFL",
        "perfedavg": "perfedavg:PerFedAvg",
        "fedper": "fedper:FedPer",
        "fedrep": "fedrep:FedRep",
        "fedbabu": "fedbabu:FedBABU",
        "lgfedavg": "lgfedavg:LGFedAvg",
        "fedbn": "fedbn:FedBN",
        "fedasync": "fedasync:FedAsync",
        "fedbuff": "fedbuff:FedBuff",
        "ccfl": "ccfl:CCFL",
        "fedsoft_async": "fedsoft_async:FedSoftAsync",
        "clustered_async": "clustered_async:ClusteredAsync",
    },
)


def citation(method: type[Algorithm]) -> str:
    """Return the BibTeX entry of a method's paper; empty if it names none."""
    if not method.paper or method.paper.startswith("@"):
        return method.paper
    entries = (Path(__file__).parent / "papers.bib").read_text(encoding="utf-8")
    found = re.search(rf"^@\w+{{{re.escape(method.paper)},$.*?^}}$", entries, re.MULTILINE | re.DOTALL)
    return found[0] if found else method.paper
