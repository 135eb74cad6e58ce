"""The final model of an earlier run, from which another run starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mpifl.core.errors import UserError, require

KEY, FILE, TABLE = "start.run", "model.safetensors", "model"


def read_model(folder: str) -> torch.Tensor:
    """Return the one model [d] that all clients use at the end of a run.

    Args:
        folder: The run folder.

    Raises:
        UserError: There is no such folder or no model in it, it cannot be read, its clients use several
            models or parts of one, or its numbers are not finite.
    """
    file = Path(folder).expanduser() / FILE
    remedy = f"has no {FILE}: take the folder of a finished run with output.model true"
    require(file.is_file(), KEY, folder, remedy)
    try:
        from safetensors.torch import load_file

        tables = load_file(file)
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise UserError(KEY, folder, f"its {FILE} cannot be read ({type(error).__name__})") from error
    found, assign = tables.get(TABLE), tables.get("assign")
    remedy = (
        f"holds {', '.join(sorted(tables))}, no table {TABLE!r} of whole models; take a run of another method"
    )
    if found is None or assign is None or found.ndim != 2:
        raise UserError(KEY, folder, remedy)
    used = np.unique(assign.numpy())
    remedy = f"its clients use {len(used)} models; take a run with one model for all (fedavg)"
    require(len(used) == 1 and 0 <= used[0] < len(found), KEY, folder, remedy)
    vector = found[int(used[0])].float()
    remedy = "its model has numbers that are not finite; take a run that did not diverge"
    require(bool(torch.isfinite(vector).all()), KEY, folder, remedy)
    return vector.clone()
