"""Malformed input in one start of Python: `python batch.py CASES FOLDER`, or under mpirun on every rank.

CASES is JSON, a list of cases. Rank r writes FOLDER/r.json, growing: for each case its exit code, what was
said on stderr, seconds, and seconds of the processor. A case that hangs is ended by an alarm.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT_S = 180  # wall seconds; a report takes 40 where four programs share a processor
WAIT_S = 50.0  # for the other ranks at the end of a case: one that gives up exits, all later cases with it
MEMORY = 24 << 30  # bytes of addresses: what asks for more is refused, as on a small machine


class TooLate(BaseException):
    """A case that hangs."""


def late(number: int, frame: FrameType | None) -> None:
    """End the case."""
    raise TooLate


def accepted(*arguments: Any) -> Any:
    """Stand in for the engine: end on all ranks together, as a run that is stopped before its first step."""
    from mpifl.core.errors import Stopped

    raise Stopped(0, "here")


def answered(case: dict[str, Any], errors: Path) -> dict[str, Any]:
    """Run one case; return its exit code, what it said and how long it took."""
    from mpifl.cli import main
    from mpifl.driver import run as running
    from mpifl.supervision.exit_codes import STOPPED

    engine = running.build_engine
    if not case["trains"]:
        running.build_engine = accepted  # type: ignore[assignment]
    before = dict(os.environ)
    os.environ.update(case["variables"])
    start, cpu = time.perf_counter(), time.process_time()
    sys.stderr.flush()
    kept, file = os.dup(2), os.open(errors, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    signal.alarm(LIMIT_S)
    try:
        code: Any = main(case["argv"])
        if code == STOPPED and not case["trains"]:
            code = 0
    except SystemExit as end:
        code = end.code
    except TooLate:
        code = "late"
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)
        running.build_engine = engine
        os.environ.clear()
        os.environ.update(before)
    spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    return {"name": case["name"], "code": code, "said": errors.read_text(errors="replace"), **spent}


def main(cases: str, folder: str) -> None:
    """Run all cases."""
    import matplotlib

    matplotlib.use("Agg")
    import mpifl.analysis.report
    from mpifl.comm.single import Single

    mpifl.analysis.report.FORMATS = ("svg", "png")  # type: ignore[assignment]
    Single.abort = lambda self, code: None  # type: ignore[method-assign]  # a fault ends one case, not all
    signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["MPIFL_DATA"] = ""
    under_mpirun = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
    if under_mpirun:
        from mpifl.comm import mpi

        mpi.EXIT_SECONDS = WAIT_S
    rank = under_mpirun or "0"
    place = Path(folder) / f"scratch-{rank}"
    place.mkdir()
    os.chdir(place)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    done = []
    for case in json.loads(Path(cases).read_text()):
        with (Path(folder) / f"{rank}.txt").open("a") as log:
            log.write(f"{case['name']!r}\n")
        done.append(answered(case, place / "errors"))
        (Path(folder) / f"{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
