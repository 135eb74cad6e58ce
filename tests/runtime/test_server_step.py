"""One step, and rounds of them, on a tiny federation in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.capabilities import ComparedUploads, RememberedUploads
from mpifl.core.errors import MethodError, NotFinite, UserError
from mpifl.core.mixing import add, average
from mpifl.core.parameters import take
from mpifl.core.plan import Plan
from mpifl.core.rng import key
from mpifl.experiment.schema import EvaluationConfig, OutputConfig, SystemConfig
from mpifl.runtime import measures, server_step
from mpifl.runtime.engine import EvaluationSchedule
from mpifl.runtime.hook_errors import ClientError
from mpifl.runtime.synchronous import SynchronousEngine
from mpifl.simulation.policies import Buffer
from mpifl.training.client import LocalClient


@dataclass(frozen=True)
class Counting(Algorithm):
    """Reports what it was told; the model grows by one for every visit. `fail`: client that raises or sends
    NaN.
    """

    fail: int = -1
    how: str = "raise"

    needs: ClassVar[Needs] = Needs(client_state=True)

    def local_update(self, message, state, client, key):
        """Add one; note everything."""
        if client.id == self.fail and self.how == "raise":
            raise ArithmeticError("the client's own trouble")
        visits = state.get("visits", torch.zeros(1)) + 1
        told = {
            "version": message.version,
            "step": message.step,
            "visit": client.visit,
            "state": float(visits),
        }
        w = message["model"][0] + 1
        w = w * float("nan") if client.id == self.fail else w
        metrics = {"train_loss": float(client.id)}
        draw = int(key.numpy().integers(2**31))
        return client.report({**told, "draw": draw}, metrics, model=w), {"visits": visits}

    def aggregate(self, server, notes):
        """Average."""
        return Plan([average(notes)], algorithm_state={"last": notes.client})


def test_a_step_of_fedavg_is_the_mean_of_what_the_clients_train(tmp_path):
    """Step 1 by hand: sum_k n_k w_k / sum n, each w_k trained with the key of its first visit."""
    federation = toy.Tiny()
    done = toy.run(CATALOGUE["fedavg"](), federation, tmp_path, steps=1)
    learner = done.server_step.config.clients.learner
    start = done.servers[0].tables["model"][0]
    trained = [
        LocalClient(k, federation, learner, toy.LOCAL).sgd(start, key(0, "visit", k, 0)).vector
        for k in range(6)
    ]
    n = federation.sizes[:, 0]
    expected = sum(int(n[k]) * trained[k].double() for k in range(6)) / int(n.sum())
    assert_close(done.server.tables["model"][0], expected.float(), rtol=1e-6, atol=1e-9)
    assert_close(start, done.server_step.problem.init(0), rtol=0, atol=0)


def test_clients_are_told_version_step_visit_and_find_their_state(tmp_path):
    """Half take part: a client's visit number and state count its own visits, not the steps."""
    done = toy.run(Counting(), toy.Tiny(), tmp_path, steps=4, participation=0.5, evaluate=False)
    visits = np.zeros(6, int)
    for step, notes in enumerate(done.notes, 1):
        assert_array_equal(notes["version"], step - 1)
        assert_array_equal(notes["step"], step)
        assert_array_equal(notes["visit"], visits[notes.client])
        visits[notes.client] += 1
        assert_array_equal(notes["state"], visits[notes.client])
        assert_array_equal(notes.client, np.unique(notes.client))
        assert_array_equal(notes.num_samples, toy.Tiny().sizes[notes.client, 0])
        assert done.servers[step].version == step
    assert visits.sum() == 12
    assert visits.min() < visits.max()
    assert_close(done.server.tables["model"], done.servers[0].tables["model"] + 4)
    assert_array_equal(done.server.algorithm_state["last"], done.notes[-1].client)


def test_draws_are_addressed_by_client_and_visit(tmp_path):
    everyone = toy.run(Counting(), toy.Tiny(), tmp_path / "a", steps=2, evaluate=False)
    half = toy.run(Counting(), toy.Tiny(), tmp_path / "b", steps=3, participation=0.5, evaluate=False)
    draws = {}
    for notes in (*everyone.notes, *half.notes):
        for k, visit, draw in zip(notes.client, notes["visit"], notes["draw"], strict=True):
            assert draws.setdefault((k, visit), draw) == draw
    assert len(set(draws.values())) == len(draws)


