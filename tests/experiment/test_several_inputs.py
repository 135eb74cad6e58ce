"""Samples of several inputs of different types, and models of several outputs, from archive to run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.runs import SCRIPT
from torch import nn
from torch.testing import assert_close

import mpifl
from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.core.federation import FEATURES, IMAGES, SEVERAL, TOKENS, DataInfo, InputPart, Split, packed
from mpifl.core.module_calls import SeveralInputs, TakenOutput
from mpifl.core.rng import key
from mpifl.core.trainer import Samples
from mpifl.data import DataConfig, open_federation
from mpifl.data.pool import Pool, check_pool, standardised
from mpifl.data.sources.arrays import pack
from mpifl.data.sources.npz import Npz
from mpifl.experiment.loader import from_tree
from mpifl.models.user_module import Custom
from mpifl.tools.method_check import check
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.tasks import Classification
from mpifl.training.trainers.pytorch import Torch

N = 240
CODE = '''
import torch
from torch import nn


class Net(nn.Module):
    """The sums of what an image, a table and words say."""

    def __init__(self, shape, num_classes, vocabulary):
        super().__init__()
        self.seen = nn.Linear(shape["image"][1] * shape["image"][2], 8)
        self.told = nn.Linear(shape["table"][0], 8)
        self.words = nn.Embedding(vocabulary["words"], 8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, image, table, words):
        assert words.dtype == torch.int64
        x = self.seen(image.flatten(1)) + self.told(table) + self.words(words).mean(1)
        return self.fc(x.relu())


class InOrder(Net):
    def forward(self, a, b, c):
        return super().forward(a, b, c)


class Swapped(Net):
    def forward(self, table, other, words):
        return super().forward(other, table, words)


class Pair(Net):
    def forward(self, image, table, words):
        return table, super().forward(image, table, words)


class Named(Net):
    def forward(self, **given):
        return {"table": given["table"], "logits": super().forward(**given)}
'''
TRAINER = """
from dataclasses import dataclass

import torch

import mpifl


@dataclass(frozen=True)
class Mine(mpifl.Trainer):
    gives = ("direction", "loss", "part", "gradient", "outputs")

    def fit(self, module, data, context):
        sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        total = n = 0
        for x, y, index in data.batches():
            assert list(x) == ["image", "table", "words"]
            assert x["words"].dtype == torch.int64
            assert hasattr(module, "embed") or isinstance(module(x), tuple)  # all outputs
            loss = context.loss(module, x, y, index)
            loss.backward()
            context.direct()
            sgd.step()
            sgd.zero_grad()
            total, n = total + loss.item() * len(y), n + len(y)
        return mpifl.Fit(total / n, context.num_steps, n)
"""


def arrays() -> dict[str, np.ndarray]:
    """Return images whose brightness, a table one of whose columns, and words that tell three classes."""
    rng = np.random.default_rng(0)
    y = np.arange(N) % 3
    image = rng.integers(0, 60, (N, 4, 4)).astype(np.uint8) + (60 * y[:, None, None]).astype(np.uint8)
    table = rng.normal(size=(N, 3)).astype(np.float32) + y[:, None]
    words = np.stack([y + 1, rng.integers(0, 4, N)], 1)
    return {"x_image_train": image, "x_table_train": table, "x_words_train": words, "y_train": y}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with an archive, modules and a trainer."""
    folder = tmp_path_factory.mktemp("several")
    np.savez(folder / "all.npz", **arrays())
    (folder / "net.py").write_text(CODE)
    (folder / "mine.py").write_text(TRAINER)
    return folder


