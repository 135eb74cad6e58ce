"""Clients that train in their own ways: by number, by range and by device; with every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import toy
from support.each import for_each
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.experiment import build
from mpifl.experiment.loader import dump, load
from mpifl.experiment.schema import SystemConfig
from mpifl.experiment.section_checks import check_sections
from mpifl.forecast.traffic import forecast
from mpifl.runtime.server_step import ServerStep
from mpifl.simulation.client_devices import Classes, DeviceClass
from mpifl.training.backend import epoch_orders
from mpifl.training.config import LocalConfig
from mpifl.training.per_client import LocalChanges, local_configs

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
LOCAL = LocalConfig(epochs=2, batch_size=10, lr=0.1, steps=7)
WAYS = {"0": LocalChanges(epochs=3), "2-3": LocalChanges(lr=0.01, batch_size=3), "5": LocalChanges(steps=2)}
SPLIT = Classes({"weak": DeviceClass(0.5), "strong": DeviceClass(0.5)})


def test_a_clients_number_wins_over_its_device_and_epochs_over_steps():
    rules = {"weak": LocalChanges(epochs=1, lr=0.5), "1-2": LocalChanges(lr=0.2)}
    found = local_configs(LOCAL, rules, ["weak", "weak", "strong", "strong"], 4)
    assert {k: (c.epochs, c.steps, c.lr) for k, c in found.items()} == {
        0: (1, None, 0.5),
        1: (1, None, 0.2),
        2: (2, 7, 0.2),
    }


@for_each(
    ("local", "num_samples", "single", "steps", "trained"),
    [
        (LocalConfig(epochs=2, batch_size=10), 25, False, 6, 50),  # 10 + 10 + 5, twice
        (LocalConfig(steps=4, batch_size=10), 25, False, 4, 35),  # 10 + 10 + 5, and 10
        (LocalConfig(steps=3, batch_size=10), 25, False, 3, 25),
        (LocalConfig(steps=3, batch_size=10), 0, False, 0, 0),
        (LocalConfig(epochs=4, batch_size=8), 9, False, 8, 36),  # 8 + 1
        (LocalConfig(epochs=4, batch_size=8), 9, True, 4, 32),  # 8
        (LocalConfig(steps=3, batch_size=4), 9, True, 3, 12),  # 4 + 4, and 4
        (LocalConfig(steps=3, batch_size=8), 1, True, 0, 0),
    ],
)
def test_steps_and_samples_of_a_visit_by_hand(local, num_samples, single, steps, trained):
    """With batch norm, a last batch of one sample is left out."""
    found = local.num_steps(num_samples, single), local.num_trained(num_samples, single)
    assert found == (steps, trained)
    assert sum(map(len, epoch_orders(num_samples, local, key(0), single))) == trained


@for_each(
    ("rules", "message"),
    [
        ("{0: {optimizer: adam}}", "per_client.0.optimizer = 'adam': unknown key; known: augment, batch"),
        ("{0: {epoch: 2}}", "did you mean 'epochs'"),
        ("{0: {lr: -1}}", "per_client.0.lr = -1.0: must be above 0"),
        ("{0: {epochs: 1, steps: 1}}", "per_client.0.steps = 1: epochs are given as well"),
        ("{weak: {epochs: 1}}", "per_client = 'weak': use the number of a client"),
        ("{3-1: {epochs: 1}}", "per_client = 3-1: use the number"),
        ("{0-3: {epochs: 1}, 2: {lr: 1}}", "per_client = 2: client 2 is in 0-3 as well"),
        ("[0]", "per_client = .*must be a mapping"),
    ],
)
def test_what_cannot_differ_is_refused(rules, message):
    with pytest.raises(UserError, match=message):
        check_sections(load(TINY, ["--per_client", rules]))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedavg", {"per_client": {"6": LocalChanges(lr=1.0)}}, "per_client = 6: there are 6 clients"),
        (
            "apfl",
            {"per_client": {"1": LocalChanges(momentum=0.5)}},
            "per_client.1.momentum = 0.5: this method",
        ),
        (
            "fedavg",
            {
                "per_client": {"1": LocalChanges(momentum=0.0)},
                "local": LocalConfig(keep_optimizer=True, momentum=0.9),
            },
            "local.keep_optimizer = True: SGD without momentum",
        ),
    ],
)
def test_what_does_not_fit_the_population_or_the_method_is_refused(method, changes, message):
    with pytest.raises(UserError, match=message):
        toy.context_of(toy.config_of(CATALOGUE[method](), **changes), toy.Tiny())


def test_rules_are_written_and_read_again():
    found = load(TINY, ["--per_client", "{0: {epochs: 2}, 4-7: {lr: 1e-3}}"])
    assert found.per_client == {"0": LocalChanges(epochs=2), "4-7": LocalChanges(lr=0.001)}
    assert dump(found).count("epochs: 2") == 1


def local_models(folder, **changes) -> torch.Tensor:
    """Return the models of Local after two steps: each client's training, by itself."""
    return toy.run(CATALOGUE["local"](), toy.Tiny(), folder, steps=2, **changes).models()


