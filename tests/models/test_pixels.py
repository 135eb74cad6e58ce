"""Networks with an output for each pixel: their shapes, how far they see, what they refuse."""

import pytest
import torch

from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo
from mpifl.models import MODELS, build_model

MASKS = DataInfo((1, 21, 30), 5, "images", "masks")  # odd sides


@pytest.mark.parametrize(("name", "count", "width"), [("fcn", 4_885, 16), ("unet", 29_357, 8)])
def test_every_pixel_has_an_embedding_and_an_output(name, count, width):
    net = build_model(MODELS[name](), MASKS)
    x = torch.rand(2, 1, 21, 30)
    assert net(x).shape == (2, 21, 30, 5)
    assert net.embed(x).shape == (2, 21, 30, width)
    assert sum(p.numel() for p in net.parameters()) == count
    torch.testing.assert_close(net(x), net.head(net.embed(x)))


def test_a_pixel_sees_fifteen_pixels():
    """Dilations 1, 2 and 4: 1 + 2 (1 + 2 + 4) in each direction."""
    net = build_model(MODELS["fcn"](), MASKS).eval()
    x = torch.rand(1, 1, 21, 30, requires_grad=True)
    net(x)[0, 10, 15].sum().backward()
    seen = x.grad[0, 0] != 0
    rows, columns = seen.any(1).nonzero(), seen.any(0).nonzero()
    assert (int(rows.min()), int(rows.max())) == (3, 17)
    assert (int(columns.min()), int(columns.max())) == (8, 22)


@pytest.mark.parametrize("name", ["fcn", "unet"])
def test_batch_norm_follows_each_convolution(name):
    kinds = [type(m).__name__ for m in build_model(MODELS[name](norm="batch"), MASKS).modules()]
    assert kinds.count("BatchNorm2d") == kinds.count("Conv2d") > 2


def test_models_of_samples_and_of_pixels_are_no_substitutes():
    with pytest.raises(UserError, match=r"one output for each sample, but .* masks; use unet or fcn"):
        build_model(MODELS["lenet5"](), MASKS)
    with pytest.raises(UserError, match=r"one output for each pixel, but .* classes; use mlp or lenet5"):
        build_model(MODELS["unet"](), DataInfo((1, 28, 28), 10))
    with pytest.raises(UserError, match="images of at least 4x4 pixels"):
        build_model(MODELS["unet"](), DataInfo((1, 3, 8), 2, "images", "masks"))
