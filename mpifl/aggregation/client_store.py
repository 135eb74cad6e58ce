"""Client state in node-local files, which every rank of a node can read and which outlive their writer.

There is one file per client, kind and visit. A visit reads the state of the previous visit and writes its
own, so a repeated step overwrites nothing that was committed.
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
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mpifl.core.errors import UserError
from mpifl.core.files import safetensors_file, write_atomically

OWNER = ".owner"  # holds the host name; every rank of the node locks it while it runs
SCRATCH = re.compile(r"mpifl-[0-9a-f]{16}-[0-9a-f]{8}")  # mpifl-RUN-LAUNCH
ATTEMPTS = 10  # tries to create the folder
YOUNG_S = 60.0  # a younger folder is not removed: its first rank may not have locked it yet


def scratch_root(need_bytes: int = 1 << 30) -> Path:
    """Return the parent folder of node-local files: shared memory, or the temporary folder if it is too full.

    Args:
        need_bytes: least free space of shared memory for it to be used.
    """
    shm = Path("/dev/shm")
    if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= need_bytes:
        return shm
    return Path(tempfile.gettempdir())


def remove_dead(root: Path, own: Path) -> None:
    """Remove the folders of this user's jobs that were killed on this host.

    A folder is removed if it names this host, is at least a minute old, and no process holds its lock. On a
    shared file system the folders of other hosts stay.

    Args:
        root: parent of the folders of all jobs.
        own: folder of this job.
    """
    for folder in root.glob("mpifl-*"):
        if folder == own or not SCRATCH.fullmatch(folder.name):
            continue
        with suppress(OSError):
            about = (folder / OWNER).stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            with (folder / OWNER).open("r+") as lock:
                if lock.read() == socket.gethostname():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


class ClientStore:
    """Named tensors of clients, one file per client, kind and visit.

    Args:
        token: RUN-LAUNCH, part of the name of this job's folder.
        folder: parent folder; None for `scratch_root()`.
        kept: folder in which a resumed run finds earlier client state; None for a new run.

    Attributes:
        folder: the node-local folder of this job.
        kept: as given.

    Raises:
        UserError: the folder cannot be created.
    """

    def __init__(self, token: str, folder: str | None = None, kept: Path | None = None) -> None:
        self.folder, self.kept = (Path(folder) if folder else scratch_root()) / f"mpifl-{token}", kept
        self._place = str(self.folder)  # a path is joined for each visit
        self._release = weakref.finalize(self, os.close, self._create())
        remove_dead(self.folder.parent, self.folder)
        run, _, launch = token.rpartition("-")
        for old in self.folder.parent.glob(f"mpifl-{run}-*") if run else ():
            if not old.name.endswith(launch):  # of an earlier launch of this run, which was killed
                shutil.rmtree(old, ignore_errors=True)

    def _create(self) -> int:
        """Create the folder; return a file descriptor whose lock shows others that this process is alive."""
        try:
            lock = self._opened()
            os.pwrite(lock, socket.gethostname().encode(), 0)
        except OSError as error:
            remedy = f"cannot be written ({error.strerror}); give another folder"
            raise UserError("system.scratch", str(self.folder.parent), remedy) from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        return lock

    def _opened(self) -> int:
        """Create the folder and open its lock; try again if a rank that ends removes it meanwhile."""
        attempts = 0
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return os.open(self.folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
            except (FileNotFoundError, FileExistsError):
                attempts += 1
                if attempts == ATTEMPTS:
                    raise

    @staticmethod
    def name(kind: str, k: int, visit: int) -> str:
        """Return the file name of client `k` after `visit` visits."""
        return f"{kind}-{k}-{visit}"

    def _path(self, kind: str, k: int, visit: int) -> str:
        return os.path.join(self._place, self.name(kind, k, visit))

    def load(self, kind: str, k: int, visit: int) -> dict[str, torch.Tensor]:
        """Return the tensors that client `k` saved for `visit`; empty for visit 0, or if it saved none."""
        if not visit:
            return {}
        places = [self._path(kind, k, visit)]
        places += [str(self.kept / self.name(kind, k, visit))] if self.kept else []
        found = next(filter(os.path.exists, places), None)
        return load_file(found) if found else {}

    def save(self, kind: str, k: int, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save the tensors of client `k` for `visit` and remove those of two visits before.

        Raises:
            UserError: the file cannot be written, for example because the disk is full.
        """
        path = self._path(kind, k, visit)
        if tensors:
            own = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
            partial = f"{path}.tmp"
            try:
                with safetensors_file(Path(partial)) as file:
                    save_file(own, file)  # clones, because safetensors refuses tensors that share memory
            except OSError as error:
                Path(partial).unlink(missing_ok=True)
                remedy = (
                    f"client state cannot be written ({error.strerror}); give a folder that has more room"
                )
                raise UserError("system.scratch", str(self.folder.parent), remedy) from error
            os.rename(partial, path)
        with suppress(FileNotFoundError):
            os.unlink(self._path(kind, k, visit - 2))

    def keep(self, names: Sequence[str], folder: Path) -> dict[str, tuple[int, str]]:
        """Copy files to a folder that outlives this node.

        Args:
            names: file names, as returned by `name`.
            folder: destination.

        Returns:
            File name -> (size in bytes, SHA-256), for the files that exist.
        """
        out = {}
        for name in names:
            path = self.folder / name
            if not path.exists() and self.kept == folder:
                path = folder / name  # not visited since the run was resumed
            if path.exists():
                data = path.read_bytes()
                out[name] = (len(data), hashlib.sha256(data).hexdigest())
                if path.parent != folder:
                    write_atomically(folder / name, data, durable=True)
        return out

    def close(self) -> None:
        """Remove the folder and release its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self._release()
