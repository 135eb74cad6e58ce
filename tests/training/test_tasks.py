"""Tasks: metrics by hand and against scikit-learn, from sums that add up; losses; mixtures; checks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from sklearn import metrics as sk
from support import toy
from torch import nn

from mpifl.core.errors import CodeFailed, UserError
from mpifl.core.federation import ClientData, DataInfo, Split
from mpifl.core.metric import METRICS, metric_of_column
from mpifl.core.parameters import flatten
from mpifl.core.rng import key
from mpifl.core.task import SUMS
from mpifl.experiment.checks import check_task
from mpifl.models import MODELS
from mpifl.results.metrics import pooled, spread
from mpifl.training.client import LocalClient
from mpifl.training.config import LocalConfig
from mpifl.training.evaluation import train_components
from mpifl.training.learner import Learner
from mpifl.training.tasks import (
    TASKS,
    Classification,
    MaskedToken,
    MultiLabel,
    NextToken,
    Regression,
    Segmentation,
    TokenClassification,
)
from mpifl.training.trainers.pytorch import Torch

N, L, T = 40, 6, 5
ALL = Classification(("accuracy", "top5", "balanced_accuracy", "macro_f1"))


def drawn(task, n=N, seed=0):
    """Return outputs and labels for a task."""
    rng = torch.Generator().manual_seed(seed)
    if isinstance(task, Classification):
        return torch.randn(n, L, generator=rng), torch.randint(L - 1, (n,), generator=rng)
    if isinstance(task, MultiLabel):
        return torch.randn(n, L, generator=rng), (torch.rand(n, L, generator=rng) > 0.7).float()
    if isinstance(task, Regression):
        return torch.randn(n, 2, generator=rng), torch.randn(n, 2, generator=rng) + 3
    if isinstance(task, Segmentation):
        masks = torch.randint(L, (n, 3, 2), generator=rng)
        masks[:, 0] = -100  # as many pixels of each sample count
        return torch.randn(n, 3, 2, L, generator=rng), masks
    labels = torch.randint(L, (n, T), generator=rng)
    return torch.randn(n, T, L, generator=rng), labels.masked_fill(torch.arange(T) > 3, -100)


TESTED = {
    "classification": ALL,
    "multi_label": MultiLabel(),
    "regression": Regression(("mse", "mae", "rmse", "r2")),
}
TESTED["next_token"] = NextToken()
TESTED["segmentation"] = Segmentation(("mean_iou", "worst_iou", "dice", "pixel_accuracy"))
TESTED["masked_token"] = MaskedToken()
TESTED["token_classification"] = TokenClassification()


def test_every_task_is_tested():
    assert set(TESTED) == set(TASKS)
    assert all(set(task.known) == {m.name for m in task.scored} for task in TESTED.values())


@pytest.mark.parametrize("task", TESTED.values(), ids=TESTED)
def test_sums_of_parts_are_those_of_the_whole(task):
    """Ten clients of four samples, or one of forty: the same sums, hence the same metrics."""
    output, labels = drawn(task)
    whole = task.evaluate(output, labels)
    parts = [task.evaluate(o, y) for o, y in zip(output.split(4), labels.split(4), strict=True)]
    scores = {name: np.array([part[name] for part in parts]) for name in parts[0]}
    for name, value in pooled(scores, task).items():
        assert_allclose(value, whole[name.removesuffix("_pooled")], rtol=1e-6)
    single = {name for name in whole if not name.startswith(SUMS)}
    assert single == {"loss", *(m.name for m in task.scored)}


@pytest.mark.parametrize("task", TESTED.values(), ids=TESTED)
def test_a_loss_is_the_mean_of_its_samples_and_has_a_gradient(task):
    output, labels = drawn(task)
    output.requires_grad_()
    losses = task.losses(output, labels)
    assert losses.shape == (N,)
    assert_allclose(task.loss(output, labels).item(), losses.mean().item(), rtol=1e-5)
    each = 4 if isinstance(task, NextToken | Segmentation) else 1  # tokens or pixels that count
    assert task.count(labels) == each * N
    assert_allclose(task.total_loss(output, labels).item(), each * losses.sum().item(), rtol=1e-5)
    assert_allclose(task.evaluate(output.detach(), labels)["loss"], losses.mean().item(), rtol=1e-5)
    (gradient,) = torch.autograd.grad(task.loss(output, labels), output)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def smoothed(output, labels):
    """Return the smoothed cross-entropy of each sample."""
    return F.cross_entropy(output, labels, reduction="none", label_smoothing=0.9)


@dataclass(frozen=True)
class Losses(Classification):
    """Says the loss of a sample only."""

    def losses(self, output, labels):
        """Smooth."""
        return smoothed(output, labels)


@dataclass(frozen=True)
class Whole(Losses):
    """Says all three."""

    def loss(self, output, labels):
        """Return the mean."""
        return self.losses(output, labels).mean()

    def total_loss(self, output, labels):
        """Return the sum."""
        return self.losses(output, labels).sum()


@dataclass(frozen=True)
class Batch(Classification):
    """Says the loss of a batch only: it is no mean over samples."""

    def loss(self, output, labels):
        """Return the root of the summed squares."""
        return F.cross_entropy(output, labels, reduction="none").square().sum().sqrt()


@dataclass(frozen=True)
class Declared(Whole):
    """Says that its loss is the cross-entropy all the same."""

    cross_entropy: ClassVar[bool] = True


def test_a_derived_task_with_a_loss_of_its_own_is_none_for_the_kernels():
    assert Classification().for_kernels
    assert [task().for_kernels for task in (Losses, Whole, Batch, Declared)] == [False, False, False, True]
    assert [task().has_total for task in (Classification, Losses, Whole, Batch)] == [True, True, True, False]


@dataclass(frozen=True)
class Total(Classification):
    """Says a sum that is not that of its loss."""

    def total_loss(self, output, labels):
        """Ten times as much."""
        return 10 * super().total_loss(output, labels)


def test_a_task_whose_total_loss_is_another_loss_is_refused():
    with pytest.raises(UserError, match=r"^name = 'Total': a total_loss of its own"):
        Total()


def test_a_mixture_of_models_has_the_loss_of_a_derived_task():
    output, labels = drawn(ALL)
    mixed = Losses().mix([output], torch.ones(1))
    expected = float(smoothed(output.double(), labels).mean())
    assert Losses().evaluate_mixed(mixed, labels)["loss"] == pytest.approx(expected)


@dataclass(frozen=True)
class ByClass(Classification):
    """Cross-entropy with float32 weights of classes, as a user writes it."""

    def losses(self, output, labels):
        weight = torch.linspace(1.0, 2.0, output.shape[1])
        return F.cross_entropy(output, labels, weight=weight, reduction="none")


def test_a_mixture_is_evaluated_by_losses_of_a_user_in_float32():
    output, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    task = ByClass()
    found = task.evaluate_mixed(task.mix([output, output], torch.tensor([0.5, 0.5])), labels)
    assert_allclose(found["loss"], float(task.losses(output, labels).mean()), rtol=1e-5)


def test_samples_are_not_weighed_where_a_loss_is_no_mean_over_them():
    client = SimpleNamespace(task=Batch())
    with pytest.raises(UserError, match="this method weighs the losses of samples"):
        train_components(client, torch.zeros(2, 3), torch.ones(2, 4), key(0))


@pytest.mark.in_turn
@pytest.mark.parametrize("task", [Losses(), Whole(), Batch()], ids=["losses", "whole", "batch"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_derived_task_is_trained_on_its_own_loss(task, kernels):
    """Two full-batch steps, and the gradient in batches, are those of plain PyTorch in float64."""
    torch.manual_seed(2)
    module = MODELS["mlp"](hidden=(6,)).build((1, 4, 4), 3)
    learner = Learner(deepcopy(module), kernels=kernels, task=task)
    split = toy.draw("train", 0, 23, 0)
    found = learner.sgd(learner.init, split, LocalConfig(epochs=2, batch_size=23, lr=0.2), key(0)).vector
    plain = deepcopy(module).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    for step in range(2):
        output = plain(split.x.double())
        loss = task.loss(output, split.y) if isinstance(task, Batch) else smoothed(output, split.y).mean()
        optimizer.zero_grad()
        loss.backward()
        if not step:
            expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
            found_gradient = learner.gradient(learner.init, split, batch_size=5)
            assert_allclose(found_gradient, expected, atol=1e-6)
        optimizer.step()
    assert_allclose(found, flatten(plain), atol=1e-6)


class Tokens(nn.Module):
    """Guesses the next token from one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(L, 5), nn.Linear(5, L)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_gradient_and_loss_of_texts_are_those_of_what_is_trained():
    """Tokens that count are 4, 1, 1, 2, ...: a step on the full batch is one along the gradient."""
    torch.manual_seed(2)
    learner = Learner(Tokens(), kernels=False, task=NextToken())
    rng = torch.Generator().manual_seed(1)
    x, y = (torch.randint(L, (9, T), generator=rng) for _ in range(2))
    y = y.masked_fill(torch.arange(T) >= torch.tensor([4, 1, 1, 2, 5, 1, 1, 3, 1])[:, None], -100)
    split = Split(x, y)
    gradient = learner.gradient(learner.init, split, batch_size=2)
    trained = learner.sgd(learner.init, split, LocalConfig(epochs=1, batch_size=9, lr=0.5), key(0))
    assert_allclose(trained.vector, learner.init - 0.5 * gradient, atol=1e-6)
    data = ClientData(split, split, split)
    federation = SimpleNamespace(client=lambda k, visit: data, data_set=lambda k, visit, step: visit)
    client = LocalClient(0, federation, learner, LocalConfig())
    assert client.loss(learner.init) == pytest.approx(trained.loss, rel=1e-6)


