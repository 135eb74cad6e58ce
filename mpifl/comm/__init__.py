"""Everything that moves between ranks. The only package that imports mpi4py."""

from .mix import Mixer
from .pool import Pool, Task, open_pool, serve
from .store import ClientStore
from .transport import Single, Transport, connect
from .wire import Wire

__all__ = [
    "ClientStore",
    "Mixer",
    "Pool",
    "Single",
    "Task",
    "Transport",
    "Wire",
    "connect",
    "open_pool",
    "serve",
]
