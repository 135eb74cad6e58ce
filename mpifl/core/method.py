"""Arguments and results of the hooks of a method, and the capabilities. Builders of mixings: `mixing.py`."""

from .algorithm import Algorithm, Downloads, Needs, chosen_rows
from .capabilities import (
    Capability,
    ComparedUploads,
    LookSizes,
    NewClients,
    OneShotStatistics,
    PlainVisit,
    PlainVisits,
    PlannedLook,
    PlannedRun,
    Question,
    RememberedUploads,
    RowUpdates,
    SecondLook,
    ServerEvaluation,
    declared,
)
from .client import Client, Direction, Loss, Trained
from .plan import Plan
from .rng import Key
from .types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

__all__ = [
    "Algorithm",
    "Capability",
    "Client",
    "ComparedUploads",
    "Direction",
    "Downloads",
    "Key",
    "LookSizes",
    "Loss",
    "Message",
    "Needs",
    "NewClients",
    "Notes",
    "OneShotStatistics",
    "PlainVisit",
    "PlainVisits",
    "Plan",
    "PlannedLook",
    "PlannedRun",
    "ProblemInfo",
    "Question",
    "Reads",
    "RememberedUploads",
    "Report",
    "RowUpdates",
    "SecondLook",
    "Server",
    "ServerEvaluation",
    "State",
    "Trained",
    "Vector",
    "chosen_rows",
    "declared",
]
