"""Everything that moves between ranks. The only package that imports mpi4py."""

from .connect import connect
from .liveness import CannotGoOn, RankLost
from .mpi_startup import asked_of
from .task_pool import Lasting, Pool, Task, open_pool, serve
from .transport import MpiTraffic, Single, Transport, on_server

__all__ = [
    "CannotGoOn",
    "Lasting",
    "MpiTraffic",
    "Pool",
    "RankLost",
    "Single",
    "Task",
    "Transport",
    "asked_of",
    "connect",
    "on_server",
    "open_pool",
    "serve",
]
