"""The interface to the data of a federation: clients, their splits, their hidden groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from .errors import UserError

IMAGES, FEATURES, TOKENS = "images", "features", "tokens"
SEVERAL = "several inputs"  # kind of samples that consist of `InputPart`s
CLASSES, MULTI_HOT, NUMBERS, MASKS = "classes", "multi_hot", "numbers", "masks"
MASKED, TAGS = "masked_tokens", "tags"
SEQUENCES = (TOKENS, MASKED, TAGS)  # kinds of labels that every position of a sample has
IGNORED = -100  # label of a token or pixel that does not count, as PyTorch's `ignore_index`
MASKED_AS_MASK, MASKED_AS_OTHER = 0.8, 0.1  # of the tokens that masks hide; the rest stay as they are
SPLITS = ("train", "val", "test")  # columns of `Federation.sizes`


class InputPart(NamedTuple):
    """One of several inputs of a model.

    Attributes:
        name: the name by which a model gets it.
        shape: its shape in one sample.
        inputs: `images`, `features` or `tokens`, as for `DataInfo`.
        vocabulary: number of different tokens; 0 if it holds none.
    """

    name: str
    shape: tuple[int, ...]
    inputs: str = FEATURES
    vocabulary: int = 0

    @property
    def width(self) -> int:
        """The numbers of it in one sample."""
        return prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which a model gets it."""
        return torch.int64 if self.inputs == TOKENS else torch.float32


def unpacked(x: torch.Tensor, parts: tuple[InputPart, ...]) -> dict[str, torch.Tensor]:
    """Return several inputs by name, in their order, each [..., *shape] in its own type.

    Args:
        x: packed samples, float32 [..., F].
        parts: what lies side by side in them.
    """
    pieces = x.split([part.width for part in parts], dim=-1)
    return {
        part.name: piece.reshape(*x.shape[:-1], *part.shape).to(part.dtype)
        for part, piece in zip(parts, pieces, strict=True)
    }


def packed(given: Mapping[str, torch.Tensor], parts: tuple[InputPart, ...]) -> torch.Tensor:
    """Return samples float32 [n, F] in which several inputs [n, *shape] lie side by side; see `unpacked`."""
    return torch.cat([given[part.name].reshape(-1, part.width).float() for part in parts], 1)


@dataclass(frozen=True)
class DataInfo:
    """Format of the samples and labels of a federation, for which models and tasks are built.

    | `inputs` | a sample as a model gets it |
    |---|---|
    | `images` | float32 [C, H, W], normalised |
    | `features` | float32 of any shape: [F] for a table, [C, H, W] for a spectrogram |
    | `tokens` | int64 [T], each from 0 to `vocabulary` - 1 |
    | `several inputs` | those of `parts`, each as its kind says; up to the model, packed in float32 [F] |

    | `labels` | a label as a task gets it | `num_classes` is the number of |
    |---|---|---|
    | `classes` | int64, from 0 to L - 1 | classes |
    | `multi_hot` | float32 [L], 1 where a label applies | labels |
    | `numbers` | float32 [L] | targets |
    | `tokens` | int64 [T], the next token; -100 for a position that does not count | different tokens |
    | `masked_tokens` | int64 [T], the token that a mask hides; -100 elsewhere | different tokens |
    | `tags` | int64 [T], the class of the token; -100 for a position that does not count | tags |
    | `masks` | int64 [H, W], a class for each pixel, -100 for one that does not count | classes |

    Attributes:
        shape: shape of one sample.
        num_classes: L, the width of the model's output.
        inputs: `images`, `features`, `tokens` or `several inputs`.
        labels: `classes`, `multi_hot`, `numbers`, `tokens`, `masked_tokens`, `tags` or `masks`.
        vocabulary: number of different tokens; 0 if samples are not tokens.
        categories: number of categories of each column of a table [F], whose values are integers from 0; 0
            for a column of numbers. Empty: all columns hold numbers.
        parts: the inputs that lie side by side in a sample of shape [F]; empty for one input. `unpack`
            separates them.
        special: (role, token) of the tokens that stand for no text: `padding` (a sample ends where only these
            follow), `mask`, `second` (a second text follows the first of these), and others by the names of
            their tokenizer. Empty if nothing is known of them.
    """

    shape: tuple[int, ...]
    num_classes: int
    inputs: str = IMAGES
    labels: str = CLASSES
    vocabulary: int = 0
    categories: tuple[int, ...] = ()
    parts: tuple[InputPart, ...] = ()
    special: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(InputPart(*part) for part in self.parts))  # also from JSON

    def token_of(self, role: str) -> int | None:
        """Return the special token of a role; None if there is none."""
        return dict(self.special).get(role)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the samples that a model gets."""
        return torch.int64 if self.inputs == TOKENS else torch.float32

    def unpack(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inputs of packed samples [n, F] by name, each [n, *shape] in its own type."""
        return unpacked(x, self.parts)


