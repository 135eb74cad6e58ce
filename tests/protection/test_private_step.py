"""Central privacy in whole steps: by hand, as an identity, and where nobody comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy, clipped
from mpifl.protection.private_step import PrivateStep
from mpifl.runtime.hook_errors import ClientError
from mpifl.simulation.policies import EveryArrival
from mpifl.simulation.sampling import Sampler
from mpifl.traffic.compression import Payload
from mpifl.training.client import LocalClient

NO_NOISE = CentralPrivacy(noise_multiplier=0.0)


def last(name: str, folder, federation=None, steps: int = 2, **changes: Any) -> torch.Tensor:
    """Return the table `model` after some steps."""
    options = changes.pop("options", {})
    done = toy.run(CATALOGUE[name](**options), federation or toy.Tiny(equal=True), folder, steps, **changes)
    return done.server.tables["model"]


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "ditto"])
def test_without_clip_and_noise_rows_are_those_of_a_run_without_privacy(name, tmp_path):
    """Clients of equal sizes weigh the same anyhow."""
    federation = toy.Tiny(8, equal=True)  # 1/8 is exact
    plain = last(name, tmp_path / "a", federation, participation=0.5)
    assert_close(
        last(name, tmp_path / "b", federation, participation=0.5, privacy=NO_NOISE), plain, rtol=0, atol=0
    )


def test_ifca_without_clip_and_noise_and_with_exact_counts_is_ifca(tmp_path):
    exact = CentralPrivacy(noise_multiplier=0.0, count_noise=0.0)
    options = {"num_clusters": 3}
    plain = last("ifca", tmp_path / "a", toy.Tiny(), options=options)
    private = last("ifca", tmp_path / "b", toy.Tiny(), options=options, privacy=exact)
    assert_close(private, plain, rtol=0, atol=0)


def trained(federation, learner, start, k: int, clip: float) -> torch.Tensor:
    """Return the clipped update of client k's first visit, float64."""
    w = LocalClient(k, federation, learner, toy.LOCAL).sgd(start, key(0, "visit", k, 0)).vector
    return clipped({"w": w}, {"w": start}, clip)["w"].double() - start.double()


def test_a_step_is_the_sum_of_clipped_updates_and_noise_over_m_by_hand(tmp_path):
    """Unequal clients count the same; the noise is z C / m times the draws at its address."""
    federation, clip, z = toy.Tiny(), 0.05, 0.7
    done = toy.run(
        CATALOGUE["fedavg"](), federation, tmp_path, steps=1, privacy=CentralPrivacy(clip, z), evaluate=False
    )
    learner = done.server_step.config.clients.learner
    start = done.servers[0].tables["model"][0]
    total = sum(trained(federation, learner, start, k, clip) for k in range(6))
    draws = key(0, "privacy", 1, "noise", "model", 0).numpy().standard_normal(len(start))
    expected = start.double() + (total + z * clip * torch.from_numpy(draws)) / 6
    assert_close(done.server.tables["model"][0], expected.float(), rtol=1e-5, atol=1e-7)


def test_rows_of_ifca_get_noise_of_z_c_over_m_by_k_chosen_or_not(tmp_path):
    """Five rows for six clients: at least one stays empty in a step, and moves by noise alone."""
    clip, z = 0.05, 2.0
    algorithm = CATALOGUE["ifca"](num_clusters=5)
    done = toy.run(algorithm, toy.Tiny(), tmp_path, steps=1, privacy=CentralPrivacy(clip, z), evaluate=False)
    before, after = done.servers[0].tables["model"], done.server.tables["model"]
    chosen = np.unique(done.notes[0]["cluster"].astype(int))
    empty = np.setdiff1d(np.arange(5), chosen)
    assert len(empty)
    d = before.shape[1]
    for k in empty:
        assert_allclose(float((after[k] - before[k]).double().std()), z * clip / (6 / 5), rtol=5 / d**0.5)


