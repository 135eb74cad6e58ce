"""Arguments and results of the hooks of a method, and the capabilities. Builders of mixings: `mixing.py`."""

from .algorithm import Algorithm, Downloads, Needs, PlannedRun, chosen_rows
from .capabilities import (
    Capability,
    ComparedUploads,
    Look,
    NewClients,
    OneShotStatistics,
    PlainVisit,
    PlainVisits,
    RememberedUploads,
    RowUpdates,
    SecondLook,
    ServerEvaluation,
    declared,
)
from .client import Client, Direction, Loss, Peer, Trained
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
    "Look",
    "Loss",
    "Message",
    "Needs",
    "NewClients",
    "Notes",
    "OneShotStatistics",
    "Peer",
    "PlainVisit",
    "PlainVisits",
    "Plan",
    "PlannedRun",
    "ProblemInfo",
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
