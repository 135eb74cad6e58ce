"""What happens on a device: the one training loop, losses, embeddings, evaluation."""

from mpifl.core.devices import settle

from .batched import LockstepRunner, pick_stack, stackable, train_all
from .client import LocalClient, public_clients
from .config import LocalConfig
from .learner import Learner

__all__ = [
    "Learner",
    "LocalClient",
    "LocalConfig",
    "LockstepRunner",
    "pick_stack",
    "public_clients",
    "settle",
    "stackable",
    "train_all",
]