@pytest.mark.parametrize("number", [2, 5])
def test_noisy_counts_divide_the_rows_and_cost_the_updates(number, tmp_path):
    """The rows' denominators are members + noise at its address, at least 1: some of five rows have less."""
    privacy = CentralPrivacy(0.05, 0.5, count_noise=1.0)
    algorithm = CATALOGUE["ifca"](num_clusters=number)
    done = toy.run(algorithm, toy.Tiny(), tmp_path, steps=1, privacy=privacy, evaluate=False)
    members = np.bincount(done.notes[0]["cluster"].astype(int), minlength=number)
    noise = key(0, "privacy", 1, "count").numpy().standard_normal(number)
    denominators = np.maximum(members + 1.0 * noise, 1.0)
    assert (min(denominators) == 1.0) == (number == 5)
    z = (0.5**-2 - 1.0) ** -0.5
    (private,) = done.server_step.config.filters.filters
    assert_allclose(private._scales["model"], z * 0.05 / denominators)


def test_the_clip_follows_the_quantile(tmp_path):
    """Without noise: all six longer than 1e-4, so C grows by exp(0.2 * 0.5) in each of three rounds."""
    privacy = CentralPrivacy(1e-4, 0.0, quantile=0.5)
    done = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, privacy=privacy, evaluate=False)
    assert_allclose(done.server_step.config.filters.told()["clip"], 1e-4 * np.exp(0.3))
    ledger = done.server_step.ledger
    d = done.server.tables["model"].shape[1]
    assert ledger.total("up", 1) == 6 * (4 * d + 4), "and each client sends one number more"


@pytest.mark.parametrize("quantile_noise", [None, 2.0])
def test_the_share_within_the_clip_is_of_the_expected_number_of_clients(quantile_noise):
    """Three of five expected clients came, two within: (0.5 + 0.5 - 0.5 + noise) / 5 + 0.5, quantile 0.3.

    The number that came is not public. Without noise on updates there is none on the share.
    """
    z = 0.0 if quantile_noise is None else 0.1
    privacy = CentralPrivacy(
        2.0, z, sampling="poisson", quantile=0.3, clip_lr=0.5, quantile_noise=quantile_noise
    )
    step = PrivateStep(privacy, CATALOGUE["fedavg"](), 5, key(7))
    notes = byhand.notes([4, 4, 4], within_clip=[1.0, 0.0, 1.0])
    step._follow(privacy, notes, 3, notes.client[:0])
    noise = 0.0 if quantile_noise is None else 2.0 * float(key(7, 3, "quantile").numpy().standard_normal())
    step.commit()
    assert_allclose(step.clip, 2.0 * np.exp(-0.5 * ((0.5 + noise) / 5 + 0.5 - 0.3)), rtol=1e-12)


def test_local_noise_of_each_client_is_averaged_with_the_methods_weights(tmp_path):
    federation, privacy = toy.Tiny(), LocalPrivacy(0.05, 1.0)
    done = toy.run(CATALOGUE["fedavg"](), federation, tmp_path, steps=1, privacy=privacy, evaluate=False)
    learner = done.server_step.config.clients.learner
    start, n = done.servers[0].tables["model"][0], federation.sizes[:, 0]
    expected = start.double()
    for k in range(6):
        draws = key(0, "visit", k, 0, "privacy", "model").numpy().standard_normal(len(start))
        update = trained(federation, learner, start, k, 0.05) + 0.05 * torch.from_numpy(draws)
        expected = expected + update * float(n[k] / n.sum())
    assert_close(done.server.tables["model"][0], expected.float(), rtol=1e-5, atol=1e-6)


def test_local_privacy_runs_with_arrivals(tmp_path):
    done = toy.events(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, privacy=LocalPrivacy(0.05, 1.0))
    assert done.server.version == 3


