"""bfloat16 in training: close to float32 by every backend, float32 outside of the step, refused elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from support import toy
from support.runs import CONFIG

from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.models import MODELS
from mpifl.training.backend import Request
from mpifl.training.batched import train_all
from mpifl.training.config import LocalConfig
from mpifl.training.cuda_graph import Replayed
from mpifl.training.learner import Learner
from mpifl.training.precision import BFLOAT16, FLOAT32, check_precision, has_bfloat16

SPLITS = [toy.draw("train", k, n, 0) for k, n in enumerate((23, 10, 5))]
has = pytest.mark.skipif(
    not has_bfloat16(torch.device("cpu")), reason="the processor has no bfloat16 of its own"
)


def way(precision: str) -> LocalConfig:
    """Return how to train in a number format."""
    return LocalConfig(steps=2, batch_size=5, lr=0.05, momentum=0.9, precision=precision)


def learner(name: str, **options) -> Learner:
    """Return a learner of a small network with weights of its own seed."""
    torch.manual_seed(11)
    return Learner(MODELS[name]().build((1, 4, 4), 3), **options)


def seen_by(one: Learner) -> list[torch.dtype]:
    """Return the formats of what the last layer of a model will make, call after call."""
    found: list[torch.dtype] = []
    head = one.flat.module.get_submodule("head")
    plain = type(head).forward

    class Seeing(type(head)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = plain(self, x)
            found.append(out.dtype)
            return out

    head.__class__ = Seeing
    return found


# Share of the change. Max-pooling of nearly equal numbers takes others after rounding: float32 steps from
# weights and images rounded to bfloat16 lie as far away in this network.
MOST = {"mlp": 0.02, "emdcfl_cnn": 0.2}


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("graphs", [None, Replayed()])
def test_bfloat16_is_near_float32_and_is_not_it(name, graphs):
    """Autocast computes bfloat16 on any processor; only whole runs are refused where it is emulated."""
    found = {p: [] for p in (FLOAT32, BFLOAT16)}
    for precision, vectors in found.items():
        one = learner(name, graphs=graphs)
        for k, split in enumerate(SPLITS):
            trained = one.sgd(one.init, split, way(precision), key(1, k))
            assert trained.vector.dtype == torch.float32
            vectors.append(trained.vector - one.init)
    for exact, rounded in zip(*found.values(), strict=True):
        apart = float((rounded - exact).norm() / exact.norm())
        assert 1e-4 < apart < MOST[name]


def test_layers_make_bfloat16_in_training_and_float32_in_evaluation():
    one = learner("mlp", kernels=False)
    made = seen_by(one)
    one.sgd(one.init, SPLITS[2], way(BFLOAT16), key(1))
    assert set(made) == {torch.bfloat16}
    made.clear()
    one.outputs(one.init, SPLITS[2].x)
    one.gradient(one.init, SPLITS[2])
    assert set(made) == {torch.float32}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", MOST)
def test_a_stack_of_clients_is_near_each_of_them_alone(name):
    one = learner(name)
    asked = [Request(one.init, s, way(BFLOAT16), key(1, k)) for k, s in enumerate(SPLITS)]
    for request, found in zip(asked, train_all(one.context, asked), strict=True):
        alone = one.sgd(request.start, request.split, request.config, request.key)
        apart = float((found.vector - alone.vector).norm() / (alone.vector - one.init).norm())
        assert apart < MOST[name]


OPTIONS = ["--local.precision", BFLOAT16, "--system.device", "cpu"]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_tf32_is_refused_in_one_line_on_a_processor(command, capsys):
    options = ["--local.precision", "tf32", "--system.device", "cpu"]
    assert cli.main([command, str(CONFIG), *options]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "local.precision" in x]
    assert "'tf32': the processor has no TF32, which is GPUs'" in line


@pytest.mark.parametrize("command", ["plan", "run"])
def test_it_is_refused_in_one_line_on_a_processor_without_it(command, monkeypatch, capsys):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    assert cli.main([command, str(CONFIG), *OPTIONS]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "local.precision" in x]
    assert "'bfloat16': the processor has neither AVX512-BF16 nor AMX" in line


def test_a_limit_of_instructions_leaves_none_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert has_bfloat16(torch.device("cpu"))
    monkeypatch.setenv("MPIFL_INSTRUCTIONS", "avx2")
    with pytest.raises(UserError, match="'bfloat16': the limit MPIFL_INSTRUCTIONS leaves neither"):
        check_precision(BFLOAT16, torch.device("cpu"))


@has
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_method_that_takes_its_own_gradients_refuses_it(command, capsys):
    assert cli.main([command, str(CONFIG), *OPTIONS, "--algorithm", "perfedavg"]) == 2
    assert (
        "local.precision = 'bfloat16': this method computes gradients of its own" in capsys.readouterr().err
    )


@has
def test_the_identity_of_a_run_names_it(tmp_path, capsys):
    read = {}
    for precision in (FLOAT32, BFLOAT16):
        place = ["--output.folder", str(tmp_path), "--output.id", precision, "--local.precision", precision]
        assert cli.main(["run", str(CONFIG), "--system.device", "cpu", *place]) == 0
        read[precision] = json.loads((tmp_path / f"tiny-{precision}" / "summary.json").read_text())
    assert read[BFLOAT16]["identity"]["precision"] == BFLOAT16
    assert "precision" not in read[FLOAT32]["identity"]
    assert read[BFLOAT16]["digest"] != read[FLOAT32]["digest"]
    assert "trained in bfloat16 by PyTorch, not by the kernels" in capsys.readouterr().out
