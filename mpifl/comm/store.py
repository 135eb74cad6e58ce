"""Client state in node-local memory: readable by every rank of the node, and alive after the rank that wrote
it.

One file per client and visit. A visit reads the state of the visit before and writes its own, so a step that
is redone overwrites nothing that was committed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def scratch_root(need_bytes: int = 1 << 30) -> Path:
    """Return the folder for node-local scratch: shared memory where it has room, otherwise the temporary
    folder.
    """
    shm = Path("/dev/shm")
    if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= need_bytes:
        return shm
    return Path(tempfile.gettempdir())


class ClientStore:
    """Named tensors of clients, by visit."""

    def __init__(self, token: str, folder: str | None = None) -> None:
        self.folder = (Path(folder) if folder else scratch_root()) / f"mpifl-{token}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, kind: str, k: int, visit: int) -> Path:
        return self.folder / f"{kind}-{k}-{visit}"

    def load(self, kind: str, k: int, visit: int) -> dict[str, torch.Tensor]:
        """Return what client `k` left after `visit` visits; empty before the first."""
        return load_file(self._path(kind, k, visit)) if visit and self._path(kind, k, visit).exists() else {}

    def save(self, kind: str, k: int, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep what client `k` leaves after `visit` visits; what it left two visits ago goes."""
        path = self._path(kind, k, visit)
        if tensors:
            own = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
            save_file(own, path.with_suffix(".tmp"))  # clones: safetensors refuses tensors that share memory
            path.with_suffix(".tmp").rename(path)
        self._path(kind, k, visit - 2).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
