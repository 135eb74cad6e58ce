"""Writes files to a disk that may be full, in a process that may be killed.

A file written here is complete or absent. All writers raise `OSError`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # errors of a full disk, an exhausted quota, and a file-size limit


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk is full."""
    return isinstance(error, OSError) and error.errno in FULL


@contextmanager
def same_folder() -> Iterator[None]:
    """Leave the working folder after a block as it was before it: a user's code may change it.

    Relative paths of a run then stay what they are.
    """
    before = working_folder()
    try:
        yield
    finally:
        if working_folder() != before:
            change_folder(before)


def working_folder() -> str:
    """Return the working folder; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def change_folder(folder: str) -> None:
    """Change the working folder to what `working_folder` returned before."""
    if folder:
        os.chdir(folder)


def write_atomically(path: Path, content: bytes | str | Iterable[str], durable: bool = False) -> None:
    """Write a file so that it is either complete or, on failure, as it was before.

    Args:
        path: The file; its folder is created where it is missing.
        content: All of it, or its pieces. Text is written in UTF-8; characters that cannot be encoded, such
            as a byte of a folder's name, are escaped.
        durable: Return only when the content is on disk, so that it survives a crash of the machine.

    Raises:
        OSError: It cannot be written; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            for piece in [content] if isinstance(content, (bytes, str)) else content:
                file.write(piece.encode(errors="backslashreplace") if isinstance(piece, str) else piece)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file


def try_lock(file: IO[Any]) -> bool:
    """Lock a file until it is closed, or its process ends; return False where another process holds it.

    On a file system without locks it returns True in every process.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def try_lock_byte(file: IO[Any], place: int) -> bool:
    """Lock a byte of a file, which need not have it, until this process closes the file, or ends.

    Returns False where another process holds it; on a file system without locks True in every process.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True


def force_to_disk(path: Path) -> None:
    """Return when a file, or the list of files in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def usual_mode() -> int:
    """Return the mode of a new file under the umask of this process."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


@contextmanager
def safetensors_file(path: Path) -> Iterator[Path]:
    """Let safetensors write a file as all others are: with the mode of the umask, its errors as `OSError`."""
    from safetensors import SafetensorError  # the models import this module, and not safetensors

    try:
        yield path
        path.chmod(usual_mode())  # safetensors writes files that the owner alone may read
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write an indented JSON file; values of other types than those of JSON are written as strings."""
    write_atomically(path, json.dumps(tree, indent=2, default=str) + "\n")