@pytest.mark.parametrize("name", ["fedavg", "oracle"])
def test_distances_are_those_of_what_clients_trained(name, tmp_path):
    """Half take part in each of three rounds, every second is evaluated: the models of rounds 2 and 3, those
    that the Oracle remembers among them, compared in NumPy; the last layer of 3 x 8 weights and 3 biases by
    itself.
    """
    uploads: dict[int, np.ndarray] = {}

    def told(hook, args, result):
        if hook == "local_update":
            uploads[result[0].client] = result[0].vectors["model"].double().numpy()

    evaluation = EvaluationConfig(every=2, distances=True)
    method, half = CATALOGUE[name](), {"participation": 0.5, "rounds": 3, "evaluation": evaluation}
    step, sampler = toy.start(method, toy.Tiny(), tmp_path, told=told, **half)
    server = step.initialize()
    for t in range(1, 4):
        server, notes = toy.step_of(step, server, sampler(t))
        found = step.client_products
        if t == 1:
            assert found is None
            continue
        assert_array_equal(found.clients, notes.client)
        assert (name == "fedavg") == (len(notes) == 3)
        x = np.stack([uploads[k] for k in notes.client.tolist()])
        for products, of in ((found.parameters, x), (found.head, x[:, -27:])):
            assert_allclose(products, of @ of.T, rtol=1e-12)


def test_the_models_of_clients_are_gathered_some_at_a_time(tmp_path, monkeypatch):
    """Two at a time, of five of six clients."""
    done = toy.run(CATALOGUE["fedper"](), toy.Tiny(), tmp_path, steps=1)
    monkeypatch.setattr(server_step, "MODEL_BLOCK", 2 * done.server_step.problem.layout.size + 1)
    some = np.array([0, 1, 3, 4, 5])
    models = done.server_step.client_models(done.server, some)
    assert_close(models, done.models()[torch.from_numpy(some)], rtol=0, atol=0)
    assert len(models.unique(dim=0)) == len(some)


def test_distances_ask_for_whole_models(tmp_path):
    evaluation = EvaluationConfig(matrices=("parameters",))
    step, sampler = toy.start(CATALOGUE["cfl"](), toy.Tiny(), tmp_path, evaluation=evaluation)
    with pytest.raises(UserError, match=r"with CFL.*upload delta, update, no whole model"):
        toy.step_of(step, step.initialize(), sampler(1))


def test_changes_are_no_models(tmp_path):
    """Where a forecast cannot tell, the first step does."""
    step, sampler = toy.start(
        CATALOGUE["scaffold"](), toy.Tiny(), tmp_path, evaluation=EvaluationConfig(distances=True)
    )
    with pytest.raises(UserError, match=r"with SCAFFOLD.*upload changes, no models"):
        toy.step_of(step, step.initialize(), sampler(1))


def test_training_figures_are_means_by_samples(tmp_path):
    done = toy.run(Counting(), toy.Tiny(), tmp_path, steps=1, evaluate=False)
    n = toy.Tiny().sizes[:, 0]
    assert_allclose(done.server_step.train_metrics["train_loss"], np.average(np.arange(6), weights=n))


def test_an_exception_in_a_client_names_rank_client_round_and_visit(tmp_path):
    with pytest.raises(
        ClientError, match="rank 0, client 3, round 1, visit 0: ArithmeticError: the client's own"
    ):
        toy.run(Counting(fail=3), toy.Tiny(), tmp_path)


def test_an_upload_that_is_not_finite_stops_the_run_and_is_named(tmp_path):
    with pytest.raises(NotFinite, match="client 2, visit 0: upload 'model' is not finite"):
        toy.run(Counting(fail=2, how="nan"), toy.Tiny(), tmp_path)


def test_the_rate_that_is_named_for_an_upload_that_is_not_finite_is_one_that_counts(tmp_path):
    """pFedMe ignores local.lr."""
    method = CATALOGUE["pfedme"](lr=1e30, personal_lr=1e30)
    with pytest.raises(NotFinite, match=r"smaller algorithm\.lr and algorithm\.personal_lr, or leave"):
        toy.run(method, toy.Tiny(), tmp_path)


