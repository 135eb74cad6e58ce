"""Computations on a device: local training, losses, embeddings, evaluation."""
