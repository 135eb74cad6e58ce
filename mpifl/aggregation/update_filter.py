"""What happens to updates between a client's training and the server's rows: a chain of filters.

Attacks, clipping, noise, masks, compression and robust rules are filters. At a client, the chain changes the
report, first filter first. On rank 0, it changes the plan in the same order, and then the new rows, last
filter first. A filter may also replace the means by which rows are mixed. Without a filter that changes
reports, visits that only train are trained in one call.

Which numbers of a vector are weights, statistics or no part of a model, `VectorParts` says; a filter that
treats them differently takes it as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from mpifl.core.client import ClientStates
from mpifl.core.parameters import VectorParts
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Reads, Report, Server

if TYPE_CHECKING:
    from .mixer import Mixer


@dataclass(frozen=True)
class FilteredVisit:
    """A visit whose report passes the filters.

    Attributes:
        message: the client's download.
        visit: number of the client's visits before this one.
        key: random key of the visit.
        told: what the server told the filters, by name (`UpdateFilter.told`).
        store: holds what filters remember of a client; None for a trial, which remembers nothing.
    """

    message: Message
    visit: int
    key: Key
    told: Mapping[str, float] = field(default_factory=dict)
    store: ClientStates | None = None


@dataclass(frozen=True)
class PlannedStep:
    """A server step whose plan passes the filters, on rank 0.

    Attributes:
        server: the server before the step.
        notes: notes of the reports; of nobody for a step without reports.
        widths: upload -> how many numbers each component has.
        lost: clients whose uploads do not arrive.
        reads: returns client -> the rows that it downloads in the step, for some clients.
        book: adds a message to the ledger: client, `up` or `down`, name, numbers, bytes without header.
        parts: what the vectors of the method hold.
        hook: class and hook that made the plan, for errors.
    """

    server: Server
    notes: Notes
    widths: Mapping[str, int]
    lost: np.ndarray
    reads: Callable[[np.ndarray], Mapping[int, Reads]]
    book: Callable[[int, str, str, int, int], None]
    parts: VectorParts
    hook: str


class RowMixer(Protocol):
    """Carries out mixings of uploads into rows, as `Mixer` does."""

    def mix(
        self,
        mixings: Sequence[Mixing] | None,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]] | None,
        uploads: Mapping[str, Sequence[torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Apply mixings in order; see `Mixer.mix`."""


