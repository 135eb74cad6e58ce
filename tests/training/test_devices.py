"""What crosses between the server's memory and a client's device; on a GPU, whole methods."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import fake_device, toy
from support.cases import CASES, OPTIONS, named
from support.nightly import mostly_nightly
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.devices import (
    CPU,
    RowsOnDevice,
    message_on,
    report_to_main_memory,
    split_on,
    state_on,
    tensors_on,
    upload_budget,
    use_deterministic_algorithms,
)
from mpifl.core.federation import Federation, LazyClient, Split
from mpifl.core.metric import Metric
from mpifl.core.rng import key
from mpifl.core.task import Task
from mpifl.core.types import Message, Report
from mpifl.experiment.schema import SystemConfig
from mpifl.models import MODELS
from mpifl.training.client import LocalClient, public_clients
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.optimizer import fused_sgd

META = torch.device("meta")  # a device without memory: where a tensor is said to be is all there is to it
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TRIED = [case for case in CASES if case[1] == OPTIONS.get(case[0], {}) or "migration" in case[1]]
FEW = [  # of the usual run: of each kind of hook and state; names as in `TRIED`
    *(case for case in TRIED if case[0] in ("cfl", "fedclust", "ucfl", "flt", "feddrift", "ifca", "flexcfl")),
    *("pacfl", "emdcfl", "fedccfa", "ccfl", "scaffold", "ditto", "apfl", "fedrep", "fedamp", "fedem"),
    *("fedrc", "fedcuau", "fedfomo", "fedadam", "moon", "perfedavg", "hypcluster", "fedsac"),
]
TOGETHER = [name for name, cls in CATALOGUE.items() if not cls().needs.single_upload]


def test_everything_a_client_reads_is_brought_to_its_device():
    message = Message({"model": torch.zeros(2, 3)}, {"model": (0, 1)}, version=4, step=5)
    there = message_on(message, META)
    assert there["model"].device == META
    assert (there.rows, there.version, there.step) == (message.rows, 4, 5)
    assert state_on({"a": torch.zeros(1)}, META)["a"].device == META
    split = split_on(Split(torch.zeros(2, 1), torch.zeros(2)), META)
    assert (split.x.device, split.y.device) == (META, META)


def test_on_the_cpu_nothing_is_copied():
    rows, state = torch.zeros(2, 3), {"a": torch.zeros(1)}
    message = Message({"model": rows}, {"model": (0, 1)})
    report = Report(0, 1, {"model": rows}, {"loss": 1.0})
    assert message_on(message, CPU) is message
    assert state_on(state, CPU) is state
    assert report_to_main_memory(report, CPU) is report
    assert tensors_on(state, CPU)["a"] is state["a"]


def test_rows_begin_where_products_add_in_one_order_wherever_they_lay():
    """A product of BLAS has other last bits where its factors begin elsewhere in a line of the cache."""
    table = torch.randn(6, 911)
    for row in range(6):
        message = Message({"model": table[:1], "direction": table[row : row + 1]}, {"direction": (row,)}, 4)
        there = message_on(message, CPU)
        assert_close(there["direction"], table[row : row + 1], rtol=0, atol=0)
        assert there["direction"].data_ptr() % 64 == 0
        assert there["model"] is message["model"]
        assert there.version == 4


def test_what_is_no_tensor_stays_what_it_is():
    assert tensors_on({"n": 3, "name": "x"}, META) == {"n": 3, "name": "x"}


def test_clients_of_the_server_answer_in_its_memory():
    torch.manual_seed(0)
    learner, federation = Learner(toy.mlp(8).build((1, 4, 4), 3)), toy.Tiny()
    (client,) = public_clients(federation, learner, LocalConfig(), [federation.client(0).train])
    assert client.init.device == client.gradient(learner.init).device == CPU
    assert client.embed(learner.init, client.data.train.x).device == CPU


def test_a_gpu_is_asked_for_the_same_bits_each_time_and_a_cpu_is_left_alone(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is taken back after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    use_deterministic_algorithms(CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        use_deterministic_algorithms(torch.device("cuda:3"))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory, "every buffer would be written twice"
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_that_many_clients_download_are_copied_once():
    """Until the step ends: then the same memory may hold other numbers."""
    rows, other = torch.zeros(2, 3), torch.ones(3)
    downloads = RowsOnDevice(META)
    first = downloads.message(Message({"model": rows}, {"model": (0, 1)}, version=4, step=5))
    second = downloads.message(Message({"model": rows, "head": other}, {"model": (0, 1), "head": 0}))
    assert first["model"].device == META
    assert (first.rows, first.version, first.step) == ({"model": (0, 1)}, 4, 5)
    assert second["model"] is first["model"]
    assert second["head"].shape == (3,)
    assert downloads.message(Message({"model": rows[0]}, {"model": 0}))["model"].shape == (3,)
    downloads.clear()
    assert downloads.message(Message({"model": rows}, {"model": (0, 1)}))["model"] is not first["model"]


def test_few_rows_are_kept_on_a_device():
    downloads, rows = RowsOnDevice(META), torch.zeros(RowsOnDevice.MOST + 1, 3)
    first, *_ = [downloads.message(Message({"model": row}, {"model": 0}))["model"] for row in rows]
    assert downloads.message(Message({"model": rows[0]}, {"model": 0}))["model"] is not first


def test_on_the_cpu_rows_are_those_of_the_table():
    rows = torch.zeros(2, 16)
    assert RowsOnDevice(CPU).message(Message({"model": rows}, {"model": (0, 1)}))["model"] is rows


def test_training_brings_no_test_images_to_a_device():
    """Each split of a client is read, and copied, when a method first asks for it."""
    asked = []

    class Watched(Federation):
        def client(self, k, visit=0):
            return LazyClient.reading(lambda name: asked.append(name) or Split(*torch.zeros(2, 5)), ("far",))

    learner = SimpleNamespace(device=META, layout=None, init=torch.zeros(1), task=None)
    client = LocalClient(0, Watched(), learner, LocalConfig())
    assert client.data.train.x.device == META
    assert client.data.train is client.data.train
    assert asked == ["train"]
    assert client.data.extra["far"].y.device == client.data.val.y.device == client.data.test.y.device == META
    assert asked == ["train", "far", "val", "test"]


@gpu
@pytest.mark.parametrize(("precision", "least", "most"), [("float32", 0, 1e-5), ("tf32", 5e-5, 0.2)])
def test_float32_on_a_gpu_is_float32_unless_tf32_is_asked_for(precision, least, most):
    """A step against the same on a CPU, relative to its length; PyTorch takes TF32 for convolutions."""
    x, found = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(0)), []
    for device, format in (("cpu", "float32"), ("cuda", precision)):
        config = LocalConfig(batch_size=64, lr=0.1, precision=format)
        torch.manual_seed(3)
        learner = Learner(MODELS["lenet5"]().build((1, 28, 28), 10), device, kernels=False)
        split = Split(x.to(device), (torch.arange(64) % 10).to(device))
        found.append((learner.sgd(learner.init, split, config, key(1)).vector - learner.init).cpu())
    apart = float((found[1] - found[0]).norm() / found[0].norm())
    assert least <= apart < most
    assert not torch.backends.cudnn.allow_tf32, "nor where nothing trains"


@pytest.mark.parametrize(("momentum", "first"), [(0.0, False), (0.9, True)])
def test_a_first_step_is_one_of_momentum_of_which_pytorch_warns_on_a_gpu(momentum, first, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *given, **options: seen.append(options["is_first_step"]))
    fused_sgd([torch.ones(1)], [torch.ones(1)], [torch.ones(1)], LocalConfig(momentum=momentum), 0.1, True)
    assert seen == [first]


@gpu
def test_reports_come_home_through_page_locked_memory():
    there = {"model": torch.arange(1e6, device="cuda"), "loss": torch.ones(2, 3, device="cuda").T}
    report = Report(0, 1, {"model": there["model"]}, {"loss": there["loss"], "n": 4})
    home = report_to_main_memory(report, torch.device("cuda", 0))
    assert home.vectors["model"].is_pinned()
    assert_close(home.vectors["model"], torch.arange(1e6), rtol=0, atol=0)
    assert_close(home.notes["loss"], torch.ones(3, 2), rtol=0, atol=0)
    assert home.notes["n"] == 4


def test_ranks_share_a_quarter_of_what_is_free_on_their_gpus(monkeypatch):
    """800 bytes are free, 200 are this process's to use again; three ranks of a node share two GPUs."""
    facts = {"mem_get_info": (800, 1000), "memory_reserved": 300, "memory_allocated": 100, "device_count": 2}
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fact=fact: fact)
    assert [upload_budget(torch.device("cuda", 0), ranks) for ranks in (1, 2, 3)] == [250, 250, 125]
    assert upload_budget(CPU, 1) == 0, "nothing is away from main memory"


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("case", mostly_nightly(TRIED, FEW, named))
def test_a_method_finds_on_a_fake_gpu_what_it_finds_on_a_cpu(case, tmp_path):
    """Nothing reads a device's memory as if it were main memory, or mixes the two; short visits will do."""
    name, options = case
    short = {"steps": 2, "evaluate": True, "local": replace(toy.LOCAL, steps=1)}
    cpu = toy.run(CATALOGUE[name](**options), toy.Tiny(), tmp_path / "cpu", **short)
    with fake_device.gpu():
        there = toy.run(CATALOGUE[name](**options), toy.Tiny(), tmp_path / "there", **short)
    for table, rows in cpu.server.tables.items():
        assert there.server.tables[table].device == CPU
        scale = float(rows.abs().max()) if rows.numel() else 1.0
        assert_close(there.server.tables[table], rows, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("stack", [0, 3])
def test_stacks_find_their_samples_on_a_fake_gpu(stack, tmp_path):
    """0 measures: on samples of a typical client, which the source gives in main memory."""
    system = SystemConfig(stack=stack)
    with fake_device.gpu():
        there = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, steps=2, system=system)
    assert len(there.notes) == 2


