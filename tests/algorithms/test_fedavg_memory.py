"""FedAvg with memory by hand, and against a mean over all clients' last models."""

from __future__ import annotations

import numpy as np
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.parameters import Layout
from mpifl.core.types import ProblemInfo

MEMORY = CATALOGUE["fedavg_memory"]()


def test_with_memory_those_who_never_came_count_as_the_initial_model():
    """n = 1, 3, 2, 4. Clients 0 and 2 have uploaded: row 0 is 1/10 and 2/10 of them, and 7/10 of w^0 in row
    1, which stays.
    """
    problem = ProblemInfo(4, 2, np.array([1, 3, 2, 4]), Layout(("w",), ((1,),), 1), lambda j: torch.ones(1))
    server = MEMORY.setup(problem, None, byhand.KEY)
    assert_array_equal(server.tables["model"], [[1.0], [1.0]])
    assert_array_equal(MEMORY.labels(server), [0, 0, 0, 0])
    plan = MEMORY.aggregate(server, byhand.notes([1, 2], [0, 2]))
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights, [[0.1, 0.2], [0, 0]])
    assert_allclose(mixing.keep, [[0, 0.7], [0, 1]])


def test_with_memory_the_model_is_the_mean_of_all_last_models(tmp_path):
    """Against a mean in NumPy of what every client uploaded last; half of them take part in a step."""
    world, initial = toy.Tiny(), None
    n, last = world.sizes[:, 0], {}
    for step, run in enumerate(toy.walk(MEMORY, world, tmp_path, participation=0.5), 1):
        if initial is None:
            initial = run.servers[0].tables["model"][0].numpy().astype(np.float64)
            last = dict.fromkeys(range(world.num_clients), initial)
        notes, store = run.notes[-1], run.server_step.config.store
        for k in notes.client[notes.fresh].tolist():
            visits = int(run.server_step.visits[k])
            last[k] = store.load("upload", k, visits)["model"].numpy().astype(np.float64)
        mean = sum(n[k] * last[k] for k in last) / n.sum()
        assert_allclose(run.server.tables["model"][0].numpy(), mean, atol=1e-6)
        assert_allclose(run.server.tables["model"][1].numpy(), initial, rtol=0, atol=0)
        if step == 4:
            break
    assert len({id(v) for v in last.values()}) > 3, "some have come again, some clients more than once"


def test_it_differs_from_fedavg_where_some_are_away(tmp_path):
    runs = [
        toy.run(method, toy.Tiny(), tmp_path / str(i), 2, participation=0.5)
        for i, method in enumerate((MEMORY, CATALOGUE["fedavg"]()))
    ]
    assert runs[1].server.tables["model"].shape[0] == 1
    assert float((runs[0].models() - runs[1].models()).abs().max()) > 1e-3
    assert_close(runs[0].models(), runs[0].models()[:1].expand(6, -1))