@dataclass(frozen=True)
class Remembering(RememberedUploads, Algorithm):
    """Averages the last models of all clients seen so far."""

    def local_update(self, message, state, client, key):
        """Report a constant vector: the step's number."""
        return client.report(model=torch.full((client.layout.size,), float(message.step))), {}

    def aggregate(self, server, notes):
        """Average, each client the same."""
        return Plan(
            [average(notes, np.ones(len(notes)))],
            algorithm_state={"fresh": notes.fresh, "client": notes.client},
        )


class RememberingTwo(Remembering):
    """Uploads a second vector, of its own length, which enters another table."""

    def setup(self, problem, fingerprints, key):
        """Add a table of four numbers."""
        server = super().setup(problem, fingerprints, key)
        return replace(server, tables={**server.tables, "extra": torch.zeros(1, 4)})

    def local_update(self, message, state, client, key):
        """Report the number of the step, and the client's own."""
        report, state = super().local_update(message, state, client, key)
        extra = torch.full((4,), float(client.id))
        return replace(report, vectors={**report.vectors, "extra": extra}), state

    def aggregate(self, server, notes):
        """Average both."""
        plan, w = super().aggregate(server, notes), np.ones(len(notes))
        return replace(plan, mixings=[*plan.mixings, average(notes, w, into="extra", of="extra")])


def test_all_uploads_of_a_client_that_is_absent_are_remembered(tmp_path):
    done = toy.run(RememberingTwo(), toy.Tiny(), tmp_path, steps=4, participation=0.5, evaluate=False)
    seen: set[int] = set()
    for server in done.servers[1:]:
        clients, fresh = server.algorithm_state["client"], server.algorithm_state["fresh"]
        seen |= set(clients[fresh].tolist())
        assert_allclose(server.tables["extra"], np.mean(sorted(seen)), rtol=1e-6)
    assert len(seen) > 3


def test_the_server_remembers_the_last_upload_of_clients_that_are_absent(tmp_path):
    done = toy.run(Remembering(), toy.Tiny(), tmp_path, steps=4, participation=0.5, evaluate=False)
    last: dict[int, int] = {}
    for step, server in enumerate(done.servers[1:], 1):
        clients, fresh = server.algorithm_state["client"], server.algorithm_state["fresh"]
        last |= dict.fromkeys(clients[fresh].tolist(), step)
        assert_array_equal(clients, sorted(last))
        assert fresh.sum() == 3
        assert_allclose(server.tables["model"], np.mean(list(last.values())), rtol=1e-6)


@dataclass(frozen=True)
class Polished(Algorithm):
    """Adds updates and halves the rows afterwards."""

    needs: ClassVar[Needs] = Needs(server_update=True)

    def local_update(self, message, state, client, key):
        """Report an update of ones."""
        return client.report(delta=torch.ones(client.layout.size)), {}

    def aggregate(self, server, notes):
        """Add the mean."""
        return Plan([add(np.full((1, len(notes)), 1 / len(notes)), of="delta")])

    def server_update(self, old, new):
        """Halve."""
        assert new.version == old.version + 1
        return type(new)(
            {"model": new.tables["model"] / 2}, new.assign, {"was": old.tables["model"].numpy()}, 99
        )


def test_server_update_comes_after_mixing(tmp_path):
    """(w + 1) / 2, then ((w + 1) / 2 + 1) / 2; the version is the engine's own business."""
    done = toy.run(Polished(), toy.Tiny(), tmp_path, steps=2, evaluate=False)
    w = done.servers[0].tables["model"]
    assert_close(done.servers[1].tables["model"], (w + 1) / 2)
    assert_close(done.servers[2].tables["model"], ((w + 1) / 2 + 1) / 2)
    assert [s.version for s in done.servers] == [0, 1, 2]


def test_only_the_chosen_clients_are_evaluated(tmp_path):
    server_step, sampler = toy.start(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path)
    server, _ = toy.step_of(server_step, server_step.initialize(), sampler(1))
    whole = server_step.evaluate(server, np.arange(6))
    some = server_step.evaluate(server, np.array([1, 4]))
    for name, values in some.items():
        assert_array_equal(values, whole[name][[1, 4]])
    assert set(whole) == {"accuracy", "loss"}