def options(place: Path, net: str = "Net, head: fc", **more: str) -> list[str]:
    """Return the options of a run of the archive."""
    given = {
        "data.source": f"{{name: npz, path: {place}/all.npz}}",
        "data.scenario": "{name: relations, permutes: labels, clients: 6, validation: 0.2}",
        "data.cache": f"{place}/cache",
        "model": f"{{name: custom, path: '{place}/net.py:{net}}}".replace(", head", "', head").replace(
            ", output", "', output"
        ),
        "local": "{epochs: 1, batch_size: 16, lr: 0.1}",
        "algorithm": "fedavg",
        "rounds": "2",
        **more,
    }
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def run(place: Path, name: str, *words: str) -> dict[str, object]:
    """Run in this process; return the summary."""
    where = ["--output.folder", str(place / "runs"), "--output.id", name, "--quiet"]
    assert cli.main(["run", "quickstart", *words, *where]) == 0
    return json.loads((place / "runs" / f"quickstart-{name}" / "summary.json").read_text())


# -- packing -------------------------------------------------------------------------------------------------


def test_arrays_of_three_types_lie_side_by_side_and_come_back_in_their_own():
    image = np.array([[[1, 2], [3, 255]]], np.uint8)
    table, words = np.array([[0.5, -1.5]]), np.array([[7, (1 << 24) - 1]])
    (x,), parts = pack({"image": image, "table": table, "words": words}, name="here")
    assert_array_equal(x, np.array([[1, 2, 3, 255, 0.5, -1.5, 7, (1 << 24) - 1]], np.float32))
    assert parts == (
        InputPart("image", (1, 2, 2), IMAGES),
        InputPart("table", (2,), FEATURES),
        InputPart("words", (2,), TOKENS, 1 << 24),
    )
    given = DataInfo((8,), 2, SEVERAL, parts=parts).unpack(torch.from_numpy(x))
    assert_close(given["image"], torch.tensor([[[[1.0, 2.0], [3.0, 255.0]]]]))
    assert_close(given["words"], torch.tensor([[7, (1 << 24) - 1]]))
    assert_close(packed(given, parts), torch.from_numpy(x))


@pytest.mark.parametrize(
    ("train", "test", "says"),
    [
        ({"a": np.zeros((2, 2)), "b": np.array([[1], [1 << 24]])}, None, "below 16777216"),
        ({"a": np.zeros((2, 2)), "b": np.array([[1], [-1]])}, None, "from 0"),
        ({"a": np.zeros((2, 2)), "b": np.zeros((3, 2))}, None, "give one for each"),
        ({"a": np.zeros((2, 2)), "b": np.zeros((2, 2))}, {"a": np.zeros((1, 2))}, "the same inputs in both"),
        ({"a": np.zeros((2, 2))}, {"a": np.zeros((1, 3))}, "one type and one shape"),
        ({"a": np.array([["x"]])}, None, "real numbers"),
    ],
)
def test_arrays_that_cannot_be_packed_are_refused(train, test, says):
    with pytest.raises(UserError, match=says):
        pack(*([train] if test is None else [train, test]), name="here")


def test_each_input_is_normalised_as_its_kind_is():
    """A channel of images has one mean and deviation, a column of a table its own, tokens none."""
    image = np.array([[[0, 10]], [[20, 30]]], np.uint8)  # mean 15, deviation sqrt(125)
    table = np.array([[1.0, 5.0], [3.0, 5.0]])  # 2 and 1; 5 and a constant
    (x,), parts = pack({"image": image, "table": table, "words": np.array([[4], [9]])}, name="here")
    pool = standardised(Pool(x, np.array([0, 1]), 2, 2, parts=parts))
    assert_allclose(pool.mean, [15, 15, 2, 5, 0])
    assert_allclose(pool.std, [125**0.5, 125**0.5, 1, 1, 1], rtol=1e-6)
    assert pool.kind == SEVERAL


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((InputPart("a", (1,)), InputPart("a", (1,))), "names that differ"),
        ((InputPart("a", (1,)), InputPart("b c", (1,))), "is a name of an input"),
        ((InputPart("a", (1,)), InputPart("b", (2,))), "numbers of the packed inputs"),
        ((InputPart("a", (1,)), InputPart("b", (1,), TOKENS, 2)), "whole numbers from 0 to 1"),
        ((InputPart("a", (1,)), InputPart("b", (1,), IMAGES)), "whole numbers from 0 to 255"),
    ],
)
def test_a_pool_whose_parts_do_not_fit_is_refused(parts, says):
    pool = Pool(np.array([[0.0, 2.5], [1.0, 3.0]], np.float32), np.array([0, 1]), 2, 2, parts=parts)
    with pytest.raises(UserError, match=says):
        check_pool(pool, "data.source")


