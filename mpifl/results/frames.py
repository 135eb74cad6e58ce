"""The CSV tables of run folders as pandas DataFrames: columns are typed, and empty fields are NaN or NA."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import UserError, require

if TYPE_CHECKING:
    from pandas import DataFrame, Series

EMPTY = ("", "nan")  # fields without a value
FLAGS = ("accepted", "placed")  # columns of 0 and 1 that are booleans
NO_GROUP = "group"  # column of true groups, -1 if the scenario has none
INTEGER = r"-?[0-9]+"


def frame_of(path: Path, required: Collection[str]) -> DataFrame:
    """Return a CSV file of a run folder; if there is no file, an empty frame with the required columns.

    Args:
        path: the file.
        required: columns that it must have.

    Returns:
        A frame with columns of int64, float64, bool or text; Int64 and boolean if fields are empty.

    Raises:
        UserError: the file cannot be read, or a column is missing.
    """
    import pandas as pd

    if not path.exists():
        return pd.DataFrame(columns=list(required))
    options: dict[str, Any] = {"keep_default_na": False, "na_values": list(EMPTY), "low_memory": False}
    if int(pd.__version__.partition(".")[0]) < 3:  # later ones read floats exactly by default
        options["float_precision"] = "round_trip"
    try:
        frame = pd.read_csv(path, **options)
        unsure = [name for name in frame if _may_be_whole(frame[name])]
        if unsure:
            texts = pd.read_csv(path, usecols=unsure, dtype=str, keep_default_na=False)
            for name in unsure:
                written = texts[name][~texts[name].isin(EMPTY)]
                if len(written) and written.str.fullmatch(INTEGER).all():
                    frame[name] = frame[name].astype("Int64")
    except pd.errors.EmptyDataError:  # a table without a row has no columns either
        return pd.DataFrame(columns=list(required))
    except (ValueError, OSError, OverflowError) as error:  # pandas' own errors are ValueErrors
        raise UserError("RUN", str(path), f"cannot be read: {error}; run it again") from error
    missing = [name for name in required if name not in frame]
    require(not missing, "RUN", str(path), f"has no column {', '.join(missing)}; run it again")
    for name in FLAGS:
        if name in frame:
            frame[name] = frame[name].astype("boolean" if frame[name].hasnans else "bool")
    if NO_GROUP in frame and not frame[NO_GROUP].hasnans and (frame[NO_GROUP] < 0).any():
        frame[NO_GROUP] = frame[NO_GROUP].astype("Int64").mask(frame[NO_GROUP] < 0)
    return frame


def _may_be_whole(column: Series[Any]) -> bool:
    """Return whether a column may hold integers and empty fields, which pandas reads as float64."""
    if column.dtype != np.float64 or not column.hasnans:
        return False
    values = column.dropna()
    return bool(len(values)) and bool((values == np.floor(values)).all())