@pytest.mark.parametrize("task", TESTED.values(), ids=TESTED)
def test_a_mixture_of_one_model_is_that_model(task):
    output, labels = drawn(task)
    other = drawn(task, seed=1)[0]
    mixed = task.mix([output, other], torch.tensor([1.0, 0.0]))
    alone, mixture = task.evaluate(output, labels), task.evaluate_mixed(mixed, labels)
    for metric in task.scored:
        assert_allclose(mixture[metric.name], alone[metric.name], rtol=1e-5)
    assert_allclose(mixture["loss"], alone["loss"], rtol=1e-5)


def test_classification_against_scikit_learn():
    output, labels = drawn(ALL)
    found, guess = ALL.evaluate(output, labels), output.argmax(1)
    assert found["accuracy"] == sk.accuracy_score(labels, guess)
    assert found["balanced_accuracy"] == pytest.approx(
        sk.recall_score(labels, guess, average="macro", labels=range(5))
    )
    assert found["macro_f1"] == pytest.approx(sk.f1_score(labels, guess, average="macro"))
    assert found["top5"] == pytest.approx(sk.top_k_accuracy_score(labels, output, k=5, labels=range(L)))
    assert found["loss"] == pytest.approx(float(F.cross_entropy(output, labels)))


def test_accuracy_alone_has_no_sums_and_is_always_scored():
    output, labels = drawn(ALL)
    assert [*Classification().evaluate(output, labels)] == ["accuracy", "loss"]
    task = Classification(("macro_f1",))
    assert task.metric.name == "macro_f1"
    assert [m.name for m in task.scored] == ["macro_f1", "accuracy"]
    assert task.evaluate(output, labels)["accuracy"] == ALL.evaluate(output, labels)["accuracy"]