def test_poisson_cohorts_differ_in_size_and_a_round_without_clients_is_noise_alone(tmp_path):
    sampler = Sampler(20, 5, key(0), poisson=True)
    sizes = [len(sampler(t)) for t in range(1, 2001)]
    assert_allclose(np.mean(sizes), 5, atol=5 * (20 * 0.25 * 0.75 / 2000) ** 0.5)
    assert min(sizes) < 3 < 7 < max(sizes)
    assert_array_equal(sampler(7), sampler(7))

    privacy = CentralPrivacy(0.05, 1.0, sampling="poisson")
    step, _ = toy.start(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, participation=0.5, privacy=privacy)
    first = step.initialize()
    assert first is not None
    server, notes = toy.step_of(step, first, np.zeros(0, np.int64))
    assert server is not None
    assert notes is not None
    assert (server.version, len(notes)) == (1, 0)
    draws = key(0, "privacy", 1, "noise", "model", 0).numpy().standard_normal(server.tables["model"].shape[1])
    expected = first.tables["model"][0].double() + torch.from_numpy(draws) * 0.05 / 3
    assert_close(server.tables["model"][0], expected.float(), rtol=1e-6, atol=1e-8)
    server, _ = toy.step_of(step, server, np.array([1, 4]))
    assert server is not None
    assert server.version == 2


class FailingAt(FedAvg):
    """FedAvg of which all clients fail in their first visit, and then clients 0 to 2."""

    def local_update(self, message, state, client, key):
        """Fail, or train."""
        if message.step == 1 or client.id < 3:
            raise RuntimeError("no")
        return super().local_update(message, state, client, key)


def test_a_round_whose_clients_all_fail_is_noise_alone_under_central_privacy(tmp_path):
    """They count as updates of 0, and D stays; under local privacy nobody adds noise, and the run ends."""
    privacy, world = CentralPrivacy(0.05, 0.7), {"on_client_error": "drop", "evaluate": False}
    done = toy.run(FailingAt(), toy.Tiny(), tmp_path / "c", 2, privacy=privacy, **world)
    start, one = (s.tables["model"][0] for s in done.servers[:2])
    draws = key(0, "privacy", 1, "noise", "model", 0).numpy().standard_normal(len(start))
    expected = start.double() + 0.7 * 0.05 * torch.from_numpy(draws) / 6
    assert_close(one, expected.float(), rtol=1e-6, atol=1e-8)
    assert [len(notes) for notes in done.notes] == [0, 3]
    dropped = [(d.step, d.client) for d in done.server_step.dropped]
    assert dropped == [*((1, k) for k in range(6)), *((2, k) for k in range(3))]
    with pytest.raises(ClientError, match="all clients of round 1 failed"):
        toy.run(FailingAt(), toy.Tiny(), tmp_path / "l", privacy=LocalPrivacy(0.05, 1.0), **world)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cfl", {"privacy": CentralPrivacy(1.0)}, "CFL sends more than updates"),
        ("scaffold", {"privacy": LocalPrivacy(1.0)}, "SCAFFOLD sends more than updates"),
        ("emdcfl", {"privacy": CentralPrivacy(1.0)}, "EMDCFL sends more"),
        ("ifca", {"privacy": LocalPrivacy(1.0)}, "tell the server the row they chose"),
        ("fedavg", {"privacy": CentralPrivacy(1.0), "policy": EveryArrival()}, "use policy rounds"),
        ("fedavg", {"privacy": CentralPrivacy(1.0), "payload": Payload("float16")}, "payload.dtype"),
        ("fedavg", {"privacy": CentralPrivacy(1.0, count_noise=1.0)}, "privacy.count_noise"),
    ],
)
def test_what_noise_does_not_cover_is_refused_in_one_line(name, changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        toy.start(CATALOGUE[name](), toy.Tiny(), tmp_path, **changes)


def test_variants_whose_uploads_are_no_rows_are_refused(tmp_path):
    for options in ({"variant": "gradient"}, {"restarts": 2}):
        with pytest.raises(UserError, match="IFCA sends more than updates"):
            toy.start(CATALOGUE["ifca"](**options), toy.Tiny(), tmp_path, privacy=CentralPrivacy(1.0))
