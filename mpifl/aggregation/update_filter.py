"""What happens to updates between a client's training and the server's rows: a chain of filters.

Attacks, clipping, noise, masks, compression and robust rules are filters. At a client, the chain changes the
report, first filter first. Without a filter that does so, visits that only train are trained in one call.

Which numbers of a vector are weights, statistics or no part of a model, `VectorParts` says; a filter that
treats them differently takes it as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mpifl.core.rng import Key
from mpifl.core.types import Message, Report

from .client_store import ClientStore


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
    store: ClientStore | None = None


class UpdateFilter:
    """Changes updates on their way from training into the rows; by default, a method changes nothing.

    Attributes:
        at_clients: whether it changes what clients receive or send, so that no visit only trains.
        remembers: kind of state in the clients' store that it keeps between visits; empty for none.
    """

    at_clients: ClassVar[bool] = False
    remembers: str = ""

    def told(self) -> Mapping[str, float]:
        """Return the numbers that the server tells the filter at clients with their tasks; on rank 0."""
        return {}

    def download(self, message: Message) -> Message:
        """Return a message as it arrives at a client."""
        return message

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

    def figures(self) -> Mapping[str, float]:
        """Return columns of `metrics.csv`; on rank 0."""
        return {}

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return the report of a client after training, as it goes on to the server.

        Args:
            report: the report, after the filters before this one.
            visit: the visit that made it.
        """
        return report


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
    def remembered(self) -> list[str]:
        """The kinds of state in the clients' store that filters keep between visits."""
        return [f.remembers for f in self.filters if f.remembers]

    def told(self) -> dict[str, float]:
        """Return what the server tells the filters at clients with their tasks; on rank 0."""
        return {name: value for f in self.filters for name, value in f.told().items()}

    def download(self, message: Message) -> Message:
        """Return a message as it arrives at a client."""
        for f in reversed(self.filters):
            message = f.download(message)
        return message

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

    def figures(self) -> dict[str, float]:
        """Return columns of `metrics.csv`; on rank 0."""
        return {name: value for f in self.filters for name, value in f.figures().items()}

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return the report as it arrives at the server."""
        for f in self.filters:
            report = f.client(report, visit)
        return report
