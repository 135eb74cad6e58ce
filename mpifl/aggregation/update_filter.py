"""What happens to updates between a client's training and the server's rows: a chain of filters.

Attacks, clipping, noise, masks, compression and robust rules are filters. At a client, the chain changes the
report, first filter first. Without a filter that does so, visits that only train are trained in one call.

Which numbers of a vector are weights, statistics or no part of a model, `VectorParts` says; a filter that
treats them differently takes it as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        store: keeps what filters remember of a client; None for a trial, of which nothing is kept.
    """

    message: Message
    visit: int
    key: Key
    store: ClientStore | None = None


class UpdateFilter:
    """Changes updates on their way from training into the rows; by default, a method changes nothing.

    Attributes:
        at_clients: whether reports are changed, so that no visit only trains.
    """

    at_clients: ClassVar[bool] = False

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
        """Whether any filter changes reports, so that no visit only trains."""
        return any(f.at_clients for f in self.filters)

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return the report as it arrives at the server."""
        for f in self.filters:
            report = f.client(report, visit)
        return report