@pytest.mark.parametrize("metrics", [("accuracy",), ("accuracy", "top5", "balanced_accuracy", "macro_f1")])
def test_a_sample_with_nan_among_its_logits_counts_as_wrong(metrics):
    """All labels are class 0, which torch.argmax and torch.topk say of NaN; one sample of three is right."""
    output = torch.tensor([[float("nan")] * 6, [5.0] + 4 * [1.0] + [float("nan")], [5.0] + 5 * [1.0]])
    found = Classification(metrics).evaluate(output, torch.zeros(3, dtype=torch.int64))
    assert found["accuracy"] == pytest.approx(1 / 3)
    if "top5" in metrics:
        assert found["top5"] == found["balanced_accuracy"] == pytest.approx(1 / 3)
        assert found["macro_f1"] == pytest.approx(2 * 1 / (3 + 1))


def test_labels_and_tokens_that_diverged_count_as_wrong():
    nan = torch.full((2, 3), float("nan"))
    found = MultiLabel().evaluate(nan, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert [found[name] for name in ("macro_f1", "micro_f1", "subset_accuracy", "hamming")] == [0.0] * 4
    tokens = NextToken().evaluate(nan[None], torch.tensor([[0, 0]]))
    assert tokens["token_accuracy"] == 0.0


def test_multi_label_against_scikit_learn():
    output, labels = drawn(MultiLabel())
    found, guess = MultiLabel().evaluate(output, labels), (output > 0).int()
    assert found["macro_f1"] == pytest.approx(sk.f1_score(labels, guess, average="macro", zero_division=0))
    assert found["micro_f1"] == pytest.approx(sk.f1_score(labels, guess, average="micro"))
    assert found["subset_accuracy"] == pytest.approx(sk.accuracy_score(labels, guess))
    assert found["hamming"] == pytest.approx(1 - sk.hamming_loss(labels, guess))


def test_regression_against_scikit_learn():
    task = TESTED["regression"]
    output, labels = drawn(task)
    found = task.evaluate(output, labels)
    assert found["mse"] == pytest.approx(sk.mean_squared_error(labels, output), rel=1e-6)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(labels, output), rel=1e-6)
    assert found["rmse"] == pytest.approx(sk.mean_squared_error(labels, output) ** 0.5, rel=1e-6)
    assert found["r2"] == pytest.approx(sk.r2_score(labels, output), rel=1e-6)
    constant = task.evaluate(output, torch.full_like(labels, 3.0))
    assert np.isnan(constant["r2"])


