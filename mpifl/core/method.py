"""Everything a method's file imports: what its hooks take and return."""

from .algorithm import Algorithm, Needs, PlannedRun
from .capabilities import (
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
)
from .client import Client, Peer, Trained
from .rng import Key
from .types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

__all__ = [
    "Algorithm",
    "Client",
    "ComparedUploads",
    "Key",
    "Look",
    "Message",
    "Needs",
    "NewClients",
    "Notes",
    "OneShotStatistics",
    "Peer",
    "PlainVisit",
    "PlainVisits",
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
]
