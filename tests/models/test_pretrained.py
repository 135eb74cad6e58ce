"""Weights from local files: what fits is loaded, what does not is refused with the file's name."""

import os
import zipfile

import pytest
import torch
from torch.testing import assert_close

from mpifl.core.errors import UserError
from mpifl.core.torchvision_compat import torchvision
from mpifl.models import MODELS

IMAGE = (3, 32, 32)


@pytest.fixture(scope="module")
def published():
    """A torchvision ResNet-18 as someone else would have saved it, with 7 classes."""
    return torchvision().models.resnet18(num_classes=7)


@pytest.fixture
def saved(published, tmp_path):
    path = tmp_path / "resnet18.pth"
    torch.save(published.state_dict(), path)
    return str(path)


def akamaster_names(net):
    """Names as in resnet20-12fca82f.th: `module.` before each, the last layer called linear, no counters."""
    names = {k: k.replace("body.", "").replace("head.", "linear.") for k in net.state_dict()}
    return {
        f"module.{names[k]}": v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")
    }


def test_resnet18_with_the_same_classes_computes_what_the_published_one_does(published, saved):
    x = torch.rand(2, *IMAGE)
    net = MODELS["resnet18"](weights=saved).build(IMAGE, 7)
    assert_close(net.eval()(x), published.eval()(x))


def test_last_layer_stays_as_drawn_when_the_classes_differ(published, saved):
    net = MODELS["resnet18"](weights=saved).build(IMAGE, 10)
    assert net.head.weight.shape == (10, 512)
    assert_close(net.body.net.conv1.weight, published.conv1.weight)
    assert_close(net.body.net.layer4[1].bn2.running_var, published.layer4[1].bn2.running_var)


def test_safetensors_are_read_too(published, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "resnet18.safetensors"
    save_file(published.state_dict(), path)
    net = MODELS["resnet18"](weights=str(path)).build(IMAGE, 7)
    assert_close(net.head.weight, published.fc.weight)


def test_resnet20_reads_the_names_of_its_published_file(tmp_path):
    """The first block of the third stage in the file is `module.layer3.0.conv1.weight` [64, 32, 3, 3]."""
    source = MODELS["resnet20"]().build(IMAGE, 10)
    state = akamaster_names(source)
    assert state["module.layer3.0.conv1.weight"].shape == (64, 32, 3, 3)
    assert state["module.linear.weight"].shape == (10, 64)
    path = tmp_path / "resnet20.th"
    torch.save({"state_dict": state, "best_prec1": 91.73}, path)
    x = torch.rand(2, *IMAGE)
    net = MODELS["resnet20"](weights=str(path)).build(IMAGE, 10)
    assert_close(net.eval()(x), source.eval()(x))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model.weights = .*nowhere.pth.*no such file"):
        MODELS["resnet18"](weights=str(tmp_path / "nowhere.pth")).build(IMAGE, 10)


@pytest.mark.parametrize("name", ["cut.pth", "cut.safetensors"])
def test_truncated_file_is_named(saved, tmp_path, name):
    path = tmp_path / name
    with open(saved, "rb") as file:
        path.write_bytes(file.read(1000))
    with pytest.raises(UserError, match=rf"{name}.*cannot be read"):
        MODELS["resnet18"](weights=str(path)).build(IMAGE, 10)


def test_weights_of_another_model_are_refused_with_the_first_misfit(saved):
    with pytest.raises(UserError, match=r"resnet18.pth.*does not fit.*is missing \(and \d+ more\)"):
        MODELS["resnet50"](weights=saved).build(IMAGE, 7)
    with pytest.raises(UserError, match=r"is missing \(and \d+ more\); body.fc.bias is there instead"):
        MODELS["resnet20"](weights=saved).build(IMAGE, 10)


def test_weights_of_another_shape_are_refused(tmp_path):
    state = akamaster_names(MODELS["resnet20"]().build((1, 32, 32), 10))
    path = tmp_path / "grey.th"
    torch.save(state, path)
    with pytest.raises(UserError, match=r"body.conv1.weight \[16, 1, 3, 3\] instead of \[16, 3, 3, 3\]"):
        MODELS["resnet20"](weights=str(path)).build(IMAGE, 10)


def test_surplus_weights_are_refused(tmp_path):
    state = akamaster_names(MODELS["resnet20"]().build(IMAGE, 10)) | {"module.extra.weight": torch.ones(1)}
    path = tmp_path / "more.th"
    torch.save(state, path)
    with pytest.raises(UserError, match=r"extra\.weight does not belong"):
        MODELS["resnet20"](weights=str(path)).build(IMAGE, 10)


class Evil:
    """What prints when it is unpickled."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ([1, 2], "no named tensors"),
        ({1: torch.ones(1), "state_dict": 3}, "no named tensors"),
        ({3: torch.ones(1)}, "no named tensors"),
        ({"a": torch.ones(2).to_sparse()}, "not a plain tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "not a plain tensor"),
        ({"a": Evil()}, "cannot be read"),
        ({"head.weight": torch.ones(1).expand(10**6, 10**6)}, "does not fit"),
    ],
)
def test_files_that_hold_no_weights_are_refused_in_one_line(tmp_path, capsys, what, word):
    path = tmp_path / "odd.pt"
    torch.save(what, path)
    with pytest.raises(UserError, match=word) as error:
        MODELS["resnet20"](weights=str(path)).build(IMAGE, 10)
    assert error.value.key == "model.weights"
    assert "\n" not in str(error.value)
    assert not capsys.readouterr().out


def test_weights_that_are_not_finite_are_refused(tmp_path):
    state = akamaster_names(MODELS["resnet20"]().build(IMAGE, 10))
    state["module.conv1.weight"][0, 0, 0, 0] = float("nan")
    path = tmp_path / "nan.th"
    torch.save(state, path)
    with pytest.raises(UserError, match=r"body.conv1.weight .*not finite"):
        MODELS["resnet20"](weights=str(path)).build(IMAGE, 10)


def test_weights_that_unpack_to_much_more_than_the_file_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 22))
    with pytest.raises(UserError, match="unpack"):
        MODELS["resnet20"](weights=str(tmp_path / "bomb.pt")).build(IMAGE, 10)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "pipe"])
def test_names_of_no_file_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no such file"):
        MODELS["resnet20"](weights=f"{tmp_path}/{name}").build(IMAGE, 10)
