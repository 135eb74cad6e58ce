"""Whole rounds under masks: the rows of runs without, what ranks exchange, and the ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.aggregation.exact_sum import exact_sum, finish, spacings
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.single import Single
from mpifl.core.errors import MethodError, UserError
from mpifl.core.mixing import average
from mpifl.core.plan import Plan
from mpifl.core.rng import key
from mpifl.experiment.schema import EvaluationConfig, OutputConfig, Seeds, SystemConfig
from mpifl.models import MODELS
from mpifl.protection.privacy import CentralPrivacy
from mpifl.protection.secure_sum import MaskedSums, bytes_of_round
from mpifl.simulation.network import Links
from mpifl.simulation.policies import EveryArrival, PartialWork, Synchronous
from mpifl.traffic.compression import Payload
from mpifl.training.client import LocalClient


@pytest.mark.parametrize("options", [{}, {"bits": 52}, {"neighbours": 2}])
def test_rows_are_those_of_a_run_without_masks_bit_for_bit(options, tmp_path):
    plain = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path / "a", evaluate=False)
    masked = toy.run(
        CATALOGUE["fedavg"](),
        toy.Tiny(),
        tmp_path / "b",
        evaluate=False,
        secure_aggregation=MaskedSums(**options),
    )
    assert_close(masked.server.tables["model"], plain.server.tables["model"], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"num_clusters": 1}, {"num_clusters": 2, "share": "body"}])
def test_rows_of_clusters_too_where_each_has_two_members(options, tmp_path):
    """A row with one member stays as it is; in these federations every chosen row has two at least."""
    federation = toy.Tiny(8)
    plain = toy.run(CATALOGUE["ifca"](**options), federation, tmp_path / "a", evaluate=False)
    assert all(np.bincount(n["cluster"].astype(int)).min() != 1 for n in plain.notes)
    masked = toy.run(
        CATALOGUE["ifca"](**options),
        federation,
        tmp_path / "b",
        evaluate=False,
        secure_aggregation=MaskedSums(),
    )
    for name, rows in plain.server.tables.items():
        assert_close(masked.server.tables[name], rows, rtol=0, atol=0)


def two_drop() -> int:
    """Return a system seed under which two of six clients drop out in round 1 at a rate of 0.3."""
    for seed in range(1000):
        draws = [key(seed, "secure", "drop", 1, k).below(1 << 53) < 0.3 * 2**53 for k in range(6)]
        if sum(draws) == 2:
            return seed
    raise AssertionError("no such seed")


def test_with_two_dropouts_a_row_is_the_exact_mean_of_the_other_four_by_hand(tmp_path):
    """The same integers, added without masks: w_k from the plan for all six, the grid too."""
    seed, federation = two_drop(), toy.Tiny()
    done = toy.run(
        CATALOGUE["fedavg"](),
        federation,
        tmp_path,
        steps=1,
        evaluate=False,
        seed=Seeds(system=seed),
        secure_aggregation=MaskedSums(dropout=0.3, threshold=0.5),
    )
    left = [k for k in range(6) if key(seed, "secure", "drop", 1, k).below(1 << 53) >= 0.3 * 2**53]
    learner = done.server_step.config.clients.learner
    start, n = done.servers[0].tables["model"][0], federation.sizes[:, 0].astype(float)
    models = [
        LocalClient(k, federation, learner, toy.LOCAL).sgd(start, key(0, "visit", k, 0)).vector
        for k in range(6)
    ]
    told = (n / n.sum())[None]
    spacing = spacings(told, np.array([float(w.abs().max()) for w in models]))
    total = exact_sum([models[k] for k in left], told[:, left], spacing, len(start))
    expected = finish(total, spacing * (told.sum() / told[:, left].sum()), None)
    assert_array_equal(done.server.tables["model"].numpy(), expected.numpy())
    mean = sum(float(n[k]) * models[k].double() for k in left) / n[left].sum()
    assert_close(done.server.tables["model"][0], mean.float(), rtol=1e-6, atol=1e-9)
    assert done.server_step.config.filters.figures() == {"secure_dropped": 2, "secure_skipped": 0}
    up = done.server_step.ledger.up
    assert (up[left] == up[left[0]]).all()
    gone = np.setdiff1d(np.arange(6), left)
    assert (up[left[0]] - up[gone] == 8 * len(start) + 5 * 32).all(), "no upload, and no shares of others"


def test_lost_clients_are_in_no_figure_of_the_round(tmp_path):
    """Cohort, uploads, `train_loss` and an adaptive clip count the four of six whose uploads arrive."""
    seed, federation = two_drop(), toy.Tiny()
    changes = {"policy": Synchronous(), "evaluation": EvaluationConfig(every=1), "seed": Seeds(system=seed)}
    secure = MaskedSums(dropout=0.3, threshold=0.3)
    done = toy.events(CATALOGUE["fedavg"](), federation, tmp_path, 1, secure_aggregation=secure, **changes)
    assert done.engine is not None
    left = [k for k in range(6) if key(seed, "secure", "drop", 1, k).below(1 << 53) >= 0.3 * 2**53]
    (record,) = done.records
    assert record.cohort.tolist() == left
    assert record.accepted == [(k, 0) for k in left]
    assert done.engine.num_uploads.tolist() == [int(k in left) for k in range(6)]
    assert done.server_step.taken.tolist() == [int(k in left) for k in range(6)]
    start, clients = toy.run(CATALOGUE["fedavg"](), federation, tmp_path / "a", 0), range(6)
    learner = done.server_step.config.clients.learner
    losses = [
        LocalClient(k, federation, learner, toy.LOCAL)
        .sgd(start.servers[0].tables["model"][0], key(0, "visit", k, 0))
        .loss
        for k in clients
    ]
    n = federation.sizes[:, 0]
    assert record.train["train_loss"] == pytest.approx(np.average(np.array(losses)[left], weights=n[left]))

    clip, lr = 1e9, 0.5  # all updates are within
    privacy = CentralPrivacy(clip=clip, quantile=0.5, clip_lr=lr, noise_multiplier=0.0)
    done = toy.run(
        CATALOGUE["fedavg"](),
        federation,
        tmp_path / "b",
        1,
        privacy=privacy,
        secure_aggregation=secure,
        seed=Seeds(system=seed),
    )
    within = 4 * 0.5 / 6 + 0.5
    told = done.server_step.config.filters.told()
    assert told == {"clip": pytest.approx(clip * np.exp(-lr * (within - 0.5)))}


def test_what_ranks_send_is_uniform(tmp_path, monkeypatch):
    """What a rank gives to the reduction has each value of its highest 3 bits as often as the others; a run
    without masks has not.
    """
    seen: list[torch.Tensor] = []

    def reduce(self, sums, purpose, dtype=None):
        seen.append(sums.clone())

    monkeypatch.setattr(Single, "Reduce", reduce)
    figures = {}
    for name, more in {"plain": {}, "masked": {"secure_aggregation": MaskedSums()}}.items():
        seen.clear()
        toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path / name, evaluate=False, **more)
        bits = torch.cat([s.reshape(-1) for s in seen]).numpy().view(np.uint64) >> np.uint64(61)
        counts = np.bincount(bits.astype(int), minlength=8)
        figures[name] = float(((counts - len(bits) / 8) ** 2 / (len(bits) / 8)).sum())
    assert figures["masked"] < 40 < 100 < figures["plain"]  # chi squared, 7 degrees of freedom


def test_the_ledger_is_the_closed_form(tmp_path):
    """Beside it, what clients read."""
    config, payload = MaskedSums(bits=40), Payload(header_bytes=7)
    done = toy.run(
        CATALOGUE["fedavg"](),
        toy.Tiny(),
        tmp_path,
        evaluate=False,
        secure_aggregation=config,
        payload=payload,
    )
    d = done.server.tables["model"].shape[1]
    down, up = bytes_of_round(6, d, config, 7)
    assert done.server_step.ledger.total("up") == 3 * up
    assert done.server_step.ledger.total("down") == 3 * (down + 6 * (4 * d + 7))


@pytest.mark.parametrize(
    ("algorithm", "deadline_s", "all_of_it"),
    [
        (CATALOGUE["fedavg"](), 3.0, True),
        (CATALOGUE["fedavg"](), 2.9, False),
        (CATALOGUE["ifca"](num_clusters=2), 2.9, False),  # groups are found in training: one of all counts
    ],
)
def test_what_the_protocol_sends_counts_towards_a_deadline(algorithm, deadline_s, all_of_it, tmp_path):
    """A second each to download, with the others' keys and shares, to compute, and to upload, masked."""
    d = toy.context_of(toy.config_of(algorithm), toy.Tiny()).problem.layout.size
    down, up = (total / 6 for total in bytes_of_round(6, d, MaskedSums(), 7))
    rows = getattr(algorithm, "num_clusters", 1)
    done = toy.events(
        algorithm,
        toy.Tiny(),
        tmp_path,
        1,
        policy=PartialWork(deadline_s=deadline_s),
        network=Links(uplink_bytes_s=up, downlink_bytes_s=down + (4 * d + 7) * rows),
        secure_aggregation=MaskedSums(),
        payload=Payload(header_bytes=7),
    )
    assert (done.reported[1]["work_mean"] == 1.0) == all_of_it
    assert done.times[1] <= deadline_s


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam"])
def test_a_row_that_is_given_up_stays_where_it_is(name, tmp_path):
    """Everybody must be left and about half are: no row moves, by no momentum either."""
    lost = MaskedSums(dropout=0.5, threshold=1.0)
    done = toy.run(CATALOGUE[name](), toy.Tiny(), tmp_path / "a", 1, evaluate=False)
    start = done.server
    step, sampler = toy.start(CATALOGUE[name](), toy.Tiny(), tmp_path / "b", secure_aggregation=lost)
    step.initialize()
    step.distribute(start)
    server, _ = toy.step_of(step, start, sampler(2))
    assert step.config.filters.figures()["secure_skipped"] == 1
    assert server.version == start.version + 1
    toy.same(server.tables, start.tables)


