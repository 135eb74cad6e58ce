"""Models as users write them, trained by FedAvg: against a plain PyTorch loop, or refused in one line.

The loop uses nothing of mpifl but the address of the visit's draws: every client copies the server's module,
trains it by `torch.optim.SGD` on its whole data as one batch, and the server averages the state dicts by
samples.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.nightly import mostly_nightly
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import mpifl
from mpifl.core.errors import UserError

SIZES, ROUNDS, STEPS, LR = (10, 14, 6), 3, 4, 0.1
NETS = """
import torch
from torch import nn
from torch.nn import functional as F


class Base(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(shape[0], 5)
        self.make()
        self.fc = nn.Linear(5, num_classes)
        self.finish()

    def make(self):
        pass

    def finish(self):
        pass

    def inner(self, h):
        return h

    def forward(self, x):
        return self.fc(self.inner(torch.tanh(self.first(x))))


class Plain(Base):
    pass


class TiedBody(Base):
    def make(self):
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight

    def inner(self, h):
        return self.b(torch.tanh(self.a(h)))


class SameModuleTwice(Base):
    def make(self):
        self.a = nn.Linear(5, 5)
        self.again = self.a

    def inner(self, h):
        return self.again(torch.tanh(self.a(h)))


class TiedHead(Base):
    def finish(self):
        self.mid = nn.Linear(3, 5)
        self.fc.weight = nn.Parameter(torch.ones(3, 5) / 4 + torch.eye(3, 5))
        self.enc = nn.Linear(5, 3, bias=False)
        self.enc.weight = self.fc.weight

    def inner(self, h):
        return self.mid(torch.tanh(self.enc(h)))


class NoBias(Base):
    def finish(self):
        self.fc = nn.Linear(5, self.fc.out_features, bias=False)


class Unused(Base):
    def make(self):
        self.never = nn.Linear(5, 5)


class FrozenLayer(Base):
    def make(self):
        self.first.weight.requires_grad_(False)


class Masked(Base):
    def make(self):
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1]))
        self.register_buffer("shut", torch.tensor([0.0, 0, 0, float("-inf"), 0]))
        self.register_buffer("places", torch.arange(5) / 5, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("flag", torch.tensor(True))

    def inner(self, h):
        return torch.softmax(h * self.mask + self.shut, 1) + self.places


class Normed(Base):
    def make(self):
        self.bn = nn.BatchNorm1d(5)

    def inner(self, h):
        return self.bn(h)


class Spectral(Base):
    def make(self):
        self.a = nn.utils.spectral_norm(nn.Linear(5, 5))

    def inner(self, h):
        return self.a(h)


class SpectralParametrized(Base):
    def make(self):
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))

    def inner(self, h):
        return self.a(h)


class WeightNormed(Base):
    def make(self):
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))

    def inner(self, h):
        return self.a(h)


class Ensemble(Base):
    def make(self):
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rest = nn.ParameterList([nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(0))])

    def inner(self, h):
        return h * self.scale * self.rest[0]


class Double(Base):
    def finish(self):
        self.double()

    def forward(self, x):
        return super().forward(x.double())


class Complex(Base):
    def make(self):
        self.a = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def inner(self, h):
        return (h * self.a).abs()


class Half(Base):
    def make(self):
        self.a = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def inner(self, h):
        return h * self.a.float()


class TwoOutputs(Base):
    def forward(self, x):
        out = super().forward(x)
        return out, out


