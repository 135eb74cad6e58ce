"""Reads what Open MPI's monitoring components wrote: the independent witness of `wire.csv`.

`mpirun --mca pml_monitoring_enable 2 --mca pml_monitoring_enable_output 3 --mca pml_monitoring_filename F`
leaves a file `F.<rank>.prof` per rank of MPI_COMM_WORLD, written in MPI_Finalize. A line is a tag and fields:

    E  rank  peer  B bytes  M msgs sent  histogram   point-to-point calls of the program (Send, Isend, ...)
    I  rank  peer  B bytes  M msgs sent  histogram   messages the library sent to carry out collectives
    C  rank  peer  B bytes  M msgs sent              collectives of program and library, spread over peers
    D  name  procs: 0,1,2                            a communicator; the next three lines belong to it
    O2A / A2O / A2A  rank  B bytes  M msgs sent      its one-to-all, all-to-one and all-to-all calls

Communicators that are freed before MPI_Finalize are not written.
"""

from collections import defaultdict
from collections.abc import Iterable
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple

PEER_TAGS = {"E": "point", "I": "internal", "C": "collective"}
KINDS = ("O2A", "A2O", "A2A")


class Count(NamedTuple):
    size: int  # bytes
    calls: int


def parse_monitoring(prefix: str | Path) -> dict[str, dict]:
    """Return counts by tag, {(rank, peer): Count}, and by communicator, {name: {(rank, kind): Count}}."""
    found: dict[str, dict] = {name: {} for name in PEER_TAGS.values()}
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


def _parse_file(lines: Iterable[str], found: dict[str, dict]) -> None:
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
