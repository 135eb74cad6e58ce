"""The last upload of each client, on rank 0, for methods in whose later steps it counts too.

In rounds these uploads stay with the workers that made them; under asynchronous policies, where uploads reach
rank 0 one by one, they stay there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mpifl.simulation.visits import Visit

from .protocol import ReportHeader
from .run_state import Saved

Row = dict[str, Any]  # of events.csv
KEPT = ("client", "num_samples", "max_abs", "sizes", "widths", "shapes")  # of a header


@dataclass(frozen=True)
class Arrival:
    """An upload that has reached the server.

    Attributes:
        visit: the visit that made it.
        header: report of the visit, without vectors.
        vectors: upload -> components [C, d].
        row: its row of `events.csv`; `weight` and `accepted` are filled in when the server steps.
    """

    visit: Visit
    header: ReportHeader
    vectors: Mapping[str, torch.Tensor]
    row: Row

    @property
    def place(self) -> tuple[int, int]:
        """What orders the reports of a step: client and visit."""
        return self.visit.client, self.visit.visit

    def age(self, version: int) -> int:
        """Return the server steps from the rows that it was trained on to a version."""
        return version - self.visit.version


class KeptUploads:
    """The last upload of each client, on rank 0.

    Args:
        max_age: server steps after which an upload no longer counts; None: it always does.
    """

    def __init__(self, max_age: int | None) -> None:
        self.max_age = max_age
        self._last: dict[int, Arrival] = {}

    def keep(self, arrivals: Sequence[Arrival]) -> None:
        """Keep uploads, in the order of their visits, as those of their clients."""
        for arrival in arrivals:
            header = _remembered({name: getattr(arrival.header, name) for name in KEPT})
            self._last[header.client] = replace(arrival, header=header)

    def counting(self, version: int, without: Collection[int] = ()) -> list[Arrival]:
        """Return the uploads that count in the step of a version, in the order of clients.

        Args:
            version: the server's, before the step.
            without: clients that have a new upload in the step.
        """
        kept = (self._last[k] for k in sorted(self._last) if k not in without)
        return [a for a in kept if self._counts(a, version)]

    def of(self, client: int, version: int) -> Arrival | None:
        """Return the last upload of a client; None if there is none that counts in the step of a version."""
        kept = self._last.get(client)
        return kept if kept is not None and self._counts(kept, version) else None

    def _counts(self, kept: Arrival, version: int) -> bool:
        return self.max_age is None or kept.age(version) <= self.max_age

    def put(self, saved: Saved) -> None:
        """Add the uploads to a checkpoint."""
        about = []
        for k, arrival in sorted(self._last.items()):
            header = {name: getattr(arrival.header, name) for name in KEPT}
            about.append({"visit": asdict(arrival.visit), "header": header, "names": [*arrival.vectors]})
            saved.tensors |= {f"kept/{k}/{name}": rows for name, rows in arrival.vectors.items()}
        saved.values["kept"] = about

    def load(self, saved: Saved) -> None:
        """Restore the uploads from a checkpoint."""
        for about in saved.values["kept"]:
            head, visit = about["header"], Visit(**about["visit"])
            head |= {"shapes": {name: tuple(shape) for name, shape in head["shapes"].items()}}
            vectors = {name: saved.tensors[f"kept/{visit.client}/{name}"] for name in about["names"]}
            self._last[visit.client] = Arrival(visit, _remembered(head), vectors, {})


def _remembered(kept: Mapping[str, Any]) -> ReportHeader:
    """Return the header of an upload that counts in later steps, from the entries that are `KEPT`."""
    return ReportHeader(number=0, fresh=False, notes={}, findings={}, metrics={}, **kept)
