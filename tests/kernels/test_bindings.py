"""The C kernels: what they are built from, what they refuse to read, and that no compiler warns."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from mpifl.kernels import bindings, pooling, training_calls

CC = shutil.which("gcc") or shutil.which("cc")
built = pytest.mark.skipif(not bindings.AVAILABLE, reason=bindings.PROBLEM or "the kernels are there")
sources = pytest.mark.skipif(not bindings.hash_of_sources(), reason="no sources beside mpifl")
training = pytest.mark.skipif(
    not bindings.TRAINING_AVAILABLE, reason=bindings.PROBLEM or "the kernels are there"
)


@sources
@pytest.mark.skipif(CC is None, reason="no compiler")
def test_where_there_is_a_compiler_the_kernels_are_built_from_these_sources():
    assert bindings.AVAILABLE, bindings.PROBLEM
    assert bindings.BUILD["sources"] == bindings.hash_of_sources()
    assert "-O3" in bindings.BUILD["flags"]
    assert bindings.BUILD["compiler"]


@built
@sources
def test_the_hash_of_the_sources_changes_with_each_of_them(tmp_path):
    for name in bindings.SOURCES:
        shutil.copy(bindings.FOLDER / name, tmp_path)
    before = bindings.hash_of_sources(tmp_path)
    assert before == bindings.hash_of_sources()
    for name in bindings.SOURCES:
        text = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(text + b"\n")
        assert bindings.hash_of_sources(tmp_path) != before, name
        (tmp_path / name).write_bytes(text)
    (tmp_path / bindings.SOURCES[2]).unlink()
    assert bindings.hash_of_sources(tmp_path) == "", "a wheel has none: nothing to compare with"


@built
@pytest.mark.parametrize("name", bindings.LIBRARIES)
def test_a_library_built_from_other_sources_is_not_used(name):
    signatures = bindings.LIBRARIES[name]
    assert bindings._open(name, signatures, bindings.BUILD["sources"])
    assert bindings._open(name, signatures, ""), "where no sources lie beside it"
    with pytest.raises(bindings.Unavailable, match="other sources"):
        bindings._open(name, signatures, hashlib.sha256(b"newer").hexdigest()[:12])
    with pytest.raises(bindings.Unavailable, match="other sources"):
        bindings._open(name, {**signatures, "function_of_a_later_version": (None, [])}, "")


def test_libraries_that_are_missing_or_broken_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(bindings, "FOLDER", tmp_path)
    assert bindings._open_all()[0] == {}
    assert "not built" in bindings._open_all()[1]
    for suffix in bindings.EXTENSION_SUFFIXES:
        (tmp_path / f"reductions{suffix}").write_bytes(b"no library")
    assert "do not load" in bindings._open_all()[1]


def c_fields(struct: str) -> list[str]:
    """Return the names of the int64 fields of a struct in training.c."""
    text = (bindings.FOLDER / "training.c").read_text()
    body = re.sub(
        r"/\*.*?\*/", "", text.partition(f"struct {struct} {{")[2].partition("};")[0], flags=re.DOTALL
    )
    return [name.strip() for line in re.findall(r"int64_t ([^;]+);", body) for name in line.split(",")]


@sources
def test_a_layer_has_the_same_fields_in_c_and_python():
    assert c_fields("layer") == list(bindings.LAYER.names)


COMPILERS = {
    "gcc": [shutil.which("gcc")],
    "clang": [shutil.which("clang")],
    "zig": [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else [None],
}


@sources
@pytest.mark.nightly
@pytest.mark.parametrize("name", bindings.LIBRARIES)
@pytest.mark.parametrize(
    "compiler", ["gcc", *(pytest.param(c, marks=pytest.mark.nightly) for c in COMPILERS if c != "gcc")]
)
def test_the_sources_compile_without_a_warning(name, compiler, tmp_path):
    """With clang from the package ziglang as well, if it is installed."""
    if None in COMPILERS[compiler]:
        pytest.skip(f"no {compiler} on this machine")
    flags = ["-O3", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fPIC", "-shared"]
    command = [*COMPILERS[compiler], *flags, bindings.FOLDER / f"{name}.c", "-lm", "-o", tmp_path / "out.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fast = subprocess.run([*command, "-ffast-math"], capture_output=True, text=True)
    assert "fast-math" in fast.stderr, "sums would be others"


def tensors(width: int = 5) -> tuple[torch.Tensor, list[torch.Tensor], np.ndarray, np.ndarray]:
    """Return what `exact_sum_add` takes: two rows of sums, three uploads, weights, grid constants."""
    uploads = [torch.ones(width) for _ in range(3)]
    return torch.zeros(2, width, dtype=torch.int64), uploads, np.ones((2, 3)), np.ones(2)


WRONG = {
    "float64": torch.ones(5, dtype=torch.float64),
    "float16": torch.ones(5, dtype=torch.float16),
    "integers": torch.ones(5, dtype=torch.int32),
    "bool": torch.ones(5, dtype=torch.bool),
    "too short": torch.ones(4),
    "too long": torch.ones(6),
    "elsewhere": torch.ones(5, device="meta"),
}


@built
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_sums_take_uploads_of_one_kind_and_length_only(wrong):
    sums, uploads, weights, magic = tensors()
    bindings.exact_sum_add(sums, uploads, weights, magic)
    with pytest.raises(ValueError, match="an upload must be"):
        bindings.exact_sum_add(sums, [*uploads[:2], wrong], weights, magic)


@built
def test_sums_refuse_tables_of_other_shapes():
    sums, uploads, weights, magic = tensors()
    for wrong in [
        (sums.float(), uploads, weights, magic),
        (sums.t(), uploads, weights, magic),
        (sums, uploads[:2], weights, magic),
        (sums, uploads, weights[:1], magic),
        (sums, uploads, weights, magic[:1]),
    ]:
        with pytest.raises(ValueError, match="must be"):
            bindings.exact_sum_add(*wrong)
    bindings.exact_sum_add(sums, [torch.ones(10)[::2]] * 3, weights, magic)  # made contiguous
    grid, kept = np.ones(2), torch.zeros(2, 5, dtype=torch.float64)
    assert bindings.exact_sum_finish(sums, grid, kept).shape == (2, 5)
    for broken in [
        (sums.int(), grid, kept),
        (sums, grid[:1], kept),
        (sums, grid, kept.float()),
        (sums, grid, kept[:1]),
    ]:
        with pytest.raises(ValueError, match="must"):
            bindings.exact_sum_finish(*broken)
    for vector in (WRONG["float64"], torch.ones(10)[::2]):
        with pytest.raises(ValueError, match="must be"):
            bindings.max_abs(vector)


@built
def test_pooling_refuses_images_it_cannot_read():
    images = torch.zeros(1, 2, 4, 6)
    for pool in (pooling.max_pool2x2, pooling.avg_pool2x2):
        for wrong in [
            images.double(),
            images.transpose(2, 3),
            images[..., :5],
            images[..., :3, :],
            torch.zeros(1, 1, 2, 2050),
        ]:
            with pytest.raises(ValueError, match="must be"):
                pool(wrong)
    grad, index = torch.zeros(1, 2, 2, 3), torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    assert pooling.max_pool2x2_backward(grad, index).shape == images.shape
    for wrong in [(grad.double(), index), (grad, index.int()), (grad, index[..., :2])]:
        with pytest.raises(ValueError, match="must be"):
            pooling.max_pool2x2_backward(*wrong)
    with pytest.raises(ValueError, match="must be"):
        pooling.avg_pool2x2_backward(grad.double())


@training
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"weights": torch.zeros(9, dtype=torch.float64)}, ValueError),
        ({"momentum": torch.zeros(8)}, ValueError),
        ({"gradient": torch.zeros(8)}, ValueError),
        (
            {"samples": (torch.zeros(5, 2, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))},
            ValueError,
        ),
        ({"samples": (torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))}, ValueError),
        ({"samples": (torch.zeros(5, 2), torch.zeros(4, dtype=torch.int64))}, ValueError),
        ({"samples": (torch.zeros(5, 2), torch.zeros(5, dtype=torch.int32))}, ValueError),
        ({"samples": (torch.zeros(5, 2), torch.full((5,), 3))}, IndexError),
        ({"order": np.arange(5, dtype=np.int32)}, ValueError),
        ({"order": np.array([0, 5])}, IndexError),
        ({"order": np.array([-1])}, IndexError),
        ({"factors": torch.ones(1)}, ValueError),
        ({"layers": np.zeros((1, 10), np.int64)}, ValueError),
        ({"layers": np.zeros(1, bindings.LAYER.descr[:9])}, ValueError),
        ({"workspace": torch.zeros(3)}, ValueError),
        ({"batch": 0}, ValueError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_training_refuses_what_it_cannot_read_and_moves_nothing(change, error):
    """A dense layer of two inputs and three classes: 9 weights."""
    dense = bindings.Layer(training_calls.DENSE, in_channels=2, out_channels=3, bias_offset=6, trainable=1)
    layers = np.array([dense], bindings.LAYER)
    given = {
        "layers": layers,
        "weights": torch.zeros(9),
        "momentum": torch.zeros(9),
        "gradient": None,
        "samples": (torch.ones(5, 2), torch.arange(5) % 3),
        "order": np.arange(5),
        "batch": 5,
        "sgd": (0.1, 0.0, 0.0),
        "steps_done": 0,
        "last": True,
        "workspace": torch.zeros(training_calls.workspace_size(layers, 5)),
    }
    with pytest.raises(error):
        training_calls.train(**{**given, **change})
    assert not given["weights"].any()
    assert training_calls.train(**given) > 0
    assert given["weights"].any()
