"""CSV files with rows for every client, one for each of its visits in turn: durations, links."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from mpifl.core.errors import UserError, require
from mpifl.core.textfiles import csv_file

T = TypeVar("T")


def read(
    file: str, key: str, form: str, needs: str, parse: Callable[[Mapping[str, str], str], T]
) -> dict[int, list[T]]:
    """Return client -> what its rows say, in the order of the file.

    Args:
        key: of the configuration that names the file. form: what to give there. needs: what a row holds.
        parse: makes something of a row, found at the place "FILE line NUMBER".

    Raises:
        UserError: where there is no such file, or a row that `parse` cannot take.
    """
    require(os.path.isfile(file), key, file, f"there is no such file; give a CSV of {form}")
    out: dict[int, list[T]] = {}
    for place, row in csv_file(Path(file), key, ("client",)):
        try:
            client, found = int(row["client"]), parse(row, place)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(place, row, f"needs {needs}") from error
        out.setdefault(client, []).append(found)
    return out


def check(clients: Iterable[int], num_clients: int, file: str, key: str) -> None:
    """Raise `UserError` unless every client has a row, and no other has."""
    known, everyone = set(clients), set(range(num_clients))
    unknown, missing = known - everyone, everyone - known
    remedy = f"{file} has rows of client {min(unknown, default=0)}; there are {num_clients} clients"
    require(not unknown, key, file, remedy)
    remedy = f"{file} has no row of client {min(missing, default=0)}; give every client one"
    require(not missing, key, file, remedy)
