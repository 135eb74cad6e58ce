"""What happens on a device: the one training loop, losses, embeddings, evaluation."""

from mpifl.core.devices import settle

from .client import LocalClient, public_clients
from .pick import pick_stack
from .sgd import Learner, LocalConfig
from .stacked import stackable, train_all
from .together import Together

__all__ = [
    "Learner",
    "LocalClient",
    "LocalConfig",
    "Together",
    "pick_stack",
    "public_clients",
    "settle",
    "stackable",
    "train_all",
]
