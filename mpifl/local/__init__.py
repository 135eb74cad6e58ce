"""What happens on a device: the one training loop, losses, embeddings, evaluation."""

from .client import LocalClient, public_clients
from .sgd import Learner, LocalConfig

__all__ = ["Learner", "LocalClient", "LocalConfig", "public_clients"]
