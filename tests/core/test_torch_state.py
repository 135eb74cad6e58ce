"""PyTorch's settings: a run has the defaults, and what user code sets changes neither run nor caller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mpifl
from mpifl.core.errors import UserError
from mpifl.core.torch_state import SETTINGS, Originals, kept, pinned, replaced, restore, state
from mpifl.results.run_folder import is_complete

CONFIG = {
    "rounds": 2,
    "algorithm": "fedavg",
    "model": {"name": "emdcfl_cnn", "channels": [3, 4], "embedding": 6},
    "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 90], "clients": 4}},
    "local": {"lr": 0.05},
    "system": {"kernels": False},
}
OTHER = {
    "autocast of the CPU": True,
    "autocast of GPUs": True,
    "type of autocast on the CPU": torch.float16,
    "type of autocast on GPUs": torch.bfloat16,
    "fp32_precision": "tf32",
    "float32_matmul_precision": "medium",
    "mkldnn.matmul.fp32_precision": "bf16",
    "mkldnn.conv.fp32_precision": "bf16",
    "mkldnn.rnn.fp32_precision": "bf16",
    "mkldnn.enabled": False,
    "mkldnn.deterministic": True,
    "nnpack.enabled": False,
    "mha.fastpath": False,
    "kernels of attention (flash, mem_efficient, math, cudnn)": (False, True, True, False),
    "cudnn.enabled": False,
    "cudnn.benchmark": True,
    "cudnn.deterministic": True,
    "cudnn.conv.fp32_precision": "ieee",
    "cudnn.rnn.fp32_precision": "ieee",
    "default_dtype": torch.float64,
    "default_device": torch.device("meta"),
    "grad_enabled": False,
    "deterministic_algorithms": (True, True),
    "denormal numbers as 0": True,
    "errors of NumPy": dict.fromkeys(("divide", "over", "under", "invalid"), "raise"),
    "num_threads": 2,
    "working folder": os.sep,
}
if torch.backends.opt_einsum.is_available():
    OTHER |= {"opt_einsum.enabled": False, "opt_einsum.strategy": "greedy"}
OTHER = {name: OTHER[name] for name in SETTINGS if name in OTHER}


@pytest.fixture(autouse=True)
def unchanged():
    """Restore the settings of the test's process."""
    before = state()
    yield
    restore(before)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return identity_of(mpifl.run(CONFIG, output={"folder": str(tmp_path_factory.mktemp("usual"))}))


def identity_of(run):
    return run.summary["digest"], run.summary["identity"]


@pytest.mark.parametrize("name", OTHER)
def test_the_block_of_a_run_has_the_default_and_the_caller_what_it_has_set(name):
    SETTINGS[name].set(OTHER[name])
    said = []
    with pinned(said.append):
        if SETTINGS[name].default is not None:
            assert SETTINGS[name].get() == SETTINGS[name].default
            told = name, str(OTHER[name])
            if name == "mkldnn.matmul.fp32_precision":
                told = "float32_matmul_precision", "mixed"
            assert all(text in said[0] for text in told)
    assert SETTINGS[name].get() == OTHER[name]


@pytest.mark.parametrize("name", OTHER)
def test_user_code_leaves_a_setting_as_it_was_also_if_it_fails(name):
    before = state()

    def fails():
        with kept():
            SETTINGS[name].set(OTHER[name])
            raise ValueError("so be it")

    with pytest.raises(ValueError, match="so be it"):
        fails()
    assert state()[list(SETTINGS).index(name)] == before[list(SETTINGS).index(name)]


def test_each_setting_is_changed_here():
    assert {*SETTINGS} - {*OTHER} <= {"opt_einsum.enabled", "opt_einsum.strategy"}


def test_the_defaults_of_pytorch_are_not_reported():
    said = []
    with pinned(said.append):
        pass
    assert not said