class UpdateFilter:
    """Changes updates on their way from training into the rows; by default, a method changes nothing.

    Attributes:
        at_clients: whether it changes what clients receive or send, so that no visit only trains.
        at_server: whether it needs whole tables on rank 0.
        in_main_memory: whether it takes uploads in main memory, also those of a device.
        hides_uploads: whether no upload is sent as it is; `plan` books what is sent instead.
        moves_rows: whether it changes rows even in a step without any upload.
        narrows: whether clients have only some of the numbers of a vector, as `width` says.
        remembers: kind of state in the clients' store that it keeps between visits; empty for none.
        state: name of its state in checkpoints; empty for none.
    """

    at_clients: ClassVar[bool] = False
    at_server: ClassVar[bool] = False
    hides_uploads: ClassVar[bool] = False
    narrows: ClassVar[bool] = False
    moves_rows: bool = False
    in_main_memory: bool = False
    remembers: str = ""
    state: ClassVar[str] = ""

    def told(self) -> Mapping[str, float]:
        """Return the numbers that the server tells the filter at clients with their tasks; on rank 0."""
        return {}

    def download(self, message: Message, client: int) -> Message:
        """Return a message as it arrives at a client."""
        return message

    def width(self, name: str, width: int, client: int) -> int:
        """Return how many numbers of a vector [width] a client has; the others never travel."""
        return width

    def kind(self, client: int) -> tuple[tuple[str, int], ...]:
        """Return what decides the widths of a client's vectors: names and numbers."""
        return ()

    def statistics(self, report: Report) -> Report:
        """Return a report of one-shot statistics as it goes on to the server."""
        return report

    def sizes(self, sizes: Mapping[str, int], report: Report, message: Message) -> Mapping[str, int]:
        """Return the bytes of the vectors that a client sends after training.

        Args:
            sizes: vector -> its bytes, after the filters before this one.
            report: the client's report.
            message: the client's download.
        """
        return sizes

    def traffic(
        self, sizes: Mapping[str, int], report: Report, clients: int, header_bytes: int
    ) -> tuple[int, Mapping[str, int]]:
        """Return what a client downloads besides its rows, and the bytes of the vectors that it sends.

        Args:
            sizes: vector -> its bytes.
            report: the client's report.
            clients: number of clients in the round.
            header_bytes: bytes of each message's header.
        """
        return 0, sizes

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return the report of a client after training, as it goes on to the server.

        Args:
            report: the report, after the filters before this one.
            visit: the visit that made it.
        """
        return report

    def lost(self, step: int, clients: np.ndarray) -> np.ndarray:
        """Return those of the clients [m] whose uploads in a step do not arrive; on rank 0."""
        return clients[:0]

    def plan(self, plan: Plan | None, step: PlannedStep) -> Plan | None:
        """Return the plan of a step before it is carried out; None if no row changes; on rank 0."""
        return plan

    def server(self, server: Server) -> Server:
        """Return the server after the mixings of a step; on rank 0."""
        return server

    def mixer(self, mixer: Mixer) -> RowMixer | None:
        """Return what carries out the mixings of steps instead of a mixer; None leaves them to it."""

    def commit(self) -> None:
        """Start the next step, after a step was taken; on rank 0."""

    def figures(self) -> Mapping[str, float]:
        """Return columns of `metrics.csv`; on rank 0."""
        return {}

    def state_dict(self) -> Mapping[str, float | None]:
        """Return the state that the next step depends on; on rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; on rank 0."""


@dataclass(frozen=True)
class UpdateFilters:
    """The filters of a run, one after the other.

    Attributes:
        filters: the filters, in the order in which a report passes them.
    """

    filters: Sequence[UpdateFilter] = ()

    @property
    def at_clients(self) -> bool:
        """Whether any filter changes what clients receive or send."""
        return any(f.at_clients for f in self.filters)

    @property
    def at_server(self) -> bool:
        """Whether any filter needs whole tables on rank 0."""
        return any(f.at_server for f in self.filters)

    @property
    def in_main_memory(self) -> bool:
        """Whether any filter takes uploads in main memory."""
        return any(f.in_main_memory for f in self.filters)

    @property
    def hides_uploads(self) -> bool:
        """Whether no upload is sent as it is."""
        return any(f.hides_uploads for f in self.filters)

    @property
    def moves_rows(self) -> bool:
        """Whether a step changes rows even without any upload."""
        return any(f.moves_rows for f in self.filters)

    @property
    def narrows(self) -> bool:
        """Whether clients have only some of the numbers of a vector."""
        return any(f.narrows for f in self.filters)

    @property
    def remembered(self) -> list[str]:
        """The kinds of state in the clients' store that filters keep between visits."""
        return [f.remembers for f in self.filters if f.remembers]

    def told(self) -> dict[str, float]:
        """Return what the server tells the filters at clients with their tasks; on rank 0."""
        return {name: value for f in self.filters for name, value in f.told().items()}

    def download(self, message: Message, client: int) -> Message:
        """Return a message as it arrives at a client."""
        for f in reversed(self.filters):
            message = f.download(message, client)
        return message

    def width(self, name: str, width: int, client: int) -> int:
        """Return how many numbers of a vector [width] a client has."""
        for f in self.filters:
            width = f.width(name, width, client)
        return width

    def widths(self, widths: Mapping[str, int], client: int) -> Mapping[str, int]:
        """Return how many numbers of a row of each table a client has, of table -> width."""
        if not self.narrows:
            return widths
        return {name: self.width(name, width, client) for name, width in widths.items()}

    def kind(self, client: int) -> tuple[tuple[str, int], ...]:
        """Return what decides the widths of a client's vectors: names and numbers."""
        return tuple(pair for f in self.filters for pair in f.kind(client))

    def statistics(self, report: Report) -> Report:
        """Return a report of one-shot statistics as it arrives at the server."""
        for f in self.filters:
            report = f.statistics(report)
        return report

    def sizes(self, sizes: Mapping[str, int], report: Report, message: Message) -> Mapping[str, int]:
        """Return the bytes of the vectors that a client sends after training; without filters, `sizes`."""
        for f in self.filters:
            sizes = f.sizes(sizes, report, message)
        return sizes

    def traffic(
        self, sizes: Mapping[str, int], report: Report, clients: int, header_bytes: int
    ) -> tuple[int, Mapping[str, int]]:
        """Return what a client moves in a round besides the rows that it downloads; see `UpdateFilter`."""
        down = 0
        for f in self.filters:
            more, sizes = f.traffic(sizes, report, clients, header_bytes)
            down += more
        return down, sizes

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return the report as it arrives at the server."""
        for f in self.filters:
            report = f.client(report, visit)
        return report

    def lost(self, step: int, clients: np.ndarray) -> np.ndarray:
        """Return those of the clients [m] whose uploads in a step do not arrive; on rank 0."""
        return np.concatenate([clients[:0], *(f.lost(step, clients) for f in self.filters)])

    def plan(self, plan: Plan | None, step: PlannedStep) -> Plan | None:
        """Return the plan that is carried out; on rank 0."""
        for f in self.filters:
            plan = f.plan(plan, step)
        return plan

    def server(self, server: Server) -> Server:
        """Return the server after the mixings of a step and all filters; on rank 0."""
        for f in reversed(self.filters):
            server = f.server(server)
        return server

    def mixer(self, mixer: Mixer) -> RowMixer | None:
        """Return what carries out the mixings of steps instead of a mixer; None if no filter does."""
        found = (f.mixer(mixer) for f in self.filters)
        return next((other for other in found if other is not None), None)

    def commit(self) -> None:
        """Start the next step, after a step was taken; on rank 0."""
        for f in self.filters:
            f.commit()

    def figures(self) -> dict[str, float]:
        """Return columns of `metrics.csv`; on rank 0."""
        return {name: value for f in self.filters for name, value in f.figures().items()}

    def state_dict(self) -> dict[str, Mapping[str, float | None]]:
        """Return the state of each filter that has one, by its name; on rank 0."""
        return {f.state: f.state_dict() for f in self.filters if f.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; on rank 0."""
        for f in self.filters:
            if f.state:
                f.load_state_dict(state[f.state])
