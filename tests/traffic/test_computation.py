"""The ledger of computation, against counts by hand.

The network is an MLP 16 -> 8 -> 3. A sample's forward pass takes 2 (16 8 + 8 3) = 304 FLOPs, its embedding
2 (16 8) = 256. A forward and backward pass adds as many for the gradients of the weights, and 2 (8 3) = 48
for that of the hidden layer: 304 + 304 + 48 = 656. Clients 0 and 1 hold 8 and 11 training samples, 6
validation and 9 test samples, and train in batches of 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy

from mpifl.algorithms.ccfl import CCFL
from mpifl.algorithms.emdcfl import EMDCFL
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.fedsoft import FedSoft
from mpifl.algorithms.ifca import IFCA
from mpifl.algorithms.ucfl import UCFL
from mpifl.core.algorithm import Algorithm
from mpifl.core.computation import Computation, Purpose, Work
from mpifl.experiment.schema import SystemConfig
from mpifl.traffic.computation import ComputationLedger

FORWARD, BACKWARD, EMBED = 304, 656, 256
SAMPLES = (8, 11)
Found = Mapping[tuple[int, Purpose], Work]


def of_clients(ledger: ComputationLedger) -> Found:
    """Return (client, purpose) -> work, without evaluation."""
    table = ledger.per_client()
    rows = zip(*(table[name].tolist() for name in ("client", "purpose", *Work._fields)), strict=True)
    return {(k, p): Work(*figures) for k, p, *figures in rows if p != "evaluation"}


def passes(times: int, samples: int) -> Work:
    """Return so many backward passes of so many samples in all."""
    return Work(0, 0, times, samples, BACKWARD * samples)


def ledger_of(
    algorithm: Algorithm, folder: Any, steps: int = 2, plain: bool = False, clients: int = 2, **changes: Any
) -> Any:
    """Return the server step after some steps, with the method's hooks observed or, if `plain`, not."""
    federation = toy.Tiny(clients)
    if not plain:
        return toy.run(algorithm, federation, folder, steps, **changes).server_step
    server_step, sampler = toy.start(algorithm, federation, folder, **changes)
    server = server_step.initialize()
    for step in range(1, steps + 1):
        server, _ = toy.step_of(server_step, server, sampler(step))
    server_step.evaluate(server, np.arange(clients))
    return server_step