class Sets:
    """Sets everything that `OTHER` holds, and another working folder, after the first round."""

    def __init__(self, folder):
        self.folder = folder

    def on_round(self, done):
        for name, value in OTHER.items():
            if name != "default_device":
                SETTINGS[name].set(value)
        os.chdir(self.folder)


def test_a_callback_and_the_calling_code_change_no_number(tmp_path, usual, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    given = {"callbacks": [Sets(tmp_path / "elsewhere")], "output": {"folder": "relative"}}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.backends.mkldnn.enabled = False
        assert identity_of(mpifl.run(CONFIG, **given)) == usual
        assert torch.is_autocast_enabled("cpu")
    assert os.getcwd() == str(tmp_path)
    assert not [*(tmp_path / "elsewhere").iterdir()]


WANDERS = """
import os
from dataclasses import dataclass
import torch
from torch.utils.data import Dataset
from mpifl.algorithms.fedavg import FedAvg

AWAY = {folder!r}

class Samples(Dataset):
    def __init__(self, train):
        os.chdir(AWAY)
    def __len__(self):
        return 40
    def __getitem__(self, i):
        os.chdir(AWAY)
        return torch.full((4,), float(i % 3)).numpy(), i % 3

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        os.chdir(AWAY)
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        os.chdir(AWAY)
        return self.layer(x)

@dataclass(frozen=True)
class Mine(FedAvg):
    def aggregate(self, *args):
        os.chdir(AWAY)
        return super().aggregate(*args)

def share(logits, labels):
    os.chdir(AWAY)
    return 0.5

os.chdir(AWAY)
"""


def test_no_code_of_the_user_moves_the_folders_of_a_run(tmp_path, monkeypatch):
    """A method, a data set, a model and a metric change the working folder, and so does their import."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    Path("wanders.py").write_text(WANDERS.format(folder=str(tmp_path / "away")))
    own = {name: f"wanders.py:{name}" for name in ("Mine", "Samples", "Net", "share")}
    tree = {
        "algorithm": {"name": own["Mine"]},
        "data": {"source": {"name": "dataset", "path": own["Samples"]}, "cache": "cache"},
        "model": {"name": "custom", "path": own["Net"], "head": "layer"},
        "evaluation": {"metrics": [own["share"]]},
        "output": {"folder": "relative", "id": "x", "client_models": True},
        **{"name": "tiny", "rounds": 2, "checkpoint": {"every": 1}},
    }
    tree["data"]["scenario"] = {"name": "iid", "clients": 4}
    mpifl.run(tree)
    assert is_complete(tmp_path / "relative" / "tiny-x")
    assert not [*(tmp_path / "away").iterdir()]
    assert os.getcwd() == str(tmp_path)


MODULE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
    def forward(self, x):
        out = self.layer(x.flatten(1))
        {what}
        return out
"""


CHANGES = {  # name -> how other code changes it, and how the test puts it back
    "torch.nn.functional.relu": lambda: setattr_of(functional, "relu", functional.gelu),
    "torch.matmul": lambda: setattr_of(torch, "matmul", lambda *args: args[0]),
    "torch.Tensor.add": lambda: setattr_of(torch.Tensor, "add", lambda *args: args[0]),
    "torch.nn.Linear.forward": lambda: setattr_of(torch.nn.Linear, "forward", lambda self, x: x),
    "torch.nn.modules.module._global_forward_hooks": lambda: (
        torch.nn.modules.module.register_module_forward_hook(lambda *args: None).remove
    ),
    "torch.overrides.TorchFunctionMode": lambda: entered(Functions()),
    "torch.utils._python_dispatch.TorchDispatchMode": lambda: entered(Operations()),
    "torch.autograd.graph.saved_tensors_hooks": lambda: entered(
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    ),
    "torch.inference_mode": lambda: entered(torch.inference_mode()),
}


class Functions(TorchFunctionMode):
    """A mode that calls each function as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """A mode that calls each operation as it is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def setattr_of(owner, name, value):
    """Replace a member; return a function that takes the replacement back."""
    old, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old) if own else delattr(owner, name)


