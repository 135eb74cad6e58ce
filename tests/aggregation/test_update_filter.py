"""The order in which filters act, and what a chain without filters does: nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.testing import assert_array_equal

from mpifl.aggregation.update_filter import FilteredVisit, PlannedStep, UpdateFilter, UpdateFilters
from mpifl.core.parameters import Layout, VectorParts
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, Report, Server

REPORT = Report(3, 10, {"model": torch.tensor([1.0])})
MESSAGE = Message({"model": torch.tensor([[1.0]])}, {"model": (0,)})
SERVER = Server({"model": torch.tensor([[1.0]])}, np.zeros(4, np.int64))
VISIT = FilteredVisit(MESSAGE, 0, key(0))
STEP = PlannedStep(
    server=SERVER,
    notes=Notes.of_nobody(),
    widths={},
    lost=np.zeros(0, np.int64),
    reads=lambda clients: {},
    book=lambda *message: None,
    parts=VectorParts(Layout.of(torch.nn.Linear(1, 1))),
    hook="Test.aggregate",
)


class Digit(UpdateFilter):
    """Appends a digit to each number that passes: x becomes 10 x + digit; a plan's rows are weighted so."""

    def __init__(self, digit: int) -> None:
        self.digit, self.remembers, self.taken = digit, f"kept{digit}", 0
        self.state = f"digit{digit}"  # type: ignore[misc]

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Append the digit to the model."""
        return replace(report, vectors={"model": 10 * report.vectors["model"] + self.digit})

    def download(self, message: Message, client: int) -> Message:
        """Append the digit to what is downloaded."""
        return replace(message, vectors={"model": 10 * message.vectors["model"] + self.digit})

    def sizes(self, sizes, report, message):
        """Append the digit to the bytes."""
        return {name: 10 * size + self.digit for name, size in sizes.items()}

    def traffic(self, sizes, report, clients, header_bytes):
        """Append the digit to the bytes, and download as many as it says."""
        return self.digit, self.sizes(sizes, report, MESSAGE)

    def lost(self, step: int, clients: np.ndarray) -> np.ndarray:
        """Lose the client of the digit."""
        return clients[clients == self.digit]

    def plan(self, plan: Plan | None, step: PlannedStep) -> Plan | None:
        """Append the digit to the weights."""
        assert plan is not None
        return replace(plan, mixings=[replace(m, weights=10 * m.weights + self.digit) for m in plan.mixings])

    def server(self, server: Server) -> Server:
        """Append the digit to the rows."""
        return replace(server, tables={"model": 10 * server.tables["model"] + self.digit})

    def commit(self) -> None:
        """Count steps."""
        self.taken += 1

    def told(self):
        """Tell clients the digit."""
        return {self.state: float(self.digit)}

    def figures(self):
        """Report the steps."""
        return {f"taken{self.digit}": float(self.taken)}

    def state_dict(self):
        """Return the steps."""
        return {"taken": float(self.taken)}

    def load_state_dict(self, state) -> None:
        """Restore the steps."""
        self.taken = int(state["taken"])


def test_reports_and_plans_pass_forwards_and_rows_and_downloads_backwards():
    """1 becomes 123 on its way to the server, and 132 on its way back."""
    chain = UpdateFilters([Digit(2), Digit(3)])
    assert chain.client(REPORT, VISIT).vectors["model"].item() == 123
    plan = chain.plan(Plan([Mixing(np.ones((1, 1)), None, "model", "model")]), STEP)
    assert plan is not None
    assert plan.mixings[0].weights.item() == 123
    assert chain.server(SERVER).tables["model"].item() == 132
    assert chain.download(MESSAGE, 0).vectors["model"].item() == 132
    assert chain.sizes({"model": 1}, REPORT, MESSAGE) == {"model": 123}
    assert chain.traffic({"model": 1}, REPORT, 4, 0) == (5, {"model": 123})
    assert_array_equal(chain.lost(1, np.arange(5)), [2, 3])


def test_each_filter_has_its_own_state_figures_and_orders():
    chain, other = UpdateFilters([Digit(2), Digit(3)]), UpdateFilters([Digit(3)])
    chain.commit()
    assert chain.figures() == {"taken2": 1, "taken3": 1}
    assert chain.told() == {"digit2": 2, "digit3": 3}
    assert chain.remembered == ["kept2", "kept3"]
    assert chain.state_dict() == {"digit2": {"taken": 1}, "digit3": {"taken": 1}}
    other.load_state_dict(chain.state_dict())
    assert other.figures() == {"taken3": 1}


def test_without_filters_nothing_changes():
    """Neither does a filter that says nothing."""
    for chain in (UpdateFilters(), UpdateFilters([UpdateFilter()])):
        assert chain.client(REPORT, VISIT) is REPORT
        assert chain.statistics(REPORT) is REPORT
        assert chain.download(MESSAGE, 0) is MESSAGE
        assert (chain.width("model", 7, 0), chain.kind(0)) == (7, ())
        assert chain.plan(None, STEP) is None
        assert chain.server(SERVER) is SERVER
        assert chain.traffic({"model": 4}, REPORT, 4, 7) == (0, {"model": 4})
        assert not len(chain.lost(1, np.arange(5)))
        assert not any((chain.at_clients, chain.at_server, chain.hides_uploads, chain.moves_rows))
        assert chain.figures() == chain.told() == chain.state_dict() == {}
        assert chain.remembered == []