BACKENDS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "PyTorch": {"system": SystemConfig(kernels=False)},
    "stacked": {"system": SystemConfig(kernels=False, stack=2)},
    "plain visits": {"plain": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedavg_trains_each_sample_once_a_round(backend, tmp_path):
    step = ledger_of(FedAvg(), tmp_path, **BACKENDS[backend])
    expected = {(0, "training"): passes(2 * 2, 2 * 8), (1, "training"): passes(2 * 3, 2 * 11)}
    assert of_clients(step.computation) == expected
    assert step.computation.of_client(1, "evaluation") == Work(1, 9, 0, 0, FORWARD * 9)
    assert step.computation.entries[1, "training"] == passes(5, 19)
    assert step.computation.total("server") == Work()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ifca_also_computes_the_loss_of_four_models(backend, tmp_path):
    step = ledger_of(IFCA(num_clusters=4), tmp_path, clients=4, **BACKENDS[backend])
    expected = {}
    for k, (n, batches) in enumerate(zip((8, 11, 14, 17), (2, 3, 3, 4), strict=True)):
        expected[k, "training"] = passes(2 * batches, 2 * n)
        expected[k, "choice"] = Work(2 * 4, 2 * 4 * n, 0, 0, 2 * 4 * FORWARD * n)
    assert of_clients(step.computation) == expected


def test_fedsoft_computes_the_loss_of_all_centres_every_second_round(tmp_path):
    step = ledger_of(FedSoft(num_clusters=3), tmp_path, steps=4, clients=4)
    n = SAMPLES[1]
    assert step.computation.of_client(1, "choice") == Work(2 * 3, 2 * 3 * n, 0, 0, 2 * 3 * FORWARD * n)
    assert step.computation.of_client(1, "training") == passes(4 * 3, 4 * n)


@pytest.mark.parametrize("backend", ["kernels", "PyTorch"])
def test_ucfl_parallel_is_as_many_trainings_as_there_are_streams(backend, tmp_path):
    """Section V-E: m_t-fold work. Before it, a gradient of all samples, and of 2 mini-batches of 4."""
    method = UCFL(streams=2, parallel=True, noise_batch=4)
    step = ledger_of(method, tmp_path, **BACKENDS[backend])
    expected = {}
    for k, (n, batches) in enumerate(zip(SAMPLES, (2, 3), strict=True)):
        expected[k, "training"] = passes(2 * 2 * batches, 2 * 2 * n)
        expected[k, "statistics"] = passes(1 + 2, n + 2 * 4)
    assert of_clients(step.computation) == expected
    once = ledger_of(UCFL(streams=2, noise_batch=4), tmp_path / "once").computation.total("training")
    assert step.computation.total("training") == once.times(2)


def test_ccfl_computes_at_the_server(tmp_path):
    """D_k holds 12 samples: 5 epochs of 3 batches for each of 2 models, and their losses.

    An upload costs its loss on both D_k, and that of each cluster model that it changes.
    """
    run = toy.run(CCFL(bar_loss=0), toy.Tiny(4), tmp_path, steps=3)
    found = run.server_step.computation
    changed = sum(
        not torch.equal(a, b)
        for old, new in zip(run.servers[:-1], run.servers[1:], strict=True)
        for a, b in zip(old.tables["model"], new.tables["model"], strict=True)
    )
    assert changed > 0
    losses = 2 + 3 * 2 + changed
    trained = passes(2 * 5 * 3, 2 * 5 * 12)
    assert found.total("server") == trained.plus(Work(losses, 12 * losses, 0, 0, 12 * FORWARD * losses))
    visits = [(a["client"], toy.Tiny(4).sizes[a["client"], 0]) for a in run.arrivals]
    samples = int(sum(n for _, n in visits))
    batches = int(sum(-(-n // 5) for _, n in visits))
    assert found.total("training") == passes(batches, samples)
    assert found.total("choice", "statistics") == Work()


def test_emdcfl_embeds_its_own_data_and_answers_each_other_client(tmp_path):
    """Once: training and validation data under the own extractor, validation data under that of the other."""
    step = ledger_of(EMDCFL(), tmp_path)
    expected = {}
    for k, (n, batches) in enumerate(zip(SAMPLES, (2, 3), strict=True)):
        expected[k, "training"] = passes(2 * batches, 2 * n)
        expected[k, "statistics"] = Work(3, n + 6 + 6, 0, 0, EMBED * (n + 6 + 6))
    assert of_clients(step.computation) == expected


def test_evaluation_on_training_data_and_after_tuning_is_evaluation(tmp_path):
    changes = {"evaluation": toy.EvaluationConfig(train=True, finetune_epochs=2)}
    step = ledger_of(FedAvg(), tmp_path, steps=1, **changes)
    expected = Work(3, 9 + 8 + 9, 2 * 2, 2 * 8, FORWARD * 26 + BACKWARD * 16)
    assert step.computation.of_client(0, "evaluation") == expected
    assert step.computation.of_client(0, "training") == passes(2, 8)


@dataclass(frozen=True)
class Failing(FedAvg):
    """Client 1 fails after its training."""

    def local_update(self, message, state, client, key):
        made = super().local_update(message, state, client, key)
        if client.id == 1:
            raise RuntimeError("no battery")
        return made


@pytest.mark.parametrize("stack", [1, 2])
def test_a_client_that_fails_has_worked_once(stack, tmp_path):
    """It is tried twice by the simulator; a real one fails once."""
    system = SystemConfig(kernels=False, stack=stack)
    step = ledger_of(Failing(), tmp_path, steps=1, on_client_error="drop", system=system)
    assert [d.client for d in step.dropped] == [1]
    assert of_clients(step.computation) == {(0, "training"): passes(2, 8), (1, "training"): passes(3, 11)}


# -- the ledger ----------------------------------------------------------------------------------------------


def table(*rows: tuple[int, Purpose, Work]) -> np.ndarray:
    """Return the table of some counts."""
    found = Computation()
    for row in rows:
        found.add(*row)
    return found.table


ONE, TWO = Work(1, 10, 0, 0, 100), Work(0, 0, 2, 20, 2000)


def test_what_was_not_committed_is_rolled_back():
    ledger = ComputationLedger(3)
    ledger.add(0, table((0, "statistics", ONE), (-1, "server", TWO)))
    ledger.commit()
    before = {name: array.copy() for name, array in ledger.state_dict().items()}
    ledger.add(1, table((0, "statistics", ONE), (2, "training", TWO), (-1, "server", ONE)))
    ledger.add(0, table((0, "statistics", TWO)))
    ledger.roll_back()
    after = ledger.state_dict()
    for name, array in before.items():
        assert_array_equal(after[name], array)
    assert not after["of_training"].any()


def test_one_client_in_the_tables_of_several_ranks_is_added_up():
    ledger = ComputationLedger(3)
    ledger.add(1, np.concatenate([table((2, "statistics", ONE)), table((2, "statistics", ONE))]))
    assert ledger.of_client(2, "statistics") == ONE.times(2)


def test_totals_are_exact_beyond_64_bits():
    ledger, huge = ComputationLedger(3), 2**62 + 1
    many = [(k, "training", Work(flops=huge)) for k in range(3)]
    ledger.add(1, table(*many))  # type: ignore[arg-type]
    assert ledger.total("training").flops == ledger.columns()["flops"] == 3 * huge
    again = ComputationLedger(3)
    again.load_state_dict(ledger.state_dict())
    assert again.rows() == ledger.rows()
    assert again.total("training").flops == 3 * huge


def test_counts_of_some_clients_only_and_totals_of_all():
    ledger = ComputationLedger(4)
    ledger.remember(np.array([1, 3]))
    ledger.add(1, table((0, "training", ONE), (1, "training", TWO), (3, "choice", ONE)))
    assert of_clients(ledger) == {(1, "training"): TWO, (3, "choice"): ONE}
    assert ledger.total("training") == ONE.plus(TWO)


def test_columns_leave_out_evaluation_and_server():
    ledger = ComputationLedger(1)
    rows: list[tuple[int, Purpose, Work]] = [(0, "training", TWO), (0, "choice", ONE), (0, "evaluation", ONE)]
    ledger.add(1, table(*rows, (-1, "server", ONE)))
    found = ledger.columns()
    assert [found[f"flops_{p}"] for p in ("training", "choice", "statistics", "evaluation", "server")] == [
        *(2000, 100, 0, 100, 100)
    ]
    assert found["flops"] == 2100
    assert (found["forward_passes"], found["backward_samples"]) == (1, 20)
