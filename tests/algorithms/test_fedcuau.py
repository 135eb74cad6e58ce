"""FedCUAU: quantiles and copies by hand, traffic, and its invariant: trunk and last copy are the method
below."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from support.nightly import covering
from torch.testing import assert_close

from mpifl.algorithms.fedcuau import FedCUAU
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.parameters import Layout, put, take
from mpifl.core.types import ProblemInfo

MOMENTUM = toy.LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.5)
TWO_LAYERS = {"model": toy.mlp(8, 6), "local": MOMENTUM}
BELOW = {"fedavg": {}, "fedprox": {"mu": 0.1}, "fedbabu": {"tune_epochs": 1}, "fedper": {}}


def test_quantiles_by_hand():
    """CU = 0, 4, 1; n = 1, 1, 2: AU = (0 + 4 + 2) / 4 = 1.5, CUAU = 1.5, 2.5, 0.5; the median is 1.5:
    clusters 0, 1, 0.
    """
    cu, n = np.array([0.0, 4.0, 1.0]), np.array([1, 1, 2])
    fingerprints = byhand.notes(n.tolist(), gram=np.outer(cu, cu))
    layout = Layout(("body.fc1.w", "head.w"), ((1,), (1,)), 2, ("head",))
    world = ProblemInfo(3, 2, n, layout, lambda j: torch.tensor([7.0, 5.0]))
    server = FedCUAU().setup(world, fingerprints, byhand.KEY)
    assert_allclose(server.algorithm_state["cuau"], [1.5, 2.5, 0.5])
    assert_array_equal(server.assign, [0, 1, 0])
    assert_close(server.tables["trunk"], torch.tensor([[7.0]]))
    assert_close(server.tables["block"], torch.tensor([[5.0], [5.0]]))


def test_a_step_by_hand():
    """n = 1, 1, 2 in clusters 0, 1, 0: trunk and last copy average all, (1/4, 1/4, 1/2); the first copy
    averages clients 0 and 2, (1/3, 0, 2/3), and stays where only client 1 takes part.
    """
    algorithm_state = {"trunk_part": [[0, 1]], "block_part": [[1, 2]]}
    server = byhand.server(3, algorithm_state, trunk=[[7.0]], block=[[5.0], [5.0]])
    server.assign[:] = [0, 1, 0]
    trunk, last, first = FedCUAU().aggregate(server, byhand.notes([1, 1, 2])).mixings
    assert_allclose(trunk.weights, [[0.25, 0.25, 0.5]])
    assert_allclose(last.weights, [[0, 0, 0], [0.25, 0.25, 0.5]])
    assert_array_equal(last.keep, [1, 0])
    assert_allclose(first.weights, [[1 / 3, 0, 2 / 3], [0, 0, 0]])
    assert_array_equal(first.keep, [0, 1])
    assert (trunk.part, last.part, first.of) == ((slice(0, 1),), (slice(1, 2),), "copy0")
    *_, first = FedCUAU().aggregate(server, byhand.notes([1], client=[1])).mixings
    assert_array_equal(first.weights, [[0], [0]])
    assert_array_equal(first.keep, [1, 1])


def test_a_copy_takes_from_its_own_cluster_and_the_more_even_ones():
    """Clusters 0, 1, 2 with n = 1, 1, 2: copy 0 is client 0's, copy 1 halves of 0 and 1, the last is
    everyone's.
    """
    algorithm_state = {"trunk_part": [[0, 1]], "block_part": [[1, 2]]}
    server = byhand.server(3, algorithm_state, trunk=[[7.0]], block=[[5.0], [5.0], [5.0]])
    server.assign[:] = [0, 1, 2]
    _, last, *copies = FedCUAU(num_clusters=3).aggregate(server, byhand.notes([1, 1, 2])).mixings
    assert_allclose(last.weights, [[0, 0, 0], [0, 0, 0], [0.25, 0.25, 0.5]])
    assert [copy.of for copy in copies] == ["copy0", "copy1"]
    assert_allclose(copies[0].weights, [[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert_allclose(copies[1].weights, [[0, 0, 0], [0.5, 0.5, 0], [0, 0, 0]])
    assert_array_equal(copies[1].keep, [1, 0, 1])


LAYOUT = Layout(("body.fc1.w", "head.w"), ((1,), (1,)), 2, ("head",))  # trunk and block, a number each


def client_of(**options: object) -> byhand.Quadratic:
    """Return a client with targets 4 for the trunk and 8 for the block, initial vector (7, 5), rate 0.5."""
    client = byhand.Quadratic([4.0, 8.0], init=[7.0, 5.0], **options)
    client.layout = LAYOUT
    return client


def test_the_update_of_the_last_layer_after_the_local_epochs_is_sent():
    """(7, 5) moves by (-1.5, 1.5): 1.5 of the head, after as many epochs as a visit has."""
    client = client_of()
    report = FedCUAU().fingerprint(client, {"seed": torch.zeros(1, 1)}, byhand.KEY)
    assert_close(report.vectors["last_layer"], torch.tensor([1.5]))
    assert client.calls[0].changes == {}


def test_a_visit_trains_trunk_and_last_copy_and_then_the_copies_below_under_the_new_trunk():
    """Cluster 0 of three, trunk 2, copies 10, 12, 20. Together (2, 20) becomes (3, 14). Under
    trunk 3 copy 0
    goes from 10 to 9 and copy 1 from 12 to 10, alone.
    """
    client, block = client_of(), LAYOUT.part("block")
    message = byhand.message(trunk=[[2.0]], block=[[10.0], [12.0], [20.0]])
    report, state = FedCUAU(num_clusters=3).local_update(message, {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([3.0, 14.0]))
    assert_close(report.vectors["copy0"], torch.tensor([9.0]))
    assert_close(report.vectors["copy1"], torch.tensor([10.0]))
    assert (report.unsent, state) == ((), {})
    together, first, second = client.calls
    assert_close(together.start, torch.tensor([2.0, 20.0]))
    assert_close(first.start, torch.tensor([3.0, 10.0]))
    assert_close(second.start, torch.tensor([3.0, 12.0]))
    assert [call.part for call in client.calls] == [None, block, block]
    assert len({call.key for call in client.calls}) == 3


def test_a_client_of_a_skewed_cluster_trains_no_copy_below_its_own():
    """Cluster 1 of three downloads copies 1 and 2: 12 and 20. It trains copy 1; copy 0 is not sent."""
    client = client_of()
    message = byhand.message(trunk=[[2.0]], block=[[12.0], [20.0]])
    report, _ = FedCUAU(num_clusters=3).local_update(message, {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([3.0, 14.0]))
    assert_close(report.vectors["copy1"], torch.tensor([10.0]))
    assert report.unsent == ("copy0",)
    assert len(client.calls) == 2


def test_rows_that_are_read_and_served():
    """A client of cluster 1 of three reads copies 1 and 2; it is evaluated with copy 0 (initial) and copy 1
    (own).
    """
    server = byhand.server(2, trunk=[[2.0]], block=[[10.0], [12.0], [20.0]])
    server.assign[:] = [0, 1]
    method = FedCUAU(num_clusters=3)
    assert method.reads(server, 1) == {"trunk": (0,), "block": (1, 2)}
    assert method.serves(server, 1) == {"trunk": (0,), "block": (0, 1)}


def test_the_first_copy_is_judged_as_it_is_and_the_own_one_after_tuning():
    """Trunk 2, first copy 10, own copy 20; two epochs of tuning: (3.5, 11). On validation data, whose targets
    are 0: (2^2 + 10^2) / 2 = 52 before, (3.5^2 + 11^2) / 2 = 66.625 after.
    """
    client = client_of(val=[0.0, 0.0])
    message = byhand.message(trunk=[[2.0]], block=[[10.0], [20.0]])
    scores = FedCUAU(tune_epochs=2).evaluate(message, {}, client, client.data.val)
    assert_allclose([scores["loss_initial"], scores["loss"]], [52, 66.625])


def whole(run: toy.Run, over: str, copy: int = -1) -> torch.Tensor:
    """Return trunk and one copy as the vector that the method below averages."""
    layout, tables = run.server_step.problem.layout, run.server.tables
    block = layout.part("block" if over in ("fedavg", "fedprox") else "stage")
    w = put(torch.zeros(layout.size), layout.part("trunk"), tables["trunk"][0])
    w = put(w, block, tables["block"][copy])
    return w if over in ("fedavg", "fedprox") else take(w, layout.part("body"))


@pytest.mark.parametrize(("participation", "over"), covering([1.0, 0.5], [*BELOW]))
def test_trunk_and_last_copy_are_the_method_below_bit_for_bit(over, participation, tmp_path):
    options = {"over": over, "num_clusters": 3, "mu": 0.1, "tune_epochs": 1}
    federation = toy.Tiny()
    one = toy.run(FedCUAU(**options), federation, tmp_path / "1", participation=participation, **TWO_LAYERS)
    below = CATALOGUE[over](**BELOW[over])
    two = toy.run(below, federation, tmp_path / "2", participation=participation, **TWO_LAYERS)
    expected = two.server.tables["body" if over in ("fedbabu", "fedper") else "model"][0]
    assert_close(whole(one, over), expected, rtol=0, atol=0)
    assert float((whole(one, over, 0) - expected).abs().max()) > 1e-4, "the first copy goes its own way"
    assert_array_equal(np.unique(one.server.assign), [0, 1, 2])


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_with_one_cluster_clients_are_judged_by_fedavg(participation, tmp_path):
    runs = [
        toy.run(a, toy.Tiny(), tmp_path / str(i), participation=participation, **TWO_LAYERS)
        for i, a in enumerate((FedCUAU(num_clusters=1, tune_epochs=0), CATALOGUE["fedavg"]()))
    ]
    assert_close(runs[0].models(), runs[1].models(), rtol=0, atol=0)
    assert_array_equal(runs[0].scores["accuracy_initial"], runs[1].scores["accuracy"])
    assert_array_equal(runs[0].scores["accuracy"], runs[1].scores["accuracy"])


BASELINES = {
    "fedavg": ("fedavg_ft", {}),
    "fedprox": ("fedavg_ft", {"mu": 0.1}),
    "fedbabu": ("fedbabu", {}),
    "fedper": ("fedper", {}),
}


@pytest.mark.parametrize("over", BASELINES)
def test_the_last_copys_figures_are_those_of_the_baseline_digit_for_digit(over, tmp_path):
    """Table 4: the rows of w^C2 equal the baseline rows of table 3, before and after fine-tuning."""
    name, options = BASELINES[over]
    cuau = FedCUAU(over=over, mu=0.1, tune_epochs=2, evaluate_copies=True)
    one, two = (
        toy.run(a, toy.Tiny(), tmp_path / str(i), participation=0.5, **TWO_LAYERS).scores
        for i, a in enumerate((cuau, CATALOGUE[name](tune_epochs=2, **options)))
    )
    for what in ("accuracy", "loss"):
        assert_array_equal(one[f"{what}_copy1"], two[what])
        assert_array_equal(one[f"{what}_copy1_initial"], two[f"{what}_initial"])
    assert np.abs(one["loss_copy0"] - two["loss"]).max() > 1e-4, "the first copy goes its own way"


def test_every_copy_is_evaluated_where_asked_and_the_own_one_as_before(tmp_path):
    """`accuracy` is the own copy's after fine-tuning, `accuracy_initial` the first copy's before."""
    runs = [
        toy.run(FedCUAU(num_clusters=3, evaluate_copies=on), toy.Tiny(), tmp_path / str(on), **TWO_LAYERS)
        for on in (False, True)
    ]
    plain, every = (run.scores for run in runs)
    names = {f"{what}_copy{j}" for what in ("accuracy", "loss") for j in range(3)}
    assert set(every) - set(plain) == names | {f"{name}_initial" for name in names}
    for name in plain:
        assert_array_equal(plain[name], every[name])
    own = np.array([every[f"loss_copy{j}"][k] for k, j in enumerate(runs[1].server.assign)])
    assert_array_equal(own, every["loss"])
    assert_array_equal(every["loss_copy0_initial"], every["loss_initial"])


def test_a_client_sends_and_receives_the_copies_from_its_own_cluster_upwards(tmp_path):
    """Seed down, last layer up; then |w^s| + (C - i) |w^C| both ways for a client of cluster i = 0 .. C-1."""
    run = toy.run(FedCUAU(num_clusters=3), toy.Tiny(), tmp_path, steps=1, evaluate=False, **TWO_LAYERS)
    layout, ledger = run.server_step.problem.layout, run.server_step.ledger
    assert ledger.total("down", 0) == 6 * 4
    head = sum(s.stop - s.start for s in layout.part("head"))
    assert ledger.total("up", 0) == 6 * head * 4
    trunk, block = (run.server.tables[name].shape[1] for name in ("trunk", "block"))
    rounds = 4 * (trunk + (3 - run.server.assign) * block)
    assert_array_equal(ledger.down - 4, rounds)
    assert_array_equal(ledger.up - 4 * head, rounds)


def test_bad_options_are_refused(tmp_path):
    for options in ({"over": "ifca"}, {"num_clusters": 0}, {"mu": -1.0}, {"tune_epochs": -1}):
        with pytest.raises(UserError, match=next(iter(options))):
            FedCUAU(**options)
    with pytest.raises(UserError, match="num_clusters = 7"):
        toy.run(FedCUAU(num_clusters=7), toy.Tiny(), tmp_path, 1)
    with pytest.raises(UserError, match="over = 'fedper'"):
        toy.run(FedCUAU(over="fedper"), toy.Tiny(), tmp_path, 1, model=toy.mlp())
