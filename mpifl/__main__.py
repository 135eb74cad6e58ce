"""Entry point of `python -m mpifl` and of the console script."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from types import FrameType

from mpifl.comm.mpi_startup import launch_info
from mpifl.core.errors import INTERRUPTED, STOPPED
from mpifl.supervision.signals import STOP_SIGNALS
from mpifl.supervision.streams import open_closed, watch_outputs

RUNS = ("run", "resume", "sweep")  # commands that exit with `STOPPED` when they are asked to stop
PATIENCE = 10.0  # seconds that rank 0, which may be in a long import, gets to print the line first
STARTS = "stopped while no run was under way; start the command again"


def end_at(numbers: tuple[signal.Signals, ...], code: int, text: str) -> None:
    """Make signals end the process with one line from rank 0, until a run installs its own handlers.

    The handlers raise nothing: an exception during the import of C code would surface as another error. The
    job ends with the first rank that exits, so the other ranks wait for rank 0. A second signal, sent by the
    launcher, ends them.

    Args:
        numbers: the signals. One that is ignored, such as SIGINT in a background job of a script, stays so.
        code: exit code.
        text: message to print.
    """
    own, is_server = os.getpid(), launch_info(os.environ).rank == 0
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own and is_server:  # not in a forked child
            shown = b"\x1b[?25h" if os.isatty(2) else b""  # shows the cursor, which a progress bar hides
            os.write(2, shown + f"mpifl: {text}\n".encode())
        elif os.getpid() == own:
            for each in heard:
                signal.signal(each, signal.SIG_DFL)
            time.sleep(PATIENCE)
        os._exit(code)

    for number in heard:
        signal.signal(number, end)


def main() -> None:
    """Run the command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    open_closed()
    failed = watch_outputs(needed=name not in RUNS)
    if name in RUNS:
        end_at(STOP_SIGNALS, STOPPED, STARTS)
    elif name != "watch":  # which handles Ctrl-C itself
        end_at((signal.SIGINT,), INTERRUPTED, "interrupted")
    from .cli import ALONE, DEFERRED
    from .cli import main as command_line

    if name in ALONE and launch_info(os.environ).size == 1:
        from mpifl.core.lazy_imports import defer

        defer(*DEFERRED)
        if name != "watch":
            gc.disable()  # the process ends before collecting would free much
    code = command_line(sys.argv[1:])
    if name in RUNS:  # Python restores the defaults before it has ended: a late signal would replace the code
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    gc.freeze()  # else Python looks through all of PyTorch before it ends: half a second
    sys.exit(code or int(failed()))


if __name__ == "__main__":
    main()
