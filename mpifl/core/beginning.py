"""The beginning of a run: its phases until the first uploads are compared, and what decides each of them.

Runs that differ only in what later phases read have the same beginning. A method says which of its fields
decide a phase (`statistics_from`, `trained_from`, ...); the cases of a sweep then compute it once.
"""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from .algorithm import Algorithm
from .capabilities import LOOKS, SETUP, SHOWN, STATISTICS, TRAINING, OneShotStatistics, SecondLook, uses

STEPS = "steps"  # until data change; the other phases are in them
MOST_BYTES = 4 << 30  # of all files that the cases of a sweep share
LEAST_FREE = 0.05  # share of the disk that is left free
OWN = ""  # origin of a result that a run computed itself
PHASES = {
    SHOWN: "what the server shows all clients",
    STATISTICS: "one-shot statistics",
    SETUP: "set-up of the server",
    TRAINING: "first training",
    LOOKS: "look of the first round",
    STEPS: "steps before data change",
}


def with_steps(alike: str, steps: int) -> str:
    """Return what identifies the first steps of cases, given what these have in common and their number."""
    return f"{alike}.{steps}"


def num_steps(about: str) -> int:
    """Return the number of steps in what `with_steps` returned, or in a name that ends with it."""
    return int(about.rpartition(".")[2])


def no_room(folder: Path, size: int) -> str:
    """Return why no further files of a size go into a sweep's folder of shared results; empty if they may."""
    used = bytes_in(folder)
    disk = shutil.disk_usage(folder)
    if used + size > MOST_BYTES:
        return f"{folder} holds {used >> 20} MB"
    if disk.free - size < LEAST_FREE * disk.total:
        return f"the disk of {folder} has {disk.free >> 20} MB left"
    return ""


def bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def deciding_fields(algorithm: Algorithm, declaration: str) -> tuple[str, ...] | None:
    """Return the fields that a declaration names; None if the method's own class does not declare them.

    A declaration counts for the class that makes it. A subclass may read further fields.

    Args:
        algorithm: the method.
        declaration: the class attribute, for example `statistics_from`.
    """
    names: tuple[str, ...] | None = vars(type(algorithm)).get(declaration)
    return names


def phases(algorithm: Algorithm) -> dict[str, dict[str, Any]]:
    """Return the phases that a method has and that runs may share, each with the fields that decide it.

    One-shot statistics and looks depend on all fields unless the method declares less. What the server shows
    is costly only where it trains a network of its own for it. The first server and the first training are
    shared only where the method declares their fields: most methods neither train in `setup`, nor compare
    anything at length after the first training.

    Returns:
        Phase -> name of a field -> its value.
    """
    every = tuple(f.name for f in fields(algorithm))  # type: ignore[arg-type]

    def declared(declaration: str) -> tuple[str, ...]:
        names = deciding_fields(algorithm, declaration)
        return every if names is None else names

    found: dict[str, tuple[str, ...]] = {}
    sent: tuple[str, ...] = ()  # decide what clients send before training
    if uses(algorithm, OneShotStatistics):
        if algorithm.auxiliary() is not None:
            sent = found[SHOWN] = declared("shown_from")
        sent = found[STATISTICS] = (*sent, *declared("statistics_from"))
    if (names := deciding_fields(algorithm, "setup_from")) is not None:
        found[SETUP] = (*sent, *names)
    trained = deciding_fields(algorithm, "trained_from")
    if trained is not None:
        found[TRAINING] = trained
    if uses(algorithm, SecondLook):
        found[LOOKS] = every if trained is None else (*trained, *declared("looked_from"))
    return {
        phase: {name: getattr(algorithm, name) for name in every if name in names}
        for phase, names in found.items()
    }