def test_next_token_by_hand():
    """Two positions count: the right token has probability 1/2 and 1/4. Perplexity = sqrt(8), one hit."""
    chances = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]])
    found = NextToken().evaluate(chances.log(), torch.tensor([[0, 1, -100]]))
    assert found["perplexity"] == pytest.approx(8**0.5)
    assert found["token_accuracy"] == 0.5
    nothing = NextToken().losses(chances.log(), torch.full((1, 3), -100))
    assert nothing.tolist() == [0.0]


def test_segmentation_by_hand():
    """Six pixels, one of which is ignored. Class 0: 2 in both, 3 in one; 1: 1 of 2; 2: 0 of 2; 3: nowhere.

    IoU 2/3, 1/2 and 0; Dice 4/5, 2/3 and 0; three of five pixels are right.
    """
    masks = torch.tensor([[[0, 0, 1], [2, 2, -100]]])
    guess = F.one_hot(torch.tensor([[[0, 0, 1], [0, 1, 3]]]), 4).float().mul(50)
    task = Segmentation(("mean_iou", "worst_iou", "dice", "pixel_accuracy"), classes=(1, 3))
    found = task.evaluate(guess, masks)
    assert found["mean_iou"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert found["worst_iou"] == 0.0
    assert found["dice"] == pytest.approx((4 / 5 + 2 / 3 + 0) / 3)
    assert found["pixel_accuracy"] == 3 / 5
    assert found["iou_1"] == 0.5
    assert np.isnan(found["iou_3"])
    assert found["loss"] == pytest.approx(2 / 5 * 50)
    nothing = task.losses(guess, torch.full_like(masks, -100))
    assert nothing.tolist() == [0.0]


def test_mean_iou_is_that_of_scikit_learn():
    output, labels = drawn(TESTED["segmentation"])
    found = TESTED["segmentation"].evaluate(output, labels)
    counts = labels != -100
    right, guess = labels[counts], output.argmax(-1)[counts]
    assert found["mean_iou"] == pytest.approx(sk.jaccard_score(right, guess, average="macro"))
    assert found["dice"] == pytest.approx(sk.f1_score(right, guess, average="macro"))
    assert found["pixel_accuracy"] == pytest.approx(sk.accuracy_score(right, guess))


def test_classes_of_segmentation_are_those_of_the_data():
    info = DataInfo((1, 4, 4), 3, "images", "masks")
    Segmentation(classes=(0, 2)).check(info)
    with pytest.raises(UserError, match="classes = 3: the source has 0 to 2"):
        Segmentation(classes=(3,)).check(info)


def of_masks() -> tuple[DataInfo, torch.Tensor, torch.Tensor]:
    """Return a format of tokens (0 pads, 4 masks), and 300 samples of 12 tokens, some hidden."""
    info = DataInfo((12,), 30, "tokens", "masked_tokens", 30, special=(("padding", 0), ("mask", 4)))
    tokens = torch.randint(5, 30, (300, 12), generator=torch.Generator().manual_seed(1))
    tokens[:, 10:] = 0
    hide = torch.zeros(300, 12, dtype=torch.bool)
    hide[:150, 2:4], hide[150:, :4] = True, True
    return info, tokens.masked_fill(hide, 4), tokens.masked_fill(~hide, -100)


def test_masks_are_drawn_anew_as_many_in_each_sample_and_never_of_special_tokens():
    info, x, y = of_masks()
    tokens, task = torch.where(y == -100, x, y), MaskedToken().prepared(info)
    one, two = (task.redrawn(x, y, key(0, "batch", i)) for i in range(2))
    for shown, labels in (one, two):
        chosen = labels != -100
        assert torch.equal(torch.where(chosen, labels, shown), tokens)
        assert torch.equal(chosen.sum(1), (y != -100).sum(1))
        assert not chosen[:, 10:].any()
        n = int(chosen.sum())
        masked, kept = (float((shown == z)[chosen].float().mean()) for z in (torch.tensor(4), tokens))
        assert abs(masked - 0.8) < 4 * (0.16 / n) ** 0.5
        assert abs(kept - 0.1 - 0.1 / 25) < 4 * (0.1 / n) ** 0.5
    assert not torch.equal(one[1], two[1])
    again = task.redrawn(x, y, key(0, "batch", 0))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


@pytest.mark.parametrize("loop", ["own loop", "torch"])
@pytest.mark.parametrize("masking", ["dynamic", "static"])
def test_each_batch_of_a_training_has_masks_of_its_own(masking, loop):
    info, x, y = of_masks()
    trainer = Torch(lr=0.1) if loop == "torch" else None
    seen: list[torch.Tensor] = []

    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(30, 30)

        def forward(self, given):
            seen.append(given.clone())
            return self.tokens(given)

    task = MaskedToken(masking=masking).prepared(info)
    learner = Learner(Seeing(), kernels=False, task=task, trainer=trainer)
    config = LocalConfig(epochs=2, batch_size=300, lr=0.1)
    start = flatten(learner.flat.module)
    learner.sgd(start, Split(x, y), config, key(0, "visit"))
    masks = [torch.sort((given == 4).double() @ 2.0 ** torch.arange(12).double()).values for given in seen]
    assert torch.equal(masks[0], masks[1]) == (masking == "static")
    assert torch.equal(masks[0], torch.sort((x == 4).double() @ 2.0 ** torch.arange(12).double()).values) == (
        masking == "static"
    )


def test_tags_have_the_scores_of_scikit_learn_over_the_tokens_that_count():
    task = TESTED["token_classification"]
    output, labels = drawn(task)
    found, counts = task.evaluate(output, labels), labels != -100
    right, guess = labels[counts].numpy(), output.argmax(-1)[counts].numpy()
    assert found["token_accuracy"] == pytest.approx(sk.accuracy_score(right, guess))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(right, guess, average="macro"))


