"""PyTorch's settings: a run has the defaults, and what user code sets changes neither run nor caller."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

import mpifl
from mpifl.core.torch_state import SETTINGS, kept, pinned, replaced, restore, state

CONFIG = {
    "rounds": 2,
    "algorithm": "fedavg",
    "model": {"name": "emdcnn", "channels": [3, 4], "embedding": 6},
    "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 90], "clients": 4}},
    "local": {"lr": 0.05},
    "system": {"kernels": False},
}
OTHER = {
    "autocast of the CPU": True,
    "float32_matmul_precision": "medium",
    "mkldnn.conv.fp32_precision": "bf16",
    "mkldnn.enabled": False,
    "default_dtype": torch.float64,
    "default_device": torch.device("meta"),
    "grad_enabled": False,
    "deterministic_algorithms": (True, True),
    "num_threads": 2,
}


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
            assert name in said[0]
            assert str(OTHER[name]) in said[0]
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
