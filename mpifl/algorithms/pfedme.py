"""pFedMe: personal models as Moreau envelopes of the global one.

Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. Legend: w
global model, w_i the client's copy, theta personal model. R times: on one mini-batch, K steps theta <- theta
- eta_p (grad l(theta) + lambda (theta - w_i) + mu theta), theta warm-started; then w_i <- w_i - eta lambda
(w_i - theta). Server: w <- (1 - beta) w + beta sum n_i w_i / sum n_i. Clients are evaluated with theta.

The method has its own learning rates and trains with plain SGD. Of `local` only batch_size, augment,
precision and the learning-rate schedule apply; the schedule changes eta_p, not eta. mu is in the authors'
code, not in the paper. In that code all clients train and the sampled ones are averaged; here only the
sampled ones train.

Variants `ucfl` and `ucfl_nesterov` follow the code of the paper "User-Centric Federated Learning": theta
starts each visit at the received model, each of its K steps takes another mini-batch, and there is no mu.
theta and w_i move with the rates eta_p and eta by an optimiser whose state stays with the client: Adam with
one step count for both, which that code uses in effect (`ucfl`), or SGD with Nesterov momentum 0.9, which its
comments recommend (`ucfl_nesterov`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from mpifl.core.client import proximal
from mpifl.core.method import Algorithm, Client, Direction, Downloads, Key, Needs, Plan
from mpifl.core.mixing import blend, sample_weights
from mpifl.core.options import NonNegativeFloat, PositiveFloat, PositiveInt
from mpifl.core.types import Message, Notes, Report, Server, State, Vector
from mpifl.training.evaluation import mean_loss

IGNORED = {  # keys of `local` -> keys of the method
    "epochs": "algorithm.local_rounds",
    "steps": "algorithm.local_rounds",
    "lr": "algorithm.lr and algorithm.personal_lr",
    "momentum": "",
    "weight_decay": "algorithm.mu (variant paper)",
    "optimizer": "algorithm.variant ucfl",
}
VECTORS = ("theta", "w")  # what the optimisers of UCFL's code move


class _Adam:
    """Adam on theta and w_i, each with moments of its own and one count of steps for both, as in Keras.

    Args:
        state: what the client keeps; empty before its first visit.
        like: a vector [p] of parameters.
    """

    moments_of: tuple[str, ...] = ("{}.first", "{}.second")

    def __init__(self, state: State, like: Vector) -> None:
        self.steps = int(state["steps"]) if "steps" in state else 0
        names = [moment.format(name) for name in VECTORS for moment in self.moments_of]
        zeros = torch.zeros_like(like)
        self.moments = {name: state.get(name, zeros).to(like.device) for name in names}

    def step(self, name: str, gradient: Vector) -> Vector:
        """Return the optimiser's step [p] for the gradient [p] of a vector, before the learning rate."""
        self.steps += 1
        first = 0.9 * self.moments[f"{name}.first"] + 0.1 * gradient
        second = 0.999 * self.moments[f"{name}.second"] + 0.001 * gradient.square()
        self.moments |= {f"{name}.first": first, f"{name}.second": second}
        size = (second / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        return first / (1 - 0.9**self.steps) / size

    def direction(self, name: str, change: Direction) -> Direction:
        """Return the direction that the optimiser makes of the gradient changed by `change`."""
        return lambda g, w: self.step(name, change(g, w))

    def state(self) -> State:
        """Return what the client keeps."""
        return {**self.moments, "steps": torch.tensor(self.steps)}


class _Nesterov(_Adam):
    """SGD with Nesterov's momentum of 0.9 on theta and w_i."""

    moments_of = ("{}",)

    def step(self, name: str, gradient: Vector) -> Vector:
        """Return g + 0.9 v, where v <- 0.9 v + g."""
        self.steps += 1
        velocity = 0.9 * self.moments[name] + gradient
        self.moments |= {name: velocity}
        return gradient + 0.9 * velocity


OPTIMIZERS = {"ucfl": _Adam, "ucfl_nesterov": _Nesterov}


@dataclass(frozen=True)
class PFedMe(Algorithm):
    """One shared row w; each client keeps its theta.

    Attributes:
        lam: lambda, pull of the personal model theta towards the client's copy w_i of the global model.
        inner_steps: K, steps of theta on each mini-batch; in UCFL's code each step has its own mini-batch.
        local_rounds: R, mini-batches of a visit; in UCFL's code rounds of K mini-batches.
        lr: eta, learning rate of w_i.
        personal_lr: eta_p, learning rate of theta.
        beta: share of the average that enters the global model.
        mu: weight decay of theta.
        variant: `paper`, or UCFL's code with Adam (`ucfl`) or Nesterov momentum (`ucfl_nesterov`), both
            without mu.
    """

    lam: PositiveFloat = 15.0
    inner_steps: PositiveInt = 5
    local_rounds: PositiveInt = 20
    lr: PositiveFloat = 0.005
    personal_lr: PositiveFloat = 0.1
    beta: PositiveFloat = 1.0
    mu: NonNegativeFloat = 0.001
    variant: Literal["paper", "ucfl", "ucfl_nesterov"] = "paper"

    paper = "dinh2020personalized"
    asks = ("direction", "sgd")
    needs = Needs(client_state=True, new_optimizer=True, ignores=IGNORED, averages=True)
    downloads = Downloads(serves="none")

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Alternate theta and w_i over R mini-batches."""
        if self.variant != "paper":
            return self._remembering(message["model"][0], state, client, key)
        w_i = theta = message["model"][0]
        plain: dict[str, Any] = {
            "optimizer": "sgd",
            "momentum": 0.0,
            "weight_decay": self.mu,
            "lr": self.personal_lr,
        }
        losses: list[tuple[float, int]] = []
        for r, batch in enumerate(client.batches(key, steps=self.local_rounds)):
            inner = client.sgd(
                theta,
                key.of("inner", r),
                direction=proximal(self.lam, w_i),
                split=batch,
                epochs=self.inner_steps,
                batch_size=len(batch),
                **plain,
            )
            theta = inner.vector
            w_i = w_i - self.lr * self.lam * (w_i - theta)
            losses.append((inner.loss, len(batch)))
        metrics = {"train_loss": mean_loss(losses)}
        kept = state if state and not losses else {"model": theta}
        return client.report(model=w_i, metrics=metrics), kept

    def _remembering(self, received: Vector, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Alternate theta and w_i R times, K mini-batches each."""
        p = client.layout.num_parameters
        memory = OPTIMIZERS[self.variant](state, received[:p])
        w_i = theta = received
        batches = client.batches(key, steps=self.local_rounds * self.inner_steps)
        losses: list[tuple[float, int]] = []
        for r in range(self.local_rounds):
            some, pull = list(islice(batches, self.inner_steps)), proximal(self.lam, w_i)
            if not some:  # a shortened visit, or a forecast, which does not train
                break
            for k, batch in enumerate(some):
                inner = client.sgd(
                    theta,
                    key.of("inner", r, k),
                    direction=memory.direction("theta", pull),
                    split=batch,
                    epochs=1,
                    batch_size=len(batch),
                    optimizer="sgd",
                    momentum=0.0,
                    weight_decay=0.0,
                    lr=self.personal_lr,
                )
                theta = inner.vector
                losses.append((inner.loss, len(batch)))
            w_i = w_i.clone()
            w_i[:p] -= self.lr * memory.step("w", self.lam * (w_i - theta)[:p])
        metrics = {"train_loss": mean_loss(losses)}
        kept = state if state and not losses else {"model": theta, **memory.state()}
        return client.report(model=w_i, metrics=metrics), kept

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """w <- (1 - beta) w + beta sum n_i w_i / n."""
        return Plan([blend(self.beta * sample_weights(notes))])
