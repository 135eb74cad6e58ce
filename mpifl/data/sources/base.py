"""What a source is: the files it reads, the pool it makes of them, how its pixels are normalised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mpifl.core.errors import UserError, require
from mpifl.core.vision import torchvision
from mpifl.data.pool import Pool

Channels = tuple[float, ...]

NORMALISATIONS: dict[str, tuple[Channels, Channels] | None] = {
    "standard": None,  # the source's own
    "unit": ((0.0,), (1.0,)),  # UCFL: pixels / 255 and nothing else
    "half": ((0.5,), (0.5,)),  # FLT, CIFAR-10
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # torchvision's pretrained weights
}


@dataclass(frozen=True)
class Source(ABC):
    """Images with labels.

    Attributes:
        normalise: standard (the source's mean and deviation), unit (pixels / 255), half (mean and deviation
            0.5) or imagenet; None leaves the choice to the scenario, whose paper may have one.
    """

    name: ClassVar[str]
    needs_root: ClassVar[bool] = True
    mean: ClassVar[Channels] = (0.0,)
    std: ClassVar[Channels] = (1.0,)

    normalise: str | None = None

    def __post_init__(self) -> None:
        known = f"known: {', '.join(NORMALISATIONS)}"
        require(
            self.normalise is None or self.normalise in NORMALISATIONS, "normalise", self.normalise, known
        )

    @abstractmethod
    def files(self, root: Path) -> list[Path]:
        """Return the files below `root` that `load` reads."""

    @abstractmethod
    def load(self, root: Path, scratch: Path) -> Pool:
        """Decode the files. A large source may write images.npy into `scratch` and return it mapped."""

    def download(self, root: Path) -> None:
        """Fetch the files into `root`, where somebody offers them."""
        raise UserError(
            "data.source.name", self.name, "cannot be downloaded; put its files below data.root by hand"
        )


def fetch(source: Source, dataset: str, root: Path, **options: Any) -> None:
    """Let torchvision download the data set called `dataset` into `root`; say so in one line if it cannot."""
    try:
        getattr(torchvision().datasets, dataset)(str(root), download=True, **options)
    except (OSError, RuntimeError) as error:
        remedy = f"{dataset} could not be downloaded ({error}); run this where a network is, or copy them"
        raise UserError("data.root", str(root), remedy) from error


def normalisation(source: Source, chosen: str, channels: int) -> tuple[Channels, Channels]:
    """Return (mean, std) per channel of pixels in [0, 1] for the normalisation called `chosen`."""
    mean, std = NORMALISATIONS[chosen] or (source.mean, source.std)
    require(
        len(mean) in (1, channels),
        "data.source.normalise",
        chosen,
        f"has {len(mean)} channels but the images have {channels}; take standard, unit or half",
    )
    return (mean * channels, std * channels) if len(mean) == 1 else (mean, std)


def broken(path: Path, why: str) -> UserError:
    """Return the error that names a file that cannot be read as what it should be."""
    return UserError(str(path), "unreadable", f"{why}; delete it and fetch it again with `mpifl prepare`")
