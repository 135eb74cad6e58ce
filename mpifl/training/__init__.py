"""Local training and evaluation: learner, backends, clients."""

from mpifl.core.devices import settle

from .backend import Request
from .batched import LockstepRunner, stackable, train_all
from .client import LocalClient, public_clients
from .config import LocalConfig
from .learner import Learner, pick_stack

__all__ = [
    "Learner",
    "LocalClient",
    "LocalConfig",
    "LockstepRunner",
    "Request",
    "pick_stack",
    "public_clients",
    "settle",
    "stackable",
    "train_all",
]
