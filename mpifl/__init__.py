"""mpifl: a message-passing simulator for clustered and personalised federated learning."""

__version__ = "0.1.0"