def test_running_statistics_need_means_that_masks_would_hide(tmp_path):
    """Sums of clipped updates over a fixed number, and mixings of a method that are no means."""
    changes = {"model": MODELS["resnet20"](), "secure_aggregation": MaskedSums()}
    privacy = CentralPrivacy(clip=1.0, noise_multiplier=0.0)
    with pytest.raises(UserError, match=r"secure_aggregation, privacy.*running statistics"):
        toy.start(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, privacy=privacy, **changes)

    class Twice(FedAvg):
        def aggregate(self, server, notes):
            mean = average(notes)
            return Plan([replace(mean, weights=2 * mean.weights, keep=np.array([-1.0]))])

    with pytest.raises(MethodError, match="no mean of the uploads"):
        toy.run(Twice(), toy.Tiny(4), tmp_path, 1, evaluate=False, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cfl", {}, "needs more than sums"),
        ("ucfl", {}, "needs more than sums"),
        ("fedavg", {"policy": EveryArrival()}, "use policy rounds"),
        ("fedavg", {"system": SystemConfig(sums="fast")}, "system.sums"),
        ("fedavg", {"system": SystemConfig(collective="gather")}, "system.collective"),
        ("fedavg", {"payload": Payload("bfloat16")}, "payload.dtype"),
        ("fedavg", {"evaluation": EvaluationConfig(distances=True)}, "evaluation.distances"),
        ("fedavg", {"output": OutputConfig(updates=True)}, "output.updates"),
    ],
)
def test_what_needs_single_uploads_is_refused_in_one_line(name, changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        toy.start(CATALOGUE[name](), toy.Tiny(), tmp_path, secure_aggregation=MaskedSums(), **changes)
