"""Client state in node-local memory: readable by every rank of the node, and alive after the rank that wrote
it.

One file per client and visit. A visit reads the state of the visit before and writes its own, so a step that
is redone overwrites nothing that was committed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mpifl.core.errors import UserError
from mpifl.core.files import told_as_os_error

OWNER = ".owner"  # names the host; locked by every rank of the node for as long as it lives
SCRATCH = re.compile(r"mpifl-[0-9a-f]{16}-[0-9a-f]{8}")  # run and launch
YOUNG_S = 60.0  # nobody judges a folder that is younger: its first rank may not have locked it yet


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
    try:
        with half.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file


def remove_dead(root: Path, own: Path) -> None:
    """Remove what jobs of this user left on this host when they were killed.

    A folder goes if it names this host, is a minute old and no process holds it; on a shared file system the
    folders of other hosts are left alone.

    Args:
        root: where the folders of all jobs are. own: the one that is in use here.
    """
    for folder in root.glob("mpifl-*"):
        if folder == own or not SCRATCH.fullmatch(folder.name):
            continue
        with suppress(OSError):
            about = (folder / OWNER).stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            with (folder / OWNER).open("r+") as hold:
                if hold.read() == socket.gethostname():
                    fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


class ClientStore:
    """Named tensors of clients, by visit.

    Attributes:
        kept: the folder in which a run that goes on finds what clients left before; None for a new run.
    """

    def __init__(self, token: str, folder: str | None = None, kept: Path | None = None) -> None:
        self.folder, self.kept = (Path(folder) if folder else scratch_root()) / f"mpifl-{token}", kept
        self._hold = self._begin()
        remove_dead(self.folder.parent, self.folder)
        run, _, launch = token.rpartition("-")
        for old in self.folder.parent.glob(f"mpifl-{run}-*") if run else ():
            if not old.name.endswith(launch):  # of a launch of this run that was killed
                shutil.rmtree(old, ignore_errors=True)

    def _begin(self) -> int:
        """Make the folder; return a descriptor whose lock tells others that this process lives."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hold = os.open(self.folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(hold, socket.gethostname().encode(), 0)
        except OSError as error:
            remedy = f"cannot be written ({error.strerror}); give another folder"
            raise UserError("system.scratch", str(self.folder.parent), remedy) from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(hold, fcntl.LOCK_SH)
        return hold

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
            half = path.with_suffix(".tmp")
            try:
                with told_as_os_error(half):
                    save_file(own, half)  # clones: safetensors refuses tensors that share memory
            except OSError as error:
                half.unlink(missing_ok=True)
                remedy = (
                    f"client state cannot be written ({error.strerror}); give a folder that has more room"
                )
                raise UserError("system.scratch", str(self.folder.parent), remedy) from error
            half.rename(path)
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
        with suppress(OSError):
            os.close(self._hold)
            self._hold = -1