def test_an_archive_gives_clients_their_inputs(place):
    """`unit` divides pixels by 255 and leaves the rest; the same arrays in a Dataset give the same bytes."""
    tree = {"source": {"name": "npz", "path": str(place / "all.npz"), "normalise": "unit"}}
    tree |= {"scenario": {"name": "iid", "clients": 4}, "cache": str(place / "cache")}
    federation = open_federation(from_tree(DataConfig, tree), 0)
    given = federation.info.unpack(federation.client(0).train.x)
    assert [(name, part.dtype) for name, part in given.items()] == [
        ("image", torch.float32), ("table", torch.float32), ("words", torch.int64),
    ]  # fmt: skip
    assert given["image"].shape[1:] == (1, 4, 4)
    held = arrays()
    row = next(i for i, words in enumerate(held["x_table_train"]) if words[0] == given["table"][0, 0])
    assert_close(given["image"][0, 0], torch.from_numpy(held["x_image_train"][row] / np.float32(255)))
    assert_array_equal(given["words"][0], held["x_words_train"][row])
    (place / "items.py").write_text(
        "import numpy as np\n"
        f"held = np.load({str(place / 'all.npz')!r})\n"
        "class Items(list):\n"
        "    def __init__(self):\n"
        "        names = ('image', 'table', 'words')\n"
        "        for i, y in enumerate(held['y_train']):\n"
        "            self.append(({name: held[f'x_{name}_train'][i] for name in names}, int(y)))\n"
    )
    tree["source"] = {"name": "dataset", "path": f"{place}/items.py:Items", "normalise": "unit"}
    same = open_federation(from_tree(DataConfig, tree), 0)
    assert same.info == federation.info
    assert_close(same.client(0).train.x, federation.client(0).train.x)


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        ({"x_table_train": None, "x_words_train": None}, {}, "stands alone"),
        ({"x_image_test": np.zeros((4, 4, 4), np.uint8)}, {}, "lacks the array"),
        ({}, {"inputs": "images"}, "has no effect on several inputs"),
        ({"y_train": np.zeros((N, 2), np.int64)}, {}, "one label for each sample"),
    ],
)
def test_archives_that_do_not_fit_are_refused(tmp_path, change, more, says):
    held = {name: array for name, array in (arrays() | change).items() if array is not None}
    np.savez(tmp_path / "some.npz", **held)
    source = Npz(path=str(tmp_path / "some.npz"), **more)
    with pytest.raises(UserError, match=says):
        check_pool(source.load(tmp_path, tmp_path), "data.source")


# -- calling a module ----------------------------------------------------------------------------------------

PARTS = (InputPart("image", (1, 2, 2), IMAGES), InputPart("words", (2,), TOKENS, 5))


def test_a_signature_with_all_names_gets_them_by_keyword_and_one_with_none_in_order():
    def of(call):
        return SeveralInputs.of(PARTS, call, "model.path", "here").by_name

    assert of(lambda words, image: None)
    assert of(lambda words, image, more=None: None)
    assert of(lambda **given: None)
    assert not of(lambda a, b: None)
    assert not of(lambda *given: None)
    with pytest.raises(UserError, match="names words and not image"):
        of(lambda words, picture: None)


def test_an_output_is_taken_by_name_or_number():
    a, b = torch.zeros(1), torch.ones(1)
    for which, found in (("1", (a, b)), ("b", {"a": a, "b": b}), ("b", SimpleNamespace(a=a, b=b))):
        assert TakenOutput(which).take(found) is b
    assert TakenOutput("1").take(b) is b, "a tensor is the output"
    for which, found, says in (("2", (a, b), "by its number"), ("c", {"a": a, "b": b}, "one of a, b")):
        with pytest.raises(UserError, match=says):
            TakenOutput(which).take(found)