@dataclass(frozen=True)
class Split:
    """Samples ready for training, contiguous; `DataInfo` describes their format.

    Attributes:
        x: [n, *shape], float32, or int64 for tokens.
        y: [n] or [n, ...], int64 for classes, tokens and masks, otherwise float32.
    """

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """The splits of one client at one visit.

    Attributes:
        train: training samples.
        val: validation samples.
        test: test samples.
        extra: further test sets by name (a backdoor, say).
    """

    train: Split
    val: Split
    test: Split
    extra: Mapping[str, Split] = field(default_factory=dict)

    @property
    def further(self) -> tuple[str, ...]:
        """Names of the further test sets."""
        return tuple(self.extra)

    def split(self, name: str) -> Split:
        """Return `train`, `val`, `test` or a further test set."""
        found: Split = self.extra[name] if name in self.further else getattr(self, name)
        return found


class LazyClient(ClientData):
    """A client whose splits are read on first access: training does not pay for test images."""

    _read: Callable[[str], Split]
    _extra: tuple[str, ...]

    @classmethod
    def reading(cls, read: Callable[[str], Split], extra: tuple[str, ...]) -> LazyClient:
        """Return a client.

        Args:
            read: returns a split by name.
            extra: names of the further test sets.
        """
        self = object.__new__(cls)
        self.__dict__.update(_read=read, _extra=extra)
        return self

    @cached_property
    def train(self) -> Split:
        """Training samples."""
        return self._read("train")

    @cached_property
    def val(self) -> Split:
        """Validation samples."""
        return self._read("val")

    @cached_property
    def test(self) -> Split:
        """Test samples."""
        return self._read("test")

    @property
    def further(self) -> tuple[str, ...]:
        """Names of the further test sets."""
        return self._extra

    @cached_property
    def extra(self) -> Mapping[str, Split]:
        """Further test sets by name."""
        return {name: self._read(name) for name in self._extra}


@dataclass(frozen=True)
class StoredSamples:
    """Training samples of several visits in the storage of a federation, for kernels that read them there.

    Attributes:
        inputs: images of all clients, uint8 [S, C, H, W], contiguous.
        labels: classes of all samples, int64 [S], contiguous.
        table: input of the model for each pixel value in each channel, float32 [C, 256].
        index: indices of the samples, one visit after the other, int64 [n].
        sizes: number of samples of each visit, int64 [visits].
    """

    inputs: np.ndarray
    labels: np.ndarray
    table: torch.Tensor
    index: np.ndarray
    sizes: np.ndarray


