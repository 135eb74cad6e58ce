"""Everything that moves between ranks. The only package that imports mpi4py."""

from .failures import CannotGoOn, RankLost
from .mix import Mixer
from .pool import Lasting, Pool, Task, open_pool, serve
from .starting import asked_of
from .store import ClientStore
from .transport import Single, Transport, connect
from .wire import Wire

__all__ = [
    "CannotGoOn",
    "ClientStore",
    "Lasting",
    "Mixer",
    "Pool",
    "RankLost",
    "Single",
    "Task",
    "Transport",
    "Wire",
    "asked_of",
    "connect",
    "open_pool",
    "serve",
]