@dataclass(frozen=True)
class Classes(Task):
    """Classes, of which the sums are tensors where the outputs are."""

    labels: ClassVar = ("classes",)
    known: ClassVar = {"hit": Metric("hit", "hits", better=1, percent=True)}

    def losses(self, output, labels):
        return torch.nn.functional.cross_entropy(output, labels, reduction="none")

    def sums(self, output, labels):
        hits = (output.argmax(1) == labels).sum()
        return {"n": len(labels), "loss": self.losses(output, labels).double().sum(), "hits": hits}

    def figures(self, sums):
        return {"hit": float(sums["hits"] / sums["n"]), "loss": float(sums["loss"] / sums["n"])}


@pytest.mark.parametrize("method", ["fedavg", "fedem"])
def test_sums_of_a_task_of_ones_own_may_be_tensors_on_a_device(method, tmp_path):
    scores = toy.run(CATALOGUE[method](), toy.Tiny(), tmp_path / "cpu", task=Classes()).scores
    with fake_device.gpu():
        there = toy.run(CATALOGUE[method](), toy.Tiny(), tmp_path / "there", task=Classes()).scores
    assert_close(there["hit"], scores["hit"], rtol=0, atol=0.01)
    assert len(np.unique(scores["hit"])) > 1


@gpu
@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("name", TOGETHER)
def test_a_method_finds_on_a_gpu_what_it_finds_on_a_cpu(name, stack, tmp_path):
    found = []
    for device in ("cpu", "cuda"):
        algorithm, system = CATALOGUE[name](**OPTIONS.get(name, {})), SystemConfig(device=device, stack=stack)
        folder = tmp_path / device
        found.append(toy.run(algorithm, toy.Tiny(), folder, steps=2, system=system))
    cpu, cuda = found
    for table, rows in cpu.server.tables.items():
        assert cuda.server.tables[table].device == CPU
        scale = float(rows.abs().max()) if rows.numel() else 1.0
        assert_close(cuda.server.tables[table], rows, rtol=0, atol=1e-2 * scale)