class Federation(ABC):
    """A population of clients. Every rank opens the same one; the order of access does not change the data.

    Attributes:
        num_clients: N.
        num_classes: L, the width of the model's output: classes, labels, targets or tokens.
        shape: shape of one sample as `client` returns it; (C, H, W) for an image.
        sizes: int64 [N, 3], samples for training, validation and test of each client (at its first visit,
            where they change).
        groups: int64 [N], the hidden group of each client, or None where there is no ground truth.
        class_names: names of the classes, labels or targets; empty if they have none.
        client_names: name of each client in the source or in the file of a split; empty if they have none.
        attackers: int64, the clients that attack (section `attack`), or None.
        targets: int64, the clients whose accuracy is reported separately (those a backdoor is aimed at), or
            None.
        content: identity of the data, by name: digests of samples, of their split over clients and of the
            files that a scenario reads, and how samples are normalised. A run can only be resumed with the
            same content. Empty if it is unknown.
    """

    num_clients: int
    num_classes: int
    shape: tuple[int, ...]
    sizes: np.ndarray
    groups: np.ndarray | None
    targets: np.ndarray | None = None
    attackers: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    client_names: Sequence[str | int] = ()
    content: Mapping[str, str] = MappingProxyType({})

    @property
    def info(self) -> DataInfo:
        """Format of samples and labels. Default: images of classes."""
        return DataInfo(self.shape, self.num_classes)

    @property
    def changes(self) -> bool:
        """Whether a client may hold other data at another visit. Default: False."""
        return False

    def data_set(self, k: int, visit: int, step: int) -> int:
        """Return the number of client `k`'s data set at a visit in a server step.

        It is what `client`, `stored` and others take as `visit`. Default: the number of the visit.
        """
        return visit

    def data_sets_of(self, clients: np.ndarray, visits: np.ndarray, step: int) -> np.ndarray:
        """Return `data_set` of several clients at their visits, int64 [m]. Default: `visits`.

        Args:
            clients: int64 [m].
            visits: visit of each client, int64 [m].
            step: the server step.
        """
        return visits

    @property
    def changes_by_time(self) -> bool:
        """Whether data change at times in seconds on the run's clock. Default: False."""
        return False

    @property
    def change_steps(self) -> Sequence[int]:
        """The server step with which each change (section `drift`) begins, as far as it is known.

        Default: none.
        """
        return ()

    @property
    def settled(self) -> Sequence[int]:
        """The server step of each moment in seconds at which clients change, as far as it is known.

        Ascending. Default: none.
        """
        return ()

    def settle_changes(self, steps: Sequence[int]) -> None:
        """Set the server step of each moment at which clients change; none without drift."""
        assert not steps, "data do not change"

    def change_is_due(self, seconds: float) -> bool:
        """Return whether data change at a time that has come, in a step that is not set yet.

        Args:
            seconds: seconds on the run's clock.
        """
        return False

    @property
    def regroups(self) -> Sequence[int]:
        """The server steps from which on some client is in another hidden group, ascending. Default: none."""
        return ()

    def groups_at(self, step: int) -> np.ndarray | None:
        """Return the hidden group of each client at a server step, int64 [N]; None without ground truth.

        Default: `groups`.
        """
        return self.groups

    @abstractmethod
    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the data of client `k` at its `visit`-th visit (a static federation ignores `visit`)."""

    def num_samples(self, k: int, visit: int = 0) -> int:
        """Return the number of training samples of client `k` at its `visit`-th visit, without reading them.

        Default: `sizes`, for data that do not change.
        """
        return int(self.sizes[k, 0])

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of clients in a set at some visits, int64 [m].

        Default: from `sizes` if data do not change; other sets are read and counted.

        Args:
            split: `train`, `val`, `test` or a further test set.
            clients: int64 [m].
            visits: visit of each client, int64 [m].
        """
        if split in SPLITS and not self.changes:
            return np.asarray(self.sizes[clients, SPLITS.index(split)])
        pairs = zip(clients.tolist(), visits.tolist(), strict=True)
        if split == "train":
            return np.array([self.num_samples(k, visit) for k, visit in pairs], np.int64)
        return np.array([len(self.client(k, visit).split(split)) for k, visit in pairs], np.int64)

    def host(self, clients: np.ndarray, ranks: int = 1) -> None:
        """Keep the samples of some clients, which this rank hosts, at hand, and those of no other client.

        It changes no sample. Default: nothing changes.

        Args:
            clients: their numbers, int64 ascending.
            ranks: number of ranks of this node that host clients.
        """
        return

    def stored(self, clients: np.ndarray, visits: np.ndarray) -> StoredSamples | None:
        """Return where the training samples of some visits are stored.

        Default: None. It is also None where a model gets more than one float for each stored pixel.

        Args:
            clients: int64 [m].
            visits: visit of each client, int64 [m].
        """
        return None

    def pixels(self, k: int, split: str = "train", visit: int = 0) -> Split:
        """Return a split of client `k`, `train`, `val` or `test`, with its images as they are stored.

        Default: as `client` returns it, for federations that store nothing else.
        """
        found: Split = getattr(self.client(k, visit), split)
        return found

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together."""
        return int(self.sizes[:, 2].sum())

    def public(self) -> tuple[Split, ...]:
        """Return the labelled sets the server itself owns, one for each group (none by default)."""
        return ()

    def group_test_sets(self) -> tuple[Split, ...]:
        """Return labelled test sets of whole groups that nobody trains on. Default: none."""
        return ()

    def has_test_data(self) -> bool:
        """Return whether there is any test data: of clients, further test sets, or those of whole groups."""
        return bool(self.sizes[:, 2].any() or self.client(0).extra or self.group_test_sets())

    def mixture(self, k: int, visit: int = 0) -> np.ndarray | None:
        """Return the true share [groups] of each group in client `k`'s data; None if it is undefined."""
        if self.groups is None:
            return None
        return np.asarray(np.eye(int(self.groups.max()) + 1)[self.groups[k]])

    def cycle(self, k: int, visit: int) -> int:
        """Return which of its data sets client `k` has at a visit: number `visit`, unless it awaits drift."""
        return visit

    def num_samples_in(self, k: int, cycle: int) -> int:
        """Return the number of training samples in client `k`'s data set number `cycle`; reads none.

        Default: those of the visit with that number, for federations that skip no data set.
        """
        return self.num_samples(k, cycle)

    def await_drift(self, threshold: float, longest: int) -> None:
        """Give each visit the first data set that differs enough from that of the visit before.

        Args:
            threshold: least total variation distance between the group shares of successive visits.
            longest: a visit skips fewer data sets than this.

        Raises:
            UserError: the data never change.
        """
        remedy = "the data of these clients do not change from visit to visit; use a scenario whose data do"
        raise UserError("policy.uploads", "drift", remedy)