class TwoInputs(Base):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Empty(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()

    def forward(self, x):
        return x


class Twins(Base):
    def finish(self):
        self.twin = nn.Parameter(self.fc.weight.data)

    def forward(self, x):
        return F.linear(torch.tanh(self.first(x)), self.twin)


class InfiniteObserver(Base):
    def make(self):
        self.register_buffer("least", torch.full((5,), float("inf")))

    def inner(self, h):
        if self.training:
            self.least.copy_(torch.minimum(self.least, h.detach().amin(0)))
        return h
"""
TRAINED = (
    "Plain", "TiedBody", "SameModuleTwice", "TiedHead", "NoBias", "Unused", "FrozenLayer", "Masked",
    "Normed", "Spectral", "SpectralParametrized", "WeightNormed", "Ensemble",
)  # fmt: skip
FEW = ("TiedBody", "TiedHead", "NoBias", "FrozenLayer", "Normed", "SpectralParametrized", "Ensemble")
REFUSED = {
    "Double": "float64",
    "Complex": "complex64",
    "Half": "bfloat16",
    "TwoOutputs": "returns a tuple",
    "TwoInputs": "mask",
    "Empty": "last layer",
    "Twins": "same memory",
    "InfiniteObserver": "least",
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the networks and a data set of three clients, whose 30 samples are in order."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 4)).astype(np.float32), np.arange(sum(SIZES)) % 3
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    ends = np.cumsum((0, *SIZES))
    rows = ", ".join(f'"{k}": {[*range(a, b)]}' for k, (a, b) in enumerate(itertools.pairwise(ends)))
    (tmp_path / "p.json").write_text(f"{{{rows}}}")
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def federated(place: Path, name: str, rounds: int = ROUNDS, **changes):
    """Return a finished run of a network."""
    tree = {
        "rounds": rounds,
        "algorithm": "fedavg",
        "local": {"epochs": STEPS, "batch_size": 64, "lr": LR},
        "model": {"name": "custom", "path": f"nets.py:{name}", "head": "fc"},
        "data": {
            "source": {"name": "npz", "path": "d.npz", "normalise": "unit"},
            "scenario": {"name": "partition", "path": "p.json", "test": "all"},
        },
        "output": {"folder": str(place / "runs"), "client_models": True},
    }
    return mpifl.run({**tree, **changes})


def averaged(place: Path, start: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict after the rounds of FedAvg in plain PyTorch."""
    data = np.load(place / "d.npz")
    x, y = torch.from_numpy(data["x_train"]), torch.from_numpy(data["y_train"])
    server, n = start, torch.tensor(SIZES)
    for _ in range(ROUNDS):
        states = []
        for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
            client = copy.deepcopy(server).train()
            optimiser = torch.optim.SGD([p for p in client.parameters() if p.requires_grad], lr=LR)
            for _ in range(STEPS):
                optimiser.zero_grad()
                F.cross_entropy(client(xs), ys).backward()
                optimiser.step()
            states.append(client.state_dict())
        mean = {
            name: sum(w * s[name] for w, s in zip((n / n.sum()).tolist(), states, strict=True))
            if first.is_floating_point() and bool(first.isfinite().all())
            else first
            for name, first in states[0].items()
        }
        server.load_state_dict(mean)
    return server.state_dict()


@pytest.mark.parametrize("name", mostly_nightly(TRAINED, FEW))
def test_a_network_is_trained_as_a_plain_loop_trains_it(place, name):
    start = federated(place, name, 1, local={"epochs": 0}).model(client=0)
    found = federated(place, name).model(client=0).state_dict()
    expected = averaged(place, start)
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        if value.is_floating_point():
            assert_close(found[tensor], value, rtol=2e-4, atol=2e-5, msg=lambda m, t=tensor: f"{t}: {m}")


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_cannot_be_averaged_is_refused_in_one_line(place, name):
    with pytest.raises(UserError, match=REFUSED[name]) as caught:
        federated(place, name)
    assert "\n" not in str(caught.value)


def test_a_frozen_layer_stays_where_it_began(place):
    start = federated(place, "FrozenLayer", 1, local={"epochs": 0}).model(client=0)
    end = federated(place, "FrozenLayer").model(client=0)
    assert torch.equal(start.first.weight, end.first.weight)
    assert not torch.equal(start.first.bias, end.first.bias)


def test_what_is_sent_is_what_a_state_dict_holds_and_can_change(place):
    """Masked: 4 * 5 + 5 weights, 5 * 3 + 3 of the head, and a finite mask of 5."""
    run = federated(place, "Masked", 1)
    assert run.metrics["federation_bytes_up"].iloc[0] == len(SIZES) * 4 * (25 + 18 + 5)


# -- running variances ---------------------------------------------------------------------------------------

QSGD = {"payload": {"compression": {"name": "qsgd", "bits": 2}}}
STEPS_TOO_LONG = {
    "qsgd": QSGD,
    "random_k": {"payload": {"compression": {"name": "random_k", "share": 0.3}}},
    "qsgd, a part": {**QSGD, "algorithm": "fedper"},
    "scale": {"attack": {"name": "scale", "clients": [1], "factor": 50.0}},
    "sign_flip": {"attack": {"name": "sign_flip", "clients": [1], "factor": 50.0}},
    "noise": {"attack": {"name": "noise", "clients": [1], "sigma": 5.0}},
    "scaffold": {"algorithm": {"name": "scaffold", "server_lr": 20.0}},
    "fednova": {"algorithm": "fednova"},
    "fedavgm": {"algorithm": {"name": "fedavgm", "server_lr": 5.0}},
    "fedadam": {"algorithm": {"name": "fedadam", "server_lr": 1.0}},
    "pfedme": {"algorithm": {"name": "pfedme", "beta": 20.0, "inner_steps": 1, "local_rounds": STEPS}},
    "fedbuff": {"algorithm": {"name": "fedbuff", "server_lr": 20.0}},
    "fedbuff, stale": {
        "algorithm": {"name": "fedbuff", "server_lr": 20.0},
        "policy": {"name": "buffer", "size": 2},
        "rounds": 8,
    },
    "scaffold, stale": {
        "algorithm": {"name": "scaffold", "server_lr": 5.0},
        "policy": {"name": "buffer", "size": 2},
        "rounds": 8,
    },
    "cfl": {"algorithm": "cfl"},
    "median of changes": {"algorithm": {"name": "scaffold", "server_lr": 20.0}, "robust": "median"},
    "norm_bound of changes": {"algorithm": {"name": "fedbuff", "server_lr": 20.0}, "robust": "norm_bound"},
}
USUALLY = (
    *("random_k", "qsgd, a part", "sign_flip", "scaffold", "fedadam", "pfedme", "fedbuff, stale"),
    "median of changes",
)


@pytest.mark.parametrize("name", mostly_nightly(STEPS_TOO_LONG, USUALLY))
def test_running_variances_stay_between_those_that_arrive(place, name):
    """A client multiplies the initial 1 by 0.9 for each batch, and adds what it sees, a tenth of at most 1.

    (Hidden values are those of a tanh.)
    """
    changes = {"rounds": ROUNDS, **STEPS_TOO_LONG[name]}
    state = federated(place, "Normed", **changes).model(client=0).state_dict()
    assert float(state["bn.running_var"].min()) >= 0.9 ** (STEPS * changes["rounds"])
    assert float(state["bn.running_var"].max()) <= 1.0


def test_noise_of_privacy_is_refused_where_statistics_are_sent(place):
    private = {"privacy": {"name": "central", "clip": 1.0, "noise_multiplier": 1.0}}
    with pytest.raises(UserError, match=r"bn\.running_mean.*group norm"):
        federated(place, "Normed", **private)
    federated(place, "Normed", 1, privacy={"name": "central", "clip": 1.0, "noise_multiplier": 0.0})
    federated(place, "Plain", 1, **private)
