"""What a run says before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import toy

from mpifl.algorithms.fedavg import FedAvg
from mpifl.comm.single import Single
from mpifl.driver.run import announce
from mpifl.experiment import placement
from mpifl.experiment.schema import SystemConfig


@pytest.mark.parametrize(
    ("device", "graphs", "optimizer", "told"),
    [
        ("cuda:0", None, "sgd", True),
        ("cuda:0", False, "sgd", True),
        ("cpu", None, "sgd", False),
        ("cuda:0", True, "sgd", False),
        ("cuda:0", None, "adam", False),
    ],
)
def test_on_a_gpu_graphs_are_named_where_they_would_help(device, graphs, optimizer, told, monkeypatch):
    said: list[str] = []
    here = placement.place(Single())
    monkeypatch.setattr("mpifl.driver.run.line", lambda identity: "")
    context = toy.context_of(toy.config_of(FedAvg()), toy.Tiny())
    changed = replace(
        context.config,
        system=SystemConfig(cuda_graphs=graphs),
        local=replace(context.config.local, optimizer=optimizer, momentum=0.0),
    )
    announce(replace(context, config=changed, places=(here | {"device": device},)), said.append, False)
    assert any("--system.cuda_graphs true" in text for text in said) == told
