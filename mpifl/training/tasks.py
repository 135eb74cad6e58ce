"""Tasks: classification (also of pixels and tokens), multi-label classification, regression, tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F

from mpifl.core.errors import require
from mpifl.core.federation import (
    CLASSES,
    IGNORED,
    MASKED,
    MASKED_AS_MASK,
    MASKED_AS_OTHER,
    MASKS,
    MULTI_HOT,
    NUMBERS,
    TAGS,
    TOKENS,
    DataInfo,
)
from mpifl.core.metric import ACCURACY, METRICS, Metric
from mpifl.core.options import NonNegativeInt
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.task import Sums, Task

NONE = -1  # prediction of a model that diverged
LEAST = 1e-300  # smallest probability, so that its logarithm is finite


def predictions(output: torch.Tensor) -> torch.Tensor:
    """Return the class [...] of the largest of the logits [..., L]; NONE, which is wrong, if one is NaN."""
    return output.argmax(-1).masked_fill(output.isnan().any(-1), NONE)


def known(*names: str) -> dict[str, Metric]:
    """Return some of the metrics, by name."""
    return {name: METRICS[name] for name in names}


@dataclass(frozen=True)
class Classification(Task):
    """Classification into one of L classes; the loss is the cross-entropy.

    Attributes:
        metrics: some of `accuracy`, `top5` (the class is among the five most probable), `balanced_accuracy`
            (mean recall over the classes that occur) and `macro_f1` (mean F1 over the classes that occur or
            are predicted). Curves and tables show the first one. Accuracy is always written.
    """

    called: ClassVar[str] = "classification"
    labels: ClassVar[tuple[str, ...]] = (CLASSES,)
    cross_entropy: ClassVar[bool] = True
    known: ClassVar[Mapping[str, Metric]] = known("accuracy", "top5", "balanced_accuracy", "macro_f1")

    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def scored(self) -> tuple[Metric, ...]:
        """The metrics in use, and accuracy."""
        return self.chosen if "accuracy" in self.metrics else (*self.chosen, ACCURACY)

    @property
    def _by_class(self) -> bool:
        return bool({"balanced_accuracy", "macro_f1"} & set(self.metrics))

    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each sample."""
        return F.cross_entropy(output, labels, reduction="none")

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, or the mean of `losses` if a subclass overrides it."""
        if type(self).losses is not Classification.losses:
            return super().loss(output, labels)
        return F.cross_entropy(output, labels)

    def total_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cross-entropies, or the sum of `losses` if a subclass overrides it."""
        if type(self).losses is not Classification.losses:
            return super().total_loss(output, labels)
        return F.cross_entropy(output, labels, reduction="sum")

    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return the sums of samples, hits and losses and, per class, of samples, predictions and hits."""
        predicted = predictions(output)
        hit = predicted == labels
        found: dict[str, torch.Tensor | np.ndarray] = {
            "n": torch.tensor(len(labels)),
            "hits": hit.sum().cpu(),
            "loss": self.losses(output, labels).double().sum().cpu(),
        }
        if "top5" in self.metrics:
            best = output.topk(min(5, output.shape[1]), dim=1).indices
            found["top5"] = ((best == labels[:, None]).any(1) & (predicted >= 0)).sum().cpu()
        if self._by_class:
            classes = output.shape[1]
            found["true"] = torch.bincount(labels, minlength=classes).cpu()
            found["predicted"] = torch.bincount(predicted[predicted >= 0], minlength=classes).cpu()
            found["right"] = torch.bincount(labels[hit], minlength=classes).cpu()
        return found

    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics and loss."""
        n = float(sums["n"])
        values = {"accuracy": _ratio(sums["hits"], n)}
        if "top5" in self.metrics:
            values["top5"] = _ratio(sums["top5"], n)
        if self._by_class:
            values["balanced_accuracy"] = _mean_ratio(sums["right"], sums["true"])
            values["macro_f1"] = _mean_ratio(2 * sums["right"], sums["true"] + sums["predicted"])
        return {**{m.name: values[m.name] for m in self.scored}, "loss": _ratio(sums["loss"], n)}

    def evaluate(self, output: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the scores of samples; without sums if accuracy, a mean over samples, is the only metric."""
        loss = float(self.loss(output, labels))
        if self.metrics == ("accuracy",):
            return {"accuracy": int((predictions(output) == labels).sum()) / len(labels), "loss": loss}
        return {**super().evaluate(output, labels), "loss": loss}

    def mix(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the weighted mean of the models' probabilities, float64 [n, L]."""
        chances = torch.stack([output.double().softmax(1) for output in outputs])  # [K, n, L]
        return torch.einsum("k,knl->nl", weights.double().to(chances.device), chances).clamp_min(LEAST).log()

    def evaluate_mixed(self, mixed: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the scores of samples, given the logarithms of their class probabilities."""
        found, kind = self.evaluate(self._readable(mixed), labels), type(self)
        if (kind.losses, kind.loss) != (Classification.losses, Classification.loss):
            return found
        return {**found, "loss": float(F.nll_loss(mixed, labels))}


@dataclass(frozen=True)
class MultiLabel(Task):
    """Multi-label classification: any of L labels may apply; the loss is the mean binary cross-entropy.

    A label is predicted if its probability is above 1/2.

    Attributes:
        metrics: some of `macro_f1` (mean F1 over the labels that occur or are predicted), `micro_f1` (F1 of
            all labels together), `subset_accuracy` (fraction of the samples with all labels right) and
            `hamming` (fraction of the labels that are right). Curves and tables show the first one.
    """

    called: ClassVar[str] = "multi_label"
    labels: ClassVar[tuple[str, ...]] = (MULTI_HOT,)
    known: ClassVar[Mapping[str, Metric]] = known("macro_f1", "micro_f1", "subset_accuracy", "hamming")

    metrics: tuple[str, ...] = ("macro_f1", "micro_f1", "subset_accuracy", "hamming")

    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean binary cross-entropy of each sample's labels."""
        return F.binary_cross_entropy_with_logits(output, labels, reduction="none").mean(1)

    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return the sums of samples and losses, of samples with all labels right, and counts per label."""
        applies = labels > 0.5
        predicted = torch.where(output.isnan(), ~applies, output > 0)  # NaN predicts what is wrong
        return {
            "n": torch.tensor(len(labels)),
            "loss": self.losses(output, labels.to(output.dtype)).double().sum().cpu(),
            "exact": (applies == predicted).all(1).sum().cpu(),
            "agree": (applies == predicted).sum().cpu(),
            "true": applies.sum(0).cpu(),
            "predicted": predicted.sum(0).cpu(),
            "right": (applies & predicted).sum(0).cpu(),
        }

    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics and loss."""
        n, width = float(sums["n"]), sums["true"].size
        twice, counted = 2 * sums["right"], sums["true"] + sums["predicted"]
        values = {
            "macro_f1": _mean_ratio(twice, counted),
            "micro_f1": _ratio(twice.sum(), float(counted.sum())),
            "subset_accuracy": _ratio(sums["exact"], n),
            "hamming": _ratio(sums["agree"], n * width),
        }
        return {**{name: values[name] for name in self.metrics}, "loss": _ratio(sums["loss"], n)}

    def mix(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return the logits of the weighted mean of the models' probabilities, float64 [n, L]."""
        chances = torch.stack([output.double().sigmoid() for output in outputs])
        p = torch.einsum("k,knl->nl", weights.double().to(chances.device), chances)
        return torch.logit(p, eps=1e-15)


CRITERIA = {"mse": "mse_loss", "mae": "l1_loss", "huber": "huber_loss"}  # -> functions of PyTorch


@dataclass(frozen=True)
class Regression(Task):
    """Regression of L real numbers; the loss is the mean squared error, or the one that `criterion` names.

    Attributes:
        metrics: some of `mse`, `mae`, `rmse` and `r2` (1 minus the squared error divided by that of the mean,
            averaged over the numbers that vary). Curves and tables show the first one. `r2_pooled` is the
            value over all clients' samples together, which differs from the mean of the clients' values.
        criterion: loss to minimise: `mse` (squared error), `mae` (absolute error) or `huber` (half the
            squared error where the error is below 1, linear above).
    """

    called: ClassVar[str] = "regression"
    labels: ClassVar[tuple[str, ...]] = (NUMBERS,)
    known: ClassVar[Mapping[str, Metric]] = known("mse", "mae", "rmse", "r2")

    metrics: tuple[str, ...] = ("mse", "mae", "r2")
    criterion: Literal["mse", "mae", "huber"] = "mse"

    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, averaged over its numbers."""
        criterion: Callable[..., torch.Tensor] = getattr(F, CRITERIA[self.criterion])
        return criterion(output, labels, reduction="none").mean(1)

    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return the sums of samples, of losses and, per number, of |error|, error^2, label and label^2."""
        y, error = labels.double(), output.double() - labels.double()
        return {
            "n": torch.tensor(len(labels)),
            "loss": self.losses(output, labels.to(output.dtype)).double().sum().cpu(),
            "absolute": error.abs().sum(0).cpu(),
            "squared": error.square().sum(0).cpu(),
            "y": y.sum(0).cpu(),
            "y2": y.square().sum(0).cpu(),
        }

    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics and loss."""
        n = float(sums["n"])
        mse = float(sums["squared"].mean()) / n
        spread = sums["y2"] - sums["y"] ** 2 / n  # of each number around its mean
        varies = spread > 1e-12 * np.maximum(sums["y2"], 1e-300)
        explained = 1 - sums["squared"][varies] / spread[varies]
        values = {
            "mse": mse,
            "mae": float(sums["absolute"].mean()) / n,
            "rmse": float(np.sqrt(mse)),
            "r2": float(explained.mean()) if varies.any() else float("nan"),
        }
        return {**{name: values[name] for name in self.metrics}, "loss": _ratio(sums["loss"], n)}


class _ByPosition(Task):
    """Classes of tokens or pixels; the loss is the mean cross-entropy over the positions that count.

    If a subclass overrides `losses`, the loss is their mean over samples.
    """

    @property
    @abstractmethod
    def _own_losses(self) -> bool:
        """Whether a subclass overrides `losses`."""

    @abstractmethod
    def _of_positions(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each position [n, ...]; 0 where it does not count."""

    def _total(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of `_of_positions`."""
        return self._of_positions(output, labels).sum()

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of a position, or the mean of `losses` if a subclass overrides it."""
        if self._own_losses:
            return super().loss(output, labels)
        return self.total_loss(output, labels) / (labels != IGNORED).sum().clamp_min(1)

    def total_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of all positions' cross-entropies, or of `losses` if a subclass overrides it."""
        return super().total_loss(output, labels) if self._own_losses else self._total(output, labels)

    def count(self, labels: torch.Tensor) -> int:
        """Return the number of positions that count, or of samples if a subclass overrides `losses`."""
        return super().count(labels) if self._own_losses else int((labels != IGNORED).sum())

    def terms(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many positions of each sample count [n], or 1 if a subclass overrides `losses`."""
        flat = labels.flatten(1)
        return torch.ones_like(flat[:, 0]) if self._own_losses else (flat != IGNORED).sum(1)

    def _own_sums(self, output: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor | np.ndarray]:
        """Return the sum of `losses` and the number of samples if a subclass overrides it."""
        if not self._own_losses:
            return {}
        return {
            "own_loss": self.losses(output, labels).double().sum().cpu(),
            "samples": torch.tensor(len(labels)),
        }

    def _loss_of(self, sums: Mapping[str, np.ndarray]) -> float:
        """Return the loss from the sums `loss` and `n`, or from `_own_sums`."""
        if self._own_losses:
            return _ratio(sums["own_loss"], float(sums["samples"]))
        return _ratio(sums["loss"], float(sums["n"]))

    def mix(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the weighted mean of the models' probabilities, float64 [n, ..., L]."""
        chances = torch.stack([output.double().softmax(-1) for output in outputs])
        p = torch.einsum("k,k...->...", weights.double().to(chances.device), chances)
        return p.clamp_min(LEAST).log()


@dataclass(frozen=True)
class NextToken(_ByPosition):
    """Prediction of the next token; the loss is the mean cross-entropy over the positions that count.

    A model returns [n, T, V]. The labels [n, T] are the next token at each position, -100 where none counts.

    Attributes:
        metrics: some of `perplexity` (the exponential of the mean cross-entropy of a token) and
            `token_accuracy`. Curves and tables show the first one.
    """

    called: ClassVar[str] = "next_token"
    labels: ClassVar[tuple[str, ...]] = (TOKENS,)
    known: ClassVar[Mapping[str, Metric]] = known("perplexity", "token_accuracy")

    metrics: tuple[str, ...] = ("perplexity", "token_accuracy")

    @property
    def _own_losses(self) -> bool:
        """Whether a subclass overrides `losses`."""
        return type(self).losses is not NextToken.losses

    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each sample's tokens; 0 where none counts."""
        return self._of_positions(output, labels).sum(1) / (labels != IGNORED).sum(1).clamp_min(1)

    def _of_positions(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.movedim(-1, 1), labels, reduction="none", ignore_index=IGNORED)

    def _total(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.movedim(-1, 1), labels, reduction="sum", ignore_index=IGNORED)

    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return the numbers of tokens that count and of hits, and the sum of the cross-entropies.

        If a subclass overrides `losses`, also return their sum and the number of samples.
        """
        counts = labels != IGNORED
        return {
            "n": counts.sum().cpu(),
            "hits": ((predictions(output) == labels) & counts).sum().cpu(),
            "loss": self._of_positions(output, labels).double().sum().cpu(),
            **self._own_sums(output, labels),
        }

    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics and loss."""
        n = float(sums["n"])
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(_ratio(sums["loss"], n)))
        values = {"perplexity": perplexity, "token_accuracy": _ratio(sums["hits"], n)}
        return {**{name: values[name] for name in self.metrics}, "loss": self._loss_of(sums)}


@dataclass(frozen=True)
class Segmentation(_ByPosition):
    """Semantic segmentation: a class for each pixel; the loss is the mean cross-entropy of the pixels.

    A model returns [n, H, W, L], the classes last. The labels [n, H, W] are classes, -100 where a pixel does
    not count. For a class, the IoU is the number of pixels that have it in both the label and the prediction,
    divided by the number that have it in one of them, over all of a client's images (Everingham et al.,
    2010).

    Attributes:
        metrics: some of `mean_iou` (mean IoU over the classes that occur or are predicted), `worst_iou` (the
            lowest of these), `dice` (mean Dice coefficient, which is F1, over the same classes) and
            `pixel_accuracy`. Curves and tables show the first one.
        classes: classes whose IoU is a metric of its own, `iou_0` for class 0.
    """

    paper: ClassVar[str] = "everingham2010pascal"
    called: ClassVar[str] = "segmentation"
    labels: ClassVar[tuple[str, ...]] = (MASKS,)
    known: ClassVar[Mapping[str, Metric]] = known("mean_iou", "worst_iou", "dice", "pixel_accuracy")

    metrics: tuple[str, ...] = ("mean_iou", "pixel_accuracy")
    classes: tuple[NonNegativeInt, ...] = ()

    @property
    def scored(self) -> tuple[Metric, ...]:
        """The metrics in use, and the IoU of each of `classes`."""
        return (*self.chosen, *(Metric(f"iou_{c}", f"IoU of class {c}") for c in self.classes))

    @property
    def _own_losses(self) -> bool:
        """Whether a subclass overrides `losses`."""
        return type(self).losses is not Segmentation.losses

    def check(self, info: DataInfo) -> None:
        """Raise `UserError` if labels are no masks, or have fewer classes than `classes` names."""
        super().check(info)
        most = max(self.classes, default=0)
        require(most < info.num_classes, "task.classes", most, f"the source has 0 to {info.num_classes - 1}")
        once = len(set(self.classes)) == len(self.classes)
        require(once, "task.classes", list(self.classes), "name each of them once")

    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each sample's pixels; 0 where none counts."""
        count = (labels != IGNORED).sum((1, 2)).clamp_min(1)
        return self._of_positions(output, labels).sum((1, 2)) / count

    def _of_positions(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = output.reshape(-1, output.shape[-1])  # deterministic on a GPU, unlike the loss of [n, L, H, W]
        each = F.cross_entropy(flat, labels.reshape(-1), reduction="none", ignore_index=IGNORED)
        return each.reshape(labels.shape)

    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return the sum of the cross-entropies and the numbers of pixels: all, and of each class.

        Of each class [L], those that have it in label and prediction (`intersection`) and in one of them or
        both (`union`). If a subclass overrides `losses`, also return their sum and the number of samples.
        """
        counts = labels != IGNORED
        right, guess, size = labels[counts], predictions(output)[counts], output.shape[-1]
        hit = right == guess
        true, both = (torch.bincount(y, minlength=size) for y in (right, right[hit]))
        predicted = torch.bincount(guess[guess >= 0], minlength=size)
        return {
            "n": counts.sum().cpu(),
            "loss": self._of_positions(output, labels).double().sum().cpu(),
            "intersection": both.cpu(),
            "union": (true + predicted - both).cpu(),
            **self._own_sums(output, labels),
        }

    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics and loss."""
        both, either = sums["intersection"], sums["union"]
        there = either > 0
        iou = np.full(both.size, np.nan)
        iou[there] = both[there] / either[there]
        values = {
            "mean_iou": _mean_ratio(both, either),
            "worst_iou": float(iou[there].min()) if there.any() else float("nan"),
            "dice": _mean_ratio(2 * both, either + both),
            "pixel_accuracy": _ratio(both.sum(), float(sums["n"])),
            **{f"iou_{c}": float(iou[c]) for c in self.classes},
        }
        return {**{m.name: values[m.name] for m in self.scored}, "loss": self._loss_of(sums)}


@dataclass(frozen=True)
class MaskedToken(NextToken):
    """Prediction of the tokens that masks hide (Devlin et al., NAACL 2019); loss and scores as `next_token`.

    The labels [n, T] are the tokens that are hidden, -100 where none is. The data have masks, which
    evaluations and choices among models use.

    Attributes:
        metrics: some of `perplexity` and `token_accuracy`, of hidden tokens. Curves and tables show the first
            one.
        masking: `dynamic`: every batch of a training draws masks anew, as many in each sample (Liu et al.,
            2019); `static`: it has those of the data.
    """

    called: ClassVar[str] = "masked_token"
    labels: ClassVar[tuple[str, ...]] = (MASKED,)

    masking: Literal["dynamic", "static"] = "dynamic"
    special: tuple[tuple[str, int], ...] = field(default=(), init=False, repr=False, compare=False)
    vocabulary: int = field(default=0, init=False, repr=False, compare=False)

    @property
    def redraws(self) -> bool:
        """Whether masks are drawn anew: the data have said which token is the mask."""
        return self.masking == "dynamic" and "mask" in dict(self.special)

    def prepared(self, info: DataInfo) -> MaskedToken:
        """Return the task that knows the special tokens of the data."""
        known = replace(self)
        object.__setattr__(known, "special", info.special)
        object.__setattr__(known, "vocabulary", info.vocabulary)
        return known

    def redrawn(self, x: torch.Tensor, y: torch.Tensor, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [b, T] with other masks, as many in each sample, and what they hide.

        A mask takes the place of 0.8 of the hidden tokens, another token that of 0.1, and 0.1 stay.
        """
        if not self.redraws:
            return x, y
        tokens, draw = torch.where(y == IGNORED, x, y).cpu(), key.torch()
        special = torch.tensor([token for _, token in self.special])
        ordinary = torch.arange(self.vocabulary)
        ordinary = ordinary[~torch.isin(ordinary, special)]
        order = torch.rand(tokens.shape, generator=draw)
        order = order.masked_fill(torch.isin(tokens, special), 2.0).argsort(1).argsort(1)
        chosen = order < (y != IGNORED).sum(1, keepdim=True).cpu()
        how = torch.rand(tokens.shape, generator=draw)
        other = ordinary[torch.randint(len(ordinary), tokens.shape, generator=draw)]
        shown = torch.where(how < MASKED_AS_MASK, dict(self.special)["mask"], tokens)
        shown = torch.where(how >= 1 - MASKED_AS_OTHER, other, shown)
        hidden = tokens.masked_fill(~chosen, IGNORED)
        return torch.where(chosen, shown, tokens).to(x.device), hidden.to(y.device)


@dataclass(frozen=True)
class TokenClassification(NextToken):
    """Classification of tokens, such as names and parts of speech; the loss is that of `next_token`.

    A model returns [n, T, L]. The labels [n, T] are classes (tags), -100 where a token does not count.

    Attributes:
        metrics: some of `token_accuracy` and `macro_f1` (mean F1 of the tags that occur or are predicted).
            Curves and tables show the first one.
    """

    called: ClassVar[str] = "token_classification"
    labels: ClassVar[tuple[str, ...]] = (TAGS,)
    known: ClassVar[Mapping[str, Metric]] = known("token_accuracy", "macro_f1")

    metrics: tuple[str, ...] = ("token_accuracy", "macro_f1")

    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return the sums of `next_token` and, per tag, of tokens, predictions and hits."""
        counts, size = labels != IGNORED, output.shape[-1]
        right, guess = labels[counts], predictions(output)[counts]
        return {
            **super().sums(output, labels),
            "true": torch.bincount(right, minlength=size).cpu(),
            "predicted": torch.bincount(guess[guess >= 0], minlength=size).cpu(),
            "right": torch.bincount(right[right == guess], minlength=size).cpu(),
        }

    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics and loss."""
        n = float(sums["n"])
        values = {
            "token_accuracy": _ratio(sums["hits"], n),
            "macro_f1": _mean_ratio(2 * sums["right"], sums["true"] + sums["predicted"]),
        }
        return {**{name: values[name] for name in self.metrics}, "loss": self._loss_of(sums)}


def _ratio(part: np.ndarray | float, whole: float) -> float:
    return float(part) / whole if whole else float("nan")


def _mean_ratio(part: np.ndarray, whole: np.ndarray) -> float:
    """Return the mean of part / whole where `whole` is not 0; NaN where it is 0 everywhere."""
    there = whole > 0
    return float((part[there] / whole[there]).mean()) if there.any() else float("nan")


TASKS: Registry[type[Task]] = Registry(
    "tasks",
    Task,
    {
        "classification": Classification,
        "multi_label": MultiLabel,
        "regression": Regression,
        "next_token": NextToken,
        "masked_token": MaskedToken,
        "token_classification": TokenClassification,
        "segmentation": Segmentation,
    },
)