def test_the_worst_client_is_the_one_with_the_largest_error():
    values = np.array([1.0, 3.0, 2.0, np.nan])
    found = spread(values, METRICS["mse"])
    assert found["mse_worst"] == found["mse_worst_tenth"] == 3.0
    assert found["mse_mean"] == 2.0
    assert spread(values, METRICS["r2"])["r2_worst"] == 1.0
    assert metric_of_column("mse_train_mean") is METRICS["mse"]
    assert metric_of_column("num_clusters") is None


@pytest.mark.parametrize(
    ("task", "labels", "message"),
    [
        (
            "classification",
            "numbers",
            "task.name = 'classification': labels of this source are numbers; use regression",
        ),
        ("regression", "classes", "use classification"),
        ("next_token", "multi_hot", "use multi_label"),
        ("multi_label", "tokens", "use next_token"),
        ("classification", "masks", "use segmentation"),
        ("segmentation", "classes", "use classification"),
    ],
)
def test_labels_of_another_task_are_refused(task, labels, message):
    with pytest.raises(UserError, match=message):
        TASKS[task]().check(DataInfo((3,), 2, "features", labels))


def test_a_task_is_called_as_a_configuration_calls_it():
    assert {name: task().name for name, task in TASKS.items()} == {name: name for name in TASKS}
    assert type("Mine", (Regression,), {})().name == "Mine"


