"""FedCCFA: clusters, means and loss by hand, a visit spelled out, and the limit without classifiers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, fake_device, toy
from torch.testing import assert_close

from mpifl.algorithms.fedbabu import FedBABU
from mpifl.algorithms.fedccfa import FedCCFA, aligned, balanced, class_vector, entropy
from mpifl.clustering.distances import madc
from mpifl.core.errors import UserError
from mpifl.core.parameters import put, take
from mpifl.core.rng import key
from mpifl.core.types import Message
from mpifl.training.tasks import Classification


def test_classifiers_with_the_same_cosines_to_the_others_are_one_cluster():
    """Classifiers at angles 0, 0, 90 and 90 degrees, C = 1, e = 2, without bias.

    Clients 0 and 1 have the cosines 0 and 0 with the others: distance 0. Clients 0 and 2: |cos(0, 1) - cos(2,
    1)| = |1 - 0| and |cos(0, 3) - cos(2, 3)| = |0 - 1|, mean 1.
    """
    heads, has = np.array([[1.0, 0], [2, 0], [0, 1], [0, 3]]), np.ones((4, 1), bool)
    for eps, expected in ((0.1, [0, 0, 2, 2]), (0.999, [0, 0, 2, 2]), (1.001, [0, 0, 0, 0])):
        assert_array_equal(FedCCFA(eps=eps).clusters(heads, has, 2)[:, 0], expected)


def test_clusters_are_those_of_dbscan_with_one_core_point():
    from sklearn.cluster import DBSCAN

    v = key(0, "dbscan").numpy().normal(size=(12, 3))
    unit = v / np.linalg.norm(v, axis=1, keepdims=True)
    sizes = set()
    for eps in (0.1, 0.2, 0.3, 0.5):
        ours = FedCCFA(eps=eps).clusters(v, np.ones((12, 1), bool), 3)[:, 0]
        found = DBSCAN(eps=eps, min_samples=1, metric="precomputed").fit(madc(unit @ unit.T)).labels_
        assert_array_equal(ours[:, None] == ours, found[:, None] == found)
        sizes.add(len(np.unique(ours)))
    assert len(sizes) > 2, "thresholds must differ in what they merge"


def test_only_clients_with_samples_of_a_class_are_clustered_and_two_are_not_compared():
    """Class 0: clients 0, 1 and 3 have samples, with equal vectors. Class 1: only two, with equal vectors.
    C = 2, e = 1, no bias.
    """
    heads = np.array([[1.0, 1.0], [1.0, 9.0], [1.0, 1.0], [1.0, 5.0]])
    has = np.array([[1, 0], [1, 0], [0, 1], [1, 1]], bool)
    assert_array_equal(FedCCFA().clusters(heads, has, 1), [[0, -1], [0, -1], [-1, 2], [0, 3]])


def test_a_class_vector_holds_weights_and_bias():
    """C = 3, e = 2: the weights of class 1 are the numbers 2 and 3, its bias is number 7."""
    assert_array_equal(class_vector(1, 3, 2, 9), [2, 3, 7])
    assert_array_equal(class_vector(1, 3, 2, 6), [2, 3])


@pytest.mark.parametrize(
    ("weighted", "first", "second"), [(False, [3.0, 13.0], 12.0), (True, [4.0, 14.0], 13.0)]
)
def test_class_vectors_and_anchors_are_averaged_in_their_clusters(weighted, first, second):
    """C = 2, e = 1, with bias: a head is w_0, w_1, b_0, b_1. Clients 0 and 1 are clustered in class 0, with 1
    and 3 samples; client 2, of the same cluster in an earlier step, is absent.

    w_0 of 1 and 5: (1 + 5) / 2 = 3, or (1 + 3 * 5) / 4 = 4; b_0 and the anchor likewise.
    """
    tables = {
        "body": [[0.0]],
        "head": [[1.0, 7.0, 11.0, 17.0], [5.0, 8.0, 15.0, 18.0], [9.0, 9.0, 9.0, 9.0]],
        "anchors": [[10.0, 20.0], [14.0, 21.0], [30.0, 31.0]],
    }
    memory = {
        "cluster": [[0, 0], [0, 1], [0, 0]],
        "counts": [[1, 1], [3, 1], [50, 1]],
        "fresh": [True, True, False],
    }
    server = byhand.server(3, memory, 1, **tables)
    new = FedCCFA(weighted=weighted).server_update(server, server).tables
    w, b = first
    assert_close(new["head"], torch.tensor([[w, 7.0, b, 17.0], [w, 8.0, b, 18.0], [9.0] * 4]))
    assert_close(new["anchors"], torch.tensor([[second, 20.0], [second, 21.0], [30.0, 31.0]]))


def test_a_step_averages_extractors_by_samples_and_keeps_the_rows_of_absent_clients():
    """n = 1, 3 and 4, of clients 0, 2 and 3 of four. All have class 0 only, and equal classifiers."""
    start = {"cluster": [[7, 7]] * 4, "counts": [[9, 9]] * 4, "fresh": [True] * 4}
    tables = {"body": [[0.0]], "head": [[0.0, 0.0]] * 4, "anchors": [[0.0, 0.0]] * 4}
    notes = byhand.notes([1, 3, 4], [0, 2, 3], balanced=[[1.0, 2.0]] * 3, counts=[[1, 0], [3, 0], [4, 0]])
    plan = FedCCFA().aggregate(byhand.server(4, start, **tables), notes)
    body, head, anchors = plan.mixings
    assert_allclose(body.weights, [[1 / 8, 3 / 8, 4 / 8]])
    for mixing in (head, anchors):
        assert_allclose(mixing.weights, [[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
        assert_allclose(mixing.keep, [0, 1, 0, 0])
    assert_array_equal(plan.algorithm_state["cluster"], [[0, -1], [7, 7], [0, -1], [0, -1]])
    assert_array_equal(plan.algorithm_state["counts"], [[1, 0], [9, 9], [3, 0], [4, 0]])
    assert_array_equal(plan.algorithm_state["fresh"], [True, False, True, True])


class Plain(torch.nn.Module):
    """Embedding = the input, logits = the embedding."""

    def embed(self, x):
        return x

    def head(self, z):
        return z


def test_the_loss_with_alignment_by_hand():
    """z = (1, 0); anchors (2, 0) with cosine 1, (0, 3) with cosine 0, none for class 2; tau = 0.5.

    A sample of class 0: align = -ln(e^2 / (e^2 + 1)) = ln(1 + e^-2). A sample of class 2 has no anchor and
    counts as 0: the mean over both is half of it, times the weight 3.
    """
    anchors = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    x, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 2])
    task = Classification()
    module = Plain()
    module.head = lambda z: F.pad(z, (0, 1))
    found = aligned(anchors, 3.0, 0.5, task)(module, x, y, torch.arange(2))
    cross_entropy = float(F.cross_entropy(F.pad(x, (0, 1)), y))
    assert_allclose(float(found), cross_entropy + 3 * math.log(1 + math.exp(-2)) / 2, rtol=1e-6)


def test_the_weight_of_the_alignment_is_the_entropy_of_the_classes():
    assert_allclose(entropy(torch.tensor([2, 2, 0])), math.log(2))
    assert_allclose(entropy(torch.tensor([5, 0, 0])), 0.0)


@pytest.mark.parametrize(("most", "each"), [(5, 2), (1, 1)])
def test_a_balanced_set_has_as_many_of_each_class_as_the_rarest(most, each):
    split = byhand.images(0, 9, [0, 0, 0, 0, 2, 2, 2, 5, 5])
    split = replace(split, x=torch.arange(9.0)[:, None])
    chosen = balanced(split, most, key(1))
    assert_array_equal(torch.bincount(chosen.y), [each, 0, each, 0, 0, each])
    assert len(set(chosen.x[:, 0].tolist())) == 3 * each
    assert_close(split.y[chosen.x[:, 0].long()], chosen.y)


@pytest.mark.parametrize(("step", "aligns"), [(3, False), (4, True)])
def test_a_visit_trains_a_balanced_classifier_then_the_own_one_then_the_extractor(step, aligns, tmp_path):
    method = FedCCFA(align_from=3, align=0.5, head_lr=0.2, head_epochs=2, balanced_epochs=3)
    done = toy.run(method, toy.Tiny(), tmp_path, steps=0)
    _, _, client = done.served[4]
    layout, address, C = client.layout, key(0, "visit", 4, 0), toy.CLASSES
    body, head = layout.part("body"), layout.part("head")
    own, anchors = take(client.init, head) + 0.1, torch.arange(1.0, 25.0)
    tables = {"body": take(client.init, body)[None] * 0.9, "head": own[None], "anchors": anchors[None]}
    message = Message(tables, dict.fromkeys(tables, (0,)), step - 1, step)
    report, state = method.local_update(message, {}, client, address)

    start = put(client.init, body, tables["body"][0])
    few = balanced(client.data.train, 5, address.of("samples"))
    even = client.sgd(start, address.of("balanced"), split=few, part=head, epochs=3, lr=0.2).vector
    w = client.sgd(put(start, head, own), address.of("head"), part=head, epochs=2, lr=0.2).vector
    loss = aligned(anchors.reshape(C, -1), 0.5, 0.1, client.task)
    w = client.sgd(w, address, part=body, loss=loss if aligns else None).vector
    assert state == {}
    assert_allclose(report.notes["balanced"], take(even, head).numpy())
    assert_close(report.vectors["body"], take(w, body))
    assert_close(report.vectors["head"], take(w, head))
    z = client.embed(w, client.data.train.x)
    means = torch.stack([z[client.data.train.y == c].mean(0) for c in range(C)])
    assert_close(report.vectors["anchors"], means.flatten())


def test_without_training_of_classifiers_it_is_fedbabu(tmp_path):
    """All classifiers stay the initial one, and extractors are trained under it and averaged by samples."""
    method = FedCCFA(head_epochs=0, balanced_epochs=0, align=0.0)
    one, two = (toy.run(a, toy.Tiny(), tmp_path / str(i)) for i, a in enumerate((method, FedBABU())))
    assert_close(one.server.tables["body"], two.server.tables["body"], rtol=0, atol=0)
    initial = take(one.server_step.problem.init(0), one.server_step.problem.layout.part("head"))
    assert_close(one.server.tables["head"], initial.expand(6, -1))


def test_clients_whose_labels_mean_the_same_share_classifiers(tmp_path):
    """The two groups of the toy data have shifted labels."""
    done = toy.run(FedCCFA(eps=0.3, align_from=1), toy.Tiny(), tmp_path, steps=4)
    assert_array_equal(done.server_step.algorithm.labels(done.server), toy.Tiny().groups)
    head, anchors = done.server.tables["head"], done.server.tables["anchors"]
    for table in (head, anchors):
        assert_close(table, table[[0, 0, 0, 3, 3, 3]], rtol=0, atol=0)
        assert float((table[0] - table[3]).abs().max()) > 0.05


def test_clients_on_a_device_align_to_the_same_numbers(tmp_path):
    method = FedCCFA(align=0.5, align_from=1)
    here = toy.run(method, toy.Tiny(), tmp_path / "here", steps=2, evaluate=False)
    with fake_device.gpu(1 << 40):
        there = toy.run(method, toy.Tiny(), tmp_path / "there", steps=2, evaluate=False)
    for name, table in here.server.tables.items():
        assert_close(there.server.tables[name], table)


def test_a_head_without_a_row_for_each_class_is_refused():
    with pytest.raises(UserError, match=r"model\.name"):
        FedCCFA().check(byhand.problem([1, 2, 3], replace(byhand.FLAT, shapes=((1,), (3, 1)))))
