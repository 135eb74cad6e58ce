"""Whole steps with stacked clients: methods of every kind, and who stands in which stack."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import toy
from support.cases import OPTIONS
from support.nightly import mostly_nightly

from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.experiment.schema import SystemConfig
from mpifl.runtime.scheduler import Scheduler
from mpifl.simulation.policies import EveryArrival

# plain, a direction, state, two trainings a visit, parts, a loss of its own, steps of one batch, a probe
TOGETHER = ("fedavg", "fedprox", "scaffold", "ditto", "fedrep", "fedcuau", "fedem", "pfedme", "emdcfl", "cfl")


@pytest.mark.parametrize("name", mostly_nightly(TOGETHER, ["scaffold", "fedrep", "fedem", "emdcfl"]))
def test_a_method_finds_stacked_what_it_finds_alone(name, tmp_path):
    found = []
    for stack in (1, 4):
        algorithm, folder = CATALOGUE[name](**OPTIONS.get(name, {})), tmp_path / str(stack)
        system = SystemConfig(stack=stack)
        found.append(toy.run(algorithm, toy.Tiny(), folder, steps=2, evaluate=False, system=system))
    alone, stacked = found
    for table, rows in alone.server.tables.items():
        scale = float(rows.abs().max()) if rows.numel() else 1.0
        torch.testing.assert_close(stacked.server.tables[table], rows, rtol=0, atol=1e-3 * scale)
    assert stacked.server_step.ledger.up.tolist() == alone.server_step.ledger.up.tolist()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_block_of_clients_stays_together_wherever_it_is_trained(workers):
    ranks, clients = list(range(1, workers + 1)), np.arange(0, 22, 2)  # blocks of 4, 4 and 3
    scheduler = Scheduler([0] * (workers + 1), ranks, np.ones(30, int), stack=4)
    owner = scheduler.assign(clients, np.arange(11.0))
    assert [len(np.unique(owner[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(np.unique(owner)) == min(workers, 3)


def test_clients_at_home_on_several_nodes_are_not_stacked():
    scheduler = Scheduler([0, 0, 1], [1, 2], np.ones(6, int), pinned=True, stack=2)
    with pytest.raises(UserError, match=r"system\.stack"):
        scheduler.assign(np.arange(6), np.ones(6))


def test_what_cannot_be_stacked_is_refused_or_left_alone(tmp_path):
    fedavg, stack = CATALOGUE["fedavg"](), SystemConfig(stack=2)
    dropout = {"model": toy.config_of(fedavg).model, "system": stack, "policy": EveryArrival()}
    with pytest.raises(UserError, match="policy rounds"):
        toy.start(fedavg, toy.Tiny(), tmp_path, Single(), **dropout)
    measured, _ = toy.start(fedavg, toy.Tiny(), tmp_path, Single(), system=SystemConfig(stack=0))
    assert measured.config.stack in (1, 4, 6)
