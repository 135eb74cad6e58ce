"""The words of a method: everything its hooks take and return, from one place."""

from .algorithm import Algorithm, Look, Needs, PlannedRun
from .client import Client, Peer, Trained
from .rng import Key
from .types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

__all__ = [
    "Algorithm",
    "Client",
    "Key",
    "Look",
    "Message",
    "Needs",
    "Notes",
    "Peer",
    "PlannedRun",
    "ProblemInfo",
    "Reads",
    "Report",
    "Server",
    "State",
    "Trained",
    "Vector",
]