def _info(place: Path) -> DataInfo:
    (x,), parts = pack(
        {name: arrays()[f"x_{name}_train"] for name in ("image", "table", "words")}, name="here"
    )
    return DataInfo(x.shape[1:], 3, SEVERAL, parts=parts)


def _split(place: Path, n: int = 48) -> Split:
    (x,), _ = pack({name: arrays()[f"x_{name}_train"] for name in ("image", "table", "words")}, name="here")
    return Split(torch.from_numpy(x[:n]) / 10, torch.from_numpy(arrays()["y_train"][:n]))


def _whole_words(split: Split) -> Split:
    return Split(torch.cat([split.x[:, :-2], (10 * split.x[:, -2:]).round()], 1), split.y)


def _built(place: Path, **model: str) -> nn.Module:
    with key(0, "net").seeded():
        return Custom(**{"path": f"{place}/net.py:Net", **model}).build_for(_info(place))


LOCAL = LocalConfig(epochs=1, batch_size=16, lr=0.1)


@pytest.mark.parametrize(
    "model",
    [
        {"head": "fc"},
        {},
        {"path": "InOrder"},
        {"path": "InOrder", "head": "fc"},
        {"path": "Pair", "output": "1"},
        {"path": "Pair", "output": "1", "head": "fc"},
        {"path": "Named", "output": "logits"},
    ],
    ids=lambda model: "-".join(model.values()) or "whole",
)
def test_every_form_trains_as_a_loop_by_hand_that_calls_the_module_with_its_inputs(place, model):
    split, info = _whole_words(_split(place)), _info(place)
    where = {"path": f"{place}/net.py:{model['path']}"} if "path" in model else {}
    learner = Learner(_built(place, **(model | where)), kernels=True)
    trained = learner.sgd(learner.init, split, LOCAL, key(0, "visit"))
    plain = _built(place)
    plain._forward_pre_hooks.clear()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for index in learner.batches(split, LOCAL, key(0, "visit")):
        given = info.unpack(split.x[index])
        sgd.zero_grad()
        nn.functional.cross_entropy(
            plain(given["image"], given["table"], given["words"]), split.y[index]
        ).backward()
        sgd.step()
    by_name = dict(plain.named_parameters())
    for name, at in learner.layout.slices.items():
        own = name.removeprefix("body.net.").replace("head.", "fc.")
        assert_close(trained.vector[at], by_name[own].detach().flatten(), atol=1e-6, rtol=1e-5)


def test_the_trainer_torch_with_sgd_takes_the_steps_of_the_own_loop(place):
    """Also where the module returns several outputs, under a method's loss of its own."""
    split, parts = _whole_words(_split(place)), _info(place).parts
    own = Learner(_built(place, head="fc"))
    model = {"path": f"{place}/net.py:Pair", "head": "fc", "output": "1"}
    other = Learner(_built(place, **model), trainer=Torch(lr=0.1), parts=parts)
    for loss in (None, lambda module, x, y, index: nn.functional.cross_entropy(module(x), y) / 2):
        one, two = (each.sgd(each.init, split, LOCAL, key(0, "visit"), loss=loss) for each in (own, other))
        assert_close(one.vector, two.vector, atol=1e-6, rtol=1e-5)
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert (two.samples, two.steps) == (48, 3)


def test_samples_of_a_trainer_are_mappings(place):
    split, parts = _whole_words(_split(place, 6)), _info(place).parts
    samples = Samples(split.x, split.y, Classification(), parts=parts)
    ((x, y, index),) = samples.batches()
    (item, label), (loaded, _) = samples[2], next(iter(samples.loader()))
    held, _ = samples.arrays()
    for name, shape in (("image", (1, 4, 4)), ("table", (3,)), ("words", (2,))):
        assert x[name].shape == (6, *shape)
        assert_close(item[name], x[name][2])
        assert_close(loaded[name], x[name])
        assert_array_equal(held[name], x[name].numpy())
    assert len(y) == len(index) == len(samples) == 6
    assert label == y[2]


