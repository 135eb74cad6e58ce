"""Connects this process to the other ranks: over MPI if an MPI launcher started it, otherwise alone."""

from __future__ import annotations

import os

from mpifl.core import instructions
from mpifl.core.process import age, launched

from .mpi_startup import check_size, starting
from .single import Single
from .transport import Transport


def connect() -> Transport:
    """Return the transport of this process: MPI when started by an MPI launcher, otherwise `Single`.

    Raises:
        UserError: a launcher started several processes, but MPI does not connect them; or the libraries of
            this process do not respect the limit in `MPIFL_INSTRUCTIONS`.
    """
    instructions.check()
    loaded = age()
    transport = _connected()
    transport.started = {"imports": round(loaded, 2), "mpi": round(age(), 2)}
    return transport


def _connected() -> Transport:
    if not launched():
        check_size(1, os.environ)
        return Single()
    with starting():
        from .mpi import connect_mpi

        transport = connect_mpi()
    check_size(transport.size, os.environ)
    return transport if transport.size > 1 else Single()