@pytest.mark.parametrize(
    ("every", "first", "expected"),
    [
        (1, False, [1, 2, 3, 4, 5]),
        (2, False, [2, 4, 5]),
        (0, False, [5]),
        (2, True, [0, 2, 4, 5]),
        (9, False, [5]),
    ],
)
def test_rounds_judge_when_due_and_always_at_the_end(every, first, expected, tmp_path):
    server_step, sampler = toy.start(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, participation=0.5)
    records = []
    evaluation = EvaluationSchedule(np.arange(6), every, first)
    rounds = SynchronousEngine(server_step, sampler, 5, evaluation)
    server = rounds.run(records.append)
    assert [r.step for r in records] == ([0] if first else []) + [1, 2, 3, 4, 5]
    assert [r.step for r in records if r.scores is not None] == expected
    for done in range(6):
        assert evaluation.num_due(done, 5) == sum(step > done for step in expected)
    assert server is records[-1].server
    for record in records[first:]:
        assert_array_equal(record.cohort, sampler(record.step))
        assert len(record.timing) == (record.scores is not None)


def test_evaluation_does_not_change_what_follows(tmp_path):
    runs = []
    for every in (0, 1):
        server_step, sampler = toy.start(CATALOGUE["fedper"](), toy.Tiny(), tmp_path / str(every))
        rounds = SynchronousEngine(server_step, sampler, 3, EvaluationSchedule(np.arange(6), every))
        runs.append(rounds.run(lambda record: None))
    toy.same(toy.state_of(runs[0]), toy.state_of(runs[1]))


@pytest.mark.parametrize("collective", ["reduce", "gather"])
@pytest.mark.parametrize("name", ["fedavg", "ucfl", "cfl"])
def test_the_collective_does_not_change_the_bits(name, collective, tmp_path):
    options = {"ucfl": {"noise_batch": 4.0}, "cfl": {"warmup": 1, "eps1": 100.0, "eps2": 0.0}}.get(name, {})
    chosen = toy.run(CATALOGUE[name](**options), toy.Tiny(), tmp_path / "auto", evaluate=False)
    system = SystemConfig(collective=collective)
    forced = toy.run(
        CATALOGUE[name](**options), toy.Tiny(), tmp_path / "forced", evaluate=False, system=system
    )
    assert forced.server_step.mixer.last_collectives == [collective]
    toy.same(toy.state_of(chosen.server), toy.state_of(forced.server))


def test_fast_sums_are_close_to_exact_ones(tmp_path):
    exact = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path / "exact", evaluate=False)
    system = SystemConfig(sums="fast")
    fast = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path / "fast", evaluate=False, system=system)
    assert_close(fast.server.tables["model"], exact.server.tables["model"], rtol=1e-4, atol=1e-6)


def test_only_those_who_take_part_are_counted_as_visited(tmp_path):
    """Oracle remembers the uploads of absent members: these are reports, and no visits."""
    done = toy.run(CATALOGUE["oracle"](), toy.Tiny(), tmp_path, steps=3, participation=0.5, evaluate=False)
    assert len(done.notes[-1]) > 3
    assert done.server_step.visits.sum() == 9


@dataclass(frozen=True)
class ComparesNow(ComparedUploads, Algorithm):
    """Products of `delta` are read in the second step; it is uploaded in steps from `sends` on."""

    sends: int = 2

    gram = "delta"

    def compares(self, server):
        """In the second step only."""
        return server.version == 1

    def local_update(self, message, state, client, key):
        """Upload what is compared when it is time."""
        w = message["model"][0]
        return client.report(model=w, **({"delta": w} if message.step >= self.sends else {})), {}

    def aggregate(self, server, notes):
        """Remember whether there were products."""
        return Plan([average(notes)], algorithm_state={"gram": np.array("gram" in notes.columns)})


def test_products_are_taken_of_what_is_uploaded_in_the_steps_that_compare(tmp_path):
    done = toy.run(ComparesNow(), toy.Tiny(), tmp_path, steps=3, evaluate=False)
    assert [bool(s.algorithm_state["gram"]) for s in done.servers[1:]] == [False, True, False]
    with pytest.raises(MethodError, match="no upload 'delta'"):
        toy.run(ComparesNow(sends=3), toy.Tiny(), tmp_path / "late", steps=3, evaluate=False)


