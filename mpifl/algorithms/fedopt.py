"""FedAdam and FedYogi: adaptive optimisers at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2. Legend: Delta mean update, m and v
its first and second moments, eta server rate, tau degree of adaptivity. m <- beta1 m + (1 - beta1) Delta;
FedAdam: v <- beta2 v + (1 - beta2) Delta^2; FedYogi: v <- v - (1 - beta2) Delta^2 sign(v - Delta^2); x <- x +
eta m / (sqrt(v) + tau), v_0 = tau^2, no bias correction. Delta is weighted by samples, as in the paper's
experiments; eta is tuned per task there (1e-2.5 to 10). Buffers are averaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from mpifl.core.method import Algorithm, Key, Needs, Notes, PlainVisits, Plan, ProblemInfo, RowUpdates, Server
from mpifl.core.mixing import average
from mpifl.core.options import PositiveFloat, ShareBelowOne


@dataclass(frozen=True)
class AdaptiveServer(PlainVisits, RowUpdates, Algorithm, ABC):
    """Table `model`, and tables `first` and `second`, its moments, that nobody reads.

    Attributes:
        server_lr: eta, learning rate of the server.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: degree of adaptivity, added to sqrt(v) in the denominator of a step.
    """

    server_lr: PositiveFloat = 0.01
    beta1: ShareBelowOne = 0.9
    beta2: ShareBelowOne = 0.99
    tau: PositiveFloat = 1e-3

    paper = "reddi2021adaptive"
    needs = Needs(server_update=True, averages=True)

    @abstractmethod
    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Return the next v from v and Delta^2."""

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with m = 0 and v = tau^2."""
        m = torch.zeros(1, problem.layout.num_parameters)
        return problem.server(first=m, second=torch.full_like(m, self.tau**2))

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])

    def server_update(self, old: Server, new: Server) -> Server:
        """Take an adaptive step along Delta = averaged - old; buffers are averaged."""
        x, m, v = (old.tables[name] for name in ("model", "first", "second"))
        p = m.shape[1]
        delta = (new.tables["model"] - x)[:, :p]
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = self.second(v, delta.square())
        moved = x[:, :p] + self.server_lr * m / (v.sqrt() + self.tau)
        model = torch.cat([moved, new.tables["model"][:, p:]], 1)
        return replace(new, tables={**new.tables, "model": model, "first": m, "second": v})


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """Adam at the server: table `model` and its moments `first` and `second`."""

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """v <- beta2 v + (1 - beta2) Delta^2."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """Yogi at the server: table `model` and its moments `first` and `second`."""

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)
