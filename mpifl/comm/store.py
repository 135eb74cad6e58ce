"""Client state in node-local memory: readable by every rank of the node, and alive after the rank that wrote
it.

One file per client and visit. A visit reads the state of the visit before and writes its own, so a step that
is redone overwrites nothing that was committed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
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


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    with half.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)


class ClientStore:
    """Named tensors of clients, by visit.

    Attributes:
        kept: the folder in which a run that goes on finds what clients left before; None for a new run.
    """

    def __init__(self, token: str, folder: str | None = None, kept: Path | None = None) -> None:
        self.folder, self.kept = (Path(folder) if folder else scratch_root()) / f"mpifl-{token}", kept
        self.folder.mkdir(parents=True, exist_ok=True)
        run, _, launch = token.rpartition("-")
        for old in self.folder.parent.glob(f"mpifl-{run}-*") if run else ():
            if not old.name.endswith(launch):  # of a launch of this run that was killed
                shutil.rmtree(old, ignore_errors=True)

    @staticmethod
    def name(kind: str, k: int, visit: int) -> str:
        """Return the name of a file."""
        return f"{kind}-{k}-{visit}"

    def _path(self, kind: str, k: int, visit: int) -> Path:
        return self.folder / self.name(kind, k, visit)

    def load(self, kind: str, k: int, visit: int) -> dict[str, torch.Tensor]:
        """Return what client `k` left after `visit` visits; empty before the first."""
        places = [self._path(kind, k, visit)]
        places += [self.kept / places[0].name] if self.kept else []
        found = next((path for path in places if visit and path.exists()), None)
        return load_file(found) if found else {}

    def save(self, kind: str, k: int, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep what client `k` leaves after `visit` visits; what it left two visits ago goes."""
        path = self._path(kind, k, visit)
        if tensors:
            own = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
            save_file(own, path.with_suffix(".tmp"))  # clones: safetensors refuses tensors that share memory
            path.with_suffix(".tmp").rename(path)
        self._path(kind, k, visit - 2).unlink(missing_ok=True)

    def keep(self, names: Sequence[str], folder: Path) -> dict[str, tuple[int, str]]:
        """Bring files to where they outlive this node; return the bytes and the SHA-256 of each that
        exists.
        """
        out = {}
        for name in names:
            path = self.folder / name
            if not path.exists() and self.kept == folder:
                path = folder / name  # not visited since the run went on
            if path.exists():
                data = path.read_bytes()
                out[name] = (len(data), hashlib.sha256(data).hexdigest())
                if path.parent != folder:
                    write_durably(folder / name, data)
        return out

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
