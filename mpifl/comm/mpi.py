"""Communication over MPI.

Objects travel pickled in point-to-point messages, so that the server can wait for them with a free core.
Blocks of numbers travel in collectives on flat buffers and are never pickled. Bytes are counted at the
sender, as the monitoring of an MPI library counts them: a collective counts the bytes that leave this rank
for each other rank.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from mpifl.core.devices import CPU, wait
from mpifl.core.timing import ClockReading

from .liveness import STOPPED_S, Process, StoppedProcessWatcher, wait_until
from .mpi_startup import end_launcher_after, is_tolerant, own_launcher
from .single import Single
from .transport import (
    CannotRecover,
    Count,
    Mismatch,
    MpiTraffic,
    RankLost,
    Transport,
    bytes_of,
    check_block,
    check_parts,
    device_ranks,
    divided,
)

TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.int64: MPI.INT64_T, torch.uint8: MPI.BYTE}
TAGS = 30000  # the tags of scatter and gather cycle through this many numbers; MPI guarantees 32767
HEADER, BLOCK, ALARM, STOP = 30001, 30002, 30003, 30004
LENGTH = struct.Struct("q")  # a message begins with the number of bytes of its rows; rows and value follow
POLLS_PER_CHECK = 16  # polls without a message between two checks whether another rank has failed
MOST_SENDS = 32  # with more pending sends than this, the completed ones are dropped
PINGS = 10  # by which the clocks of two ranks are compared; the fastest decides
CLOCK = 30005
EXIT_SECONDS = 3.0
NOTICE_SECONDS = 2.0  # within which the loss of a rank becomes known everywhere
LOSSES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}  # with `mpirun --with-ft ulfm`

Verb = TypeVar("Verb", bound=Callable[..., Any])


def guarded(verb: Verb) -> Verb:
    """Raise the loss of a rank as `RankLost` here and, by revoking the communicator, on all other ranks."""

    @functools.wraps(verb)
    def call(self: Mpi, *args: Any, **options: Any) -> Any:
        try:
            out = verb(self, *args, **options)
            self.last_call = time.monotonic()
            return out
        except MPI.Exception as error:
            if not self.is_loss(error):
                raise
            self.comm.Revoke()
            self._workers_comm.Revoke()
            raise RankLost(str(error)) from error

    return call  # type: ignore[return-value]  # the same signature


def _buffer(block: torch.Tensor) -> list[Any]:
    """Return a contiguous tensor as an MPI buffer without a copy; device memory by DLPack, after a sync."""
    if block.device == CPU:
        return [block.numpy(), block.numel(), TYPES[block.dtype]]
    wait(block.device)
    return [block, block.numel(), TYPES[block.dtype]]


def _named(comm: MPI.Comm) -> MPI.Comm:
    """Name a communicator whose traffic is counted: the MPI library's monitoring finds it by its name."""
    comm.Set_name("mpifl")
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def connect_mpi() -> Mpi:
    """Return the transport over all ranks; abort with a message if a rank is lost meanwhile."""
    try:
        transport = Mpi()
        transport.watch_stopped(STOPPED_S)
        return transport
    except (MPI.Exception, RankLost) as error:
        if not is_tolerant():
            raise
        if MPI.COMM_WORLD.rank:
            time.sleep(NOTICE_SECONDS)  # rank 0 prints first
        text = f"a rank was lost while the job came up ({error}); start the job again"
        print(f"mpifl: {text}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
        raise


class Mpi(Transport):
    """All ranks of a communicator.

    Args:
        comm: MPI.COMM_WORLD by default; it is duplicated.
    """

    def __init__(self, comm: MPI.Comm | None = None) -> None:
        self.comm = _named((comm or MPI.COMM_WORLD).Dup())
        self._exit_comm = (comm or MPI.COMM_WORLD).Dup()
        self._workers_comm = self._workers()
        self.library = MPI.Get_library_version().split(",")[0].strip("\0 \n")
        self.rank, self.size, self.traffic = self.comm.rank, self.comm.size, MpiTraffic()
        self.numbers, self.lost = tuple(range(self.size)), list[str]()
        self._out_of_reach = False  # whether a lost rank may still run on a node without any other rank
        self._sequence = 0
        self._waiting_for = 0, self.size  # tag of the current gather, first rank whose value is missing
        self._received = 0  # bytes of the last message received
        self._losses = 0  # number of times that ranks were lost
        self._sent_to: dict[int, int] = defaultdict(int)  # rank -> messages of `isend`
        self._received_from: dict[int, int] = defaultdict(int)  # rank -> messages of `poll`
        self._sends: list[tuple[MPI.Request, Any]] = []  # pending sends and their buffers
        # blocks being received: request, source, number among its messages, header, block
        self._receives: list[tuple[MPI.Request, int, int, Any, torch.Tensor]] = []
        self._empty_polls = 0  # polls without a message
        self._failed = False  # whether an error was raised on this rank or another
        self._remote_error: tuple[Exception | None, int] = None, 0  # the error of another rank, and that rank
        self._request_to_stop = MPI.REQUEST_NULL
        self._groups: list[Mpi] = []  # transports over a part of the ranks, made by `split`
        self._stopped_s = 0.0
        self._watcher: StoppedProcessWatcher | None = None
        self.nodes = self._find_nodes(comm or MPI.COMM_WORLD)

    def _workers(self) -> MPI.Comm:
        """Return the communicator of the workers; on rank 0, one of rank 0 alone; every rank calls.

        It is split from a communicator without a name, so that monitoring does not count the split as
        mpifl's traffic.
        """
        return _named(self._exit_comm.Split(int(self._exit_comm.rank > 0)))

    def _find_nodes(self, parent: MPI.Comm) -> tuple[int, ...]:
        """Return the node of each rank, numbered in the order of first ranks; also exchange processes."""
        local = parent.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = self.device_rank = local.rank
        first = MPI.Group.Translate_ranks(local.group, [0], self.comm.group)[0]
        self._node_comm = local  # never freed: Open MPI's monitoring reads it to the end
        here = self.gather((Process.of(os.getpid()), first), "layout")
        self.processes, leaders = zip(*self.bcast(here, "layout"), strict=True)
        self.names = tuple(f"rank {r} on {p.host}, pid {p.pid}" for r, p in enumerate(self.processes))
        order = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
        return tuple(order[leader] for leader in leaders)

    @property
    def _who(self) -> str:
        return f"rank {self.rank}"

    def _message(self, source: int, goal: int, number: int, single: bool = False) -> int:
        """Return a number that the sender and the receiver of a message know, and no other message has.

        Args:
            source: rank that sends.
            goal: rank that receives.
            number: number of the collective, or of the message among those of `isend` between the two.
            single: whether it is a message of `isend`.
        """
        epoch = (self._losses & 0xF) << 24 | number & 0xFFFFFF
        return ((epoch * self.size + source) * self.size + goal) * 2 + single

    def _tag(self) -> int:
        self._sequence += 1
        return self._sequence % TAGS

    @guarded
    def scatter(self, values: Sequence[Any] | None, purpose: str) -> Any:
        """Send each rank its value; an object that several ranks receive is pickled once."""
        tag = self._tag()
        if self.rank:
            return self._recv(0, tag, purpose)
        assert values is not None
        raw: dict[int, bytes] = {}
        blobs = [raw.get(id(p)) or raw.setdefault(id(p), pickle.dumps(p, protocol=5)) for p in values[1:]]
        self._send_each(blobs, tag, purpose)
        return values[0]

    def _send_each(self, blobs: Sequence[bytes], tag: int, purpose: str) -> None:
        """Send one message to each of the ranks 1, 2, ..."""
        with self.traffic("send", purpose, sent=sum(map(len, blobs)), messages=len(blobs)):
            pending = []
            for r, b in enumerate(blobs, 1):
                self.traffic.timeline.sent(self._message(0, r, self._sequence))
                pending.append(self.comm.Isend([b, len(b), MPI.BYTE], dest=r, tag=tag))
            wait_until(lambda: MPI.Request.Testall(pending))

    @guarded
    def scatter_rows(
        self, values: Sequence[Any] | None, rows: np.ndarray | None, counts: Sequence[int], purpose: str
    ) -> tuple[Any, memoryview]:
        """Send each rank its value and its rows; see `Transport`."""
        tag = self._tag()
        if self.rank:
            mine, pickled = self._parts(self._recv_bytes(0, tag, purpose))
            return pickle.loads(pickled), mine
        assert values is not None
        assert rows is not None
        data, raw = bytes_of(rows), dict[int, bytes]()
        size = data.nbytes // max(1, sum(counts))
        ends = [0, *(np.cumsum(counts) * size).tolist()]
        blobs = []
        for p, lo, hi in zip(values[1:], ends[1:], ends[2:], strict=False):
            value = raw.get(id(p)) or raw.setdefault(id(p), pickle.dumps(p, protocol=5))
            blobs.append(b"".join((LENGTH.pack(hi - lo), data[lo:hi], value)))
        self._send_each(blobs, tag, purpose)
        return values[0], data[: ends[1]]

    @guarded
    def gather_rows(self, value: Any, rows: bytes, purpose: str) -> tuple[list[Any], list[memoryview]] | None:
        """Send this rank's value and rows to rank 0; see `Transport`."""
        tag = self._tag()
        if self.rank:
            value = pickle.dumps(value, protocol=5)
            self._send_to_server(b"".join((LENGTH.pack(len(rows)), rows, value)), tag, purpose)
            return None
        values, blobs, known = [value], [memoryview(rows)], dict[bytes, Any]()
        for blob in self._recv_each(tag, purpose):
            data, pickled = self._parts(blob)
            key = bytes(pickled)
            if key not in known:
                known[key] = pickle.loads(key)
            values.append(known[key])
            blobs.append(data)
        return values, blobs

    def _parts(self, blob: bytearray) -> tuple[memoryview, memoryview]:
        """Return the rows and the pickled value of a message."""
        (size,) = LENGTH.unpack_from(blob)
        parts = memoryview(blob)[LENGTH.size :]
        return parts[:size], parts[size:]

    @guarded
    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Send this rank's value to rank 0; see `Transport`."""
        tag = self._tag()
        if not self.rank:
            return [value, *map(pickle.loads, self._recv_each(tag, purpose))]
        self._send_to_server(pickle.dumps(value, protocol=5), tag, purpose)
        return None

    def _send_to_server(self, blob: bytes, tag: int, purpose: str) -> None:
        with self.traffic("send", purpose, sent=len(blob), messages=1):
            self.traffic.timeline.sent(self._message(self.rank, 0, self._sequence))
            request = self.comm.Isend([blob, len(blob), MPI.BYTE], dest=0, tag=tag)
            wait_until(request.Test)

    def _recv_each(self, tag: int, purpose: str) -> Iterator[bytearray]:
        """Yield the message of each other rank, in rank order; on rank 0."""
        for r in range(1, self.size):
            self._waiting_for = tag, r
            yield self._recv_bytes(r, tag, purpose)
        self._waiting_for = tag, self.size

    def waiting_for(self) -> list[str]:
        """Return the names of the ranks from which no message has arrived."""
        tag, first = self._waiting_for
        return [self.names[r] for r in range(first, self.size) if not self.comm.Iprobe(r, tag)]

    def _recv(self, source: int, tag: int, purpose: str) -> Any:
        return pickle.loads(self._recv_bytes(source, tag, purpose))

    def _recv_bytes(self, source: int, tag: int, purpose: str) -> bytearray:
        with self.traffic("receive", purpose):
            status = MPI.Status()
            message = wait_until(lambda: self.comm.Improbe(source, tag, status) or self._check_alarm())
            blob = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([blob, len(blob), MPI.BYTE])
            self._received = len(blob)
            self.traffic.timeline.received(self._message(source, self.rank, self._sequence))
        return blob

    def _check_alarm(self) -> Any:
        """Raise the error of another rank, if it has sent one; called after a poll without a message."""
        self._empty_polls += 1
        status = MPI.Status()
        if self._empty_polls % POLLS_PER_CHECK == 0 and self.comm.Iprobe(MPI.ANY_SOURCE, ALARM, status):
            source = status.Get_source()
            error: Exception = self.comm.recv(source=source, tag=ALARM)
            self._remote_error = error, source
            raise error

    def raise_on_others(self, error: Exception) -> None:
        """Send the error under a tag of its own; it is small, so the send completes without a receiver."""
        known, source = self._remote_error
        self._failed = True
        others = range(1, self.size) if self.is_server else (0,)
        with suppress(MPI.Exception):
            for rank in others:
                if error is not known or rank != source:
                    self._sends.append((self.comm.isend(error, rank, ALARM), error))

    def ask_to_stop(self) -> None:
        """Send rank 0 an empty message, which no collective waits for."""
        if self.rank:
            with suppress(MPI.Exception):  # a rank was lost at this moment
                self._request_to_stop = self.comm.Isend([b"", 0, MPI.BYTE], 0, STOP)

    def stop_asked(self) -> bool:
        """Receive such messages; see `Transport`."""
        asked = False
        with suppress(MPI.Exception):  # a rank was lost; the next collective says so
            while not self.rank and self.comm.Iprobe(MPI.ANY_SOURCE, STOP):
                self.comm.Recv([bytearray(0), 0, MPI.BYTE], MPI.ANY_SOURCE, STOP)
                asked = True
        return asked

    @guarded
    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Send this rank's counts to rank 0, which adds the bytes of this message."""
        tag, rows = self._tag(), self.traffic.rows(self.numbers[self.rank])
        if self.rank:
            blob = pickle.dumps(rows, protocol=5)
            with self.traffic("send", "census", sent=len(blob), messages=1):
                self.traffic.timeline.sent(self._message(self.rank, 0, self._sequence))
                self.comm.Send([blob, len(blob), MPI.BYTE], dest=0, tag=tag)
            return None
        for source in range(1, self.size):
            rows += self._recv(source, tag, "census")
            count = Count(calls=1, messages=1, bytes=self._received)
            rank = self.numbers[source]
            rows.append({"rank": rank, "call": "send", "purpose": "census", **vars(count)})
        return rows

    @guarded
    def compare_clocks(self) -> ClockReading:
        """Exchange messages with rank 0, which answers with its time; see `Transport`.

        The offset is that of the fastest exchange, with half of its duration as the error. Processes of one
        node read the same clock.
        """
        comm, origin = self.comm, np.array([time.perf_counter()])
        request = comm.Ibcast([origin, MPI.DOUBLE], root=0)
        wait_until(lambda: request.Test() or self._check_alarm())
        began, stamp, nothing = float(origin[0]), np.zeros(1), [bytearray(0), 0, MPI.BYTE]
        far = [r for r in range(1, self.size) if self.nodes[r] != self.nodes[0]]
        if not self.rank:
            for r in far:  # one after the other, so that nobody waits for another
                comm.Send(nothing, r, CLOCK)
                for _ in range(PINGS):
                    comm.Recv(nothing, r, CLOCK)
                    stamp[0] = time.perf_counter()
                    comm.Send([stamp, MPI.DOUBLE], r, CLOCK)
        if self.rank not in far:
            return ClockReading(time.perf_counter(), began=began)
        wait_until(lambda: comm.Iprobe(0, CLOCK) or self._check_alarm())
        comm.Recv(nothing, 0, CLOCK)
        found = []
        for _ in range(PINGS):
            asked = time.perf_counter()
            comm.Send(nothing, 0, CLOCK)
            comm.Recv([stamp, MPI.DOUBLE], 0, CLOCK)
            now = time.perf_counter()
            found.append(ClockReading(now, float(stamp[0]) - (asked + now) / 2, (now - asked) / 2, began))
        return min(found, key=lambda reading: reading.error)

    @guarded
    def run_guarded(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; raise `RankLost` if a rank is lost in it.

        Args:
            work: function that makes its own MPI calls.
        """
        return work()

    @guarded
    def barrier(self) -> None:
        """Poll a non-blocking barrier."""
        with self.traffic("barrier", "control"):
            request = self.comm.Ibarrier()
            wait_until(lambda: request.Test() or self._check_alarm())

    def final_barrier(self) -> bool:
        """Poll a barrier on a communicator that nothing else uses."""
        try:
            request, end = self._exit_comm.Ibarrier(), time.perf_counter() + EXIT_SECONDS
            wait_until(lambda: request.Test() or time.perf_counter() > end)
            return bool(request.Test())
        except MPI.Exception:  # a rank died instead
            return False

    @guarded
    def Bcast(self, block: torch.Tensor, purpose: str, dtype: torch.dtype = torch.float32) -> None:
        """Broadcast in place.

        On one node, rank 0 often shares a core with a worker and must not spin on it until all ranks have the
        block. Between nodes, the blocking call uses better algorithms.
        """
        check_block(block, purpose, dtype, who=self._who)
        sent = 0 if self.rank else block.nbytes * (self.size - 1)
        with self.traffic("bcast", purpose, sent, 0 if self.rank else self.size - 1):
            if len(set(self.nodes)) == 1:
                request = self.comm.Ibcast(_buffer(block), root=0)
                wait_until(lambda: request.Test() or self._check_alarm())
            else:
                self.comm.Bcast(_buffer(block), root=0)

    @guarded
    def Reduce(self, block: torch.Tensor, purpose: str, dtype: torch.dtype = torch.float32) -> None:
        """Sum onto rank 0, in place on that rank."""
        check_block(block, purpose, dtype, who=self._who)
        sent = block.nbytes if self.rank else 0
        with self.traffic("reduce", purpose, sent, int(self.rank > 0)):
            if self.rank:
                self.comm.Reduce(_buffer(block), None, op=MPI.SUM, root=0)
            else:
                self.comm.Reduce(MPI.IN_PLACE, _buffer(block), op=MPI.SUM, root=0)

    @guarded
    def Gatherv(
        self, block: torch.Tensor, counts: Sequence[int], purpose: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor | None:
        """Gather rows onto rank 0."""
        rows = counts[self.rank] if len(counts) else None
        check_block(block, purpose, dtype, (rows, None), self._who)
        sent = block.nbytes if self.rank else 0
        width = block.shape[1]
        with self.traffic("gatherv", purpose, sent, int(self.rank > 0)):
            if self.rank:
                self.comm.Gatherv(_buffer(block), None, root=0)
                return None
            out = torch.empty(sum(counts), width, dtype=block.dtype)
            sizes = np.asarray(counts) * width
            self.comm.Gatherv(_buffer(block), [out.numpy(), sizes, TYPES[block.dtype]], root=0)
            return out

    @guarded
    def Reduce_scatter(
        self, block: torch.Tensor, counts: Sequence[int], purpose: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Sum the workers' blocks over their own communicator."""
        check_block(block, purpose, dtype, (sum(counts), None), self._who)
        width = block.shape[1]
        out = torch.empty(counts[self.rank], width, dtype=block.dtype)
        with self.traffic("reduce_scatter", purpose, block.nbytes - out.nbytes, len(self.workers) - 1):
            sizes = [counts[r] * width for r in self.workers]
            self._workers_comm.Reduce_scatter(_buffer(block), _buffer(out), recvcounts=sizes, op=MPI.SUM)
        return out

    @guarded
    def Alltoallv(
        self,
        block: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        purpose: str,
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Exchange parts of flat blocks between all ranks."""
        check_block(block, purpose, torch.float32, (sum(sent) if starts is None else None,), self._who)
        starts = [*accumulate(sent[:-1], initial=0)] if starts is None else [*starts]
        check_parts(len(block), sent, starts, purpose, self._who)
        out = torch.empty(sum(received), dtype=block.dtype)
        leaves = (sum(sent) - sent[self.rank]) * block.element_size()
        with self.traffic("alltoallv", purpose, leaves, self.size - 1):
            kind, given = TYPES[block.dtype], (list(sent), starts)
            self.comm.Alltoallv([block.numpy(), given, kind], [out.numpy(), list(received), kind])
        return out

    @guarded
    def Allgatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Gather the workers' blocks onto each worker, over their own communicator."""
        check_block(block, purpose, torch.float32, (counts[self.rank],), self._who)
        sizes, others = [counts[r] for r in self.workers], len(self.workers) - 1
        out, kind = torch.empty(sum(sizes), dtype=block.dtype), TYPES[block.dtype]
        with self.traffic("allgatherv", purpose, block.nbytes * others, others):
            self._workers_comm.Allgatherv(_buffer(block), [out.numpy(), sizes, kind])
        return out

    @guarded
    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Start two sends: the header's bytes, then the block, which `poll` receives as float32."""
        check_block(block, purpose, torch.float32, (None,), self._who)
        if len(self._sends) > MOST_SENDS:
            self._sends = [(r, keep) for r, keep in self._sends if not r.Test()]
        blob = pickle.dumps((block.numel(), header), protocol=5)
        self._sent_to[rank] += 1
        with self.traffic(
            "send", purpose, sent=len(blob) + block.nbytes, messages=1 + int(block.numel() > 0)
        ):
            self.traffic.timeline.sent(self._message(self.rank, rank, self._sent_to[rank], single=True))
            self._sends.append((self.comm.Isend([blob, len(blob), MPI.BYTE], rank, HEADER), blob))
            if block.numel():
                self._sends.append((self.comm.Isend(_buffer(block), rank, BLOCK), block))

    @guarded
    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Receive one header; return a message once its block is complete.

        It makes as few MPI calls as possible: with more ranks than cores, a call without a result yields the
        core.
        """
        status = MPI.Status()
        for i, (request, source, number, header, block) in enumerate(self._receives):
            if request.Test(status):
                del self._receives[i]
                return self._whole(status, source, number, header, block, purpose)
        message = self.comm.Improbe(MPI.ANY_SOURCE, HEADER, status)
        if message is None:
            self._check_alarm()
            return None
        blob, source = bytearray(status.Get_count(MPI.BYTE)), status.Get_source()
        message.Recv([blob, len(blob), MPI.BYTE])
        size, header = pickle.loads(blob)
        number = self._received_from[source] = self._received_from[source] + 1
        block = torch.empty(size, dtype=torch.float32)
        request = self.comm.Irecv(_buffer(block), source, BLOCK) if size else MPI.REQUEST_NULL
        if request.Test(status):
            return self._whole(status, source, number, header, block, purpose)
        self._receives.append((request, source, number, header, block))
        return None

    def _whole(
        self, status: MPI.Status, source: int, number: int, header: Any, block: torch.Tensor, purpose: str
    ) -> tuple[int, Any, torch.Tensor]:
        """Return a message whose block has as many numbers as its header says."""
        if block.numel() and (found := status.Get_count(MPI.FLOAT)) != block.numel():
            raise Mismatch(f"{purpose}: rank {source} sends {found} numbers, its header says {block.numel()}")
        self.traffic.timeline.received(self._message(source, self.rank, number, single=True))
        return source, header, block

    def watch_stopped(self, limit: float) -> None:
        """Start the watcher in the first rank of each node."""
        if limit != self._stopped_s:
            self._stopped_s = limit
            self._watch()

    def _watch(self) -> None:
        before, self._watcher = self._watcher, None
        near = [r for r in range(self.size) if self.nodes[r] == self.nodes[self.rank]]
        if self._stopped_s and self.rank == near[0]:
            self._watcher = StoppedProcessWatcher(
                self._stopped_s,
                [(self.processes[r], self.names[r]) for r in near],
                None if self.rank else own_launcher(of_one_job=True),
            )
        if before is not None:
            before.close()

    def split(self, count: int) -> Transport:
        """Split the communicator; a group of one rank is a `Single`."""
        groups = divided(self.nodes, count)
        number, ranks = next((i, ranks) for i, ranks in enumerate(groups) if self.rank in ranks)
        comm = self._exit_comm.Split(number, ranks.index(self.rank))
        group = Mpi(comm) if len(ranks) > 1 else Single()
        if isinstance(group, Mpi):
            self._groups.append(group)
        group.local_rank, group.device_rank = self.local_rank, device_ranks(self.nodes, groups)[self.rank]
        group.started = self.started
        return group

    def regroup(self) -> tuple[int, ...]:
        """Shrink the communicator to the remaining ranks, numbered without gaps."""
        left = tuple(range(self.size))
        while True:
            left = tuple(left[r] for r in self._shrink())
            try:
                self._exit_comm = self.comm.Dup()
                self._exit_comm.Set_errhandler(MPI.ERRORS_RETURN)
                self._workers_comm = self._workers()
                return left
            except MPI.Exception as error:
                if not self.is_loss(error):
                    raise

    def _shrink(self) -> list[int]:
        """Return the former numbers of the remaining ranks."""
        old, nodes, names, processes = self.comm, self.nodes, self.names, self.processes
        old.Revoke()
        self.comm = _named(old.Shrink())
        left = MPI.Group.Translate_ranks(self.comm.group, [*range(self.comm.size)], old.group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.nodes, self.names = tuple(nodes[r] for r in left), tuple(names[r] for r in left)
        self.processes = tuple(processes[r] for r in left)
        self.numbers = tuple(self.numbers[r] for r in left)
        self._sequence, self._sends, self._receives = 0, [], []
        self._losses += 1
        self._sent_to.clear()
        self._received_from.clear()
        for r in sorted({*range(len(names))} - {*left}):
            self.lost.append(names[r])
            if nodes[r] == self.nodes[self.rank]:
                processes[r].send(signal.SIGKILL)  # a stopped process would keep mpirun waiting
            self._out_of_reach |= nodes[r] not in self.nodes
        if 0 not in left:
            raise CannotRecover(f"{names[0]}, the server, was lost")
        self._watch()
        return left

    def is_loss(self, error: MPI.Exception) -> bool:
        """Return whether an error means that a rank was lost.

        A failed collective may report another error, possibly before this rank knows of the loss.
        """

        def known() -> bool:
            return bool(self.comm.Is_revoked() or self.comm.Get_failed().size)

        if error.Get_error_class() in LOSSES:
            return True
        end = time.perf_counter() + NOTICE_SECONDS
        try:
            wait_until(lambda: known() or time.perf_counter() > end)
            return known()
        except (MPI.Exception, NotImplementedError):  # an MPI without fault tolerance
            return False

    def failed_ranks(self) -> list[str]:
        """Return the names of the ranks that failed and are still in the communicator."""
        if not is_tolerant():
            return []
        known = self.comm.Get_failed()
        return [
            self.names[r] for r in MPI.Group.Translate_ranks(known, [*range(known.size)], self.comm.group)
        ]

    def finalize(self, code: int) -> None:
        """Exit without MPI_Finalize if ranks may be lost, or if messages are left after a failure.

        MPI_Finalize would wait for lost ranks and for Open MPI's failure detector. The watcher for stopped
        ranks runs to the end, because a rank that is stopped here keeps the launcher waiting.
        """
        if is_tolerant():
            if not code:
                self.final_barrier()
            sys.stdout.flush()
            sys.stderr.flush()
            if self._out_of_reach and not self.rank:
                self.abort(code)
            os._exit(code)
        failed = [transport for transport in (*self._all_groups(), self) if transport._failed]
        if not all([transport._drained() for transport in failed]):
            os._exit(code)

    def _all_groups(self) -> Iterator[Mpi]:
        """Yield the transports that `split` made, also of parts."""
        for group in self._groups:
            yield group
            yield from group._all_groups()

    def _drained(self) -> bool:
        """Receive the messages sent before a failure; return whether all arrived in time.

        MPI_Finalize would wait for them.
        """
        end = time.perf_counter() + EXIT_SECONDS
        status = MPI.Status()

        def drained(requests: Sequence[MPI.Request]) -> bool:
            message = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is not None:
                message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
            return message is None and all([request.Test() for request in requests])

        def in_time(requests: Sequence[MPI.Request]) -> bool:
            return bool(wait_until(lambda: drained(requests) or time.perf_counter() > end)) and drained(
                requests
            )

        try:
            mine = [request for request, _ in self._sends] + [request for request, *_ in self._receives]
            return in_time(mine) and in_time([self._exit_comm.Ibarrier()])
        except MPI.Exception:
            return False

    def abort_from_any_thread(self, code: int) -> None:
        """Abort the job; rank 0 also kills the launcher if it keeps running."""
        self._out_of_reach = True
        self.abort(code)

    def abort(self, code: int) -> None:
        """Abort the job."""
        if self._out_of_reach and not self.rank:
            end_launcher_after(EXIT_SECONDS)
        self.comm.Abort(code)
