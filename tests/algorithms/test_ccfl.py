"""CCFL and FedSoft-Async by hand: the client's step, what the server makes of its own sets, their figures.

The server's rules are in `tests/runtime/test_asynchronous_rules.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.ccfl import CCFL, lateness
from mpifl.algorithms.fedsoft_async import FedSoftAsync
from mpifl.algorithms.local import Local
from mpifl.comm.single import Single
from mpifl.core.parameters import Layout
from mpifl.core.types import ProblemInfo
from mpifl.driver.figures import estimated, figures
from mpifl.experiment import loader
from mpifl.experiment.build import build
from mpifl.experiment.schema import EvaluationConfig, Seeds
from mpifl.forecast.plan import describe
from mpifl.forecast.traffic import forecast
from mpifl.results.metrics import mixture_kl
from mpifl.results.recorder import Recorder, RunningFigures
from mpifl.simulation.policies import ClientDecides, Synchronous
from mpifl.training.tasks import Classification, Regression


def owned(target: float, num_samples: int) -> byhand.Quadratic:
    """Return a labelled set of the server's, as a client."""
    client = byhand.Quadratic([target])
    client.num_samples = num_samples
    return client


def test_a_client_of_ccfl_is_held_near_what_it_received():
    """F(w) = (w - 4)^2 / 2, eta = 0.5, rho = 0.5, received 1: 1 -> 2.5, then 2.5 - 0.5 (-1.5 + 0.5 * 1.5) =
    2.875.

    Before the answer it scores 1 / (1 + F) on its test data, whose target is 3: F = 0.125^2 / 2.
    """
    client = byhand.Quadratic([4.0], steps=2, test=[3.0])
    report, state = CCFL(rho=0.5).local_update(byhand.message(model=[[1.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([2.875]))
    assert_allclose(report.metrics["accuracy_before"], 1 / (1 + 0.125**2 / 2))
    assert not state


def test_local_may_start_from_the_mean_of_the_clusters_models():
    """Sets with targets 2 and 6, a step of 0.5 from 0: models 1 and 3, mean 2. A client downloads it once."""
    method = Local(pretrain_epochs=1)
    sets = [owned(2.0, 10), owned(6.0, 10)]
    layout = Layout(("w",), ((1,),), 1)
    problem = ProblemInfo(3, 1, np.full(3, 10), layout, lambda j: torch.zeros(1), public=sets)
    server = method.setup(problem, None, byhand.KEY)
    assert_close(server.tables["model"], torch.tensor([[2.0]]))
    told = byhand.message(model=[[2.0]])
    report, state = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert not report.vectors
    assert_close(state["model"], torch.tensor([3.0]))
    plan = method.aggregate(server, byhand.notes([10], client=[1]))
    assert plan.assign is None, "the table has row 0 only"
    after = replace(server, algorithm_state=plan.algorithm_state)
    assert [method.reads(after, k) for k in (0, 1)] == [{"model": (0,)}, {}]
    _, state = method.local_update(byhand.message(), state, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(state["model"], torch.tensor([3.5]))
    assert Local().needs.alone
    assert not method.needs.alone


def test_a_client_of_fedsoft_async_counts_its_samples_and_starts_from_their_mixture():
    """Ten samples: losses 1 under model 0, 0 or 2 under model 1: 1 fits four, 0 six: mu = (0.6, 0.4).

    Models 0 and 1 are mixed to 0.4; target 0, eta = 0.5, rho = 0.5, two steps: 0.4 -> 0.2, then
    0.2 - 0.5 (0.2 + 0.5 (0.2 - 0.4)) = 0.15.
    """
    client = byhand.Told([[1.0] * 10, [0.0] * 4 + [2.0] * 6])
    client.steps = 2
    message = byhand.message(model=[[0.0], [1.0]])
    report, _ = FedSoftAsync(rho=0.5).local_update(message, {}, client, byhand.KEY)
    assert_allclose(report.notes["mu"], [0.6, 0.4])
    assert_close(report.vectors["model"], torch.tensor([0.15]))
    assert_allclose(report.metrics["accuracy_before"], 1 / (1 + 100.15**2 / 2), rtol=1e-5)


def test_fedsoft_async_serves_the_clients_own_mixture():
    server = byhand.server(2, {"mu": [[0.6, 0.4], [0.1, 0.9]], "changed": [0, 0]}, model=[[0.0], [1.0]])
    assert_array_equal(FedSoftAsync().serves(server, 1)["model"], [0.1, 0.9])
    assert FedSoftAsync().reads(server, 1) == {"model": (0, 1)}


def test_ccfl_answers_with_the_clients_own_mixture():
    server = byhand.server(2, {"u": [[0.6, 0.4], [0.1, 0.9]]}, model=[[0.0], [1.0]])
    assert_array_equal(CCFL().reads(server, 1)["model"], [0.1, 0.9])
    assert_array_equal(CCFL().mixtures(server), server.algorithm_state["u"])


@pytest.mark.parametrize("method", [CCFL(pretrain_epochs=3), FedSoftAsync(pretrain_epochs=3)])
def test_the_first_models_are_trained_on_the_servers_sets(method):
    """From the common 2 towards 4 and 8, three epochs of one step, rate 0.5: 3, 3.5, 3.75 and 5, 6.5, 7.25.

    All mixtures are even at first.
    """
    public = owned(4.0, 10), owned(8.0, 10)
    layout = Layout(("w",), ((1,),), 1)
    world = ProblemInfo(3, 2, np.ones(3), layout, lambda j: torch.full((1,), 2.0 + j), public=public)
    server = method.setup(world, None, byhand.KEY)
    assert_close(server.tables["model"], torch.tensor([[3.75], [7.25]]))
    assert_array_equal(method.mixtures(server), np.full((3, 2), 0.5))
    assert_array_equal(server.algorithm_state["changed"], [0, 0])
    assert public[0].calls[0].key != public[1].calls[0].key, "each draws batches of its own"


PUBLIC = owned(4.0, 300), owned(8.0, 100)


def test_the_server_judges_an_upload_by_sums_over_sixteen_batches():
    """w = 2: losses 2 and 18 on the two sets, times 16, whatever their sizes."""
    assert_allclose(CCFL().inspect({"model": torch.tensor([2.0])}, PUBLIC)["l"], [32, 288])


def test_the_server_appraises_each_model_on_its_own_set_when_it_changed():
    """Rows 2 and 6 for targets 4 and 8: losses 2 and 2, times 16. Then row 1 becomes 5: 4.5; row 0 is not
    looked at again (its note says 77).
    """
    first = CCFL().appraise(None, byhand.server(1, model=[[2.0], [6.0]]), PUBLIC)
    assert_allclose(first.algorithm_state["own"], [32, 32])
    old = replace(first, algorithm_state={**first.algorithm_state, "own": np.array([77.0, 32.0])})
    new = replace(old, tables={"model": torch.tensor([[2.0], [5.0]])})
    assert_allclose(CCFL().appraise(old, new, PUBLIC).algorithm_state["own"], [77, 72])
    assert_allclose(old.algorithm_state["own"], [77, 32])


def test_shares_are_estimated_from_loss_gap_and_distance_by_their_weights():
    """0.5 (3/4, 1/4) + 0.2 (1/2, 1/2) + 0.3 (1/5, 4/5) = (0.535, 0.465), sharpened by A = 2."""
    method = CCFL(c1=0.5, c2=0.2, sharpen=(2.0,), bar_loss=0.0)
    u = method.estimate(np.array([[1.0, 3.0], [1.0, 1.0], [4.0, 1.0]]))
    assert_allclose(u, [1 / (1 + np.exp(-0.14)), 1 / (1 + np.exp(0.14))])


def test_lateness_begins_at_b_epochs():
    assert_allclose(lateness(np.array([-1, 4, 5, 7]), 10.0, 5.0), [1, 1, 1 / 51, 1 / 71])


@pytest.mark.parametrize(("lag", "refused"), [(1, False), (2, True)])
def test_ccfl_refuses_uploads_older_than_max_lag_epochs(lag, refused):
    """A lag of one step is an age of two epochs."""
    state = {"u": [[0.5, 0.5]], "changed": [0, 0], "own": [1.0, 1.0], "history": np.zeros((0, 3, 2))}
    server = byhand.server(1, state, version=9, model=[[0.0], [1.0]])
    told = replace(byhand.notes([5], l=[[9.0, 12.0]], row_distance=[[1.0, 2.0]]), staleness=np.array([lag]))
    assert (CCFL(max_lag=2).aggregate(server, told).mixings == []) == refused


# ---- the figures of both


@pytest.fixture
def context():
    """Return a run of two clients whose true mixtures are (1/2, 1/2) at visit 2 and (1, 0) at visit 0."""
    truth = {(0, 2): [0.5, 0.5], (1, 0): [1.0, 0.0]}

    def evaluate(vector, split):
        return {"accuracy": {(0.0, "a"): 0.9, (1.0, "b"): 0.7}.get((float(vector[0]), split), 0.0)}

    federation = SimpleNamespace(
        mixture=lambda k, visit: np.array(truth[k, visit]), group_test_sets=lambda: ("a", "b")
    )
    problem = SimpleNamespace(public=[SimpleNamespace(evaluate=evaluate)])
    config = SimpleNamespace(algorithm=CCFL(), policy=ClientDecides(), task=Classification())
    return SimpleNamespace(config=config, federation=federation, problem=problem)


def test_an_estimate_is_compared_with_the_truth_of_its_own_upload(context):
    """KL((1/2, 1/2) || (1/4, 3/4)) = ln(4/3) / 2 and KL((1, 0) || (1/2, 1/2)) = ln 2.

    Client 0 has a later visit, whose upload was refused: its estimate stays, and so does its divergence.
    Rows 0 and 1 score 0.9 and 0.7 on the test sets of their own groups.
    """
    running = RunningFigures()
    server = byhand.server(2, {"u": [[0.25, 0.75], [0.5, 0.5]]}, model=[[0.0], [1.0]])
    record = SimpleNamespace(server=server, evaluated_clients=np.arange(2), scores=None, step=1)
    record.cohort, record.accepted = np.array([0]), [(0, 2)]
    assert figures(context, record, np.array([3, 0]), running).get("mixture_kl") is None, "no upload yet"
    running.estimated(*next(estimated(context, record)))
    found = figures(context, record, np.array([3, 0]), running)
    assert_allclose([found["mixture_kl"], found["mixture_kl_uploads"]], np.log(4 / 3) / 2)
    record.accepted = []
    assert not [*estimated(context, record)], "refused"
    record.cohort, record.accepted = np.array([1]), [(1, 0)]
    running.estimated(*next(estimated(context, record)))
    running.estimated(1, 0.0)
    found = figures(context, record, np.array([4, 1]), running)
    assert_allclose(found["mixture_kl"], np.log(4 / 3) / 4), "the last of each client"
    assert_allclose(found["mixture_kl_uploads"], (np.log(4 / 3) / 2 + np.log(2)) / 3)
    assert_allclose([found["accuracy_cluster"], found["accuracy_cluster_std"]], [0.8, 0.1])
    assert "accuracy_before" not in found, "the clients report it"


def test_rows_that_are_not_one_to_each_set_of_the_server_have_no_figure(context):
    server = byhand.server(2, {"u": [[1.0], [1.0]]}, model=[[0.0]])
    record = SimpleNamespace(server=server, evaluated_clients=np.arange(2), scores=None, step=1)
    assert figures(context, record, np.array([3, 0]), RunningFigures()) == {}


@pytest.mark.parametrize("method", [CCFL(), FedSoftAsync()])
def test_figures_have_the_name_of_the_tasks_metric(method, tmp_path):
    task = Classification(metrics=("macro_f1",))
    done = toy.events(method, toy.Drifting(), tmp_path, 3, policy=ClientDecides(), task=task)
    names = {name for figures in done.reported.values() for name in figures}
    assert {"macro_f1_before", "macro_f1_before_std"} <= names
    assert {"macro_f1_received", "macro_f1_received_std"} <= names
    assert not any("accuracy" in name for name in names)


def test_a_client_on_its_own_is_evaluated_by_the_model_before_its_upload(context):
    """Of three clients the last has not trained."""
    context.config.algorithm = Local()
    scores = {"accuracy": np.array([0.5, 0.7, 0.1])}
    server = byhand.server(3, {}, model=[[0.0]])
    record = SimpleNamespace(server=server, evaluated_clients=np.arange(3), scores=scores, step=1)
    found = figures(context, record, np.array([3, 1, 0]), RunningFigures())
    assert_allclose([found["accuracy_before"], found["accuracy_before_std"]], [0.6, 0.1])
    context.config.policy = Synchronous()
    assert figures(context, record, np.array([3, 1, 0]), RunningFigures()) == {}


def test_clients_without_test_samples_have_no_score_before_an_upload(context):
    """Clients 0 and 1 score 0.5 and 0.7, client 3 has no test sample, client 2 has not trained.

    As in the other columns, NaN of a client with samples is the worst score if its model diverged, and no
    score otherwise (R2 of equal targets).
    """
    context.config.algorithm = Local()
    server = byhand.server(4, {}, model=[[0.0]])

    def before(**scores):
        values = {name.replace("_", "."): np.array(found) for name, found in scores.items()}
        record = SimpleNamespace(server=server, evaluated_clients=np.arange(4), scores=values, step=1)
        found = figures(context, record, np.array([3, 1, 0, 2]), RunningFigures())
        name = context.config.task.metric.name
        return [found[f"{name}_before"], found[f"{name}_before_std"]]

    lost = np.nan
    assert_allclose(before(accuracy=[0.5, 0.7, 0.1, lost], loss=[1, 1, 1, lost]), [0.6, 0.1])
    context.config.task = Regression(metrics=("r2",))
    assert_allclose(before(r2=[0.5, 0.7, 0.1, lost], loss=[1, 1, 1, 1], sums_n=[2, 2, 2, 2]), [0.6, 0.1])
    mean, _ = before(r2=[0.5, 0.7, 0.1, lost], loss=[1, 1, 1, lost], sums_n=[2, 2, 2, 2])
    assert mean == -np.inf


def test_the_clusters_accuracy_is_averaged_over_all_cycles():
    """Clusters of 0.4, 0.6, 0.8 and 0.2, 0.2, 0.5 after 4, 8 and 12 uploads: means 0.6 and 0.3."""
    running = RunningFigures()
    assert "accuracy_cluster_all" not in running.of_clusters(0, [0.1, 0.1]), "no upload"
    running.of_clusters(4, [0.4, 0.2])
    assert_allclose(running.of_clusters(8, [0.6, 0.2])["accuracy_cluster_all"], 0.35)
    found = running.of_clusters(12, [0.8, 0.5])
    assert_allclose([found["accuracy_cluster"], found["accuracy_cluster_std"]], [0.65, 0.15])
    assert_allclose([found["accuracy_cluster_all"], found["accuracy_cluster_all_std"]], [0.45, 0.15])


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_figures_over_the_whole_run_go_on_in_a_resumed_one(metric, tmp_path):
    recorder = Recorder(tmp_path, toy.Tiny(2))
    recorder.running.estimated(1, 0.5)
    recorder.running.of_clusters(4, [0.4, 0.2], metric)
    state = json.loads(json.dumps(recorder.state_dict()))
    again = Recorder(tmp_path, toy.Tiny(2))
    again.load_state_dict(state, b"", 0)
    for one in (recorder, again):
        one.running.estimated(1, 0.1)
        assert_allclose(one.running.of_clusters(8, [0.6, 0.4], metric)[f"{metric}_cluster_all"], 0.4)
    assert again.running == recorder.running
    assert again.running.mixture([0, 1]) == {"mixture_kl": 0.1, "mixture_kl_uploads": 0.3}


class Mixed(toy.Drifting):
    """Clients whose data are another mixture of the two groups at every visit, for what is told of them."""

    def mixture(self, k: int, visit: int = 0) -> np.ndarray:
        """Return 0.1 to 0.9 of group 0."""
        share = 0.1 + (k + 3 * visit) % 9 / 10
        return np.array([share, 1 - share])


@pytest.mark.parametrize("method", [CCFL(max_lag=2), FedSoftAsync()])
def test_the_divergence_is_that_of_the_uploads_that_were_taken(method, tmp_path):
    """A refused upload has no estimate: neither its data nor its client's stored share come in again."""
    federation = Mixed()
    done = toy.events(method, federation, tmp_path, 24, policy=ClientDecides(), seed=Seeds(training=3))
    context = SimpleNamespace(config=SimpleNamespace(algorithm=method), federation=federation)
    shares = "u" if isinstance(method, CCFL) else "mu"
    running, last, every = RunningFigures(), {}, []
    for record, row in zip(done.records[1:], done.arrivals, strict=True):
        for k, kl in estimated(context, record):
            running.estimated(k, kl)
        if row["accepted"]:
            truth = federation.mixture(row["client"], row["visit"])
            kl = mixture_kl(truth, record.server.algorithm_state[shares][row["client"]])
            last[row["client"]] = kl
            every.append(kl)
    refused = [row for row in done.arrivals if not row["accepted"]]
    assert bool(refused) == isinstance(method, CCFL)
    found = running.mixture(range(federation.num_clients))
    assert_allclose(found["mixture_kl"], np.mean([*last.values()]))
    assert_allclose(found["mixture_kl_uploads"], np.mean(every))


# ---- accuracies before and after an upload


@pytest.mark.parametrize(
    ("method", "shares"),
    [(CCFL(alpha0=0.9, bar_loss=-1, sharpen=(20.0,)), "u"), (FedSoftAsync(alpha0=0.9), "mu")],
)
def test_the_accuracy_after_an_upload_is_that_of_the_model_received_at_it(method, shares, tmp_path):
    """Each upload is answered with the mixture of the rows just after it; other uploads move the rows later.

    Both figures are those of the client's last upload, on the test images of that visit, and their spread
    over the clients that have uploaded. After the last upload of all, its client's next visit has not begun.
    """
    federation, every = toy.Drifting(), EvaluationConfig(every=4, at_start=True)
    done = toy.events(
        method, federation, tmp_path, 16, policy=ClientDecides(), evaluation=every, seed=Seeds(training=3)
    )
    model = done.server_step.config.clients
    after, now = {}, {}
    for t, row in enumerate(done.arrivals, start=1):
        k, visit, server = row["client"], row["visit"], done.servers[t]
        mixed = torch.from_numpy(server.algorithm_state[shares][k]) @ server.tables["model"].double()
        after[k] = model.client(k, visit).evaluate(mixed.float())["accuracy"]
        now[k] = visit
        if t % 4 == 0:
            assert len(now) < federation.num_clients or t > 8, "who has not uploaded does not count"
            figures = done.reported[t]
            assert_allclose(figures["accuracy_received"], np.mean([*after.values()]), atol=1e-9)
            assert_allclose(figures["accuracy_received_std"], np.std([*after.values()]), atol=1e-9)
    end = []
    for k, visit in now.items():
        last = torch.from_numpy(done.server.algorithm_state[shares][k]) @ done.server.tables["model"].double()
        end.append(model.client(k, visit).evaluate(last.float())["accuracy"])
    assert abs(np.mean(end) - figures["accuracy_received"]) > 0.01, "later uploads make a difference"


@pytest.mark.parametrize(("sigma", "expected", "kl"), [(0.0, 0.0, 13.82), (1e-4, 1e-4, 4.61)])
def test_a_share_without_samples_is_nought_or_fedsofts_sigma(sigma, expected, kl):
    """Model 0 fits all ten samples best. KL((1/2, 1/2) || (1, x)) = ln(1/2) + ln(1/x) / 2, with x at least
    1e-12: 13.82 - 0.69, and 4.61 - 0.69.
    """
    client = byhand.Told([[0.0] * 10, [1.0] * 10])
    message = byhand.message(model=[[0.0], [1.0]])
    report, _ = FedSoftAsync(sigma=sigma).local_update(message, {}, client, byhand.KEY)
    assert_allclose(report.notes["mu"], [1.0, expected])
    assert_allclose(mixture_kl(np.array([[0.5, 0.5]]), report.notes["mu"]), kl - np.log(2), atol=0.01)


def test_the_ledger_has_two_time_stamps_a_cycle(tmp_path):
    """Six clients start, one of them uploads at each of twelve steps and starts again but after the last.

    Down: 6 + 11 = 17 integers of 4 bytes, up: 12.
    """
    done = toy.events(CCFL(bar_loss=-1), toy.Tiny(), tmp_path, 12, policy=ClientDecides())
    totals = [row for row in done.server_step.ledger.totals() if row["name"] == "time_stamp"]
    assert [(row["direction"], row["kind"], row["bytes"], row["numbers"]) for row in totals] == [
        ("down", "control", 68, 17),
        ("up", "control", 48, 12),
    ]
    size = 4 * done.server_step.problem.layout.size
    assert (done.server_step.ledger.total("down"), done.server_step.ledger.total("up")) == (
        17 * (size + 4),
        12 * (size + 4),
    )


def test_clients_of_ccfl_need_no_test_images_of_their_own():
    """Models of clusters are evaluated on test sets of whole groups."""
    config = loader.load("ccfl-small", ["--data.scenario.test_images", "0"])
    assert build(config, Single()).federation.group_test_sets()


@pytest.mark.parametrize("clusters", [1, 3])
def test_ccfl_is_planned_with_any_number_of_clusters(clusters):
    """A step moves one upload and one mixture, each with its time stamp: 4 (d + 1) bytes."""
    config = loader.load("ccfl-small", ["--data.scenario.clusters", str(clusters)])
    context = build(config, Single())
    found = forecast(context)
    size = 4 * (context.problem.layout.size + 1)
    assert found.per_round == (size, size)
    assert f"K = {clusters} (before: {clusters}), mixed from 1 uploads" in describe(config, Single())
