"""Open MPI's own monitoring of its messages and collectives, an independent check of `mpi_traffic.csv`.

`prepare` must be called before MPI starts, because MPI_Init chooses the component. A `Monitor` makes the
library write its counts through the MPI tool interface, so neither MPI_Finalize nor a shared file system is
needed; no communicator may have been freed before, because Open MPI 5.0 still reads its name. Without a
`Monitor`, the same counts are written at MPI_Finalize, to `F.<rank>.prof` for each rank of MPI_COMM_WORLD, by
`mpirun --mca pml_monitoring_enable 2 --mca pml_monitoring_enable_output 3 --mca pml_monitoring_filename F`.
Each line of these files has a tag and fields:

    E  rank  peer  B bytes  M msgs sent  histogram   point-to-point calls of the program (Send, Isend, ...)
    I  rank  peer  B bytes  M msgs sent  histogram   messages the library sent to carry out collectives
    C  rank  peer  B bytes  M msgs sent              collectives of program and library, spread over peers
    D  name  procs: 0,1,2                            a communicator; the next three lines belong to it
    O2A / A2O / A2A  rank  B bytes  M msgs sent      its one-to-all, all-to-one and all-to-all calls

Communicators that were freed before MPI_Finalize are not written.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

from mpifl.core.errors import require

ENABLE, LEVELS = "OMPI_MCA_pml_monitoring_enable", "OMPI_MCA_coll"
ALLTOALLV = {  # pairwise: persistent requests of the linear algorithm are also counted as messages
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_alltoallv_algorithm": "2",
}
FLUSH, GENERIC = b"pml_monitoring_flush", 9  # a performance variable, and MPI_T_PVAR_CLASS_GENERIC
PEER_TAGS = {"E": "point", "I": "internal", "C": "collective"}
KINDS = ("O2A", "A2O", "A2A")


class Count(NamedTuple):
    """The bytes and calls in one line of the monitoring output."""

    size: int
    calls: int


def prepare() -> None:
    """Turn on Open MPI's monitoring, which counts the program's messages and the library's separately.

    Two-level collectives are turned off: over several nodes, Open MPI 5.0.11 may crash in MPI_Finalize with
    both.
    """
    os.environ[ENABLE] = "2"
    os.environ.setdefault(LEVELS, "^han")
    os.environ.update(ALLTOALLV)


class Monitor:
    """Reads the counts that Open MPI makes on this rank from now on.

    Raises:
        UserError: this MPI has no monitoring.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
        remedy = "only Open MPI monitors itself; there is nothing to compare with"
        require(library.startswith("Open MPI"), "--check-mpi-traffic", library, remedy)
        self._library, index, level = ctypes.CDLL(MPI.__file__), ctypes.c_int(), ctypes.c_int()
        remedy = "its monitoring component is missing; leave OMPI_MCA_pml unset, or use another build"
        self._call("MPI_T_init_thread", MPI.THREAD_SINGLE, ctypes.byref(level))
        missing = self._library.MPI_T_pvar_get_index(FLUSH, GENERIC, ctypes.byref(index))
        require(not missing, "--check-mpi-traffic", library, remedy)
        self._session, self._handle, length = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        world = ctypes.c_void_p.from_address(MPI._addressof(MPI.COMM_WORLD))
        self._call("MPI_T_pvar_session_create", ctypes.byref(self._session))
        target = (ctypes.byref(world), ctypes.byref(self._handle), ctypes.byref(length))
        self._call("MPI_T_pvar_handle_alloc", self._session, index, *target)
        self._call("MPI_T_pvar_start", self._session, self._handle)
        self.read()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with code {code}")

    def read(self) -> dict[str, dict[Any, Any]]:
        """Return this rank's counts since the last call, in the form of `parse_monitoring`."""
        with tempfile.TemporaryDirectory() as folder:
            prefix = Path(folder) / "count"
            name = ctypes.create_string_buffer(os.fsencode(prefix))
            self._call("MPI_T_pvar_write", self._session, self._handle, name)
            self._call(
                "MPI_T_pvar_stop", self._session, self._handle
            )  # writes the file and clears the counts
            self._call("MPI_T_pvar_start", self._session, self._handle)
            return parse_monitoring(prefix)


def parse_monitoring(prefix: str | Path) -> dict[str, dict[Any, Any]]:
    """Return counts by tag, {(rank, peer): Count}, and by communicator, {name: {(rank, kind): Count}}.

    Args:
        prefix: PREFIX in the file names `PREFIX.<rank>.prof`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has an unknown tag.
    """
    found: dict[str, dict[Any, Any]] = {name: {} for name in PEER_TAGS.values()}
    found["communicators"] = defaultdict(dict)
    files = sorted(glob(f"{escape(str(prefix))}.*.prof"))
    if not files:
        raise FileNotFoundError(
            f"no monitoring output {prefix}.<rank>.prof: the run did not reach MPI_Finalize"
        )
    for name in files:
        with open(name) as lines:
            _parse_file(lines, found)
    return found


def _parse_file(lines: Iterable[str], found: dict[str, dict[Any, Any]]) -> None:
    communicator = ""
    for line in lines:
        tag, *fields = line.rstrip("\n").split("\t")
        if tag in PEER_TAGS:
            found[PEER_TAGS[tag]][int(fields[0]), int(fields[1])] = _count(fields[2:])
        elif tag == "D":
            communicator = fields[0]
        elif tag in KINDS:
            # several communicators may share a name (splits, duplicates): their calls add up
            calls, key = found["communicators"][communicator], (int(fields[0]), tag)
            old, new = calls.get(key, Count(0, 0)), _count(fields[1:])
            calls[key] = Count(old.size + new.size, old.calls + new.calls)
        elif not tag.startswith("#"):
            raise ValueError(f"monitoring output: unknown line {line!r}")


def _count(fields: list[str]) -> Count:
    return Count(int(fields[0].removesuffix(" bytes")), int(fields[1].removesuffix(" msgs sent")))
