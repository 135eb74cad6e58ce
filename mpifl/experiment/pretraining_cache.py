"""A cache on disk for networks that the server trains for one-shot statistics (FLT's autoencoder)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import OneShotStatistics, hooks_of, uses
from mpifl.core.files import write_atomically
from mpifl.core.rng import Key
from mpifl.core.types import ProblemInfo

FORM = 2  # of the files; from 2 on they hold what the server computed


@dataclass(frozen=True)
class PretrainingCache:
    """One file for each pre-trained network, named by a digest of everything that determines it.

    Attributes:
        folder: folder of the files.
        about: further settings that decide the numbers: options of local training, libraries and machine; as
            JSON values.
    """

    folder: Path
    about: Mapping[str, Any]

    def get(
        self,
        algorithm: Algorithm,
        problem: ProblemInfo,
        key: Key,
        make: Callable[[], Mapping[str, torch.Tensor]],
    ) -> Mapping[str, torch.Tensor]:
        """Return the network that an earlier run saved; if there is none, call `make` and save its result."""
        file = self.file(algorithm, problem, key)
        if kept := read_shown(file):
            return kept
        shown = make()
        if file is not None:
            write_shown(file, shown)
        return shown

    def file(self, algorithm: Algorithm, problem: ProblemInfo, key: Key) -> Path | None:
        """Return the file for the result of `shows`; None for methods that train nothing for it.

        Args:
            algorithm: the method.
            problem: the problem passed to `shows`.
            key: the key passed to `shows`.
        """
        if algorithm.auxiliary() is None or not uses(algorithm, OneShotStatistics) or not problem.public:
            return None
        names = hooks_of(algorithm, OneShotStatistics).shown_from
        chosen = [f.name for f in fields(algorithm) if names is None or f.name in names]  # type: ignore[arg-type]
        options = {name: getattr(algorithm, name) for name in chosen}
        about = {"form": FORM, "key": key.entropy, **self.about}
        told = {"method": type(algorithm).__qualname__, "options": options, **about}
        sha = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
        sha.update(problem.public[0].auxiliary.init.numpy().data)
        for client in problem.public:
            for part in (client.data.train.x, client.data.train.y):
                sha.update(str(tuple(part.shape)).encode())
                sha.update(part.cpu().contiguous().numpy().data)
        return self.folder / f"shown-{sha.hexdigest()[:32]}.safetensors"


def read_shown(file: Path | None) -> dict[str, torch.Tensor]:
    """Return the content of a file; empty if it is missing or damaged."""
    from safetensors.torch import load

    try:
        return {} if file is None else load(file.read_bytes())
    except Exception:  # missing, or damaged in any way: it is computed again
        return {}


def write_shown(file: Path, shown: Mapping[str, torch.Tensor]) -> None:
    """Write a file for later runs."""
    from safetensors.torch import save

    write_atomically(file, save({name: rows.contiguous() for name, rows in shown.items()}))