@dataclass(frozen=True)
class ComparesPairs(ComparedUploads, Algorithm):
    """Client k uploads (k + 1, 1) and (10 k, 2) in one upload of two components."""

    gram = "pair"

    def local_update(self, message, state, client, key):
        """Upload the pair beside the model."""
        k = client.id
        pair = torch.tensor([[k + 1.0, 1.0], [10.0 * k, 2.0]])
        return client.report(model=message["model"][0], pair=pair), {}

    def aggregate(self, server, notes):
        """Keep the products."""
        return Plan([average(notes)], algorithm_state={"gram": notes["gram"]})


@pytest.mark.parametrize("policy", [{}, {"policy": Buffer(size=6)}], ids=["rounds", "buffer"])
def test_components_of_an_upload_are_compared_as_one_vector(policy, tmp_path):
    """Client k: (k + 1)(j + 1) + 1 + 100 k j + 4 with client j."""
    done = toy.events(ComparesPairs(), toy.Tiny(), tmp_path, steps=1, **policy) if policy else None
    done = done or toy.run(ComparesPairs(), toy.Tiny(), tmp_path, steps=1, evaluate=False)
    k = np.arange(6)
    expected = np.outer(k + 1, k + 1) + 100 * np.outer(k, k) + 5
    assert_allclose(done.server.algorithm_state["gram"], expected)


def test_cflgp_looks_at_profiles_every_other_round(tmp_path):
    method = CATALOGUE["cflgp"](num_clusters=2, period=2)
    done = toy.run(method, toy.Tiny(), tmp_path, steps=3, evaluate=False)
    assert ["gram" in notes.columns for notes in done.notes] == [True, False, True]


def test_updates_are_compared_with_their_mean_in_every_module(tmp_path):
    """Against float64 sums over the uploads, round for round, with half of the clients in each."""
    moved: dict[int, tuple[int, torch.Tensor]] = {}

    def told(hook, args, result):
        if hook == "local_update":
            report = result[0]
            moved[report.client] = report.num_samples, report.vectors["model"] - args[0]["model"][0]

    options = {"participation": 0.5, "model": toy.mlp(8, 6), "output": OutputConfig(updates=True)}
    algorithm = CATALOGUE["fedavg"]()
    server_step, sampler = toy.start(algorithm, toy.Tiny(), tmp_path, told=told, **options)
    server = server_step.initialize()
    for step in (1, 2, 3):
        moved.clear()
        server, notes = toy.step_of(server_step, server, sampler(step))
    layout = server_step.problem.layout
    assert list(layout.module_parts()) == ["fc1", "fc2", "head"]
    found = {(row["client"], row["block"]): row for row in server_step.updates}
    assert len(found) == 3 * len(notes) == 9
    share = np.array([moved[k][0] for k in notes.client]) / sum(n for n, _ in moved.values())
    for block, part in layout.module_parts().items():
        u = np.stack([take(moved[k][1], part).double().numpy() for k in notes.client])
        mean = share @ u
        for k, row in zip(notes.client, u, strict=True):
            one = found[int(k), block]
            assert_allclose(one["size"], np.linalg.norm(row), rtol=1e-9)
            assert_allclose(one["distance"], np.linalg.norm(row - mean), rtol=1e-7)
            cosine = row @ mean / np.linalg.norm(row) / np.linalg.norm(mean)
            assert_allclose(one["mean_cosine"], cosine, rtol=1e-9)
            groups = toy.Tiny().groups[notes.client]
            beside = (groups == groups[list(notes.client).index(k)]) & (notes.client != k)
            unit = u / np.linalg.norm(u, axis=1, keepdims=True)
            pairs = unit[beside] @ row / np.linalg.norm(row)
            assert_allclose(one["pair_cosine"], pairs.mean() if len(pairs) else np.nan, rtol=1e-9)


@dataclass(frozen=True)
class Changes(Algorithm):
    """FedAvg whose clients upload changes, from nothing or from a vector that they name."""

    named: bool

    def local_update(self, message, state, client, key):
        """Upload the change, or the model beside the one that it is based on, half as long."""
        x = message["model"][0]
        w = client.sgd(x, key).vector
        upload, base = (w - x / 2, x / 2) if self.named else (w - x, None)
        return client.report(based_on={"model": base}, model=upload), {}

    def aggregate(self, server, notes):
        """Leave the rows alone."""
        return Plan([add(np.zeros((1, len(notes.client))))])