@pytest.mark.parametrize("kernels", [True, False])
def test_each_client_trains_as_if_all_trained_in_its_way(kernels, tmp_path):
    """Row k of a mixed run is row k of the run in which everybody has the options of client k."""
    system = SystemConfig(kernels=kernels, device="cpu")
    mixed = local_models(tmp_path / "mixed", per_client=WAYS, system=system)
    plain = local_models(tmp_path / "plain", system=system)
    for k, name in enumerate(["0", None, "2-3", "2-3", None, "5"]):
        local = toy.LOCAL if name is None else WAYS[name].of(toy.LOCAL, "")
        alone = local_models(tmp_path / f"{k}", local=local, system=system)
        assert_close(mixed[k], alone[k], rtol=0, atol=0)
        assert torch.equal(mixed[k], plain[k]) == (name is None)


def test_stacked_clients_keep_their_ways(tmp_path):
    """Clients of one stack with other numbers of steps, rates and sizes of a batch: as one by one."""
    one = local_models(tmp_path / "one", per_client=WAYS, system=SystemConfig(kernels=False, device="cpu"))
    system = SystemConfig(kernels=False, device="cpu", stack=6)
    assert_close(local_models(tmp_path / "all", per_client=WAYS, system=system), one, rtol=1e-4, atol=1e-5)


def test_rules_of_devices_reach_their_clients_and_balance_the_ranks(tmp_path):
    rules = {"weak": LocalChanges(epochs=4)}
    config = toy.config_of(CATALOGUE["fedavg"](), devices=SPLIT, per_client=rules)
    context = toy.context_of(config, toy.Tiny())
    weak = {k for k, name in enumerate(context.duration.devices) if name == "weak"}
    assert len(weak) == 3
    assert {k for k in range(6) if context.local_of(k).epochs == 4} == weak
    step: ServerStep = build.build_server_step(context, toy.ClientStore("test", str(tmp_path)))
    sizes = toy.Tiny().sizes[:, 0]
    assert step.costs.tolist() == [n * (4 if k in weak else 1) for k, n in enumerate(sizes.tolist())]


def test_the_forecast_of_traffic_knows_the_clients(tmp_path):
    """Bytes do not depend on how long a client trains; the ledger agrees."""
    plain = toy.context_of(toy.config_of(CATALOGUE["fedavg"]()), toy.Tiny())
    other = toy.context_of(toy.config_of(CATALOGUE["fedavg"](), per_client=WAYS), toy.Tiny())
    assert forecast(other).total == forecast(plain).total
    step, sampler = toy.start(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, per_client=WAYS)
    toy.step_of(step, step.initialize(), sampler(1))
    found = (step.ledger.total("down"), step.ledger.total("up"))
    assert found == forecast(other).per_round
