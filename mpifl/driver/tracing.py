"""The trace of a run: recorded by each rank, and written at its end or when it fails (`output.trace`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mpifl.comm.transport import RankLost
from mpifl.core.timeline import Recording
from mpifl.core.timing import NO_TIMELINE, Timeline
from mpifl.experiment.context import RunContext
from mpifl.results.recorder import Recorder
from mpifl.results.trace_file import Alignment, append, create, lines_of_arrivals, lines_of_rank
from mpifl.supervision.logging import warn


class Trace:
    """The trace of a run on this rank; without `output.trace`, nothing is recorded or written.

    Attributes:
        timeline: is told what this rank does.
    """

    timeline: Timeline = NO_TIMELINE

    def write(self) -> None:
        """Write what was recorded to the run folder, once; callable from any thread."""


class RecordedTrace(Trace):
    """A trace that is recorded; every rank makes one.

    Args:
        context: context of the run.
        folder: the run folder.
        recorder: recorder of the run folder, on rank 0.
    """

    def __init__(self, context: RunContext, folder: Path, recorder: Recorder | None) -> None:
        self.context, self.folder, self.recorder = context, folder, recorder
        transport = self.transport = context.transport
        if transport.is_server:  # before the others leave the comparison of clocks
            began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            create(folder, {"run": folder.name, "ranks": transport.size, "began": began})
        ranges = torch.cuda.nvtx if context.learner.device.type == "cuda" else None
        self.timeline = self.recording = Recording.of_rank(transport.size, ranges)
        self.number, self.size = transport.numbers[transport.rank], transport.size
        self.alignment = Alignment(transport.compare_clocks())
        transport.traffic.tell(self.recording)
        self._written = False

    def close(self) -> None:
        """Write the trace of a run that has ended; every rank calls, and returns when the file is whole."""
        transport = self.transport
        transport.traffic.timeline = NO_TIMELINE
        try:
            self.alignment = Alignment(self.alignment.first, transport.compare_clocks())
            self.write()
            transport.barrier()
        except RankLost:
            self.write()
        transport.traffic.clear()  # of this barrier

    def write(self) -> None:
        """Write what was recorded to the run folder, once; callable from any thread."""
        if self._written:
            return
        self._written, lost = True, "; ".join(self.transport.lost)
        try:
            lines = lines_of_rank(self.recording, self.number, self.size, self.alignment, lost)
            if self.recorder is not None:
                self.recorder.write_arrivals()
                unit = "seconds" if self.context.config.policy.in_seconds else "server steps"
                lines += lines_of_arrivals(self.folder / "events.csv", unit)
            append(self.folder, lines)
        except OSError as error:
            warn(f"output.trace: rank {self.number} cannot write its part of the trace ({error})")


@contextmanager
def traced(context: RunContext, folder: Path, recorder: Recorder | None) -> Iterator[Trace]:
    """Record and write the trace of the run in the block, if the run asks for one; every rank calls.

    If the block raises an exception, each rank writes what it has by itself.

    Args:
        context: context of the run.
        folder: the run folder.
        recorder: recorder of the run folder, on rank 0.
    """
    if not context.config.output.trace:
        yield Trace()
        return
    trace = RecordedTrace(context, folder, recorder)
    try:
        yield trace
        trace.close()
    finally:
        context.transport.traffic.timeline = NO_TIMELINE
        trace.write()