@pytest.mark.parametrize("named", [False, True])
def test_uploads_that_are_changes_are_compared_as_what_they_are(named, tmp_path):
    asked = {"model": toy.mlp(8), "output": OutputConfig(updates=True)}
    plain = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path / "a", 1, **asked).server_step.updates
    found = toy.run(Changes(named), toy.Tiny(), tmp_path / "b", 1, **asked).server_step.updates
    one = [(row["size"], row["mean_cosine"], row["distance"]) for row in plain]
    other = [(row["size"], row["mean_cosine"], row["distance"]) for row in found]
    assert len(one) > 0
    assert_allclose(other, one, rtol=1e-4)


@pytest.mark.parametrize("name", ["ifca", "fedper", "fesem"])
def test_updates_are_compared_only_of_one_whole_model(name, tmp_path):
    with pytest.raises(UserError, match="updates"):
        toy.run(CATALOGUE[name](), toy.Tiny(), tmp_path, 1, output=OutputConfig(updates=True))


@pytest.mark.parametrize("declared", [True, False])
def test_rows_live_with_their_readers_only_where_the_method_says_that_rank_0_never_looks_at_them(
    declared, tmp_path, monkeypatch
):
    """Otherwise `labels`, say, would look at the rows of before they moved, with three ranks and more."""

    class Own(CATALOGUE["fedamp"]):
        needs = Needs(client_state=True, row_per_client=declared)

    step, _ = toy.start(Own(), toy.Tiny(), tmp_path)
    server = step.initialize()
    assert len(server.tables["model"]) == 6
    assert step._row_owners(server, "model") is None, "a single rank"
    monkeypatch.setattr(step.transport, "size", 3, raising=False)
    monkeypatch.setattr(step.scheduler, "row_owners", lambda: np.array([1, 2, 1, 2, 1, 2]))
    owners = step._row_owners(server, "model")
    assert (owners is not None) == declared


def test_updates_and_their_mean_by_hand():
    """Updates (3, 4), (0, 5), (0, 0) with shares 1/2, 1/4, 1/4: mean (1.5, 3.25), |mean|^2 = 12.8125."""
    u = np.array([[3.0, 4.0], [0.0, 5.0], [0.0, 0.0]])
    found = measures.update_statistics(u @ u.T, np.array([0.5, 0.25, 0.25]))
    assert_allclose(found["size"], [5, 5, 0])
    cosines = [17.5 / (5 * np.sqrt(12.8125)), 16.25 / (5 * np.sqrt(12.8125)), np.nan]
    assert_allclose(found["mean_cosine"], cosines)
    assert_allclose(found["distance"], np.sqrt([1.5**2 + 0.75**2, 1.5**2 + 1.75**2, 12.8125]))


def test_updates_and_the_others_of_their_group_by_hand():
    """Group 0: (1, 0), (0, 2), (3, 3): cosines 0, 1/sqrt(2), 1/sqrt(2). Group 1: (1, 0) alone."""
    u = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [1.0, 0.0]])
    groups, share = np.array([0, 0, 0, 1]), np.full(4, 0.25)
    half = 0.5**0.5
    found = measures.update_statistics(u @ u.T, share, groups)["pair_cosine"]
    assert_allclose(found, [half / 2, half / 2, half, np.nan])
    found = measures.update_statistics(u @ u.T, share)["pair_cosine"]
    assert_allclose(found, [(1 + half) / 3, half / 3, 2 * half / 3 + half / 3, (1 + half) / 3])


def test_independent_updates_agree_with_their_mean_but_not_with_each_other():
    """Ten clients, 100,000 numbers each: 1 / sqrt(10) = 0.316 with the mean, 0 in pairs."""
    u = np.random.default_rng(0).standard_normal((10, 100_000))
    found = measures.update_statistics(u @ u.T, np.full(10, 0.1))
    assert_allclose(found["mean_cosine"], 10**-0.5, atol=0.01)
    assert_allclose(found["pair_cosine"], 0.0, atol=0.01)


def test_evaluations_that_remain_include_that_of_the_last_step():
    """Of ten steps 3, 6, 9 and 10 are evaluated."""
    schedule = EvaluationSchedule(np.arange(2), every=3)
    due = [t for t in range(1, 11) if schedule.due(t, 10)]
    assert due == [3, 6, 9, 10]
    assert [schedule.num_due(done, 10) for done in range(11)] == [
        sum(t > done for t in due) for done in range(11)
    ]