def entered(context):
    """Enter a context; return a function that leaves it."""
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


class Changes:
    """Changes one of `CHANGES` after the first round."""

    def __init__(self, name):
        self.name, self.rounds, self.undo = name, 0, lambda: None

    def on_round(self, done):
        self.rounds += 1
        self.undo = CHANGES[self.name]()


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_put_back_is_seen(name):
    originals = Originals()
    assert not originals.changed()
    undo = CHANGES[name]()
    try:
        found = originals.changed()
    finally:
        undo()
    assert found == [name]
    assert not originals.changed()


def test_what_pytorch_changes_in_itself_is_not_taken_for_others():
    originals = Originals()
    compiled = torch.compile(lambda x: functional.relu(x) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert not originals.changed()
    assert not replaced()


@pytest.mark.parametrize("name", [*CHANGES][::4])
def test_a_callback_that_replaces_a_part_of_pytorch_ends_the_run(name, tmp_path):
    changes = Changes(name)
    try:
        with pytest.raises(UserError, match=rf"{name}.*Changes\.on_round"):
            mpifl.run(CONFIG, output={"folder": str(tmp_path)}, callbacks=[changes])
    finally:
        changes.undo()
    assert changes.rounds == 1


def test_a_module_that_replaces_a_function_in_a_visit_ends_the_run(tmp_path, monkeypatch):
    what = "torch.nn.functional.relu = lambda x: x"
    (tmp_path / "net.py").write_text(MODULE.format(what=what))
    monkeypatch.setattr(functional, "relu", functional.relu)  # puts it back
    model = {"name": "custom", "path": f"{tmp_path}/net.py:Net", "head": "layer"}
    with pytest.raises(UserError, match=r"torch\.nn\.functional\.relu.*rank 0"):
        mpifl.run({**CONFIG, "model": model}, output={"folder": str(tmp_path)})


def test_what_a_module_replaces_when_it_is_imported_is_in_the_identity(tmp_path, monkeypatch):
    monkeypatch.setattr(functional, "silu", functional.silu)  # puts it back
    first = "import torch\ntorch.nn.functional.silu = lambda x: x\n"
    (tmp_path / "net.py").write_text(first + MODULE.format(what=""))
    model = {"name": "custom", "path": f"{tmp_path}/net.py:Net", "head": "layer"}
    run = mpifl.run({**CONFIG, "model": model}, output={"folder": str(tmp_path)})
    assert run.summary["identity"]["replaced"] == "torch.nn.functional.silu"


class Sees:
    """Keeps the settings that it sees after each round."""

    def __init__(self):
        self.seen = []

    def on_round(self, done):
        self.seen.append(state())


@pytest.mark.parametrize("what", ["torch.set_num_threads(2)", "torch.backends.mkldnn.enabled = False"])
def test_a_module_that_changes_a_setting_leaves_it_to_nobody(tmp_path, what):
    (tmp_path / "net.py").write_text(MODULE.format(what=what))
    model = {"name": "custom", "path": f"{tmp_path}/net.py:Net", "head": "layer"}
    before, sees = state(), Sees()
    mpifl.run({**CONFIG, "model": model}, output={"folder": str(tmp_path)}, callbacks=[sees])
    threads, enabled = (list(SETTINGS).index(name) for name in ("num_threads", "mkldnn.enabled"))
    assert state() == before
    assert [(s[threads], s[enabled]) for s in sees.seen] == [(before[threads], True)] * 2


def test_replaced_functions_and_hooks_on_all_modules_are_in_the_identity(tmp_path, usual, monkeypatch):
    assert not replaced()
    original = functional.relu
    monkeypatch.setattr(functional, "relu", lambda *args, **options: original(*args, **options))
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        found = identity_of(mpifl.run(CONFIG, output={"folder": str(tmp_path)}))[1]
    finally:
        hook.remove()
    assert found["replaced"] == "torch.nn.modules.module._global_forward_hooks, torch.nn.functional.relu"
    assert found["hash"] != usual[1]["hash"]
