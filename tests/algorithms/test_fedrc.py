"""FedRC: the label correction by hand, and the limit of one cluster."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.fedrc import FedRC
from mpifl.core.federation import ClientData, Split


class Labelled(byhand.Told):
    """A client with two samples, labelled 0 and 1."""

    @property
    def data(self):
        split = Split(torch.zeros(2, 1), torch.tensor([0, 1]))
        return ClientData(split, split, split)


def test_the_label_correction_by_hand():
    """Label sums (3, 1) and (2, 2): C = (3/4, 1/4) and (1/2, 1/2). Equal losses, omega = (1/2, 1/2).

    Label 0: 1 / C = 4/3 against 2, q = (2/5, 3/5). Label 1: 4 against 2, q = (2/3, 1/3). omega <- (8/15,
    7/15).
    """
    client = Labelled([[1.0, 1.0], [1.0, 1.0]])
    message = byhand.message(model=[[0.0], [1.0]], labels=[[3.0, 1.0], [2.0, 2.0]])
    q, omega = FedRC(num_clusters=2).expect(message, {}, client)
    assert_close(q, torch.tensor([[2 / 5, 2 / 3], [3 / 5, 1 / 3]]))
    assert_close(omega, torch.tensor([8 / 15, 7 / 15]))


def test_a_report_carries_the_label_sums(tmp_path):
    """q as above: sample 0 has label 0, sample 1 label 1, so the sums are q itself."""
    client = Labelled([[1.0, 1.0], [1.0, 1.0]])
    message = byhand.message(model=[[0.0], [1.0]], labels=[[3.0, 1.0], [2.0, 2.0]])
    report, state = FedRC(num_clusters=2).local_update(message, {}, client, byhand.KEY)
    assert_close(report.vectors["labels"], torch.tensor([[2 / 5, 2 / 3], [3 / 5, 1 / 3]]))
    assert_close(state["pi"], torch.tensor([8 / 15, 7 / 15]))


def test_label_sums_are_pooled_without_weights():
    """Sums already count samples: each report enters alike, whatever its n."""
    server = byhand.server(2, model=[[0.0], [0.0]], labels=[[1.0], [1.0]])
    plan = FedRC(num_clusters=2).aggregate(server, byhand.notes([1, 3], component=[0, 1]))
    models, labels = plan.mixings
    assert_allclose(models.weights, [[0.25, 0, 0.75, 0], [0, 0.25, 0, 0.75]])
    assert_allclose(labels.weights, [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
    assert labels.into == labels.of == "labels"
    assert_allclose(plan.assign, np.array([0, 1]))


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedrc_with_one_cluster_is_fedavg(participation, tmp_path):
    agree(Limit("K = 1", "fedrc", {"num_clusters": 1}), "fedavg", participation, tmp_path)
