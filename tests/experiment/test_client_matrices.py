"""Matrices over pairs of clients at the end of a run, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import toy
from support.runs import CONFIG, TASK_CONFIG, TASKS
from torch.nn import functional as F

from mpifl import cli
from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.types import Server
from mpifl.experiment import build, client_matrices
from mpifl.experiment.client_matrices import compare_clients
from mpifl.experiment.context import RunContext
from mpifl.experiment.schema import EvaluationConfig
from mpifl.experiment.section_checks import check_sections
from mpifl.results.run_folder import is_complete
from mpifl.runtime.server_step import ServerStep
from mpifl.simulation.policies import EveryArrival

TOKENS = TASKS["next_token"]


def ran(folder, federation, *matrices: str, **changes) -> tuple[RunContext, ServerStep, Server]:
    """Return a context after its rounds, which are two."""
    evaluation = EvaluationConfig(matrices=matrices)
    config = toy.config_of(CATALOGUE["oracle"](), rounds=2, evaluation=evaluation, **changes)
    context = toy.context_of(config, federation)
    step = build.build_server_step(context, ClientStore("test", str(folder)))
    server = step.initialize()
    for t in (1, 2):
        server, _ = toy.step_of(step, server, context.sampler(t))
        assert t == 2 or step.client_products is None
    return context, step, server


def test_parameters_are_those_of_the_last_uploads_and_nan_where_there_is_none(tmp_path):
    """Half of six take part in two rounds: some are never seen."""
    context, step, _ = ran(tmp_path, toy.Tiny(), "parameters", participation=0.5)
    seen = np.flatnonzero(step.visits)
    assert 3 <= len(seen) < 6
    found = compare_clients(context, step)[0]["parameters"]
    x = np.stack([step.store.load("upload", k, int(step.visits[k]))["model"].numpy() for k in seen])
    expected = np.linalg.norm(x[:, None].astype(float) - x[None], axis=2)
    assert_allclose(found[np.ix_(seen, seen)], expected, atol=1e-6)
    assert np.isnan(np.delete(found, seen, axis=0)).all()


def test_gradients_are_compared_at_the_common_initial_model(tmp_path):
    federation = toy.Tiny()
    context, step, _ = ran(tmp_path, federation, "gradients")
    module = context.config.model.build(federation.shape, federation.num_classes)
    torch.nn.utils.vector_to_parameters(context.problem.init(0), module.parameters())
    rows = []
    for k in range(6):
        data = federation.client(k).train
        loss = F.cross_entropy(module(data.x), data.y)
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]))
    g = F.normalize(torch.stack(rows).double(), dim=1)
    assert_allclose(compare_clients(context, step)[0]["gradients"], g @ g.T, atol=1e-5)


def test_angles_are_those_that_pacfl_compares(tmp_path):
    """Of each class the first three left singular vectors: least angle of two, and of their spans."""
    federation = toy.Tiny()
    context, step, _ = ran(tmp_path, federation, "angles")
    found, _ = compare_clients(context, step)
    assert [*found] == ["angles", "smallest_angles"]
    bases = []
    for k in range(6):
        data = federation.client(k).train
        parts = [data.x[data.y == c].flatten(1).T.double().numpy() for c in range(3)]
        bases.append(np.hstack([np.linalg.svd(x, full_matrices=False)[0][:, :3] for x in parts]))
    for i in range(6):
        for j in range(i):
            spans = [np.linalg.qr(bases[k])[0] for k in (i, j)]
            cosine = min(1.0, float(np.linalg.svd(spans[0].T @ spans[1])[1].max()))
            assert_allclose(np.cos(np.deg2rad(found["smallest_angles"][i, j])), cosine, atol=1e-5)
            products = bases[i].T @ bases[j]
            assert np.abs(np.cos(np.deg2rad(found["angles"][i, j])) - products).min() < 1e-4
    assert_allclose(found["angles"], found["angles"].T)
    assert_allclose(np.diag(found["angles"]), 0)


def test_matrices_and_distances_that_cannot_be_are_refused():
    with pytest.raises(
        UserError, match=r"matrices = \['gradient'\]: use some of parameters, gradients, angles"
    ):
        EvaluationConfig(matrices=("gradient",))
    asynchronous = {"policy": EveryArrival()}
    for asked in ({"distances": True}, {"matrices": ("parameters",)}):
        evaluation = EvaluationConfig(**asked)
        config = toy.config_of(CATALOGUE["fedasync"](), evaluation=evaluation, **asynchronous)
        with pytest.raises(UserError, match="use policy rounds"):
            check_sections(config)
    evaluation = EvaluationConfig(matrices=("gradients", "angles"))
    check_sections(toy.config_of(CATALOGUE["fedasync"](), evaluation=evaluation, **asynchronous))


@pytest.mark.parametrize("source", ["numbers", "tokens"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_angles_of_data_that_pacfl_cannot_compare_are_refused_before_training(
    source, command, tmp_path, capsys
):
    """Numbers as labels, and sequences as samples: the remedy names the matrix, not the method."""
    task = ["--task", "regression"] if source == "numbers" else TOKENS
    options = ["--evaluation.matrices", "[gradients, angles]", "--output.folder", str(tmp_path)]
    time = ["--time", "no"] if command == "plan" else []
    assert cli.main([command, str(TASK_CONFIG), *task, *options, *time]) == 2
    said = capsys.readouterr().err
    assert "evaluation.matrices = ['gradients', 'angles']" in said
    assert "leave angles out" in said
    assert not [*tmp_path.glob("*/run.json")]


def test_a_matrix_that_fails_after_training_leaves_the_other_results(tmp_path, monkeypatch, capsys):
    """The part of client 5 fails, which nothing tries before: all other files are those of a finished run."""

    def failing(context: RunContext, k: int) -> np.ndarray:
        if k == 5:
            raise ZeroDivisionError("client 5")
        return np.eye(64, 3, dtype=np.float32)

    monkeypatch.setitem(client_matrices.PARTS, "angles", failing)
    monkeypatch.setattr(client_matrices, "basis_of", failing)
    place = ["--output.folder", str(tmp_path), "--output.id", "a", "--quiet"]
    assert cli.main(["run", str(CONFIG), "--evaluation.matrices", "[gradients, angles]", *place]) == 1
    said = capsys.readouterr().err
    assert "evaluation.matrices: ZeroDivisionError: client 5" in said
    folder = tmp_path / "tiny-a"
    assert is_complete(folder)
    assert (folder / "model.safetensors").exists()
    assert not (folder / "checkpoints").exists()
    with np.load(folder / "matrices.npz") as found:
        assert found.files == ["gradients"], "those that were made"
    assert cli.main(["resume", str(folder), "--quiet"]) == 0, "there is nothing left to do"