def test_a_module_that_names_some_inputs_alone_is_refused(place):
    with pytest.raises(UserError, match="names table, words and not image"):
        _built(place, path=f"{place}/net.py:Swapped")


# -- runs ----------------------------------------------------------------------------------------------------

METHODS = {"fedavg": "fedavg", "ifca": "{name: ifca, num_clusters: 2}", "emdcfl": "emdcfl"}


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_runs_have_one_digest_for_any_number_of_ranks(place, mpirun, ranks, tmp_path):
    """EMD-CFL compares embeddings, IFCA losses."""
    runs = {name: options(place, algorithm=method) for name, method in METHODS.items()}
    program = SCRIPT, "quickstart", tmp_path / "out", json.dumps(runs)
    done = mpirun(ranks, *program, env=toy.PYTHONPATH)
    assert done.returncode == 0, done.stderr
    for name, words in runs.items():
        summary = json.loads((tmp_path / "out" / f"quickstart-{name}" / "summary.json").read_text())
        assert summary["digest"] == run(place, f"{name}-{ranks}", *words)["digest"], name


@pytest.mark.nightly
def test_a_method_and_a_trainer_pass_mpifl_check_on_them(place):
    """Stopped and resumed, over two ranks, with the bytes that the forecast says."""
    model = ["--model.path", f"{place}/net.py:Pair", "--model.output", "1"]
    said: list[str] = []
    for name in ("ifca", f"{place}/mine.py:Mine"):
        words = options(place)
        at = [words.index(f"--{key}") for key in ("algorithm", "rounds")]
        kept = [word for i, word in enumerate(words) if i not in (*at, *(i + 1 for i in at))]
        assert check(name, [*kept, *model], 2, said.append), said
    assert sum("stopped after" in line for line in said) == 2


def test_a_trainer_of_ones_own_gets_inputs_by_name_and_all_outputs(place):
    """The task and the methods take the one that `model.output` names; the run's model returns it."""
    words = options(
        place, "Pair, output: '1'", algorithm=METHODS["ifca"], **{"local.trainer": f"{place}/mine.py:Mine"}
    )
    summary = run(place, "mine", *words)
    assert summary["accuracy_mean"] > 0.5
    found = mpifl.load_run(str(place / "runs" / "quickstart-mine")).model(client=0)
    train = mpifl.client_data(place / "runs" / "quickstart-mine" / "config.yaml", 0)["train"][0]
    given = {name: torch.from_numpy(part) for name, part in train.items()}
    assert found(**given).shape == (len(train["table"]), 3)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model": "mlp"}, "takes images or features"),
        ({"algorithm": "pacfl"}, "it compares images or features or tokens"),
        ({"algorithm": "pca_km_hc"}, "it compares images or features"),
        ({"local.augment": "crop_flip"}, "are several inputs"),
        ({"data.scenario": "{name: feature_noise, clients: 6}"}, "noise is for images"),
        ({"data.scenario": "{name: quantile, by: brightness, clients: 6}"}, "have no order"),
        ({"data.scenario": "{name: relations, clients: 6}"}, "several inputs cannot be permuted"),
        ({"data.scenario": "rotated"}, "it changes images"),
        ({"data.source.normalise": "imagenet"}, "leave it out"),
    ],
)
def test_what_means_nothing_for_several_inputs_is_refused_in_a_line(place, more, says, capsys):
    words = [*options(place, **{k: v for k, v in more.items()}), "--output.folder", str(place / "no")]
    assert cli.main(["run", "quickstart", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpifl: ")]
    assert says in line


def test_a_module_of_several_outputs_that_names_none_is_told_how(place, capsys):
    words = [*options(place, "Named"), "--output.folder", str(place / "no")]
    words[words.index("--model") + 1] = f"{{name: custom, path: '{place}/net.py:Named'}}"
    assert cli.main(["run", "quickstart", *words]) == 2
    assert "name one of table, logits in model.output" in capsys.readouterr().err