def test_options_of_tasks():
    with pytest.raises(UserError, match=r"metrics = \['mse'\]: use some of accuracy"):
        Classification(("mse",))
    with pytest.raises(UserError, match="name each of them once"):
        Regression(("mse", "mse"))
    with pytest.raises(UserError, match="criterion = 'x': use one of mse"):
        Regression(criterion="x")


@dataclass(frozen=True)
class Pinball(Regression):
    """A task of a user: the quantile loss; its metrics are those of regression."""

    known: ClassVar = Regression.known
    quantile: float = 0.9

    def losses(self, output, labels):
        gap = labels - output
        return torch.maximum(self.quantile * gap, (self.quantile - 1) * gap).mean(1)


WRONG = {  # what a task of a user makes instead
    "losses": (lambda self, output, labels: None, "losses gives NoneType; give one for each of"),
    "losses of all": (lambda self, output, labels: output.mean(), r"losses gives \[\]; give one for each of"),
    "losses without a gradient": (
        lambda self, output, labels: labels.sum(1),
        r"loss gives \[\]; .* gradient",
    ),
    "loss": (lambda self, output, labels: output.sum(0), r"loss gives \[2\]; give a number with a gradient"),
    "sums": (lambda self, output, labels: {"n": "a"}, "sums gives dict; give a mapping"),
    "figures": (lambda self, sums: {"mse": 1.0}, "figures gives dict; .* numbers mse, mae, r2, loss"),
    "figures of nothing": (lambda self, sums: None, "figures gives NoneType"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_task_makes_is_checked_before_a_run(kind):
    made, message = WRONG[kind]
    wrong = type("Wrong", (Pinball,), {kind.split()[0]: made})()
    with pytest.raises(UserError, match=f"task.name = 'Wrong': {message}"):
        check_task(wrong, *drawn(Regression()))


def test_a_task_is_not_tried_on_a_client_without_samples():
    """Its figures would divide by 0."""
    wrong = type("Whole", (Pinball,), {"figures": lambda self, sums: {"mse": 1 / float(sums["n"])}})()
    output, labels = drawn(Regression())
    check_task(wrong, output[:0], labels[:0])


def test_an_exception_of_a_tasks_own_code_names_the_task():
    wrong = type("Wrong", (Pinball,), {"figures": lambda self, sums: 1 / 0})()
    with pytest.raises(CodeFailed, match="task Wrong: ZeroDivisionError"):
        check_task(wrong, *drawn(Regression()))


@pytest.mark.parametrize("known", [{}, {"loss": METRICS["mse"]}, {"mse": "mse"}, {"mse": METRICS["mae"]}])
def test_metrics_of_a_task_of_ones_own_are_metrics(known):
    with pytest.raises(UserError, match="name = 'Wrong': its `known` maps the name of each metric"):
        type("Wrong", (Pinball,), {"known": known})()


def test_a_task_of_ones_own():
    output, labels = drawn(Regression())
    found = Pinball().evaluate(output, labels)
    assert found["mse"] == Regression().evaluate(output, labels)["mse"]
    assert found["loss"] == pytest.approx(float(Pinball().losses(output, labels).mean()))


def of_samples(task):
    """Return a class derived from a task whose `losses` are ten times those of the task."""

    @dataclass(frozen=True)
    class Samples(type(task)):
        """Says the loss of a sample."""

        def losses(self, output, labels):
            return 10 * super().losses(output, labels)

    return Samples(task.metrics)


def of_batches(task):
    """Return a class derived from a task whose `loss` is ten times that of the task."""

    @dataclass(frozen=True)
    class Batches(type(task)):
        """Says the loss of a batch."""

        def loss(self, output, labels):
            return 10 * super().loss(output, labels)

    return Batches(task.metrics)


PYTORCH = {
    "classification": F.cross_entropy,
    "multi_label": F.binary_cross_entropy_with_logits,
    "regression": F.mse_loss,
    **dict.fromkeys(
        ("next_token", "masked_token", "token_classification", "segmentation"),
        lambda output, labels: F.cross_entropy(output.movedim(-1, 1), labels),
    ),
}


@pytest.mark.parametrize("derived", [of_samples, of_batches])
@pytest.mark.parametrize("name", TESTED)
def test_the_loss_of_an_evaluation_is_that_of_a_derived_class(derived, name):
    """Ten times PyTorch's own loss; metrics, and sums of which they are made, are those of the task."""
    task = TESTED[name]
    output, labels = drawn(task)
    expected = PYTORCH[name](output, labels)
    found, plain = derived(task).evaluate(output, labels), task.evaluate(output, labels)
    assert found["loss"] == pytest.approx(10 * float(expected))
    assert plain["loss"] == pytest.approx(float(expected))
    assert {m.name: found[m.name] for m in task.scored} == {m.name: plain[m.name] for m in task.scored}
    mixed = derived(task).mix([output], torch.ones(1))
    assert derived(task).evaluate_mixed(mixed, labels)["loss"] == pytest.approx(10 * float(expected))


def test_a_derived_loss_of_tokens_is_the_mean_over_samples_and_perplexity_that_of_the_cross_entropy():
    """Cross-entropies ln 2 and ln 4 of the first sample's two tokens, ln 2 of the second's only one.

    A sample's loss is that of its worst token: (ln 4 + ln 2) / 2. Perplexity: exp((ln 2 + ln 4 + ln 2) / 3).
    """

    @dataclass(frozen=True)
    class Worst(NextToken):
        """The worst token of a sample."""

        def losses(self, output, labels):
            each = F.cross_entropy(output.movedim(-1, 1), labels, reduction="none", ignore_index=-100)
            return each.amax(1)

    chances = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], [[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]])
    labels = torch.tensor([[0, 1], [0, -100]])
    found = Worst().evaluate(chances.log(), labels)
    assert found["loss"] == pytest.approx(1.5 * np.log(2))
    assert found["perplexity"] == pytest.approx(16 ** (1 / 3))
    assert found["loss"] == pytest.approx(float(Worst().loss(chances.log(), labels)))
    halves = [Worst().evaluate(chances[i : i + 1].log(), labels[i : i + 1]) for i in (0, 1)]
    together = {name: np.stack([half[name] for half in halves]) for name in found}
    assert pooled(together, Worst())["perplexity_pooled"] == pytest.approx(16 ** (1 / 3))


@dataclass(frozen=True)
class Summed(Regression):
    """Says the loss of a batch, and sums from which that loss is computed."""

    def loss(self, output, labels):
        return (output - labels).abs().mean()

    def sums(self, output, labels):
        return {**super().sums(output, labels), "mine": (output - labels).double().abs().mean(1).sum()}

    def figures(self, sums):
        return {**super().figures(sums), "loss": float(sums["mine"] / sums["n"])}


def test_a_class_that_defines_sums_beside_its_loss_gets_the_loss_of_its_figures():
    output, labels = drawn(Regression())
    exact = float((output - labels).double().abs().mean(1).sum()) / N
    assert Summed().evaluate(output, labels)["loss"] == exact
